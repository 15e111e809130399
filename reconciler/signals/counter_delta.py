"""What cumulative counters grew by between two passes, by key: the inode of a group, a process, a device."""

from collections.abc import Hashable
from operator import sub
from typing import NamedTuple, TypeAlias, final

from cgroupfs.bounded import digits
from cgroupfs.usage import SHORTEST_S, grown

Counts: TypeAlias = tuple[int | None, ...]
"""Counters of one key, in a fixed order; None: this kernel does not have that counter."""


class CounterIncrease(NamedTuple):
    """Increase of each counter; None: unknown, because it was counted again or is missing."""

    interval_s: float
    by: Counts

    def rate(self, index: int) -> float | None:
        """One of them, per second."""
        grew = self.by[index]
        return None if grew is None else grew / self.interval_s


@final
class CounterDelta:
    """The readings of the previous pass and of this one. A key that a whole pass leaves out is dropped."""

    def __init__(self) -> None:
        # Plain tuples: there are some for each pod each second.
        self._before: dict[Hashable, tuple[float, Counts]] = {}
        self._now: dict[Hashable, tuple[float, Counts]] = {}

    def __len__(self) -> int:
        return len(self._now)

    def rotate(self) -> None:
        self._before, self._now = self._now, {}

    def knew(self, key: Hashable) -> bool:
        """Whether the pass before had read it."""
        return key in self._before

    def grown(self, key: Hashable, at_s: float, counts: Counts) -> CounterIncrease | None:
        """Take a reading; None when there is nothing to compare it with, or only one from just before."""
        before = self._before.get(key)
        if before is None or len(before[1]) != len(counts):
            self._now[key] = at_s, counts
            return None
        interval_s = at_s - before[0]
        if 0.0 <= interval_s < SHORTEST_S:
            # The older reading remains, so that quick passes still add up to a rate.
            self._now[key] = before
            return None
        self._now[key] = at_s, counts
        if interval_s < 0.0:
            return None
        return CounterIncrease(interval_s, _differences(before[1], counts))

    def carry(self, key: Hashable) -> None:
        """Keep the previous reading: this pass does not read it."""
        if (before := self._before.get(key)) is not None:
            self._now[key] = before


def _differences(before: Counts, after: Counts) -> Counts:
    try:
        # Nearly always all are present and none fell; a third of the time of comparing each.
        differences: tuple[int, ...] = tuple(map(sub, after, before))
        if min(differences, default=0) >= 0:
            return differences
    except TypeError:
        pass  # one is missing
    return tuple(map(grown, before, after))


def prefixes(*names: str) -> tuple[str, ...]:
    """The prefixes that `parse_counters` searches for, built once."""
    return tuple(f"\n{name} " for name in names)


def parse_counters(text: str, wanted: tuple[str, ...]) -> list[int | None]:
    """A few numbers of a flat file of many lines; None: not there. A fifth of the time that reading all lines takes."""
    text = f"\n{text}"  # a needle begins with a line end, so that no name is found at the end of a longer one
    counters: list[int | None] = []
    for needle in wanted:
        at = text.find(needle)
        if at < 0:
            counters.append(None)
            continue
        begin = at + len(needle)
        end = text.find("\n", begin)
        value = text[begin:] if end < 0 else text[begin:end]
        counters.append(digits(value))
    return counters
