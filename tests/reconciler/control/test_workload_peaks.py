"""Peaks of workloads learned each minute, stored in turns, and taken over by the next run."""

from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.errors import StoreError
from cgroupfs.usage import MemoryUsage
from reconciler.control.node_headroom import PeakPredictor
from reconciler.control.pod_minutes import Minute
from reconciler.headroom.cpu import HeadroomLaw
from reconciler.headroom.peak_rows import ROW, ROWS, decode_row, row_of
from reconciler.headroom.peaks import WorkloadPeaks
from state.memory import NodeMemoryReading
from state.model import NodeCpu, Pod, Pools
from state.plan import NodePlan
from state.schema import META
from state.store import Store, StoreBatch
from tests.fakes.clock import Clock
from tests.reconciler.nodes import online, pod

GIB = 1 << 30
POOLS = Pools(online_cpus=CpuSet.span(16), reserved=EMPTY, dedicated={}, shared=EMPTY, reclaimed=EMPTY, budget_milli=0)
NODE = NodeMemoryReading(total_bytes=100 * GIB, available_bytes=60 * GIB, age_s=0.0)


SYSTEM = NodeCpu(busy_milli=1500, online_milli=1000, reclaimed_milli=0, age_s=0.0)


class Known(Struct):
    node_memory: NodeMemoryReading | None = NODE
    kubepods: str = "/kubepods"
    pods: dict[str, Pod] = {}


class Usage:
    """Memory of groups; one of no group is not known."""

    def __init__(self) -> None:
        self.kept = {"/kubepods": 30 * GIB}

    def memory_use(self, path: str) -> MemoryUsage | None:
        used = self.kept.get(path)
        return None if used is None else MemoryUsage(limit_bytes=None, used_bytes=used)


class Node:
    """A predictor on a store, and time that a test moves."""

    def __init__(self, path: Path) -> None:
        self.path, self.clock, self.boot = path / "state.db", Clock(), "one"
        self.wrong_s = 0.0
        self.known, self.usage, self.law = Known(), Usage(), HeadroomLaw.HISTOGRAM
        self.uptime: Callable[[], float] = self.clock
        self.open()

    def open(self) -> None:
        self.store = Store(str(self.path), boot=self.boot)
        self.predictor = PeakPredictor(
            self.store,
            trio.CapacityLimiter(1),
            self.usage,
            self.known,
            lambda: NodePlan(pools=POOLS),
            law=lambda: self.law,
            uptime=self.uptime,
            wall=lambda: self.clock.wall() + self.wrong_s,
        )

    def reopen(self) -> None:
        self.store.close()
        self.open()

    def add(self, uid: str, memory: int = GIB, **fields: object) -> None:
        item = replace(online(uid), namespace="ns", name=uid, **fields)
        self.known.pods[uid] = item
        self.usage.kept[item.group.path] = memory

    async def minutes(self, count: int, use_milli: float | None = 1000.0) -> None:
        for _ in range(count):
            self.clock.now += 60
            self.predictor.second(SYSTEM)
            pods = [(item, Minute(use_milli, None, None)) for item in self.known.pods.values()]
            self.predictor.take(pods)
            await self.predictor.learn()

    def facts(self) -> tuple[object, object]:
        status = self.predictor.status()
        return status["known"], status["cold"]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_what_online_pods_and_the_system_use_is_learned(node: Node) -> None:
    node.add("web-0")
    node.known.pods["be"] = pod("be")
    await node.minutes(3)
    left = node.predictor.cpu_left(POOLS)
    assert left is not None
    assert 16_000 - 1.1 * 1.2 * 1500 < left < 16_000 - 1.1 * 1500
    memory = node.predictor.memory_left(NODE, 10 * GIB)
    assert memory is not None
    assert (100 - 10) * GIB - 1.1 * 1.06 * 11 * GIB < memory < (100 - 10) * GIB - 1.1 * 11 * GIB
    assert node.facts() == (0, 1)
    assert node.predictor.workloads() == {"known": 0, "cold": 1}


async def test_an_old_prediction_is_none(node: Node) -> None:
    assert node.predictor.cpu_left(POOLS) is None
    node.add("web-0")
    await node.minutes(1)
    node.clock.now += 179
    assert node.predictor.cpu_left(POOLS) is not None
    node.clock.now += 2
    assert (node.predictor.cpu_left(POOLS), node.predictor.memory_left(NODE, 0)) == (None, None)
    assert "not valid" in str(node.predictor.status()["text"])


async def test_a_restart_forgets_nothing_and_takes_the_time_between_into_account(node: Node) -> None:
    node.add("web-0")
    await node.minutes(1500)
    before = node.predictor.status()
    await node.predictor.save(ROWS)
    node.wrong_s = -9e8  # the wall clock is not asked in the same boot
    node.clock.now += 600
    node.reopen()
    await node.minutes(1)
    assert node.facts() == (1, 0)
    assert node.predictor.status()["online_milli"] == before["online_milli"]
    assert node.predictor.status()["system_milli"] == before["system_milli"]
    await node.predictor.save(ROWS)
    node.clock.now += 7 * 86_400
    node.reopen()
    await node.minutes(1)
    assert node.facts() == (0, 1)


