"""Names of pods that are longer than a terminal has room for: shortened in the middle, and accepted so where pods are named.

kubectl and crictl let such lines overflow; systemctl shortens unit names in the middle, on a terminal only, and shows
them whole with ``-l``. Pods are closer to units: the start says which workload, the end which of its pods. What is
shortened on the screen can be copied from it: the mark cannot be part of a name, so that text is a pattern.
"""

import sys
from typing import Final

MARK: Final = "…"
PLAIN_MARK: Final = "~"
"""Where the output's encoding lacks `MARK`. Neither is allowed in names: they are DNS labels."""
LEAST: Final = 12
"""Columns below which no name is shortened: nothing would be left to tell two of them apart."""


def mark() -> str:
    """The mark that the output's encoding has."""
    try:
        MARK.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return PLAIN_MARK
    return MARK


def shortened(text: str, width: int, sign: str) -> str:
    """A text in at most ``width`` columns, at least `LEAST`; of a longer one the middle is replaced by ``sign``."""
    width = max(width, LEAST)
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}{sign}{text[-end:]}"


def shortened_words(text: str, width: int, sign: str) -> str:
    """The same of each word."""
    return " ".join(shortened(word, width, sign) for word in text.split(" "))


def start_of(text: str) -> str:
    """What a name begins with for which ``text`` may stand: all of it, or the part before the mark."""
    return min((text.partition(sign)[0] for sign in (MARK, PLAIN_MARK)), key=len)


def stands_for(text: str, name: str) -> bool:
    """Whether ``text`` is the start of a name, or the name as it was shortened."""
    start = start_of(text)
    if start == text:
        return name.startswith(text)
    end = text[len(start) + 1 :]
    return len(name) >= len(text) and name.startswith(start) and name.endswith(end)
