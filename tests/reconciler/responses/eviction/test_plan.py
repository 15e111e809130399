"""The decision as a whole: no pod twice, none where it cannot help, never more than the caps, and dry runs."""

from typing import Any

import pytest
from msgspec.structs import fields, replace

from reconciler.responses.eviction.config import (
    DiskTriggerConfig,
    EvictionConfig,
    LimitsConfig,
    NodeCpuConfig,
    NodeMemoryConfig,
    NumaMemoryTriggerConfig,
    ReclaimedResourceConfig,
    RssOveruseConfig,
    TriggersConfig,
)
from reconciler.responses.eviction.limits import load_history, saved_history
from reconciler.responses.eviction.plan import decide, initial_state, signals_of
from reconciler.responses.eviction.triggers.base import Trigger, check_sections, check_trigger
from reconciler.responses.eviction.triggers.named import NAME
from reconciler.responses.eviction.triggers.node_memory import TRIGGER as NODE_MEMORY
from reconciler.responses.eviction.triggers.table import TRIGGERS
from state.eviction import EvictionOutcome
from state.evidence import ContendedResource
from state.model import Hold, PodClass
from tests.fakes.constants import varied
from tests.reconciler.responses.eviction.plans import QUIET, case, full, memory, only, requested
from tests.reconciler.responses.eviction.world import GI, Planner, World, batch, be, reasons

RSS = varied(RssOveruseConfig(enabled=True), for_s=0)


def test_an_order_tells_all_that_carrying_it_out_needs() -> None:
    world = full(be("a", grace_s=45.0), be("b"), a=15, b=1)
    (order,) = Planner(world, memory()).first().orders
    assert (order.uid, order.title, order.namespace, order.name, order.owner) == (
        "a",
        "ci/a",
        "ci",
        "a",
        "ReplicaSet/a",
    )
    assert (order.cause, order.subject, order.forced, order.grace_s) == ("node_memory", "node", True, 45.0)
    assert order.frees == {"memory": 15 * GI}
    assert order.evidence == "80 GiB of 100 GiB used, 80 % (threshold 70 %)"
    assert order.ranking[0].startswith("1. evict: ci/a")
    assert order.decided_s == pytest.approx(world.wall)


@pytest.mark.parametrize(
    ("most", "own", "grace"), [(None, None, None), (None, 30.0, 30.0), (10, 30.0, 10), (10, 5.0, 5.0), (10, None, 10)]
)
def test_the_grace_is_the_pods_own_but_not_more_than_the_trigger_gives(
    most: float | None, own: float | None, grace: float | None
) -> None:
    config = only("node_memory", varied(NodeMemoryConfig(enabled=True), grace_s=most))
    (order,) = Planner(full(be("a", grace_s=own), a=15), config).first().orders
    assert order.grace_s == grace


def test_a_refused_and_a_failed_eviction_are_no_relief_and_the_next_one_goes() -> None:
    """crane counts a call that failed as released; Koordinator had the same."""
    world = full(be("a"), be("b"), be("c"), a=15, b=14, c=13)
    planner = Planner(world, memory())
    (first,) = planner.first().orders
    planner.cases = [case(first, EvictionOutcome.REFUSED, world.wall)]
    (second,) = planner.step().orders
    planner.cases.append(case(second, EvictionOutcome.FAILED, world.wall))
    (third,) = planner.step().orders
    assert [first.uid, second.uid, third.uid] == ["a", "b", "c"]
    planner.cases.append(case(third))
    assert "its eviction was refused" in "\n".join(third.ranking)
    assert "its eviction failed" in "\n".join(third.ranking)


