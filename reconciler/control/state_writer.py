"""Makes durable what the agent learns while it works: outcomes, settings in force, pools, pods, holds.

Originals are not written here: they are durable before their first write. Rows written here may be lost in a crash and
are recovered by reading the node, except holds, which are written before they are acknowledged.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Final, final

import trio
from msgspec.structs import replace

from cgroupfs.errors import StoreError
from reconciler.alerts.agent_alerts import STORE_IS_WELL
from reconciler.control.earlier_run import Unexamined
from reconciler.control.node_headroom import NodeHeadroom
from reconciler.control.persistence import POD, POOLS, encoded, plan_row
from reconciler.control.reconciler import Reconciler
from reconciler.control.record import NodeRecord
from reconciler.headroom.report import HEADROOM, HeadroomState
from reconciler.runtime.stints import in_worker
from reconciler.runtime.wakeup import beat_after
from state.model import Pod, Setting
from state.plan import NodePlan
from state.schema import ASSIGNMENTS, META, RUNNING, SETTINGS, UNRECORDED
from state.store import StoreBatch
from state.summary import pod_facts

_FLUSH_S: Final = 2.0
"""A crash loses about so much of the history."""
_CHECK_S: Final = 10.0
"""How often the store is checked for damage."""
_CHECK_ALL_S: Final = 3600.0
"""Damage that leaves no trace in the file's times: the medium's own."""


@final
class StateWriter:
    """Writes what has changed to the store. All disk work uses the store's thread limiter, one thread at a time."""

    def __init__(
        self,
        record: NodeRecord,
        reconciler: Reconciler,
        headroom: NodeHeadroom,
        alert: Callable[[str, str, Setting | None], None],
    ) -> None:
        self._store = store = record.store
        self._ledger = record.ledger
        self._reconciler = reconciler
        self._lane = record.lane
        self._alert = alert
        self._headroom = headroom
        self._holds = record.holds
        self._checked_all = time.monotonic()
        self._generation = store.generation
        self.damage: str | None = None
        """What was found wrong with the store while it was in use, and when; until the daemon ends."""
        self._promised: HeadroomState | None = None
        self._unexamined: Unexamined = frozenset()
        """The row `UNRECORDED` of the store; empty: it has none."""
        self._settings: dict[str, Setting] = {}
        self._plan: NodePlan | None = None
        self._pods: dict[str, Pod] = {}
        self._titles: dict[str, dict[str, object]] = {}
        """By row, what is stored of these pods."""
        self._fresh = True
        self._seen_changes = -1
        self.problem: str | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Flush at intervals, and again at the end; then remove the row by which the next run knows of a kill."""
        task_status.started()
        await self._mark(running=True)
        checked = trio.current_time()
        try:
            while True:
                await self._holds.rows.urgent.wait_until(beat_after(_FLUSH_S))
                if trio.current_time() - checked >= _CHECK_S:
                    checked = trio.current_time()
                    await self.check()
                await self.flush()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
                await self.flush()
                await self._mark(running=False)

    async def _mark(self, *, running: bool) -> None:
        batch = StoreBatch()
        if running:
            batch.put(META, RUNNING, encoded(True))
        else:
            batch.delete(META, RUNNING)
        with contextlib.suppress(StoreError):  # reported by the next flush
            await in_worker(self._store.apply, batch, limiter=self._lane)

    async def check(self) -> None:
        """Check the store for damage by other programs, have it repaired, and log it."""
        now = time.monotonic()
        full = now - self._checked_all >= _CHECK_ALL_S
        if full:
            self._checked_all = now
        elif self._store.is_untouched:
            # The usual case: a thread for it takes ten times as long.
            return
        try:
            wrong = await in_worker(lambda: self._store.check(full=full), limiter=self._lane)
        except StoreError:
            return  # reported by the next flush
        if wrong is not None:
            self.damage = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}: {wrong}"
            self._alert("store", wrong, None)
            self.problem = wrong  # until the next flush has succeeded

    async def flush(self) -> None:
        """Make everything that changed durable. A store that fails is reported once, and tried again."""
        if self._generation != self._store.generation:
            # The store is another file than the one that was written.
            self._generation = self._store.generation
            self._fresh, self._settings, self._plan, self._pods, self._titles = True, {}, None, {}, {}
            self._holds.rewrite()
            await self._mark(running=True)
        changes = self._reconciler.changes
        pending = self._fresh or changes != self._seen_changes or self._ledger.unflushed or self._holds.rows.pending
        promised = self._headroom.report.persisted() != self._promised
        if not (pending or promised) and self.problem is None and self._store.writable:
            return
        batch, settle = self._changes()
        try:
            await in_worker(self._write, batch, limiter=self._lane)
        except StoreError as exc:
            if self.problem is None:
                self._alert("store", str(exc), None)
            self.problem = str(exc)
            return
        settle()
        self._seen_changes = changes
        if self.problem is not None:
            self._alert("store", STORE_IS_WELL, None)
        self.problem = None

    def _write(self, batch: StoreBatch) -> None:
        self._ledger.flush()
        if batch:
            self._store.apply(batch)

    def _changes(self) -> tuple[StoreBatch, Callable[[], None]]:
        """The rows that differ from what was written last, and what to call once they are durable."""
        batch = StoreBatch()
        if self._fresh:
            # What an earlier run, or another store, has there is replaced as a whole.
            batch.clear(SETTINGS)
            batch.clear(ASSIGNMENTS)
        settings, pods, titles = self._settings, self._pods, self._titles
        plan, before = _persisted(self._reconciler.plan), self._plan
        if self._fresh or self._reconciler.changes != self._seen_changes:
            settings = {
                f"{setting.path}:{knob}": setting
                for wanted in self._reconciler.wanted.values()
                for item in wanted.values()
                for knob, setting in item.items()
            }
            _differences(batch, SETTINGS, settings, self._settings)
            pods = dict(self._reconciler.inventory.pods)
            titles = self._titles_of(pods, plan)
            _differences(batch, ASSIGNMENTS, titles, self._titles)
        if plan is not None and (self._fresh or plan != before):
            batch.put(ASSIGNMENTS, POOLS, plan_row(plan))
        promised = self._headroom.report.persisted()
        if promised is not None and (self._fresh or promised != self._promised):
            batch.put(ASSIGNMENTS, HEADROOM, encoded(promised))
        unexamined = self._reconciler.earlier_run.unexamined
        if self._fresh or unexamined != self._unexamined:
            if unexamined is None or unexamined:
                batch.put(META, UNRECORDED, encoded(None if unexamined is None else sorted(unexamined)))
            else:
                batch.delete(META, UNRECORDED)
        if self._fresh:
            self._headroom.row.stage(batch)
        stored = self._holds.rows.stage(batch)

        def settle() -> None:
            stored()
            self._settings, self._plan, self._pods, self._titles, self._fresh = settings, plan, pods, titles, False
            self._promised, self._unexamined = promised, unexamined

        return batch, settle

    def _titles_of(self, pods: Mapping[str, Pod], plan: NodePlan | None) -> dict[str, dict[str, object]]:
        """What the command line shows of a pod while the daemon is down; made again for pods that changed only."""
        pools = plan.pools if plan is not None else None
        titles: dict[str, dict[str, object]] = {}
        for uid, pod in pods.items():
            key = f"{POD}{uid}"
            known = self._titles.get(key)
            pool = pools.pool_of(pod) if pools is not None else None
            if known is None or self._pods.get(uid) is not pod or known["pool"] != pool:
                known = pod_facts(pod, pools)
            titles[key] = known
        return titles


def _persisted(plan: NodePlan | None) -> NodePlan | None:
    """The plan without what is not in the row `POOLS`."""
    if plan is None:
        return None
    return replace(plan, cookies=None, oom_scores=None, idle_threads=None, files={}, capacity=None)


def _differences(batch: StoreBatch, table: str, now: Mapping[str, object], before: Mapping[str, object]) -> None:
    for key, value in now.items():
        known = before.get(key)
        if known is not value and known != value:
            batch.put(table, key, encoded(value))
    for key in before.keys() - now.keys():
        batch.delete(table, key)
