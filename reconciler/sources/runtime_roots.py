"""Where the container runtimes of this node keep their per-container directories.

Two kinds, with one directory per container id: the runtime's own state (`reconciler.sources.runtime_files`), and the
OCI bundle, in which containerd's shim writes ``init.pid`` when it has started the container.

Source: containerd's shim for runc (v1 and v2), its configuration formats 1 to 3; moby; crio.conf(5), crio.conf.d(5),
containers-storage.conf(5).
"""

import errno
import glob
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from msgspec import Struct

from cgroupfs.bounded import decoded
from cgroupfs.bounded import read_file as read_file_bounded
from cgroupfs.errors import InputError, SourceError, errno_name
from reconciler.runtime.kubelet_programs import CONTAINERD_CONFIGS, IMAGES, STATES
from reconciler.runtime.safe_files import FileRule, read_file
from reconciler.sources.runtime_files import FIFO, FILES, Runtime, shim_runtime

CONTAINERD_CONFIG: Final = CONTAINERD_CONFIGS[0]
_DEEPEST: Final = 64
CRIO_CONFIG: Final = "/etc/crio/crio.conf"
CRIO_DROP_INS: Final = "/etc/crio/crio.conf.d"
CRIO_STORAGE: Final = "/etc/containers/storage.conf"
_CRIO_RUN_ROOT: Final = "/run/containers/storage"
_CRIO_DRIVER: Final = "overlay"
_LONGEST_DRIVER: Final = 64
_WITH_MACHINE: Final = "vm"
"""CRI-O's type of a runtime with a machine for each pod (kata), whose root has its sandboxes."""
_MOST_FILES: Final = 256
_MOST_PARTS: Final = 64
"""Of a pattern in ``imports``."""
_SHOWN: Final = 60
_SHIM_PATH: Final = "shim-binary-path"
"""In a bundle, of containerd 1.6 and newer: the program of the sandbox's shim."""
_LONGEST_PATH: Final = 4096
_STATE: Final = STATES[0]
_RUNC_ROOT: Final = "/run/containerd/runc"
"""*Not* below containerd's state directory: the shim uses this default of its own, or the runtime's ``Root`` option,
and adds the containerd namespace.
"""
_NAMESPACE: Final = "k8s.io"
_TASKS: Final = "io.containerd.runtime.v2.task"
_TASKS_V1: Final = "io.containerd.runtime.v1.linux"
# Format 1 called the CRI plugin "cri"; format 3 moved it.
_CRI_PLUGINS: Final = ("io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "cri")
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR})
_LEGACY_PLUGINS: Final = ("io.containerd.runtime.v1.linux", "linux")


class RuntimeDirs(Struct, frozen=True, kw_only=True):
    """Directories to search, all with the root prefix. ``bundles`` and ``nested`` differ in the place of a bundle.

    ``states``: ``<dir>/<id>/`` with a runtime's file. ``bundles``: ``<dir>/<id>/config.json``. ``nested`` (CRI-O):
    ``<dir>/<id>/userdata/config.json``, in which no ``init.pid`` appears. ``kata``: ``<dir>/<sandbox id>/``.
    ``gvisor``: ``<dir>/<id>_sandbox:<sandbox id>.state``. ``problems``: files that could not be used.
    """

    states: tuple[str, ...]
    bundles: tuple[str, ...]
    nested: tuple[str, ...] = ()
    problems: tuple[InputError, ...] = ()
    kata: tuple[str, ...] = ()
    gvisor: tuple[str, ...] = ()

    def bundle(self, container_id: str) -> str | None:
        """The bundle directory of a container that has one now.

        Errors: `SourceError` when that cannot be determined.
        """
        for directory in self.bundles:
            path = f"{directory}/{container_id}"
            if _is_there(f"{path}/config.json"):
                return path
        for directory in self.nested:
            path = f"{directory}/{container_id}/userdata"
            if _is_there(f"{path}/config.json"):
                return path
        return None

    def state_file(self, container_id: str) -> str | None:
        """The runtime's record of a container that has one now. Errors: as `bundle`."""
        for directory in self.states:
            for file in FILES:
                path = f"{directory}/{container_id}/{file.name}"
                if _is_there(path):
                    return path
        return None

    def sandbox(self, container_id: str) -> Runtime | None:
        """The runtime of a container that runs in a virtual machine or a kernel of its own; None: none is recognised.

        By files that only root makes, never by the name of a process, which any process may take: the bundle's
        ``shim-binary-path``, kata's directory of a sandbox, or runsc's state file.
        """
        for directory in self.bundles:
            runtime = shim_runtime(_first_line(f"{directory}/{container_id}/{_SHIM_PATH}"))
            if runtime.is_sandbox():
                return runtime
        if any(os.path.isdir(f"{directory}/{container_id}") for directory in self.kata):
            return Runtime.KATA
        files = [f"{directory}/{container_id}_sandbox:{container_id}.state" for directory in self.gvisor]
        return Runtime.GVISOR if any(os.path.isfile(file) for file in files) else None

    def waits_for_start(self, container_id: str) -> bool:
        """Whether a file proves that the container's program was not executed yet. False proves nothing."""
        return any(
            os.path.exists(f"{directory}/{container_id}/{file.name}")
            and os.path.exists(f"{directory}/{container_id}/{FIFO}")
            for directory in self.states
            for file in FILES
            if file.fifo
        )


