"""Use of the node and of each pod as means of some minutes, for a report to the cluster.

Counters are read when a report is due, not each second: two files of the machine and three of each pod, in slices.
Units: thousandths of a CPU; bytes without page cache that can be dropped.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol, final

from cgroupfs.files import REAL, FileOps
from cgroupfs.usage import MemoryUsage, grown
from reconciler.headroom.shapes import NodeUse, PodUse
from reconciler.runtime.cooperative import TimeSlice
from reconciler.signals.cpu import CpuTicks, idle_shares, parse_stat
from state.memory import NodeMemoryReading
from state.model import Pod, PodClass

_MOST_PODS: Final = 1024
_APART_S: Final = 10.0
"""Readings closer than this are one: the number of readings is bounded."""
_CPU: Final = 1000
_NS_PER_MILLI: Final = 1e6
_QOS_LABEL: Final = "koordinator.sh/qosClass"
_QOS: Final = frozenset({"LSE", "LSR", "LS", "BE", "SYSTEM"})
_BANDS: Final = ((9000, "koord-prod"), (7000, "koord-mid"), (5000, "koord-batch"), (3000, "koord-free"))
"""The least priority of each of Koordinator's classes; a band is a thousand wide."""


class NodeUseReading(Protocol):
    """The part of `reconciler.control.inventory.Inventory` that is used here."""

    @property
    def node_memory(self) -> NodeMemoryReading | None: ...

    @property
    def pods(self) -> Mapping[str, Pod]: ...


class PodCounters(Protocol):
    """The part of `cgroupfs.usage.UsageReader` that is used here."""

    def cpu_ns(self, path: str) -> int | None: ...

    def memory_use(self, path: str) -> MemoryUsage | None: ...


class _Point(NamedTuple):
    at_s: float
    cpus: Mapping[int, CpuTicks]
    pods: Mapping[tuple[str, int], int]
    """CPU nanoseconds by group and inode: a later group of that name is another one."""


@final
class NodeUseMeter:
    """Means of the CPU and memory use of the node and its pods."""

    def __init__(
        self,
        usage: PodCounters,
        knowledge: NodeUseReading,
        *,
        root: str = "/",
        files: FileOps = REAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._usage = usage
        self._knowledge = knowledge
        self._proc = f"{root.rstrip('/')}/proc"
        self._files = files
        self._clock = clock
        self._points: deque[_Point] = deque()

    async def measure(self, window_s: float) -> NodeUse | None:
        """The means since the oldest reading of the window; None: this is the first reading, or counters are missing.

        ``window_s``: older readings are dropped, but for the last one before it. Errors: none.
        """
        now = self._clock()
        try:
            cpus = parse_stat(self._files.read(self._proc, "stat"))
        except (OSError, ValueError):
            return None
        pods = [pod for pod in list(self._knowledge.pods.values()) if pod.name and pod.namespace][:_MOST_PODS]
        used: dict[tuple[str, int], int] = {}
        memory: dict[str, int] = {}
        slices = TimeSlice()
        for pod in pods:
            path = pod.group.path
            if (ns := self._usage.cpu_ns(path)) is not None:
                used[path, pod.group.inode] = ns
            if (kept := self._usage.memory_use(path)) is not None:
                memory[path] = kept.kept_bytes
            await slices.checkpoint()
        point = _Point(now, cpus, used)
        # Reports that follow each other soon: this reading replaces the one before.
        if len(self._points) > 1 and now - self._points[-2].at_s < _APART_S:
            self._points.pop()
        self._points.append(point)
        while len(self._points) > 2 and self._points[1].at_s <= now - window_s:
            self._points.popleft()
        node = self._knowledge.node_memory
        if len(self._points) < 2 or node is None or node.age_s is None:
            return None
        first = self._points[0]
        shares = idle_shares(first.cpus, cpus)
        return NodeUse(
            cpus_milli=_CPU * len(cpus),
            total_bytes=node.total_bytes,
            cpu_milli=sum(_CPU - round(shares.get(cpu, 0.0) * _CPU) for cpu in cpus),
            memory_bytes=max(0, node.total_bytes - node.available_bytes),
            pods=tuple(use for pod in pods if (use := self._pod(pod, point, memory.get(pod.group.path))) is not None),
        )

    def _pod(self, pod: Pod, now: _Point, memory_bytes: int | None) -> PodUse | None:
        key = pod.group.path, pod.group.inode
        # From its first reading within the window; a pod that began since then has used all of it since.
        before = next((point for point in self._points if key in point.pods), now)
        interval_s = now.at_s - before.at_s
        ns = grown(before.pods.get(key), now.pods.get(key))
        if ns is None or memory_bytes is None or interval_s <= 0:
            return None  # left out of the report: Koordinator's manager then counts the pod's request
        assert pod.namespace is not None
        assert pod.name is not None
        return PodUse(
            namespace=pod.namespace,
            name=pod.name,
            cpu_milli=round(ns / interval_s / _NS_PER_MILLI),
            memory_bytes=memory_bytes,
            priority=_priority(pod),
            qos=_qos(pod),
        )


def _priority(pod: Pod) -> str:
    """Koordinator's priority class: by the pod's priority, as its webhook does, else by bypassd's class."""
    for least, name in _BANDS:
        if pod.priority is not None and least <= pod.priority < least + 1000:
            return name
    return "koord-batch" if pod.pod_class is PodClass.RECLAIMED else ""


def _qos(pod: Pod) -> str:
    label = pod.labels.get(_QOS_LABEL, "")
    if label in _QOS:
        return label
    return "BE" if pod.pod_class is PodClass.RECLAIMED else "LS"
