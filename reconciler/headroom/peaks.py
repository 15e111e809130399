"""Peaks of online workloads, from decaying histograms of their use; and what they leave for BE work. Pure.

    headroom = what there is - predicted peaks of online workloads - predicted peak of the system

A *workload* is what remains when a pod is replaced: namespace, kind and name of its controller (`workload_of`). It is
*cold* before a day of samples, and again when nothing was measured for half an hour.

Times are seconds since the boot (CLOCK_BOOTTIME), in a replay those of the recording: the wall clock, which people and
NTP set, is not used here. Units: thousandths of a CPU, bytes.

Source: Koordinator's peak predictor (half-life of 12 h for CPU and 24 h for memory, p95 and p98, 10 % margin, cold
start of 24 h, model dropped after 30 min without a sample), which predicts by pod: there a rollout is a cold start.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, final

from msgspec import Struct

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.headroom.histogram import CPU_MILLI, MEMORY_BYTES, DecayingHistogram
from reconciler.runtime.cooperative import Steps
from state.memory import NodeMemoryReading
from state.model import Pod, Pools

CPU_HALF_LIFE_S: Final = 12 * 3600.0
"""Yesterday's peak of three hours keeps more than the 5 % of the weight that p95 leaves out; last week's does not."""
MEMORY_HALF_LIFE_S: Final = 24 * 3600.0
"""Memory that was needed is needed again: it is given back rarely, and too little of it kills."""
CPU_RANK: Final = 0.95
"""CPU waits where there is too little: one minute in twenty may be above."""
MEMORY_RANK: Final = 0.98
MARGIN_PERCENT: Final = 10
"""Added to each peak: growth since the last one."""
COLD_START_S: Final = 24 * 3600.0
"""A workload's load repeats by day: before the first day is over its peak may not have been seen."""
FEWEST_SAMPLES: Final = 60.0
"""Minutes, as they count now, below which a histogram is not used: about two days after the last of a whole day."""
STALE_S: Final = 1800.0
"""Without a reading for so long a workload counts by its requests."""
FRESH_S: Final = 180.0
"""An older prediction is none: what BE work could have is unknown."""
MOST: Final = 512
"""Workloads in all: 3 KiB each."""
MOST_NEW: Final = 128
"""Of them, those measured for less than an hour: what short-lived pods and pods with made-up owners can take."""
_PROMOTED: Final = 60
"""Samples after which a workload leaves the probation, and after which that is tried again."""
SYSTEM: Final = "(system)"
"""Name of what no pod accounts for; no workload has it."""
_CPU: Final = 1000
_LONGEST: Final = 600
"""Characters of a workload's name: a pod without a known owner chooses the labels that it is made of."""
_CRON_TIME: Final = re.compile(r"-\d{8,10}\Z")
"""Ends the name of a CronJob's Job: the scheduled time in minutes since the epoch, by older controllers in seconds."""
_HASH_LABEL: Final = "pod-template-hash"
_GENERATED: Final = 5
"""Characters of a generated name's ending."""
_PODS_A_STEP: Final = 16


class PodReading(NamedTuple):
    """One online pod's minute. Use None: not measured. ``cpu_request`` and ``cpu_milli``: beyond its exclusive CPUs."""

    workload: str
    cpu_milli: float | None
    memory_bytes: float | None
    cpu_request: int = 0
    memory_request: int = 0


class NodeReading(NamedTuple):
    """What no pod accounts for, as the mean of the minute. None: not measured."""

    cpu_milli: float | None
    memory_bytes: float | None


class PeakPrediction(Struct, frozen=True, kw_only=True):
    """The sums of one minute. ``known``, ``cold``: workloads with pods on the node, by whether their peak is known.

    ``online_*`` and ``system_*``: with their margins.
    """

    at_s: float
    known: int = 0
    cold: int = 0
    online_cpu_milli: int = 0
    online_memory_bytes: int = 0
    system_cpu_milli: int = 0
    system_memory_bytes: int = 0


