"""Files that a capture takes from a node, and which parts: the list is explicit, so that no secret file is ever read.

Every path is the node's own below the capture, so that the capture works wherever a root directory can be named.

A capture is written as root, often into a directory that others may write, too. So every name on the way is opened
relative to the directory before it and never through a link of another user; an existing directory is used only if no
user but root and this one can change or replace it.
"""

import errno
import glob
import gzip
import os
import stat
import tarfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Final, Protocol, Self, final

from cgroupfs.errors import errno_name
from reconciler.cli import masks
from reconciler.cli.controlfiles import CAPTURED
from reconciler.cli.controlfiles import LARGEST as LARGEST_CONTROL
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.nodeview import InspectedNode
from reconciler.runtime.safe_files import FileRule, UntrustedFileError, check_directory, read_file
from reconciler.sources.runtime_files import announce_reading
from reconciler.sources.runtime_roots import CONTAINERD_CONFIG, CRIO_CONFIG, CRIO_DROP_INS, CRIO_STORAGE
from state.allocated import ACTUATED_PODS, ALLOCATED_PODS
from state.kubelet import CPU_STATE, DEVICES, MEMORY_STATE, POD_STATUS

_LINKS: Final = 16
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITABLE: Final = stat.S_IWGRP | stat.S_IWOTH
_BLOCK: Final = tarfile.BLOCKSIZE
_LEVEL: Final = 3
"""Of gzip: control files are mostly zeros of padding; level 6 takes twice the time for 5 % less."""
_NAME: Final = 100
_PREFIX: Final = 155
_LARGEST: Final = 0o77777777777
_MODE: Final = b"0000600\x000000000\x000000000\x00"
"""Mode, owner and group."""
_MAGIC: Final = tarfile.POSIX_MAGIC + bytes(64) + b"0000000\x000000000\x00"
"""Magic and version, no names of owner and group, no device."""
_FIXED: Final = sum(_MODE) + 8 * ord(" ") + ord("0") + sum(_MAGIC)
"""Sum of the bytes that are equal in all headers; the checksum's own field counts as blanks."""


class ArchiveWriter(Protocol):
    """Takes files by their path on the node, without the leading slash."""

    files: int

    def put(self, path: str, data: bytes) -> None:
        """One file."""


@final
class DirectorySink:
    """Files below a directory that is empty or not there yet; only its owner may read them."""

    def __init__(self, path: str) -> None:
        self.files = 0
        self._path = path
        try:
            self._directory, unsafe = _directory(path)
            full = bool(os.listdir(self._directory))
        except OSError as exc:
            raise CliError(f"{path}: {_why(exc)}", Exit.USAGE) from exc
        if full or unsafe:
            os.close(self._directory)
            why = "is not empty" if full else f"{unsafe}; name a directory that does not exist yet"
            raise CliError(f"{path}: {why}", Exit.USAGE)

    def put(self, path: str, data: bytes) -> None:
        """One file. Errors: `ValueError` for a path that leads out; `CliError` when it cannot be written."""
        *above, name = _parts(path)
        directory = self._directory
        try:
            for part in above:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=directory)
                below = os.open(part, _DIRECTORY, dir_fd=directory)
                if directory != self._directory:
                    os.close(directory)
                directory = below
            with open(os.open(name, _NEW, 0o600, dir_fd=directory), "wb") as file:
                file.write(data)
        except FileExistsError:
            raise
        except OSError as exc:
            raise CliError(f"{self._path}: {path}: {_why(exc)}", Exit.USAGE) from exc
        finally:
            if directory != self._directory:
                os.close(directory)
        self.files += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._directory)


