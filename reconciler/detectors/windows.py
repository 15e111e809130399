"""Windows over the past of a signal, from the agent's own samples: any length, the same on every kernel.

A sample covers the time since the one before it, also where that is two intervals as in a calm time
(`reconciler.interference.pace`). Samples may be late or missing: a window reports how much of it was covered.
"""

from bisect import bisect_right
from typing import Final

from reconciler.detectors.base import VictimView
from reconciler.signals.history import STALE_S, SampleSeries

COVERED: Final = 0.8
"""The part of a window that must have been seen for its mean to mean anything."""
GAP: Final = 2.5 / STALE_S
"""As a part of the time for which a sample is fresh: a sample so long after the one before it follows a gap. In a calm
time they are two intervals apart.
"""


def interval_s(sight: VictimView) -> float:
    """The time between two samples when none is missing."""
    return sight.fresh_s / STALE_S


def spacing_s(sight: VictimView, signal: str) -> float:
    """The same of one signal: some are not measured in each interval."""
    return sight.patience_s(signal) / STALE_S


def weighed(series: SampleSeries, start: float, end: float, fresh_s: float) -> tuple[float, float] | None:
    """The mean by time of the window from ``start`` to ``end``, and the time covered; None: nothing.

    A sample counts in each window for the part that it covers there. One that follows a gap (see `GAP`) counts in the
    window of its own time, and covers at most ``fresh_s``; the very first one covers one sample interval.
    """
    times, values = series.after(start)
    if not times:
        return None
    first = int(times[0] <= start)
    before = times[0] if first else times[0] - fresh_s / STALE_S
    # Summed again each time: a running sum drifts, so that a recording would give other numbers from its middle on, and
    # sums kept with every sample cost more than they save.
    total = seen_s = 0.0
    for at, value in zip(times[first:], values[first:], strict=True):
        if at > end:
            begin = max(start, before)
            if begin < end and at - before <= fresh_s * GAP:
                total += value * (end - begin)
                seen_s += end - begin
            break
        span = at - before
        if span > fresh_s:  # noqa: PLR1730  # a call of `min` for each sample costs as much as all the rest
            span = fresh_s
        if span > at - start:  # noqa: PLR1730  # of the first, the part that lies in the window
            span = at - start
        before = at
        total += value * span
        seen_s += span
    return (total / seen_s, seen_s) if seen_s > 0 else None


def highest(series: SampleSeries, start: float, end: float, fresh_s: float) -> float | None:
    """The highest value of such a window; None: nothing."""
    if weighed(series, start, end, fresh_s) is None:
        return None
    times, values = series.after(start)
    first, last = bisect_right(times, start), bisect_right(times, end)
    if last < len(times):
        before = times[last - 1] if last else times[0] - fresh_s / STALE_S
        # The one that is measured after the window, if it covers much of it, or is all that does.
        much = times[last] - before <= fresh_s * GAP and end - before > fresh_s / STALE_S / 2
        last += last == first or much
    return max(values[first:last])


def mean(series: SampleSeries, now: float, length_s: float, fresh_s: float, ago_s: float = 0.0) -> float | None:
    """The mean of a window of at least one sample interval, which ended ``ago_s`` before ``now``.

    ``fresh_s``: see `VictimView.patience_s`. None: too little of it was seen.
    """
    spacing = fresh_s / STALE_S
    length = max(length_s, spacing)
    end = now - ago_s
    pair = weighed(series, end - length, end, fresh_s)
    # The newest sample may be almost one interval old: that part of the window is not a gap.
    return None if pair is None or pair[1] < COVERED * length - spacing else pair[0]
