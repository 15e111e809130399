"""Rights by the audit log: the manifests have what the daemon requests, and nothing that it never requests.

Three daemons on a real kubelet, in a cluster of Koordinator, of Katalyst and of neither, with every feature that uses
the API server; in each a BE pod requests more than the node has for it.
"""

import json
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from reconciler.cli.rights import RightsUse, manifest
from reconciler.clients.api_identity import OWN_MARK
from tests.cluster.control_plane import ControlPlane, Object
from tests.cluster.real_node import NODE, RealNode
from tests.cluster.test_burst import deployment, offer, remove
from tests.cluster.test_capacity import define
from tests.cluster.test_closed_node import until
from tests.cluster.test_shortage import SOON

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

RBAC: Final = Path(__file__).resolve().parents[2] / "deploy/kubernetes/base/rbac.yaml"
UNUSED: Final = {
    ("get", "", "nodes/pods"): "kubelets before 1.33 do not know it, and ask for nodes/proxy",
}
ANYONE: Final = ("authorization.k8s.io", "selfsubjectaccessreviews")
"""What every authenticated client may request; requests of no resource (discovery, /version) are left out too."""
KOORDINATOR: Final = "slo.koordinator.sh"
KATALYST: Final = ("node.katalyst.kubewharf.io", "config.katalyst.kubewharf.io")
Right = tuple[str, str, str]


def roles() -> list[Object]:
    return [item for item in yaml.safe_load_all(RBAC.read_text()) if item["kind"] == "ClusterRole"]