@final
class TarSink:
    """A ``.tar.gz`` that appears under its name when it is complete."""

    def __init__(self, path: str) -> None:
        self.files = 0
        above, self._name = os.path.split(os.path.abspath(path))
        self._part = f"{self._name}.part"
        self._seen: set[str] = set()
        try:
            # One descriptor: the name of the directory may be another's a moment later.
            self._directory = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # Another user may have put a link of this name into a world-writable directory.
                with suppress(FileNotFoundError):
                    os.unlink(self._part, dir_fd=self._directory)
                self._file = open(os.open(self._part, _NEW, 0o600, dir_fd=self._directory), "wb")  # noqa: SIM115
            except BaseException:
                os.close(self._directory)
                raise
        except OSError as exc:
            raise CliError(f"{path}: {errno_name(exc.errno)}", Exit.USAGE) from exc
        self._tar = gzip.GzipFile(filename="", fileobj=self._file, mode="wb", compresslevel=_LEVEL)

    def put(self, path: str, data: bytes) -> None:
        """One file. Errors: `ValueError` for a path that leads out."""
        _parts(path)
        if path in self._seen:
            raise FileExistsError(path)
        self._seen.add(path)
        self._tar.write(b"".join((_header(path, len(data), int(time.time())), data, bytes(-len(data) % _BLOCK))))
        self.files += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if exc is None:
                # The end of an archive is two blocks of zeros.
                self._tar.write(bytes(2 * _BLOCK))
            self._tar.close()
            self._file.close()
            if exc is None:
                os.rename(self._part, self._name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
            else:
                os.unlink(self._part, dir_fd=self._directory)
        finally:
            os.close(self._directory)


def open_sink(target: str) -> DirectorySink | TarSink:
    """An archive for a name that ends in .tar.gz or .tgz, else a directory. Errors: `CliError`."""
    if target.endswith((".tar.gz", ".tgz")):
        if os.path.lexists(target):
            raise CliError(f"{target}: already exists", Exit.USAGE)
        return TarSink(target)
    return DirectorySink(target)


def _header(path: str, size: int, mtime: int) -> bytes:
    """A regular file's header. Written here, as the library takes longer for a header than the kernel for the file.

    Source: POSIX.1-2017, pax, "ustar Interchange Format".
    """
    name, prefix = path.encode("utf-8", "surrogateescape"), b""
    if len(name) > _NAME:
        cut = name.rfind(b"/", 0, _PREFIX + 1)
        prefix, name = name[: max(0, cut)], name[cut + 1 :]
    if len(name) > _NAME or not path.isascii() or size > _LARGEST:
        info = tarfile.TarInfo(path)
        info.size, info.mode, info.mtime = size, 0o600, mtime
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    numbers = b"%011o\x00%011o\x00" % (size, mtime)
    checksum = _FIXED + sum(name) + sum(prefix) + sum(numbers)
    return b"".join(
        (
            name.ljust(_NAME, b"\0"),
            _MODE,
            numbers,
            b"%06o\x00 0" % checksum,
            bytes(100),
            _MAGIC,
            prefix.ljust(167, b"\0"),
        )
    )


def _parts(path: str) -> list[str]:
    parts = path.split("/")
    if not all(parts) or {".", ".."} & set(parts) or "\0" in path:
        raise ValueError(f"{path}: not a path inside the captured node")
    return parts


def _directory(path: str) -> tuple[int, str]:
    """Open a directory part by part; what is missing is made, for us alone.

    The second value: why others can change the directory, or what is found under its name; empty for a new one, and
    where they cannot. Errors: `OSError`; EPERM for a link of another user.
    Source: path_resolution(7), inode(7) (the sticky bit).
    """
    number = os.open("/", _DIRECTORY)
    links, made, unsafe = _LINKS, False, ""
    parts = deque(part for part in os.path.abspath(path).split("/") if part)
    try:
        while parts:
            part = parts.popleft()
            made = False
            try:
                status = os.stat(part, dir_fd=number, follow_symlinks=False)
            except FileNotFoundError:
                os.mkdir(part, 0o700, dir_fd=number)
                made = True
            else:
                if stat.S_ISLNK(status.st_mode):
                    links -= 1
                    if links < 0 or status.st_uid not in {0, os.geteuid()}:
                        raise PermissionError(errno.EPERM, f"{part} is a symbolic link of uid {status.st_uid}")
                    target = os.readlink(part, dir_fd=number)
                    parts.extendleft(reversed([text for text in target.split("/") if text not in {"", "."}]))
                    if target.startswith("/"):
                        parts.appendleft("/")
                    continue
            below = os.open(part, _DIRECTORY, dir_fd=number)
            os.close(number)
            number = below
            status = os.fstat(number)
            # A new directory is this user's, unless another user has replaced it since.
            made = made and status.st_uid == os.geteuid() and not status.st_mode & _WRITABLE
            unsafe = unsafe or _unsafe(status, part, last=not parts)
    except BaseException:
        os.close(number)
        raise
    return number, "" if made else unsafe


def _unsafe(status: os.stat_result, name: str, *, last: bool) -> str:
    """Why others can change it. In a sticky directory they can replace nothing of this user's, but add to it."""
    if status.st_uid not in {0, os.geteuid()}:
        return f"{name} is owned by uid {status.st_uid}"
    if status.st_mode & _WRITABLE and (last or not status.st_mode & stat.S_ISVTX):
        return f"{name} is writable by others"
    return ""


def _why(exc: OSError) -> str:
    return exc.strerror if exc.errno == errno.EPERM and exc.strerror else errno_name(exc.errno)


_GATHER_LARGEST: Final = 4 << 20
_SYSTEM: Final = (
    *("proc/self/mountinfo", "proc/self/status", "proc/stat", "proc/meminfo", "proc/filesystems", "proc/cpuinfo"),
    *("proc/sys/kernel/osrelease", "proc/sys/kernel/random/boot_id", "proc/sys/kernel/perf_event_paranoid"),
    *("proc/pressure/cpu", "proc/pressure/memory", "proc/pressure/io", "etc/os-release"),
    *(f"proc/sys/fs/inotify/{name}" for name in ("max_user_watches", "max_user_instances", "max_queued_events")),
)
_TOPOLOGY: Final = (
    *(f"sys/devices/system/cpu/{name}" for name in ("online", "present", "possible", "isolated")),
    "sys/devices/system/cpu/cpu[0-9]*/online",
    "sys/devices/system/cpu/cpu[0-9]*/cpu_capacity",
    "sys/devices/system/cpu/cpu[0-9]*/topology/*",
    "sys/devices/system/cpu/cpu[0-9]*/cache/index*/*",
    "sys/devices/system/node/node[0-9]*/cpulist",
    "sys/devices/system/node/node[0-9]*/distance",
    "sys/devices/system/node/node[0-9]*/meminfo",
    "sys/devices/system/node/node[0-9]*/hugepages/*/nr_hugepages",
    "sys/devices/cpu_*/cpus",
    "sys/bus/event_source/devices/cpu*/type",
    "sys/fs/resctrl/schemata",
    "sys/fs/resctrl/info/*/*",
)
_ABOVE: Final = ("cpuset.*", "cpu.*", "cpuacct.usage", "memory.limit_in_bytes", "memory.max", "cgroup.controllers")
# Not needed, and their content is of this moment only.
_SKIPPED: Final = frozenset({"tasks", "cgroup.procs", "cgroup.threads", "cgroup.event_control", "memory.kmem.slabinfo"})

Masked = Callable[[str], str]


@final
class CaptureCollector:
    """Takes the files. ``problems`` is what was there and could not be had."""

    def __init__(self, node: InspectedNode, sink: ArchiveWriter) -> None:
        self.problems: list[str] = []
        self._node = node
        self._root = node.root
        self._sink = sink
        self._taken: set[str] = set()

    def everything(self) -> None:
        """All groups of files."""
        self.all(_SYSTEM, masks.mask_text)
        self.all(self._globbed(_TOPOLOGY))
        self.cgroups()
        self.kubelet()
        self.runtime()
        self.own()

    def cgroups(self) -> None:
        """The kubepods tree in every hierarchy, and the groups above it: of kubepods itself every file.

        Of the groups below it the files that bypassd reads or writes: those alone are 42,000 at 500 pods.
        """
        node = self._node
        if node.hierarchy is None or node.layout is None:
            return
        for mount in node.hierarchy.mounts():
            for group in _above(node.layout.kubepods):
                names = [f"{self._relative(mount.path(group))}/{name}" for name in _ABOVE]
                self.all(self._globbed(names), largest=LARGEST_CONTROL)
            self._tree(mount.path(node.layout.kubepods))

    def kubelet(self) -> None:
        """The kubelet's configuration and allocations; of its flags only those that the agent reads."""
        node, kubelet_config = self._node, self._node.kubelet
        if kubelet_config.pid is not None:
            flags = [f"--{name}={masks.mask_text(value)}" for name, value in kubelet_config.flags.items()]
            words = ["kubelet", *flags]
            if kubelet_config.section:
                # Only this program's configuration has a section; its flags are in the file too.
                words = [str(kubelet_config.inside), f"--config={kubelet_config.config_path}"]
            self.put(f"proc/{kubelet_config.pid}/cmdline", "\0".join([*words, ""]))
        if kubelet_config.config_path is not None:
            self.one(kubelet_config.config_path, masks.mask_config_text, rule=kubelet_config.config_rule)
        if directory := kubelet_config.flags.get("config-dir"):
            self._named(directory, "*.conf", FileRule.ROOT, masks.mask_config_text)
        for name in (CPU_STATE, MEMORY_STATE):
            self.one(f"{kubelet_config.root_dir}/{name}")
        for name in (POD_STATUS, ALLOCATED_PODS, ACTUATED_PODS):
            self.one(f"{kubelet_config.root_dir}/{name}", masks.mask_allocations)
        self.one(DEVICES, masks.mask_devices)
        if node.config.static_manifests:
            self._named(node.config.static_manifests, "[!.]*", FileRule.OPERATOR, masks.mask_yaml_text)
        elif kubelet_config.static_pod_path:
            self._named(kubelet_config.static_pod_path, "[!.]*", FileRule.ROOT, masks.mask_yaml_text)

    def runtime(self) -> None:
        """Its configuration, and of each container the bundle and the state."""
        self.one(CONTAINERD_CONFIG, masks.mask_toml_text, rule=FileRule.ROOT)
        for path in (CRIO_CONFIG, CRIO_STORAGE):
            self.one(path, masks.mask_toml_text, rule=FileRule.ROOT)
        self.all(self._globbed(["etc/containerd/conf.d/*.toml", f"{CRIO_DROP_INS[1:]}/*"]), masks.mask_toml_text)
        for cid in self._node.containers:
            bundle, state = self._node.runtime.bundle(cid), self._node.runtime.state_file(cid)
            if bundle is not None:
                self.one(f"{self._relative(bundle)}/config.json", masks.mask_bundle_text)
            if state is not None:
                announce_reading(state)
                self.one(self._relative(state), masks.mask_bundle_text)

    def own(self) -> None:
        """The agent's own configuration and the operator's file of classes."""
        config = [os.path.join(self._root, "etc/bypassd/config.yaml"), *self._node.config_files]
        for path in config:
            self.one(self._relative(path), masks.mask_own_config)
        if self._node.config.operator_file is not None:
            self.one(self._node.config.operator_file, masks.mask_config_text)

    # Taking

    def all(
        self, paths: Iterable[str], masked: Masked | None = None, *, largest: int = _GATHER_LARGEST, quiet: bool = False
    ) -> None:
        """Each of these files."""
        for path in paths:
            self.one(path, masked, largest=largest, quiet=quiet)

    def one(
        self,
        path: str,
        masked: Masked | None = None,
        *,
        largest: int = _GATHER_LARGEST,
        quiet: bool = False,
        rule: FileRule | None = None,
    ) -> None:
        """One file, if it exists. ``quiet``: many of these cannot be read, and the list of them is not needed.

        ``rule``: the origin of the path; None: it is from the list in this module.
        """
        path = path.lstrip("/")
        if path in self._taken:
            return
        try:
            if rule is None:
                text = _read(os.path.join(self._root, path), largest)
            else:
                content = read_file(f"/{path}", rule, root=self._root, largest=largest)
                text = content.decode("utf-8", "surrogateescape")
        except UntrustedFileError as exc:
            self.problems.append(f"/{path}: {exc.strerror}")
            return
        except FileNotFoundError:
            return
        except OSError as exc:
            if not quiet:
                self.problems.append(f"/{path}: {errno_name(exc.errno)}")
            return
        try:
            self.put(path, masked(text) if masked is not None else text)
        except ValueError as exc:
            self.problems.append(f"/{path}: not captured, cannot be masked: {exc}")

    def _named(self, directory: str, pattern: str, rule: FileRule, masked: Masked) -> None:
        """The files of a directory that the operator or the kubelet named."""
        try:
            check_directory(directory, rule, root=self._root)
        except OSError as exc:
            if not isinstance(exc, FileNotFoundError):
                self.problems.append(f"{directory}: {exc.strerror or exc}")
            return
        for path in self._globbed([f"{glob.escape(directory.strip('/'))}/{pattern}"]):
            self.one(path, masked, rule=rule)

    def put(self, path: str, text: str) -> None:
        """One file with this content."""
        if path not in self._taken:
            self._taken.add(path)
            self._sink.put(path, text.encode("utf-8", "surrogateescape"))

    def _relative(self, path: str) -> str:
        return os.path.relpath(path, self._root)

    def _globbed(self, patterns: Iterable[str]) -> Iterator[str]:
        for pattern in patterns:
            for path in sorted(glob.glob(os.path.join(glob.escape(self._root), pattern))):
                if os.path.isfile(path):
                    yield self._relative(path)

    def _tree(self, directory: str) -> None:
        """A directory's control files and those of the groups below it. What cannot be read is left out silently."""
        for above, _, names in os.walk(directory):
            path = self._relative(above)
            for name in sorted(names):
                if name in _SKIPPED or (above != directory and name not in CAPTURED) or f"{path}/{name}" in self._taken:
                    continue
                try:
                    data = _bytes(f"{above}/{name}", LARGEST_CONTROL)
                except OSError:
                    continue
                self._taken.add(f"{path}/{name}")
                self._sink.put(f"{path}/{name}", data)


def _above(kubepods: str) -> Iterator[str]:
    path = kubepods
    while path != "/":
        path = path.rpartition("/")[0] or "/"
        yield path


def _read(path: str, largest: int) -> str:
    return _bytes(path, largest).decode("utf-8", "surrogateescape")


def _bytes(path: str, largest: int) -> bytes:
    """A regular file, or the first part of a long one. Never waits on a pipe or a device."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise FileNotFoundError(path)
        parts = bytearray()
        while len(parts) < largest and (part := os.read(number, min(largest - len(parts), 1 << 16))):
            parts += part
    finally:
        os.close(number)
    return bytes(parts)
