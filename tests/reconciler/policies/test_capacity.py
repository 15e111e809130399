"""What a capacity file says: the part of the budget, its likely minimum, and what responses do or will do."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cgroupfs.naming import QosClass
from reconciler.control.planner import plan_node
from reconciler.policies.batch import BatchConfig
from reconciler.policies.capacity import ANNOTATION, MOST, CapacityConfig, add_low, likely, steady
from reconciler.policies.responses import ResponsesConfig
from reconciler.policies.table import PoliciesConfig
from state.capacity import CapacityPlan, CapacityState, PodCapacity
from state.cpu import HarmReading
from state.measures import AnnouncedStep, Response, Restrictions, SqueezeLimit
from state.model import ContainerMeta, NodeView, Pod, PodClass, Resources
from state.plan import NodePlan
from tests.reconciler.nodes import container, cpu, node, online, pod

ON = PoliciesConfig(capacity=CapacityConfig(enabled=True))
MILLI = st.integers(0, 500_000)


def asking(uid: str, text: str = "volume:v", **more: Any) -> Pod:
    return replace(pod(uid, **more), annotations={ANNOTATION: text})


def planned(
    view: NodeView, before: NodePlan | None = None, config: PoliciesConfig = ON
) -> tuple[NodePlan, CapacityPlan]:
    plan = plan_node(view, before, config)
    assert plan.capacity is not None
    return plan, plan.capacity


def of(view: NodeView, uid: str = "be") -> PodCapacity:
    return planned(view)[1].pods[uid]


def test_pods_in_the_besteffort_directory_share_its_quota_and_others_have_a_part_of_their_own() -> None:
    view = node(asking("be"), pod("other"), asking("big", qos=QosClass.BURSTABLE), online("web"))
    plan, capacity = planned(view)
    quota = plan.pools.quota_milli
    assert quota is not None
    assert {uid: (item.cpu_milli, item.shared_with) for uid, item in capacity.pods.items()} == {
        "be": (quota[view.besteffort], 1),
        "big": (quota["big"], 0),
    }
    assert {item.cpus for item in capacity.pods.values()} == {str(plan.pools.reclaimed)}


@pytest.mark.parametrize("text", ["", "v", "volume:", "volume:../x", "volume:a/b", "volume:.hidden", "signal:v"])
def test_only_the_name_of_a_volume_is_taken(text: str) -> None:
    assert planned(node(asking("be", text)))[1].pods == {}


def test_only_be_pods_have_one_and_a_bounded_number_of_them() -> None:
    crowd = [asking(f"p{number:04}") for number in range(MOST + 3)]
    assert len(planned(node(*crowd))[1].pods) == MOST
    assert planned(node(asking("web", cls=PodClass.SHARED)))[1].pods == {}
    assert plan_node(node(asking("be")), None, PoliciesConfig()).capacity is None


def test_the_likely_minimum_is_that_of_the_last_minutes_and_ends_with_the_window() -> None:
    view = node(asking("be"), online("web"), now=1000.0)
    plan, _ = planned(view)
    full = plan.capacity.pods["be"].cpu_milli if plan.capacity else 0
    busy = replace(view, now=1010.0, cpu=cpu(online=4000))
    plan, capacity = planned(busy, plan)
    least = capacity.pods["be"].cpu_milli
    assert least == capacity.pods["be"].likely_cpu_milli < full
    for second in range(1011, 1030):
        plan, capacity = planned(replace(view, now=float(second)), plan)
    assert (capacity.pods["be"].cpu_milli, capacity.pods["be"].likely_cpu_milli) == (full, least)
    plan, capacity = planned(replace(view, now=1400.0), plan)
    assert capacity.pods["be"].likely_cpu_milli == full


def harmless(use: int | None, ceiling: int = 8000, now: float = 1000.0) -> NodeView:
    """BE work in the idle class beside an online pod: the harm law's ceiling is all CPUs."""
    return node(
        asking("be"),
        pod("other"),
        online("web"),
        actual={(f"/kubepods/besteffort/pod{uid}", "cpu.idle"): 1 for uid in ("be", "other")},
        harm=HarmReading(ceiling_milli=ceiling),
        cpu=cpu(online=use, reclaimed=500, system=200) if use is not None else None,
        now=now,
    )


def test_under_the_harm_law_it_is_what_online_work_leaves_and_not_the_ceiling() -> None:
    plan, capacity = planned(harmless(6000))
    item = capacity.pods["be"]
    assert plan.pools.quota_milli is None
    assert (plan.pools.budget_milli, item.cpu_milli, item.shared_with, item.cpus) == (8000, 1800, 1, "0-7")
    assert "leave 1.80 CPU" in item.reason
    # It varies by a twentieth: no change. Then the least of the window is the likely minimum.
    plan, capacity = planned(harmless(5700, now=1001.0), plan)
    assert capacity.pods["be"] == item
    plan, capacity = planned(harmless(1000, now=1002.0), plan)
    assert (capacity.pods["be"].cpu_milli, capacity.pods["be"].likely_cpu_milli) == (6800, 1800)
    # Cut to three CPUs it has no more, whatever is idle.
    _, cut = planned(harmless(1000, 3000, now=1003.0), plan)
    assert cut.pods["be"].cpu_milli == 3000


def test_under_the_harm_law_it_does_not_rise_while_use_is_unknown() -> None:
    plan, capacity = planned(harmless(6000))
    _, after = planned(harmless(None, now=1001.0), plan)
    assert after.pods["be"].cpu_milli == capacity.pods["be"].cpu_milli
    assert planned(harmless(None))[1].pods["be"].cpu_milli == 1000


