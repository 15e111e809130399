"""Serves the two apps: loopback TCP read-only, and the unix socket (mode 0600) with the controls.

Hypercorn speaks the protocol; the accept loop and the stream are ours, for the limits that it does not have: how many
connections are open, and how long a peer that does not read may keep one. Its own limits are all set here.
"""

import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final, cast, final

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from starlette.applications import Starlette

from cgroupfs.errors import AgentError, errno_name
from reconciler import logs

MAX_HEADER: Final = 16 * 1024
READ_BYTES: Final = 4 * 1024
IDLE_S: Final = 5.0
"""Between requests, and until the first one's header is complete."""
READ_S: Final = 10
SEND_S: Final = 5.0
BACKLOG: Final = 64


class WebError(AgentError):
    """A socket cannot be had: the address is in use, or the directory is missing."""


@final
class WebServer:
    """A component: one app on one listening socket. ``started()`` when it listens.

    Errors: `WebError`; the supervisor tries again, so a port that another process holds is taken when it gets free.
    """

    def __init__(
        self, app: Starlette, listen: Callable[[], AbstractContextManager[socket.socket]], max_connections: int
    ) -> None:
        self._app = app
        self._listen = listen
        self._max_connections = max_connections
        self._log = logs.get("web")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; what is being sent then may take `SEND_S` more."""
        with self._listen() as listening:
            await self._serve(listening, task_status)

    async def _serve(self, listening: socket.socket, task_status: trio.TaskStatus[None]) -> None:
        config = hypercorn_config()
        context = WorkerContext(None)
        app = ASGIWrapper(cast("Any", self._app))  # hypercorn's scope types and starlette's are the same mappings
        open_now = 0

        async def handle(stream: trio.SocketStream) -> None:
            nonlocal open_now
            if open_now >= self._max_connections:
                await trio.aclose_forcefully(stream)
                return
            open_now += 1
            try:
                guarded = cast("Any", GuardedStream(stream))  # it is used as a stream with a socket, nothing more
                await _Connection(app, config, context, cast("Any", {}), guarded)
            finally:
                open_now -= 1

        listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, handle, [listener])
            self._log.info("serving", at=_where(listening))
            task_status.started()


@final
class _Connection(TCPServer):
    """Hypercorn's, but over when the peer has gone: its own waits for the idle time to pass, holding the place."""

    async def _read_data(self) -> None:
        await super()._read_data()
        await self.idle_task.stop()


@final
class GuardedStream:
    """A connection as hypercorn uses it, with an end to waiting for a peer that does not read.

    Hypercorn sends under a shield: without a deadline inside it, one stopped client could keep the daemon from ending.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self.socket = stream.socket

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """As the stream does, a little at a time: a header that arrives whole is not measured, only a part of one."""
        return await self._stream.receive_some(min(max_bytes or READ_BYTES, READ_BYTES))

    async def send_all(self, data: bytes) -> None:
        """As the stream does, but within `SEND_S`."""
        with trio.move_on_after(SEND_S) as scope:
            await self._stream.send_all(data)
        if scope.cancelled_caught:
            raise trio.BrokenResourceError(f"the peer has not read for {SEND_S:g} s")

    async def send_eof(self) -> None:
        """As the stream does."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """As the stream does."""
        await self._stream.aclose()


def hypercorn_config() -> HypercornConfig:
    """Every limit that hypercorn has, explicitly."""
    config = HypercornConfig()
    config.h11_max_incomplete_size = MAX_HEADER
    config.h2_max_concurrent_streams = 8
    config.h2_max_header_list_size = MAX_HEADER
    config.h2_max_inbound_frame_size = 2**14
    config.keep_alive_timeout = IDLE_S
    config.keep_alive_max_requests = 1000
    config.read_timeout = READ_S
    config.max_app_queue_size = 4
    config.websocket_max_message_size = 1024
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = None
    return config


@contextmanager
def listen_tcp(address: str, port: int) -> Iterator[socket.socket]:
    """A listening TCP socket. Errors: `WebError`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as made:
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((address, port))
            made.listen(BACKLOG)
        except OSError as exc:
            raise WebError(f"cannot listen on {address} port {port}: {errno_name(exc.errno)}") from exc
        yield made


@contextmanager
def listen_unix(path: str) -> Iterator[socket.socket]:
    """A listening unix socket of mode 0600 at ``path``; one that is there is replaced, ours is removed afterwards.

    It is made under another name and renamed when its mode is right: at no moment could somebody else connect, and
    the process' umask, which all threads share, stays alone. Whether another daemon lives there is the instance lock's
    matter. Errors: `WebError`.
    """
    temporary = f"{path}.{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as made:
        if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise WebError(f"{path}: exists and is no socket; left alone")
        try:
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            made.bind(temporary)
            os.chmod(temporary, 0o600)
            made.listen(BACKLOG)
            os.rename(temporary, path)
            inode = os.lstat(path).st_ino
        except OSError as exc:
            # A path of more than 107 bytes is refused by Python itself, without an errno.
            raise WebError(f"cannot listen on {path}: {errno_name(exc.errno) if exc.errno else exc}") from exc
        try:
            yield made
        finally:
            with suppress(FileNotFoundError):
                # Not a successor's.
                if os.lstat(path).st_ino == inode:
                    os.unlink(path)


def _where(listening: socket.socket) -> str:
    name = listening.getsockname()
    return name if isinstance(name, str) else f"{name[0]} port {name[1]}"