def workload_of(pod: Pod) -> str:
    """``namespace/Kind/name`` of what remains when the pod is replaced; bounded.

    A ReplicaSet's name ends with the hash of its Deployment's template, a CronJob's Job with the time; a static pod's
    owner is the node. Where the owner is not known, as from the runtime only, it is that of the labels which
    controllers set, and of the pod's name. Pods choose these, and share the histograms of their own namespace only.
    """
    kind, _, name = (pod.owner or "").partition("/")
    if pod.static or kind == "Node":
        kind, name = "Pod", pod.name or pod.uid
    elif not name:
        kind, name = _controller(pod.name or pod.uid, pod.labels)
    if kind == "ReplicaSet":
        ending = f"-{pod.labels.get(_HASH_LABEL, '')}"
        if len(ending) > 1 and name.endswith(ending) and len(name) > len(ending):
            kind, name = "Deployment", name.removesuffix(ending)
    elif kind == "Job" and (made := _CRON_TIME.search(name)) is not None and made.start():
        kind, name = "CronJob", name[: made.start()]
    return f"{pod.namespace or ''}/{kind}/{name}"[:_LONGEST]


def _controller(name: str, labels: Mapping[str, str]) -> tuple[str, str]:
    """Kind and name of the controller, by a pod's labels and name; else the pod.

    Source: Kubernetes documentation, "Well-Known Labels".
    """
    before, dash, last = name.rpartition("-")
    if before and dash:
        generated = len(last) == _GENERATED
        if generated and (made := labels.get(_HASH_LABEL)) and before.endswith(f"-{made}"):
            return "ReplicaSet", before
        if generated and {"controller-revision-hash", "pod-template-generation"} <= labels.keys():
            return "DaemonSet", before
        if labels.get("statefulset.kubernetes.io/pod-name") == name and last.isdecimal():
            return "StatefulSet", before
        job = labels.get("batch.kubernetes.io/job-name") or labels.get("job-name")
        if job and name.startswith(f"{job}-"):
            return "Job", job
    return "Pod", name


def reading_of(pod: Pod, cpu_milli: float | None, memory_bytes: int | None, own: Mapping[str, int]) -> PodReading:
    """A pod's minute. ``own``: by pod uid, its exclusive CPUs (`own_milli`), which are not among what there is."""
    most = own.get(pod.uid, 0)
    return PodReading(
        workload_of(pod),
        None if cpu_milli is None else max(0.0, cpu_milli - most),
        memory_bytes,
        max(0, pod.total(lambda item: item.requests.cpu_milli or 0) + (pod.overhead.cpu_milli or 0) - most),
        pod.total(lambda item: item.requests.memory_bytes or 0) + (pod.overhead.memory_bytes or 0),
    )


def own_milli(pools: Pools) -> dict[str, int]:
    """The exclusive CPUs of each pod that has some, as thousandths, by uid."""
    result: dict[str, CpuSet] = {}
    for key, cpus in pools.dedicated.items():
        uid = key.partition("/")[0]
        # Containers of one pod may have the same CPUs: an init container's pass to an app container.
        result[uid] = result.get(uid, EMPTY) | cpus
    return {uid: _CPU * len(cpus) for uid, cpus in result.items()}


def cpu_left(prediction: PeakPrediction, pools: Pools) -> int:
    """What the predicted peaks leave of the CPUs that no container owns."""
    there_is = _CPU * len(pools.online_cpus - pools.dedicated_cpus)
    return max(0, there_is - prediction.online_cpu_milli - prediction.system_cpu_milli)


def memory_left(prediction: PeakPrediction, node: NodeMemoryReading, reserve_bytes: int) -> int:
    """What the predicted peaks leave of the node's memory, and of kubepods' own where that is limited."""
    whole = node.total_bytes - prediction.system_memory_bytes
    pods = whole if node.pods_bytes is None else node.pods_bytes  # what the system uses is not in kubepods
    return max(0, min(whole, pods) - reserve_bytes - prediction.online_memory_bytes)


