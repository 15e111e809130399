"""One connection: HTTP/1.1 and nothing else, request after request, in one task. An error ends only this connection.

h11 reads and writes the protocol; what it leaves open is bounded here: how long a header may take, in how many pieces
and lines it may come, how long a write to a peer that does not read may take, how many requests a connection may make.
HTTP/2, upgrades and pipelining are not supported.
"""

import re
import select
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from email.utils import formatdate
from typing import Any, Final, NamedTuple, NoReturn, final
from urllib.parse import unquote

import h11
import trio
from starlette.exceptions import HTTPException

from reconciler.web.limits import ClientLimits, HttpCounts

MAX_HEADER: Final = 16 * 1024
MAX_LINES: Final = 100
MAX_TARGET: Final = 8 * 1024
MAX_QUERY: Final = 1024
MAX_PIECES: Final = 16
"""Reads that one header may take: a client that sends byte by byte costs a wake-up for each."""
MAX_REQUESTS: Final = 1000
READ_BYTES: Final = 4 * 1024
PIECE_S: Final = 0.02
"""Between two reads of one header."""
IDLE_S: Final = 5.0
"""Between requests, and until the first one's header is complete."""
SEND_S: Final = 5.0
SLICE: Final = 64 * 1024
"""Bytes of a body that one system call sends."""
ANSWER_S: Final = 60.0
"""From a request's header to its whole answer."""

RETRY_S: Final = 2
_READS: Final = frozenset({b"GET", b"HEAD", b"OPTIONS"})
_NO_REQUEST: Final = "not an HTTP/1.1 request"
_END: Final = re.compile(rb"\n\r?\n")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Aborted(Exception):
    """The connection cannot go on; the text is the reason as it is counted."""


class Client(NamedTuple):
    """The client of a connection, with its counters and limits."""

    listener: str
    name: str
    limits: ClientLimits
    counts: HttpCounts


