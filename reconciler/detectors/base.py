"""The interface of a detector: a pure function from the recent past of one victim to a verdict.

Its input is frames and their history, and its own memory of the same victim; it reads no clock and no file. Where a
signal that it needs is missing or too old it returns ``unknown``: never ``ok`` for what was not measured.
"""

import math
from collections.abc import Callable, Hashable
from typing import Any, Final, Generic, TypeVar

from msgspec import Struct

from reconciler.signals.catalog import SIGNALS
from reconciler.signals.history import History, SampleSeries, patience_s
from state.evidence import DetectorVerdict, PodSnapshot, SampleFrame, Verdict

C = TypeVar("C", bound=Struct)
M = TypeVar("M", bound=Struct)
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
CALM_S: Final = 2.0
"""The longest interval between two frames while nothing is wrong."""
WINDOWED: Final = math.inf


class VictimView(Struct, frozen=True, kw_only=True):
    """What a detector sees of one victim at one moment.

    ``subject``: a pod's or ``node``; ``pod`` None for the node. ``fresh_s``: how old a sample may be to count as now.
    ``shared``: what detectors have worked out in this frame for all victims, see `once`.
    """

    subject: str
    pod: PodSnapshot | None
    frame: SampleFrame
    history: History
    fresh_s: float
    shared: dict[Hashable, Any] = {}

    @property
    def now(self) -> float:
        """Monotonic seconds."""
        return self.frame.at_s

    def value(self, signal: str, subject: str | None = None) -> float | None:
        """The victim's (or another subject's) newest sample; None: missing or too old, which is unknown."""
        within_s = patience_s(signal, self.fresh_s)
        return self.history.fresh(subject or self.subject, signal, self.frame.at_s, within_s)

    def series(self, signal: str, subject: str | None = None) -> SampleSeries | None:
        """The victim's (or another subject's) past of a signal; None: never measured."""
        return self.history.series(subject or self.subject, signal)

    def measured_at(self, signal: str, subject: str | None = None) -> float:
        """When the newest sample was measured, in monotonic seconds; now, if there is none."""
        series = self.series(signal, subject)
        return self.now if series is None else series.times[-1]

    def memo(self, make: Callable[[K, "VictimView"], T], of: K) -> T:
        """What is the same for all victims of a frame: made for the first of them."""
        key = make, of
        if key not in self.shared:
            self.shared[key] = make(of, self)
        result: T = self.shared[key]
        return result

    def patience_s(self, signal: str) -> float:
        """How old a sample of this signal may be to count as now."""
        return patience_s(signal, self.fresh_s)


def _half(_config: object) -> float:
    return 0.5


class Detector(Struct, Generic[C, M], frozen=True, kw_only=True):
    """One kind of detector. ``config_type`` has a default for each field; its docstring is the documentation.

    ``signals``: what it needs, given its configuration. ``judge``: opinion and what to remember of this victim.
    ``learned_s``: when (seconds since the epoch) it last learned something; given where what it remembers outlives the
    daemon, by workload (see `signature`) instead of by pod. ``near``: from this severity on a finding is a sign that
    asks for a pass each interval (see `reconciler.interference.pace`): half of a limit that has to be exceeded for a
    while; `WINDOWED` where windows of at least `CALM_S` are evaluated, of which no pass then misses one; 0.0 where
    samples are counted.
    """

    name: str
    summary: str
    config_type: type[C]
    memory_type: type[M]
    signals: Callable[[C], tuple[str, ...]]
    judge: Callable[[C, VictimView, M | None], tuple[DetectorVerdict, M]]
    learned_s: Callable[[M], float] | None = None
    near: Callable[[C], float] = _half

    @property
    def durable(self) -> bool:
        """Whether what it remembers outlives the daemon."""
        return self.learned_s is not None


# The table holds detectors of every config and memory type; each is called only with its own.
AnyDetector = Detector[Any, Any]


def unknown(message: str | Callable[[], str]) -> DetectorVerdict:
    """The verdict where a signal is missing; ``message`` names it."""
    return DetectorVerdict(verdict=Verdict.UNKNOWN, text=message)


def check_detector(detector: AnyDetector) -> None:
    """What a row of the table must have. Errors: `ValueError` for no summary, or a signal that the catalog lacks."""
    if not detector.summary:
        raise ValueError("needs a summary")
    missing = [name for name in detector.signals(detector.config_type()) if name not in SIGNALS]
    if missing:
        raise ValueError(f"unknown signal {missing[0]}")
