"""The line ``protect: LEVEL`` of a configuration file, as a person would change it: every other line is unchanged."""

import re
from typing import Final

from reconciler.config.model import Protection

_VALUE: Final = r"""(protect[ \t]*:[ \t]+)['"]?[a-z+~]+['"]?((?:[ \t]+#[^\r\n]*)?[ \t]*)"""
_LINE: Final = re.compile(_VALUE)
_COMMENTED: Final = re.compile(r"#[ \t]?" + _VALUE)
_DOCUMENT: Final = re.compile(r"[^#\s]")
_START: Final = "---"
_BEFORE_COMMENT: Final = 2


def with_level(text: str, level: Protection, line: int = 0) -> str:
    """The text with the level; the caller reads the result again before it is used.

    ``line``: of the setting, as read, from 1; 0: the file does not have it, so the commented line of the example
    becomes the setting, or a new line precedes the first key. Errors: `ValueError` for a setting that is written in
    another form than a line of its own, which only its author can change.
    """
    lines = text.splitlines(keepends=True)
    if line:
        if (match := _LINE.fullmatch(lines[line - 1].rstrip("\r\n"))) is None:
            raise ValueError("protect is not on a line of its own there; change it in an editor")
        lines[line - 1] = _line(match, level, lines[line - 1])
        return "".join(lines)
    for index, row in enumerate(lines):
        if (match := _COMMENTED.fullmatch(row.rstrip("\r\n"))) is not None:
            lines[index] = _line(match, level, row)
            return "".join(lines)
    at = next((index for index, row in enumerate(lines) if _DOCUMENT.match(row)), len(lines))
    # A document's start and a directive are before its keys.
    starts = [index for index, row in enumerate(lines) if row.rstrip() == _START]
    at = starts[0] + 1 if starts else at
    if at and not lines[at - 1].endswith("\n"):
        lines[at - 1] += "\n"
    return "".join([*lines[:at], f"protect: {level.value}\n", *lines[at:]])


def _line(match: re.Match[str], level: Protection, row: str) -> str:
    """With the comment at its column, where the value leaves room for it."""
    head, comment = match.groups()
    end = row[len(row.rstrip("\r\n")) :]
    if not comment.strip():
        return f"{head}{level.value}{end}"
    column = len(match[0]) - len(comment.lstrip())
    blanks = max(column - len(head) - len(level.value), _BEFORE_COMMENT)
    return f"{head}{level.value}{' ' * blanks}{comment.lstrip()}{end}"
