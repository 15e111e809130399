"""When the victim suffered, and whether a pod's use goes with it. Pure.

The symptom is what tells the suffering best of what is measured. Use is compared with it by CPI²'s correlation, which
asks whether use falls into the bad time, and by Pearson's, which asks whether both rise and fall together.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from reconciler.detectors.base import Sight
from reconciler.detectors.moments import of
from reconciler.detectors.windows import spacing_s
from reconciler.detectors.words import number
from state.evidence import NODE, Resource

Points = Sequence[tuple[float, float]]

SYMPTOMS: Final[Mapping[Resource, tuple[tuple[str, float | None], ...]]] = {
    Resource.CPU: (("cpu.wait", 5.0), ("cpu.pressure", 10.0), ("cpi", None)),
    Resource.MEMORY: (("memory.pressure", 5.0), ("memory.refaults", None)),
    Resource.IO: (("io.pressure", 5.0), ("disk.delay", 20.0)),
    Resource.CACHE: (("cpi", None), ("llc.misses", None), ("cpu.wait", 5.0), ("cpu.pressure", 10.0)),
    Resource.NETWORK: (("service.latency", None),),
}
"""By which the victim's suffering is told, the first that is measured, and from which value on it is suffering. None,
or not reached in the window (a detector may know better what is much for this victim): the median of the kept past."""


class Symptom(NamedTuple):
    """By what the suffering is told; above ``limit`` it is."""

    signal: str
    points: Points
    limit: float
    bad: Points
    """When it suffered, within the window; empty: all of the window."""


def symptom_of(sight: Sight, resource: Resource, window_s: float) -> Symptom | None:
    """How the lack of a resource shows in this victim; None: nothing of it is measured."""
    for signal, limit in SYMPTOMS[resource]:
        for subject in dict.fromkeys((sight.subject, NODE)):
            if sight.value(signal, subject) is None:
                continue
            series = sight.history.series(subject, signal)
            points = tuple(series) if series is not None else ()
            window = [point for point in points if point[0] > sight.now - window_s]
            most = max((value for _, value in window), default=0.0)
            if limit is not None and most > limit:
                return Symptom(signal, points, limit, tuple(point for point in window if point[1] > limit))
            median = sorted(value for _, value in points)[len(points) // 2]
            # Half of all noise is above the median: what is bad is well above it.
            return Symptom(signal, points, median, tuple(point for point in window if point[1] > (median + most) / 2))
    return None


def paired(base: Points, other: Points, within_s: float) -> list[tuple[float, float]]:
    """(value of ``base``, value of ``other``) measured at about the same time; both have the oldest first."""
    # Most readers of one frame measure at the same moment: only for the others the nearest is looked for.
    exact = dict(other)
    times: list[float] = []
    found: list[tuple[float, float]] = []
    for at, value in base:
        if at in exact:
            found.append((value, exact[at]))
            continue
        times = times or [one for one, _ in other]
        place = bisect_left(times, at)
        near = min(other[max(0, place - 1) : place + 1], key=lambda one: abs(one[0] - at), default=None)
        if near is not None and abs(near[0] - at) < within_s:
            found.append((value, near[1]))
    return found


def rhythm(sight: Sight, subject: str, signals: Sequence[str], symptom: Symptom) -> tuple[float, str] | None:
    """How well the use of a pod (the sum of some signals) goes with the suffering, 0-1, and words for it.

    None: too little of either is known.
    """
    pairs = _together(sight, subject, signals, symptom)
    if len(pairs) < _PAIRS:
        return None
    found = correlation(pairs, symptom.limit)
    words = f"with {symptom.signal}: {number(found)} (CPI²)"
    if not _varies([value for value, _ in pairs]):
        return (1 + found) / 2, words
    # A pod that does the same all the time is no reason for what comes and goes.
    same = pearson(pairs) if _varies([use for _, use in pairs]) else 0.0
    return (2 + found + same) / 4, f"{words}, {number(same)} (Pearson)"


_PAIRS: Final = 8
"""Fewer moments tell nothing about a rhythm."""


def _together(sight: Sight, subject: str, signals: Sequence[str], symptom: Symptom) -> list[tuple[float, float]]:
    """(symptom, use) at each moment of the past; a pod that was not there yet used nothing."""
    sums: list[tuple[float, float]] = [(at, 0.0) for at, _ in symptom.points]
    measured = False
    for signal in signals:
        series = sight.history.series(subject, signal)
        if series is None:
            continue
        points = tuple(series)
        measured = True
        begun = points[0][0] - spacing_s(sight, signal)
        before = [(at, 0.0) for at, _ in symptom.points if at <= begun]
        values = _by_time(symptom.points, [*before, *points], spacing_s(sight, signal))
        sums = [(at, total + values[at]) for at, total in sums if at in values]
    levels = dict(symptom.points)
    return [(levels[at], total) for at, total in sums] if measured else []


def _by_time(base: Points, other: Points, within_s: float) -> dict[float, float]:
    return dict(paired([(at, at) for at, _ in base], other, within_s))


def correlation(pairs: Sequence[tuple[float, float]], limit: float) -> float:
    """CPI²'s antagonist correlation of (symptom, use) pairs, -1 to 1: positive when use falls into the bad time."""
    total = math.fsum(use for _, use in pairs)
    if total <= 0:
        return 0.0
    found = 0.0
    for level, use in pairs:
        if level > limit:
            found += use / total * (1 - limit / level if limit > 0 else 1.0)
        elif limit > 0:
            found += use / total * max(-1.0, level / limit - 1)
    return max(-1.0, min(1.0, found))


def pearson(pairs: Sequence[tuple[float, float]]) -> float:
    """Pearson's correlation coefficient; 0.0 where one side does not vary."""
    first, second = of([one for one, _ in pairs]), of([other for _, other in pairs])
    if not first.variance or not second.variance:
        return 0.0
    joint = math.fsum((one - first.mean) * (other - second.mean) for one, other in pairs) / len(pairs)
    return max(-1.0, min(1.0, joint / (first.sigma * second.sigma)))


def _varies(values: Sequence[float]) -> bool:
    moments = of(values)
    return moments.sigma > _FLAT * abs(moments.mean)


_FLAT: Final = 0.1
