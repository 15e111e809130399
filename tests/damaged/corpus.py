"""Damaged inputs: the files of tests/fixtures/damaged, and what is made of a good input in every systematic way.

What is too large for a repository (deep nesting, numbers of 100,000 digits) is made here.
"""

import copy
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

FIXTURES: Final = Path(__file__).parents[1] / "fixtures" / "damaged"
DIGITS: Final = (19, 20, 21, 4299, 4301, 100_000)
"""Around 2^64, and around the limit of Python's own conversion."""
DEPTHS: Final = (30, 200, 500, 990, 1_100, 100_000)

Named = Iterator[tuple[str, bytes]]

_BYTES: Final = {
    "empty": b"",
    "blank": b" \t\r\n",
    "a newline": b"\n",
    "nul": b"\0",
    "nul page": b"\0" * 4096,
    "bom": b"\xef\xbb\xbf",
    "bom, then an object": b"\xef\xbb\xbf{}",
    "utf-16": "{}".encode("utf-16"),
    "utf-32": "{}".encode("utf-32"),
    "latin-1": b"\xe9\xff\xfe",
    "a surrogate": b"\xed\xa0\x80",
    "cut utf-8": b"abc\xe2\x82",
    "escapes": b"\x1b]0;x\x07\x1b[2J\x9b",
    "separators": "\u2028\u2029\x85\x1c".encode(),
    "a word": b"max",
    "null": b"null",
    "true": b"true",
    "minus one": b"-1",
    "minus": b"-",
    "plus": b"+1",
    "underscores": b"1_000",
    "arabic digits": "\u0661\u0662".encode(),
    "superscript digits": "\u00b2\u00b3".encode(),
    "a fraction": b"0.5",
    "an exponent": b"1e400",
    "nan": b"nan",
    "infinity": b"inf",
    "an object": b"{}",
    "an array": b"[]",
    "a text": b'""',
    "a number": b"7",
    "a lone surrogate": b'"\\ud800"',
    "colons": b":" * 1000,
    "commas": b"," * 1000,
    "equals": b"=" * 1000,
    "parentheses": b")(" * 1000,
    "one long line": b"a" * 70_000,
    "many lines": b"a\n" * 20_000,
    "many words": b"1 " * 20_000,
    "random": bytes(range(256)) * 4,
}


@cache
def everywhere() -> tuple[tuple[str, bytes], ...]:
    """What any file may hold."""
    return tuple(_everywhere())


def _everywhere() -> Named:
    yield from _BYTES.items()
    for digits in DIGITS:
        yield f"{digits} digits", b"9" * digits
        yield f"minus {digits} digits", b"-" + b"9" * digits
        yield f"a fraction of {digits} digits", b"0." + b"9" * digits
    for path in sorted(FIXTURES.glob("any/*")):
        yield path.name, path.read_bytes()
    for depth in DEPTHS:
        yield f"{depth} arrays", b"[" * depth + b"]" * depth
        yield f"{depth} open arrays", b"[" * depth
        yield f"{depth} open objects", b'{"a":' * depth
        yield f"{depth} msgpack arrays", b"\x91" * depth + b"\x00"
        yield f"{depth} msgpack maps", b"\x81\xa1a" * depth + b"\x00"


def kept(parser: str) -> Named:
    """The files that are kept for one parser."""
    for path in sorted((FIXTURES / parser).glob("*")):
        yield path.name, path.read_bytes()


