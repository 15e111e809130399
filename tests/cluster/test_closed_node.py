"""A closed node on a real control plane: an evicted Deployment's pod is not scheduled there meanwhile, and is after.

`make cluster` runs it where KUBEBUILDER_ASSETS names the programs; elsewhere it is skipped with that reason.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import yaml
from msgspec.structs import replace

from reconciler.actuators.base import PlanSnapshot
from reconciler.actuators.node_mark import NodeMarker
from reconciler.cli.rights import RIGHTS, RightsUse, manifest
from reconciler.clients.kube import KubeApi
from reconciler.clients.kube_config import ApiServer
from reconciler.clients.node_object import NodeClient
from reconciler.control.planner import plan_node
from reconciler.policies.table import PoliciesConfig
from state.closing import CLOSED_CONDITION, CLOSED_KEY, ClosedNode, MarkState, NodeMark
from state.ledger import Ledger
from state.store import Store
from tests.cluster.control_plane import MERGE_PATCH, ControlPlane, Object, control_plane
from tests.fakes.api_nodes import JSON_PATCH, FakeNodes
from tests.reconciler.nodes import node as node_view

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

OTHERS = {"key": "dedicated", "value": "db", "effect": "NoSchedule"}
SETTLE_S = 4.0
"""A scheduler that may, has bound a pod long before."""


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("plane")) as plane:
        yield plane


class Agent:
    """The node's part of the daemon, on a store of its own."""

    def __init__(self, directory: Path, kubeconfig: Path, name: str) -> None:
        self.directory, self.kubeconfig, self.name = directory, kubeconfig, name
        self.detail = ""
        """Of the mark, after the last step of `keep`."""
        directory.mkdir(parents=True, exist_ok=True)

    def situation(self, mark: NodeMark | None, *, enforce: bool = True) -> PlanSnapshot:
        view, now = node_view(), time.time()
        closed = None if mark is None else ClosedNode(reason="test", since_s=now, until_s=now + 3600, mark=mark)
        plan = replace(plan_node(view, None, PoliciesConfig()), closed=closed)
        return PlanSnapshot(view=view, plan=plan, enforce=enforce)

    def turn(self, *marks: NodeMark | None, enforce: bool = True) -> MarkState | None:
        """One start of the daemon that is killed afterwards: mark after mark, and what became of the last."""
        api = KubeApi(ApiServer(kubeconfig=str(self.kubeconfig)))

        async def main() -> MarkState | None:
            store = Store(str(self.directory / "state.db"), boot="b")
            marker = NodeMarker(Ledger(store), trio.CapacityLimiter(1), lambda: NodeClient(api, self.name))
            for mark in marks:
                marker.planned(self.situation(mark, enforce=enforce))
                await marker.sweep()
            status = marker.mark()
            self.problems = marker.problems()
            await api.aclose()
            store.close()
            return None if status is None else status.state

        return trio.run(main)

    def keep(
        self,
        mark: NodeMark,
        *steps: Callable[[], object],
        last: MarkState = MarkState.IN_PLACE,
        before_end: Callable[[], object] = lambda: None,
    ) -> None:
        """One run of the daemon, whose clock runs 20 times as fast: closed, and open again.

        The mark has to be in place after the start and after each step, or, after the last one, to have that state.
        """
        api = KubeApi(ApiServer(kubeconfig=str(self.kubeconfig)))

        async def main() -> None:
            store = Store(str(self.directory / "state.db"), boot="b")
            marker = NodeMarker(
                Ledger(store),
                trio.CapacityLimiter(1),
                lambda: NodeClient(api, self.name),
                clock=lambda: 20 * time.monotonic(),
            )
            marker.planned(self.situation(mark))
            for number, step in enumerate((lambda: None, *steps)):
                await trio.to_thread.run_sync(step)
                wanted = last if number == len(steps) else MarkState.IN_PLACE
                with trio.fail_after(60):
                    await marker.sweep()
                    while (status := marker.mark()) is None or status.state is not wanted:
                        await trio.sleep(0.1)
                        await marker.sweep()
                self.detail = status.detail
            await trio.to_thread.run_sync(before_end)
            marker.planned(self.situation(None))
            with trio.fail_after(60):
                while marker.status()["recorded"]:
                    await marker.sweep()
                    await trio.sleep(0.1)
            self.problems = marker.problems()
            await api.aclose()
            store.close()

        trio.run(main)


