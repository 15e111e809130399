"""The sockets: loopback TCP, the unix socket (mode 0600) with the controls, and one for a group of readers (0660).

One task accepts, at a bounded rate, and one task serves each connection (`reconciler.web.connection`). Any failure of a
connection is counted and logged at most once per window, and ends that connection.
"""

import grp
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Final, final

import trio

from cgroupfs.errors import AgentError, errno_name
from cgroupfs.log import get_log
from reconciler.web.connection import IDLE_S, Aborted, App, Client, Connection
from reconciler.web.limits import ClientLimits, HttpCounts, LogWindow, client_of
from reconciler.web.trust import ServerTls

BACKLOG: Final = 64
ACCEPT_AGAIN_S: Final = 0.1


class WebError(AgentError):
    """A socket is unavailable: the address is in use, or the directory is missing."""


@final
class WebServer:
    """A component: one app on one listening socket. ``started()`` when it listens.

    ``name`` is the listener's in logs and metrics. Errors: `WebError`; the supervisor tries again, so a port that
    another process holds is taken when it gets free.
    """

    def __init__(
        self,
        app: App,
        listen: Callable[[], AbstractContextManager[socket.socket]],
        limits: ClientLimits,
        *,
        name: str,
        counts: HttpCounts,
        tls: ServerTls | None = None,
    ) -> None:
        self._app = app
        self._listen = listen
        self._limits = limits
        self._name = name
        self._counts = counts
        self._tls = tls
        self._log = get_log("web", listener=name)
        self._window = LogWindow(self._log)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; what is being sent then may take `SEND_S` more."""
        if self._tls is not None:
            # Without a usable certificate this is an error of the component, not of each connection.
            self._tls.context()
        with self._listen() as listening:
            listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
            async with trio.open_nursery() as nursery:
                self._log.info("serving", at=_where(listening))
                task_status.started()
                await self._accept(listener, nursery)

    async def _accept(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        while True:
            # Before and not after: a connection that waits in the kernel's queue costs nothing.
            bucket = self._limits.accepts
            if wait_s := bucket.wait_s(trio.current_time()):
                await trio.sleep(wait_s)
            try:
                stream = await listener.accept()
            except OSError as exc:
                # No descriptor is free, say: those in use are given back when their connections end.
                self._window.warning(
                    "cannot accept a connection", trio.current_time(), errno=errno_name(exc.errno or 0)
                )
                await trio.sleep(ACCEPT_AGAIN_S)
                continue
            bucket.take(trio.current_time())
            try:
                client = client_of(stream.socket)
            except OSError:
                # It was reset while it waited in the queue.
                client = ""
            if client and self._limits.open(client):
                nursery.start_soon(self._serve, stream, client)
                continue
            self._counts.aborted[self._name, "too many" if client else "reset"] += 1
            await trio.aclose_forcefully(stream)

    async def _serve(self, stream: trio.SocketStream, client: str) -> None:
        """One connection, guarded: no failure of it leaves this function."""
        reason = ""
        try:
            tls = await self._encrypted(stream)
            await Connection(self._app, stream, Client(self._name, client, self._limits, self._counts), tls).run()
        except Aborted as exc:
            reason = str(exc)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            reason = "reset"
        except Exception as exc:  # noqa: BLE001  (every mistake of ours or a library's is only this connection's)
            reason = "fault"
            self._window.failure("a connection failed", exc, trio.current_time(), client=client)
        finally:
            self._limits.close(client)
            if reason:
                self._counts.aborted[self._name, reason] += 1
            await _close(stream)

    async def _encrypted(self, stream: trio.SocketStream) -> "trio.SSLStream[trio.SocketStream] | None":
        """TLS over a new connection, after its handshake; None: this listener has none. Errors: `Aborted`."""
        if self._tls is None:
            return None
        # As HTTPS has it: peers close without TLS's own goodbye, and need none.
        made = trio.SSLStream(stream, self._tls.context(), server_side=True, https_compatible=True)
        with trio.move_on_after(IDLE_S) as scope:
            try:
                await made.do_handshake()
            except trio.BrokenResourceError as exc:
                # A client without TLS, or that does not trust the certificate.
                raise Aborted("tls") from exc
        if scope.cancelled_caught:
            raise Aborted("timeout")
        return made


async def _close(stream: trio.SocketStream) -> None:
    try:
        with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            await stream.send_eof()
    finally:
        await trio.aclose_forcefully(stream)


@contextmanager
def listen_tcp(address: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as made:
        try:
            # After a restart the port still has connections of the one before in TIME_WAIT.
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((address, port))
            made.listen(BACKLOG)
        except OSError as exc:
            raise WebError(f"cannot listen on {address} port {port}: {errno_name(exc.errno)}") from exc
        yield made


@contextmanager
def listen_unix(path: str, group: int | None = None) -> Iterator[socket.socket]:
    """A listening unix socket at ``path``; an existing one is replaced, this one is removed afterwards.

    Its mode is 0600; with a ``group`` (its id) it is that group's, and 0660. Errors: `WebError`.
    """
    # Renamed when its mode is right: at no moment can another user connect, and the process' umask, which all threads
    # share, is not changed. The instance lock excludes another daemon on ``path``.
    temporary = f"{path}.{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as made:
        if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise WebError(f"{path}: exists and is not a socket; unchanged")
        try:
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            # Of a daemon that was killed, whose process id this one has now.
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            made.bind(temporary)
            os.chmod(temporary, 0o600)
            if group is not None:
                _give(temporary, group)
                os.chmod(temporary, 0o660)
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


def _give(path: str, group: int) -> None:
    try:
        os.chown(path, -1, group)
    except PermissionError as exc:
        # Without CAP_CHOWN, which nothing else needs, only a member may do this.
        os.unlink(path)
        raise WebError(f"{path}: EPERM for group {group}: add it to SupplementaryGroups= of the unit") from exc


def group_id(name: str) -> int:
    """The group's id; may query a directory service. A number is an id: a container has no list of groups.

    Errors: `WebError` when no such group exists.
    """
    if name.isdecimal():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError as exc:
        raise WebError(f"no group {name!r}") from exc


def _where(listening: socket.socket) -> str:
    name = listening.getsockname()
    # It was bound under a name of its own, see `listen_unix`.
    return name.removesuffix(f".{os.getpid()}") if isinstance(name, str) else f"{name[0]} port {name[1]}"
