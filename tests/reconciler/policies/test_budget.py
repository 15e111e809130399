import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.control.planner import plan_pools
from reconciler.policies.budget import (
    Budget,
    BudgetConfig,
    arriving_milli,
    budget_control,
    cpu_count,
    floor,
    next_budget,
)
from reconciler.policies.table import PoliciesConfig
from state.model import Container, ContainerKind, NodeCpu, NodeView, Pod, PodClass, Pools, Resources
from tests.fakes.constants import varied
from tests.reconciler.nodes import container, cpu, cpus, node, online, pod

SANDBOX = ContainerKind.SANDBOX

CONFIG = BudgetConfig()
ALL = cpus("0-7")
"""Eight CPUs: limit 5200, floor 160, grain 160, step 800."""


def held(budget: int, *, at: float = 0.0, unknown_since: float | None = None, why: str = "before") -> Pools:
    return Pools(
        online_cpus=ALL,
        reserved=EMPTY,
        dedicated={},
        shared=ALL,
        reclaimed=ALL,
        budget_milli=budget,
        budget_at=at,
        unknown_since=unknown_since,
        reasons={"budget": why},
    )


def step(
    view: NodeView, previous: Pools | None = None, *, ceiling: int = 8000, config: BudgetConfig = CONFIG
) -> Budget:
    return next_budget(view, view.topology.online, previous, config, outside=EMPTY, ceiling=ceiling)


@pytest.mark.parametrize(
    ("use", "budget"),
    [
        (cpu(), 5200),
        (cpu(online=1000, system=200), 4000),
        (cpu(online=1000, reclaimed=3000, system=200), 4000),
        (cpu(online=6000), -800),
        (cpu(online=5200), 0),
    ],
)
def test_the_law_is_capacity_times_limit_less_online_and_system_use(use: NodeCpu, budget: int) -> None:
    assert budget_control(ALL, use, EMPTY, CONFIG) == budget


def test_only_counted_cpus_are_capacity_and_use_elsewhere_is_credited_where_it_is_known() -> None:
    use = cpu(online=1500, idle={6: 0.0, 7: 0.5})
    assert budget_control(cpus("0-5"), use, EMPTY, CONFIG) == 3900 - 1500
    assert budget_control(cpus("0-5"), use, cpus("6-7"), CONFIG) == 3900
    assert budget_control(cpus("0-4"), use, cpus("5-7"), CONFIG) == 3250 - 1500


def test_an_online_containers_request_is_kept_free_from_its_directory_on_until_its_use_is_measured() -> None:
    """Before that it uses nothing, and BE work would fill the CPUs on which it starts."""
    web = online("web", container("main", requests=Resources(cpu_milli=1500)), container("pause", kind=SANDBOX))
    others = [
        pod("be", container("be", requests=Resources(cpu_milli=4000))),
        pod("own", container("own", requests=Resources(cpu_milli=2000)), cls=PodClass.DEDICATED),
    ]
    arrived = dict.fromkeys(("id-main", "id-pause", "id-be", "id-own"), 100.0)
    view = node(web, *others, now=100.0, arrived=arrived, cpu=cpu())

    def owns(pod: Pod, _: Container) -> bool:
        return pod.uid == "own"

    assert arriving_milli(view, owns, CONFIG) == 1500
    assert arriving_milli(replace(view, now=104.9), owns, CONFIG) == 1500
    assert arriving_milli(replace(view, now=105.0), owns, CONFIG) == 0
    assert arriving_milli(view, owns, varied(BudgetConfig(), arrival_s=0)) == 0
    assert arriving_milli(replace(view, arrived={}), owns, CONFIG) == 0
    # 5200 less 1500, in whole grains of 160, and at once.
    view = node(web, now=100.0, arrived=arrived, cpu=cpu())
    given = plan_pools(view, replace(held(5120, at=99.9), online_cpus=ALL), PoliciesConfig())
    assert given.budget_milli == 3680
    assert "1.50 kept for starting online containers" in given.reasons["budget"]
    later = plan_pools(replace(view, now=106.0), given, PoliciesConfig())
    assert later.budget_milli == 3680 + 800, "and back by steps"


