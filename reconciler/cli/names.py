"""Long names on a terminal: shortened in the middle, and accepted so where a pod is named.

systemctl shortens the names of units in this way, on a terminal only. The start of a pod's name has its workload, and
by the end the pods of a workload differ.
"""

from typing import Final

MARK: Final = "..."
"""In place of the middle. No name of a pod has it (DNS labels); shells leave it as it is, and every terminal has it."""
LEAST: Final = 12
"""Columns that a shortened name has at least: with fewer, many pods would have the same."""


def shortened(text: str, width: int) -> str:
    """A text in at most ``width`` columns, or `LEAST` if that is more."""
    width = max(width, LEAST)
    if len(text) <= width:
        return text
    end = (width - len(MARK)) // 2
    # A dot before the mark would be taken for a part of it.
    return f"{text[: width - len(MARK) - end].rstrip('.')}{MARK}{text[-end:]}"


def start_of(text: str) -> str:
    """What each name begins with that ``text`` may mean."""
    return text.partition(MARK)[0]


def may_mean(text: str, name: str) -> bool:
    """Whether ``text`` is the start of a name, or the whole name shortened."""
    start, _, end = text.partition(MARK)
    short = start and end and len(name) > len(text) and name.startswith(start) and name.endswith(end)
    return name.startswith(text) or bool(short)
