"""The victim's bad moments, and how a pod's use correlates with them. Pure.

The symptom is the measured signal that shows the interference best. Use is compared with it by CPI²'s correlation,
which tests whether use falls into the bad time, and by Pearson's, which tests whether both rise and fall together.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import compress, repeat
from operator import add, mul, sub, truediv
from typing import Final, NamedTuple, final

from reconciler.detectors.base import VictimView
from reconciler.detectors.moments import Moments, moments_of
from reconciler.detectors.uses import nearest
from reconciler.detectors.windows import spacing_s
from reconciler.runtime.format import number
from reconciler.signals.history import SampleSeries
from state.evidence import NODE, ContendedResource

SYMPTOMS: Final[Mapping[ContendedResource, tuple[tuple[str, float | None], ...]]] = {
    ContendedResource.CPU: (("cpu.wait", 5.0), ("cpu.pressure", 10.0), ("cpi", None)),
    ContendedResource.MEMORY: (("memory.pressure", 5.0), ("memory.refaults", None)),
    ContendedResource.IO: (("io.pressure", 5.0), ("disk.delay", 20.0)),
    ContendedResource.CACHE: (("cpi", None), ("llc.misses", None), ("cpu.wait", 5.0), ("cpu.pressure", 10.0)),
    ContendedResource.NETWORK: (("service.latency", None),),
}
"""Symptoms, the first that is measured is used, and the value from which on a moment is bad.

None, or not reached in the window (a detector may have a better limit for this victim): the median of the kept past.
"""


@final
class CorrelationLevels:
    """The symptom's value at each moment; ``limit``: above it the moment is bad. Repeated results are cached."""

    def __init__(self, values: Sequence[float], limit: float) -> None:
        self.values, self.limit = values, limit

    @cached_property
    def moments(self) -> Moments:
        return moments_of(self.values)

    @cached_property
    def distances(self) -> list[float]:
        """From the mean."""
        return list(map(sub, self.values, repeat(self.moments.mean)))

    @cached_property
    def weights(self) -> list[float]:
        """What use at each moment counts in CPI²'s correlation: above 0 in a bad moment, below it in a good one."""
        limit = self.limit
        if limit <= 0:
            return [1.0 if level > limit else 0.0 for level in self.values]
        return [1 - limit / level if level > limit else max(-1.0, level / limit - 1) for level in self.values]

    @cached_property
    def vary(self) -> bool:
        """Not the same all the time."""
        return _varies(self.moments)

    def where(self, known: Sequence[bool]) -> "CorrelationLevels":
        return self if all(known) else CorrelationLevels(list(compress(self.values, known)), self.limit)


@final
class SymptomSeries(NamedTuple):
    """The symptom used, the moments of the kept past, and its values."""

    signal: str
    times: list[float]
    levels: CorrelationLevels
    bad: list[float]
    """The bad moments within the window; empty: all of the window."""


def symptom_of(sight: VictimView, resource: ContendedResource, window_s: float) -> SymptomSeries | None:
    """How the lack of a resource shows in this victim; None: nothing of it is measured."""
    for signal, limit in SYMPTOMS[resource]:
        for subject in dict.fromkeys((sight.subject, NODE)):
            series = sight.series(signal, subject)
            if series is None or sight.value(signal, subject) is None:
                continue
            times, values = series.all()
            begin = bisect_right(times, sight.now - window_s)
            most = max(values[begin:], default=0.0)
            if limit is not None and most > limit:
                usual = bad_above = limit
            else:
                usual = sorted(values)[len(values) // 2]
                # Half of all noise is above the median: what is bad is well above it.
                bad_above = (usual + most) / 2
            bad = [at for at, value in zip(times[begin:], values[begin:], strict=True) if value > bad_above]
            return SymptomSeries(signal, times, CorrelationLevels(values, usual), bad)
    return None


def rhythm(sight: VictimView, subject: str, signals: Sequence[str], symptom: SymptomSeries) -> tuple[float, str] | None:
    """Correlation of a pod's use (the sum of some signals) with the symptom, 0-1, and a text.

    None: too few samples of either.
    """
    levels, uses = _together(sight, subject, signals, symptom)
    if len(uses) < _PAIRS:
        return None
    value = correlation(levels, uses)
    message = f"with {symptom.signal}: {number(value)} (CPI²)"
    if not levels.vary:
        return (1 + value) / 2, message
    same = pearson(levels, uses)
    return (2 + value + same) / 4, f"{message}, {number(same)} (Pearson)"


_PAIRS: Final = 8
"""Fewer moments give no significant correlation."""


def _together(
    sight: VictimView, subject: str, signals: Sequence[str], symptom: SymptomSeries
) -> tuple[CorrelationLevels, Sequence[float]]:
    """The symptom and the use at each moment of the past; a pod that was not there yet used nothing."""
    known = [True] * len(symptom.times)
    total: list[float] | None = None
    for signal in signals:
        series = sight.series(signal, subject)
        if series is None:
            continue
        values = _followed(series, symptom.times, spacing_s(sight, signal), known)
        total = values if total is None else list(map(add, total, values))
    if total is None:
        return symptom.levels, []
    return symptom.levels.where(known), total if all(known) else list(compress(total, known))


def _followed(series: SampleSeries, moments: list[float], within_s: float, known: list[bool]) -> list[float]:
    """Its values at these moments; where there is none, 0.0, and ``known`` becomes False."""
    times, values = series.all()
    if times == moments:
        return values
    begun = times[0] - within_s
    before = [at for at in moments if at <= begun]
    values = [*[0.0] * len(before), *values]
    result = []
    for index, place in enumerate(nearest(moments, [*before, *times], within_s)):
        if place is None:
            known[index] = False
        result.append(0.0 if place is None else values[place])
    return result


def correlation(levels: CorrelationLevels, uses: Sequence[float]) -> float:
    """CPI²'s antagonist correlation of symptom and use, -1 to 1: positive when use falls into the bad time."""
    total = math.fsum(uses)
    if total <= 0:
        return 0.0
    value: float = sum(map(mul, map(truediv, uses, repeat(total)), levels.weights))
    return max(-1.0, min(1.0, value))


def pearson(levels: CorrelationLevels, uses: Sequence[float]) -> float:
    """Pearson's correlation coefficient; 0.0 where one side does not vary."""
    if not uses or not levels.moments.variance:
        return 0.0
    mean = math.fsum(uses) / len(uses)
    distances = list(map(sub, uses, repeat(mean)))
    use = Moments(float(len(uses)), mean, math.fsum(map(mul, distances, distances)) / len(uses))
    if not use.variance or not _varies(use):
        return 0.0  # constant use cannot explain a symptom that varies
    joint = math.fsum(map(mul, levels.distances, distances)) / len(uses)
    return max(-1.0, min(1.0, joint / (levels.moments.sigma * use.sigma)))


def _varies(moments: Moments) -> bool:
    return moments.sigma > _FLAT * abs(moments.mean)


_FLAT: Final = 0.1
"""A deviation of at most this share of the mean is noise, with which nothing correlates."""