def bound(plane: ControlPlane, use: RightsUse, node: str, *more: RightsUse) -> Path:
    """The credentials of the service account with the printed role of one use, and of ``more``; no other."""
    for item in yaml.safe_load_all(manifest(list(RightsUse), "kube-system")):
        if item["kind"] == "ClusterRoleBinding":
            plane.call("DELETE", f"/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/{item['metadata']['name']}")
    for other in ("n1", "n2"):
        for role in (RightsUse.TAINT, RightsUse.CONDITION):
            plane.call("DELETE", f"/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/bypassd-{role}-{other}")
    plane.apply(manifest([use, *more], "kube-system", node))
    path = plane.account_kubeconfig()
    # The authorizer reads roles through a watch.
    resource = "nodes/status" if use is RightsUse.CONDITION else "nodes"
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": plane.account("bypassd"),
            "resourceAttributes": {
                "verb": "patch",
                "resource": "nodes",
                "subresource": resource.partition("/")[2],
                "name": node,
            },
        },
    }
    until(
        lambda: plane.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)[1]["status"]["allowed"]
    )
    return path


def until(condition: Callable[[], Any], longest_s: float = 30.0, *, told: Callable[[], str] = str) -> None:
    """``told`` is what a failure shows."""
    deadline = time.monotonic() + longest_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not come within {longest_s:.0f} s\n{told()}"
        time.sleep(0.1)


@pytest.fixture
def nodes(plane: ControlPlane) -> Iterator[ControlPlane]:
    """n1 with a taint of others that the test's pods tolerate, and n2."""
    for name in ("n1", "n2"):
        if plane.get(f"/api/v1/nodes/{name}") is None:
            plane.add_node(name)
        plane.call("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None, "unschedulable": None}}, MERGE_PATCH)
    plane.call("PATCH", "/api/v1/nodes/n1", {"spec": {"taints": [OTHERS]}}, MERGE_PATCH)
    gone = {"status": {"conditions": [{"$patch": "delete", "type": CLOSED_CONDITION}]}}
    plane.call("PATCH", "/api/v1/nodes/n1/status", gone, MERGE_PATCH)
    yield plane
    plane.call("DELETE", "/apis/apps/v1/namespaces/default/deployments/be")
    until(lambda: not plane.pods("app=be"))


def deployment(plane: ControlPlane, *, labels: Object | None = None, requests: Object | None = None) -> None:
    """One BE pod, on n1."""
    plane.call("PATCH", "/api/v1/nodes/n2", {"spec": {"unschedulable": True}}, MERGE_PATCH)
    resources = {"requests": requests or {"cpu": "100m"}, "limits": requests or {}}
    container = {"name": "main", "image": "localhost/be:1", "resources": resources}
    toleration = {"key": OTHERS["key"], "operator": "Exists"}
    spec = {"containers": [container], "tolerations": [toleration], "terminationGracePeriodSeconds": 0}
    body = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "be", "namespace": "default"},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {"app": "be"}},
            "template": {"metadata": {"labels": {"app": "be", **(labels or {})}}, "spec": spec},
        },
    }
    plane.apply(json.dumps(body))
    until(lambda: runs_on(plane) == ["n1"])


def runs_on(plane: ControlPlane) -> list[str]:
    """The nodes of its pods; empty: of one that is not scheduled."""
    return [pod["spec"].get("nodeName", "") for pod in plane.pods("app=be")]


def evict(plane: ControlPlane) -> None:
    """As bypassd's own request; returns when the replacement exists."""
    (pod,) = plane.pods("app=be")
    meta = pod["metadata"]
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": meta["name"], "namespace": "default"},
        "deleteOptions": {"preconditions": {"uid": meta["uid"]}},
    }
    code, answer = plane.call("POST", f"/api/v1/namespaces/default/pods/{meta['name']}/eviction", body)
    assert code == 201, answer
    until(lambda: [new["metadata"]["uid"] for new in plane.pods("app=be")] not in ([], [meta["uid"]]))


