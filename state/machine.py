"""A machine in one line of text: for plans without a node, for tests, and as the description of a machine.

    2 sockets x 2 nodes x 8 cores x 2 threads; l3 per 4 cores; offline 3; isolated 4-7; distance 10 12 32

`parse` makes a `Topology` of it, `describe` the text of a topology that is regular enough to have one. docs/machine.md
describes every part.
"""

import re
from collections.abc import Callable, Iterator
from typing import Final, NoReturn

from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, MAX_CPUS, CpuSet
from cgroupfs.errors import InputError
from state.topology import Cpu, CpuKind, NumaNode, Topology

NUMBERINGS: Final = ("firmware", "adjacent", "alternating")
_SIZE_UNITS: Final = (("T", 40), ("G", 30), ("M", 20), ("K", 10))
_LEVELS: Final = ("sockets", "nodes", "cores", "threads")
_LEVEL: Final = re.compile(r"(\d{1,9})\s*(socket|node|core|thread)s?(?:\s+|$)")
_BETWEEN: Final = re.compile(r"(?<![a-z])[x\u00d7](?![a-z])|[*,]")
_E_CORES: Final = re.compile(r"(\d{1,9})\s*e-?cores?")
_L3: Final = re.compile(r"per\s+(?:(?:(\d{1,9})\s*)?cores?|(node|socket))")
_SIZE: Final = re.compile(r"(\d{1,9})\s*([kmgt]?)(?:i?b?)(?:\s+per\s+node)?")
_MEMORY_NODES: Final = re.compile(r"(\d{1,9})(?:\s+of\s+(.+))?")
_UNITS: Final = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_FARTHEST: Final = 255
"""The firmware's table (ACPI SLIT) has one byte for each distance."""
_MOST_NODES: Final = 1024
"""Of the largest Linux (NODES_SHIFT 10)."""
_EXAMPLE: Final = "such as '2 sockets x 2 nodes x 8 cores x 2 threads'"


class MachineDescription(Struct, frozen=True, kw_only=True):
    """A description, taken apart."""

    sockets: int = 1
    nodes: int = 1  # per socket
    cores: int = 1  # per node
    threads: int = 1  # per core
    e_cores: int = 0
    l3_cores: int | None = None  # cores under one L3; None: one L3 for each node
    l3_socket: bool = False  # one L3 for each socket
    efficiency: CpuSet = EMPTY  # the cores of these CPUs are efficiency cores
    offline: CpuSet = EMPTY
    isolated: CpuSet = EMPTY
    distances: tuple[tuple[int, ...], ...] = ()  # levels (one row), or one row for each node
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
        return 1 if self.numa_off else self.domains

    @property
    def size(self) -> int:
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


def suggestions(topology: Topology) -> Iterator[MachineDescription]:
    """Descriptions with the topology's number of CPUs; none for a machine whose parts differ in size.

    One of them has to be right, as `describe` builds and compares each; the more probable are first.
    """
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
        off = domains < sockets  # several sockets in one node
        if (off and domains != 1) or (not off and domains % sockets):
            continue
        nodes = 1 if off else domains // sockets
        for each in (threads, 2 * threads) if topology.offline else (threads,):
            # Slow CPUs are E-cores beside the others, or else cores of the regular shape that are listed.
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
    # One level fewer where all other nodes are equally far.
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
    for unit, shift in _SIZE_UNITS:
        if count and not count & ((1 << shift) - 1):
            return f"{count >> shift}{unit}"
    return str(count)


def parse(text: str) -> Topology:
    """The machine that the text describes.

    Numbers are those that Linux would show: a core has the number of its lowest online CPU, sockets, nodes and L3
    caches count from 0. Errors: `InputError` with the part that is wrong and what was expected.
    """
    shape, *parts = text.split(";")
    machine = _shape(shape)
    seen: set[str] = set()
    for part in parts:
        message = " ".join(part.lower().split())
        if not message:
            continue
        for name, read in _PARTS.items():
            if message == name or message.startswith(f"{name} "):
                if name in seen:
                    wrong(part, f"{name} only once")
                seen.add(name)
                machine = read(machine, message.removeprefix(name).strip(), part)
                break
        else:
            wrong(part, f"one of {', '.join(_PARTS)}")
    return build(machine)


# The parts


