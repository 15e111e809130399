"""NUMA nodes for new demands: by free CPUs, by nodes that are exclusive or avoided, and by memory."""

from typing import Any

import pytest

from cgroupfs.cpuset import CpuSet
from reconciler.placement.binding import NodeBinding, bind
from reconciler.placement.demand import CpuDemand
from reconciler.placement.resource_hints import NumaFreeMemory
from state.cpu import AntiAffinity, CpuPreferences, TopologyPolicy
from state.topology import Topology, uniform
from tests.reconciler.placement.shapes import demand

# Node 0 is 0-3 and 8-11, node 1 is 4-7 and 12-15.
TWO = uniform(sockets=2, nodes=2, cores=8, threads=2)
# Nodes 0 to 3 are 0-3, 4-7, 8-11, 12-15.
FOUR = uniform(sockets=2, nodes=4, cores=16, threads=1)
GIB = 2**30
BEST = TopologyPolicy.BEST_EFFORT
ALONE = CpuPreferences(numa_binding=True, numa_share=False)
BOUND = CpuPreferences(numa_binding=True)
APART = CpuPreferences(apart=AntiAffinity.NODE)


def bound(topology: Topology, *demands: CpuDemand, free: str | None = None, **more: Any) -> NodeBinding:
    settings: dict[str, Any] = {"policy": BEST, "wishes": {}, "affinity": {}} | more
    return bind(demands, topology.online if free is None else CpuSet.parse(free), topology, **settings)


def nodes(binding: NodeBinding) -> dict[str, str]:
    return {cpu_demand.uid: str(CpuSet(cpu_demand.nodes)) for cpu_demand in binding.demands}


def test_each_newcomer_sees_what_the_ones_before_it_leave() -> None:
    binding = bound(TWO, demand("a", 6), demand("b", 4), demand("c", 4))
    assert nodes(binding) == {"a": "0", "b": "1", "c": "1"}


def test_who_holds_cpus_or_has_a_schedulers_choice_is_left_alone_and_counted() -> None:
    binding = bound(TWO, demand("a", 4, "0-3"), demand("b", 4, explicit="4-7"), demand("c", 5))
    assert nodes(binding) == {"a": "", "b": "", "c": "0-1"}
    assert set(binding.reasons) == {"c/c"}


def test_without_a_policy_only_who_asks_is_bound() -> None:
    binding = bound(
        TWO,
        demand("a", 2),
        demand("b", 2, numa_binding=True),
        demand("c", 2),
        wishes={"b": BOUND},
        policy=TopologyPolicy.NONE,
        affinity={"c/c": {"gpu": CpuSet([1])}},
    )
    assert nodes(binding) == {"a": "", "b": "0", "c": ""}


COMPANY: dict[str, tuple[CpuDemand, CpuPreferences, CpuDemand, CpuPreferences, str, str]] = {
    "an exclusive node takes nobody": (
        demand("a", 2, "0,8", numa_exclusive=True),
        BOUND,
        demand("b", 2),
        BOUND,
        "1",
        "",
    ),
    "one that wants its node so gets an empty one": (
        demand("a", 2, "0,8"),
        BOUND,
        demand("b", 2, numa_exclusive=True),
        BOUND,
        "1",
        "",
    ),
    "unshared": (demand("a", 2, "0,8"), ALONE, demand("b", 2), BOUND, "1", "not on node 0, used exclusively"),
    "unshared by the newcomer": (demand("a", 2, "0,8"), BOUND, demand("b", 2), ALONE, "1", "not on node 0"),
    "unshared, and too large for the others": (
        demand("a", 2, "0,8"),
        ALONE,
        demand("b", 10),
        BOUND,
        "0-1",
        "other nodes have too few CPUs: also on node 0",
    ),
    "unshared with bound ones only": (demand("a", 2, "0,8"), ALONE, demand("b", 2), CpuPreferences(), "0", ""),
    "unshared means nothing without binding": (
        demand("a", 2, "0,8"),
        CpuPreferences(numa_share=False),
        demand("b", 2),
        BOUND,
        "0",
        "",
    ),
    "unshared stands below a scheduler's decision": (
        demand("a", 2, "0,8"),
        ALONE,
        demand("b", 2),
        CpuPreferences(nodes=(0,)),
        "0",
        "named by the pod's annotations",
    ),
    "apart": (demand("a", 2, "0,8"), APART, demand("b", 2), APART, "1", "avoids the pods on node 0"),
    "apart costs no node more": (
        demand("a", 6, "4-7,12-13"),
        APART,
        demand("b", 9),
        APART,
        "0-1",
        "shares node 1 with pods to avoid",
    ),
    "apart from the same wish only": (demand("a", 2, "0,8"), APART, demand("b", 2), CpuPreferences(), "0", ""),
    "apart on cores is no matter of nodes": (
        demand("a", 2, "0,8"),
        CpuPreferences(apart=AntiAffinity.CORE),
        demand("b", 2),
        CpuPreferences(apart=AntiAffinity.CORE),
        "0",
        "",
    ),
}


@pytest.mark.parametrize(
    ("old", "old_wish", "new", "new_wish", "expected", "reason"), COMPANY.values(), ids=COMPANY.keys()
)
def test_company(
    old: CpuDemand, old_wish: CpuPreferences, new: CpuDemand, new_wish: CpuPreferences, expected: str, reason: str
) -> None:
    binding = bound(TWO, old, new, wishes={"a": old_wish, "b": new_wish})
    assert nodes(binding) == {"a": "", "b": expected}
    assert reason in binding.reasons["b/c"]


