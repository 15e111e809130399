"""The trigger of CPU use by NUMA node: when it begins and ends, which pods it names, and the whole decision."""

import pytest
from msgspec.structs import replace

from reconciler.responses.eviction.config import EvictionConfig, NumaCpuConfig
from reconciler.responses.eviction.plan import decide, signals_of
from reconciler.responses.eviction.resources import EvictedResource, usage_of
from reconciler.responses.eviction.triggers import numa_cpu
from reconciler.responses.eviction.triggers.base import RECLAIMED
from reconciler.responses.eviction.triggers.ring import LoadRing
from reconciler.signals.history import History
from state.eviction import EvictionOutcome
from state.model import PodClass
from tests.fakes.constants import varied
from tests.reconciler.responses.eviction.numanode import busy_node_frames
from tests.reconciler.responses.eviction.plans import case, only
from tests.reconciler.responses.eviction.world import GI, START, Judge, Planner, World, be, reasons, uids

ON = NumaCpuConfig(enabled=True)
CPUS = 16_000.0


def use(world: World, subject: str, percent: float) -> None:
    """From now on a node of 16 CPUs uses so much."""
    world.put(subject, cpu__numa_use=CPUS * percent / 100, cpu__numa_idle=CPUS * (100 - percent) / 100)


def two(left: float, right: float, *pods: object) -> World:
    world = World(*pods)  # type: ignore[arg-type]
    use(world, "numa:0", left)
    use(world, "numa:1", right)
    return world


@pytest.mark.parametrize(
    ("percents", "was_short", "short"),
    [
        ((95, 95, 95), False, False),  # not full
        ((95, 95, 95, 95), False, True),
        ((80, 95, 95, 95), False, True),  # 75 % of the samples
        ((80, 80, 95, 95), False, False),  # 50 %
        ((95, 95, 95, 80), False, False),  # over in the end
        ((95, 95, 95, 90), False, False),  # not above the threshold in the end
        ((90, 90, 90, 90), False, False),
        ((95, 95, 95, 89), True, True),  # between the marks it continues
        ((80, 80, 80, 88.1), True, True),
        ((95, 95, 95, 88), True, False),  # at the lower mark
        ((95, 95), True, False),  # restarted after a gap
    ],
)
def test_a_shortage_begins_above_the_threshold_and_ends_at_the_lower_mark(
    percents: tuple[float, ...], was_short: bool, short: bool
) -> None:
    ring = LoadRing(tuple(percent / 100 for percent in percents), START)
    assert numa_cpu.judge_node(ON, ring, was_short=was_short).short is short


def test_after_its_end_the_window_begins_from_the_low_sample() -> None:
    """Else three old samples above the threshold and one more would do."""
    ended = numa_cpu.judge_node(ON, LoadRing((0.95, 0.95, 0.95, 0.80), START), was_short=True)
    assert ended.ring.ratios == (0.80,) * 4


def test_a_busy_node_is_a_shortage_after_three_of_four_samples_down_to_the_lower_mark() -> None:
    world = two(96, 20, be("a"), be("b"))
    world.put("pod:a@numa:0", cpu__numa_use=2000)
    world.put("pod:b@numa:1", cpu__numa_use=2000)
    judge = Judge(numa_cpu.TRIGGER, world, ON)
    reading = judge.after(44)
    assert (reading.pressures, reading.known) == ((), False)
    reading = judge.after(1)
    (pressure,) = reading.pressures
    assert (pressure.subject, pressure.good, pressure.hard) == ("numa:0", EvictedResource.CPU, False)
    assert pressure.need == pytest.approx(CPUS * 0.08)
    assert (pressure.classes, uids([pressure])) == (RECLAIMED, ["a"])
    assert reading.known


def test_use_between_the_marks_neither_begins_nor_ends_it() -> None:
    world = two(89, 20)
    judge = Judge(numa_cpu.TRIGGER, world, ON)
    assert not judge.after(200).pressures
    use(world, "numa:0", 95)
    assert judge.after(60).pressures
    use(world, "numa:0", 89)
    assert judge.after(200).pressures[0].need == pytest.approx(CPUS * 0.01)
    use(world, "numa:0", 88)
    assert not judge.after(20).pressures
    use(world, "numa:0", 95)
    assert not judge.after(30).pressures
    assert judge.after(30).pressures


