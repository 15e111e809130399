"""Windows over the past of a signal, from our own samples: any length, the same on every kernel.

A sample stands for the time since the one before it. Samples may come late or not at all: a window says how much of it
was really seen, and whoever needs more than there is gets None, which is unknown.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from reconciler.detectors.base import STALE_S, Sight

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


def over(points: Iterable[tuple[float, float]], start: float, end: float, fresh_s: float) -> Window | None:
    """The window ``start < at <= end`` of ``points`` (the oldest first); None without a sample in it.

    A sample that follows a gap stands for at most ``fresh_s``; the very first for one sample interval.
    """
    total = seen = 0.0
    low, high = float("inf"), float("-inf")
    previous: float | None = None
    for at, value in points:
        if at > end:
            break
        span = fresh_s / STALE_S if previous is None else min(at - previous, fresh_s)
        previous = at
        if at <= start:
            continue
        span = min(span, at - start)
        total += value * span
        seen += span
        low, high = min(low, value), max(high, value)
    return Window(total / seen, low, high, seen) if seen > 0 else None


def past(sight: Sight, subject: str | None, signal: str, length_s: float) -> Sequence[tuple[float, float]]:
    """The samples of the last ``length_s`` and the one before them, the oldest first; empty: never measured."""
    series = sight.history.series(subject, signal) if subject is not None else None
    return () if series is None else series.tail(sight.now - length_s)


def measured_s(sight: Sight, subject: str | None, signal: str) -> float:
    """When the newest sample was measured; now, if there is none."""
    series = sight.history.series(subject, signal) if subject is not None else None
    return sight.now if series is None or series.last is None else series.last[0]


def seen(sight: Sight, subject: str | None, signal: str, length_s: float, ago_s: float = 0.0) -> Window | None:
    """The ``length_s`` that ended ``ago_s`` before now; None: too little of it was seen.

    A window that is shorter than the sample interval is as long as that.
    """
    spacing = spacing_s(sight, signal)
    length = max(length_s, spacing)
    end = sight.now - ago_s
    found = over(past(sight, subject, signal, ago_s + length), end - length, end, sight.patience_s(signal))
    # The newest sample may be almost one interval old: that part of the window is no gap.
    return None if found is None or found.seen_s < COVERED * length - spacing else found


def mean(sight: Sight, subject: str | None, signal: str, length_s: float, ago_s: float = 0.0) -> float | None:
    """The mean of `seen`."""
    found = seen(sight, subject, signal, length_s, ago_s)
    return None if found is None else found.mean
