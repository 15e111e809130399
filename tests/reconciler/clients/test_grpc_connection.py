"""The gRPC client's connection: lost, refused, exhausted, replaced, and whose socket it may be."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import trio
from h2.errors import ErrorCodes

from cgroupfs.errors import SourceError
from reconciler.clients.grpc import UnaryCall, UnaryChannel
from tests.fakes.http2_peer import BEGIN, OK, Behaviour, Peer, Peers
from tests.reconciler.clients.grpcpair import ASK, Pair, echo_once, serve


async def goaway(peer: Peer) -> None:
    await peer.asked_for()
    peer.http2.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
    await peer.flush()
    await peer.stream.receive_some()


async def hang_up(peer: Peer) -> None:
    await peer.asked_for()


async def half_an_answer(peer: Peer) -> None:
    peer.http2.send_headers(await peer.asked_for(), BEGIN)
    await peer.flush()


async def wrong_frame(peer: Peer) -> None:
    await peer.asked_for()
    await peer.stream.send_all(bytes(9))  # data on stream 0
    await trio.sleep_forever()


FATAL = [
    (wrong_frame, "the answer is not HTTP/2: "),
    (goaway, r"connection ended by the server \(ENHANCE_YOUR_CALM\)"),
    (hang_up, r"connection closed by the server|the connection broke: Connection reset by peer"),
    (half_an_answer, r"connection closed by the server|the connection broke: Connection reset by peer"),
]


async def test_a_peer_of_another_protocol_is_reported_with_its_first_bytes(pair: Pair) -> None:
    async def older(peer: Peer) -> None:
        await peer.stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await trio.sleep_forever()

    await pair.meet(older)
    with pytest.raises(SourceError, match=r"Ask: the answer is not HTTP/2: it begins with b'HTTP/1\.1 400 Bad R"):
        await pair.ask()
    assert not pair.channel.connected


@pytest.mark.parametrize(("behaviour", "message"), FATAL)
async def test_a_first_connection_that_fails_is_one_clear_error_and_the_next_question_makes_another(
    pair: Pair, behaviour: Behaviour, message: str
) -> None:
    await pair.meet(behaviour, serve)
    with pytest.raises(SourceError, match=f"^t: s: Ask: ({message})"):
        await pair.ask()
    assert not pair.channel.connected
    await pair.goes_on(2)


@pytest.mark.parametrize("behaviour", [behaviour for behaviour, _ in FATAL])
async def test_a_kept_connection_that_fails_is_replaced_without_an_error(pair: Pair, behaviour: Behaviour) -> None:
    async def once_good(peer: Peer) -> None:
        await echo_once(peer)
        await behaviour(peer)

    peers = await pair.meet(once_good, serve)
    assert [await pair.ask(), await pair.ask()] == [b"question"] * 2
    assert len(peers.met) == 2


async def test_a_second_loss_is_an_error_and_not_a_circle(pair: Pair) -> None:
    async def once_good(peer: Peer) -> None:
        await echo_once(peer)
        await peer.asked_for()

    peers = await pair.meet(once_good, hang_up)
    await pair.ask()
    with pytest.raises(SourceError, match=r"connection closed|Connection reset"):
        await pair.ask()
    assert len(peers.met) == 2


@pytest.mark.parametrize("way", ["goaway", "eof"])
async def test_an_end_between_questions_is_seen_before_the_next(pair: Pair, way: str) -> None:
    async def leave(peer: Peer) -> None:
        await echo_once(peer)
        if way == "goaway":
            peer.http2.close_connection()
            await peer.flush()
            await peer.stream.receive_some()

    peers = await pair.meet(leave, serve)
    await pair.ask()
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert await pair.ask() == b"question"
    assert [len(peer.requests) for peer in peers.met] == [1, 1]


async def test_a_connection_lost_between_two_questions_that_travel_together_is_replaced(pair: Pair) -> None:
    async def one_of_two(peer: Peer) -> None:
        await echo_once(peer)
        stream = await peer.asked_for()
        peer.http2.send_headers(stream, [*BEGIN, *OK], end_stream=True)
        peer.http2.close_connection()
        await peer.flush()
        await peer.stream.receive_some()

    peers = await pair.meet(one_of_two, serve, MAX_CONCURRENT_STREAMS=1)
    await pair.ask()
    questions = [UnaryCall("/s/M", b"one"), UnaryCall("/s/M", b"two")]
    assert await pair.channel.call(*questions, timeout_s=5) == [b"one", b"two"]
    assert [len(peer.requests) for peer in peers.met] == [2, 2]


async def test_a_connection_that_has_no_streams_left_is_replaced(pair: Pair) -> None:
    await pair.meet(serve)
    await pair.ask()
    connection = pair.channel._connection
    assert connection is not None
    connection._protocol.highest_outbound_stream_id = 2**31 - 1
    await pair.goes_on(2)


async def test_a_full_queue_of_connections_is_waited_out(place: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place / "s"))
    listener.listen(0)
    others = []
    with listener:
        while True:
            other = socket.socket(socket.AF_UNIX)
            other.setblocking(False)
            others.append(other)
            try:
                other.connect(str(place / "s"))
            except BlockingIOError:
                break
        channel = UnaryChannel(str(place / "s"), source="t", shown="s")
        with pytest.raises(SourceError, match="no answer within"):
            await channel.call(ASK, timeout_s=0.1)
        listener.setblocking(False)

        async def accept() -> None:
            await trio.sleep(0.1)
            for _ in range(len(others) - 1):
                listener.accept()[0].close()
            await trio.lowlevel.wait_readable(listener)
            accepted = trio.socket.from_stdlib_socket(listener.accept()[0])
            async with trio.SocketStream(accepted) as stream:
                peer = Peer(stream, {})
                await echo_once(peer)
                await echo_once(peer)
                await trio.sleep(0.05)

        answers = []

        async def ask() -> None:
            answers.extend(await channel.call(ASK, timeout_s=5))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            nursery.start_soon(ask)
            nursery.start_soon(ask)
        assert answers == [b"question"] * 2
        channel.close()
    for other in others:
        other.close()


async def test_no_socket_no_listener_and_a_too_long_path_are_each_one_clear_error(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(place / "deaf"))
        for name, message in (
            ("none", "^t: s: no such socket$"),
            ("deaf", "^t: s: Ask: cannot connect: Connection refused$"),
            ("x" * 200, "^t: s: Ask: cannot connect: AF_UNIX path too long$"),
        ):
            channel = UnaryChannel(str(place / name), source="t", shown="s")
            with pytest.raises(SourceError, match=message):
                await channel.call(ASK, timeout_s=1)


LISTEN = """
import os, socket, sys
made = socket.socket(fileno=int(sys.argv[1]))
os.setresuid(65534, 65534, 65534)
made.listen()
print(flush=True)
made.accept()[0].recv(1)
"""


def started(command: list[str], descriptor: int) -> "subprocess.Popen[bytes]":
    """The process, when it has said that it listens."""
    process = subprocess.Popen(command, pass_fds=[descriptor], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


async def answer_once(peer: Peer) -> None:
    await echo_once(peer)


async def test_a_socket_that_was_not_configured_must_be_roots(nursery: trio.Nursery) -> None:
    if os.geteuid() != 0:
        pytest.skip("NOT RUN: only root can make files that root alone can change")
    with tempfile.TemporaryDirectory(prefix="bypassd-test-", dir="/run") as directory:
        place = Path(directory)
        channel = UnaryChannel(str(place / "s"), source="t", shown="s", root_only=True)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(place / "s"))
            command = [sys.executable, "-c", LISTEN, str(bound.fileno())]
            with started(command, bound.fileno()) as process:
                try:
                    with pytest.raises(SourceError, match="a process of uid 65534 listens on it"):
                        await channel.call(ASK, timeout_s=5)
                finally:
                    process.kill()
            os.chown(place / "s", 65534, 0)
            with pytest.raises(SourceError, match="is owned by uid 65534"):
                await channel.call(ASK, timeout_s=5)
        (place / "s").unlink()
        peers = Peers(place / "s", answer_once, settings={})
        await nursery.start(peers.run)
        assert len(await channel.call(ASK, timeout_s=5)) == 1
        place.chmod(0o777)
        channel.close()
        with pytest.raises(SourceError, match="is writable by everybody"):
            await channel.call(ASK, timeout_s=5)
        nursery.cancel_scope.cancel()
