"""How the kubelet of this node is set up: from its command line and its configuration file, each value with its source.

An unreadable part is one message in ``problems`` and leaves the value at the kubelet's own default, so that a wrong
file never hides the node. Only the process that `reconciler.sources.host_processes` verifies is used; of a kubelet
inside another program (k3s, MicroK8s, KubeEdge) `reconciler.sources.kubelet_arguments` has the flags.

Source: Kubernetes documentation, "kubelet" (flags) and "KubeletConfiguration (v1beta1)" (file, defaults).
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.errors import InputError
from cgroupfs.naming import Driver
from reconciler.runtime.safe_files import FileRule, UntrustedFileError, check_directory, list_directory, read_file
from reconciler.settings.yaml import read_yaml
from reconciler.sources.host_processes import HostProcess, HostSearch, find_host_process
from reconciler.sources.kubelet_arguments import KubeletArguments, kubelet_arguments
from reconciler.sources.reassertion import RECONCILE_S

STANDARD_CONFIG: Final = "/var/lib/kubelet/config.yaml"

# Of a kubelet without a file; for one with a file it is closed.
_READ_ONLY_PORT: Final = 10255
_LONGEST: Final = 64
"""Characters of a duration."""


class KubeletConfig(Struct, frozen=True, kw_only=True):
    """The kubelet's configuration. Paths are the kubelet's, without the root prefix.

    ``sources`` maps a field's name to the flag or ``file:line:column`` that set it. A field that is not in ``sources``
    has the kubelet's default.
    """

    pid: int | None = None  # None: no process is verified as the kubelet
    started: int = 0  # clock ticks from boot to the start of ``pid``
    executable: str | None = None
    program: tuple[int, int] | None = None  # device and inode of ``executable``
    flags: Mapping[str, str] = {}  # those of its arguments that are read here
    config_path: str | None = None
    config_rule: FileRule = FileRule.ROOT  # the origin of ``config_path``
    port: int = 10250
    read_only_port: int = 0
    address: str = "0.0.0.0"  # where it listens: everywhere
    cgroup_driver: Driver = Driver.CGROUPFS
    cgroup_root: str = "/"
    cpu_manager_policy: str = "none"
    cpu_manager_options: Mapping[str, str] = {}
    reconcile_s: float = RECONCILE_S  # how often the CPU manager compares containers with its state
    reserved_cpus: CpuSet = EMPTY
    static_pod_path: str | None = None
    root_dir: str = "/var/lib/kubelet"
    cert_dir: str = "/var/lib/kubelet/pki"
    tls_cert_file: str | None = None
    runtime_endpoint: str | None = None
    kubeconfig: str | None = None
    node_name: str | None = None
    sources: Mapping[str, str] = {}
    problems: tuple[str, ...] = ()
    unread: bool = False  # a configuration file could not be read: its values are missing here
    inside: str | None = None  # the program that the kubelet is a part of
    section: tuple[str, ...] = ()  # where the KubeletConfiguration is in the file

    @property
    def strict_reserved(self) -> bool:
        """Whether shared pods remain off the reserved CPUs too (option ``strict-cpu-reservation``, 1.32 and later)."""
        return self.cpu_manager_options.get("strict-cpu-reservation", "").lower() == "true"

    @property
    def standalone(self) -> bool:
        """Whether this kubelet is known to belong to no cluster: its own flags were read, and name no kubeconfig.

        A kubelet inside another program has its API server from that program.
        """
        return self.pid is not None and self.inside is None and self.kubeconfig is None

    @property
    def cgroups(self) -> dict[str, object]:
        """The kubelet's cgroup settings, by the keys of its file, for finding the tree; only those that were set."""
        document: dict[str, object] = {"cgroupDriver": str(self.cgroup_driver), "cgroupRoot": self.cgroup_root}
        fields = {"cgroupDriver": "cgroup_driver", "cgroupRoot": "cgroup_root"}
        return {key: value for key, value in document.items() if fields[key] in self.sources}

    @property
    def loopback(self) -> str:
        """The address under which this node's own kubelet answers."""
        return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(self.address, self.address)


class _Option(Struct, frozen=True):
    """One setting: field, the file's key (dotted), the flag, and how its text becomes the value."""

    field: str
    key: str | None
    flag: str | None
    read: Callable[[object], object]


def _text(value: object) -> str:
    # YAML makes a number of a node's name such as 12.
    if not isinstance(value, str | int):
        raise ValueError("a text")  # noqa: TRY004  (one error type for "not usable")
    return str(value)


def _port(value: object) -> int:
    number = int(value) if isinstance(value, int) or (isinstance(value, str) and value.isdecimal()) else -1
    if not 0 <= number <= 65535:
        raise ValueError("a port from 0 to 65535")
    return number


def _driver(value: object) -> Driver:
    if value not in {"cgroupfs", "systemd"}:
        raise ValueError("cgroupfs or systemd")
    return Driver.SYSTEMD if value == "systemd" else Driver.CGROUPFS


