"""Orders that are on their way: credited, waited for, and withdrawn when their reason is gone."""

from typing import Any

import pytest
from msgspec.structs import replace

from reconciler.responses.eviction.config import (
    LimitsConfig,
    MemoryPressureConfig,
    NumaMemoryTriggerConfig,
    PoolLoadConfig,
    RssOveruseConfig,
    TriggersConfig,
)
from reconciler.responses.eviction.limits import load_history, saved_history
from reconciler.responses.eviction.plan import initial_state
from reconciler.responses.eviction.triggers.named import NAME
from state.eviction import EvictionCase, EvictionMethodName, EvictionOrder, EvictionOutcome
from state.evidence import ContendedResource, RuleVerdict, Verdict
from state.model import PodClass
from tests.fakes.constants import varied
from tests.reconciler.responses.eviction.plans import case, full, memory, only, requested
from tests.reconciler.responses.eviction.world import GI, Planner, World, batch, be, reasons


def test_nobody_goes_for_pressure_that_is_on_its_way() -> None:
    world = full(be("a"), be("b"), a=13, b=13)
    planner = Planner(world, memory())
    (order,) = planner.first().orders
    planner.cases = [case(order)]
    assert planner.run(300) == []
    assert reasons(planner.decision)["node_memory"].startswith(f"coming: eviction in progress: {order.title}")


def test_between_the_order_and_its_case_nobody_goes_either() -> None:
    planner = Planner(full(be("a"), be("b"), a=13, b=13), memory())
    assert len(planner.first().orders) == 1
    assert planner.run(55) == []


def test_what_comes_back_is_credited_and_only_the_rest_is_taken() -> None:
    """12 GiB must be freed: 8 are being freed."""
    world = full(be("gone", terminating=True), be("a"), be("b", priority=5), gone=8, a=5, b=9)
    (order,) = Planner(world, memory()).first().orders
    assert order.uid == "a"


def test_a_pod_that_others_are_ending_is_credited_for_its_grace_and_a_while_and_then_no_more() -> None:
    world = full(be("stuck", terminating=True, grace_s=30.0), be("a"), stuck=13, a=13)
    planner = Planner(world, memory())
    assert planner.run(88) == []
    assert planner.run(5) == ["a"]


def test_a_stall_without_an_amount_takes_one_and_waits_for_it() -> None:
    config = only("memory_pressure", varied(MemoryPressureConfig(), reclaimed_s=0))
    pods = [be(f"w{n}", cls=PodClass.SHARED) for n in range(3)]
    world = full(be("a"), be("b"), *pods, a=5, b=4)
    world.put(memory__pressure=50)
    for pod in pods:
        world.put(pod.subject, memory__pressure=50)
    planner = Planner(world, config)
    (order,) = planner.first().orders
    assert order.uid == "a"
    planner.cases = [case(order)]
    assert planner.run(100) == []
    # Its work has ended, a helper of it has not: what is judged by a mean is still bad, and waits for the end.
    world.put("pod:a", memory__rss=0)
    assert planner.run(100) == []
    assert reasons(planner.decision)["memory_pressure"].startswith("coming: eviction in progress: ci/a")
    del world.pods["a"]
    assert planner.run(10) == []
    planner.cases = [case(order, EvictionOutcome.GONE, world.wall)]
    assert planner.run(1) == ["b"]


def test_what_was_hoped_of_a_pod_is_credited_until_its_case_has_ended() -> None:
    """A pool's load is judged by a ring of samples, which shows for minutes what has gone."""
    config = only("pool_load", PoolLoadConfig(enabled=True), classes=(PodClass.SHARED,))
    world = World(be("a", cls=PodClass.SHARED), be("b", cls=PodClass.SHARED))
    world.put("pool:shared", load__runnable=40, pool__cpus=10)
    for uid, use in (("a", 30_000), ("b", 20_000)):
        world.put(f"pod:{uid}", cpu__use=use, cpu__wait_milli=0)
    planner = Planner(world, config)
    (order,) = planner.first(600).orders
    planner.cases = [case(order)]
    world.put(f"pod:{order.uid}", cpu__use=0)
    assert planner.run(30) == []
    assert reasons(planner.decision)["pool_load"].startswith(f"coming: eviction in progress: {order.title}")
    del world.pods[order.uid]
    assert planner.run(10) == []


