r"""``-o jsonpath=TEMPLATE``: the part of kubectl's language that selects values from a document.

A template is text with expressions in braces: ``{.pods[0].name}``, ``{.pods[*].uid}``, ``{.pods[-1]['class']}``,
``{"\n"}`` for a quoted text. A key after a dot may have a dot of its own behind a backslash. Several values of one
expression are separated by a blank, as kubectl prints them. Filters, ranges of indexes and ``{range}`` are refused.
Source: kubernetes.io, "JSONPath Support".
"""

import json
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from reconciler.cli.exits import CliError, Exit
from state.printable import printable, printable_json

LONGEST: Final = 1000
"""Characters of a template."""
MOST: Final = 100_000
"""Values that one expression selects."""
_STEP: Final = re.compile(
    r"""\.(?P<key>(?:\\.|[^.\[\]{}\\*'"\s@?()])+)|\.?\[(?P<index>-?\d{1,9})\]|(?P<all>\[\*\]|\.\*)"""
    r"""|\.?\[(?P<quoted>'[^']*'|"[^"]*")\]"""
)
_PART: Final = re.compile(r"\{((?:'[^']*'|\"[^\"]*\"|[^{}'\"])*)\}")
_TEXTS: Final = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}


class Step(NamedTuple):
    """A key of an object, an index of a list, or (both None) all values of either."""

    key: str | None = None
    item: int | None = None


Part = str | tuple[Step, ...]
"""Text, or an expression."""


def parse(template: str) -> tuple[Part, ...]:
    """The parts of a template. Errors: `ValueError` with the place of the mistake."""
    if len(template) > LONGEST:
        raise ValueError(f"longer than {LONGEST} characters")
    parts: list[Part] = []
    at = 0
    while at < len(template):
        if template[at] != "{":
            end = template.find("{", at)
            end = len(template) if end < 0 else end
            if "}" in template[at:end]:
                raise ValueError(f"'}}' without '{{' at character {at + template[at:end].index('}') + 1}")
            parts.append(_unescaped(template[at:end]))
            at = end
            continue
        match = _PART.match(template, at)
        if match is None:
            raise ValueError(f"'{{' at character {at + 1} is not closed")
        parts.append(_part(match[1].strip(), at + 1))
        at = match.end()
    if not any(isinstance(part, tuple) for part in parts):
        raise ValueError("it has no expression in braces, such as {.pods[*].name}")
    return tuple(parts)


def _part(text: str, at: int) -> Part:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" and text[0] not in text[1:-1]:
        return _unescaped(text[1:-1])
    path = text.removeprefix("$")
    steps: list[Step] = []
    position = 0
    while position < len(path):
        match = None if path == "." else _STEP.match(path, position)
        if match is None:
            if path == ".":
                break
            raise ValueError(
                f"cannot read {path[position:][:40]!r} in the expression at character {at}; "
                "expected .KEY, ['KEY'], [NUMBER] or [*]"
            )
        if match["all"]:
            steps.append(Step())
        elif match["index"] is not None:
            steps.append(Step(item=int(match["index"])))
        else:
            key = match["quoted"][1:-1] if match["quoted"] is not None else re.sub(r"\\(.)", r"\1", match["key"])
            steps.append(Step(key=key))
        position = match.end()
    if not steps and path not in {"", "."}:
        raise ValueError(f"the expression at character {at} is empty")
    return tuple(steps)


def _unescaped(text: str) -> str:
    return re.sub(r"\\[nt\\]", lambda match: _TEXTS[match[0]], text)


def select(template: str, document: object) -> str:
    """The text of a template. Errors: `CliError` for a template that is wrong, or a key that the document lacks."""
    try:
        parts = parse(template)
    except ValueError as exc:
        raise CliError(f"-o jsonpath: {exc}", Exit.USAGE) from exc
    return "".join(part if isinstance(part, str) else " ".join(map(_text, _values(part, document))) for part in parts)


def _values(steps: Sequence[Step], document: object) -> list[Any]:
    """Every selected value. Behind a ``[*]`` values that lack a key are left out; elsewhere that is an error."""
    values: list[Any] = [document]
    several = False
    for number, step in enumerate(steps):
        after: list[Any] = []
        for value in values:
            if step == Step():
                several = True
                after += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            elif step.key is not None and isinstance(value, dict) and step.key in value:
                after.append(value[step.key])
            elif step.item is not None and isinstance(value, list) and -len(value) <= step.item < len(value):
                after.append(value[step.item])
            elif not several:
                raise CliError(f"-o jsonpath: {_missing(steps[:number], step, value)}", Exit.NOT_FOUND)
            if len(after) > MOST:
                raise CliError(f"-o jsonpath: more than {MOST} values", Exit.USAGE)
        values = after
    return values


def _missing(before: Sequence[Step], step: Step, value: object) -> str:
    where = "".join(f".{item.key}" if item.key is not None else f"[{item.item}]" for item in before) or "the document"
    if step.item is not None:
        size = f"has {len(value)} items" if isinstance(value, list) else "is not a list"
        return f"no [{step.item}]: {where} {size}"
    if isinstance(value, dict):
        return f"no key {step.key!r} in {where}; it has {', '.join(sorted(value)[:20])}"
    return f"no key {step.key!r}: {where} is {'a list; use [*] or [0]' if isinstance(value, list) else 'no object'}"


def _text(value: object) -> str:
    """A value on one line that may be written to a terminal."""
    return printable(value) if isinstance(value, str) else printable_json(json.dumps(value, ensure_ascii=False))
