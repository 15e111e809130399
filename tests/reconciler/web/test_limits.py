"""What the listeners cost, counted: builds, steps, requests and connections. And who may ask for what."""

import errno
import grp
import os
import stat
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import h11
import pytest
import trio
import trio.testing

from reconciler.config.model import HttpSection
from reconciler.runtime.supervisor import ComponentHealth, Supervisor
from reconciler.web import server
from reconciler.web.answers import SHARE, Answers
from reconciler.web.app import read_app
from reconciler.web.components import components
from reconciler.web.limits import MAX_CLIENTS, Bucket, ClientLimits, HttpCounts, Rate, client_of
from reconciler.web.server import WebServer, listen_unix
from reconciler.web.trust import Hosts
from tests.fakes.ports import free_port
from tests.fakes.web import FakeControl, FakeShown
from tests.reconciler.web.site import LIVES, exchange, serving

ROW_S = 0.0002
ROWS = 150


class BusyShown(FakeShown):
    """A document of many rows, each of which takes its time to make, as 500 pods' do."""

    def __init__(self) -> None:
        super().__init__()
        self.builds = 0

    async def parts(self, sections: Sequence[str], pod: str = "") -> tuple[Iterator[tuple[str, object]], float]:
        self.builds += 1
        return iter([("pods", self._rows())]), 0.0

    def _rows(self) -> Iterator[object]:
        for number in range(ROWS):
            until = time.thread_time() + ROW_S
            while time.thread_time() < until:
                pass
            yield {"uid": number}


async def test_builds_take_their_share_of_the_time_however_many_ask() -> None:
    shown = BusyShown()
    answers = Answers(shown, HttpCounts())
    asked = 0

    async def ask() -> None:
        nonlocal asked
        while True:
            asked += 1
            assert (await answers.state(["pods"], "json")).count(b"uid") == ROWS

    began = trio.current_time()
    with trio.move_on_after(1.5):
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(ask)
    rounds = answers.state_rounds
    took_s = trio.current_time() - began
    # One build may have started at the end. On main each question is a build of 30 ms: 50 in this time.
    assert shown.builds == rounds.builds <= 1 + took_s * SHARE / (ROWS * ROW_S) + 1
    assert asked > 2 * rounds.builds, "one build answers all who wait"


async def test_others_run_while_an_answer_is_built() -> None:
    answers = Answers(BusyShown(), HttpCounts())
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await trio.lowlevel.checkpoint()
        before = turns
        await answers.state(["pods"], "json")
        during = turns - before
        nursery.cancel_scope.cancel()
    # 30 ms in slices of a millisecond.
    assert during >= ROWS * ROW_S / 0.001 / 2


async def test_an_answer_is_never_older_than_its_question() -> None:
    shown = FakeShown()
    answers = Answers(shown, HttpCounts())
    for number in range(5):
        shown.pods = {"now": number}
        assert await answers.state(["pods"], "json") == b'{"pods":{"now":%d}}\n' % number


async def test_one_round_makes_what_all_who_wait_want() -> None:
    shown = FakeShown()
    answers = Answers(shown, HttpCounts())
    chunks: dict[tuple[str, str], bytes] = {}

    async def ask(section: str, form: str) -> None:
        chunks[section, form] = await answers.state([section], form)

    await answers.state(["pods"], "json")
    async with trio.open_nursery() as nursery:
        for section, form in (("pods", "json"), ("pools", "json"), ("pools", "yaml")):
            nursery.start_soon(ask, section, form)
    assert chunks == {
        ("pods", "json"): b'{"pods":{"u1":{"class":"reclaimed","cpus":"0-3"}}}\n',
        ("pools", "json"): b'{"pools":{"a 1":[2]}}\n',
        ("pools", "yaml"): b'pools: {"a 1":[2]}\n',
    }
    assert len(shown.asked) <= 3


async def test_a_request_that_is_given_up_takes_nobodys_answer_away() -> None:
    shown = BusyShown()
    answers = Answers(shown, HttpCounts())
    done = 0

    async def ask() -> None:
        nonlocal done
        await answers.state(["pods"], "json")
        done += 1

    async with trio.open_nursery() as nursery:
        impatient = trio.CancelScope()

        async def give_up() -> None:
            with impatient:
                await ask()

        nursery.start_soon(give_up)
        await trio.lowlevel.checkpoint()
        nursery.start_soon(ask)
        await trio.lowlevel.checkpoint()
        impatient.cancel()
    assert done == 1


