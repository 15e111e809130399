"""The evictions' journal: each case as a row of the store, written before the action that it describes.

A row is complete, so that after a crash at any moment the next run can continue the case. The alert of an eviction's
end is stored together with that end: one outcome, one alert, in any event.
"""

from collections.abc import Callable, Iterable
from typing import Final, Protocol, final

import trio
from msgspec import Struct

from cgroupfs.errors import CgroupError, StoreError
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.log import get_log
from reconciler.alerts.alert import Alert
from reconciler.runtime.stints import in_worker
from state.eviction import EvictionCase, EvictionStep
from state.rows import MirroredRows, RowForm
from state.schema import EVICTIONS
from state.store import Store, StoreBatch

_LOG: Final = get_log("journal")
VERSION: Final = 1
_RETRY_S: Final = 1.0
_LONGEST_RETRY_S: Final = 30.0


class AlertStage(Protocol):
    """Adds an alert to a store batch of this component, so that both are stored together."""

    async def __call__(self, batch: StoreBatch, alert: Alert) -> Callable[[], None]:
        """Returns a function to call once the batch is stored; it dispatches the alert."""


class _CaseRow(Struct, frozen=True, kw_only=True):
    v: int = VERSION
    case: EvictionCase


_FORM: Final = RowForm(_CaseRow, VERSION)


def cases_of(rows: Iterable[tuple[str, bytes]]) -> list[EvictionCase]:
    """The cases in the rows of `state.schema.EVICTIONS`; an unreadable row is logged and left out."""
    cases = []
    for key, body in rows:
        try:
            row = _FORM.decode(body)
            if row is None:
                _LOG.warning("an eviction was stored by a newer version; not used", key=key)
                continue
            cases.append(row.case)
        except ValueError as exc:
            _LOG.warning("cannot read a stored eviction", key=key, error=str(exc))
    return cases


@final
class EvictionJournal:
    """The cases of evictions in the store. All disk work uses the store's thread limiter."""

    def __init__(self, store: Store, lane: trio.CapacityLimiter, stage: AlertStage) -> None:
        self._store = store
        self._lane = lane
        self._stage = stage
        self._held = MirroredRows(store, EVICTIONS, _FORM)
        self._written: dict[str, _CaseRow] = {}
        self.problem: str | None = None

    async def load(self) -> list[EvictionCase]:
        """The cases of earlier runs. Errors: `StoreError`."""
        rows = await in_worker(self._store.rows, EVICTIONS, limiter=self._lane)
        cases = cases_of(rows)
        self._written = {case.order.id: _CaseRow(case=case) for case in cases}
        return cases

    async def write(self, case: EvictionCase, *alerts: Alert) -> None:
        """Returns when the case and its alert are durable: until then no action may be taken.

        Errors: none. Writing is repeated until the store takes it; `problem` has the reason.
        """
        batch, row = StoreBatch(), _CaseRow(case=case)
        self._held.put(batch, case.order.id, row)
        # Once each: the very same alert staged again would be none.
        stored = [await self._stage(batch, alert) for alert in alerts]
        pause_s = _RETRY_S
        while not await self._apply(batch):
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)
        self._written[case.order.id] = row
        for tell in stored:
            tell()

    async def forget(self, orders: Iterable[str]) -> None:
        """Remove expired rows. If the store fails they remain until the next time."""
        batch, gone = StoreBatch(), tuple(orders)
        for order in gone:
            self._held.put(batch, order, None)
        if batch and await self._apply(batch):
            for order in gone:
                self._written.pop(order, None)

    async def _apply(self, batch: StoreBatch) -> bool:
        try:
            await in_worker(self._held.write, batch, lambda: dict(self._written), limiter=self._lane)
        except StoreError as exc:
            if self.problem is None:
                _LOG.warning("evictions paused, the store is not writable", error=str(exc))
            self.problem = f"evictions paused, the store is not writable: {exc}"
            return False
        if self.problem is not None:
            _LOG.info("evictions resumed: the store is writable again")
        self.problem = None
        return True


def thaw_killed(hierarchy: Hierarchy, store: Store) -> tuple[list[str], list[str]]:
    """Thaw every pod that was being killed when the daemon ended; as `thaw`. A pod that runs is not touched."""
    # Not on nodes that never evict.
    from cgroupfs.subtree import Subtree

    done: list[str] = []
    failed: list[str] = []
    try:
        cases = cases_of(store.rows(EVICTIONS))
    except StoreError as exc:
        return done, [f"cannot read the stored evictions: {exc}"]
    for case in cases:
        if not case.open or case.step is not EvictionStep.KILL or case.boot != store.boot:
            continue
        group = case.target.group
        try:
            with Subtree.open(hierarchy, group, case.target.inodes) as tree:
                thawed = tree.thaw()
                if thawed and tree.thaw():
                    failed.append(f"{group}: still frozen: it was thawed, and is frozen again")
                elif thawed:
                    done.append(group)
                if tree.missing:
                    failed.append(f"{group}: groups in it may still be frozen: {tree.missing}")
        except CgroupError as exc:
            failed.append(f"{group}: still frozen: {exc}")
    return done, failed