@final
class Workload:
    """One workload's histograms. ``first_s``, ``last_s``: of its samples."""

    __slots__ = ("count", "cpu", "first_s", "last_s", "memory")

    def __init__(self, at_s: float) -> None:
        self.cpu = DecayingHistogram(CPU_MILLI, CPU_HALF_LIFE_S)
        self.memory = DecayingHistogram(MEMORY_BYTES, MEMORY_HALF_LIFE_S)
        self.first_s = self.last_s = at_s
        self.count = 0.0
        """Samples as they count at ``last_s``: of the CPU, or of memory where no CPU use is measured."""

    def add(self, cpu_milli: float | None, memory_bytes: float | None, at_s: float) -> None:
        """One sample; without a measured amount it is none."""
        if cpu_milli is None and memory_bytes is None:
            return
        self.count = self.counted(at_s) + 1
        if cpu_milli is not None:
            self.cpu.add(cpu_milli, at_s)
        if memory_bytes is not None:
            self.memory.add(memory_bytes, at_s)
        self.last_s = max(self.last_s, at_s)

    def counted(self, at_s: float) -> float:
        """Samples as they count at a moment: what the evidence is worth."""
        return self.count * math.pow(2.0, -min(1000.0, max(0.0, at_s - self.last_s) / CPU_HALF_LIFE_S))

    def is_known(self, at_s: float) -> bool:
        """Whether it was measured for a day, enough of it counts, and it is measured now."""
        return (
            self.last_s - self.first_s >= COLD_START_S
            and at_s - self.last_s <= STALE_S
            and self.counted(at_s) >= FEWEST_SAMPLES
        )

    def peaks(self, *, known: bool) -> tuple[float, float]:
        """CPU and memory of one pod, without the margin; of one that is not known the most that was measured."""
        ranks = (CPU_RANK, MEMORY_RANK) if known else (1.0, 1.0)
        return self.cpu.quantile(ranks[0]), self.memory.quantile(ranks[1])


class _Pods:
    """One workload's pods of a minute."""

    __slots__ = ("count", "cpu", "cpu_count", "cpu_request", "memory", "memory_count", "memory_request")

    def __init__(self) -> None:
        self.count = self.cpu_count = self.memory_count = 0
        self.cpu = self.memory = 0.0
        self.cpu_request = self.memory_request = 0

    def add(self, reading: PodReading) -> None:
        self.count += 1
        if reading.cpu_milli is not None:
            self.cpu, self.cpu_count = self.cpu + reading.cpu_milli, self.cpu_count + 1
        if reading.memory_bytes is not None:
            self.memory, self.memory_count = self.memory + reading.memory_bytes, self.memory_count + 1
        self.cpu_request += reading.cpu_request
        self.memory_request += reading.memory_request

    @property
    def means(self) -> tuple[float | None, float | None]:
        return (
            self.cpu / self.cpu_count if self.cpu_count else None,
            self.memory / self.memory_count if self.memory_count else None,
        )


