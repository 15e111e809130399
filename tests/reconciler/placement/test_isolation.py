"""isolation: which online pods get CPUs of their own for their runnable threads, when, and for how long."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from reconciler.control.persistence import decode_plan, plan_row
from reconciler.control.planner import plan_pools
from reconciler.placement.claims import cpu_claims
from reconciler.placement.isolation import SIGNALS, IsolationConfig, observe, runnable_milli
from reconciler.placement.provision import ProvisionPolicy
from reconciler.policies.shared import ConfineMode, PoolSizing, SharedConfig, SharedPoolMode
from reconciler.policies.table import PoliciesConfig
from state.cpu import CpuPreferences, Measured, PodIndicators, PodIsolation
from state.model import NodeView, Pod, PodClass, Pools, Resources
from state.plan import NodePlan
from tests.fakes.constants import varied
from tests.reconciler.nodes import container, cpu, node, pod

ON = varied(IsolationConfig(enabled=True, cpus_percent=50), pods_percent=100)
STEP_S = 5.0


def asking(uid: str, milli: int, limit: int | None = None, cls: PodClass = PodClass.SHARED, **wish: Any) -> Pod:
    main = container("main", requests=Resources(cpu_milli=milli), limits=Resources(cpu_milli=limit))
    return replace(pod(uid, main, cls=cls), wish=CpuPreferences(**wish))


def threads(milli: float, *, age_s: float = 0.0, use: float | None = None) -> PodIndicators:
    """So many runnable threads, a quarter of which run."""
    run = milli / 4 if use is None else use
    return PodIndicators(
        use_milli=Measured(value=run, age_s=age_s), wait_milli=Measured(value=milli - run, age_s=age_s)
    )


def config(isolation: IsolationConfig = ON, **shared: Any) -> PoliciesConfig:
    return PoliciesConfig(shared=SharedConfig(isolation=isolation, **shared))


def lived(
    view: NodeView,
    runnable: Mapping[str, float],
    given: PoliciesConfig,
    pools: Pools | None = None,
    *,
    steps: int = 3,
    at: float = 1000.0,
    step_s: float = STEP_S,
) -> Pools:
    measured = {uid: threads(milli) for uid, milli in runnable.items()}
    for number in range(steps):
        pools = plan_pools(replace(view, now=at + number * step_s, indicators=measured), pools, given)
    assert pools is not None
    return pools


def isolated(pools: Pools) -> dict[str, int]:
    """CPUs by uid."""
    return {key.partition("/")[2]: len(cpus) for key, cpus in pools.named.items() if key.startswith("isolation/")}


TWO = node(asking("busy", 2000), asking("calm", 2000), topology=16)


def test_a_pod_is_isolated_at_the_third_sample_in_a_row() -> None:
    assert isolated(lived(TWO, {"busy": 3100, "calm": 2900}, config(), steps=2)) == {}
    pools = lived(TWO, {"busy": 3100, "calm": 2900}, config(), steps=3)
    assert isolated(pools) == {"busy": 2}
    assert pools.bound == {"busy": "isolation/busy"}
    own = pools.named["isolation/busy"]
    assert not own & pools.shared
    assert own | pools.shared == CpuSet.span(16)


def test_plans_between_two_samples_are_no_hits() -> None:
    assert isolated(lived(TWO, {"busy": 9000}, config(), steps=9, step_s=1.0)) == {}
    old = replace(TWO, now=1000.0, indicators={"busy": threads(9000, age_s=2.0)})
    pools = plan_pools(old, None, config())
    for age in (3.0, 7.0, 12.0):
        later = replace(old, now=998.0 + age, indicators={"busy": threads(9000, age_s=age)})
        pools = plan_pools(later, pools, config())
    assert pools.isolation["busy"].hits == 1


def test_a_sample_below_the_limits_ends_the_row() -> None:
    pools = lived(TWO, {"busy": 9000}, config(), steps=2)
    pools = lived(TWO, {"busy": 2000}, config(), pools, steps=1, at=1010.0)
    assert pools.isolation == {}
    assert isolated(lived(TWO, {"busy": 9000}, config(), pools, steps=2, at=1015.0)) == {}


@pytest.mark.parametrize(
    ("request_milli", "runnable", "counts"),
    [
        pytest.param(2000, 3001, True, id="half more"),
        pytest.param(2000, 3000, False, id="just half more"),
        pytest.param(8000, 10_001, True, id="two threads more"),
        pytest.param(8000, 10_000, False, id="just two threads more"),
        pytest.param(100, 900, False, id="less than one thread"),
        pytest.param(100, 1001, True, id="a small request and more than one thread"),
        pytest.param(0, 9000, False, id="no request"),
    ],
)
def test_what_counts_as_a_sample_over_the_limits(request_milli: int, runnable: int, counts: bool) -> None:
    found = observe([asking("a", request_milli)], {"a": threads(runnable)}, {}, 10.0, ON)
    assert (found == {"a": PodIsolation(hits=1, hit_at=10.0)}) is counts
    assert bool(found) is counts


def test_an_old_or_missing_sample_is_unknown() -> None:
    assert runnable_milli(threads(1000)) == 1000
    assert runnable_milli(threads(1000, age_s=20.0)) is None
    assert runnable_milli(PodIndicators(wait_milli=Measured(value=1.0))) is None
    assert runnable_milli(None) is None
    before = {"a": PodIsolation(hits=2, hit_at=5.0)}
    assert observe([asking("a", 1000)], {}, before, 10.0, ON) == before
    # A row does not last for ever.
    assert observe([asking("a", 1000)], {"a": threads(9000)}, before, 500.0, ON)["a"].hits == 1


def test_isolation_ends_when_no_sample_was_over_the_limits_for_a_while() -> None:
    given = config()
    pools = lived(TWO, {"busy": 9000}, given)
    pools = lived(TWO, {"busy": 100}, given, pools, steps=24, at=1015.0)
    assert isolated(pools) == {"busy": 2}
    # One more, and the while begins again.
    pools = lived(TWO, {"busy": 9000}, given, pools, steps=1, at=1135.0)
    pools = lived(TWO, {"busy": 100}, given, pools, steps=24, at=1140.0)
    assert isolated(pools) == {"busy": 2}
    pools = lived(TWO, {"busy": 100}, given, pools, steps=1, at=1260.0)
    assert (isolated(pools), pools.isolation) == ({}, {})


def test_a_pod_that_is_no_longer_measured_is_not_isolated_for_ever() -> None:
    pools = lived(TWO, {"busy": 9000}, config())
    assert isolated(lived(TWO, {}, config(), pools, steps=30, at=1015.0)) == {}


def test_its_limit_decides_the_size_where_that_fits_else_its_request() -> None:
    view = node(asking("busy", 2000, 4000), asking("calm", 2000), topology=16)
    assert isolated(lived(view, {"busy": 9000}, config())) == {"busy": 4}
    assert isolated(lived(view, {"busy": 9000}, config(replace(ON, cpus_percent=20)))) == {"busy": 2}
    # The other pods request 13 of 16 CPUs: only the request is left.
    view = node(asking("busy", 2000, 4000), asking("calm", 13_000), topology=16)
    assert isolated(lived(view, {"busy": 9000}, config())) == {"busy": 2}


def test_the_bounds_of_cpus_and_of_pods() -> None:
    members = [asking(uid, 2000) for uid in "abcdef"]
    view, load = node(*members, topology=20), dict.fromkeys("abcdef", 9000.0)
    assert isolated(lived(view, load, config(IsolationConfig(enabled=True)))) == {"a": 2, "b": 2}
    pools = lived(view, load, config(IsolationConfig(enabled=True, cpus_percent=100)))
    assert isolated(pools) == {"a": 2, "b": 2, "c": 2}
    assert "d" in pools.reasons["isolation"]
    assert isolated(lived(view, load, config(replace(ON, cpus_percent=0)))) == {}


def test_a_pod_that_has_its_cpus_comes_before_one_that_is_new() -> None:
    members = [asking(uid, 2000) for uid in "abc"]
    given = config(varied(IsolationConfig(enabled=True, cpus_percent=10), pods_percent=100))
    view = node(*members, topology=20)
    pools = lived(view, {"b": 9000}, given)
    assert isolated(lived(view, {"a": 9000, "b": 9000}, given, pools, steps=5, at=1015.0)) == {"b": 2}


def test_requests_of_others_come_before_isolated_pods() -> None:
    """2.5 CPUs round up to 3, and the others request the rest."""
    full = node(asking("busy", 2500), asking("calm", 13_500), topology=16)
    pools = lived(full, {"busy": 9000}, config())
    assert isolated(pools) == {}
    # An arrival ends the isolation that no longer fits.
    view = node(asking("busy", 2500), asking("calm", 2000), topology=16)
    pools = lived(view, {"busy": 9000}, config())
    assert isolated(pools) == {"busy": 3}
    assert isolated(lived(full, {"busy": 9000}, config(), pools, steps=1, at=1015.0)) == {}


@pytest.mark.parametrize(
    "members",
    [
        pytest.param([asking("busy", 2000)], id="alone"),
        pytest.param([asking("busy", 2000, pool="x"), asking("calm", 2000)], id="alone in a named pool"),
        pytest.param([asking("busy", 2000, numa_binding=True), asking("c", 1, numa_binding=True)], id="bound"),
        pytest.param([asking("busy", 2000, cls=PodClass.DEDICATED), asking("calm", 2000)], id="dedicated"),
        pytest.param([asking("busy", 2000, cls=PodClass.RECLAIMED), asking("calm", 2000)], id="BE"),
        pytest.param([asking(uid, 2000, cls=PodClass.SYSTEM, pool="x") for uid in ("busy", "b")], id="system"),
    ],
)
def test_pods_that_are_never_isolated(members: list[Pod]) -> None:
    assert isolated(lived(node(*members, topology=16), {"busy": 9000}, config())) == {}


@pytest.mark.parametrize("given", [config(IsolationConfig()), config(confine=ConfineMode.NEVER)], ids=["off", "never"])
def test_off_and_where_no_online_pod_gets_a_cpu_set(given: PoliciesConfig) -> None:
    pools = lived(TWO, {"busy": 9000}, given)
    assert (isolated(pools), pools.isolation) == ({}, {})


def test_the_signals_are_measured_for_it_only_where_it_is_on() -> None:
    assert SharedConfig().signals == frozenset()
    assert SharedConfig(isolation=ON).signals == SIGNALS
    assert SharedConfig(isolation=ON, enabled=False).signals == frozenset()


def test_a_new_run_keeps_isolated_pods_and_their_time_begins_again() -> None:
    pools = lived(TWO, {"busy": 9000}, config())
    pools = lived(TWO, {"busy": 9000, "calm": 9000}, config(), pools, steps=1, at=1015.0)
    again = decode_plan(plan_row(NodePlan(pools=pools))).pools
    assert again.isolation == {"busy": PodIsolation(isolated=True)}
    assert isolated(lived(TWO, {}, config(), again, steps=1, at=50.0)) == {"busy": 2}


def test_each_claim_is_named_with_its_rule() -> None:
    pools = lived(TWO, {"busy": 9000}, config())
    view = replace(TWO, now=1015.0)
    claims = {claim.owner: claim for claim in cpu_claims(view, pools)}
    claim = claims["isolation/busy"]
    assert (claim.pods, claim.asked, claim.got, claim.cut) == (("busy",), 2, 2, False)
    assert "isolated" in claim.rule
    assert claims["shared"].pods == ("calm",)


@pytest.mark.parametrize("mode", list(SharedPoolMode))
@pytest.mark.parametrize("expand", [True, False])
@pytest.mark.parametrize(
    ("sizing", "policy"),
    [(PoolSizing.REQUEST, ProvisionPolicy.NONE), *((PoolSizing.MEASURED, policy) for policy in ProvisionPolicy)],
)
def test_constant_input_is_at_rest_once_pods_are_locked_in(
    mode: SharedPoolMode, expand: bool, sizing: PoolSizing, policy: ProvisionPolicy
) -> None:
    members = [asking(uid, 1500, pool="x" if uid in "abc" else None) for uid in "abcdef"]
    view = node(*members, topology=24, cpu=cpu(online=6000))
    given = config(mode=mode, expand=expand, sizing=sizing)
    given = replace(given, shared=replace(given.shared, provision=replace(given.shared.provision, policy=policy)))
    load = {"a": 9000.0, "d": 9000.0, "e": 100.0}
    pools = first = lived(view, load, given, steps=60, step_s=30.0)
    assert isolated(first).keys() == {"a", "d"}
    for step in range(80):
        pools = lived(view, load, given, pools, steps=1, at=4000.0 + 7.0 * step)
        assert (pools.named, pools.shared, pools.isolation) == (first.named, first.shared, first.isolation)
