"""BE work on the CPUs of online pools: each pool gives what it can spare, a saturated one last."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.control.planner import plan_pools
from reconciler.policies.budget import BudgetConfig
from reconciler.policies.overlap import PoolOverlap, overlaps, shares
from reconciler.policies.reclaimed import ReclaimedConfig
from reconciler.policies.shared import SharedConfig
from reconciler.policies.table import PoliciesConfig
from state.cpu import CpuPreferences, GroupUse
from state.model import NodeView, Pod, Pools, Resources
from state.topology import Topology, uniform
from tests.reconciler.nodes import container, cpu, cpus, node, online, pod

CONFIG = PoliciesConfig(shared=SharedConfig(expand=False))
"""Each pool has what its text says; test_expansion.py has the others."""


def asking(uid: str, milli: int, pool: str | None = None) -> Pod:
    item = online(uid, container("main", requests=Resources(cpu_milli=milli)))
    return replace(item, wish=CpuPreferences(pool=pool))


def used(view: NodeView, milli: dict[str, int]) -> NodeView:
    uses = {view.pods[uid].group.path: GroupUse(cpu_milli=number) for uid, number in milli.items()}
    return replace(view, uses=uses, cpu=cpu(online=sum(milli.values())))


def settled(view: NodeView) -> Pools:
    """The pools once the budget has grown as far as it does."""
    pools = None
    config = replace(CONFIG, reclaimed=ReclaimedConfig(budget=BudgetConfig(limit_percent=100)))
    for step in range(40):
        pools = plan_pools(replace(view, now=10.0 * step), pools, config)
    assert pools is not None
    return pools


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("busy", "system"), [(0, 0), (2000, 0), (6000, 0), (10_000, 0), (0, -8000)])
def test_the_overlap_with_a_saturated_pool_is_the_least_within_a_core(threads: int, busy: int, system: int) -> None:
    """32 CPUs, `web` uses all of its 8; the others' use decides how many CPUs the budget needs."""
    topology = uniform(cores=32 // threads, threads=threads)
    view = node(asking("web", 8000, "web"), asking("rest", 1000), pod("be"), topology=topology)
    view = used(view, {"web": 8000, "rest": busy})
    if system:
        # The node's use is not known in full, and the budget exceeds what the default pool has.
        view = replace(view, cpu=cpu(online=8000 + system))
    pools = settled(view)
    web = pools.named["shared/web"]
    least = max(0, len(pools.reclaimed) - len(pools.shared))
    assert len(pools.reclaimed & web) <= least + threads
    assert pools.reclaimed


def test_without_measurements_the_requests_count() -> None:
    view = replace(node(asking("web", 8000, "web"), asking("rest", 1000), pod("be"), topology=32), cpu=None)
    pools = plan_pools(view, None, CONFIG)
    assert not plan_pools(view, pools, CONFIG).reclaimed & pools.named["shared/web"]


def test_two_pools_share_in_proportion_to_what_they_can_spare() -> None:
    found = {"a": PoolOverlap(CpuSet.span(8), 4000), "b": PoolOverlap(cpus("8-31"), 20_000)}
    assert shares(12, found, EMPTY, 1) == {"a": 2, "b": 10}
    assert shares(30, found, EMPTY, 1) == {"a": 6, "b": 24}


def test_a_pool_that_becomes_busy_gives_back_and_one_that_becomes_idle_takes_nothing_at_once() -> None:
    held = cpus("0-1,8-17")
    busy = {"a": PoolOverlap(CpuSet.span(8), 0), "b": PoolOverlap(cpus("8-31"), 20_000)}
    assert shares(12, busy, held, 1) == {"a": 0, "b": 12}
    idle = {"a": PoolOverlap(CpuSet.span(8), 8000), "b": PoolOverlap(cpus("8-31"), 20_000)}
    assert shares(12, idle, held, 1) == {"a": 2, "b": 10}


def test_up_to_a_core_too_many_moves_nothing() -> None:
    found = {"a": PoolOverlap(CpuSet.span(8), 0), "b": PoolOverlap(cpus("8-31"), 20_000)}
    assert shares(4, found, cpus("0-1,8-9"), 2) == {"a": 2, "b": 2}


def test_requests_alone_move_nothing() -> None:
    found = {"a": PoolOverlap(CpuSet.span(8), 0, measured=False), "b": PoolOverlap(cpus("8-31"), 20_000)}
    assert shares(12, found, cpus("0-5,8-13"), 1) == {"a": 6, "b": 6}
    assert shares(14, found, cpus("0-5,8-13"), 1) == {"a": 6, "b": 8}


def test_cpus_that_no_pool_requests_are_used_first_and_given_back_last() -> None:
    found = {"a": PoolOverlap(CpuSet.span(8), 8000, beyond=2), "b": PoolOverlap(cpus("8-31"), 20_000, beyond=6)}
    assert shares(8, found, EMPTY, 1) == {"a": 2, "b": 6}
    assert shares(15, found, EMPTY, 1) == {"a": 4, "b": 11}
    assert shares(8, found, cpus("0-3,8-18"), 1) == {"a": 2, "b": 6}
    busy = {**found, "b": PoolOverlap(cpus("8-31"), 1000, beyond=6)}
    assert shares(6, busy, EMPTY, 1) == {"a": 5, "b": 1}


pools_of_numbers = st.lists(
    st.tuples(st.integers(1, 6), st.integers(-2000, 7000), st.none() | st.integers(-2, 6)), min_size=1, max_size=4
)


@given(pools_of_numbers, st.integers(0, 24), st.integers(0, 2**24 - 1), st.sampled_from([1, 2]))
def test_what_is_over_is_the_least_within_a_core_and_constant_input_is_at_rest(
    numbers: list[tuple[int, int, int | None]], count: int, mask: int, core: int
) -> None:
    """Beside the exhaustive answer: all ways to divide the CPUs over the pools."""
    found: dict[str, PoolOverlap] = {}
    first = 0
    for at, (size, spare, beyond) in enumerate(numbers):
        found[str(at)] = PoolOverlap(CpuSet(range(first, first + size)), spare, beyond=beyond)
        first += size
    held = CpuSet.from_mask(mask) & CpuSet.span(first)
    got = shares(count, found, held, core)
    assert sum(got.values()) == min(count, first)
    assert all(0 <= got[key] <= len(overlap.cpus) for key, overlap in found.items())

    def over(parts: tuple[int, ...]) -> int:
        return sum(max(0, part - overlap.spare) for part, overlap in zip(parts, found.values(), strict=True))

    best = min(
        over(parts)
        for parts in product(*(range(len(overlap.cpus) + 1) for overlap in found.values()))
        if sum(parts) == min(count, first)
    )
    assert over(tuple(got.values())) <= best + core * len(found)
    after = CpuSet.union(overlap.cpus.lowest(got[key]) for key, overlap in found.items())
    assert shares(count, found, after, core) == got


def test_the_default_pools_use_is_what_the_others_leave_of_all_online_use() -> None:
    view = node(asking("web", 8000, "web"), asking("rest", 1000), topology=Topology(online=CpuSet.span(32)))
    view = used(view, {"web": 5000})
    view = replace(view, cpu=cpu(online=9000))
    pools = plan_pools(view, None, CONFIG)
    found = overlaps(view, pools, pools.online_cpus)
    assert {key: overlap.spare_milli for key, overlap in found.items()} == {"shared": 20_000, "shared/web": 3000}
