"""Memory as a running daemon keeps it on real cgroups: bounds, soft limits, BE processes first for the OOM killer."""

import signal
from collections.abc import Callable

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