def test_what_was_hoped_for_one_place_is_not_credited_to_another() -> None:
    config = only(
        "numa_memory", varied(NumaMemoryTriggerConfig(reclaimed_passes=1), _cooldown_s=0, droppable_percent=100)
    )
    world = World(be("a"), be("b"))
    for node in ("numa:0", "numa:1"):
        world.put(node, memory__free=GI / 4, memory__total=100 * GI, memory__low=GI, memory__min=GI / 2)
    world.put("numa:1", memory__free=50 * GI)
    world.put("pod:a@numa:0", memory__numa_rss=5 * GI)
    world.put("pod:a@numa:1", memory__numa_rss=0)
    world.put("pod:b@numa:1", memory__numa_rss=5 * GI)
    planner = Planner(world, config)
    (order,) = planner.first().orders
    assert order.uid == "a"
    planner.cases = [case(order)]
    world.put("numa:1", memory__free=GI / 4)
    assert planner.run(30) == ["b"]


def test_a_second_suspect_waits_for_the_end_of_the_first() -> None:
    config = only("interference", TriggersConfig().interference)
    planner = Planner(World(be("hog"), be("other")), config)
    planner.named = [requested(uid, resource=ContendedResource.CPU) for uid in ("hog", "other")]
    (order,) = planner.step().orders
    planner.cases = [case(order)]
    assert planner.run(30) == []
    assert "coming" in reasons(planner.decision)[NAME]


@pytest.mark.parametrize(
    ("more", "credited"),
    [
        (
            {
                "means": EvictionMethodName.SIGNAL,
                "left": (EvictionMethodName.API, EvictionMethodName.CRI, EvictionMethodName.SIGNAL),
            },
            True,
        ),
        ({"means": EvictionMethodName.API, "left": (EvictionMethodName.API,), "accepted": True}, True),
        ({"means": EvictionMethodName.API, "left": (EvictionMethodName.API,)}, False),
        (
            {"means": EvictionMethodName.CRI, "left": (EvictionMethodName.API,)},
            False,
        ),  # the kubelet has started it again
        ({}, False),
    ],
)
def test_a_half_dead_pod_is_credited_until_it_is_gone_or_may_be_tried_again(
    more: dict[str, Any], credited: bool
) -> None:
    world = full(be("a"), be("b"), a=15, b=14)
    planner = Planner(world, memory(limits=varied(LimitsConfig(), retry_s=120)))
    (first,) = planner.first().orders
    planner.cases = [replace(case(first, EvictionOutcome.FAILED, world.wall), **more)]
    world.put("pod:a", memory__rss=1 * GI)
    if not credited:
        assert planner.run(2) == ["b"]
        return
    assert planner.run(118) == []
    assert reasons(planner.decision)["node_memory"].startswith("coming: eviction in progress: ci/a; 15 GiB")
    again = Planner(world, planner.config)
    assert planner.memory is not None
    row = saved_history(planner.memory.past, world.frame())
    frame = world.frame()
    again.memory = initial_state(frame, load_history(row, at_s=frame.at_s, wall_s=frame.wall_s))
    assert planner.run(5) == ["b"]
    del world.pods["a"]
    assert again.run(70) == ["b"]


def finding(verdict: Verdict, rule: str = "latency", title: str = "shop/web") -> RuleVerdict:
    return RuleVerdict(
        rule=rule, victim="pod:web", title=title, verdict=verdict, resource=ContendedResource.CPU, since_s=0.0
    )


def test_a_wish_ends_with_the_suffering_and_not_before() -> None:
    config = only("interference", TriggersConfig().interference, limits=varied(LimitsConfig(), quiet_s=30))
    for verdict, ordered in ((Verdict.OK, []), (Verdict.UNKNOWN, ["hog"]), (Verdict.INTERFERED, ["hog"])):
        planner = Planner(World(be("hog")), config, started=False)
        planner.named = [requested("hog")]
        planner.findings = [finding(Verdict.INTERFERED), finding(Verdict.INTERFERED, "other")]
        planner.step()
        planner.named, planner.findings = [], [finding(verdict), finding(Verdict.INTERFERED, "other")]
        assert planner.run(55) == ordered, verdict


