"""`cpi` and `llc.misses` of online pods: cycles, instructions and cache misses counted for some seconds of each minute.

A few pods are counted at a time, the pod that has waited longest first, within a bound on open descriptors. A sample is
of the whole window and is valid until the next; it ages meanwhile.

**Cost**: on 2 CPUs 0.2 ms to open and 0.2 ms to close a pod's 6 counters, mostly interrupts of the CPU that counts:
below 0.01 % of a CPU for 100 pods a minute. While a pod is counted, each switch of its CPUs between groups costs more.

Source: Zhang et al., CPI²: CPU performance isolation for shared compute clusters, EuroSys 2013 (10 s in each minute).
"""

import errno
import math
import os
import resource
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple, final

import trio
from msgspec import Struct

from cgroupfs.errors import SourceError
from cgroupfs.hierarchy import UNIFIED
from reconciler.runtime.format import duration
from reconciler.runtime.stints import in_worker
from reconciler.runtime.wakeup import next_beat
from reconciler.signals.perf_abi import CACHE_MISSES, CYCLES, HARDWARE, INSTRUCTIONS, PerfCalls, PerfEvent, RealPerf
from reconciler.signals.perf_window import (
    PerfCounts,
    PerfKey,
    PerfStart,
    PerfSupport,
    PerfTurn,
    PerfWindow,
    probe,
    rotate,
    why,
)
from reconciler.signals.pod_cpus import pod_cpus
from reconciler.signals.readers import BaseReader, SampleContext, SampleSheet, SharedReaders
from state.evidence import pod_subject
from state.model import NodeView, Pod

TICK_S: Final = 1.0
"""Windows begin and end on ticks."""
SIGNALS: Final = ("cpi", "llc.misses")
_RETRY_S: Final = 600.0
"""After a refusal for lack of rights or descriptors the next try is this much later: an operator may have fixed it."""
_KEPT_PERIODS: Final = 3.0
"""How many periods the last result of a pod is valid: some turns may be missed."""
_CLOSE_S: Final = 2.0
"""At the end the closing of counters is awaited for at most so long."""
_SECOND_LEVEL: Final = 0.5
"""Confidence of misses where the generic event is of the level before the last (`_SECOND_LEVEL_VENDORS`)."""
_SECOND_LEVEL_VENDORS: Final = ("AuthenticAMD", "HygonGenuine")


class PerfConfig(Struct, frozen=True, kw_only=True):
    """How the pods take turns. No two nodes need other numbers."""

    # Open counters of one CPU each; half of a usual file limit of 4096.
    descriptors: int = 2048
    # Fewer seconds of a mostly idle pod have too few cycles for a stable ratio.
    window_s: float = 10.0
    # CPI2's: one value per minute, for which a sixth of the time is counted.
    period_s: float = 60.0


LAW: Final = PerfConfig()


def due(pods: Collection[str], begun: Mapping[str, float], now: float, law: PerfConfig, *, counting: int) -> list[str]:
    """Which pods to begin with at this tick, those that have waited longest first.

    ``pods``: all of them; ``begun``: when each was last begun with; ``counting``: how many are being counted now.
    Beginnings are spread over the period, so that few are counted at the same time.
    """
    waiting = [uid for uid in pods if now - begun.get(uid, -math.inf) >= law.period_s]
    waiting.sort(key=lambda uid: (begun.get(uid, -math.inf), uid))
    a_tick = math.ceil(len(pods) * TICK_S / law.period_s)
    # Windows end on ticks, and so are up to one longer than they should.
    at_once = math.ceil(len(pods) * (law.window_s + TICK_S) / law.period_s) + 1
    return waiting[: max(0, min(a_tick, at_once - counting))]


def stretched_s(needs: Collection[int], budget: int, law: PerfConfig) -> float:
    """How often each pod can be counted really. ``needs``: descriptors of each pod, of ``budget`` at once."""
    demand = sum(need for need in needs if need <= budget) * (law.window_s + TICK_S) / law.period_s
    return law.period_s * max(1.0, demand / max(1, budget))


class _OpenCounters(NamedTuple):
    window: PerfWindow
    since_s: float


class _PerfResult(NamedTuple):
    counts: PerfCounts
    at_s: float


