"""Merging of hints: equal to trying everything on small machines, within its bounds on large ones."""

import functools
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.cpuset import CpuSet
from reconciler.placement.hints import (
    MergedHint,
    NodeMaskOptions,
    NodeMaskRanker,
    ResourceHints,
    TopologyHint,
    merge,
    reachable,
)
from state.cpu import TopologyPolicy
from state.topology import Cpu, NumaNode, Topology
from tests.reconciler.placement.shapes import CPU_S, at_most

NONE, BEST, RESTRICTED, SINGLE, NUMERIC = TopologyPolicy
FOUR = CpuSet.span(4)


def hints(name: str, text: str | None) -> ResourceHints:
    """``"0* 0-1 2-3*"``: one hint a word, preferred with a star. None: does not care; "": cannot be had."""
    if text is None:
        return ResourceHints(name=name)
    parts = text.split()
    topology_hints = tuple(
        TopologyHint(nodes=CpuSet.parse(word.rstrip("*")), preferred=word.endswith("*")) for word in parts
    )
    return ResourceHints(name=name, hints=topology_hints)


def brief(merged: MergedHint) -> str:
    return f"{merged.nodes}{'*' * merged.preferred}{'' if merged.admitted else ' refused'}"


@pytest.mark.parametrize(
    ("memory", "device", "policy", "expected"),
    [
        ("0* 1* 0-1", "1* 0-1", BEST, "1*"),
        ("0* 1* 0-1", None, BEST, "0*"),
        (None, None, BEST, "0-3*"),
        (None, None, SINGLE, "0-3*"),
        ("1* 0-1", "0* 0-1", BEST, "0"),
        ("1* 0-1", "0* 0-1", RESTRICTED, "0 refused"),
        ("1* 0-1", "0* 0-1", SINGLE, "0 refused"),
        ("1* 0-1", "0* 0-1", NONE, "0-3"),
        ("0-1* 2-3*", "2-3* 0-3", RESTRICTED, "2-3*"),
        ("0-1* 2-3*", "2-3* 0-3", SINGLE, "2-3 refused"),
        ("1*", "0*", BEST, "0-3"),
        ("1* 0-1", "", BEST, "1"),
        ("0-2* 0-3", "3 0-3", BEST, "0-2"),
        ("0-2*", "1-3*", BEST, "1-2"),
    ],
)
def test_two_resources_under_each_policy(
    memory: str | None, device: str | None, policy: TopologyPolicy, expected: str
) -> None:
    merged = merge([hints("memory", memory), hints("gpu", device)], policy, FOUR)
    assert brief(merged) == expected


@pytest.mark.parametrize(
    ("cpu", "device", "policy", "expected"),
    [
        # The case of the issue: the CPUs prefer node 1, the device is on node 0.
        ("1* 0-1", "0* 0-1", BEST, "1"),
        ("1* 0-1", "0* 0-1", RESTRICTED, "1 refused"),
        # A preferred merge stays what it is.
        ("0* 1* 0-1", "1* 0-1", BEST, "1*"),
        # Of several nodes that the CPUs prefer, one where the device can be had, preferred by it or not.
        ("0* 2* 3*", "1* 3", BEST, "3"),
        # CPUs that need two nodes have no single node to prefer.
        ("0-1* 0-3", "2* 0-3", BEST, "0-1"),
    ],
)
def test_the_cpus_preference_wins(cpu: str, device: str, policy: TopologyPolicy, expected: str) -> None:
    merged = merge([hints("cpu", cpu), hints("gpu", device)], policy, FOUR)
    assert brief(merged) == expected


def test_the_reason_names_what_each_resource_prefers() -> None:
    merged = merge([hints("cpu", "1* 0-1"), hints("vendor/gpu", "0*"), hints("memory", "")], BEST, FOUR)
    assert merged.reason == (
        "not all on the same nodes: cpu prefers 1, vendor/gpu prefers 0, memory does not fit on any node; the "
        "CPUs' preference for NUMA node 1 applies"
    )
    assert merge([hints("cpu", "2*"), hints("memory", "2*")], BEST, FOUR).reason == "cpu and memory on NUMA node 2"


