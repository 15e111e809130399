"""Memory as a running daemon keeps it on real cgroups: bounds, soft limits, BE processes first for the OOM killer."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon.process import Daemon, bounded, wait_for
from tests.fakes.node import DirectoryNode, NodePod

Make = Callable[..., Daemon]
SOFT, LIMIT = "memory.soft_limit_in_bytes", "memory.limit_in_bytes"
NO_LIMIT = str((1 << 63) // 4096 * 4096 - 4096)
MEGA = 1 << 20
ON = {
    "be_memory": {"enabled": True, "hard_percent": 10},
    "memory_qos": {"enabled": True},
    "oom_score": {"enabled": True},
    "memory_reclaim": {"enabled": True},
}
SOON = {"policies.oom_score.sweep_s": 1}


def batch(node: DirectoryNode) -> NodePod:
    return node.add(
        "be",
        qos="burstable",
        shares=102,
        process=True,
        labels={"koordinator.sh/qosClass": "BE"},
        annotations={"katalyst.kubewharf.io/memory_enhancement": '{"oom_priority": "-51"}'},
        requests={"kubernetes.io/batch-memory": "100Mi"},
        limits={"kubernetes.io/batch-memory": "200Mi"},
    )


def score(pod: NodePod) -> str:
    assert pod.main.process is not None
    with open(f"/proc/{pod.main.process.pid}/oom_score_adj") as file:
        return file.read().strip()


def test_memory_settings_come_with_the_configuration_and_go_with_it(node: DirectoryNode, daemon: Make) -> None:
    be = batch(node)
    plain = node.add("plain", shares=102)
    before, old = node.tree(), score(be)
    item = daemon(policies=ON, constants=SOON).up()
    wait_for(lambda: bounded(node, plain.main), told=item.tail)
    wait_for(lambda: node.read(be.main.group, "memory", SOFT) == str(190 * MEGA), told=item.tail)
    assert node.read(be.main.group, "memory", LIMIT) == str(200 * MEGA)
    besteffort = f"{node.kubepods}/besteffort"
    wait_for(lambda: node.read(besteffort, "memory", SOFT) != NO_LIMIT, told=item.tail)
    bound = int(node.read(besteffort, "memory", SOFT))
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) << 10
    assert 0 < bound <= total * 9 // 10
    # The soft limit is written first.
    wait_for(lambda: node.read(besteffort, "memory", LIMIT) != NO_LIMIT, told=item.tail)
    assert bound < int(node.read(besteffort, "memory", LIMIT)) <= bound * 11 // 10
    wait_for(lambda: score(be) == "951", told=item.tail)
    state = item.state("sides", "budget")
    assert state["sides"]["oom_score"]["containers"] == {be.main.group: 951}
    assert state["sides"]["memory_reclaim"]["wanted"] is True
    assert "1 BE pods outside besteffort" in state["budget"]["reasons"]["be_memory"]
    item.configure(policies={})
    item.signal(signal.SIGHUP)
    wait_for(lambda: node.read(besteffort, "memory", SOFT) == NO_LIMIT, told=item.tail)
    wait_for(lambda: node.read(be.main.group, "memory", SOFT) == NO_LIMIT, told=item.tail)
    wait_for(lambda: score(be) == old, told=item.tail)
    assert node.read(be.main.group, "memory", LIMIT) == str(200 * MEGA), "the batch limit is another policy's"
    assert item.lines("warning", "error") == []
    status, answer = item.call("POST", "/restore", {"by": "test"})
    assert (status, answer["left"]) == (200, 0), answer
    assert node.tree() == before


SWAP = "memory.memsw.limit_in_bytes"


def swapping(item: Daemon, path: str) -> Daemon:
    """The daemon sees a machine with 1 GiB of swap: this one's swap is of no interest here, its bounds are."""
    with open("/proc/meminfo") as file:
        rows = [line for line in file if not line.startswith("Swap")]
    with open(path, "w") as file:
        file.write("".join(rows) + "SwapTotal:       1048576 kB\nSwapFree:        1048576 kB\n")
    script = f'mount --bind {path} /proc/meminfo && exec "$@"'
    item.within = ("unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh")
    return item


