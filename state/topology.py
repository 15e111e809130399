"""Where the CPUs are: threads in cores, cores under L3 caches, in NUMA nodes, in sockets; fast and slow kinds.

Numbers that the kernel gives only per socket (core_id) or not at all are replaced by the lowest CPU of the group, so
that every number here is unique on the machine. L3 keeps the kernel's cache id where there is one, because resctrl
calls its domains by it.

Source: kernel documentation, ABI/stable/sysfs-devices-system-cpu and -node; ABI/testing cpu_capacity.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import cached_property
from typing import Final

from msgspec import Struct
from msgspec.structs import force_setattr

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.errors import SourceError

FULL_CAPACITY: Final = 1024
# Favoured cores of one kind differ by a few per cent, mid cores of big.LITTLE reach 0.8 of the fastest and run what
# the fastest run; E-cores and little cores stay below 0.65.
_SLOW: Final = 0.75
_CPU_DIRECTORY: Final = re.compile(r"cpu(\d+)")
_NODE_DIRECTORY: Final = re.compile(r"node(\d+)")
_STAT_CPU: Final = re.compile(r"^cpu(\d+) ", re.MULTILINE)


class CpuKind(StrEnum):
    """Performance or efficiency core; machines with one kind have only P."""

    PERFORMANCE = "P"
    EFFICIENCY = "E"


class Cpu(Struct, frozen=True, kw_only=True):
    """One online CPU (hardware thread). ``thread`` counts within the core; the fastest has ``capacity`` 1024."""

    id: int
    core: int
    socket: int = 0
    node: int = 0
    l3: int = 0
    thread: int = 0
    kind: CpuKind = CpuKind.PERFORMANCE
    capacity: int = FULL_CAPACITY


class Topology(Struct, frozen=True, kw_only=True, dict=True):
    """The CPUs of a machine. Given only ``online``, every CPU is a core of its own in one socket and node.

    ``isolated`` are the kernel's ``isolcpus``: online, but the scheduler's balancing leaves them alone.
    """

    online: CpuSet
    cpus: tuple[Cpu, ...] = ()
    offline: CpuSet = EMPTY
    isolated: CpuSet = EMPTY

    def __post_init__(self) -> None:
        if not self.cpus:
            force_setattr(self, "cpus", tuple(Cpu(id=cpu, core=cpu) for cpu in self.online))
        described = CpuSet(cpu.id for cpu in self.cpus)
        if described != self.online or len(self.cpus) != len(self.online):
            raise ValueError(f"CPUs {described} are described but {self.online} are online")

    def cpu(self, number: int) -> Cpu:
        """One CPU. Errors: `KeyError` when it is not online."""
        return self._by_id[number]

    def siblings(self, cpu: int) -> CpuSet:
        """The threads of the CPU's core, itself included. Errors: `KeyError` when it is not online."""
        return self._cores[self._by_id[cpu].core]

    def cores(self) -> tuple[CpuSet, ...]:
        """Every core as the set of its online threads, by lowest CPU."""
        return tuple(self._cores.values())

    def whole_cores(self, cpus: CpuSet) -> CpuSet:
        """Those of ``cpus`` whose core lies inside ``cpus`` completely."""
        whole = EMPTY
        for core in self._cores.values():
            if core <= cpus:
                whole |= core
        return whole

    def nodes(self) -> tuple[int, ...]:
        """Numbers of the NUMA nodes that have online CPUs, ascending."""
        return tuple(sorted(self._nodes))

    def node_cpus(self, node: int) -> CpuSet:
        """The online CPUs of one NUMA node; empty for a node of memory only or none at all."""
        return self._nodes.get(node, EMPTY)

    def l3_domains(self) -> Mapping[int, CpuSet]:
        """CPUs by the L3 cache they share; without L3 by socket and node."""
        return self._l3

    def sockets(self) -> Mapping[int, CpuSet]:
        """CPUs by socket."""
        return self._sockets

    def kind_cpus(self, kind: CpuKind) -> CpuSet:
        """All online CPUs of one kind."""
        return CpuSet(cpu.id for cpu in self.cpus if cpu.kind is kind)

    @property
    def smt(self) -> bool:
        """Whether any core has more than one online thread."""
        return len(self._cores) < len(self.cpus)

    # The struct is frozen, so what is derived is computed once, at first use.
    @cached_property
    def _by_id(self) -> dict[int, Cpu]:
        return {cpu.id: cpu for cpu in self.cpus}

    @cached_property
    def _cores(self) -> dict[int, CpuSet]:
        return _grouped(self.cpus, lambda cpu: cpu.core)

    @cached_property
    def _nodes(self) -> dict[int, CpuSet]:
        return _grouped(self.cpus, lambda cpu: cpu.node)

    @cached_property
    def _l3(self) -> dict[int, CpuSet]:
        return _grouped(self.cpus, lambda cpu: cpu.l3)

    @cached_property
    def _sockets(self) -> dict[int, CpuSet]:
        return _grouped(self.cpus, lambda cpu: cpu.socket)


