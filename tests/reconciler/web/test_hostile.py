"""Whatever a client sends ends its own connection at most: a corpus, and random bytes against the real server."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Self

import h11
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from reconciler.web import connection
from reconciler.web.answers import Answers
from reconciler.web.app import control_app
from reconciler.web.interface import RestoreRequest
from reconciler.web.limits import ClientLimits, HttpCounts, Rate
from reconciler.web.server import WebServer, listen_unix
from tests.examples import examples
from tests.fakes.web import FakeControl, FakeShown
from tests.reconciler.web.site import LIVES, exchange, raw, raw_unix, serving

HOST = b"Host: localhost\r\n"
CHUNKED = HOST + b"Transfer-Encoding: chunked\r\n\r\n"
LONG = b"a" * 20_000

HEALTH = b"GET /healthz HTTP/1.1\r\n" + HOST
RESTORE = b"POST /restore HTTP/1.1\r\n"

CORPUS = {
    "a chunk's size is no number": RESTORE + CHUNKED + b"zz\r\n\r\n",
    "a chunk's size on a read": b"GET /healthz HTTP/1.1\r\n" + CHUNKED + b"zz\r\n\r\n",
    "a chunk's size on the metrics": b"GET /metrics HTTP/1.1\r\n" + CHUNKED + b"zz\r\n\r\n",
    "a chunk's size on the state": b"GET /state HTTP/1.1\r\n" + CHUNKED + b"zz\r\n\r\n",
    "a chunk's size without an end": RESTORE + CHUNKED + b"1" * 5000,
    "a chunk's size of 5000 digits": RESTORE + CHUNKED + b"1" * 5000 + b"\r\n",
    "a chunk that is longer than it says": RESTORE + CHUNKED + b"1\r\nabc\r\n0\r\n\r\n",
    "trailers that are none": RESTORE + CHUNKED + b"0\r\n\x00\r\n\r\n",
    "two lengths": RESTORE + HOST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nx",
    "a length and chunks": b"POST /restore HTTP/1.1\r\nContent-Length: 1\r\n" + CHUNKED + b"0\r\n\r\n",
    "a length below zero": RESTORE + HOST + b"Content-Length: -1\r\n\r\n",
    "a length of 5000 digits": RESTORE + HOST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
    "another transfer coding": RESTORE + HOST + b"Transfer-Encoding: gzip\r\n\r\n",
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\xff" * 40,
    "http/2, then nothing": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "h2c": HEALTH + b"Connection: upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\nx",
    "h2c, settings that are none": HEALTH + b"Connection: upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: !\r\n\r\n",
    "websocket": HEALTH
    + b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x\r\n\r\n"
    + b"\x81\xff" * 9,
    "connect": b"CONNECT localhost:1 HTTP/1.1\r\n" + HOST + b"\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
    "nothing but zeros": b"\x00" * 100,
    "ssh": b"SSH-2.0-OpenSSH_9.2\r\n",
    "http/0.9": b"GET /\r\n\r\n",
    "http/9.9": b"GET /healthz HTTP/9.9\r\n" + HOST + b"\r\n",
    "no host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "two hosts": HEALTH + HOST + b"\r\n",
    "a name with a space": HEALTH + b"a b: c\r\n\r\n",
    "a folded line": HEALTH + b"a: b\r\n c\r\n\r\n",
    "a zero in a value": HEALTH + b"a: \x00\r\n\r\n",
    "a long line": HEALTH + b"a: " + LONG + b"\r\n\r\n",
    "a long target": b"GET /" + LONG + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "a long query": b"GET /state?" + b"&a" * 5000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "many lines": HEALTH + b"a:b\r\n" * 3000 + b"\r\n",
    "no utf-8 in the path": b"GET /%ff%fe%00 HTTP/1.1\r\n" + HOST + b"\r\n",
    "raw bytes in the path": b"GET /\xff\xfe HTTP/1.1\r\n" + HOST + b"\r\n",
    "no utf-8 in the query": b"GET /state?section=%ff&format=%80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "another target": b"GET http://elsewhere/state HTTP/1.1\r\n" + HOST + b"\r\n",
    "a star": b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n",
    "a method that is none": b"\xc3\xa9 / HTTP/1.1\r\n" + HOST + b"\r\n",
    "accept": b"GET /metrics HTTP/1.1\r\n"
    + HOST
    + b"Accept: application/openmetrics-text;version=9."
    + b"9" * 5000
    + b"\r\n\r\n",
    "pipelined": (HEALTH + b"\r\n") * 50,
    "pipelined behind a body": b"POST /reload HTTP/1.1\r\n"
    + HOST
    + b"Content-Length: 2\r\n\r\n{}GET / HTTP/1.1\r\n\r\n",
    "half a header": b"GET /healthz HTTP/1.1\r\nHost: loc",
    "half a body": RESTORE + HOST + b"Content-Length: 100\r\n\r\n{",
    "expect": RESTORE + HOST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n",
    "nothing": b"",
}
"""What clients that are broken or hostile send, by what is wrong with it."""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "IDLE_S", 0.3)
    monkeypatch.setattr(connection, "PIECE_S", 0.001)
    monkeypatch.setattr("reconciler.web.app.BODY_DEADLINE_S", 0.3)


@pytest.mark.parametrize("sent", CORPUS.values(), ids=CORPUS)
async def test_a_connection_that_is_hostile_ends_alone(tmp_path: Path, sent: bytes) -> None:
    async with serving(tmp_path) as site:
        for ask in (raw, raw_unix):
            answer = await ask(site, sent)
            assert not answer or answer.startswith(b"HTTP/1.1 "), "no other protocol is spoken"
            assert answer[9:12] not in {b"500", b"503"}, "a client's mistake is not ours"
        assert (await raw(site, LIVES)).startswith(b"HTTP/1.1 200")
        assert (await raw_unix(site, LIVES)).startswith(b"HTTP/1.1 200")
        for listener in ("tcp", "socket"):
            name = f'bypassd_http_connections_aborted_total{{listener="{listener}",reason="fault"}}'
            assert await site.metric(name) == 0


async def test_a_reset_at_any_place_ends_one_connection(tmp_path: Path) -> None:
    request = b"POST /restore HTTP/1.1\r\n" + HOST + b"Content-Length: 20\r\n\r\n" + b" " * 20
    async with serving(tmp_path) as site:
        for at in (1, 30, 60, 75):
            stream = await trio.open_tcp_stream("127.0.0.1", site.port)
            await stream.send_all(request[:at])
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stream.socket.close()
            assert (await raw(site, LIVES)).startswith(b"HTTP/1.1 200")


async def test_a_peer_that_goes_before_its_answer_is_no_failure_of_the_app(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as site:
        site.shown.pods = {"big": "x" * (4 << 20)}
        stream = await trio.open_unix_socket(site.path)
        await stream.send_all(b"GET /state HTTP/1.1\r\n" + HOST + b"\r\n")
        await stream.receive_some(10)
        await stream.aclose()
        await site.until('bypassd_http_connections_aborted_total{listener="socket",reason="reset"}')
    assert caplog.records == []


@pytest.mark.parametrize(
    ("target", "status"), [(b"/" + b"a" * 9000, 414), (b"*", 400), (b"/state?" + b"a" * 2000, 414)]
)
async def test_a_refused_head_request_is_answered_without_a_body(tmp_path: Path, target: bytes, status: int) -> None:
    async with serving(tmp_path) as site:
        answer = await raw(site, b"HEAD " + target + b" HTTP/1.1\r\n" + HOST + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert answer.endswith(b"\r\n\r\n")
        assert not await site.metric('bypassd_http_connections_aborted_total{listener="tcp",reason="fault"}')


async def test_a_refusal_after_a_head_request_has_its_body(tmp_path: Path) -> None:
    async with serving(tmp_path) as site:
        stream = await trio.open_tcp_stream("127.0.0.1", site.port)
        await stream.send_all(b"HEAD /healthz HTTP/1.1\r\n" + HOST + b"\r\n")
        assert b" 200 " in await stream.receive_some(1000)
        assert b'{"error":' in await exchange(stream, b"GET / HTTP/1.1\r\nHost", 60)


async def test_a_peer_that_goes_while_its_body_is_read_is_no_failure_of_the_app(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as site:
        stream = await trio.open_unix_socket(site.path)
        await stream.send_all(CORPUS["expect"])
        await trio.sleep(0.05)
        # With the interim answer unread: to the server this is a reset.
        await stream.aclose()
        await site.until('bypassd_http_connections_aborted_total{listener="socket",reason="reset"}')
    assert caplog.records == []


async def test_what_is_refused_is_counted_by_its_reason(tmp_path: Path) -> None:
    async with serving(tmp_path) as site:
        for name, status in (("tls", b"400"), ("many lines", b"431"), ("half a header", b"408")):
            assert (await raw(site, CORPUS[name]))[9:12] == status
        for reason in ("malformed", "too large", "timeout"):
            assert await site.metric(f'bypassd_http_connections_aborted_total{{listener="tcp",reason="{reason}"}}') == 1
        assert await site.metric('bypassd_http_requests_total{code="431",listener="tcp"}') == 1


async def test_a_header_of_thousands_of_lines_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    real = h11.Connection.receive_data

    def receive_data(self: h11.Connection, data: bytes) -> None:
        parsed.append(len(data))
        real(self, data)

    monkeypatch.setattr(h11.Connection, "receive_data", receive_data)
    async with serving(tmp_path) as site:
        assert (await raw(site, CORPUS["many lines"]))[9:12] == b"431"
    assert parsed == []


async def test_a_client_that_sends_byte_by_byte_has_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    real = trio.SocketStream.receive_some

    async def counted(self: trio.SocketStream, most: int | None = None) -> bytes | bytearray:
        data = await real(self, most)
        reads.append(len(data))
        return data

    async with serving(tmp_path) as site:
        stream = await trio.open_tcp_stream("127.0.0.1", site.port)
        monkeypatch.setattr(trio.SocketStream, "receive_some", counted)
        with contextlib.suppress(trio.BrokenResourceError):
            for letter in LIVES[:-2] + b"a: " + b"a" * 200:
                await stream.send_all(bytes([letter]))
                await trio.sleep(0.002)
        await stream.aclose()
        assert 0 < len(reads) <= connection.MAX_PIECES


class Fuzzed:
    """The server with the controls in a thread of its own; it stays up for all examples."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "fuzzed")
        self.counts = HttpCounts()
        self.ended: BaseException | None = None
        self._up = threading.Event()
        self._scope = trio.CancelScope()
        self._token: trio.lowlevel.TrioToken | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(10)
        return self

    def __exit__(self, *ignored: object) -> None:
        if self._thread.is_alive() and self._token is not None:
            self._token.run_sync_soon(self._scope.cancel)
        self._thread.join()

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as exc:  # noqa: BLE001  (the test looks at it)
            self.ended = exc

    async def _main(self) -> None:
        shown = FakeShown()
        app = control_app(shown, Answers(shown, self.counts), FakeControl())
        fast = Rate(1e6, 1000)
        limits = ClientLimits(64, requests=fast, by_client=fast, accepts=fast)
        server = WebServer(app, partial(listen_unix, self.path), limits, name="socket", counts=self.counts)
        self._token = trio.lowlevel.current_trio_token()
        with self._scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(server.run)
                self._up.set()

    def ask(self, *pieces: bytes, pause_s: float = 0.0) -> bytes:
        answer = b""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(60)
            client.connect(self.path)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for piece in pieces:
                    client.sendall(piece)
                    time.sleep(pause_s)
                client.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while part := client.recv(1 << 16):
                    answer += part
        return answer


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    before = connection.IDLE_S, connection.PIECE_S
    connection.IDLE_S, connection.PIECE_S = 0.3, 0.001  # type: ignore[misc]
    with Fuzzed(tmp_path_factory.mktemp("fuzz")) as server:
        yield server
    connection.IDLE_S, connection.PIECE_S = before  # type: ignore[misc]


