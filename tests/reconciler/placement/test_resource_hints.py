from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.cpuset import CpuSet
from reconciler.placement.hints import CPU, EXACT, ResourceHints, merge
from reconciler.placement.resource_hints import ResourceCapacity, fewest, fixed, hints_of
from state.cpu import TopologyPolicy
from state.topology import uniform
from tests.reconciler.placement.shapes import CPU_S, at_most, cpu_capacity

GIB = 2**30


def supply(name: str, request: int, free: Sequence[int], total: Sequence[int] | int) -> ResourceCapacity:
    every = [total] * len(free) if isinstance(total, int) else total
    return ResourceCapacity(name=name, request=request, free=dict(enumerate(free)), total=dict(enumerate(every)))


def shown(hints: ResourceHints) -> str | None:
    if hints.hints is None:
        return None
    return " ".join(f"{hint.nodes}{'*' * hint.preferred}" for hint in hints.hints)


@pytest.mark.parametrize(
    ("request_", "free", "expected"),
    [
        (2, (4, 4), "0* 1* 0-1"),
        (4, (1, 4), "1* 0-1"),
        (4, (2, 2), "0-1"),
        (6, (4, 4), "0-1*"),
        (9, (4, 4), ""),
        (0, (4, 4), None),
    ],
)
def test_hints_are_the_sets_with_enough_and_preferred_those_as_small_as_on_an_empty_machine(
    request_: int, free: tuple[int, int], expected: str | None
) -> None:
    (hints,) = hints_of([supply("cpu", request_, free, 4)], uniform(nodes=2, cores=4))
    assert shown(hints) == expected


def test_cpus_are_counted_by_node() -> None:
    machine = uniform(sockets=2, nodes=4, cores=8, threads=2)
    capacity = cpu_capacity(machine, CpuSet.parse("0-1,8,2"), 2)
    assert capacity.total == {0: 4, 1: 4, 2: 4, 3: 4}
    assert capacity.free == {0: 3, 1: 1, 2: 0, 3: 0}
    assert shown(hints_of([capacity], machine)[0]) == "0* 0-1 0,2 0,3 0-2 0-1,3 0,2-3 0-3"


def test_aligned_by_socket_all_sets_within_as_few_sockets_are_preferred() -> None:
    machine = uniform(sockets=2, nodes=4, cores=8, threads=2)
    capacity = cpu_capacity(machine, CpuSet.span(16) - machine.node_cpus(0), 4, align_socket=True)
    assert shown(hints_of([capacity], machine)[0]) == "1* 2* 3* 0-1* 0,2 1-2 0,3 1,3 2-3* 0-2 0-1,3 0,2-3 1-3 0-3"


def test_what_is_to_be_packed_scores_higher_the_less_is_left() -> None:
    machine = uniform(nodes=2, cores=4)
    packed = ResourceCapacity(name="cpu", request=1, total={0: 4, 1: 4}, free={0: 4, 1: 2}, pack=True)
    (hints,) = hints_of([packed], machine)
    assert [(str(hint.nodes), hint.score) for hint in hints.hints or ()] == [("0", -3), ("1", -1), ("0-1", -5)]
    assert merge([hints], TopologyPolicy.BEST_EFFORT, CpuSet.span(2)).nodes == CpuSet((1,))


def test_what_is_in_use_is_wanted_where_it_is() -> None:
    machine = uniform(nodes=4, cores=4)
    (hints,) = hints_of([fixed("vendor/gpu", CpuSet((1, 3)), range(4))], machine)
    assert shown(hints) == "1,3* 0-1,3 1-3 0-3"


def amounts(count: int, low: int = 0) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(low, 8), min_size=count, max_size=count)


@given(amounts(4, low=1), st.data())
def test_on_small_machines_the_hints_are_the_kubelets(total: list[int], data: st.DataObject) -> None:
    free = [data.draw(st.integers(0, most)) for most in total]
    request = data.draw(st.integers(1, 12))
    (hints,) = hints_of([supply("cpu", request, free, total)], uniform(nodes=4, cores=4))
    expected = []
    smallest = 4
    for mask in range(1, 16):
        nodes = CpuSet.from_mask(mask)
        if sum(total[node] for node in nodes) >= request:
            smallest = min(smallest, len(nodes))
        if sum(free[node] for node in nodes) >= request:
            expected.append(nodes)
    assert {(hint.nodes, hint.preferred) for hint in hints.hints or ()} == {
        (nodes, len(nodes) == smallest) for nodes in expected
    }


