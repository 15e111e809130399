"""A daemon that is started beside another one takes over within a moment, and the other one is there if it fails."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.daemon.process import Daemon, bounded, wait_for
from tests.fakes.node import DirectoryNode, NodePod

Make = Callable[..., Daemon]
YIELDS: dict[str, object] = {"constants": {"reconciler.runtime.standby:_YIELDS_S": 2.0}}
"""How long a daemon that was asked may take to hand over."""


def runs(daemon: Daemon) -> bool:
    """Whether this process is the one that holds the lock, by its log."""
    with open(daemon.log, encoding="utf-8") as file:
        texts = [line for line in file if '"ready"' in line or '"standby"' in line]
    return bool(texts) and '"ready"' in texts[-1]


@contextmanager
def pods_meanwhile(node: DirectoryNode, every_s: float = 0.1) -> Iterator[list[NodePod]]:
    """BE pods that are made all the time."""
    made: list[NodePod] = []
    ended = threading.Event()

    def make() -> None:
        while not ended.wait(every_s):
            made.append(node.add(shares=102))

    thread = threading.Thread(target=make)
    thread.start()
    try:
        yield made
    finally:
        ended.set()
        thread.join()


def first(daemon: Daemon, message: str) -> str:
    """When its log has this message first."""
    return str(next(row["ts"] for row in daemon.lines() if row["msg"] == message))


def test_a_second_daemon_takes_over_once_it_is_prepared_and_no_pod_stays_unbounded(
    node: DirectoryNode, daemon: Make
) -> None:
    old = daemon(log={"format": "json"}).up("--wait")
    new = Daemon(node)
    new.forked = False  # with its imports
    new.log = f"{old.directory}/new.log"
    try:
        with pods_meanwhile(node) as made:
            new.start("--wait")
            wait_for(lambda: os.path.exists(new.log) and runs(new), told=new.tail)
        # What lies between the two is no start of a process: the new one has asked, and waits for the lock alone.
        assert first(new, "hand-over requested") <= first(new, "standby") < first(new, "ready")
        assert first(old, "stopping") < first(new, "ready")
        # It waits, in its process, and nothing was restored.
        assert old.pid
        assert not runs(old)
        wait_for(lambda: all(bounded(node, pod.main) for pod in made), told=new.tail)
        # The new one ends: the old one continues.
        os.kill(new.pid, signal.SIGKILL)
        wait_for(lambda: runs(old), told=old.tail)
        late = node.add(shares=102)
        wait_for(lambda: bounded(node, late.main), told=old.tail)
        new.end_code()
        # The next attempt is refused, and ends, so that a rollout stops.
        new.start("--wait")
        wait_for(lambda: old.said("hand-over refused") != [], told=old.tail)
        assert runs(old)
        assert old.stop() == 0
        wait_for(lambda: runs(new), told=new.tail)
    finally:
        if new.running:
            new.kill()


def test_a_daemon_that_does_not_wait_ends_beside_another_one(node: DirectoryNode, daemon: Make) -> None:
    daemon().up("--wait")
    second = Daemon(node)
    second.start()
    assert second.end_code() == 3


def test_a_daemon_with_another_store_ends_beside_one_that_manages_the_pods(node: DirectoryNode, daemon: Make) -> None:
    """As after a change of ``store.path`` in a rollout with surge: both would write the same groups."""
    old = daemon().up("--wait")
    other = Daemon(node, store={"path": f"{node.root}/elsewhere/state.db"})
    other.log = f"{other.directory}/other.log"
    other.start("--wait")
    assert other.end_code() == 3
    assert f"another bypassd (pid {old.pid}) manages these pods, with another store.path: stop it first" in other.tail()
    late = node.add(shares=102)
    wait_for(lambda: bounded(node, late.main), told=old.tail)
    assert old.stop() == 0
    other.up()
    assert other.stop() == 0


def test_a_daemon_that_does_not_respond_keeps_the_lock_until_it_does(node: DirectoryNode, daemon: Make) -> None:
    old = daemon(log={"format": "json"}).up("--wait")
    second = Daemon(node, **YIELDS)
    second.log = f"{second.directory}/second.log"
    old.signal(signal.SIGSTOP)
    try:
        second.start("--wait")
        # Two at a time would write against each other: a rollout stops here.
        assert second.end_code() == 3
        assert "does not hand over" in second.tail()
    finally:
        old.signal(signal.SIGCONT)
    # It follows the request, and continues, as the lock is free.
    wait_for(lambda: [row["msg"] for row in old.lines()].count("ready") == 2, told=old.tail)
    late = node.add(shares=102)
    wait_for(lambda: bounded(node, late.main), told=old.tail)
    assert old.stop() == 0


def test_a_standby_ends_at_once_when_it_is_stopped(node: DirectoryNode, daemon: Make) -> None:
    daemon().up()  # without --wait: it hands nothing over
    second = Daemon(node)
    second.log = f"{second.directory}/second.log"
    second.start("--wait")
    wait_for(lambda: os.path.exists(second.log) and '"standby"' in Path(second.log).read_text(), told=second.tail)
    # Meant for a daemon: their default action would end the standby.
    second.signal(signal.SIGHUP)
    second.signal(signal.SIGUSR2)
    time.sleep(0.2)
    assert second.stop() == 0


@pytest.mark.parametrize(
    "numbers",
    [(signal.SIGUSR2, signal.SIGTERM), (signal.SIGTERM, signal.SIGUSR2), (signal.SIGUSR2, signal.SIGINT)],
    ids=["stop in a hand-over", "hand-over in a stop", "interrupt in a hand-over"],
)
def test_a_stop_and_a_hand_over_at_a_time_are_a_stop(
    node: DirectoryNode, daemon: Make, numbers: tuple[signal.Signals, ...]
) -> None:
    pod = node.add(shares=102)
    before = node.tree()
    item = daemon(on_stop="restore").up("--wait")
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    for number in numbers:
        item.signal(number)
        time.sleep(0.01)
    assert item.end_code() == 0
    assert node.tree() == before