def test_the_reason_has_the_use_that_is_credited_and_from_when_the_budget_rises() -> None:
    """The numbers of the text are those of the budget."""
    use = cpu(online=2500, idle={6: 0.0, 7: 0.0})
    counted, outside = cpus("0-5"), cpus("6-7")

    def reason(before: int | None) -> str:
        last = held(before) if before is not None else None
        last = replace(last, reasons={}) if last is not None else None
        view = node(cpu=use, now=1000.0)
        return next_budget(view, counted, last, CONFIG, outside=outside, ceiling=8000).reason

    law = "target 65 % of 6 CPUs - 0.00 used by system - 2.50 online + 2.00 on other CPUs, in steps of 0.16 CPU"
    assert reason(None) == law
    assert next_budget(
        node(cpu=replace(use, host_be_milli=700, busy_milli=use.busy_milli + 700), now=1000.0),
        *(counted, None, CONFIG),
        outside=outside,
        ceiling=8000,
    ).reason == law.replace("0.00 used by system", "0.70 used by system (0.70 by BE host workloads)")
    assert reason(3200) == f"{law}; raised when that is at least 3.52 CPU"
    assert budget_control(counted, use, outside, CONFIG) == 3400


def test_the_floor_is_the_larger_of_two_and_never_more_than_there_is() -> None:
    assert floor(ALL, ALL, CONFIG) == 160
    assert floor(cpus("0-1"), cpus("1"), CONFIG) == 100
    assert floor(ALL, cpus("0"), varied(BudgetConfig(), floor_milli=5000)) == 1000


def test_the_first_budget_is_the_law_in_whole_grains() -> None:
    made = step(node(cpu=cpu(online=1000), now=7.0))
    assert (made.milli, made.at, made.unknown_since) == (4160, 7.0, None)


def test_the_first_budget_without_a_signal_is_the_floor() -> None:
    made = step(node(cpu=None, now=7.0))
    assert (made.milli, made.unknown_since) == (160, 7.0)
    assert made.reason == "CPU use unknown; limited to the minimum, 0.16 CPU"


def test_it_falls_to_the_law_at_once() -> None:
    assert step(node(cpu=cpu(online=5000), now=100.0), held(4800, at=99.9)).milli == 160


def test_it_grows_by_a_step_and_only_after_the_interval() -> None:
    assert step(node(now=101.9), held(1600, at=100.0)).milli == 1600
    made = step(node(now=102.0), held(1600, at=100.0))
    assert (made.milli, made.at) == (2400, 102.0)


def test_growth_is_a_rate_however_often_it_is_asked() -> None:
    pools, now = held(160, at=0.0), 0.0
    for _ in range(1000):
        now += 0.01
        made = step(node(now=now), pools)
        pools = replace(pools, budget_milli=made.milli, budget_at=made.at)
    assert pools.budget_milli <= 160 + 5 * 800


def test_noise_of_a_grain_causes_no_change() -> None:
    pools = held(0)
    seen = []
    for turn in range(400):
        noise = (turn * 7919) % 150
        made = step(node(cpu=cpu(online=1000 + noise), now=turn * 10.0), pools)
        pools = held(made.milli, at=made.at, why=made.reason)
        seen.append(made)
    assert len({(made.milli, made.at, made.reason) for made in seen[20:]}) == 1


def test_the_idle_buffer_lowers_it_and_the_floor_stands_above_the_buffer() -> None:
    view = node(now=10.0)
    assert step(view, held(4800), ceiling=2000).milli == 1920
    assert "limited by the idle buffer to 2.00 CPU" in step(view, held(4800), ceiling=2000).reason
    assert step(view, held(4800), ceiling=0).milli == 160


@pytest.mark.parametrize("use", [None, cpu(age=None), cpu(age=3.1), cpu(age=29.0)])
def test_an_unknown_or_old_signal_holds_the_budget(use: NodeCpu | None) -> None:
    made = step(node(cpu=use, now=1000.0), held(2400))
    assert made.milli == 2400
    assert made.unknown_since is not None


def test_an_old_signal_still_lowers_it() -> None:
    assert step(node(cpu=cpu(online=4000, age=10.0), now=1000.0), held(2400)).milli == 1120


