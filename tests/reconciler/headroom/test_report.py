"""Headroom reports: the document, what the store keeps, and the reporter's file."""

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.control.persistence import encoded
from reconciler.headroom.cpu import HeadroomConfig, HeadroomLaw
from reconciler.headroom.report import HEADROOM, HeadroomReport, HeadroomState, read_kept
from reconciler.telemetry.metrics import MetricsSnapshot
from state.memory import NodeMemoryReading
from state.model import NodeCpu, Pools
from state.schema import ASSIGNMENTS
from state.store import Store, StoreBatch
from state.topology import uniform
from tests.fakes.clock import Clock
from tests.fakes.constants import varied
from tests.reconciler.nodes import cpu, cpus
from tests.reconciler.telemetry.rendered import render

TOPOLOGY = uniform(nodes=2, cores=8, threads=1)
IDLE = dict.fromkeys(range(8), 1.0)


def pools(reclaimed: str = "2-5") -> Pools:
    return Pools(
        online_cpus=CpuSet.span(8),
        reserved=EMPTY,
        dedicated={},
        shared=CpuSet.span(8),
        reclaimed=cpus(reclaimed),
        budget_milli=100_000,
    )


def report(clock: Clock, kept: HeadroomState | None = None, **config: Any) -> HeadroomReport:
    return HeadroomReport(varied(HeadroomConfig(), **config), kept, node="n1", clock=clock, wall=clock.wall)


def look(headroom_report: HeadroomReport, clock: Clock, seconds: int = 60, *, known: bool = True) -> None:
    for _ in range(seconds):
        clock.now += 1
        headroom_report.update(pools(), TOPOLOGY, cpu(idle=IDLE) if known else None, clock.now)


def looked(**config: Any) -> tuple[HeadroomReport, Clock]:
    """A minute of readings."""
    clock = Clock()
    headroom_report = report(clock, **config)
    look(headroom_report, clock)
    return headroom_report, clock


def test_before_the_first_plan_nothing_is_said() -> None:
    clock = Clock()
    headroom_report = report(clock)
    headroom_report.update(None, TOPOLOGY, cpu(idle=IDLE), clock.now)
    assert headroom_report.status() == {
        "milli": 0,
        "reason": "not measured yet",
        "known_s": None,
        "closed": False,
        "nodes": [],
        "memory": None,
    }
    assert headroom_report.persisted() is None


def test_the_document_has_each_memory_node() -> None:
    headroom_report, _ = looked()
    assert headroom_report.status() == {
        "milli": 4000,
        "reason": "mean of 30 s",
        "closed": False,
        "known_s": 0.0,
        "nodes": [
            {"numa_node": 0, "milli": 2000, "supply_milli": 2000, "cpus": "2-3"},
            {"numa_node": 1, "milli": 2000, "supply_milli": 2000, "cpus": "4-5"},
        ],
        "memory": None,
    }


def test_a_scrape_has_one_series_for_each_node() -> None:
    text, _ = render(MetricsSnapshot(version="1", mode="enforce", headroom_milli={"0": 2000, "1": 300}))
    shown = [line for line in text.decode().splitlines() if line.startswith("bypassd_headroom_cpus")]
    assert shown == ['bypassd_headroom_cpus{numa_node="0"} 2.0', 'bypassd_headroom_cpus{numa_node="1"} 0.3']


def test_the_store_is_not_written_for_each_reading() -> None:
    headroom_report, clock = looked()
    rows = set()
    for _ in range(600):
        look(headroom_report, clock, 1)
        kept = headroom_report.persisted()
        assert kept is not None
        assert clock.wall() - kept.at <= headroom_report.config.unknown_hold_s / 2
        rows.add(kept.at)
    assert len(rows) <= 6


def test_a_restart_keeps_the_promise_and_a_long_absence_does_not() -> None:
    headroom_report, clock = looked()
    kept = headroom_report.persisted()
    clock.now += 60
    assert report(clock, kept).state.amounts == {0: 2000, 1: 2000}
    clock.now += 600
    assert report(clock, kept).state.amounts == {}


class MadePeaks:
    """What the peaks leave, as a test has it."""

    def __init__(self, left: int | None) -> None:
        self.left = left
        self.seconds = 0

    def second(self, cpu: NodeCpu | None) -> None:
        self.seconds += cpu is not None

    def cpu_left(self, pools: Pools) -> int | None:
        return self.left if pools.reclaimed else None

    def memory_left(self, node: NodeMemoryReading, reserve_bytes: int) -> int | None:
        return None if self.left is None else min(self.left, node.total_bytes - reserve_bytes)


def test_by_the_law_of_peaks_no_more_is_promised_than_they_leave() -> None:
    clock, peaks = Clock(), MadePeaks(1000)
    config = HeadroomConfig(law=HeadroomLaw.HISTOGRAM)
    headroom_report = HeadroomReport(config, peaks=peaks, clock=clock, wall=clock.wall)
    look(headroom_report, clock)
    assert headroom_report.state.amounts == {0: 500, 1: 500}
    assert headroom_report.state.reason == "mean of 30 s, below predicted peaks of online workloads"
    assert peaks.seconds == 60
    assert headroom_report.promises.minute() == (1000, 4000), "what could be had is a fact, whatever the law"
    peaks.left = 99_000
    look(headroom_report, clock, 200)
    assert (headroom_report.state.total, headroom_report.state.reason) == (4000, "mean of 2 min")
    peaks.left = 601  # an online pod has come
    look(headroom_report, clock, 1)
    assert headroom_report.state.amounts == {0: 300, 1: 300}
    assert headroom_report.state.reason == "what predicted peaks of online workloads leave"
    peaks.left = 99_000
    look(headroom_report, clock, 400)
    headroom_report.use(HeadroomConfig())
    peaks.left = 0
    look(headroom_report, clock, 200)
    assert headroom_report.state.total > 3900, "the other law takes no notice"


