from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.placement.pack import attainable, cells, pack
from state.topology import Topology, uniform
from tests.reconciler.nodes import cpus
from tests.reconciler.placement.packcost import PackCost, cost

# First threads 0-3, second ones 4-7: cores {0,4} {1,5} {2,6} {3,7}; node 0 has the first two of them.
SMALL = uniform(sockets=2, nodes=2, cores=4, threads=2)
FLAT = uniform(nodes=2, cores=8, threads=1)
# Node 0: 0-7,32-39; node 1: 8-15,40-47; node 2: 16-23,48-55; node 3: 24-31,56-63.
BIG = uniform(sockets=2, nodes=4, cores=32, threads=2)


def named(**sets: str) -> dict[str, CpuSet]:
    return {name: cpus(text) for name, text in sets.items()}


def test_from_nothing_pools_get_whole_cores_and_one_node_each() -> None:
    packed = pack({"a": 10, "b": 16, "c": 7, "d": 2}, {}, BIG.online, BIG)
    assert cost(packed, {}, BIG.online, BIG) == PackCost(moved=35, split=1, nodes=4, caches=4)


def test_a_pool_that_fits_no_node_fills_as_few_as_it_can() -> None:
    packed = pack({"a": 40, "b": 8}, {}, BIG.online, BIG)
    assert cost(packed, {}, BIG.online, BIG) == PackCost(moved=48, split=0, nodes=4, caches=4)


def test_what_is_held_and_wanted_again_is_the_answer() -> None:
    held = named(b="0,3,5", a="1,6")
    assert pack({"a": 2, "b": 3}, held, SMALL.online, SMALL) == held


@pytest.mark.parametrize(
    ("sizes", "held", "expected"),
    [
        pytest.param({"a": 2}, named(a="1"), named(a="1,5"), id="growing completes its core"),
        pytest.param({"a": 4}, named(a="2,6"), named(a="2-3,6-7"), id="growing stays in its node"),
        pytest.param({"a": 2}, named(a="1,3,7"), named(a="3,7"), id="shrinking gives back the lone thread"),
        pytest.param({"a": 2}, named(a="0-1,3-5,7"), named(a="0,4"), id="shrinking leaves the smaller node first"),
        pytest.param({"a": 3}, named(a="2-3,6-7"), named(a="2-3,6"), id="an odd size breaks one core"),
        pytest.param(
            {"a": 3, "b": 3}, named(a="0-1,4", b="2"), named(a="0-1,4", b="2-3,6"), id="others stay where they are"
        ),
        pytest.param(
            {"a": 1, "b": 2},
            named(a="0-1", b="5"),
            named(a="0", b="1,5"),
            id="a core goes to the pool that grows there",
        ),
        pytest.param({"b": 3}, named(a="0-3", b="4,7"), named(b="0,4,7"), id="a pool that is gone is free for others"),
        pytest.param({"a": 0, "b": 1}, named(a="0"), {"a": EMPTY, "b": cpus("0")}, id="a size of nothing gets nothing"),
    ],
)
def test_small_steps(sizes: Mapping[str, int], held: Mapping[str, CpuSet], expected: Mapping[str, CpuSet]) -> None:
    assert pack(sizes, held, SMALL.online, SMALL) == expected


def test_cpus_that_are_not_free_any_more_are_replaced_and_nothing_else_moves() -> None:
    packed = pack({"a": 3, "b": 2}, named(a="0-2", b="4-5"), cpus("1-7"), FLAT)
    assert packed == named(a="1-3", b="4-5")


def test_an_unbound_pool_gives_way_to_a_bound_one() -> None:
    held = named(a="0-3", z="4-5")
    packed = pack({"a": 4, "z": 2, "n": 2}, held, FLAT.online, FLAT, {"n": FLAT.node_cpus(0)})
    assert packed["n"] <= FLAT.node_cpus(0)
    assert len(packed["a"] & held["a"]) == 2
    assert packed["z"] == held["z"]


def test_a_chain_of_pools_gives_way_where_only_the_last_has_room() -> None:
    # x may only be in 0-1, y in 0-3, z in 2-5: x takes y's, y takes z's, z takes the last free ones.
    within = named(x="0-1", y="0-3", z="2-5")
    packed = pack({"x": 2, "y": 2, "z": 2}, named(y="0-1", z="2-3"), cpus("0-5"), FLAT, within)
    assert packed == named(x="0-1", y="2-3", z="4-5")


def test_an_unbound_pool_keeps_away_from_nodes_that_others_are_bound_to() -> None:
    within = {"n": BIG.node_cpus(0)}
    packed = pack({"n": 4, "a": 4}, {}, BIG.online, BIG, within)
    assert not packed["a"] & BIG.node_cpus(0)


def test_too_little_is_shared_and_nobody_is_left_with_nothing() -> None:
    packed = pack({"a": 6, "b": 6, "n": 4}, {}, FLAT.online, FLAT, {"n": FLAT.node_cpus(0)})
    assert {name: len(cpu_set) for name, cpu_set in packed.items()} == {"a": 2, "b": 2, "n": 4}
    packed = pack({"a": 6, "n": 8, "m": 8}, {}, FLAT.online, FLAT, dict.fromkeys("nm", FLAT.node_cpus(0)))
    assert {name: len(cpu_set) for name, cpu_set in packed.items()} == {"a": 4, "n": 2, "m": 2}


def test_offline_and_unknown_cpus_are_never_given() -> None:
    assert pack({"a": 9}, named(a="0-20"), cpus("0-3,30-40"), SMALL) == named(a="0-3")
    assert pack({"a": 1}, {}, EMPTY, SMALL) == {"a": EMPTY}


