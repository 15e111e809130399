"""The web part as components of the daemon. Its libraries are imported when it starts, in a thread.

A daemon that serves starts this last, so that pods are reconciled before their page exists.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from socket import socket as Socket  # noqa: N812
from typing import TYPE_CHECKING, final

import trio

from reconciler.config.model import HttpSection
from reconciler.runtime.lazy import import_in_thread
from reconciler.runtime.stints import in_worker
from reconciler.runtime.supervisor import Component
from reconciler.web.answers import ROOT, Answers
from reconciler.web.interface import ControlHandler, StatusProvider
from reconciler.web.limits import ACCEPTS, HANDSHAKES, ClientLimits, HttpCounts

if TYPE_CHECKING:
    from reconciler.web.connection import App
    from reconciler.web.server import WebServer
    from reconciler.web.trust import Hosts, ServerTls


def components(
    config: HttpSection, status: StatusProvider, control: ControlHandler, *, root: str = "/", names: Sequence[str] = ()
) -> list[Component]:
    """The configured components: one a socket, so that a port in use disables no controls.

    ``names``: the node's, by which clients may call over TCP.
    """
    web = _Web(config, status, control, root, names)
    made: list[Component] = []
    if config.socket is not None:
        made.append(Component(name="web socket", run=web.socket))
    if config.reader_group is not None:
        made.append(Component(name="web readers", run=web.readers))
    if config.enabled:
        made.append(Component(name="web", run=web.tcp))
    return made


@final
class _Web:
    """Three components on one set of modules; root's socket has responses of its own."""

    def __init__(
        self, config: HttpSection, status: StatusProvider, control: ControlHandler, root: str, names: Sequence[str]
    ) -> None:
        self._config = config
        self._status = status
        self._control = control
        self._root = root
        self._names = names
        self._counts = HttpCounts()
        self._answers = Answers(status, self._counts)
        # Root's own: no reader's builds and answers are waited for.
        self._for_root = Answers(status, self._counts, ROOT)

    async def socket(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await _import()
        from reconciler.web.app import control_app
        from reconciler.web.server import listen_unix

        app = control_app(self._status, self._for_root, self._control, self._hosts())
        listen = partial(listen_unix, self._path(self._config.socket or ""))
        await self._server(app, listen, "socket").run(task_status=task_status)

    async def readers(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await _import()
        from reconciler.web.app import read_app
        from reconciler.web.server import group_id, listen_unix

        group = await in_worker(group_id, self._config.reader_group or "")
        app = read_app(self._status, self._answers, self._hosts())
        listen = partial(listen_unix, self._path(self._config.reader_socket), group)
        await self._server(app, listen, "readers").run(task_status=task_status)

    async def tcp(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """TCP: health, metrics and the page; with TLS where it has a certificate."""
        await _import()
        from reconciler.web.app import open_app
        from reconciler.web.server import listen_tcp
        from reconciler.web.trust import ServerTls, Token

        config = self._config
        token = Token(self._path(config.token_file)) if config.token_file is not None else None
        app = open_app(
            self._status, self._answers, self._hosts(undotted=False), state=config.state_over_tcp, token=token
        )
        tls = None
        if config.cert_file is not None and config.key_file is not None:
            tls = ServerTls(self._path(config.cert_file), self._path(config.key_file))
        server = self._server(app, partial(listen_tcp, config.address, config.port), "tcp", tls)
        await server.run(task_status=task_status)

    def _hosts(self, *, undotted: bool = True) -> "Hosts":
        from reconciler.web.trust import Hosts

        config = self._config
        names = config.address, os.uname().nodename, *self._names, *config.allowed_hosts
        return Hosts(names, undotted=undotted)

    def _path(self, path: str) -> str:
        return os.path.join(self._root, path.lstrip("/"))

    def _server(
        self,
        app: "App",
        listen: "Callable[[], AbstractContextManager[Socket]]",
        name: str,
        tls: "ServerTls | None" = None,
    ) -> "WebServer":
        from reconciler.web.server import WebServer

        accepts = ACCEPTS if tls is None else HANDSHAKES
        limits = ClientLimits(self._config.max_connections, accepts=accepts)
        return WebServer(app, listen, limits, name=name, counts=self._counts, tls=tls)


async def _import() -> None:
    """In a thread, so that the loop continues; a loaded module costs nothing."""
    # 4 MiB and 0.1 s, which a daemon that is configured to serve nothing saves.
    await import_in_thread("reconciler.web.app")
    await import_in_thread("reconciler.web.server")
