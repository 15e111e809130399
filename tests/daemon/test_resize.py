"""In-place resize: the new size is in force without a restart, and what is requested but not admitted is reported."""

from collections.abc import Callable
from typing import Any

from tests.daemon.process import Daemon, bounded, wait_for
from tests.fakes.node import DirectoryNode, NodePod

Make = Callable[..., Daemon]
KOORDINATOR = "koordinator.sh/qosClass"
RARELY = {"kubelet.period_s": 300}
"""The list is asked for only when something tells that it has changed."""


def cpu(milli: int) -> dict[str, str]:
    return {"cpu": f"{milli}m"}


def oci(milli: int, limit: int) -> dict[str, Any]:
    """What the kubelet has the runtime set for such a request and limit."""
    return {"cpu": {"shares": milli * 1024 // 1000, "quota": limit * 100, "period": 100_000}, "memory": {}}


def sized(node: DirectoryNode, milli: int, limit: int, **more: Any) -> NodePod:
    pod = node.add(
        qos="burstable",
        shares=milli * 1024 // 1000,
        quota_us=limit * 100,
        requests=cpu(milli),
        limits=cpu(limit),
        process=True,
        **more,
    )
    node.kubelet.allocated(pod.uid, pod.main.name, cpu(milli), cpu(limit))
    return pod


def in_force(node: DirectoryNode, pod: NodePod) -> tuple[str, str]:
    return node.shares(pod.main), node.quota(pod.main.group)


def test_a_resized_be_pod_has_the_new_size_and_stays_bounded(node: DirectoryNode, daemon: Make) -> None:
    pod = sized(node, 200, 400, labels={KOORDINATOR: "BE"})
    item = daemon(constants=RARELY).up()
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    container, number = pod.main.id, node.kubelet.api.requests
    # BE has the least weight, whatever it asks for; its limit is its own.
    assert in_force(node, pod) == ("2", "40000")

    # More is requested; the kubelet has no room yet. No value changes, and it is reported.
    pod.meta["resources"] = {"requests": cpu(400), "limits": cpu(800)}
    pending = {"type": "PodResizePending", "status": "True", "reason": "Deferred", "message": "node is full"}
    pod.meta["status"] = {"conditions": [pending]}
    node.settle(pod.main, {**oci(200, 400), "memory": {"limit": 256 << 20}})
    message = "deferred: requests.cpu 200m -> 400m, limits.cpu 400m -> 800m (node is full)"
    wait_for(lambda: item.pod(pod.uid)["resizes"] == {"main": message}, told=lambda: str(item.pod(pod.uid)))
    assert node.kubelet.api.requests > number, "the runtime's update made us ask, long before the period was over"
    wait_for(lambda: bounded(node, pod.main) and in_force(node, pod) == ("2", "40000"), told=item.tail)

    # Now there is: it is admitted and actuated, and the container runs on.
    pod.meta["status"] = {}
    node.kubelet.allocated(pod.uid, pod.main.name, cpu(400), cpu(800))
    node.settle(pod.main, oci(400, 800))
    wait_for(lambda: item.pod(pod.uid)["resizes"] == {}, told=lambda: str(item.pod(pod.uid)))
    wait_for(lambda: bounded(node, pod.main) and in_force(node, pod) == ("2", "80000"), told=item.tail)
    assert pod.main.id == container
    assert pod.main.process is not None
    assert pod.main.process.poll() is None
    assert item.problems() == []

    # What is restored is the new size.
    status, answer = item.call("POST", "/restore", {"by": "test"})
    assert (status, answer["left"]) == (200, 0), answer
    assert (in_force(node, pod), node.cpus(pod.main)) == (("409", "80000"), "0-1")
