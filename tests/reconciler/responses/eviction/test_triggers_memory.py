"""Triggers of memory, disks and promises: formulas and defaults of the peers, and what they get wrong."""

import pytest

from reconciler.responses.eviction.config import (
    DiskTriggerConfig,
    FsMinimum,
    MemoryPressureConfig,
    NodeMemoryConfig,
    NumaMemoryTriggerConfig,
    ReclaimedResourceConfig,
    RssOveruseConfig,
)
from reconciler.responses.eviction.resources import EvictedResource
from reconciler.responses.eviction.triggers import (
    disk,
    memory_pressure,
    node_memory,
    numa_memory,
    reclaimed_resource,
    rss_overuse,
)
from reconciler.responses.eviction.triggers.base import EVERY, RECLAIMED
from state.model import PodClass, Resources
from tests.fakes.constants import varied
from tests.reconciler.responses.eviction.world import GI, MI, Judge, World, batch, be, uids


@pytest.mark.parametrize(
    ("used", "need"),
    [(69.9, None), (70.0, 2.0), (70.9, 2.9), (90.0, 22.0)],
)
def test_node_memory_frees_exact_bytes_down_to_the_lower_bound(used: float, need: float | None) -> None:
    """koordlet cuts to whole percents, and in one mode counts each victim a thousand times."""
    world = World()
    world.put(memory__total=100 * GI, memory__available=(100 - used) * GI)
    pressures = Judge(node_memory.TRIGGER, world).now().pressures
    if need is None:
        assert pressures == ()
    else:
        assert pressures[0].need == pytest.approx(need * GI)
        assert (pressures[0].good, pressures[0].classes, pressures[0].hard) == (EvictedResource.MEMORY, RECLAIMED, True)


def test_node_memory_has_a_lower_bound_of_its_own_where_one_is_set() -> None:
    world = World()
    world.put(memory__total=100 * GI, memory__available=20 * GI)
    config = NodeMemoryConfig(threshold_percent=75, lower_percent=60)
    assert Judge(node_memory.TRIGGER, world, config).now().pressures[0].need == pytest.approx(20 * GI)
    world.put(memory__available=None)
    assert Judge(node_memory.TRIGGER, World(), config).now().known is False


@pytest.mark.parametrize(
    ("total", "available", "critical"),
    [(100, 1.01, False), (100, 0.99, True), (10, 0.51, False), (10, 0.49, True), (100, 29, False)],
)
def test_memory_is_critical_only_when_hardly_any_can_be_allocated(
    total: float, available: float, critical: bool
) -> None:
    """Above that the kernel reclaims, and no online pod is killed without an eviction."""
    world = World()
    world.put(memory__total=total * GI, memory__available=available * GI)
    assert [shortage.critical for shortage in Judge(node_memory.TRIGGER, world).now().pressures] == [critical]
    world.put(memory__free=1, memory__low=200 * MI)
    assert [shortage.critical for shortage in Judge(memory_pressure.TRIGGER, world).now().pressures] == [critical]
    world.put(memory__available=None)
    world.at += 60
    assert [shortage.critical for shortage in Judge(memory_pressure.TRIGGER, world).now().pressures] == [False]


@pytest.mark.parametrize(
    ("free", "cache", "critical"),
    [
        (455, 800, False),
        (200, 900, True),
        (200, 1100, False),
        (200, None, False),
        (1000, 100, True),
        (100, 5000, False),
    ],
)
def test_a_numa_node_is_critical_when_its_page_cache_does_not_help_either(
    free: float, cache: float | None, critical: bool
) -> None:
    world = numa(free * MI, cache=None if cache is None else cache * MI)
    world.put(memory__total=256 * GI, memory__available=0.9 * GI)
    result = Judge(numa_memory.TRIGGER, world).after(12 * 5, 5)
    assert [shortage.critical for shortage in result.pressures] == [critical]


