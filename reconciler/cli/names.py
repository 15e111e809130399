"""Long names on a terminal: shortened in the middle, and accepted so where a pod is named.

systemctl shortens the names of units so, on a terminal only. The start of a pod's name has its workload, the end tells
the pods of a workload apart.
"""

from typing import Final

MARK: Final = "..."
"""In place of the middle. No name of a pod has it (DNS labels); shells leave it as it is, and every terminal has it."""
LEAST: Final = 12
"""Columns below which no name is shortened: what is left would be no name."""


def shortened(text: str, width: int) -> str:
    """A text in at most ``width`` columns, or `LEAST` if that is more."""
    width = max(width, LEAST)
    if len(text) <= width:
        return text
    end = (width - len(MARK)) // 2
    return f"{text[: width - len(MARK) - end]}{MARK}{text[-end:]}"


def start_of(text: str) -> str:
    """What each name begins with for which ``text`` may stand."""
    return text.partition(MARK)[0]


def stands_for(text: str, name: str) -> bool:
    """Whether ``text`` is the start of a name, or the name as it was shortened."""
    start, _, end = text.partition(MARK)
    if not start or not end:
        return name.startswith(text)
    return len(name) > len(text) and name.startswith(start) and name.endswith(end)