BROKEN_CHUNKS = [
    (b"zz\r\n",),
    (b"5\r\nhello\r\n", b"zz\r\n"),
    (b"5\r\nhelloXX", b"\r\n"),
    (b"-1\r\n",),
    (b"5;" + LONG,),
]


@pytest.mark.parametrize("pause_s", [0, 0.0005, 0.001, 0.005])
@pytest.mark.parametrize("chunks", BROKEN_CHUNKS, ids=range(len(BROKEN_CHUNKS)))
def test_a_body_that_breaks_while_its_request_is_answered(
    fuzzed: Fuzzed, chunks: tuple[bytes, ...], pause_s: float
) -> None:
    """Two tasks that sent on one connection, an answer and an error's, ended the component in one of 20 tries."""
    for line in (b"GET /healthz", b"POST /healthz", b"GET /metrics", b"GET /state", b"POST /restore", b"GET /nothing"):
        for _ in range(5):
            fuzzed.ask(line + b" HTTP/1.1\r\n" + CHUNKED, *chunks, pause_s=pause_s)
    assert fuzzed.ask(LIVES).startswith(b"HTTP/1.1 200")
    assert fuzzed.counts.aborted["socket", "fault"] == 0


TOKENS = st.sampled_from(
    [
        *(b"GET", b"POST", b"HEAD", b"DELETE", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b" ", b"\r\n", b"\n", b"\r\n\r\n"),
        *(b"/state", b"/holds", b"/holds/node", b"/metrics", b"?section=", b"%ff", b"*", b"HTTP/1.1", b"HTTP/1.0"),
        *(b"Host: a\r\n", b"Transfer-Encoding: chunked\r\n", b"Content-Length: ", b"Connection: upgrade\r\n", b"-1"),
        *(
            b"Upgrade: websocket\r\n",
            b"Expect: 100-continue\r\n",
            b"0\r\n\r\n",
            b"5\r\nhello\r\n",
            b"zz",
            b"\x00",
            b"9" * 30,
        ),
    ]
)
REQUEST = b"POST /holds HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A sound request with some of its bytes replaced, taken away or doubled."""
    data = bytearray(REQUEST)
    for _ in range(draw(st.integers(1, 4))):
        first = draw(st.integers(0, len(data)))
        last = draw(st.integers(first, min(len(data), first + 8)))
        data[first:last] = draw(st.one_of(st.binary(max_size=6), TOKENS, st.just(bytes(data[first:last]) * 2)))
    return bytes(data)