def test_without_a_mark_an_evicted_deployments_pod_is_back_on_the_node_at_once(nodes: ControlPlane) -> None:
    deployment(nodes)
    evict(nodes)
    until(lambda: runs_on(nodes) == ["n1"], SETTLE_S)


def test_with_no_schedule_it_waits_while_the_node_is_closed_and_is_back_when_it_is_open(
    nodes: ControlPlane, tmp_path: Path
) -> None:
    agent = Agent(tmp_path, bound(nodes, RightsUse.TAINT, "n1"), "n1")
    deployment(nodes)
    assert agent.turn(NodeMark.NO_SCHEDULE) is MarkState.IN_PLACE
    evict(nodes)
    time.sleep(SETTLE_S)
    assert runs_on(nodes) == [""]
    # The daemon was killed: its next start opens the node, in observe mode, too.
    assert agent.turn(None, enforce=False) is None
    until(lambda: runs_on(nodes) == ["n1"])
    assert nodes.taints("n1") == [OTHERS]


@pytest.mark.parametrize("mark", [NodeMark.AUTO, NodeMark.NO_SCHEDULE])
def test_with_another_node_the_replacement_is_scheduled_there_and_none_comes_back(
    nodes: ControlPlane, tmp_path: Path, mark: NodeMark
) -> None:
    agent = Agent(tmp_path, bound(nodes, RightsUse.TAINT, "n1"), "n1")
    deployment(nodes)
    nodes.call("PATCH", "/api/v1/nodes/n2", {"spec": {"unschedulable": None}}, MERGE_PATCH)
    assert agent.turn(mark) is MarkState.IN_PLACE
    for _ in range(3):
        evict(nodes)
        until(lambda: runs_on(nodes) == ["n2"])
    # After that n1 takes pods again.
    agent.turn(None)
    nodes.call("PATCH", "/api/v1/nodes/n2", {"spec": {"unschedulable": True}}, MERGE_PATCH)
    evict(nodes)
    until(lambda: runs_on(nodes) == ["n1"])


def test_prefer_no_schedule_lets_it_come_back_where_no_other_node_fits(nodes: ControlPlane, tmp_path: Path) -> None:
    agent = Agent(tmp_path, bound(nodes, RightsUse.TAINT, "n1"), "n1")
    deployment(nodes)
    assert agent.turn(NodeMark.PREFER_NO_SCHEDULE) is MarkState.IN_PLACE
    evict(nodes)
    until(lambda: runs_on(nodes) == ["n1"])
    agent.turn(None)


def test_the_printed_role_is_of_this_node_alone_and_every_verb_of_it_is_used(
    nodes: ControlPlane, tmp_path: Path
) -> None:
    for use, mark in ((RightsUse.TAINT, NodeMark.NO_SCHEDULE), (RightsUse.CONDITION, NodeMark.CONDITION)):
        path = bound(nodes, use, "n1")
        before = len(nodes.audited())
        assert Agent(tmp_path / use, path, "n1").turn(mark, None) is None
        used = {(verb, resource) for verb, resource, code in nodes.audited()[before:] if code == 200}
        assert used == {(verb, right.resource) for right in RIGHTS if right.use is use for verb in right.verbs}
        other = Agent(tmp_path / f"{use}2", path, "n2")
        assert other.turn(mark) is MarkState.REFUSED
        assert "forbidden" in other.problems[0]
    assert (nodes.taints("n1"), nodes.taints("n2")) == ([OTHERS], [])


def test_a_kubelets_credentials_are_enough_for_its_own_condition_and_for_nothing_else(
    nodes: ControlPlane, tmp_path: Path
) -> None:
    path = nodes.node_kubeconfig("n1")
    agent = Agent(tmp_path / "a", path, "n1")
    assert agent.turn(NodeMark.NO_SCHEDULE) is MarkState.REFUSED
    assert "not allowed to modify taints" in agent.problems[0]
    assert agent.turn(NodeMark.AUTO) is MarkState.HEADROOM_ONLY
    assert agent.turn(None, NodeMark.CONDITION) is MarkState.IN_PLACE
    time.sleep(1.0)  # the kubelet's own heartbeats leave it
    conditions = (nodes.get("/api/v1/nodes/n1") or {})["status"]["conditions"]
    assert {condition["type"] for condition in conditions} == {"Ready", CLOSED_CONDITION}
    assert agent.turn(None) is None
    conditions = (nodes.get("/api/v1/nodes/n1") or {})["status"]["conditions"]
    assert {condition["type"] for condition in conditions} == {"Ready"}
    assert Agent(tmp_path / "b", path, "n2").turn(NodeMark.CONDITION) is MarkState.REFUSED


