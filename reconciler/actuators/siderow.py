"""What a side actuator remembers of this boot: one row of the store, durable before anything of it is done.

Threads' ids, cookies, mounts and values in /proc mean something on one boot only, so a row of another boot tells of
nothing. A row is there exactly while there is something to take back: by it alone the daemon knows, at its next start,
which side actuators it has to load (`reconciler.sides`).
"""

import logging
from collections.abc import Callable
from typing import Final, Generic, TypeVar, final

import msgspec
import trio

from cgroupfs.bounded import decoded
from state.schema import META
from state.store import Batch, Store

_LOG: Final = logging.getLogger(__name__)
K = TypeVar("K", bound="OfBoot")


class OfBoot(msgspec.Struct, frozen=True, kw_only=True):
    """The base of what a row holds. With ``boot`` alone, everything else as by default, there is nothing to keep."""

    boot: str


@final
class SideRow(Generic[K]):
    """One row. ``kind`` must have a default for all that it adds to `OfBoot`; ``what``: its words for the log."""

    def __init__(self, key: str, kind: type[K], what: str) -> None:
        self.key = key
        self._what = what
        self._decode: Callable[[bytes], K] = msgspec.msgpack.Decoder(kind).decode
        self._empty: Callable[[str], K] = lambda boot: kind(boot=boot)

    def read(self, store: Store) -> K:
        """What the store tells of this boot; with nothing in it where it tells nothing, or what nobody can read."""
        row = dict(store.rows(META)).get(self.key)
        try:
            kept = decoded(self._decode, row) if row is not None else None
        except ValueError as exc:
            _LOG.warning("what is remembered of %s cannot be read: %s", self._what, exc)
            kept = None
        return kept if kept is not None and kept.boot == store.boot else self._empty(store.boot)

    def write(self, store: Store, kept: K) -> None:
        """Make it durable, or forget the row when there is nothing in it (the store's lane). Errors: `StoreError`."""
        batch = Batch()
        if kept == self._empty(kept.boot):
            batch.delete(META, self.key)
        else:
            batch.put(META, self.key, msgspec.msgpack.encode(kept))
        store.apply(batch)


@final
class Remembered(Generic[K]):
    """A row in use."""

    def __init__(self, row: SideRow[K], store: Store, lane: trio.CapacityLimiter) -> None:
        """``lane``: the store's limiter."""
        self.now = row.read(store)
        """What the store has."""
        self._row = row
        self._store = store
        self._lane = lane

    async def become(self, kept: K) -> None:
        """Remember this instead; when it returns it is durable. Errors: `StoreError`: then the old one counts."""
        if kept == self.now:
            return
        await trio.to_thread.run_sync(self._row.write, self._store, kept, limiter=self._lane)
        self.now = kept