def test_the_higher_score_wins_between_equals_and_never_against_fewer_nodes() -> None:
    def scored(*result: tuple[str, int]) -> ResourceHints:
        return ResourceHints(
            name="cpu",
            hints=tuple(
                TopologyHint(nodes=CpuSet.parse(nodes), preferred=True, score=score) for nodes, score in result
            ),
        )

    assert brief(merge([scored(("0", 1), ("2", 5), ("0-1", 9))], BEST, FOUR)) == "2*"


def test_two_resources_of_one_name_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="same name"):
        merge([hints("cpu", "0"), hints("cpu", "1")], BEST, FOUR)


def machine(distances: Sequence[Sequence[int]]) -> Topology:
    count = len(distances)
    return Topology(
        online=CpuSet.span(count),
        cpus=tuple(Cpu(id=node, core=node, node=node) for node in range(count)),
        numa=tuple(NumaNode(id=node, distances=tuple(row)) for node, row in enumerate(distances)),
    )


RING = machine([[10, 30, 20, 40], [30, 10, 40, 20], [20, 40, 10, 30], [40, 20, 30, 10]])


def test_closer_nodes_win_between_equally_many_only_when_distances_count() -> None:
    cpu = hints("cpu", "0-1* 0,2* 2-3*")
    assert brief(merge([cpu], BEST, FOUR)) == "0-1*"
    assert brief(merge([cpu], BEST, FOUR, closest=RING)) == "0,2*"


# --- The reference: every combination, as the kubelet does it ---------------------------------------------------------

Plain = tuple[int | None, bool]


def narrower(number: int, other: int, topology: Topology | None) -> bool:
    """Whether the kubelet takes the first one of two masks."""
    if number.bit_count() != other.bit_count():
        return number.bit_count() < other.bit_count()
    if topology is not None and (gap := spread(topology, number) - spread(topology, other)):
        return gap < 0
    return number < other


def spread(topology: Topology, mask: int) -> int:
    nodes = list(CpuSet.from_mask(mask))
    return sum(topology.distance(node, other) for node in nodes for other in nodes)


def better(best: tuple[int, bool] | None, new: tuple[int, bool], size: int, topology: Topology | None) -> bool:
    """Whether the new merge replaces the best so far: the kubelet's list of cases, one after the other."""
    if new[0] == 0:
        return False
    if best is None:
        return True
    if new[1] != best[1]:
        return new[1]
    old_count, new_count = best[0].bit_count(), new[0].bit_count()
    if new[1] or old_count > size:
        return narrower(new[0], best[0], topology)
    if old_count == size:
        return new_count == size and narrower(new[0], best[0], topology)
    if new_count > size:
        return False
    if new_count != old_count:
        return new_count > old_count
    return narrower(new[0], best[0], topology)


def exhaustive(
    resources: Sequence[ResourceHints], policy: TopologyPolicy, nodes: CpuSet, topology: Topology | None
) -> str:
    lists: list[list[Plain]] = []
    for resource_hints in resources:
        if resource_hints.hints is None:
            lists.append([(None, True)])
        elif not resource_hints.hints:
            lists.append([(None, False)])
        else:
            lists.append([(hint.nodes.mask, hint.preferred) for hint in resource_hints.hints])
    if policy is SINGLE:
        lists = [[(m, p) for m, p in each if p and (m is None or m.bit_count() == 1)] for each in lists]
    size = max((min((m.bit_count() for m, _ in each if m is not None), default=0) for each in lists), default=0)
    best: tuple[int, bool] | None = None
    for combination in itertools.product(*lists):
        masks = [mask for mask, _ in combination if mask is not None]
        merged = nodes.mask
        for mask in masks:
            merged &= mask
        preferred = all(wanted for _, wanted in combination) and len(set(masks)) <= 1
        if better(best, (merged, preferred), size, topology):
            best = (merged, preferred)
    mask, preferred = best or (nodes.mask, False)
    admitted = preferred or policy is BEST
    # What the kubelet refuses has no nodes; we say what would be best.
    return f"{CpuSet.from_mask(mask)}{'*' * preferred}" if admitted or policy is not SINGLE else "refused"