def marks(plane: ControlPlane) -> list[str]:
    """What n1 has of bypassd: effects of its taints, and its condition."""
    node = plane.get("/api/v1/nodes/n1") or {}
    effects = [item["effect"] for item in node["spec"].get("taints", []) if item["key"] == CLOSED_KEY]
    return effects + [item["type"] for item in node["status"]["conditions"] if item["type"] == CLOSED_CONDITION]


MARKS = [(NodeMark.AUTO, RightsUse.TAINT), (NodeMark.CONDITION, RightsUse.CONDITION)]


@pytest.mark.parametrize(("mark", "use"), MARKS)
def test_a_node_that_others_change_all_the_time_is_marked_and_opened(
    nodes: ControlPlane, tmp_path: Path, mark: NodeMark, use: RightsUse
) -> None:
    ended = threading.Event()

    def change(key: str) -> None:
        number = 0
        while not ended.is_set():
            number += 1
            patch = {"metadata": {"labels": {key: str(number)}}}
            assert nodes.call("PATCH", "/api/v1/nodes/n1", patch, MERGE_PATCH)[0] in {200, 409}

    others = [threading.Thread(target=change, args=(f"storm{number}",)) for number in range(3)]
    path = bound(nodes, use, "n1")
    for other in others:
        other.start()
    try:
        seen: list[list[str]] = []
        agent = Agent(tmp_path, path, "n1")
        agent.keep(mark, lambda: seen.append(marks(nodes)))
    finally:
        ended.set()
        for other in others:
            other.join()
    assert seen == [["PreferNoSchedule"] if mark is NodeMark.AUTO else [CLOSED_CONDITION]]
    assert (marks(nodes), nodes.taints("n1")) == ([], [OTHERS])


@pytest.mark.parametrize(("mark", "use"), MARKS)
def test_a_closed_node_through_a_restart_of_the_api_server_and_a_new_object(
    nodes: ControlPlane, tmp_path: Path, mark: NodeMark, use: RightsUse
) -> None:
    def restart() -> None:
        nodes.kill("kube-apiserver")
        nodes.start_again("kube-apiserver")

    def delete() -> None:
        nodes.forget_node("n1")

    def make_again() -> None:
        delete()
        nodes.add_node("n1")
        nodes.call("PATCH", "/api/v1/nodes/n1", {"spec": {"taints": [OTHERS]}}, MERGE_PATCH)

    seen: list[list[str]] = []

    def look() -> None:
        seen.append(marks(nodes))

    agent = Agent(tmp_path, bound(nodes, use, "n1"), "n1")
    agent.keep(mark, look, restart, look, make_again, look)
    assert seen == [["PreferNoSchedule"] if mark is NodeMark.AUTO else [CLOSED_CONDITION]] * 3
    assert (marks(nodes), agent.problems) == ([], [])
    # Deleted for good: nothing is left to be removed.
    agent.keep(mark, before_end=delete)
    assert agent.problems == []


@pytest.mark.parametrize(
    ("theirs", "state"),
    [
        ([{"key": CLOSED_KEY, "value": "mine", "effect": "PreferNoSchedule"}], MarkState.FOREIGN),
        ([{"key": CLOSED_KEY, "effect": "NoExecute"}], MarkState.REMOVED),
        ([], MarkState.REMOVED),
    ],
    ids=["value", "effect", "none"],
)
def test_what_a_person_makes_of_the_taint_meanwhile_stays(
    nodes: ControlPlane, tmp_path: Path, theirs: list[Object], state: MarkState
) -> None:
    def edit() -> None:
        assert marks(nodes) == ["PreferNoSchedule"]
        by = "/api/v1/nodes/n1?fieldManager=kubectl-taint"
        nodes.call("PATCH", by, {"spec": {"taints": [OTHERS, *theirs]}}, MERGE_PATCH)

    agent = Agent(tmp_path, bound(nodes, RightsUse.TAINT, "n1"), "n1")
    agent.keep(NodeMark.AUTO, edit, last=state)
    assert "(taints last written by kubectl-taint)" in agent.detail
    assert sorted(nodes.taints("n1"), key=str) == sorted([OTHERS, *theirs], key=str)


