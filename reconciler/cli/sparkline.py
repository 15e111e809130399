"""A series of numbers as one line of characters."""

import sys
from collections.abc import Sequence
from typing import Final

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_PLAIN: Final = "_.-=+*#@"
_UNKNOWN: Final = "?"


def sparkline(values: Sequence[float | None], width: int = 30) -> str:
    """At most ``width`` characters, the newest at the end; each is the largest of the values that it is made from.

    Zero is the lowest mark and the largest value the highest. Without blocks in the output's encoding, ASCII.
    """
    if not values:
        return ""
    size = -(-len(values) // width)
    # From the end, so that the newest mark does not change its part with every value.
    parts = [values[max(0, end - size) : end] for end in range(len(values), 0, -size)][::-1]
    largest = [max((value for value in part if value is not None), default=None) for part in parts]
    top = max((value for value in largest if value is not None), default=0.0) or 1.0
    marks = levels()
    return "".join(
        _UNKNOWN if value is None else marks[min(len(marks) - 1, int(value / top * len(marks)))] for value in largest
    )


def levels() -> str:
    """Marks from the lowest to the highest, in the output's encoding."""
    try:
        _BLOCKS.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return _PLAIN
    return _BLOCKS