def _is_there(path: str) -> bool:
    """Whether there is such a file. Errors: `SourceError` where that cannot be determined: unknown is not absent."""
    try:
        os.stat(path)
    except OSError as exc:
        if exc.errno in _ABSENT:
            return False
        raise SourceError("runtime", f"cannot read {path}: {errno_name(exc.errno)}") from exc
    return True


def _first_line(path: str) -> str:
    """A short text file of the runtime's; empty when it is not there, and for anything else than a text."""
    try:
        return read_file_bounded(path, _LONGEST_PATH).decode().partition("\n")[0]
    except (OSError, ValueError):
        return ""


def find_runtime_dirs(root: str = "/", config: str = CONTAINERD_CONFIG) -> RuntimeDirs:
    """The defaults of containerd, docker and CRI-O, and what the configurations of containerd and CRI-O name besides.

    Of the containerd of k3s, RKE2, k0s and MicroK8s too: their state directories and their configurations.

    Errors: none; a configuration that cannot be used is in ``problems``, and the defaults remain.
    """
    problems: list[InputError] = []
    states = [f"{_RUNC_ROOT}/{_NAMESPACE}"]
    tasks = [_STATE]
    for file in (config, *CONTAINERD_CONFIGS[1:]):
        for document in _documents(root, file, problems):
            try:
                tasks += _texts(document.get("state"), "state", file)
                states += [f"{path.rstrip('/')}/{_NAMESPACE}" for path in _runtime_roots(document, file)]
            except InputError as exc:
                problems.append(exc)
    # runc's of docker and CRI-O, and CRI-O's crun.
    crio = _read_crio(root)
    states += ["/run/docker/runtime-runc/moby", "/run/runc", "/run/crun", *crio.states]
    problems += crio.problems
    tasks += STATES[1:]
    bundles = [f"{state.rstrip('/')}/{kind}/{_NAMESPACE}" for state in tasks for kind in (_TASKS, _TASKS_V1)]
    # docker up to 19.03 has the first shim.
    bundles += [
        f"{state}/{kind}/moby" for state in ("/run/docker/containerd/daemon", _STATE) for kind in (_TASKS, _TASKS_V1)
    ]
    return RuntimeDirs(
        states=_below(root, states),
        bundles=_below(root, bundles),
        nested=_below(root, crio.nested),
        kata=_below(root, ["/run/vc/sbs", *crio.kata]),
        gvisor=_below(root, [f"/run/containerd/runsc/{_NAMESPACE}"]),
        problems=tuple(problems),
    )


def find_image_root(root: str = "/", config: str = CONTAINERD_CONFIG) -> str:
    """Where the runtime keeps images and the containers' layers, without the root prefix: the kubelet's ``imagefs``.

    What containerd's or CRI-O's configuration names, else the first default that exists (containerd, docker, CRI-O),
    else containerd's. Errors: none; a configuration that cannot be used names nothing.
    """
    named: list[str] = []
    for document in _documents(root, config, []):
        try:
            named += _texts(document.get("root"), "root", config)
        except InputError:
            continue
    for path in (*reversed(named), *_read_crio(root).images, *IMAGES):
        if os.path.isdir(os.path.join(root, path.lstrip("/"))):
            return path
    return named[-1] if named else IMAGES[0]


