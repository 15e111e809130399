"""Constant input ends in a constant plan: pool sizes of every sizing mode, with use that follows what the pools get."""

from collections.abc import Mapping
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from reconciler.control.planner import plan_pools
from reconciler.placement.pool_members import DEFAULT
from reconciler.placement.provision import ProvisionConfig, ProvisionPolicy, WaitGains
from reconciler.policies.shared import PoolSizing, SharedConfig, SharedPoolMode
from reconciler.policies.table import PoliciesConfig
from state.cpu import CpuPreferences, GroupUse, Measured, PodIndicators
from state.model import NodeView, Pod, PodClass, Pools, Resources
from state.topology import Topology, uniform
from tests.examples import SEARCH
from tests.reconciler.nodes import container, cpu, node, pod

REPETITIONS = 200 if SEARCH else 80
MODES = [(PoolSizing.REQUEST, ProvisionPolicy.NONE), *((PoolSizing.MEASURED, policy) for policy in ProvisionPolicy)]
INTERVALS = [0.1, 1.0, 7.0, 30.0, 300.0]


def shape(cpus: int, threads: int) -> Topology:
    return uniform(cores=max(1, cpus // threads), threads=threads)


def member(uid: str, request: int, pool: str | None) -> Pod:
    item = pod(uid, container("main", requests=Resources(cpu_milli=request)), cls=PodClass.SHARED)
    return replace(item, wish=CpuPreferences(pool=pool))


def scene(requests: Mapping[str, int], topology: Topology) -> NodeView:
    """One pod per pool, with the pool's name; ``shared`` is in the default pool."""
    members = [member(name, milli, None if name == DEFAULT else name) for name, milli in requests.items()]
    return node(*members, topology=topology, cpu=cpu(online=1000))


def configured(
    sizing: PoolSizing,
    policy: ProvisionPolicy,
    mode: SharedPoolMode,
    wait: float | None = None,
    *,
    expand: bool = False,
) -> PoliciesConfig:
    provision = ProvisionConfig(policy=policy)
    if wait is not None:
        provision = replace(provision, pid=replace(provision.pid, cpu_sched_wait=WaitGains(target_percent=wait)))
    return PoliciesConfig(shared=SharedConfig(sizing=sizing, mode=mode, provision=provision, expand=expand))


def granted(view: NodeView, pools: Pools | None) -> dict[str, float]:
    """CPUs that each pod gets; of a set that several pools have, an equal part."""
    if pools is None:
        return dict.fromkeys(view.pods, 1.0)
    own: dict[str, CpuSet] = {uid: pools.named.get(f"shared/{uid}", pools.shared) for uid in view.pods}
    return {uid: len(cpus) / sum(cpus == other for other in own.values()) for uid, cpus in own.items()}


def follow(view: NodeView, loads: Mapping[str, int], pools: Pools | None, at: float) -> NodeView:
    """The next reading: each pod uses its load as far as it has CPUs; what remains of the load waits."""
    got = granted(view, pools)
    used = {uid: min(load, round(1000 * got[uid])) for uid, load in loads.items()}
    uses = {view.pods[uid].group.path: GroupUse(cpu_milli=milli) for uid, milli in used.items()}
    waits = {uid: loads[uid] ** 3 / max(1.0, 1000 * got[uid]) ** 2 for uid in loads}
    measured = {uid: PodIndicators(wait_milli=Measured(value=wait)) for uid, wait in waits.items()}
    return replace(view, now=at, uses=uses, indicators=measured)


def run(
    view: NodeView,
    loads: Mapping[str, int],
    config: PoliciesConfig,
    start: Pools | None,
    interval: float,
    *,
    times: int = REPETITIONS,
    at: float = 1000.0,
) -> Pools:
    pools = start
    for turn in range(times):
        pools = plan_pools(follow(view, loads, pools, at + turn * interval), pools, config)
    assert pools is not None
    return pools


def parts(pools: Pools) -> object:
    """All that the online pools decide."""
    return pools.named, pools.shared, pools.sizes


@pytest.mark.parametrize(
    ("mode", "expand", "interval"),
    [
        (SharedPoolMode.OVERLAP, True, 7.0),
        (SharedPoolMode.OVERLAP, False, 300.0),
        (SharedPoolMode.SEPARATE, False, 0.1),
        (SharedPoolMode.SEPARATE, False, 7.0),
    ],
)
@pytest.mark.parametrize(("sizing", "policy"), [mode for mode in MODES if mode[1] is not ProvisionPolicy.PID])
@pytest.mark.parametrize(
    ("cpus", "loads"),
    [
        pytest.param(59, {"a": 60_000, "b": 20_000}, id="two pools that do not fit"),
        pytest.param(4, dict.fromkeys("abcdefg", 1500), id="more pools than CPUs"),
        pytest.param(3, {name: 900 + 100 * at for at, name in enumerate("abcdefg")}, id="more unequal pools than CPUs"),
        pytest.param(64, {"a": 9000, "b": 3000, DEFAULT: 2000}, id="all fits"),
    ],
)
def test_the_plan_after_many_repetitions_is_the_first(
    cpus: int,
    loads: Mapping[str, int],
    sizing: PoolSizing,
    policy: ProvisionPolicy,
    mode: SharedPoolMode,
    expand: bool,
    interval: float,
) -> None:
    view = scene(loads, shape(cpus, 1))
    view = replace(view, uses={view.pods[uid].group.path: GroupUse(cpu_milli=milli) for uid, milli in loads.items()})
    config = configured(sizing, policy, mode, expand=expand)
    pools = first = plan_pools(replace(view, now=1000.0), None, config)
    for turn in range(1, (REPETITIONS if SEARCH else 40) + 1):
        pools = plan_pools(replace(view, now=1000.0 + turn * interval), pools, config)
    assert parts(pools) == parts(first)


NAMES = [DEFAULT, "a", "b", "c", "d", "e"]


@settings(max_examples=400 if SEARCH else 12, deadline=None)
@given(
    loads=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 40_000), min_size=1),
    requests=st.integers(100, 12_000),
    cpus=st.sampled_from([2, 4, 8, 16, 32, 64]),
    threads=st.sampled_from([1, 2]),
    style=st.sampled_from(MODES),
    mode=st.sampled_from(list(SharedPoolMode)),
    interval=st.sampled_from(INTERVALS),
    wait=st.sampled_from([None, 10.0]),
    begun=st.booleans(),
    expand=st.booleans(),
)
def test_use_that_follows_the_pools_comes_to_rest(
    loads: Mapping[str, int],
    requests: int,
    cpus: int,
    threads: int,
    style: tuple[PoolSizing, ProvisionPolicy],
    mode: SharedPoolMode,
    interval: float,
    wait: float | None,
    begun: bool,
    expand: bool,
) -> None:
    """From a new node, and from one whose loads were others before, at every interval."""
    view = scene(dict.fromkeys(loads, requests), shape(cpus, threads))
    config = configured(*style, mode, wait, expand=expand)
    start = None
    if begun:
        start = run(
            view, dict(zip(loads, reversed(list(loads.values())), strict=True)), config, None, 60.0, times=30, at=-9e3
        )
    # Long enough for the slowest: two CPUs in 30 s.
    settled = run(view, loads, config, start, 30.0, times=150)
    final = run(view, loads, config, settled, interval, at=1000.0 + 150 * 30)
    assert parts(run(view, loads, config, final, interval, at=1e5)) == parts(final)
    assert parts(final) == parts(settled)