@pytest.mark.parametrize("available", [None, 1.1 * GI, 128 * GI])
def test_a_numa_node_is_not_critical_while_the_other_nodes_have_memory(available: float | None) -> None:
    world = numa(200 * MI, cache=900 * MI)
    world.put(memory__total=256 * GI, memory__available=available)
    result = Judge(numa_memory.TRIGGER, world).after(12 * 5, 5)
    assert [shortage.critical for shortage in result.pressures] == [False]


def numa(free: float, *, total: float = 128 * GI, cache: float | None = 5 * GI) -> World:
    """Low 200 MiB, min 160 MiB; with the margin short below 456 MiB, urgent below 1184 MiB."""
    world = World()
    world.put(
        "numa:0",
        memory__free=free,
        memory__total=total,
        memory__low=200 * MI,
        memory__min=160 * MI,
        memory__inactive_file=cache,
    )
    return world


# Urgent marks would be above the low one otherwise: the counters are seen alone.
COUNTING = varied(NumaMemoryTriggerConfig(), urgent_bytes=0)


def test_six_passes_below_low_and_margin_let_be_go_and_twelve_everybody() -> None:
    judge = Judge(numa_memory.TRIGGER, numa(455 * MI), COUNTING)
    assert not judge.after(4 * 5, 5).pressures
    (pressure,) = judge.after(5, 5).pressures
    assert (pressure.subject, pressure.classes, pressure.hard) == ("numa:0", RECLAIMED, True)
    assert pressure.need == pytest.approx(MI)
    assert pressure.least == pytest.approx(0.001 * 128 * GI)
    assert judge.after(5 * 5, 5).pressures[0].classes == RECLAIMED
    assert judge.after(5, 5).pressures[0].classes == EVERY


def test_a_good_pass_takes_one_off_and_a_count_that_is_high_evicts_nobody_in_it() -> None:
    world = numa(400 * MI)
    judge = Judge(numa_memory.TRIGGER, world, COUNTING)
    judge.after(6 * 5, 5)
    assert judge.memory == {"numa:0": 7}
    world.put("numa:0", memory__free=2 * GI)
    assert judge.after(5, 5).pressures == ()
    assert judge.after(5, 5).pressures == ()
    assert judge.memory == {"numa:0": 5}
    world.put("numa:0", memory__free=400 * MI)
    assert judge.after(5, 5).pressures


def test_below_min_and_urgent_be_goes_at_once_and_everybody_in_the_next_pass() -> None:
    judge = Judge(numa_memory.TRIGGER, numa(100 * MI))
    (pressure,) = judge.now().pressures
    assert pressure.classes == RECLAIMED
    assert judge.memory == {"numa:0": 11}
    assert "below the min watermark" in pressure.evidence
    (pressure,) = judge.now().pressures
    assert pressure.classes == EVERY


def test_little_droppable_cache_raises_the_low_mark() -> None:
    judge = Judge(numa_memory.TRIGGER, numa(1 * GI, cache=3 * GI))
    assert judge.now().pressures
    assert not Judge(numa_memory.TRIGGER, numa(1 * GI, cache=5 * GI)).now().pressures
    assert Judge(numa_memory.TRIGGER, numa(1 * GI, cache=5 * GI)).after(60, 5).pressures == ()


def test_a_page_cache_that_has_filled_the_node_is_no_shortage() -> None:
    """Katalyst's urgent margin of 1 GiB is above where the kernel keeps free memory once the cache is full."""
    world = numa(300 * MI, cache=40 * GI)
    assert Judge(numa_memory.TRIGGER, world).after(100, 5).pressures == ()
    assert (
        Judge(numa_memory.TRIGGER, world, varied(NumaMemoryTriggerConfig(), droppable_percent=100))
        .after(100, 5)
        .pressures
    )


def test_margins_are_bounded_by_the_size_of_the_node() -> None:
    """Katalyst's are absolute: 1 GiB of a 4 GiB node would have to be free all the time."""
    small = numa(500 * MI, total=4 * GI, cache=420 * MI)
    bare = varied(NumaMemoryTriggerConfig(), droppable_percent=100)
    assert Judge(numa_memory.TRIGGER, small, bare).after(100, 5).pressures == ()
    short = numa(390 * MI, total=4 * GI, cache=405 * MI)
    assert Judge(numa_memory.TRIGGER, short, bare).after(30, 5).pressures