def _grouped(cpus: Iterable[Cpu], key: Callable[[Cpu], int]) -> dict[int, CpuSet]:
    masks: dict[int, int] = {}
    for cpu in sorted(cpus, key=lambda cpu: cpu.id):
        number = key(cpu)
        masks[number] = masks.get(number, 0) | 1 << cpu.id
    return {number: CpuSet.from_mask(mask) for number, mask in masks.items()}


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


def read_topology(root: str = "/") -> Topology:
    """The topology of this node (or copied node) from ``<root>/sys``.

    Parts that a virtual machine lacks are filled in with the simplest answer: own cores, one socket, node 0.
    Errors: `SourceError` when not even the list of online CPUs can be had.
    """
    devices = os.path.join(root, "sys/devices")
    base = f"{devices}/system/cpu"
    online = _online(base, root)
    sockets = {cpu: max(0, _number(f"{base}/cpu{cpu}/topology/physical_package_id", 0)) for cpu in online}
    nodes = _node_of(f"{devices}/system/node")
    cores = {cpu: _threads(base, cpu, online) for cpu in online}
    capacity = {cpu: _number(f"{base}/cpu{cpu}/cpu_capacity", FULL_CAPACITY) for cpu in online}
    slow = _slow(devices, capacity)
    caches = _l3_of(base, online, {cpu: (sockets[cpu], nodes.get(cpu, 0)) for cpu in online})
    return Topology(
        online=online,
        cpus=tuple(
            Cpu(
                id=cpu,
                core=min(cores[cpu]),
                socket=sockets[cpu],
                node=nodes.get(cpu, 0),
                l3=caches[cpu],
                thread=len(cores[cpu] & CpuSet.span(cpu)),
                kind=CpuKind.EFFICIENCY if cpu in slow else CpuKind.PERFORMANCE,
                capacity=capacity[cpu],
            )
            for cpu in online
        ),
        offline=(_list(f"{base}/present") or online) - online,
        isolated=(_list(f"{base}/isolated") or EMPTY) & online,
    )


def _online(base: str, root: str) -> CpuSet:
    online = _list(f"{base}/online")
    if online:
        return online
    present = CpuSet(_numbered(base, _CPU_DIRECTORY))
    # Without "online" each CPU says for itself; CPU 0 often cannot go offline and then has no such file.
    online = CpuSet(cpu for cpu in present if _number(f"{base}/cpu{cpu}/online", 1) == 1)
    if not online:
        online = CpuSet(int(cpu) for cpu in _STAT_CPU.findall(_text(os.path.join(root, "proc/stat"))))
    if not online:
        raise SourceError(
            "topology", f"no online CPU found: {base}/online and {root.rstrip('/')}/proc/stat tell of none"
        )
    return online


def _threads(base: str, cpu: int, online: CpuSet) -> CpuSet:
    for name in ("core_cpus_list", "thread_siblings_list"):
        threads = _list(f"{base}/cpu{cpu}/topology/{name}")
        # A hypervisor that hands out nonsense must not make a CPU belong to a core without it.
        if threads is not None and cpu in threads:
            return threads & online
    return CpuSet([cpu])


def _node_of(base: str) -> dict[int, int]:
    nodes: dict[int, int] = {}
    for node in _numbered(base, _NODE_DIRECTORY):
        for cpu in _list(f"{base}/node{node}/cpulist") or EMPTY:
            nodes[cpu] = node
    return nodes


def _l3_of(base: str, online: CpuSet, package: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    shared: dict[int, CpuSet] = {}
    ids: dict[int, int] = {}
    for cpu in online:
        for index in _numbered(f"{base}/cpu{cpu}/cache", re.compile(r"index(\d+)")):
            cache = f"{base}/cpu{cpu}/cache/index{index}"
            if _number(f"{cache}/level", 0) == 3:
                shared[cpu] = (_list(f"{cache}/shared_cpu_list") or EMPTY) & online | CpuSet([cpu])
                ids[cpu] = _number(f"{cache}/id", -1)
    if len(shared) < len(online):
        # No L3, or hidden from a part of the CPUs: what shares socket and node shares the path to memory.
        first: dict[tuple[int, int], int] = {}
        return {cpu: first.setdefault(package[cpu], cpu) for cpu in online}
    if min(ids.values()) >= 0:
        return ids
    return {cpu: min(cpus) for cpu, cpus in shared.items()}


def _slow(devices: str, capacity: Mapping[int, int]) -> CpuSet:
    named = EMPTY
    for unit in ("cpu_atom", "cpu_lowpower"):
        named |= _list(f"{devices}/{unit}/cpus") or EMPTY
    if named:
        return named
    fastest = max(capacity.values())
    return CpuSet(cpu for cpu, value in capacity.items() if value < fastest * _SLOW)


def _text(path: str) -> str:
    """The file, or nothing at all where it cannot be had: every part of /sys is optional."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _list(path: str) -> CpuSet | None:
    text = _text(path).strip()
    try:
        return CpuSet.parse(text) if text else None
    except ValueError:
        return None


def _number(path: str, default: int) -> int:
    try:
        return int(_text(path))
    except ValueError:
        return default


def _numbered(directory: str, pattern: re.Pattern[str]) -> list[int]:
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    return sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name)))
