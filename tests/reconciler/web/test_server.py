import logging
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import httpx2
import msgspec
import pytest
import trio
import yaml
from trio.testing import MockClock

from cgroupfs.errors import StoreError
from reconciler.config.model import HttpSection
from reconciler.runtime.supervisor import Supervisor
from reconciler.web import connection
from reconciler.web.answers import Answers
from reconciler.web.app import MAX_BODY, control_app, open_app, read_app
from reconciler.web.components import components
from reconciler.web.interface import AlertTest, HoldRequest, RestoreRequest
from reconciler.web.limits import ClientLimits, HttpCounts
from reconciler.web.server import WebError, WebServer, listen_tcp, listen_unix
from tests.fakes.ports import free_port
from tests.fakes.web import FakeControl, FakeShown
from tests.reconciler.web.site import serving

PROJECT = Path(__file__).parents[3]


async def test_health_is_the_pulse_readiness_names_what_is_missing_and_metrics_are_prometheus_text(
    tmp_path: Path, idle_clock: MockClock
) -> None:
    async with serving(tmp_path) as site:
        answer = await site.tcp.get("/healthz")
        assert (answer.status_code, answer.json()) == (200, {"alive": True, "silent_s": 0.25})
        site.shown.pulse.alive, site.shown.pulse.age_s = False, 31.0
        answer = await site.unix.get("/healthz")
        assert (answer.status_code, answer.json()) == (503, {"alive": False, "silent_s": 31.0})
        assert (await site.unix.get("/readyz")).json() == {"ready": True, "problems": 0, "reasons": []}
        answer = await site.tcp.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert "\nbypassd_ready 1.0\n" in answer.text
        assert "server" not in answer.headers
        site.shown.reasons = ["the first plan is not done"]
        answer = await site.unix.get("/readyz")
        assert answer.status_code == 503
        assert answer.json() == {"ready": False, "problems": 1, "reasons": ["the first plan is not done"]}


async def test_state_has_three_formats_with_the_same_content_of_the_requested_sections_and_pods(
    tmp_path: Path, idle_clock: MockClock
) -> None:
    whole = {"pods": {"u1": {"class": "reclaimed", "cpus": "0-3"}}, "pools": {"a 1": [2]}}
    async with serving(tmp_path) as site:
        assert (await site.unix.get("/state")).json() == whole
        packed = await site.unix.get("/state?format=msgpack")
        assert packed.headers["content-type"] == "application/vnd.msgpack"
        assert msgspec.msgpack.decode(packed.content) == whole
        written = await site.unix.get("/state?format=yaml")
        assert yaml.load(written.text, Loader=yaml.CSafeLoader) == whole
        site.shown.asked.clear()
        site.shown.pods_asked.clear()
        for query, sections in (
            ("section=pools", ["pools"]),
            ("section=pools,pods", ["pods", "pools"]),
            ("section=pools&section=pods&pod=shop/web-0", ["pods", "pools"]),
            ("pod=web%2B1&section=pods", ["pods"]),
            ("pod=a,b", ["pods", "pools"]),
        ):
            assert list((await site.unix.get(f"/state?{query}")).json()) == sections == list(site.shown.asked[-1])
        assert len(site.shown.asked) == 5
        assert site.shown.pods_asked == ["", "", "shop/web-0", "web+1", "a,b"]


async def test_a_wrong_question_is_answered_with_what_is_known(tmp_path: Path, idle_clock: MockClock) -> None:
    async with serving(tmp_path) as site:
        for url, error in (
            ("/state?section=pod", "section: 'pod': expected one of pods, pools"),
            ("/state?format=xml", "format: 'xml': expected one of json, msgpack, yaml"),
        ):
            answer = await site.unix.get(url)
            assert (answer.status_code, answer.json()) == (400, {"error": error})
        for pod in ("", "web,", "a,b,c,d,e", "w" * 401, "web%0a", "%1b[2J"):
            assert (await site.unix.get(f"/state?section=pods&pod={pod}")).status_code == 400, pod
        assert site.shown.asked == []


async def test_the_hour_of_a_pod_is_had_by_its_uid(tmp_path: Path, idle_clock: MockClock) -> None:
    async with serving(tmp_path) as site:
        assert (await site.unix.get("/pods/u1/hour")).json() == {"use_milli": [1, None]}
        assert (await site.unix.get("/pods/u2/hour")).status_code == 404
        assert (await site.tcp.get("/pods/u1/hour")).status_code == 404


async def test_a_hold_is_made_and_released_over_the_unix_socket(tmp_path: Path, idle_clock: MockClock) -> None:
    async with serving(tmp_path) as site:
        body = {"target": "pod:u1", "reason": "debugging", "by": "ann", "seconds": 60}
        made = await site.unix.post("/holds", json=body)
        assert made.status_code == 201
        shown = {"target": "pod:u1", "reason": "debugging", "by": "ann", "until": 60.0}
        assert made.json() == shown | {"seconds": None, "ends_boot_s": None, "boot_id": "", "budget": False}
        gone = await site.unix.delete("/holds/file:/kubepods/besteffort")
        assert (gone.status_code, gone.json()) == (200, {"released": "file:/kubepods/besteffort"})
        none = await site.unix.delete("/holds/pod:u2")
        assert (none.status_code, none.json()) == (404, {"error": "no hold on 'pod:u2'"})
        assert site.control.told == [
            HoldRequest(target="pod:u1", reason="debugging", by="ann", seconds=60.0),
            "release file:/kubepods/besteffort",
            "release pod:u2",
        ]


