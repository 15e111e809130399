import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.cpuset import CpuSet
from reconciler.placement.nodes import NodeChoice, choose_nodes
from reconciler.placement.resource_hints import ResourceCapacity, fixed
from state.cpu import CpuPreferences, TopologyPolicy
from state.topology import Cpu, NumaNode, Topology, uniform
from tests.reconciler.placement.shapes import CPU_S, at_most, cpu_capacity

NONE, BEST, RESTRICTED, SINGLE, NUMERIC = TopologyPolicy
MACHINE = uniform(sockets=2, nodes=4, cores=16, threads=2)
"""Four nodes of 8 CPUs."""


def free(*counts: int) -> CpuSet:
    """So many free CPUs in each node of `MACHINE`."""
    return CpuSet(cpu for node, count in enumerate(counts) for cpu in MACHINE.node_cpus(node).lowest(count))


def gpu(nodes: str) -> ResourceCapacity:
    return fixed("vendor/gpu", CpuSet.parse(nodes), MACHINE.nodes())


def mem(request: int, *amounts: int) -> ResourceCapacity:
    there = dict(enumerate(amounts))
    return ResourceCapacity(name="memory", request=request, free=there, total=dict.fromkeys(there, 64))


def choose(
    count: int, counts: tuple[int, ...], *others: ResourceCapacity, policy: TopologyPolicy = BEST, **more: object
) -> NodeChoice:
    return choose_nodes(cpu_capacity(MACHINE, free(*counts), count), others, MACHINE, policy=policy, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "counts", "others", "policy", "nodes", "admitted"),
    [
        (4, (8, 8, 8, 8), (), NONE, (), True),
        (4, (2, 8, 8, 8), (), SINGLE, (1,), True),
        (4, (8, 8, 8, 8), (gpu("2"),), RESTRICTED, (2,), True),
        (4, (8, 8, 2, 8), (gpu("2"),), RESTRICTED, (0,), False),
        # kubernetes issue 106270: the device is on node 0, whose CPUs are gone.
        (4, (1, 8, 8, 8), (gpu("0"),), BEST, (1,), True),
        (12, (8, 8, 8, 8), (gpu("2-3"),), RESTRICTED, (2, 3), True),
        (12, (8, 8, 8, 8), (), SINGLE, (0, 1), False),
        (12, (8, 8, 8, 8), (), RESTRICTED, (0, 1), True),
        (4, (8, 8, 8, 8), (mem(10, 4, 4, 4, 64),), BEST, (3,), True),
        (40, (8, 8, 8, 8), (), BEST, (), False),
    ],
)
def test_nodes_by_policy(
    count: int,
    counts: tuple[int, ...],
    others: tuple[ResourceCapacity, ...],
    policy: TopologyPolicy,
    nodes: tuple[int, ...],
    admitted: bool,
) -> None:
    choice = choose(count, counts, *others, policy=policy)
    assert (choice.nodes, choice.admitted) == (nodes, admitted)
    assert choice.reason


@pytest.mark.parametrize(
    ("wish", "nodes", "reason"),
    [
        (CpuPreferences(nodes=(3,)), (3,), "named by the pod's annotations"),
        (
            CpuPreferences(nodes=(0,)),
            (),
            "NUMA nodes 0 of the pod's annotations have 2 of 4 CPUs; policy none: any NUMA node",
        ),
        (
            CpuPreferences(nodes=(9,)),
            (),
            "the pod's annotations name NUMA nodes 9, some of which do not exist; policy none",
        ),
        (CpuPreferences(numa_binding=True), (1,), "cpu on NUMA node 1"),
        (CpuPreferences(node_count=2), (0, 1), "cpu on NUMA nodes 0-1"),
        (CpuPreferences(node_count=9), (1,), "no 9 NUMA nodes have enough CPUs together; cpu on NUMA node 1"),
        (CpuPreferences(topology_policy=SINGLE), (1,), "cpu on NUMA node 1"),
    ],
)
def test_the_pods_wishes_come_before_the_nodes_policy(
    wish: CpuPreferences, nodes: tuple[int, ...], reason: str
) -> None:
    choice = choose(4, (2, 8, 8, 8), policy=NONE, wish=wish)
    assert choice.nodes == nodes
    assert choice.reason.startswith(reason)


