"""One connection to a gRPC peer: what a call sends, and every way in which its answer may fail or wait."""

import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from h2.errors import ErrorCodes
from h2.events import PingAckReceived, SettingsAcknowledged, StreamReset
from h2.exceptions import H2Error
from h2.settings import SettingCodes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cgroupfs.errors import SourceError
from reconciler.clients import grpc
from reconciler.clients.grpc import Code, GrpcStatusError, UnaryCall
from tests.examples import examples
from tests.fakes.http2_peer import BEGIN, OK, Peer, framed
from tests.reconciler.clients.grpcpair import Pair, echo_once, serve


async def test_a_call_is_sent_as_grpc_requires(pair: Pair) -> None:
    peers = await pair.meet(serve)
    assert await pair.ask(timeout_s=2) == b"question"
    ((headers, body),) = peers.met[0].requests.values()
    assert body == b"\0\0\0\0\x08question"
    assert headers == {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/some.Service/Ask",
        ":authority": "localhost",
        "grpc-timeout": "2200m",
        "te": "trailers",
        "content-type": "application/grpc",
        "user-agent": "bypassd",
    }


async def test_questions_share_one_connection_and_answers_keep_their_order(pair: Pair) -> None:
    async def backwards(peer: Peer) -> None:
        for stream in reversed([await peer.asked_for() for _ in range(3)]):
            await peer.answer(stream, peer.requests[stream][1])
        await peer.serve()

    peers = await pair.meet(backwards)
    answers = await pair.channel.call(*(UnaryCall("/s/M", bytes([n])) for n in range(3)), timeout_s=5)
    assert answers == [b"\0", b"\1", b"\2"]
    assert await pair.ask(UnaryCall("/s/M", b"")) == b""
    assert len(peers.met) == 1


async def test_many_tasks_ask_at_once_within_what_the_peer_takes(pair: Pair) -> None:
    most = 0

    async def in_threes(peer: Peer) -> None:
        nonlocal most
        while True:
            streams = [await peer.asked_for()]
            with trio.move_on_after(0.005):
                while True:
                    streams.append(await peer.asked_for())
            most = max(most, len(streams))
            for stream in reversed(streams):
                await peer.answer(stream, peer.requests[stream][1])

    peers = await pair.meet(in_threes, MAX_CONCURRENT_STREAMS=3)
    answers: dict[int, bytes] = {}

    async def ask(number: int) -> None:
        answers[number] = await pair.ask(UnaryCall("/s/M", str(number).encode()), 20)

    await ask(0)  # so that the peer's settings are known
    async with trio.open_nursery() as nursery:
        for number in range(1, 100):
            nursery.start_soon(ask, number)
    assert answers == {number: str(number).encode() for number in range(100)}
    assert most == 3
    assert len(peers.met) == 1


@pytest.mark.parametrize(
    ("trailers", "code", "message"),
    [
        (
            (("grpc-status", "5"), ("grpc-message", "no %22caf%C3%A9%22%0A here")),
            5,
            's: Ask: NOT_FOUND: no "café" here',
        ),
        ((("grpc-status", "13"),), Code.INTERNAL, "s: Ask: INTERNAL: "),
        ((("grpc-status", "99"), ("grpc-message", "%zz%")), 99, "s: Ask: status 99: %zz%"),
        ((("grpc-status", "2"), ("grpc-message", "x" * 999)), 2, f"s: Ask: UNKNOWN: {'x' * 200}"),
    ],
)
@pytest.mark.parametrize("body", [b"", framed(b"ignored")])
async def test_a_status_other_than_ok_is_a_refusal_in_the_peers_words(
    pair: Pair, trailers: tuple[tuple[str, str], ...], code: int, message: str, body: bytes
) -> None:
    async def refuse(peer: Peer) -> None:
        await peer.answer(await peer.asked_for(), body, trailers)
        await peer.serve()

    await pair.meet(refuse)
    with pytest.raises(GrpcStatusError) as caught:
        await pair.ask()
    assert (caught.value.code, str(caught.value)) == (code, f"t: {message}")
    await pair.goes_on()


async def test_an_answer_of_trailers_only_is_understood(pair: Pair) -> None:
    async def refuse(peer: Peer) -> None:
        stream = await peer.asked_for()
        refusal = [*BEGIN, ("grpc-status", "12"), ("grpc-message", "no")]
        peer.http2.send_headers(stream, refusal, end_stream=True)
        await peer.serve()

    await pair.meet(refuse)
    with pytest.raises(GrpcStatusError, match=r"UNIMPLEMENTED: no$"):
        await pair.ask()
    assert await pair.ask() == b"question"


