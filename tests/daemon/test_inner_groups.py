"""Groups that a tenant has made inside a BE container (docker, kind, systemd), on the real kernel."""

import contextlib
import os
import signal
from collections.abc import Callable

import pytest

from tests.daemon.process import Daemon, wait_for
from tests.daemon.test_placement import DEDICATED
from tests.fakes.node import DirectoryNode, NodePod

Make = Callable[..., Daemon]
QUOTA = {"reclaimed": {"form": "quota", "budget": {"law": "quota", "limit_percent": 1, "floor_percent": 50}}}
"""One of two CPUs."""
DOCKER = f"docker/{'cd' * 32}"
UNIT = "system.slice/build.service"
pytestmark = pytest.mark.skipif(os.cpu_count() != 2, reason="REAL KERNEL TEST NOT RUN: it divides two CPUs")


def make_inner(node: DirectoryNode, pod: NodePod, name: str) -> str:
    """A group inside the pod's container, with a copy of its CPUs, as docker's own runc makes it."""
    path = pod.main.group
    for part in name.split("/"):
        path = f"{path}/{part}"
        for controller in ("cpu", "cpuset"):
            os.makedirs(node.path(path, controller), exist_ok=True)
        for file in ("cpuset.cpus", "cpuset.mems"):
            if not node.read(path, "cpuset", file):
                node.write(path, "cpuset", file, node.read(path.rpartition("/")[0], "cpuset", file))
    return path


def remove_inner(node: DirectoryNode, pod: NodePod, name: str) -> None:
    """With the groups above it that have no other."""
    parts = name.split("/")
    for depth in range(len(parts), 0, -1):
        path = f"{pod.main.group}/{'/'.join(parts[:depth])}"
        for controller in ("cpu", "cpuset"):
            with contextlib.suppress(OSError):
                os.rmdir(node.path(path, controller))


def cpus(node: DirectoryNode, path: str) -> str:
    return node.read(path, "cpuset", "cpuset.cpus")


@pytest.mark.parametrize("name", [DOCKER, UNIT])
def test_an_inner_quota_above_the_budget_costs_its_own_pod_only_and_ends_with_it(
    node: DirectoryNode, daemon: Make, name: str
) -> None:
    ci, other = node.add("ci"), node.add("other")
    besteffort = node.pods[ci.uid].group.rpartition("/")[0]
    inner = make_inner(node, ci, name)
    node.write(inner, "cpu", "cpu.cfs_quota_us", "200000")
    try:
        item = daemon(policies=QUOTA).up()
        # Twice the budget is the least that the kernel takes; the other pod has a part of the budget of its own.
        wait_for(lambda: node.quota(besteffort) == "200000", told=item.tail)
        wait_for(lambda: 0 < int(node.quota(other.main.group)) <= 100_000, told=item.tail)
        rows = {row["path"]: row["settings"] for row in item.state("directories")["directories"]}
        (status,) = [row for row in rows[besteffort] if row["knob"] == "cpu.quota"]
        assert (status["state"], status["wanted"], status["actual"]) == ("blocked", "100000", "200000")
        assert inner in status["detail"]
        (problem,) = [line for line in item.problems() if line.startswith(f"{besteffort}: cpu.quota")]
        assert inner in problem
        assert "default/ci" in problem
        reason = item.state("budget")["budget"]["reasons"]["quota"]
        assert reason.startswith("not in force on 1 of 2 groups: default/ci: ")
        assert "planned: CPU quota per container: kubepods/besteffort takes no less than 2.00 CPU" in reason
    finally:
        remove_inner(node, ci, name)
    # No restart: the budget returns to the directory.
    wait_for(lambda: node.quota(besteffort) == "100000", told=item.tail)
    wait_for(lambda: node.quota(other.main.group) == "-1", told=item.tail)
    assert [line for line in item.problems() if "cpu.quota" in line] == []
    assert item.state("budget")["budget"]["reasons"]["quota"] == "enforced as CPU quota on kubepods/besteffort"


def test_a_pod_that_goes_with_its_inner_groups_leaves_nothing_in_the_way(node: DirectoryNode, daemon: Make) -> None:
    ci = node.add("ci")
    node.add("other")
    besteffort = ci.group.rpartition("/")[0]
    node.write(make_inner(node, ci, DOCKER), "cpu", "cpu.cfs_quota_us", "200000")
    item = daemon(policies=QUOTA).up()
    wait_for(lambda: node.quota(besteffort) == "200000", told=item.tail)
    remove_inner(node, ci, DOCKER)
    node.remove(ci)
    wait_for(lambda: node.quota(besteffort) == "100000", told=item.tail)


@pytest.mark.parametrize("name", [DOCKER, UNIT])
def test_a_container_leaves_an_owned_cpu_with_the_groups_inside_it(
    node: DirectoryNode, daemon: Make, name: str
) -> None:
    ci = node.add("ci", cpus="0-1")
    inner = make_inner(node, ci, name)
    before = node.tree()
    item = daemon().up()
    own = node.add("own", qos="", annotations=DEDICATED, cpus="0-1", shares=1024, requests={"cpu": "1"})
    wait_for(lambda: node.cpus(own.main) in {"0", "1"}, told=item.tail)
    rest = "1" if node.cpus(own.main) == "0" else "0"
    wait_for(lambda: node.cpus(ci.main) == rest, told=item.tail)
    assert (cpus(node, inner), cpus(node, inner.rpartition("/")[0])) == (rest, rest)
    assert [line for line in item.problems() if "cpu.set" in line or "exclusive" in line] == []
    # Docker starts another container meanwhile, which copies what it sees.
    late = make_inner(node, ci, f"{name.partition('/')[0]}/late")
    assert cpus(node, late) == rest
    status, answer = item.call("POST", "/restore", {"by": "test"})
    assert (status, answer["left"]) == (200, 0), answer
    assert [cpus(node, path) for path in (ci.main.group, inner, late)] == ["0-1"] * 3
    remove_inner(node, ci, f"{name.partition('/')[0]}/late")
    node.remove(own)
    assert node.tree() == before


def test_the_groups_inside_grow_again_with_their_container(node: DirectoryNode, daemon: Make) -> None:
    ci = node.add("ci", cpus="0-1")
    inner = make_inner(node, ci, DOCKER)
    item = daemon(policies={"reclaimed": {"form": "quota"}}).up()
    own = node.add("own", qos="", annotations=DEDICATED, cpus="0-1", shares=1024, requests={"cpu": "1"})
    wait_for(lambda: node.cpus(own.main) in {"0", "1"}, told=item.tail)
    item.configure(policies={"reclaimed": {"form": "cpuset"}})
    item.signal(signal.SIGHUP)
    wait_for(lambda: len(node.cpus(ci.main)) == 1, told=item.tail)
    late = make_inner(node, ci, "docker/late")
    assert cpus(node, inner) == cpus(node, late) == node.cpus(ci.main)
    item.configure(policies={"reclaimed": {"form": "quota"}})
    item.signal(signal.SIGHUP)
    wait_for(lambda: node.cpus(ci.main) == "0-1", told=item.tail)
    wait_for(lambda: cpus(node, inner) == cpus(node, late) == "0-1", told=item.tail)
    remove_inner(node, ci, "docker/late")
    remove_inner(node, ci, DOCKER)
