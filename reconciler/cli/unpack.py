"""Unpacks an untrusted archive of a captured node: regular files of bounded number and size, inside one directory.

The library's own ``filter="data"`` is not relied on: before Python 3.11.13 a chain of links leads it out of the
directory (CVE-2025-4517). `capture` writes no links, so here none is made. Its reading of headers is not used either:
its patterns take a pax header of digits its length squared (CVE-2024-6232), and each record of one becomes an object.
What a packed file may grow to is bounded while it is read, for a megabyte of zeros can be a gigabyte.

Source: POSIX.1-2017, pax, "ustar Interchange Format" and "pax Extended Header"; GNU tar, "Basic Tar Format".
"""

import gzip
import os
import re
import stat
import tarfile
import zlib
from collections.abc import Iterator
from typing import IO, Final, NamedTuple, final

from cgroupfs.errors import InputError, errno_name
from reconciler.cli.controlfiles import PLANNED, ArchivedControls, below_kubepods
from reconciler.runtime import format as fmt

MOST_BYTES: Final = 512 << 20
"""Of all files with their headers, unpacked. A node of 110 pods has some 12 MB."""
MOST_RATIO: Final = 200
FREE_BYTES: Final = 64 << 20
"""So much may come out of the smallest file."""
MOST_FILES: Final = 200_000
LARGEST_HEADER: Final = 64 << 10
"""Bytes of a header before a member's own: a long name, or pax records."""
_LONGEST_NAME: Final = 1_024
_LONGEST_NUMBER: Final = 20
_HEADERS: Final = 4
"""Such headers before one member: a long name, a long link, pax records."""
_DEEPEST: Final = 40
_PART: Final = 1 << 20
_OCTAL: Final = re.compile(rb"([0-7]{1,11})[ \0]+")
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def unpack(path: str, directory: str) -> ArchivedControls:
    """Unpack ``path`` (``.tar`` or ``.tar.gz``) into a new empty directory, for a plan.

    Of pods' groups it unpacks no file: what a plan reads of them is in the result, the rest is only checked.

    Errors: `InputError` for a file other than such an archive, or exceeds the limits.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InputError(path, "not a regular file", "a .tar or .tar.gz archive")
            packed = status.st_size
            most = min(MOST_BYTES, FREE_BYTES + MOST_RATIO * packed)
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            source = _Bounded(gzip.GzipFile(fileobj=file) if zipped else file, path, most)
            unpacked = _Unpacked(source, path, directory)
            for member in _members(source, path):
                unpacked.take(member)
            return unpacked.controls
    except OSError as exc:
        raise InputError(path, exc.strerror or str(exc) or errno_name(exc.errno), "a .tar or .tar.gz archive") from exc
    except (tarfile.TarError, EOFError, zlib.error, ValueError, OverflowError, RecursionError) as exc:
        raise InputError(path, str(exc), "a .tar or .tar.gz archive") from exc


class _Member(NamedTuple):
    """What counts of a header. ``regular`` False: a directory."""

    name: str
    size: int
    regular: bool = True


def _plain(header: bytes) -> _Member | None:
    """A regular file's header as `capture` writes it; None: any other, which the library reads in four times the time.

    Source: POSIX.1-2017, pax, "ustar Interchange Format".
    """
    if header[156:157] != tarfile.REGTYPE or header[257:265] != tarfile.POSIX_MAGIC or len(header) < tarfile.BLOCKSIZE:
        return None
    size, checksum = _OCTAL.fullmatch(header, 124, 136), _OCTAL.fullmatch(header, 148, 156)
    if size is None or checksum is None:
        return None
    # The field itself counts as blanks.
    if sum(header) - sum(header[148:156]) + 8 * ord(" ") != int(checksum[1], 8):
        return None
    name, prefix = header[:100].partition(b"\0")[0], header[345:500].partition(b"\0")[0]
    whole = prefix + b"/" + name if prefix else name
    return _Member(whole.decode("utf-8", "surrogateescape"), int(size[1], 8))


def _members(source: "_Bounded", path: str) -> Iterator[_Member]:
    """The members with their final names and sizes. The caller reads each content, padding included.

    Errors: `InputError`; `tarfile.HeaderError` for an invalid header.
    """
    name: str | None = None
    size: int | None = None
    before = 0
    for number in range(MOST_FILES + 1):
        header = source.read(tarfile.BLOCKSIZE)
        if not header.strip(b"\0"):
            if not number and not header:
                raise InputError(path, "an empty file", "a .tar or .tar.gz archive")
            return
        if name is None and size is None and (plain := _plain(header)) is not None:
            before = 0
            yield plain
            continue
        member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        if member.size < 0:
            raise InputError(path, f"a size of {member.size}", "the capture of one node")
        if member.type in {tarfile.GNUTYPE_LONGNAME, *_PAX}:
            before += 1
            if before > _HEADERS or member.size > LARGEST_HEADER:
                raise InputError(path, f"a header of {member.size} bytes", f"at most {LARGEST_HEADER}")
            text = source.whole(member.size + -member.size % tarfile.BLOCKSIZE)[: member.size]
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
        yield _Member(member.name, member.size, member.isreg())
    raise InputError(path, f"more than {MOST_FILES} files", "the capture of one node")


_PAX: Final = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)


def _pax(data: bytes, path: str) -> dict[str, str]:
    """The records that count here, name and size, of lines ``<length> <key>=<value>``. Errors: `InputError`."""
    texts: dict[str, str] = {}
    at = 0
    while at < len(data) and data[at]:
        digits, space, _ = data[at : at + 8].partition(b" ")
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

    def take(self, member: _Member) -> None:
        """The content of one, padding included. Errors: `InputError`; `OSError`."""
        parts = [part for part in member.name.split("/") if part not in {"", "."}]
        if member.name.startswith("/") or ".." in parts or "\0" in member.name:
            raise InputError(self._path, member.name, "names inside the captured node")
        if len(member.name) > _LONGEST_NAME or len(parts) > _DEEPEST:
            raise InputError(
                self._path, member.name, f"names of at most {_LONGEST_NAME} characters and {_DEEPEST} directories"
            )
        full = "/".join((self._directory, *parts))
        if not member.regular:
            self._make(full)
            return
        if not parts:
            raise InputError(self._path, member.name, "regular files and directories only, as `capture` writes them")
        if below_kubepods(parts) and self.controls.has_room(full, member.size):
            data = self._source.whole(member.size + -member.size % tarfile.BLOCKSIZE)[: member.size]
            if parts[-1] in PLANNED:
                self.controls.put(full, data)
                self._make(os.path.dirname(full))
            return
        self._make(os.path.dirname(full))
        left = member.size
        with open(os.open(full, _NEW, 0o600), "wb") as into:
            while left:
                part = self._source.some(min(left, _PART))
                into.write(part)
                left -= len(part)
        self._source.whole(-member.size % tarfile.BLOCKSIZE)

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
