"""The built-in rules one by one, and which has precedence over which."""

from typing import Any

import pytest
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.placement.allocate import allocate
from reconciler.placement.chain import PlacementContext, Plugin, PluginRequest, load
from reconciler.placement.config import PlacementConfig
from reconciler.placement.cpu_accumulator import CpuAccumulator
from reconciler.placement.plugins import (
    Interrupts,
    KeepApart,
    LeastMovement,
    NearNodes,
    OneSocket,
    OneThread,
    PreferCoreKind,
    Spread,
    WholeCores,
    WholeL3,
)
from state.cpu import AntiAffinity
from state.model import PodClass
from state.topology import NumaNode, Topology, uniform
from tests.reconciler.placement.shapes import demand, shape, with_efficiency

# Node 0 is 0-7 and 32-39, its L3 domains 0-3 and 4-7; nodes 0 and 1 are socket 0.
BIG = shape(sockets=2, nodes=4, l3=8, cores=32)
ROWS = ((10, 12, 40, 20), (12, 10, 20, 40), (40, 20, 10, 12), (20, 40, 12, 10))
FAR = replace(BIG, numa=tuple(NumaNode(id=node, distances=row) for node, row in enumerate(ROWS)))
HYBRID = with_efficiency(uniform(sockets=2, nodes=2, cores=8, threads=1), lambda cpu: cpu.core % 4 > 1)

EFFICIENT_FIRST = with_efficiency(uniform(sockets=2, nodes=2, cores=8, threads=1), lambda cpu: cpu.core % 4 < 2)


def question(candidates: str, kept: str = "", **more: Any) -> PluginRequest:
    cpus = CpuSet.parse(candidates)
    return PluginRequest(
        demand=demand("pod", 2, **more), count=2, candidates=cpus, kept=CpuSet.parse(kept), tiers=(cpus,), pools=(cpus,)
    )


SCORES: dict[str, tuple[Plugin, Topology, dict[str, Any], str, float]] = {
    "performance cores": (PreferCoreKind(), HYBRID, {}, "0-2,4", 0.75),
    "efficiency cores for BE": (PreferCoreKind(), HYBRID, {"pod_class": PodClass.RECLAIMED}, "0-2,4", 0.25),
    "interrupts": (Interrupts(), BIG, {}, "2-5", 0.5),
    "one L3": (WholeL3(), BIG, {}, "0-3", 1.0),
    "three L3": (WholeL3(), BIG, {}, "0,4,8", 1 / 3),
    "three L3 to one who does not care": (WholeL3(), BIG, {"prefer_l3": False}, "0,4,8", 1.0),
    "one node": (NearNodes(), FAR, {}, "0,7", 1.0),
    "two near nodes": (NearNodes(), FAR, {}, "0,8", 10 / 11 / 2),
    "two far nodes": (NearNodes(), FAR, {}, "0,16", 10 / 25 / 2),
    "two far nodes, NUMA-bound": (NearNodes(), FAR, {"numa_binding": True}, "0,16", 10 / 25 / 3),
    "whole cores": (WholeCores(), BIG, {}, "0-1,32-33", 1.0),
    "a broken core of two": (WholeCores(), BIG, {}, "0-1,32", 0.5),
    "broken cores, to one who wants them so": (WholeCores(), BIG, {"spread_cores": True}, "0-1", 1.0),
    "threads of their own cores": (OneThread(), BIG, {"spread_cores": True}, "0-3", 1.0),
    "two of four on one core": (OneThread(), BIG, {"spread_cores": True}, "0-2,32", 0.75),
    "two on one core for one who does not care": (OneThread(), BIG, {}, "0,32", 1.0),
    "nobody to be apart from": (KeepApart(), BIG, {"apart": AntiAffinity.CORE}, "0,32", 1.0),
    "even": (Spread(), BIG, {"distribute": True}, "0-1,8-9", 1.0),
    "on both of its nodes": (Spread(), BIG, {"every_node": True, "nodes": (0, 1)}, "0-1,8-9", 1.0),
    "on one of its nodes": (Spread(), BIG, {"every_node": True, "nodes": (0, 1)}, "0-1", 0.0),
    "unevenly on both of its nodes": (Spread(), BIG, {"every_node": True, "nodes": (0, 1)}, "0-1,8", 0.75),
    "uneven": (Spread(), BIG, {"distribute": True}, "0-3,8", 0.25),
    "uneven for one who does not care": (Spread(), BIG, {}, "0-3,8", 1.0),
    "one socket": (OneSocket(), BIG, {"align_socket": True}, "0,8", 1.0),
    "two sockets": (OneSocket(), BIG, {"align_socket": True}, "0,16", 0.5),
    "two sockets for one who does not care": (OneSocket(), BIG, {}, "0,16", 1.0),
    "nothing held, nothing remembered": (LeastMovement(), BIG, {}, "0-1", 1.0),
    "half of what it held": (LeastMovement(), BIG, {"held": "0-3"}, "0-1,6-7", 0.75),
    "half of it remembered": (LeastMovement(), BIG, {}, "30-31,62-63", 0.75),
    "what it held itself": (LeastMovement(), BIG, {"held": "30,62"}, "30,62", 1.0),
}


