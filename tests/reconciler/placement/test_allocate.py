from typing import Any

import pytest
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.placement.allocate import allocate, preference
from reconciler.placement.chain import load
from reconciler.placement.config import PlacementConfig
from reconciler.placement.demand import Allocation, CpuDemand
from state.topology import NumaNode, Topology, uniform
from tests.reconciler.placement.shapes import (
    CPU_S,
    SINGLE_SOCKET_HT,
    at_most,
    demand,
    shape,
    with_efficiency,
    without,
)

# Two sockets, four nodes, eight L3 domains, 32 cores: node 0 is 0-7 and 32-39, its L3 domains 0-3 and 4-7.
BIG = shape(sockets=2, nodes=4, l3=8, cores=32)


def place(topology: Topology, free: str, *demands: CpuDemand, **more: Any) -> Allocation:
    return allocate(demands, CpuSet.parse(free), topology, **more)


def owners(got: Allocation) -> dict[str, str]:
    return {key.partition("/")[0]: str(cpus) for key, cpus in got.cpus.items()}


def test_what_is_held_and_right_stays_whatever_would_be_better() -> None:
    got = place(BIG, "0-63", demand("a", 4, "0,9,18,63"), demand("b", 2, nodes=(0,)))
    assert owners(got) == {"a": "0,9,18,63", "b": "1,33"}
    assert got.notes["a/c"] == "unchanged"


def test_nodes_and_a_schedulers_new_choice_move_nobody_who_is_right() -> None:
    got = place(BIG, "0-63", demand("a", 2, "0,32", explicit="8,40", nodes=(3,)))
    assert owners(got) == {"a": "0,32"}


def test_a_schedulers_choice_is_taken_as_it_is() -> None:
    got = place(BIG, "0-63", demand("a", 2, explicit="5,9,11"), demand("b", 64, priority=9))
    assert owners(got) == {"a": "5,9,11"}
    assert got.notes == {"a/c": "chosen by the scheduler"}
    again = place(BIG, "0-63", demand("a", 2, "5,9,11", explicit="5,9,11"))
    assert owners(again) == {"a": "5,9,11"}


@pytest.mark.parametrize(
    ("free", "other", "more"),
    [("0-4,6-63", [], {}), ("0-63", [demand("b", 1, "5")], {}), ("0-63", [], {"full_cores": True})],
    ids=["not free", "of somebody else", "half cores where whole ones are requested"],
)
def test_a_schedulers_choice_that_cannot_be_is_replaced_and_told(
    free: str, other: list[CpuDemand], more: dict[str, Any]
) -> None:
    got = place(BIG, free, demand("a", 2, explicit="5,6", **more), *other)
    assert len(got.cpus["a/c"]) == 2
    assert got.notes["a/c"] == "chosen; the scheduler's choice was not free"


def test_a_resize_follows_the_schedulers_new_choice() -> None:
    got = place(BIG, "0-63", demand("a", 4, "0,32", explicit="8-9,40-41"))
    assert owners(got) == {"a": "8-9,40-41"}


def test_two_holders_of_one_cpu_the_higher_priority_has_it() -> None:
    got = place(SINGLE_SOCKET_HT, "0-7", demand("a", 2, "0,4"), demand("b", 2, "4,5", priority=1))
    assert got.cpus["b/c"] == CpuSet.parse("4,5")
    assert 0 in got.cpus["a/c"]


SHRINKS = {
    "a core of three": ("0-2,32-34", 4, {}, "0-1,32-33"),
    "the lone thread": ("0-2,32-33", 4, {}, "0-1,32-33"),
    "to an odd number": ("0-2,32-34", 3, {}, "0-1,32"),
    "a lone thread before a core, though lower": ("0-2,33-34", 4, {}, "1-2,33-34"),
    "a lone thread before half a core": ("0-2,33-34", 3, {}, "1-2,33"),
    "the emptier node, though lower": ("0,8-9,32,40-41", 4, {}, "8-9,40-41"),
    "the core it has whole is kept": ("0-1,33", 2, {"full_cores": True}, "1,33"),
    "in whole cores": ("0-2,32-34", 3, {"full_cores": True}, "0-1,32-33"),
    "the node with the fewest": ("0-2,8,32-34,40", 4, {}, "0-1,32-33"),
    "evenly": ("0-2,8-10,32-34,40-42", 8, {"distribute": True}, "0-1,8-9,32-33,40-41"),
    "to one": ("0,32", 1, {}, "0"),
}


