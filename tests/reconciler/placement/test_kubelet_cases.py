"""The kubelet's own tables of its CPU assignment, answered by the chain with its built-in plug-ins."""

from typing import Any

import pytest

from cgroupfs.cpuset import CpuSet
from reconciler.placement.allocate import allocate
from state.topology import Topology
from tests.reconciler.placement.shapes import (
    DUAL_SOCKET_HT,
    DUAL_SOCKET_NO_HT,
    MULTI_NUMA_HT,
    MULTI_NUMA_HT_LARGE,
    SINGLE_SOCKET_HT,
    UNCORE_DUAL_NO_SMT,
    UNCORE_MULTI_NUMA,
    UNCORE_NO_SMT,
    UNCORE_SMT,
    demand,
)


def placed(topology: Topology, free: str, count: int, held: str = "", **more: Any) -> str:
    got = allocate([demand("pod", count, held, **more)], CpuSet.parse(free), topology)
    return str(got.cpus.get("pod/c", CpuSet()))


PACKED = {
    "one cpu from a single socket": (SINGLE_SOCKET_HT, "0-7", 1, "0"),
    "one cpu, some cpus are taken": (SINGLE_SOCKET_HT, "1,3,5-7", 1, "6"),
    "two cpus": (SINGLE_SOCKET_HT, "0-7", 2, "0,4"),
    "all cpus": (SINGLE_SOCKET_HT, "0-7", 8, "0-7"),
    "two cpus, one core is free": (SINGLE_SOCKET_HT, "0-1,3,6-7", 2, "3,7"),
    "a socket and a core": (DUAL_SOCKET_HT, "0-11", 8, "0-2,4,6-8,10"),
    "one cpu, core 0 is taken": (DUAL_SOCKET_HT, "1-5,7-11", 1, "2"),
    "a socket without HT": (DUAL_SOCKET_NO_HT, "0-7", 4, "0-3"),
    "a NUMA node": (MULTI_NUMA_HT, "0-79", 20, "0-9,40-49"),
    "a NUMA node, a core of the first is taken": (MULTI_NUMA_HT, "1-39,41-79", 20, "10-19,50-59"),
    "two NUMA nodes are a socket": (MULTI_NUMA_HT, "0-79", 40, "0-19,40-59"),
    "a socket and a NUMA node": (MULTI_NUMA_HT, "0-79", 60, "0-29,40-69"),
    "a socket and a NUMA node, a core is taken": (MULTI_NUMA_HT, "1-39,41-79", 60, "10-39,50-79"),
    "three NUMA nodes and two cores": (MULTI_NUMA_HT, "0-79", 64, "0-31,40-71"),
    "two whole L3 and a part of the smallest": (UNCORE_NO_SMT, "1-15", 10, "1-2,4-11"),
    "an L3 of the first socket": (UNCORE_DUAL_NO_SMT, "0-15", 4, "0-3"),
    "all L3 of the first socket": (UNCORE_DUAL_NO_SMT, "2-15", 6, "2-7"),
    "an L3 of the second socket": (UNCORE_DUAL_NO_SMT, "8-15", 4, "8-11"),
    "an L3 before a node with the exact number": (UNCORE_MULTI_NUMA, "3-8,12", 2, "4-5"),
    "the L3 that holds it, SMT": (UNCORE_SMT, "2-7,10-15", 6, "4-6,12-14"),
    "a whole L3 and a core of the other, SMT": (UNCORE_SMT, "1-7,9-15", 10, "1,4-7,9,12-15"),
}


@pytest.mark.parametrize(("topology", "free", "count", "expected"), PACKED.values(), ids=PACKED.keys())
def test_packed(topology: Topology, free: str, count: int, expected: str) -> None:
    assert placed(topology, free, count) == expected


