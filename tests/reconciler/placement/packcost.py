"""The objective of `reconciler.placement.pack` as numbers, for tests and benchmarks."""

from collections.abc import Mapping
from typing import NamedTuple

from cgroupfs.cpuset import CpuSet
from state.topology import Topology


class PackCost(NamedTuple):
    """What a packing costs; compared in this order.

    ``moved``: CPUs given to a pool that it did not hold. ``split``: cores of which a pool has some free thread but not
    all of them, counted for each pool. ``nodes``, ``caches``: NUMA nodes and L3 domains in use, counted for each pool.
    """

    moved: int
    split: int
    nodes: int
    caches: int


def cost(packed: Mapping[str, CpuSet], held: Mapping[str, CpuSet], free: CpuSet, topology: Topology) -> PackCost:
    """The objective of `pack` for one packing."""
    sets = [cpus for cpus in packed.values() if cpus]
    cores = [core & free for core in topology.cores()]
    nodes = [topology.node_cpus(node) for node in topology.nodes()]
    return PackCost(
        moved=sum(len(cpus - held.get(name, CpuSet())) for name, cpus in packed.items()),
        split=sum(bool(core & cpus) and not core <= cpus for cpus in sets for core in cores),
        nodes=sum(bool(node & cpus) for cpus in sets for node in nodes),
        caches=sum(bool(cache & cpus) for cpus in sets for cache in topology.l3_domains().values()),
    )
