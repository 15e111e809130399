"""Files of checksummed frames: bounded reading, resynchronisation after damage, replacement by rename.

A frame is a mark, the body's length, its CRC-32, and the body. A reader takes every whole frame, also after a damaged
one, and reports whether anything was left out.

Imports nothing heavy: the command line reads with this.
"""

import errno
import os
import stat
import zlib
from contextlib import suppress
from typing import Final

from cgroupfs.bounded import read_open
from cgroupfs.errors import errno_name

MARK: Final = b"\xb1yp\xd1"
_HEAD: Final = len(MARK) + 8
_IN_VAIN: Final = 8
"""Bodies without a matching checksum are read for at most so many times the length of all data."""
LARGEST: Final = 256 << 20
"""Bytes. A larger file is not bypassd's: 2,500 files take 1 MiB."""


def frame(body: bytes) -> bytes:
    return b"".join((MARK, len(body).to_bytes(4, "big"), zlib.crc32(body).to_bytes(4, "big"), body))


def frames(data: bytes) -> tuple[list[bytes], bool]:
    """The bodies of all whole frames, in order; False when there are bytes that belong to none."""
    chunks: list[bytes] = []
    whole, at, left = True, 0, _IN_VAIN * len(data)
    while at < len(data) and left >= 0:
        end = at + _HEAD + int.from_bytes(data[at + 4 : at + 8], "big")
        head = data[at : at + _HEAD]
        if head[:4] == MARK and len(data) >= end:
            body = data[at + _HEAD : end]
            if zlib.crc32(body).to_bytes(4, "big") == head[8:]:
                chunks.append(body)
                at = end
                continue
            # In a forged file marks with any lengths overlap, so each body is hashed anew: bounded.
            left -= len(body)
        # Damage, or a frame that was not written completely: the next mark may begin a whole one.
        whole = False
        at = data.find(MARK, at + 1)
        if at < 0:
            break
    return chunks, whole


def read(path: str) -> bytes:
    """Content of a regular file that this user owns, of at most `LARGEST` bytes. Errors: OSError."""
    # O_NONBLOCK: opening a pipe would wait for a writer.
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(number, path)
        return read_open(number, path, LARGEST)
    finally:
        os.close(number)


def open_to_append(path: str) -> int:
    """Open (or make) a file of this user to append to it. Errors: OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    number = os.open(path, flags, 0o600)
    try:
        _check(number, path)
    except OSError:
        os.close(number)
        raise
    return number


def append(number: int, data: bytes) -> None:
    """Append whole. Errors: OSError; a part of it may be there then, which no reader takes."""
    if os.write(number, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def replace(path: str, data: bytes, *, sync: bool) -> int:
    """Put new content in place by a rename, and return the file opened to append. Errors: OSError; nothing changed.

    ``sync``: the content is on disk before the rename, so that a power cut leaves the old file or the new one.
    """
    fresh = f"{path}.new"
    number = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        append(number, data)
        if sync:
            os.fsync(number)
        os.rename(fresh, path)
    except OSError:
        os.close(number)
        raise
    return number


class FrameFile:
    """A file of frames in use. Its methods do not raise: ``problem`` has the failure.

    ``failing``: what cannot be done after a failure, for people.
    """

    def __init__(self, path: str, failing: str) -> None:
        self.path = path
        self.problem: str | None = None
        self._failing = failing
        self._number = -1
        self._size = 0

    def close(self) -> None:
        number, self._number = self._number, -1
        if number >= 0:
            with suppress(OSError):
                os.close(number)

    def _replace(self, data: bytes, *, sync: bool) -> bool:
        """Put new content in place; False: it failed."""
        try:
            number = replace(self.path, data, sync=sync)
        except OSError as exc:
            self._failed(exc)
            return False
        self.close()
        self._number, self._size, self.problem = number, len(data), None
        return True

    def _failed(self, exc: OSError) -> None:
        self.close()
        self.problem = f"{self.path}: {self._failing}: {errno_name(exc.errno)}"


def _check(number: int, path: str) -> None:
    """No other user may be able to write it. Errors: OSError."""
    status = os.fstat(number)
    if not stat.S_ISREG(status.st_mode) or status.st_uid not in {0, os.geteuid()}:
        raise OSError(errno.EPERM, "not a regular file owned by this user", path)
