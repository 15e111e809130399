"""The last hour of every pod, one value a minute: CPU use, throttling, and wait; for ``why`` and the metrics.

Read for all pods, watched for interference or not: once a minute two files of each group.

**Cost**: one array of 4-byte numbers a pod and directory: 1 KiB after an hour, 0.5 MiB at 500 pods; 4 µs a file.
Units: thousandths of a CPU. Source: kernel documentation, scheduler/sched-bwc and accounting/psi.
"""

import math
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, final

import trio

from cgroupfs.errors import AgentError
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import UNIFIED, Hierarchy
from cgroupfs.lines import lines_of
from cgroupfs.pressure import parse_totals
from cgroupfs.usage import UsageReader, grown
from reconciler.runtime.cooperative import TimeSlice
from state.model import NodeCpu, Pod, PodClass

NAME: Final = "pod minutes"
MINUTE_S: Final = 60.0
LENGTH: Final = 60
SERIES: Final = ("use_milli", "throttled_milli", "wait_milli")
_WIDTH: Final = len(SERIES)
_WAIT_SUM: Final = "wait_sum "


class _Counters(NamedTuple):
    """Nanoseconds since the group began; None: unknown."""

    at_s: float
    use_ns: int | None
    throttled_ns: int | None
    wait_ns: int | None


class Minute(NamedTuple):
    """One group's minute, in the order of `SERIES`. Thousandths of a CPU; None: unknown."""

    use_milli: float | None
    throttled_milli: float | None
    wait_milli: float | None


class CpuSeconds(NamedTuple):
    """What pods used, what quotas kept from them, and what they waited. Seconds; None: never measured."""

    use: float | None = None
    throttled: float | None = None
    wait: float | None = None

    def plus(self, more: "CpuSeconds") -> "CpuSeconds":
        """The sum; an unknown part of ``more`` adds nothing."""
        # Most pods' minutes add nothing: no object is made for them.
        for have, new in zip(self, more, strict=True):
            if new is not None and (new or have is None):
                break
        else:
            return self
        pairs = zip(self, more, strict=True)
        return CpuSeconds(*(have if new is None else (have or 0.0) + new for have, new in pairs))


_UNKNOWN: Final = CpuSeconds()


@lru_cache(maxsize=8)
def _still(*unknown: bool) -> tuple[Minute, CpuSeconds]:
    """Of a group whose counters have not moved, as of most pods. ``unknown``: of each of `SERIES`."""
    parts = [None if is_unknown else 0.0 for is_unknown in unknown]
    return Minute(*parts), CpuSeconds(*parts)


@final
class MinuteSeries:
    """The last `LENGTH` minutes of one group. A value that is unknown is None."""

    __slots__ = ("_values", "last", "total")

    def __init__(self) -> None:
        self._values = array("f")
        self.last: _Counters | None = None
        self.total = CpuSeconds()
        """Since the first reading. It never falls, as a sum over containers would when one of them ends."""

    def add(self, counters: _Counters) -> tuple[Minute, CpuSeconds] | None:
        """The minute since the reading before, and its growth; the first reading makes none."""
        before, self.last = self.last, counters
        if before is None or counters.at_s <= before.at_s:
            return None
        if before[1:] == counters[1:]:
            minute, more = _still(*[number is None for number in counters[1:]])
            self._append(minute)
            self.total = self.total.plus(more)
            return minute, more
        interval_s = counters.at_s - before.at_s
        increases = [grown(earlier, later) for earlier, later in zip(before[1:], counters[1:], strict=True)]
        minute = Minute(*(None if increase is None else increase / interval_s / 1e6 for increase in increases))
        self._append(minute)
        more = CpuSeconds(*(None if increase is None else increase / 1e9 for increase in increases))
        self.total = self.total.plus(more)
        return minute, more

    def _append(self, minute: Minute) -> None:
        self._values.extend([math.nan if value is None else value for value in minute])
        del self._values[: -LENGTH * _WIDTH]

    def series(self, name: str) -> list[int | None]:
        values = self._values[SERIES.index(name) :: _WIDTH]
        return [None if math.isnan(value) else round(value) for value in values]


