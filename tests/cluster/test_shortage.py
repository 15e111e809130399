"""The whole daemon in a shortage, on a real control plane: the node is closed, the pod evicted, and not back before.

The node is one of directories (tests/daemon); its pods are those that the real scheduler binds to it.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reconciler.cli.rights import RightsUse
from state.closing import CLOSED_KEY
from tests.cluster.control_plane import MERGE_PATCH, ControlPlane, Object, control_plane
from tests.cluster.test_closed_node import SETTLE_S, bound, deployment, evict, runs_on, until
from tests.daemon.process import Daemon
from tests.e2e.mounts import hierarchies
from tests.fakes.node import HIERARCHIES, DirectoryNode, RealKernel

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

BATCH = {"kubernetes.io/batch-cpu": "200000"}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[DirectoryNode]:
    lacking = [name for name in HIERARCHIES if name not in hierarchies()]
    if lacking or os.geteuid() != 0:
        pytest.skip(f"REAL KERNEL TEST NOT RUN: needs root and cgroup v1 ({', '.join(lacking)})")
    kernel = RealKernel()
    root = f"/bypassd-test-cluster-{os.getpid()}"
    with DirectoryNode(str(tmp_path / "node"), kernel, kernel.mounts, cgroup_root=root, runc="runc") as made:
        yield made


@pytest.fixture
def plane(tmp_path: Path, node: DirectoryNode) -> Iterator[ControlPlane]:
    """With n1, whose pods are on the node of directories, and n2."""

    def start(pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        if uid not in node.pods and pod["spec"]["nodeName"] == "n1":
            node.add(pod["metadata"]["name"], uid=uid, shares=102, listed=False, process=True)

    def end(pod: Object) -> None:
        if (known := node.pods.get(pod["metadata"]["uid"])) is not None:
            node.remove(known)

    with control_plane(tmp_path / "plane") as plane:
        for name in ("n1", "n2"):
            plane.add_node(name)
        plane.bound, plane.gone = start, end
        yield plane


SOON = {
    "closing.reopen_s": 10,
    "eviction.interval_s": 1,
    "eviction.limits.quiet_s": 0,
    "eviction.spared.young_s": 0,
}


def configuration(kubeconfig: Path, **eviction: Any) -> dict[str, Any]:
    """The BE pod requests more than 1.2 times what the node has for it."""
    triggers: dict[str, dict[str, Any]] = {"interference": {"enabled": False}, "numa_memory": {"enabled": False}}
    triggers |= {"memory_pressure": {"enabled": False}, "reclaimed_resource": {"enabled": True, "cpu_ratio": 1.2}}
    return {
        "node": {"name": "n1"},
        "kubelet": {"endpoint": "off"},
        "apiserver": {"kubeconfig": str(kubeconfig), "watch_pods": "on"},
        "closing": {"mark": "NoSchedule"},
        "constants": SOON,
        "eviction": {
            "enabled": True,
            "dry_run": False,
            "triggers": triggers,
            **eviction,
        },
    }


def closing(daemon: Daemon) -> dict[str, Any]:
    facts: dict[str, Any] = daemon.state("eviction")["eviction"]["closing"]
    return facts


def outcomes(daemon: Daemon) -> list[tuple[str, str]]:
    return [(case["outcome"], case["means"]) for case in daemon.state("eviction")["eviction"]["ended"]]


def test_in_a_shortage_an_evicted_pod_does_not_come_back_and_after_it_does(
    plane: ControlPlane, node: DirectoryNode
) -> None:
    kubeconfig = bound(plane, RightsUse.TAINT, "n1", RightsUse.PODS, RightsUse.EVICTION)
    daemon = Daemon(node, **configuration(kubeconfig))
    try:
        daemon.up()
        deployment(plane, labels={"koordinator.sh/qosClass": "BE"}, requests=BATCH)
        # Its pod is evicted, and pending from then on: n2 takes none.
        until(lambda: plane.taints("n1"), 90, told=lambda: daemon.control("evictions", "--all").stdout + daemon.tail())
        until(lambda: runs_on(plane) == [""], 60)
        (taint,) = plane.taints("n1")
        assert (taint["key"], taint["effect"]) == (CLOSED_KEY, "NoSchedule")
        facts = closing(daemon)
        assert (facts["closed"], facts["state"]) == (True, "in place")
        assert facts["reason"].startswith("reclaimed_resource: ")
        until(lambda: outcomes(daemon) == [("done", "api")])
        assert daemon.metric("bypassd_node_closed") == {"": 1.0}
        shown = daemon.control("evictions").stdout
        assert "the node is closed to new BE pods since" in shown
        assert "taint bypassd/closed:NoSchedule" in shown
        assert daemon.state("headroom")["headroom"]["milli"] == 0
        # The pod that used too much is gone, so the shortage is over: it opens by itself, and the pod is back.
        until(lambda: not plane.taints("n1"), 60)
        until(lambda: runs_on(plane) == ["n1"], 30)
        # It is the same shortage again: the node is closed, and the limit of its owner lets no other pod be evicted.
        until(lambda: plane.taints("n1"))
        assert closing(daemon)["times"]["closed"] == 2
        # A killed daemon leaves the mark; its next start removes it, in observe mode.
        daemon.kill()
        evict(plane)
        time.sleep(SETTLE_S)
        assert plane.taints("n1")
        assert runs_on(plane) == [""]
        daemon.configure(**{**configuration(kubeconfig, enabled=False), "mode": "observe"})
        daemon.up()
        until(lambda: not plane.taints("n1"), 30)
        until(lambda: runs_on(plane) == ["n1"], 30)
    finally:
        if daemon.running:
            daemon.stop()
        used = {(verb, resource) for verb, resource, code in plane.audited() if code < 400}
        assert {("get", "nodes"), ("patch", "nodes"), ("create", "pods/eviction")} <= used
        assert plane.call("PATCH", "/api/v1/nodes/n1", {"spec": {"taints": None}}, MERGE_PATCH)[0] == 200


WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
BINDING = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/bypassd-taint-n1"


def fail_evictions(plane: ControlPlane) -> None:
    """An admission webhook that does not respond: each Eviction is HTTP 500 from now on."""
    webhook = {
        "name": "down.example.com",
        "rules": [{"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["*"], "resources": ["pods/eviction"]}],
        "clientConfig": {"url": "https://127.0.0.1:9/"},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration"}
    assert plane.call("POST", WEBHOOKS, {**kind, "metadata": {"name": "down"}, "webhooks": [webhook]})[0] == 201


def test_evictions_that_always_fail_end_no_pod_and_a_right_that_was_revoked_is_used_when_it_is_back(
    plane: ControlPlane, node: DirectoryNode
) -> None:
    fail_evictions(plane)
    kubeconfig = bound(plane, RightsUse.TAINT, "n1", RightsUse.PODS, RightsUse.EVICTION)
    daemon = Daemon(node, **configuration(kubeconfig))
    try:
        daemon.up()
        deployment(plane, labels={"koordinator.sh/qosClass": "BE"}, requests=BATCH)
        (pod,) = plane.pods("app=be")
        until(lambda: plane.taints("n1"), 90, told=daemon.tail)
        until(lambda: ("create", "pods/eviction", 500) in plane.audited(), 30, told=daemon.tail)
        until(lambda: outcomes(daemon), 150, told=lambda: daemon.control("evictions").stdout)
        assert outcomes(daemon) == [("refused", "api")]
        shown = daemon.control("evictions", "--all").stdout
        assert "its disruption budget could not be asked" in shown
        assert "HTTP 500" in shown
        assert [each["metadata"]["uid"] for each in plane.pods("app=be")] == [pod["metadata"]["uid"]]
        assert pod["metadata"]["uid"] in node.pods
        # The shortage ends while the right to change the node is revoked.
        code, binding = plane.call("GET", BINDING)
        assert code == 200
        assert plane.call("DELETE", BINDING)[0] == 200
        plane.call("DELETE", "/apis/apps/v1/namespaces/default/deployments/be")
        until(lambda: not plane.pods("app=be"))
        # Without a grace period the API server may delete it before the kubelets here have seen that it is to go.
        if (known := node.pods.get(pod["metadata"]["uid"])) is not None:
            node.remove(known)
        until(
            lambda: "is not removed" in str(daemon.state("problems")),
            200,
            told=lambda: daemon.control("evictions").stdout + daemon.tail(),
        )
        assert plane.taints("n1")
        binding["metadata"] = {"name": binding["metadata"]["name"]}
        assert plane.call("POST", BINDING.rpartition("/")[0], binding)[0] == 201
        until(lambda: not plane.taints("n1"), 200, told=daemon.tail)
    finally:
        if daemon.running:
            daemon.stop()
