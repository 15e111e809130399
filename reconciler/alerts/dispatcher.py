"""Dispatches alerts: makes incidents of them, stores durable ones first, then offers them to each sink's outbox.

`send` never waits and never fails, whatever state disk and network are in.

**Durable alerts** are in the store until every sink has taken them or has given up: delivered at least once. A row is
written before the first delivery, and removed after the last one.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final, final

import trio
from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.errors import StoreError
from cgroupfs.log import get_log
from reconciler.alerts.agent_alerts import source_alert
from reconciler.alerts.alert import Alert, Severity
from reconciler.alerts.config import AlertsConfig, SinkConfig
from reconciler.alerts.incident import Incident, Incidents, entry, sanitize
from reconciler.alerts.outbox import Outbox
from reconciler.alerts.sample_alert import test_notice, try_sinks
from reconciler.alerts.sink_worker import SinkWorker, rules_of
from reconciler.alerts.sinks.base import AlertSink, SinkSetup
from reconciler.alerts.sinks.table import build as build_sink
from reconciler.runtime.stints import in_worker
from reconciler.runtime.wakeup import WakeUp
from state.rows import MirroredRows, RowForm
from state.schema import META
from state.store import Store, StoreBatch

PREFIX: Final = "alert:"
"""Rows of the store's META table, by incident. An older daemon ignores them."""
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
        """Put the row that `put` would make into a batch of the caller's, so that both are durable together."""
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
                # After a cancellation, too.
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
        # The oldest that is not critical, as rows are in the order of their age; else the oldest.
        others = (key for key in self._rows if key != newest)
        victim = min(others, key=lambda key: self._rows[key].notice.alert.severity is Severity.CRITICAL)
        del self._rows[victim]
        self._dirty.add(victim)
        self.dropped += 1
        if self.dropped == 1:
            self._log.warning("too many pending alerts in the store; the oldest are removed", most=self.most)


FORGET_S: Final = 3600.0
"""An event that did not happen again for so long is another one."""
_RETRY_S: Final = 5.0
_LAST_S: Final = 3.0
_RECENT: Final = 100
"""Incidents in the state document."""


