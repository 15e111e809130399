"""The agent's one clock: CPU use each second to five; ten times a second, beside BE work, the idle buffer or harm law.

One task instead of many sleeping ones. It reads counters, runs the pure control laws, and marks the node dirty when a
result has changed; the worker does the rest.
"""

import os
import time
from collections.abc import Callable
from typing import Final, final

import trio
from msgspec.structs import replace

from cgroupfs.errors import errno_name
from cgroupfs.files import REAL, FileOps
from cgroupfs.log import get_log
from cgroupfs.usage import SHORTEST_S, MemoryUsage, UsageReader
from reconciler.control.be_watch import RealtimeWatch, StartWatch
from reconciler.control.harm_watch import HarmWatch, outside_of_their_class
from reconciler.control.host_watch import DaemonWatch
from reconciler.control.quota_lending import QuotaLender
from reconciler.control.reconciler import Reconciler
from reconciler.policies import be_memory, idle_buffer
from reconciler.policies.be_memory import BeMemoryConfig, MemorySample, MemoryState
from reconciler.policies.start_allowance import without_allowance
from reconciler.runtime.cooperative import TimeSlice
from reconciler.runtime.wakeup import EARLY, next_beat
from reconciler.runtime.workqueue import TICK
from reconciler.signals.cpu import (
    ONLINE,
    RECLAIMED,
    CpuReading,
    CpuSampler,
    UseBySide,
    idle_sample,
    parse_stat,
)
from reconciler.signals.groups import GroupSampler, UsageHistory, sampled
from reconciler.signals.irqs import IrqSampler
from reconciler.signals.memory import NumaMemorySampler, parse_meminfo
from state.cpu import Uses
from state.memory import NodeMemoryReading
from state.model import NodeCpu, PodClass, SourceStatus
from state.plan import NodePlan
from state.pod_index import derived, index_of

_MEMORY_LOG: Final = get_log("memory_sampler")
_OLD_S: Final = 10.0
"""To the law of BE's memory an older reading is unknown."""
_LOG: Final = get_log("sampler")
_ASLEEP_MILLI: Final = 20
"""Up to this use BE work counts as asleep."""
_ASLEEP: Final = 2
"""While BE work sleeps, a sample is due after so many intervals: when it wakes up, its law follows within 2 s. Until
then its weight, its idle class and its quota hold.
"""
_LENT: Final = 5
"""The same while BE work has all that it may by the harm law: that law's own rounds show what online pods need. Of the
laws that need the samples then the fastest, that of BE's memory, steps each 5 s.
"""
_SETTLED_S: Final = 5.0
"""After a container's arrival until its threads' class is surely read: before, a law may depend on the next sample."""


@final
class MemorySampler:
    """Reads memory at intervals and steps the law of BE's memory bound. The newest readings are in its attributes."""

    def __init__(
        self,
        *,
        used: Callable[[], int | None],
        pods: Callable[[int], MemoryUsage | None],
        root: str = "/",
        files: FileOps = REAL,
    ) -> None:
        """``used``: bytes in use below the besteffort directory, None where that is not known.

        ``pods``: kubepods' memory; its page cache matters only where less than these bytes are left below its limit.
        """
        self.node: NodeMemoryReading | None = None
        self.problem: str | None = None
        self._used = used
        self._pods = pods
        self._proc = os.path.join(root, "proc")
        self._files = files
        self._read_at = self._stepped_at = 0.0
        self._state: MemoryState | None = None

    def on_second(self, now: float) -> None:
        """Read. ``now``: monotonic seconds."""
        try:
            read = parse_meminfo(self._files.read(self._proc, "meminfo"))
            used = self._used()
        except (OSError, ValueError) as exc:
            # Unknown: the last reading ages, and the law raises nothing on it.
            if self.problem is None:
                _MEMORY_LOG.warning("cannot read the node's memory", error=str(exc))
            self.problem = f"cannot read the node's memory: {exc}"
            if self.node is not None:
                self.node = replace(self.node, age_s=now - self._read_at)
            return
        self.problem = None
        self._read_at = now
        self.node = _with_pods(replace(read, reclaimed_bytes=used, age_s=0.0), self._pods(read.available_bytes))

    def bound(self, config: BeMemoryConfig, previous: int | None, now: float) -> int | None:
        """BE work's bound by the law; None while it is off or the node has not been read.

        ``previous``: the bound in force when the law has just started (from an earlier run, or none).
        """
        node = self.node
        if not config.enabled or node is None:
            self._state = None
            return None
        if self._state is None:
            self._state = be_memory.start(previous, node.for_pods_bytes, config)
        elif now - self._stepped_at < config.interval_s * EARLY:
            return self._state.high_bytes
        self._stepped_at = now
        fresh = node.age_s is not None and node.age_s < _OLD_S
        sample = MemorySample(
            total_bytes=node.for_pods_bytes,
            available_bytes=node.left_for_pods_bytes if fresh else None,
            used_bytes=node.reclaimed_bytes if fresh else None,
        )
        self._state = be_memory.step(self._state, sample, now, config)
        return self._state.high_bytes


