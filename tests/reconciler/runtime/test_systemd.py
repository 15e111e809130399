import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from reconciler.runtime.systemd import Heartbeat, Notifier, Watchdog, watchdog_interval_s


class Manager:
    """systemd's end: a datagram socket and what arrived."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.socket.bind(address)

    def received(self) -> list[dict[str, str]]:
        messages: list[dict[str, str]] = []
        while True:
            try:
                text = self.socket.recv(4096).decode()
            except BlockingIOError:
                return messages
            messages.append(dict(line.split("=", 1) for line in text.split("\n")))


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Manager, Notifier]]:
    if request.param == "path":
        made, notifier = Manager(f"{tmp_path}/n"), Notifier({"NOTIFY_SOCKET": f"{tmp_path}/n"})
    else:
        name = f"bypassd-test-{os.getpid()}"
        made, notifier = Manager(f"\0{name}"), Notifier({"NOTIFY_SOCKET": f"@{name}"})
    with made.socket:
        yield made, notifier
        notifier.close()


def test_states_arrive_at_a_path_and_at_an_abstract_address(manager: tuple[Manager, Notifier]) -> None:
    made, notifier = manager
    assert notifier.ready("110 pods\nREADY=0")
    assert notifier.status("fine")
    assert notifier.reloading()
    assert notifier.stopping("SIGTERM")
    assert notifier.ping()
    messages = made.received()
    assert int(messages[2].pop("MONOTONIC_USEC")) > 0
    assert messages == [
        {"READY": "1", "STATUS": "110 pods READY=0"},
        {"STATUS": "fine"},
        {"RELOADING": "1"},
        {"STOPPING": "1", "STATUS": "SIGTERM"},
        {"WATCHDOG": "1"},
    ]


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1"}])
def test_without_a_usable_address_nothing_is_sent(environ: dict[str, str]) -> None:
    assert not Notifier(environ).ready("up")


def test_a_manager_that_is_gone_is_logged_once_and_never_raises(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": f"{tmp_path}/nobody"})
    with caplog.at_level(logging.WARNING):
        assert [notifier.ping(), notifier.ping()] == [False, False]
    assert [record.getMessage() for record in caplog.records] == ["cannot notify systemd"]
    notifier.close()


def test_a_full_socket_does_not_block(tmp_path: Path) -> None:
    made, notifier = Manager(f"{tmp_path}/n"), Notifier({"NOTIFY_SOCKET": f"{tmp_path}/n"})
    with made.socket:
        sent = [notifier.ping() for _ in range(5000)]
        assert sent[0]
        assert not sent[-1]
        made.received()
        assert notifier.ping()
    notifier.close()


@pytest.mark.parametrize(
    ("environ", "interval"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdogs_interval_is_the_one_for_this_process(environ: dict[str, str], interval: float | None) -> None:
    assert watchdog_interval_s(environ, pid=7) == interval


async def test_the_watchdog_pings_only_while_the_heart_beats(
    tmp_path: Path,
    nursery: trio.Nursery,
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, notifier = Manager(f"{tmp_path}/n"), Notifier({"NOTIFY_SOCKET": f"{tmp_path}/n"})
    heartbeat = Heartbeat(limit_s=5, clock=trio.current_time)
    pings: list[float] = []
    with made.socket, caplog.at_level(logging.WARNING):
        await nursery.start(Watchdog(notifier, heartbeat, 10.0).run)
        for second in range(60):
            if second in {9, 19, 49}:
                heartbeat.beat()
            await trio.sleep(0.5)
            pings += [second for message in made.received() if message == {"WATCHDOG": "1"}]
            await trio.sleep(0.5)
    notifier.close()
    nursery.cancel_scope.cancel()
    # It looks every 5 s, and a beat is good for 5 s: the one at 9 s serves the look at 10 s, not the one at 15 s.
    assert pings == [0, 5, 10, 20, 50]
    texts = [record.getMessage() for record in caplog.records]
    assert texts == ["the main loop makes no progress", "the main loop makes progress again"] * 2 + [texts[0]]


def test_no_value_begins_another_field_and_none_keeps_a_state_from_being_sent(tmp_path: Path) -> None:
    manager = Manager(f"{tmp_path}/n")
    with manager.socket:
        notifier = Notifier({"NOTIFY_SOCKET": f"{tmp_path}/n"})
        assert notifier.status("evil\nMAINPID=1\x1b[2J\u2028\udc80")
        assert notifier.status("x" * 1_000_000)
        first, second = manager.received()
        notifier.close()
    assert first == {"STATUS": r"evil MAINPID=1\x1b[2J \udc80"}
    assert len(second["STATUS"]) < 2048
