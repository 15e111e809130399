"""CPU topology: threads in cores, cores under L3 caches, in NUMA nodes, in sockets; fast and slow kinds.

Every number here is unique on the machine. `state.topology_sysfs` reads a machine, `state.machine` a description.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import cached_property
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import force_setattr

from cgroupfs.cpuset import EMPTY, CpuSet

K = TypeVar("K")

FULL_CAPACITY: Final = 1024
LOCAL_DISTANCE: Final = 10
REMOTE_DISTANCE: Final = 20
"""The kernel's default distance of two nodes where the firmware reports none (include/linux/topology.h)."""


class CpuKind(StrEnum):
    """Performance or efficiency core; machines with one kind have only P."""

    PERFORMANCE = "P"
    EFFICIENCY = "E"


class Cpu(Struct, frozen=True, kw_only=True):
    """One online CPU (hardware thread)."""

    id: int
    core: int
    socket: int = 0
    node: int = 0
    l3: int = 0
    thread: int = 0  # counts within the core
    kind: CpuKind = CpuKind.PERFORMANCE
    capacity: int = FULL_CAPACITY  # the fastest has 1024


class NumaNode(Struct, frozen=True, kw_only=True):
    """One NUMA node, with CPUs or of memory only. Free memory is not included: it changes by the second."""

    id: int
    # To every node of the machine in ascending order of their numbers, itself included (the firmware's SLIT: 10 is
    # local); empty: not known.
    distances: tuple[int, ...] = ()
    memory_bytes: int | None = None  # ordinary memory there (`state.memory`); 0: a node of CPUs only; None: not known


class Topology(Struct, frozen=True, kw_only=True, dict=True):
    """The CPUs of a machine. Given only the online ones, every CPU is a core of its own in one socket and node."""

    online: CpuSet
    cpus: tuple[Cpu, ...] = ()
    offline: CpuSet = EMPTY
    isolated: CpuSet = EMPTY  # the kernel's isolcpus: online, but not part of the scheduler's balancing
    # In ascending order; left out: the nodes that the CPUs name, of which no more is known.
    numa: tuple[NumaNode, ...] = ()

    def __post_init__(self) -> None:
        # The struct is frozen: defaults that follow from other fields are set here, before anyone has it.
        if not self.cpus:
            force_setattr(self, "cpus", tuple(Cpu(id=cpu, core=cpu) for cpu in self.online))
        described = CpuSet(cpu.id for cpu in self.cpus)
        if described != self.online or len(self.cpus) != len(self.online):
            raise ValueError(f"CPUs {described} are described but {self.online} are online")
        named = {cpu.node for cpu in self.cpus}
        if not self.numa:
            force_setattr(self, "numa", tuple(NumaNode(id=node) for node in sorted(named)))
        ids = [node.id for node in self.numa]
        if ids != sorted(set(ids)) or not named <= set(ids):
            raise ValueError(f"CPUs are in NUMA nodes {sorted(named)}, but the nodes described are {ids}")
        if any(len(node.distances) not in (0, len(ids)) for node in self.numa):
            raise ValueError(f"a NUMA node has distances to other than the {len(ids)} nodes of the machine")

    def cpu(self, number: int) -> Cpu:
        """One CPU. Errors: `KeyError` when it is not online."""
        return self._by_id[number]

    def node_of(self, cpu: int) -> int:
        """The NUMA node of a CPU. Errors: `KeyError` when it is not online."""
        return self._by_id[cpu].node

    def siblings(self, cpu: int) -> CpuSet:
        """The threads of the CPU's core, itself included. Errors: `KeyError` when it is not online."""
        return self._cores[self._by_id[cpu].core]

    def cores(self) -> tuple[CpuSet, ...]:
        """Every core as the set of its online threads, by lowest CPU."""
        return self._core_list

    def whole_cores(self, cpus: CpuSet) -> CpuSet:
        """The CPUs of ``cpus`` whose core is inside ``cpus`` completely."""
        missing, whole = ~cpus.mask, 0
        for core in self._core_masks:
            if not core & missing:
                whole |= core
        return CpuSet.from_mask(whole)

    def nodes(self) -> tuple[int, ...]:
        """Numbers of the NUMA nodes that have online CPUs, ascending."""
        return tuple(sorted(self._nodes))

    def node_cpus(self, node: int) -> CpuSet:
        """The online CPUs of one NUMA node; empty for a node of memory only or none at all."""
        return self._nodes.get(node, EMPTY)

    def node(self, number: int) -> NumaNode:
        """One NUMA node. Errors: `KeyError` when there is none of this number."""
        return self._numa[number]

    def memory_nodes(self) -> CpuSet:
        """The NUMA nodes that have memory, with CPUs or without: all that cpu.mems may name.

        A node whose memory is unknown counts as having some.
        """
        return self._memory

    def distance(self, number: int, other: int) -> int:
        """Distance of the memory of one node from another: 10 within a node, larger is slower.

        Where the firmware reports nothing, 20 as in the kernel. Errors: `KeyError` when no such node exists.
        """
        return self._distances[number][other]

    def nearest(self, node: int) -> tuple[int, ...]:
        """All NUMA nodes from the nearest to the farthest, itself first; equally far ones by number.

        Errors: `KeyError` when there is none of this number.
        """
        return self._nearest[node]

    def node_sockets(self, node: int) -> tuple[int, ...]:
        """The sockets that a NUMA node's CPUs are in: one, but for firmware that hides its nodes (interleaving).

        A node of memory only has none.
        """
        return self._node_sockets.get(node, ())

    def l3_domains(self) -> Mapping[int, CpuSet]:
        """CPUs by the L3 cache they share; without L3 by socket and node."""
        return self._l3

    def sockets(self) -> Mapping[int, CpuSet]:
        return self._sockets

    def kind_cpus(self, kind: CpuKind) -> CpuSet:
        return self._kinds.get(kind, EMPTY)

    @property
    def smt(self) -> bool:
        """Whether any core has more than one online thread."""
        return len(self._cores) < len(self.cpus)

    @cached_property
    def threads(self) -> int:
        """Online threads of the core that has the most; 1 without a core."""
        return max(map(len, self._core_list), default=1)

    # The struct is frozen, so what is derived is computed once, at first use.
    @cached_property
    def _by_id(self) -> dict[int, Cpu]:
        return {cpu.id: cpu for cpu in self.cpus}

    @cached_property
    def _cores(self) -> dict[int, CpuSet]:
        return _grouped(self.cpus, lambda cpu: cpu.core)

    @cached_property
    def _core_list(self) -> tuple[CpuSet, ...]:
        return tuple(self._cores.values())

    @cached_property
    def _core_masks(self) -> tuple[int, ...]:
        return tuple(core.mask for core in self._core_list)

    @cached_property
    def _nodes(self) -> dict[int, CpuSet]:
        return _grouped(self.cpus, lambda cpu: cpu.node)

    @cached_property
    def _l3(self) -> dict[int, CpuSet]:
        return _grouped(self.cpus, lambda cpu: cpu.l3)

    @cached_property
    def _sockets(self) -> dict[int, CpuSet]:
        return _grouped(self.cpus, lambda cpu: cpu.socket)

    @cached_property
    def _kinds(self) -> dict[CpuKind, CpuSet]:
        return _grouped(self.cpus, lambda cpu: cpu.kind)

    @cached_property
    def _numa(self) -> dict[int, NumaNode]:
        return {node.id: node for node in self.numa}

    @cached_property
    def _memory(self) -> CpuSet:
        return CpuSet(node.id for node in self.numa if node.memory_bytes != 0)

    @cached_property
    def _distances(self) -> dict[int, dict[int, int]]:
        ids = [node.id for node in self.numa]
        return {node.id: dict(zip(ids, node.distances or _assumed(node.id, ids), strict=True)) for node in self.numa}

    @cached_property
    def _nearest(self) -> dict[int, tuple[int, ...]]:
        # Some firmware gives a node no smaller distance to itself than to others.
        return {
            node: tuple(sorted(row, key=lambda other: (other != node, row[other], other)))
            for node, row in self._distances.items()
        }

    @cached_property
    def _node_sockets(self) -> dict[int, tuple[int, ...]]:
        return _pairs((cpu.node, cpu.socket) for cpu in self.cpus)


