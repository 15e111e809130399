"""The archive of a captured node: written for one user alone, and read although another may have made it.

It is written as root, often into a directory that others may write, too: never through a link of another user, and
into an existing directory only if no user but root and this one can change or replace it (`_directory`). It is read
with bounds, and into one directory only (`unpack`).

Source: POSIX.1-2017, pax, "ustar Interchange Format" and "pax Extended Header"; GNU tar, "Basic Tar Format".
"""

import errno
import gzip
import os
import re
import stat
import tarfile
import time
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Final, Protocol, Self, final

from cgroupfs.errors import InputError, errno_name
from cgroupfs.files import REAL
from cgroupfs.knobs import CATALOG
from reconciler.cli.exits import CliError, Exit
from reconciler.runtime import format as fmt

_KUBEPODS: Final = re.compile(r"(?:\A|-)kubepods(?:\.slice)?\Z")
SETTINGS: Final = frozenset(
    name for knob in CATALOG.values() for version in (1, 2) if (name := knob.file(version)) is not None
)
"""The files that bypassd sets."""
PLANNED: Final = SETTINGS | {"memory.current"}
"""Those of them, and of the counters, that a plan reads in pods' groups: into memory, and no file is made of them."""
_COUNTERS: Final = (
    *("cpuacct.usage", "cpu.stat", "cpu.pressure", "cpuset.effective_cpus", "cpuset.effective_mems"),
    *("cpuset.cpus.effective", "cpuset.mems.effective"),
    *("memory.current", "memory.usage_in_bytes", "memory.stat", "memory.numa_stat", "memory.pressure"),
    *("memory.events", "memory.events.local", "memory.failcnt", "memory.oom_control", "memory.use_hierarchy"),
    *("memory.swap.current", "memory.memsw.usage_in_bytes"),
    *("io.stat", "io.pressure", "blkio.throttle.io_serviced", "blkio.throttle.io_service_bytes"),
    *("cgroup.controllers", "cgroup.subtree_control", "cgroup.type", "cgroup.events", "cgroup.freeze"),
    *("freezer.state", "freezer.parent_freezing", "pids.current"),
)
CAPTURED: Final = SETTINGS | frozenset(_COUNTERS)
"""What a capture takes of each pod's groups: of 500 pods 42,000 files, where the kernel has 108,000."""
LARGEST_CONTROL: Final = 64 << 10
"""Bytes that are taken of one control file."""
_MOST_MEMORY: Final = 128 << 20
"""Bytes of an archive's values that are kept in memory; what exceeds it is unpacked like any other file."""


def fits(path: str) -> bool:
    """Whether `unpack` takes a file with such a path."""
    return len(path.encode("utf-8", "surrogateescape")) <= _LONGEST_NAME and path.count("/") < _DEEPEST


def below_kubepods(parts: list[str]) -> bool:
    """Whether a file's path leads through kubepods to a group below it."""
    at = next((index for index, part in enumerate(parts) if _KUBEPODS.search(part)), None)
    return at is not None and len(parts) > at + 2


@final
class ArchivedControls:
    """Control files of an archive, by full path: read from memory, every other file from the file system.

    It is a `FileOps` of a copied node, where nothing is written.
    """

    def __init__(self) -> None:
        self._texts: dict[str, bytes] = {}
        self._bytes = 0

    def has_room(self, path: str, size: int) -> bool:
        """Whether a file of so many bytes can be kept here."""
        return size <= LARGEST_CONTROL and self._bytes + size + len(path) <= _MOST_MEMORY

    def put(self, path: str, data: bytes) -> None:
        self._bytes += len(data) + len(path)
        self._texts[path] = data

    def read(self, directory: str, file: str) -> str:
        data = self._texts.get(f"{directory}/{file}")
        return REAL.read(directory, file) if data is None else data.decode()

    # Of a pod's groups there are only the files that were unpacked.
    inode = staticmethod(REAL.inode)
    groups = staticmethod(REAL.groups)
    files = staticmethod(REAL.files)

    def write(self, directory: str, file: str, text: str) -> None:
        """Errors: `OSError`, always."""
        del text
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), f"{directory}/{file}")