@pytest.mark.parametrize("threads", [1, 2, 4] if SEARCH else [1, 4])
@pytest.mark.parametrize("size_before", [10, 30, 50, 64] if SEARCH else [10, 50])
@pytest.mark.parametrize("load", [300, 2000, 7000] if SEARCH else [300, 7000])
def test_a_pid_pool_whose_use_fell_shrinks_to_its_target(threads: int, size_before: int, load: int) -> None:
    """Within two cores of the smallest size that keeps the target, after an hour."""
    view = scene({"a": 1000, DEFAULT: 1000}, shape(256, threads))
    config = configured(PoolSizing.MEASURED, ProvisionPolicy.PID, SharedPoolMode.OVERLAP)
    busy = {"a": size_before * 600, DEFAULT: 500}
    large = _grown(threads, size_before)
    assert len(large.named["shared/a"]) >= size_before
    small = run(view, {**busy, "a": load}, config, large, 10.0, times=360, at=2000.0)
    needed = max(2, -(-load // 600))
    assert needed <= len(small.named["shared/a"]) <= needed + 2 * threads


@cache
def _grown(threads: int, size: int) -> Pools:
    """Where each load begins to fall."""
    view = scene({"a": 1000, DEFAULT: 1000}, shape(256, threads))
    config = configured(PoolSizing.MEASURED, ProvisionPolicy.PID, SharedPoolMode.OVERLAP)
    return run(view, {"a": size * 600, DEFAULT: 500}, config, None, 2.0, times=200)


def test_waiting_that_rises_faster_than_the_pool_shrinks_does_not_make_it_swing() -> None:
    """At 6 CPUs it is far below the target, at 4 far above: the size that was too small is tried only once."""
    view = scene({"a": 1000, DEFAULT: 1000}, shape(64, 2))
    config = configured(PoolSizing.MEASURED, ProvisionPolicy.PID, SharedPoolMode.OVERLAP, 10.0)
    pools: Pools | None = None
    sizes: list[int] = []
    for turn in range(400):
        has = len(pools.named["shared/a"]) if pools is not None else 0
        measured = {"a": PodIndicators(wait_milli=Measured(value=900.0 if has <= 4 else 10.0))}
        seen = follow(view, {"a": 1000, DEFAULT: 500}, pools, 1000.0 + turn * 10)
        measured[DEFAULT] = PodIndicators(wait_milli=Measured(value=0.0))
        pools = plan_pools(replace(seen, indicators=measured), pools, config)
        sizes.append(len(pools.named["shared/a"]))
    assert set(sizes[40:]) == {6}
    assert pools is not None
    # With less load the smaller size is tried again.
    for turn in range(60):
        seen = follow(view, {"a": 300, DEFAULT: 500}, pools, 9000.0 + turn * 10)
        measured = {uid: PodIndicators(wait_milli=Measured(value=0.0)) for uid in ("a", DEFAULT)}
        pools = plan_pools(replace(seen, indicators=measured), pools, config)
    assert len(pools.named["shared/a"]) < 6
