"""Numbers and times as people read them."""

import time
from collections.abc import Mapping
from typing import Final

_UNITS: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def clock(at: object, *, exact: bool = False) -> str:
    """Wall-clock time of a stamp: ``12:10:01``, with the date when it was another day; a dash for never."""
    if not isinstance(at, int | float) or at <= 0:
        return "-"
    then = time.localtime(at)
    text = time.strftime("%H:%M:%S", then)
    if exact:
        text += f".{int(at * 1000) % 1000:03d}"
    if then[:3] != time.localtime()[:3]:
        text = f"{time.strftime('%Y-%m-%d', then)} {text}"
    return text


def until(at: object) -> str:
    """The end of a hold: a time, or that it has none."""
    return "until released" if at is None else clock(at)


def span(seconds: object) -> str:
    """A length of time in two or three figures: ``850 µs``, ``4.2 s``, ``12 min``; a dash when there is none."""
    if not isinstance(seconds, int | float):
        return "-"
    value = abs(float(seconds))
    for size, name in _UNITS:
        if value >= size * 1.5:
            return f"{value / size:.0f} {name}"
    if value >= 1:
        return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"
    if value >= 0.001:
        return f"{value * 1000:.0f} ms" if value >= 0.01 else f"{value * 1000:.1f} ms"
    return f"{value * 1_000_000:.0f} µs"


def cpus(milli: object) -> str:
    """Thousandths of a CPU as CPUs: ``2.40``."""
    return f"{milli / 1000:.2f}" if isinstance(milli, int | float) else "-"


def size(count: object) -> str:
    """Bytes: ``43 MiB``."""
    if not isinstance(count, int | float):
        return "-"
    value = float(count)
    for name in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {name}"
        value /= 1024
    return f"{value:.1f} TiB"


def plural(count: int, one: str, many: str = "") -> str:
    """``1 file``, ``2 files``."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def short(path: str) -> str:
    """A group's path with only so much of a container's id as is needed to find it."""
    above, _, name = path.rpartition("/")
    return f"{above}/{name[:12]}…" if len(name) == 64 else path


def place(path: str, titles: Mapping[str, str]) -> str:
    """A group as people know it: ``namespace/name`` for a pod's, with the id's start for a container's, else the path.

    ``titles``: pods' titles by the path of their group.
    """
    above, _, name = path.rpartition("/")
    if path in titles:
        return titles[path]
    return f"{titles[above]}/{name[:12]}" if above in titles else short(path)


def text(value: object) -> str:
    """A value of the document; a dash for none, one line where the file has several."""
    return "-" if value is None or value == "" else str(value).replace("\n", "; ")