@given(amount=MILLI, budget=MILLI, low=MILLI)
def test_the_likely_minimum_is_never_more_than_there_is(amount: int, budget: int, low: int) -> None:
    assert 0 <= likely(amount, budget, low) <= amount
    assert likely(amount, budget, low) <= likely(amount, budget, low + 1)


@given(st.lists(st.tuples(st.floats(-10, 400), MILLI), min_size=1, max_size=60), st.floats(30, 3600))
def test_the_lows_are_few_and_have_the_least_of_the_window(steps: list[tuple[float, int]], window_s: float) -> None:
    lows: tuple[tuple[float, int], ...] = ()
    now, seen = 0.0, list[tuple[float, int]]()
    for step, budget in steps:
        now += step
        seen = [item for item in seen if item[0] <= now] if step < 0 else seen
        seen.append((now, budget))
        lows = add_low(lows, now, budget, window_s)
        assert len(lows) <= 12
        if all(later >= 0 for later, _ in steps):
            recent = [milli for at, milli in seen if at >= now - window_s]
            assert min(milli for _, milli in lows) <= min(recent)
    assert min(milli for _, milli in lows) in {budget for _, budget in steps}


def test_constant_input_comes_to_rest() -> None:
    view = node(asking("be"), asking("other"), online("web"), now=1000.0, cpu=cpu(online=1500))
    plan, capacity = planned(view)
    for second in range(200):
        plan, capacity = planned(replace(view, now=1000.0 + second), plan)
    _, after = planned(replace(view, now=1300.0), plan)
    assert after.pods == capacity.pods


@pytest.mark.parametrize(("milli", "kept"), [(1000, True), (1049, True), (951, True), (1060, False), (940, False)])
def test_a_small_change_of_cpu_is_no_new_content(milli: int, kept: bool) -> None:
    before = PodCapacity(volume="v", cpu_milli=1000, likely_cpu_milli=0, cpus="1", reason="old")
    fresh = replace(before, cpu_milli=milli, reason="new")
    assert steady(before, fresh) is (before if kept else fresh)
    assert steady(before, replace(fresh, state=CapacityState.SQUEEZED)).state is CapacityState.SQUEEZED
    assert steady(None, fresh) is fresh


def test_a_squeezed_and_a_frozen_pod_have_what_is_left_and_the_victim_is_not_named() -> None:
    limit = SqueezeLimit(cpu_milli=70, memory_high_bytes=1 << 20, reason="for victim secret/web (cpu)")
    view = node(asking("be"), online("web"))
    squeezed = of(replace(view, measures=Restrictions(squeezed={"be": limit}, budget_milli=10**6)))
    assert (squeezed.state, squeezed.cpu_milli, squeezed.likely_cpu_milli) == (CapacityState.SQUEEZED, 70, 70)
    assert squeezed.memory_bytes == 1 << 20
    frozen = of(replace(view, measures=Restrictions(squeezed={"be": limit}, frozen={"be": "for victim secret/web"})))
    assert (frozen.state, frozen.cpu_milli, frozen.likely_cpu_milli) == (CapacityState.FROZEN, 0, 0)
    texts = msgspec.json.encode([squeezed, frozen])
    assert b"secret" not in texts


@pytest.mark.parametrize(("response", "likely_milli"), [(Response.SQUEEZE, 70), (Response.FREEZE, 0)])
def test_an_announced_step_counts_for_the_next_minute_and_not_for_now(response: Response, likely_milli: int) -> None:
    view = node(asking("be"), online("web"))
    free = of(view)
    step = AnnouncedStep(response=response, at_s=12.0, squeeze=SqueezeLimit(cpu_milli=70))
    told = of(replace(view, measures=Restrictions(announced={"be": step})))
    assert (told.state, told.cpu_milli, told.likely_cpu_milli) == (CapacityState.RUNNING, free.cpu_milli, likely_milli)
    assert (
        told.next_state is {Response.SQUEEZE: CapacityState.SQUEEZED, Response.FREEZE: CapacityState.FROZEN}[response]
    )
    assert told.next_at == 12.0


def test_with_responses_off_no_pod_is_shown_as_frozen() -> None:
    off = PoliciesConfig(capacity=CapacityConfig(enabled=True), responses=ResponsesConfig(enabled=False))
    view = node(asking("be"), measures=Restrictions(frozen={"be": "x"}))
    assert planned(view, None, off)[1].pods["be"].state is CapacityState.RUNNING


def test_a_batch_memory_limit_is_the_pods_own_where_it_is_written() -> None:
    item = asking("be")
    box = container("a", limits=Resources(batch_memory_bytes=1 << 20))
    item = replace(item, containers=(replace(box, group=item.containers[0].group),))
    assert of(node(item)).memory_bytes == 1 << 20
    off = replace(ON, batch=BatchConfig(memory=False))
    assert planned(node(item), config=off)[1].pods["be"].memory_bytes is None
    meta = ContainerMeta(name="a", limits=box.limits)
    kata = replace(item, sandbox="kata", containers=(), declared=(meta, meta), overhead=Resources(memory_bytes=5))
    assert of(node(kata)).memory_bytes == (2 << 20) + 5


def test_the_memory_bound_is_the_smallest_that_applies() -> None:
    whole = (container("a", limits=Resources(memory_bytes=300)), container("b", limits=Resources(memory_bytes=200)))
    partly = (whole[0], container("b"))
    for containers, expected in ((whole, 500), (partly, None)):
        item = replace(pod("be", *containers), annotations={ANNOTATION: "volume:v"})
        assert of(node(item)).memory_bytes == expected
        for bound in (400, 600):
            squeezed = Restrictions(squeezed={"be": SqueezeLimit(memory_high_bytes=bound)})
            assert of(node(item, measures=squeezed)).memory_bytes == min(bound, expected or bound)
