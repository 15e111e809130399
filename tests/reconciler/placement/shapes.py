"""Machines for placement tests: regular ones from a few numbers, the kubelet's own, irregular ones."""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final

from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from reconciler.placement.demand import CpuDemand
from reconciler.placement.hints import CPU
from reconciler.placement.resource_hints import ResourceCapacity
from state.topology import Cpu, CpuKind, Topology, uniform

CPU_S: Final = 5.0
"""Ten times what the longest bounded search takes; without its bound it takes hours."""


@contextmanager
def at_most(cpu_s: float) -> Iterator[None]:
    """Fails where the block uses more CPU time of this thread."""
    began = time.thread_time()
    yield
    assert time.thread_time() - began < cpu_s


def shape(*, sockets: int = 1, nodes: int = 1, l3: int | None = None, cores: int, threads: int = 2) -> Topology:
    """`uniform` with ``l3`` L3 domains on the whole machine; left out, one a node."""
    made = uniform(sockets=sockets, nodes=nodes, cores=cores, threads=threads)
    if l3 is None:
        return made
    return replace(made, cpus=tuple(replace(cpu, l3=cpu.core * l3 // cores) for cpu in made.cpus))


def cpu_capacity(topology: Topology, free: CpuSet, request: int, *, align_socket: bool = False) -> ResourceCapacity:
    """Whole CPUs by NUMA node; ``free`` are those that the container may have (its own included)."""
    return ResourceCapacity(
        name=CPU,
        request=request,
        total={node: len(topology.node_cpus(node)) for node in topology.nodes()},
        free={node: len(topology.node_cpus(node) & free) for node in topology.nodes()},
        align_socket=align_socket,
    )


def without(topology: Topology, offline: Collection[int]) -> Topology:
    """The same machine after some CPUs went offline."""
    left = tuple(cpu for cpu in topology.cpus if cpu.id not in offline)
    named = {cpu.node for cpu in left}
    return Topology(
        online=CpuSet(cpu.id for cpu in left),
        cpus=left,
        offline=topology.offline | CpuSet(offline),
        numa=tuple(replace(node, distances=()) for node in topology.numa if node.id in named),
    )


def with_efficiency(topology: Topology, is_slow: Callable[[Cpu], bool]) -> Topology:
    """The same machine with some cores being efficiency cores of one thread."""
    kept = [cpu for cpu in topology.cpus if not (is_slow(cpu) and cpu.thread)]
    return Topology(
        online=CpuSet(cpu.id for cpu in kept),
        cpus=tuple(replace(cpu, kind=CpuKind.EFFICIENCY) if is_slow(cpu) else cpu for cpu in kept),
    )


# The kubelet's test machines (pkg/kubelet/cm/cpumanager): numbered by socket alternately, or node after node.
SINGLE_SOCKET_HT = uniform(cores=4, threads=2)
DUAL_SOCKET_HT = Topology(
    online=CpuSet.span(12),
    cpus=tuple(Cpu(id=n, core=n % 6, socket=n % 2, node=n % 2, l3=n % 2, thread=n // 6) for n in range(12)),
)
DUAL_SOCKET_NO_HT = Topology(
    online=CpuSet.span(8), cpus=tuple(Cpu(id=n, core=n, socket=n // 4, node=n // 4, l3=n // 4) for n in range(8))
)
MULTI_NUMA_HT = uniform(sockets=2, nodes=4, cores=40, threads=2)
MULTI_NUMA_HT_LARGE = uniform(sockets=2, nodes=8, cores=128, threads=2)
UNCORE_NO_SMT = shape(cores=16, threads=1, l3=4)
UNCORE_SMT = shape(cores=8, threads=2, l3=2)
UNCORE_DUAL_NO_SMT = shape(sockets=2, nodes=2, cores=16, threads=1, l3=4)
UNCORE_MULTI_NUMA = shape(nodes=2, cores=16, threads=1, l3=4)


def demand(key: str, count: int, held: str = "", explicit: str | None = None, **more: Any) -> CpuDemand:
    """A demand of pod ``key``, container c."""
    chosen = None if explicit is None else CpuSet.parse(explicit)
    return CpuDemand(key=f"{key}/c", count=count, held=CpuSet.parse(held), explicit=chosen, **more)