def test_without_watermarks_a_part_of_the_node_stands_in_and_nothing_is_urgent() -> None:
    world = numa(300 * MI)
    world.put("numa:0", memory__low=None, memory__min=None)
    judge = Judge(numa_memory.TRIGGER, world)
    assert judge.now().pressures == ()
    assert judge.after(25, 5).pressures[0].need == pytest.approx(0.001 * 128 * GI + 256 * MI - 300 * MI)


def test_a_pass_that_cannot_be_judged_changes_nothing() -> None:
    world = numa(400 * MI)
    judge = Judge(numa_memory.TRIGGER, world, COUNTING)
    judge.after(6 * 5, 5)
    world.put("numa:0", memory__free=None)
    world.at += 60
    reading = judge.now()
    assert (reading.known, reading.pressures, judge.memory) == (False, (), {"numa:0": 7})


def stalling(node: float, pods: list[float]) -> World:
    world = World(*(be(f"p{index}", cls=PodClass.SHARED) for index in range(len(pods))), be("job"))
    world.put(memory__pressure=node, memory__total=100 * GI)
    for index, value in enumerate(pods):
        world.put(f"pod:p{index}", memory__pressure=value)
    world.put("pod:job", memory__pressure=99)
    return world


@pytest.mark.parametrize(
    ("node", "pods", "met"),
    [
        (15, [4, 4, 4], True),
        (14.9, [4, 4, 4], False),
        (15, [6, 6, 0.5], False),  # two suffer
        (15, [2, 2, 2], False),  # on average too little
        (40, [12, 3, 2, 0, 3], True),
        (40, [], False),
    ],
)
def test_memory_pressure_needs_node_and_pods(node: float, pods: list[float], met: bool) -> None:
    assert bool(Judge(memory_pressure.TRIGGER, stalling(node, pods)).after(30).pressures) is met


def test_stalls_let_be_go_after_15_s_and_everybody_after_45_s_one_at_a_time() -> None:
    judge = Judge(memory_pressure.TRIGGER, stalling(30, [10, 10, 10]))
    judge.after(4)
    assert not judge.after(14).pressures  # PSI is a mean of ten seconds, known after five
    (pressure,) = judge.after(3).pressures
    assert (pressure.need, pressure.classes, pressure.hard) == (None, RECLAIMED, True)
    (pressure,) = judge.after(30).pressures
    assert pressure.classes == EVERY


def test_free_memory_of_the_node_below_the_mark_lets_be_go() -> None:
    world = World()
    world.put(memory__free=90 * MI, memory__total=100 * GI, memory__low=100 * MI, memory__inactive_file=GI)
    judge = Judge(memory_pressure.TRIGGER, world)
    (pressure,) = judge.now().pressures
    assert (pressure.need, pressure.classes) == (10 * MI, RECLAIMED)
    world.put(memory__inactive_file=50 * GI)
    assert judge.after(1).pressures == ()
    world.put(memory__inactive_file=GI, memory__free=110 * MI)
    assert judge.after(1).pressures == ()
    config = MemoryPressureConfig(free_bytes=GI)
    assert Judge(memory_pressure.TRIGGER, world, config).now().pressures[0].need == GI - 110 * MI


def test_memory_pressure_is_judged_by_what_is_known() -> None:
    world = World()
    assert not Judge(memory_pressure.TRIGGER, world).now().known
    world.put(memory__free=GI, memory__total=100 * GI)
    assert Judge(memory_pressure.TRIGGER, world).now().known
    gap = stalling(30, [10, 10, 10])
    judge = Judge(memory_pressure.TRIGGER, gap)
    judge.after(15)
    gap.put(memory__pressure=None)
    gap.at += 20
    judge.now()
    gap.put(memory__pressure=30)
    assert not judge.after(14).pressures


