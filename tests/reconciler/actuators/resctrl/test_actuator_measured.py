"""What pods use of cache and bandwidth is reported or unknown, and BE's share follows it where requested."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from reconciler.policies.cache import CachePolicyConfig
from resctrl.schemata import parse_schemata
from state.cache import CacheConsumption, CacheMode, LevelControl, ShareLevel
from state.evidence import Sample
from tests.fakes.constants import varied
from tests.fakes.resctrl_shapes import AMD, INTEL, L2_ONLY, MonitorShape, Shape
from tests.reconciler.actuators.resctrl_world import (
    BATCH,
    BE,
    MOUNT,
    WEB,
    World,
)
from tests.reconciler.nodes import online


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def batch_use(world: World) -> Any:
    """Of the pod BATCH, in the first cache."""
    status: Any = world.side.status()
    return status["use"]["pods"]["batch"]["domains"]["0"]


async def test_use_of_cache_and_bandwidth_is_told_by_pod_or_not_known(world: World) -> None:
    world.spawn(BATCH)
    world.spawn(WEB)
    await world.sweep(BATCH, WEB)
    group = f"{BE}/mon_groups/bypassd-batch"
    world.model.bandwidth(group, 0, 3e9, 1e9)
    for _ in range(4):
        await world.sweep(BATCH, WEB, seconds=2.0)
    world.model.occupancy(group, 0, 1 << 20)
    await world.sweep(BATCH, WEB, seconds=2.0)
    use = batch_use(world)
    assert (use["occupancy_bytes"], use["total_bytes_s"]) == (1 << 20, pytest.approx(3e9, rel=0.01))
    assert use["local_bytes_s"] == pytest.approx(1e9, rel=0.01)
    world.model.answer(group, 0, "Unavailable")
    await world.sweep(BATCH, WEB, seconds=2.0)
    assert batch_use(world)["total_bytes_s"] is None
    assert world.side.status()["monitoring_groups"] == {"budget": 24, "used": 2, "waiting": {}}


async def test_what_is_measured_is_told_to_signals_and_metrics(world: World) -> None:
    assert world.side.measured() is None
    world.config = CachePolicyConfig(enabled=True, mode=CacheMode.DYNAMIC)
    world.spawn(BATCH)
    world.spawn(WEB)
    await world.sweep(BATCH, WEB)
    group = f"{BE}/mon_groups/bypassd-batch"
    world.model.bandwidth(group, 0, 3e9, 1e9)
    world.model.bandwidth(group, 1, 1e9, 1e9)
    for _ in range(4):
        await world.sweep(BATCH, WEB, seconds=2.0)
    world.model.answer(f"{MOUNT}/mon_groups/bypassd-web", 1, "Unavailable")
    world.model.occupancy(group, 0, 1 << 20)
    await world.sweep(BATCH, WEB, seconds=2.0)
    cache_usage = world.side.measured()
    assert cache_usage is not None
    assert cache_usage.at_s == world.model.now()
    assert cache_usage.pods["batch"].occupancy_bytes == 1 << 20
    assert cache_usage.pods["batch"].total_bytes_s == pytest.approx(4e9, rel=0.01)
    assert cache_usage.pods["web"] == CacheConsumption()
    assert cache_usage.groups["bypassd-be"][1].total_bytes_s == pytest.approx(1e9, rel=0.01)
    assert cache_usage.groups["(default)"][1].total_bytes_s is None
    assert cache_usage.classes == {"bypassd-be": "reclaimed"}
    assert cache_usage.level == ShareLevel(cache_percent=20, mba_percent=10)
    assert cache_usage.lacks == {}
    world.config = CachePolicyConfig()
    await world.sweep(BATCH, WEB)
    assert world.side.measured() is None


async def test_why_something_is_not_measured_is_told(tmp_path: Path) -> None:
    both = {"llc.occupancy", "memory.bandwidth"}
    blind = World(tmp_path / "blind", L2_ONLY)
    blind.side.planned(blind.situation(BATCH))
    cache_usage = blind.side.measured()
    assert cache_usage is not None
    assert dict(cache_usage.lacks) == dict.fromkeys(both, "resctrl not checked yet")
    await blind.sweep(BATCH)
    cache_usage = blind.side.measured()
    assert cache_usage is not None
    assert cache_usage.lacks.keys() == both
    assert "no mbm_total_bytes in info/L3_MON" in cache_usage.lacks["memory.bandwidth"]
    few = World(
        tmp_path / "few",
        replace_monitor(INTEL, MonitorShape(rmids=9, domains=(0, 1), threshold=1 << 30)),
    )
    await few.sweep(BATCH, WEB)
    cache_usage = few.side.measured()
    assert cache_usage is not None
    assert dict(cache_usage.lacks) == dict.fromkeys(both, "1 of 2 pods monitored now, with 1 monitoring groups")
    gone = World(tmp_path / "gone")
    gone.model.umount()
    await gone.sweep(BATCH)
    cache_usage = gone.side.measured()
    assert cache_usage is not None
    assert "not mounted" in cache_usage.lacks["llc.occupancy"]


async def test_where_ids_are_few_pods_are_watched_in_turns(tmp_path: Path) -> None:
    few = replace_monitor(INTEL, MonitorShape(rmids=10, domains=(0, 1), threshold=1 << 30))
    world = World(tmp_path, few)
    world.config = varied(CachePolicyConfig(enabled=True), dwell_s=10)
    pods = [online(f"p{number}") for number in range(5)]
    for pod in pods:
        world.spawn(pod)
    seen: set[str] = set()
    for _ in range(12):
        await world.sweep(*pods, seconds=5.0)
        watched = world.model.groups(f"{MOUNT}/mon_groups")
        assert len(watched) <= 2
        seen |= set(watched)
    assert seen == {f"bypassd-p{number}" for number in range(5)}
    assert world.side.problems() == []


async def test_ids_that_are_still_busy_are_waited_for(tmp_path: Path) -> None:
    busy = replace_monitor(AMD, MonitorShape(rmids=17, domains=(0, 1, 2, 3), threshold=0))
    world = World(tmp_path, busy)
    world.config = varied(CachePolicyConfig(enabled=True), dwell_s=2)
    pods = [online("p1"), online("p2")]
    for pod in pods:
        world.spawn(pod)
    await world.sweep(*pods)
    world.model.occupancy(f"{MOUNT}/mon_groups/bypassd-p1", 0, 1 << 20)
    for _ in range(6):
        await world.sweep(*pods, seconds=2.0)
    assert world.side.problems() == []
    assert len(world.model.groups(f"{MOUNT}/mon_groups")) <= 1


async def test_be_gives_way_to_bandwidth_and_gets_it_back_slowly(world: World) -> None:
    world.config = varied(CachePolicyConfig(enabled=True, mode=CacheMode.DYNAMIC), law=LevelControl(calm_s=2.0))
    world.spawn(BATCH)
    world.spawn(WEB)
    for _ in range(12):
        await world.sweep(BATCH, WEB, seconds=2.0)
    grown = level(world)
    assert grown[0] > 20
    assert grown[1] > 10
    world.model.bandwidth(BE, 0, 19e9)
    for _ in range(2):
        await world.sweep(BATCH, WEB, seconds=2.0)
    cut = level(world)
    assert cut[0] >= grown[0]
    assert cut[1] == 10
    assert "MB:0= 10;1= 10" in world.model.read(BE, "schemata")
    world.misses = {"web": Sample(50.0, 1.0)}
    await world.sweep(BATCH, WEB, seconds=2.0)
    assert level(world) == (20, 10)
    assert "L3:0=003;1=003" in world.model.read(BE, "schemata")


async def test_bes_ways_shrink_at_a_victims_misses_and_grow_back_slowly(world: World) -> None:
    """Bandwidth is not counted on this machine: misses alone move BE's share, and only while they are counted."""
    world.config = varied(
        CachePolicyConfig(enabled=True, monitor=False, mode=CacheMode.DYNAMIC), law=LevelControl(calm_s=2.0)
    )
    world.spawn(BATCH)
    world.spawn(WEB)

    async def ways(missed: float | None) -> int:
        for domain in (0, 1):
            world.model.answer(MOUNT, domain, "Unavailable")
        # BE misses as it likes: it is no victim.
        counted = {} if missed is None else {"web": Sample(missed, 0.5)}
        world.misses = {"batch": Sample(90.0, 0.5), **counted}
        await world.sweep(BATCH, WEB, seconds=2.0)
        return parse_schemata(world.model.read(BE, "schemata"))["L3"][0].bit_count()

    assert [await ways(None) for _ in range(4)] == [2, 2, 2, 2]
    grown = [await ways(1.0) for _ in range(16)]
    assert grown == sorted(grown)
    assert grown[-1] == 6
    assert max(after - before for before, after in itertools.pairwise(grown)) == 1
    assert await ways(30.0) == 2
    assert [await ways(30.0) for _ in range(3)] == [2, 2, 2]
    back = [await ways(1.0) for _ in range(4)]
    assert back == sorted(back)
    assert back[-1] < 6


def level(world: World) -> tuple[int, int]:
    result: Any = world.side.status()["level"]
    return result["cache_percent"], result["mba_percent"]


async def test_counters_that_cannot_be_read_never_raise_be(world: World) -> None:
    world.config = varied(CachePolicyConfig(enabled=True, mode=CacheMode.DYNAMIC), law=LevelControl(calm_s=0.0))
    world.spawn(BATCH)
    world.spawn(WEB)
    await world.sweep(BATCH, WEB)
    for domain in (0, 1):
        # The default group's own id still answers: its sum leaves out the pod's part without a word.
        world.model.answer(f"{MOUNT}/mon_groups/bypassd-web", domain, "Unavailable")
    for _ in range(5):
        await world.sweep(BATCH, WEB, seconds=2.0)
    assert level(world) == (20, 10)


def replace_monitor(shape: Shape, monitor: MonitorShape) -> Shape:
    return dataclasses.replace(shape, monitor=monitor)
