"""Numbers, sizes, durations and times as text for people: the only place that formats them.

Every status line, reason, alert and screen uses these functions, so that a value reads the same everywhere. Machine
formats (control files, JSON, metrics, configuration) are not made here.
"""

import time
from collections.abc import Sequence
from typing import Final

_DURATIONS: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))
_SIZES: Final = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
NONE: Final = "-"
"""Text of a value that is missing."""


def number(value: float) -> str:
    """Three significant digits, no exponent: ``0.123``, ``7.2``, ``1234``."""
    if value != value or value in {float("inf"), float("-inf")}:  # noqa: PLR0124  # only NaN differs from itself
        return str(value)
    size = abs(value)
    return _trimmed(value, 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3)


def percent(value: object) -> str:
    """``10.5 %``."""
    return f"{number(value)} %" if isinstance(value, int | float) else NONE


def size(count: object) -> str:
    """Bytes in the largest unit that leaves at least 1: ``43 MiB``, ``3.3 GiB``, ``338 MiB``."""
    if not isinstance(count, int | float):
        return NONE
    for name, factor in _SIZES:
        if abs(count) >= factor:
            value = count / factor
            return f"{_trimmed(value, 0 if abs(value) >= 100 else 1)} {name}"
    return f"{number(count)} B"


def rate(per_second: object) -> str:
    """Bytes per second: ``1.5 GiB/s``."""
    return f"{size(per_second)}/s" if isinstance(per_second, int | float) else NONE


def cpus(milli: object) -> str:
    """Thousandths of a CPU as CPUs: ``2.40``."""
    return f"{milli / 1000:.2f}" if isinstance(milli, int | float) else NONE


def cpu(milli: object) -> str:
    """Thousandths of a CPU as an amount: ``2.40 CPU``."""
    return f"{cpus(milli)} CPU" if isinstance(milli, int | float) else NONE


def quantity(value: float, unit: str) -> str:
    """A signal's value with its unit (`reconciler.signals.catalog`): ``7.2 %``, ``0.34 CPU``, ``1.5 GiB/s``."""
    match unit:
        case "bytes":
            return size(value)
        case "bytes/s":
            return rate(value)
        case "milli-CPU":
            return cpu(value)
        case "percent":
            return percent(value)
        case "ratio" | "count":
            return number(value)
        case _:
            return f"{number(value)} {unit}"


def duration(seconds: object) -> str:
    """A length of time in two or three digits: ``850 µs``, ``4.2 s``, ``12 min``, ``2.5 h``."""
    if not isinstance(seconds, int | float):
        return NONE
    value = abs(float(seconds))
    for factor, name in _DURATIONS:
        if value >= factor * 2:
            return f"{_short(value / factor)} {name}"
    if value >= 1 or value == 0:
        return f"{_short(value)} s"
    return f"{_short(value * 1000)} ms" if value >= 0.001 else f"{value * 1_000_000:.0f} µs"


def clock(at: object, *, exact: bool = False) -> str:
    """Wall-clock time of a stamp: ``12:10:01``, with the date on another day; a dash for never."""
    if not isinstance(at, int | float) or at <= 0:
        return NONE
    then = time.localtime(at)
    text = time.strftime("%H:%M:%S", then)
    if exact:
        text += f".{int(at * 1000) % 1000:03d}"
    if then[:3] != time.localtime()[:3]:
        text = f"{time.strftime('%Y-%m-%d', then)} {text}"
    return text


def until(at: object) -> str:
    """The end of a hold, to follow the word "until": ``12:10:01``, or ``release`` when it has no end."""
    return "release" if at is None else clock(at)


def plural(count: int, singular: str, many: str = "") -> str:
    """``1 file``, ``2 files``."""
    return f"{count} {singular if count == 1 else many or singular + 's'}"


def first_of(texts: Sequence[str], most: int, noun: str = "") -> str:
    """``a; b; and 3 more``, with a noun ``3 more pods``: a list of any length in one line; empty without any."""
    text = "; ".join(texts[:most])
    if len(texts) <= most:
        return text
    return f"{text}; and {len(texts) - most} more{f' {noun}' if noun else ''}"


def _short(value: float) -> str:
    return _trimmed(value, 0 if value >= 10 else 1)


def _trimmed(value: float, places: int) -> str:
    text = f"{value:.{places}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text
