"""A node for each claim at once: whatever fits is found on small machines, as trying everything shows."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.placement.joint import STEPS, JointClaim, JointNode, JointRest, JointSearch

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
    """Whether this assignment breaks no rule, counted anew from the definitions."""
    left, whole, open_left = 0, 0, 0
    for place, node in nodes.items():
        here = [claim for claim, where in placed if where == place]
        owners = [claim for claim in here if not claim.pool]
        if owners and (node.closed or (any(claim.alone for claim in owners) and (node.owners or len(owners) > 1))):
            return False
        pools = {claim.pool: node.pools.get(claim.pool, (0, 0)) for claim in here if claim.pool}
        more = 0
        for pool, (milli, cpus) in pools.items():
            asked = milli + sum(claim.milli for claim in here if claim.pool == pool)
            more += max(0, max(1, -(-asked // 1000)) - cpus)
        in_cores = sum(claim.milli // 1000 for claim in owners if claim.cores)
        single = more + sum(claim.milli // 1000 for claim in owners if not claim.cores)
        broken = max(0, -(-(single - (node.left - node.cores * THREADS)) // THREADS))
        after = node.left - in_cores - single
        cores = node.cores - in_cores // THREADS - broken
        if after < 0 or (in_cores and cores < 0):
            return False
        left += after
        if not (node.closed or any(claim.alone for claim in owners)):
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
