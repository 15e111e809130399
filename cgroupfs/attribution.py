"""Attribution of writes to control files: one fanotify mark per hierarchy, or inotify where the kernel lacks that.

fanotify reports the writer's pid for every write below a mount, by any process, through any mount of the same
hierarchy; it needs CAP_SYS_ADMIN in the first user namespace. `identify` finds the kind of the writer.

Source: fanotify(7), fanotify_init(2), fanotify_mark(2); measured on 5.10 to 6.18.
"""

import ctypes
import errno
import os
from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from struct import Struct as Layout
from typing import Final, NamedTuple, Protocol, final

import trio
from msgspec import Struct

from cgroupfs.errors import SourceError, errno_name
from cgroupfs.lines import lines_of, stat_fields, status_field
from cgroupfs.log import get_log
from cgroupfs.watch import DirWatcher, Mask

_MOST: Final = 64 * 1024
"""Bytes of a process's list of groups."""
_MOST_ELSEWHERE: Final = 64
"""Paths of hierarchies in other mount namespaces, which privileged containers choose; a write is compared with each."""
_DEEPEST_ELSEWHERE: Final = 32
"""Names in such a path, each of which is tried for a write that cannot be placed: a tenant nests groups deeply."""
_POD: Final = "kubepods"
_OUTSIDE: Final = ":/.."
"""How a group begins that is outside of our cgroup namespace."""
_UNSET_LOGIN: Final = "4294967295"
"""``loginuid`` of a process that no login started: -1."""
_KUBELETS: Final = frozenset({"kubelet", "hyperkube", "kubelite", "k3s", "k3s-server", "k3s-agent", "edgecore"})
_RUNTIMES: Final = frozenset(
    {"runc", "crun", "youki", "kata-runtime"}
    | {"containerd", "dockerd", "docker-containerd", "crio", "conmon", "conmonrs"}
)
# runc may run from a sealed copy of itself in memory; its init's process name is "runc:[2:INIT]" until the exec.
_RUNTIME_PARTS: Final = ("containerd-shim", "runc:[", "memfd:runc")
_HANDS: Final = frozenset(
    {"bash", "sh", "dash", "ash", "zsh", "ksh", "fish", "tcsh", "csh", "busybox", "sudo", "su"}
    | {"tee", "dd", "cp", "sed", "vi", "vim", "nvim", "nano", "emacs", "mc", "cgset", "cgclassify", "cgexec"}
)
"""Programs with which a person writes a file, outside of services."""
_LOG: Final = get_log("attribution")
_NAME: Final = "write attribution"
_FAN_CLASS_NOTIF_CLOEXEC_NONBLOCK: Final = 0x0 | 0x1 | 0x2
_FAN_MARK_ADD: Final = 0x1
_FAN_MARK_MOUNT: Final = 0x10
_FAN_MARK_FILESYSTEM: Final = 0x100
_FAN_MODIFY: Final = 0x2
_FAN_Q_OVERFLOW: Final = 0x4000
_FAN_VERSION: Final = 3
_AT_FDCWD: Final = -100
_REMOVED: Final = frozenset({errno.ENODEV, errno.ENOENT})
_EVENT: Final = Layout("=IBBHQii")
# Each event read opens a descriptor; this many at a time remain far below the usual limit of 1024.
_READ_BYTES: Final = _EVENT.size * 64


class WriterKind(StrEnum):
    """Kind of a writer. The reaction is decided elsewhere: a runtime is expected, a person's value is kept."""

    SELF = "self"
    KUBELET = "kubelet"
    RUNTIME = "runtime"
    SYSTEMD = "systemd"
    PERSON = "person"
    OTHER = "other"
    UNKNOWN = "unknown"


