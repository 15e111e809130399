"""What the other modules show with stand-ins for the kubelet, with a real one: values are read from the kernel."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reconciler.cli.rights import RightsUse, manifest
from reconciler.headroom.shapes import KOORDINATOR_CPU, KOORDINATOR_MEMORY, OWN_CPU, OWN_MEMORY, VALID_UNTIL
from state.closing import CLOSED_KEY
from tests.cluster.control_plane import MERGE_PATCH, ControlPlane, Object
from tests.cluster.real_node import NODE, RealNode
from tests.cluster.test_burst import deployment, offer, remove, running
from tests.cluster.test_closed_node import until
from tests.cluster.test_rights import configuration

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

PODS = "/api/v1/namespaces/default/pods"
BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
WITHIN_S = 90.0


@pytest.fixture
def kubeconfig(real: RealNode) -> Iterator[Path]:
    uses = (RightsUse.PODS, RightsUse.EVICTION, RightsUse.EVENTS, RightsUse.TAINT, RightsUse.NODE)
    real.plane.apply(manifest(uses, "kube-system", NODE))
    yield real.plane.account_kubeconfig()
    plane = real.plane
    plane.call("DELETE", f"{BUDGETS}/much")
    for name in ("much", "koordinator", "katalyst", "online", "offered"):
        remove(real, name)
    # As after a test that failed.
    plane.call("PATCH", f"/api/v1/nodes/{NODE}", {"spec": {"taints": None}}, MERGE_PATCH)


def allocatable(plane: ControlPlane) -> Object:
    node = plane.get(f"/api/v1/nodes/{NODE}")
    assert node is not None
    return dict(node["status"]["allocatable"])


def runs(real: RealNode, name: str) -> Object:
    """The one pod of a Deployment, when it runs."""
    until(lambda: len(running(real.plane, name)) == 1, WITHIN_S, told=lambda: real.log("kubelet"))
    (pod,) = running(real.plane, name)
    return pod


def test_classes_of_both_dialects_and_a_pod_that_requests_what_is_offered(
    real: RealNode, kubeconfig: Path, tmp_path: Path
) -> None:
    plane = real.plane
    budget = {"limit_percent": 1, "floor_percent": 50}
    daemon = real.daemon(
        tmp_path,
        apiserver={"kubeconfig": str(kubeconfig), "watch_pods": "on"},
        headroom={"publish": "node", "window_s": "1s"},
        constants={"headroom.report_s": 1.0},
        policies={"idle_buffer": {"enabled": False}, "reclaimed": {"budget": budget}},
    )
    daemon.start()
    try:
        daemon.wait_ready()
        # How much depends on what else the machine does.
        until(lambda: {OWN_CPU, OWN_MEMORY} <= allocatable(plane).keys(), WITHIN_S, told=daemon.tail)
        node = plane.get(f"/api/v1/nodes/{NODE}")
        assert node is not None
        assert VALID_UNTIL in node["metadata"]["annotations"]
        deployment(plane, "koordinator", 1, real.template({"koordinator.sh/qosClass": "BE"}))
        katalyst = real.template({})
        katalyst["metadata"]["annotations"] = {"katalyst.kubewharf.io/qos_level": "reclaimed_cores"}
        deployment(plane, "katalyst", 1, katalyst)
        online = real.template({"koordinator.sh/qosClass": "LS"}, resources={"cpu": "100m", "memory": "64Mi"})
        deployment(plane, "online", 1, online)
        for name, amount in ((KOORDINATOR_CPU, 1000), (KOORDINATOR_MEMORY, 1 << 30)):
            offer(plane, name, amount)
        resources = {KOORDINATOR_CPU: "250", KOORDINATOR_MEMORY: "64Mi"}
        deployment(plane, "offered", 1, real.template({"koordinator.sh/qosClass": "BE"}, resources=resources))
        pods = {name: runs(real, name) for name in ("koordinator", "katalyst", "online", "offered")}
        wanted = {pod["metadata"]["uid"]: "reclaimed" for pod in pods.values()}
        wanted[pods["online"]["metadata"]["uid"]] = "shared"
        until(lambda: {uid: (daemon.pod(uid) or {}).get("class") for uid in wanted} == wanted, told=daemon.tail)
        offered = pods["offered"]
        bounds = {
            "cpu/cpu.shares": "256",
            "cpu/cpu.cfs_quota_us": "25000",
            "memory/memory.limit_in_bytes": str(64 << 20),
        }
        until(lambda: {file: real.container_value(offered, file) for file in bounds} == bounds, told=daemon.tail)
    finally:
        daemon.stop()
    assert OWN_CPU not in allocatable(plane)
    assert real.container_value(offered, "cpu/cpu.cfs_quota_us") == "-1"


def events(plane: ControlPlane) -> set[str]:
    """The reasons of bypassd's Events on pods."""
    code, answer = plane.call("GET", "/api/v1/namespaces/default/events")
    assert code == 200, answer
    return {
        item["reason"]
        for item in answer["items"]
        if item["source"].get("component") == "bypassd" and item["involvedObject"]["kind"] == "Pod"
    }


