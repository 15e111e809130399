"""An evictor with pods of plain files, and what tests want to do with it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import trio

from reconciler.alerts.alert import Alert, AlertKind
from reconciler.clients.kube import KubeApi
from reconciler.clients.kube_config import ApiServer
from reconciler.responses.eviction.executor import Evictor
from reconciler.responses.eviction.journal import VERSION, cases_of
from reconciler.responses.means.base import EvictionMethod
from reconciler.responses.means.config import EvictionMeans, RestartRules
from state.eviction import EvictionCase, EvictionOrder, EvictionStep, EvictionTarget
from state.schema import EVICTIONS
from state.store import Store, StoreBatch
from tests.fakes.constants import varied
from tests.fakes.plainpod import PlainNode, PlainPod, order_for
from tests.until import until

CONFIG = varied(EvictionMeans(), margin_s=1.0, restarts=RestartRules(watch_s=0.0), at_once=2)


def row_of(case: EvictionCase) -> bytes:
    """A case's row as `EvictionJournal` stores it."""
    return msgspec.msgpack.encode({"v": VERSION, "case": case})


class Bench:
    """An evictor on a store of its own; its alerts are in ``told``."""

    def __init__(self, directory: Path) -> None:
        (directory / "groups").mkdir()
        self.node = PlainNode(directory / "groups")
        self.path = str(directory / "state.db")
        self.kubelet = directory / "kubelet"
        self.told: list[Alert] = []
        self.why: str | None = None
        self.closing = False
        self.lane = trio.CapacityLimiter(1)
        self.open_store()

    def open_store(self, boot: str = "boot-1") -> None:
        self.store = Store(self.path, boot=boot, retry_s=0.0)

    async def stage(self, batch: StoreBatch, alert: Alert) -> Callable[[], None]:
        assert EVICTIONS in batch.rows
        return lambda: self.told.append(alert)

    def evictor(self, *ways: EvictionMethod, config: EvictionMeans = CONFIG, **more: Any) -> Evictor:
        return Evictor(
            config,
            hierarchy=self.node.hierarchy,
            store=self.store,
            lane=self.lane,
            stage=self.stage,
            api=KubeApi(ApiServer(enabled=False)),
            cri=lambda: None,
            kubelet_dir=str(self.kubelet),
            pods=self.node.pods.get,
            forbidden=lambda _: self.why,
            closing=lambda: self.closing,
            ways=ways,
            **more,
        )

    def rows(self) -> list[EvictionCase]:
        return cases_of(self.store.rows(EVICTIONS))

    def leave(self, case: EvictionCase) -> None:
        """As an earlier run would have left it."""
        batch = StoreBatch()
        batch.put(EVICTIONS, case.order.id, row_of(case))
        self.store.apply(batch)

    def kinds(self) -> list[AlertKind]:
        return [alert.kind for alert in self.told]


async def carried_out(evictor: Evictor, *orders: EvictionOrder) -> tuple[EvictionCase, ...]:
    """Run until every case has ended."""
    async with trio.open_nursery() as nursery:
        await nursery.start(evictor.run)
        for order in orders:
            evictor.submit(order)
        await all_ended(evictor)
        nursery.cancel_scope.cancel()
    return evictor.cases()


async def all_ended(evictor: Evictor) -> None:
    await until(lambda: not any(case.open for case in evictor.cases()))


def left_at(pod: PlainPod, step: EvictionStep, **more: Any) -> EvictionCase:
    inode = pod.directory.stat().st_ino
    uid = pod.directory.name.removeprefix("pod")
    target = EvictionTarget(group=f"/{pod.directory.name}", inodes={str(pod.directory.parent): inode}, grace_s=0.2)
    now = time.time()
    return EvictionCase(order=order_for(uid), target=target, boot="boot-1", step=step, step_s=now, begun_s=now, **more)