@pytest.mark.parametrize(("count", "nodes"), [(12, (1, 2)), (26, (0, 1, 2, 3))], ids=["some nodes", "the only hint"])
def test_resources_without_a_common_node_leave_the_cpus_their_own_best(count: int, nodes: tuple[int, ...]) -> None:
    far = NumaNode(id=4, distances=(20, 20, 20, 20, 10), memory_bytes=2**40)
    near = tuple(NumaNode(id=node, distances=(20, 20, 20, 20, 20)) for node in range(4))
    machine = Topology(online=MACHINE.online, cpus=MACHINE.cpus, numa=(*near, far))
    only_far = ResourceCapacity(name="memory", request=1, free={4: 64}, total={4: 64})
    choice = choose_nodes(cpu_capacity(machine, free(2, 8, 8, 8), count), [only_far], machine, policy=BEST)
    assert choice.nodes == nodes
    assert choice.reason.endswith(f"no common node: the best for the CPUs is {nodes[0]}-{nodes[-1]}")


def test_the_fewest_nodes_where_all_fit_come_before_what_different_sets_have_in_common() -> None:
    choice = choose(12, (8, 8, 2, 8), mem(10, 4, 4, 32, 4))
    assert choice.nodes == (0, 1, 2)
    assert choice.reason.endswith("; all fit on 0-2")


def test_missing_cpus_come_from_the_nearest_node() -> None:
    table = [[10, 40, 20, 30], [40, 10, 40, 20], [20, 40, 10, 30], [30, 20, 30, 10]]
    machine = Topology(
        online=MACHINE.online,
        cpus=MACHINE.cpus,
        numa=tuple(NumaNode(id=node, distances=tuple(row)) for node, row in enumerate(table)),
    )
    choice = choose_nodes(cpu_capacity(machine, free(0, 1, 1, 1), 2), [gpu("0")], machine, policy=NUMERIC)
    assert choice.nodes == (0, 2, 3)
    assert choice.reason.endswith("too few CPUs there: extended by node 3")


@given(
    st.lists(st.integers(0, 8), min_size=4, max_size=4),
    st.integers(1, 24),
    st.sampled_from(list(TopologyPolicy)),
    st.lists(st.sampled_from([gpu("0"), gpu("1,3"), mem(10, 64, 8, 0, 16), mem(90, 64, 64, 8, 8)]), max_size=1),
)
def test_chosen_nodes_always_have_the_cpus(
    counts: list[int], count: int, policy: TopologyPolicy, others: list[ResourceCapacity]
) -> None:
    choice = choose(count, tuple(counts), *others, policy=policy)
    assert choice == choose(count, tuple(counts), *others, policy=policy)
    if choice.nodes:
        assert sum(counts[node] for node in choice.nodes) >= count
    else:
        assert policy is NONE or sum(counts) < count
    if policy is SINGLE and choice.admitted:
        assert len(choice.nodes) == 1


@pytest.mark.parametrize("count", [16, 32, 64])
def test_a_whole_choice_on_many_nodes_takes_a_bounded_time(count: int) -> None:
    machine = Topology(
        online=CpuSet.span(count * 4),
        cpus=tuple(Cpu(id=cpu, core=cpu, node=cpu // 4) for cpu in range(count * 4)),
    )
    there = {node: (node * 5) % 7 for node in range(count)}
    memory = ResourceCapacity(name="memory", request=12, free=there, total=dict.fromkeys(there, 7))
    free_now = CpuSet(cpu for cpu in machine.online if (cpu * 3) % 5)
    for policy in (BEST, RESTRICTED, SINGLE, NUMERIC):
        with at_most(CPU_S):
            choice = choose_nodes(cpu_capacity(machine, free_now, 10), [memory], machine, policy=policy)
        assert len(choice.nodes) in (3, 4)