def _cpus(value: object) -> CpuSet:
    return CpuSet.parse(_text(value))


def _root(value: object) -> str:
    return "/" + _text(value).strip("/")


def _options(value: object) -> Mapping[str, str]:
    """A mapping in the file, ``a=b,c=d`` as a flag."""
    if isinstance(value, dict):
        return {str(key): str(text).lower() if isinstance(text, bool) else str(text) for key, text in value.items()}
    pairs = [part.partition("=") for part in _text(value).split(",") if part]
    return {key.strip(): text.strip() for key, _, text in pairs}


_DURATION: Final = re.compile(r"(\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})(h|ms|m|s|us|µs|ns)")
_FACTORS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def _period(value: object) -> float:
    """A duration in Go's form, such as ``1m30s``, in seconds. Source: Go documentation, time.ParseDuration."""
    text = str(value)[:_LONGEST]
    parts = [(match[1], match[2]) for match in _DURATION.finditer(text)]
    if "".join(number + unit for number, unit in parts) != text and text != "0":
        raise ValueError("a duration such as 10s")
    # kubeadm writes ``0s`` for the default.
    return sum(float(number) * _FACTORS[unit] for number, unit in parts) or RECONCILE_S


_OPTIONS: Final = (
    _Option("port", "port", "port", _port),
    _Option("read_only_port", "readOnlyPort", "read-only-port", _port),
    _Option("address", "address", "address", _text),
    _Option("cgroup_driver", "cgroupDriver", "cgroup-driver", _driver),
    _Option("cgroup_root", "cgroupRoot", "cgroup-root", _root),
    _Option("cpu_manager_policy", "cpuManagerPolicy", "cpu-manager-policy", _text),
    _Option("cpu_manager_options", "cpuManagerPolicyOptions", "cpu-manager-policy-options", _options),
    _Option("reconcile_s", "cpuManagerReconcilePeriod", "cpu-manager-reconcile-period", _period),
    _Option("reserved_cpus", "reservedSystemCPUs", "reserved-cpus", _cpus),
    _Option("static_pod_path", "staticPodPath", "pod-manifest-path", _text),
    _Option("root_dir", None, "root-dir", _text),
    _Option("cert_dir", None, "cert-dir", _text),
    _Option("tls_cert_file", "tlsCertFile", "tls-cert-file", _text),
    _Option("runtime_endpoint", "containerRuntimeEndpoint", "container-runtime-endpoint", _text),
    _Option("kubeconfig", None, "kubeconfig", _text),
    _Option("node_name", None, "hostname-override", _text),
)
_FLAGS: Final = frozenset({"config", "config-dir", *(option.flag for option in _OPTIONS if option.flag)})


def parse_flags(arguments: tuple[str, ...]) -> dict[str, str]:
    """``--name=value`` and ``--name value`` of the known flags, the last one winning; ``_`` counts as ``-``."""
    flags: dict[str, str] = {}
    for index, word in enumerate(arguments):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("_", "-")
        if name not in _FLAGS:
            continue
        if not equals:
            value = arguments[index + 1] if index + 1 < len(arguments) else ""
        flags[name] = value
    return flags


def read_kubelet_config(
    root: str = "/",
    config_path: str | None = None,
    *,
    root_dir: str | None = None,
    executable: str | None = None,
    search: Callable[[], HostSearch] | None = None,
) -> KubeletConfig:
    """This node's kubelet configuration. The operator's ``config_path`` and ``root_dir`` win over its flags.

    ``executable``: the path of its program, where the operator names it. ``search``: finds the process, for tests.
    Never raises: where no kubelet runs, its usual file is still read, and without that its defaults apply.
    """
    host_search = search() if search is not None else find_host_process(root=root, executable=executable)
    kubelet = host_search.process
    arguments = _arguments(kubelet, root)
    flags = parse_flags(arguments.arguments)
    who = "kubelet" if kubelet is None or kubelet.inside is None else f"{kubelet.inside.name}: kubelet"
    read = _Values(root, who)
    # ROOT: a file that the kubelet's flags name must be one that only root can change.
    path, rule = (config_path or arguments.config or flags.get("config") or None), FileRule.ROOT
    section = arguments.section
    if config_path is not None:
        rule, section = FileRule.OPERATOR, ()
    # Of a kubelet that does not run now.
    if path is None and kubelet is None and os.path.exists(os.path.join(root, STANDARD_CONFIG.lstrip("/"))):
        path = STANDARD_CONFIG
    if path is None and kubelet is not None:
        # Only drop-ins are merged into the defaults of the flags, not into those of a file.
        read.values["read_only_port"] = _READ_ONLY_PORT
    if path is not None or flags.get("config-dir"):
        read.read_files(path, rule, flags.get("config-dir"), section)
    # After the files: the kubelet lets its flags win.
    for option in _OPTIONS:
        if option.flag in flags:
            read.set(option, flags[option.flag], f"{who} --{option.flag}")
    # Before the operator's own, which may be any directory.
    read.check_root_dir()
    read.prefer("root_dir", root_dir, "root-dir", "kubelet.root_dir")
    if config_path is not None and flags.get("config", config_path) != config_path:
        read.problems.append(_differs("config", flags["config"], "kubelet.config_file", config_path))
    start = KubeletConfig(
        pid=None if kubelet is None else kubelet.pid,
        executable=kubelet.executable or None if kubelet is not None and _prints_version(kubelet) else None,
        program=None if kubelet is None else kubelet.program,
        started=0 if kubelet is None else kubelet.started,
        flags=flags,
        config_path=path,
        config_rule=rule,
        sources=read.sources,
        # A file of the operator's replaces what the arguments lack.
        problems=(*read.problems, *host_search.problems, *(arguments.problems if config_path is None else ())),
        unread=read.unread or (arguments.unread and config_path is None),
        section=section,
        inside=None if kubelet is None or kubelet.inside is None else kubelet.inside.name,
    )
    return replace(start, **read.values)


