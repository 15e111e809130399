"""Whether promised headroom was there: minute by minute. Pure. Units: those of the amounts (CPU: thousandths; bytes).

A minute has to give the largest amount that was promised within the last hour. It gave the mean of what BE work could
have had: unused amounts and BE work's present use, within the bound on BE work. Where that is less by more than
`TOLERANCE_PERCENT`, the promise of the minute is broken.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple, final

from msgspec import Meta, Struct, field

from reconciler.headroom.histogram import CPU_MILLI, MEMORY_BYTES, Buckets

WINDOW: Final = 60
"""Minutes for which a promise counts."""
MINUTE_S: Final = 60.0
TOLERANCE_PERCENT: Final = 5
"""A mean over one minute varies by this share at steady load."""

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Amount = Annotated[float, Meta(ge=0, le=1e24)]
Tops = Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 62)], ...], Meta(max_length=WINDOW)]


class PromiseMinute(NamedTuple):
    """One minute. ``available`` None: not known."""

    promised: int
    available: int | None

    @property
    def missing(self) -> int:
        """What of the promise was not there; 0 where that is not known."""
        return 0 if self.available is None else max(0, self.promised - self.available)

    @property
    def is_broken(self) -> bool:
        """Whether more was missing than is tolerated."""
        return self.missing * 100 > self.promised * TOLERANCE_PERCENT


@final
class PromiseWindow:
    """The promises of the last hour, and the readings of the present minute."""

    def __init__(self, lately: Sequence[int] = (), age_s: float = 0.0) -> None:
        """``lately``: of an earlier run `tops`, ``age_s`` ago; an age below 0 (the clock was set back) counts as 0."""
        absent = min(WINDOW, int(max(0.0, age_s) // MINUTE_S))
        self._tops: deque[int] = deque([*lately, *[0] * absent], maxlen=WINDOW)
        self._top = self._sum = self._count = 0

    def add(self, promised: int, available: int | None) -> None:
        """A reading: the amount promised now, and what BE work could have now (None: not known)."""
        self._top = max(self._top, promised)
        if available is not None:
            self._sum += available
            self._count += 1

    def minute(self) -> PromiseMinute:
        """The minute is over."""
        self._tops.append(self._top)
        available = self._sum // self._count if self._count else None
        self._top = self._sum = self._count = 0
        # The largest: a BE pod that was scheduled by a promise still runs when the promise has fallen.
        return PromiseMinute(max(self._tops), available)

    @property
    def tops(self) -> tuple[int, ...]:
        """The largest promise of each minute, the newest last, for the store."""
        return (*self._tops, self._top)[-WINDOW:]


class NodePromises(NamedTuple):
    law: str
    cpu: PromiseMinute
    memory: PromiseMinute


class PromiseSum(Struct, kw_only=True):
    """Minutes of one resource. ``missing``: sum over the broken minutes; ``most_missing``: of one of them.

    ``promised`` and ``available``: known minutes by bucket of the amount (texts: readers of the store refuse others).
    """

    kept: Count = 0
    broken: Count = 0
    unknown: Count = 0
    missing: Amount = 0.0
    most_missing: Amount = 0.0
    promised: Annotated[dict[str, Count], Meta(max_length=512)] = field(default_factory=dict)
    available: Annotated[dict[str, Count], Meta(max_length=512)] = field(default_factory=dict)

    def add(self, minute: PromiseMinute, buckets: Buckets) -> None:
        if minute.available is None:  # neither kept nor broken
            self.unknown += 1
            return
        self.broken += minute.is_broken
        self.kept += not minute.is_broken
        if minute.is_broken:
            self.missing += minute.missing
            self.most_missing = max(self.most_missing, minute.missing)
        for counts, amount in ((self.promised, minute.promised), (self.available, minute.available)):
            bucket = str(buckets.index(amount))
            counts[bucket] = counts.get(bucket, 0) + 1

    def merge(self, other: "PromiseSum") -> None:
        for name in ("kept", "broken", "unknown", "missing"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.most_missing = max(self.most_missing, other.most_missing)
        self.promised = dict(Counter(self.promised) + Counter(other.promised))
        self.available = dict(Counter(self.available) + Counter(other.available))


class PromiseHour(Struct, kw_only=True):
    """Promises of some minutes. ``laws``: minutes by the law that decided."""

    cpu: PromiseSum = field(default_factory=PromiseSum)
    memory: PromiseSum = field(default_factory=PromiseSum)
    laws: Annotated[dict[str, Count], Meta(max_length=8)] = field(default_factory=dict)

    def add(self, promises: NodePromises) -> None:
        self.laws[promises.law] = self.laws.get(promises.law, 0) + 1
        self.cpu.add(promises.cpu, CPU_MILLI)
        self.memory.add(promises.memory, MEMORY_BYTES)

    def merge(self, other: "PromiseHour") -> None:
        self.cpu.merge(other.cpu)
        self.memory.merge(other.memory)
        self.laws = dict(Counter(self.laws) + Counter(other.laws))