def _with_pods(node: NodeMemoryReading, pods: MemoryUsage | None) -> NodeMemoryReading:
    """The node's reading, reduced to what kubepods' own limit leaves where that limit is tighter."""
    if pods is None or pods.limit_bytes is None or pods.limit_bytes >= node.total_bytes:
        return node
    left = max(0, pods.limit_bytes - pods.kept_bytes)
    return replace(node, pods_bytes=pods.limit_bytes, pods_available_bytes=left)


@final
class Sampler:
    """Reads CPU use at intervals and steps the laws that depend on it."""

    def __init__(
        self,
        reconciler: Reconciler,
        usage: UsageReader,
        *,
        lagged: Callable[[float], None],
        read: Callable[[NodeCpu | None, float], None],
        sampled: Callable[[], None],
        harm: HarmWatch,
        daemons: DaemonWatch,
        idle_threads: Callable[[], frozenset[str]] = frozenset,
        root: str = "/",
        sample_s: float = 1.0,
        files: FileOps = REAL,
    ) -> None:
        """``lagged`` gets the delay of each tick behind its due time (s): what the loop's other work costs.

        ``read`` gets each CPU reading, and the newest one again without a new one. ``sampled`` is called once per
        sample. ``idle_threads``: see `NodeView.idle_threads`.
        """
        self.harm = harm
        self.daemons = daemons
        self._idle_threads = idle_threads
        self._sampled = sampled
        self._lagged = lagged
        self._read = read
        self._reconciler = reconciler
        self._usage = usage
        self._proc = f"{root.rstrip('/')}/proc"
        self._sample_s = sample_s
        self._files = files
        self._sampler = CpuSampler()
        self._groups = GroupSampler(usage)
        self._memory = UsageHistory()
        self._numa = NumaMemorySampler(root, files)
        self._irqs = IrqSampler(root)
        self.bursts = QuotaLender(reconciler, usage)
        self.starts = StartWatch(reconciler, usage)
        self.realtime = RealtimeWatch(reconciler, usage.cpu_ns, files)
        self.memory = MemorySampler(
            used=lambda: usage.memory_bytes(reconciler.inventory.besteffort),
            pods=lambda enough: usage.memory_use(reconciler.inventory.layout.kubepods, enough_bytes=enough),
            root=root,
            files=files,
        )
        self._idle: idle_buffer.IdleState | None = None
        self._before: tuple[CpuReading, int | None] | None = None
        """The idle buffer's last reading, with BE work's CPU time (ns); None: the buffer is not in force."""
        self._sampled_at = 0.0
        self._failed_at = float("-inf")
        """When a second without a reading counted last."""
        self._sums = UseBySide()
        self._interval: tuple[NodePlan | None, float] = None, sample_s
        """Between two samples, by the plan of that time."""
        self.problem: str | None = None

    def status(self) -> SourceStatus:
        """How old the last CPU reading is."""
        now = time.monotonic()
        age = now - self._sampled_at if self._sampled_at else None
        return SourceStatus(name="cpu", ok=self.problem is None, age_s=age, detail=self.problem or "/proc/stat")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        try:
            await self._tick_for_ever()
        finally:
            self.harm.close()
            self.daemons.close()

    async def _tick_for_ever(self) -> None:
        due = trio.current_time()
        while True:
            config = self._reconciler.policies.idle_buffer
            works, now = self._reclaimed_works(), time.monotonic()
            harmful = works and self.harm.state is not None
            fast = config.enabled and works and not self.harm.decides(now)
            self._lagged(max(0.0, trio.current_time() - due))
            # Ten rounds a second beside online pods: each does only what is due, in slices.
            slices = TimeSlice()
            if fast or self._is_due(now):
                self.tick(now, fast=fast)
                await slices.checkpoint()
            await self.harm.round(now)
            await self.daemons.round(now)
            self._interval = self._reconciler.plan, self.interval_s(now, works=works)
            intervals = [self._interval[1]]
            intervals += [burst_s] if (burst_s := self.bursts.interval_s()) is not None else []
            intervals += [config.interval_s] if fast else []
            intervals += [self.harm.interval_s(now)] if harmful else []
            due = await next_beat(min(intervals))

    def interval_s(self, now: float, *, works: bool | None = None) -> float:
        """Seconds from one sample to the next; more where no law needs each second's: nothing starts or is lent.

        ``works``: whether BE work does, if that is known.
        """
        reconciler = self._reconciler
        policies, plan = reconciler.policies, reconciler.plan
        if not (self._reclaimed_works() if works is None else works):
            calm = _ASLEEP if self.harm.state is None else 1
        else:
            calm = _LENT if self._all_is_lent(now) else 1
        if (
            calm > 1
            and plan is not None
            and self.problem is None
            and not (plan.starts.pods or plan.starts.created)
            and not self.bursts.has_borrowers
            and not policies.node_daemons.enabled
            and not (policies.be_memory.enabled and policies.be_memory.interval_s < calm * self._sample_s)
            and not (policies.shared.enabled and policies.shared.measured)
        ):
            return calm * self._sample_s
        return self._sample_s

    def _all_is_lent(self, now: float) -> bool:
        reconciler = self._reconciler
        return (
            self.harm.is_calm(now)
            and not reconciler.policies.capacity.enabled
            and not reconciler.inventory.arrived_within(_SETTLED_S, now)
        )

    def _is_due(self, now: float) -> bool:
        """Whether the counters are wanted now: by the second's sample, the bursts, or to leave the idle buffer."""
        plan, interval_s = self._interval
        if plan is not self._reconciler.plan:
            interval_s = self.interval_s(now)
        second = now - self._sampled_at >= interval_s * EARLY
        return second or self.bursts.interval_s() is not None or self._before is not None or self.problem is not None

    def tick(self, now: float, *, fast: bool) -> None:
        """Read the counters once. ``fast``: for the idle buffer too."""
        try:
            reading = CpuReading(at_s=now, cpus=parse_stat(self._files.read(self._proc, "stat")))
        except (OSError, ValueError) as exc:
            # Unknown: the last reading ages, and the laws raise nothing on it.
            error = errno_name(exc.errno) if isinstance(exc, OSError) else str(exc)
            if self.problem is None:
                _LOG.warning("cannot read the CPU counters", path=f"{self._proc}/stat", error=error)
            self.problem = f"{self._proc}/stat: {error}"
            if now - self._failed_at >= self._sample_s * EARLY:
                self._failed_at = now
                known = self._reconciler.inventory.take(cpu=self._sampler.current(now), uses=self._uses(now))
                # Memory is in another file, and an unknown use ends in the least budget by a plan only.
                self._remember_memory(now)
                self._read(known.cpu, now)
                self.bursts.on_second(now)
                self._reconciler.dirty.mark(TICK)
            self.bursts.evaluate(None, now)
            return
        self.problem = None
        if fast:
            self._step(reading, now)
        else:
            self._idle = self._before = None
            self._reconciler.inventory.take(reclaimed_ceiling_milli=None)
        self.bursts.evaluate(reading, now)
        if now - self._sampled_at >= self._sample_s * EARLY:
            self._sampled_at = now
            self._remember_memory(now)
            self._sample(reading, now)
            self._sampled()

    def _sample(self, reading: CpuReading, now: float) -> None:
        """CPU use by class, from the directories' own counters: three reads, plus one per pod outside its class."""
        knowledge = self._reconciler.inventory
        odd = derived(knowledge.table, outside_of_their_class)
        paths = (knowledge.layout.kubepods, knowledge.besteffort, *odd)
        used = {path: ns for path in paths if (ns := self._usage.cpu_ns(path)) is not None}
        online, reclaimed = self._sums.add(used, paths[0], paths[1], odd)
        classes = {ONLINE: PodClass.SHARED, RECLAIMED: PodClass.RECLAIMED}
        sides = replace(reading, pods={ONLINE: online, RECLAIMED: reclaimed})
        cpu = self._sampler.sample(sides, classes)
        if cpu is not None and (be_milli := knowledge.readings.hosts.be_milli):
            cpu = replace(cpu, host_be_milli=min(be_milli, cpu.system_milli))
        self._groups.sample(
            sampled(knowledge.table, self._reconciler.policies, self._reconciler.pools, knowledge.besteffort)
        )
        knowledge.take(
            cpu=cpu,
            uses=self._uses(now),
            numa_memory=self._numa.sample(knowledge.readings.topology.nodes(), now),
            irq_cpus=self._irqs.sample(self._reconciler.policies.exclusive.avoid_irqs, now),
            idle_threads=self._idle_threads(),
            realtime=self.realtime.check(now),
        )
        self.bursts.on_second(now)
        self._read(cpu, now)
        self.starts.check(now)
        self._reconciler.dirty.mark(TICK)

    def _remember_memory(self, now: float) -> None:
        """The node's memory, and BE work's bound by the law: the pass after this sample plans by both."""
        reconciler, knowledge = self._reconciler, self._reconciler.inventory
        self.memory.on_second(now)
        before = reconciler.plan.memory.reclaimed_high_bytes if reconciler.plan is not None else None
        bound = self.memory.bound(reconciler.policies.be_memory, before, now)
        knowledge.take(node_memory=self.memory.node, reclaimed_memory_bytes=bound)

    def _uses(self, now: float) -> Uses:
        half_life_s = self._reconciler.policies.shared.provision.estimate.half_life_s
        return self._memory.add(self._groups.current(now), now, half_life_s)

    def _step(self, reading: CpuReading, now: float) -> None:
        """The idle buffer's law, from the counters since the reading before."""
        pools = self._reconciler.pools
        if pools is None:
            return
        used = self._usage.cpu_ns(self._reconciler.inventory.besteffort)
        before = self._before
        if before is not None and reading.at_s - before[0].at_s < SHORTEST_S:
            return
        self._before = (reading, used)
        watched = idle_buffer.watched(pools)
        if self._idle is None:
            self._idle = idle_buffer.start(pools, 1000 * len(watched))
        if before is None:
            return
        sample = idle_sample(before[0], reading, watched, reclaimed_ns=(before[1], used))
        if self._had_allowance(before[0].at_s):
            sample = without_allowance(sample, pools.budget_milli)
        config = self._reconciler.policies.idle_buffer
        self._idle = idle_buffer.step(self._idle, sample, now, config)
        if self._idle.ceiling_milli != self._reconciler.inventory.readings.reclaimed_ceiling_milli:
            self._reconciler.inventory.take(reclaimed_ceiling_milli=self._idle.ceiling_milli)
            self._reconciler.dirty.mark(TICK)

    def _had_allowance(self, since: float) -> bool:
        """Whether BE work had a start allowance at some time since then (monotonic seconds)."""
        plan = self._reconciler.plan
        return plan is not None and (bool(plan.starts.pods) or plan.starts.at > since)

    def _reclaimed_works(self) -> bool:
        """Whether BE work uses the CPU at all: if it does not, nothing can be taken from it, and no task is woken."""
        cpu = self._reconciler.inventory.readings.cpu
        if cpu is not None and cpu.reclaimed_milli <= _ASLEEP_MILLI:
            return False
        return bool(index_of(self._reconciler.inventory.table).reclaimed)