def test_success_starts_the_pause_of_its_trigger_alone() -> None:
    config = only("node_memory", varied(NodeMemoryConfig(enabled=True), _cooldown_s=30))
    config = replace(config, triggers=replace(config.triggers, rss_overuse=RSS))
    world = full(be("a"), be("b"), be("c", requests=batch(None, GI)), a=15, b=14, c=1)
    planner = Planner(world, config)
    (order,) = planner.first().orders
    del world.pods["a"]
    del world.samples["pod:a"]
    planner.cases = [case(order, EvictionOutcome.DONE, world.wall)]
    world.put("pod:c", memory__rss=2 * GI)
    assert [eviction_order.uid for eviction_order in planner.step().orders] == ["c"]
    assert planner.run(27) == []
    assert reasons(planner.decision)["node_memory"].startswith("cooling: cooldown after the last eviction")
    assert "b" in planner.run(5)


def test_evicting_be_cannot_cure_what_online_work_has_taken() -> None:
    world = full(be("a"), be("b"), be("leak", cls=PodClass.SHARED), used=95, a=1, b=2, leak=80)
    planner = Planner(world, memory())
    assert planner.run(100) == []
    why = reasons(planner.decision)["node_memory"]
    assert why.startswith("not-theirs: evicting reclaimed pods cannot fix it: all candidates use 3 GiB")
    (refusal,) = planner.decision.refusals
    assert any("ci/leak: class shared is not in eviction.classes (80 GiB" in line for line in refusal.ranking)
    assert any("wait: cannot fix it" in line for line in refusal.ranking)


def test_pods_that_hold_next_to_nothing_cannot_cure_it_either() -> None:
    world = full(be("a"), a=0.001)
    planner = Planner(world, memory())
    assert planner.run(20) == []
    assert reasons(planner.decision)["node_memory"] == (
        "not-theirs: evicting reclaimed pods cannot fix it: none uses enough of the resource"
    )


def test_for_the_images_file_system_who_holds_some_of_it_goes_and_an_unknown_part_is_told_as_such() -> None:
    config = only("disk", varied(DiskTriggerConfig(enabled=True), for_s=0))
    world = World(be("a"), be("b"))
    for place, free in (("fs:nodefs", 50), ("fs:imagefs", 5)):
        world.put(place, fs__size=100 * GI, fs__available=free * GI, fs__inodes=1e6, fs__inodes_free=9e5)
    world.put("pod:a", fs__use=30 * GI, fs__inodes_use=100)
    planner = Planner(world, config)
    assert planner.run(5) == []
    assert reasons(planner.decision)["disk"] == "unknown: usage of 2 candidates is unknown"
    (refusal,) = planner.decision.refusals
    assert all("usage unknown (usage unknown)" in line for line in refusal.ranking)
    world.put("pod:b@fs:imagefs", fs__use=20 * GI, fs__inodes_use=100)
    assert planner.run(1) == ["b"]


def test_nobody_is_left_to_go() -> None:
    planner = Planner(full(be("a", static=True), a=50), memory())
    assert planner.run(20) == []
    assert reasons(planner.decision)["node_memory"] == "nobody: no pod may be evicted for this"


def test_nobody_goes_in_the_first_seconds_after_the_start() -> None:
    world = full(be("a"), a=15)
    planner = Planner(world, memory(limits=QUIET), started=False)
    assert planner.run(60) == []
    assert reasons(planner.decision)["node_memory"].startswith("starting: quiet period after start: 1 s left")
    assert planner.run(2) == ["a"]


def test_a_hold_on_the_node_or_the_pod_keeps_everybody() -> None:
    planner = Planner(full(be("a"), a=15), memory())
    planner.holds = {"node": Hold(target="node", reason="looking", by="jo")}
    assert planner.run(10) == []
    assert reasons(planner.decision)["node_memory"] == "held: the node is on hold by jo: looking"
    planner.holds = {"pod:a": Hold(target="pod:a", reason="looking", by="jo")}
    assert planner.run(10) == []
    planner.holds = {}
    assert planner.run(2) == ["a"]


def small(count: int) -> World:
    """Each holds 1 GiB of the 12 that must be freed."""
    return full(*(be(f"p{n}") for n in range(count)), **{f"p{n}": 1 for n in range(count)})


