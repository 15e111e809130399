"""The part that reads a control plane's settings, when they are wanted."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import trio

from reconciler.clients.kube import KubeApi
from reconciler.clients.kube_config import ApiServer, NodeSettings
from reconciler.config.model import Config
from reconciler.control.record import NodeRecord
from reconciler.daemon.node_settings import UNUSED, NodeSettingsPart
from state.store import Store
from tests.until import until


async def test_the_stored_settings_are_read_in_the_stores_lane(tmp_path: Path, nursery: trio.Nursery) -> None:
    store, lane = Store(str(tmp_path / "state.db")), trio.CapacityLimiter(1)
    part = NodeSettingsPart(
        Config(apiserver=ApiServer(node_settings=NodeSettings.KOORDINATOR)),
        cast(NodeRecord, SimpleNamespace(store=store, lane=lane)),
        "n1",
        lambda: KubeApi(ApiServer(server="http://127.0.0.1:1")),
        UNUSED,
    )
    begun, ended = trio.Event(), threading.Event()

    def flush() -> None:
        with store._alone():
            trio.from_thread.run_sync(begun.set)
            ended.wait()

    def facts() -> Any:
        return part.facts().get("missing")

    async with trio.open_nursery() as inner:
        inner.start_soon(lambda: trio.to_thread.run_sync(flush, limiter=lane))
        await begun.wait()
        await inner.start(part.run)
        await until(lambda: lane.statistics().tasks_waiting)
        assert facts() is None
        ended.set()
        await until(lambda: facts() is not None)
        inner.cancel_scope.cancel()
    store.close()