RSS = varied(RssOveruseConfig(), for_s=0)


@pytest.mark.parametrize(
    ("requests", "partial", "rss", "over"),
    [
        (batch(None, GI), (), 1.06 * GI, True),  # Katalyst skips BE pods: they have no plain request
        (batch(None, GI), (), 1.04 * GI, False),
        (Resources(memory_bytes=GI), (), 1.06 * GI, True),
        (Resources(memory_bytes=4 * GI, batch_memory_bytes=GI), (), 1.06 * GI, True),
        (batch(None, GI), ("batch_memory_bytes",), 2 * GI, False),  # a container has no request: the sum is too small
        (Resources(), (), 2 * GI, False),
        (batch(None, 0), (), 2 * GI, False),
    ],
)
def test_rss_overuse_by_the_request_that_counts(
    requests: Resources, partial: tuple[str, ...], rss: float, over: bool
) -> None:
    world = World(be("a", requests=requests, partial=partial))
    world.put("pod:a", memory__rss=rss)
    pressures = Judge(rss_overuse.TRIGGER, world, RSS).now().pressures
    assert uids(pressures) == (["a"] if over else [])
    if over:
        assert pressures[0].need == pytest.approx(rss - 1.05 * GI)
        assert (pressures[0].hard, pressures[0].named) == (False, True)


def test_a_pods_own_threshold_and_a_pod_that_is_not_measured() -> None:
    own = {"katalyst.kubewharf.io/memory_enhancement": '{"rss_overuse_threshold": "0.8"}'}
    pods = [be("a", requests=batch(None, GI), annotations=own), be("b", requests=batch(None, GI))]
    world = World(*pods)
    world.put("pod:a", memory__rss=0.9 * GI)
    assert uids(Judge(rss_overuse.TRIGGER, world, RSS).now().pressures) == ["a"]
    assert not Judge(rss_overuse.TRIGGER, World(*pods), RSS).now().known


def test_rss_overuse_must_last() -> None:
    world = World(be("a", requests=batch(None, GI)))
    world.put("pod:a", memory__rss=2 * GI)
    judge = Judge(rss_overuse.TRIGGER, world)
    assert not judge.after(29).pressures
    assert judge.after(1).pressures


def fs(available: float, inodes_free: float = 900, *, name: str = "nodefs", size: float = 100 * GI) -> World:
    world = World()
    world.put(f"fs:{name}", fs__available=available, fs__size=size, fs__inodes_free=inodes_free, fs__inodes=1000)
    return world


DISK = varied(DiskTriggerConfig(), for_s=0)


@pytest.mark.parametrize(
    ("world", "good", "need"),
    [
        (fs(12 * GI), None, 0),
        (fs(11.9 * GI), EvictedResource.DISK, 2.1 * GI),
        (fs(16 * GI, name="imagefs"), EvictedResource.DISK, 3 * GI),
        (fs(90 * GI, inodes_free=69), EvictedResource.INODES, 21),
        (fs(90 * GI, inodes_free=70), None, 0),
        (fs(0.1 * GI, size=9 * GI), None, 0),  # smaller than is judged
        (fs(1 * GI, name="scratch"), None, 0),  # its use is unknown
    ],
)
def test_disk_minima_by_file_system(world: World, good: EvictedResource | None, need: float) -> None:
    reading = Judge(disk.TRIGGER, world, DISK).now()
    if good is None:
        assert reading.pressures == ()
    else:
        (pressure,) = reading.pressures
        assert (pressure.good, pressure.hard) == (good, True)
        assert pressure.need == pytest.approx(need)
        assert pressure.subject in world.samples


@pytest.mark.parametrize(("size", "available", "judged"), [(100, 15, False), (100, 15.5, False), (99, 15, True)])
def test_images_on_the_nodes_own_file_system_are_not_judged_apart(size: float, available: float, judged: bool) -> None:
    world = fs(15 * GI)
    world.samples |= fs(available * GI, name="imagefs", size=size * GI).samples
    assert [shortage.subject for shortage in Judge(disk.TRIGGER, world, DISK).now().pressures] == [
        "fs:imagefs"
    ] * judged


