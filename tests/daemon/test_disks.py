"""Disk limits as the daemon keeps them on a real blkio hierarchy: divided again, kept through a kill, restored."""

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from cgroupfs.errors import SourceError
from reconciler.sources.disks import find_disk
from tests.cgroupfs.kernelgroup import remove_tree
from tests.daemon.process import Daemon, wait_for
from tests.e2e.mounts import hierarchies
from tests.fakes.node import DirectoryNode, NodePod

Make = Callable[..., Daemon]
WRITES = "blkio.throttle.write_bps_device"
MEGA = 1 << 20


@pytest.fixture
def device(node: DirectoryNode) -> Iterator[str]:
    """The disk below the node's directory, on a machine with blkio on v1; the node's groups there go with the test."""
    if "blkio" not in hierarchies():
        pytest.skip("REAL KERNEL TEST NOT RUN: no cgroup v1 hierarchy of blkio is mounted")
    try:
        disk = find_disk(node.root)
    except SourceError as exc:
        pytest.skip(f"REAL KERNEL TEST NOT RUN: {exc}")
    for path in (node.cgroup_root, node.kubepods, node.besteffort, f"{node.kubepods}/burstable"):
        os.mkdir(node.path(path, "blkio"))
    try:
        yield disk.device
    finally:
        remove_tree(node.path(node.cgroup_root, "blkio"))


def added(node: DirectoryNode, name: str) -> NodePod:
    """A BE pod that the runtime has given its blkio groups as well."""
    pod = node.add(name)
    for group in (pod.group, *(box.group for box in pod.boxes)):
        os.mkdir(node.path(group, "blkio"))
    return pod


def limit(node: DirectoryNode, pod: NodePod) -> str:
    return node.read(pod.main.group, "blkio", WRITES)


def test_limits_are_divided_kept_through_a_kill_and_removed(node: DirectoryNode, daemon: Make, device: str) -> None:
    first = added(node, "first")
    rule = {"name": node.root, "write_bps": 8 * MEGA}
    policies = {"disk": {"enabled": True, "weight_be": None, "devices": [rule]}}
    item = daemon(policies=policies).up()
    wait_for(lambda: limit(node, first) == f"{device} {8 * MEGA}", told=item.tail)
    second = added(node, "second")
    wait_for(lambda: limit(node, second) == f"{device} {4 * MEGA}", told=item.tail)
    wait_for(lambda: limit(node, first) == f"{device} {4 * MEGA}", told=item.tail)
    assert node.read(first.boxes[0].group, "blkio", WRITES) == "", "pause containers are not managed"
    item.kill()
    two = daemon(policies=policies).up()
    assert limit(node, first) == limit(node, second) == f"{device} {4 * MEGA}"
    two.configure(policies={"disk": {"enabled": True, "weight_be": None, "share": "pod", "devices": [rule]}})
    two.signal(signal.SIGHUP)
    wait_for(lambda: limit(node, first) == f"{device} {8 * MEGA}", told=two.tail)
    status, answer = two.call("POST", "/restore", {"by": "test"})
    assert (status, answer["left"]) == (200, 0), answer
    assert limit(node, first) == limit(node, second) == ""
