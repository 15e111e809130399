"""Groups and values of the document as text; numbers and times are in `reconciler.runtime.format`."""

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from cgroupfs.bounded import digits
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
    quota, _, period = text.partition(" ")
    if knob == "cpu.quota" and period and digits(period) is not None:
        return "no limit" if quota == "max" else f"{quota} of {period} µs"
    amount = digits(text.removeprefix("-"))
    number = -amount if amount is not None and text.startswith("-") else amount
    if knob in _UNLIMITED and (text == "max" or (number is not None and (number < 0 or number >= _NO_LIMIT))):
        return "no limit"
    if number is None:
        return text
    if knob.startswith("memory.") and knob in _UNLIMITED:
        return size(number)
    unit = _UNITS.get(knob)
    return text if unit is None else f"{text} {unit}"


def exact_text(knob: str, value: object) -> str:
    """For tables: the file's own number, by which values can be compared, and its unit or ``268435456 (256 MiB)``."""
    raw, shown = value_text(value), setting_text(knob, value).removesuffix(_PERIODICALLY)
    return shown if shown == raw or shown.startswith(f"{raw} ") else f"{raw} ({shown})"


def file_text(file: str, value: object) -> str:
    """The text of a control file in the same form."""
    return exact_text(_knobs_of_files().get(file, ""), value)


@cache
def _knobs_of_files() -> Mapping[str, str]:
    from cgroupfs.knobs import CATALOG  # 5 ms that only tables of files pay

    # The first knob of a file: cpu.max is read as the quota. cpu.weight of cgroup v2 has no unit.
    knobs = [(form.file, knob.name) for knob in CATALOG.values() for form in knob.forms.values()]
    return {file: name for file, name in reversed(knobs) if file != "cpu.weight"}


_NO_LIMIT: Final = 1 << 62
"""cgroup v1 shows no limit of memory as the largest number of pages."""
_PERIODICALLY: Final = " a period"
_UNLIMITED: Final = frozenset(
    {"cpu.quota", "memory.max", "memory.high", "memory.soft", "memory.swap", "memory.min", "memory.low", "pids.max"}
)
_BEFORE_SOURCES: Final[Mapping[str, str]] = {"spec": " (by the runtime's spec)", "seen": " (last seen)"}
_UNITS: Final[Mapping[str, str]] = {
    "cpu.quota": f"µs{_PERIODICALLY}",
    "cpu.period": "µs",
    "cpu.burst": "µs",
    "cpu.weight": "shares",
    "pids.max": "processes",
}


def value_text(value: object) -> str:
    """A value of the document; a dash if it is missing, one line where the file has several."""
    return "-" if value is None or value == "" else str(value).replace("\n", "; ")


def before_text(event: Mapping[str, Any]) -> str:
    """The value before an event; where it was not read at a write, with where it is from."""
    if event["before"] is None and event["kind"] == "write":
        return "not read"
    source = _BEFORE_SOURCES.get(event.get("before_source") or "", "")
    return f"{value_text(event['before'])}{source}"
