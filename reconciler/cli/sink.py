"""Destination of a capture: a directory, or a compressed archive. Both contain a node's files under their own paths.

A capture is written as root, often into a directory that others may write, too. So every name on the way is opened
relative to the directory before it and never through a link of another user; an existing directory is used only if no
user but root and this one can change or replace it.
"""

import errno
import gzip
import os
import stat
import tarfile
import time
from collections import deque
from contextlib import suppress
from types import TracebackType
from typing import Final, Protocol, Self, final

from cgroupfs.errors import errno_name
from reconciler.cli.exits import CliError, Exit

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
