"""Strict reading of another program's JSON checkpoint: every fault has its own code, refused fields are named.

Pure but for `read_checkpoint`. The formats themselves are in `state.kubelet`.
"""

import errno
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final, TypeVar

import msgspec

from cgroupfs.bounded import decoded, read_file
from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import InputError, errno_name

_MAX_BYTES: Final = 16 * 2**20
_MOST_PARTS: Final = 300_000
"""Values, lists and maps: as objects they take up to 80 times their bytes. Device plug-ins report some 100,000 ids."""
_DEEPEST: Final = 32
"""No format has half of it, and a newer one is to be shown as such."""
_T = TypeVar("_T")
# Objects of another program, checked field by field: Any until then.
Object = dict[str, Any]


class CheckpointFault(StrEnum):
    """What is wrong with a checkpoint file."""

    MISSING = "missing"
    UNREADABLE = "unreadable"
    EMPTY = "empty"
    TORN = "torn"
    CHECKSUM = "checksum"
    FUTURE = "future"
    FOREIGN = "foreign"
    INVALID = "invalid"


class CheckpointError(InputError):
    """A checkpoint that cannot be used; the text names file, field, value and what was expected."""

    def __init__(self, fault: CheckpointFault, where: str, value: object, expected: str) -> None:
        super().__init__(where, value, expected)
        self.fault = fault


def read_checkpoint(path: str, parse: Callable[[bytes, str], _T]) -> _T:
    """Read and parse one checkpoint. The kubelet renames them into place, so a read never meets a half-written one.

    Errors: `CheckpointError`, also for a file that is not there or cannot be read.
    """
    try:
        # No links: device plug-ins' pods write in the directory of the devices' checkpoint.
        data = read_file(path, _MAX_BYTES, links=False)
    except FileNotFoundError:
        raise CheckpointError(CheckpointFault.MISSING, path, "no such file", "a checkpoint of the kubelet") from None
    except OSError as exc:
        if shown := {errno.EFBIG: f"more than {_MAX_BYTES} bytes", errno.ELOOP: "a symbolic link"}.get(exc.errno or 0):
            raise CheckpointError(CheckpointFault.INVALID, path, shown, "a checkpoint of the kubelet") from None
        raise CheckpointError(CheckpointFault.UNREADABLE, path, errno_name(exc.errno), "a readable file") from exc
    return parse(data, path)


def load(data: bytes, where: str, fields: set[str]) -> Object:
    """The top-level object with the names of its known fields in canonical case. Errors: `CheckpointError`."""
    if not data.strip(b" \t\r\n\0"):
        # A power cut leaves files of length 0, or full of zero bytes.
        raise CheckpointError(CheckpointFault.EMPTY, where, f"{len(data)} bytes without content", "a JSON object")
    if (parts := sum(map(data.count, (b",", b"[", b"{")))) > _MOST_PARTS:
        raise CheckpointError(
            CheckpointFault.INVALID, where, f"a text of {parts} parts", f"at most {_MOST_PARTS} values, lists and maps"
        )
    try:
        result = decoded(msgspec.json.decode, data, deepest=_DEEPEST)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise CheckpointError(
            CheckpointFault.TORN, where, data[-40:].decode(errors="replace"), f"whole JSON ({exc})"
        ) from exc
    except ValueError as exc:
        raise CheckpointError(
            CheckpointFault.INVALID, where, data[:40].decode(errors="replace"), f"a JSON object; {exc}"
        ) from exc
    if not isinstance(result, dict):
        raise CheckpointError(CheckpointFault.INVALID, where, result, "a JSON object")
    # Go matches names without regard to case, and so do hand-edited files that a kubelet accepted.
    canonical = {name.lower(): name for name in fields}
    named = {canonical.get(str(name).lower(), str(name)): value for name, value in result.items()}
    known(named, where, fields)
    return named


def known(document: Mapping[str, Any], where: str, fields: set[str]) -> None:
    """Refuse a field that this version does not support. Errors: `CheckpointError`."""
    for name, value in document.items():
        if name not in fields:
            expected = f"only {', '.join(sorted(fields))}: this is the format of a newer kubelet"
            raise CheckpointError(CheckpointFault.FUTURE, f"{where}: {name}", value, expected)


def _field(
    fields: Mapping[str, Any], name: str, where: str, kind: type[_T], expected: str, *, empty: _T | None = None
) -> _T:
    """A field of one type. ``empty``: what absent and null are; None: they are refused. Errors: `CheckpointError`."""
    value = fields.get(name)
    if value is None and empty is not None:
        return empty
    if not isinstance(value, kind):
        raise CheckpointError(CheckpointFault.INVALID, f"{where}: {name}", value, expected)
    return value


def text(fields: Mapping[str, Any], name: str, where: str) -> str:
    """A text field. Errors: `CheckpointError`."""
    return _field(fields, name, where, str, "a text")


def number(fields: Mapping[str, Any], name: str, where: str, *, optional: bool = False) -> int:
    """A whole number from 0 up. Errors: `CheckpointError`."""
    value = fields.get(name, 0 if optional else None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointError(CheckpointFault.INVALID, f"{where}: {name}", value, "a number from 0 up")
    return value


def mapping(fields: Mapping[str, Any], name: str, where: str, *, optional: bool = False) -> Object:
    """An object; optional: absent and null are an empty one. Errors: `CheckpointError`."""
    return _field(fields, name, where, dict, "an object", empty={} if optional else None)


def items(fields: Mapping[str, Any], name: str, where: str, *, optional: bool = False) -> list[Any]:
    """A list; optional: absent and null are an empty one. Errors: `CheckpointError`."""
    return _field(fields, name, where, list, "a list", empty=[] if optional else None)


def texts(fields: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    """A list of texts; absent and null are an empty one. Errors: `CheckpointError`."""
    values = items(fields, name, where, optional=True)
    for value in values:
        if not isinstance(value, str):
            raise CheckpointError(CheckpointFault.INVALID, f"{where}: {name}", value, "a list of texts")
    return tuple(values)


def numbers(fields: Mapping[str, Any], name: str, where: str) -> list[int]:
    """A list of whole numbers from 0 up; absent and null are an empty one. Errors: `CheckpointError`."""
    values = items(fields, name, where, optional=True)
    for value in values:
        number({name: value}, name, where)
    return values


def verify(where: str, stored: int, expected: int) -> None:
    """Errors: `CheckpointError` where a checksum is not that of the content."""
    if stored != expected:
        raise CheckpointError(CheckpointFault.CHECKSUM, where, stored, f"{expected} for this content")


def cpus(text: str, where: str) -> CpuSet:
    """A CPU list. Errors: `CheckpointError`."""
    try:
        return CpuSet.parse(text)
    except ValueError as exc:
        raise CheckpointError(CheckpointFault.INVALID, where, text, "a CPU list") from exc
