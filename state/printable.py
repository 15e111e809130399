r"""Sanitizes untrusted text for a terminal, a log or a file that a person prints.

Names, labels, annotations, answers of probes and servers, kernel texts, names of processes and texts of exceptions are
chosen by others. At output every character that could control a terminal, begin a line, reorder text (U+202A to U+202E,
U+2066 to U+2069) or hide (zero width, private use) is shown as an escape such as ``\x1b`` or ``\u202e``. Values in
between are not escaped: escaped twice, or escaped and then compared, they would be other values.

Source: ECMA-48 (C0, C1); Unicode Technical Report 36, "Unicode Security Considerations", 2.10 and 3.
"""

import json
from typing import Any, Final

LONGEST: Final = 4096
"""Characters of one value on a screen or in a log line. JSON, YAML and msgpack are never cut."""
_MARK: Final = "…(+{} characters)"


def printable(text: str, longest: int | None = None) -> str:
    """One line in which every character is visible, line ends and tabs included; cut after ``longest`` characters."""
    if longest is not None and len(text) > longest:
        text = text[:longest] + _MARK.format(len(text) - longest)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def printable_lines(text: str, longest: int | None = None) -> str:
    """The same for a text of several lines, whose line ends remain; ``longest`` counts for each line."""
    if longest is None and text.isprintable():
        return text
    return "\n".join(printable(line, longest) for line in text.split("\n"))


def printable_json(text: str) -> str:
    r"""A JSON text that may be written to a terminal: what is not printable within its strings as ``\uXXXX``.

    A lone surrogate, which strict readers refuse even when it is escaped, becomes a text as with `encodable`.
    """
    if text.replace("\n", "").isprintable():
        return text
    # Outside its strings a JSON text has line ends and printable ASCII only, and within them no line end.
    return "".join(char if char == "\n" or char.isprintable() else json.dumps(encodable(char))[1:-1] for char in text)


def encodable(value: Any) -> Any:  # plain data of any shape, and the same shape back
    r"""Plain data without lone surrogates, which no UTF-8 can hold: in the place of each the text ``\udc80``.

    They come from names of files and processes that are no UTF-8, and from JSON, which may escape them.
    """
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {encodable(key): encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encodable(item) for item in value]
    return value


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()
