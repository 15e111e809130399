"""Kubelets that write again what they want: followed where they do it once, given way to where they do it for ever."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.daemon.process import Daemon, wait_for
from tests.fakes.node import DirectoryNode, NodePod

Make = Callable[..., Daemon]
PERIOD_S = 1.2
SPEC = {"cpu": {"shares": 2, "period": 100_000, "cpus": "0-1"}, "memory": {}}


def test_static_from_1_22_is_corrected_once_and_never_fought(node: DirectoryNode, daemon: Make) -> None:
    """A shared container is updated once in its first ten seconds, and when the default set changes."""
    node.kubelet.cpu_manager("static", "0-1")
    pod = node.add("be", cpus="0-1")
    item = daemon().up()
    wait_for(lambda: node.cpus(pod.main) != "0-1", told=item.tail)
    ours = node.cpus(pod.main)
    node.settle(pod.main, SPEC)
    wait_for(lambda: node.cpus(pod.main) == ours, told=item.tail)
    # An exclusive container takes a CPU: the default set changes, and every shared container gets it.
    pinned = node.add("pinned", qos="", cpus="0", shares=1024)
    node.kubelet.cpu_manager("static", "1", {pinned.uid: {"main": "0"}})
    node.settle(pod.main, {"cpu": {**SPEC["cpu"], "cpus": "1"}, "memory": {}})
    wait_for(lambda: f"dedicated/{pinned.uid}/main" in item.state("pools")["pools"], told=item.tail)
    wait_for(lambda: node.cpus(pod.main) == "1", told=item.tail)
    assert item.standing(pod.main.group, "cpu.set")["state"] in {"in place", "written"}
    agent = item.state("agent")["agent"]
    assert (agent["alerts"], agent["kubelet_reasserts_s"]) == ({}, None)
    # What is restored is what the kubelet wants now, not what was there at the first reading.
    status, answer = item.call("POST", "/restore", {"by": "test"})
    assert (status, answer["left"]) == (200, 0), answer
    assert node.cpus(pod.main) == "1"
    assert (node.cpus(pinned.main), node.shares(pinned.main)) == ("0", "1024")


@contextmanager
def rounds(node: DirectoryNode, pods: list[NodePod]) -> Iterator[list[float]]:
    """A kubelet that writes all containers again each period, and when it did."""
    done: list[float] = []
    ended = threading.Event()

    def reconcile() -> None:
        due = time.monotonic()
        while not ended.wait(max(0.0, due - time.monotonic())):
            due += PERIOD_S
            for pod in pods:
                node.settle(pod.main, SPEC)
            done.append(time.monotonic())

    thread = threading.Thread(target=reconcile)
    thread.start()
    try:
        yield done
    finally:
        ended.set()
        thread.join()


def test_static_up_to_1_21_gets_its_cpu_sets_and_be_is_bounded_by_quota(node: DirectoryNode, daemon: Make) -> None:
    """Every container is rewritten in a fixed rhythm: the CPU set is given up, the directory's quota remains."""
    node.kubelet.cpu_manager("static", "0-1")
    node.kubelet.reconcile_every(PERIOD_S)
    pods = [node.add("be", cpus="0-1"), node.add("too", cpus="0-1")]
    item = daemon(kubelet={"config_file": f"{node.kubelet_root}/config.yaml"}).up()

    def given_up() -> bool:
        learnt = item.state("agent")["agent"]["kubelet_reasserts_s"] is not None
        return learnt and all(node.cpus(pod.main) == "0-1" for pod in pods)

    wait_for(lambda: all(node.cpus(pod.main) != "0-1" for pod in pods), told=item.tail)
    with rounds(node, pods) as done:
        wait_for(given_up, within_s=60, told=item.tail)
        assert node.quota(node.besteffort) == "100000"
        assert all(node.read(pod.group, "cpu", "cpu.shares") == "1024" for pod in pods), "nobody rewrites their groups"

        def nothing_to_fight_about() -> bool:
            """In three rounds. On a busy machine one may be so late that the rhythm has to be learnt again."""
            first, written = len(done), item.metric_sum("bypassd_writes_total")
            assert written > 0
            wait_for(lambda: len(done) >= first + 3)
            return given_up() and item.metric_sum("bypassd_writes_total") == written

        wait_for(nothing_to_fight_about, within_s=120, told=item.tail)
    assert item.alerts("yield") == 0
