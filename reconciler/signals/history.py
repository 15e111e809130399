"""The near past of every signal: bounded rings, one a subject and signal.

A ring holds the last `length` samples whatever happens, so memory is known beforehand: 16 bytes a sample, 2 KiB a
signal at 120. A subject that is in no frame any more is forgotten at once; a pod that returns starts without a past.
"""

from array import array
from collections.abc import Iterator, Mapping
from typing import Final, final

from state.evidence import Frame

LENGTH: Final = 120


@final
class Series:
    """One signal of one subject: values with the moment at which each was measured (monotonic seconds)."""

    __slots__ = ("_at", "_length", "_next", "_values", "confidence")

    def __init__(self, length: int = LENGTH) -> None:
        self._at = array("d")
        self._values = array("d")
        self._length = length
        self._next = 0
        self.confidence = 0.0
        """Of the newest sample."""

    def __len__(self) -> int:
        return len(self._at)

    def add(self, at_s: float, value: float, confidence: float = 1.0) -> None:
        """Take one; a sample that is not newer than the last one (a reading told twice) is left out."""
        if len(self._at) and at_s <= self._at[self._next - 1]:
            return
        self.confidence = confidence
        if len(self._at) < self._length:
            self._at.append(at_s)
            self._values.append(value)
            return
        self._at[self._next] = at_s
        self._values[self._next] = value
        self._next = (self._next + 1) % self._length

    def __iter__(self) -> Iterator[tuple[float, float]]:
        """(at, value), the oldest first."""
        for index in range(len(self._at)):
            place = (self._next + index) % len(self._at)
            yield self._at[place], self._values[place]

    @property
    def last(self) -> tuple[float, float] | None:
        """(at, value) of the newest; None when there is none."""
        return (self._at[self._next - 1], self._values[self._next - 1]) if len(self._at) else None

    def since(self, at_s: float) -> list[tuple[float, float]]:
        """Those measured after ``at_s``, the oldest first."""
        return [point for point in self if point[0] > at_s]

    def tail(self, at_s: float) -> list[tuple[float, float]]:
        """Those measured after ``at_s`` and the one before them, the oldest first; costs what it gives."""
        found: list[tuple[float, float]] = []
        for back in range(1, len(self._at) + 1):
            # Below zero python counts from the end, which is where the ring goes on.
            place = self._next - back
            found.append((self._at[place], self._values[place]))
            if found[-1][0] <= at_s:
                break
        found.reverse()
        return found


@final
class History:
    """All series, fed with frames."""

    def __init__(self, length: int = LENGTH) -> None:
        self._length = length
        self._series: dict[str, dict[str, Series]] = {}

    def add(self, frame: Frame) -> None:
        """Take a frame's samples; subjects that it does not have are forgotten."""
        for subject in self._series.keys() - frame.samples.keys():
            del self._series[subject]
        for subject, samples in frame.samples.items():
            here = self._series.setdefault(subject, {})
            for signal, sample in samples.items():
                series = here.get(signal)
                if series is None:
                    series = here[signal] = Series(self._length)
                series.add(frame.at_s - sample.age_s, sample.value, sample.confidence)

    def series(self, subject: str, signal: str) -> Series | None:
        """One signal's past; None when it was never measured."""
        return self._series.get(subject, {}).get(signal)

    def of(self, subject: str) -> Mapping[str, Series]:
        """All signals of one subject."""
        return self._series.get(subject, {})

    def fresh(self, subject: str, signal: str, now: float, within_s: float) -> float | None:
        """The newest value if it is at most ``within_s`` old; None: unknown."""
        series = self.series(subject, signal)
        if series is None or series.last is None:
            return None
        at_s, value = series.last
        return value if now - at_s <= within_s else None