@pytest.mark.parametrize(
    ("body", "trailers", "http", "message"),
    [
        (framed(b"yes")[:-1], OK, "200", "not a single message: 7 bytes that begin with '0000000003'"),
        (framed(b"yes") * 2, OK, "200", "not a single message: 16 bytes"),
        (b"\1" + framed(b"yes")[1:], OK, "200", "not a single message: 8 bytes that begin with '0100000003'"),
        (b"\0\0", OK, "200", "not a single message: 2 bytes"),
        (b"", OK, "200", "not a single message: 0 bytes"),
        (framed(b"yes"), (), "200", "the answer has no status"),
        (framed(b"yes"), (("grpc-status", "-1"),), "200", "the status '-1', expected a number"),
        (framed(b"yes"), (("grpc-status", "9" * 5000),), "200", "the status '99999999999999999999', expected a number"),
        (b"<html>", (), "404", "UNIMPLEMENTED: HTTP 404"),
        (b"<html>", (), "503", r"HTTP 503 with application/grpc\+proto, not gRPC"),
        (framed(b"yes"), (("grpc-status", "4"),), "200", "no answer within 5 s$"),
    ],
)
async def test_what_is_no_good_answer_is_one_clear_error(
    pair: Pair, body: bytes, trailers: tuple[tuple[str, str], ...], http: str, message: str
) -> None:
    async def answer(peer: Peer) -> None:
        await peer.answer(await peer.asked_for(), body, trailers, http)
        await peer.serve()

    await pair.meet(answer)
    with pytest.raises(SourceError, match=f"^t: s: Ask: .*{message}"):
        await pair.ask()
    assert await pair.ask() == b"question"


async def test_a_reset_stream_ends_one_question_and_not_the_connection(pair: Pair) -> None:
    async def reset(peer: Peer) -> None:
        peer.http2.reset_stream(await peer.asked_for(), ErrorCodes.REFUSED_STREAM)
        await peer.serve()

    await pair.meet(reset)
    with pytest.raises(SourceError, match=r"^t: s: Ask: request cancelled by the server \(REFUSED_STREAM\)$"):
        await pair.ask()
    await pair.goes_on()


async def test_a_peer_that_never_answers_costs_the_time_allowed_and_its_connection(pair: Pair) -> None:
    async def nothing(peer: Peer) -> None:
        await trio.sleep_forever()

    await pair.meet(nothing, serve)
    begun = trio.current_time()
    with pytest.raises(SourceError, match=r"^t: s: Ask: no answer within 200 ms$"):
        await pair.ask(timeout_s=0.2)
    assert trio.current_time() - begun < 2
    assert not pair.channel.connected
    await pair.goes_on(2)


async def test_a_peer_that_is_slow_with_one_question_keeps_the_connection(pair: Pair) -> None:
    async def slow_once(peer: Peer) -> None:
        await peer.asked_for()
        await peer.until(StreamReset)
        assert [event.error_code for event in peer.seen if isinstance(event, StreamReset)] == [ErrorCodes.CANCEL]
        await peer.serve()

    await pair.meet(slow_once)
    with pytest.raises(SourceError, match="no answer within"):
        await pair.ask(timeout_s=0.2)
    await pair.goes_on()


async def test_a_cancelled_question_does_not_poison_the_connection(pair: Pair) -> None:
    """Its answer, sent before the peer has heard of the cancellation, is passed over."""
    may_answer = trio.Event()

    async def late(peer: Peer) -> None:
        stream = await peer.asked_for()
        peer.http2.send_headers(stream, BEGIN)
        peer.http2.send_data(stream, framed(b"a late answer")[:7])
        await peer.flush()
        await may_answer.wait()
        # Without reading the reset first, and more than one window of it.
        peer.http2.send_data(stream, framed(b"a late answer")[7:])
        for _ in range(8):
            peer.http2.send_data(stream, bytes(16384))
        peer.http2.send_headers(stream, OK, end_stream=True)
        await peer.flush()
        await peer.serve()

    peers = await pair.meet(late)
    with trio.move_on_after(0.1) as scope:
        await pair.ask()
    assert scope.cancelled_caught
    may_answer.set()
    answers = [await pair.ask(UnaryCall("/s/M", bytes(n))) for n in range(20)]
    assert answers == [bytes(n) for n in range(20)]
    assert len(peers.met) == 1


