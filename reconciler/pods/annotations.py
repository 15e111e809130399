"""Reading untrusted annotations: one bad value is one message, and does not affect the values beside it.

An annotation is text, often a JSON object whose fields other programs use too. So unknown fields are ignored, and a
field is parsed only when it is requested, by a reader that describes in a few words what it expects.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, final

import msgspec

from cgroupfs.bounded import decoded
from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import InputError
from reconciler.pods.marks import LONGEST_WORD, longest, note, too_long, utf8_bytes
from reconciler.settings.units import parse_quantity

NUMA_NODES: Final = 1024
"""As many as the kernel can be built for (CONFIG_NODES_SHIFT 10)."""

_DEEPEST: Final = 32
_decode: Final = msgspec.json.Decoder(dict[str, Any]).decode
_BOOLS: Final = {"true": True, "false": False}
_T = TypeVar("_T")


class UnusableError(ValueError):
    """A value is not of the expected form; the text has what was expected. Never leaves the readers' caller."""


@final
class JsonAnnotation:
    """One annotation that holds a JSON object; it has no fields when it is missing or broken."""

    def __init__(self, annotations: Mapping[str, str], name: str, problems: list[str]) -> None:
        self._where = f"annotation {name}"
        self._problems = problems
        self._fields: dict[str, Any] = {}  # untrusted JSON: the reader of each field checks its type
        text = annotations.get(name)
        if text is None:
            return
        if (size := utf8_bytes(text)) > longest(name):
            note(problems, too_long(self._where, size, longest(name), "bytes"))
            return
        try:
            self._fields = decoded(_decode, text, deepest=_DEEPEST)
        except ValueError:
            note(problems, str(InputError(self._where, text, "a JSON object")))

    def read(self, key: str, reader: Callable[[Any], _T | None]) -> _T | None:
        """One field; None when it is missing, null, broken (a message), or empty."""
        value = self._fields.get(key)
        return None if value is None else attempt(f"{self._where}: {key}", value, reader, self._problems)

    def items(self, reader: Callable[[Any], _T | None], most: int) -> tuple[tuple[str, _T], ...]:
        """Every field that has a value, by name, where names are a tenant's; none of more than ``most`` of them."""
        if len(self._fields) > most:
            note(self._problems, f"{self._where}: {len(self._fields)} fields; expected at most {most}")
            return ()
        values = ((key, self.read(key, reader)) for key in sorted(self._fields))
        return tuple((key, value) for key, value in values if value is not None)


def read_plain(
    annotations: Mapping[str, str], name: str, reader: Callable[[Any], _T | None], problems: list[str]
) -> _T | None:
    """An annotation that is one value; None when it is missing, broken (a message), or empty."""
    text = annotations.get(name)
    if text is None:
        return None
    if (size := utf8_bytes(text)) > longest(name):
        note(problems, too_long(f"annotation {name}", size, longest(name), "bytes"))
        return None
    return attempt(f"annotation {name}", text, reader, problems)


def attempt(where: str, value: object, reader: Callable[[Any], _T | None], problems: list[str]) -> _T | None:
    """The reader's result; None and a message at ``where`` when it cannot use the value."""
    try:
        return reader(value)
    except UnusableError as exc:
        note(problems, str(InputError(where, value, str(exc))))
        return None


def text_of(value: object, expected: str) -> str:
    """A string. Errors: `UnusableError`, as of all readers here."""
    if not isinstance(value, str):
        raise UnusableError(f"{expected}, as a string")
    return value


def one_of(value: object, table: Mapping[str, _T]) -> _T:
    """The value of one word in a table; the empty word may be in the table and is not named in the message."""
    expected = f"one of {', '.join(word for word in table if word)}"
    text = text_of(value, expected)
    if text not in table:
        raise UnusableError(expected)
    return table[text]


def bool_text(value: object) -> bool:
    return one_of(value, _BOOLS)


def whole_number(value: object, low: int, high: int) -> int:
    """A JSON integer between two bounds, both included."""
    # A bool is an int in Python.
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UnusableError(f"a whole number from {low} to {high}")
    return value


def whole_text(value: object, low: int, high: int, what: str) -> int:
    """A whole number written as a string, not below 0. ``what`` names it in the message."""
    expected = f"{what} from {low} to {high}"
    text = text_of(value, expected)
    # The length first: `int` raises another error for more than 4300 digits.
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(high)) and low <= int(text) <= high):
        raise UnusableError(expected)
    return int(text)


def amount(value: object, expected: str) -> float:
    """A Kubernetes quantity, as a JSON string or integer, of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UnusableError(expected)
    try:
        number = parse_quantity(value)
    except ValueError as exc:
        raise UnusableError(expected) from exc
    # Kubernetes allows no quantity above 2^63-1.
    if not 0 <= number < 2**63:
        raise UnusableError(expected)
    return float(number)


def cpu_list(value: object) -> CpuSet:
    expected = "a CPU list such as 0-3,8"
    return _parsed(text_of(value, expected), expected)


def node_list(value: object) -> tuple[int, ...]:
    """At least one NUMA node, in the same format."""
    expected = f"a list of NUMA nodes such as 0 or 0,2-3, below {NUMA_NODES}"
    text = text_of(value, expected)
    nodes = _parsed(text, expected)
    if not nodes or nodes.mask.bit_length() > NUMA_NODES:
        raise UnusableError(expected)
    return tuple(nodes)


def _parsed(text: str, expected: str) -> CpuSet:
    if len(text) > LONGEST_WORD:
        raise UnusableError(f"{expected}, of at most {LONGEST_WORD} characters")
    try:
        return CpuSet.parse(text)
    except ValueError as exc:
        raise UnusableError(expected) from exc
