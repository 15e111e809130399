"""The other end of an HTTP/2 connection on a unix socket, which does exactly what a test says, right or wrong."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

import trio
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, RequestReceived, StreamEnded
from h2.settings import SettingCodes, Settings

BEGIN = ((":status", "200"), ("content-type", "application/grpc"))
OK = (("grpc-status", "0"),)


def framed(message: bytes) -> bytes:
    """A message as gRPC sends it."""
    return b"\0" + len(message).to_bytes(4, "big") + message


class Peer:
    """One accepted connection. ``requests`` are headers and body by stream; ``seen`` is every event."""

    def __init__(self, stream: trio.SocketStream, settings: Mapping[SettingCodes, int]) -> None:
        self.stream = stream
        self.http2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self.http2.local_settings = Settings(client=False, initial_values=dict(settings))
        self.http2.initiate_connection()
        self.requests: dict[int, tuple[dict[str, str], bytes]] = {}
        self.asked: list[int] = []
        self.seen: list[Event] = []

    async def flush(self) -> None:
        await self.stream.send_all(self.http2.data_to_send())

    async def read(self) -> bool:
        """Take in the next data; False when the client has closed."""
        await self.flush()
        data = await self.stream.receive_some(65536)
        for event in self.http2.receive_data(data) if data else ():
            self.seen.append(event)
            if isinstance(event, RequestReceived):
                headers = {str(name): str(value) for name, value in event.headers}
                self.requests[event.stream_id] = (headers, b"")
            elif isinstance(event, DataReceived):
                headers, body = self.requests[event.stream_id]
                self.requests[event.stream_id] = (headers, body + event.data)
                self.http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, StreamEnded):
                self.asked.append(event.stream_id)
        await self.flush()
        return bool(data)

    async def asked_for(self) -> int:
        """The stream of the next whole question."""
        while not self.asked:
            if not await self.read():
                raise trio.EndOfChannel
        return self.asked.pop(0)

    async def until(self, kind: type[Event]) -> None:
        """Read until such an event."""
        while not any(isinstance(event, kind) for event in self.seen):
            assert await self.read()

    async def answer(
        self, stream: int, body: bytes = framed(b"yes"), trailers: tuple[tuple[str, str], ...] = OK, http: str = "200"
    ) -> None:
        """Headers, ``body`` as the windows allow, trailers (none: the body ends the stream)."""
        self.http2.send_headers(stream, [(":status", http), ("content-type", "application/grpc+proto")])
        while body:
            room = min(self.http2.local_flow_control_window(stream), self.http2.max_outbound_frame_size, len(body))
            if room:
                self.http2.send_data(stream, body[:room], end_stream=room == len(body) and not trailers)
                body = body[room:]
                await self.flush()
            else:
                assert await self.read()
        if trailers:
            self.http2.send_headers(stream, trailers, end_stream=True)
        await self.flush()

    async def serve(self) -> None:
        """Answer every request with its content."""
        while True:
            stream = await self.asked_for()
            await self.answer(stream, self.requests[stream][1])


Behaviour = Callable[[Peer], Awaitable[None]]


class Peers:
    """Listens on ``path``; the first connection meets the first behaviour and so on, the last one again and again."""

    def __init__(self, path: Path, *behaviours: Behaviour, settings: Mapping[SettingCodes, int] | None = None) -> None:
        self.path = path
        self.behaviours = list(behaviours)
        self.settings = dict(settings or {})
        self.met: list[Peer] = []

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        sock = trio.socket.socket(trio.socket.AF_UNIX)
        await sock.bind(str(self.path))
        sock.listen()
        task_status.started()
        await trio.serve_listeners(self._meet, [trio.SocketListener(sock)])

    async def _meet(self, stream: trio.SocketStream) -> None:
        behaviour = self.behaviours.pop(0) if len(self.behaviours) > 1 else self.behaviours[0]
        peer = Peer(stream, self.settings)
        self.met.append(peer)
        async with stream:
            with suppress(trio.EndOfChannel, trio.BrokenResourceError):  # the client may leave at any time
                await behaviour(peer)
