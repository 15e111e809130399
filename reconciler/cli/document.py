"""The daemon's document, and commands to it, over its unix socket; without a daemon, what the store has of it."""

import json
import os
import socket
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from cgroupfs.bounded import digits
from reconciler.cli import places
from reconciler.cli.exits import CliError, Exit
from reconciler.runtime.format import duration
from reconciler.runtime.streams import complain

_CONNECT_S: Final = 2.0
ANSWER_S: Final = 10.0
_LARGEST: Final = 256 * 1024 * 1024
_SAFE: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~/:,@")
_UNUSABLE: Final = frozenset({400, 404, 405, 413})
_BUSY: Final = frozenset({429, 503})
"""The daemon answers other clients now, and this one within seconds."""
_RETRY_S: Final = 2.0


class Unreachable(CliError):
    """No daemon answers on the socket; the text is a clause such as "no such socket". ``path`` None: there is none.

    ``silent``: a process listens on it, which is hung or stopped (SIGSTOP), not gone.
    """

    def __init__(self, path: str | None, why: str, *, silent: bool = False) -> None:
        super().__init__(why if path is None else f"no answer on {path}: {why}", Exit.UNREACHABLE)
        self.why = why
        self.silent = silent

    def end(self, what: str) -> CliError:
        """Of a command that needs the daemon: ``what`` says why, or what to do."""
        what = "a daemon runs that does not answer (systemctl restart bypassd)" if self.silent else what
        return CliError(f"{self}; {what}", self.code)


class Denied(CliError):
    """The socket is there, but this user may not use it: not the same as a daemon that is down."""

    def __init__(self, path: str, group: str | None = None) -> None:
        """``group``: its members may make the request, beside root."""
        way = f" or join group {group}" if group else ""
        super().__init__(f"{path}: permission denied: run with sudo{way}", Exit.UNREACHABLE)


class DaemonRefused(CliError):
    """The daemon refused the request. ``problems``: of a configuration, one a line."""

    def __init__(self, status: int, words: str, problems: Sequence[object] = ()) -> None:
        code = Exit.NOT_FOUND if status == 404 else Exit.USAGE if status in _UNUSABLE else Exit.REFUSED
        super().__init__(f"the daemon: {words}", code, lines=problems)
        self.status = status


def ask(
    path: str, method: str, target: str, body: object = None, *, timeout_s: float | None = None
) -> Any:  # what a JSON answer holds has no static type
    """One exchange; the decoded body of a 2xx. ``target`` is a path in its form on the wire (`quoted`).

    Errors: `Unreachable` when no daemon responds; `Denied`; `DaemonRefused` with the daemon's message.
    """
    status, answer = exchange(path, method, target, body, timeout_s=timeout_s)
    try:
        result = json.loads(answer)
    except ValueError as exc:
        raise Unreachable(path, f"the answer is not from bypassd ({exc})") from exc
    if status // 100 != 2:
        parts = result if isinstance(result, dict) else {}
        raise DaemonRefused(status, str(parts.get("error") or f"HTTP {status}"), parts.get("problems") or ())
    if not isinstance(result, dict):
        raise Unreachable(path, f"the answer is not from bypassd ({type(result).__name__})")
    return result


