"""Windows of time: which one holds at an instant, and when that changes next. Pure but for reading zone data.

A window holds while a clock in its zone shows a time within it: from its begin, up to and without its end, on its days.
So where clocks go forward a time that no clock shows belongs to no window, and where they go back what is shown twice
is within twice. The part after midnight belongs to the day on which the window began. Of several windows that hold at
once the first of the list is in force.

Units: instants are seconds since the epoch, times of day minutes since midnight, days are 0 (Monday) to 6.
Source: PEP 495 (times that are shown twice), PEP 615 (zone data). Loaded only where a configuration has windows.
"""

import os
import re
import struct
import zoneinfo
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta, tzinfo
from io import BytesIO
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple, final
from zoneinfo import ZoneInfo

from msgspec import Meta, Struct

from cgroupfs.bounded import read_file
from reconciler.runtime import safe_files
from reconciler.runtime.safe_files import FileRule
from reconciler.settings.schema import lazy_struct

FORM: Final = "DAYS HH:MM-HH:MM [ZONE], such as weekdays 09:00-20:00 Europe/Berlin"
_NAMES: Final = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_GROUPS: Final = {"daily": range(7), "weekdays": range(5), "weekends": range(5, 7)}
_SPAN: Final = re.compile(r"([0-9]{1,2}):([0-9]{2})-([0-9]{1,2}):([0-9]{2})", re.ASCII)
_ZONE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9+_-]*(/[A-Za-z0-9][A-Za-z0-9+_-]*){0,3}", re.ASCII)
_LONGEST: Final = 200
_LARGEST: Final = 64 << 10
"""Bytes: the zone with the most changes takes 4 KiB."""
_DAY_MIN: Final = 1440
_HOUR_MIN: Final = 60
_DAYS_AHEAD: Final = 15
"""A window of one day a week holds within these, also where one of its weeks lacks the hour."""
_PROBED: Final = 1_577_836_800, 2_524_608_000
"""From 2020 to 2050, each month: instants of which the offset must be one."""
_PROBE_EACH_S: Final = 30 * 86_400
_PROBE_S: Final = 6 * 3600
"""Two changes of a zone's offset are further apart."""
_EARLIEST: Final = 86_400 * 366
"""The days before it exist, too: `_local` does not go below the epoch."""
_LATEST: Final = 250_000_000_000
"""The year 9892; with the days around it all dates exist in every zone."""
_LOCALTIME: Final = "etc/localtime"
_BELOW: Final = "/zoneinfo/"


class WindowTime(NamedTuple):
    """When a window holds."""

    days: frozenset[int]
    begin: int  # minutes since midnight
    end: int  # not after the begin: on the next day
    zone: str | None = None  # None: the node's


class ZonedTime(NamedTuple):
    time: WindowTime
    zone: tzinfo


class Decision(NamedTuple):
    """The window in force from `Decision.since` to `Decision.until`."""

    window: int | None  # by its place in the list; None: none
    since: float
    until: float | None = None  # None: no change within `_DAYS_AHEAD` days, for which the decision holds
    then: int | None = None  # the window in force from then on

    def covers(self, at: float) -> bool:
        """Whether the decision is the one for this instant, too. An earlier instant is not covered: clocks are set."""
        until = self.since + _DAYS_AHEAD * 86_400 if self.until is None else self.until
        return self.since <= at < until


def parse_when(text: str) -> WindowTime:
    """`FORM`: days are names (``mon``, ``monday``), ranges and lists of them, daily, weekdays, weekends.

    Errors: `ValueError` with every mistake; a zone is checked for its form only.
    """
    words = text.split()
    if len(text) > _LONGEST or not 2 <= len(words) <= 3:
        raise ValueError(f"expected {FORM}; got {text[:_LONGEST]!r}")
    problems: list[str] = []
    days = frozenset[int]()
    begin = end = 0
    try:
        days = _days(words[0].lower())
    except ValueError as exc:
        problems.append(str(exc))
    try:
        begin, end = _times(words[1])
    except ValueError as exc:
        problems.append(str(exc))
    zone = words[2] if len(words) == 3 else None
    if zone is not None and not _ZONE.fullmatch(zone):
        problems.append(f"zone: expected a name such as Europe/Berlin or UTC; got {zone!r}")
    if problems:
        raise ValueError("; ".join(problems))
    return WindowTime(days, begin, end, zone)


