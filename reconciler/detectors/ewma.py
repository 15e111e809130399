"""ewma: the newest sample of a signal is far from the value that its recent past predicts.

Expected is an exponentially weighted mean of the samples before, the deviation is theirs around it. Outliers in a row
are interference; a level that lasts ``relearn_s`` is the new normal.

Source: Caelus (three sigma around an EWMA, which there includes the sample under test).
"""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Final, Literal, NamedTuple

from msgspec import Meta, Struct

from reconciler.detectors.base import Detector, VictimView, unknown
from reconciler.detectors.moments import moments_of
from reconciler.detectors.subjects import gap_of, resource_of, shown, subject_of, whose
from reconciler.detectors.threshold import severity
from reconciler.runtime.format import duration, quantity
from reconciler.signals.catalog import SIGNALS
from state.evidence import ContendedResource, DetectorVerdict, Verdict

_FIRST: Final = 10
"""The mean of so many samples begins the weighted one."""
_LEAST: Final = 11
"""Fewer samples of the past are too few to judge by."""


class EwmaConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Outliers of any signal."""

    signal: Annotated[str, Meta(description="a signal of the catalog (docs/signals.md)")] = "cpu.wait"
    of: Annotated[
        str | None,
        Meta(description="victim, node, pool (the victim's), numa:N or fs:NAME; omitted: what has the signal"),
    ] = None
    samples: Annotated[int, Meta(ge=_LEAST, le=110, description="number of past samples (N)")] = 30
    sigmas: Annotated[float, Meta(ge=1, le=20, description="standard deviations that make an outlier")] = 3.0
    direction: Annotated[Literal["up", "down", "both"], Meta(description="direction of an outlier")] = "up"
    floor_fraction: Annotated[float, Meta(ge=0.001, le=10, description="minimum deviation as a share of the mean")] = (
        0.1
    )
    floor: Annotated[
        float, Meta(ge=0, description="minimum deviation in the signal's unit; for signals around zero")
    ] = 0.0
    times: Annotated[int, Meta(ge=1, le=60, description="consecutive outliers that make an interference")] = 3
    resource: Annotated[
        ContendedResource | None, Meta(description="the contended resource; omitted: derived from the signal's name")
    ] = None

    # Half of the samples that are stored.
    relearn_s: ClassVar[float] = 60.0

    def __post_init__(self) -> None:
        whose(self.signal, self.of)


class EwmaMemory(Struct, frozen=True, kw_only=True):
    """``run`` outliers in a row since ``since_s``. ``at_s``: the newest sample seen.

    ``from_s``: what is older was another normal.
    """

    at_s: float
    run: int = 0
    since_s: float = 0.0
    from_s: float = 0.0


class ExpectedRange(NamedTuple):
    """Where the next sample should be."""

    mean: float
    sigma: float


def expected(values: Sequence[float]) -> ExpectedRange:
    """Mean and deviation of the samples before the one under test; there is at least one."""
    first = values[:_FIRST]
    mean = sum(first) / len(first)
    decay = 2 / (len(values) + 1)
    for value in values[_FIRST:]:
        mean = value * decay + mean * (1 - decay)
    around = moments_of(values)
    # Around the weighted mean, not their own: its lag is part of the uncertainty.
    return ExpectedRange(mean, math.hypot(around.sigma, around.mean - mean))


def evaluate(config: EwmaConfig, sight: VictimView, memory: EwmaMemory | None) -> tuple[DetectorVerdict, EwmaMemory]:
    subject = subject_of(sight, whose(config.signal, config.of))
    at = sight.now if subject is None else sight.measured_at(config.signal, subject)
    if memory is None or not 0 <= at - memory.at_s <= sight.patience_s(config.signal):
        # After a gap it is unknown whether outliers were in a row.
        memory = EwmaMemory(at_s=float("-inf"), from_s=memory.from_s if memory is not None else 0.0)
    value = sight.value(config.signal, subject) if subject is not None else None
    if value is None:
        text = "the victim has no pool" if subject is None else f"{config.signal} not available"
        return unknown(text), memory
    # Neither the sample under test nor the outliers before it count. With itself inside, no single spike is ever found
    # at 11 samples: for a flat line the test is (1-d)^2 > 9/N ((1-d)^2 + (N-1) d^2).
    start = memory.since_s if memory.run else at
    past = _past(config, sight, subject, memory.from_s, start)
    if len(past) < _LEAST:
        text = f"{config.signal}: {len(past)} of {_LEAST} past samples"
        return unknown(text), EwmaMemory(at_s=at, from_s=memory.from_s)
    usual = expected(past)
    # Without a floor a flat line has outliers by rounding.
    sigma = max(usual.sigma, config.floor_fraction * abs(usual.mean), config.floor)
    distance = value - usual.mean
    distance = {"up": distance, "down": -distance, "both": abs(distance)}[config.direction]
    bound = config.sigmas * sigma
    # A sample seen twice is one outlier.
    run = memory.run + (at != memory.at_s) if distance > bound else 0
    unit = SIGNALS[config.signal].unit
    text = f"{shown(config.signal, value)}, usually {quantity(usual.mean, unit)} ± {quantity(sigma, unit)}"
    resource = config.resource or resource_of(config.signal)
    if run and at - start >= config.relearn_s:
        text += f"; for {duration(at - start)}: accepted as the new normal"
        after = EwmaMemory(at_s=at, from_s=start)
        return DetectorVerdict(verdict=Verdict.OK, text=text, resource=resource), after
    if run > 1:
        text += f"; {run} in a row"
    verdict = Verdict.INTERFERED if run >= config.times else Verdict.SUSPECT if run else Verdict.OK
    return DetectorVerdict(
        verdict=verdict,
        text=text,
        resource=resource,
        severity=severity(max(0.0, distance), bound),
        gap=gap_of(resource, config.signal, distance - bound) if run else None,
    ), EwmaMemory(at_s=at, run=run, since_s=start if run else at, from_s=memory.from_s)


def _past(config: EwmaConfig, sight: VictimView, subject: str | None, from_s: float, before_s: float) -> list[float]:
    """The newest ``samples`` of the past that are not under test, the oldest first."""
    series = sight.history.series(subject, config.signal) if subject is not None else None
    points = () if series is None else tuple(series)
    return [value for at, value in points if from_s <= at < before_s][-config.samples :]


DETECTOR = Detector(
    name="ewma",
    summary="a signal deviates from its recent values",
    config_type=EwmaConfig,
    memory_type=EwmaMemory,
    signals=lambda config: (config.signal,),
    judge=evaluate,
    near=lambda _: 0.0,
)
