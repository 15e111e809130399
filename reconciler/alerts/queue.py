"""Alerts that a crash must not lose, in the store until every sink has taken them or has given up. At least once.

A row is written before the first delivery, and removed after the last one. A daemon that crashes between delivery and
removal sends again, with the same id. While the store cannot be written, rows are in memory only, and that is reported.
"""

import time
from collections.abc import Callable, Collection, Mapping
from typing import Final, final

import trio
from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.errors import StoreError
from cgroupfs.log import get_log
from reconciler.alerts.alert import Severity
from reconciler.alerts.incident import Incident
from reconciler.runtime.stints import in_worker
from state.rows import MirroredRows, RowForm
from state.schema import META
from state.store import Store, StoreBatch

PREFIX: Final = "alert:"
"""Rows of the store's META table, by incident. An older daemon leaves them alone."""
VERSION: Final = 1


class QueueRow(Struct, frozen=True, kw_only=True):
    """One row. ``to``: the sinks that have yet to take it; ``stored_s``: since when (seconds since the epoch)."""

    v: int = VERSION
    notice: Incident
    to: tuple[str, ...]
    stored_s: float


_FORM: Final = RowForm(QueueRow, VERSION)


@final
class DurableQueue:
    """The stored alerts, by sink. Only `flush` uses the disk, in the store's thread."""

    def __init__(
        self, store: Store, lane: trio.CapacityLimiter, most: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.most = most
        self.dropped = 0
        """Rows given up because there were too many."""
        self.problem: str | None = None
        self._lane = lane
        self._clock = clock
        self._rows: dict[str, QueueRow] = {}
        self._dirty: set[str] = set()
        self._held = MirroredRows(store, META, _FORM, PREFIX)
        self._turn = trio.Lock()
        self._log = get_log("alerts")

    @property
    def rows(self) -> Mapping[str, QueueRow]:
        """Pending alerts, by id, the oldest first."""
        return self._rows

    @property
    def unflushed(self) -> bool:
        """Whether the store lacks something of it."""
        return bool(self._dirty)

    def load(self, rows: Collection[tuple[str, bytes]]) -> None:
        """Load the rows of an earlier run. An unreadable row is logged and removed; one of a newer version is left."""
        for key, body in rows:
            if not key.startswith(PREFIX):
                continue
            name = key.removeprefix(PREFIX)
            try:
                row = _FORM.decode(body)
                if row is None:
                    self._log.warning("alert of a newer version left in the store", id=name)
                    continue
                # What has been put meanwhile is newer.
                self._rows.setdefault(name, row)
            except ValueError as exc:
                self._log.warning("unreadable alert removed from the store", id=name, error=str(exc))
                self._dirty.add(name)

    def put(self, notice: Incident, to: Collection[str]) -> None:
        """Keep it for these sinks, with those that it was kept for already. Durable after `flush`."""
        known = self._rows.get(notice.id)
        names = tuple(dict.fromkeys((*(known.to if known is not None else ()), *to)))
        stored_s = known.stored_s if known is not None else self._clock()
        self._rows[notice.id] = QueueRow(notice=notice, to=names, stored_s=stored_s)
        self._dirty.add(notice.id)
        if len(self._rows) > self.most:
            self._drop(notice.id)

    def stage(self, batch: StoreBatch, notice: Incident, to: Collection[str]) -> None:
        """Put the row that `put` would make into a batch of the caller's, to be durable together with his."""
        self._held.put(batch, notice.id, QueueRow(notice=notice, to=tuple(to), stored_s=self._clock()))

    def acknowledge(self, ids: Collection[str], sink: str) -> None:
        """This sink has taken these, or has given them up."""
        for key in ids:
            row = self._rows.get(key)
            if row is None or sink not in row.to:
                continue
            left = tuple(name for name in row.to if name != sink)
            if left:
                self._rows[key] = replace(row, to=left)
            else:
                del self._rows[key]
            self._dirty.add(key)

    async def flush(self) -> bool:
        """Bring the store up to date; False when it cannot be written now, which is reported once."""
        async with self._turn:
            if not self._dirty and self._held.current:
                return self.problem is None
            taken, self._dirty = self._dirty, set()
            changes = {key: self._rows.get(key) for key in taken}
            stored = False
            try:
                await in_worker(self._write, changes, limiter=self._lane)
                stored = True
            except StoreError as exc:
                if self.problem is None:
                    self._log.warning("alerts are kept in memory only", error=str(exc))
                self.problem = f"alerts are kept in memory only: {exc}"
                return False
            finally:
                if not stored:
                    self._dirty |= taken
            if self.problem is not None:
                self._log.info("alerts are stored again", count=len(self._rows))
            self.problem = None
            return True

    def _write(self, changes: Mapping[str, QueueRow | None]) -> None:
        """In the store's thread."""
        batch = StoreBatch()
        for key, row in changes.items():
            self._held.put(batch, key, row)
        self._held.write(batch, lambda: dict(self._rows))

    def _drop(self, newest: str) -> None:
        others = (key for key in self._rows if key != newest)
        victim = min(others, key=lambda key: self._rows[key].notice.alert.severity is Severity.CRITICAL)
        del self._rows[victim]
        self._dirty.add(victim)
        self.dropped += 1
        if self.dropped == 1:
            self._log.warning("too many pending alerts in the store; the oldest are removed", most=self.most)
