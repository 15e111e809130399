"""The near past of every signal: bounded, one series a subject and signal.

A series holds the last `LENGTH` samples at most: 8 bytes a value, and 8 for its time, which most signals of a subject
share. 1 KiB a signal at 120, 2 where the times are its own.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Final, final

from state.evidence import Sample, SampleFrame

LENGTH: Final = 120
_SLACK: Final = 16
"""Removing the oldest one costs as much as removing so many at once."""


@final
class SampleSeries:
    """One signal of one subject: values with the moment at which each was measured (monotonic seconds)."""

    __slots__ = ("_length", "confidence", "times", "values")

    def __init__(self, length: int = LENGTH, times: "array[float] | None" = None) -> None:
        """``times``: shared with other series; one of them appends to it."""
        # For `all` and `after` to read. The newest of both are last and belong together; both may hold more than the
        # past, and times more than values.
        self.times = array("d") if times is None else times
        self.values = array("d")
        self._length = length
        self.confidence = 0.0
        """Of the newest sample."""

    def __len__(self) -> int:
        return min(len(self.values), self._length)

    def add(self, at_s: float, value: float, confidence: float = 1.0) -> None:
        """Add a sample; a sample that is not newer than the last one (a repeated reading) is left out."""
        times = self.times
        if times and at_s <= times[-1]:
            return
        times.append(at_s)
        self.values.append(value)
        self.confidence = confidence
        if len(times) >= self._length + _SLACK:
            del times[: -self._length]
            self.trim()

    def trim(self) -> None:
        """Forget values that are no part of the past."""
        del self.values[: -self._length]

    def part(self) -> None:
        """Nothing was measured at the time that was appended last: have own times from now on."""
        self.times = self.times[-1 - len(self.values) : -1]

    def joins(self, times: "array[float]") -> bool:
        """Share these times if those of its past are the same."""
        count = len(self)
        same = self.times[-count:].tobytes() == times[-count:].tobytes()
        if same:
            self.trim()
            self.times = times
        return same

    def __iter__(self) -> Iterator[tuple[float, float]]:
        """(at, value), the oldest first."""
        return zip(*self.all(), strict=True)

    def fresh(self, now: float, within_s: float) -> float | None:
        """The newest value if it is at most ``within_s`` old; None: unknown."""
        return self.values[-1] if self.values and now - self.times[-1] <= within_s else None

    def all(self) -> tuple[list[float], list[float]]:
        """Times, and the values measured then, the oldest first."""
        count = len(self)
        return (self.times[-count:].tolist(), self.values[-count:].tolist()) if count else ([], [])

    def after(self, at_s: float) -> tuple[list[float], list[float]]:
        """Times and values measured after ``at_s`` and the pair before them, the oldest first."""
        times, values = self.times, self.values
        size, count = len(times), len(values)
        begin = size - (count if count < self._length else self._length)  # noqa: FURB136  # hundreds of times a second
        first = max(begin, bisect_right(times, at_s, begin) - 1)
        return times[first:].tolist(), values[first - size :].tolist()

    def since(self, at_s: float) -> list[tuple[float, float]]:
        """Those measured after ``at_s``, the oldest first."""
        return [point for point in self.tail(at_s) if point[0] > at_s]

    def tail(self, at_s: float) -> list[tuple[float, float]]:
        """Samples measured after ``at_s`` and the sample before them, the oldest first."""
        return list(zip(*self.after(at_s), strict=True))


@final
class _Subject:
    """All series of one subject.

    ``times``: shared by the series that each frame had since they began, measured at the frame's own moment.
    """

    __slots__ = ("_length", "_together", "series", "times")

    def __init__(self, length: int) -> None:
        self._length = length
        self._together = 0
        """How many share ``times``."""
        self.times = array("d")
        self.series: dict[str, SampleSeries] = {}

    def take(self, now: float, samples: Mapping[str, Sample]) -> None:
        times, known, count = self.times, self.series, 0
        if times and now <= times[-1]:
            self._take_apart(now, samples)
            return
        times.append(now)
        for signal, sample in samples.items():
            series = known.get(signal)
            if series is None and not sample.age_s:
                series = known[signal] = SampleSeries(self._length, times)
                self._together += 1
            if series is not None and series.times is times and not sample.age_s:
                series.values.append(sample.value)
                series.confidence = sample.confidence
                count += 1
            else:
                self._apart(signal).add(now - sample.age_s, sample.value, sample.confidence)
        if count != self._together:
            for signal, series in known.items():
                if series.times is times and signal not in samples:
                    series.part()
                    self._together -= 1
        if len(times) >= self._length + _SLACK:
            self._trim()

    def _take_apart(self, now: float, samples: Mapping[str, Sample]) -> None:
        """A frame that is not newer than the last one: repeated samples are left out."""
        for signal, sample in samples.items():
            series = self.series.get(signal)
            if series is None or series.times is not self.times:
                self._apart(signal).add(now - sample.age_s, sample.value, sample.confidence)

    def _apart(self, signal: str) -> SampleSeries:
        """The series, with times of its own."""
        series = self.series.get(signal)
        if series is None:
            series = self.series[signal] = SampleSeries(self._length)
        elif series.times is self.times:
            series.part()
            self._together -= 1
        return series

    def _trim(self) -> None:
        del self.times[: -self._length]
        for series in self.series.values():
            if series.times is self.times:
                series.trim()
            elif series.joins(self.times):
                # It had missed some, and has forgotten that by now.
                self._together += 1


@final
class History:
    def __init__(self, length: int = LENGTH) -> None:
        self._length = length
        self._subjects: dict[str, _Subject] = {}

    def add(self, frame: SampleFrame) -> None:
        """Take a frame's samples; subjects that it does not have are forgotten."""
        known, now = self._subjects, frame.at_s
        if known.keys() != frame.samples.keys():
            # At once: a pod that returns starts without a past.
            for subject in known.keys() - frame.samples.keys():
                del known[subject]
        for subject, samples in frame.samples.items():
            current = known.get(subject)
            if current is None:
                current = known[subject] = _Subject(self._length)
            current.take(now, samples)

    def series(self, subject: str, signal: str) -> SampleSeries | None:
        """One signal's past; None when it was never measured."""
        current = self._subjects.get(subject)
        return None if current is None else current.series.get(signal)

    def get(self, subject: str) -> Mapping[str, SampleSeries]:
        current = self._subjects.get(subject)
        return {} if current is None else current.series

    def fresh(self, subject: str, signal: str, now: float, within_s: float) -> float | None:
        """The newest value if it is at most ``within_s`` old; None: unknown."""
        current = self._subjects.get(subject)
        series = None if current is None else current.series.get(signal)
        return None if series is None else series.fresh(now, within_s)


STALE_S: Final = 3.0
"""A sample counts as fresh for this many sample intervals."""


_SLOW: Final[Mapping[str, float]] = {
    **dict.fromkeys(("cpi", "llc.misses"), 130.0),
    **dict.fromkeys(("llc.occupancy", "memory.bandwidth", "service.latency"), 30.0),
    **dict.fromkeys(("fs.available", "fs.size", "fs.inodes_free", "fs.inodes"), 30.0),
    **dict.fromkeys(("fs.use", "fs.inodes_use"), 240.0),
}
"""Signals that are not measured each sample interval, whatever its length: how long their samples count as fresh."""


def patience_s(signal: str, fresh_s: float) -> float:
    """How old a sample of this signal may be to count as now, where others may be ``fresh_s`` old."""
    slow = _SLOW.get(signal)
    return fresh_s if slow is None or slow < fresh_s else slow
