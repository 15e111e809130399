"""The flags of a kubelet, also of one inside another program, as that program gives them to it.

Each reader gives what `reconciler.sources.kubelet_config` reads then as it reads every kubelet's flags: a list of
arguments, of which the last of a name counts, and for KubeEdge the section of a file that has a KubeletConfiguration.
What cannot be read is a problem, never a guess: a variable in a unit, a URL as configuration.

Source: see `reconciler.runtime.kubelet_programs`; systemd.service(5), systemd.unit(5), "COMMAND LINES".
"""

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from msgspec import Struct

from cgroupfs.errors import InputError
from reconciler.runtime.kubelet_programs import ArgumentSource, KubeletProgram
from reconciler.runtime.safe_files import FileRule, list_directory, read_file
from reconciler.settings.yaml import YamlDocument, read_yaml

_LARGEST: Final = 64 * 1024
"""Bytes of a unit, a file of arguments or a program's configuration."""
_MOST_FILES: Final = 16
"""Drop-ins in one directory."""
_MOST_ARGUMENTS: Final = 1000
_SHOWN: Final = 80
_FIX: Final = "set kubelet.config_file to a KubeletConfiguration that has its settings, such as reservedSystemCPUs"


class KubeletArguments(Struct, frozen=True, kw_only=True):
    """``arguments``: the kubelet's flags. ``config``, ``section``: a file with a KubeletConfiguration in a section.

    ``problems``: what is missing here. ``unread``: a file could not be read now, which may be different later.
    """

    arguments: tuple[str, ...]
    config: str | None = None
    section: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    unread: bool = False


def kubelet_arguments(
    program: KubeletProgram, pid: int, words: tuple[str, ...], unit: str, root: str = "/"
) -> KubeletArguments:
    """Of a program with a kubelet inside; a kubelet's own arguments are its flags. Errors: none.

    ``words``: the arguments of its process; ``unit``: its service where these show nothing.
    """
    reading = _ProgramFiles(f"{program.name} (process {pid}) runs this node's kubelet inside", root)
    return _READERS[program.source](program, words, unit, reading)


class _ProgramFiles:
    """The files that one reading has used, and what it could not read."""

    def __init__(self, who: str, root: str) -> None:
        self.who = who
        self.root = root
        self.problems: list[str] = []
        self.unread = False

    def unreadable(self, what: str) -> None:
        """A file that cannot be used now: torn, being replaced, damaged."""
        self.unread = True
        self.miss(what)

    def miss(self, what: str) -> None:
        """A problem, for which settings of the kubelet are missing."""
        self.problems.append(f"{self.who}, and its settings are not complete: {what}; {_FIX}")

    def text(self, path: str) -> str | None:
        """A file of root's; None without one, or where it cannot be used (a problem)."""
        try:
            return read_file(path, FileRule.ROOT, root=self.root, largest=_LARGEST).decode()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as exc:
            self.unreadable(f"{path[:_SHOWN]}: {getattr(exc, 'strerror', None) or exc}")
            return None

    def names(self, directory: str, *endings: str) -> list[str]:
        """The names in a directory with one of these endings, sorted; none without one."""
        try:
            names = list_directory(directory, FileRule.ROOT, root=self.root)
        except FileNotFoundError:
            return []
        except OSError as exc:
            self.unreadable(f"{directory[:_SHOWN]}: {exc.strerror or exc}")
            return []
        used = [name for name in names if name.lower().endswith(endings)]
        if len(used) > _MOST_FILES:
            self.miss(f"{directory[:_SHOWN]} has more than {_MOST_FILES} files")
        return used[:_MOST_FILES]

    def yaml(self, path: str) -> YamlDocument | None:
        """A file's mapping; None without the file, without content, or where it is none (a problem)."""
        text = self.text(path)
        if text is None:
            return None
        try:
            document = read_yaml(text, path)
        except InputError as exc:
            self.unreadable(str(exc))
            return None
        if document.data is None:
            return None
        if not isinstance(document.data, dict):
            self.unreadable(str(document.refusal((), "a mapping")))
            return None
        return document

    def is_directory(self, path: str) -> bool:
        return os.path.isdir(os.path.join(self.root, path.lstrip("/")))

    def result(self, arguments: tuple[str, ...], config: str | None = None, *section: str) -> KubeletArguments:
        return KubeletArguments(
            arguments=arguments,
            config=config,
            section=section,
            problems=tuple(self.problems),
            unread=self.unread,
        )


