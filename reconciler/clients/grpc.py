"""Unary gRPC calls over a unix socket: all that CRI needs, for a fifth of the memory of gRPC's own library.

That library's import takes 11 MiB of a daemon that may have 50, this module and h2 two. What is added here to h2:
framing, status, deadlines, and connecting again. Only for calls that are harmless when repeated (`UnaryChannel`).

Source: "gRPC over HTTP2" in gRPC's documentation; RFC 9113.
"""

import math
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Final, NamedTuple, final
from urllib.parse import unquote

import trio
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import H2Error
from h2.settings import SettingCodes, Settings

from cgroupfs.errors import SourceError
from reconciler.clients.proto_items import PREFIX
from reconciler.runtime.format import duration
from reconciler.runtime.safe_files import FileRule, UntrustedFileError, check_socket

Headers = Sequence[tuple[str, str]]

# A peer whose queue is full (of connections, or of bytes) is tried again this often.
FULL_S: Final = 0.01
_CHUNK: Final = 64 * 1024
# So much of an answer arrives without waiting for window updates.
_WINDOW: Final = 1024 * 1024
_AT_ONCE: Final = 64
"""Streams at once, where the peer permits more."""
_SETTINGS_FRAME: Final = b"\4"  # what a server begins with, by its fourth byte
_LARGEST: Final = 64 * 1024 * 1024
_LARGEST_READ: Final = 1024 * 1024 * 1024
"""Of an answer that is taken apart as it arrives: a bound on work, not on memory."""
_FRAMES: Final = 256
"""So many frames may arrive until the next answer ends, and one more for each `_FRAME_BYTES`: an answer takes some ten.
A peer that sends more (pings, empty data) keeps the loop busy for nothing: parsing one takes 10 to 30 us."""
_FRAME_BYTES: Final = 256
_FRAME_HEAD: Final = 9


class ConnectionLostError(Exception):
    """The connection ended before the answers were there; the text is the reason."""


@final
class Http2Stream:
    """One call on its stream, and its response so far: all headers and trailers, and the body.

    ``problem``: why the response is incomplete although the connection is usable. With a ``sink`` the body is passed to
    it as it arrives, and only its first ``kept`` bytes remain here; ``length`` counts all of it.
    """

    def __init__(
        self, request: Headers, body: bytes, *, limit: int, sink: Callable[[bytes], None] | None = None, kept: int = 0
    ) -> None:
        self.request = request
        self.unsent = body
        self.limit = limit
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.length = 0
        self.sink = sink
        self.kept = kept
        self.ended = False
        self.problem = ""

    def take(self, data: bytes) -> None:
        self.length += len(data)
        if self.sink is None:
            self.body += data
        else:
            self.body += data[: max(0, self.kept - len(self.body))]
            self.sink(data)

    def fail(self, why: str) -> None:
        self.ended = True
        self.problem = why


class _Protocol(H2Connection):
    # The library remembers so many closed streams, to accept late frames for them; 65536 by default.
    MAX_CLOSED_STREAMS = 256


@final
class FrameCounter:
    """Counts frames before the library parses them."""

    def __init__(self) -> None:
        self._head = b""
        """Of a frame whose head has not arrived whole."""
        self._left = 0
        """Bytes of the present frame that are to arrive."""

    def count(self, data: bytes) -> int:
        """How many frames begin in what arrives now."""
        data, frames, at = self._head + data, 0, self._left
        while at + _FRAME_HEAD <= len(data):
            frames += 1
            at += _FRAME_HEAD + int.from_bytes(data[at : at + 3], "big")
        self._head, self._left = data[at:], max(0, at - len(data))
        return frames


