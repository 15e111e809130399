"""Quotas, bursts and the idle class as the daemon keeps them on real cgroups, and gives them back."""

import signal
from collections.abc import Callable

import pytest

from tests.daemon.process import Daemon, bounded, wait_for
from tests.fakes.node import DirectoryNode, NodePod

Make = Callable[..., Daemon]
QUOTA, BURST = "cpu.cfs_quota_us", "cpu.cfs_burst_us"


def limited(node: DirectoryNode, name: str, qos: str, quota: int, **more: object) -> NodePod:
    """An online pod of one container with a quota, and the pod's own as the kubelet writes it."""
    pod = node.add(name, qos=qos, shares=1024, quota_us=quota, **more)  # type: ignore[arg-type]
    node.write(pod.group, "cpu", QUOTA, str(quota))
    return pod


def levels(node: DirectoryNode, pod: NodePod, file: str) -> tuple[str, str]:
    """What the pod's directory and its main container hold."""
    return node.read(pod.group, "cpu", file), node.read(pod.main.group, "cpu", file)


def test_a_pinned_containers_quota_is_lifted_again_after_each_update_and_restored(
    node: DirectoryNode, daemon: Make
) -> None:
    pinned = limited(node, "pinned", "", 100_000, cpus="1")
    node.kubelet.cpu_manager("static", "0", {pinned.uid: {"main": "1"}})
    item = daemon().up()
    wait_for(lambda: levels(node, pinned, QUOTA) == ("-1", "-1"), told=item.tail)
    # The kubelet of those days writes it again with each update of the container.
    node.settle(pinned.main)
    wait_for(lambda: levels(node, pinned, QUOTA) == ("-1", "-1"), told=item.tail)
    item.configure(policies={"pinned": {"enabled": False}})
    item.signal(signal.SIGHUP)
    wait_for(lambda: levels(node, pinned, QUOTA) == ("100000", "100000"), told=item.tail)
    assert item.lines("warning", "error") == []


def test_bursts_come_with_the_configuration_and_go_with_it(node: DirectoryNode, daemon: Make) -> None:
    web = limited(node, "web", "burstable", 50_000)
    closed = limited(node, "closed", "burstable", 50_000, annotations={"koordinator.sh/cpuBurst": '{"policy": "none"}'})
    try:
        node.read(web.group, "cpu", BURST)
    except FileNotFoundError:
        pytest.skip("REAL KERNEL TEST NOT RUN: this kernel has no CFS burst")
    item = daemon(policies={"burst": {"enabled": True, "percent": 60}}).up()
    wait_for(lambda: levels(node, web, BURST) == ("30000", "30000"), told=item.tail)
    assert levels(node, closed, BURST) == ("0", "0")
    item.configure(policies={"burst": {"enabled": True, "percent": 100}, "normalise": {"ratio": 2.0}})
    item.signal(signal.SIGHUP)
    wait_for(lambda: levels(node, web, BURST) == ("25000", "25000"), told=item.tail)
    assert levels(node, web, QUOTA) == ("50000", "25000")
    item.configure()
    item.signal(signal.SIGHUP)
    wait_for(lambda: levels(node, web, BURST) == ("0", "0"), told=item.tail)
    assert levels(node, web, QUOTA) == ("50000", "50000")
    assert item.lines("warning", "error") == []


# By the quota law: under the harm law BE pods in the idle class have no quota. ``always``: from Linux 6.6 on
# the least weight of besteffort takes the place of the idle class otherwise.
IDLE = {
    "idle_class": {"enabled": True, "always": True},
    "reclaimed": {"budget": {"limit_percent": 1, "floor_percent": 50, "law": "quota"}},
}


def test_the_idle_class_is_set_and_removed_and_the_weight_is_unchanged(node: DirectoryNode, daemon: Make) -> None:
    be = node.add("be", shares=102)
    try:
        node.read(be.group, "cpu", "cpu.idle")
    except FileNotFoundError:
        pytest.skip("REAL KERNEL TEST NOT RUN: this kernel has no idle class for groups")
    before = node.tree()
    item = daemon(policies=IDLE).up()
    wait_for(lambda: bounded(node, be.main), told=item.tail)
    wait_for(lambda: node.read(be.group, "cpu", "cpu.idle") == "1", told=item.tail)
    item.look_again(3)
    assert item.standing(be.group, "cpu.weight")["detail"] == "takes effect once cpu.idle ends"
    item.configure()
    item.signal(signal.SIGHUP)
    wait_for(lambda: node.read(be.group, "cpu", "cpu.idle") == "0", told=item.tail)
    wait_for(lambda: node.read(be.group, "cpu", "cpu.shares") == "1024", told=item.tail)
    item.configure(policies=IDLE)
    item.signal(signal.SIGHUP)
    wait_for(lambda: node.read(be.group, "cpu", "cpu.idle") == "1", told=item.tail)
    assert item.lines("warning", "error") == []
    status, answer = item.call("POST", "/restore", {"by": "test"})
    assert (status, answer["left"]) == (200, 0), answer
    assert node.tree() == before
