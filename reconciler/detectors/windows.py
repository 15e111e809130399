"""Windows over the past of a signal, from our own samples: any length, the same on every kernel.

A sample stands for the time since the one before it. Samples may come late or not at all: a window says how much of it
was really seen, and whoever needs more than there is gets None, which is unknown.

Each second hundreds of windows are looked at, so the sums run in C. They are made anew each time: a sum that is carried
from look to look drifts, and a recording would not give the same numbers from its middle on.
"""

from bisect import bisect_right
from collections.abc import Sequence
from operator import mul, sub
from typing import Final, NamedTuple

from reconciler.detectors.base import STALE_S, Sight
from reconciler.signals.history import Series

COVERED: Final = 0.8
"""The part of a window that must have been seen for its mean to mean anything."""


class Window(NamedTuple):
    """What a window holds. ``mean`` is weighted by time; ``seen_s``: the time that its samples stand for."""

    mean: float
    low: float
    high: float
    seen_s: float


def interval_s(sight: Sight) -> float:
    """The time between two samples when none is missing."""
    return sight.fresh_s / STALE_S


def spacing_s(sight: Sight, signal: str) -> float:
    """The same of one signal: some are not measured in each interval."""
    return sight.patience_s(signal) / STALE_S


def spans(times: Sequence[float], fresh_s: float) -> list[float]:
    """The time that each sample stands for, the oldest first; there is at least one.

    A sample that follows a gap stands for at most ``fresh_s``; the very first for one sample interval.
    """
    found = [fresh_s / STALE_S]
    found += map(sub, times[1:], times)
    return [min(one, fresh_s) for one in found] if max(found) > fresh_s else found


def weighed(
    times: Sequence[float], values: Sequence[float], start: float, end: float, fresh_s: float
) -> tuple[float, float, slice] | None:
    """The mean by time in ``start < at <= end``, the time seen, and which samples these are; None: there are none.

    ``times`` and ``values``: the oldest first, with the sample before the window, if there is one.
    """
    low, high = bisect_right(times, start), bisect_right(times, end)
    if low >= high:
        return None
    part = slice(low, high)
    stood = spans(times, fresh_s)[part]
    stood[0] = min(stood[0], times[low] - start)
    seen_s = sum(stood)
    return (sum(map(mul, values[part], stood)) / seen_s, seen_s, part) if seen_s > 0 else None


def over(times: Sequence[float], values: Sequence[float], start: float, end: float, fresh_s: float) -> Window | None:
    """The same with the lowest and the highest value."""
    found = weighed(times, values, start, end, fresh_s)
    if found is None:
        return None
    mean_of, seen_s, part = found
    inside = values[part]
    return Window(mean_of, min(inside), max(inside), seen_s)


def past(sight: Sight, subject: str | None, signal: str, length_s: float) -> tuple[list[float], list[float]]:
    """Times and values of the last ``length_s`` and of the one before, the oldest first; empty: never measured."""
    series = sight.history.series(subject, signal) if subject is not None else None
    return ([], []) if series is None else series.after(sight.now - length_s)


def measured_s(sight: Sight, subject: str | None, signal: str) -> float:
    """When the newest sample was measured; now, if there is none."""
    series = sight.history.series(subject, signal) if subject is not None else None
    return sight.now if series is None else series.last_s


def seen(sight: Sight, subject: str | None, signal: str, length_s: float) -> Window | None:
    """The last ``length_s``; None: too little of it was seen.

    A window that is shorter than the sample interval is as long as that.
    """
    spacing = spacing_s(sight, signal)
    length = max(length_s, spacing)
    found = over(*past(sight, subject, signal, length), sight.now - length, sight.now, sight.patience_s(signal))
    # The newest sample may be almost one interval old: that part of the window is no gap.
    return None if found is None or found.seen_s < COVERED * length - spacing else found


def mean(series: Series, now: float, length_s: float, fresh_s: float, ago_s: float = 0.0) -> float | None:
    """The mean of such a window that ended ``ago_s`` before ``now``. ``fresh_s``: see `Sight.patience_s`."""
    spacing = fresh_s / STALE_S
    length = max(length_s, spacing)
    end = now - ago_s
    found = weighed(*series.after(now - (ago_s + length)), end - length, end, fresh_s)
    return None if found is None or found[1] < COVERED * length - spacing else found[0]