def check_when(text: str) -> None:
    """The check of a file's value: as `parse_when`, and the data of a named zone is here. Errors: `ValueError`."""
    if (zone := parse_when(text).zone) is not None:
        zone_of(zone)


def zone_of(name: str | None, root: str = "/") -> tzinfo:
    """A zone by its name; None: that of the node whose files are below ``root``, UTC where it has none.

    Errors: `ValueError` where the zone data has no such zone, or there is none at all.
    """
    if name is None:
        return _node_zone(root)
    if name == "UTC":
        return UTC
    if not _ZONE.fullmatch(name):
        raise ValueError(f"zone: expected a name such as Europe/Berlin or UTC; got {name[:_LONGEST]!r}")
    try:
        # Not from the cache: a reload reads data that an update has replaced.
        file = next((path for place in zoneinfo.TZPATH if os.path.isfile(path := os.path.join(place, name))), None)
        return _parsed(read_file(file, _LARGEST), name) if file is not None else ZoneInfo.no_cache(name)
    except (OSError, ValueError) as exc:  # ZoneInfoNotFoundError is a KeyError
        raise ValueError(f"zone {name}: its data cannot be read: {exc}") from exc
    except KeyError as exc:
        try:
            # Is it this zone that is missing, or the zone data as a whole?
            ZoneInfo.no_cache("Europe/London")
        except (KeyError, OSError, ValueError):
            raise ValueError(f"zone {name}: no zone data on this node; install tzdata, or write UTC") from exc
        raise ValueError(f"zone {name}: unknown; expected a name of the zone data, such as Europe/Berlin") from exc


def local_name(root: str = "/") -> str | None:
    """The name of the node's zone, as its link has it; None: it has no link to zone data."""
    try:
        name = os.readlink(os.path.join(root, _LOCALTIME)).rpartition(_BELOW)[2]
    except OSError:
        return None
    return name if _ZONE.fullmatch(name) else None


def _node_zone(root: str) -> tzinfo:
    path = os.path.join(root, _LOCALTIME)
    try:
        content = read_file(path, _LARGEST) if root == "/" else _read_below(root)
    except FileNotFoundError:
        if root != "/" and (name := local_name(root)) is not None:
            # A copy of /etc without the zone data that its link names: this machine's data of that name.
            return zone_of(name)
        return UTC
    except OSError as exc:
        raise ValueError(f"the node's zone ({path}) cannot be read: {exc.strerror}; name one") from exc
    try:
        return _parsed(content, local_name(root))
    except ValueError as exc:
        raise ValueError(f"the node's zone ({path}) is not zone data: {exc}; name one") from exc


class _Whole(BytesIO):
    """Zone data of which each read gets all it asks for: `zoneinfo` does not return from a last line without an end."""

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(size)
        if size is not None and 0 <= size != len(content):
            raise ValueError("it ends too early")
        return content


def _parsed(content: bytes, name: str | None) -> tzinfo:
    """Errors: `ValueError`, also for offsets that no clock has: they would be one at each later use."""
    try:
        zone = ZoneInfo.from_file(_Whole(content), key=name)
        for at in range(_PROBED[0], _PROBED[1], _PROBE_EACH_S):
            _local(at, zone).utcoffset()
    # What `zoneinfo` raises for data that it does not check.
    except (AssertionError, LookupError, OverflowError, struct.error) as exc:
        raise ValueError(f"garbled: {exc}") from exc
    return zone


def _read_below(root: str) -> bytes:
    """The zone of the node below ``root``, whose link names a file of that node and not of this process."""
    path = f"/{_LOCALTIME}"
    with suppress(OSError):
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(f"{root}{path}")))
    return safe_files.read_file(path, FileRule.OPERATOR, root=root, largest=_LARGEST)


def holds(window: ZonedTime, at: float) -> bool:
    """Whether the window's clock shows a time within it."""
    local = _local(at, window.zone)
    minute, day = local.hour * _HOUR_MIN + local.minute, local.weekday()
    days, begin, end, _ = window.time
    if end > begin:
        return day in days and begin <= minute < end
    return (day in days and minute >= begin) or ((day - 1) % 7 in days and minute < end)


