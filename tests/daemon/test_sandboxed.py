"""Pods in gVisor on real cgroups: what is promised holds in the pod's own group, where all its processes are."""

import os
from collections.abc import Callable

from tests.daemon.process import Daemon, wait_for
from tests.fakes.node import DirectoryNode, NodePod

Make = Callable[..., Daemon]
LIMIT, TOGETHER = "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
MEGA = 1 << 20


def in_gvisor(node: DirectoryNode, pod: NodePod) -> NodePod:
    """As containerd's shim marks each bundle of the pod."""
    for box in pod.boxes:
        with open(f"{node.bundles}/{box.id}/shim-binary-path", "w") as file:
            file.write("/usr/local/bin/containerd-shim-runsc-v1")
    return pod


def test_a_batch_memory_limit_is_the_pods_and_goes_with_the_restore(node: DirectoryNode, daemon: Make) -> None:
    limits = {"kubernetes.io/batch-memory": "200Mi", "kubernetes.io/batch-cpu": "500"}
    be = in_gvisor(node, node.add("be", containers=2, requests=limits, limits=limits))
    before = node.read(be.group, "memory", LIMIT)
    item = daemon().up()
    wait_for(lambda: node.read(be.group, "memory", LIMIT) == str(400 * MEGA), told=item.tail)
    if os.path.exists(node.path(be.group, "memory", TOGETHER)):
        wait_for(lambda: node.read(be.group, "memory", TOGETHER) == str(400 * MEGA), told=item.tail)
    assert node.read(be.main.group, "memory", LIMIT) == before
    status, answer = item.call("POST", "/restore", {"by": "test"})
    assert (status, answer["left"]) == (200, 0), answer
    assert node.read(be.group, "memory", LIMIT) == before


def test_exclusive_cpus_of_the_kubelet_are_the_pods(node: DirectoryNode, daemon: Make) -> None:
    """The kubelet's CPU is in the file of an empty group; the pod's own group has all CPUs."""
    pinned = in_gvisor(node, node.add("pinned", qos="", cpus="1", shares=1024, quota_us=100_000))
    node.write(pinned.group, "cpu", "cpu.cfs_quota_us", "100000")
    node.kubelet.cpu_manager("static", "0", {pinned.uid: {"main": "1"}})
    item = daemon(node={"resync_s": 2.0}).up()
    wait_for(lambda: node.read(pinned.group, "cpuset", "cpuset.cpus") == "1", told=item.tail)
    # Only then is its quota of no use.
    wait_for(lambda: node.quota(pinned.group) == "-1", told=item.tail)
    assert not [line for line in item.problems() if "CPU set file" in line]