async def test_one_failure_reaches_all_who_wait_and_the_next_build_is_new() -> None:
    shown = FakeShown()
    answers = Answers(shown, HttpCounts())
    shown.broken = True
    with pytest.raises(ZeroDivisionError):
        await answers.state(["pods"], "json")
    shown.broken = False
    assert b"u1" in await answers.state(["pods"], "json")


async def test_a_name_that_is_no_utf8_and_control_characters_are_escaped() -> None:
    shown = FakeShown()
    answers = Answers(shown, HttpCounts())
    shown.pods = {"bad\udcff": "\x1b[31m\x9b2J\x7f\u2028\ufeff"}
    text = await answers.state(["pods"], "json")
    assert text == b'{"pods":{"bad\\\\udcff":"\\u001b[31m\\u009b2J\\u007f\\u2028\\ufeff"}}\n'
    for form in ("yaml", "msgpack"):
        assert b"bad" in await answers.state(["pods"], form)
    # DEL and escapes in what is ASCII throughout.
    shown.pods = {"uid": "\x1b[31m\n\x7f"}
    text = await answers.state(["pods"], "json")
    assert text == b'{"pods":{"uid":"\\u001b[31m\\n\\u007f"}}\n'


def test_a_bucket_gives_its_burst_at_once_and_then_its_rate() -> None:
    bucket, now, waits = Bucket(Rate(10, 3)), 1000.0, []
    for _ in range(5):
        waits.append(round(bucket.wait_s(now), 6))
        bucket.take(now)
    assert waits == [0, 0, 0, 0.1, 0.2]
    assert bucket.wait_s(now + 10) == 0


def test_a_client_waits_for_its_own_rate_and_is_refused_beyond_a_second() -> None:
    limits = ClientLimits(32, by_client=Rate(2, 2), requests=Rate(1000, 1000))
    waits = [limits.request("uid 1000", 50.0) for _ in range(6)]
    assert waits == [0, 0, 0.5, 1.0, None, None]
    assert limits.request("uid 1001", 50.0) == 0, "another client does not wait"
    assert limits.request("uid 1000", 60.0) == 0


def test_all_clients_together_have_a_rate_and_their_number_is_bounded() -> None:
    limits = ClientLimits(32, by_client=Rate(1000, 1000), requests=Rate(8, 4))
    waits = [limits.request(f"10.0.{number // 256}.{number % 256}", 50.0) for number in range(3 * MAX_CLIENTS)]
    assert waits[:4] == [0] * 4
    assert sum(wait is not None for wait in waits) == 12
    assert len(limits._buckets) == MAX_CLIENTS


def test_one_client_leaves_connections_for_others() -> None:
    limits = ClientLimits(8)
    assert [limits.open("loopback") for _ in range(7)] == [True] * 6 + [False]
    assert [limits.open("10.0.0.1") for _ in range(3)] == [True, True, False]
    limits.close("loopback")
    assert limits.open("10.0.0.2")
    assert [ClientLimits(2).open("uid 0") for _ in range(2)] == [True, True]


async def test_clients_are_known_by_uid_and_by_network(tmp_path: Path) -> None:
    async with serving(tmp_path) as site:
        stream = await trio.open_unix_socket(site.path)
        assert client_of(stream.socket) == f"uid {os.getuid()}"
        await stream.aclose()
        listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
        there = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1], local_address="127.8.9.1")
        current = await listener.accept()
        assert client_of(current.socket) == "loopback"
        for item in (current, there, listener):
            await item.aclose()


@asynccontextmanager
async def listening(directory: Path, limits: ClientLimits) -> AsyncIterator[tuple[str, HttpCounts]]:
    """The readers' socket with limits of its own: its path, and what it counts."""
    shown, counts, path = FakeShown(), HttpCounts(), str(directory / "s")
    app = read_app(shown, Answers(shown, counts))
    async with trio.open_nursery() as nursery:
        await nursery.start(WebServer(app, partial(listen_unix, path), limits, name="readers", counts=counts).run)
        yield path, counts
        nursery.cancel_scope.cancel()