def test_a_hard_pressure_takes_up_to_the_burst_and_the_caps() -> None:
    planner = Planner(small(20), memory(limits=varied(LimitsConfig(per_minute=4, per_10_minutes=6), per_pass=3)))
    ordered = [len(planner.step().orders) for _ in range(5)]
    assert ordered == [3, 1, 0, 0, 0]
    assert reasons(planner.decision)["node_memory"] == "limit: limit per minute, 4 of 4 used"
    assert any("wait: limit per minute, 4 of 4 used" in line for line in planner.decision.refusals[0].ranking)


def test_an_owners_pods_do_not_all_go() -> None:
    pods = [be(f"p{n}", owner="Job/one") for n in range(20)]
    world = full(*pods, **{f"p{n}": 1 for n in range(20)})
    planner = Planner(world, memory(limits=LimitsConfig(per_owner=2)))
    assert len(planner.run(10)) == 2
    assert reasons(planner.decision)["node_memory"] == "limit: eviction limit of their owners reached"


def test_of_soft_pressures_the_best_gets_one_in_a_pass() -> None:
    config = only("rss_overuse", RSS)
    pods = [be("a", requests=batch(None, GI), priority=5), be("b", requests=batch(None, GI))]
    world = full(*pods, used=10, a=9, b=2)
    planner = Planner(world, config)
    decision = planner.step()
    assert [order.uid for order in decision.orders] == ["b"]
    (refusal,) = decision.refusals
    assert (refusal.subject, refusal.reason) == ("pod:a", "ci/b ranks first")
    assert [order.uid for order in planner.step().orders] == ["a"]


def test_a_soft_pressure_waits_while_somebody_goes_for_a_hard_one() -> None:
    config = memory()
    config = replace(config, triggers=replace(config.triggers, rss_overuse=RSS))
    world = full(be("a"), be("b", requests=batch(None, GI)), a=15, b=2)
    decision = Planner(world, config).step()
    assert [order.uid for order in decision.orders] == ["a"]
    assert reasons(decision)["rss_overuse"].startswith("turn: another pod is evicted in this pass")


def test_numa_pressure_takes_who_holds_memory_there() -> None:
    config = only("numa_memory", varied(NumaMemoryTriggerConfig(), _cooldown_s=0, droppable_percent=100))
    world = World(be("here"), be("there"))
    for node in ("numa:0", "numa:1"):
        world.put(node, memory__free=50 * GI, memory__total=100 * GI, memory__low=GI, memory__min=GI / 2)
    world.put("numa:1", memory__free=GI / 4)
    world.put("pod:here@numa:1", memory__numa_rss=5 * GI)
    world.put("pod:there@numa:0", memory__numa_rss=50 * GI)
    (order,) = Planner(world, config).first().orders
    assert (order.uid, order.subject, order.grace_s) == ("here", "numa:1", 10.0)


def test_a_hold_that_has_run_out_holds_nobody() -> None:
    planner = Planner(full(be("a"), a=15), memory())
    until = planner.world.wall + 5
    planner.holds = {
        target: Hold(target=target, reason="looking", by="jo", until=until) for target in ("node", "pod:a")
    }
    assert planner.run(4) == []
    assert planner.run(2) == ["a"]


def test_a_named_suspect_goes_when_exclusions_and_limits_allow_it() -> None:
    config = only("interference", TriggersConfig().interference)
    world = World(be("hog"), be("web", cls=PodClass.SHARED))
    planner = Planner(world, config)
    planner.named = [requested("hog", evidence="p99 40 ms", resource=ContendedResource.CPU)]
    (order,) = planner.step().orders
    assert (order.uid, order.cause, order.forced) == ("hog", NAME, False)
    assert order.evidence == "rule latency: victim shop/web: p99 40 ms"
    planner.cases = [case(order, EvictionOutcome.GONE, world.wall)]
    planner.named = [replace(planner.named[0], uid="web")]
    assert planner.run(5) == []
    assert reasons(planner.decision)[NAME] == "nobody: no pod may be evicted for this"


