"""Wait of each pod's tasks in a run queue: by taskstats for whole processes, else by schedstat by thread.

Units: nanoseconds inside. Source: kernel documentation, accounting/taskstats and scheduler/sched-stats
(/proc/<pid>/schedstat).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, final

from cgroupfs.bounded import shown, whole
from cgroupfs.errors import SourceError
from cgroupfs.usage import SHORTEST_S
from reconciler.runtime.cooperative import TimeSlice
from reconciler.signals.counter_delta import CounterDelta
from reconciler.signals.pod_cpus import pod_cpus
from reconciler.signals.podcpu import PodCpu, QuotaLookup
from reconciler.signals.processes import OUTSIDE
from reconciler.signals.readers import BaseReader, SampleContext, SampleSheet, SharedReaders
from reconciler.signals.taskstats import Delays, Taskstats
from state.model import Pod

SIGNALS: Final = ("cpu.wait", "cpu.wait_milli", "cpu.wait_own", "cpu.delay")
_QUIET: Final = 0.5
"""Confidence where no task got a CPU: the kernel counts a wait when the task gets the CPU, not while it waits."""
_LEAST: Final = 0.1
"""Confidence where throttling explains all of the waiting."""
_ESTIMATE: Final = 0.8
"""Confidence of ``cpu.wait_own``."""
_TRY_AGAIN_S: Final = 60.0
_AT_ONCE: Final = 16
"""Pods whose processes are queried together."""
_QUERIED: Final = 128
"""Processes of one query, 2.5 µs each."""
_THREADS: Final = 4096
"""Of one pod, where each is read: 15 µs. What the others use lowers the confidence, as that of ended processes does."""


class DelaySource(Protocol):
    """Provides the delays of processes; `Taskstats` does."""

    def query(self, pids: Sequence[int]) -> Mapping[int, Delays]: ...

    def close(self) -> None: ...


class ProcessLists(Protocol):
    """Lists the processes of each pod; `reconciler.signals.processes.PodProcesses` does."""

    @property
    def outside(self) -> bool: ...

    def get(self, pod: Pod, now: float, /) -> tuple[int, ...]: ...

    def ended(self, uid: str) -> None: ...


class PodWait(NamedTuple):
    """What a pod's tasks did between two passes. ``own_ns``: of the waiting, what quotas explain."""

    interval_s: float
    run_ns: int
    wait_ns: int
    own_ns: int
    switches: int

    @property
    def confidence(self) -> float:
        """The share of the waiting that no quota explains."""
        return max(_LEAST, 1.0 - self.own_ns / self.wait_ns) if self.own_ns else 1.0


def own_wait_ns(run_ns: int, wait_ns: int, interval_s: float, throttled_cpus: float, cpus: int) -> int:
    """The part of the waiting that was throttling, as an estimate.

    ``throttled_cpus``: run queues that were stopped, on average. Each held the tasks that wanted to run there: with n
    of them on ``cpus`` CPUs, n/cpus, at least one.
    """
    tasks = (run_ns + wait_ns) / 1e9 / interval_s
    queued = max(1.0, tasks / max(1, cpus))
    return min(wait_ns, round(throttled_cpus * queued * interval_s * 1e9))


class _WaitSum(NamedTuple):
    """``complete`` False: a process that was listed has ended."""

    run_ns: int
    wait_ns: int
    switches: int
    complete: bool