@final
class PerfReader(BaseReader):
    """`TaskReader` that counts a few pods at a time. No counter is opened before its signals are wanted."""

    def __init__(
        self,
        shared: SharedReaders,
        *,
        config: PerfConfig = LAW,
        calls: PerfCalls | None = None,
        events: tuple[PerfEvent, PerfEvent, PerfEvent] = (CYCLES, INSTRUCTIONS, CACHE_MISSES),
    ) -> None:
        """``events``: used for cycles, instructions and misses."""
        super().__init__(shared)
        self._config = config
        self._calls = calls or RealPerf()
        self._cycles, self._instructions, self._misses = events
        self._hierarchy = hierarchy = shared.means.hierarchy
        self._controller = "perf_event" if hierarchy.version("perf_event") == 1 else UNIFIED
        self._limiter = trio.CapacityLimiter(1)
        self._view: NodeView | None = None
        self._pods: dict[str, Pod] = {}
        self._support = PerfSupport()
        self._tried_s = -math.inf
        self._open: dict[PerfKey, _OpenCounters] = {}
        self._begun: dict[str, float] = {}
        """When each pod was begun with last, or passed over."""
        self._known: dict[PerfKey, _PerfResult] = {}
        self._scarce: tuple[int, float] | None = None
        """How many descriptors were open when none was left, and when that was."""
        self._refused: dict[str, str] = {}
        """Why a pod was not counted when its turn came, by uid."""
        self._short = ""
        self._exact = 1.0 if self._misses.type != HARDWARE else misses_confidence(hierarchy.root)

    @property
    def descriptors(self) -> int:
        return sum(item.window.descriptors for item in self._open.values())

    def problems(self) -> Mapping[str, str]:
        missing = self._support.missing
        if self._cycles.name in missing:
            return dict.fromkeys(SIGNALS, missing[self._cycles.name])
        problems: dict[str, str] = {}
        refused = list(self._refused.items())
        parts = [self._short] if self._short else []
        if refused:
            uid, message = refused[0]
            title = self._pods[uid].title if uid in self._pods else uid
            parts.append(f"pod {title}: {message}" + (f"; and {len(refused) - 1} more pods" if refused[1:] else ""))
        if parts:
            problems["cpi"] = "; ".join(parts)
        if self._misses.name in missing:
            problems["llc.misses"] = missing[self._misses.name]
        elif self._exact < 1 and self._support.events:
            problems["llc.misses"] = (
                "this processor counts second-level cache misses under this name, not last-level ones"
            )
        return problems

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        """Enter the results of the last windows, and record the existing pods."""
        wanted = any(signal in scene.wanted for signal in SIGNALS)
        self._view = scene.view
        self._pods = {uid: pod for uid, pod in scene.view.pods.items() if pod.pod_class.online} if wanted else {}
        keys = {_key(pod) for pod in self._pods.values()}
        oldest = now - _KEPT_PERIODS * self._config.period_s
        self._known = {key: known for key, known in self._known.items() if key in keys and known.at_s >= oldest}
        for key, known in self._known.items():
            self._enter(sheet, key.uid, known, now)

    def _enter(self, sheet: SampleSheet, uid: str, known: _PerfResult, now: float) -> None:
        # Others (the NMI watchdog, profilers) may have had the counters for a part of the pod's time.
        values, confidence = known.counts.values, known.counts.coverage
        done = values.get(self._instructions.name, 0.0)
        if done <= 0:
            return
        subject, age_s = pod_subject(uid), max(0.0, now - known.at_s)
        sheet.put(subject, "cpi", values[self._cycles.name] / done, age_s=age_s, confidence=confidence)
        misses = values.get(self._misses.name)
        if misses is not None:
            rate = 1000.0 * misses / done
            sheet.put(subject, "llc.misses", rate, age_s=age_s, confidence=confidence * self._exact)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Open and close windows as they are due, until cancelled; then give all descriptors back."""
        task_status.started()
        try:
            while True:
                await self._tick(self._clock())
                await next_beat(self._rest_s(self._clock()))
        finally:
            await self.aclose()

    def _rest_s(self, now: float) -> float:
        """Seconds to the next tick: that of the next test, where this machine counts nothing."""
        if self._support.events or not self._pods or self._open:
            return TICK_S
        return max(TICK_S, self._tried_s + _RETRY_S - now)

    async def aclose(self) -> None:
        windows, self._open = [item.window for item in self._open.values()], {}
        if windows:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_S):
                await in_worker(_close_all, windows, limiter=self._limiter, abandon_on_cancel=True)

    async def _tick(self, now: float) -> None:
        """One tick: decide here, act in the thread, take over the result."""
        keys = {_key(pod) for pod in self._pods.values()}
        uids = {key.uid for key in keys}
        self._begun = {uid: at for uid, at in self._begun.items() if uid in uids}
        self._refused = {uid: message for uid, message in self._refused.items() if uid in uids}
        # Of removed pods: closed at once, as open counters keep a cgroup in memory.
        lost = [key for key in self._open if key not in keys]
        ended = [key for key, item in self._open.items() if key in keys and now - item.since_s >= self._config.window_s]
        begin = self._chosen(now) if await self._can_count(now) else []
        if not (lost or ended or begin):
            return
        finish = {key: self._open[key].window for key in (*lost, *ended)}
        # In a thread: the first event after a pause costs 16 ms, as the kernel patches itself. Never abandoned: its
        # open descriptors would have no owner, and those it closes are in use until it returns.
        done = await in_worker(rotate, self._calls, self._support.events, finish, ended, begin, limiter=self._limiter)
        for key in finish:
            self._open.pop(key, None)
        self._take(done, begin, now)

    async def _can_count(self, now: float) -> bool:
        """Whether this machine counts anything: tested once, and repeated at intervals if it did not."""
        if self._view is None or not self._pods:
            return False
        if not self._support.events and now - self._tried_s >= _RETRY_S:
            self._tried_s = now
            needed, cpu = (self._cycles, self._instructions), min(self._view.topology.online)
            self._support = await in_worker(
                probe, self._calls, needed, (self._misses,), cpu, self._hierarchy.root, limiter=self._limiter
            )
        return bool(self._support.events)

    def _chosen(self, now: float) -> list[PerfStart]:
        view = self._view
        assert view is not None
        if self._scarce is not None and now - self._scarce[1] >= _RETRY_S:
            self._scarce = None
        budget = min(self._config.descriptors, _allowed())
        if self._scarce is not None:
            budget = min(budget, self._scarce[0])
        turns = due(self._pods, self._begun, now, self._config, counting=len(self._open))
        if not turns:
            return []
        # A CPU outside its set would cost descriptors and count nothing. Its pool may not bind it.
        where = {uid: pod_cpus(pod, view, None) for uid, pod in self._pods.items()}
        needs = {uid: len(self._support.events) * len(cpus) for uid, cpus in where.items()}
        self._short = _shortage(needs, budget, self._config)
        left = budget - self.descriptors
        chosen: list[PerfStart] = []
        for uid in turns:
            if needs[uid] > budget:
                # More than may be open at all: the others have their turns.
                self._begun[uid] = now
                continue
            if needs[uid] > left:
                break  # the pod that has waited longest is next, not the cheapest
            left -= needs[uid]
            pod = self._pods[uid]
            try:
                directory = self._hierarchy.directory(self._controller, pod.group.path)
            except SourceError:
                self._begun[uid] = now
                self._refused[uid] = "neither cgroup2 nor the perf_event hierarchy is mounted: mount one of them"
                continue
            chosen.append(PerfStart(_key(pod), directory, where[uid]))
        return chosen

    def _take(self, done: PerfTurn, begin: Iterable[PerfStart], now: float) -> None:
        at_s = self._clock()
        for start in begin:
            self._begun[start.key.uid] = now
            self._refused.pop(start.key.uid, None)
        for key, window in done.opened.items():
            self._open[key] = _OpenCounters(window, at_s)
        for key, counts in done.counted.items():
            if counts is not None:
                self._known[key] = _PerfResult(counts, at_s)
        for key, exc in done.failed.items():
            if exc.errno in {errno.EMFILE, errno.ENFILE}:
                self._scarce = self.descriptors, now
            gone = exc.errno in {errno.ENOENT, errno.ENODEV}
            self._refused[key.uid] = "no group for hardware counters" if gone else why(exc, self._hierarchy.root)


def _shortage(needs: Mapping[str, int], budget: int, law: PerfConfig) -> str:
    """What the bound on descriptors costs; empty: nothing."""
    large = [need for need in needs.values() if need > budget]
    if large:
        return f"{len(large)} pods need up to {max(large)} file descriptors each, {budget} are allowed: raise the limit"
    every_s = stretched_s(needs.values(), budget, law)
    if every_s > law.period_s:
        return f"{budget} file descriptors allow one measurement per pod every {duration(every_s)}"
    return ""


def _key(pod: Pod) -> PerfKey:
    return PerfKey(pod.uid, pod.group.inode)


def _close_all(windows: Iterable[PerfWindow]) -> None:
    for window in windows:
        window.close()


def _allowed() -> int:
    """Half of the descriptors that this process may have: the other half is for its files and connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft // 2


def misses_confidence(root: str) -> float:
    """How far the event that is called cache misses is of the last-level cache, on this processor."""
    try:
        with open(os.path.join(root, "proc/cpuinfo"), encoding="ascii", errors="replace", newline="\n") as file:
            head = file.read(4096)
    except OSError:
        return 1.0
    return _SECOND_LEVEL if any(vendor in head for vendor in _SECOND_LEVEL_VENDORS) else 1.0