def test_apart_on_one_node_less_loses() -> None:
    """Both fit one node only where the other pod is: fewer nodes are first."""
    binding = bound(FOUR, demand("a", 1, "0"), demand("b", 3), free="0-5,8-9,12-13", wishes={"a": APART, "b": APART})
    assert nodes(binding)["b"] == "0"
    assert "shares node 0 with pods to avoid" in binding.reasons["b/c"]


def test_containers_of_one_pod_keep_each_other_company() -> None:
    cpu_demand = demand("a", 2, "0,8")
    other = CpuDemand(key="a/d", count=2)
    for wish in (ALONE, APART):
        binding = bound(TWO, cpu_demand, other, wishes={"a": wish})
        assert binding.demands[1].nodes == (0,)


@pytest.mark.parametrize(("count", "expected"), [(1, False), (2, True), (4, True), (5, False)])
def test_a_number_of_nodes_means_cpus_on_each_of_them(count: int, expected: bool) -> None:
    """A number that the machine does not have belongs to no pod."""
    binding = bound(FOUR, demand("a", 4), wishes={"a": CpuPreferences(node_count=count)})
    assert binding.demands[0].every_node is expected
    assert len(binding.demands[0].nodes) == (count if count < 5 else 1)


def test_a_bound_pod_without_cpus_of_its_own_is_company_too() -> None:
    wishes = {"shared": BOUND, "a": ALONE}
    binding = bound(TWO, demand("a", 2), wishes=wishes, seated={"shared": CpuSet([0])})
    assert nodes(binding) == {"a": "1"}


def test_whole_cores_and_single_threads_are_counted_where_they_are_asked_for() -> None:
    free = "0-7,12"
    assert nodes(bound(TWO, demand("a", 2), free=free)) == {"a": "0"}
    assert nodes(bound(TWO, demand("a", 2, full_cores=True), free=free)) == {"a": "1"}
    single: dict[str, Any] = {"spread_cores": True, "strict_cores": True}
    # Four CPUs on two cores of node 0, four on four of node 1.
    assert nodes(bound(TWO, demand("a", 4, **single), free="0-1,8-9,4-7")) == {"a": "1"}
    assert nodes(bound(TWO, demand("a", 4, spread_cores=True), free="0-1,8-9,4-7")) == {"a": "0"}


def memory(*free: int, total: int = 64, **requests: int) -> NumaFreeMemory:
    return NumaFreeMemory(
        total=dict.fromkeys(range(len(free)), total * GIB),
        free={node: gib * GIB for node, gib in enumerate(free)},
        requests={f"{uid}/c": gib * GIB for uid, gib in requests.items()},
    )


MEMORY: dict[str, tuple[NumaFreeMemory | None, tuple[CpuDemand, ...], dict[str, str]]] = {
    "nothing known": (None, (demand("a", 2),), {"a": "0"}),
    "no request": (memory(1, 60), (demand("a", 2),), {"a": "0"}),
    "room enough": (memory(30, 60, a=20), (demand("a", 2),), {"a": "0"}),
    "too little on node 0": (memory(10, 60, a=20), (demand("a", 2),), {"a": "1"}),
    "too little anywhere": (memory(10, 10, a=20), (demand("a", 2),), {"a": "0"}),
    "more than one node has": (memory(60, 60, a=100), (demand("a", 2),), {"a": "0"}),
    "the first newcomer has not touched its memory yet": (
        memory(30, 30, a=20, b=20),
        (demand("a", 2), demand("b", 2)),
        {"a": "0", "b": "1"},
    ),
    "nor has one that came a moment ago": (
        memory(60, 60, a=50, b=20),
        (demand("a", 2, "0,8"), demand("b", 2)),
        {"a": "", "b": "1"},
    ),
    "half of it on each of its nodes": (
        memory(60, 60, a=40, b=40, c=40),
        (demand("a", 2, "0,4"), demand("b", 2), demand("c", 2)),
        {"a": "", "b": "0", "c": "1"},
    ),
}


@pytest.mark.parametrize(("known", "demands", "expected"), MEMORY.values(), ids=MEMORY.keys())
def test_memory(known: NumaFreeMemory | None, demands: tuple[CpuDemand, ...], expected: dict[str, str]) -> None:
    assert nodes(bound(TWO, *demands, memory=known)) == expected


def test_memory_that_the_kubelet_has_given_out_counts_instead() -> None:
    binding = bound(TWO, demand("a", 2), memory=memory(0, 60, a=20), affinity={"a/c": {"memory": CpuSet([0])}})
    assert nodes(binding) == {"a": "0"}
    assert binding.reasons["a/c"] == "cpu and memory on NUMA node 0"


def test_memory_and_cpus_that_are_not_together() -> None:
    """The CPUs are free on node 1 only, the memory on node 0: where the CPUs are decides."""
    binding = bound(TWO, demand("a", 3), free="0-1,4-7", memory=memory(60, 10, a=20))
    assert binding.demands[0].nodes == (1,)
    assert "not all on the same nodes" in binding.reasons["a/c"]