SPREAD = {
    "4 full cores, 2 in each NUMA node": (DUAL_SOCKET_HT, "0-11", 8, False, "0-3,6-9"),
    "32 full cores, 8 in each": (MULTI_NUMA_HT, "0-79", 64, False, "0-7,10-17,20-27,30-37,40-47,50-57,60-67,70-77"),
    "24 full cores, 8 in the first 3": (MULTI_NUMA_HT, "0-79", 48, False, "0-7,10-17,20-27,40-47,50-57,60-67"),
    "24 full cores, nodes with the most room": (
        MULTI_NUMA_HT,
        "1-29,32-39,41-69,72-79",
        48,
        False,
        "1-8,10-17,20-27,41-48,50-57,60-67",
    ),
    "24 full cores, the last 3 though the first would do": (
        MULTI_NUMA_HT,
        "2-29,31-39,42-69,71-79",
        48,
        False,
        "10-17,20-27,31-38,50-57,60-67,71-78",
    ),
    "8 full cores, 2 in each": (
        MULTI_NUMA_HT,
        "0-2,10-12,20-22,30-32,40-41,50-51,60-61,70-71",
        16,
        False,
        "0-1,10-11,20-21,30-31,40-41,50-51,60-61,70-71",
    ),
    "13 cores over 2, by threads": (MULTI_NUMA_HT, "0-79", 26, False, "0-6,10-16,40-45,50-55"),
    "13 cores over 2, by cores": (MULTI_NUMA_HT, "0-79", 26, True, "0-6,10-15,40-46,50-55"),
    "31 cores, 2 threads over": (MULTI_NUMA_HT, "0-79", 62, False, "0-7,10-17,20-27,30-37,40-47,50-57,60-66,70-76"),
    "31 cores, 3 cores over": (MULTI_NUMA_HT, "0-79", 62, True, "0-7,10-17,20-27,30-36,40-47,50-57,60-67,70-76"),
    "31 cores, the rest keeps the balance": (
        MULTI_NUMA_HT,
        "0-8,10-18,20-40,41-48,50-58,60-79",
        62,
        False,
        "0-7,10-17,20-27,30-37,40-46,50-56,60-67,70-77",
    ),
    "31 cores, the rest keeps the balance, by cores": (
        MULTI_NUMA_HT,
        "0-8,10-18,20-39,40-48,50-58,60-79",
        62,
        True,
        "0-7,10-16,20-27,30-37,40-47,50-56,60-67,70-77",
    ),
    "the rest where there is room": (
        MULTI_NUMA_HT,
        "0-3,10-13,20-23,30-36,40-43,50-53,60-63,70-76",
        34,
        False,
        "0-3,10-13,20-23,30-34,40-43,50-53,60-63,70-74",
    ),
    "the live machine": (
        MULTI_NUMA_HT_LARGE,
        "0,128,30-31,158-159,43-47,171-175,62-63,190-191,75-79,203-207,94,96,222-223,101-111,229-239,126-127,254-255",
        28,
        False,
        # Five whole cores on the node with the remainder; the kubelet has 96 and 105 there, two halves of others.
        "43-47,75-79,101-105,171-174,203-206,229-233",
    ),
    "what fits one node is not spread": (MULTI_NUMA_HT, "0-79", 20, False, "0-9,40-49"),
}


@pytest.mark.parametrize(("topology", "free", "count", "full", "expected"), SPREAD.values(), ids=SPREAD.keys())
def test_distribute_cpus_across_numa(topology: Topology, free: str, count: int, full: bool, expected: str) -> None:
    assert placed(topology, free, count, distribute=True, full_cores=full) == expected


RESIZE = {
    "1 of 1": (SINGLE_SOCKET_HT, "0-7", "0", 1, "0"),
    "the sibling": (SINGLE_SOCKET_HT, "0-7", "0", 2, "0,4"),
    "the sibling is taken: a lone thread": (SINGLE_SOCKET_HT, "0-1,3,5-7", "0", 2, "0,6"),
    "the sibling is taken: a core": (SINGLE_SOCKET_HT, "0-1,3,5-7", "0", 3, "0-1,5"),
    "all": (SINGLE_SOCKET_HT, "0-7", "0", 8, "0-7"),
    "the core on the second socket": (DUAL_SOCKET_HT, "0-11", "11", 2, "5,11"),
    "the socket it is on": (DUAL_SOCKET_HT, "0-11", "11", 6, "1,3,5,7,9,11"),
    "the socket it is on and a core": (DUAL_SOCKET_HT, "0-11", "11", 8, "0-1,3,5-7,9,11"),
    "the sockets of its NUMA node": (MULTI_NUMA_HT, "0-79", "39", 40, "20-39,60-79"),
    "its NUMA node": (MULTI_NUMA_HT, "0-79", "39", 20, "30-39,70-79"),
    "the NUMA nodes of both its CPUs, and the nearest": (MULTI_NUMA_HT, "0-79", "39,59", 60, "0-19,30-59,70-79"),
    "its L3 first": (UNCORE_NO_SMT, "2-15", "8-9", 8, "4-11"),
    "its L3, SMT": (UNCORE_SMT, "0-15", "4-6", 8, "4-7,12-15"),
    "more than there are keeps what it has": (SINGLE_SOCKET_HT, "0,2,4,6", "0", 5, "0"),
}


