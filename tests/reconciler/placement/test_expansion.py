"""expansion: sizes with the CPUs that no pool requests: every CPU has a pool, few change theirs, at rest."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.placement.expansion import NodeRoom, expand
from reconciler.policies.shared import SharedConfig
from reconciler.policies.table import PoliciesConfig
from tests.bench.movement import MACHINES, planned_moves

REST = "shared"


def test_pools_that_are_new_get_parts_in_proportion_to_their_weights() -> None:
    sizes = expand({REST: 1, "a": 4, "b": 2}, {REST: 2, "a": 4, "b": 2}, {}, 32, rest=REST)
    assert sizes == {REST: 8, "a": 16, "b": 8}


def test_a_pool_that_grows_within_its_part_takes_nothing() -> None:
    held = {REST: 8, "a": 16, "b": 8}
    weights = {REST: 8, "a": 15, "b": 8}
    assert expand({REST: 1, "a": 15, "b": 2}, weights, held, 32, rest=REST) == held


def test_a_pool_that_requests_more_takes_from_the_default_pool_while_that_has_more_than_its_part() -> None:
    held = {REST: 14, "a": 9, "b": 9}
    weights = {REST: 4, "a": 6, "b": 4}
    assert expand({REST: 1, "a": 12, "b": 4}, weights, held, 32, rest=REST) == {REST: 11, "a": 12, "b": 9}


def test_cpus_in_use_are_kept_from_a_pool_that_only_lacks_its_part() -> None:
    held, weights = {REST: 32, "a": 0}, {REST: 8, "a": 8}
    assert expand({REST: 1, "a": 8}, weights, held, 32, rest=REST, used={REST: 24}) == {REST: 24, "a": 8}
    assert expand({REST: 1, "a": 8}, weights, held, 32, rest=REST, used={REST: 23}) == {REST: 23, "a": 9}
    assert expand({REST: 1, "a": 8}, weights, held, 32, rest=REST) == {REST: 22, "a": 10}


def test_requests_that_do_not_fit_are_the_sizes() -> None:
    requested = {REST: 4, "a": 29}
    assert expand(requested, requested, {}, 32, rest=REST) == requested


numbers = st.integers(1, 9)


@given(
    st.lists(st.tuples(numbers, numbers, st.integers(0, 20), st.integers(0, 3)), min_size=1, max_size=8),
    st.integers(0, 60),
    st.lists(st.integers(0, 12), min_size=3, max_size=3),
    st.dictionaries(st.integers(0, 7), st.integers(0, 20)),
)
def test_all_cpus_are_divided_and_no_request_or_room_is_broken_and_the_answer_is_at_rest(
    pools: list[tuple[int, int, int, int]], more: int, room: list[int], use: dict[int, int]
) -> None:
    """Each pool: request, weight, CPUs held, and the number of its node (0: bound to none)."""
    names = [REST, *map(str, range(1, len(pools)))]
    requested = {name: item[0] for name, item in zip(names, pools, strict=True)}
    weights = {name: item[1] for name, item in zip(names, pools, strict=True)}
    held = {name: item[2] for name, item in zip(names, pools, strict=True)}
    used = {names[at]: value for at, value in use.items() if at < len(names)}
    rooms = []
    for number in (1, 2, 3):
        here = [name for name, item in zip(names, pools, strict=True) if item[3] == number and name != REST]
        if here:
            rooms.append(NodeRoom(here, sum(requested[name] for name in here) + room[number - 1]))
    available = sum(requested.values()) + more
    sizes = expand(requested, weights, held, available, rest=REST, rooms=rooms, used=used)
    assert sizes.keys() == requested.keys()
    assert sum(sizes.values()) == available
    assert all(sizes[name] >= size for name, size in requested.items())
    assert all(sum(sizes[name] for name in item.pools) <= item.cpus for item in rooms)
    assert expand(requested, weights, sizes, available, rest=REST, rooms=rooms, used=used) == sizes


@pytest.mark.parametrize(("machine", "lives"), [("16 CPUs, 1 node", 10), ("64 CPUs, 2 nodes", 5)])
def test_no_more_cpus_change_pools_than_where_the_default_pool_has_them_all(machine: str, lives: int) -> None:
    topology = MACHINES[machine]
    means = []
    for expansion in (False, True):
        steps, all_used = planned_moves(topology, lives, PoliciesConfig(shared=SharedConfig(expand=expansion)))
        means.append(statistics.fmean(steps))
        assert all_used
    assert means[1] <= means[0]
