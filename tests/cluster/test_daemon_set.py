"""The DaemonSet of deploy/kubernetes, run by a real kubelet; and its rollout, while BE pods start all the time.

The image: BYPASSD_IMAGE, else the newest in dist (`make image`). With -s the figures are printed.
"""

import copy
import json
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Final

import pytest
import yaml

from tests.artifact.daemonset import CAPABILITIES, KUBERNETES, config_maps, machine_capabilities
from tests.cluster.control_plane import MERGE_PATCH, ControlPlane, Object
from tests.cluster.real_node import NODE, RealNode
from tests.cluster.test_burst import MEMORY, offer
from tests.cluster.test_closed_node import until
from tests.cluster.test_rollout import PATH, daemons, manifest

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT: Final = Path(__file__).resolve().parents[2]
EVERY_S: Final = 1.0
"""Between two BE pods of a rollout."""
MOST: Final = 20
MOST_GAP_S: Final = 30.0
"""Of a machine that other tests use, too; the figures of a quiet one are in docs/kubernetes.md."""
LABEL: Final = "app=meanwhile"
RESOURCES: Final = {"kubernetes.io/batch-cpu": "300", "kubernetes.io/batch-memory": str(MEMORY)}


def image() -> Path | None:
    if given := os.environ.get("BYPASSD_IMAGE"):
        return Path(given)
    made = sorted(ROOT.glob("dist/bypassd-*-image-x86_64.tar"), key=lambda path: path.stat().st_mtime)
    return made[-1] if made else None


def capabilities(item: Object) -> list[str]:
    names: list[str] = item["spec"]["template"]["spec"]["containers"][0]["securityContext"]["capabilities"]["add"]
    return names


def is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


@pytest.fixture
def applied(real: RealNode, *, surge: bool) -> Iterator[Object]:
    """The base with the overlay enforce, one pod of it ready."""
    archive = image()
    if archive is None:
        pytest.skip("no image: make image")
    plane = real.plane
    real.import_image(str(archive))
    for name in ("serviceaccount.yaml", "rbac.yaml"):
        plane.apply((KUBERNETES / "base" / name).read_text())
    for name, data in config_maps("enforce").items():
        metadata = {"name": name, "namespace": "kube-system"}
        plane.apply(yaml.safe_dump({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}))
    item = manifest(surge=surge)
    # A container gets no capability that this machine's root lacks; the runtime refuses it.
    added = capabilities(item)
    added[:] = [name for name in added if CAPABILITIES[name] in machine_capabilities()]
    assert plane.call("POST", PATH, item)[0] == 201
    try:
        until(lambda: [is_ready(pod) for pod in daemons(plane)] == [True], 120, told=lambda: logs(real))
        yield item
    finally:
        plane.call("DELETE", f"{PATH}/bypassd")
        until(lambda: not plane.call("GET", "/api/v1/namespaces/kube-system/pods")[1]["items"], 120)


def rollout(plane: ControlPlane) -> str:
    """What the controller knows, and the pods."""
    return json.dumps([(plane.get(f"{PATH}/bypassd") or {})["status"], *(pod["status"] for pod in daemons(plane))])


def logs(real: RealNode) -> str:
    """The ends of the daemons' logs, and of the kubelet's."""
    files = log_files(real, "kube-system_bypassd-*")
    parts = [f"{path.parts[-3]}:\n{''.join(path.read_text().splitlines(keepends=True)[-30:])}" for path in files]
    return "\n".join([*parts, real.log("kubelet")])


def log_files(real: RealNode, pods: str) -> list[Path]:
    return list((real.directory / "overlay/var/log/upper/pods").glob(f"{pods}/bypassd/*.log"))


def log_file(real: RealNode, pod: Object) -> Path:
    (path,) = log_files(real, f"kube-system_{pod['metadata']['name']}_*")
    return path


def at(log: Path, text: str) -> float:
    """When a daemon has logged this; seconds since the epoch."""
    line = next(line for line in log.read_text().splitlines() if text in line)
    return datetime.fromisoformat(line.split()[3]).timestamp()


def container(pod: Object) -> str:
    (status,) = pod["status"]["containerStatuses"]
    return str(status["containerID"]).removeprefix("containerd://")