async def test_too_many_requests_get_429_and_when_to_come_again(tmp_path: Path) -> None:
    # Root has the listener's rate.
    limits = ClientLimits(8, by_client=Rate(0.1, 2), requests=Rate(0.1, 2))
    async with listening(tmp_path, limits) as (path, counts):
        answers = [await exchange(await trio.open_unix_socket(path), LIVES, 3) for _ in range(4)]
    assert [answer[9:12] for answer in answers] == [b"200", b"200", b"429", b"429"]
    assert b"\r\nretry-after: " in answers[2].lower()
    assert counts.aborted["readers", "rate"] == 2


async def test_connections_are_accepted_at_a_rate(tmp_path: Path) -> None:
    async with (
        listening(tmp_path, ClientLimits(8, accepts=Rate(0.01, 3))) as (path, counts),
        trio.open_nursery() as nursery,
    ):
        for _ in range(6):
            nursery.start_soon(exchange, await trio.open_unix_socket(path), LIVES, 60)
        await trio.testing.wait_all_tasks_blocked(0.2)
        assert counts.requests == {("readers", "200"): 3}
        nursery.cancel_scope.cancel()


async def test_a_process_without_free_descriptors_accepts_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "ACCEPT_AGAIN_S", 0.001)
    real, failures = (
        trio.SocketListener.accept,
        iter([errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ECONNABORTED] * 3),
    )

    async def accept(self: trio.SocketListener) -> trio.SocketStream:
        if number := next(failures, None):
            raise OSError(number, os.strerror(number))
        return await real(self)

    monkeypatch.setattr(trio.SocketListener, "accept", accept)
    async with serving(tmp_path) as site:
        assert (await site.tcp.get("/healthz")).status_code == 200
        assert (await site.unix.get("/healthz")).status_code == 200
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) <= 2, (
        "one per listener and window"
    )


async def test_a_body_of_many_chunks_leaves_the_loop_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turn, events, real = 0, Counter[int](), h11.Connection.next_event

    async def other() -> None:
        nonlocal turn
        while True:
            await trio.lowlevel.checkpoint()
            turn += 1

    def next_event(self: h11.Connection) -> object:
        events[turn] += 1
        return real(self)

    monkeypatch.setattr(h11.Connection, "next_event", next_event)
    request = b"POST /restore HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with serving(tmp_path) as site, trio.open_nursery() as nursery:
        nursery.start_soon(other)
        stream = await trio.open_unix_socket(site.path)
        answer = await exchange(stream, request + b"1\r\n \r\n" * 500 + b"2\r\n{}\r\n0\r\n\r\n", 10)
        nursery.cancel_scope.cancel()
    assert answer.startswith(b"HTTP/1.1 200")
    assert events.total() > 500
    assert max(events.values()) <= 4, "events of one connection between two turns of another task"


# Who may ask for what


def test_names_of_the_node_are_allowed_and_no_others() -> None:
    hosts = Hosts(["node-7", "Extra.Example."])
    for host in (
        *(b"localhost", b"LocalHost:9470", b"127.0.0.1", b"127.0.0.1:1", b"[::1]:9470"),
        *(b"node-7", b"node-7.:80", b"extra.example"),
    ):
        assert hosts.allow(host, None), host
    for host in (
        *(b"evil.example", b"evil.example:9470", b"localhost.evil.example", b"127.0.0.2"),
        *(b"", b"a b", b"[::1", b"localhost:x"),
    ):
        assert not hosts.allow(host, None), host


async def test_every_path_has_the_host_check(tmp_path: Path) -> None:
    async with serving(tmp_path, allowed_hosts=("extra.example",)) as site:
        for host, path, status in (
            ("node-7", "/metrics", 200),
            ("extra.example", "/metrics", 200),
            ("evil.example", "/healthz", 421),
            ("evil.example", "/metrics", 421),
            ("evil.example", "/nothing", 421),
        ):
            assert (await site.tcp.get(path, headers={"host": host})).status_code == status, (host, path)


def test_the_address_that_was_called_is_a_name_of_the_node() -> None:
    hosts = Hosts()
    assert hosts.allow(b"10.1.2.3:9470", ("10.1.2.3", 9470))
    assert not hosts.allow(b"10.1.2.4:9470", ("10.1.2.3", 9470))
    assert not hosts.allow(None, ("10.1.2.3", 9470))
    assert Hosts(["fd00::1"]).allow(b"[fd00::1]", None)


