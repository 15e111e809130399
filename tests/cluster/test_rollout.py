"""A rollout with the component surge: the scheduler places the new pod beside the old one, which stays meanwhile."""

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.control_plane import MERGE_PATCH, ControlPlane, Object, control_plane
from tests.cluster.test_closed_node import until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

MANIFESTS = Path(__file__).resolve().parents[2] / "deploy/kubernetes"
SHORT_S = 5
PATH = "/apis/apps/v1/namespaces/kube-system/daemonsets"


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("plane")) as plane:
        labels = {"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
        plane.add_node("n1", labels=labels)
        yield plane


def manifest(*, surge: bool) -> dict[str, Any]:
    """The base, or with the component; what takes a minute there takes seconds here."""
    item: dict[str, Any] = yaml.safe_load((MANIFESTS / "base/daemonset.yaml").read_text())
    spec = item["spec"]
    spec["minReadySeconds"] = 2
    if surge:
        patch = yaml.safe_load((MANIFESTS / "surge/surge.yaml").read_text())["spec"]
        (change,) = patch["template"]["spec"]["containers"]
        spec |= {name: patch[name] for name in ("minReadySeconds", "updateStrategy")}
        spec["updateStrategy"]["type"] = "RollingUpdate"
        probe = spec["template"]["spec"]["containers"][0]["readinessProbe"]
        probe |= change["readinessProbe"]
        assert probe["initialDelaySeconds"] > SHORT_S
        probe["initialDelaySeconds"] = SHORT_S
    return item


def daemons(plane: ControlPlane) -> list[Object]:
    return [pod for pod in plane.pods("app.kubernetes.io/name=bypassd", "kube-system") if pod["spec"].get("nodeName")]


@pytest.mark.parametrize("surge", [True, False])
def test_the_old_pod_stays_until_the_new_one_is_available_only_with_surge(plane: ControlPlane, *, surge: bool) -> None:
    item = manifest(surge=surge)
    assert plane.call("POST", PATH, item)[0] == 201
    try:
        until(lambda: plane.call("GET", f"{PATH}/bypassd")[1]["status"].get("numberAvailable") == 1)
        (old,) = daemons(plane)
        changed = copy.deepcopy(item["spec"]["template"])
        changed["metadata"]["annotations"]["example/restart"] = "1"
        code, answer = plane.call("PATCH", f"{PATH}/bypassd", {"spec": {"template": changed}}, MERGE_PATCH)
        assert code == 200, answer
        most, least = 0, 9
        deadline = time.monotonic() + 60
        uids = {old["metadata"]["uid"]}
        while old["metadata"]["uid"] in uids or not uids:
            assert time.monotonic() < deadline, "no rollout"
            uids = {pod["metadata"]["uid"] for pod in daemons(plane)}
            most, least = max(most, len(uids)), min(least, len(uids))
            time.sleep(0.05)
        # Without it the old one is deleted first: how long the node has none depends on the kubelet, which is not here.
        assert most == (2 if surge else 1)
        assert least == 1 or not surge
    finally:
        plane.call("DELETE", f"{PATH}/bypassd")
        until(lambda: not daemons(plane))
