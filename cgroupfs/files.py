"""Opening, reading and writing single kernel files, inline: no threads, no buffering, no Python file objects.

`FileOps` is the agent's only access to control files, so that the same code runs on the real kernel (`REAL`) and on the
strict fake one of the tests. A read costs 2-3 µs this way, ``open().read()`` 9.
"""

import errno
import os
from itertools import islice
from typing import Final, Protocol

from cgroupfs.errors import translated

_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC
_WRITE_FLAGS: Final = os.O_WRONLY | os.O_CLOEXEC
_CHUNK: Final = 65_536
_HARMLESS: Final = 0x2 | 0x4 | 0x8
"""``MS_NOSUID``, ``MS_NODEV``, ``MS_NOEXEC``. Source: mount(2)."""
# The kernel cuts long files at record boundaries near its buffer of one page; a shorter text is complete.
_CERTAINLY_WHOLE: Final = 1_024


class ReadOps(Protocol):
    """Reads kernel files, by absolute paths. All raise plain `OSError`, as the kernel answers."""

    def read(self, directory: str, file: str) -> str: ...

    def groups(self, directory: str, most: int | None = None) -> list[str]:
        """Names of the directories inside, in no order; at most so many."""


class FileOps(ReadOps, Protocol):
    """What the agent does to control files."""

    def inode(self, directory: str) -> int: ...

    def write(self, directory: str, file: str, text: str) -> None:
        """One write of the whole value."""

    def files(self, directory: str) -> list[str]:
        """Names of the files inside, in no order."""


def write_now(files: FileOps, directory: str, file: str, text: str) -> int:
    """Write one control file; 0 or the errno. Nothing is read back.

    The fast path uses this between the runtime's event and the exec of the container's program.
    """
    try:
        files.write(directory, file, text)
    except OSError as exc:
        return exc.errno or errno.EIO
    return 0


def _read_all(number: int) -> str:
    data = os.read(number, _CHUNK)
    if len(data) > _CERTAINLY_WHOLE:
        parts = [data]
        while more := os.read(number, _CHUNK):
            parts.append(more)
        data = b"".join(parts)
    return data.decode("utf-8", "surrogateescape")


class RealFiles:
    """`FileOps` of the running kernel."""

    def inode(self, directory: str) -> int:
        return os.stat(directory).st_ino

    def read(self, directory: str, file: str) -> str:
        # The most frequent call of an idle daemon.
        number = os.open(f"{directory}/{file}", _READ_FLAGS)
        try:
            return _read_all(number)
        finally:
            os.close(number)

    def write(self, directory: str, file: str, text: str) -> None:
        data = text.encode()
        number = os.open(f"{directory}/{file}", _WRITE_FLAGS)
        try:
            # A control file takes a value whole or not at all; anything else is not a control file.
            if os.write(number, data) != len(data):
                raise OSError(errno.EIO, "short write", file)
        finally:
            os.close(number)

    def groups(self, directory: str, most: int | None = None) -> list[str]:
        # Two links are its name and its own dot: nothing inside. The stat costs a tenth of a listing.
        if os.stat(directory).st_nlink == 2:
            return []
        with os.scandir(directory) as entries:
            return list(islice((entry.name for entry in entries if entry.is_dir(follow_symlinks=False)), most))

    def files(self, directory: str) -> list[str]:
        with os.scandir(directory) as entries:
            return [entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]


REAL: Final[FileOps] = RealFiles()
"""The running kernel."""


def read_text(path: str) -> str:
    """The whole of a small kernel file. Errors: `CgroupError`."""
    with translated(path, "read"):
        number = os.open(path, _READ_FLAGS)
        try:
            return _read_all(number)
        finally:
            os.close(number)


def mount(source: str, place: str, kind: str, options: str = "") -> int:
    """Mount one of the kernel's file systems, without programs or devices in it; 0 or the errno."""
    import ctypes  # where it is needed: most nodes never mount anything

    libc = ctypes.CDLL(None, use_errno=True)
    flags, data = ctypes.c_ulong(_HARMLESS), options.encode() or None
    done = libc.mount(source.encode(), place.encode(), kind.encode(), flags, data)
    return ctypes.get_errno() if done != 0 else 0


def unmount(place: str, flags: int = 0) -> int:
    """0 or the errno."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if libc.umount2(place.encode(), flags) != 0 else 0
