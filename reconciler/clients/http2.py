"""One kept HTTP/2 connection to a unix socket, for small calls that many tasks may make at once.

**Without a task of its own.** A task that waits for a response reads for all: one task reads, the others are parked and
check again after each arrival; when the reader has its response, or is cancelled, the next one reads. Processing
received bytes never awaits, so a cancelled call cannot lose half a frame; its stream is reset and the connection stays
usable. The alternative, a background reader, would need a nursery that outlives every call, only to answer pings
between them: if a peer closes the connection because of those, the call is repeated on a new one.

Source: RFC 9113.
"""

import math
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, final

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

Headers = Sequence[tuple[str, str]]

# A peer whose queue is full (of connections, or of bytes) is tried again this often.
FULL_S: Final = 0.01
_CHUNK: Final = 64 * 1024
# So much of an answer arrives without waiting for window updates.
_WINDOW: Final = 1024 * 1024
_AT_ONCE: Final = 64
_SETTINGS_FRAME: Final = b"\4"  # what a server begins with, by its fourth byte


class ConnectionLostError(Exception):
    """The connection ended before the answers were there; the text is the reason."""


@final
class Http2Stream:
    """One call on its stream, and its response so far: all headers and trailers, and the body.

    ``problem``: why the response is incomplete although the connection is usable. With a ``sink`` the body is passed to
    it as it arrives, and only its first ``kept`` bytes stay here; ``length`` counts all of it.
    """

    def __init__(
        self, asked: Headers, body: bytes, *, limit: int, sink: Callable[[bytes], None] | None = None, kept: int = 0
    ) -> None:
        self.asked = asked
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
        """Take in a part of the body."""
        self.length += len(data)
        if self.sink is None:
            self.body += data
        else:
            self.body += data[: max(0, self.kept - len(self.body))]
            self.sink(data)

    def fail(self, why: str) -> None:
        """End it without an answer."""
        self.ended = True
        self.problem = why


class _Protocol(H2Connection):
    # The library remembers so many closed streams, to accept late frames for them; 65536 by default.
    MAX_CLOSED_STREAMS = 256


@final
class Http2Connection:
    """Everything but the waits is synchronous; a failure is recorded in ``lost`` and handled by the waiting tasks.

    Takes over the connected, non-blocking ``sock``.
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
        self.lost: str | None = None
        self.heard_at = -math.inf

    def usable(self) -> bool:
        """Whether it can take another call, after processing what arrived without a call."""
        if self.lost is None and not self._reading:
            self._receive()
        return self.lost is None

    def close(self) -> None:
        """End it; questions under way are lost."""
        if self.lost is None:
            with suppress(H2Error):
                self._protocol.close_connection()
            self._flush()
            self._lose("the connection was closed")

    async def run(self, exchanges: Sequence[Http2Stream]) -> None:
        """Ask, together, and wait until every exchange has ended.

        Errors: `ConnectionLostError`, when that cannot be any more.
        """
        streams: dict[int, Http2Stream] = {}
        try:
            for exchange in exchanges:
                await self._until(self._has_room)
                streams[self._begin(exchange)] = exchange
            await self._until(lambda: all(exchange.ended for exchange in exchanges))
        finally:
            for stream, exchange in streams.items():
                del self._exchanges[stream]
                if exchange.unsent or not exchange.ended:
                    self._reset(stream)

    async def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._flush()
            if self.lost is not None:
                raise ConnectionLostError(self.lost)
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
            self._protocol.send_headers(stream, exchange.asked)
        except H2Error as exc:
            reason = f"cannot send over this connection: {exc}"
            self._lose(reason)
            raise ConnectionLostError(reason) from exc
        self._exchanges[stream] = exchange
        self._feed()
        return stream

    def _feed(self) -> None:
        """Hand over as much of the questions as the peer's windows allow."""
        for stream, exchange in self._exchanges.items():
            while exchange.unsent and not exchange.ended:
                window = self._protocol.local_flow_control_window(stream)
                room = min(window, self._protocol.max_outbound_frame_size)
                if room <= 0:
                    break
                part, exchange.unsent = exchange.unsent[:room], exchange.unsent[room:]
                self._protocol.send_data(stream, part, end_stream=not exchange.unsent)

    def _receive(self) -> None:
        """Take in what has arrived, if anything has."""
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
        elif isinstance(event, StreamReset):
            exchange.fail(f"request cancelled by the server ({_name(event.error_code)})")

    def _reset(self, stream: int) -> None:
        """Report to the peer that this response is not needed any more."""
        if self.lost is None:
            with suppress(H2Error):
                self._protocol.reset_stream(stream, ErrorCodes.CANCEL)
            self._flush()
        if self._wait is not None:
            self._wait.cancel(reason="a waiting question has room now")

    def _flush(self) -> None:
        self._out += self._protocol.data_to_send()
        try:
            while self._out and self.lost is None:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            if self._wait is not None:
                self._wait.cancel(reason="bytes of another question wait for room")
        except OSError as exc:
            self._lose(f"the connection broke: {exc.strerror}")

    def _lose(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()
            self._arrivals.unpark_all()


def _name(code: int | ErrorCodes | None) -> str:
    return code.name if isinstance(code, ErrorCodes) else f"error {code}"


def _text(raw: bytes | str) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
