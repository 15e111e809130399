"""Published headroom on a real API server with a real scheduler; Koordinator's manager is a stand-in with its formula.

Longer than other modules because every case begins with the same server and asks what a scheduler finds there.

Rights are those that ``bypassctl init credentials`` prints for the use, and the audit log shows that no other was used.
"""

import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from reconciler.cli.rights import RightsUse, manifest
from reconciler.clients.kube import KubeApi
from reconciler.clients.kube_config import ApiServer
from reconciler.clients.node_object import NodeClient, NodeTaint
from reconciler.clients.node_settings import SettingsClient
from reconciler.headroom.cpu import ClusterTarget
from reconciler.headroom.publisher import HeadroomPublisher, PublishError
from reconciler.headroom.shapes import (
    KATALYST_CPU,
    KATALYST_MEMORY,
    KOORDINATOR_CPU,
    KOORDINATOR_MEMORY,
    OWN_CPU,
    OWN_MEMORY,
    VALID_UNTIL,
    NodeUse,
    Offer,
)
from reconciler.headroom.targets import NodeTarget, target_of, withdraw_from
from reconciler.settings.units import whole
from state.closing import CLOSED_KEY
from tests.cluster.control_plane import ControlPlane, Object, control_plane
from tests.fakes.constants import varied

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

GI: Final = 1 << 30
MERGE: Final = "application/merge-patch+json"
USE: Final = NodeUse(cpus_milli=8000, total_bytes=16 * GI, cpu_milli=1000, memory_bytes=2 * GI)
METRICS: Final = "/apis/slo.koordinator.sh/v1alpha1/nodemetrics"
CNR: Final = "/apis/node.katalyst.kubewharf.io/v1alpha1/customnoderesources"
_NUMBERS: Final = count()
MARGIN_MILLI: Final = 3200
"""Koordinator's default for CPU: 40 % of the node."""


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("plane")) as made:
        yield made


class Meter:
    async def measure(self, window_s: float) -> NodeUse | None:
        return USE