class WriterProcess(Struct, frozen=True, kw_only=True):
    """One process that wrote. ``name`` is its program's, empty when it has ended or is not visible."""

    kind: WriterKind
    pid: int = 0
    name: str = ""

    @property
    def person(self) -> bool:
        """A human decided this."""
        return self.kind is WriterKind.PERSON

    def __str__(self) -> str:
        if not self.pid:
            return "an unknown process"
        if not self.name:
            return f"pid {self.pid} (exited)"
        if self.kind is WriterKind.PERSON:
            return f"a person using {self.name} (pid {self.pid})"
        return f"{self.name} (pid {self.pid})"


UNKNOWN_WRITER: Final = WriterProcess(kind=WriterKind.UNKNOWN)


def identify(pid: int, root: str = "/") -> WriterProcess:
    """The kind of process ``pid`` now. Costs 10 to 40 µs; errors: none.

    It is called a few dozen microseconds after the write: short-lived writers (runc, a shell's echo) often still exist,
    but not always. An undetermined one is UNKNOWN and never guessed.
    """
    if pid <= 0:
        # The kernel's number for a process outside this pid namespace is 0.
        return UNKNOWN_WRITER
    if pid == os.getpid() and root == "/":
        return WriterProcess(kind=WriterKind.SELF, pid=pid, name="bypassd")
    directory = os.path.join(root, "proc", str(pid))
    comm = _read(f"{directory}/comm").strip()
    if not comm:
        return WriterProcess(kind=WriterKind.UNKNOWN, pid=pid)
    program = _program(directory)
    return WriterProcess(kind=_kind(pid, comm, program, directory), pid=pid, name=program or comm)


def _kind(pid: int, comm: str, program: str, directory: str) -> WriterKind:
    names = {comm, program}
    groups = _read(f"{directory}/cgroup", _MOST)
    # A list that is cut off may hide the pod's group, and so does a path relative to a cgroup namespace.
    in_pod = _POD in groups or _OUTSIDE in groups or len(groups) >= _MOST
    component = _component(pid, comm, names, program)
    # Any process may take any name. In a pod's group only a runtime's shim is accepted.
    if component is not None and (not in_pod or _is_part(names)) and _is_hosts(directory, in_pod=in_pod):
        return component
    if in_pod:
        # A container may choose any names: its processes are not the node's kubelet or runtime.
        return WriterKind.OTHER
    unit = _unit(groups)
    if _has_terminal(_read(f"{directory}/stat")) or "/session-" in unit or "/user.slice" in unit:
        return WriterKind.PERSON
    if ".service" in unit:
        # A shell without a terminal in a service is that service's script, except where a login server left it.
        login = "/ssh" in unit and _read(f"{directory}/loginuid") not in {"", _UNSET_LOGIN}
        return WriterKind.PERSON if login else WriterKind.OTHER
    if _read(f"{directory}/loginuid") not in {"", _UNSET_LOGIN} or names & _HANDS:
        return WriterKind.PERSON
    return WriterKind.OTHER


def _component(pid: int, comm: str, names: set[str], program: str) -> WriterKind | None:
    """What the process is by its name, which proves nothing; None: nothing that has a name here."""
    if names & _KUBELETS:
        return WriterKind.KUBELET
    if names & _RUNTIMES or _is_part(names):
        return WriterKind.RUNTIME
    if program.startswith("systemd") or (pid == 1 and comm == "systemd"):
        return WriterKind.SYSTEMD
    return None


def _is_part(names: set[str]) -> bool:
    return any(name.startswith(part) for name in names for part in _RUNTIME_PARTS)


def _is_hosts(directory: str, *, in_pod: bool) -> bool:
    """Whether it may be a component of the node: root's, in the first user namespace."""
    status = _read(f"{directory}/status")
    # Real, effective, saved and file system's.
    if status_field(status, "Uid:").split() != ["0"] * 4:
        return False
    # No container shares process 1's file systems and process ids, unless it has been given the whole node.
    spaces = ("user", "mnt", "pid") if in_pod else ("user",)
    try:
        own = {name: os.readlink(f"{directory}/ns/{name}") for name in spaces}
        return own == _hosts_spaces(os.path.dirname(directory), spaces)
    except OSError:
        return False


