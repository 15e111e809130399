"""A burst of 110 BE pods of one Deployment on a real kubelet: what each container saw at its first instruction.

With -s the figures are printed.
"""

import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from reconciler.cli.rights import RightsUse, manifest
from tests.cluster.control_plane import ControlPlane, Object
from tests.cluster.real_node import NODE, RealNode
from tests.cluster.test_closed_node import until
from tests.e2e.agent import Agent

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

PODS = 110
MEMORY = 96 << 20
MILLI = 300
SHARES = str(MILLI * 1024 // 1000)
LEAST = (105, 90)
"""Of `PODS`, and of those with their weight, which the runtime writes until a few milliseconds before the first
instruction: 109, 109 measured, on a machine that other tests use, too."""
LEAST_ROLLOUT = 90
"""104 and 110 measured at a load of 40 to 68, with the weight 77 and 93: but for those that began in the 2 s of the
hand-over (7 s at most) all had it, as no daemon is there to write it between the runtime's own write and the first
instruction. How long that takes, and how many containers start in it, is the machine's."""


def offer(plane: ControlPlane, name: str, amount: int) -> None:
    """An extended resource of the node, as a manager writes it."""
    patch = {"status": {"capacity": {name: str(amount)}, "allocatable": {name: str(amount)}}}
    code, answer = plane.call("PATCH", f"/api/v1/nodes/{NODE}/status", patch, "application/merge-patch+json")
    assert code == 200, answer


def deployment(plane: ControlPlane, name: str, replicas: int, template: Object) -> None:
    body = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {**template, "metadata": {"labels": {"app": name, **template["metadata"]["labels"]}}},
        },
    }
    plane.apply(json.dumps(body))


def remove(real: RealNode, name: str) -> None:
    real.plane.call("DELETE", f"/apis/apps/v1/namespaces/default/deployments/{name}")
    until(
        lambda: real.plane.call("GET", f"/api/v1/namespaces/default/pods?labelSelector=app={name}")[1]["items"] == [],
        400,  # the kubelet ends 110 pods: more than 180 s at a load of 40
    )


def running(plane: ControlPlane, name: str) -> list[Object]:
    return [pod for pod in plane.pods(f"app={name}") if pod["status"].get("phase") == "Running"]


@pytest.fixture
def agent(real: RealNode, tmp_path: Path) -> Iterator[Agent]:
    """The daemon that waits for another one's hand-over; and no pod is left."""
    made = daemon(real, tmp_path / "first")
    made.start("--wait")
    made.wait_ready()
    try:
        yield made
    finally:
        made.stop()
        remove(real, "burst")


def daemon(real: RealNode, directory: Path) -> Agent:
    plane = real.plane
    plane.apply(manifest([RightsUse.PODS], "kube-system"))
    # Half of the machine for BE work, whatever else runs on it: the batch limit of a pod is less, and so written.
    budget = {"limit_percent": 1, "floor_percent": 50}
    return real.daemon(
        directory,
        apiserver={"kubeconfig": str(plane.account_kubeconfig()), "watch_pods": "on"},
        policies={"idle_buffer": {"enabled": False}, "reclaimed": {"budget": budget}},
    )


def logged_s(agent: Agent, text: str) -> float:
    """The time (monotonic clock) of the first line with this text in a daemon's log."""
    line = next(line for line in Path(agent.log).read_text().splitlines() if text in line)
    at = datetime.fromisoformat(line.partition(" ")[0]).timestamp()
    return at - time.time() + time.monotonic()


def in_place(
    real: RealNode, pods: list[Object], handover_s: tuple[float, float] = (math.inf, math.inf)
) -> Counter[str]:
    """How many containers had each value at their first instruction.

    ``beside``: those that began before or after the hand-over; ``with shares``: of these, with their weight.
    """
    everywhere = os.sched_getaffinity(0)
    counts: Counter[str] = Counter()
    for pod in pods:
        seen = real.report(pod)
        began_s = seen.first_ns / 1e9
        if not handover_s[0] <= began_s <= handover_s[1]:
            counts["beside"] += 1
            counts["with shares"] += seen.values["cpu.shares"] == SHARES
        good = {
            "CPU set": seen.affinity < everywhere,
            "quota": seen.values["cpu.cfs_quota_us"] == str(MILLI * 100),
            "shares": seen.values["cpu.shares"] == SHARES,
            "memory": seen.values["memory.limit_in_bytes"] == str(MEMORY),
        }
        counts.update(name for name, is_good in good.items() if is_good)
        counts["all"] += all(good.values())
    return counts


@pytest.mark.parametrize("rollout", [False, True])
def test_a_burst_is_bounded_from_its_first_instruction(
    real: RealNode, agent: Agent, tmp_path: Path, *, rollout: bool
) -> None:
    """``rollout``: a second daemon takes over in the middle of it."""
    plane = real.plane
    offer(plane, "kubernetes.io/batch-cpu", 1_000_000)
    offer(plane, "kubernetes.io/batch-memory", 1 << 40)
    resources = {"kubernetes.io/batch-cpu": str(MILLI), "kubernetes.io/batch-memory": str(MEMORY)}
    second = daemon(real, tmp_path / "second")
    try:
        deployment(plane, "burst", PODS, real.template({"koordinator.sh/qosClass": "BE"}, resources=resources))
        if rollout:
            until(lambda: len(running(plane, "burst")) > PODS // 5, 240, told=lambda: real.log("kubelet"))
            second.start("--wait")
        until(lambda: len(running(plane, "burst")) == PODS, 400, told=lambda: real.log("kubelet"))
        handover_s, during = (math.inf, math.inf), ""
        if rollout:
            until(lambda: "daemon: ready" in Path(second.log).read_text(), told=second.tail)
            handover_s = (logged_s(agent, "signal=SIGUSR2"), logged_s(second, "daemon: ready"))
            during = f", hand-over of {handover_s[1] - handover_s[0]:.1f} s"
        counts = in_place(real, running(plane, "burst"), handover_s)
        print(f"\nin place at the first instruction, of {PODS}{during}: {dict(counts)}")
        # All of them are bounded a moment later.
        until(
            lambda: {real.container_value(pod, "cpu/cpu.shares") for pod in running(plane, "burst")} == {SHARES},
            told=agent.tail,
        )
    finally:
        second.stop()
    least, least_shares = LEAST
    assert min(counts[name] for name in ("CPU set", "quota", "memory")) >= (LEAST_ROLLOUT if rollout else least)
    if rollout:
        assert counts["beside"] >= PODS // 5
        # The same part as without a hand-over.
        assert counts["with shares"] * PODS >= least_shares * counts["beside"]
    else:
        assert counts["shares"] >= least_shares