def closed_by(plane: ControlPlane) -> list[str]:
    """The effects of bypassd's taint."""
    return [item["effect"] for item in plane.taints(NODE) if item["key"] == CLOSED_KEY]


def cases(daemon: Any) -> list[tuple[str, str]]:
    return [(case["outcome"], case["means"]) for case in daemon.state("eviction")["eviction"]["ended"]]


def test_a_budget_is_kept_and_an_evicted_pod_is_not_back_while_the_node_is_closed(
    real: RealNode, kubeconfig: Path, tmp_path: Path
) -> None:
    plane = real.plane
    offer(plane, "kubernetes.io/batch-cpu", 1_000_000)
    cluster = {"publish": "off", "settings": "off", "mark": "NoSchedule", "events": "v1"}
    sections = configuration(kubeconfig, **cluster) | {"kubelet": {"endpoint": "off"}}
    daemon = real.daemon(tmp_path, store={"path": f"{tmp_path}/state.db"}, **sections)
    budget = {"minAvailable": 1, "selector": {"matchLabels": {"app": "much"}}}
    plane.apply(
        json.dumps(
            {
                "apiVersion": "policy/v1",
                "kind": "PodDisruptionBudget",
                "metadata": {"name": "much", "namespace": "default"},
                "spec": budget,
            }
        )
    )
    resources = {"kubernetes.io/batch-cpu": "200000"}
    deployment(plane, "much", 1, real.template({"koordinator.sh/qosClass": "BE"}, resources=resources))
    first = runs(real, "much")
    until(lambda: (plane.get(f"{BUDGETS}/much") or {}).get("status", {}).get("currentHealthy") == 1)
    before = len(plane.audited())
    daemon.start()
    try:
        daemon.wait_ready()
        # Closed, asked, and refused by the budget: the pod runs on.
        until(lambda: closed_by(plane) == ["NoSchedule"], WITHIN_S, told=daemon.tail)
        until(lambda: ("create", "pods/eviction", 429) in plane.audited()[before:], WITHIN_S, told=daemon.tail)
        assert [pod["metadata"]["uid"] for pod in running(plane, "much")] == [first["metadata"]["uid"]]
        assert "much" in daemon.control("evictions").stdout
        assert plane.call("DELETE", f"{BUDGETS}/much")[0] == 200
        until(lambda: ("done", "api") in cases(daemon), WITHIN_S, told=lambda: daemon.control("evictions").stdout)
        until(lambda: [pod["spec"].get("nodeName") for pod in plane.pods("app=much")] == [None], 30)
        until(lambda: bool(events(plane)), told=daemon.tail)
        # The shortage went with the pod: its replacement runs when the node is open again.
        second = runs(real, "much")
        assert second["metadata"]["uid"] != first["metadata"]["uid"]
    finally:
        daemon.stop()
    assert closed_by(plane) == []
