"""Pods that are created, restart, are created again under their old uid, and removed."""

from collections.abc import Callable

from tests.daemon.process import Daemon, bounded, wait_for
from tests.fakes.node import Box, DirectoryNode

Make = Callable[..., Daemon]


def rows(daemon: Daemon, text: str) -> list[str]:
    """The ledger's files whose group path has this text."""
    return [row["path"] + "/" + row["file"] for row in daemon.state("files")["files"] if text in row["path"]]


def test_pods_that_come_are_bounded_and_pods_that_go_leave_nothing(node: DirectoryNode, daemon: Make) -> None:
    item = daemon().up()
    pods = [node.add() for _ in range(8)]
    for pod in pods:
        wait_for(lambda pod=pod: bounded(node, pod.main), told=item.tail)  # type: ignore[misc]
    for pod in pods:
        node.remove(pod)
    wait_for(lambda: item.state("pods")["pods"] == [], told=item.tail)
    wait_for(lambda: rows(item, "/pod") == [], told=item.tail)
    # The kubelet is a thread of this process, and may be late on a busy machine.
    assert [line for line in item.lines("warning", "error") if line["part"] != "kubelet_api"] == []


def test_a_restarted_container_is_bounded_again_with_its_own_original(node: DirectoryNode, daemon: Make) -> None:
    pod = node.add("app", shares=102)
    item = daemon().up()
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    old = pod.main
    new = node.restart(pod)
    wait_for(lambda: bounded(node, new), told=item.tail)
    wait_for(lambda: rows(item, old.id) == [], told=item.tail)
    originals = {row["file"]: row["original"] for row in item.state("files")["files"] if new.id in row["path"]}
    assert originals == {"cpuset.cpus": "0-1", "cpu.shares": "102"}


def test_a_static_pod_made_anew_under_its_uid_is_a_new_pod(node: DirectoryNode, daemon: Make) -> None:
    uid = "0123456789abcdef0123456789abcdef"
    marked = {"koordinator.sh/qosClass": "BE"}
    first = node.add("static", uid=uid, qos="burstable", shares=102, labels=marked)
    item = daemon().up()
    wait_for(lambda: bounded(node, first.main), told=item.tail)
    inode = {row["inode"] for row in item.state("files")["files"] if row["path"] == first.group}
    node.remove(first)
    second = node.add("static", uid=uid, qos="burstable", shares=204, labels=marked)
    wait_for(lambda: bounded(node, second.main), told=item.tail)

    def renewed() -> bool:
        now = {row["inode"] for row in item.state("files")["files"] if row["path"] == second.group}
        return bool(now) and not now & inode

    wait_for(renewed, told=item.tail)
    status, answer = item.call("POST", "/restore", {"by": "test"})
    assert (status, answer["left"]) == (200, 0), answer
    assert (node.cpus(second.main), node.shares(second.main)) == ("0-1", "204")
    assert node.read(second.group, "cpu", "cpu.shares") == "204"


def test_a_cpuset_that_is_still_empty_is_not_taken_for_the_original(node: DirectoryNode, daemon: Make) -> None:
    item = daemon().up()
    pod = node.add("young", containers=0)

    def seen(box: Box) -> None:
        wait_for(lambda: item.standing(box.group, "cpu.set").get("state") == "prepared", told=item.tail)

    box = node.create(pod, "main", {"cpu": {"shares": 102}, "memory": {}}, meanwhile=seen)
    node.settle(box)
    wait_for(lambda: bounded(node, box), told=item.tail)
    status, answer = item.call("POST", "/restore", {"by": "test"})
    assert (status, answer["left"]) == (200, 0), answer
    assert (node.cpus(box), node.shares(box)) == ("0-1", "102")