def _hosts_spaces(proc: str, spaces: Iterable[str]) -> dict[str, str]:
    """Process 1's namespaces; our own where the kernel does not show us those. Errors: `OSError`."""
    try:
        return {name: os.readlink(f"{proc}/1/ns/{name}") for name in spaces}
    except PermissionError:
        return {name: os.readlink(f"{proc}/self/ns/{name}") for name in spaces}


def _read(path: str, most: int = 4096) -> str:
    """A file of /proc, empty when the process has ended or may not be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, most).decode(errors="replace")
        finally:
            os.close(fd)
    except OSError:
        return ""


def _program(directory: str) -> str:
    """The name of the program's file; empty for kernel threads and where it may not be read."""
    try:
        path = os.readlink(f"{directory}/exe").removesuffix(" (deleted)")
    except OSError:
        return ""
    return path[1:] if path.startswith("/memfd:") else path.rsplit("/", 1)[-1]


def _unit(text: str) -> str:
    """The path in systemd's own hierarchy, or in the only one of cgroup v2; empty without either."""
    paths = dict(line.split(":", 2)[1:] for line in lines_of(text) if line.count(":") >= 2)
    return paths.get("name=systemd") or paths.get("") or ""


def _has_terminal(stat: str) -> bool:
    """Whether the process has a controlling terminal: field 7, ``tty_nr``; one that has ended has none."""
    try:
        return stat_fields(stat)[4] != "0"
    except ValueError:
        return False


class ObservedWrite(NamedTuple):
    """One or more writes of one process to one control file (the kernel merges those not yet read)."""

    directory: str  # the watched hierarchy's
    group: str  # the path below it; empty: the write came through a mount that cannot be placed
    file: str  # the control file's name
    writer: WriterProcess
    lost: bool = False  # events were lost; nothing else is known


class WriteWatch(Protocol):
    """Either way of watching."""

    @property
    def problem(self) -> str | None:
        """What is missing (a hierarchy, the writers' names); None when nothing is."""
        ...

    def follow(self, directory: str, group: str) -> None:
        """Watch one group in one hierarchy (fanotify: a group outside ``below`` is reported, too)."""
        ...

    def forget(self, directory: str, group: str) -> None:
        """The group was removed, or is of no interest any more."""
        ...

    async def next_batch(self) -> Sequence[ObservedWrite]:
        """At least one foreign write. Cancelled, it loses none."""
        ...

    def take(self) -> Sequence[ObservedWrite]:
        """The events reported so far, without waiting; may be empty. `next_batch` does not return them again."""
        ...

    def close(self) -> None: ...


def watch_writes(directories: Iterable[str], *, files: Collection[str] | None = None, below: str = "/") -> WriteWatch:
    """Watch the hierarchies mounted at ``directories``, in the better way that this kernel and the rights allow.

    ``files``: names of interest (None: all). ``below``: the group whose subtree is of interest, besides the groups that
    are followed. Errors: none; `WriteWatch.problem` has what is missing, and it is logged once.
    """
    try:
        watch: WriteWatch = FanotifyWatch(directories, files=files, below=below)
    except SourceError as exc:
        watch = InotifyWrites(files, str(exc))
    if watch.problem:
        _LOG.warning(watch.problem)
    return watch


