"""More pools than CPUs: where the pods of a pool without CPUs of its own run, their requests count."""

import re
from typing import Any

import pytest
from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from reconciler.control.planner import plan_pools
from reconciler.placement.claims import cpu_claims
from reconciler.policies.overlap import overlaps
from reconciler.policies.shared import PoolSizing, SharedConfig, SharedPoolMode
from reconciler.policies.table import PoliciesConfig
from state.cpu import CpuPreferences, GroupUse
from state.model import NodeView, Pod, PodClass, Pools, Resources
from state.topology import Topology, uniform
from tests.reconciler.nodes import container, node, online, pod
from tests.reconciler.placement.shapes import without

SMALL_NODE = without(uniform(sockets=2, nodes=2, cores=32, threads=1), range(13))
"""Three CPUs on node 0, 16 on node 1."""
OVERLAP = PoliciesConfig()
KEPT = PoliciesConfig(shared=SharedConfig(expand=False))
SEPARATE = PoliciesConfig(shared=SharedConfig(mode=SharedPoolMode.SEPARATE))


def asking(uid: str, cpus: int, **wish: Any) -> Pod:
    item = pod(uid, container("main", requests=Resources(cpu_milli=1000 * cpus)), cls=PodClass.SHARED)
    return replace(item, wish=CpuPreferences(pool=uid, **wish))


def bound(count: int) -> list[Pod]:
    return [asking(f"b{number}", 3, numa_binding=True, nodes=(0,)) for number in range(count)]


def planned(topology: Topology | int, *pods: Pod, config: PoliciesConfig = OVERLAP) -> tuple[NodeView, Pools]:
    view = node(*pods, topology=topology)
    pools = plan_pools(view, None, config)
    for _ in range(5):
        pools = plan_pools(view, pools, config)
    return view, pools


def without_cpus(pools: Pools) -> list[str]:
    return [key for key, cpus in pools.named.items() if cpus == pools.shared]


@pytest.mark.parametrize("config", [OVERLAP, KEPT, SEPARATE], ids=["overlap", "kept", "separate"])
def test_every_cpu_of_a_node_with_too_few_is_a_pool_s_own_and_the_rest_have_their_requests(
    config: PoliciesConfig,
) -> None:
    _, pools = planned(SMALL_NODE, *bound(5), asking("c", 4), config=config)
    own = {key: len(cpus) for key, cpus in pools.named.items() if cpus != pools.shared}
    assert {key: own[key] for key in own if key != "shared/c"} == dict.fromkeys(
        ("shared/b0-NUMA0", "shared/b1-NUMA0", "shared/b2-NUMA0"), 1
    )
    assert own["shared/c"] >= 4
    # Two pools of three CPUs each.
    assert len(pools.shared) >= 6
    assert not pools.separate or not pools.reclaimed & (pools.shared | CpuSet.union(pools.named.values()))


def test_a_pool_that_may_be_anywhere_is_not_enlarged_while_others_have_no_cpu() -> None:
    _, pools = planned(4, asking("a", 3), *(asking(f"n{number}", 1) for number in range(5)))
    assert len(pools.named["shared/a"]) == 1
    assert len(pools.shared) == 2
    assert "requested by no pool" not in pools.reasons["shared"]


@pytest.mark.parametrize(("cpus", "guests"), [(8, None), (4, "4 pools")], ids=["each has its own", "four have none"])
def test_the_shared_pools_reason_counts_the_pools_that_it_runs(cpus: int, guests: str | None) -> None:
    _, pools = planned(cpus, *(asking(f"n{number}", 1) for number in range(6)))
    found = re.search(r"also runs (.*) cut to 0", pools.reasons["shared"])
    assert (found and found[1]) == guests


def test_one_that_may_be_anywhere_is_cut_before_those_bound_to_the_node() -> None:
    _, pools = planned(4, *bound(5), asking("c", 4))
    own = [key for key, cpus in pools.named.items() if cpus != pools.shared]
    assert own == ["shared/b0-NUMA0", "shared/b1-NUMA0", "shared/c"]
    assert len(pools.named["shared/c"]) == 1


def test_their_use_is_that_of_the_pool_where_they_run() -> None:
    view, pools = planned(4, *(asking(f"n{number}", 1) for number in range(6)))
    guests = [key.partition("/")[2] for key in without_cpus(pools)]
    assert len(guests) == 4
    uses = {item.group.path: GroupUse(cpu_milli=500) for item in view.pods.values()}
    found = overlaps(replace(view, uses=uses), pools, pools.online_cpus)
    assert found["shared"].spare_milli == 1000 * len(pools.shared) - 500 * len(guests)


