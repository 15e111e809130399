"""Provision policies: the demand by each, and the limits that make pid safe."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from reconciler.placement.estimate import EstimateConfig
from reconciler.placement.provision import (
    USAGE,
    CpiGains,
    PidConfig,
    PidIndicator,
    ProvisionConfig,
    ProvisionPolicy,
    WaitGains,
    demand,
    pid_step,
    pod_indicators,
    pool_indicators,
    signals_of,
    usage_ratio,
    with_experience,
)
from reconciler.placement.sizes import SizeConfig, regulate
from reconciler.policies.budget import BudgetConfig, budget_control
from state.cpu import GroupUse, Measured, PodIndicators, PoolSize, Uses
from state.evidence import PodSnapshot, Sample, SampleFrame
from state.model import NodeCpu, Pod, PodClass, Resources
from tests.fakes.constants import varied
from tests.reconciler.nodes import container, online

PID = PidConfig()
NOW = 1000.0


def web(uid: str = "web", request: int | None = None) -> Pod:
    return online(uid, container("main", requests=Resources(cpu_milli=request)))


def using(pods: list[tuple[Pod, int]], **more: Any) -> dict[str, GroupUse]:
    return {pod.group.path: GroupUse(cpu_milli=milli, **more) for pod, milli in pods}


def size(cpus: int, wanted: int | None = None, changed_at: float = 0.0) -> PoolSize:
    return PoolSize(wanted_milli=cpus * 1000 if wanted is None else wanted, cpus=cpus, changed_at=changed_at)


def ask(
    policy: ProvisionPolicy,
    pods: list[Pod],
    uses: Uses,
    previous: PoolSize | None = None,
    **more: Any,
) -> int:
    config = ProvisionConfig(policy=policy)
    return demand("shared", pods, uses, {}, previous, now=NOW, config=config, **more)[0]


@pytest.mark.parametrize(
    ("policy", "used", "wanted"),
    [
        pytest.param(ProvisionPolicy.NONE, 9000, 2000, id="none: the request, whatever is used"),
        pytest.param(ProvisionPolicy.CANONICAL, 9000, 11250, id="canonical: use and a quarter"),
        pytest.param(ProvisionPolicy.DYNAMIC_QUOTA, 9000, 15030, id="dynamic quota: use is 60 % of it"),
        pytest.param(ProvisionPolicy.PID, 9000, 11250, id="pid before the first size: canonical"),
    ],
)
def test_each_policy(policy: ProvisionPolicy, used: int, wanted: int) -> None:
    pod = web(request=2000)
    assert ask(policy, [pod], using([(pod, used)])) == wanted


@pytest.mark.parametrize("policy", list(ProvisionPolicy))
def test_a_pool_without_pods_needs_nothing(policy: ProvisionPolicy) -> None:
    assert ask(policy, [], {}, size(8)) == 0


def test_one_pool_may_have_another_policy() -> None:
    pod = web(request=2000)
    config = ProvisionConfig(pools={"shared/batch": ProvisionPolicy.NONE})
    numbers = [
        demand(pool, [pod], using([(pod, 8000)]), {}, None, now=NOW, config=config)[0]
        for pool in ("shared", "shared/batch")
    ]
    assert numbers == [10000, 2000]


def test_a_restart_moves_nothing_and_a_sampler_that_stays_silent_starves_nobody() -> None:
    pod, before = web(request=16000), size(4, 3000)
    assert ask(ProvisionPolicy.CANONICAL, [pod], {}, before, starting=True) == 3000
    assert ask(ProvisionPolicy.CANONICAL, [pod], {}, before) == 16000
    assert ask(ProvisionPolicy.CANONICAL, [pod], using([(pod, 4000)]), before, starting=True) == 5000


@pytest.mark.parametrize("policy", list(ProvisionPolicy))
def test_the_reason_does_not_follow_each_sample(policy: ProvisionPolicy) -> None:
    pod, config = web(request=1000), ProvisionConfig(policy=policy)
    texts = {
        demand("shared", [pod], using([(pod, milli)]), {}, size(8), now=NOW, config=config)[1] for milli in (5000, 5001)
    }
    assert len(texts) == 1


def test_dynamic_quota_and_the_budget_law_are_one_formula() -> None:
    """R x (target - current) + BE use: what Katalyst gives BE work as a quota."""
    cpus, target, online_milli, be_milli = 16, 0.6, 5200, 1700
    current = (online_milli + be_milli) / (cpus * 1000)
    katalyst = cpus * 1000 * (target - current) + be_milli
    use = NodeCpu(busy_milli=online_milli + be_milli, online_milli=online_milli, reclaimed_milli=be_milli, age_s=0.0)
    ours = budget_control(CpuSet.span(cpus), use, CpuSet(), BudgetConfig(limit_percent=60))
    assert ours == round(katalyst)


# pid


@pytest.mark.parametrize(
    ("indicators", "wanted"),
    [
        pytest.param({USAGE: PidIndicator(0.60, 0.6)}, 10000, id="at the target"),
        pytest.param({USAGE: PidIndicator(0.604, 0.6)}, 10000, id="in the dead band above"),
        pytest.param({USAGE: PidIndicator(0.57, 0.6)}, 10000, id="in the dead band below"),
        pytest.param({USAGE: PidIndicator(0.90, 0.6)}, 14055, id="half too full: ln 1.5 of its size more"),
        pytest.param({USAGE: PidIndicator(0.50, 0.6)}, 9271, id="too empty: slower down than up"),
        pytest.param({USAGE: PidIndicator(0.001, 0.6)}, 8000, id="never more than 2 CPUs down"),
        pytest.param({"cpi": PidIndicator(100.0, 1.0)}, 20000, id="never more than 10 CPUs up"),
        pytest.param({USAGE: PidIndicator(0.0, 0.6)}, 8000, id="nothing has no logarithm"),
        pytest.param({USAGE: PidIndicator(0.3, 0.6), "cpi": PidIndicator(1.2, 1.0)}, 11823, id="the largest wins"),
        pytest.param({USAGE: PidIndicator(None, 0.6)}, 10000, id="unknown: no change"),
        pytest.param({USAGE: PidIndicator(0.1, 0.6, 16.0)}, 10000, id="old: no change"),
        pytest.param({USAGE: PidIndicator(0.1, 0.6, None)}, 10000, id="of unknown age: no change"),
        pytest.param(
            {USAGE: PidIndicator(0.1, 0.6), "cpi": PidIndicator(None, 1.0)}, 10000, id="one unknown: never down"
        ),
        pytest.param(
            {USAGE: PidIndicator(0.9, 0.6), "cpi": PidIndicator(None, 1.0)}, 14055, id="one unknown: still up"
        ),
        pytest.param({}, 10000, id="nothing at all"),
    ],
)
def test_a_pid_step(indicators: Mapping[str, PidIndicator], wanted: int) -> None:
    assert pid_step(indicators, size(10), NOW, PID)[0] == wanted


def test_each_indicator_has_gains_of_its_own() -> None:
    config = replace(PID, cpi=varied(CpiGains(), up=2.0, above=0.5))
    assert pid_step({"cpi": PidIndicator(1.4, 1.0)}, size(10), NOW, config)[0] == 10000
    assert pid_step({"cpi": PidIndicator(1.6, 1.0)}, size(10), NOW, config)[0] == 19400


def test_asking_often_adds_nothing_up() -> None:
    pairs = {pid_step({USAGE: PidIndicator(0.9, 0.6)}, size(10), NOW + index / 10, PID) for index in range(20)}
    assert len(pairs) == 1


@pytest.mark.parametrize(
    ("now", "age", "wanted"),
    [
        pytest.param(1003.0, 0.0, 10000, id="within the settling time"),
        pytest.param(1006.0, 7.0, 10000, id="measured before the change"),
        pytest.param(1006.0, 1.0, 14055, id="measured after it"),
        pytest.param(3.0, 0.0, 14055, id="after a reboot the clock starts again"),
    ],
)
def test_a_change_shows_before_the_next_one(now: float, age: float, wanted: int) -> None:
    assert pid_step({USAGE: PidIndicator(0.9, 0.6, age)}, size(10, changed_at=1000.0), now, PID)[0] == wanted


def test_a_size_that_is_cut_does_not_wind_up() -> None:
    cut = size(4, 50_000)
    assert pid_step({USAGE: PidIndicator(0.9, 0.6)}, cut, NOW, PID)[0] == 4000 + 1622


@pytest.mark.parametrize(("asked", "small"), [(3, 0), (4, 0), (5, 4)])
def test_a_size_that_grew_remembers_the_one_that_was_too_small(asked: int, small: int) -> None:
    pods = [web()]
    found = with_experience(size(asked), size(4), pods, using([(pods[0], 3900)]), EstimateConfig())
    assert (found.cpus, found.small_cpus, found.small_milli > 0) == (asked, small, small > 0)


def test_no_indicator_at_all_is_the_estimate_and_never_down() -> None:
    pod = web(request=2000)
    assert ask(ProvisionPolicy.PID, [pod], {}, size(4)) == 4000
    assert ask(ProvisionPolicy.PID, [web(request=6000)], {}, size(4)) == 6000


def test_pid_never_goes_below_use_nor_below_what_new_pods_ask_for() -> None:
    old, new = web("old"), web("new", request=8000)
    uses = using([(old, 1000)], age_s=0.0) | using([(new, 0)], known_s=1.0)
    assert ask(ProvisionPolicy.PID, [old, new], uses, size(4)) == 9000


def test_the_usage_ratio_is_of_the_pools_own_pods() -> None:
    pods, config = [web("a"), web("b")], ProvisionConfig()
    assert usage_ratio(pods, using([(pods[0], 2000), (pods[1], 1000)], age_s=1.0), 4, config) == (0.75, 0.6, 1.0)
    assert usage_ratio(pods, using([(pods[0], 2000)]), 4, config) == (None, 0.6, 0.0)
    assert usage_ratio(pods, {}, 4, config) is None
    assert usage_ratio(pods, using([(pods[0], 1)]), 0, config) is None


WAIT_AND_CPI = replace(PID, cpu_sched_wait=WaitGains(target_percent=10.0), cpi=CpiGains(target=2.0))


def seen(wait_milli: float | None = None, cpi: float | None = None, age_s: float = 0.0) -> PodIndicators:
    def number(value: float | None) -> Measured | None:
        return None if value is None else Measured(value=value, age_s=age_s)

    return PodIndicators(wait_milli=number(wait_milli), cpi=number(cpi))


@pytest.mark.parametrize(
    ("measured", "wait", "cpi"),
    [
        pytest.param({"a": seen(250, 1.0), "b": seen(0, 4.0)}, (20.0, 10.0, 0.0), (1.6, 2.0, 0.0), id="all known"),
        pytest.param({"a": seen(250, 1.0, 7.0), "b": seen(0, 4.0, 3.0)}, (20.0, 10.0, 7.0), (1.6, 2.0, 7.0), id="old"),
        pytest.param({"a": seen(250, 1.0)}, (None, 10.0, None), (None, 2.0, None), id="one pod unknown"),
        pytest.param({"a": seen(0, 1.0), "b": seen(0)}, (0.0, 10.0, 0.0), (None, 2.0, None), id="one CPI unknown"),
        pytest.param({}, (None, 10.0, None), (None, 2.0, None), id="nothing measured"),
    ],
)
def test_the_indicators_of_a_pool_are_those_of_its_pods_together(
    measured: dict[str, PodIndicators], wait: object, cpi: object
) -> None:
    """Waiting of 250 beside running of 1000; cycles of 800 and 200 by their instructions of 800 and 50: 1000/850."""
    pods = [web("a"), web("b")]
    uses = using([(pods[0], 500), (pods[1], 500)])
    indicators = pool_indicators(pods, uses, measured, WAIT_AND_CPI)
    assert (indicators["cpu_sched_wait"], indicators["cpi"]) == (wait, cpi)


def test_pods_that_hardly_run_have_no_say_in_the_cpi() -> None:
    pods = [web("a"), web("b")]
    uses = using([(pods[0], 500), (pods[1], 19)])
    indicators = pool_indicators(pods, uses, {"a": seen(0, 3.0), "b": seen(0)}, WAIT_AND_CPI)
    assert indicators == {"cpu_sched_wait": (0.0, 10.0, 0.0), "cpi": (3.0, 2.0, 0.0)}
    assert "cpi" not in pool_indicators(pods[1:], uses, {}, WAIT_AND_CPI)


def test_without_a_target_an_indicator_is_neither_measured_nor_used() -> None:
    pods = [web("a")]
    assert pool_indicators(pods, using([(pods[0], 500)]), {"a": seen(250, 9.0)}, PID) == {}
    pid = ProvisionConfig(policy=ProvisionPolicy.PID)
    assert signals_of(pid) == frozenset()
    assert signals_of(replace(pid, pid=WAIT_AND_CPI)) == {"cpu.wait_milli", "cpi"}
    assert signals_of(ProvisionConfig(pid=WAIT_AND_CPI)) == frozenset()
    one_pool = ProvisionConfig(pools={"shared/a": ProvisionPolicy.PID}, pid=WAIT_AND_CPI)
    assert signals_of(one_pool) == {"cpu.wait_milli", "cpi"}


def test_a_frame_gives_online_pods_indicators_as_old_as_they_are_now() -> None:
    def snapshot(uid: str, cls: PodClass) -> PodSnapshot:
        return PodSnapshot(uid=uid, title=uid, pod_class=cls, group=f"/{uid}", qos="burstable")

    pods = {"a": snapshot("a", PodClass.SHARED), "be": snapshot("be", PodClass.RECLAIMED)}
    samples = {
        "pod:a": {"cpu.wait_milli": Sample(300.0, 1.0), "cpi": Sample(2.0, 0.0, 0.4), "cpu.use": Sample(700.0, 1.0)},
        "pod:be": {"cpu.wait_milli": Sample(9.0)},
    }
    frame = SampleFrame(at_s=100.0, wall_s=0.0, pods=pods, samples=samples)
    use = Measured(value=700.0, age_s=4.0)
    assert pod_indicators(frame, 103.0) == {"a": replace(seen(300.0, age_s=4.0), use_milli=use)}


def test_waiting_enlarges_a_pool_that_its_use_alone_would_not() -> None:
    pod = web()
    config = ProvisionConfig(policy=ProvisionPolicy.PID, pid=WAIT_AND_CPI)
    uses, measured = using([(pod, 2400)]), {"web": seen(2400, 2.0)}
    wanted, why = demand("shared", [pod], uses, measured, size(4), now=NOW, config=config)
    assert (wanted, why) == (4000 + 3219, "pid: cpu_sched_wait is above its target")
    without = ProvisionConfig(policy=ProvisionPolicy.PID)
    assert demand("shared", [pod], uses, measured, size(4), now=NOW, config=without)[0] == 4000


@pytest.mark.parametrize(("age", "wanted"), [(60.0, 20_000), (131.0, 10_000)])
def test_cycles_per_instruction_stay_good_for_longer_than_what_is_read_each_second(age: float, wanted: int) -> None:
    assert pid_step({"cpi": PidIndicator(100.0, 1.0, age)}, size(10), NOW, PID)[0] == wanted


@pytest.mark.parametrize("cpus", [1, 4, 120])
@pytest.mark.parametrize("used", [300, 2000, 9000, 40_000])
def test_with_the_regulator_a_steady_load_comes_to_rest(cpus: int, used: int) -> None:
    """Katalyst's gain on a small pool of a large node would swing; here the size stops moving, large enough."""
    config, sizes, pod = ProvisionConfig(policy=ProvisionPolicy.PID), SizeConfig(), web()
    now: PoolSize = size(cpus)
    history = []
    for tick in range(0, 4000, 2):
        held = min(used, now.cpus * 1000)
        wanted, _ = demand("shared", [pod], using([(pod, held)]), {}, now, now=float(tick), config=config)
        now = regulate(now, wanted, float(tick), sizes)
        history.append(now.cpus)
    assert len(set(history[-500:])) == 1
    assert used <= history[-1] * 1000