def test_a_lower_mark_of_its_own_is_released_to() -> None:
    judge = Judge(numa_cpu.TRIGGER, two(96, 20), NumaCpuConfig(enabled=True, threshold_percent=80, lower_percent=60))
    assert judge.after(60).pressures[0].need == pytest.approx(CPUS * 0.36)
    with pytest.raises(ValueError, match="lower_percent is 81; expected at most threshold_percent"):
        NumaCpuConfig(threshold_percent=80, lower_percent=81)


def test_a_load_that_has_just_ended_is_no_shortage_and_ends_it_with_its_next_sample() -> None:
    world = two(96, 20)
    judge = Judge(numa_cpu.TRIGGER, world, ON)
    assert judge.after(60).pressures
    use(world, "numa:0", 10)
    assert not judge.after(1).pressures
    assert judge.memory["numa:0"].short
    judge.after(30)
    assert not judge.memory["numa:0"].short


def test_peaks_of_half_of_the_time_are_no_shortage() -> None:
    world = two(20, 20)
    judge = Judge(numa_cpu.TRIGGER, world, ON)
    judge.now()
    for _ in range(10):
        use(world, "numa:0", 100)
        assert not judge.after(15).pressures
        use(world, "numa:0", 20)
        assert not judge.after(15).pressures


def test_each_node_is_judged_by_itself() -> None:
    world = two(96, 97)
    use(world, "numa:2", 89)
    use(world, "numa:3", 100)
    reading = Judge(numa_cpu.TRIGGER, world, ON).after(60)
    assert [pressure.subject for pressure in reading.pressures] == ["numa:0", "numa:1", "numa:3"]


def test_one_node_is_said_and_is_no_fault() -> None:
    world = World(be("a"))
    use(world, "numa:0", 100)
    world.put("pod:a", cpu__use=9000)
    planner = Planner(world, only("numa_cpu", ON))
    assert planner.run(200) == []
    reading = planner.decision.readings["numa_cpu"]
    assert (reading.known, reading.pressures) == (True, ())
    assert reading.words.startswith("one NUMA node")
    assert planner.log == []


def test_without_readings_it_is_unknown_and_a_gap_begins_a_new_ring() -> None:
    world = two(96, 20)
    judge = Judge(numa_cpu.TRIGGER, world, ON)
    assert judge.after(60).pressures
    world.at += 60
    assert judge.now().pressures == ()
    for subject in ("numa:0", "numa:1"):
        world.put(subject, cpu__numa_use=None)
    reading = judge.after(20)
    assert (reading.known, reading.pressures) == (False, ())


def test_a_pod_that_was_moved_to_another_node_is_no_candidate_of_the_old_one() -> None:
    world = two(96, 20, be("a"))
    world.put("pod:a@numa:0", cpu__numa_use=2000, memory__numa_rss=1)
    judge = Judge(numa_cpu.TRIGGER, world, ON)
    assert uids(judge.after(60).pressures) == ["a"]
    world.put("pod:a@numa:0", cpu__numa_use=None)
    world.put("pod:a@numa:1", cpu__numa_use=2000)
    assert uids(judge.after(1).pressures) == []


@pytest.mark.parametrize(
    ("online_pods", "classes", "gone"),
    [
        (False, (PodClass.RECLAIMED,), ["job"]),
        (True, (PodClass.RECLAIMED,), ["job"]),
        (False, (PodClass.RECLAIMED, PodClass.SHARED), ["job"]),
        (True, (PodClass.RECLAIMED, PodClass.SHARED), ["job", "web"]),
    ],
)
def test_be_pods_alone_are_evicted_unless_both_settings_have_online_ones(
    online_pods: bool, classes: tuple[PodClass, ...], gone: list[str]
) -> None:
    world = two(100, 20, be("web", cls=PodClass.SHARED), be("job"), be("far"), be("wide"))
    world.put("pod:web@numa:0", cpu__numa_use=5000)
    world.put("pod:job@numa:0", cpu__numa_use=2500)
    world.put("pod:far@numa:1", cpu__numa_use=9000)
    world.put("pod:wide", cpu__use=9000)
    planner = Planner(
        world, only("numa_cpu", varied(replace(ON, online_pods=online_pods), _cooldown_s=0), classes=classes)
    )
    ended = []
    for _ in range(300):
        for order in planner.step().orders:
            ended.append(order.uid)
            assert (order.cause, order.subject, order.forced) == ("numa_cpu", "numa:0", False)
            planner.cases.append(case(order, EvictionOutcome.DONE, world.wall))
            del world.pods[order.uid], world.samples[f"pod:{order.uid}@numa:0"]
    assert ended == gone