@final
class FanotifyWatch:
    """All writes to the files of whole hierarchies, with the writer."""

    def __init__(self, directories: Iterable[str], *, files: Collection[str] | None = None, below: str = "/") -> None:
        """Errors: `SourceError` when not a single hierarchy can be marked."""
        self._files = None if files is None else frozenset(files)
        self._below = below.rstrip("/")
        self._followed: set[str] = set()
        """Groups outside of ``below``."""
        self._own = os.getpid()
        self._bases: dict[int, str] = {}
        self._elsewhere: set[tuple[int, str]] = set()
        """Devices, with the paths that they have in other mount namespaces."""
        self._waiting = False
        self._losing = 0
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._init()
        failed: list[str] = []
        for directory in dict.fromkeys(directories):
            code = self._mark(directory)
            try:
                device = os.stat(directory).st_dev
            except OSError as exc:
                code = code or exc.errno or errno.EIO
            if code:
                failed.append(f"{directory} ({errno_name(code)})")
            else:
                self._bases[device] = directory
        self._problem = f"{_NAME}: writers unknown in {', '.join(failed)}" if failed else None
        if not self._bases:
            self.close()
            raise SourceError(_NAME, f"fanotify cannot mark {', '.join(failed) or 'anything'}")

    @property
    def problem(self) -> str | None:
        """Hierarchies that could not be marked."""
        return self._problem

    def follow(self, directory: str, group: str) -> None:
        """Report writes in a group outside of ``below``, too: the kernel reports those of the whole hierarchy."""
        del directory
        if not self._is_below(group):
            self._followed.add(group)

    def forget(self, directory: str, group: str) -> None:
        """Report no more writes in a group outside of ``below``."""
        del directory
        self._followed.discard(group)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            if self._waiting:
                trio.lowlevel.notify_closing(fd)
            os.close(fd)

    async def next_batch(self) -> Sequence[ObservedWrite]:
        """At least one write by another process. Cancelled, it loses none.

        Errors: `trio.ClosedResourceError` after `close`.
        """
        while True:
            if self._fd < 0:
                raise trio.ClosedResourceError
            self._waiting = True
            try:
                await trio.lowlevel.wait_readable(self._fd)
            finally:
                self._waiting = False
            batch = self._read()
            if batch:
                return batch

    def take(self) -> Sequence[ObservedWrite]:
        """The kernel reports a write as it is done: after reading a foreign value its writer is found here."""
        return self._read() if self._fd >= 0 else ()

    def _init(self) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_LARGEFILE", 0)
        fd: int = self._libc.fanotify_init(_FAN_CLASS_NOTIF_CLOEXEC_NONBLOCK, flags)
        if fd < 0:
            raise SourceError(_NAME, f"fanotify is not available: {errno_name(ctypes.get_errno())}")
        return fd

    def _mark(self, directory: str) -> int:
        """Mark one hierarchy; 0 or the errno. The file-system mark sees other mounts, too, but needs Linux 4.20."""
        code = 0
        for scope in (_FAN_MARK_FILESYSTEM, _FAN_MARK_MOUNT):
            done = self._libc.fanotify_mark(
                self._fd,
                ctypes.c_uint(_FAN_MARK_ADD | scope),
                ctypes.c_uint64(_FAN_MODIFY),
                _AT_FDCWD,
                ctypes.c_char_p(os.fsencode(directory)),
            )
            if done == 0:
                return 0
            code = ctypes.get_errno()
        return code or errno.EINVAL

    def _read(self) -> list[ObservedWrite]:
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as exc:
            if exc.errno in _REMOVED:
                # Its group was removed before the read: the write is of no interest any more.
                return []
            # EMFILE, ENFILE: the kernel has dropped the event whose file it could not open. Each write on the node is
            # one such event: only the begin and the end of the loss are logged.
            if exc.errno != self._losing:
                _LOG.warning("events lost", watch=_NAME, errno=errno_name(exc.errno))
            self._losing = exc.errno or 0
            return [ObservedWrite("", "", "", UNKNOWN_WRITER, lost=True)]
        if self._losing:
            _LOG.info("events are read again", watch=_NAME)
        self._losing = 0
        batch: list[ObservedWrite] = []
        writers: dict[int, WriterProcess] = {}
        offset = 0
        while offset < len(data):
            length, version, _, _, mask, fd, pid = _EVENT.unpack_from(data, offset)
            offset += length
            try:
                if mask & _FAN_Q_OVERFLOW:
                    batch.append(ObservedWrite("", "", "", UNKNOWN_WRITER, lost=True))
                elif pid != self._own and version == _FAN_VERSION:  # own writes are reported, too
                    write = self._decode(fd, pid, writers)
                    if write is not None:
                        batch.append(write)
            finally:
                # Each event has an open descriptor, also one that is not decoded.
                if fd >= 0:
                    os.close(fd)
        return batch

    def _decode(self, fd: int, pid: int, writers: dict[int, WriterProcess]) -> ObservedWrite | None:
        try:
            path = os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")
            name = path.rpartition("/")[2]
            if self._files is not None and name not in self._files:
                return None
            stat = os.fstat(fd)
        except OSError:
            return None
        directory = self._bases.get(stat.st_dev)
        if directory is None:
            return None
        group = self._group(path, directory, stat)
        if group and group not in self._followed and not self._is_below(group):
            return None
        if pid not in writers:
            writers[pid] = identify(pid)
        return ObservedWrite(directory, group, name, writers[pid])

    def _is_below(self, group: str) -> bool:
        return group == self._below or group.startswith(f"{self._below}/")

    def _group(self, path: str, directory: str, stat: os.stat_result) -> str:
        """The group path of a file, by the path that the writer's mount namespace has to it; empty: not found."""
        where, _, name = path.rpartition("/")
        for device, prefix in ((stat.st_dev, directory), *self._elsewhere):
            if device == stat.st_dev and (where == prefix or where.startswith(f"{prefix}/")):
                group = where[len(prefix) :] or "/"
                # Another file may have this path: a node in a pod has groups of the host's names in its namespaces.
                if _inode(f"{directory}{group}/{name}") == stat.st_ino:
                    return group
        # A writer in another mount namespace has another path to the same file: the ends of it are tried.
        parts = path.split("/")
        for depth in range(1, min(len(parts), _DEEPEST_ELSEWHERE + 1)):
            if _inode("/".join([directory, *parts[depth:]])) == stat.st_ino:
                if len(self._elsewhere) >= _MOST_ELSEWHERE:
                    self._elsewhere.clear()
                self._elsewhere.add((stat.st_dev, "/".join(parts[:depth])))
                return "/" + "/".join(parts[depth:-1])
        return ""