def init_pid(real: RealNode, pod: Object) -> int:
    path = real.directory / "containerd-state/runc/k8s.io" / container(pod) / "state.json"
    return int(json.loads(path.read_text())["init_process_pid"])


@contextmanager
def pods_meanwhile(real: RealNode) -> Iterator[list[Object]]:
    """BE pods that are made all the time; none is left."""
    for name in RESOURCES:
        offer(real.plane, name, 1 << 40)
    made: list[Object] = []
    ended = threading.Event()

    def make() -> None:
        while len(made) < MOST and not ended.wait(EVERY_S):
            template = real.template({"app": "meanwhile", "koordinator.sh/qosClass": "BE"}, resources=RESOURCES)
            template["metadata"]["name"] = f"meanwhile-{len(made)}"
            template["spec"]["nodeName"] = NODE
            body = {"apiVersion": "v1", "kind": "Pod", **template}
            code, answer = real.plane.call("POST", "/api/v1/namespaces/default/pods", body)
            assert code == 201, answer
            made.append(answer)

    thread = threading.Thread(target=make)
    thread.start()
    try:
        yield made
    finally:
        ended.set()
        thread.join()
        real.plane.call("DELETE", f"/api/v1/namespaces/default/pods?labelSelector={LABEL}")
        path = f"/api/v1/namespaces/default/pods?labelSelector={LABEL}"
        until(lambda: not real.plane.call("GET", path)[1]["items"], 180)


def is_bounded(real: RealNode, pod: Object) -> bool:
    """Whether its container has its memory limit by now, which the kubelet does not set."""
    now = real.plane.get(f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}") or {}
    statuses = now.get("status", {}).get("containerStatuses", [])
    known = any("containerID" in status for status in statuses)
    return known and real.container_value(now, "memory/memory.limit_in_bytes") == str(MEMORY)


@pytest.mark.parametrize("surge", [True, False], ids=["surge", "base"])
def test_a_rollout_leaves_the_node_bounded(real: RealNode, applied: Object, *, surge: bool) -> None:
    plane = real.plane
    (old,) = daemons(plane)
    # Its privileges are the manifest's, and no other.
    status = Path(f"/proc/{init_pid(real, old)}/status").read_text()
    held = sum(1 << CAPABILITIES[name] for name in capabilities(applied))
    assert f"\nCapEff:\t{held:016x}\n" in status
    assert "\nNoNewPrivs:\t1\n" in status
    # The kubelet removes it with the pod.
    kept = real.directory / f"{uuid.uuid4()}.log"
    kept.hardlink_to(log_file(real, old))
    with pods_meanwhile(real) as made:
        until(lambda: len(made) > 2)
        changed = copy.deepcopy(applied["spec"]["template"])
        changed["metadata"]["annotations"]["example/restart"] = "1"
        code, answer = plane.call("PATCH", f"{PATH}/bypassd", {"spec": {"template": changed}}, MERGE_PATCH)
        assert code == 200, answer
        uid = old["metadata"]["uid"]

        def new() -> list[Object]:
            return [pod for pod in daemons(plane) if pod["metadata"]["uid"] != uid and is_ready(pod)]

        until(new, 180, told=lambda: logs(real))
        pods = list(made)
        seen = [real.report(pod) for pod in pods]
        unbounded = [report for report in seen if report.values["memory.limit_in_bytes"] != str(MEMORY)]
        print(f"\nrollout, surge {surge}: {len(unbounded)} of {len(pods)} BE pods were unbounded at first")
        # Until it has taken over, its probes are answered by the old daemon.
        until(lambda: "daemon: ready" in log_file(real, *new()).read_text(), 60, told=lambda: logs(real))
        gap = at(log_file(real, *new()), "daemon: ready") - at(kept, "daemon: stopping")
        print(f"without a daemon: {gap:.2f} s")
        assert 0 < gap < MOST_GAP_S
        until(lambda: all(is_bounded(real, pod) for pod in pods), 60, told=lambda: logs(real))
        until(lambda: all(pod["metadata"]["uid"] != uid for pod in daemons(plane)), 180, told=lambda: rollout(plane))