@final
class WorkloadPeaks:
    """The workloads with their histograms: `MOST` at most.

    A new one is in a probation of `MOST_NEW` until it has been measured for an hour. So workloads that live shortly, or
    that a tenant renames each minute, displace one another, and no workload that was measured for a day.
    """

    def __init__(self) -> None:
        self.known: dict[str, Workload] = {}
        self.new: dict[str, Workload] = {}
        self.system: Workload | None = None

    def __len__(self) -> int:
        return len(self.known) + len(self.new)

    def minute(self, pods: Sequence[PodReading], node: NodeReading, at_s: float) -> Steps[PeakPrediction]:
        """One minute of all online pods: it is learned, and then the peaks are predicted. A step is some 50 µs."""
        groups: dict[str, _Pods] = {}
        for number, reading in enumerate(pods):
            group = groups.get(reading.workload)
            if group is None:
                group = groups[reading.workload] = _Pods()
            group.add(reading)
            if number % _PODS_A_STEP == 0:
                yield
        known = 0
        cpu = memory = 0.0
        displaced = self._displaced(at_s, groups)
        for name, group in groups.items():
            workload = self._admitted(name, at_s, displaced)
            if workload is not None:
                # One sample, the mean of its pods: the peak is that of one pod.
                workload.add(*group.means, at_s)
                self._promote(name, workload, at_s)
            is_known = workload is not None and workload.is_known(at_s)
            known += is_known
            own_cpu, own_memory = (0.0, 0.0) if workload is None else workload.peaks(known=is_known)
            # Once for each pod that it has now: the peak of a workload that is scaled up is known at once.
            own_cpu, own_memory = with_margin(own_cpu) * group.count, with_margin(own_memory) * group.count
            # A cold one counts by its requests, or by the most that was measured if that is more.
            cpu += own_cpu if is_known else max(own_cpu, group.cpu_request)
            memory += own_memory if is_known else max(own_memory, group.memory_request)
            yield
        if self.system is None:
            self.system = Workload(at_s)
        self.system.add(*node, at_s)
        system = self.system.peaks(known=self.system.is_known(at_s))
        return PeakPrediction(
            at_s=at_s,
            known=known,
            cold=len(groups) - known,
            online_cpu_milli=round(cpu),
            online_memory_bytes=round(memory),
            system_cpu_milli=round(with_margin(system[0])),
            system_memory_bytes=round(with_margin(system[1])),
        )

    def restore(self, name: str, workload: Workload, *, known: bool) -> None:
        """One that an earlier run had; beyond the bound it is left out. One that was measured since then remains."""
        if name == SYSTEM:
            if self.system is None or self.system.count < workload.count:
                self.system = workload
            return
        kept, most = (self.known, MOST - MOST_NEW) if known else (self.new, MOST_NEW)
        if name not in self.known and len(kept) < most:
            self.new.pop(name, None)
            kept[name] = workload

    def items(self) -> Iterable[tuple[str, Workload, bool]]:
        """All with their names, and whether they have left the probation."""
        yield from ((name, workload, True) for name, workload in list(self.known.items()))
        yield from ((name, workload, False) for name, workload in list(self.new.items()))
        if self.system is not None:
            yield SYSTEM, self.system, True

    def _admitted(self, name: str, at_s: float, displaced: Iterator[str]) -> Workload | None:
        """The workload of a name; None where all places are taken by workloads that have pods now."""
        workload = self.known.get(name) or self.new.get(name)
        if workload is not None:
            return workload
        # The absent one with the least evidence makes room.
        while len(self.new) >= MOST_NEW:
            least = next(displaced, None)
            if least is None:
                return None
            # One that was restored as a known one meanwhile is no longer there.
            self.new.pop(least, None)
        workload = self.new[name] = Workload(at_s)
        return workload

    def _displaced(self, at_s: float, present: Collection[str]) -> Iterator[str]:
        """The absent ones in the probation, the least evidence first: ordered once a minute, by its first newcomer."""
        yield from (
            key for _, key in sorted((at.counted(at_s), key) for key, at in self.new.items() if key not in present)
        )

    def _promote(self, name: str, workload: Workload, at_s: float) -> None:
        minutes = int((workload.last_s - workload.first_s) // 60.0)
        if minutes < _PROMOTED or name not in self.new:
            return
        if len(self.known) >= MOST - MOST_NEW:
            if minutes % _PROMOTED:
                return  # comparing with all known ones costs 0.1 ms
            # It takes the place of the one whose evidence counts least now, if that is less than its own.
            counted, least = min((at.counted(at_s), key) for key, at in self.known.items())
            if counted >= workload.counted(at_s):
                return
            del self.known[least]
        self.known[name] = self.new.pop(name)


def with_margin(amount: float) -> float:
    return amount * (100 + MARGIN_PERCENT) / 100
