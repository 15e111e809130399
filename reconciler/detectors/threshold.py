"""threshold: any signal above or below a value for a while, with a separate value and time at which it clears.

Source: Volcano (breach at 80 %, clear at 30 %), crane (N above, M below), Koordinator; all of them one shape.
Differences: durations instead of counts, unknown instead of zero for what is missing, and samples that were estimated
can be refused by their confidence.
"""

from typing import Annotated, Final

from msgspec import Meta

from reconciler.detectors.base import Detector, VictimView, unknown
from reconciler.detectors.subjects import gap_of, resource_of, shown, subject_of, whose
from reconciler.detectors.timer import DebounceState, DebounceTiming, paused, step
from reconciler.runtime.format import duration, number, percent, quantity
from reconciler.signals.catalog import SIGNALS
from state.evidence import ContendedResource, DetectorVerdict, Verdict

SIGNAL: Final = "cpu.wait"
_ABOVE: Final = 5.0
"""The limit of `SIGNAL`, percent; any other signal needs one of its own."""
_MOST: Final = 1000.0
"""A larger severity says no more."""


class ThresholdConfig(DebounceTiming, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A signal beyond a value; by default cpu.wait above 5 %."""

    signal: Annotated[str, Meta(description="a signal of the catalog (docs/signals.md)")] = SIGNAL
    of: Annotated[
        str | None,
        Meta(description="victim, node, pool (the victim's), numa:N or fs:NAME; omitted: what has the signal"),
    ] = None
    above: Annotated[float | None, Meta(description="bad above this value, in the signal's unit")] = None
    below: Annotated[float | None, Meta(description="bad below this value")] = None
    clear: Annotated[float | None, Meta(description="cleared at this value or better; omitted: the limit")] = None
    min_confidence: Annotated[float, Meta(ge=0, le=1, description="samples with less confidence count as missing")] = (
        0.5
    )
    resource: Annotated[
        ContendedResource | None, Meta(description="the contended resource; omitted: derived from the signal's name")
    ] = None

    def __post_init__(self) -> None:
        whose(self.signal, self.of)
        if self.above is not None and self.below is not None:
            raise ValueError("above and below are both set; expected one of them")
        if self.limit is None:
            raise ValueError(f"expected above or below with signal {self.signal!r}")
        if self.clear is not None and (self.clear - self.limit) * self.sign > 0:
            side = "above" if self.sign > 0 else "below"
            raise ValueError(f"clear {number(self.clear)} is itself {side} the limit {number(self.limit)}")

    @property
    def sign(self) -> int:
        """1: bad above the limit, -1: bad below it."""
        return 1 if self.below is None else -1

    @property
    def limit(self) -> float | None:
        """The limit in force; None only in a config that is refused."""
        if self.below is not None:
            return self.below
        return _ABOVE if self.above is None and self.signal == SIGNAL else self.above


def evaluate(
    config: ThresholdConfig, sight: VictimView, memory: DebounceState | None
) -> tuple[DetectorVerdict, DebounceState]:
    where = whose(config.signal, config.of)
    subject = subject_of(sight, where)
    value = sight.value(config.signal, subject) if subject is not None else None
    if value is None or subject is None:
        what = "the victim has no pool" if subject is None else f"{config.signal} not available"
        return unknown(what), paused(memory, sight.now)
    series = sight.history.series(subject, config.signal)
    if series is not None and series.confidence < config.min_confidence:
        text = f"{config.signal} is an estimate (confidence {percent(series.confidence * 100)})"
        return unknown(text), paused(memory, sight.now)
    limit = config.limit
    assert limit is not None
    clear = limit if config.clear is None else config.clear
    beyond = (value - limit) * config.sign
    cleared = (value - clear) * config.sign <= 0
    at = sight.measured_at(config.signal, subject)
    held = step(memory, at, config, breached=beyond > 0, cleared=cleared, look_s=sight.patience_s(config.signal))
    resource = config.resource or resource_of(config.signal)
    bound = "limit" if config.sign > 0 else "minimum"
    text = f"{shown(config.signal, value)}, {bound} {quantity(limit, SIGNALS[config.signal].unit)}"
    if where != "victim":
        text = f"{subject}: {text}"
    if held.verdict is Verdict.SUSPECT and held.since_s is not None:
        text += f" ({duration(at - held.since_s)} of {duration(config.for_s)})"
    elif held.active and beyond <= 0:
        text += ", not cleared yet"
    gap = gap_of(resource, config.signal, beyond) if beyond > 0 else None
    return DetectorVerdict(
        verdict=held.verdict, text=text, resource=resource, severity=severity(value, limit, config.sign), gap=gap
    ), held


def severity(value: float, limit: float, sign: int = 1) -> float:
    """How often the limit fits into the value (``sign`` -1: the value into the limit); 1.0 is just at it."""
    top, bottom = (value, limit) if sign > 0 else (limit, value)
    if bottom <= 0 or top < 0:
        # No ratio means anything around zero: only the side counts.
        return 1.0 + (1.0 if (value - limit) * sign > 0 else 0.0)
    return min(_MOST, top / bottom)


DETECTOR = Detector(
    name="threshold",
    summary="a signal above or below a value for a while",
    config_type=ThresholdConfig,
    memory_type=DebounceState,
    signals=lambda config: (config.signal,),
    judge=evaluate,
)