async def test_a_cancelled_question_makes_room_for_one_that_waits(pair: Pair) -> None:
    async def third_only(peer: Peer) -> None:
        await echo_once(peer)
        await peer.asked_for()
        await peer.asked_for()
        await echo_once(peer)

    await pair.meet(third_only, MAX_CONCURRENT_STREAMS=2)
    await pair.ask()
    second = trio.CancelScope()

    async def give_up() -> None:
        with second:
            await pair.ask()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pair.ask)
        await trio.testing.wait_all_tasks_blocked(0.02)
        nursery.start_soon(give_up)
        await trio.testing.wait_all_tasks_blocked(0.02)
        with trio.fail_after(60):
            async with trio.open_nursery() as third:
                third.start_soon(pair.ask, UnaryCall("/s/M", b"third"))
                await trio.testing.wait_all_tasks_blocked(0.02)
                second.cancel()
        nursery.cancel_scope.cancel()


async def test_when_the_task_that_reads_for_all_is_cancelled_another_reads_on(pair: Pair) -> None:
    event = trio.Event()

    async def third_only(peer: Peer) -> None:
        streams = [await peer.asked_for() for _ in range(3)]
        event.set()
        await peer.until(StreamReset)
        for stream in streams[1:]:
            await peer.answer(stream, peer.requests[stream][1])

    await pair.meet(third_only)
    answers: list[bytes] = []

    async def ask(scope: trio.CancelScope, number: int) -> None:
        with scope:
            answers.append(await pair.ask(UnaryCall("/s/M", bytes([number]))))

    scopes = [trio.CancelScope() for _ in range(3)]
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for number, scope in enumerate(scopes):
                nursery.start_soon(ask, scope, number)
                await trio.testing.wait_all_tasks_blocked(0.02)
            await event.wait()
            scopes[0].cancel()
    assert sorted(answers) == [b"\1", b"\2"]


@pytest.mark.parametrize(("size", "window"), [(0, 1000), (1, 20), (70_000, 1000), (5_000_000, 2**20)])
async def test_long_answers_and_questions_flow_through_the_windows(pair: Pair, size: int, window: int) -> None:
    await pair.meet(serve, INITIAL_WINDOW_SIZE=window)
    await pair.ask()  # so that the peer's settings are known
    message = bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert await pair.ask(UnaryCall("/s/M", message), 20) == message


async def test_a_peer_that_does_not_read_for_a_while_loses_nothing(pair: Pair) -> None:
    async def sleepy(peer: Peer) -> None:
        first = await peer.asked_for()
        await trio.sleep(0.1)
        await peer.answer(first, peer.requests[first][1])
        await trio.sleep(0.2)
        await peer.serve()

    large = 2**30
    peers = await pair.meet(sleepy, INITIAL_WINDOW_SIZE=large)
    answers: list[bytes] = []

    async def ask(message: bytes) -> None:
        answers.append(await pair.ask(UnaryCall("/s/M", message), 20))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, b"first")
        await trio.testing.wait_all_tasks_blocked(0.05)
        peers.met[0].http2.increment_flow_control_window(large)
        await peers.met[0].flush()
        await trio.testing.wait_all_tasks_blocked(0.01)
        nursery.start_soon(ask, bytes(3_000_000))
    assert [len(answer) for answer in answers] == [5, 3_000_000]


async def test_an_answer_that_is_too_long_is_refused_and_the_connection_kept(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc, "_LARGEST", 200_000)

    async def flood(peer: Peer) -> None:
        stream = await peer.asked_for()
        peer.http2.send_headers(stream, BEGIN)
        while not any(isinstance(event, StreamReset) for event in peer.seen):
            with trio.move_on_after(0.001):
                await peer.read()
            with suppress(H2Error):  # the window is used up, or the reset has just come
                peer.http2.send_data(stream, bytes(10_000))
        await peer.serve()

    await pair.meet(flood)
    with pytest.raises(SourceError, match=r"the answer is larger than 200005 bytes"):
        await pair.ask()
    await pair.goes_on()