def test_disk_minimum_in_bytes_and_a_file_system_without_inodes() -> None:
    world = fs(19 * GI)
    world.put("fs:nodefs", fs__inodes=0, fs__inodes_free=0)
    config = varied(DiskTriggerConfig(nodefs=FsMinimum(available_bytes=20 * GI)), for_s=10)
    judge = Judge(disk.TRIGGER, world, config)
    assert not judge.after(9).pressures
    (pressure,) = judge.after(1).pressures
    assert pressure.need == pytest.approx(3 * GI)
    assert not Judge(disk.TRIGGER, World(), config).now().known


def promised(budget: float | None, *pods: object) -> World:
    world = World(*pods)  # type: ignore[arg-type]
    world.put(be__budget=budget)
    return world


def test_promises_above_five_times_what_there_is_are_too_much() -> None:
    world = promised(1000, be("a", requests=batch(3000)), be("b", requests=batch(2001)))
    (pressure,) = Judge(reclaimed_resource.TRIGGER, world).after(60).pressures
    assert (pressure.good, pressure.hard) == (EvictedResource.CPU_REQUEST, True)
    assert pressure.need == pytest.approx(1)
    world = promised(1000, be("a", requests=batch(3000)), be("b", requests=batch(2000)))
    assert Judge(reclaimed_resource.TRIGGER, world).after(60).pressures == ()


@pytest.mark.parametrize(("lower", "need"), [(100, 1), (80, 1001), (20, 4001)])
def test_pods_are_evicted_down_to_the_lower_mark(lower: int, need: float) -> None:
    world = promised(1000, be("a", requests=batch(3000)), be("b", requests=batch(2001)))
    config = varied(ReclaimedResourceConfig(), lower_percent=lower)
    (pressure,) = Judge(reclaimed_resource.TRIGGER, world, config).after(60).pressures
    assert pressure.need == pytest.approx(need)


def test_promised_memory_is_judged_alone_where_cpu_is_not_known() -> None:
    world = World(be("a", requests=batch(9000, 11 * GI)))
    world.put(be__memory_bound=2 * GI)
    (pressure,) = Judge(reclaimed_resource.TRIGGER, world).after(60).pressures
    assert pressure.good is EvictedResource.MEMORY_REQUEST
    assert pressure.need == pytest.approx(GI)


def test_a_dip_of_the_budget_breaks_no_promise() -> None:
    """Ours moves within a second; Katalyst acts at once, but by a smoothed figure."""
    world = promised(4000, be("a", requests=batch(9000)))
    judge = Judge(reclaimed_resource.TRIGGER, world)
    judge.after(60)
    world.put(be__budget=100)
    assert not judge.after(59).pressures
    assert judge.after(2).pressures


def test_a_figure_that_is_missing_is_not_zero_and_zero_is_zero() -> None:
    """koordlet takes a missing allocatable for zero and evicts all."""
    world = promised(None, be("a", requests=batch(9000)))
    reading = Judge(reclaimed_resource.TRIGGER, world).after(60)
    assert (reading.known, reading.pressures) == (False, ())
    assert reading.words == "unknown: be.budget, be.memory_bound not measured"
    world = promised(0, be("a", requests=batch(9000)))
    reading = Judge(reclaimed_resource.TRIGGER, world).after(10)
    assert (reading.known, reading.words) == (False, "unknown: too few samples in 60 s")
    (pressure,) = Judge(reclaimed_resource.TRIGGER, world).after(60).pressures
    assert pressure.need == 9000


def test_bounds_of_the_sections_contradict_nobody() -> None:
    with pytest.raises(ValueError, match="all_passes is 3; expected at least reclaimed_passes"):
        NumaMemoryTriggerConfig(all_passes=3)
    assert ReclaimedResourceConfig().cpu_ratio == 5.0
