"""Rows of META, one for each hour since the epoch: loaded at start, stored when they changed, deleted when too old."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeVar, final

import msgspec
import trio

from cgroupfs.bounded import decoded
from cgroupfs.errors import StoreError
from cgroupfs.log import get_log
from state.schema import META
from state.store import Store, StoreBatch

HOUR_S: Final = 3600
_LOG: Final = get_log("store")

T = TypeVar("T")


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
class HourRows:
    """Which rows the store has. ``unsaved``: hours whose rows have changed since."""

    def __init__(self, store: Store, lane: trio.CapacityLimiter, prefix: str, known: Mapping[int, object]) -> None:
        self._store = store
        self._lane = lane
        self._prefix = prefix
        self.unsaved: set[int] = set()
        self._stored = set(known)
        self._generation = store.generation

    async def save(self, hours: Mapping[int, object]) -> None:
        """Store what changed, and delete rows of other hours.

        A failing store is reported by the state writer, not here.
        """
        if self._generation != self._store.generation:
            # The store is another file than the one that was written.
            self._generation, self._stored, self.unsaved = self._store.generation, set(), set(hours)
        batch, stored = StoreBatch(), set(hours)
        for at in self.unsaved & stored:
            batch.put(META, f"{self._prefix}{at}", msgspec.msgpack.encode(hours[at]))
        for at in self._stored - stored:
            batch.delete(META, f"{self._prefix}{at}")
        if not batch:
            return
        unsaved, self.unsaved = self.unsaved, set()
        try:
            await trio.to_thread.run_sync(self._store.apply, batch, limiter=self._lane)
        except StoreError:
            self.unsaved |= unsaved
        else:
            self._stored = stored