def _below(root: str, paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(os.path.join(root, os.path.normpath(path).lstrip("/")) for path in paths))


def _documents(root: str, config: str, problems: list[InputError]) -> Iterator[Mapping[str, object]]:
    """The main file, then what it imports (globs, relative to it), as containerd merges them."""
    todo = [config]
    done: set[str] = set()
    while todo and len(done) < _MOST_FILES:
        path = todo.pop(0)
        if path in done:
            continue
        done.add(path)
        try:
            document = _load(root, path)
        except InputError as exc:
            problems.append(exc)
            continue
        if document is None:
            continue
        yield document
        try:
            for pattern in _imports(document, path):
                full = os.path.join(glob.escape(root), pattern.lstrip("/"))
                todo += sorted(f"/{os.path.relpath(text, root)}" for text in glob.glob(full))
        except InputError as exc:
            problems.append(exc)


def _imports(document: Mapping[str, object], path: str) -> list[str]:
    """The patterns that a file imports, as absolute paths. Errors: `InputError` for one that no system has."""
    imports = document.get("imports")
    patterns: list[str] = []
    for item in imports if isinstance(imports, list) else ():
        text = str(item)
        # `glob` calls itself for each part.
        if len(text) > _LONGEST_PATH or text.count("/") >= _MOST_PARTS or "\0" in text:
            expected = f"a path of at most {_MOST_PARTS} parts and {_LONGEST_PATH} characters"
            raise InputError(f"{path}: imports", text[:_SHOWN], expected)
        patterns.append(os.path.join(os.path.dirname(path), text))
    if len(patterns) > _MOST_FILES:
        raise InputError(f"{path}: imports", f"{len(patterns)} patterns", f"at most {_MOST_FILES}")
    return patterns


def _runtime_roots(document: Mapping[str, object], where: str) -> list[str]:
    plugins = _table(document, "plugins", where)
    roots: list[str] = []
    for plugin in _CRI_PLUGINS:
        containerd = _table(_table(plugins, plugin, where), "containerd", where)
        runtimes = dict(_table(containerd, "runtimes", where))
        # Format 1 had two runtimes by name, outside the table.
        runtimes |= {
            key: containerd[key] for key in ("default_runtime", "untrusted_workload_runtime") if key in containerd
        }
        for name in runtimes:
            runtime = _table(runtimes, name, where)
            roots += _texts(_table(runtime, "options", where).get("Root"), f"{name}.options.Root", where)
            roots += _texts(runtime.get("runtime_root"), f"{name}.runtime_root", where)
    for plugin in _LEGACY_PLUGINS:
        roots += _texts(_table(plugins, plugin, where).get("runtime_root"), f"{plugin}.runtime_root", where)
    return roots


# CRI-O


class _CrioDirs(Struct, frozen=True, kw_only=True):
    """Directories without the root prefix, as `RuntimeDirs` has them.

    ``images``: where layers are, if it is configured. ``problems``: files, or values, that could not be used.
    """

    states: tuple[str, ...]
    nested: tuple[str, ...]
    kata: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    problems: tuple[InputError, ...] = ()