def test_swap_is_bounded_by_class_in_the_order_that_the_kernel_takes(node: DirectoryNode, daemon: Make) -> None:
    if not os.path.exists(node.path("", "memory", SWAP)):
        pytest.skip("REAL KERNEL TEST NOT RUN: swap is not accounted")
    be = batch(node)
    web = node.add("web", qos="burstable", shares=512, memory=100 * MEGA, limits={"memory": "100Mi"})
    node.add("free", qos="burstable", shares=512, requests={"cpu": "500m"})
    before = node.tree()

    def bounds(pod: NodePod) -> tuple[int, int]:
        """Memory, and memory and swap together, in MiB."""
        memory, both = (int(node.read(pod.main.group, "memory", file)) for file in (LIMIT, SWAP))
        return memory // MEGA, both // MEGA

    def configure(be_percent: int | None, online_percent: int | None) -> None:
        classes = {"reclaimed": {"swap_percent": be_percent}, "shared": {"swap_percent": online_percent}}
        item.configure(policies={"memory_qos": {"enabled": True, **classes}})
        item.signal(signal.SIGHUP)

    memory_qos = {"enabled": True, "reclaimed": {"swap_percent": 50}, "shared": {"swap_percent": 0}}
    item = swapping(daemon(policies={"memory_qos": memory_qos}), f"{node.root}/meminfo")
    item.up()
    wait_for(lambda: bounds(be) == (200, 300), told=item.tail)
    wait_for(lambda: bounds(web) == (100, 100), told=item.tail)
    # Up and down with the limit, whichever of the two files has to go first.
    for amount, both in ((400, 600), (50, 75), (200, 300)):
        be.meta["resources"]["limits"]["kubernetes.io/batch-memory"] = f"{amount}Mi"
        wait_for(lambda amount=amount, both=both: bounds(be) == (amount, both), told=item.tail)  # type: ignore[misc]
    for percent in (0, 100, 50):
        configure(percent, 100 - percent)
        wait_for(lambda percent=percent: bounds(be) == (200, 200 + 2 * percent), told=item.tail)  # type: ignore[misc]
        wait_for(lambda percent=percent: bounds(web) == (100, 200 - percent), told=item.tail)  # type: ignore[misc]
    reasons = item.state("budget")["budget"]["reasons"]["memory_qos"]
    assert "swap of 1 pods without a memory limit is not bounded on cgroup v1, such as default/free" in reasons
    configure(None, None)
    wait_for(lambda: (bounds(be), bounds(web)) == ((200, 200), (100, 100)), told=item.tail)
    assert item.lines("warning", "error") == []
    # A killed daemon's bounds are undone in the same order.
    configure(50, 0)
    wait_for(lambda: bounds(be) == (200, 300), told=item.tail)
    item.kill()
    assert item.control("restore").returncode == 0
    assert node.tree() == before


def test_an_online_pods_own_oom_score_is_obeyed_by_container_and_given_back(node: DirectoryNode, daemon: Make) -> None:
    # Without CAP_SYS_RESOURCE the kernel refuses numbers below a process's own.
    may_lower = Path("/proc/self/status").read_text().partition("CapEff:\t")[2].split()[0]
    low, lowest = (-999, -997) if int(may_lower, 16) >> 24 & 1 else (1, 1)
    spec = f'{{"main": 300, "side-1": {low}, "other": 5}}'
    web = node.add(
        "web",
        qos="burstable",
        shares=102,
        containers=2,
        process=True,
        labels={"koordinator.sh/qosClass": "LS"},
        annotations={"koordinator.sh/oom-score-adj-spec": spec, "koordinator.sh/oom-score-adj": "200"},
        requests={"cpu": "200m"},
    )
    late = node.add("late", qos="burstable", shares=102, process=True, requests={"cpu": "100m"})

    def scores(pod: NodePod) -> list[int]:
        return [
            int(Path(f"/proc/{box.process.pid}/oom_score_adj").read_text())
            for box in pod.boxes[1:]
            if box.process is not None
        ]

    old = scores(web), scores(late)
    item = daemon(policies={"oom_score": {"enabled": True, "online": True}}, constants=SOON).up()
    wait_for(lambda: scores(web) == [300, lowest], told=item.tail)
    assert scores(late) == old[1]
    # The kubelet lists a change, and a process that the container starts later inherits it.
    web.meta["annotations"]["koordinator.sh/oom-score-adj-spec"] = '{"main": 899}'
    wait_for(lambda: scores(web) == [899, 200], told=item.tail)
    late.meta["annotations"]["koordinator.sh/oom-score-adj"] = "1000"
    wait_for(lambda: scores(late) == [900], told=item.tail)
    extra = subprocess.Popen(["/bin/sleep", "3600"])
    try:
        node.write(late.main.group, "cpu", "cgroup.procs", str(extra.pid))
        node.write(late.main.group, "cpuset", "cgroup.procs", str(extra.pid))
        wait_for(lambda: Path(f"/proc/{extra.pid}/oom_score_adj").read_text().strip() == "900", told=item.tail)
        del web.meta["annotations"]["koordinator.sh/oom-score-adj"]
        web.meta["annotations"]["koordinator.sh/oom-score-adj-spec"] = "not JSON"
        wait_for(lambda: scores(web) == old[0], told=item.tail)
        wait_for(lambda: any("oom-score-adj-spec" in text for text in item.problems()), told=item.tail)
        item.kill()
        assert scores(late) == [900]
        assert item.control("restore").returncode == 0
        assert scores(late) == old[1]
    finally:
        extra.kill()
        extra.wait()
