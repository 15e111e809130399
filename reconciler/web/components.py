"""The web part as the daemon's components. Its libraries are imported when it starts, in a thread.

They take 7 MiB and 0.2 s: a daemon that is told to serve nothing pays neither, and one that does puts this into its
innermost layer, so that pods are right before the page about them exists.
"""

import os
from functools import partial
from importlib import import_module
from typing import final

import trio

from reconciler.config import Http
from reconciler.supervisor import Component
from reconciler.web.interface import Control, Shown


def components(config: Http, shown: Shown, control: Control, *, root: str = "/") -> list[Component]:
    """What the configuration asks for: one component a socket, so that a port in use takes no controls away."""
    web = _Web(config, shown, control, root)
    made: list[Component] = []
    if config.socket is not None:
        made.append(Component(name="web socket", run=web.socket))
    if config.enabled:
        made.append(Component(name="web", run=web.tcp))
    return made


@final
class _Web:
    """Two lives on one set of modules."""

    def __init__(self, config: Http, shown: Shown, control: Control, root: str) -> None:
        self._config = config
        self._shown = shown
        self._control = control
        self._root = root

    async def socket(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The unix socket, with the controls."""
        await _import()
        from reconciler.web.app import control_app  # noqa: PLC0415
        from reconciler.web.server import WebServer, listen_unix  # noqa: PLC0415

        path = os.path.join(self._root, (self._config.socket or "").lstrip("/"))
        app = control_app(self._shown, self._control)
        await WebServer(app, partial(listen_unix, path), self._config.max_connections).run(task_status=task_status)

    async def tcp(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Loopback TCP, read-only."""
        await _import()
        from reconciler.web.app import read_app  # noqa: PLC0415
        from reconciler.web.server import WebServer, listen_tcp  # noqa: PLC0415

        listen = partial(listen_tcp, self._config.address, self._config.port)
        await WebServer(read_app(self._shown), listen, self._config.max_connections).run(task_status=task_status)


async def _import() -> None:
    """In a thread, so that the loop goes on; what is there already costs nothing."""
    await trio.to_thread.run_sync(import_module, "reconciler.web.app")
    await trio.to_thread.run_sync(import_module, "reconciler.web.server")
