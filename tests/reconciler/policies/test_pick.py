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


def test_from_nothing_whole_cores_from_the_highest_are_taken() -> None:
    assert choose_cpus(4, cpus("0-7"), EMPTY, EMPTY, SMT) == cpus("2-3,6-7")


def test_an_odd_count_takes_half_of_one_core_only() -> None:
    assert choose_cpus(3, cpus("0-7"), EMPTY, EMPTY, SMT) == cpus("3,6-7")


def test_what_is_held_stays_held() -> None:
    assert choose_cpus(3, cpus("0-7"), cpus("0-1"), EMPTY, FLAT) == cpus("0-1,7")
    assert choose_cpus(2, cpus("0-7"), cpus("0,2,4"), EMPTY, FLAT) == cpus("2,4")


def test_growing_completes_a_core_before_it_begins_another() -> None:
    assert choose_cpus(2, cpus("0-7"), cpus("1"), EMPTY, SMT) == cpus("1,5")


def test_shrinking_gives_back_a_lone_thread_before_it_breaks_a_core() -> None:
    assert choose_cpus(2, cpus("0-7"), cpus("2,6,3"), EMPTY, SMT) == cpus("2,6")


def test_siblings_of_taken_cpus_are_given_last() -> None:
    assert choose_cpus(5, cpus("1-7"), EMPTY, cpus("0"), SMT) == cpus("2-3,5-7")
    assert choose_cpus(7, cpus("1-7"), EMPTY, cpus("0"), SMT) == cpus("1-7")


def test_a_held_cpu_is_exchanged_when_its_sibling_becomes_dedicated() -> None:
    assert choose_cpus(1, cpus("0-2,4-7"), cpus("7"), cpus("3"), SMT) == cpus("6")


def test_neighbours_are_the_threads_of_taken_cores() -> None:
    assert neighbours(cpus("4-7"), cpus("1,3"), SMT) == cpus("5,7")


def test_fewer_candidates_than_asked_for_are_all_taken() -> None:
    assert choose_cpus(9, cpus("1,3"), cpus("5"), cpus("2"), FLAT) == cpus("1,3")


@pytest.mark.parametrize(
    ("count", "held", "expected"),
    [
        (2, "", "1,5"),
        (5, "", "0-1,4-5,7"),
        (3, "2,6", "2,5-6"),
        (2, "1-2,5-6", "1,5"),
        (3, "1-2,5-6", "1,5-6"),
    ],
    ids=["taken first", "and then the others", "nobody moves for them", "given back last", "in part"],
)
def test_efficiency_cores_are_taken_first_and_given_back_last(count: int, held: str, expected: str) -> None:
    assert choose_cpus(count, cpus("0-7"), cpus(held), EMPTY, HYBRID) == cpus(expected)


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