@pytest.mark.parametrize(("topology", "free", "held", "count", "expected"), RESIZE.values(), ids=RESIZE.keys())
def test_resize(topology: Topology, free: str, held: str, count: int, expected: str) -> None:
    assert placed(topology, free, count, held) == expected


SPREAD_RESIZE = {
    "4 cores, 2 in each node": (DUAL_SOCKET_HT, "0-11", "11", 8, "0-2,5-8,11"),
    "32 cores, 8 in each": (
        MULTI_NUMA_HT,
        "0-79",
        "36-39,76-79",
        64,
        "0-7,10-17,20-27,30-33,36-47,50-57,60-67,70-73,76-79",
    ),
    "fits its node": (DUAL_SOCKET_HT, "0-11", "11", 2, "5,11"),
}


@pytest.mark.parametrize(
    ("topology", "free", "held", "count", "expected"), SPREAD_RESIZE.values(), ids=SPREAD_RESIZE.keys()
)
def test_distribute_cpus_across_numa_resize(
    topology: Topology, free: str, held: str, count: int, expected: str
) -> None:
    assert placed(topology, free, count, held, distribute=True) == expected


FULL_PCPUS_ONLY = {
    "an even count": (SINGLE_SOCKET_HT, "0-7", 4, "0-1,4-5"),
    "an odd count gets the last core whole": (SINGLE_SOCKET_HT, "0-7", 3, "0-1,4-5"),
    "one cpu is a core": (SINGLE_SOCKET_HT, "0-7", 1, "0,4"),
    "half cores are no cores": (SINGLE_SOCKET_HT, "0-2,5-7", 4, "1-2,5-6"),
    "enough threads, too few cores": (SINGLE_SOCKET_HT, "0-3,7", 4, ""),
    "an odd count whose last core is not to be had": (SINGLE_SOCKET_HT, "0-2,4-5", 5, ""),
    "no SMT, no constraint": (DUAL_SOCKET_NO_HT, "0-7", 3, "0-2"),
}


@pytest.mark.parametrize(
    ("topology", "free", "count", "expected"), FULL_PCPUS_ONLY.values(), ids=FULL_PCPUS_ONLY.keys()
)
def test_full_pcpus_only(topology: Topology, free: str, count: int, expected: str) -> None:
    assert placed(topology, free, count, full_cores=True) == expected


ALIGN_BY_SOCKET = {
    "two nodes of one socket": (MULTI_NUMA_HT, "0-79", 40, {}, "0-19,40-59"),
    "the second socket when the first has too few": (MULTI_NUMA_HT, "8-39,48-79", 30, {}, "20-34,60-74"),
    "spread over the nodes of one socket": (
        MULTI_NUMA_HT,
        "0-7,10-39,40-47,50-79",
        24,
        {"distribute": True},
        "20-25,30-35,60-65,70-75",
    ),
    "more than a socket": (MULTI_NUMA_HT, "0-79", 50, {}, "0-24,40-64"),
}


@pytest.mark.parametrize(
    ("topology", "free", "count", "more", "expected"), ALIGN_BY_SOCKET.values(), ids=ALIGN_BY_SOCKET.keys()
)
def test_align_by_socket(topology: Topology, free: str, count: int, more: dict[str, Any], expected: str) -> None:
    assert placed(topology, free, count, align_socket=True, **more) == expected
