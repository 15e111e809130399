"""Counters and histograms that components fill; `telemetry` renders them."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final, final

from msgspec import Struct

from state.closing import MarkStatus

# From what one kernel write costs to what a person would call broken. Source: the price list in the kernel facts (4 µs
# a write, 8-20 ms for a slow attach), and 7.7 ms between the runtime's signal and its exec.
LATENCY_S: Final = (50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 7.5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 1.0)


LAG_S: Final = (1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 1.0, 5.0)


class HistogramValues(Struct, frozen=True):
    """A copy of a histogram. ``counts`` has one more entry than ``bounds``: what was above the last."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@final
class Histogram:
    """Counts observations by size. A value equal to a bound belongs to it, as Prometheus' ``le`` has it."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    @property
    def values(self) -> HistogramValues:
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
    """Full reconcile passes, by reason."""
    starts: Mapping[str, int] = {}
    """Container starts by whether all settings were applied before the program's exec: true, false, unknown."""
    yields: int = 0
    systemd_events: int = 0
    """Events in which systemd wrote its units' values again: a daemon-reload, or a property that was set."""
    object_errors: Mapping[tuple[str, str], int] = {}
    events: int = 0
    """Passes that were not caused by the clock alone, or that found something to change."""
    cpus_moved: int = 0
    """CPUs that changed pools; see `reconciler.placement.churn`."""
    pools_changed: int = 0
    signal_to_write: HistogramValues = Histogram(LATENCY_S).values
    signal_to_would_write: HistogramValues = Histogram(LATENCY_S).values
    passes: HistogramValues = Histogram(LATENCY_S).values
    lag: HistogramValues = Histogram(LAG_S).values

    @property
    def cpuset_writes(self) -> int:
        """Writes of CPU sets that the kernel took: the operation whose cost grows with the machine."""
        return sum(
            count for (knob, outcome), count in self.writes.items() if knob == "cpu.set" and outcome in _PERFORMED
        )


class InterferenceCounters(Struct, frozen=True, kw_only=True):
    """Counts of the monitor, for the metrics. Since the start, except those that are of now."""

    verdicts: Mapping[tuple[str, str], int] = {}  # victims now, by rule and verdict
    steps: Mapping[str, int] = {}  # in force now, by response
    # Transitions on the ladder, by response and turn; a rule in shadow has turns of its own (``would-applied``).
    changes: Mapping[tuple[str, str], int] = {}
    read_s: Mapping[str, float] = {}  # CPU seconds by reader
    pass_s: float = 0.0
    orders: Mapping[str, int] = {}  # evictions of the last hours by outcome; ``open``: under way
    ended: Mapping[str, int] = {}  # all evictions by outcome
    would: int = 0  # pods that a dry run would evict now
    closed: bool = False  # to new BE pods now
    closings: Mapping[str, int] = {}  # how often it was closed and opened, by turn
    mark: MarkStatus | None = None  # on the node's object; None: none is wanted


@final
class AgentCounters:
    """The live counters of events that no other part counts. Only the loop's task changes them.

    Writes, foreign writes, systemd's events, yields and resyncs are counted where they happen: `values` has none of
    them.
    """

    def __init__(self) -> None:
        # All three exist from the start, so that a ratio of them never lacks a part.
        self._starts = {"true": 0, "false": 0, "unknown": 0}
        self.events = 0
        """Passes that were not caused by the clock, or found something to change."""
        self.cpus_moved = 0
        self.pools_changed = 0
        """CPUs that plans gave to other pools, and pools that they gave other CPUs."""
        self._signal_to_write = Histogram(LATENCY_S)
        self.signal_to_would_write = Histogram(LATENCY_S)
        """From a container's signal to a plan of its settings that is not written (observe mode, a dry run)."""
        self.passes = Histogram(LATENCY_S)
        """The main loop's passes."""
        self.lag = Histogram(LAG_S)
        """How late the loop's timers are."""

    def started(self, signal_to_write_s: float | None, before_exec: bool | None) -> None:
        """A container's settings are applied; None is "unknown"."""
        self._starts["unknown" if before_exec is None else str(before_exec).lower()] += 1
        if signal_to_write_s is not None:
            self._signal_to_write.observe(signal_to_write_s)

    @property
    def values(self) -> CounterValues:
        return CounterValues(
            starts=dict(self._starts),
            events=self.events,
            cpus_moved=self.cpus_moved,
            pools_changed=self.pools_changed,
            signal_to_write=self._signal_to_write.values,
            signal_to_would_write=self.signal_to_would_write.values,
            passes=self.passes.values,
            lag=self.lag.values,
        )