def _assumed(node: int, ids: list[int]) -> tuple[int, ...]:
    return tuple(LOCAL_DISTANCE if other == node else REMOTE_DISTANCE for other in ids)


def _grouped(cpus: Iterable[Cpu], key: Callable[[Cpu], K]) -> dict[K, CpuSet]:
    masks: dict[K, int] = {}
    for cpu in sorted(cpus, key=lambda cpu: cpu.id):
        number = key(cpu)
        masks[number] = masks.get(number, 0) | 1 << cpu.id
    return {number: CpuSet.from_mask(mask) for number, mask in masks.items()}


def _pairs(pairs: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    groups: dict[int, list[int]] = {}
    for left, right in sorted(set(pairs)):
        groups.setdefault(left, []).append(right)
    return {left: tuple(rights) for left, rights in groups.items()}


def uniform(*, sockets: int = 1, nodes: int = 1, cores: int = 4, threads: int = 2) -> Topology:
    """A machine of ``cores`` cores in all, numbered as x86 firmware does: first threads first, then second ones.

    Nodes are spread evenly over the machine, each with an L3 of its own. Errors: `ValueError` for an uneven split.
    """
    if min(sockets, nodes, cores, threads) < 1 or cores % sockets or cores % nodes:
        raise ValueError(f"{cores} cores cannot be split evenly into {sockets} sockets and {nodes} nodes")
    return Topology(
        online=CpuSet.span(cores * threads),
        cpus=tuple(
            Cpu(
                id=thread * cores + core,
                core=core,
                socket=core * sockets // cores,
                node=core * nodes // cores,
                l3=core * nodes // cores,
                thread=thread,
            )
            for thread in range(threads)
            for core in range(cores)
        ),
    )
