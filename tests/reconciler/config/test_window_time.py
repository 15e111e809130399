"""Windows of time: the form of their times, and the window in force minute by minute, by the clock of its zone."""

import os
import struct
import sys
import zoneinfo
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, tzinfo
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconciler.config.window_time import (
    Decision,
    WindowTime,
    ZonedTime,
    check_when,
    decide,
    holds,
    local_name,
    overlapping,
    parse_when,
    zone_of,
)

DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
ALL = frozenset(range(7))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("weekdays 09:00-20:00 Europe/Berlin", WindowTime(frozenset(range(5)), 540, 1200, "Europe/Berlin")),
        ("weekends 00:00-24:00", WindowTime(frozenset({5, 6}), 0, 1440)),
        ("daily 22:00-6:00 UTC", WindowTime(ALL, 1320, 360, "UTC")),
        ("Mon 0:00-0:01", WindowTime(frozenset({0}), 0, 1)),
        ("fri-mon 23:30-00:30", WindowTime(frozenset({4, 5, 6, 0}), 1410, 30)),
        ("monday,wed-friday 01:00-02:00", WindowTime(frozenset({0, 2, 3, 4}), 60, 120)),
        ("tue-tue 01:00-02:00", WindowTime(frozenset({1}), 60, 120)),
        ("sat,weekdays 08:00-24:00 Etc/GMT+5", WindowTime(frozenset(range(6)), 480, 1440, "Etc/GMT+5")),
    ],
)
def test_times_are_read(text: str, expected: WindowTime) -> None:
    assert parse_when(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected DAYS HH:MM-HH:MM"),
        ("09:00-20:00", "expected DAYS HH:MM-HH:MM"),
        ("daily 09:00-20:00 Europe/Berlin x", "expected DAYS HH:MM-HH:MM"),
        (f"daily 09:00-20:00 {'x' * 300}", "expected DAYS HH:MM-HH:MM"),
        ("workdays 09:00-20:00", "days: expected daily, weekdays, weekends"),
        ("mon- 09:00-20:00", "days: expected"),
        ("mon,, 09:00-20:00", "days: expected"),
        ("m 09:00-20:00", "got 'm'"),
        ("daily 9-20", "times: expected HH:MM-HH:MM"),
        ("daily 09:60-20:00", "times: expected HH:MM-HH:MM"),
        ("daily 24:00-06:00", "times: expected HH:MM-HH:MM"),
        ("daily 09:00-24:01", "times: expected HH:MM-HH:MM"),
        ("daily \u0660\u0669:00-20:00", "times: expected HH:MM-HH:MM"),
        ("daily 09:00-09:00", "the window is empty"),
        ("daily 09:00-20:00 ../../etc/passwd", "zone: expected a name"),
        ("daily 09:00-20:00 /etc/localtime", "zone: expected a name"),
        ("daily 09:00-20:00 Europe/", "zone: expected a name"),
        ("daily 09:00-20:00 Europe/Nowhere", "zone Europe/Nowhere: unknown"),
        ("daily 09:00-20:00 Europe", "zone Europe: "),
    ],
)
def test_a_mistake_is_named_with_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        check_when(text)


def test_all_mistakes_of_one_text_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"days: .*; times: .*; zone: "):
        check_when("workdays 9-20 Europe/Berl!n")


@pytest.fixture
def no_zone_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "tzdata", None)
    zoneinfo.reset_tzpath([str(tmp_path)])
    yield
    zoneinfo.reset_tzpath()


@pytest.mark.usefixtures("no_zone_data")
def test_without_zone_data_one_message_names_what_is_missing() -> None:
    with pytest.raises(ValueError, match="no zone data on this node; install tzdata, or write UTC"):
        check_when("daily 09:00-20:00 Europe/Berlin")
    check_when("daily 09:00-20:00 UTC")