def crd(kind: str, plural: str, group: str, scope: str, name: str = "v1alpha1") -> Object:
    """The kind, in one version, with a status subresource; its fields are not checked."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": name,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": schema, "status": schema}}},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": scope,
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [version],
        },
    }


def define(plane: ControlPlane, kind: str, plural: str, group: str, scope: str = "Cluster") -> None:
    code, answer = plane.call(
        "POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd(kind, plural, group, scope)
    )
    assert code in {201, 409}, answer
    until(lambda: plane.call("GET", f"/apis/{group}/v1alpha1/{plural}")[0] == 200)


def until(question: Any, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not question():
        assert time.monotonic() < deadline, question
        time.sleep(0.1)


def api_of(plane: ControlPlane, node: str, *uses: RightsUse) -> KubeApi:
    """A client with these uses' rights to this node's objects and no other."""
    account = f"bypassd-{'-'.join(use.value for use in uses) or 'none'}-{node}"
    kubeconfig = plane.account_kubeconfig(account)
    plane.apply(manifest(uses, "kube-system", node).replace("name: bypassd\n", f"name: {account}\n"))
    return KubeApi(varied(ApiServer(kubeconfig=str(kubeconfig)), timeout_s=10.0))


def run(plane: ControlPlane, name: ClusterTarget, use: RightsUse, node: str, *offers: Offer | None) -> list[Offer]:
    """Publish each offer; None: withdraw. What was read back."""
    read: list[Offer] = []

    async def main() -> None:
        api = api_of(plane, node, use)
        try:
            target = target_of(name, api, node, Meter(), valid_s=lambda: 240.0)
            for offer in offers:
                if offer is None:
                    await target.withdraw()
                else:
                    read.append((await target.publish(offer)).offer)
        finally:
            await api.aclose()

    trio.run(main)
    return read


def start(plane: ControlPlane, name: str, node: str, *, scheduler: str = "default-scheduler", **resources: str) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "schedulerName": scheduler,
            "containers": [{"name": "c", "image": "x", "resources": {"limits": resources, "requests": resources}}],
        },
    }
    code, answer = plane.call("POST", "/api/v1/namespaces/default/pods", body)
    assert code == 201, answer


def is_scheduled(plane: ControlPlane, name: str) -> bool:
    pod = plane.get(f"/api/v1/namespaces/default/pods/{name}")
    return pod is not None and bool(pod["spec"].get("nodeName"))


def is_refused(plane: ControlPlane, name: str) -> bool:
    """Whether the scheduler has looked and found no node."""
    pod = plane.get(f"/api/v1/namespaces/default/pods/{name}") or {}
    conditions = pod.get("status", {}).get("conditions", [])
    return any(item["type"] == "PodScheduled" and item["status"] == "False" for item in conditions)


def allocatable(plane: ControlPlane, node: str) -> Object:
    found = plane.get(f"/api/v1/nodes/{node}")
    assert found is not None
    return dict(found["status"].get("allocatable") or {})


def test_the_scheduler_uses_the_nodes_own_resources(plane: ControlPlane) -> None:
    plane.add_node("own")
    offer = Offer(cpu_milli=2000, memory_bytes=4 * GI)
    assert run(plane, ClusterTarget.NODE, RightsUse.NODE, "own", offer) == [offer]
    node = plane.get("/api/v1/nodes/own")
    assert node is not None
    assert VALID_UNTIL in node["metadata"]["annotations"]
    start(plane, "fits", "own", **{OWN_CPU: "1500", OWN_MEMORY: "1Gi"})
    until(lambda: is_scheduled(plane, "fits"))
    start(plane, "more", "own", **{OWN_CPU: "1500", OWN_MEMORY: "1Gi"})
    until(lambda: is_refused(plane, "more"))
    run(plane, ClusterTarget.NODE, RightsUse.NODE, "own", Offer(cpu_milli=4000, memory_bytes=4 * GI))
    until(lambda: is_scheduled(plane, "more"))
    run(plane, ClusterTarget.NODE, RightsUse.NODE, "own", None)
    assert OWN_CPU not in allocatable(plane, "own")
    node = plane.get("/api/v1/nodes/own")
    assert node is not None
    assert VALID_UNTIL not in node["metadata"].get("annotations", {})


async def test_an_edit_of_the_nodes_resources_is_named_and_restored(plane: ControlPlane) -> None:
    """And the usual write is one request, whatever form the API server gives the amounts."""
    plane.add_node("edited")
    offer, more = Offer(cpu_milli=2000, memory_bytes=4 * GI), Offer(cpu_milli=3000, memory_bytes=GI)
    status = "/api/v1/nodes/edited/status"
    edits: list[str] = []

    async with api_of(plane, "edited", RightsUse.NODE) as api:
        target = NodeTarget(api, "edited", valid_s=lambda: 240.0, wall=time.time)
        for wanted in (offer, offer, more):
            assert (await target.publish(wanted)).edit == ""
        assert target.object.requests == 4  # the first reads the object before
        for amounts in ({OWN_CPU: "9k"}, {OWN_MEMORY: None}):
            patch = {"status": {"allocatable": amounts}}
            assert plane.call("PATCH", f"{status}?fieldManager=kubectl-edit", patch, MERGE)[0] == 200
            published = await target.publish(more)
            edits.append(published.edit)
            assert published.offer == more
        patch = {"status": {"capacity": {OWN_CPU: "0"}}}
        assert plane.call("PATCH", f"{status}?fieldManager=kubectl-edit", patch, MERGE)[0] == 200
        with pytest.raises(PublishError, match=r"3 changes in 10 minutes: left to it"):
            await target.publish(more)
    assert edits == [
        "kubectl-edit changed allocatable bypassd/batch-cpu from 3k to 9k",
        "another program changed allocatable bypassd/batch-memory from 1073741824 to none",
    ]


def test_rights_that_are_given_back_are_used_soon(plane: ControlPlane) -> None:
    """As a rollout of roles does: taken away while it is published, given back, without a reload."""
    plane.add_node("rights")
    offer = Offer(cpu_milli=2000, memory_bytes=GI)
    role = "/apis/rbac.authorization.k8s.io/v1/clusterroles/bypassd-headroom-node-rights"

    async def main() -> None:
        api = api_of(plane, "rights", RightsUse.NODE)
        publisher = HeadroomPublisher(
            lambda _: NodeTarget(api, "rights", valid_s=lambda: 3.0, wall=time.time),
            wanted=lambda: ClusterTarget.NODE,
            offer=lambda: offer,
            writes=lambda: True,
            note=kept,
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(publisher.run)
            await reached(publisher, ok=True)
            found = plane.get(role)
            assert found is not None
            assert plane.call("DELETE", role)[0] == 200
            await reached(publisher, ok=False)
            assert "HTTP 403" in publisher.statuses()[0].detail
            await trio.sleep(6)
            del found["metadata"]["resourceVersion"], found["metadata"]["uid"]
            assert plane.call("POST", role.rpartition("/")[0], found)[0] == 201
            await reached(publisher, ok=True)
            nursery.cancel_scope.cancel()
        await api.aclose()

    async def kept(name: ClusterTarget | None) -> None:
        """No store: nothing survives this test."""

    async def reached(publisher: HeadroomPublisher, *, ok: bool) -> None:
        with trio.fail_after(30):
            while True:
                await trio.sleep(0.1)
                if [status.ok for status in publisher.statuses()] == [ok] and publisher.status()["at"] is not None:
                    return

    trio.run(main)
    assert allocatable(plane, "rights")[OWN_CPU] == "2k"


class Manager(threading.Thread):
    """Koordinator's manager for one node: its formula by usage, each half second; resets what has no time.

    Source: batchresource plug-in, ``CalculateBatchResourceByPolicy`` and ``isDegradeNeeded``.
    """

    def __init__(self, plane: ControlPlane, node: str) -> None:
        super().__init__(daemon=True)
        self.plane, self.node, self.ended = plane, node, threading.Event()
        self.most = 0

    def run(self) -> None:
        while not self.ended.wait(0.5):
            metric = self.plane.get(f"{METRICS}/{self.node}") or {}
            status = metric.get("status") or {}
            amounts: dict[str, str | None] = {KOORDINATOR_CPU: None, KOORDINATOR_MEMORY: None}
            if status.get("updateTime"):
                cpu = self._left(status, "cpu", 8000 - MARGIN_MILLI, 1)
                memory = self._left(status, "memory", 16 * GI, 1)
                self.most = max(self.most, cpu)
                amounts = {KOORDINATOR_CPU: str(cpu), KOORDINATOR_MEMORY: str(memory)}
            patch = {"status": {"allocatable": amounts, "capacity": amounts}}
            self.plane.call("PATCH", f"/api/v1/nodes/{self.node}/status", patch, MERGE)

    @staticmethod
    def _left(status: Object, name: str, total: int, unit: int) -> int:
        used = [status["nodeMetric"]["systemUsage"], *(item["podUsage"] for item in status["podsMetric"])]
        used += [item["usage"] for item in status.get("hostApplicationMetric") or ()]
        return max(0, total - sum(int(item[name].removesuffix("m")) // unit for item in used))


@pytest.fixture
def managed(plane: ControlPlane) -> Iterator[Manager]:
    define(plane, "NodeMetric", "nodemetrics", "slo.koordinator.sh")
    node = f"koord-{next(_NUMBERS)}"
    plane.add_node(node, batch=False)
    kind = {"apiVersion": "slo.koordinator.sh/v1alpha1", "kind": "NodeMetric", "metadata": {"name": node}}
    assert plane.call("POST", METRICS, kind)[0] == 201
    manager = Manager(plane, node)
    manager.start()
    yield manager
    manager.ended.set()
    manager.join(10)


def test_koordinators_manager_computes_from_what_is_reported(plane: ControlPlane, managed: Manager) -> None:
    def batch() -> int:
        return whole(allocatable(plane, managed.node).get(KOORDINATOR_CPU, "-1"))

    name, use = ClusterTarget.KOORDINATOR, RightsUse.KOORDINATOR
    plenty, little = Offer(cpu_milli=7000, memory_bytes=GI), Offer(cpu_milli=2000, memory_bytes=GI)
    run(plane, name, use, managed.node, plenty)
    # 8 CPUs less its margin of 40 % and 1 CPU of the system: the manager offers less than bypassd would.
    until(lambda: batch() == 3800)
    run(plane, name, use, managed.node, little)
    until(lambda: batch() == 2000)
    start(plane, "batch", managed.node, **{KOORDINATOR_CPU: "1500", KOORDINATOR_MEMORY: "1Mi"})
    until(lambda: is_scheduled(plane, "batch"))
    # No more here.
    run(plane, name, use, managed.node, Offer())
    until(lambda: batch() == 0)
    start(plane, "late", managed.node, **{KOORDINATOR_CPU: "100", KOORDINATOR_MEMORY: "1Mi"})
    until(lambda: is_refused(plane, "late"))
    # A dead agent: the manager resets what has no time.
    run(plane, name, use, managed.node, None)
    until(lambda: KOORDINATOR_CPU not in allocatable(plane, managed.node))


def test_a_koordlet_on_the_node_is_left_alone(plane: ControlPlane, managed: Manager) -> None:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    usage = {"cpu": "1", "memory": "1"}
    patch = {"status": {"updateTime": at, "podsMetric": [], "nodeMetric": {"systemUsage": usage}}}
    path = f"{METRICS}/{managed.node}/status?fieldManager=koordlet"
    assert plane.call("PATCH", path, patch, MERGE)[0] == 200
    with pytest.raises(PublishError, match="koordlet"):
        run(plane, ClusterTarget.KOORDINATOR, RightsUse.KOORDINATOR, managed.node, Offer(cpu_milli=1))
    metric = plane.get(f"{METRICS}/{managed.node}")
    assert metric is not None
    assert metric["status"]["updateTime"] == at


def test_edits_of_what_the_two_control_planes_read_are_named_and_restored(plane: ControlPlane) -> None:
    define(plane, "NodeMetric", "nodemetrics", "slo.koordinator.sh")
    define(plane, "CustomNodeResource", "customnoderesources", "node.katalyst.kubewharf.io")
    plane.add_node("edits", batch=False)
    kind = {"apiVersion": "slo.koordinator.sh/v1alpha1", "kind": "NodeMetric", "metadata": {"name": "edits"}}
    # With a spec, as its manager makes it: without a field the API server keeps no managedFields.
    assert plane.call("POST", METRICS, {**kind, "spec": {"metricCollectPolicy": {}}})[0] == 201
    offer = Offer(cpu_milli=2000, memory_bytes=GI)

    def edit(path: str, status: Object, manager: str = "kubectl-edit") -> None:
        url = f"{path}/edits/status?fieldManager={manager}"
        assert plane.call("PATCH", url, {"status": status}, MERGE)[0] == 200

    async def main() -> None:
        async with api_of(plane, "edits", RightsUse.KOORDINATOR, RightsUse.KATALYST) as api:
            report = target_of(ClusterTarget.KOORDINATOR, api, "edits", Meter(), valid_s=lambda: 240.0)
            for _ in range(2):
                assert (await report.publish(offer)).edit == ""
            # Others' fields are others'.
            edit(METRICS, {"other": 1}, "koord-manager")
            assert (await report.publish(offer)).edit == ""
            edit(METRICS, {"hostApplicationMetric": [{"name": "x"}]})
            assert (await report.publish(offer)).edit == "kubectl-edit changed hostApplicationMetric of the NodeMetric"
            edit(METRICS, {"updateTime": None})
            assert "changed updateTime of the NodeMetric from 2" in (await report.publish(offer)).edit
            edit(METRICS, {"nodeMetric": {"systemUsage": {"cpu": "1"}}})
            with pytest.raises(PublishError, match=r"kubectl-edit changed nodeMetric .* 3 changes in 10 minutes"):
                await report.publish(offer)
            assert (await report.publish(offer)).edit == ""
            await trio.sleep(1.1)  # a time that is no own report's
            edit(METRICS, {"updateTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}, "koordlet")
            with pytest.raises(PublishError, match="koordlet writes the status of the NodeMetric"):
                await report.publish(offer)
            resource = target_of(ClusterTarget.KATALYST, api, "edits", Meter(), valid_s=lambda: 240.0)
            for _ in range(2):
                assert (await resource.publish(offer)).edit == ""
            edit(CNR, {"topologyPolicy": "None"}, "katalyst-controller")
            assert (await resource.publish(offer)).edit == ""
            edit(CNR, {"resources": {"allocatable": {KATALYST_CPU: "7"}}})
            words = f"kubectl-edit changed allocatable {KATALYST_CPU} from 2000 to 7"
            assert (await resource.publish(offer)).edit == words
            edit(CNR, {"resources": {"capacity": {KATALYST_CPU: None}}})
            assert (await resource.publish(offer)).edit.endswith(f"changed capacity {KATALYST_CPU} from 2000 to none")
            edit(CNR, {"resources": {"allocatable": {KATALYST_CPU: "9"}}}, "agent")
            with pytest.raises(PublishError, match=r"agent changed .* 3 changes in 10 minutes"):
                await resource.publish(offer)
            with pytest.raises(PublishError, match="agent writes the status"):
                await resource.publish(offer)

    trio.run(main)


def test_katalysts_object_is_made_and_has_what_its_scheduler_reads(plane: ControlPlane) -> None:
    define(plane, "CustomNodeResource", "customnoderesources", "node.katalyst.kubewharf.io")
    plane.add_node("kata")
    offer = Offer(cpu_milli=3000, memory_bytes=GI)
    assert run(plane, ClusterTarget.KATALYST, RightsUse.KATALYST, "kata", offer, offer) == [offer, offer]
    found = plane.get(f"{CNR}/kata")
    assert found is not None
    assert found["status"]["resources"]["allocatable"][KATALYST_CPU] == "3000"
    run(plane, ClusterTarget.KATALYST, RightsUse.KATALYST, "kata", None)
    found = plane.get(f"{CNR}/kata")
    assert found is not None
    assert found["status"]["resources"]["allocatable"][KATALYST_CPU] == "0"


class KatalystScheduler(threading.Thread):
    """What Katalyst's scheduler does with reclaimed resources: binds a pod where the CustomNodeResource has room.

    Each half second. What the object does not have it keeps from before; a node without an object has nothing. Source:
    Katalyst's scheduler, cache of nodes and plug-in QoSAwareNodeResourcesFit; topology zones are another plug-in's.
    """

    NAME: Final = "katalyst-scheduler"

    def __init__(self, plane: ControlPlane, node: str) -> None:
        super().__init__(daemon=True)
        self.plane, self.node, self.ended = plane, node, threading.Event()
        self.known: dict[str, int] = {}
        self.refused: set[str] = set()

    def run(self) -> None:
        while not self.ended.wait(0.5):
            found = self.plane.get(f"{CNR}/{self.node}") or {}
            if (amounts := found.get("status", {}).get("resources", {}).get("allocatable")) is not None:
                self.known = {name: whole(amounts.get(name, "0")) for name in (KATALYST_CPU, KATALYST_MEMORY)}
            pods = self.plane.call("GET", "/api/v1/namespaces/default/pods")[1]["items"]
            left = dict(self.known)
            for pod in pods:
                if pod["spec"].get("nodeName") == self.node:
                    for name, amount in self._requests(pod).items():
                        left[name] = left.get(name, 0) - amount
            for pod in pods:
                if pod["spec"]["schedulerName"] == self.NAME and "nodeName" not in pod["spec"]:
                    self._schedule(pod, left)

    def _schedule(self, pod: Object, left: dict[str, int]) -> None:
        name, requests = pod["metadata"]["name"], self._requests(pod)
        if any(amount > left.get(resource, 0) for resource, amount in requests.items()):
            self.refused.add(name)
            return
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name},
            "target": {"apiVersion": "v1", "kind": "Node", "name": self.node},
        }
        assert self.plane.call("POST", f"/api/v1/namespaces/default/pods/{name}/binding", body)[0] == 201
        for resource, amount in requests.items():
            left[resource] -= amount

    @staticmethod
    def _requests(pod: Object) -> dict[str, int]:
        sums = dict.fromkeys((KATALYST_CPU, KATALYST_MEMORY), 0)
        for container in pod["spec"]["containers"]:
            for name, text in container["resources"].get("requests", {}).items():
                if name in sums:
                    sums[name] += whole(text)
        return {name: amount for name, amount in sums.items() if amount}


def test_a_scheduler_that_reads_as_katalysts_places_pods_by_what_is_published(plane: ControlPlane) -> None:
    define(plane, "CustomNodeResource", "customnoderesources", "node.katalyst.kubewharf.io")
    plane.add_node("reclaimed")
    scheduler = KatalystScheduler(plane, "reclaimed")
    scheduler.start()

    def publish(offer: Offer | None) -> None:
        run(plane, ClusterTarget.KATALYST, RightsUse.KATALYST, "reclaimed", offer)

    def create(name: str) -> None:
        resources = {KATALYST_CPU: "1500", KATALYST_MEMORY: "512Mi"}
        start(plane, name, "reclaimed", scheduler=KatalystScheduler.NAME, **resources)

    try:
        create("first")
        until(lambda: "first" in scheduler.refused)
        publish(Offer(cpu_milli=2000, memory_bytes=GI))
        until(lambda: is_scheduled(plane, "first"))
        create("second")
        until(lambda: "second" in scheduler.refused)
        publish(Offer(cpu_milli=4000, memory_bytes=GI))
        until(lambda: is_scheduled(plane, "second"))
        # Withdrawn is nothing, also for a scheduler that keeps what it saw before a removal.
        publish(None)
        create("third")
        until(lambda: "third" in scheduler.refused)
        time.sleep(1.5)
        assert not is_scheduled(plane, "third")
    finally:
        scheduler.ended.set()
        scheduler.join(10)


def test_another_writer_of_an_object_that_was_made_here_is_named(plane: ControlPlane) -> None:
    define(plane, "CustomNodeResource", "customnoderesources", "node.katalyst.kubewharf.io")
    plane.add_node("shared")
    offer = Offer(cpu_milli=2000, memory_bytes=GI)
    run(plane, ClusterTarget.KATALYST, RightsUse.KATALYST, "shared", offer)
    patch = {"status": {"resources": {"allocatable": {KATALYST_CPU: "7"}}}}
    assert plane.call("PATCH", f"{CNR}/shared/status?fieldManager=katalyst-agent", patch, MERGE)[0] == 200
    with pytest.raises(PublishError, match="katalyst-agent writes the status"):
        run(plane, ClusterTarget.KATALYST, RightsUse.KATALYST, "shared", offer)


async def test_objects_that_are_deleted_and_made_again_get_what_is_published(plane: ControlPlane) -> None:
    define(plane, "CustomNodeResource", "customnoderesources", "node.katalyst.kubewharf.io")
    plane.add_node("again")
    offer, less = Offer(cpu_milli=2000, memory_bytes=4 * GI), Offer(cpu_milli=1000, memory_bytes=GI)
    kind = {"apiVersion": "node.katalyst.kubewharf.io/v1alpha1", "kind": "CustomNodeResource"}

    async with api_of(plane, "again", RightsUse.KATALYST) as api, api_of(plane, "again", RightsUse.NODE) as nodes:
        katalyst = target_of(ClusterTarget.KATALYST, api, "again", Meter(), valid_s=lambda: 240.0)
        assert (await katalyst.publish(offer)).offer == offer
        assert plane.call("DELETE", f"{CNR}/again")[0] == 200
        assert (await katalyst.publish(less)).offer == less
        assert plane.call("DELETE", f"{CNR}/again")[0] == 200
        assert plane.call("POST", CNR, {**kind, "metadata": {"name": "again"}})[0] == 201
        assert (await katalyst.publish(offer)).offer == offer
        node = target_of(ClusterTarget.NODE, nodes, "again", Meter(), valid_s=lambda: 240.0)
        assert (await node.publish(offer)).offer == offer
        assert plane.call("DELETE", "/api/v1/nodes/again")[0] == 200
        with pytest.raises(PublishError) as caught:
            await node.publish(offer)
        assert caught.value.missing
        plane.add_node("again")
        assert (await node.publish(offer)).offer == offer


async def test_another_machines_node_of_the_same_name_gets_nothing(plane: ControlPlane) -> None:
    define(plane, "CustomNodeResource", "customnoderesources", "node.katalyst.kubewharf.io")
    plane.add_node("twin")
    offer = Offer(cpu_milli=2000, memory_bytes=GI)
    async with api_of(plane, "twin", RightsUse.NODE, RightsUse.KATALYST) as api:
        target = target_of(ClusterTarget.NODE, api, "twin", Meter(), valid_s=lambda: 240.0, boot="this")
        katalyst = target_of(ClusterTarget.KATALYST, api, "twin", Meter(), valid_s=lambda: 240.0, boot="this")
        for boot, words in (("another", "is of another machine: its kubelet reports boot another"), ("this", "")):
            patch = {"status": {"nodeInfo": {"bootID": boot}}}
            assert plane.call("PATCH", "/api/v1/nodes/twin/status", patch, MERGE)[0] == 200
            if words:
                for each in (target, katalyst):
                    with pytest.raises(PublishError, match=words):
                        await each.publish(offer)
                assert OWN_CPU not in allocatable(plane, "twin")
                assert plane.get(f"{CNR}/twin") is None
            else:
                for each in (target, katalyst):
                    assert (await each.publish(offer)).offer == offer


def test_without_the_right_nothing_is_written(plane: ControlPlane) -> None:
    plane.add_node("bare")
    with pytest.raises(PublishError, match="403"):
        run(plane, ClusterTarget.NODE, RightsUse.EVENTS, "bare", Offer(cpu_milli=1))
    assert OWN_CPU not in allocatable(plane, "bare")


async def test_printed_rights_are_for_no_other_node(plane: ControlPlane) -> None:
    plane.add_node("mine")
    plane.add_node("others")

    api = api_of(plane, "mine", RightsUse.NODE)
    try:
        for path in ("/api/v1/nodes/others", "/api/v1/nodes/others/status"):
            method = "PATCH" if path.endswith("status") else "GET"
            answer = await api.request(method, path, {} if method == "PATCH" else None, content_type=MERGE)
            assert answer.status == 403
        assert (await api.request("GET", "/api/v1/nodes/mine")).status == 200
    finally:
        await api.aclose()


def test_a_killed_daemons_headroom_is_withdrawn_by_the_command(plane: ControlPlane, tmp_path: Path) -> None:
    plane.add_node("killed")
    run(plane, ClusterTarget.NODE, RightsUse.NODE, "killed", Offer(cpu_milli=500))
    assert whole(allocatable(plane, "killed")[OWN_CPU]) == 500

    async def main() -> None:
        for node in ("killed", "gone"):
            api = api_of(plane, node, RightsUse.NODE)
            await withdraw_from(ClusterTarget.NODE, api, node)
            await api.aclose()

    trio.run(main)
    assert OWN_CPU not in allocatable(plane, "killed")


async def test_a_kubelets_own_credentials_are_enough_without_a_control_plane(plane: ControlPlane) -> None:
    plane.add_node("kubelets")
    path = plane.node_kubeconfig("kubelets")

    async with KubeApi(varied(ApiServer(kubeconfig=str(path)), timeout_s=10.0)) as api:
        target = target_of(ClusterTarget.NODE, api, "kubelets", Meter(), valid_s=lambda: 240.0)
        offer = Offer(cpu_milli=1500, memory_bytes=GI)
        assert (await target.publish(offer)).offer == offer
        await target.withdraw()
    assert OWN_CPU not in allocatable(plane, "kubelets")


def test_what_the_api_server_does_not_have_is_named_and_is_used_when_it_is_there(plane: ControlPlane) -> None:
    """Kinds that are not installed, one of another version, one of a group that has another kind, and an object."""
    group, crds = "node.katalyst.kubewharf.io", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    plane.add_node("late")
    plane.call("DELETE", f"{crds}/customnoderesources.{group}")
    until(lambda: plane.call("GET", CNR)[0] == 404)
    offer = Offer(cpu_milli=1000, memory_bytes=GI)

    async def refused(api: KubeApi) -> PublishError:
        target = target_of(ClusterTarget.KATALYST, api, "late", Meter(), valid_s=lambda: 240.0)
        with pytest.raises(PublishError) as caught:
            await target.publish(offer)
        return caught.value

    async def main() -> None:
        async with api_of(plane, "late", RightsUse.KATALYST) as api:
            error = await refused(api)
            assert error.missing
            assert "does not have its kind" in str(error)
            define(plane, "Other", "others", group)
            error = await refused(api)
            assert error.missing
            assert "does not have its kind" in str(error)
            plane.call("DELETE", f"{crds}/others.{group}")
            other = crd("CustomNodeResource", "customnoderesources", group, "Cluster", "v1beta1")
            assert plane.call("POST", crds, other)[0] == 201
            until(lambda: plane.call("GET", CNR.replace("v1alpha1", "v1beta1"))[0] == 200)
            until(lambda: plane.call("GET", CNR)[0] == 404)
            error = await refused(api)
            assert not error.missing
            assert "this version of its kind" in str(error)
            plane.call("DELETE", f"{crds}/customnoderesources.{group}")
            until(lambda: plane.call("GET", CNR.replace("v1alpha1", "v1beta1"))[0] == 404)
            define(plane, "CustomNodeResource", "customnoderesources", group)
            target = target_of(ClusterTarget.KATALYST, api, "late", Meter(), valid_s=lambda: 240.0)
            assert (await target.publish(offer)).offer == offer

    trio.run(main)


async def test_a_node_with_annotations_of_200_kib(plane: ControlPlane) -> None:
    plane.add_node("large")
    annotations = {f"example.com/{number}": "x" * 20_000 for number in range(10)}
    assert plane.call("PATCH", "/api/v1/nodes/large", {"metadata": {"annotations": annotations}}, MERGE)[0] == 200
    offer = Offer(cpu_milli=1000, memory_bytes=GI)

    async with api_of(plane, "large", RightsUse.NODE, RightsUse.TAINT, RightsUse.SETTINGS_KOORDINATOR) as api:
        target = target_of(ClusterTarget.NODE, api, "large", Meter(), valid_s=lambda: 240.0)
        assert (await target.publish(offer)).offer == offer
        client = NodeClient(api, "large")
        taint = NodeTaint(key=CLOSED_KEY, effect="NoSchedule")
        assert (await client.add_taint(await client.read(), taint)).taint(CLOSED_KEY, "NoSchedule") is not None
        marks = await SettingsClient(api, "large").node(("example.com/",))
        assert marks.content == annotations