@given(amounts(12), amounts(12), st.integers(1, 8), st.integers(1, 8))
def test_on_large_machines_one_or_two_nodes_for_all_are_always_found(
    cpu: list[int], mem: list[int], want_cpu: int, want_mem: int
) -> None:
    machine = uniform(nodes=12, cores=24)
    supplies = [supply("cpu", want_cpu, cpu, 4), supply("memory", want_mem, mem, 4)]
    cpu_hints, mem_hints = hints_of(supplies, machine)
    both = {hint.nodes for hint in cpu_hints.hints or ()} & {hint.nodes for hint in mem_hints.hints or ()}
    number = min((len(nodes) for nodes in both), default=99)
    pairs = [
        len({index, other})
        for index in range(12)
        for other in range(index, 12)
        if sum(cpu[node] for node in {index, other}) >= want_cpu
        and sum(mem[node] for node in {index, other}) >= want_mem
    ]
    if pairs:
        assert number == min(pairs)
    elif sum(cpu) >= want_cpu and sum(mem) >= want_mem:
        assert 2 < number <= 12


@pytest.mark.parametrize("count", [12, 16, 32, 64])
@pytest.mark.parametrize("resources", [1, 3, 5])
def test_the_sets_and_the_time_on_large_machines_are_bounded(count: int, resources: int) -> None:
    machine = uniform(nodes=count, cores=count * 2)
    supplies = [
        supply(f"r{number}", count * 2, [(node * 7 + number * 5) % 4 for node in range(count)], 4)
        for number in range(resources)
    ]
    assert count > EXACT
    with at_most(CPU_S):
        hints = hints_of(supplies, machine)
    sets = count * (2 * resources + 3) + resources + 1
    assert all(len(resource_hints.hints or ()) <= sets for resource_hints in hints)
    assert merge(hints, TopologyPolicy.BEST_EFFORT, CpuSet.span(count)).nodes


@pytest.mark.parametrize("nodes", [2, 8, 16])
def test_a_resource_that_is_short_everywhere_says_so(nodes: int) -> None:
    machine = uniform(nodes=nodes, cores=32)
    assert hints_of([cpu_capacity(machine, CpuSet(), 1)], machine) == (ResourceHints(name=CPU, hints=()),)


asked = st.tuples(st.integers(0, 20), amounts(6), amounts(6), st.booleans())


@given(
    st.lists(asked, min_size=1, max_size=3), st.sampled_from([TopologyPolicy.BEST_EFFORT, TopologyPolicy.RESTRICTED])
)
def test_the_fewest_hints_merge_as_all_do(
    drawn: list[tuple[int, list[int], list[int], bool]], policy: TopologyPolicy
) -> None:
    supplies = [
        ResourceCapacity(
            name=f"r{place}",
            request=request_,
            free=dict(enumerate(free)),
            total=dict(enumerate(max(pair) for pair in zip(free, total, strict=True))),
            pack=pack,
        )
        for place, (request_, free, total, pack) in enumerate(drawn)
    ]
    few = fewest(supplies)
    if few is None:
        return
    machine = uniform(sockets=2, nodes=6, cores=6)
    every = CpuSet.span(6)
    hint = merge(few, policy, every, closest=machine)
    assert hint == merge(hints_of(supplies, machine), policy, every, closest=machine)
    assert hint.preferred


@pytest.mark.parametrize(
    ("supplies", "found"),
    [
        ([supply("cpu", 2, (4, 4), 4), supply("memory", 3, (4, 4), 4)], "0* 1*"),
        ([supply("cpu", 2, (4, 1), 4), supply("memory", 3, (4, 4), 4)], "0*"),
        ([supply("cpu", 6, (4, 4), 4), supply("memory", 6, (4, 4), 4)], "0-1*"),
        ([supply("cpu", 2, (4, 1), 4), supply("memory", 3, (1, 4), 4)], None),
        ([supply("cpu", 2, (4, 4), 4), supply("memory", 6, (4, 4), 4)], None),
        ([supply("cpu", 0, (4, 4), 4)], None),
        ([supply("cpu", 12, [4] * 12, 8)], None),
        ([supply("cpu", 8, [*[4] * 11, 8], 8)], "11*"),
    ],
    ids=["both", "cpu decides", "two nodes", "nowhere", "unlike needs", "no request", "wide on many", "one of many"],
)
def test_the_fewest_hints_are_those_that_all_prefer(supplies: list[ResourceCapacity], found: str | None) -> None:
    few = fewest(supplies)
    assert (None if few is None else shown(few[0])) == found