@pytest.fixture
def link(tmp_path: Path) -> Path:
    """Where a node has its zone; there is none yet."""
    (tmp_path / "etc").mkdir()
    return tmp_path / "etc/localtime"


def test_without_a_zone_the_nodes_applies(tmp_path: Path, link: Path) -> None:
    assert zone_of(None, str(tmp_path)) is UTC
    link.write_bytes(data_of("Asia/Kathmandu"))
    zone = zone_of(None, str(tmp_path))
    assert datetime(2026, 1, 1, tzinfo=zone).isoformat() == "2026-01-01T00:00:00+05:45"
    link.write_bytes(b"TZif, or not")
    with pytest.raises(ValueError, match=r"the node's zone .* is not zone data"):
        zone_of(None, str(tmp_path))
    link.unlink()
    os.mkfifo(link)
    with pytest.raises(ValueError, match=r"the node's zone .* cannot be read"):
        zone_of(None, str(tmp_path))


@pytest.mark.parametrize(
    "garble",
    [
        pytest.param(lambda data: data[:-1], id="the last line without an end"),
        pytest.param(lambda data: data[: len(data) // 2], id="half of it"),
        pytest.param(lambda data: data[:32] + b"\xff" * 4 + data[36:], id="more entries than there are"),
        pytest.param(lambda data: data[: data.rindex(b"\n", 0, -1)] + b"x" + data[-20:], id="no line where one begins"),
        pytest.param(lambda data: data[: data.rindex(b"\n", 0, -1)] + b"\n\xff\n", id="no text"),
    ],
)
def test_garbled_zone_data_is_an_error_and_read_to_its_end_only(
    tmp_path: Path, link: Path, monkeypatch: pytest.MonkeyPatch, garble: Callable[[bytes], bytes]
) -> None:
    content = garble(data_of("Europe/Berlin"))
    link.write_bytes(content)
    with pytest.raises(ValueError, match=r"the node's zone .* is not zone data"):
        zone_of(None, str(tmp_path))
    monkeypatch.setattr(zoneinfo, "TZPATH", (str(tmp_path),))
    (tmp_path / "Berlin").write_bytes(content)
    with pytest.raises(ValueError, match="zone Berlin: its data cannot be read"):
        zone_of("Berlin")


def test_an_offset_that_no_clock_has_is_an_error_before_any_window_uses_it(tmp_path: Path, link: Path) -> None:
    """It is in a type of local time of the second block."""
    whole = data_of("Asia/Kathmandu")
    offset = struct.pack(">i", 20_700)
    link.write_bytes(whole[: whole.rindex(b"\n", 0, -1)].replace(offset, struct.pack(">i", 900_000)) + b"\n\n")
    with pytest.raises(ValueError, match="is not zone data"):
        zone_of(None, str(tmp_path))


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("/usr/share/zoneinfo/America/Argentina/Salta", "America/Argentina/Salta"),
        ("../usr/share/zoneinfo/Etc/GMT+5", "Etc/GMT+5"),
        ("/usr/share/zoneinfo/../../etc/passwd", None),
        ("/etc/timezone", None),
    ],
)
def test_the_name_of_the_nodes_zone_is_that_of_its_link(
    tmp_path: Path, link: Path, target: str, name: str | None
) -> None:
    link.symlink_to(target)
    assert local_name(str(tmp_path)) == name


