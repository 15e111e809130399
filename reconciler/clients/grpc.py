"""Unary gRPC calls over a unix socket: all that CRI needs, for a fifth of the memory of gRPC's own library.

That library's import takes 11 MiB of a daemon that may have 50, this module and h2 two. What is added here to h2:
framing, status, deadlines, and connecting again.

**Repeated calls.** A kept connection may be broken unnoticed. A call that loses such a connection is repeated once on a
new one; so this is only for calls that are harmless when repeated.

Source: "gRPC over HTTP2" in gRPC's documentation.
"""

import math
import socket
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final, NamedTuple, final
from urllib.parse import unquote

import trio

from cgroupfs.errors import SourceError
from reconciler.clients.http2 import FULL_S, ConnectionLostError, Http2Connection, Http2Stream
from reconciler.clients.proto_items import PREFIX
from reconciler.runtime.format import duration
from reconciler.runtime.safe_files import FileRule, UntrustedFileError, check_socket

Code = IntEnum(
    "Code",
    "OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS PERMISSION_DENIED "
    "RESOURCE_EXHAUSTED FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED INTERNAL UNAVAILABLE DATA_LOSS "
    "UNAUTHENTICATED",
    start=0,
)

_LARGEST: Final = 64 * 1024 * 1024
_LARGEST_READ: Final = 1024 * 1024 * 1024
"""Of an answer that is taken apart as it arrives: a bound on work, not on memory."""


class UnaryCall(NamedTuple):
    """One call: ``/package.Service/Method`` and the serialized request.

    ``sink`` makes the receiver of the response's bytes as they arrive, prefix and all; a repeated call makes a new one.
    The response itself is empty then.
    """

    path: str
    message: bytes
    sink: Callable[[], Callable[[bytes], None]] | None = None

    @property
    def method(self) -> str:
        """The last part of the path, for messages."""
        return self.path.rsplit("/", 1)[-1]


@final
class GrpcStatusError(SourceError):
    """The peer answered with a status other than OK; ``code`` is gRPC's number for it."""

    def __init__(self, source: str, message: str, code: int) -> None:
        super().__init__(source, message)
        self.code = code