@pytest.mark.parametrize(("held", "count", "more", "expected"), SHRINKS.values(), ids=SHRINKS.keys())
def test_shrinking_in_place(held: str, count: int, more: dict[str, Any], expected: str) -> None:
    got = place(BIG, "0-63", demand("a", count, held, **more))
    assert owners(got) == {"a": expected}
    assert got.notes["a/c"] == f"keeps {len(got.cpus['a/c'])} of the {len(CpuSet.parse(held))} CPUs it had"


GROWS = {
    "the other thread": ("0", "0-63", 2, {}, "0,32"),
    "the other thread before a lone one": ("1", "0-1,33", 2, {}, "1,33"),
    "its L3": ("0,32", "0-63", 4, {}, "0-1,32-33"),
    "its node when its L3 is full": ("0,32", "0,4-63", 4, {}, "0,4,32,36"),
    "its socket when its node is full": ("0,32", "0,8-31,32,40-63", 4, {}, "0,8,32,40"),
    "the other socket at last": ("0,32", "0,16-31,32,48-63", 4, {}, "0,16,32,48"),
    "half cores are completed first": ("0,1,32", "0-63", 4, {"full_cores": True}, "0-1,32-33"),
    "a half core that cannot be completed is exchanged": ("0,1,32", "0-32,34-63", 4, {"full_cores": True}, "0,2,32,34"),
    "a lost CPU is replaced beside the others": ("0-2,32-34", "0-1,3-63", 6, {}, "0-1,3,32-34"),
    "evenly with the node it is on": (
        "24,56",
        "0-29,32-61",
        24,
        {"distribute": True},
        "0-5,24-29,32-37,56-61",
    ),
    "evenly": ("0-1,8-9,32-33,40-41", "0-63", 10, {"distribute": True}, "0-2,8-10,32-33,40-41"),
}


@pytest.mark.parametrize(("held", "free", "count", "more", "expected"), GROWS.values(), ids=GROWS.keys())
def test_growing_in_place(held: str, free: str, count: int, more: dict[str, Any], expected: str) -> None:
    got = place(BIG, free, demand("a", count, held, **more))
    assert str(got.cpus["a/c"]) == str(CpuSet.parse(expected))
    assert not got.refused


def test_one_that_cannot_grow_keeps_what_it_has() -> None:
    got = place(SINGLE_SOCKET_HT, "0-3,4", demand("a", 6, "0,4", full_cores=True))
    assert owners(got) == {"a": "0,4"}
    assert got.refused == {"a/c": "requests 4 more CPUs; 0 free in whole cores"}
    assert got.notes == {}


def test_one_that_lost_all_its_cpus_gets_what_there_is_before_any_newcomer() -> None:
    got = place(SINGLE_SOCKET_HT, "1-3", demand("a", 4, "0,4-6"), demand("new", 1, priority=5))
    assert owners(got) == {"a": "1-3"}
    assert sorted(got.refused) == ["a/c", "new/c"]


def test_without_numa_binding_a_container_owns_cpus_like_any_other() -> None:
    got = place(BIG, "0-63", demand("a", 40))
    assert len(got.cpus["a/c"]) == 40
    assert {socket for socket, cpus in BIG.sockets().items() if cpus & got.cpus["a/c"]} == {0, 1}


def test_the_nodes_of_the_hints_are_never_left() -> None:
    got = place(BIG, "0-63", demand("a", 16, nodes=(2,)), demand("b", 17, nodes=(1,)))
    assert owners(got) == {"a": "16-23,48-55"}
    assert got.refused == {"b/c": "requests 17 CPUs on node 1; 16 free; fragmented: 64 free on the whole machine"}