# Writing

_LINKS: Final = 16
"""Symbolic links on the way to a directory, at most."""
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITABLE: Final = stat.S_IWGRP | stat.S_IWOTH
_BLOCK: Final = tarfile.BLOCKSIZE
_LEVEL: Final = 3
"""Of gzip: control files are mostly zeros of padding; level 6 takes twice the time for 5 % less."""
# Bytes of two fields of a header, and the largest size: eleven octal digits.
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
    """Files below a directory that is empty or does not exist yet; only its owner may read them."""

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
            raise  # the same path twice, as of `TarSink`
        except OSError as exc:
            raise CliError(f"{self._path}: {path}: {_why(exc)}", Exit.USAGE) from exc
        finally:
            if directory != self._directory:
                os.close(directory)
        self.files += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._directory)


@final
class TarSink:
    """A ``.tar.gz`` that appears under its name when it is complete."""

    def __init__(self, path: str) -> None:
        self.files = 0
        self._path = path
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
        """One file. Errors: `ValueError` for a path that leads out; `CliError` when it cannot be written."""
        _parts(path)
        if path in self._seen:
            raise FileExistsError(path)
        self._seen.add(path)
        with self._writing():
            self._tar.write(b"".join((_header(path, len(data), int(time.time())), data, bytes(-len(data) % _BLOCK))))
        self.files += 1

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Errors: `CliError`, such as for a full disk."""
        try:
            yield
        except OSError as exc:
            raise CliError(f"{self._path}: {_why(exc)}", Exit.USAGE) from exc

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        complete = False
        try:
            if failed is None:
                with self._writing():
                    # The end of an archive is two blocks of zeros.
                    self._tar.write(bytes(2 * _BLOCK))
                    self._tar.close()
                    self._file.close()
                    os.rename(self._part, self._name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
                complete = True
        finally:
            if not complete:
                for closing in (self._tar, self._file):
                    # What is left in their buffers has no place on a full disk.
                    with suppress(OSError):
                        closing.close()
                os.unlink(self._part, dir_fd=self._directory)
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
            prefix.ljust(167, b"\0"),  # and the rest of the block
        )
    )


def _parts(path: str) -> list[str]:
    parts = path.split("/")
    if not all(parts) or {".", ".."} & set(parts) or "\0" in path:
        raise ValueError(f"{path}: not a path inside the captured node")
    return parts


def _directory(path: str) -> tuple[int, str]:
    """Open a directory part by part, each relative to the one before it; what is missing is made, for us alone.

    The second value is why others can change or replace the directory; empty where they cannot, and for a new one.
    Errors: `OSError`; EPERM for a link of another user.
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
            # Of what was opened: the name may be another's since the stat above.
            status = os.fstat(number)
            # A new directory is this user's, unless another user has replaced it since.
            made = made and status.st_uid == os.geteuid() and not status.st_mode & _WRITABLE
            unsafe = unsafe or _unsafe(status, part, last=not parts)
    except BaseException:
        os.close(number)
        raise
    return number, "" if made else unsafe


def _unsafe(status: os.stat_result, name: str, *, last: bool) -> str:
    """Why others can change or replace it; empty: they cannot."""
    if status.st_uid not in {0, os.geteuid()}:
        return f"{name} is owned by uid {status.st_uid}"
    # In a sticky directory others can replace nothing of this user's, but they can add files.
    if status.st_mode & _WRITABLE and (last or not status.st_mode & stat.S_ISVTX):
        return f"{name} is writable by others"
    return ""


def _why(exc: OSError) -> str:
    return exc.strerror if exc.errno == errno.EPERM and exc.strerror else errno_name(exc.errno)


# Reading