def one_hint(nodes: int) -> st.SearchStrategy[TopologyHint]:
    return st.builds(TopologyHint, nodes=st.integers(1, 2**nodes - 1).map(CpuSet.from_mask), preferred=st.booleans())


@st.composite
def several(draw: st.DrawFn) -> tuple[CpuSet, list[ResourceHints]]:
    count = draw(st.integers(1, 4))
    lists = st.none() | st.lists(one_hint(count), max_size=6).map(tuple)
    drawn = draw(st.lists(lists, max_size=4))
    return CpuSet.span(count), [ResourceHints(name=f"r{number}", hints=each) for number, each in enumerate(drawn)]


@given(several(), st.sampled_from((BEST, RESTRICTED, SINGLE)), st.booleans())
def test_on_four_nodes_the_merge_is_the_kubelets(
    given_: tuple[CpuSet, list[ResourceHints]], policy: TopologyPolicy, near: bool
) -> None:
    nodes, resources = given_
    topology = RING if near else None
    merged = merge(resources, policy, nodes, closest=topology)
    text = f"{merged.nodes}{'*' * merged.preferred}" if merged.admitted or policy is not SINGLE else "refused"
    assert text == exhaustive(resources, policy, nodes, topology)
    assert merged.admitted is (merged.preferred or policy is BEST)
    shuffled = [
        ResourceHints(name=resource_hints.name, hints=resource_hints.hints and resource_hints.hints[::-1])
        for resource_hints in resources[::-1]
    ]
    again = merge(shuffled, policy, nodes, closest=topology)
    assert (again.nodes, again.preferred) == (merged.nodes, merged.preferred)


many = st.lists(st.integers(1, 255), min_size=1, max_size=12)


@given(st.lists(many, min_size=2, max_size=4), st.sampled_from([0, 3]))
def test_counted_intersections_are_those_that_trying_finds(lists: list[list[int]], shift: int) -> None:
    """Also with nodes that are not numbered from 0."""
    options = [NodeMaskOptions((mask << shift, False, 0) for mask in each) for each in lists]
    expected = {functools.reduce(int.__and__, numbers) << shift for numbers in itertools.product(*lists)} - {0}
    met = reachable(options, 255 << shift, NodeMaskRanker(), size=1, limit=None)
    assert met == dict.fromkeys(sorted(expected), 0)


def test_scores_of_intersections_are_still_added_up() -> None:
    options = [
        NodeMaskOptions([(0b01, False, 2), (0b11, False, 1)]),
        NodeMaskOptions([(0b11, False, 5), (0b01, False, 3)]),
    ]
    assert reachable(options, 0b11, NodeMaskRanker(), size=1, limit=None) == {0b01: 7, 0b11: 6}


# --- numeric ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpu", "memory", "device", "expected"),
    [
        ("0* 1* 0-1", "0* 1* 0-1", "1* 0-1", "cpu=1 memory=1 gpu=1"),
        # One of the aligned resources may prefer fewer nodes, the other's preference is enough.
        ("0 0-1*", "0* 0-1", None, "cpu=0 memory=0"),
        ("0-1", "0-1", None, "refused"),
        ("0* 0-1", "1* 1-2", None, "refused"),
        # A device around the aligned nodes or inside them, never beside them.
        ("0-1*", "0-1*", "1*", "cpu=0-1 memory=0-1 gpu=1"),
        ("0*", "0*", "1* 0-1", "cpu=0 memory=0 gpu=0-1"),
        ("0*", "0*", "1* 2-3", "refused"),
        # A preferred device before fewer nodes.
        ("0*", "0*", "0-3* 0", "cpu=0 memory=0 gpu=0-3"),
        # A memory that does not care cannot vouch for CPUs that would rather be elsewhere.
        ("0-1", None, None, "refused"),
        (None, None, "2*", "gpu=2"),
        ("0*", "", None, "refused"),
    ],
)
def test_numeric_aligns_cpu_and_memory_and_nests_the_rest(
    cpu: str | None, memory: str | None, device: str | None, expected: str
) -> None:
    merged = merge([hints("cpu", cpu), hints("memory", memory), hints("gpu", device)], NUMERIC, FOUR)
    text = " ".join(f"{name}={nodes}" for name, nodes in merged.by_resource.items())
    assert (text if merged.admitted else "refused") == expected