SINGLES: dict[str, tuple[str, int, dict[str, Any], str | None, str]] = {
    "as asked": ("0-7", 4, {}, "0-3", "chosen"),
    "too few cores": ("0-1,4-5", 3, {}, "0-1,4", "chosen; only 2 cores for its 3 CPUs"),
    "too few cores by one": ("0-7", 5, {}, "0-4", "chosen; only 4 cores for its 5 CPUs"),
    "too few cores, required": (
        "0-1,4-5",
        3,
        {"strict_cores": True},
        None,
        "requests 3 CPUs; 2 free one per core; fragmented: 4 free on the whole machine",
    ),
    "required, whatever the weights say": ("0,4,1", 2, {"strict_cores": True}, "0-1", "chosen"),
    "grown": ("0-7", 3, {"held": "0-1", "strict_cores": True}, "0-2", "keeps 2 of the 2 CPUs it had"),
    "grown, too few cores": (
        "0-1,4-5",
        3,
        {"held": "0-1", "strict_cores": True},
        "0-1",
        "requests 1 more CPUs; 0 free one per core; fragmented: 2 free on the whole machine",
    ),
    "requested later": ("0-7", 2, {"held": "0,4", "strict_cores": True}, "0,4", "unchanged"),
}


@pytest.mark.parametrize(("free", "count", "more", "expected", "words"), SINGLES.values(), ids=SINGLES.keys())
def test_single_threads(free: str, count: int, more: dict[str, Any], expected: str | None, words: str) -> None:
    got = place(SINGLE_SOCKET_HT, free, demand("a", count, spread_cores=True, **more))
    assert owners(got).get("a") == expected
    assert {**got.notes, **got.refused} == {"a/c": words}


def test_required_single_threads_need_no_plug_in() -> None:
    free = SINGLE_SOCKET_HT.online
    for strict, expected in ((True, "0-1"), (False, "0,4")):
        got = allocate(
            [demand("a", 2, spread_cores=True, strict_cores=strict)],
            free,
            SINGLE_SOCKET_HT,
            load(PlacementConfig(plugins={"threads": 0})),
        )
        assert owners(got) == {"a": expected}


def test_an_exclusive_node_takes_nobody_else() -> None:
    got = place(BIG, "0-63", demand("a", 2, numa_exclusive=True), demand("b", 50), demand("c", 4))
    assert got.closed == {0: "a/c"}
    assert owners(got) == {"a": "0,32", "c": "8-9,40-41"}
    assert got.refused == {"b/c": "requests 50 CPUs; 48 free"}


def test_one_that_wants_its_node_alone_goes_where_nobody_is() -> None:
    got = place(BIG, "0-63", demand("old", 2, "0,32"), demand("a", 2, numa_exclusive=True))
    assert got.closed == {1: "a/c"}
    none = place(SINGLE_SOCKET_HT, "0-7", demand("old", 2, "0,4"), demand("a", 2, numa_exclusive=True))
    assert none.refused == {"a/c": "requests 2 CPUs without other pods; 0 free"}


def test_an_exclusive_one_with_company_from_before_is_told() -> None:
    got = place(SINGLE_SOCKET_HT, "0-7", demand("a", 2, "0,4"), demand("b", 2, "1,5", numa_exclusive=True))
    assert owners(got) == {"a": "0,4", "b": "1,5"}
    assert got.notes["b/c"] == "unchanged; node 0 already used by other pods"


def test_an_exclusive_one_that_shrinks_opens_the_node_that_it_leaves() -> None:
    got = place(BIG, "0-63", demand("a", 14, "0-7,8,32-39,40", numa_exclusive=True), demand("b", 2, nodes=(1,)))
    assert got.closed == {0: "a/c"}
    assert owners(got) == {"a": "0-6,32-38", "b": "8,40"}


def test_priority_then_whole_nodes_then_size_then_name_decides_who_chooses_first() -> None:
    demands = [demand("b", 2), demand("a", 2), demand("big", 4), demand("first", 2, priority=1)]
    got = allocate(demands, SINGLE_SOCKET_HT.online, SINGLE_SOCKET_HT)
    assert owners(got) == {"first": "0,4", "big": "1-2,5-6", "a": "3,7"}