def in_force(windows: Sequence[ZonedTime], at: float) -> int | None:
    """The first window that holds, by its place in the list."""
    return next((index for index, window in enumerate(windows) if holds(window, at)), None)


def decide(windows: Sequence[ZonedTime], at: float) -> Decision:
    """The window in force at an instant, and the next change."""
    index = in_force(windows, at)
    if not windows:
        return Decision(index, at)
    begin = min(max(at, _EARLIEST), _LATEST)
    for instant in _instants(windows, begin):
        if (then := in_force(windows, instant)) != index:
            return Decision(index, at, float(instant), then)
    return Decision(index, at)


def overlapping(windows: Sequence[ZonedTime], at: float) -> Iterator[tuple[int, int]]:
    """Pairs of windows, the earlier of the list first, that both hold at some moment of the weeks after ``at``."""
    # Between two of these instants the same windows hold.
    instants = [at, *_instants(windows, min(max(at, _EARLIEST), _LATEST))]
    held = [[index for index, window in enumerate(windows) if holds(window, instant)] for instant in instants]
    pairs = {(first, second) for some in held for at, first in enumerate(some) for second in some[at + 1 :]}
    yield from sorted(pairs)


def _instants(windows: Sequence[ZonedTime], after: float) -> Iterator[int]:
    """Every instant after ``after`` at which a window may begin or end, in order, of `_DAYS_AHEAD` days."""
    zones = list(dict.fromkeys(window.zone for window in windows))
    first = int(after // 86_400) - 1
    last = int(after)
    for day in range(first, first + _DAYS_AHEAD + 2):
        begin, end = day * 86_400, (day + 1) * 86_400
        found = {moment for zone in zones for moment in _changes(zone, begin, end)}
        for window in windows:
            found.update(_of_day(window, begin, end))
        for moment in sorted(found):
            if moment > last:
                last = moment
                yield moment


def _of_day(window: ZonedTime, begin: int, end: int) -> Iterator[int]:
    """The instants within these at which the window's clock shows its begin or its end."""
    # A day of UTC begins and ends on different dates of the zone.
    low, high = _local(begin, window.zone).date(), _local(end, window.zone).date()
    for offset in range((high - low).days + 1):
        for minute in (window.time.begin, window.time.end % _DAY_MIN):
            for moment in _moments(low + timedelta(days=offset), minute, window.zone):
                if begin <= moment < end:
                    yield moment


def _moments(day: date, minute: int, zone: tzinfo) -> Iterator[int]:
    """When a clock of the zone shows this, once or twice; of a time that is not shown, instants near its gap."""
    for fold in (0, 1):
        shown = datetime(day.year, day.month, day.day, minute // 60, minute % 60, tzinfo=zone, fold=fold)
        yield int(shown.timestamp())


def _changes(zone: tzinfo, begin: int, end: int) -> Iterator[int]:
    """The instants within these at which the zone's offset changes, to the second."""
    low = begin
    while low < end:
        high = min(low + _PROBE_S, end)
        if _offset(low, zone) != (after := _offset(high, zone)):
            same, other = low, high
            # By bisection: one change is between the two.
            while other - same > 1:
                middle = (same + other) // 2
                same, other = (same, middle) if _offset(middle, zone) == after else (middle, other)
            yield other
        low = high


def _offset(at: int, zone: tzinfo) -> timedelta | None:
    return _local(at, zone).utcoffset()


def _local(at: float, zone: tzinfo) -> datetime:
    return datetime.fromtimestamp(min(max(at, 0.0), _LATEST + 86_400 * 30), zone)


def _days(text: str) -> frozenset[int]:
    days: set[int] = set()
    for part in text.split(","):
        if part in _GROUPS:
            days.update(_GROUPS[part])
            continue
        first, dash, last = part.partition("-")
        begin, end = _day(first), _day(last if dash else first)
        if begin is None or end is None:
            raise ValueError(
                f"days: expected daily, weekdays, weekends, or days such as mon-fri or sat,sun; got {part!r}"
            )
        days.update((begin + step) % 7 for step in range((end - begin) % 7 + 1))
    return frozenset(days)


def _day(text: str) -> int | None:
    return next((number for number, name in enumerate(_NAMES) if text in {name, name[:3]}), None)


def _times(text: str) -> tuple[int, int]:
    """Minutes; an end of 24:00 is midnight."""
    match = _SPAN.fullmatch(text)
    expected = "expected HH:MM-HH:MM from 00:00 to 24:00"
    if match is None:
        raise ValueError(f"times: {expected}; got {text!r}")
    hours, minutes, last_hours, last_minutes = map(int, match.groups())
    begin, end = hours * _HOUR_MIN + minutes, last_hours * _HOUR_MIN + last_minutes
    if max(minutes, last_minutes) >= _HOUR_MIN or begin >= _DAY_MIN or end > _DAY_MIN:
        raise ValueError(f"times: {expected}; got {text!r}")
    if begin == end:
        raise ValueError(f"times: the window is empty: {text!r}; write 00:00-24:00 for the whole day")
    return begin, end


if TYPE_CHECKING:
    from reconciler.detectors.rule import RuleConfig
else:
    RuleConfig = lazy_struct("reconciler.detectors.rule", "RuleConfig")

SETTINGS: Final[Mapping[str, str]] = {
    "protect": "protect",
    "limit_percent": "policies.reclaimed.budget.limit_percent",
    "reserve_percent": "policies.reclaimed.budget.harm.reserve_percent",
    "memory_reserve_percent": "headroom.memory.reserve_percent",
    "rules": "interference.rules",
}
"""The keys of a window, and the setting whose value each is while the window is in force."""
_PERCENT: Final = "in place of {}"


class WindowConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A time, and what is otherwise while it lasts. The mode is the same in every window."""

    name: Annotated[
        str,
        Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$", description="its name in events, metrics and reports"),
    ]
    when: Annotated[
        str,
        Meta(
            description=f"{FORM}; without a zone the node's",
            extra={"check": "reconciler.config.window_time:check_when"},
        ),
    ]
    protect: Annotated[Literal["cpu", "cpu+memory", "full"] | None, Meta(description="another level of protect")] = None
    limit_percent: Annotated[
        Annotated[int, Meta(ge=1, le=100)] | None, Meta(description=_PERCENT.format(SETTINGS["limit_percent"]))
    ] = None
    reserve_percent: Annotated[
        Annotated[int, Meta(ge=0, le=50)] | None, Meta(description=_PERCENT.format(SETTINGS["reserve_percent"]))
    ] = None
    memory_reserve_percent: Annotated[
        Annotated[int, Meta(ge=0, le=90)] | None, Meta(description=_PERCENT.format(SETTINGS["memory_reserve_percent"]))
    ] = None
    rules: Annotated[
        Mapping[str, RuleConfig], Meta(description="rules by name, key by key above those of interference.rules")
    ] = {}


def moved(index: int) -> Mapping[tuple[str | int, ...], str]:
    """Where the values of a window are written, and the settings that have them while it is in force."""
    return {("windows", index, key): setting for key, setting in SETTINGS.items()}


@final
class WindowTable:
    def __init__(self, windows: Sequence[WindowConfig], root: str = "/", zone: str | None = None) -> None:
        """``zone``: of those without one; None: that of the node below ``root``.

        Errors: `ValueError` where a zone has no data.
        """
        self.names = tuple(window.name for window in windows)
        times = [parse_when(window.when) for window in windows]
        self._zoned = [ZonedTime(time, zone_of(time.zone or zone, root)) for time in times]

    def decide(self, at: float) -> Decision:
        """The window in force at an instant (seconds since the epoch), and the next change."""
        return decide(self._zoned, at)

    def name(self, index: int | None) -> str | None:
        """Of a window; None: no window is in force."""
        return None if index is None else self.names[index]

    def overlaps(self, at: float) -> Iterator[str]:
        """A line for each two windows that hold together at some moment of the weeks after ``at``."""
        for first, second in overlapping(self._zoned, at):
            yield f"windows {self.names[first]} and {self.names[second]} overlap: {self.names[first]} is in force then"