MOST_BYTES: Final = 512 << 20
"""Of all files with their headers, unpacked. A node of 110 pods has some 12 MB."""
MOST_RATIO: Final = 200
"""Unpacked bytes for each packed one, beside `FREE_BYTES`."""
FREE_BYTES: Final = 64 << 20
"""So much may come out of the smallest file."""
MOST_FILES: Final = 200_000
LARGEST_HEADER: Final = 64 << 10
"""Bytes of a header before a member's own: a long name, or pax records."""
_LONGEST_NAME: Final = 1_024
_LONGEST_NUMBER: Final = 20
"""Digits: those of 2^64."""
_HEADERS: Final = 4
"""Such headers before one member: a long name, a long link, pax records."""
_DEEPEST: Final = 40
_PART: Final = 1 << 20
_UNPACKED: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def unpack(path: str, directory: str) -> ArchivedControls:
    """Unpack ``path`` (``.tar`` or ``.tar.gz``) into a new empty directory, for a plan.

    Of pods' groups it unpacks no file: what a plan reads of them is in the result, the rest is only checked.

    Errors: `InputError` for a file that is not such an archive, or exceeds the limits.
    """
    try:
        # O_NONBLOCK: a pipe is refused below, and never waited for.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InputError(path, "not a regular file", "a .tar or .tar.gz archive")
            packed = status.st_size
            # Bounded while it is read: a megabyte of zeros can be a gigabyte.
            most = min(MOST_BYTES, FREE_BYTES + MOST_RATIO * packed)
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            source = _Bounded(gzip.GzipFile(fileobj=file) if zipped else file, path, most)
            unpacked = _Unpacked(source, path, directory)
            # Not by tarfile's ``filter="data"``: before Python 3.11.13 a chain of links leads it out of the directory
            # (CVE-2025-4517).
            for member in _members(source, path):
                unpacked.take(member)
            return unpacked.controls
    except OSError as exc:
        raise InputError(path, exc.strerror or str(exc) or errno_name(exc.errno), "a .tar or .tar.gz archive") from exc
    except (tarfile.TarError, EOFError, zlib.error, ValueError, OverflowError, RecursionError) as exc:
        raise InputError(path, str(exc), "a .tar or .tar.gz archive") from exc


def _members(source: "_Bounded", path: str) -> Iterator[tarfile.TarInfo]:
    """Files and directories with their final names and sizes. The caller reads each content, padding included.

    Errors: `InputError`; `tarfile.HeaderError` for an invalid header.
    """
    name: str | None = None
    size: int | None = None
    before = files = 0
    # In bytes they are bounded, too. A long name has a header of its own before the file's.
    for number in range(2 * MOST_FILES + 1):
        header = source.read(_BLOCK)
        if not header and not number:
            raise InputError(path, "an empty file", "a .tar or .tar.gz archive")
        if len(header) < _BLOCK:
            raise EOFError("the archive is cut off: no block of zeros ends it")
        if not header.strip(b"\0"):
            while source.read(_PART):
                pass  # gzip's checksum is at its end
            return
        member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        if member.size < 0:
            raise InputError(path, f"a size of {member.size}", "the capture of one node")
        if member.type in {tarfile.GNUTYPE_LONGNAME, *_PAX}:
            before += 1
            if before > _HEADERS or member.size > LARGEST_HEADER:
                raise InputError(path, f"a header of {member.size} bytes", f"at most {LARGEST_HEADER}")
            text = source.whole(member.size + -member.size % _BLOCK)[: member.size]
            if member.type == tarfile.GNUTYPE_LONGNAME:
                name = text.partition(b"\0")[0].decode("utf-8", "surrogateescape")
            else:
                records = _pax(text, path)
                # A global header has nothing that counts here: no two files have one name or one size.
                if member.type != tarfile.XGLTYPE:
                    name = records.get("path", name)
                    size = _size(records, path) if "size" in records else size
            continue
        member.name = name if name is not None else member.name
        member.size = size if size is not None else member.size
        name, size, before = None, None, 0
        if not (member.isreg() or (member.isdir() and not member.size)) or member.issparse():
            raise InputError(path, member.name, "regular files and directories only, as `capture` writes them")
        files += 1
        if files > MOST_FILES:
            break
        yield member
    raise InputError(path, f"more than {MOST_FILES} files", "the capture of one node")


_PAX: Final = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)