@pytest.mark.parametrize(("plugin", "topology", "more", "cpus", "expected"), SCORES.values(), ids=SCORES.keys())
def test_scores(plugin: Plugin, topology: Topology, more: dict[str, Any], cpus: str, expected: float) -> None:
    context = PlacementContext(
        topology=topology,
        fitter=CpuAccumulator(topology),
        interrupts=CpuSet.parse("4-7"),
        remembered=CpuSet.parse("30,62"),
    )
    score = plugin.score(question(str(topology.online), **more), context, CpuSet.parse(cpus))
    assert score == pytest.approx(expected)


def test_a_lone_thread_is_half_as_bad_as_breaking_a_free_core() -> None:
    context = PlacementContext(topology=BIG, fitter=CpuAccumulator(BIG))
    lone = WholeCores().score(question("0-63", kept=""), context, CpuSet([0]))
    beside = WholeCores().score(question("0-31,33-63"), context, CpuSet([0]))
    assert (lone, beside) == (0.0, 0.5)


SINGLE = {"spread_cores": True}
WINS: dict[str, tuple[Topology, str, int, dict[str, Any], str]] = {
    "a whole core in the next L3 before two halves in one": (BIG, "0-1,4,36", 2, {}, "4,36"),
    "two halves in one node before whole cores in two": (BIG, "0-3,8,40,16,48", 4, {}, "0-3"),
    "the L3 of a node already used, an untouched node stays whole": (BIG, "0-31,32-63", 2, {}, "0,32"),
    "of equal L3 the one with less free beside it": (BIG, "0-7,12-15,32-39,44-47", 2, {}, "12,44"),
    "of equal nodes the one with less free beside it": (BIG, "0-15,32-47,16-23,48-55", 2, {}, "16,48"),
    "one node with room before a socket with the exact number": (
        BIG,
        "0-2,32-34,8-10,40-42,16-22,48-54,24-30,56-62",
        12,
        {},
        "16-21,48-53",
    ),
    "performance cores in two L3 before efficiency cores in one": (
        with_efficiency(shape(cores=8, threads=1, l3=2), lambda cpu: cpu.core in {1, 2, 3}),
        "0-4",
        2,
        {},
        "0,4",
    ),
    "one node before performance cores": (HYBRID, "2-4", 2, {}, "2-3"),
    "the performance cores of the one node that holds it": (HYBRID, "2-3,5-7", 3, {}, "5-7"),
    "one node, and there its performance cores": (EFFICIENT_FIRST, "0-2,7", 2, {}, "0,2"),
    "on each of its nodes": (BIG, "0-63", 4, {"every_node": True, "nodes": (1, 3)}, "8,24,40,56"),
    "on each of its nodes as even as can be": (BIG, "0-63", 5, {"every_node": True, "nodes": (1, 3)}, "8-9,24,40,56"),
    "on fewer nodes where there are too few CPUs for each": (
        BIG,
        "0-63",
        1,
        {"every_node": True, "nodes": (1, 3)},
        "8",
    ),
    "whole cores on each of its nodes": (
        BIG,
        "0-63",
        4,
        {"every_node": True, "nodes": (0, 2), "full_cores": True},
        "0,16,32,48",
    ),
    "single threads of free cores": (BIG, "0-63", 4, SINGLE, "0-3"),
    "single threads of the cores that nobody else is on": (BIG, "0-3,6,34-35,38", 2, SINGLE, "2-3"),
    "single threads beside somebody before two of one core": (BIG, "0,32,1", 2, SINGLE, "0-1"),
    "single threads in two L3 before a whole core in one": (BIG, "0,32,4,36", 2, SINGLE, "0,4"),
    "whole cores of one node before single threads on two": (BIG, "0-1,32-33,16-18", 4, SINGLE, "0-1,32-33"),
}