def test_without_a_prediction_nothing_grows_and_nothing_is_promised_in_the_end() -> None:
    clock, peaks = Clock(), MadePeaks(2000)
    headroom_report = HeadroomReport(
        HeadroomConfig(law=HeadroomLaw.HISTOGRAM), peaks=peaks, clock=clock, wall=clock.wall
    )
    look(headroom_report, clock)
    peaks.left = None
    look(headroom_report, clock, 200)
    assert headroom_report.state.total == 2000
    assert headroom_report.state.reason == "predicted peaks of online workloads unknown: no increase"
    look(headroom_report, clock, 60)
    assert headroom_report.state.total == 0


def test_what_was_promised_within_the_last_hour_survives_a_restart() -> None:
    headroom_report, clock = looked()
    assert headroom_report.promises.minute() == (4000, 4000)
    look(headroom_report, clock, 1)
    kept = headroom_report.persisted()
    clock.now += 3000
    again = report(clock, kept)
    look(again, clock, 1)
    assert again.state.total == 0
    assert again.promises.minute() == (4000, 4000)


def test_the_store_gives_back_what_it_took(tmp_path: Path) -> None:
    kept = HeadroomState(milli={"0": 2000, "1": 0}, at=1_700_000_000.0, lately=(2000, 0), memory_lately=(1 << 40,))
    with closing(Store(str(tmp_path / "state.db"), boot="b", version="1", node="n1", history_limit=100)) as store:
        assert read_kept(store) is None
        batch = StoreBatch()
        batch.put(ASSIGNMENTS, HEADROOM, encoded(kept))
        store.apply(batch)
        assert read_kept(store) == kept
        batch = StoreBatch()
        batch.put(ASSIGNMENTS, HEADROOM, encoded("nonsense"))
        store.apply(batch)
        assert read_kept(store) is None


async def test_the_file_is_whole_and_says_until_when_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "headroom.json"
    headroom_report, clock = looked(file=str(path))
    await headroom_report.write()
    result = json.loads(path.read_text())
    assert result["cpu_milli"] == 4000
    assert result["numa_nodes"] == {"0": {"cpu_milli": 2000}, "1": {"cpu_milli": 2000}}
    assert (result["schema"], result["kind"], result["node"]) == (1, "bypassd-headroom", "n1")
    assert result["valid_until"] == clock.wall() + 240
    assert os.listdir(tmp_path) == ["headroom.json"]
    assert path.stat().st_mode & 0o777 == 0o644


async def test_no_file_is_written_unless_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    headroom_report, _ = looked()
    await headroom_report.write()
    assert (os.listdir(tmp_path), headroom_report.statuses()) == ([], [])


async def test_a_file_that_cannot_be_written_is_a_problem_until_it_can(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "later" / "headroom.json"
    headroom_report = report(clock, file=str(path))
    await headroom_report.write()
    assert [(status.ok, status.detail) for status in headroom_report.statuses()] == [(False, f"{path}: ENOENT")]
    path.parent.mkdir()
    await headroom_report.write()
    assert [status.ok for status in headroom_report.statuses()] == [True]


async def test_the_file_follows_each_change_and_never_runs_out(
    nursery: trio.Nursery, tmp_path: Path, autojump_clock: MockClock
) -> None:
    clock, path = Clock(), tmp_path / "headroom.json"
    headroom_report = report(clock, file=str(path))
    await nursery.start(headroom_report.run)
    look(headroom_report, clock, 31)
    await trio.sleep(1)
    assert json.loads(path.read_text())["cpu_milli"] == 4000
    clock.now += 30
    await trio.sleep(31)
    assert json.loads(path.read_text())["at"] == clock.wall()


def test_a_new_configuration_takes_hold_at_once() -> None:
    headroom_report, clock = looked()
    headroom_report.use(varied(headroom_report.config, unknown_hold_s=5.0))
    look(headroom_report, clock, 4, known=False)
    assert headroom_report.state.total == 4000
    look(headroom_report, clock, 4, known=False)
    assert headroom_report.state.total == 0


async def test_a_closed_node_promises_nothing_at_once_and_an_open_one_more_in_steps(tmp_path: Path) -> None:
    path = tmp_path / "headroom.json"
    headroom_report, clock = looked(file=str(path), max_step_milli=500)
    assert headroom_report.state.total > 0
    headroom_report.close("memory_pressure: 1 GiB available")
    assert headroom_report.state.total == 0
    await headroom_report.write()
    published = json.loads(path.read_text())
    assert (published["cpu_milli"], published["closed"]) == (0, True)
    assert published["reason"] == "closed to new BE pods: memory_pressure: 1 GiB available"
    look(headroom_report, clock, 300)
    assert headroom_report.state.total == 0
    kept = headroom_report.persisted()
    assert kept is not None
    assert set(kept.milli.values()) == {0}
    headroom_report.close(None)
    look(headroom_report, clock, 1)
    assert headroom_report.state.total == 0
    look(headroom_report, clock, 31)
    assert headroom_report.state.amounts == {0: 500, 1: 500}