def test_a_wish_between_two_passes_is_served_in_the_next_one_and_lapses() -> None:
    config = only("interference", TriggersConfig().interference, interval_s=5.0)
    world = World(be("hog", age_s=0.0))
    planner = Planner(world, config)
    planner.step()
    planner.named = [requested("hog")]
    assert planner.step().orders == ()
    planner.named = []
    assert planner.run(10) == ["hog"]
    young = Planner(World(be("new", age_s=-100.0)), config)
    young.named = [requested("new")]
    young.step()
    young.named = []
    assert young.run(50) == []
    assert reasons(young.decision)
    young.run(15)
    assert young.run(300) == []
    assert not reasons(young.decision)


def test_a_pass_is_made_only_when_its_time_has_come() -> None:
    planner = Planner(full(be("a"), a=15), memory(interval_s=5.0))
    assert len(planner.step().orders) == 1
    steps = [planner.step() for _ in range(4)]
    assert [(decision.orders, decision.news) for decision in steps] == [((), ())] * 4
    assert steps[-1].pressures
    assert "coming" in reasons(planner.step())["node_memory"]


def test_a_dry_run_decides_the_same_at_each_moment_and_evicts_nobody() -> None:
    for used in (60, 75, 80, 99):
        decisions = []
        for dry in (True, False):
            world = full(be("a"), be("b"), be("c", priority=9), used=used, a=3, b=9, c=20)
            planner = Planner(world, memory(dry_run=dry))
            decisions.append(planner.step())
        dry_run, enforced = decisions
        assert dry_run.orders == ()
        assert dry_run.would == enforced.orders
        assert dry_run.refusals == enforced.refusals


def test_a_dry_run_stands_and_is_told_once() -> None:
    world = full(be("a"), a=15)
    planner = Planner(world, memory(dry_run=True))
    (first,) = planner.step().would
    for second in range(200):
        world.put("pod:a", memory__rss=(15 + second % 3) * GI)
        (order,) = planner.step().would
        assert (order.id, order.decided_s) == (first.id, first.decided_s)
    assert planner.log == [
        "node_memory: ci/a would be evicted (dry run): 80 GiB of 100 GiB used, 80 % (threshold 70 %)"
    ]
    world.put(memory__available=90 * GI)
    planner.run(59)
    assert len(planner.log) == 1
    planner.run(5)
    assert planner.log[1:] == [f"ended: {planner.log[0]}"]
    world.put(memory__available=20 * GI)
    planner.run(5)
    assert len(planner.log) == 3


def test_what_comes_and_goes_is_one_thing_and_told_once() -> None:
    world = full(be("a"), a=15)
    planner = Planner(world, memory(dry_run=True))
    for second in range(300):
        world.put(memory__available=(20 if second % 20 < 10 else 90) * GI)
        planner.step()
    assert len(planner.log) == 1


def test_one_trigger_can_be_a_dry_run_beside_enforced_ones_and_takes_nothing_from_them() -> None:
    config = memory(limits=varied(LimitsConfig(), per_pass=1))
    config = replace(
        config,
        triggers=replace(
            config.triggers,
            reclaimed_resource=varied(ReclaimedResourceConfig(), for_s=0),
            node_memory=NodeMemoryConfig(enabled=True, dry_run=True),
        ),
    )
    world = full(be("a"), be("b", requests=batch(9000)), a=15, b=1)
    world.put(be__budget=1000)
    decision = Planner(world, config).step()
    assert [(order.uid, order.cause) for order in decision.orders] == [("b", "reclaimed_resource")]
    assert [(order.uid, order.cause) for order in decision.would] == [("a", "node_memory")]


def test_a_node_on_which_nothing_is_enforced_is_a_dry_run() -> None:
    world = full(be("a"), a=15)
    planner = Planner(world, memory())
    world.enforce = False
    assert [(decision.orders, len(decision.would)) for decision in (planner.step(), planner.step())] == [((), 1)] * 2
    frame, memory_now = world.frame(), planner.memory
    outcomes = [
        decide(planner.config, replace(frame, at_s=frame.at_s + 1, enforce=enforce), world.history, memory_now)[0]
        for enforce in (False, True)
    ]
    assert [([order.uid for order in decision.orders], len(decision.would)) for decision in outcomes] == [
        ([], 1),
        (["a"], 0),
    ]