async def test_settings_and_pings_are_answered_while_a_question_waits(pair: Pair) -> None:
    async def ping(peer: Peer) -> None:
        stream = await peer.asked_for()
        peer.http2.ping(b"pingpong")
        peer.http2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 5})
        await peer.until(PingAckReceived)
        await peer.until(SettingsAcknowledged)
        await peer.answer(stream)
        await peer.serve()

    await pair.meet(ping)
    assert await pair.ask() == b"yes"
    assert await pair.ask() == b"question"


@given(
    st.lists(st.binary(max_size=60) | st.sampled_from([b"\0\0\0\4\0\0\0\0\0", b"\0\0\x04\0\x01\0\0\0\x01"]), max_size=8)
)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_whatever_a_peer_sends_ends_in_a_source_error(parts: list[bytes]) -> None:
    place = Path(tempfile.mkdtemp(prefix="bypassd-grpc-"))
    try:
        async with trio.open_nursery() as nursery:

            async def noise(peer: Peer) -> None:
                for part in parts:
                    await peer.stream.send_all(part)

            pair = Pair(nursery, place)
            await pair.meet(noise)
            with pytest.raises(SourceError):
                await pair.ask(timeout_s=1)
            nursery.cancel_scope.cancel()
    finally:
        shutil.rmtree(place)


async def test_closing_is_harmless_at_any_time(pair: Pair) -> None:
    async def silent(peer: Peer) -> None:
        await echo_once(peer)
        await peer.asked_for()
        await trio.sleep_forever()

    peers = await pair.meet(silent, serve)
    pair.channel.close()
    await pair.ask()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pair.ask)  # on a kept connection: asked again
        await trio.testing.wait_all_tasks_blocked(0.05)
        pair.channel.close()
    assert pair.channel.connected
    assert len(peers.met) == 2
    pair.channel.close()
    pair.channel.close()
    assert not pair.channel.connected


async def test_many_questions_leave_nothing_behind_on_the_connection(pair: Pair) -> None:
    await pair.meet(serve)
    for _ in range(400):
        await pair.ask()
    connection = pair.channel._connection
    assert connection is not None
    assert not connection._exchanges
    assert len(connection._protocol.streams) < 3
    assert len(connection._protocol._closed_streams) <= 256


PING = b"\0\0\x08\x06\0\0\0\0\0" + bytes(8)
EMPTY_DATA = b"\0\0\0\0\0\0\0\0\1"


@pytest.mark.parametrize("frame", [PING, EMPTY_DATA, b"\0\0\0\x0b\0\0\0\0\0"], ids=["ping", "empty data", "unknown"])
async def test_a_peer_that_sends_frames_without_an_answer_costs_a_moment_not_the_timeout(
    pair: Pair, frame: bytes
) -> None:
    async def flood(peer: Peer) -> None:
        await peer.asked_for()
        peer.http2.send_headers(1, BEGIN)
        await peer.flush()
        while True:
            await peer.stream.send_all(frame * 1000)

    peers = await pair.meet(flood)
    begun = time.process_time()
    with pytest.raises(SourceError, match=r"s: Ask: the server sends too many frames without an answer"):
        await pair.ask(timeout_s=60)
    assert time.process_time() - begun < 2
    assert len(peers.met) == 1
    assert not pair.channel.connected


async def test_pings_beside_each_answer_and_an_answer_in_many_frames_are_usual(pair: Pair) -> None:
    async def busy(peer: Peer) -> None:
        while True:
            stream = await peer.asked_for()
            await peer.stream.send_all(PING * 200)
            peer.http2.send_headers(stream, BEGIN)
            body = framed(b"x" * 300_000)
            for at in range(0, len(body), 512):
                peer.http2.send_data(stream, body[at : at + 512])
            peer.http2.send_headers(stream, OK, end_stream=True)
            await peer.flush()

    peers = await pair.meet(busy)
    for _ in range(5):
        assert len(await pair.ask()) == 300_000
    assert len(peers.met) == 1


@given(
    st.lists(st.integers(0, 40), max_size=30),
    st.lists(st.integers(1, 60), min_size=1, max_size=30),
)
@settings(max_examples=examples(100), deadline=None)
def test_frames_are_counted_however_they_are_cut(sizes: list[int], cuts: list[int]) -> None:
    data = b"".join(size.to_bytes(3, "big") + bytes(6 + size) for size in sizes)
    counter, seen, at = grpc.FrameCounter(), 0, 0
    while at < len(data):
        cut = cuts[at % len(cuts)]
        seen += counter.count(data[at : at + cut])
        at += cut
    assert seen == len(sizes)