@final
class Connection:
    """One accepted connection. `run` returns when it is over; the caller closes the stream."""

    def __init__(
        self,
        app: App,
        stream: trio.SocketStream,
        client: Client,
        tls: "trio.SSLStream[trio.SocketStream] | None" = None,
    ) -> None:
        """``stream``: the connection. ``tls``: what is read and written instead, encrypted over it."""
        self._app = app
        self._socket = stream.socket
        self._stream: trio.SocketStream | trio.SSLStream[trio.SocketStream] = tls or stream
        self._scheme = "http" if tls is None else "https"
        self._client = client
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER)
        self._is_head = False
        self._closes = False
        """Whether the connection ends after this response."""
        self._unsent: list[bytes] = []
        self._send_error: Exception | None = None
        """Why the response could not be sent; nothing more is sent then."""

    async def run(self) -> None:
        """Handle requests until either side ends the connection.

        Errors: `Aborted` for what is counted as such; `trio.BrokenResourceError` when the peer has closed; anything
        else is a fault of the app.
        """
        for number in range(1, MAX_REQUESTS + 1):
            request = await self._next_request()
            if request is None:
                return
            self._closes = number == MAX_REQUESTS
            wait_s = self._client.limits.request(self._client.name, trio.current_time())
            if wait_s is None:
                await self._refuse(429, "rate", "too many requests", retry_after_s=RETRY_S)
            elif wait_s:
                await trio.sleep(wait_s)
            if request.method not in _READS and self._has_hung_up():
                # It waited while the daemon could not read it, and its sender has reported a failure: an order is done
                # only while its sender waits for the outcome.
                raise Aborted("given up")
            await self._answer(request)
            if self._closes or self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                return
            self._http.start_next_cycle()

    async def _next_request(self) -> h11.Request | None:
        """The next request with a valid header; None when the peer sends no more."""
        header = bytearray()
        self._is_head = False
        with trio.move_on_after(IDLE_S) as scope:
            for piece in range(MAX_PIECES):
                if piece:
                    await trio.sleep(PIECE_S)
                data = await self._stream.receive_some(READ_BYTES)
                if not data:
                    if header:
                        raise Aborted("malformed")
                    return None
                header += data
                if header[0] < ord("!"):
                    # A TLS hello, for one, has no line's end to wait for.
                    await self._refuse(400, "malformed", _NO_REQUEST)
                end = _END.search(header)
                if (end.end() if end else len(header)) > MAX_HEADER or header.count(b"\n", 0, _end_of(end)) > MAX_LINES:
                    await self._refuse(431, "too large", "the header is too large")
                if end:
                    break
            else:
                await self._refuse(400, "timeout", "the header arrived in too many parts")
        if scope.cancelled_caught:
            if header:
                await self._refuse(408, "timeout", "the header was not complete in time")
            return None
        self._http.receive_data(bytes(header))
        try:
            request = self._http.next_event()
        except h11.RemoteProtocolError as exc:
            await self._refuse(exc.error_status_hint, "malformed", _NO_REQUEST)
        if not isinstance(request, h11.Request):
            await self._refuse(400, "malformed", _NO_REQUEST)
        self._is_head = request.method == b"HEAD"
        path, _, query = request.target.partition(b"?")
        if len(path) > MAX_TARGET or len(query) > MAX_QUERY:
            await self._refuse(414, "too large", "the request target is too long")
        if not path.startswith(b"/"):
            await self._refuse(400, "malformed", "the request target is not a path")
        return request

    def _has_hung_up(self) -> bool:
        """Whether the peer has closed a unix socket. One that has only finished sending still waits for the answer."""
        # TCP does not distinguish the two before an answer is sent; it serves no orders.
        if self._socket.family != socket.AF_UNIX:
            return False
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLHUP)
        return any(events & select.POLLHUP for _, events in poll.poll(0))

    async def _answer(self, request: h11.Request) -> None:
        path, _, query = request.target.partition(b"?")
        local = self._socket.getsockname()
        scope: Message = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": request.http_version.decode(),
            "method": request.method.decode(),
            "scheme": self._scheme,
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": [(bytes(key), bytes(value)) for key, value in request.headers],
            "client": None,
            # The address at which the client reached the daemon, whatever name the header has.
            "server": None if self._socket.family == socket.AF_UNIX else (local[0], local[1]),
        }
        with trio.move_on_after(ANSWER_S) as deadline:
            try:
                await self._app(scope, self._receive, self._send)
            except Exception:
                if self._http.our_state is h11.SEND_RESPONSE:
                    raise
                # The app has answered (500) and logged it.
                raise Aborted("fault") from None
        # No other response: a part of this one may have been sent.
        if deadline.cancelled_caught:
            raise Aborted("timeout")
        if self._send_error is not None:
            raise self._send_error

    # ASGI

    async def _receive(self) -> Message:
        """The next part of the body. Errors: `HTTPException` (400) for one that breaks the protocol or is lost."""
        if self._http.they_are_waiting_for_100_continue:
            self._queue(h11.InformationalResponse(status_code=100, headers=[]))
            await self._flush()
        # A body of thousands of small chunks is thousands of events of one read.
        await trio.lowlevel.checkpoint()
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(bytes(await self._stream.receive_some(READ_BYTES)))
        except h11.RemoteProtocolError as exc:
            self._closes = True
            self._client.counts.aborted[self._client.listener, "malformed"] += 1
            raise HTTPException(400, "the body violates HTTP/1.1") from exc
        except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
            # No response can be sent: `_answer` reports it.
            self._send_error = exc
            raise HTTPException(400, "the peer has closed the connection") from exc
        if isinstance(event, h11.Data):
            return {"type": "http.request", "body": bytes(event.data), "more_body": True}
        if isinstance(event, h11.EndOfMessage):
            return {"type": "http.request", "body": b"", "more_body": False}
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        """ASGI's send. A closed peer is not an error of the app: `_answer` reports it when the app is done."""
        if self._send_error is not None:
            return
        if message["type"] == "http.response.start":
            # The part of a body that the app has not read is not read at all, nor are requests behind this one
            # (pipelining); and a fault of the app is raised again after its response.
            behind = not self._at_end() or bool(self._http.trailing_data[0])
            self._closes = self._closes or behind or message["status"] == 500
            self._start(message["status"], [(bytes(key), bytes(value)) for key, value in message["headers"]])
        elif message["type"] == "http.response.body":
            if message.get("body") and not self._is_head:
                self._queue(h11.Data(data=message["body"]))
            if not message.get("more_body", False):
                self._queue(h11.EndOfMessage())
            try:
                await self._flush()
            except (Aborted, trio.BrokenResourceError, trio.ClosedResourceError) as exc:
                self._send_error = exc

    def _at_end(self) -> bool:
        """Whether the request's body is read."""
        # Of a request without a body h11 reports the end at once.
        if self._http.their_state is h11.SEND_BODY:
            try:
                self._http.next_event()
            except h11.RemoteProtocolError:
                return False
        return self._http.their_state is h11.DONE

    # The wire

    async def _refuse(self, status: int, reason: str, message: str, *, retry_after_s: int | None = None) -> NoReturn:
        """Answer by ourselves, and end. Errors: `Aborted`, always."""
        self._closes = True
        # ``message`` is one of this module's texts, which need no escapes.
        body = f'{{"error":"{message}"}}\n'.encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if retry_after_s is not None:
            headers.append((b"retry-after", str(retry_after_s).encode()))
        # h11 allows a response before a request has been read.
        self._start(status, headers)
        if not self._is_head:
            self._queue(h11.Data(data=body))
        await self._flush()
        raise Aborted(reason)

    def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._client.counts.requests[self._client.listener, str(status)] += 1
        headers.append((b"date", formatdate(usegmt=True).encode()))
        if self._closes:
            headers.append((b"connection", b"close"))
        self._queue(h11.Response(status_code=status, headers=headers))

    def _queue(self, event: h11.Event) -> None:
        """Have it sent by the next `_flush`."""
        # A long body is passed through and not copied: other connections send the same object.
        for piece in self._http.send_with_data_passthrough(event) or ():
            if self._unsent and len(self._unsent[-1]) + len(piece) <= SLICE:
                self._unsent[-1] += piece
            else:
                self._unsent.append(piece)

    async def _flush(self) -> None:
        pieces, self._unsent = self._unsent, []
        # Shielded: a response that is being sent when the daemon ends gets this long, too.
        with trio.move_on_after(SEND_S, shield=True) as scope:
            for piece in pieces:
                view = memoryview(piece)
                for start in range(0, len(view), SLICE):
                    await self._stream.send_all(view[start : start + SLICE])
        if scope.cancelled_caught:
            raise Aborted("slow reader")


def _end_of(end: "re.Match[bytes] | None") -> int:
    """Where a header ends; beyond all bytes where it has not ended yet."""
    return end.end() if end else 1 << 30