def of_text(good: bytes) -> Named:
    """A good text, damaged: cut, doubled, with each of its numbers made something else, with other characters."""
    for part in range(8):
        yield f"cut at {part}/8", good[: len(good) * part // 8]
    yield "without its end", good[:-1]
    yield "twice", good + good
    yield "bom before", b"\xef\xbb\xbf" + good
    yield "nul inside", good[: len(good) // 2] + b"\0" + good[len(good) // 2 :]
    yield "latin-1 inside", good[: len(good) // 2] + b"\xff" + good[len(good) // 2 :]
    yield "surrogate inside", good[: len(good) // 2] + b"\xed\xa0\x80" + good[len(good) // 2 :]
    yield "upper case", good.upper()
    yield "without blanks", good.replace(b" ", b"")
    yield "without newlines", good.replace(b"\n", b"")
    yield "windows", good.replace(b"\n", b"\r\n")
    for name, number in (
        ("nothing", b""),
        ("a word", b"x"),
        ("minus", b"-1"),
        ("arabic", "\u0661".encode()),
        ("superscript", "\u00b2".encode()),
        ("a latin-1 digit", b"\xb2"),
        ("nul", b"\0"),
        ("20 digits", b"9" * 20),
        ("4301 digits", b"9" * 4301),
        ("octal", b"\\777"),
        ("a fraction", b"1.5"),
        ("an exponent", b"1e9"),
    ):
        yield f"numbers are {name}", _numbers(good, number)
    parts = good.split(b" ")
    for at in range(min(len(parts), 40)):
        yield f"word {at} is missing", b" ".join(parts[:at] + parts[at + 1 :])
        yield f"word {at} is long", b" ".join([*parts[:at], b"9" * 4301, *parts[at + 1 :]])
    lines = good.split(b"\n")
    for at in range(min(len(lines), 40)):
        yield f"line {at} is missing", b"\n".join(lines[:at] + lines[at + 1 :])
        yield f"line {at} is twice", b"\n".join([*lines[: at + 1], *lines[at:]])


def _numbers(good: bytes, by: bytes) -> bytes:
    result, inside = bytearray(), False
    for byte in good:
        digit = 48 <= byte <= 57
        if digit and not inside:
            result += by
        elif not digit:
            result.append(byte)
        inside = digit
    return bytes(result)


def _deep(depth: int) -> Any:
    result: Any = 0
    for _ in range(depth):
        result = [result]
    return result


# Not None: that is one of them.
INSTEAD: Final[dict[str, Any]] = {
    "null": None,
    "true": True,
    "zero": 0,
    "minus one": -1,
    "a large number": 2**64,
    "a fraction": 0.5,
    "an empty text": "",
    "a text": "x",
    "digits": "7",
    "4301 digits as text": "9" * 4301,
    "a surrogate": "\ud800",
    "a nul": "\0",
    "an empty array": [],
    "an array": [1],
    "texts": ["x"],
    "nested": [[], {}],
    "an empty object": {},
    "an object": {"a": 1},
    "an object of digits": {"9" * 4301: "1", "-": {}, "\u00b2": []},
    "a deep array": _deep(200),
}
_RAW: Final = {
    "4301 digits": b"9" * 4301,
    "minus 4301 digits": b"-" + b"9" * 4301,
    "100000 digits": b"9" * 100_000,
    "a huge exponent": b"1e999999999",
    "900 arrays": b"[" * 900 + b"]" * 900,
    "990 arrays": b"[" * 990 + b"]" * 990,
    "5000 arrays": b"[" * 5000 + b"]" * 5000,
    "not utf-8": b'"\xff\xfe"',
    "10000 items": b"[" + b"0," * 10_000 + b"0]",
    "nothing": b"",
}
_MARK: Final = "\u2603here\u2603"


def of_json(good: bytes, pack: Callable[[Any], bytes] = lambda item: json.dumps(item).encode()) -> Named:
    """A good document with each of its keys removed, and its value replaced by one of each kind."""
    document = json.loads(good)
    for path in _paths(document):
        shown = "/".join(map(str, path)) or "all"
        if path:
            yield f"{shown} removed", pack(_changed(document, path, remove=True))
            if isinstance(path[-1], str):
                yield f"{shown} renamed", pack(_renamed(document, path))
        for name, value in INSTEAD.items():
            yield f"{shown} is {name}", pack(_changed(document, path, value))
    text = json.dumps(document).encode()
    yield "unknown keys of every kind", pack(document | INSTEAD) if isinstance(document, dict) else text
    yield "every key twice", text.replace(b"{", b"{" + text[1:-1] + b",", 1) if text[1:-1] else text


def of_raw_json(good: bytes) -> Named:
    """A good document with each value replaced by what no encoder writes."""
    yield "100000 items", b"[" + b"0," * 100_000 + b"0]"
    document = json.loads(good)
    for path in _paths(document):
        shown = "/".join(map(str, path)) or "all"
        text = json.dumps(_changed(document, path, _MARK)).encode()
        for name, raw in _RAW.items():
            yield f"{shown} is {name}", text.replace(json.dumps(_MARK).encode(), raw)


def _paths(value: Any, path: tuple[str | int, ...] = (), depth: int = 0) -> Iterator[tuple[str | int, ...]]:
    yield path
    if depth > 8:
        return
    if isinstance(value, dict):
        for key in value:
            yield from _paths(value[key], (*path, key), depth + 1)
    elif isinstance(value, list) and value:
        yield from _paths(value[0], (*path, 0), depth + 1)


def _copied(document: Any, path: tuple[str | int, ...]) -> tuple[Any, Any]:
    """A document to change at a path, with copies of what is on the way there only; and the last one of these."""
    made = inside = copy.copy(document)
    for step in path[:-1]:
        inside[step] = inside = copy.copy(inside[step])
    return made, inside


def _changed(document: Any, path: tuple[str | int, ...], value: Any = None, *, remove: bool = False) -> Any:
    if not path:
        return value
    made, inside = _copied(document, path)
    if remove:
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return made


def _renamed(document: Any, path: tuple[str | int, ...]) -> Any:
    made, inside = _copied(document, path)
    inside["9" * 4301] = inside.pop(path[-1])
    return made