@final
class UnaryChannel:
    """Calls to one peer; connects at the first call, and again after a lost connection. Many tasks may call at once.

    ``source`` and ``shown`` (the operator's path of the socket) begin every message. ``root_only``: only a socket of
    root's, in directories of root's, on which a process of root's listens.
    """

    def __init__(self, path: str, *, source: str, shown: str, root_only: bool = False) -> None:
        self._root_only = root_only
        self._path = path
        self._source = source
        self._shown = shown
        self._connection: Http2Connection | None = None

    @property
    def connected(self) -> bool:
        """Whether a connection is held that is not known to be lost."""
        return self._connection is not None and self._connection.lost is None

    def close(self) -> None:
        """Drop the connection; a question under way loses it. The channel stays usable."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    async def call(self, *questions: UnaryCall, timeout_s: float) -> list[bytes]:
        """The answers to ``questions``, which travel together, in their order.

        Errors: `GrpcStatusError` with the peer's own words; `SourceError` without a socket, a connection, or a response
        in time, or none that is one gRPC message.
        """
        begun = trio.current_time()
        try:
            with trio.fail_after(timeout_s):
                exchanges = await self._run(questions, timeout_s)
        except trio.TooSlowError as exc:
            # A peer without any response may be down for good; a connection with other responses is kept.
            if self._connection is not None and self._connection.heard_at < begun:
                self.close()
            raise self._error(questions, _late(timeout_s)) from exc
        return [
            self._answer(question, exchange, timeout_s) for question, exchange in zip(questions, exchanges, strict=True)
        ]

    async def _run(self, questions: Sequence[UnaryCall], timeout_s: float) -> list[Http2Stream]:
        again = False
        while True:
            exchanges = [_exchange(question, timeout_s) for question in questions]
            connection = self._connection
            kept = connection is not None and connection.usable()
            if connection is None or not kept:
                connection, kept = await self._connect(questions)
            try:
                await connection.run(exchanges)
            except ConnectionLostError as exc:
                if again or not kept:
                    raise self._error(questions, str(exc)) from exc
                again = True
            else:
                return exchanges

    async def _connect(self, questions: Sequence[UnaryCall]) -> tuple[Http2Connection, bool]:
        """A connection, and whether another question made it meanwhile."""
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                if self._root_only:
                    check_socket(self._path, FileRule.ROOT)
                sock.setblocking(False)
                sock.connect(self._path)
                if self._root_only and (uid := _listener(sock)) != 0:
                    raise UntrustedFileError(self._path, f"a process of uid {uid} listens on it, expected root")
            except OSError as exc:
                sock.close()
                if isinstance(exc, FileNotFoundError):
                    raise SourceError(self._source, f"{self._shown}: no such socket") from exc
                if isinstance(exc, UntrustedFileError):
                    raise SourceError(self._source, f"{self._shown}: not used: {exc.strerror}") from exc
                if not isinstance(exc, BlockingIOError):
                    raise self._error(questions, f"cannot connect: {exc.strerror or exc}") from exc
            else:
                self._connection = Http2Connection(sock)
                return self._connection, False
            # EAGAIN on a unix socket: the peer's queue of connections is full, and no event reports when it is not.
            await trio.sleep(FULL_S)
            if self._connection is not None and self._connection.usable():
                return self._connection, True

    def _answer(self, question: UnaryCall, exchange: Http2Stream, timeout_s: float) -> bytes:
        code, said = parse_status(exchange)
        if code == Code.DEADLINE_EXCEEDED:
            raise self._error([question], _late(timeout_s))
        if code:
            name = Code(code).name if code in set(Code) else f"status {code}"
            text = " ".join(said.split())[:200]
            raise GrpcStatusError(self._source, f"{self._shown}: {question.method}: {name}: {text}", code)
        if said:
            raise self._error([question], said)
        return bytes(exchange.body[PREFIX:])

    def _error(self, questions: Sequence[UnaryCall], message: str) -> SourceError:
        text = ", ".join(question.method for question in questions)
        return SourceError(self._source, f"{self._shown}: {text}: {message}")


def _exchange(question: UnaryCall, timeout_s: float) -> Http2Stream:
    # The peer's clock runs a little longer, so that the client's ends an unanswered call.
    patience_ms = min(math.ceil(timeout_s * 1100), 99_999_999)
    headers = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", question.path),
        (":authority", "localhost"),
        ("grpc-timeout", f"{patience_ms}m"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "bypassd"),
    )
    framed = b"\0" + len(question.message).to_bytes(PREFIX - 1, "big") + question.message
    if question.sink is None:
        return Http2Stream(headers, framed, limit=PREFIX + _LARGEST)
    return Http2Stream(headers, framed, limit=PREFIX + _LARGEST_READ, sink=question.sink(), kept=PREFIX)


def parse_status(exchange: Http2Stream) -> tuple[int, str]:
    """``(status, the peer's words)``; ``(0, what is wrong)`` for what is not gRPC; ``(0, "")`` for a good answer."""
    status = exchange.headers.get("grpc-status")
    if exchange.problem:
        return 0, exchange.problem
    if status is None:
        http, kind = exchange.headers.get(":status"), exchange.headers.get("content-type", "no content type")
        if http == "404":
            return Code.UNIMPLEMENTED, "HTTP 404"
        if http != "200" or not kind.startswith("application/grpc"):
            return 0, f"HTTP {http} with {kind}, not gRPC"
        return 0, "the answer has no status"
    if not (status.isascii() and status.isdigit() and len(status) < 10):
        return 0, f"the answer has the status {status[:20]!r}, expected a number"
    if int(status):
        return int(status), unquote(exchange.headers.get("grpc-message", ""), errors="replace")
    head = bytes(exchange.body[:PREFIX])
    if len(head) < PREFIX or head[0] or exchange.length != PREFIX + int.from_bytes(head[1:], "big"):
        return 0, f"the answer is not a single message: {exchange.length} bytes that begin with {head.hex()!r}"
    return 0, ""


def _listener(sock: socket.socket) -> int:
    """The user id of the process that listens at the other end."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


def _late(timeout_s: float) -> str:
    return f"no answer within {duration(timeout_s)}"
