"""Groups and values of the document as text; numbers and times are in `reconciler.runtime.format`."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

from cgroupfs.bounded import digits
from reconciler.runtime.format import clock, size

_NO_WINDOW: Final = "no window"


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


def without_file(text: str, file: str | None) -> str:
    """A message without the path of its control file, where place and file are shown beside it."""
    path, separator, rest = text.partition(f"/{file}: ")
    return rest if file and separator and path.startswith("/") and ": " not in path else text


def unmeasured(sources: Sequence[Mapping[str, Any]]) -> str:
    """The reason for an unknown CPU use: its source fails, or the second reading is missing."""
    failing = any(source["name"] == "cpu" and not source["ok"] for source in sources)
    return "CPU use: cannot be read (source cpu)" if failing else "CPU use: measuring…"


def setting_text(knob: str, value: object, file: str | None = None) -> str:
    """A knob's value with its unit: ``40000 µs a period``, ``256 MiB``, ``no limit``; CPU lists as they are.

    ``file``: the control file. cgroup v2 has a weight (``weight 39``) where v1 has shares; unknown: shares.
    """
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
    if knob in _WEIGHTS or file == _WEIGHT:
        return f"weight {text}"
    unit = _UNITS.get(knob)
    return text if unit is None else f"{text} {unit}"


def exact_text(knob: str, value: object, file: str | None = None) -> str:
    """For tables: the file's own number, by which values can be compared, and its unit or ``268435456 (256 MiB)``."""
    raw, shown = value_text(value), setting_text(knob, value, file).removesuffix(_PERIODICALLY)
    return shown if raw in {shown, shown.removeprefix("weight ")} or shown.startswith(f"{raw} ") else f"{raw} ({shown})"


def file_text(file: str, value: object) -> str:
    """The text of a control file in the same form."""
    return exact_text(_knobs().get(file, ""), value, file)


@cache
def _knobs() -> Mapping[str, str]:
    """Knobs by their files; of several with one file the first."""
    from cgroupfs.knobs import CATALOG  # 3 ms, only where files are shown

    return {form.file: knob.name for knob in reversed(list(CATALOG.values())) for form in knob.forms.values()}


_WEIGHT: Final = "cpu.weight"
_WEIGHTS: Final = frozenset({"blkio.weight", "blkio.bfq_weight", "io.weight", "io.bfq_weight"})
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
    return f"{file_text(event['file'] or '', event['before'])}{source}"


def window_text(window: Mapping[str, Any]) -> str:
    """``office until 20:00:00, then no window``; empty where no windows are configured."""
    if not window.get("names"):
        return ""
    name = window["name"] or _NO_WINDOW
    if window["until"] is None:
        return f"{name}, no change within two weeks"
    return f"{name} until {clock(window['until'])}, then {window['then'] or _NO_WINDOW}"