def every_chain(resources: Sequence[ResourceHints]) -> tuple[int, int] | None:
    """More preferred resources, then fewer nodes in the widest: the best of every combination; None: refused."""
    cared = [resource_hints for resource_hints in resources if resource_hints.hints is not None]
    best: tuple[int, int] | None = None
    for chosen in itertools.product(*(resource_hints.hints or () for resource_hints in cared)):
        named = dict(zip((resource_hints.name for resource_hints in cared), chosen, strict=True))
        aligned = [hint for name, hint in named.items() if name in ("cpu", "memory")]
        if aligned and (len({hint.nodes for hint in aligned}) > 1 or not any(hint.preferred for hint in aligned)):
            continue
        if any(not (a.nodes <= b.nodes or b.nodes <= a.nodes) for a, b in itertools.combinations(chosen, 2)):
            continue
        rest = sum(hint.preferred for name, hint in named.items() if name not in ("cpu", "memory"))
        key = (-rest, max((len(hint.nodes) for hint in chosen), default=0))
        best = key if best is None or key < best else best
    return best


@given(st.tuples(*(st.none() | st.lists(one_hint(4), max_size=6).map(tuple) for _ in range(4))))
def test_numeric_finds_a_chain_as_good_as_trying_everything(drawn: tuple[tuple[TopologyHint, ...] | None, ...]) -> None:
    names = ("cpu", "memory", "gpu", "nic")
    resources = [ResourceHints(name=name, hints=each) for name, each in zip(names, drawn, strict=True)]
    merged = merge(resources, NUMERIC, FOUR)
    expected = every_chain(resources)
    assert merged.admitted is (expected is not None)
    if expected is not None:
        topology_hints = {
            offered.name: {hint.nodes: hint for hint in sorted(offered.hints, key=lambda hint: hint.preferred)}
            for offered in resources
            if offered.hints is not None
        }
        preferred = sum(
            topology_hints[name][nodes].preferred
            for name, nodes in merged.by_resource.items()
            if name in ("gpu", "nic")
        )
        assert (-preferred, max((len(nodes) for nodes in merged.by_resource.values()), default=0)) == expected
        assert merged.by_resource.keys() == topology_hints.keys()


# --- Bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [BEST, RESTRICTED, SINGLE])
@pytest.mark.parametrize("count", [2, 4, 8, 16, 32, 64])
def test_the_worst_lists_are_merged_in_a_bounded_time(count: int, policy: TopologyPolicy) -> None:
    """Long lists of large overlapping masks that no hint prefers: nothing ends early."""
    nodes = CpuSet.span(count)
    masks = [nodes.mask & ~(1 << first) & ~(1 << second) for first in range(count) for second in range(count)]
    lists = tuple(TopologyHint(nodes=CpuSet.from_mask(mask)) for mask in sorted(set(masks)) if mask)
    resources = [ResourceHints(name=name, hints=lists) for name in ("cpu", "memory", "gpu", "nic")]
    with at_most(CPU_S):
        merged = merge(resources, policy, nodes)
    assert not merged.preferred
    assert merged.nodes


@pytest.mark.parametrize("count", [8, 16, 32, 64])
def test_numeric_nests_the_longest_lists_in_a_bounded_time(count: int) -> None:
    nodes = CpuSet.span(count)
    lists = tuple(TopologyHint(nodes=CpuSet.span(width), preferred=True) for width in range(1, count + 1))
    resources = [ResourceHints(name=name, hints=lists) for name in ("cpu", "memory", "gpu", "nic")]
    with at_most(CPU_S):
        merged = merge(resources, NUMERIC, nodes)
    assert merged.by_resource == dict.fromkeys(("cpu", "memory", "gpu", "nic"), CpuSet.span(1))