# k3s


_UNITS: Final = (
    "/run/systemd/transient",
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
"""systemd's directories of units; the first that has a name counts."""
_K3S_DATA: Final = "/var/lib/rancher/k3s"
_K3S_STATE: Final = "/run/k3s"
_SHORT: Final = {"c": "config", "d": "data-dir"}
"""Short names of k3s' flags."""
_ENVIRONMENT: Final = {"K3S_CONFIG_FILE": "config", "K3S_DATA_DIR": "data-dir", "K3S_NODE_NAME": "node-name"}
"""Variables that stand for flags; no other one is kept, for an environment file has the cluster's token."""
_SWITCHES: Final = frozenset({"docker", "with-node-id"})
"""Flags without a value of their own: the next word is not theirs."""
_READ: Final = frozenset({"kubelet-arg", "config", "data-dir", "container-runtime-endpoint", "node-name"})
"""Flags with a value. All others have no part here, and may have secrets."""
_UNIT_VARIABLE: Final = re.compile(r"\$(?:\{(\w+)\}|(\w+))", re.ASCII)


def _k3s(program: KubeletProgram, words: tuple[str, ...], unit: str, reading: _ProgramFiles) -> KubeletArguments:
    """Its configuration, then its arguments, as k3s merges them."""
    arguments = words[1:]
    texts = _unit_texts(unit, reading) if unit else []
    if not arguments and unit:
        # k3s overwrites its command line (``/usr/local/bin/k3s agent``), since arguments may have secrets: they are
        # read where they come from.
        arguments = _unit_arguments(program, words[:1], unit, texts, reading)
    elif not arguments:
        reading.miss("its command line shows no arguments, and its cgroup no service unit that has them")
    flags = _flags(arguments)
    environment = _environment(unit, texts, reading)
    # The variable precedes the flag, of which the first counts.
    path = environment.get("config") or next(iter(flags.get("config", ())), "") or program.config or ""
    if "://" in path:
        reading.miss(f"{path[:_SHOWN]} is not a file")
        configured: dict[str, list[str]] = {}
    else:
        configured = _k3s_config(path, reading)
    return reading.result(_k3s_arguments(environment, configured, flags, reading))


def _k3s_arguments(
    environment: Mapping[str, str],
    configured: Mapping[str, list[str]],
    flags: Mapping[str, list[str]],
    reading: _ProgramFiles,
) -> tuple[str, ...]:
    """What k3s gives to its kubelet: its own flags, each replaced by a ``kubelet-arg`` of the same name."""

    def last(name: str, default: str) -> str:
        values = [*configured.get(name, ()), *flags.get(name, ())]
        return values[-1] if values else environment.get(name, default)

    data = last("data-dir", _K3S_DATA).rstrip("/") or _K3S_DATA
    socket = last("container-runtime-endpoint", "")
    if last("docker", "false").lower() == "true":
        socket = f"{_K3S_STATE}/cri-dockerd/cri-dockerd.sock"
    own = {
        "kubeconfig": f"{data}/agent/kubelet.kubeconfig",
        "tls-cert-file": f"{data}/agent/serving-kubelet.crt",
        "pod-manifest-path": f"{data}/agent/pod-manifests",
        "read-only-port": "0",
        "container-runtime-endpoint": "unix://"
        + (socket or f"{_K3S_STATE}/containerd/containerd.sock").removeprefix("unix://"),
    }
    drop_ins = f"{data}/agent/etc/kubelet.conf.d"
    if reading.is_directory(drop_ins):
        own["config-dir"] = drop_ins
        # Since 1.32: its drop-ins have these, and a copy of the file that ``kubelet-arg: config=`` names, which may
        # have others.
        for name in ("tls-cert-file", "pod-manifest-path", "container-runtime-endpoint"):
            del own[name]
    if (name := last("node-name", "")) and last("with-node-id", "false").lower() != "true":
        own["hostname-override"] = name.lower()
    # A list: those of the configuration and of the command line all count.
    extra = [*configured.get("kubelet-arg", ()), *flags.get("kubelet-arg", ())][:_MOST_ARGUMENTS]
    return _merged(own, extra)


def _merged(own: Mapping[str, str], extra: list[str]) -> tuple[str, ...]:
    """``name=value`` replaces a flag of the program's own, ``name+=value`` follows it, ``name-=value`` precedes it."""
    left = dict(own)
    values: dict[str, list[str]] = {}
    for argument in extra:
        name, equals, value = argument.removeprefix("--").partition("=")
        flag = name.rstrip("+-")
        before = values.get(flag, [])
        value = value if equals else "true"
        own_value = [left[flag]] if flag in left and name != flag else []
        values[flag] = [value, *own_value, *before] if name.endswith("-") else [*own_value, *before, value]
        left.pop(flag, None)
    values |= {name: [value] for name, value in left.items()}
    return tuple(f"--{name}={value}" for name, items in values.items() for value in items)


def _flags(arguments: tuple[str, ...]) -> dict[str, list[str]]:
    """Values by name, in their order: ``--name=value``, ``--name value``, or with one ``-``."""
    flags: dict[str, list[str]] = {}
    words = iter(arguments)
    for word in words:
        if not word.startswith("-") or word.strip("-") == "":
            continue
        name, (_, equals, value) = _flag_name(word), word.partition("=")
        if name in _SWITCHES:
            value = value if equals else "true"
        elif not equals:
            value = next(words, "") if name in _READ else ""
        flags.setdefault(name, []).append(value)
    return flags


def _k3s_config(path: str, reading: _ProgramFiles) -> dict[str, list[str]]:
    """The configuration and its drop-ins: of each key the values of the last file that has it; ``key+`` adds."""
    names = reading.names(f"{path}.d", ".yaml", ".yml")
    values: dict[str, list[str]] = {}
    for file in (path, *(f"{path}.d/{name}" for name in names)):
        document = reading.yaml(file)
        if document is None or not isinstance(document.data, dict):
            continue
        for key, value in document.data.items():
            name = key.removesuffix("+")
            items = [_plain(item) for item in (value if isinstance(value, list) else [value])]
            values[name] = [*(values.get(name, []) if key != name else []), *items]
    return {_SHORT.get(name, name): items for name, items in values.items()}


def _plain(value: object) -> str:
    if value is None or isinstance(value, list | dict):
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _unit_arguments(
    program: KubeletProgram, command: tuple[str, ...], unit: str, texts: list[str], reading: _ProgramFiles
) -> tuple[str, ...]:
    """The arguments after the command in the unit's ``ExecStart``; none (a problem) where no such line is found."""
    for line in reversed(_exec_starts(texts)):
        try:
            words = shlex.split(line.lstrip("@-:+!"))
        except ValueError as exc:
            reading.unreadable(f"{unit}: ExecStart: {exc}")
            return ()
        names = [os.path.basename(word) for word in words]
        start = next((index for index, name in enumerate(names) if name in program.programs), None)
        # The command (server, agent) is that of the process, or the line starts something else.
        if start is None or tuple(words[start + 1 : start + 2]) != command:
            continue
        return tuple(_without_variables(words[start + 2 :], unit, reading))
    reading.miss(f"{unit}: no ExecStart with {program.name} {' '.join(command)} was found")
    return ()


def _without_variables(words: list[str], unit: str, reading: _ProgramFiles) -> list[str]:
    """The words without those that have a variable, each with its flag; ``$$`` means ``$``.

    A value may be a secret: a problem names only the variable. A flag that is not read makes none.
    """
    kept: list[str] = []
    for word in words:
        variable = _UNIT_VARIABLE.search(word.replace("$$", ""))
        if variable is None:
            kept.append(word.replace("$$", "$").replace("%%", "%"))
            continue
        flag, equals, _ = word.partition("=")
        if not equals or not flag.startswith("-"):
            flag = kept.pop() if kept and _awaits_value(kept[-1]) else ""
        # Where it is all of a word, systemd makes any number of words of it, unless it has braces.
        several = variable[0] == word and variable[2] is not None
        if several or not flag or "$" in flag or _flag_name(flag) in _READ | _SWITCHES:
            reading.miss(f"{unit}: ExecStart has the variable {(variable[1] or variable[2])[:_SHOWN]}")
    return kept


def _awaits_value(word: str) -> bool:
    return word.startswith("-") and "=" not in word and _flag_name(word) not in _SWITCHES


def _flag_name(word: str) -> str:
    name = word.lstrip("-").partition("=")[0]
    return _SHORT.get(name, name)


def _exec_starts(texts: list[str]) -> list[str]:
    """The ``ExecStart`` lines in force; an empty one drops those before it."""
    lines: list[str] = []
    for text in texts:
        for value in _assignments(text, "Service", "ExecStart"):
            if value:
                lines.append(value)
            else:
                lines.clear()
    return lines


def _environment(unit: str, texts: list[str], reading: _ProgramFiles) -> dict[str, str]:
    """The variables of the unit that replace flags, by the flag: of ``Environment``, then of its files."""
    found: dict[str, str] = {}
    words = [value for text in texts for value in _assignments(text, "Service", "Environment")]
    for text in texts:
        for value in _assignments(text, "Service", "EnvironmentFile"):
            # A ``-``: the file need not exist. ``%N``: the unit's name without its type.
            path = value.removeprefix("-").replace("%N", unit.rpartition(".")[0])
            words += (reading.text(path) or "").splitlines() if path.startswith("/") else []
    for word in words:
        try:
            pairs = [pair.partition("=") for pair in shlex.split(word, comments=True)]
        except ValueError:
            continue  # systemd drops such a line too
        found |= {_ENVIRONMENT[name]: value for name, equals, value in pairs if equals and name in _ENVIRONMENT}
    return found


def _unit_texts(unit: str, reading: _ProgramFiles) -> list[str]:
    """The unit, then its drop-ins by name. A name in several directories counts in the first of them."""
    main = next((text for directory in _UNITS if (text := reading.text(f"{directory}/{unit}")) is not None), None)
    drop_ins: dict[str, str] = {}
    for directory in reversed(_UNITS):
        for name in reading.names(f"{directory}/{unit}.d", ".conf"):
            drop_ins[name] = f"{directory}/{unit}.d/{name}"
    texts = [main, *(reading.text(drop_ins[name]) for name in sorted(drop_ins))]
    return [text for text in texts if text is not None]


def _assignments(text: str, section: str, key: str) -> Iterator[str]:
    """The values of a key in a section of a unit, in their order; lines that end in a backslash continue."""
    inside, pending = False, ""
    # An empty line at the end, for a last one that ends in a backslash.
    for raw in (*text.splitlines(), ""):
        line = raw.strip()
        if line.startswith(("#", ";")):
            continue
        if line.endswith("\\"):
            pending += line[:-1] + " "
            continue
        line, pending = pending + line, ""
        if line.startswith("["):
            inside = line == f"[{section}]"
            continue
        name, equals, value = line.partition("=")
        if inside and equals and name.strip() == key:
            yield value.strip()


# MicroK8s


_VARIABLE: Final = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")


def _args_file(program: KubeletProgram, words: tuple[str, ...], _unit: str, reading: _ProgramFiles) -> KubeletArguments:
    """The file of arguments, split at spaces, without quotes, with the snap's variables."""
    path = _value(words, "kubelet-args-file") or program.config or ""
    text = reading.text(path)
    if text is None:
        if not reading.unread:
            reading.unreadable(f"{path[:_SHOWN]} does not exist")
        return reading.result(())
    # The file is ``$SNAP_DATA/args/kubelet``.
    data = os.path.dirname(os.path.dirname(path))
    variables = {"SNAP_DATA": data, "SNAP_COMMON": f"{os.path.dirname(data)}/common"}
    arguments: list[str] = []
    for raw in text.splitlines():
        if raw.lstrip().startswith("#"):
            continue
        for word in raw.replace('"', "").replace("'", "").split():
            unknown = [name for name in (a or b for a, b in _VARIABLE.findall(word)) if name not in variables]
            if unknown:
                if not word.startswith("-") and arguments and _awaits_value(arguments[-1]):
                    arguments.pop()
                reading.miss(f"{path[:_SHOWN]} has the variable {unknown[0][:_SHOWN]}")
                continue
            arguments.append(_VARIABLE.sub(lambda match: variables[match[1] or match[2]], word))
    return reading.result(tuple(arguments[:_MOST_ARGUMENTS]))


def _value(words: tuple[str, ...], flag: str) -> str | None:
    """The last value of a flag of the program; None without it."""
    value = None
    for index, word in enumerate(words):
        name, equals, text = word.removeprefix("--").partition("=")
        if word.startswith("--") and name.replace("_", "-") == flag:
            value = text if equals else next(iter(words[index + 1 : index + 2]), None)
    return value


# KubeEdge


_EDGED: Final = ("modules", "edged")
_TAILORED: Final = "tailoredKubeletConfig"
_EDGED_FLAGS: Final = {"hostnameOverride": "hostname-override", "rootDirectory": "root-dir"}
_EDGED_DEFAULTS: Final = {
    "address": "--address=127.0.0.1",
    "readOnlyPort": "--read-only-port=10350",
    "containerRuntimeEndpoint": "--container-runtime-endpoint=unix:///run/containerd/containerd.sock",
}
"""Of a configuration without them, by the key of a KubeletConfiguration. Source: v1alpha2, default.go."""
_EDGED_MANIFESTS: Final = "/etc/kubeedge/manifests"
_FIRST_FLAGS: Final = {
    "cgroupDriver": "cgroup-driver",
    "cgroupRoot": "cgroup-root",
    "remoteRuntimeEndpoint": "container-runtime-endpoint",
    "hostnameOverride": "hostname-override",
}
"""The keys of ``modules.edged`` in v1alpha1 (KubeEdge before 1.12), which had no CPU manager."""


def _edgecore(program: KubeletProgram, words: tuple[str, ...], _unit: str, reading: _ProgramFiles) -> KubeletArguments:
    """``modules.edged`` of its configuration; its flags have other names there and are beside the section."""
    path = _value(words, "config") or program.config or ""
    document = reading.yaml(path)
    edged: object = document.data if document is not None else None
    for key in _EDGED:
        edged = edged.get(key) if isinstance(edged, dict) else None
    if not isinstance(edged, dict):
        if not reading.unread:
            reading.unreadable(f"{path[:_SHOWN]} has no section {'.'.join(_EDGED)}")
        return reading.result(())
    tailored = edged.get(_TAILORED)
    # The keys of v1alpha1 alone.
    if not isinstance(tailored, dict) and any(key in edged for key in ("cgroupDriver", "remoteRuntimeEndpoint")):
        first = {flag: edged[key] for key, flag in _FIRST_FLAGS.items() if isinstance(edged.get(key), str)}
        return reading.result(("--root-dir=/var/lib/edged", *(f"--{name}={value}" for name, value in first.items())))
    arguments = [f"--{flag}={edged[key]}" for key, flag in _EDGED_FLAGS.items() if isinstance(edged.get(key), str)]
    section = tailored if isinstance(tailored, dict) else {}
    arguments += [flag for key, flag in _EDGED_DEFAULTS.items() if section.get(key) is None]
    if section.get("staticPodPath") is None and reading.is_directory(_EDGED_MANIFESTS):
        arguments.append(f"--pod-manifest-path={_EDGED_MANIFESTS}")
    return reading.result(tuple(arguments), path, *_EDGED, _TAILORED)


_READERS: Final[
    Mapping[ArgumentSource, Callable[[KubeletProgram, tuple[str, ...], str, _ProgramFiles], KubeletArguments]]
] = {
    ArgumentSource.K3S: _k3s,
    ArgumentSource.ARGS_FILE: _args_file,
    ArgumentSource.EDGECORE: _edgecore,
}
