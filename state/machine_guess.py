"""Candidate descriptions of a topology, and their text.

Candidates are checked by building them, so they only have to include the right one; the more probable are first.
"""

from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY
from state.machine_shape import NUMBERINGS, MachineDescription
from state.topology import CpuKind, Topology

_UNITS: Final = (("T", 40), ("G", 30), ("M", 20), ("K", 10))


def suggestions(topology: Topology) -> Iterator[MachineDescription]:
    """Descriptions with the topology's number of CPUs; none for a machine whose parts differ in size."""
    for shape in _shapes(topology):
        for numbered in NUMBERINGS:
            yield replace(shape, numbering=numbered)


def _shapes(topology: Topology) -> Iterator[MachineDescription]:
    total = len(topology.online | topology.offline)
    sockets = len(topology.sockets())
    threads = max(map(len, topology.cores()))
    slow = topology.kind_cpus(CpuKind.EFFICIENCY)
    bare = [node for node in topology.numa if not topology.node_cpus(node.id)]
    # With CPUs offline a node without any may have lost them all, and a core may have lost threads everywhere.
    for memory_nodes in dict.fromkeys((len(bare), 0) if topology.offline else (len(bare),)):
        domains = len(topology.numa) - memory_nodes
        off = domains < sockets
        if (off and domains != 1) or (not off and domains % sockets):
            continue
        nodes = 1 if off else domains // sockets
        for each in (threads, 2 * threads) if topology.offline else (threads,):
            for e_cores in dict.fromkeys((0, len(slow) // (sockets * nodes))):
                left = total - e_cores * sockets * nodes
                cores = left // (sockets * nodes * each)
                machine = MachineDescription(
                    sockets=sockets,
                    nodes=nodes,
                    cores=cores,
                    threads=each,
                    e_cores=e_cores,
                    numa_off=off,
                    efficiency=EMPTY if e_cores else slow,
                    offline=topology.offline,
                    isolated=topology.isolated,
                    distances=_distances(topology, domains, nodes),
                    memory_nodes=memory_nodes,
                    memory_bytes=topology.numa[0].memory_bytes,
                    memory_node_bytes=topology.numa[-1].memory_bytes if memory_nodes else None,
                )
                if cores > 0 and machine.size == total:
                    yield from _caches(machine, topology)


def _caches(machine: MachineDescription, topology: Topology) -> Iterator[MachineDescription]:
    """An L3 for each node, for each socket, or for so many cores."""
    yield machine
    yield replace(machine, l3_socket=True)
    domains = max(topology.l3_domains()) + 1
    cores = machine.domains * (machine.cores + machine.e_cores)
    each = cores // domains
    if 0 < each <= cores // machine.domains and (machine.cores + machine.e_cores) % each == 0:
        yield replace(machine, l3_cores=each)


def _distances(topology: Topology, domains: int, nodes: int) -> tuple[tuple[int, ...], ...]:
    """As levels where they are some, else row by row."""
    rows = tuple(node.distances for node in topology.numa)
    if not all(rows):
        return ()
    within: set[int] = set()
    across: set[int] = set()
    for item, row in enumerate(rows):
        for other, distance in enumerate(row):
            if other != item:
                near = max(item, other) < domains and item // nodes == other // nodes
                (within if near else across).add(distance)
    own = {row[number] for number, row in enumerate(rows)}
    if max(len(own), len(within), len(across)) > 1:
        return rows
    both = within | across
    return ((rows[0][0], *both),) if len(both) < 2 else ((rows[0][0], *within, *across),)


def explain(machine: MachineDescription) -> str:
    """The text of a description; default values are left out."""
    counts = {"socket": machine.sockets, "node": machine.nodes, "core": machine.cores, "thread": machine.threads}
    shape = " x ".join(_count(number, name) for name, number in counts.items() if number > 1 or name == "core")
    parts = [f"{shape} + {machine.e_cores} e-cores" if machine.e_cores else shape]
    if machine.l3_cores is not None:
        parts.append("l3 per core" if machine.l3_cores == 1 else f"l3 per {machine.l3_cores} cores")
    elif machine.l3_socket:
        parts.append("l3 per socket")
    for name, cpus in (("e-cores", machine.efficiency), ("offline", machine.offline), ("isolated", machine.isolated)):
        if cpus:
            parts.append(f"{name} {cpus}")
    if machine.distances:
        parts.append(f"distance {' / '.join(' '.join(map(str, row)) for row in machine.distances)}")
    if machine.memory_bytes is not None:
        parts.append(f"memory {_size(machine.memory_bytes)} per node")
    if machine.memory_nodes:
        size = "" if machine.memory_node_bytes is None else f" of {_size(machine.memory_node_bytes)}"
        parts.append(f"memory nodes {machine.memory_nodes}{size}")
    if machine.numbering != NUMBERINGS[0]:
        parts.append(f"numbering {machine.numbering}")
    if machine.numa_off:
        parts.append("numa off")
    return "; ".join(parts)


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' if number != 1 else ''}"


def _size(count: int) -> str:
    for unit, shift in _UNITS:
        if count and not count & ((1 << shift) - 1):
            return f"{count >> shift}{unit}"
    return str(count)
