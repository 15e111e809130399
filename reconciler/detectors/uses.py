"""Recent use of pods: read once a frame, for all victims whose suspects are ranked in it.

Victims differ in their bad moments, not in the use of their neighbours.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple, final

from reconciler.signals.history import STALE_S, History, patience_s
from state.evidence import SampleFrame

Times = tuple[float, ...]


class ResourceUse(NamedTuple):
    """One pod's samples of a signal in the window and the one before it, the oldest first; ``inside``: the first in it.

    ``times`` is one object for all pods that were measured at the same moments.
    """

    times: Times
    values: list[float]
    inside: int
    spacing_s: float

    def mean(self) -> float:
        """Of the window; 0.0 without a sample in it."""
        return _mean(self.values[self.inside :])

    def growth(self) -> float:
        """From the lowest to the newest."""
        return max(0.0, self.values[-1] - min(self.values))


@final
class ResourceUses:
    """Of one frame. Not measured, or not any more, is None."""

    def __init__(self, frame: SampleFrame, history: History, fresh_s: float) -> None:
        self._now, self._history, self._fresh_s = frame.at_s, history, fresh_s
        self._known: dict[tuple[str, float], dict[str, ResourceUse | None]] = {}
        self._times: dict[Times, Times] = {}

    def get(self, signal: str, window_s: float) -> Callable[[str], ResourceUse | None]:
        known = self._known.setdefault((signal, window_s), {})

        def found(subject: str) -> ResourceUse | None:
            if subject not in known:
                known[subject] = self._read(subject, signal, window_s)
            return known[subject]

        return found

    def _read(self, subject: str, signal: str, window_s: float) -> ResourceUse | None:
        series, patience = self._history.series(subject, signal), patience_s(signal, self._fresh_s)
        if series is None or series.fresh(self._now, patience) is None:
            return None
        begin = self._now - window_s
        listed, values = series.after(begin)
        times = tuple(listed)
        times = self._times.setdefault(times, times)
        return ResourceUse(times, values, int(times[0] <= begin), patience / STALE_S)


@final
class UsesInWindow:
    """The mean of uses at certain moments: a victim's bad ones."""

    def __init__(self, times: Sequence[float]) -> None:
        self._bad = times
        self._picks: dict[tuple[int, float], Callable[[Sequence[float]], Sequence[float]]] = {}

    def mean(self, use: ResourceUse) -> float:
        """Of the samples at about those moments; 0.0 where there are none. Of no moments: of the window."""
        if not self._bad:
            return use.mean()
        # Most pods are measured at the same moments: the selection is computed once for all of them. The object lives
        # as long as `ResourceUses` has it, so that no other one has its id.
        key = id(use.times), use.spacing_s
        pick = self._picks.get(key)
        if pick is None:
            pick = self._picks[key] = _picking(nearest(self._bad, use.times, use.spacing_s))
        return _mean(pick(use.values))


def nearest(base: Sequence[float], times: Sequence[float], within_s: float) -> list[int | None]:
    """For each moment of ``base`` which of ``times`` is it, or closest and not ``within_s`` away; None: none is."""
    if base == times:
        return list(range(len(times)))
    # Most readers of one frame measure at the same moment: the nearest is searched for the others only.
    exact = {at: place for place, at in enumerate(times)}
    numbers: list[int | None] = []
    for at in base:
        place = exact.get(at)
        if place is None and times:
            place = bisect_left(times, at)
            around = range(max(0, place - 1), min(place + 1, len(times)))
            place = min(around, key=lambda number: abs(times[number] - at))
            if abs(times[place] - at) >= within_s:
                place = None
        numbers.append(place)
    return numbers


def _picking(places: Sequence[int | None]) -> Callable[[Sequence[float]], Sequence[float]]:
    known = [place for place in places if place is not None]
    if len(known) > 1:
        return itemgetter(*known)
    return lambda values: [values[place] for place in known]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
