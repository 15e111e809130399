"""Groups and values of the document as text; numbers and times are in `reconciler.runtime.format`."""

from collections.abc import Mapping
from typing import Final

from reconciler.runtime.format import size


def short_path(path: str) -> str:
    """A group's path with the first 12 characters of a container's id."""
    above, _, name = path.rpartition("/")
    return f"{above}/{name[:12]}…" if len(name) == 64 else path


def group_title(path: str, titles: Mapping[str, str]) -> str:
    """A pod's group as ``namespace/name``, a container's with the start of its id, every other as its path.

    ``titles``: pods' titles by the path of their group.
    """
    above, _, name = path.rpartition("/")
    if path in titles:
        return titles[path]
    return f"{titles[above]}/{name[:12]}" if above in titles else short_path(path)


def setting_text(knob: str, value: object) -> str:
    """A knob's value with its unit: ``40000 µs a period``, ``256 MiB``, ``no limit``; CPU lists as they are."""
    text = value_text(value)
    if text == "-":
        return text
    number = int(text) if text.lstrip("-").isascii() and text.lstrip("-").isdecimal() and len(text) <= 20 else None
    if knob in _UNLIMITED and (text == "max" or (number is not None and (number < 0 or number >= _NO_LIMIT))):
        return "no limit"
    if number is None:
        return text
    if knob.startswith("memory.") and knob in _UNLIMITED:
        return size(number)
    unit = _UNITS.get(knob)
    return text if unit is None else f"{text} {unit}"


_NO_LIMIT: Final = 1 << 62
"""cgroup v1 shows no limit of memory as the largest number of pages."""
_UNLIMITED: Final = frozenset(
    {"cpu.quota", "memory.max", "memory.high", "memory.soft", "memory.swap", "memory.min", "memory.low", "pids.max"}
)
_UNITS: Final[Mapping[str, str]] = {
    "cpu.quota": "µs a period",
    "cpu.period": "µs",
    "cpu.burst": "µs",
    "cpu.weight": "shares",
    "pids.max": "processes",
}


def value_text(value: object) -> str:
    """A value of the document; a dash if it is missing, one line where the file has several."""
    return "-" if value is None or value == "" else str(value).replace("\n", "; ")