def test_an_address_counts_in_each_of_its_forms() -> None:
    hosts = Hosts()
    # A client of IPv4 at a listener of all addresses (``::``), which has both families.
    assert hosts.allow(b"10.1.2.3:9470", ("::ffff:10.1.2.3", 9470))
    assert hosts.allow(b"[2001:DB8:0:0::5]:9470", ("2001:db8::5", 9470))
    assert hosts.allow(b"[fe80::1]:9470", ("fe80::1%eth0", 9470))
    assert not hosts.allow(b"10.1.2.4:9470", ("::ffff:10.1.2.3", 9470))
    assert not hosts.allow(b"[::2]:9470", ("::3", 9470))


async def test_web_pages_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as site:
        for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
            assert (await site.unix.post("/restore", headers=headers)).status_code == 403
            assert (await site.tcp.get("/metrics", headers=headers)).status_code == 403
        assert site.control.told == []


async def test_tcp_has_no_word_of_any_pod_but_the_metrics(tmp_path: Path) -> None:
    async with serving(tmp_path) as site:
        site.shown.reasons = ["pod shop/web-0: annotation x: 'secret'"]
        answer = await site.tcp.get("/readyz")
        assert (answer.status_code, answer.json()) == (503, {"ready": False, "problems": 1})
        assert (await site.tcp.get("/state")).status_code == 404
        assert (await site.tcp.get("/state?section=pods")).status_code == 404
        assert (await site.tcp.head("/healthz")).status_code == 200


async def test_the_state_over_tcp_is_a_setting_and_has_the_host_check(tmp_path: Path) -> None:
    async with serving(tmp_path, state_over_tcp=True) as site:
        assert (await site.tcp.get("/state")).status_code == 200
        assert (await site.tcp.get("/state", headers={"host": "evil.example"})).status_code == 421
        assert (await site.tcp.post("/holds", json={})).status_code == 404


async def test_readers_read_everything_and_command_nothing(tmp_path: Path) -> None:
    reader = str(tmp_path / "r")
    group = grp.getgrgid(os.getgid()).gr_name
    async with serving(tmp_path, reader_group=group, reader_socket=reader) as site:
        result = os.lstat(reader)
        assert (stat.S_IMODE(result.st_mode), result.st_gid) == (0o660, os.getgid())
        assert stat.S_IMODE(os.lstat(site.path).st_mode) == 0o600
        for request, status in (
            (b"GET /state HTTP/1.1", b"200"),
            (b"POST /holds HTTP/1.1", b"404"),
            (b"POST /restore HTTP/1.1", b"404"),
            (b"POST /reload HTTP/1.1", b"404"),
            (b"DELETE /holds/node HTTP/1.1", b"404"),
        ):
            sent = request + b"\r\nHost: a\r\nConnection: close\r\n\r\n"
            assert (await exchange(await trio.open_unix_socket(reader), sent, 3))[9:12] == status
        assert site.control.told == []
    assert os.listdir(tmp_path) == []


async def test_the_readers_group_may_be_a_number_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    monkeypatch.setattr(os, "chown", lambda path, uid, gid: given.append(gid))
    async with serving(tmp_path, reader_group="471100815", reader_socket=str(tmp_path / "r")):
        assert stat.S_IMODE(os.lstat(tmp_path / "r").st_mode) == 0o660
    assert given == [471100815]


async def test_a_group_that_does_not_exist_stops_its_own_socket_only(tmp_path: Path) -> None:
    config = HttpSection(
        port=free_port(), socket=str(tmp_path / "s"), reader_group="no-such-group", reader_socket=str(tmp_path / "r")
    )
    supervisor = Supervisor([components(config, FakeShown(), FakeControl())])
    async with trio.open_nursery() as nursery:
        await nursery.start(supervisor.run)
        statuses = supervisor.statuses
        assert statuses["web readers"].error == "no group 'no-such-group'"
        assert [statuses[name].health for name in ("web", "web socket")] == [
            ComponentHealth.RUNNING,
            ComponentHealth.RUNNING,
        ]
        assert sorted(os.listdir(tmp_path)) == ["s"]
        supervisor.stop("enough")


def test_the_two_unix_sockets_are_two() -> None:
    with pytest.raises(ValueError, match="the same"):
        HttpSection(reader_group="ops", reader_socket="/run/bypassd/bypassd.sock")
