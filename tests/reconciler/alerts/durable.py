"""An alert kept as the eviction's journal does it: staged into a batch, stored, then sent."""

import trio

from reconciler.alerts.alert import Alert
from reconciler.alerts.dispatcher import AlertDispatcher
from reconciler.alerts.service import AlertService
from state.store import Store, StoreBatch


async def keep(to: AlertDispatcher | AlertService, store: Store, lane: trio.CapacityLimiter, alert: Alert) -> None:
    batch = StoreBatch()
    stored = await to.stage(batch, alert) if isinstance(to, AlertService) else to.stage(batch, alert)
    if batch:
        await trio.to_thread.run_sync(store.apply, batch, limiter=lane)
    stored()