@final
class AlertDispatcher:
    """Makes incidents of alerts and offers them to the sinks. A component; `send` may be called before it runs."""

    def __init__(
        self,
        config: AlertsConfig,
        store: Store,
        lane: trio.CapacityLimiter,
        setup: Callable[[str, SinkConfig], SinkSetup],
        *,
        build: Callable[[SinkSetup], AlertSink] = build_sink,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``setup`` gives what a sink of that name and configuration is made of."""
        self._config = config
        self._store = store
        self._lane = lane
        self._setup = setup
        self._build = build
        self._clock = clock
        self._queue = DurableQueue(store, lane, config.queue, clock)
        self._incidents = Incidents(self._forget_s(config))
        self._couriers: dict[str, SinkWorker] = {}
        self._soon = WakeUp()
        self._nursery: trio.Nursery | None = None
        self._recent: dict[str, Incident] = {}
        self._loaded = False
        self._log = get_log("alerts")
        for name, sink_config in config.sinks.items():
            self._couriers[name] = self._courier(name, sink_config)

    # In

    def send(self, alert: Alert, *, besides: str = "") -> None:
        """Send it to every sink that accepts it, except ``besides``. Durable alerts are for `stage`."""
        notice, fresh = self._take(alert, besides)
        if fresh:
            self._offer(notice)

    def stage(self, batch: StoreBatch, alert: Alert) -> Callable[[], None]:
        """Add a durable alert to a batch of the caller's own, so that both are stored or neither.

        Returns a function to call once the batch is stored, which sends the alert; without that call it is sent by the
        next run at the earliest.
        """
        notice, fresh = self._take(alert, "")
        known = self._queue.rows.get(notice.id)
        # One that was sent before is stored again only as long as a sink has yet to take it.
        to = self._wanting(notice) if fresh else known.to if known is not None else ()
        if to:
            self._queue.stage(batch, notice, to)

        def stored() -> None:
            if fresh:
                if to:
                    self._queue.put(notice, to)
                    for name in set(to) - self._couriers.keys():  # removed meanwhile, by a reload
                        self._queue.acknowledge([notice.id], name)
                self._offer(notice)

        return stored

    # Running

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send until cancelled. Reports its start when an earlier run's alerts are loaded."""
        await self._load()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                for courier in self._couriers.values():
                    nursery.start_soon(courier.run, name=f"alerts to {courier.name}")
                task_status.started()
                await self._write()
            finally:
                self._nursery = None
                # A delivered alert must not be sent again only because the daemon was stopped in an orderly way.
                with trio.CancelScope(shield=True, deadline=trio.current_time() + _LAST_S):
                    await self._queue.flush()

    def reconfigure(self, config: AlertsConfig) -> None:
        """Use a new configuration: removed sinks get nothing more, changed ones keep their pending alerts."""
        before, self._config = self._config, config
        self._queue.most = config.queue
        self._incidents.forget_s = self._forget_s(config)
        ended: list[str] = []
        for name, courier in list(self._couriers.items()):
            now = config.sinks.get(name)
            setup = self._setup(name, now) if now is not None else None
            if setup == courier.setup and before.queue == config.queue:
                continue
            courier.stop()
            del self._couriers[name]
            if now is None:
                self._queue.acknowledge([key for key, row in self._queue.rows.items() if name in row.to], name)
                self._soon.set()
                if courier.reported:
                    ended.append(name)
            else:
                self._start(name, now, courier)
        for name, sink in config.sinks.items():
            if name not in self._couriers:
                self._start(name, sink)
        for name in ended:
            self._tell_of_sink(name, f"alerts to {name}: the sink is no longer configured", well=True)

    async def test(self, only: str | None, by: str) -> Sequence[Mapping[str, object]]:
        """Send a test to each sink (or one) now, around filters and waits; returns the result by sink."""
        notice = test_notice(self._config, by, self._clock())
        couriers = [worker for name, worker in self._couriers.items() if only in {None, name}]
        return await try_sinks([(worker.setup, partial(worker.deliver_once, notice)) for worker in couriers])

    # Status

    def problems(self) -> list[str]:
        texts = [f"alerts to {worker.name}: {worker.problem}" for worker in self._couriers.values() if worker.problem]
        return [*texts, *([self._queue.problem] if self._queue.problem else [])]

    def status(self) -> dict[str, object]:
        """The state document's part: each sink, pending alerts, and the newest ones."""
        now = trio.current_time()
        sinks = [
            {
                "sink": worker.name,
                "kind": worker.setup.config.how,
                "problem": worker.problem or "",
                "waiting": worker.outbox.waiting,
                "late_s": round(worker.outbox.age_s(now), 1),
                **worker.outbox.tally.outcomes,
            }
            for worker in self._couriers.values()
        ]
        waiting = [
            {
                **entry(notice),
                "to": [worker.name for worker in self._couriers.values() if worker.outbox.pending(notice.id)],
            }
            for notice in self._recent.values()
        ]
        pending = [{**entry(row.notice), "to": list(row.to)} for row in self._queue.rows.values()]
        return {"sinks": sinks, "stored": pending, "recent": waiting[::-1]}

    def couriers(self) -> Sequence[SinkWorker]:
        """Those that carry, for the metrics."""
        return tuple(self._couriers.values())

    @property
    def stored(self) -> int:
        return len(self._queue.rows)

    # Within

    def _take(self, alert: Alert, besides: str) -> tuple[Incident, bool]:
        """The incident with this alert; False when this very alert is in it already."""
        labels = {**self._config.labels, **alert.labels}
        alert = sanitize(replace(alert, at_s=alert.at_s or self._clock(), labels=labels))
        notice = self._incidents.take(alert, besides)
        # `Incidents.take` returns the same object for an alert that it has already.
        fresh = self._recent.pop(notice.id, None) is not notice
        self._recent[notice.id] = notice
        if len(self._recent) > _RECENT:
            del self._recent[next(iter(self._recent))]
        return notice, fresh

    def _wanting(self, notice: Incident) -> list[str]:
        return [name for name, courier in self._couriers.items() if courier.outbox.wants(notice)]

    def _offer(self, notice: Incident) -> None:
        now = trio.current_time()
        for name, courier in self._couriers.items():
            courier.outbox.offer(notice, now)
            courier.wake()
            if lost := courier.outbox.lost:
                self._queue.acknowledge(lost, name)
                lost.clear()
            if not courier.outbox.pending(notice.id):
                self._queue.acknowledge([notice.id], name)
        if self._queue.unflushed:
            self._soon.set()

    async def _load(self) -> None:
        """Offer the pending alerts of an earlier run; those that no sink accepts any more are removed."""
        if self._loaded:
            return
        try:
            rows = await in_worker(self._store.rows, META, limiter=self._lane)
        except StoreError as exc:
            # A damaged file has been replaced by now, with every row in it that was whole.
            rows = await in_worker(self._store.rows, META, limiter=self._lane)
            self._log.warning("stored alerts loaded by a second read", error=str(exc))
        self._loaded = True
        self._queue.load(rows)
        now, wall = trio.current_time(), self._clock()
        for key, row in list(self._queue.rows.items()):
            self._incidents.resume(row.notice)
            self._recent.setdefault(key, row.notice)
            for name in row.to:
                courier = self._couriers.get(name)
                if courier is None:
                    self._log.info("stored alert dropped: its sink was removed", id=key, sink=name)
                    self._queue.acknowledge([key], name)
                elif not courier.outbox.pending(key):
                    courier.outbox.offer(row.notice, now, age_s=max(0.0, wall - row.stored_s))
                    if not courier.outbox.pending(key):
                        self._queue.acknowledge([key], name)
        self._soon.set()

    async def _write(self) -> None:
        """Keep the store up to date."""
        while True:
            await self._soon.wait()
            if not await self._queue.flush():
                await self._soon.wait(_RETRY_S)
                self._soon.set()

    def _courier(self, name: str, config: SinkConfig, before: SinkWorker | None = None) -> SinkWorker:
        rules = rules_of(config, self._config.queue)
        outbox = Outbox(name, rules, self._clock() - trio.current_time()) if before is None else before.outbox
        outbox.rules = rules
        return SinkWorker(
            self._setup(name, config),
            outbox,
            self._build,
            settled=self._delivered,
            failing=self._sink_failing,
            reported=before is not None and before.reported,
        )

    def _start(self, name: str, config: SinkConfig, before: SinkWorker | None = None) -> None:
        courier = self._couriers[name] = self._courier(name, config, before)
        if self._nursery is not None:
            self._nursery.start_soon(courier.run, name=f"alerts to {name}")

    def _delivered(self, ids: Sequence[str], sink: str) -> None:
        self._queue.acknowledge(ids, sink)
        if self._queue.unflushed:
            self._soon.set()

    def _sink_failing(self, name: str, error: str | None) -> None:
        message = f"alerts to {name} {'are delivered again' if error is None else f'cannot be delivered: {error}'}"
        self._tell_of_sink(name, message, well=error is None)

    def _tell_of_sink(self, name: str, message: str, *, well: bool) -> None:
        self.send(source_alert(f"sink:{name}", message, {"sink": name}, self._clock(), well=well), besides=name)

    @staticmethod
    def _forget_s(config: AlertsConfig) -> float:
        return max([FORGET_S, *(2 * sink.repeat_s for sink in config.sinks.values())])
