"""The near past of every signal: bounded, one series a subject and signal.

A series holds the last `LENGTH` samples whatever happens, so memory is known beforehand: 16 bytes a sample, 2 KiB a
signal at 120. A subject that is in no frame any more is forgotten at once; a pod that returns starts without a past.

All of it is read and written each second, thousands of times: samples lie one after the other in arrays, of which a
part is taken at once. The oldest are removed some at a time, as removing one costs as much as removing `_SLACK`.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Final, final

from state.evidence import Frame

LENGTH: Final = 120
_SLACK: Final = 16


@final
class Series:
    """One signal of one subject: values with the moment at which each was measured (monotonic seconds)."""

    __slots__ = ("_full", "_length", "confidence", "times", "values")

    def __init__(self, length: int = LENGTH) -> None:
        self.times = array("d")
        """The newest is the last; a few of the oldest may still be here that are no part of the past, see `begin`."""
        self.values = array("d")
        """One for each of ``times``."""
        self.confidence = 0.0
        """Of the newest sample."""
        self._length = length
        self._full = length + _SLACK

    def __len__(self) -> int:
        return min(len(self.times), self._length)

    def add(self, at_s: float, value: float, confidence: float = 1.0) -> None:
        """Take one; a sample that is not newer than the last one (a reading told twice) is left out."""
        times = self.times
        if times and at_s <= times[-1]:
            return
        self.confidence = confidence
        times.append(at_s)
        self.values.append(value)
        if len(times) >= self._full:
            del times[: -self._length]
            del self.values[: -self._length]

    def __iter__(self) -> Iterator[tuple[float, float]]:
        """(at, value), the oldest first."""
        return zip(*self.all(), strict=True)

    @property
    def last(self) -> tuple[float, float] | None:
        """(at, value) of the newest; None when there is none."""
        return (self.times[-1], self.values[-1]) if self.times else None

    def fresh(self, now: float, within_s: float) -> float | None:
        """The newest value if it is at most ``within_s`` old; None: unknown."""
        times = self.times
        return self.values[-1] if times and now - times[-1] <= within_s else None

    @property
    def begin(self) -> int:
        """Where in ``times`` the past begins."""
        return max(0, len(self.times) - self._length)

    def place(self, at_s: float) -> int:
        """Where the first one stands that was measured after ``at_s``, or would."""
        return bisect_right(self.times, at_s, self.begin)

    def all(self) -> tuple[list[float], list[float]]:
        """Times, and the values measured then, the oldest first."""
        begin = self.begin
        return self.times[begin:].tolist(), self.values[begin:].tolist()

    def after(self, at_s: float) -> tuple[list[float], list[float]]:
        """Times and values of those measured after ``at_s`` and the one before them, the oldest first."""
        begin = self.begin
        first = max(begin, bisect_right(self.times, at_s, begin) - 1)
        return self.times[first:].tolist(), self.values[first:].tolist()

    def since(self, at_s: float) -> list[tuple[float, float]]:
        """Those measured after ``at_s``, the oldest first."""
        return [point for point in self.tail(at_s) if point[0] > at_s]

    def tail(self, at_s: float) -> list[tuple[float, float]]:
        """Those measured after ``at_s`` and the one before them, the oldest first."""
        return list(zip(*self.after(at_s), strict=True))


@final
class History:
    """All series, fed with frames."""

    def __init__(self, length: int = LENGTH) -> None:
        self._length = length
        self._series: dict[str, dict[str, Series]] = {}

    def add(self, frame: Frame) -> None:
        """Take a frame's samples; subjects that it does not have are forgotten."""
        known, now = self._series, frame.at_s
        if known.keys() != frame.samples.keys():
            for subject in known.keys() - frame.samples.keys():
                del known[subject]
        for subject, samples in frame.samples.items():
            here = known.get(subject)
            if here is None:
                here = known[subject] = {}
            for signal, sample in samples.items():
                series = here.get(signal)
                if series is None:
                    series = here[signal] = Series(self._length)
                series.add(now - sample.age_s, sample.value, sample.confidence)

    def series(self, subject: str, signal: str) -> Series | None:
        """One signal's past; None when it was never measured."""
        here = self._series.get(subject)
        return None if here is None else here.get(signal)

    def of(self, subject: str) -> Mapping[str, Series]:
        """All signals of one subject."""
        return self._series.get(subject, {})

    def fresh(self, subject: str, signal: str, now: float, within_s: float) -> float | None:
        """The newest value if it is at most ``within_s`` old; None: unknown."""
        here = self._series.get(subject)
        series = None if here is None else here.get(signal)
        if series is None or now - series.times[-1] > within_s:
            return None
        return series.values[-1]
