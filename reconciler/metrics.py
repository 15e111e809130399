"""What is counted and measured: plain numbers on the loop, and the frozen snapshot that a scrape shows.

Nothing here knows Prometheus; `reconciler.exposition` makes its text from the newest snapshot. The
loop's task is the only writer, so counting is an addition without a lock, and `Counters.values` is the only copy.
"""

import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final, final

from msgspec import Struct

from reconciler.alerts.telling import AlertNumbers
from reconciler.supervisor import ComponentStatus
from reconciler.watching import WatchNumbers
from state.cache import CacheUse
from state.model import SourceStatus

# From what one kernel write costs to what a person would call broken. Source: the price list in the kernel facts (4 µs
# a write, 8-20 ms for a slow attach), and 7.7 ms between the runtime's signal and its exec.
LATENCY_S: Final = (50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 7.5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 1.0)
LAG_S: Final = (1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 1.0, 5.0)


class HistogramValues(Struct, frozen=True):
    """A copy of a histogram. ``counts`` has one more entry than ``bounds``: what was above the last."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """How many were observed."""
        return sum(self.counts)


@final
class Histogram:
    """Counts observations by size. A value equal to a bound belongs to it, as Prometheus' ``le`` has it."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    @property
    def values(self) -> HistogramValues:
        """A frozen copy."""
        return HistogramValues(self._bounds, tuple(self._counts), self._total)


_PERFORMED: Final = frozenset({"hot", "written", "restored"})
"""Outcomes of writes that reached the kernel and were taken."""


class CounterValues(Struct, frozen=True, kw_only=True):
    """A copy of all counters. Units: seconds in the histograms."""

    writes: Mapping[tuple[str, str], int] = {}
    """By knob and outcome: written, hot, restored, refused, blocked, gone."""
    foreign: Mapping[str, int] = {}
    """Foreign writes by kind of writer."""
    resyncs: Mapping[str, int] = {}
    """Looks at everything, by reason."""
    starts: Mapping[str, int] = {}
    """Container starts by whether all settings came before the program's exec: true, false, unknown."""
    yields: int = 0
    object_errors: Mapping[tuple[str, str], int] = {}
    events: int = 0
    """Looks that something other than the clock asked for, or that found something to move."""
    cpus_moved: int = 0
    """CPUs that came to belong to other pools; see `reconciler.placement.movement`."""
    pools_changed: int = 0
    signal_to_write: HistogramValues = Histogram(LATENCY_S).values
    look: HistogramValues = Histogram(LATENCY_S).values
    lag: HistogramValues = Histogram(LAG_S).values

    @property
    def cpuset_writes(self) -> int:
        """Writes of CPU sets that the kernel took: the act whose price grows with the machine."""
        return sum(
            count for (knob, outcome), count in self.writes.items() if knob == "cpu.set" and outcome in _PERFORMED
        )


@final
class Counters:
    """The living counters of what nobody else counts. Only the loop's task calls these.

    Writes, foreign writes, yields and resyncs are counted by those that act: `values` has none of them.
    """

    __slots__ = ("_cpus_moved", "_events", "_lag", "_look", "_pools_changed", "_signal_to_write", "_starts")

    def __init__(self) -> None:
        # All three exist from the start, so that a ratio of them never lacks a part.
        self._starts = {"true": 0, "false": 0, "unknown": 0}
        self._events = 0
        self._cpus_moved = 0
        self._pools_changed = 0
        self._signal_to_write = Histogram(LATENCY_S)
        self._look = Histogram(LATENCY_S)
        self._lag = Histogram(LAG_S)

    def started(self, signal_to_write_s: float | None, before_exec: bool | None) -> None:
        """A container's settings are in place; None is "cannot be told"."""
        self._starts["unknown" if before_exec is None else str(before_exec).lower()] += 1
        if signal_to_write_s is not None:
            self._signal_to_write.observe(signal_to_write_s)

    def looked(self, seconds: float) -> None:
        """The main loop is through one look."""
        self._look.observe(seconds)

    def event(self) -> None:
        """A look had another cause than the clock, or found something to move."""
        self._events += 1

    def moved(self, cpus: int, pools: int) -> None:
        """A plan gave this many CPUs to other pools, and this many pools other CPUs."""
        self._cpus_moved += cpus
        self._pools_changed += pools

    def lagged(self, seconds: float) -> None:
        """A timer of the loop came this much late."""
        self._lag.observe(max(0.0, seconds))

    @property
    def values(self) -> CounterValues:
        """A frozen copy."""
        return CounterValues(
            starts=dict(self._starts),
            events=self._events,
            cpus_moved=self._cpus_moved,
            pools_changed=self._pools_changed,
            signal_to_write=self._signal_to_write.values,
            look=self._look.values,
            lag=self._lag.values,
        )


class PodMetrics(Struct, frozen=True, kw_only=True):
    """One pod's series: eight at most. ``quota_milli`` None: no quota; ``cpus``: how many it may run on.

    ``llc_bytes`` and ``memory_bytes_s``: what it has of the cache and of the memory bus, None: not known.
    """

    uid: str
    namespace: str
    name: str
    pod_class: str
    source: str
    cpus: int | None = None
    quota_milli: int | None = None
    in_force: int = 0
    pending: int = 0
    left_alone: int = 0
    """Settings that a hold or a yield keeps from being written."""
    llc_bytes: int | None = None
    memory_bytes_s: float | None = None


class MetricsSnapshot(Struct, frozen=True, kw_only=True):
    """Everything that a scrape shows, at one moment. Units as the names say; CPU in thousandths."""

    version: str
    mode: str
    ready: bool = False
    pods: tuple[PodMetrics, ...] = ()
    """Empty where the configuration asks for sums only."""
    pods_by_class: Mapping[str, int] = {}
    pools: Mapping[str, int] = {}
    """CPUs by pool."""
    budget_milli: int | None = None
    used_milli: Mapping[str, int] = {}
    """CPU used by ``online``, ``reclaimed`` and ``system`` work."""
    headroom_milli: Mapping[str, int] = {}
    headroom_memory_bytes: int | None = None
    """What BE may be promised, by NUMA node."""
    settings: Mapping[tuple[str, str], int] = {}
    """By knob and state: ``in_force``, ``pending``, ``left_alone``."""
    refused: Mapping[str, int] = {}
    """Settings that the planner refuses now, by rule."""
    holds: int = 0
    yielded: int = 0
    ledger_files: int = 0
    sources: tuple[SourceStatus, ...] = ()
    components: tuple[ComponentStatus, ...] = ()
    store_ok: bool = True
    alerts: AlertNumbers = AlertNumbers()
    watches: int = 0
    rss_bytes: int = 0
    cpu_s: float = 0.0
    started_at: float = 0.0
    """Wall-clock seconds."""
    counters: CounterValues = CounterValues()
    cache: CacheUse | None = None
    watched: WatchNumbers | None = None
    """None where nothing measures it."""
    cache_age_s: float | None = None
    http_requests: Mapping[tuple[str, str], int] = {}
    """Answers of our own listeners, by listener and status."""
    http_aborted: Mapping[tuple[str, str], int] = {}
    """Connections that ended early, by listener and reason."""


def rss_bytes(root: str = "/") -> int:
    """This process' resident memory, 0 where /proc does not tell."""
    try:
        with open(os.path.join(root, "proc/self/statm"), encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, IndexError, ValueError):
        return 0