def granted() -> set[Right]:
    """Verb, group, resource of each rule of the DaemonSet's roles, and of the renewal, which has its own."""
    renewal = [item for item in yaml.safe_load_all(manifest([RightsUse.RENEWAL], "kube-system")) if "rules" in item]
    return {
        (verb, group, resource)
        for role in (*roles(), *renewal)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def requested(plane: ControlPlane) -> set[Right]:
    """Of the account bypassd, at the API server and, by the kubelet's own question about it, at the kubelet."""
    rights: set[Right] = set()
    for item in plane.requests():
        review = item.body.get("spec", {}) if item.resource == "subjectaccessreviews" else {}
        if item.user == plane.account("bypassd") and not item.resource.startswith("/"):
            rights.add((item.verb, item.group, item.resource))
        elif review.get("user") == plane.account("bypassd") and item.user.startswith("system:node:"):
            asked = review["resourceAttributes"]
            resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
            rights.add((asked["verb"], asked.get("group", ""), resource))
    return {right for right in rights if right[1:] != ANYONE}


@pytest.fixture
def bound(real: RealNode) -> Iterator[ControlPlane]:
    """Every role of the manifests, bound; the kinds of both control planes; and a BE pod that is too much."""
    plane = real.plane
    plane.apply(RBAC.read_text())
    plane.apply(manifest([RightsUse.RENEWAL], "kube-system"))
    subject = {"kind": "ServiceAccount", "name": "bypassd", "namespace": "kube-system"}
    for role in roles():
        name = role["metadata"]["name"]
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
        binding = {"metadata": {"name": name}, "roleRef": reference, "subjects": [subject]}
        plane.apply(
            yaml.safe_dump({**binding, "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding"})
        )
    define(plane, "NodeMetric", "nodemetrics", KOORDINATOR)
    define(plane, "NodeSLO", "nodeslos", KOORDINATOR)
    define(plane, "CustomNodeResource", "customnoderesources", KATALYST[0])
    define(plane, "CustomNodeConfig", "customnodeconfigs", KATALYST[1])
    define(plane, "AdminQoSConfiguration", "adminqosconfigurations", KATALYST[1], "Namespaced")
    create(plane, f"{KOORDINATOR}/v1alpha1", "NodeMetric", NODE)
    create(plane, f"{KOORDINATOR}/v1alpha1", "NodeSLO", NODE, spec={"resourceUsedThresholdWithBE": {"enable": True}})
    target = {"configType": {"group": KATALYST[1], "version": "v1alpha1", "resource": "adminqosconfigurations"}}
    named = {**target, "configName": "default", "configNamespace": "kube-system", "hash": "1"}
    create(
        plane,
        f"{KATALYST[1]}/v1alpha1",
        "CustomNodeConfig",
        NODE,
        status={"katalystCustomConfigList": [named]},
    )
    create(plane, f"{KATALYST[1]}/v1alpha1", "AdminQoSConfiguration", "default", "kube-system", spec={"config": {}})
    offer(plane, "kubernetes.io/batch-cpu", 1_000_000)
    try:
        yield plane
    finally:
        remove(real, "much")


def create(plane: ControlPlane, version: str, kind: str, name: str, namespace: str = "", **parts: Object) -> None:
    base = f"/apis/{version}/namespaces/{namespace}" if namespace else f"/apis/{version}"
    body = {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **parts}
    code, answer = plane.call("POST", f"{base}/{kind.lower()}s", body)
    assert code == 201, answer
    if "status" in parts:
        body["metadata"] = answer["metadata"]
        code, answer = plane.call("PUT", f"{base}/{kind.lower()}s/{name}/status", body)
        assert code == 200, answer


def own_kubeconfig(plane: ControlPlane, real: RealNode, *, left_s: float = 600.0) -> Path:
    """As ``bypassctl init credentials`` makes it, with a token of ten minutes of which ``left_s`` are left."""
    account = plane.get("/api/v1/namespaces/kube-system/serviceaccounts/bypassd")
    assert account is not None
    key = serialization.load_pem_private_key((plane.pki / "sa.key").read_bytes(), None)
    assert isinstance(key, rsa.RSAPrivateKey)
    ends = int(time.time() + left_s)
    claims = {
        "iss": plane.url,
        "aud": [plane.url],
        "sub": plane.account("bypassd"),
        "iat": ends - 600,
        "nbf": ends - 600,
        "exp": ends,
        "kubernetes.io": {
            "namespace": "kube-system",
            "serviceaccount": {"name": "bypassd", "uid": account["metadata"]["uid"]},
        },
    }

    def part(content: bytes) -> str:
        return urlsafe_b64encode(content).rstrip(b"=").decode()

    text = f"{part(json.dumps({'alg': 'RS256', 'typ': 'JWT'}).encode())}.{part(json.dumps(claims).encode())}"
    token = f"{text}.{part(key.sign(text.encode(), padding.PKCS1v15(), hashes.SHA256()))}"
    made = yaml.safe_load(plane.account_kubeconfig().read_text())
    ca = made["clusters"][0]["cluster"]["certificate-authority"]
    path = real.directory / "kubeconfig"
    path.write_text(
        f"{OWN_MARK}this node's bypassd at the API server.\n"
        "apiVersion: v1\nkind: Config\ncurrent-context: bypassd\n"
        f"clusters:\n- name: cluster\n  cluster:\n    server: {plane.url}\n    certificate-authority: {ca}\n"
        f"users:\n- name: bypassd\n  user:\n    token: {json.dumps(token)}\n"
        "contexts:\n- name: bypassd\n  context: {cluster: cluster, user: bypassd}\n"
    )
    path.chmod(0o600)
    return path


def configuration(kubeconfig: Path, *, publish: str, settings: str, mark: str, events: str) -> dict[str, Any]:
    triggers: dict[str, dict[str, Any]] = {"interference": {"enabled": False}, "numa_memory": {"enabled": False}}
    triggers |= {"memory_pressure": {"enabled": False}, "reclaimed_resource": {"enabled": True, "cpu_ratio": 1.2}}
    return {
        "apiserver": {"kubeconfig": str(kubeconfig), "watch_pods": "on", "node_settings": settings},
        "kubelet": {"endpoint": "https"},
        "headroom": {"publish": publish, "window_s": "1s"},
        "alerts": {"sinks": {"events": {"repeat_s": "1s", "batch_delay_s": "0s", "kubernetes": {"api": events}}}},
        "closing": {"mark": mark},
        "constants": {**SOON, "headroom.report_s": 1.0},
        "eviction": {
            "enabled": True,
            "dry_run": False,
            "triggers": triggers,
        },
    }


CLUSTERS: Final = {
    "koordinator": {"publish": "koordinator", "settings": "koordinator", "mark": "NoSchedule", "events": "v1"},
    "katalyst": {"publish": "katalyst", "settings": "katalyst", "mark": "condition", "events": "events.k8s.io/v1"},
    "neither": {"publish": "node", "settings": "off", "mark": "NoSchedule", "events": "v1"},
}


def test_the_manifests_have_what_is_requested_and_nothing_else(
    real: RealNode, bound: ControlPlane, tmp_path: Path
) -> None:
    before = len(bound.requests())
    for name, cluster in CLUSTERS.items():
        run_through_a_shortage(real, tmp_path / name, cluster)
    refused = [item for item in bound.requests()[before:] if item.code == 403 and "bypassd" in item.user]
    used, rights = requested(bound), granted()
    assert refused == []
    assert used - rights == set()
    assert rights - used == set(UNUSED)


def run_through_a_shortage(real: RealNode, directory: Path, cluster: dict[str, str]) -> None:
    """A daemon until it has closed the node and evicted a pod; its token is renewed at its start."""
    kubeconfig = own_kubeconfig(real.plane, real, left_s=100.0)
    store = {"path": f"{directory}/state.db"}
    daemon = real.daemon(directory, store=store, **configuration(kubeconfig, **cluster))
    daemon.start()
    try:
        daemon.wait_ready()
        labels = {"koordinator.sh/qosClass": "BE", "katalyst.kubewharf.io/qos_level": "reclaimed_cores"}
        deployment(real.plane, "much", 1, real.template(labels, resources={"kubernetes.io/batch-cpu": "200000"}))
        until(lambda: daemon.state("eviction")["eviction"]["ended"], 120, told=daemon.tail)
    finally:
        daemon.stop()
        remove(real, "much")