async def test_tcp_has_no_controls_at_all(tmp_path: Path, idle_clock: MockClock) -> None:
    async with serving(tmp_path) as site:
        answers = [
            await site.tcp.post("/holds", json={"target": "node", "reason": "x", "by": "x"}),
            await site.tcp.delete("/holds/node"),
            await site.tcp.post("/restore"),
            await site.tcp.post("/alerts/test"),
            await site.tcp.post("/reload"),
        ]
        assert [answer.status_code for answer in answers] == [404] * 5
        assert (await site.tcp.post("/metrics")).status_code == 405
        assert site.control.told == []


async def test_errors_of_ours_are_their_one_message(tmp_path: Path, idle_clock: MockClock) -> None:
    async with serving(tmp_path) as site:
        nonsense = await site.unix.post("/holds", json={"target": "nonsense", "reason": "", "by": ""})
        assert nonsense.status_code == 400
        assert nonsense.json() == {"error": "hold target: 'nonsense': expected node or pod:UID"}
        assert (await site.unix.post("/restore")).json() == {"restored": 3}
        site.control.error = StoreError("the disk is full")
        full = await site.unix.post("/restore", json={"pod_uid": "u1"})
        assert (full.status_code, full.json()) == (503, {"error": "the disk is full"})
        assert site.control.told[1:] == [RestoreRequest(), RestoreRequest(pod_uid="u1")]
        assert (await site.unix.post("/alerts/test", json={"sink": "x", "by": "ana"})).json() == {"sinks": []}
        assert site.control.told[-1] == AlertTest(sink="x", by="ana")
        bad = await site.unix.post("/reload")
        assert bad.status_code == 400
        assert bad.json() == {"error": "/c.yaml:1:2: mode: no", "problems": ["/c.yaml:1:2: mode: no"]}
        answer = (await site.unix.get("/nothing")).json()
        assert answer["error"] == "Not Found: GET /nothing"
        assert {"/metrics", "/state", "/healthz", "/readyz"} <= set(answer["links"])


async def test_a_bad_body_is_refused(tmp_path: Path, idle_clock: MockClock) -> None:
    invalid = "the body is not a valid HoldRequest: "
    async with serving(tmp_path) as site:
        for body, status, error in (
            (b"{", 400, f"{invalid}Input data was truncated"),
            (b'{"target": "node"}', 400, f"{invalid}Object missing required field `reason`"),
            (b'{"tarket": "node"}', 400, f"{invalid}Object contains unknown field `tarket`"),
            (b" " * (MAX_BODY + 1), 413, f"the body is larger than {MAX_BODY} bytes"),
        ):
            answer = await site.unix.post("/holds", content=body)
            assert (answer.status_code, answer.json()) == (status, {"error": error})
        assert site.control.told == []


async def test_a_missing_body_ends_in_a_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle_clock: MockClock
) -> None:
    monkeypatch.setattr("reconciler.web.app.BODY_DEADLINE_S", 0.3)
    async with serving(tmp_path) as site:
        stream = await trio.open_unix_socket(site.path)
        async with stream:
            await stream.send_all(b"POST /holds HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{")
            with trio.fail_after(60):
                assert (await stream.receive_some()).startswith(b"HTTP/1.1 408")
        assert site.control.told == []


async def test_an_internal_error_is_logged_and_answered_without_details(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, idle_clock: MockClock
) -> None:
    async with serving(tmp_path) as site:
        site.shown.broken = True
        with caplog.at_level(logging.ERROR):
            answers = [await site.unix.get("/state") for _ in range(10)]
        assert {answer.status_code for answer in answers} == {500}
        assert answers[0].json() == {"error": "internal error; see the log"}
        assert "ZeroDivisionError: a mistake" in caplog.text
        assert len([record for record in caplog.records if record.exc_info]) == 1, "the next ones are counted"
        site.shown.broken = False
        assert (await site.unix.get("/state")).status_code == 200


async def test_more_connections_than_allowed_are_closed_at_once(tmp_path: Path, idle_clock: MockClock) -> None:
    request = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n%s\r\n"
    async with serving(tmp_path, max_connections=2) as site:
        with trio.fail_after(60):
            streams = [await trio.open_tcp_stream("127.0.0.1", site.port) for _ in range(3)]
            assert await streams[2].receive_some() == b""
            await streams[0].send_all(request % b"connection: close\r\n")
            assert (await streams[0].receive_some()).startswith(b"HTTP/1.1 200")
            for stream in streams:
                await stream.aclose()
            # A peer that has gone leaves its place at once.
            for _ in range(10):
                stream = await trio.open_tcp_stream("127.0.0.1", site.port)
                await stream.send_all(request % b"")
                assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
                await stream.aclose()
                await trio.sleep(0.01)


