import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.placement.allocate import preference
from reconciler.policies.reclaimed import choose_cpus, neighbours
from state.topology import CpuKind, Topology, uniform
from tests.reconciler.nodes import cpus

# First threads 0-3, second ones 4-7: cores {0,4} {1,5} {2,6} {3,7}.
SMT = uniform(cores=4, threads=2)
FLAT = uniform(cores=8, threads=1)
# Cores 0 and 1 are efficiency cores.
HYBRID = replace(SMT, cpus=tuple(replace(cpu, kind=CpuKind.EFFICIENCY) if cpu.core < 2 else cpu for cpu in SMT.cpus))


@pytest.mark.parametrize(
    ("topology", "count", "candidates", "held", "taken", "expected"),
    [
        pytest.param(SMT, 4, "0-7", "", "", "2-3,6-7", id="from nothing whole cores from the highest"),
        pytest.param(SMT, 3, "0-7", "", "", "3,6-7", id="an odd count takes half of one core only"),
        pytest.param(FLAT, 3, "0-7", "0-1", "", "0-1,7", id="what is held stays held"),
        pytest.param(FLAT, 2, "0-7", "0,2,4", "", "2,4", id="and the rest of it is given back"),
        pytest.param(SMT, 2, "0-7", "1", "", "1,5", id="growing completes a core before it begins another"),
        pytest.param(SMT, 2, "0-7", "2,6,3", "", "2,6", id="a lone thread is given back before a core is broken"),
        pytest.param(SMT, 5, "1-7", "", "0", "2-3,5-7", id="siblings of taken CPUs are last"),
        pytest.param(SMT, 7, "1-7", "", "0", "1-7", id="and taken where there is no other"),
        pytest.param(SMT, 1, "0-2,4-7", "7", "3", "6", id="exchanged when its sibling becomes dedicated"),
        pytest.param(FLAT, 9, "1,3", "5", "2", "1,3", id="fewer candidates than requested are all taken"),
        pytest.param(HYBRID, 2, "0-7", "", "", "1,5", id="efficiency cores are first"),
        pytest.param(HYBRID, 5, "0-7", "", "", "0-1,4-5,7", id="and then the others"),
        pytest.param(HYBRID, 3, "0-7", "2,6", "", "2,5-6", id="nobody moves for them"),
        pytest.param(HYBRID, 2, "0-7", "1-2,5-6", "", "1,5", id="they are given back last"),
        pytest.param(HYBRID, 3, "0-7", "1-2,5-6", "", "1,5-6", id="in part"),
    ],
)
def test_which_cpus_are_chosen(
    topology: Topology, count: int, candidates: str, held: str, taken: str, expected: str
) -> None:
    assert choose_cpus(count, cpus(candidates), cpus(held), cpus(taken), topology) == cpus(expected)


def test_neighbours_are_the_threads_of_taken_cores() -> None:
    assert neighbours(cpus("4-7"), cpus("1,3"), SMT) == cpus("5,7")


def test_a_chains_order_of_preference_is_followed() -> None:
    tiers = preference(cpus("0-7"), FLAT, interrupts=cpus("6-7")).tiers
    assert choose_cpus(2, cpus("0-7"), EMPTY, EMPTY, FLAT, tiers=tiers) == cpus("4-5")
    assert choose_cpus(7, cpus("0-7"), EMPTY, EMPTY, FLAT, tiers=tiers) == cpus("0-5,7")
    assert choose_cpus(2, cpus("0-7"), EMPTY, EMPTY, FLAT, tiers=[cpus("1")]) == cpus("1,7")


masks = st.integers(0, 255).map(CpuSet.from_mask)


@given(
    count=st.integers(0, 8), candidates=masks, held=masks, taken=masks, topology=st.sampled_from([SMT, FLAT, HYBRID])
)
def test_the_right_number_is_chosen_and_no_dedicated_core_is_entered_without_need(
    count: int, candidates: CpuSet, held: CpuSet, taken: CpuSet, topology: Topology
) -> None:
    candidates -= taken
    chosen = choose_cpus(count, candidates, held, taken, topology)
    assert len(chosen) == min(count, len(candidates))
    assert chosen <= candidates
    beside = neighbours(candidates, taken, topology)
    assert not chosen & beside or candidates - beside <= chosen
    assert choose_cpus(count, candidates, chosen, taken, topology) == chosen


@given(count=st.integers(1, 8), candidates=masks, held=masks, topology=st.sampled_from([SMT, FLAT, HYBRID]))
def test_the_fewest_cpus_change_hands(count: int, candidates: CpuSet, held: CpuSet, topology: Topology) -> None:
    chosen = choose_cpus(count, candidates, held, EMPTY, topology)
    kept = held & candidates
    assert len(chosen & kept) == min(len(chosen), len(kept))
    from_scratch = choose_cpus(count, candidates, EMPTY, EMPTY, topology)
    assert len(chosen ^ held) <= len(from_scratch ^ held)
