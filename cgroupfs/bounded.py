"""Common parts of readers of untrusted data: files of bounded size, numbers of bounded length, one error type.

A control file is the kernel's; everything else is untrusted: a pipe where a file is expected, 100,000 digits where a
number is, a thousand arrays inside each other. Python fails on these with errors of several types (RecursionError,
ValueError from ``int``, MemoryError) or not at all (the open of a pipe waits for a writer).
"""

import errno
import os
import stat
from collections.abc import Callable
from typing import Any, BinaryIO, Final, TypeVar

MOST_DIGITS: Final = 20
"""Of a kernel's number: 2^64 has as many."""
_LONGEST_NUMBER: Final = 64
"""Characters of a number with its sign and the blanks around it."""
_PART: Final = 1 << 20
_NULL: Final = os.makedev(1, 3)
"""``/dev/null``. Source: the kernel's list of devices, admin-guide/devices."""
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NESTED: Final = frozenset({dict, list})
_S = TypeVar("_S")
_T = TypeVar("_T")


def read_file(path: str, most: int, *, pipes: bool = False, links: bool = True) -> bytes:
    """The whole of a regular file. ``pipes``: also of a pipe or ``/dev/null``, for a file that a person names.

    ``links``: the file may be a symbolic link; no, where others can write in its directory.

    Units: ``most`` in bytes. Errors: `OSError`; EFBIG for a longer file, EINVAL for a device, a socket or a pipe (which
    is neither waited for nor read), ELOOP for a link that may not be.
    """
    # Without O_NONBLOCK the open of a pipe blocks until it has a writer.
    number = os.open(path, _READ if links else _READ | os.O_NOFOLLOW)
    try:
        status = os.fstat(number)
        kind = status.st_mode
        if pipes and stat.S_ISFIFO(kind):
            os.set_blocking(number, True)
        elif stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        elif not stat.S_ISREG(kind) and not (pipes and status.st_rdev == _NULL):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return read_open(number, path, most)
    finally:
        os.close(number)


def open_file(path: str) -> BinaryIO:
    """A regular file, to be read part by part. Errors: `OSError`; EINVAL for a device, a socket or a pipe."""
    number = os.open(path, _READ)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return open(number, "rb")


def read_open(number: int, path: str, most: int) -> bytes:
    """The rest of an open file. ``path``: for the error.

    Units: ``most`` in bytes. Errors: `OSError`; EFBIG for a longer file.
    """
    data = bytearray()
    while part := os.read(number, min(_PART, most + 1 - len(data))):
        data += part
        if len(data) > most:
            raise OSError(errno.EFBIG, f"is longer than {most} bytes", path)
    return bytes(data)


def whole(text: str) -> int:
    """A whole number in plain digits, signed or not, of bounded length; blanks around it. Errors: `ValueError`."""
    if len(text) > _LONGEST_NUMBER:
        raise ValueError(f"{text[:20]!r}... is not a number: {len(text)} characters")
    # Plain `int` takes underscores, and the digits of every script.
    if "_" in text or not text.isascii():
        raise ValueError(f"{text!r} is not a number")
    return int(text)


def digits(text: str) -> int | None:
    """A whole number from 0 up in plain digits, of at most `MOST_DIGITS`; None for anything else."""
    return int(text) if len(text) <= MOST_DIGITS and text.isascii() and text.isdecimal() else None


def decoded(decode: Callable[[_S], _T], data: _S, *, deepest: int | None = None) -> _T:
    """The result of a decoder (of msgspec, json, msgpack or tomllib) on untrusted data.

    ``deepest``: how many lists and maps may be inside each other; give it where the value is walked without a type.
    Errors: `ValueError`, which msgspec's own errors are: no other type is raised.
    """
    try:
        result = decode(data)
    except (RecursionError, MemoryError, OverflowError) as exc:
        raise ValueError("nested too deeply, or too large") from exc
    if deepest is not None and not is_shallow(result, deepest):
        raise ValueError(f"nested more than {deepest} levels deep")
    return result


def is_shallow(value: object, deepest: int) -> bool:
    """Whether lists and maps are inside each other at most so deep: a deeper value breaks later recursion.

    ``value``: as a decoder makes it, whose lists and maps are no subclasses.
    """
    # By level and not by recursion, which is what it guards against.
    level: list[Any] = [value] if type(value) in _NESTED else []
    for _ in range(deepest):
        if not level:
            return True
        level = [
            inner
            for entry in level
            for inner in (entry.values() if type(entry) is dict else entry)
            if type(inner) in _NESTED
        ]
    return not level


def shown(value: object, most: int = 120) -> str:
    """``repr(value)`` for a message, cut at ``most`` characters without making all of it first. Errors: none."""
    parts: list[str] = []
    _show(value, parts, most + 1, _DEEPEST_SHOWN)
    text = "".join(parts)
    return text if len(text) <= most else f"{text[: most - 3]}..."


_DEEPEST_SHOWN: Final = 40
_HUGE: Final = 1_000
"""Bits: `int` refuses to print what has more than 4,300 digits."""


def _show(value: object, parts: list[str], room: int, deepest: int) -> int:
    """Add the text of ``value``; how much room is left."""
    if room <= 0:
        return room
    kind = type(value)
    if (kind is dict or kind is list or kind is tuple) and not deepest:
        text = "..."
    elif kind is dict:
        return _show_items(value, parts, room, deepest, "{}")
    elif kind is list:
        return _show_items(value, parts, room, deepest, "[]")
    elif kind is tuple:
        return _show_items(value, parts, room, deepest, "()")
    elif isinstance(value, str | bytes | bytearray):
        text = repr(value[:room])
    elif isinstance(value, int) and value.bit_length() > _HUGE:
        text = f"a number of {value.bit_length()} bits"
    else:
        try:
            text = repr(value)
        except (RecursionError, ValueError):
            text = f"a {kind.__name__}"
    parts.append(text)
    return room - len(text)


def _show_items(value: Any, parts: list[str], room: int, deepest: int, ends: str) -> int:
    parts.append(ends[0])
    room -= 1
    for number, item in enumerate(value):
        if room <= 0:
            return room
        if number:
            parts.append(", ")
            room -= 2
        room = _show(item, parts, room, deepest - 1)
        if ends == "{}":
            parts.append(": ")
            room = _show(value[item], parts, room - 2, deepest - 1)
    last = f",{ends[1]}" if ends == "()" and len(value) == 1 else ends[1]
    parts.append(last)
    return room - len(last)
