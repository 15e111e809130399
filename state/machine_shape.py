"""A machine of so many sockets, nodes, cores and threads, and the topology that Linux would show of it.

`state.machine` reads one from a line of text, `state.machine` finds the one behind a topology.
"""

from typing import Final, NoReturn

from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.errors import InputError
from state.topology import Cpu, CpuKind, NumaNode, Topology

NUMBERINGS: Final = ("firmware", "adjacent", "alternating")


class MachineDescription(Struct, frozen=True, kw_only=True):
    """A description, taken apart. Each of ``nodes``, ``cores``, ``threads`` is per one of the level before.

    ``l3_cores`` None: one L3 for each node, ``l3_socket``: for each socket. ``distances`` are levels (one row) or one
    row for each node. ``efficiency``: the cores of these CPUs are efficiency cores.
    """

    sockets: int = 1
    nodes: int = 1
    cores: int = 1
    threads: int = 1
    e_cores: int = 0
    l3_cores: int | None = None
    l3_socket: bool = False
    efficiency: CpuSet = EMPTY
    offline: CpuSet = EMPTY
    isolated: CpuSet = EMPTY
    distances: tuple[tuple[int, ...], ...] = ()
    memory_bytes: int | None = None
    memory_nodes: int = 0
    memory_node_bytes: int | None = None
    numbering: str = "firmware"
    numa_off: bool = False

    @property
    def domains(self) -> int:
        """Groups of cores as the shape has them, in the order of the sockets: nodes, unless NUMA is off."""
        return self.sockets * self.nodes

    @property
    def numa_nodes(self) -> int:
        """NUMA nodes with CPUs."""
        return 1 if self.numa_off else self.domains

    @property
    def size(self) -> int:
        """All CPUs."""
        return self.domains * (self.cores * self.threads + self.e_cores)


def wrong(value: str, expected: str) -> NoReturn:
    """Errors: `InputError`, always: a part of a description, and what it should be."""
    raise InputError("machine", " ".join(value.split()), expected)


def build(machine: MachineDescription) -> Topology:
    """The topology of a description. Errors: `InputError` where its parts do not fit each other."""
    every = _all_cpus(machine)
    slow = {cpu.core for cpu in every if cpu.id in machine.efficiency}
    cpus = sorted((cpu for cpu in every if cpu.id not in machine.offline), key=lambda cpu: cpu.id)
    cores: dict[int, list[int]] = {}
    for cpu in cpus:
        cores.setdefault(cpu.core, []).append(cpu.id)
    online = CpuSet.span(machine.size) - machine.offline
    return Topology(
        online=online,
        # The kernel shows only what is online: an offline first thread has the second one count as the first.
        cpus=tuple(
            replace(
                cpu,
                core=cores[cpu.core][0],
                thread=cores[cpu.core].index(cpu.id),
                kind=CpuKind.EFFICIENCY if cpu.core in slow else cpu.kind,
            )
            for cpu in cpus
        ),
        offline=machine.offline,
        isolated=machine.isolated & online,
        numa=_nodes(machine),
    )


def _all_cpus(machine: MachineDescription) -> list[Cpu]:
    """Every CPU; ``core`` is only a number of its own for each core."""
    cpus: list[Cpu] = []
    performance = machine.domains * machine.cores
    for position in range(performance):
        domain, core = _place(machine, position, machine.cores)
        for thread in range(machine.threads):
            adjacent = machine.numbering == "adjacent"
            number = position * machine.threads + thread if adjacent else thread * performance + position
            cpus.append(_cpu(machine, number, domain, core, position))
    first = performance * machine.threads
    for position in range(machine.domains * machine.e_cores):
        domain, core = _place(machine, position, machine.e_cores)
        cpu = _cpu(machine, first + position, domain, machine.cores + core, performance + position)
        cpus.append(replace(cpu, kind=CpuKind.EFFICIENCY))
    return cpus


def _place(machine: MachineDescription, position: int, cores: int) -> tuple[int, int]:
    """The domain of a core, and its number there."""
    if machine.numbering == "alternating":
        return position % machine.domains, position // machine.domains
    return divmod(position, cores)


def _cpu(machine: MachineDescription, number: int, domain: int, core: int, unique: int) -> Cpu:
    socket = domain // machine.nodes
    if machine.l3_cores is not None:
        l3 = domain * ((machine.cores + machine.e_cores) // machine.l3_cores) + core // machine.l3_cores
    else:
        l3 = socket if machine.l3_socket else domain
    return Cpu(
        id=number,
        core=unique,
        socket=socket,
        node=0 if machine.numa_off else domain,
        l3=l3,
    )


def _nodes(machine: MachineDescription) -> tuple[NumaNode, ...]:
    count = machine.numa_nodes + machine.memory_nodes
    rows = _rows(machine, count)
    sizes = [machine.memory_bytes] * machine.numa_nodes + [machine.memory_node_bytes] * machine.memory_nodes
    return tuple(NumaNode(id=node, distances=rows[node], memory_bytes=sizes[node]) for node in range(count))


def _rows(machine: MachineDescription, count: int) -> list[tuple[int, ...]]:
    numbers = machine.distances
    if not numbers:
        return [()] * count
    shown = f"distance {' / '.join(' '.join(map(str, row)) for row in numbers)}"
    if len(numbers) > 1:
        if len(numbers) != count or any(len(row) != count for row in numbers):
            wrong(shown, f"{count} rows of {count} numbers, one for each node")
        return list(numbers)
    levels = numbers[0]
    if len(levels) > 3 or (len(levels) == 1 and count > 1):
        wrong(shown, f"two or three numbers, or {count} rows of {count} numbers divided by /")

    def between(number: int, other: int) -> int:
        if number == other:
            return levels[0]
        # A node of memory only is as far as another socket.
        together = max(number, other) < machine.numa_nodes and number // machine.nodes == other // machine.nodes
        return levels[1] if together else levels[-1]

    return [tuple(between(index, other) for other in range(count)) for index in range(count)]