@pytest.mark.parametrize(("topology", "free", "count", "more", "expected"), WINS.values(), ids=WINS.keys())
def test_what_wins(topology: Topology, free: str, count: int, more: dict[str, Any], expected: str) -> None:
    got = allocate([demand("pod", count, **more)], CpuSet.parse(free), topology)
    assert str(got.cpus.get("pod/c", EMPTY)) == expected


@pytest.mark.parametrize(("align", "sockets"), [(True, {0}), (False, {0, 1})], ids=["aligned", "not aligned"])
def test_one_socket_before_fewer_nodes_only_where_asked_for(align: bool, sockets: set[int]) -> None:
    topology = shape(sockets=2, nodes=6, cores=24, threads=1)
    got = allocate([demand("pod", 6, distribute=True, align_socket=align)], CpuSet.parse("0-2,4-5,8-9,12-14"), topology)
    assert {socket for socket, cpus in topology.sockets().items() if cpus & got.cpus["pod/c"]} == sockets


@pytest.mark.parametrize(("bound", "nodes"), [(True, {0}), (False, {0, 1})], ids=["bound", "not bound"])
def test_a_bound_one_stays_on_one_node_longer(bound: bool, nodes: set[int]) -> None:
    # Half of it is between what a second node and L3 cost without binding (6.7 + 2) and with it (7.8 + 2).
    chain = load(PlacementConfig(plugins={"kind": 18.5}))
    got = allocate([demand("pod", 4, numa_binding=bound)], HYBRID.online, HYBRID, chain)
    assert {HYBRID.node_of(cpu) for cpu in got.cpus["pod/c"]} == nodes


APART: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "another core": ({"apart": AntiAffinity.CORE}, {"apart": AntiAffinity.CORE}, "0-31,33-63", "1"),
    "another node": ({"apart": AntiAffinity.NODE}, {"apart": AntiAffinity.NODE}, "0-63", "8"),
    "beside one who does not mind": ({}, {"apart": AntiAffinity.CORE}, "0-31,33-63", "32"),
    "beside one who minds other things": (
        {"apart": AntiAffinity.NODE},
        {"apart": AntiAffinity.CORE},
        "0-31,33-63",
        "32",
    ),
    "not minding": ({"apart": AntiAffinity.CORE}, {}, "0-63", "32"),
    "no other core": ({"apart": AntiAffinity.CORE}, {"apart": AntiAffinity.CORE}, "0,32", "32"),
    "no other node": ({"apart": AntiAffinity.NODE}, {"apart": AntiAffinity.NODE}, "0-2,32", "32"),
}


@pytest.mark.parametrize(("held", "new", "free", "expected"), APART.values(), ids=APART.keys())
def test_apart_from_pods_of_the_same_wish(held: dict[str, Any], new: dict[str, Any], free: str, expected: str) -> None:
    """A container of one thread sits on CPU 0; which one the other pod's gets."""
    there = CpuSet.parse("0")
    got = allocate(
        [demand("old", 1, "0", **held), demand("new", 1, **new)],
        CpuSet.parse(free) | there | CpuSet([32]),
        BIG,
        load(PlacementConfig(plugins={"movement": 0})),
    )
    assert got.cpus["old/c"] == there
    assert str(got.cpus["new/c"]) == expected


def test_apart_concerns_other_pods_only() -> None:
    first, second = demand("pod", 1, "0", apart=AntiAffinity.CORE), demand("pod", 1, apart=AntiAffinity.CORE)
    got = allocate([first, replace(second, key="pod/d")], BIG.online, BIG)
    assert got.cpus["pod/d"] == CpuSet([32])


def test_where_apart_cannot_be_had_the_fewest_shared_cores_are() -> None:
    # Cores 0 and 1 are with the first pod; three threads are left beside it, two elsewhere.
    got = allocate(
        [demand("old", 2, "0-1", apart=AntiAffinity.CORE), demand("new", 3, apart=AntiAffinity.CORE)],
        CpuSet.parse("0-1,32-33,4,36"),
        BIG,
    )
    assert str(got.cpus["new/c"]) == "4,32,36"


def test_switched_off_nobody_is_kept_apart() -> None:
    chain = load(PlacementConfig(plugins={"apart": 0}))
    demands = [demand("old", 1, "0", apart=AntiAffinity.CORE), demand("new", 1, apart=AntiAffinity.CORE)]
    assert allocate(demands, BIG.online, BIG, chain).cpus["new/c"] == CpuSet([32])