def test_an_order_whose_pressure_is_over_is_withdrawn_after_a_while() -> None:
    world = full(be("a"), a=15)
    planner = Planner(world, memory())
    (order,) = planner.first().orders
    planner.cases = [case(order)]
    overs: list[Any] = []

    def watch(seconds: int) -> list[Any]:
        return [over for _ in range(seconds) if (over := dict(planner.step().over))]

    assert watch(20) == []
    world.put(memory__available=40 * GI)
    assert watch(9) == []
    world.put(memory__available=20 * GI)
    assert watch(5) == []
    world.put(memory__available=None)
    assert watch(100) == [], "unknown is not over"
    world.put(memory__available=40 * GI)
    overs = watch(12)
    assert overs[0] == {order.id: "the shortage has ended"}
    planner.cases = [case(order, EvictionOutcome.ABANDONED, world.wall)]
    assert watch(5) == []


def test_an_order_is_withdrawn_when_the_victim_of_the_rule_is_well_and_one_of_an_earlier_run_is_let_be() -> None:
    config = only("interference", TriggersConfig().interference)
    planner = Planner(World(be("hog")), config)
    planner.named = [requested("hog")]
    planner.findings = [finding(Verdict.INTERFERED)]
    (order,) = planner.first().orders
    planner.named, planner.cases = [], [case(order)]
    assert planner.run(20) == []
    assert planner.decision.over == {}
    planner.findings = [finding(Verdict.OK)]
    planner.run(9)
    assert planner.decision.over == {}
    planner.run(1)
    assert planner.decision.over == {order.id: "shop/web has recovered"}
    later = Planner(planner.world, config)
    later.cases, later.findings = planner.cases, planner.findings
    later.run(100)
    assert later.decision.over == {}


def test_an_order_whose_victim_is_gone_or_whose_trigger_is_off_does_not_report_a_recovery() -> None:
    config = only("interference", TriggersConfig().interference)
    planner = Planner(World(be("hog")), config)
    planner.named, planner.findings = [requested("hog")], [finding(Verdict.INTERFERED)]
    (order,) = planner.first().orders
    planner.named, planner.findings, planner.cases = [], [], [case(order)]
    planner.run(12)
    assert planner.decision.over == {order.id: "rule latency no longer acts for shop/web"}
    planner = Planner(full(be("a"), a=15), memory())
    (order,) = planner.first().orders
    planner.cases, planner.config = [case(order)], config
    planner.run(12)
    assert planner.decision.over == {order.id: "trigger node_memory is off"}


@pytest.mark.parametrize("cls", [PodClass.RECLAIMED, PodClass.SHARED])
def test_a_pod_that_a_rule_named_and_that_became_an_online_pod_since_is_not_evicted(cls: PodClass) -> None:
    config = only("interference", TriggersConfig().interference, classes=(PodClass.RECLAIMED, PodClass.SHARED))
    planner = Planner(World(be("hog", cls=cls)), config)
    planner.named, planner.findings = [requested("hog")], [finding(Verdict.INTERFERED)]
    assert [order.uid for order in planner.first().orders] == (["hog"] if cls is PodClass.RECLAIMED else [])


def test_an_order_for_one_pod_is_withdrawn_when_the_pressure_no_longer_means_that_one() -> None:
    config = only("rss_overuse", varied(RssOveruseConfig(enabled=True), for_s=0))
    world = full(be("a", requests=batch(None, GI)), be("b", requests=batch(None, GI)), used=10, a=9, b=2)
    planner = Planner(world, config)
    orders = [*planner.step().orders, *planner.step().orders]
    assert len(orders) == 2
    planner.cases = [case(order) for order in orders]
    world.put("pod:a", memory__rss=GI)
    planner.run(12)
    assert list(planner.decision.over) == [order.id for order in orders if order.uid == "a"]


def unasked(planner: Planner, order: EvictionOrder) -> EvictionCase:
    ended = case(order, EvictionOutcome.REFUSED, planner.world.wall)
    return replace(ended, unasked="HTTP 401: Unauthorized")


