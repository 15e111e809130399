"""Rows of learned peaks: given back as written, one damaged workload at a time, by clocks that may be wrong."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.headroom.histogram import HistogramRow
from reconciler.headroom.peak_rows import (
    ROWS,
    PeakRow,
    WorkloadRow,
    decode_row,
    decode_workload,
    elapsed_s,
    encode_row,
    encode_workload,
    row_of,
)
from reconciler.headroom.peaks import Workload

DAY_S = 86_400.0


def learned(minutes: int = 1500, *, cpu_milli: float = 2500.0, from_s: float = 1000.0) -> Workload:
    workload = Workload(from_s)
    for minute in range(minutes):
        workload.add(cpu_milli, 5e8, from_s + 60.0 * minute)
    return workload


@given(
    samples=st.lists(
        st.tuples(st.none() | st.floats(0.0, 2e6), st.none() | st.floats(0.0, 4e12), st.floats(1.0, 7200.0)),
        max_size=30,
    ),
    name=st.text(min_size=1, max_size=300),
    later=st.floats(0.0, 1e6),
)
def test_a_workload_is_given_back(
    samples: list[tuple[float | None, float | None, float]], name: str, later: float
) -> None:
    at_s = 1e5
    workload = Workload(at_s)
    for cpu_milli, memory, passed in samples:
        at_s += passed
        workload.add(cpu_milli, memory, at_s)
    row = encode_workload(name.encode("utf-8", "replace").decode(), workload, at_s, known=True)
    assert len(row) < 8192
    _, again, known = decode_workload(row, at_s + later)
    assert known
    assert again.counted(at_s + later) == pytest.approx(workload.counted(at_s))
    assert again.is_known(at_s + later) == workload.is_known(at_s)
    for rank in (0.5, 0.95):
        assert again.cpu.quantile(rank - 0.01) <= workload.cpu.quantile(rank) <= again.cpu.quantile(rank + 0.01)


def test_a_days_peak_is_known_again_after_a_restart_and_not_after_a_week() -> None:
    workload = learned()
    at_s = workload.last_s
    row = encode_workload("ns/Deployment/web", workload, at_s, known=True)
    for age_s, known in ((0.0, True), (1700.0, True), (1900.0, False), (7 * DAY_S, False)):
        name, again, _ = decode_workload(row, at_s)
        assert name == "ns/Deployment/web"
        assert again.is_known(at_s + age_s) is known
        assert again.peaks(known=True)[0] == workload.peaks(known=True)[0]


@pytest.mark.parametrize(
    ("boot", "uptime_s", "wall_s", "elapsed"),
    [
        ("one", 1600.0, -5e9, 600.0),
        ("one", 900.0, 1e6, 0.0),
        ("two", 10.0, 1e6 + 3600.0, 3600.0),
        ("two", 10.0, 0.0, 0.0),
        ("two", 10.0, 9e15, DAY_S),
        ("", 10.0, 1e6 + 60.0, 60.0),
    ],
)
def test_time_has_passed_by_the_boots_clock_else_by_the_wall_clock(
    boot: str, uptime_s: float, wall_s: float, elapsed: float
) -> None:
    row = decode_row(encode_row("one", 1000.0, 1e6, ()))
    assert elapsed_s(row, boot, uptime_s, wall_s) == elapsed


def test_one_damaged_workload_does_not_cost_the_others() -> None:
    good = encode_workload("ns/Pod/a", learned(3), 2000.0, known=False)
    row = decode_row(encode_row("one", 1.0, 1.0, (good, msgspec.msgpack.encode("no workload"), good)))
    names = []
    for raw in row.workloads:
        try:
            names.append(decode_workload(raw, 5.0)[0])
        except ValueError:
            names.append("")
    assert names == ["ns/Pod/a", "", "ns/Pod/a"]


@pytest.mark.parametrize(
    "change",
    [
        {"first_s": math.nan},
        {"last_s": math.inf},
        {"count": math.nan},
        {"first_s": 1.0, "last_s": 2.0},
        {"name": ""},
        {"name": "x" * 5000},
        {"cpu": HistogramRow(5.0, (9999, 1))},
        {"memory": HistogramRow(5.0, (1, 99_999))},
        {"cpu": HistogramRow(-1.0, (1, 1))},
    ],
)
def test_a_workload_that_is_not_one_is_refused(change: dict[str, object]) -> None:
    good = WorkloadRow("ns/Pod/a", True, 5.0, 0.0, 9.0, None, None)
    row = msgspec.msgpack.encode(msgspec.structs.replace(good, **change))
    with pytest.raises(ValueError, match=r"."):
        decode_workload(row, 0.0)


@pytest.mark.parametrize("row", [PeakRow("b", math.nan, 0.0, ()), PeakRow("b", 0.0, math.inf, ())])
def test_a_row_without_a_time_is_refused(row: PeakRow) -> None:
    with pytest.raises(ValueError, match="finite"):
        decode_row(msgspec.msgpack.encode(row))


def test_workloads_are_spread_over_the_rows() -> None:
    numbers = {row_of(f"ns/Deployment/{number}") for number in range(1000)}
    assert numbers == set(range(ROWS))
    assert row_of("ns/Pod/\ud800") in range(ROWS)