OURS = {"key": CLOSED_KEY, "effect": "PreferNoSchedule", "value": "until-20300101T000000Z"}
CONDITION = {"type": CLOSED_CONDITION, "status": "True", "reason": "R", "message": "m"}
PATCHES: list[tuple[str, str, Any]] = [
    ("", JSON_PATCH, [{"op": "test", "path": "/spec/taints", "value": None}]),
    ("", JSON_PATCH, [{"op": "test", "path": "/metadata/uid", "value": "another"}]),
    ("", JSON_PATCH, [{"op": "add", "path": "/spec/taints/-", "value": OURS}]),
    ("", JSON_PATCH, [{"op": "add", "path": "/spec/taints/-", "value": OTHERS}]),
    ("", JSON_PATCH, [{"op": "add", "path": "/spec/taints/-", "value": {**OURS, "value": "a:b"}}]),
    ("", JSON_PATCH, [{"op": "add", "path": "/spec/taints/-", "value": {**OURS, "effect": "Never"}}]),
    ("", JSON_PATCH, [{"op": "remove", "path": "/spec/taints/7"}]),
    ("", JSON_PATCH, [{"op": "test", "path": "/spec/taints/0", "value": OURS}]),
    (
        "",
        JSON_PATCH,
        [{"op": "test", "path": "/spec/taints/0", "value": OTHERS}, {"op": "remove", "path": "/spec/taints/0"}],
    ),
    ("", JSON_PATCH, [{"op": "replace", "path": "/spec/taints/0", "value": OURS}]),
    ("", "application/nonsense", []),
    ("/status", MERGE_PATCH, {"status": {"conditions": [CONDITION]}}),
    ("/status", MERGE_PATCH, {"status": {"conditions": [{"$patch": "delete", "type": CLOSED_CONDITION}]}}),
    ("/status", MERGE_PATCH, {"metadata": {"resourceVersion": "1"}, "status": {"conditions": [CONDITION]}}),
    ("/status", MERGE_PATCH, {"metadata": {"uid": "another"}, "status": {"conditions": [CONDITION]}}),
]


@pytest.mark.parametrize(("part", "kind", "change"), PATCHES)
def test_the_fake_api_server_answers_as_the_real_one(nodes: ControlPlane, part: str, kind: str, change: Any) -> None:
    fake = FakeNodes()
    fake.add("n1", taints=[OTHERS])
    code, answer = nodes.call("PATCH", f"/api/v1/nodes/n1{part}", change, kind)
    faked, their = fake.answer("PATCH", f"/api/v1/nodes/n1{part}", kind, json.dumps(change).encode())
    assert (faked, their.get("reason")) == (code, answer.get("reason")), answer
    if code == 200:
        assert their["spec"].get("taints") == answer["spec"].get("taints")
        types = [[item["type"] for item in one["status"]["conditions"]] for one in (their, answer)]
        assert types[0] == types[1]


@pytest.mark.parametrize(("mark", "use"), MARKS)
def test_a_node_that_was_renamed_removes_the_mark_from_its_earlier_object(
    nodes: ControlPlane, tmp_path: Path, mark: NodeMark, use: RightsUse
) -> None:
    path = bound(nodes, use, "n1")
    assert Agent(tmp_path, path, "n1").turn(mark) is MarkState.IN_PLACE
    assert marks(nodes)
    # The role of the new name alone does not reach the earlier object: that is said, and tried again.
    bound(nodes, use, "n2")
    agent = Agent(tmp_path, path, "n2")
    agent.turn(None)
    assert marks(nodes)
    assert any("forbidden" in text for text in agent.problems), agent.problems
    bound(nodes, use, "n2")
    nodes.apply(manifest([use], "kube-system", "n1"))
    until(lambda: agent.turn(None) is None and not agent.problems)
    assert (marks(nodes), nodes.taints("n1")) == ([], [OTHERS])