def test_where_no_budget_can_be_asked_two_pods_are_tried_and_then_one_at_a_time_after_a_while() -> None:
    """Without that each BE pod would be ordered and refused in turn, with two alerts each."""
    limits = varied(LimitsConfig(per_minute=100, per_10_minutes=100), per_pass=1, retry_s=120)
    world = full(*(be(f"p{n}") for n in range(9)), **{f"p{n}": 13.0 for n in range(9)})
    planner = Planner(world, memory(limits=limits))
    orders = 0
    said: set[str] = set()
    for _ in range(600):
        made = planner.step().orders
        orders += len(made)
        planner.cases += [unasked(planner, order) for order in made]
        said |= set(reasons(planner.decision).values())
    assert 2 <= orders <= 2 + 2 * 600 / 120
    assert said == {
        "unasked: disruption budgets cannot be asked, and no online pod is in danger: HTTP 401: Unauthorized"
    }


def test_a_shortage_that_kills_online_pods_is_served_all_the_same_by_the_pods_that_were_refused_before() -> None:
    world = full(be("a"), be("b"), a=13, b=13)
    planner = Planner(world, memory(limits=varied(LimitsConfig(), per_pass=1)))
    for _ in range(30):
        planner.cases += [unasked(planner, order) for order in planner.step().orders]
    assert [eviction_case.order.critical for eviction_case in planner.cases] == [False, False]
    world.put(memory__available=0.5 * GI)
    assert planner.decision.critical == frozenset()
    (order,) = planner.step().orders
    assert (order.uid, order.critical) == ("a", True)
    assert planner.decision.critical == {("node_memory", "node")}
    assert [order.uid for order in planner.step().orders] == ["b"]
    assert planner.step().orders == (), "one order for each pod"


def test_an_online_pod_is_not_ordered_again_and_again_where_no_budget_can_be_asked() -> None:
    """Its order is not critical: each would be refused, with two alerts each time."""
    world = full(
        *(be(f"web{n}", cls=PodClass.SHARED) for n in range(5)), used=99.5, **{f"web{n}": 13.0 for n in range(5)}
    )
    world.put(memory__free=1, memory__low=GI, memory__pressure=50)
    for pod in world.pods.values():
        world.put(pod.subject, memory__pressure=20)
    limits = varied(LimitsConfig(per_minute=1000, per_10_minutes=1000, per_owner=1000), per_pass=5, retry_s=120)
    config = only(
        "memory_pressure",
        varied(varied(MemoryPressureConfig(), reclaimed_s=0, all_s=0), _cooldown_s=0),
        classes=(PodClass.RECLAIMED, PodClass.SHARED),
        limits=limits,
    )
    planner = Planner(world, config)
    made: list[EvictionOrder] = []
    for _ in range(110):
        orders = planner.step().orders
        made += orders
        planner.cases += [unasked(planner, order) for order in orders]
    assert any(shortage.critical for shortage in planner.decision.pressures)
    assert [order.critical for order in made] == [False] * 2, "two, by which it is known that none can be asked"
    why = "\n".join(line for refusal in planner.decision.refusals for line in refusal.ranking)
    assert "its disruption budget cannot be asked: HTTP 401: Unauthorized" in why


def test_no_online_pod_is_ended_without_its_budget_to_save_others() -> None:
    world = full(be("web", cls=PodClass.SHARED), web=50, used=99.5)
    world.put(memory__free=1, memory__low=GI)
    config = only(
        "memory_pressure",
        varied(MemoryPressureConfig(), reclaimed_s=0, all_s=0),
        classes=(PodClass.RECLAIMED, PodClass.SHARED),
    )
    pods = [be(f"w{n}", cls=PodClass.SHARED) for n in range(3)]
    world.pods |= {pod.uid: pod for pod in pods}
    world.put(memory__pressure=50)
    for pod in (*pods, world.pods["web"]):
        world.put(pod.subject, memory__pressure=20)
    decision = Planner(world, config).first()
    assert any(shortage.critical for shortage in decision.pressures)
    assert [(order.uid, order.critical) for order in decision.orders] == [("web", False)]