def _inode(path: str) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


@final
class InotifyWrites:
    """The fallback: writes to the followed groups by any process, this one included, without the writer."""

    def __init__(self, files: Collection[str] | None = None, why: str = "") -> None:
        self._files = None if files is None else frozenset(files)
        self._why = why
        self._watcher: DirWatcher[tuple[str, str]] = DirWatcher(_NAME)

    @property
    def problem(self) -> str | None:
        """Why this is not fanotify, and what else is wrong."""
        limit = self._watcher.stats.problem
        return f"{self._why}: writers unknown" + (f"; {limit}" if limit else "")

    def follow(self, directory: str, group: str) -> None:
        """Watch one group in one hierarchy."""
        self._watcher.add(f"{directory}{group.rstrip('/')}", int(Mask.MODIFY | Mask.ONLYDIR), (directory, group))

    def forget(self, directory: str, group: str) -> None:
        """Must be called when a group was removed: its watch remains otherwise."""
        self._watcher.remove(f"{directory}{group.rstrip('/')}")

    def close(self) -> None:
        self._watcher.close()

    def take(self) -> Sequence[ObservedWrite]:
        """Nothing: it would name no writer."""
        return ()

    async def next_batch(self) -> Sequence[ObservedWrite]:
        """At least one write, possibly an own one: compare the value.

        A polled group is reported with an empty ``file``.
        """
        while True:
            batch: list[ObservedWrite] = []
            for event in await self._watcher.next_batch():
                if event.token is None:
                    batch.append(ObservedWrite("", "", "", UNKNOWN_WRITER, lost=True))
                elif event.rescan or (not event.ended and (self._files is None or event.name in self._files)):
                    batch.append(ObservedWrite(*event.token, event.name, UNKNOWN_WRITER))
            if batch:
                return batch