def test_switched_off_nothing_is_judged_and_the_past_is_kept() -> None:
    world = full(be("a"), a=15)
    planner = Planner(world, memory())
    (order,) = planner.step().orders
    planner.config = EvictionConfig()
    decision = planner.step()
    assert (decision.readings, decision.pressures) == ({}, ())
    assert planner.memory is not None
    assert [turn.uid for turn in planner.memory.past.turns] == [order.uid]
    assert signals_of(EvictionConfig()) == frozenset()
    assert {"memory.total", "memory.available", "memory.rss"} <= signals_of(memory())
    every = EvictionConfig(enabled=True)
    assert signals_of(every) - signals_of(every, network=False) == {"net.receive", "net.transmit"}


def test_a_trigger_that_is_blind_says_so_once() -> None:
    world = World(be("a"))
    planner = Planner(world, memory())
    planner.run(30)
    assert planner.log == ["node_memory: cannot evaluate: unknown: memory.total, memory.available not measured"]
    assert planner.decision.readings["node_memory"].known is False


def test_the_caps_hold_over_a_restart() -> None:
    config = memory(limits=varied(LimitsConfig(per_minute=3), quiet_s=0, per_pass=3))
    world = small(20)
    planner = Planner(world, config)
    assert len(planner.step().orders) == 3
    assert planner.memory is not None
    row = saved_history(planner.memory.past, world.frame())
    again = Planner(world, config)
    world.history = type(world.history)()
    frame = world.frame()
    again.memory = initial_state(frame, load_history(row, at_s=frame.at_s, wall_s=frame.wall_s))
    assert again.run(20) == []
    assert "limit" in reasons(again.decision)["node_memory"]


def test_a_pod_that_was_started_again_in_place_is_not_evicted_over_and_over() -> None:
    world = full(be("a", owner="Job/one"), be("b", owner="Job/one"), a=15, b=0)
    planner = Planner(world, memory(limits=varied(LimitsConfig(per_owner_percent=100), again_s=300)))
    (order,) = planner.step().orders
    planner.cases = [case(order, EvictionOutcome.DONE, world.wall)]
    assert planner.run(299) == []
    assert planner.run(5) == ["a"]


def test_who_has_changed_is_judged_by_what_is_so_now() -> None:
    """A mark that is set after the order is for the executor; before, no pod is evicted."""
    world = full(be("a"), a=15)
    planner = Planner(world, memory())
    world.pods["a"] = be("a", annotations={"bypassd/do-not-evict": "true"})
    assert planner.run(5) == []
    world.pods["a"] = be("a")
    assert planner.run(1) == ["a"]


def test_the_table_refuses_what_is_half_defined() -> None:
    sections = {field.name: field.type for field in fields(TriggersConfig)}
    assert len(TRIGGERS) >= 10
    for trigger in TRIGGERS.values():
        check_trigger(trigger, sections)
    for changes, message in (
        ({"summary": ""}, "needs a summary"),
        ({"name": "other"}, "no section of this name"),
        ({"config_type": NodeCpuConfig}, "no section of this name and config type"),
        ({"signals": ("memory.nothing",)}, r"unknown signal memory\.nothing"),
    ):
        broken: Trigger[Any, Any] = replace(NODE_MEMORY, **changes)
        with pytest.raises(ValueError, match=message):
            check_trigger(broken, sections)
    check_sections(TRIGGERS, sections, NAME)
    with pytest.raises(ValueError, match="differ: node_cpu"):
        check_sections([name for name in TRIGGERS if name != "node_cpu"], sections, NAME)
    with pytest.raises(ValueError, match="differ: other"):
        check_sections([*TRIGGERS, "other"], sections, NAME)