def test_a_link_below_a_root_names_a_file_of_that_node(tmp_path: Path, link: Path) -> None:
    """As most systems have it: this process would follow it to its own zone data."""
    link.symlink_to("/usr/share/zoneinfo/Europe/Paris")
    # Its zone data is not below the root: the zone is known by its name.
    winter = datetime(2026, 1, 1)  # noqa: DTZ001 - a clock's time, in each zone
    assert winter.replace(tzinfo=zone_of(None, str(tmp_path))).isoformat() == "2026-01-01T00:00:00+01:00"
    file = tmp_path / "usr/share/zoneinfo/Europe/Paris"
    file.parent.mkdir(parents=True)
    file.write_bytes(data_of("Asia/Kathmandu"))
    assert winter.replace(tzinfo=zone_of(None, str(tmp_path))).isoformat() == "2026-01-01T00:00:00+05:45"
    link.unlink()
    link.symlink_to("/usr/share/zoneinfo/Europe/Nowhere")
    with pytest.raises(ValueError, match="zone Europe/Nowhere: unknown"):
        zone_of(None, str(tmp_path))
    link.unlink()
    link.symlink_to("../../../../../../../../proc/self/environ")
    assert zone_of(None, str(tmp_path)) is UTC
    file.unlink()
    file.symlink_to("/proc/self/environ")
    link.unlink()
    link.symlink_to("../usr/share/zoneinfo/Europe/Paris")
    with pytest.raises(ValueError, match="points outside the copied node"):
        zone_of(None, str(tmp_path))


def data_of(key: str) -> bytes:
    for directory in zoneinfo.TZPATH:
        if (file := Path(directory, key)).exists():
            return file.read_bytes()
    return resources.files("tzdata").joinpath("zoneinfo", key).read_bytes()


zone_once = cache(zone_of)


def zoned(text: str, zone: str = "UTC") -> ZonedTime:
    time = parse_when(text)
    return ZonedTime(time, zone_once(time.zone or zone))


def epoch(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp())


@lru_cache(maxsize=8)
def shown(zone: tzinfo, at: int) -> tuple[int, int]:
    """Weekday and minute of the day that a clock in the zone shows."""
    local = datetime.fromtimestamp(at, zone)
    return local.weekday(), local.hour * 60 + local.minute


def shown_within(window: ZonedTime, at: int) -> bool:
    day, minute = shown(window.zone, at)
    days, begin, end, _ = window.time
    if end > begin:
        return day in days and begin <= minute < end
    return (day in days and minute >= begin) or ((day - 1) % 7 in days and minute < end)


CHANGES = {
    "Berlin, forward": ("Europe/Berlin", "2026-03-28T00:00:00+00:00"),
    "Berlin, back": ("Europe/Berlin", "2026-10-24T00:00:00+00:00"),
    "Lord Howe, half an hour back": ("Australia/Lord_Howe", "2026-04-03T12:00:00+00:00"),
    "Lord Howe, half an hour forward": ("Australia/Lord_Howe", "2026-10-02T12:00:00+00:00"),
    "Santiago, back at midnight": ("America/Santiago", "2026-04-03T12:00:00+00:00"),
    "Santiago, forward at midnight": ("America/Santiago", "2026-09-04T12:00:00+00:00"),
    "Cairo, forward at midnight": ("Africa/Cairo", "2026-04-22T20:00:00+00:00"),
    "Cairo, back at midnight": ("Africa/Cairo", "2026-10-28T20:00:00+00:00"),
    "Apia, without a Friday": ("Pacific/Apia", "2011-12-28T12:00:00+00:00"),
    "Casablanca, back for a month": ("Africa/Casablanca", "2026-02-14T00:00:00+00:00"),
}
TIMES = (
    "daily 00:00-24:00",
    "daily 02:15-02:45",
    "daily 23:30-00:30",
    "sat,sun 22:00-06:00",
    "weekdays 00:00-01:00",
    "fri-sun 01:30-03:00",
    "sun 00:00-00:01",
)


