"""Real containers of a real runtime are evicted: through CRI, by signals, and by what an API server sets going."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from cgroupfs.errors import CgroupError
from cgroupfs.hierarchy import FREEZER, Hierarchy
from cgroupfs.subtree import Subtree
from reconciler.alerts.alert import Alert, AlertKind
from reconciler.clients.kube import KubeApi
from reconciler.clients.kube_config import ApiServer
from reconciler.responses.eviction.executor import Evictor
from reconciler.responses.means.config import ApiMeans, EvictionMeans, RestartRules
from reconciler.sources.cri import CriClient
from state.eviction import EvictionCase, EvictionMethodName, EvictionOrder, EvictionOutcome
from state.evidence import PodSnapshot
from state.model import PodClass
from state.store import Store, StoreBatch
from tests.e2e.conftest import PodFactory
from tests.e2e.cri import CriError
from tests.e2e.criapi import runtime_pb2 as pb
from tests.e2e.node import Node, RunningPod
from tests.e2e.pods import ContainerSpec, PodSpec, best_effort, new_uid
from tests.fakes.constants import varied
from tests.fakes.http_peer import HttpPeer, Reply

pytestmark = [pytest.mark.containerd, pytest.mark.quiet]
BUDGET = json.dumps({"kind": "Status", "reason": "TooManyRequests", "message": "budget"}).encode()
API_THEN_CRI = (EvictionMethodName.API, EvictionMethodName.CRI)
HARDLY_BEGUN_S = 0.2
GRACE_S = 20.0
GONE = json.dumps({"kind": "Status", "reason": "NotFound", "details": {"kind": "pods"}}).encode()
LISTED = {"resources": [{"name": "pods/eviction", "kind": "Eviction", "group": "policy", "version": "v1"}]}


def crunching() -> PodSpec:
    containers = (ContainerSpec(name="main", run=("burn", "1")), ContainerSpec(name="side"))
    return PodSpec(name="crunch", uid=new_uid(), containers=containers)


def frozen(hierarchy: Hierarchy, group: str) -> bool:
    directory = Path(hierarchy.directory(FREEZER, group))
    if hierarchy.version(FREEZER) == 1:
        return (directory / "freezer.state").read_text().strip() != "THAWED"
    return (directory / "cgroup.freeze").read_text().strip() == "1"


def frozen_and_other(node: Node, run_pod: PodFactory) -> tuple[RunningPod, RunningPod]:
    pod, other = run_pod(crunching()), run_pod(best_effort("other"))
    hierarchy, group = Hierarchy.detect(), node.cgroups.pod_group(pod.spec)
    with Subtree.open(hierarchy, group) as tree:
        assert tree.stop()
    assert frozen(hierarchy, group)
    return pod, other


@pytest.fixture(autouse=True)
def thawed(containerd_node: Node, request: pytest.FixtureRequest) -> Iterator[None]:
    """No runtime ends a frozen pod: asks for the factory first, so as to run before its pods are removed."""
    request.getfixturevalue("run_pod")
    yield
    for pod in containerd_node.pods.values():
        with (
            contextlib.suppress(CgroupError),
            Subtree.open(Hierarchy.detect(), containerd_node.cgroups.pod_group(pod.spec)) as tree,
        ):
            tree.thaw()


async def evicted(
    node: Node,
    pod: RunningPod,
    directory: Path,
    *means: EvictionMethodName,
    port: int | None = None,
    critical: bool = False,
) -> tuple[EvictionCase, list[Alert]]:
    """The pod's case when it has ended, and all alerts. ``critical``: of a shortage that lasts until then."""
    alerts: list[Alert] = []

    async def stage(batch: StoreBatch, alert: Alert) -> Callable[[], None]:
        return lambda: alerts.append(alert)

    facts = PodSnapshot(
        uid=pod.spec.uid,
        title=pod.spec.name,
        pod_class=PodClass.RECLAIMED,
        group=node.cgroups.pod_group(pod.spec),
        namespace=pod.spec.namespace,
        # Long: a busy machine is to have the time for it, and a finished step is not waited for.
        grace_s=GRACE_S,
    )
    evictor = Evictor(
        varied(
            EvictionMeans(order=means, api=varied(ApiMeans(), first_wait_s=0.1, failing_s=1.0)),
            # `start_again` takes more than two seconds on a busy machine; a pod that returns later is not ended again.
            restarts=RestartRules(watch_s=10.0 if means == (EvictionMethodName.CRI,) else 0.0),
        ),
        hierarchy=Hierarchy.detect(),
        store=Store(str(directory / "state.db"), boot="b"),
        lane=trio.CapacityLimiter(1),
        stage=stage,
        api=KubeApi(
            varied(ApiServer(server=f"http://127.0.0.1:{port}"), timeout_s=0.5) if port else ApiServer(enabled=False)
        ),
        cri=lambda: CriClient(node.containerd.socket, timeout_s=10.0),
        kubelet_dir=node.kubelet_root,
        pods={facts.uid: facts}.get,
        closing=lambda: False,
        forbidden=lambda _: None,
    )
    order = EvictionOrder(
        id="1",
        uid=facts.uid,
        title=facts.title,
        namespace=facts.namespace,
        name=pod.spec.name,
        owner=None,
        cause="test",
        evidence="because",
        critical=critical,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(evictor.run)
        evictor.measured({(order.cause, order.subject)} if critical else ())
        evictor.submit(order)
        with trio.fail_after(120):
            while True:
                cases = evictor.cases()
                if cases and not any(case.open for case in cases):
                    break
                await trio.sleep(0.02)
        nursery.cancel_scope.cancel()
    return evictor.cases()[0], alerts


def check_ended(
    node: Node,
    pod: RunningPod,
    other: RunningPod,
    case: EvictionCase,
    alerts: list[Alert],
    outcome: EvictionOutcome = EvictionOutcome.DONE,
) -> None:
    hierarchy, group = Hierarchy.detect(), node.cgroups.pod_group(pod.spec)
    assert case.outcome is outcome, case
    # The durable alert before a means that knows no budget.
    unguarded = [AlertKind.EVICTION_UNGUARDED] if case.order.critical else []
    assert [alert.kind for alert in alerts] == [AlertKind.EVICTION_PLANNED, *unguarded, AlertKind.EVICTION_DONE]
    with Subtree.open(hierarchy, group) as tree:
        assert not any(tree.scan())
    assert not frozen(hierarchy, group)
    assert node.cri.container_status(other["main"].id).state == pb.CONTAINER_RUNNING


def start_again(node: Node, pod: RunningPod) -> None:
    """What a kubelet does about a pod whose sandbox has ended, and that it did not end itself."""
    ids = [running.id for running in pod.containers.values()]
    deadline = time.monotonic() + 60
    while any(node.cri.container_status(text).state != pb.CONTAINER_EXITED for text in ids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while any(sandbox.id == pod.sandbox and sandbox.state == pb.SANDBOX_READY for sandbox in node.cri.list_sandboxes()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for item in ids:
        node.cri.remove_container(item)
    node.cri.remove_sandbox(pod.sandbox)
    with contextlib.suppress(CriError):  # its sandbox is ended before its last container is there
        node.run_pod(pod.spec)


def end(node: Node, pod: RunningPod) -> None:
    """What a kubelet does about a pod that is gone from the API server."""
    for container in pod.containers.values():
        node.cri.stop_container(container.id, grace_s=2)
    node.cri.stop_sandbox(pod.sandbox)


async def end_after(requests: int, server: HttpPeer, node: Node, pod: RunningPod) -> None:
    """The kubelet's part, once the API server was requested so many times."""
    while len(server.requests) < requests:  # noqa: ASYNC110
        await trio.sleep(0.05)
    await trio.to_thread.run_sync(end, node, pod)


async def test_through_cri_with_the_grace_and_again_when_the_kubelet_starts_it_again(
    containerd_node: Node, run_pod: PodFactory, tmp_path: Path
) -> None:
    pod, other = frozen_and_other(containerd_node, run_pod)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, start_again, containerd_node, pod)
        case, alerts = await evicted(containerd_node, pod, tmp_path, EvictionMethodName.CRI)
    check_ended(containerd_node, pod, other, case, alerts)
    # Once for each step of the kubelet's start after which it was caught: the sandbox, then one container each.
    assert 1 <= case.rounds <= 1 + len(pod.containers), case
    assert case.detail == "containers stopped by the runtime"
    again = containerd_node.pods[pod.spec.uid]
    assert again.sandbox != pod.sandbox
    made = [
        container.id for container in containerd_node.cri.list_containers() if container.pod_sandbox_id == again.sandbox
    ]
    assert made
    for status in map(containerd_node.cri.container_status, made):
        assert status.state == pb.CONTAINER_EXITED, status
        # It had its SIGTERM, or had hardly started when its sandbox was ended. As process 1 without a handler yet it
        # ignores SIGTERM: then it had its whole grace.
        lived_s = (status.finished_at - status.started_at) / 1e9 if status.started_at else 0.0
        assert status.exit_code in {0, 143} or not HARDLY_BEGUN_S <= lived_s < GRACE_S, status


async def test_by_signals_frozen_as_it_is(containerd_node: Node, run_pod: PodFactory, tmp_path: Path) -> None:
    pod, other = frozen_and_other(containerd_node, run_pod)
    case, alerts = await evicted(containerd_node, pod, tmp_path, EvictionMethodName.SIGNAL)
    check_ended(containerd_node, pod, other, case, alerts)


async def test_by_an_api_server_that_refuses_fails_and_accepts(
    containerd_node: Node, run_pod: PodFactory, tmp_path: Path, nursery: trio.Nursery
) -> None:
    pod, other = frozen_and_other(containerd_node, run_pod)
    listed = Reply(json.dumps(LISTED).encode())
    refused = Reply(BUDGET, status="429 Too Many Requests")
    failed = Reply(b"{}", status="500 Internal Server Error")
    server = HttpPeer([listed, refused, failed, Reply(b"{}", status="201 Created")])
    port = await nursery.start(server.serve)
    nursery.start_soon(end_after, 4, server, containerd_node, pod)
    case, alerts = await evicted(containerd_node, pod, tmp_path, EvictionMethodName.API, port=port)
    check_ended(containerd_node, pod, other, case, alerts)
    bodies: list[Any] = [json.loads(body) for body in server.bodies[1:]]
    assert [body["deleteOptions"]["preconditions"]["uid"] for body in bodies] == [pod.spec.uid] * 3


async def test_by_no_means_that_knows_no_budget_where_the_api_server_hangs(
    containerd_node: Node, run_pod: PodFactory, tmp_path: Path, nursery: trio.Nursery
) -> None:
    pod = run_pod(crunching())
    server = HttpPeer([Reply(json.dumps(LISTED).encode()), Reply(hang_s=60)])
    port = await nursery.start(server.serve)
    case, alerts = await evicted(containerd_node, pod, tmp_path, *API_THEN_CRI, port=port)
    assert case.outcome is EvictionOutcome.REFUSED
    assert [alert.kind for alert in alerts] == [AlertKind.EVICTION_PLANNED, AlertKind.EVICTION_REFUSED]
    with Subtree.open(Hierarchy.detect(), containerd_node.cgroups.pod_group(pod.spec)) as tree:
        assert any(tree.scan())


async def test_by_the_runtime_where_the_api_server_hangs_and_online_pods_would_be_killed(
    containerd_node: Node, run_pod: PodFactory, tmp_path: Path, nursery: trio.Nursery
) -> None:
    pod, other = frozen_and_other(containerd_node, run_pod)
    server = HttpPeer([Reply(json.dumps(LISTED).encode()), Reply(hang_s=60)])
    port = await nursery.start(server.serve)
    case, alerts = await evicted(containerd_node, pod, tmp_path, *API_THEN_CRI, port=port, critical=True)
    check_ended(containerd_node, pod, other, case, alerts)
    assert (case.means, case.detail) == (EvictionMethodName.CRI, "containers stopped by the runtime")
    assert case.tried[0].startswith("api: ")


async def test_no_method_ends_a_pod_that_the_api_server_does_not_have_and_the_kubelet_ends(
    containerd_node: Node, run_pod: PodFactory, tmp_path: Path, nursery: trio.Nursery
) -> None:
    pod, other = frozen_and_other(containerd_node, run_pod)
    listed = Reply(json.dumps(LISTED).encode())
    server = HttpPeer([listed, Reply(GONE, status="404 Not Found")])
    port = await nursery.start(server.serve)
    nursery.start_soon(end_after, 2, server, containerd_node, pod)
    case, alerts = await evicted(containerd_node, pod, tmp_path, *API_THEN_CRI, port=port)
    check_ended(containerd_node, pod, other, case, alerts, EvictionOutcome.GONE)
    assert case.tried == ()