def test_pods_on_several_nodes_are_no_candidates_and_that_is_said() -> None:
    world = two(100, 20, be("wide"))
    world.put("pod:wide", cpu__use=9000)
    planner = Planner(world, only("numa_cpu", ON))
    assert planner.run(120) == []
    assert reasons(planner.decision)["numa_cpu"].startswith("nobody:")


def test_after_an_eviction_it_pauses_for_its_cooldown() -> None:
    world = two(100, 20, be("a"), be("b"))
    for uid in "ab":
        world.put(f"pod:{uid}@numa:0", cpu__numa_use=1000)
    planner = Planner(world, only("numa_cpu", varied(ON, _cooldown_s=40)))
    (order,) = planner.first().orders
    del world.pods[order.uid], world.samples[f"pod:{order.uid}@numa:0"]
    planner.cases = [case(order, EvictionOutcome.DONE, world.wall)]
    assert planner.run(39) == []
    assert reasons(planner.decision)["numa_cpu"].startswith("cooling:")
    assert len(planner.run(2)) == 1


def test_use_of_a_pod_on_another_node_is_not_credited_to_this_one() -> None:
    world = two(100, 100, be("a"), be("b"))
    world.put("pod:a@numa:0", cpu__numa_use=3000)
    world.put("pod:b@numa:1", cpu__numa_use=3000)
    for uid in "ab":
        world.put(f"pod:{uid}", cpu__use=3000)
    planner = Planner(world, only("numa_cpu", varied(ON, _cooldown_s=0)))
    (order,) = planner.first().orders
    planner.cases = [case(order)]
    assert planner.run(10) == [{"a": "b", "b": "a"}[order.uid]]


def test_a_dry_run_shows_the_pod_and_off_is_off() -> None:
    def planned(config: EvictionConfig) -> Planner:
        world = two(100, 20, be("a"))
        world.put("pod:a@numa:0", cpu__numa_use=3000)
        planner = Planner(world, config)
        planner.first()
        return planner

    dry = planned(only("numa_cpu", replace(ON, dry_run=True))).decision
    assert (dry.orders, [order.uid for order in dry.would]) == ((), ["a"])
    off = only("numa_cpu", NumaCpuConfig())
    assert planned(off).decision.would == planned(off).decision.orders == ()
    assert "cpu.numa_use" not in signals_of(off)
    assert {"cpu.numa_use", "cpu.numa_idle", "cpu.use"} <= signals_of(only("numa_cpu", ON))
    assert not NumaCpuConfig().enabled


def test_a_pods_memory_on_the_only_node_with_memory_is_its_whole() -> None:
    """A machine with CPUs on two nodes and memory on one: the pod's whole memory is on that one."""
    world = two(10, 10, be("a"))
    world.put("numa:0", memory__total=GI, memory__free=0)
    world.put("pod:a", memory__rss=7.0)
    assert usage_of(EvictedResource.MEMORY, world.pods["a"], "numa:0", world.scene()) == 7.0


@pytest.mark.parametrize(
    ("machine", "busy"),
    [("2 sockets x 8 cores x 2 threads", 1), ("4 sockets x 4 cores", 2), ("4 sockets x 4 cores", 0)],
)
@pytest.mark.parametrize("enabled", [True, False])
def test_on_a_described_machine_the_be_pod_of_the_busy_node_is_evicted(machine: str, busy: int, enabled: bool) -> None:
    config, history, memory = only("numa_cpu", NumaCpuConfig(enabled=enabled)), History(), None
    orders = []
    for frame in busy_node_frames(machine, busy, 70):
        history.add(frame)
        decision, memory = decide(config, frame, history, memory)
        orders += [(order.uid, order.subject, order.frees["cpu"]) for order in decision.orders]
    assert orders == ([(f"be-{busy}", f"numa:{busy}", 1000.0)] if enabled else [])
    assert {uid for shortage in decision.pressures for uid in shortage.only or ()} == (
        {f"be-{busy}", f"web-{busy}"} if enabled else set()
    )


def test_on_a_described_machine_of_one_node_no_pod_is_evicted() -> None:
    history, memory = History(), None
    for frame in busy_node_frames("1 socket x 4 cores", 0, 70):
        history.add(frame)
        decision, memory = decide(only("numa_cpu", ON), frame, history, memory)
    assert (decision.orders, decision.refusals, decision.pressures) == ((), (), ())
    assert decision.readings["numa_cpu"].known
