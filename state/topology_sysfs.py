"""Reads the topology of a machine, or of a copied one, from its /sys.

Every part of /sys is optional: a virtual machine, a container and an old kernel each lack another one. A missing or
invalid file is replaced by the simplest default (own core, one socket, node 0, unknown distances) for its own fact
only. 1,024 CPUs are some 5,000 small files: 30 ms, so a running daemon reads again in a thread.

Source: kernel documentation, ABI/stable/sysfs-devices-system-cpu and -node; ABI/testing cpu_capacity.
"""

import os
import re
from collections.abc import Mapping
from typing import Final

from cgroupfs.bounded import digits
from cgroupfs.cpuset import EMPTY, MAX_CPUS, CpuSet
from cgroupfs.errors import SourceError
from state.memory import huge_bytes, meminfo_bytes, ordinary_bytes
from state.topology import FULL_CAPACITY, Cpu, CpuKind, NumaNode, Topology

# Favoured cores of one kind differ by a few per cent, mid cores of big.LITTLE reach 0.8 of the fastest and run what
# the fastest run; E-cores and little cores remain below 0.65.
_SLOW: Final = 0.75
_CPU_DIRECTORY: Final = re.compile(r"cpu(\d+)")
_NODE_DIRECTORY: Final = re.compile(r"node(\d+)")
_CACHE_DIRECTORY: Final = re.compile(r"index(\d+)")
_STAT_CPU: Final = re.compile(r"^cpu(\d+) ", re.MULTILINE)
_PAGE: Final = 4096
_FARTHEST: Final = 255
"""The firmware's table (ACPI SLIT) has one byte for each distance."""
_LARGEST: Final = 1 << 16
"""Bytes that are read of one file."""
_STAT: Final = 1 << 20
"""Bytes of /proc/stat: its lines of the CPUs have about 80 each."""

ONLINE: Final = "sys/devices/system/cpu/online"
"""The list of online CPUs, below the root."""


def read_topology(root: str = "/") -> Topology:
    """The topology of this node (or copied node) from ``<root>/sys``.

    Errors: `SourceError` when not even the list of online CPUs can be had.
    """
    devices = os.path.join(root, "sys/devices")
    base = f"{devices}/system/cpu"
    online = _online(base, root)
    sockets = {cpu: max(0, _number(f"{base}/cpu{cpu}/topology/physical_package_id", 0)) for cpu in online}
    nodes, numa = _numa(f"{devices}/system/node", online)
    cores = _cores(base, online)
    capacity = {cpu: _number(f"{base}/cpu{cpu}/cpu_capacity", FULL_CAPACITY) for cpu in online}
    slow = _slow(devices, capacity)
    caches = _l3_of(base, online, {cpu: (sockets[cpu], nodes[cpu]) for cpu in online})
    return Topology(
        online=online,
        cpus=tuple(
            Cpu(
                id=cpu,
                core=min(cores[cpu]),  # the kernel's core_id is unique in a socket only
                socket=sockets[cpu],
                node=nodes[cpu],
                l3=caches[cpu],
                thread=len(cores[cpu] & CpuSet.span(cpu)),
                kind=CpuKind.EFFICIENCY if cpu in slow else CpuKind.PERFORMANCE,
                capacity=capacity[cpu],
            )
            for cpu in online
        ),
        offline=(_list(f"{base}/present") or online) - online,
        isolated=(_list(f"{base}/isolated") or EMPTY) & online,
        numa=numa,
    )


def read_online(root: str = "/") -> str | None:
    """The text of the kernel's list of online CPUs, to detect a change cheaply (3 µs)."""
    return _text(os.path.join(root, ONLINE)).strip() or None


def _online(base: str, root: str) -> CpuSet:
    online = _list(f"{base}/online")
    if online:
        return online
    present = CpuSet(_numbered(base, _CPU_DIRECTORY))
    # Without "online" each CPU has its own file; CPU 0 often cannot be offlined and then has none.
    online = CpuSet(cpu for cpu in present if _number(f"{base}/cpu{cpu}/online", 1) == 1)
    if not online:
        listed = (digits(cpu) for cpu in _STAT_CPU.findall(_text(os.path.join(root, "proc/stat"), _STAT)))
        online = CpuSet(cpu for cpu in listed if cpu is not None and cpu < MAX_CPUS)
    if not online:
        raise SourceError(
            "topology", f"no online CPU found: {base}/online and {root.rstrip('/')}/proc/stat tell of none"
        )
    return online


def _cores(base: str, online: CpuSet) -> dict[int, CpuSet]:
    cores: dict[int, CpuSet] = {}
    for cpu in online:
        if cpu not in cores:
            threads = _threads(base, cpu, online)
            # A hypervisor that hands out nonsense must not put a CPU into two cores.
            threads = CpuSet(thread for thread in threads if thread not in cores)
            cores |= dict.fromkeys(threads, threads)
    return cores


def _threads(base: str, cpu: int, online: CpuSet) -> CpuSet:
    for name in ("core_cpus_list", "thread_siblings_list"):
        threads = _list(f"{base}/cpu{cpu}/topology/{name}")
        # ... nor make it belong to a core without it.
        if threads is not None and cpu in threads:
            return threads & online
    return CpuSet([cpu])