def test_two_demands_with_one_key_are_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"one key: \['a/c'\]"):
        place(SINGLE_SOCKET_HT, "0-7", demand("a", 1), demand("a", 2))


def test_performance_cores_first_for_owners() -> None:
    hybrid = with_efficiency(uniform(cores=4, threads=2), lambda cpu: cpu.core < 2)
    got = allocate([demand("a", 4), demand("b", 1)], hybrid.online, hybrid)
    assert owners(got) == {"a": "2-3,6-7", "b": "0"}


def test_be_work_prefers_efficiency_cores_and_likes_interrupts_least() -> None:
    hybrid = with_efficiency(uniform(cores=4, threads=2), lambda cpu: cpu.core < 2)
    assert preference(hybrid.online, hybrid).tiers == (CpuSet.parse("0-1"), CpuSet.parse("2-3,6-7"))
    assert preference(hybrid.online, hybrid, interrupts=CpuSet([0, 3])).tiers[0] == CpuSet([1])
    assert preference(EMPTY, hybrid).tiers == ()
    assert preference(SINGLE_SOCKET_HT.online, SINGLE_SOCKET_HT).tiers == (SINGLE_SOCKET_HT.online,)


def test_interrupt_cpus_are_avoided_but_not_at_the_price_of_two_nodes() -> None:
    got = place(SINGLE_SOCKET_HT, "0-7", demand("a", 2), interrupts=CpuSet([0]))
    assert owners(got) == {"a": "1,5"}
    busy = CpuSet.parse("0-1,8-9,16-17,24-25")
    assert {BIG.node_of(cpu) for cpu in place(BIG, "0-63", demand("a", 16), interrupts=busy).cpus["a/c"]} == {0}


def test_the_last_cpus_of_one_that_may_come_back_are_taken_last() -> None:
    got = place(SINGLE_SOCKET_HT, "0-7", demand("a", 2), remembered=CpuSet([0, 4]))
    assert owners(got) == {"a": "1,5"}
    assert owners(place(SINGLE_SOCKET_HT, "0,4", demand("a", 2), remembered=CpuSet([0, 4]))) == {"a": "0,4"}


def test_more_than_a_socket_goes_to_the_nearest_nodes() -> None:
    rows = ((10, 12, 40, 20), (12, 10, 20, 40), (40, 20, 10, 12), (20, 40, 12, 10))
    topology = replace(BIG, numa=tuple(NumaNode(id=n, distances=row) for n, row in enumerate(rows)))
    got = place(topology, "0-63", demand("a", 24, "0-7,32-39", nodes=(0, 2, 3)))
    assert {topology.node_of(cpu) for cpu in got.cpus["a/c"]} == {0, 3}


def test_offline_siblings_make_a_core_of_one_thread() -> None:
    topology = without(SINGLE_SOCKET_HT, {4})
    got = allocate([demand("a", 1, full_cores=True), demand("b", 3, full_cores=True)], topology.online, topology)
    assert owners(got) == {"a": "2,6", "b": "0-1,5"}


LARGE = {threads: shape(sockets=8, nodes=16, l3=128, cores=1024 // threads, threads=threads) for threads in (1, 2)}


@pytest.mark.parametrize("full", [False, True], ids=["threads", "full cores"])
@pytest.mark.parametrize("threads", [1, 2], ids=["no SMT", "SMT"])
def test_the_work_on_a_large_machine_is_bounded(threads: int, full: bool) -> None:
    topology = LARGE[threads]
    demands = [
        demand(f"p{number:03}", 1 + number * 7 % 9, full_cores=full, distribute=number % 3 == 0)
        for number in range(200)
    ]
    with at_most(CPU_S):
        got = allocate(demands, topology.online, topology)
    held = [
        replace(cpu_demand, held=got.cpus[cpu_demand.key])
        for cpu_demand in demands
        if cpu_demand.key not in got.refused
    ]
    assert allocate(held, topology.online, topology).cpus == got.cpus