@pytest.mark.parametrize("wrong_s", [0.0, -9e8, 9e8])
async def test_a_boot_with_a_wrong_clock_costs_no_peak(node: Node, wrong_s: float) -> None:
    node.add("web-0")
    await node.minutes(1500)
    peak = node.predictor.status()["online_milli"]
    await node.predictor.save(ROWS)
    node.boot, node.wrong_s, booted = "two", wrong_s, node.clock.now
    node.uptime = lambda: node.clock.now - booted
    node.reopen()
    await node.minutes(1, 50.0)
    assert node.facts() == (1, 0)
    assert node.predictor.status()["online_milli"] == peak
    await node.minutes(2)
    assert node.predictor.cpu_left(POOLS) is not None


async def test_damage_costs_the_workloads_that_it_hits(node: Node) -> None:
    for number in range(12):
        node.add(f"web-{number}")
    await node.minutes(1500)
    await node.predictor.save(ROWS)
    key = f"{ROW}{row_of('ns/Pod/web-0')}"
    lost = [name for name, _, _ in node.predictor.peaks.items() if f"{ROW}{row_of(name)}" == key]
    batch = StoreBatch()
    batch.put(META, key, b"\x93no row")
    batch.put(META, f"{ROW}oops", b"")
    node.store.apply(batch)
    node.reopen()
    await node.minutes(1)
    assert node.facts() == (12 - len(lost), len(lost))


async def test_rows_are_written_in_turns_and_emptied_ones_are_deleted(node: Node) -> None:
    for number in range(200):
        node.add(f"web-{number}")
    await node.minutes(1)
    for turn in range(ROWS // 4):
        await node.predictor.save(4)
        assert len([key for key, _ in node.store.rows(META) if key.startswith(ROW)]) <= 4 * (turn + 1)
    sizes = {key: len(row) for key, row in node.store.rows(META) if key.startswith(ROW)}
    assert sum(sizes.values()) < 200 * 150
    node.predictor.peaks.new.clear()
    await node.predictor.save(ROWS)
    assert [key for key, _ in node.store.rows(META) if key.startswith(ROW)] == [f"{ROW}{row_of('(system)')}"]


async def test_an_end_while_the_rows_are_restored_loses_none(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(120):
        node.add(f"web-{number}")
    await node.minutes(2)
    await node.predictor.save(ROWS)
    node.reopen()
    read = node.store.rows
    async with trio.open_nursery() as nursery:

        def last_read(table: str) -> list[tuple[str, bytes]]:
            trio.from_thread.run_sync(nursery.cancel_scope.cancel)
            return read(table)

        monkeypatch.setattr(node.store, "rows", last_read)
        await nursery.start(node.predictor.run)
        node.predictor.take([])
        await trio.Event().wait()
    monkeypatch.undo()
    rows = [decode_row(row) for key, row in node.store.rows(META) if key.startswith(ROW)]
    assert sum(len(row.workloads) for row in rows) == 121


async def test_rows_that_cannot_be_read_at_first_are_not_replaced(
    node: Node, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    for number in range(12):
        node.add(f"web-{number}")
    await node.minutes(1500)
    peak = node.predictor.status()["system_milli"]
    await node.predictor.save(ROWS)
    node.reopen()

    def refused(table: str) -> list[tuple[str, bytes]]:
        raise StoreError(f"{table}: disk I/O error")

    async def component_learns() -> None:
        before = node.predictor.prediction
        node.clock.now += 60
        node.predictor.take([(item, Minute(10.0, None, None)) for item in node.known.pods.values()])
        while node.predictor.prediction is before:  # noqa: ASYNC110 - it is set, not announced
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        await nursery.start(node.predictor.run)
        with monkeypatch.context() as patched:
            patched.setattr(node.store, "rows", refused)
            for _ in range(9):
                await component_learns()
            assert node.facts() == (0, 12)
        await component_learns()
        assert node.facts() == (12, 0)
        assert node.predictor.status()["system_milli"] == peak
        nursery.cancel_scope.cancel()
    node.reopen()
    await node.minutes(1)
    assert node.facts() == (12, 0)


async def test_the_component_learns_what_it_is_given_and_stores_all_at_its_end(
    node: Node, autojump_clock: trio.testing.MockClock
) -> None:
    node.add("web-0")
    async with trio.open_nursery() as nursery:
        await nursery.start(node.predictor.run)
        node.law = HeadroomLaw.RECENT
        node.predictor.take([])
        await trio.testing.wait_all_tasks_blocked()
        assert node.predictor.status()["name"] == "recent"
        node.law = HeadroomLaw.HISTOGRAM
        node.predictor.take([(node.known.pods["web-0"], Minute(500.0, None, None))])
        while "known" not in node.predictor.status():  # noqa: ASYNC110 - it is set, not announced
            await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert {key for key, _ in node.store.rows(META) if key.startswith(ROW)} == {
        f"{ROW}{row_of('ns/Pod/web-0')}",
        f"{ROW}{row_of('(system)')}",
    }


def rows_of(node: Node) -> int:
    return sum(key.startswith(ROW) for key, _ in node.store.rows(META))


async def test_a_row_that_could_not_be_deleted_is_deleted_with_the_next_save(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.add("web-0")
    await node.minutes(2)
    await node.predictor.save(ROWS)
    stored = rows_of(node)
    assert stored > 0
    node.predictor.peaks = WorkloadPeaks()

    def full(_batch: StoreBatch) -> None:
        raise StoreError("state.db", "no space left on device")

    with monkeypatch.context() as failing:
        failing.setattr(node.store, "apply", full)
        await node.predictor.save(ROWS)
    assert rows_of(node) == stored
    await node.predictor.save(ROWS)
    assert rows_of(node) == 0