def exchange(
    path: str, method: str, target: str, body: object = None, *, timeout_s: float | None = None
) -> tuple[int, bytes]:
    """Status and body of one exchange. ``timeout_s`` None: `ANSWER_S`. Errors: `Unreachable`, `Denied`."""
    timeout_s = ANSWER_S if timeout_s is None else timeout_s
    content = b"" if body is None else json.dumps(body).encode()
    # Not by http.client: it imports TLS and mail headers, 25 ms that every ``bypassctl status`` would pay.
    head = (
        f"{method} {target} HTTP/1.1\r\nHost: bypassd\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_CONNECT_S)
            connection.connect(path)
            connection.settimeout(timeout_s)
            connection.sendall(head.encode() + content)
            received = _all(connection)
    except FileNotFoundError as exc:
        raise Unreachable(path, "daemon not running (no such socket)") from exc
    except ConnectionRefusedError as exc:
        raise Unreachable(path, "daemon not running (stale socket)") from exc
    except PermissionError as exc:
        raise Denied(path) from exc
    except TimeoutError as exc:
        raise Unreachable(path, f"no answer within {duration(timeout_s)}", silent=True) from exc
    except BlockingIOError as exc:
        raise Unreachable(path, "the queue of its socket is full", silent=True) from exc
    except OSError as exc:
        raise Unreachable(path, exc.strerror or str(exc)) from exc
    return _parsed(path, received)


def _all(connection: socket.socket) -> bytes:
    received = bytearray()
    while part := connection.recv(1 << 16):
        received += part
        if len(received) > _LARGEST:
            break  # its length shows that it is incomplete
    return bytes(received)


def _parsed(path: str, received: bytes) -> tuple[int, bytes]:
    head, end, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    parts = first.split()
    if (
        not end
        or len(parts) < 2
        or not parts[0].startswith("HTTP/1.")
        or len(parts[1]) != 3
        or digits(parts[1]) is None
    ):
        raise Unreachable(path, "the answer is not HTTP" if received else "connection closed")
    headers = {name.strip().lower(): text.strip() for name, _, text in (line.partition(":") for line in lines)}
    length = headers.get("content-length")
    if length is not None and len(body) < (digits(length) or 0):
        raise Unreachable(path, "the answer is incomplete")
    return int(parts[1]), body


def quoted(text: str) -> str:
    """Text as a part of a request's path; a hold's target may hold any character."""
    return "".join(chr(byte) if byte in _SAFE else f"%{byte:02X}" for byte in text.encode())


SEARCHED: Final = 10_000
"""Rows of the stored history in which those of a pod are looked for; as the daemon does."""
Row = dict[str, Any]
"""A part of the document: what JSON holds has no static type; docs/state.md describes it."""


class FetchedDocument(NamedTuple):
    """The document. ``down``: why it is not the daemon's; None when it is. ``silent``: as of `Unreachable`."""

    body: Row
    down: str | None
    silent: bool = False

    @property
    def live(self) -> bool:
        """True when a running daemon produced it."""
        return self.down is None


def fetch(options: Namespace, sections: Sequence[str] = (), *, say: bool = True, pod: str = "") -> FetchedDocument:
    """The document, with at least the ``sections`` (none: all). With ``say``, a daemon that is down is reported.

    ``pod``: at least what is of the pods that it may mean (names, uids or container ids, with commas between them).
    The store's document has all pods (``pods``, also for ``podnames``); its history only rows with those texts.
    Errors: `CliError` when neither the daemon nor the store is available, or this user may not use the socket.
    """
    where = places.find(options)
    try:
        return FetchedDocument(get(where, _target(sections, pod)), None)
    except Unreachable as exc:
        down, silent = str(exc), exc.silent
    return FetchedDocument(stored(where.store, down, say=say, pod=pod), down, silent)


def fetch_live(options: Namespace, sections: Sequence[str], what: str) -> Row:
    """The document of the running daemon. ``what``: the end of the message where none runs. Errors: `CliError`."""
    try:
        return get(places.find(options), _target(sections))
    except Unreachable as exc:
        raise exc.end(what) from exc


def fetch_again(options: Namespace, sections: Sequence[str], wait: Callable[[float], None]) -> Row:
    """The same for a command that has had an answer before, as of `get_again`."""
    return get_again(places.find(options), _target(sections), wait)


def _target(sections: Sequence[str], pod: str = "") -> str:
    query = [f"section={','.join(sections)}"] if sections else []
    query += [f"pod={quoted(pod)}"] if pod else []
    return "/state" + (f"?{'&'.join(query)}" if query else "")


def get(where: places.AgentPaths, target: str, *, timeout_s: float | None = None) -> Row:
    """GET over root's socket, else the readers'. Errors: as of `ask`."""
    reader = where.reader
    try:
        fields: Row = send(where, "GET", target, timeout_s=timeout_s)
    except Denied:
        if reader is None or not os.path.exists(reader):
            raise
        try:
            fields = ask(reader, "GET", target, timeout_s=timeout_s)
        except Denied as exc:
            raise Denied(reader, _group(reader)) from exc
    return fields


def get_again(where: places.AgentPaths, target: str, wait: Callable[[float], None]) -> Row:
    """GET for a command that has had an answer before.

    Waits (``wait``: seconds) for a daemon that is down or has too much to do, and reports that once. Errors: `CliError`
    for any other refusal.
    """
    waits = False
    while True:
        try:
            return get(where, target)
        except (Unreachable, Denied, DaemonRefused) as exc:
            # Denied: of a daemon that starts, root's socket may be there before the readers'.
            if isinstance(exc, DaemonRefused) and exc.status not in _BUSY:
                raise
            if not waits:
                complain(f"{exc.why if isinstance(exc, Unreachable) else exc}; waiting for the daemon")
            waits = True
            wait(_RETRY_S)


def send(
    where: places.AgentPaths, method: str, target: str, body: object = None, *, timeout_s: float | None = None
) -> Any:  # as of ask
    """A request over root's socket; the decoded answer. Errors: as of `ask`; `Unreachable` where there is none."""
    if where.socket is None:
        raise Unreachable(None, where.absent)
    if timeout_s is not None and timeout_s > ANSWER_S:
        # The work may take minutes; a daemon that does not answer is found in seconds.
        exchange(where.socket, "GET", "/healthz")
    return ask(where.socket, method, target, body, timeout_s=timeout_s)


def _group(path: str) -> str | None:
    """The group whose members may use the readers' socket."""
    import grp  # only for a message

    try:
        gid = os.stat(path).st_gid
        return grp.getgrgid(gid).gr_name if gid else None
    except (OSError, KeyError):
        return None


def stored(path: str, down: str, *, say: bool = True, pod: str = "", history: int = 200) -> Row:
    """The document that the store has. ``down``: why it is not the daemon's. Errors: as of `fetch`."""
    # Here, because SQLite and msgpack cost 15 ms, and mostly the daemon answers.
    from cgroupfs.errors import StoreError
    from state.dump import from_store
    from state.reader import read_dump
    from state.schema import NewerSchemaError

    try:
        # Of one pod, what is in the newest rows may be of others only.
        dump = read_dump(path, history=SEARCHED if pod else history, about=pod.split(",") if pod else ())
        if dump["newer"] is not None:
            complain(str(dump["newer"]))
        body = from_store(dump, time.time())
    except NewerSchemaError as exc:
        raise CliError(str(exc), Exit.REFUSED) from exc
    except StoreError as exc:
        raise CliError(f"{down}; {exc}", Exit.UNREACHABLE) from exc
    if say:
        complain(f"{down}; showing the state file {path}")
    return body


def of_namespace(title: str | None, namespace: str | None) -> bool:
    """Whether what has this title is a pod of the namespace, or in one; ``namespace`` None: whatever it is."""
    return namespace is None or (title or "").startswith(f"{namespace}/")


def setting_statuses(body: Row) -> Iterator[tuple[str, str, Row]]:
    """Every setting with its status, as ``(place, path, setting)``; only the daemon has it.

    ``place``: the pod's title, for a container's group with its name, else the path.
    """
    for group in body.get("directories", ()):
        yield from ((group["path"], group["path"], setting) for setting in group["settings"])
    for pod in body["pods"]:
        yield from ((pod["title"], pod["group"], setting) for setting in pod.get("settings", ()))
        for container in pod.get("containers", ()):
            place = container_title(pod, container)
            yield from ((place, container["group"], setting) for setting in container["settings"])


def container_title(pod: Row, container: Row) -> str:
    """``namespace/name/container``; one without a name by the start of its id."""
    return f"{pod['title']}/{container['name'] or container['id'][:12]}"