def _read_crio(root: str = "/") -> _CrioDirs:
    """What the files below ``root`` name, and the defaults. Errors: none; they are in ``problems``.

    ``/etc/crio/crio.conf``, then the files of ``/etc/crio/crio.conf.d`` in the order of their names: of one option the
    last value counts, runtimes are added by name.
    """
    problems: list[InputError] = []
    options: dict[str, str] = {}
    states: list[str] = []
    kata: list[str] = []

    def take(path: str, prefix: str, names: Mapping[str, str]) -> None:
        """The options of one file: ``names`` from its own to CRI-O's."""
        try:
            document = _load(root, path)
            section = _table(document or {}, prefix, path)
            for own, name in names.items():
                if (value := _crio_option(section, own, f"{path}: {prefix}.{own}")) is not None:
                    options[name] = value
            for name, runtime_root, is_vm in _crio_runtimes(section, path):
                (kata if is_vm else states).extend(_texts(runtime_root, f"{name}.runtime_root", path))
        except InputError as exc:
            problems.append(exc)

    # First: a later value wins, and this one counts only for what CRI-O's own files do not name.
    take(CRIO_STORAGE, "storage", {"runroot": "runroot", "graphroot": "root", "driver": "storage_driver"})
    for path in (CRIO_CONFIG, *_crio_drop_ins(root, problems)):
        take(path, "crio", {"runroot": "runroot", "root": "root", "storage_driver": "storage_driver"})
    runs, driver = options.get("runroot") or _CRIO_RUN_ROOT, options.get("storage_driver") or _CRIO_DRIVER
    bundles = [f"{run.rstrip('/')}/{driver}-containers" for run in dict.fromkeys((runs, _CRIO_RUN_ROOT))]
    return _CrioDirs(
        states=tuple(dict.fromkeys(states)),
        nested=tuple(dict.fromkeys((*bundles, f"{_CRIO_RUN_ROOT}/{_CRIO_DRIVER}-containers"))),
        kata=tuple(dict.fromkeys(f"{path.rstrip('/')}/sbs" for path in kata)),
        images=tuple(filter(None, (options.get("root"),))),
        problems=tuple(problems),
    )


def _crio_drop_ins(root: str, problems: list[InputError]) -> list[str]:
    directory = os.path.join(root, CRIO_DROP_INS.lstrip("/"))
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    except OSError as exc:
        problems.append(InputError(CRIO_DROP_INS, errno_name(exc.errno), "a readable directory"))
        return []
    if len(names) > _MOST_FILES:
        problems.append(InputError(CRIO_DROP_INS, f"{len(names)} files", f"at most {_MOST_FILES}"))
    paths = [f"{CRIO_DROP_INS}/{name}" for name in names[:_MOST_FILES]]
    return [path for path in paths if not os.path.isdir(os.path.join(root, path.lstrip("/")))]


def _crio_option(section: Mapping[str, object], name: str, where: str) -> str | None:
    """A path, or the name of a storage driver; None: not set. Errors: `InputError`."""
    value = section.get(name)
    if value is None or value == "":
        return None
    if name not in {"driver", "storage_driver"}:
        return _texts(value, name, where.partition(":")[0])[0]
    if not (isinstance(value, str) and value.isalnum() and len(value) <= _LONGEST_DRIVER):
        raise InputError(where, value, "the name of a storage driver")
    return value


def _crio_runtimes(section: Mapping[str, object], path: str) -> list[tuple[str, object, bool]]:
    """Name, root, and whether it has a machine for each pod, of each runtime."""
    runtimes = _table(_table(section, "runtime", path), "runtimes", path)
    rows = [(name, _table(runtimes, name, path)) for name in runtimes]
    return [(name, row.get("runtime_root"), row.get("runtime_type") == _WITH_MACHINE) for name, row in rows]


# TOML


def _load(root: str, path: str) -> Mapping[str, object] | None:
    """A file of root's; None: there is none. Errors: `InputError` for one that cannot be used."""
    try:
        return decoded(tomllib.loads, read_file(path, FileRule.ROOT, root=root).decode(), deepest=_DEEPEST)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise InputError(path, exc.strerror or str(exc), "a readable file of root's") from exc
    except ValueError as exc:
        raise InputError(path, str(exc), "TOML") from exc


def _table(parent: Mapping[str, object], key: str, where: str) -> Mapping[str, object]:
    """A table of the file ``where``; empty: it has none. Errors: `InputError`."""
    value = parent.get(key, {})
    if not isinstance(value, dict):
        raise InputError(f"{where}: {key}", value, "a table")
    return value


def _texts(value: object, key: str, where: str) -> list[str]:
    """The value as a list of none or one: an empty text means "the default". Errors: `InputError`."""
    if value is None or value == "":
        return []
    if not (isinstance(value, str) and value.startswith("/")):
        raise InputError(f"{where}: {key}", value, "an absolute path")
    return [value]