def test_a_core_with_one_free_thread_serves_the_odd_cpu() -> None:
    free = cpus("0-3,5-7")
    packed = pack({"a": 3}, {}, free, SMALL)
    assert packed == named(a="0-1,5")
    assert cost(packed, {}, free, SMALL).split == 0


def test_when_many_pools_want_one_node_each_of_the_bound_ones_is_served() -> None:
    """256 CPUs, all of them held by unbound pools; bound ones take three of eight nodes from them."""
    topology = uniform(sockets=2, nodes=8, cores=128, threads=2)
    before = {f"u{index}": 25 for index in range(10)}
    held = pack(before, {}, topology.online, topology)
    within = {f"b{index}": topology.node_cpus(index // 2) for index in range(6)}
    sizes = {**dict.fromkeys(before, 15), **dict.fromkeys(within, 16)}
    packed = pack(sizes, held, topology.online, topology, within)
    assert {name: len(cpu_set) for name, cpu_set in packed.items()} == sizes
    assert all(packed[name] <= within[name] for name in within)


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    threads = draw(st.sampled_from([1, 2]))
    nodes = draw(st.sampled_from([1, 2]))
    return uniform(nodes=nodes, cores=8 // threads, threads=threads)


masks = st.integers(0, 255).map(CpuSet.from_mask)
NAMES = ("a", "b", "c")


@st.composite
def cases(draw: st.DrawFn) -> tuple[Topology, CpuSet, dict[str, int], dict[str, CpuSet], dict[str, CpuSet]]:
    """A machine of eight CPUs, what is free, sizes, what is held (disjoint), and what pools are bound to."""
    topology = draw(machines())
    free = draw(masks | st.just(topology.online))
    owners = draw(st.lists(st.sampled_from((*NAMES, "gone", None)), min_size=8, max_size=8))
    held = {name: CpuSet(cpu for cpu, owner in enumerate(owners) if owner == name) for name in (*NAMES, "gone")}
    sizes = draw(st.dictionaries(st.sampled_from(NAMES), st.integers(0, 5)))
    anywhere = masks | st.sampled_from([topology.node_cpus(node) for node in topology.nodes()])
    within = draw(st.dictionaries(st.sampled_from(NAMES), anywhere))
    return topology, free, sizes, held, within


def best(
    free: CpuSet, sizes: Mapping[str, int], held: Mapping[str, CpuSet], within: Mapping[str, CpuSet]
) -> dict[tuple[int, ...], int]:
    """The most CPUs that can be kept, by numbers that the pools can have: every assignment, CPU by CPU."""
    names = sorted(sizes)
    numbers = {(0,) * len(names): 0}
    for cpu in free:
        for counts, kept in list(numbers.items()):
            for index, name in enumerate(names):
                if counts[index] < sizes[name] and (name not in within or cpu in within[name]):
                    more = (*counts[:index], counts[index] + 1, *counts[index + 1 :])
                    numbers[more] = max(numbers.get(more, 0), kept + (cpu in held.get(name, EMPTY)))
    return numbers


@given(cases())
def test_the_sum_is_the_largest_and_the_movement_the_least_that_there_can_be(
    case: tuple[Topology, CpuSet, dict[str, int], dict[str, CpuSet], dict[str, CpuSet]],
) -> None:
    topology, free, sizes, held, within = case
    packed = pack(sizes, held, free, topology, within)
    assert list(packed) == sorted(sizes)
    union = EMPTY
    for name, cpu_set in packed.items():
        assert cpu_set <= (within.get(name, free) & free)
        assert len(cpu_set) <= sizes[name]
        assert not cpu_set & union
        union |= cpu_set
    possible = best(free, sizes, held, within)
    assert len(union) == max(sum(counts) for counts in possible)
    counts = tuple(len(item) for item in packed.values())
    kept = sum(len(result & held.get(name, EMPTY)) for name, result in packed.items())
    assert kept == possible[counts]


@given(cases())
def test_one_more_step_with_the_same_sizes_moves_nothing(
    case: tuple[Topology, CpuSet, dict[str, int], dict[str, CpuSet], dict[str, CpuSet]],
) -> None:
    topology, free, sizes, held, within = case
    packed = pack(sizes, held, free, topology, within)
    assert pack(sizes, packed, free, topology, within) == packed
    assert pack(dict(reversed(list(sizes.items()))), held, free, topology, within) == packed


@given(cases())
def test_no_pool_has_nothing_while_another_could_spare_one(
    case: tuple[Topology, CpuSet, dict[str, int], dict[str, CpuSet], dict[str, CpuSet]],
) -> None:
    topology, free, sizes, held, within = case
    counts = tuple(len(cpu_set) for cpu_set in pack(sizes, held, free, topology, within).values())
    possible = best(free, sizes, held, within)
    names = sorted(sizes)
    for index, name in enumerate(names):
        if sizes[name] and not counts[index]:
            assert all(
                not other[index] or any(mine > 0 and not its for mine, its in zip(counts, other, strict=True))
                for other in possible
            )


@given(st.dictionaries(st.sampled_from(NAMES), st.integers(0, 12), min_size=1), st.integers(1, 16))
def test_a_cut_without_bounds_is_even_in_parts_of_the_size(sizes: dict[str, int], count: int) -> None:
    numbers = attainable(sizes, cells((1 << count) - 1, dict.fromkeys(sizes, (1 << count) - 1)))
    assert sum(numbers.values()) == min(count, sum(sizes.values()))
    for name, size in sizes.items():
        for other, its in sizes.items():
            # No pool that waits for the next CPU has a smaller part than another had before its last.
            if numbers[name] < size and numbers[other] > 1:
                assert numbers[name] / size >= (numbers[other] - 1) / its