async def test_a_peer_that_does_not_read_cannot_keep_the_daemon_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle_clock: MockClock
) -> None:
    monkeypatch.setattr(connection, "SEND_S", 0.5)
    began = 0.0
    async with serving(tmp_path) as site:
        site.shown.pods = {"big": "x" * (16 << 20)}
        stream = await trio.open_unix_socket(site.path)
        await stream.send_all(b"GET /state HTTP/1.1\r\nhost: a\r\n\r\n")
        await stream.receive_some(10)
        began = trio.current_time()
    assert trio.current_time() - began < 2
    await stream.aclose()


async def test_the_unix_socket_is_for_its_owner_only_and_removed_with_the_server(
    tmp_path: Path, idle_clock: MockClock
) -> None:
    async with serving(tmp_path) as site:
        assert stat.S_IMODE(os.lstat(site.path).st_mode) == 0o600
        assert os.listdir(tmp_path) == ["s"]
    assert os.listdir(tmp_path) == []


def test_a_socket_left_by_a_killed_daemon_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "run" / "s")
    os.mkdir(tmp_path / "run")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    with listen_unix(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


def test_a_successors_socket_is_not_removed(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with listen_unix(path):
        os.rename(path, f"{path}.old")
        with socket.socket(socket.AF_UNIX) as successor:
            successor.bind(path)
    assert stat.S_ISSOCK(os.lstat(path).st_mode)


def test_a_file_where_the_socket_should_be_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(WebError, match="exists and is not a socket"), listen_unix(str(path)):
        pass
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: listen_unix("/proc/nowhere/s"), r"cannot listen on /proc/nowhere/s: ENOENT"),
        (lambda: listen_unix("/tmp/" + "x" * 200), r"cannot listen on /tmp/x+: AF_UNIX path too long"),
        (lambda: listen_tcp("192.0.2.1", 9470), r"cannot listen on 192.0.2.1 port 9470: EADDRNOTAVAIL"),
    ],
)
def test_a_socket_that_cannot_be_had_is_one_message(
    make: Callable[[], AbstractContextManager[socket.socket]], message: str
) -> None:
    with pytest.raises(WebError, match=message), make():
        pass


async def test_a_port_in_use_is_taken_when_it_gets_free_and_the_controls_never_stop(
    tmp_path: Path, idle_clock: MockClock
) -> None:
    shown, control, port = FakeShown(), FakeControl(), free_port()
    config = HttpSection(port=port, socket=str(tmp_path / "s"))
    supervisor = Supervisor([components(config, shown, control)])
    with listen_tcp("127.0.0.1", port):
        async with trio.open_nursery() as nursery:
            await nursery.start(supervisor.run)
            assert supervisor.statuses["web"].error == f"cannot listen on 127.0.0.1 port {port}: EADDRINUSE"
            transport = httpx2.AsyncHTTPTransport(uds=str(tmp_path / "s"))
            async with httpx2.AsyncClient(transport=transport, base_url="http://bypassd") as client:
                assert (await client.get("/healthz")).status_code == 200
            supervisor.stop("enough")
    async with trio.open_nursery() as nursery:
        app, listen = read_app(shown, Answers(shown, HttpCounts())), partial(listen_tcp, "127.0.0.1", port)
        run = WebServer(app, listen, ClientLimits(4), name="tcp", counts=HttpCounts()).run
        await nursery.start(run)
        nursery.cancel_scope.cancel()


def test_a_disabled_listener_is_not_served() -> None:
    shown, control = FakeShown(), FakeControl()
    assert components(HttpSection(enabled=False, socket=None), shown, control) == []
    assert [component.name for component in components(HttpSection(enabled=False), shown, control)] == ["web socket"]
    assert [component.name for component in components(HttpSection(socket=None), shown, control)] == ["web"]


def test_the_controls_are_routes_of_roots_socket_only_and_the_state_of_unix_sockets() -> None:
    shown = FakeShown()
    answers = Answers(shown, HttpCounts())
    apps = (open_app(shown, answers), read_app(shown, answers), control_app(shown, answers, FakeControl()))
    over_tcp, reading, controlling = ({getattr(route, "path", "") for route in app.routes} for app in apps)
    assert over_tcp == {"/", "/healthz", "/readyz", "/metrics"}
    assert reading - over_tcp == {"/state", "/pods/{uid}/hour", "/events"}
    assert controlling - reading == {"/holds", "/holds/{target:path}", "/restore", "/off", "/alerts/test", "/reload"}


def test_the_daemon_does_not_pay_for_the_web_part_before_it_starts() -> None:
    heavy = ("starlette", "h11", "prometheus_client")
    code = f"import sys, reconciler.web.components; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PROJECT)
    assert done.stdout == "[]\n"
