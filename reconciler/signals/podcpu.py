"""CPU use and throttling of each pod, from the counters of its own groups and of its containers'.

A pod is throttled by its own quota where its directory or one of its containers' exceeded one.

**Cost**: one read of 4 µs a pod and one for each group but sandboxes'.
Units: nanoseconds inside, the catalog's outside. Source: kernel documentation, scheduler/sched-bwc.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol, final

from cgroupfs.hierarchy import UNIFIED
from cgroupfs.kept import GroupDirectories
from cgroupfs.naming import QosClass
from reconciler.runtime.cooperative import TimeSlice
from reconciler.signals.counter_delta import CounterDelta, parse_counters, prefixes
from reconciler.signals.readers import BaseReader, SampleContext, SampleSheet, SharedReaders
from state.model import NodeView, Pod

SIGNALS: Final = ("cpu.use", "cpu.throttled", "cpu.throttled_milli")


class Throttling(NamedTuple):
    """What quotas kept from a pod since the pass before: CPU time of all its groups together, in nanoseconds.

    One group's throttled time is summed over CPUs, so it may exceed the interval. ``above_ns``: by a directory above
    (besteffort, with the budget of BE work), caused neither by the pod nor by a neighbour. ``complete`` False: a group
    could not be read, so there may be more.
    """

    interval_s: float
    own_ns: int
    above_ns: int
    complete: bool = True

    @property
    def cpus(self) -> float:
        """How many of the pod's run queues were stopped on average, by any quota."""
        return (self.own_ns + self.above_ns) / 1e9 / self.interval_s


class _CpuStat(NamedTuple):
    """``cpu.stat``: zeros for a group without bandwidth control; ``cpu_ns`` on v2 only."""

    periods: int
    hit: int
    throttled_ns: int
    cpu_ns: int | None


_UNLIMITED: Final = "nr_periods 0\nnr_throttled 0\n"
_OF_STAT: Final = prefixes("nr_periods", "nr_throttled", "throttled_time", "throttled_usec", "usage_usec")


def parse_cpu_stat(text: str) -> _CpuStat:
    """v1's (nanoseconds) or v2's (microseconds)."""
    if text.startswith(_UNLIMITED):
        # v1, and never a quota: most groups.
        return _CpuStat(0, 0, 0, None)
    periods, hit, throttled_ns, throttled_us, usage_us = parse_counters(text, _OF_STAT)
    if throttled_ns is None:
        throttled_ns = (throttled_us or 0) * 1000
    return _CpuStat(periods or 0, hit or 0, throttled_ns, None if usage_us is None else usage_us * 1000)


class QuotaLookup(Protocol):
    """Provides a pod's throttling."""

    def throttling(self, uid: str) -> Throttling | None:
        """Of the last pass; None: not known."""


@final
class PodCpu(BaseReader):
    """A `Reader`, and the `QuotaLookup` of the readers that run after it."""

    def __init__(self, shared: SharedReaders) -> None:
        super().__init__(shared)
        hierarchy = shared.means.hierarchy
        self._usage_v1 = hierarchy.version("cpuacct") == 1
        self._accounts = GroupDirectories(hierarchy, "cpuacct")
        bandwidth = "cpu" if hierarchy.version("cpu") == 1 else UNIFIED
        self._groups = GroupDirectories(hierarchy, bandwidth) if hierarchy.version(bandwidth) is not None else None
        self._use = CounterDelta()
        self._quota = CounterDelta()
        self._throttling: dict[str, Throttling] = {}

    def throttling(self, uid: str) -> Throttling | None:
        return self._throttling.get(uid)

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        self._use.rotate()
        self._quota.rotate()
        slices = TimeSlice()
        throttling: dict[str, Throttling] = {}
        above = self._above(scene.view)
        for uid, pod in scene.view.pods.items():
            subject = f"pod:{uid}"
            at_s = self._clock()
            stat = self._stat(pod.group.path)
            cpu_ns = self._cpuacct_ns(pod.group.path) if self._usage_v1 else stat.cpu_ns if stat is not None else None
            grew = self._use.grown(pod.group.inode or pod.group.path, at_s, (cpu_ns,))
            share, own_ns, complete = self._own(pod, at_s, stat)
            if grew is not None:
                rate = grew.rate(0)
                values = {"cpu.use": None if rate is None else rate / 1e6}
                if self._groups is not None:
                    throttling[uid] = Throttling(grew.interval_s, own_ns, above[pod.qos], complete)
                    if complete:
                        values["cpu.throttled"] = share
                        values["cpu.throttled_milli"] = own_ns / grew.interval_s / 1e6
                sheet.enter(subject, values)
            await slices.checkpoint()
        self._throttling = throttling
        self._problems = {} if self._groups is not None else dict.fromkeys(SIGNALS[1:], "no cpu controller is mounted")

    def _cpuacct_ns(self, path: str) -> int | None:
        try:
            return int(self._files.read(self._accounts(path), "cpuacct.usage"))
        except (OSError, ValueError):
            return None

    def _stat(self, path: str) -> _CpuStat | None:
        if self._groups is None:
            return None
        try:
            text = self._files.read(self._groups(path), "cpu.stat")
        except OSError:
            return None
        return parse_cpu_stat(text)

    def _above(self, view: NodeView) -> Mapping[QosClass, int]:
        """What the directories above the pods stopped, in ns of the pass, by the pods' QoS class."""
        grew: dict[str, int] = {}
        for path in (view.kubepods, view.besteffort, view.burstable):
            stat = self._stat(path)
            increase = self._quota.grown(path, self._clock(), (stat.throttled_ns,)) if stat is not None else None
            grew[path] = (increase.by[0] or 0) if increase is not None else 0
        top = grew[view.kubepods]
        return {
            QosClass.GUARANTEED: top,
            QosClass.BURSTABLE: top + grew[view.burstable],
            QosClass.BESTEFFORT: top + grew[view.besteffort],
        }

    def _own(self, pod: Pod, at_s: float, stat: _CpuStat | None) -> tuple[float, int, bool]:
        """Throttled periods (percent, of the group that has most), throttled ns, and whether all could be read.

        ``stat``: of the pod's own directory, read at ``at_s``.
        """
        share, own_ns, complete = 0.0, 0, stat is not None
        readings = [(pod.group, at_s, stat)]
        # The runtime gives a sandbox no quota. All others are read, quota or not: one that was set a second ago would
        # otherwise look like a neighbour's effect.
        groups = [container.group for container in pod.workload]
        readings += [(group, self._clock(), self._stat(group.path)) for group in groups]
        for group, read_s, item in readings:
            if item is None:
                complete = False
                continue
            grew = self._quota.grown(group.inode or group.path, read_s, (item.periods, item.hit, item.throttled_ns))
            if grew is None:
                continue
            periods, hit, waited_ns = grew.by
            if periods and hit is not None:
                share = max(share, min(100.0, 100.0 * hit / periods))
            own_ns += waited_ns or 0
        return share, own_ns, complete