def _shape(text: str) -> MachineDescription:
    counts: dict[str, int] = {}
    levels, *more = text.lower().split("+")
    # An x, a comma or a multiplication sign between the levels has no meaning: their names do.
    rest = _BETWEEN.sub(" ", levels).strip()
    while rest or not counts:
        match = _LEVEL.match(rest)
        if match is None:
            wrong(rest or text, f"a number of {', '.join(_LEVELS)}, {_EXAMPLE}")
        name, rest = f"{match[2]}s", rest[match.end() :]
        if counts and _LEVELS.index(name) <= _LEVELS.index(list(counts)[-1]):
            wrong(text, f"{' before '.join(_LEVELS)}, each once, {_EXAMPLE}")
        counts[name] = int(match[1])
        if not 0 < counts[name] <= MAX_CPUS:
            wrong(match[0], f"1 to {MAX_CPUS} {name}")
    sockets, nodes, cores, threads = (counts.get(name, 1) for name in _LEVELS)
    machine = MachineDescription(sockets=sockets, nodes=nodes, cores=cores, threads=threads)
    for extra in more:
        match = _E_CORES.fullmatch(extra.strip())
        if match is None or len(more) > 1:
            wrong(f"+{extra}", "a number of efficiency cores, such as '8 cores x 2 threads + 16 e-cores'")
        machine = replace(machine, e_cores=min(int(match[1]), MAX_CPUS))
    if machine.size > MAX_CPUS:
        wrong(text, f"at most {MAX_CPUS} CPUs; these are {machine.size}")
    if machine.domains > _MOST_NODES:
        wrong(text, f"at most {_MOST_NODES} nodes; these are {machine.domains}")
    return machine


def _l3(machine: MachineDescription, value: str, part: str) -> MachineDescription:
    match = _L3.fullmatch(value)
    if match is None:
        wrong(part, "l3 per 4 cores, l3 per core, l3 per node or l3 per socket")
    if match[2]:
        return replace(machine, l3_socket=match[2] == "socket")
    cores, each = machine.cores + machine.e_cores, int(match[1] or 1)
    if each < 1 or cores % each:
        wrong(part, f"a number that divides the {cores} cores of a node")
    return replace(machine, l3_cores=each)


def _cpus(value: str, part: str, machine: MachineDescription) -> CpuSet:
    try:
        cpus = CpuSet.parse(value)
    except ValueError:
        cpus = EMPTY
    if not cpus or not cpus <= CpuSet.span(machine.size):
        wrong(part, f"a CPU list such as 4-7,12 within 0-{machine.size - 1}")
    return cpus


def _offline(machine: MachineDescription, value: str, part: str) -> MachineDescription:
    cpus = _cpus(value, part, machine)
    if len(cpus) == machine.size:
        wrong(part, "at least one CPU that stays online")
    return replace(machine, offline=cpus)


def _distance(machine: MachineDescription, value: str, part: str) -> MachineDescription:
    rows = [row.split() for row in value.split("/")]
    parts = [word for row in rows for word in row]
    if not parts or not all(
        word.isascii() and word.isdecimal() and len(word) < 4 and 0 < int(word) <= _FARTHEST for word in parts
    ):
        wrong(part, f"distances from 1 to {_FARTHEST}, such as 10 12 32")
    return replace(machine, distances=tuple(tuple(map(int, row)) for row in rows))


def _memory(machine: MachineDescription, value: str, part: str) -> MachineDescription:
    return replace(machine, memory_bytes=_bytes(value, part))


def _memory_nodes(machine: MachineDescription, value: str, part: str) -> MachineDescription:
    match = _MEMORY_NODES.fullmatch(value)
    if match is None or not 0 < int(match[1]) <= _MOST_NODES:
        wrong(part, "memory nodes 2, or memory nodes 2 of 128G")
    size = _bytes(match[2], part) if match[2] else None
    return replace(machine, memory_nodes=int(match[1]), memory_node_bytes=size)


def _bytes(value: str, part: str) -> int:
    match = _SIZE.fullmatch(value)
    if match is None:
        wrong(part, "a size such as 64G (K, M, G, T; in steps of 1024)")
    return int(match[1]) << _UNITS[match[2]]


def _numbering(machine: MachineDescription, value: str, part: str) -> MachineDescription:
    if value not in NUMBERINGS:
        wrong(part, f"numbering {', '.join(NUMBERINGS)}")
    return replace(machine, numbering=value)


def _numa(machine: MachineDescription, value: str, part: str) -> MachineDescription:
    if value != "off" or machine.nodes > 1:
        wrong(part, "numa off, and a shape without nodes")
    return replace(machine, numa_off=True)


_PARTS: Final[dict[str, Callable[[MachineDescription, str, str], MachineDescription]]] = {
    "l3": _l3,
    "e-cores": lambda machine, value, part: replace(machine, efficiency=_cpus(value, part, machine)),
    "offline": _offline,
    "isolated": lambda machine, value, part: replace(machine, isolated=_cpus(value, part, machine)),
    "distance": _distance,
    "memory nodes": _memory_nodes,  # before the shorter name
    "memory": _memory,
    "numbering": _numbering,
    "numa": _numa,
}


def describe(topology: Topology) -> str | None:
    """The shortest text that `parse` makes this topology of; None where there is none.

    Machines whose sockets differ, or whose CPUs, nodes or caches are numbered in another way than the three that
    `parse` supports, have no text.
    """
    return next((explain(description) for description in suggestions(topology) if build(description) == topology), None)