def test_after_the_hold_it_falls_to_the_floor() -> None:
    assert step(node(cpu=cpu(age=30.5), now=1000.0), held(2400)).milli == 160
    assert step(node(cpu=None, now=1000.0), held(2400, unknown_since=969.0)).milli == 160
    assert step(node(cpu=None, now=1000.0), held(2400, unknown_since=971.0)).milli == 2400


def test_a_restarted_agent_keeps_the_budget_until_its_first_reading() -> None:
    made = step(node(cpu=None, now=5000.0), held(2400, at=10.0))
    assert (made.milli, made.at, made.unknown_since) == (2400, 10.0, 5000.0)
    again = step(node(now=5001.0), held(2400, at=10.0, unknown_since=5000.0))
    assert (again.milli, again.unknown_since) == (3200, None)


def test_a_clock_that_restarted_does_not_stop_growth() -> None:
    assert step(node(now=5.0), held(1600, at=90000.0)).milli == 2400


def test_the_reason_stays_while_the_budget_stays() -> None:
    assert step(node(cpu=cpu(online=1001), now=1.0), held(4160, why="as said before")).reason == "as said before"
    # Of the same target; one that a reload has changed is another reason for the same budget.
    for target, stays in (("65 % of 8", True), ("60 % of 8", False), ("65 % of 6", False)):
        why = f"target {target} CPUs - 0.00 used by system - 3.50 online"
        given = step(node(cpu=cpu(online=6000), now=1.0), held(160, why=f"{why}; limited to the minimum, 0.16 CPU"))
        assert given.milli == 160
        assert given.reason.startswith(why) is stays
        assert given.reason.startswith("target 65 % of 8 CPUs - ")


@pytest.mark.parametrize(
    ("budget", "held_now", "bounded", "count"),
    [
        (4000, 0, True, 4),
        (4001, 0, True, 5),
        (4249, 4, True, 4),
        (4251, 4, True, 5),
        (3999, 0, False, 3),
        (4200, 3, False, 3),
        (4250, 3, False, 4),
        (100, 0, False, 1),
        (100, 5, True, 1),
        (90000, 2, True, 8),
    ],
)
def test_cpus_for_a_budget(budget: int, held_now: int, bounded: bool, count: int) -> None:
    assert cpu_count(budget, held_now, 8, 1, bounded=bounded) == count


numbers = st.integers(0, 9000)
budgets = st.integers(160, 8000)


@given(
    online=numbers,
    system=numbers,
    reclaimed=numbers,
    before=st.none() | budgets,
    ceiling=st.integers(-100, 8000),
    elapsed=st.floats(0, 100),
    counted=st.integers(1, 255).map(CpuSet.from_mask),
)
def test_it_is_never_above_the_law_nor_below_the_floor(
    online: int, system: int, reclaimed: int, before: int | None, ceiling: int, elapsed: float, counted: CpuSet
) -> None:
    use = cpu(online=online, system=system, reclaimed=reclaimed)
    view = node(cpu=use, now=elapsed)
    previous = held(before) if before is not None else None
    made = next_budget(view, counted, previous, CONFIG, outside=EMPTY, ceiling=ceiling)
    low = floor(ALL, counted, CONFIG)
    assert low <= made.milli <= max(low, min(budget_control(counted, use, EMPTY, CONFIG), ceiling))
    if before is not None:
        assert made.milli <= max(before, low) + 800


@given(
    online=numbers,
    before=budgets,
    ages=st.tuples(st.floats(0, 60), st.floats(0, 60)),
    since=st.none() | st.floats(0, 99),
)
def test_an_older_signal_never_gives_more(
    online: int, before: int, ages: tuple[float, float], since: float | None
) -> None:
    younger, older = sorted(ages)
    previous = held(before, unknown_since=since)

    def budget(age: float | None) -> int:
        return step(node(cpu=cpu(online=online, age=age), now=100.0), previous).milli

    assert budget(older) <= budget(younger)
    if older > CONFIG.stale_after_s:
        assert budget(older) <= max(before, 160)
    assert step(node(cpu=None, now=100.0), previous).milli <= max(before, 160)