@pytest.mark.parametrize("name", CHANGES)
def test_the_window_and_the_next_change_are_right_in_every_minute_around_a_change_of_the_clock(name: str) -> None:
    key, start = CHANGES[name]
    begin = epoch(start)
    windows = [zoned(text, key) for text in TIMES[1:]]
    minutes = range(begin, begin + 3 * 86_400, 60)
    held = [[shown_within(window, minute) for window in windows] for minute in minutes]
    assert [[holds(window, minute + 59) for window in windows] for minute in minutes] == held
    first = [next((number for number, is_held in enumerate(row) if is_held), None) for row in held]
    changes = [minutes[number] for number in range(1, len(minutes)) if first[number] != first[number - 1]]
    assert len(changes) > 6
    decision = decide(windows, begin)
    for number, minute in enumerate(minutes):
        if not decision.covers(minute):
            assert decision.until == minute
            assert decision.then == first[number]
            decision = decide(windows, minute)
        assert decision.window == first[number]
    assert [change for change in changes if decide(windows, change - 0.5).until != change] == []


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(CHANGES)),
    st.lists(st.tuples(st.sampled_from(TIMES), st.sampled_from(["", "UTC", "Asia/Kathmandu"])), min_size=1, max_size=4),
    st.integers(0, 3 * 86_400),
)
def test_nothing_changes_before_the_next_change(name: str, texts: list[tuple[str, str]], after: int) -> None:
    key, start = CHANGES[name]
    windows = [zoned(text, zone or key) for text, zone in texts]
    at = epoch(start) + after
    decision = decide(windows, at)

    def first(instant: int) -> int | None:
        return next((number for number, window in enumerate(windows) if shown_within(window, instant)), None)

    assert decision.window == first(at)
    last = at + 2 * 86_400 if decision.until is None else int(decision.until)
    assert {first(minute) for minute in range(at, last, 60)} <= {decision.window}
    if decision.until is not None:
        assert decision.then == first(last) != decision.window


def test_a_time_that_no_clock_shows_is_in_no_window_and_one_shown_twice_is_within_twice() -> None:
    window = zoned("daily 02:15-02:45", "Europe/Berlin")
    forward, back = epoch("2026-03-29T00:00:00+01:00"), epoch("2026-10-25T00:00:00+02:00")
    assert sum(holds(window, minute) for minute in range(forward, forward + 6 * 3600, 60)) == 0
    assert sum(holds(window, minute) for minute in range(back, back + 6 * 3600, 60)) == 60


def test_a_window_of_one_hour_a_week_is_found_over_a_week_that_lacks_it() -> None:
    window = zoned("sun 02:15-02:45", "Europe/Berlin")
    decision = decide([window], epoch("2026-03-22T03:00:00+01:00"))
    assert decision.until == epoch("2026-04-05T02:15:00+02:00")


@pytest.mark.parametrize(
    ("decision", "at", "covered"),
    [
        (Decision(0, 100.0, 200.0, None), 100.0, True),
        (Decision(0, 100.0, 200.0, None), 199.9, True),
        (Decision(0, 100.0, 200.0, None), 200.0, False),
        (Decision(0, 100.0, 200.0, None), 99.9, False),
        (Decision(None, 100.0), 1e6, True),
        (Decision(None, 100.0), 2e6, False),
    ],
)
def test_a_decision_holds_from_its_moment_to_the_next_change_and_not_for_a_clock_that_was_set_back(
    decision: Decision, at: float, covered: bool
) -> None:
    assert decision.covers(at) is covered


@pytest.mark.parametrize("at", [-1e18, -1.0, 0.0, 1e3, 2.4e11, 1e18])
def test_any_clock_has_a_decision(at: float) -> None:
    windows = [zoned(text, "America/Santiago") for text in TIMES]
    assert decide(windows, at).since == at
    assert decide([], at) == Decision(None, at)


def test_windows_that_hold_together_are_named_once_the_first_of_the_list_first() -> None:
    windows = [
        zoned("weekdays 09:00-20:00"),
        zoned("daily 22:00-06:00"),
        zoned("sat 05:00-07:00"),
        zoned("fri 11:00-12:00", "Asia/Kathmandu"),
    ]
    assert list(overlapping(windows, epoch("2026-11-28T12:00:00+00:00"))) == [(1, 2), (1, 3)]
    assert list(overlapping(windows[:2] + windows[:1], 1.8e9)) == [(0, 2)]
