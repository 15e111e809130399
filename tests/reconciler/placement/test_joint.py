"""A node for each claim at once: whatever fits is found on small machines, as trying everything shows."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from reconciler.control.planner import plan_pools
from reconciler.placement.joint import STEPS, JointClaim, JointNode, JointRest, JointSearch
from reconciler.policies.table import PoliciesConfig
from state.cpu import CpuPreferences
from state.model import NodeView, NumaMemory, Pod, PodClass, Pools, Resources
from state.topology import NumaNode, uniform
from tests.reconciler.nodes import container, node, pod

THREADS = 2
NODES = st.lists(
    st.builds(
        lambda cores, lone, owners, closed, pool: JointNode(
            cores * THREADS + lone, cores, {"x": (700, 1)} if pool else {}, owners or closed, closed
        ),
        st.integers(0, 3),
        st.integers(0, 2),
        st.booleans(),
        st.sampled_from([False, False, False, True]),
        st.booleans(),
    ),
    min_size=1,
    max_size=3,
).map(lambda nodes: dict(enumerate(nodes)))


@st.composite
def claims(draw: st.DrawFn, nodes: int) -> list[JointClaim]:
    made = []
    for number in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["near", "near", "alone", "cores", "bound", "bound"]))
        units = draw(st.integers(1, 4))
        where = tuple(draw(st.sets(st.integers(0, nodes - 1), min_size=1)))
        if kind == "bound":
            milli = draw(st.sampled_from([200, 1000, 1300, 2000]))
            made.append(JointClaim(f"c{number}", milli, where, draw(st.sampled_from("xy"))))
        else:
            milli = 1000 * (units * THREADS if kind == "cores" else units)
            made.append(JointClaim(f"c{number}", milli, where, alone=kind == "alone", cores=kind == "cores"))
    return made


def fits(nodes: dict[int, JointNode], placed: list[tuple[JointClaim, int]], rest: JointRest) -> bool:
    """Whether this assignment breaks no rule, counted from the definitions."""
    left, whole, open_left = 0, 0, 0
    for place, room in nodes.items():
        here = [claim for claim, where in placed if where == place]
        owners = [claim for claim in here if not claim.pool]
        if owners and (room.closed or (any(claim.alone for claim in owners) and (room.owners or len(owners) > 1))):
            return False
        pools = {claim.pool: room.pools.get(claim.pool, (0, 0)) for claim in here if claim.pool}
        more = 0
        for pool, (milli, cpus) in pools.items():
            asked = milli + sum(claim.milli for claim in here if claim.pool == pool)
            more += max(0, max(1, -(-asked // 1000)) - cpus)
        in_cores = sum(claim.milli // 1000 for claim in owners if claim.cores)
        single = more + sum(claim.milli // 1000 for claim in owners if not claim.cores)
        broken = max(0, -(-(single - (room.left - room.cores * THREADS)) // THREADS))
        after = room.left - in_cores - single
        cores = room.cores - in_cores // THREADS - broken
        if after < 0 or (in_cores and cores < 0):
            return False
        left += after
        if not (room.closed or any(claim.alone for claim in owners)):
            open_left += after
            whole += max(0, cores)
    return open_left >= rest.owned and whole * THREADS >= rest.cores and left >= rest.owned + rest.loose


@given(st.data(), NODES, st.integers(0, 6), st.integers(0, 2), st.integers(0, 3))
def test_it_finds_a_fit_where_there_is_one(
    data: st.DataObject, nodes: dict[int, JointNode], owned: int, cores: int, loose: int
) -> None:
    wanted = data.draw(claims(len(nodes)))
    rest = JointRest(owned + cores * THREADS, cores * THREADS, loose, THREADS)
    found = JointSearch(nodes, wanted, rest).found()
    if found is not None:
        assert found.keys() == {claim.key for claim in wanted}
        assert fits(nodes, [(claim, found[claim.key]) for claim in wanted], rest)
        return
    for places in product(*(claim.nodes for claim in wanted)):
        assert not fits(nodes, list(zip(wanted, places, strict=True)), rest)


@given(st.data(), NODES)
def test_the_order_of_the_claims_does_not_matter(data: st.DataObject, nodes: dict[int, JointNode]) -> None:
    wanted = data.draw(claims(len(nodes)))
    other = data.draw(st.permutations(wanted))
    rest = JointRest(1, 0, 1, THREADS)
    assert JointSearch(nodes, wanted, rest).found() == JointSearch(nodes, other, rest).found()


@pytest.mark.parametrize("nodes", [8, 16])
def test_the_work_has_a_bound(nodes: int) -> None:
    """Nodes that all differ, each with room for one claim, and one claim too many."""
    rooms = {place: JointNode(40 + place % 8, 20) for place in range(nodes)}
    wanted = [JointClaim(f"c{number}", 1000 * (24 + number % 3), tuple(rooms)) for number in range(nodes + 1)]
    search = JointSearch(rooms, wanted, JointRest(0, 0, 0, THREADS))
    assert search.found() is None
    assert search.steps == STEPS


def test_like_nodes_are_tried_once() -> None:
    rooms = {place: JointNode(4, 2) for place in range(8)}
    wanted = [JointClaim(f"c{number}", 3000, tuple(rooms)) for number in range(9)]
    search = JointSearch(rooms, wanted, JointRest(0, 0, 0, THREADS))
    assert search.found() is None
    assert search.steps == 8


def test_a_bound_pod_uses_the_rest_of_an_exclusive_node() -> None:
    """Only so the last container finds its CPUs."""
    rooms = {0: JointNode(2, 1), 1: JointNode(4, 2), 2: JointNode(4, 2)}
    wanted = [
        JointClaim("alone", 1000, (0, 1, 2), alone=True),
        JointClaim("pod", 1000, (0, 1, 2), "shared/share"),
        JointClaim("cores", 4000, (0, 1, 2), cores=True),
    ]
    found = JointSearch(rooms, wanted, JointRest(2, 0, 1, THREADS)).found()
    assert found is not None
    assert found["alone"] == found["pod"] == 0


# Through the whole plan: three nodes, of the first one only two CPUs are usable

GIB = 2**30
CONFIG = PoliciesConfig()
SMALL = replace(
    uniform(sockets=1, nodes=3, cores=6, threads=2),
    isolated=CpuSet([0, 6]),
    numa=tuple(NumaNode(id=number, memory_bytes=64 * GIB) for number in range(3)),
)


def asking(uid: str, milli: int, cls: PodClass, **wish: object) -> Pod:
    made = pod(uid, container("main", requests=Resources(cpu_milli=milli, memory_bytes=8 * GIB)), cls=cls)
    return replace(made, wish=CpuPreferences(**wish))  # type: ignore[arg-type]


def full(*, share: bool | None = None, memory: tuple[int, int, int] = (60, 60, 60)) -> NodeView:
    """As many claims as CPUs; ``memory``: free GiB of each node."""
    return node(
        asking("alone", 1000, PodClass.DEDICATED, numa_binding=True, numa_exclusive=True),
        asking("cores", 4000, PodClass.DEDICATED, full_cores=True),
        asking("any", 2000, PodClass.DEDICATED),
        asking("bound", 1000, PodClass.SHARED, numa_binding=True, numa_share=share),
        asking("named", 185, PodClass.SHARED, numa_binding=True, pool="x"),
        asking("default", 1000, PodClass.SHARED),
        topology=SMALL,
        numa_memory=NumaMemory(free={number: free * GIB for number, free in enumerate(memory)}, age_s=1.0),
    )


EMPTY_NODE = plan_pools(node(topology=SMALL), None, CONFIG)


@pytest.mark.parametrize("previous", [None, EMPTY_NODE], ids=["first plan", "later"])
def test_all_claims_of_a_full_machine_get_their_cpus(previous: Pools | None) -> None:
    view = full()
    pools = plan_pools(view, previous, CONFIG)
    assert {key: len(cpus) for key, cpus in pools.dedicated.items()} == {
        "alone/main": 1,
        "any/main": 2,
        "cores/main": 4,
    }
    assert pools.dedicated["alone/main"] <= SMALL.node_cpus(0)
    assert sorted(map(len, pools.named.values())) == [1, 1]
    assert len(pools.shared) == 1
    again = plan_pools(view, pools, CONFIG)
    assert (again.dedicated, again.named, again.bound) == (pools.dedicated, pools.named, pools.bound)


def test_a_container_is_on_the_node_that_was_decided_for_it() -> None:
    """A container with a node of its own leaves it that one, and the bound pod another."""
    machine = replace(uniform(sockets=1, nodes=3, cores=15, threads=1), isolated=CpuSet([0, 5]))
    view = node(
        asking("decided", 4000, PodClass.DEDICATED, numa_binding=True, nodes=(1,)),
        asking("alone", 1000, PodClass.DEDICATED, numa_binding=True, numa_exclusive=True),
        asking("any", 1000, PodClass.DEDICATED),
        asking("bound", 3251, PodClass.SHARED, numa_binding=True, pool="x"),
        asking("default", 3000, PodClass.SHARED),
        topology=machine,
    )
    pools = plan_pools(view, None, CONFIG)
    assert pools.dedicated["decided/main"] == CpuSet.parse("6-9")
    assert {key: len(cpus) for key, cpus in pools.dedicated.items()} == {
        "alone/main": 1,
        "any/main": 1,
        "decided/main": 4,
    }
    assert [len(cpus) for cpus in pools.named.values()] == [4]
    assert len(pools.shared) == 3


def test_the_search_leaves_a_container_with_its_memory() -> None:
    """Its memory is on a node with which not all fit: it gets that node."""
    pools = plan_pools(full(memory=(1, 60, 60)), EMPTY_NODE, CONFIG)
    assert not pools.dedicated["alone/main"] & SMALL.node_cpus(0)


def test_the_search_puts_no_pod_beside_one_that_shares_with_none() -> None:
    pools = plan_pools(full(share=False), None, CONFIG)
    assert pools.bound["bound"].rpartition("-")[2] != pools.bound["named"].rpartition("-")[2]
    assert not pools.dedicated["alone/main"] & SMALL.node_cpus(int(pools.bound["bound"][-1]))
