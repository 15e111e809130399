"""Two configurations over the same views: the recorded one gives the recorded plans, and what another would change."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from reconciler.control.planner import plan_node
from reconciler.control.replay import PlanComparison, PlanTrack, allowed_milli
from reconciler.policies.budget import BudgetConfig
from reconciler.policies.reclaimed import ReclaimedConfig, ReclaimedForm
from reconciler.policies.table import PoliciesConfig
from state.model import NodeView
from state.plan import NodePlan
from tests.reconciler.interference.nodescript import CPUS, night, view

RECORDED = PoliciesConfig()


def limited(percent: int, form: ReclaimedForm = ReclaimedForm.BOTH) -> PoliciesConfig:
    budget = BudgetConfig(limit_percent=percent)
    return replace(RECORDED, reclaimed=replace(ReclaimedConfig(), budget=budget, form=form))


def compared(
    before: PoliciesConfig, now: PoliciesConfig, views: Sequence[NodeView], *, enforced: bool = True
) -> PlanComparison:
    mine = PlanTrack(policies=before)
    comparison = PlanComparison(mine, mine if before == now else PlanTrack(policies=now))
    plan: NodePlan | None = None
    for item in views:
        plan = plan_node(item, plan, before)
        if item is views[0]:
            comparison.begin(plan)
        comparison.step(item, plan, enforced=enforced)
    return comparison


def views_of(uses: Sequence[tuple[int, int, bool, int]]) -> list[NodeView]:
    second, result = 0, []
    for used, be, more, gap in uses:
        second += gap
        result.append(view(second, used, be, more=more))
    return result


@given(
    st.lists(
        st.tuples(st.integers(0, 16000), st.integers(0, 8000), st.booleans(), st.integers(1, 40)),
        min_size=1,
        max_size=25,
    ),
    st.integers(1, 100),
    st.sampled_from(ReclaimedForm),
)
def test_the_recorded_configuration_gives_the_recorded_plans(
    uses: list[tuple[int, int, bool, int]], percent: int, form: ReclaimedForm
) -> None:
    policies = limited(percent, form)
    facts = compared(policies, policies, views_of(uses)).facts()
    steps = len(uses)
    assert facts["agreement"] == {
        "steps": steps, "same_cpu_sets": steps, "same_budget": steps, "budget_off_mean_milli": 0,
    }  # fmt: skip
    assert (facts["pools"], facts["settings"]) == ({}, {})
    assert facts["before"] == facts["now"]
    assert (facts["work"]["lost_cpu_s"], facts["work"]["won_most_cpu_s"]) == (0, 0)


@given(st.integers(1, 100), st.integers(1, 100))
def test_what_one_loses_the_other_had_room_for(first: int, second: int) -> None:
    views = night(12)
    there, back = compared(limited(first), limited(second), views), compared(limited(second), limited(first), views)
    lost, won = there.facts()["work"]["lost_cpu_s"], back.facts()["work"]["won_most_cpu_s"]
    assert (lost > 0) <= (won > 0)


def test_a_smaller_limit_takes_work_cpus_and_quota_from_be() -> None:
    facts = compared(RECORDED, limited(40), night()).facts()
    assert facts["work"]["lost_cpu_s"] > 0
    assert facts["work"]["won_most_cpu_s"] == 0
    assert facts["now"]["budget_mean_milli"] < facts["before"]["budget_mean_milli"]
    assert facts["pools"]["reclaimed"]["most_cpus"] >= 1
    assert facts["settings"]["cpu.quota"]["groups"] >= 1
    assert facts["online"]["overlap_more_s"] == 0
    assert facts["online"]["overlap_less_s"] > 0


def test_a_larger_limit_risks_idle_time_and_overlap() -> None:
    facts = compared(RECORDED, limited(100), night()).facts()
    assert facts["work"]["lost_cpu_s"] == 0
    assert 0 < facts["work"]["won_while_limited_cpu_s"] <= facts["work"]["won_most_cpu_s"]
    assert facts["online"]["overlap_more_cpu_s"] > 0
    assert facts["online"]["idle_least_mean_milli"] < facts["online"]["idle_mean_milli"]


def flat(policies: PoliciesConfig, item: NodeView) -> PlanTrack:
    """Holds one plan for good."""
    return PlanTrack(policies=policies, plan=plan_node(item, None, policies))


@pytest.mark.parametrize(
    ("be", "limits", "enforced", "lost", "won", "near"),
    [
        # Budgets: 65 % of 16 CPUs less 2 = 8.32 CPUs, in whole grains; 40 %: 4.16 of 4.4.
        pytest.param(8000, (65, 40), True, True, False, False, id="use beyond the new limit is lost"),
        pytest.param(1000, (65, 40), True, False, False, False, id="use below the new limit is not"),
        pytest.param(4100, (40, 65), True, False, True, True, id="near its limit it wins"),
        pytest.param(1000, (40, 65), True, False, True, False, id="far from it, perhaps nothing"),
        pytest.param(1000, (40, 65), False, False, False, False, id="observed: it wanted no more"),
        pytest.param(8000, (40, 65), False, False, True, True, id="observed: it wins what it used"),
        pytest.param(8000, (65, 40), False, True, False, False, id="observed: it loses the part that was allowed"),
    ],
)
def test_work_won_and_lost_by_the_formula(
    be: int, limits: tuple[int, int], enforced: bool, lost: bool, won: bool, near: bool
) -> None:
    views = [view(second, 1500, be) for second in (0, 1)]
    before, now = flat(limited(limits[0]), views[0]), flat(limited(limits[1]), views[0])
    comparison = PlanComparison(before, now)
    comparison.step(views[0], None)
    assert before.plan is not None
    assert now.plan is not None
    mine, theirs = allowed_milli(before.plan.pools), allowed_milli(now.plan.pools)
    comparison.step(views[1], None, enforced=enforced)
    work = comparison.facts()["work"]
    idle = 1000 * CPUS - (1500 + be + 500)
    room = max(0, min(theirs - mine, idle)) if enforced else max(0, min(be, theirs) - mine)
    assert work["used_cpu_s"] == be / 1000
    assert work["lost_cpu_s"] == pytest.approx(max(0, min(be, mine) - theirs) / 1000)
    assert work["won_most_cpu_s"] == pytest.approx(room / 1000)
    assert (work["lost_cpu_s"] > 0, work["won_most_cpu_s"] > 0) == (lost, won)
    assert (work["won_while_limited_cpu_s"] > 0) is near


def test_time_without_a_reading_of_cpu_use_is_not_counted_as_work() -> None:
    views = [replace(view(second, 1500, 6000), cpu=None) for second in range(5)]
    facts = compared(RECORDED, limited(40), views).facts()
    assert facts["use_unknown_s"] == facts["seconds"] == 4
    assert facts["work"]["used_cpu_s"] == 0
    assert facts["online"]["idle_mean_milli"] is None


def test_what_lies_before_the_reported_time_only_makes_the_past() -> None:
    views = night(60)
    whole, part = compared(RECORDED, limited(40), views), PlanComparison(*map(tracks, (RECORDED, limited(40))))
    plan: NodePlan | None = None
    for item in views:
        plan = plan_node(item, plan, RECORDED)
        if item is views[0]:
            part.begin(plan)
        part.step(item, plan, counted=item.now >= views[40].now)
    assert part.facts()["seconds"] == 20
    assert part.now.plan == whole.now.plan


def tracks(policies: PoliciesConfig) -> PlanTrack:
    return PlanTrack(policies=policies)


def test_the_minimum_budget_is_counted_in_seconds() -> None:
    facts = compared(RECORDED, RECORDED, [view(second, 15000, 500) for second in range(11)]).facts()
    assert facts["now"]["floor_s"] == facts["seconds"] == 10
