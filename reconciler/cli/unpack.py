"""Unpacks a captured node's archive, whoever made it: regular files of bounded number and size, inside one directory.

The library's own ``filter="data"`` is not relied on: before Python 3.11.13 a chain of links leads it out of the
directory (CVE-2025-4517). `capture` writes no links, so here none is made. What a packed file may grow to is bounded
while it is read, for a megabyte of zeros can be a gigabyte, also within a header.
"""

import gzip
import io
import os
import stat
import tarfile
import zlib
from typing import IO, Final, final

from cgroupfs.errors import InputError, errno_name

MOST_BYTES: Final = 512 << 20
"""Of all files with their headers, unpacked. A node of 110 pods has some 12 MB."""
MOST_RATIO: Final = 200
FREE_BYTES: Final = 64 << 20
"""So much may come out of the smallest file."""
MOST_FILES: Final = 200_000
_LONGEST_NAME: Final = 1_024
_DEEPEST: Final = 40
_PART: Final = 1 << 20
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def unpack(path: str, directory: str) -> None:
    """Unpack ``path`` (``.tar`` or ``.tar.gz``) into an empty directory of ours.

    Errors: `InputError` for what is no such archive, or is more than one may hold.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise InputError(path, "not a regular file", "a .tar or .tar.gz archive")
            packed = found.st_size
            most = min(MOST_BYTES, FREE_BYTES + MOST_RATIO * packed)
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            source = _Bounded(gzip.GzipFile(fileobj=file) if zipped else file, path, most)
            # As a stream: nothing is sought, so all that is unpacked is counted.
            with tarfile.open(fileobj=source, mode="r|") as archive:
                for number, member in enumerate(archive):
                    if number >= MOST_FILES:
                        raise InputError(path, f"more than {MOST_FILES} files", "the capture of one node")
                    _member(archive, member, path, directory)
    except OSError as exc:
        raise InputError(path, exc.strerror or str(exc) or errno_name(exc.errno), "a .tar or .tar.gz archive") from exc
    except (tarfile.TarError, EOFError, zlib.error, ValueError, OverflowError, RecursionError) as exc:
        raise InputError(path, str(exc), "a .tar or .tar.gz archive") from exc


def _member(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, directory: str) -> None:
    parts = [part for part in member.name.split("/") if part not in {"", "."}]
    if member.name.startswith("/") or ".." in parts or "\0" in member.name:
        raise InputError(path, member.name, "names inside the captured node")
    if len(member.name) > _LONGEST_NAME or len(parts) > _DEEPEST:
        raise InputError(path, member.name, f"names of at most {_LONGEST_NAME} characters and {_DEEPEST} directories")
    full = os.path.join(directory, *parts)
    if member.isdir():
        os.makedirs(full, mode=0o700, exist_ok=True)
        return
    if not member.isreg() or member.issparse() or not parts:
        raise InputError(path, member.name, "regular files and directories only, as `capture` writes them")
    os.makedirs(os.path.dirname(full), mode=0o700, exist_ok=True)
    content = archive.extractfile(member)
    assert content is not None, "regular files have one"
    with open(os.open(full, _NEW, 0o600), "wb") as into:
        while part := content.read(_PART):
            into.write(part)


@final
class _Bounded(io.RawIOBase):
    """What tarfile reads from. Errors: `InputError` when more than ``most`` bytes come out."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile, path: str, most: int) -> None:
        super().__init__()
        self._file = file
        self._path = path
        self._most = most
        self._left = most

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(min(size, self._left + 1) if size >= 0 else self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise InputError(self._path, f"more than {self._most >> 20} MiB unpacked", "the capture of one node")
        return data