def _numa(base: str, online: CpuSet) -> tuple[dict[int, int], tuple[NumaNode, ...]]:
    """Each online CPU's node, and the nodes: those that the kernel shows, and 0 for CPUs that none of them has."""
    nodes: dict[int, int] = {}
    shown = _numbered(base, _NODE_DIRECTORY)
    for node in shown:
        for cpu in _list(f"{base}/node{node}/cpulist") or EMPTY:
            nodes[cpu] = node
    placed = {cpu: nodes.get(cpu, 0) for cpu in online}
    ids = sorted({*shown, *placed.values()})
    return placed, tuple(
        NumaNode(
            id=node,
            distances=_distances(f"{base}/node{node}/distance", ids),
            memory_bytes=_memory(f"{base}/node{node}"),
        )
        for node in ids
    )


def _distances(path: str, ids: list[int]) -> tuple[int, ...]:
    """One number for each existing node, in their order; any other list is rejected as a whole."""
    parts = _text(path).split()
    distances = tuple(number for word in parts if (number := digits(word)) is not None and 0 < number <= _FARTHEST)
    return distances if len(parts) == len(distances) == len(ids) else ()


def _memory(node: str) -> int | None:
    total = meminfo_bytes(_text(f"{node}/meminfo")).get("MemTotal")
    if not total:
        return total
    try:
        sizes = os.listdir(f"{node}/hugepages")
    except OSError:
        return total
    huge = huge_bytes(sizes, lambda size: _text(f"{node}/hugepages/{size}/nr_hugepages"))
    # 0 is a node without memory, and one with nothing but huge pages has some.
    return max(_PAGE, ordinary_bytes(total, huge))


def _l3_of(base: str, online: CpuSet, package: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    domains: dict[int, int] = {}
    ids: dict[int, int] = {}
    for cpu in online:
        cache = None if cpu in domains else _l3_directory(f"{base}/cpu{cpu}/cache")
        if cache is not None:
            # The other CPUs' files are not read: a difference would be invalid, and 1,024 of them are slow.
            for number in (_list(f"{cache}/shared_cpu_list") or EMPTY) & online | CpuSet([cpu]):
                domains.setdefault(number, cpu)
            ids[cpu] = _number(f"{cache}/id", -1)
    if len(domains) < len(online):
        # No L3, or hidden from a part of the CPUs: what shares socket and node shares the path to memory.
        first: dict[tuple[int, int], int] = {}
        return {cpu: first.setdefault(package[cpu], cpu) for cpu in online}
    # Some hypervisors number the caches of every socket from 0.
    across = len({(ids[cpu], package[cpu][0]) for cpu in ids}) > len(set(ids.values()))
    if across or min(ids.values()) < 0:
        return domains
    # The kernel's ids where it has them: resctrl names its domains by them.
    return {cpu: ids[domain] for cpu, domain in domains.items()}


def _l3_directory(base: str) -> str | None:
    # The usual index of L3; else whichever index has it.
    if _number(f"{base}/index3/level", 0) == 3:
        return f"{base}/index3"
    for index in _numbered(base, _CACHE_DIRECTORY):
        if _number(f"{base}/index{index}/level", 0) == 3:
            return f"{base}/index{index}"
    return None


def _slow(devices: str, capacity: Mapping[int, int]) -> CpuSet:
    # Intel's hybrid machines name them by their perf units, Arm's have a capacity.
    named = EMPTY
    for unit in ("cpu_atom", "cpu_lowpower"):
        named |= _list(f"{devices}/{unit}/cpus") or EMPTY
    if named:
        return named
    fastest = max(capacity.values())
    return CpuSet(cpu for cpu, value in capacity.items() if value < fastest * _SLOW)


def _text(path: str, most: int = _LARGEST) -> str:
    """The file, or nothing at all if it is unreadable: every part of /sys is optional."""
    # Not with open(): its layers cost three times the system calls, and this is called thousands of times.
    try:
        # O_NONBLOCK: a copied tree may have a pipe there, which would wait for a writer.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        text = part = os.read(file, most)
        # One read of a CPU list has a page at most; another one of each short file would cost as much as the first.
        while part and not len(part) % _PAGE and len(text) < most:
            text += (part := os.read(file, most - len(text)))
        return text.decode("ascii", "replace")
    except OSError:
        return ""
    finally:
        os.close(file)


def _list(path: str) -> CpuSet | None:
    text = _text(path).strip()
    try:
        return CpuSet.parse(text) if text else None
    except ValueError:
        return None


def _number(path: str, default: int) -> int:
    text = _text(path).strip()
    # -1 is what some files have for "none".
    number = digits(text.removeprefix("-"))
    if number is None:
        return default
    return -number if text.startswith("-") else number


def _numbered(directory: str, pattern: re.Pattern[str]) -> list[int]:
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    numbers = (digits(match[1]) for name in names if (match := pattern.fullmatch(name)))
    return sorted(number for number in numbers if number is not None and number < MAX_CPUS)