@final
class RunQueue(BaseReader):
    """A `Reader`. ``quotas`` None: throttling is unknown."""

    def __init__(
        self,
        shared: SharedReaders,
        processes: ProcessLists,
        quotas: QuotaLookup | None,
        taskstats: Callable[[], DelaySource] = Taskstats,
    ) -> None:
        super().__init__(shared)
        self._processes = processes
        self._quotas = quotas
        self._proc = f"{shared.means.root.rstrip('/')}/proc"
        self._proc_files = shared.means.files
        self._open = taskstats
        self._socket: DelaySource | None = None
        self._try_at = 0.0
        self._grew = CounterDelta()
        self._before: dict[str, float] = {}
        self._outside = False

    def problems(self) -> Mapping[str, str]:
        return dict.fromkeys(SIGNALS, OUTSIDE) if self._outside else self._problems

    async def aclose(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        self._prepare(now)
        self._grew.rotate()
        slices = TimeSlice()
        before, self._before = self._before, {}
        pods = list(scene.view.pods.values())
        seen = False
        for begin in range(0, len(pods), _AT_ONCE):
            together = {pod.uid: self._processes.get(pod, now) for pod in pods[begin : begin + _AT_ONCE]}
            seen = seen or any(together.values())
            at_s = self._clock()
            sums = await self._query(together, at_s, slices)
            for pod in pods[begin : begin + _AT_ONCE]:
                known = sums.get(pod.uid)
                if known is None:
                    continue
                interval_s = at_s - before.get(pod.uid, at_s)
                # As `CounterDelta` does: of two readings that are too close the older one remains.
                self._before[pod.uid] = at_s if interval_s >= SHORTEST_S else before.get(pod.uid, at_s)
                if not known.complete:
                    self._processes.ended(pod.uid)
                if interval_s >= SHORTEST_S:
                    self._enter(sheet, pod.uid, self._without_quota(pod, scene, known, interval_s))
            await slices.checkpoint()
        self._outside = not seen and self._processes.outside

    def _prepare(self, now: float) -> None:
        """Open a socket, or record why not; tried again at intervals, as rights can be given."""
        if self._socket is not None or now < self._try_at:
            return
        self._try_at = now + _TRY_AGAIN_S
        try:
            self._socket = self._open()
            self._problems = {}
        except SourceError as exc:
            self._problems = dict.fromkeys(SIGNALS, f"{exc}; using schedstat of each thread instead")

    async def _query(self, pids: Mapping[str, Sequence[int]], at_s: float, slices: TimeSlice) -> dict[str, _WaitSum]:
        """What the processes of each pod did since the pass before; pods of which nothing is known are missing."""
        sums: dict[str, _WaitSum] = {}
        if self._socket is None:
            for uid, own in pids.items():
                if (item := await self._by_thread(own, at_s, slices)) is not None:
                    sums[uid] = item
            return sums
        wanted = [pid for own in pids.values() for pid in own]
        replies: dict[int, Delays] = {}
        try:
            # How many processes a pod or a host workload has is its own choice.
            for begin in range(0, len(wanted), _QUERIED):
                replies.update(self._socket.query(wanted[begin : begin + _QUERIED]))
                await slices.checkpoint()
        except (OSError, ValueError) as exc:
            # Its rights were removed, or memory is short; the next pass decides again.
            self._close()
            self._problems = dict.fromkeys(SIGNALS, f"taskstats: {exc}")
            return sums
        for uid, own in pids.items():
            if own:
                pairs = [(pid, replies[pid]) for pid in own if pid in replies]
                sums[uid] = self._sum(pairs, at_s, complete=len(pairs) == len(own))
        return sums

    async def _by_thread(self, pids: Sequence[int], at_s: float, slices: TimeSlice) -> _WaitSum | None:
        pairs: list[tuple[object, Delays]] = []
        alive = 0
        for pid in pids:
            await slices.checkpoint()
            try:
                tids = self._proc_files.groups(f"{self._proc}/{pid}/task", _THREADS - len(pairs))
            except OSError:
                continue
            alive += 1
            for tid in tids:
                try:
                    text = self._proc_files.read(f"{self._proc}/{pid}/task/{tid}", "schedstat")
                    pairs.append(((pid, tid), parse_schedstat(text)))
                except (OSError, ValueError):
                    continue
                await slices.checkpoint()
        if alive and not pairs:
            self._problems = dict.fromkeys(SIGNALS, "no run queue times in this kernel (CONFIG_SCHED_INFO)")
        return self._sum(pairs, at_s, complete=alive == len(pids)) if pairs else None

    def _sum(self, pairs: Iterable[tuple[object, Delays]], at_s: float, *, complete: bool) -> _WaitSum:
        run_ns = wait_ns = switches = 0
        for key, delays in pairs:
            grew = self._grew.grown(key, at_s, delays)
            if grew is None:
                continue
            ran, waited, turns = grew.by
            # A number that went back is another process by this pid: what it did before is not of this interval.
            if ran is not None and waited is not None and turns is not None:
                run_ns, wait_ns, switches = run_ns + ran, wait_ns + waited, switches + turns
        return _WaitSum(run_ns, wait_ns, switches, complete)

    def _without_quota(self, pod: Pod, scene: SampleContext, sums: _WaitSum, interval_s: float) -> PodWait:
        throttling = self._quotas.throttling(pod.uid) if self._quotas is not None else None
        own_ns = 0
        # A task that a quota stops is in the run queue, too: the kernel counts it as waiting, in every version
        # (measured on 6.18: one spinner with a quota of 20 % waits 80 % of the time).
        if throttling is not None and throttling.cpus:
            cpus = len(pod_cpus(pod, scene.view, scene.pools))
            own_ns = own_wait_ns(sums.run_ns, sums.wait_ns, interval_s, throttling.cpus, cpus)
        return PodWait(interval_s, sums.run_ns, sums.wait_ns, own_ns, sums.switches)

    def _enter(self, sheet: SampleSheet, uid: str, waited: PodWait) -> None:
        subject = f"pod:{uid}"
        wait_ns = waited.wait_ns - waited.own_ns
        confidence = waited.confidence * self._coverage(sheet, subject, waited) if waited.switches else _QUIET
        busy = waited.run_ns + wait_ns
        per_ms = 1e6 * waited.interval_s
        values = {
            "cpu.wait": 100.0 * wait_ns / busy if busy else 0.0,
            "cpu.wait_milli": wait_ns / per_ms,
            "cpu.delay": wait_ns / 1e3 / max(1, waited.switches),
        }
        sheet.enter(subject, values, confidence)
        sheet.put(subject, "cpu.wait_own", waited.own_ns / per_ms, confidence=_ESTIMATE if waited.own_ns else 1.0)

    def _coverage(self, sheet: SampleSheet, subject: str, waited: PodWait) -> float:
        """Which part of the pod's CPU time its known processes explain; small uses are all noise."""
        # The use of a process between the last sample and its end is lost.
        used = sheet.get(subject, "cpu.use")
        known = waited.run_ns / 1e6 / waited.interval_s
        if used is None or used < 50.0 or known >= 0.9 * used:
            return 1.0
        return max(_LEAST, known / used)


def parse_schedstat(text: str) -> Delays:
    """A thread's line: time on a CPU (ns), time in a run queue (ns), number of turns.

    Errors: `ValueError` for anything else.
    """
    parts = text.split()
    if len(parts) != 3:
        raise ValueError(f"{shown(text)} is not a line of schedstat")
    run_ns, wait_ns, switches = map(whole, parts)
    return Delays(run_ns, wait_ns, switches)


def build(shared: SharedReaders) -> RunQueue:
    return RunQueue(shared, shared.processes, shared.reader(PodCpu))