@settings(max_examples=examples(150), deadline=None)
@given(
    pieces=st.lists(
        st.one_of(mutated(), st.lists(TOKENS, max_size=12).map(b"".join), st.binary(max_size=40)), max_size=4
    )
)
def test_random_bytes_never_reach_the_server(fuzzed: Fuzzed, pieces: list[bytes]) -> None:
    answer = fuzzed.ask(*pieces)
    assert not answer or answer.startswith(b"HTTP/1.1 ")
    assert fuzzed.ask(LIVES).startswith(b"HTTP/1.1 200")
    assert fuzzed.ended is None
    assert fuzzed.counts.aborted["socket", "fault"] == 0


async def test_half_a_connection_gets_its_answer(tmp_path: Path) -> None:
    async with serving(tmp_path) as site:
        stream = await trio.open_tcp_stream("127.0.0.1", site.port)
        await stream.send_all(LIVES)
        await stream.send_eof()
        assert (await exchange(stream, b"", 3)).startswith(b"HTTP/1.1 200")


async def test_an_order_whose_sender_has_gone_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped daemon continues minutes later: ``bypassctl`` has reported by then that no daemon answers."""
    order = b'POST /restore HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\n\r\n{"by":"ana"}'
    async with serving(tmp_path) as site:
        stopped = trio.Event()
        original = WebServer._serve

        async def later(self: WebServer, stream: trio.SocketStream, client: str) -> None:
            await stopped.wait()
            await original(self, stream, client)

        with monkeypatch.context() as patch:
            patch.setattr(WebServer, "_serve", later)
            gone = await trio.open_unix_socket(site.path)
            await gone.send_all(order)
            waiting = await trio.open_unix_socket(site.path)
            await waiting.send_all(order.replace(b"ana", b"eve"))
            # It sends no more, and waits for the answer.
            await waiting.send_eof()
            await gone.aclose()
            stopped.set()
            assert (await exchange(waiting, b"", 10)).startswith(b"HTTP/1.1 200")
        await site.until('bypassd_http_connections_aborted_total{listener="socket",reason="given up"}')
        assert site.control.told == [RestoreRequest(by="eve")]