def _arguments(kubelet: HostProcess | None, root: str) -> KubeletArguments:
    if kubelet is None or kubelet.inside is None:
        return KubeletArguments(arguments=() if kubelet is None else kubelet.arguments)
    return kubelet_arguments(kubelet.inside, kubelet.pid, kubelet.arguments, kubelet.unit, root)


def _prints_version(kubelet: HostProcess) -> bool:
    return kubelet.inside is None or kubelet.inside.prints_kubernetes


def _differs(flag: str, value: str, setting: str, configured: str) -> str:
    return f"{setting} is {configured}, but the kubelet runs with --{flag}={value[:200]}; the setting is used"


class _Values:
    """Values read so far, the source of each, and the parts that could not be used."""

    def __init__(self, root: str, who: str = "kubelet") -> None:
        self.root = root
        self.who = who
        self.values: dict[str, object] = {}
        self.sources: dict[str, str] = {}
        self.problems: list[str] = []
        self.unread = False

    def set(self, option: _Option, value: object, source: str, name: str = "") -> None:
        """Take one value; an empty text leaves the default, as it does for the kubelet."""
        if value == "":
            return
        try:
            self.values[option.field] = option.read(value)
        except ValueError as exc:
            self.problems.append(str(InputError(source + name, value, str(exc))))
            return
        self.sources[option.field] = source

    def prefer(self, field: str, configured: str | None, flag: str, setting: str) -> None:
        """The operator's value wins; where the kubelet's differs, one of the two is wrong."""
        if configured is None:
            return
        source = f"{self.who} --{flag}"
        if self.sources.get(field) == source and self.values[field] != configured:
            self.problems.append(_differs(flag, str(self.values[field]), setting, configured))
        self.values[field] = configured
        self.sources.pop(field, None)

    def check_root_dir(self) -> None:
        """The directory is read, counted and written in: one that another user can change is not used."""
        if "root_dir" not in self.sources:
            return
        try:
            check_directory(str(self.values["root_dir"]), FileRule.ROOT, root=self.root)
        except UntrustedFileError as exc:
            self.problems.append(f"{self.sources.pop('root_dir')}: {exc.strerror}; not used")
            del self.values["root_dir"]
        except OSError:
            return  # not there yet; what is there of the way to it is root's

    def read_files(self, path: str | None, rule: FileRule, drop_ins: str | None, section: tuple[str, ...] = ()) -> None:
        """The file, then ``*.conf`` of the drop-in directory in the order of their names; later files win.

        ``section``: where in the file the KubeletConfiguration is; a file without the section has no value.
        """
        files = [
            *([(path, rule)] if path is not None else ()),
            *((name, FileRule.ROOT) for name in self._drop_ins(drop_ins)),
        ]
        for name, named_by in files:
            try:
                document = read_yaml(read_file(name, named_by, root=self.root).decode(), name)
            except OSError as exc:
                self._not_read(f"kubelet configuration {name}: {exc.strerror or exc}")
                continue
            except (InputError, UnicodeDecodeError) as exc:
                self._not_read(f"kubelet configuration {exc}")
                continue
            if not isinstance(document.data, dict):
                self._not_read(str(document.refusal((), "a KubeletConfiguration")))
                continue
            within = section if name == path else ()
            values = document.data
            for key in within:
                inner = values.get(key)
                values = inner if isinstance(inner, dict) else {}
            for option in _OPTIONS:
                if option.key is not None and values.get(option.key) is not None:
                    self.set(option, values[option.key], document.place((*within, option.key)), f": {option.key}")

    def _not_read(self, problem: str) -> None:
        self.unread = True
        self.problems.append(problem)

    def _drop_ins(self, directory: str | None) -> Iterator[str]:
        if directory is None:
            return
        try:
            names = list_directory(directory, FileRule.ROOT, root=self.root)
        except OSError as exc:
            self._not_read(f"kubelet configuration {directory}: {exc.strerror or exc}")
            return
        for name in names:
            if name.endswith(".conf"):
                yield f"{directory}/{name}"