@pytest.mark.parametrize("cpus", [1, 2])
def test_a_claim_without_cpus_has_a_rule_too(cpus: int) -> None:
    topology = without(uniform(sockets=2, nodes=2, cores=8, threads=1), range(cpus, 8))
    view, pools = planned(topology, *bound(1), asking("c", 1))
    assert all(claim.rule for claim in cpu_claims(view, pools) if claim.asked)
    assert {"shared/b0-NUMA0", "shared/c"} <= pools.named.keys()


@pytest.mark.parametrize("more", [[], [asking("c", 1)]], ids=["bound pools", "and a pool that may be anywhere"])
def test_where_pools_of_nodes_have_every_cpu_the_shared_pool_has_the_same_ones(more: list[Pod]) -> None:
    topology = without(uniform(sockets=2, nodes=2, cores=4, threads=1), (1, 3))
    bound_to = [asking(f"b{on}", 1, numa_binding=True, nodes=(on,)) for on in (0, 1)]
    _, pools = planned(topology, *bound_to, *more, online("web"))
    assert pools.shared == topology.online
    assert (pools.named["shared/b0-NUMA0"], pools.named["shared/b1-NUMA1"]) == (CpuSet([0]), CpuSet([2]))
    assert without_cpus(pools) == [f"shared/{item.uid}" for item in more]
    assert pools.reasons["shared"].startswith("fewer CPUs than pools")


def tiny(uid: str, **wish: Any) -> Pod:
    item = pod(uid, container("main", requests=Resources(cpu_milli=10)), cls=PodClass.SHARED)
    return replace(item, wish=CpuPreferences(pool=uid, **wish))


@pytest.mark.parametrize("config", [OVERLAP, KEPT, SEPARATE], ids=["overlap", "kept", "separate"])
@pytest.mark.parametrize("wish", [{}, {"numa_binding": True}, {"numa_binding": True, "nodes": (0,)}])
def test_pools_of_less_than_a_cpu_take_no_requested_cpu_of_others(config: PoliciesConfig, wish: dict[str, Any]) -> None:
    """Fifteen pods of 10 thousandths of a CPU, each of which names a pool, would have fifteen CPUs."""
    shape = uniform(sockets=2, nodes=2, cores=16, threads=1)
    web = online("web", container("main", requests=Resources(cpu_milli=12_000)))
    _, pools = planned(shape, web, *[tiny(f"t{number}", **wish) for number in range(15)], config=config)
    assert len(pools.shared) >= 12
    assert without_cpus(pools)
    own = [len(cpus) for cpus in pools.named.values() if cpus != pools.shared]
    assert sum(own) <= 3
    # Where there is room each has a CPU of its own.
    _, pools = planned(shape, *[tiny(f"t{number}", **wish) for number in range(3)], config=config)
    assert not without_cpus(pools)


@pytest.mark.parametrize("wish", [{}, {"numa_binding": True}, {"numa_binding": True, "nodes": (0,)}])
@pytest.mark.parametrize("sizing", list(PoolSizing))
def test_pools_of_less_than_a_cpu_keep_no_container_from_cpus_of_its_own(
    wish: dict[str, Any], sizing: PoolSizing
) -> None:
    shape = uniform(sockets=2, nodes=2, cores=16, threads=1)
    others = [tiny(f"t{number}", **wish) for number in range(15)]
    config = PoliciesConfig(shared=SharedConfig(sizing=sizing))
    before = plan_pools(node(*others, topology=shape), None, config)
    db = pod("db", container("main", requests=Resources(cpu_milli=4000)), cls=PodClass.DEDICATED)
    pools = plan_pools(node(db, *others, topology=shape), before, config)
    assert {key: len(cpus) for key, cpus in pools.dedicated.items()} == {"db/main": 4}
    assert pools.shared


def test_a_bound_pool_keeps_the_cpus_of_its_node_beside_pools_of_less_than_one() -> None:
    shape = uniform(sockets=2, nodes=2, cores=16, threads=1)
    others = [tiny(f"t{number}", numa_binding=True, nodes=(0,)) for number in range(8)]
    _, pools = planned(shape, asking("big", 7, numa_binding=True, nodes=(0,)), *others)
    assert len(pools.named["shared/big-NUMA0"]) >= 7
