"""Requests and commands to the running daemon, over its unix socket.

The request is written directly: the standard library's client imports TLS and mail headers, 25 ms that every
``bypassctl status`` would pay for one line of HTTP to a process of the same program.
"""

import json
import socket
from typing import Any, Final

from cgroupfs.bounded import digits
from reconciler.cli.exits import CliError, Exit
from reconciler.runtime.format import duration

_CONNECT_S: Final = 2.0
ANSWER_S: Final = 10.0
_LARGEST: Final = 256 * 1024 * 1024
_SAFE: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~/:,@")
_UNUSABLE: Final = frozenset({400, 404, 405, 413})


class Unreachable(CliError):
    """No daemon answers on the socket; the text is a clause such as "no such socket"."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"no answer on {path}: {why}", Exit.UNREACHABLE)
        self.why = why


class Denied(CliError):
    """The socket is there, but this user may not use it: not the same as a daemon that is down."""

    def __init__(self, path: str, group: str | None = None) -> None:
        """``group``: its members may make the request, beside root."""
        way = f" or join group {group}" if group else ""
        super().__init__(f"{path}: permission denied: run with sudo{way}", Exit.UNREACHABLE)


class DaemonRefused(CliError):
    """The daemon refused the request."""

    def __init__(self, status: int, words: str) -> None:
        code = Exit.NOT_FOUND if status == 404 else Exit.USAGE if status in _UNUSABLE else Exit.REFUSED
        super().__init__(f"the daemon: {words}", code)
        self.status = status


def ask(
    path: str, method: str, target: str, body: object = None, *, timeout_s: float = ANSWER_S
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
        parts = result.get("error") if isinstance(result, dict) else None
        raise DaemonRefused(status, str(parts or f"HTTP {status}"))
    if not isinstance(result, dict):
        raise Unreachable(path, f"the answer is not from bypassd ({type(result).__name__})")
    return result


def exchange(
    path: str, method: str, target: str, body: object = None, *, timeout_s: float = ANSWER_S
) -> tuple[int, bytes]:
    """Status and body of one exchange. Errors: `Unreachable`, `Denied`."""
    content = b"" if body is None else json.dumps(body).encode()
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
        raise Unreachable(path, f"no answer within {duration(timeout_s)}") from exc
    except OSError as exc:
        raise Unreachable(path, exc.strerror or str(exc)) from exc
    return _parsed(path, received)


def _all(connection: socket.socket) -> bytes:
    received = bytearray()
    while part := connection.recv(1 << 16):
        received += part
        if len(received) > _LARGEST:
            break
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