def _pax(data: bytes, path: str) -> dict[str, str]:
    """The records that count here, name and size, of lines ``<length> <key>=<value>``. Errors: `InputError`.

    Not by tarfile: its patterns take a record of digits its length squared (CVE-2024-6232), and it makes an object of
    each record.
    """
    texts: dict[str, str] = {}
    at = 0
    while at < len(data) and data[at]:
        digits, space, _ = data[at : at + 8].partition(b" ")
        # The shortest record: its own length, a blank, ``=`` and a line end.
        if not (space and digits.isdigit()) or int(digits) < len(digits) + 3 or at + int(digits) > len(data):
            raise InputError(path, "an unreadable pax header", "an archive of `capture` or tar")
        record = data[at + len(digits) + 1 : at + int(digits)]
        at += int(digits)
        key, equals, value = record.partition(b"=")
        if not equals or not value.endswith(b"\n"):
            raise InputError(path, "an unreadable pax header", "an archive of `capture` or tar")
        if key in {b"path", b"size"}:
            texts[key.decode()] = value[:-1].decode("utf-8", "surrogateescape")
        elif key.startswith(b"GNU.sparse"):
            raise InputError(path, "a sparse file", "regular files and directories only, as `capture` writes them")
    return texts


def _size(records: dict[str, str], path: str) -> int:
    text = records["size"]
    if not (text.isascii() and text.isdigit()) or len(text) > _LONGEST_NUMBER:
        raise InputError(path, f"a size of {text[:_LONGEST_NUMBER]!r}", "a whole number of bytes")
    return int(text)


@final
class _Unpacked:
    """Takes the members' contents from the archive, each where it belongs."""

    def __init__(self, source: "_Bounded", path: str, directory: str) -> None:
        self.controls = ArchivedControls()
        self._source = source
        self._path = path
        self._directory = directory
        self._made = {directory}

    def take(self, member: tarfile.TarInfo) -> None:
        """The content of one, padding included. Errors: `InputError`; `OSError`."""
        parts = [part for part in member.name.split("/") if part not in {"", "."}]
        if member.name.startswith("/") or ".." in parts or "\0" in member.name:
            raise InputError(self._path, member.name, "names inside the captured node")
        if not fits(member.name):
            raise InputError(
                self._path, member.name, f"names of at most {_LONGEST_NAME} bytes and {_DEEPEST} directories"
            )
        full = "/".join((self._directory, *parts))
        if member.isdir():
            self._make(full)
            return
        if not parts:
            raise InputError(self._path, member.name, "regular files and directories only, as `capture` writes them")
        if below_kubepods(parts) and self.controls.has_room(full, member.size):
            data = self._source.whole(member.size + -member.size % _BLOCK)[: member.size]
            if parts[-1] in PLANNED:
                self.controls.put(full, data)
                self._make(os.path.dirname(full))
            return
        self._make(os.path.dirname(full))
        left = member.size
        with open(os.open(full, _UNPACKED, 0o600), "wb") as into:
            while left:
                part = self._source.some(min(left, _PART))
                into.write(part)
                left -= len(part)
        self._source.whole(-member.size % _BLOCK)

    def _make(self, directory: str) -> None:
        if directory not in self._made:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            self._made.add(directory)


@final
class _Bounded:
    """What the archive is read from. Errors: `InputError` for more than ``most`` bytes."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile, path: str, most: int) -> None:
        self._file = file
        self._path = path
        self._most = most
        self._left = most

    def read(self, size: int) -> bytes:
        """So many bytes, or those up to the end."""
        parts = bytearray()
        # One byte more than is allowed: it shows that there are more.
        while len(parts) < size and (part := self._file.read(min(size - len(parts), self._left + 1))):
            parts += part
            self._left -= len(part)
            if self._left < 0:
                raise InputError(self._path, f"more than {fmt.size(self._most)} unpacked", "the capture of one node")
        return bytes(parts)

    def some(self, size: int) -> bytes:
        """At least one of so many bytes. Errors: `EOFError`."""
        part = self.read(size)
        if not part:
            raise EOFError("the archive ends within a file")
        return part

    def whole(self, size: int) -> bytes:
        """Exactly so many bytes. Errors: `EOFError`."""
        data = self.read(size)
        if len(data) < size:
            raise EOFError("the archive ends within a file")
        return data