@final
class Http2Connection:
    """A connection without a task of its own. Takes over the connected, non-blocking ``sock``.

    One of the waiting tasks reads for all: the others are parked and check again after each arrival; when the reader
    has its response, or is cancelled, the next one reads. A failure is recorded in ``lost``, and each call raises it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        # The sent bytes are constant and valid: validating them again would be a tenth of a call's cost.
        config = H2Configuration(
            client_side=True, header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False
        )
        self._protocol = _Protocol(config)
        self._protocol.local_settings = Settings(
            client=True,
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW,
                SettingCodes.MAX_HEADER_LIST_SIZE: H2Connection.DEFAULT_MAX_HEADER_LIST_SIZE,
            },
        )
        self._protocol.initiate_connection()
        self._protocol.increment_flow_control_window(_WINDOW)
        self._out = bytearray()
        self._exchanges: dict[int, Http2Stream] = {}
        self._arrivals = trio.lowlevel.ParkingLot()
        self._reading = False
        self._wait: trio.CancelScope | None = None
        self._frames = FrameCounter()
        self._allowance = float(_FRAMES)
        self.lost: str | None = None
        self.heard_at = -math.inf

    def usable(self) -> bool:
        """Whether it can take another call, after processing what arrived without a call."""
        if self.lost is None and not self._reading:
            self._receive()
        return self.lost is None

    def close(self) -> None:
        """End it; calls under way are lost."""
        if self.lost is None:
            with suppress(H2Error):
                self._protocol.close_connection()
            self._flush()
            self._lose("the connection was closed")

    async def run(self, exchanges: Sequence[Http2Stream]) -> None:
        """Send all requests, and wait until every exchange has ended. Errors: `ConnectionLostError`."""
        streams: dict[int, Http2Stream] = {}
        try:
            for exchange in exchanges:
                await self._until(self._has_room)
                streams[self._begin(exchange)] = exchange
            await self._until(lambda: all(exchange.ended for exchange in exchanges))
        finally:
            # Everything but the waits is synchronous, so a cancelled call has sent no half frame: with its stream reset
            # the connection remains usable.
            for stream, exchange in streams.items():
                del self._exchanges[stream]
                if exchange.unsent or not exchange.ended:
                    self._reset(stream)

    async def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._flush()
            if self.lost is not None:
                raise ConnectionLostError(self.lost)
            # No background reader: it would need a nursery that outlives every call, only to answer pings between them,
            # and a peer that closes the connection because of those costs a repeated call.
            if self._reading:
                await self._arrivals.park()
                continue
            self._reading = True
            # No end, but a retry at intervals while bytes wait for room.
            self._wait = trio.CancelScope(deadline=trio.current_time() + FULL_S if self._out else math.inf)
            try:
                with self._wait, suppress(trio.ClosedResourceError):  # closed by another task, which noted why
                    await trio.lowlevel.wait_readable(self._socket)
                self._receive()
            finally:
                self._wait = None
                self._reading = False
                self._arrivals.unpark_all()

    def _has_room(self) -> bool:
        # Before the peer has announced its limit, one.
        most = self._protocol.remote_settings.max_concurrent_streams if self.heard_at > -math.inf else 1
        return self._protocol.open_outbound_streams < min(_AT_ONCE, most)

    def _begin(self, exchange: Http2Stream) -> int:
        if self.lost is not None:
            raise ConnectionLostError(self.lost)
        try:
            stream = self._protocol.get_next_available_stream_id()
            self._protocol.send_headers(stream, exchange.request)
        except H2Error as exc:
            reason = f"cannot send over this connection: {exc}"
            self._lose(reason)
            raise ConnectionLostError(reason) from exc
        self._exchanges[stream] = exchange
        self._feed()
        return stream

    def _feed(self) -> None:
        """Hand over as much of the requests as the peer's windows allow."""
        for stream, exchange in self._exchanges.items():
            while exchange.unsent and not exchange.ended:
                window = self._protocol.local_flow_control_window(stream)
                room = min(window, self._protocol.max_outbound_frame_size)
                if room <= 0:
                    break
                part, exchange.unsent = exchange.unsent[:room], exchange.unsent[room:]
                self._protocol.send_data(stream, part, end_stream=not exchange.unsent)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_CHUNK) if self.lost is None else b""
        except BlockingIOError:
            return
        except OSError as exc:
            self._lose(f"the connection broke: {exc.strerror}")
            return
        if not data:
            self._lose("connection closed by the server")
            return
        if self.heard_at == -math.inf and data[3:4] not in {b"", _SETTINGS_FRAME}:
            # Checked here, because the library would take the text of an HTTP/1 server for a frame of 4 MiB.
            self._lose(f"the answer is not HTTP/2: it begins with {data[:20]!r}")
            return
        self.heard_at = trio.current_time()
        self._allowance += len(data) / _FRAME_BYTES - self._frames.count(data)
        if self._allowance < 0:
            self._lose(f"the server sends too many frames without an answer (more than {_FRAMES})")
            return
        try:
            for event in self._protocol.receive_data(data):
                self._take(event)
            if self.lost is None:
                self._feed()
        except H2Error as exc:
            self._flush()
            self._lose(f"the answer is not HTTP/2: {exc}")
        self._flush()

    def _take(self, event: Event) -> None:
        if isinstance(event, ConnectionTerminated):
            self._lose(f"connection ended by the server ({_name(event.error_code)})")
            return
        # Of a reset stream, too: its data counts for the connection's window (RFC 9113, section 5.1).
        if isinstance(event, DataReceived) and self.lost is None:
            self._protocol.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        exchange = self._exchanges.get(getattr(event, "stream_id", 0))
        if exchange is None or exchange.ended:
            return
        if isinstance(event, (ResponseReceived, TrailersReceived)):
            exchange.headers |= {_text(name): _text(value) for name, value in event.headers}
        elif isinstance(event, DataReceived):
            if exchange.length + len(event.data) <= exchange.limit:
                exchange.take(event.data)
            else:
                exchange.fail(f"the answer is larger than {exchange.limit} bytes")
                exchange.body.clear()
                self._reset(event.stream_id)
        elif isinstance(event, StreamEnded):
            exchange.ended = True
            self._allowance = float(_FRAMES)
        elif isinstance(event, StreamReset):
            exchange.fail(f"request cancelled by the server ({_name(event.error_code)})")

    def _reset(self, stream: int) -> None:
        """Report to the peer that this response is not needed any more."""
        if self.lost is None:
            with suppress(H2Error):
                self._protocol.reset_stream(stream, ErrorCodes.CANCEL)
            self._flush()
        if self._wait is not None:
            self._wait.cancel(reason="a waiting call has room now")

    def _flush(self) -> None:
        self._out += self._protocol.data_to_send()
        try:
            while self._out and self.lost is None:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            if self._wait is not None:
                self._wait.cancel(reason="bytes of another call wait for room")
        except OSError as exc:
            self._lose(f"the connection broke: {exc.strerror}")

    def _lose(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
            # Before the close: it wakes up the task that waits for the socket.
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()
            self._arrivals.unpark_all()


def _name(code: int | ErrorCodes | None) -> str:
    return code.name if isinstance(code, ErrorCodes) else f"error {code}"


def _text(raw: bytes | str) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw


Code = IntEnum(
    "Code",
    "OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS PERMISSION_DENIED "
    "RESOURCE_EXHAUSTED FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED INTERNAL UNAVAILABLE DATA_LOSS "
    "UNAUTHENTICATED",
    start=0,
)


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

    A kept connection may be broken unnoticed: a call that loses it is repeated once on a new one.

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
        """Drop the connection; a call under way loses it. The channel remains usable."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    async def call(self, *calls: UnaryCall, timeout_s: float) -> list[bytes]:
        """The answers to ``calls``, which travel together, in their order.

        Errors: `GrpcStatusError` with the peer's own words; `SourceError` without a socket, a connection, or a response
        in time, or none that is one gRPC message.
        """
        begun = trio.current_time()
        try:
            with trio.fail_after(timeout_s):
                exchanges = await self._run(calls, timeout_s)
        except trio.TooSlowError as exc:
            # A peer without any response may be down for good; a connection with other responses is kept.
            if self._connection is not None and self._connection.heard_at < begun:
                self.close()
            raise self._error(calls, _late(timeout_s)) from exc
        return [self._answer(call, exchange, timeout_s) for call, exchange in zip(calls, exchanges, strict=True)]

    async def _run(self, calls: Sequence[UnaryCall], timeout_s: float) -> list[Http2Stream]:
        again = False
        while True:
            exchanges = [_exchange(call, timeout_s) for call in calls]
            connection = self._connection
            kept = connection is not None and connection.usable()
            if connection is None or not kept:
                connection, kept = await self._connect(calls)
            try:
                await connection.run(exchanges)
            except ConnectionLostError as exc:
                if again or not kept:
                    raise self._error(calls, str(exc)) from exc
                again = True
            else:
                return exchanges

    async def _connect(self, calls: Sequence[UnaryCall]) -> tuple[Http2Connection, bool]:
        """A connection, and whether another call made it meanwhile."""
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
                    raise self._error(calls, f"cannot connect: {exc.strerror or exc}") from exc
            else:
                self._connection = Http2Connection(sock)
                return self._connection, False
            # EAGAIN on a unix socket: the peer's queue of connections is full, and no event reports when it is not.
            await trio.sleep(FULL_S)
            if self._connection is not None and self._connection.usable():
                return self._connection, True

    def _answer(self, call: UnaryCall, exchange: Http2Stream, timeout_s: float) -> bytes:
        code, message = parse_status(exchange)
        if code == Code.DEADLINE_EXCEEDED:
            raise self._error([call], _late(timeout_s))
        if code:
            name = Code(code).name if code in set(Code) else f"status {code}"
            text = " ".join(message.split())[:200]
            raise GrpcStatusError(self._source, f"{self._shown}: {call.method}: {name}: {text}", code)
        if message:
            raise self._error([call], message)
        return bytes(exchange.body[PREFIX:])

    def _error(self, calls: Sequence[UnaryCall], message: str) -> SourceError:
        text = ", ".join(call.method for call in calls)
        return SourceError(self._source, f"{self._shown}: {text}: {message}")


def _exchange(call: UnaryCall, timeout_s: float) -> Http2Stream:
    # The peer's clock runs a little longer, so that the client's ends an unanswered call.
    # Eight digits are the most that a grpc-timeout may have.
    patience_ms = min(math.ceil(timeout_s * 1100), 99_999_999)
    headers = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", call.path),
        (":authority", "localhost"),
        ("grpc-timeout", f"{patience_ms}m"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "bypassd"),
    )
    framed = b"\0" + len(call.message).to_bytes(PREFIX - 1, "big") + call.message
    if call.sink is None:
        return Http2Stream(headers, framed, limit=PREFIX + _LARGEST)
    return Http2Stream(headers, framed, limit=PREFIX + _LARGEST_READ, sink=call.sink(), kept=PREFIX)


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