_INDICATOR = st.builds(
    PidIndicator, st.none() | st.floats(0, 100), st.floats(0.01, 100), st.none() | st.sampled_from([0.0, 5.0, 16.0])
)
_NAMES = st.sampled_from([USAGE, "cpi", "cpu_sched_wait"])


@given(st.dictionaries(_NAMES, _INDICATOR), st.integers(0, 256), st.integers(0, 300_000), st.floats(0, 2000))
def test_steps_are_bounded(told: dict[str, PidIndicator], cpus: int, wanted: int, changed_at: float) -> None:
    before = size(cpus, wanted, changed_at)
    number, _ = pid_step(told, before, NOW, PID)
    start = min(wanted, cpus * 1000)
    assert number == wanted or max(0, start - PID.down_milli) <= number <= start + PID.up_milli


@given(st.dictionaries(_NAMES, _INDICATOR, min_size=1), _NAMES)
def test_a_missing_indicator_never_lowers(told: dict[str, PidIndicator], name: str) -> None:
    hidden = {**told, name: PidIndicator(None, 1.0)}
    assert pid_step(hidden, size(10), NOW, PID)[0] >= 10_000


@given(st.integers(0, 64_000), st.integers(1, 64), st.sampled_from(list(ProvisionPolicy)))
def test_losing_sight_never_lowers_a_demand(used: int, cpus: int, policy: ProvisionPolicy) -> None:
    pod = web(request=1000)
    seen, old = using([(pod, used)]), using([(pod, used)], age_s=60.0)
    if policy is ProvisionPolicy.PID:
        assert ask(policy, [pod], old, size(cpus)) >= cpus * 1000
    else:
        assert ask(policy, [pod], old, size(cpus)) >= ask(policy, [pod], seen, size(cpus))


def test_pid_asks_for_no_more_than_the_requests_while_others_cut_the_pool() -> None:
    busy, idle = web("busy", request=5000), web("idle")
    uses = using([(busy, 3900)], age_s=0.0) | using([(idle, 0)], age_s=0.0)
    cut = replace(size(4, 4500), asked_cpus=8)
    assert ask(ProvisionPolicy.PID, [busy, idle], uses, cut) == 5000
    assert ask(ProvisionPolicy.PID, [busy, idle], uses, replace(cut, wanted_milli=7000)) == 7000