@final
class PodMinutes:
    """A component: the last 60 minutes of each pod. ``sampled`` gets each whole minute of all pods that have one."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        pods: Callable[[], Mapping[str, Pod]],
        *,
        sampled: Callable[[Sequence[tuple[Pod, Minute]]], None],
        files: FileOps = REAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hierarchy = hierarchy
        self._pods = pods
        self._files = files
        self._clock = clock
        self._sampled = sampled
        self._usage = UsageReader(hierarchy, ops=files, clock=clock)
        self._pressure = hierarchy.version("cpu") == 2
        self._groups: dict[str, MinuteSeries] = {}
        """By group path: pods, and the directories above them."""
        self._inodes: dict[str, int] = {}
        self._before_above: Mapping[str, _Counters] = {}
        self._now_above: Mapping[str, _Counters] = {}
        self._waits: str | None = None
        self._sampled_at: float | None = None
        self.by_class: dict[PodClass, CpuSeconds] = {}
        """Of all pods that a class ever had, since the start: what pods that ended have used stays in it."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        due = trio.current_time()
        while True:
            await self.sample()
            due = max(due + MINUTE_S, trio.current_time())
            await trio.sleep_until(due)

    async def sample(self) -> None:
        """One reading of every pod; those that no longer exist are forgotten."""
        slices = TimeSlice()
        pods = list(self._pods().values())
        directories = {pod.group.path.rpartition("/")[0] for pod in pods}
        above = {path for directory in directories for path in (directory, *directories_above(directory))} - {"", "/"}
        kept = above | {pod.group.path for pod in pods}
        for path in self._groups.keys() - kept:
            del self._groups[path]
            self._inodes.pop(path, None)
        self._now_above = {path: self._read(path) for path in above}
        for path, counters in self._now_above.items():
            self._add(path, counters)
        minutes: list[tuple[Pod, Minute]] = []
        for pod in pods:
            path = pod.group.path
            if self._inodes.get(path) != pod.group.inode:
                # The same name, another group: its counters began again.
                self._groups.pop(path, None)
                self._inodes[path] = pod.group.inode
            minute, more = self._add(path, self._unchanged(path) or self._with_containers(pod)) or (None, _UNKNOWN)
            self.by_class[pod.pod_class] = self.by_class.get(pod.pod_class, _UNKNOWN).plus(more)
            if minute is not None:
                minutes.append((pod, minute))
            await slices.checkpoint()
        self._before_above = self._now_above
        first, self._sampled_at = self._sampled_at is None, self._clock()
        if not first:
            self._sampled(minutes)

    def total(self, pod: Pod) -> CpuSeconds:
        """What one pod has used, since the first reading of its group. At most a minute old."""
        series = self._groups.get(pod.group.path)
        return series.total if series is not None else CpuSeconds()

    def _add(self, path: str, counters: _Counters) -> tuple[Minute, CpuSeconds] | None:
        if (series := self._groups.get(path)) is None:
            series = self._groups[path] = MinuteSeries()
        return series.add(counters)

    def _unchanged(self, path: str) -> _Counters | None:
        """A pod's counters without a reading: those of before, while its directory's are unchanged.

        The directories are read first: what runs while the pods are read shows a minute later.
        """
        directory = path.rpartition("/")[0]
        before, now = self._before_above.get(directory), self._now_above.get(directory)
        if before is None or now is None or now.use_ns is None or before[1:] != now[1:]:
            return None
        known = self._groups.get(path)
        last = known.last if known is not None else None
        return None if last is None else last._replace(at_s=now.at_s)

    def _with_containers(self, pod: Pod) -> _Counters:
        """The pod's counters, its throttled time with that of its containers: each has a quota of its own.

        The kernel sums throttled time over CPUs, so it may exceed the pod's use.
        """
        counters = self._read(pod.group.path)
        paths = [container.group.path for container in pod.workload]
        throttled = [counters.throttled_ns, *(self._read(path, wait=False).throttled_ns for path in paths)]
        known = [number for number in throttled if number is not None]
        return counters._replace(throttled_ns=sum(known) if known else None)

    def _read(self, path: str, *, wait: bool = True) -> _Counters:
        try:
            usage = self._usage.read_cpu(path)
        except AgentError:
            return _Counters(self._clock(), None, None, None)
        return _Counters(usage.at_s, usage.cpu_ns, usage.throttled_ns, self._wait_ns(path) if wait else None)

    def _wait_ns(self, path: str) -> int | None:
        """``psi``: at least one task waited for a CPU; ``schedstats`` (v1): the group's run queues waited, in sum."""
        try:
            if self._pressure:
                text = self._files.read(self._hierarchy.directory(UNIFIED, path), "cpu.pressure")
                waited_us = parse_totals(text).some_us
                self._waits = "psi"
                return 1000 * waited_us
            text = self._files.read(self._hierarchy.directory("cpu", path), "cpu.stat")
            found = next((line for line in lines_of(text) if line.startswith(_WAIT_SUM)), None)
            if found is None:
                return None
            self._waits = "schedstats"
            return int(found[len(_WAIT_SUM) :])
        except (AgentError, OSError, ValueError):
            return None

    def hour(self, pod: Pod) -> dict[str, object]:
        """One pod's hour as plain values, the oldest minute first; ``above_milli``: throttling above it, by path."""
        series = self._groups.get(pod.group.path)
        return {
            "interval_s": MINUTE_S,
            "age_s": None if self._sampled_at is None else self._clock() - self._sampled_at,
            "wait": self._waits,
            **{name: series.series(name) if series is not None else [] for name in SERIES},
            "above_milli": {
                path: self._groups[path].series("throttled_milli")
                for path in directories_above(pod.group.path)
                if path in self._groups
            },
        }


