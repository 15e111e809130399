"""The CPU pools as wholes: their CPUs, how busy those are, and how many tasks want them.

Waiting is that of the pool's CPUs in /proc/schedstat, where the kernel was built with it, else the sum over the pool's
pods. Throttling is subtracted either way.

**Cost**: one read of 1 µs a CPU and scheduling domain, each pass; every five seconds on machines of more than 64 CPUs.
Source: kernel documentation, scheduler/sched-stats.
"""

from collections.abc import Collection
from typing import Final, NamedTuple, final

from cgroupfs.bounded import shown, whole
from cgroupfs.cpuset import CpuSet
from cgroupfs.lines import lines_of
from reconciler.signals.counter_delta import CounterDelta
from reconciler.signals.cpu import idle_milli
from reconciler.signals.pod_cpus import pool_cpus
from reconciler.signals.readers import BaseReader, SampleContext, SampleSheet, SharedReaders
from state.evidence import pod_subject, pool_subject
from state.model import Pools

SIGNALS: Final = (
    "pool.cpus",
    "cpu.use",
    "cpu.idle",
    "cpu.wait",
    "cpu.wait_milli",
    "load.runnable",
    "memory.use",
)
_WAITING: Final = frozenset({"cpu.wait", "cpu.wait_milli", "load.runnable"})
_PROXY: Final = 0.5
"""Confidence of the sum over a pool's pods: it misses system work, and BE pods of another pool."""
_MANY: Final = 64
"""CPUs beyond which /proc/schedstat is read each `_MANY_EVERY_S` only."""
_MANY_EVERY_S: Final = 5.0


class CpuWait(NamedTuple):
    """Since boot: how long tasks ran on a CPU and how long they waited for it."""

    run_ns: int
    wait_ns: int


def parse_schedstat(text: str) -> dict[int, CpuWait]:
    """/proc/schedstat by CPU. Errors: `ValueError` for a CPU line of fewer than nine numbers, or of other words."""
    waits: dict[int, CpuWait] = {}
    for line in lines_of(text):
        if line.startswith("cpu"):
            name, *counts = line.split()
            if len(counts) < 9:
                raise ValueError(f"{shown(line)} has fewer than nine numbers")
            waits[whole(name[3:])] = CpuWait(whole(counts[6]), whole(counts[7]))
    return waits


class _PoolLoad(NamedTuple):
    """On average: tasks that ran, and that waited, in thousandths."""

    run_milli: float
    wait_milli: float


@final
class PoolReader(BaseReader):
    """A `Reader`; runs after those of the pods, whose samples it adds up."""

    def __init__(self, shared: SharedReaders) -> None:
        super().__init__(shared)
        self._proc = f"{shared.means.root.rstrip('/')}/proc"
        self._proc_files = shared.means.files
        self._grew = CounterDelta()
        self._cpus: dict[int, _PoolLoad] = {}
        self._read_at: float | None = None

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        pools = scene.pools
        if pools is None:
            return
        wanted = set(scene.wanted)
        by_name = pool_cpus(pools)
        if not wanted.isdisjoint(_WAITING):
            self._read_waiting(len(scene.view.topology.online), now)
        members = _members(scene, pools)
        for name, cpus in by_name.items():
            subject = pool_subject(name)
            sheet.put(subject, "pool.cpus", len(cpus))
            self._enter_use(scene, sheet, subject, cpus)
            pods = members.get(name, [])
            if not wanted.isdisjoint(_WAITING):
                neighbours = [
                    uid for other, uids in members.items() if by_name.get(other, CpuSet()) & cpus for uid in uids
                ]
                self._enter_waiting(sheet, subject, cpus, pods, neighbours)
            memory = [use for uid in pods if (use := sheet.get(pod_subject(uid), "memory.use")) is not None]
            # Of all of its pods, or of none: a part of the sum would look like little memory.
            if memory and len(memory) == len(pods):
                sheet.put(subject, "memory.use", sum(memory))

    def _enter_use(self, scene: SampleContext, sheet: SampleSheet, subject: str, cpus: CpuSet) -> None:
        if (known := idle_milli(scene.view.cpu, cpus)) is not None:
            idle, age_s = known
            sheet.put(subject, "cpu.idle", idle, age_s=age_s)
            sheet.put(subject, "cpu.use", 1000.0 * len(cpus) - idle, age_s=age_s)

    def _read_waiting(self, count: int, now: float) -> None:
        if count > _MANY and self._read_at is not None and 0.0 <= now - self._read_at < _MANY_EVERY_S:
            return
        self._grew.rotate()
        self._read_at = now
        try:
            waits = parse_schedstat(self._proc_files.read(self._proc, "schedstat"))
        except (OSError, ValueError) as exc:
            # The kernel has no such file where it was built without it, as some clouds' are.
            self._problems = dict.fromkeys(
                sorted(_WAITING),
                f"/proc/schedstat: {exc.strerror if isinstance(exc, OSError) else exc}; the wait of a pool is "
                "the sum over its pods",
            )
            self._cpus = {}
            return
        self._problems = {}
        at_s = self._clock()
        loads: dict[int, _PoolLoad] = {}
        for cpu, counts in waits.items():
            grew = self._grew.grown(cpu, at_s, tuple(counts))
            run, wait = (grew.rate(0), grew.rate(1)) if grew is not None else (None, None)
            if run is not None and wait is not None:
                loads[cpu] = _PoolLoad(run / 1e6, wait / 1e6)
        self._cpus = loads

    def _enter_waiting(
        self, sheet: SampleSheet, subject: str, cpus: CpuSet, pods: Collection[str], neighbours: Collection[str]
    ) -> None:
        """``neighbours``: the pods that may run on these CPUs."""
        known = [self._cpus[cpu] for cpu in cpus if cpu in self._cpus]
        if known and len(known) == len(cpus):
            # Throttled tasks count as waiting on these CPUs, whatever the pool of their pod.
            own = sum(sheet.get(pod_subject(uid), "cpu.wait_own") or 0.0 for uid in neighbours)
            run = sum(load.run_milli for load in known)
            wait, confidence = max(0.0, sum(load.wait_milli for load in known) - own), 1.0
        else:
            parts = [
                (use, waited)
                for uid in pods
                if (use := sheet.get(pod_subject(uid), "cpu.use")) is not None
                and (waited := sheet.get(pod_subject(uid), "cpu.wait_milli")) is not None
            ]
            if not parts:
                return
            run, wait = (sum(column) for column in zip(*parts, strict=True))
            confidence = _PROXY * len(parts) / len(pods)
        age_s = 0.0 if self._read_at is None else max(0.0, self._clock() - self._read_at) if known else 0.0
        busy = run + wait
        sheet.put(subject, "load.runnable", busy / 1000, age_s=age_s, confidence=confidence)
        sheet.put(subject, "cpu.wait_milli", wait, age_s=age_s, confidence=confidence)
        sheet.put(subject, "cpu.wait", 100.0 * wait / busy if busy else 0.0, age_s=age_s, confidence=confidence)


def _members(scene: SampleContext, pools: Pools) -> dict[str, list[str]]:
    """The pods' uids by pool; those that run everywhere are in none."""
    members: dict[str, list[str]] = {}
    for uid, pod in scene.view.pods.items():
        if (name := pools.pool_of(pod)) is not None:
            members.setdefault(name, []).append(uid)
    return members
