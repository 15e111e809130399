"""The look of each style of `StyledText`, in rich's words, and the same as a terminal's codes without rich."""

from functools import lru_cache
from typing import Final

STYLES: Final = {
    "ok": "green",
    "warn": "yellow",
    "bad": "bold red",
    "dim": "dim",
    "head": "bold",
    "key": "reverse",
    # A drawing's CPUs; where BE work runs too, the pool's colour is ink instead of ground.
    "pool reserved": "black on yellow",
    "pool reserved be": "bold yellow",
    "pool interrupt": "white on magenta",
    "pool interrupt be": "bold magenta",
    "pool shared": "black on green",
    "pool shared be": "bold green",
    "pool named": "black on cyan",
    "pool named be": "bold cyan",
    "pool dedicated": "white on red",
    "pool dedicated be": "bold red",
    "pool reclaimed": "bold",
    "pool reclaimed be": "bold",
    "pool several": "reverse",
}
_CODES: Final = {"bold": 1, "dim": 2, "underline": 4, "reverse": 7}
_COLOURS: Final = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
RESET: Final = "\x1b[0m"


@lru_cache(maxsize=128)
def codes(style: str, *, colours: bool) -> str:
    """The sequence that begins a style; empty for none. Without ``colours`` only bold, dim, underlined and reverse.

    Source: ECMA-48, 8.3.117 (SGR). ``underline`` may follow a style's name.
    """
    name, _, more = style.partition(" +")
    numbers = []
    ground = 0
    for word in [*STYLES.get(name, "").split(), *more.split()]:
        if word == "on":
            ground = 10
        elif word in _CODES:
            numbers.append(_CODES[word])
        elif colours:
            numbers.append(30 + ground + _COLOURS.index(word))
    if ground and not colours:
        numbers.append(_CODES["reverse"])
    return f"\x1b[{';'.join(map(str, numbers))}m" if numbers else ""