def directories_above(path: str) -> Iterator[str]:
    """The groups above a pod's, the nearest first; without the hierarchy's root."""
    while (path := path.rpartition("/")[0]) not in {"", "/"}:
        yield path


NODE_INTERVAL_S: Final = 10.0
NODE_LENGTH: Final = 360
NODE_SERIES: Final = ("online_milli", "reclaimed_milli", "system_milli", "idle_milli", "budget_milli")
_NODE_WIDTH: Final = len(NODE_SERIES)


@final
class NodeHour:
    """Means of `NODE_INTERVAL_S`, the oldest first; None where nothing was known."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._values = array("f")
        self._sums = [0.0] * _NODE_WIDTH
        self._counts = [0] * _NODE_WIDTH
        self._began: float | None = None

    def add(self, cpu: NodeCpu | None, budget_milli: int | None, cpus: int, now: float) -> None:
        """One reading, None while it is unknown. ``cpus``: how many are online."""
        if self._began is None:
            self._began = now
        while now - self._began >= NODE_INTERVAL_S:
            self._end()
        values: tuple[int | None, ...] = (None, None, None, None, budget_milli)
        if cpu is not None:
            idle = max(0, 1000 * cpus - cpu.busy_milli)
            values = (cpu.online_milli, cpu.reclaimed_milli, cpu.system_milli, idle, budget_milli)
        for index, value in enumerate(values):
            if value is not None:
                self._sums[index] += value
                self._counts[index] += 1

    def _end(self) -> None:
        assert self._began is not None
        pairs = zip(self._sums, self._counts, strict=True)
        self._values.extend(total / count if count else math.nan for total, count in pairs)
        del self._values[: -NODE_LENGTH * _NODE_WIDTH]
        self._sums, self._counts = [0.0] * _NODE_WIDTH, [0] * _NODE_WIDTH
        self._began += NODE_INTERVAL_S
        if self._clock() - self._began > NODE_LENGTH * NODE_INTERVAL_S:
            # After a suspend: no loop over hours of nothing.
            self._values, self._began = array("f"), self._clock()

    def series(self) -> dict[str, object]:
        """As plain values. ``age_s``: of the newest value's end."""
        return {
            "interval_s": NODE_INTERVAL_S,
            "age_s": None if self._began is None else max(0.0, self._clock() - self._began),
            **{
                name: [None if math.isnan(value) else round(value) for value in self._values[index::_NODE_WIDTH]]
                for index, name in enumerate(NODE_SERIES)
            },
        }
