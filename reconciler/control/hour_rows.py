"""Rows of META, one for each hour since the epoch: loaded at start, stored when they changed, deleted when too old.

The wall clock may be wrong for a while: a node without a battery boots years behind and is set right by NTP minutes
later; a person sets it wrong and back. So the rows of this boot are moved with every step of the clock, also one while
the daemon was down, and rows are deleted by their age only where the clock has not been stepped for a day.
"""

import time
from collections.abc import Callable, Iterator
from typing import Annotated, Final, Generic, TypeVar, final

import msgspec
import trio
from msgspec import Meta

from cgroupfs.bounded import decoded
from cgroupfs.errors import StoreError
from cgroupfs.log import get_log
from reconciler.runtime.stints import in_worker
from state.schema import META
from state.store import Store, StoreBatch

HOUR_S: Final = 3600
STEADY_S: Final = 86_400.0
"""A clock that was not stepped for so long is taken for right."""
_SPARE: Final = 2
"""Rows of so many times the wanted days may be kept while the clock is not steady; the nearest to now."""
_CLOCK: Final = "clock"
_LATEST: Final = 999_999_999
"""The largest hour that a row's key may name."""
_MOST_HOURS: Final = 4096
_LOG: Final = get_log("store")

T = TypeVar("T")
Hour = Annotated[int, Meta(ge=0, le=_LATEST)]


class _Clock(msgspec.Struct, kw_only=True):
    """A row besides the hours. ``hours``: those that were recorded in this boot, at this offset of the wall clock.

    ``offset_s`` is the wall clock at the boot, ``stepped_s`` the time since the boot of the last step.
    """

    boot: str
    offset_s: Annotated[float, Meta(ge=-1e12, le=1e12)]
    stepped_s: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    hours: Annotated[list[Hour], Meta(max_length=_MOST_HOURS)] = []


_CLOCK_DECODER: Final = msgspec.msgpack.Decoder(_Clock)


def uptime_s() -> float:
    """Time since the boot, with that in suspend: what no step of the wall clock changes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def load_rows(store: Store, prefix: str, decode: Callable[[bytes], T]) -> Iterator[tuple[int, T]]:
    """The rows of earlier runs, by hour; a row that cannot be read is left out."""
    for key, row in store.rows(META):
        name = key.removeprefix(prefix)
        if name == key or not (name.isascii() and name.isdecimal() and len(name) < 10):
            continue
        try:
            yield int(name), decoded(decode, row)
        except ValueError as exc:
            _LOG.warning("cannot read an hour's row", row=f"{prefix}{name}", error=str(exc))


@final
class HourRows(Generic[T]):
    def __init__(
        self,
        store: Store,
        lane: trio.CapacityLimiter,
        prefix: str,
        hours: dict[int, T],
        *,
        merge: Callable[[T, T], T],
        wall: Callable[[], float],
        uptime: Callable[[], float],
    ) -> None:
        """``hours``: as `load_rows` has them, changed in place. ``merge``: two rows of what is one hour now."""
        self._store = store
        self._lane = lane
        self._prefix = prefix
        self._merge = merge
        self._wall = wall
        self._uptime = uptime
        self.hours = hours
        self._unsaved: set[int] = set()
        self._stored = set(hours)
        self._generation = store.generation
        self._clock = self._load_clock()
        self._mine = set(self._clock.hours)
        """Hours that were recorded in this boot."""

    def _load_clock(self) -> _Clock:
        row = next((body for key, body in self._store.rows(META) if key == f"{self._prefix}{_CLOCK}"), None)
        try:
            known = None if row is None else decoded(_CLOCK_DECODER.decode, row)
        except ValueError as exc:
            known = None
            _LOG.warning("cannot read the clock of the hours' rows", row=f"{self._prefix}{_CLOCK}", error=str(exc))
        if known is not None and known.boot and known.boot == self._store.boot:
            return known
        return _Clock(boot=self._store.boot, offset_s=self._wall() - self._uptime())

    def present(self) -> int:
        """The present hour. After a step of the clock the rows of this boot are moved with it."""
        offset_s = self._wall() - self._uptime()
        moved = round((offset_s - self._clock.offset_s) / HOUR_S)
        if moved:
            self._move(moved)
            self._clock.offset_s, self._clock.stepped_s = offset_s, self._uptime()
            _LOG.warning("the clock was stepped: hourly rows of this boot are moved", row=self._prefix, hours=moved)
        return min(max(0, int(self._wall())) // HOUR_S, _LATEST)

    def _move(self, moved: int) -> None:
        """Move the rows of this boot by so many hours; of earlier boots nothing is known, and they remain."""
        rows = {at: self.hours.pop(at) for at in sorted(self._mine) if at in self.hours}
        self._mine = set()
        for before, row in rows.items():
            at = before + moved
            if 0 <= at <= _LATEST:
                self.hours[at] = self._merge(self.hours[at], row) if at in self.hours else row
                self.changed(at)

    def changed(self, at: int) -> None:
        """The row of an hour, in this boot."""
        self._unsaved.add(at)
        self._mine.add(at)

    def _prune(self, days: int) -> None:
        """Delete rows that are too old or in the future, if the clock was not stepped for a day."""
        now, wanted = self.present(), 24 * days
        if self._uptime() - self._clock.stepped_s >= STEADY_S:
            dropped = [at for at in self.hours if not 0 <= now - at < wanted]
        else:
            # By number only: what the clock calls too old or future may be neither.
            dropped = sorted(self.hours, key=lambda at: abs(now - at))[_SPARE * wanted :]
        for at in dropped:
            del self.hours[at]

    async def save(self, days: int) -> None:
        """Store what changed, and delete rows of other hours than the last ``days``.

        A failing store is reported by the state writer, not here.
        """
        self._prune(days)
        if self._generation != self._store.generation:
            # The store is another file than the one that was written.
            self._generation, self._stored, self._unsaved = self._store.generation, set(), set(self.hours)
        batch, stored = StoreBatch(), set(self.hours)
        for at in self._unsaved & stored:
            batch.put(META, f"{self._prefix}{at}", msgspec.msgpack.encode(self.hours[at]))
        for at in self._stored - stored:
            batch.delete(META, f"{self._prefix}{at}")
        if not batch:
            return
        self._mine &= stored
        self._clock.hours = sorted(self._mine)[-_MOST_HOURS:]
        batch.put(META, f"{self._prefix}{_CLOCK}", msgspec.msgpack.encode(self._clock))
        unsaved, self._unsaved = self._unsaved, set()
        done = False
        try:
            await in_worker(self._store.apply, batch, limiter=self._lane)
            done = True
        except StoreError:
            return
        finally:
            # Also where it was cancelled: the save at the end has to have them.
            if not done:
                self._unsaved |= unsaved
        self._stored = stored
