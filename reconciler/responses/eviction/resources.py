"""What an eviction releases: the kinds of resources, a pod's use of one at a place, and amounts as text. Pure.

A pod's part of a place (a NUMA node, a file system) has the subject ``pod:UID@numa:0`` (`state.evidence`). If it is not
measured, the pod's whole is used if the place is the only one of its kind, else it is unknown, and a pod is not evicted
for a resource that it is not known to use.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final

from reconciler.responses.eviction.samples import EvictionContext
from reconciler.runtime import format as fmt
from state.evidence import NODE, ContendedResource, PodSnapshot, pod_at


class EvictedResource(StrEnum):
    """Units: thousandths of a CPU (cpu, cpu.request), tasks, bytes, inodes, bytes per second (io, network)."""

    CPU = "cpu"
    CPU_REQUEST = "cpu.request"
    LOAD = "load"
    MEMORY = "memory"
    MEMORY_REQUEST = "memory.request"
    DISK = "disk"
    INODES = "inodes"
    IO = "io"
    CACHE = "cache"
    NETWORK = "network"


OF_RESOURCE: Final[Mapping[ContendedResource, EvictedResource]] = {
    ContendedResource.CPU: EvictedResource.CPU,
    ContendedResource.MEMORY: EvictedResource.MEMORY,
    ContendedResource.IO: EvictedResource.IO,
    ContendedResource.CACHE: EvictedResource.CACHE,
    ContendedResource.NETWORK: EvictedResource.NETWORK,
}
_NAMES: Final[Mapping[EvictedResource, str]] = {
    EvictedResource.CPU: "CPU",
    EvictedResource.CPU_REQUEST: "CPU requested",
    EvictedResource.LOAD: "tasks",
    EvictedResource.MEMORY: "of memory",
    EvictedResource.MEMORY_REQUEST: "of memory requested",
    EvictedResource.DISK: "of disk",
    EvictedResource.INODES: "inodes",
    EvictedResource.IO: "/s of disks",
    EvictedResource.CACHE: "/s of memory bandwidth",
    EvictedResource.NETWORK: "/s of network",
}


def usage_of(good: EvictedResource, pod: PodSnapshot, place: str, scene: EvictionContext) -> float | None:
    """The amount that ``place`` regains when the pod is evicted; None: unknown, or nothing there."""
    return _HELD[good](pod, place, scene)


def cpu_request(pod: PodSnapshot) -> int | None:
    """A BE pod's request under the names for BE work, else its plain request. Thousandths of a CPU."""
    return pod.requests.be_cpu_milli if pod.be_cpu_milli is None else pod.be_cpu_milli


def memory_request(pod: PodSnapshot) -> int | None:
    """The same of memory, in bytes."""
    return pod.requests.be_memory_bytes if pod.be_memory_bytes is None else pod.be_memory_bytes


def format_amount(good: EvictedResource, value: float) -> str:
    """``1.20 CPU``, ``3 GiB of memory``, ``1200 inodes``."""
    name = _NAMES[good]
    match good:
        case EvictedResource.CPU | EvictedResource.CPU_REQUEST:
            return f"{fmt.cpus(value)} {name}"
        case EvictedResource.LOAD:
            return f"{fmt.number(value)} {name}"
        case EvictedResource.INODES:
            return f"{value:.0f} {name}"
        case _:
            return f"{fmt.size(value)}{'' if name.startswith('/') else ' '}{name}"


def _memory(pod: PodSnapshot, place: str, scene: EvictionContext) -> float | None:
    # Anonymous memory: page cache counts as free in the triggers' measure, and is reclaimable without an eviction.
    if place.startswith("numa:"):
        value = scene.value(pod_at(pod.uid, place), "memory.numa_rss")
        if value is not None or len(scene.places("numa:", "memory.total")) != 1:
            return value
    whole = scene.value(pod.subject, "memory.rss")
    return scene.value(pod.subject, "memory.use") if whole is None else whole


def _fs(signal: str) -> Callable[[PodSnapshot, str, EvictionContext], float | None]:
    def measure(pod: PodSnapshot, place: str, scene: EvictionContext) -> float | None:
        value = scene.value(pod_at(pod.uid, place), signal)
        return scene.value(pod.subject, signal) if value is None and place == "fs:nodefs" else value

    return measure


def _sum(*signals: str) -> Callable[[PodSnapshot, str, EvictionContext], float | None]:
    def measure(pod: PodSnapshot, _place: str, scene: EvictionContext) -> float | None:
        values = [value for signal in signals if (value := scene.value(pod.subject, signal)) is not None]
        return sum(values) if values else None

    return measure


def _cpu(pod: PodSnapshot, place: str, scene: EvictionContext) -> float | None:
    if not place.startswith("numa:"):
        return scene.value(pod.subject, "cpu.use")
    value = scene.value(pod_at(pod.uid, place), "cpu.numa_use")
    if value is not None:
        return value
    # A pod that is bound to another node uses none of this one; of a pod on several nodes the parts are unknown.
    others = (scene.value(pod_at(pod.uid, other), "cpu.numa_use") for other in scene.places("numa:", "cpu.numa_use"))
    return None if all(other is None for other in others) else 0.0


def _load(pod: PodSnapshot, place: str, scene: EvictionContext) -> float | None:
    running = scene.value(pod.subject, "cpu.use")
    if running is None or place not in {NODE, f"pool:{pod.pool}"}:
        return None
    return (running + (scene.value(pod.subject, "cpu.wait_milli") or 0.0)) / 1000


_HELD: Final[Mapping[EvictedResource, Callable[[PodSnapshot, str, EvictionContext], float | None]]] = {
    EvictedResource.CPU: _cpu,
    EvictedResource.CPU_REQUEST: lambda pod, _place, _scene: cpu_request(pod),
    EvictedResource.LOAD: _load,
    EvictedResource.MEMORY: _memory,
    EvictedResource.MEMORY_REQUEST: lambda pod, _place, _scene: memory_request(pod),
    EvictedResource.DISK: _fs("fs.use"),
    EvictedResource.INODES: _fs("fs.inodes_use"),
    EvictedResource.IO: _sum("disk.read", "disk.write"),
    EvictedResource.CACHE: _sum("memory.bandwidth"),
    EvictedResource.NETWORK: _sum("net.receive", "net.transmit"),
}
