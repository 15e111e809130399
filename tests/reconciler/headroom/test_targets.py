"""Objects of the three control planes on a strict API server: what is written, read back, refused and withdrawn.

Longer than other modules because the three share most cases: each is run for every shape that it applies to.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from cgroupfs.errors import AgentError
from reconciler.clients.kube import KubeApi
from reconciler.clients.kube_config import ApiServer
from reconciler.headroom.cpu import ClusterTarget
from reconciler.headroom.publisher import Published, PublishError
from reconciler.headroom.shapes import (
    KATALYST_CPU,
    KOORDINATOR_CPU,
    KOORDINATOR_MEMORY,
    OWN_CPU,
    OWN_MEMORY,
    VALID_UNTIL,
    WITHHELD,
    NodeUse,
    Offer,
    PodUse,
)
from reconciler.headroom.targets import KatalystTarget, KoordinatorTarget, NodeTarget, withdraw_from
from tests.fakes.constants import varied
from tests.fakes.object_server import NODES, ObjectServer

GI = 1 << 30
CNR = "/apis/node.katalyst.kubewharf.io/v1alpha1/customnoderesources"
METRICS = "/apis/slo.koordinator.sh/v1alpha1/nodemetrics"
NODE, RESOURCE, METRIC = (f"{kind}/n1" for kind in (NODES, CNR, METRICS))
NOW = 1_795_000_000.0
OFFER = Offer(cpu_milli=2400, memory_bytes=GI)
USE = NodeUse(
    cpus_milli=8000,
    total_bytes=32 * GI,
    cpu_milli=2500,
    memory_bytes=6 * GI,
    pods=(PodUse(namespace="a", name="b", cpu_milli=1500, memory_bytes=GI, priority="koord-prod", qos="LS"),),
)


class Meter:
    def __init__(self, use: NodeUse | None) -> None:
        self.use = use
        self.windows: list[float] = []

    async def measure(self, window_s: float) -> NodeUse | None:
        self.windows.append(window_s)
        return self.use


@asynccontextmanager
async def serving(*kinds: str) -> AsyncIterator[tuple[ObjectServer, KubeApi]]:
    """With a node, and these kinds installed: an empty report, as the manager makes it; Katalyst's is ours to make."""
    server = ObjectServer(lambda: NOW)
    make_node(server)
    server.kinds |= {*kinds}
    if METRICS in kinds:
        server.make(METRIC, status={})
    async with trio.open_nursery() as nursery:
        port = await nursery.start(server.serve)
        api = KubeApi(varied(ApiServer(server=f"http://127.0.0.1:{port}"), timeout_s=5))
        yield server, api
        await api.aclose()
        nursery.cancel_scope.cancel()


def make_node(server: ObjectServer, **allocatable: str) -> None:
    amounts = {"cpu": "8", **allocatable}
    server.make(NODE, spec={"x": 1}, status={"allocatable": dict(amounts), "capacity": dict(amounts)})


def at_node(
    api: KubeApi,
    name: str = "n1",
    *,
    boot: str = "",
    wall: Callable[[], float] = lambda: NOW,
    clock: Callable[[], float] = time.monotonic,
) -> NodeTarget:
    return NodeTarget(api, name, valid_s=lambda: 240.0, wall=wall, boot=boot, clock=clock)


def shown(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


async def test_the_node_has_names_of_its_own_beside_what_others_have() -> None:
    async with serving() as (server, api):
        target = at_node(api)
        await target.find()
        published = await target.publish(OFFER)
        assert published.offer == OFFER
        assert 0 < published.next_s <= 80
        found = server.objects[NODE]
        assert found["status"]["allocatable"] == {"cpu": "8", OWN_CPU: "2400", OWN_MEMORY: str(GI)}
        until = shown(NOW + 240)
        assert found["metadata"]["annotations"] == {VALID_UNTIL: until}
        await target.withdraw()
        found = server.objects[NODE]
        assert (found["status"]["allocatable"], found["status"]["capacity"]) == ({"cpu": "8"}, {"cpu": "8"})
        assert VALID_UNTIL not in found["metadata"]["annotations"]


async def test_what_another_writer_has_made_of_it_is_what_is_reported() -> None:
    async with serving() as (server, api):
        target = at_node(api)
        original = server.patch

        def less(path: str, patch: Any, *, manager: str, status: bool = True) -> int:
            code = original(path, patch, manager=manager, status=status)
            return original(path, {"status": {"allocatable": {OWN_CPU: "7"}}}, manager="webhook") and code

        server.patch = less  # type: ignore[method-assign]
        assert (await target.publish(OFFER)).offer.cpu_milli == 7
        assert server.objects[NODE]["status"]["capacity"][OWN_CPU] == "2400"


async def test_what_another_program_has_changed_is_named_and_restored_without_requests_of_its_own() -> None:
    async with serving() as (server, api):
        now = 0.0
        target = at_node(api, clock=lambda: now)
        for _ in range(3):
            assert (await target.publish(OFFER)).edit == ""
        assert server.requests == [f"GET {NODE}", *[f"PATCH {NODE}/status"] * 3]
        for theirs, manager, words in (
            ("0", "kubelet", "kubelet changed allocatable bypassd/batch-cpu from 2400 to 0"),
            ("5", "bypassd", "another bypassd changed allocatable bypassd/batch-cpu from 2400 to 5"),
            (None, "kubectl-edit", "another program changed allocatable bypassd/batch-cpu from 2400 to none"),
        ):
            server.patch(NODE, {"status": {"allocatable": {OWN_CPU: theirs}}}, manager=manager)
            # Others write the status all the time.
            server.patch(NODE, {"status": {"conditions": [theirs]}}, manager="node-problem-detector")
            published = await target.publish(OFFER)
            assert (published.edit, published.offer) == (words, OFFER)
            assert server.objects[NODE]["status"]["allocatable"][OWN_CPU] == "2400"
            assert (await target.publish(OFFER)).edit == ""
            now += 600


async def test_a_program_that_changes_it_again_and_again_has_it_for_a_while() -> None:
    now = 0.0
    async with serving() as (server, api):
        target = at_node(api, clock=lambda: now)

        async def fought(seconds: float) -> Published:
            nonlocal now
            now += seconds
            server.patch(NODE, {"status": {"capacity": {OWN_MEMORY: "5"}}}, manager="manager")
            return await target.publish(OFFER)

        await target.publish(OFFER)
        assert [bool((await fought(60)).edit) for _ in range(2)] == [True, True]
        with pytest.raises(PublishError, match=r"manager changed capacity .*3 changes in 10 minutes") as caught:
            await fought(60)
        assert caught.value.foreign
        assert server.objects[NODE]["status"]["capacity"][OWN_MEMORY] == "5"
        # Tried again after a while: it still does it.
        now += 300
        await target.publish(OFFER)
        assert server.objects[NODE]["status"]["capacity"][OWN_MEMORY] == str(GI)
        with pytest.raises(PublishError, match="left to it"):
            await fought(60)
        now += 600
        await target.publish(OFFER)
        assert (await fought(60)).edit


@pytest.mark.parametrize("case", ["unreadable answer", "no answer", "node made again"])
async def test_what_we_have_changed_ourselves_and_a_new_object_are_no_edit(case: str) -> None:
    now = 0.0
    async with serving(METRICS, CNR) as (server, api):
        server.objects[NODE]["metadata"]["uid"] = "a"
        target = at_node(api, clock=lambda: now)
        await target.publish(OFFER)
        if case == "node made again":
            make_node(server)
            server.objects[NODE]["metadata"]["uid"] = "b"
        else:
            answer = b'{"metadata": {' if case == "unreadable answer" else None
            server.raw[f"{NODE}/status"] = (200, answer)
            with pytest.raises(AgentError):
                await target.publish(OFFER)
            del server.raw[f"{NODE}/status"]
            if case == "no answer":
                # It is carried out after the next one.
                assert (await target.publish(OFFER)).edit == ""
                now = 30.0
            server.patch(NODE, {"status": {"allocatable": {OWN_CPU: "7"}}}, manager="bypassd")
        published = await target.publish(OFFER)
        assert (published.edit, published.offer) == ("", OFFER)
        # After that, edits are seen again.
        now = 41.0
        await target.publish(OFFER)
        server.patch(NODE, {"status": {"allocatable": {OWN_CPU: "7"}}}, manager="kubectl")
        assert (await target.publish(OFFER)).edit


async def test_another_machines_node_of_the_same_name_gets_nothing() -> None:
    async with serving(METRICS, CNR) as (server, api):
        server.make(RESOURCE, status={})
        server.objects[NODE]["status"]["nodeInfo"] = {"bootID": "another"}
        for target in (
            at_node(api, boot="b"),
            KoordinatorTarget(api, "n1", Meter(USE), wall=lambda: NOW, boot="b"),
            KatalystTarget(api, "n1", wall=lambda: NOW, boot="b"),
        ):
            # Nor is what the other one publishes taken back.
            for change in (target.publish(OFFER), target.withdraw()):
                with pytest.raises(PublishError, match="is of another machine"):
                    await change
        for kind in (ClusterTarget.NODE, ClusterTarget.KOORDINATOR, ClusterTarget.KATALYST):
            with pytest.raises(PublishError, match="is of another machine"):
                await withdraw_from(kind, api, "n1", boot="b")
        assert not any(request.startswith("PATCH") for request in server.requests)
        assert OWN_CPU not in server.objects[NODE]["status"]["allocatable"]
        assert server.objects[METRIC]["status"] == server.objects[RESOURCE]["status"] == {}
        target = at_node(api, boot="b")
        server.objects[NODE]["status"]["nodeInfo"] = {"bootID": "b"}
        server.requests.clear()
        await target.publish(OFFER)
        await target.publish(OFFER)
        assert server.requests == [f"GET {NODE}", f"PATCH {NODE}/status", f"PATCH {NODE}/status"]
        # The other kubelet reports.
        server.objects[NODE]["status"]["nodeInfo"] = {"bootID": "another"}
        for _ in range(2):
            with pytest.raises(PublishError, match="is of another machine"):
                await target.publish(OFFER)
        assert server.requests[3:] == [f"PATCH {NODE}/status", f"GET {NODE}"]


@pytest.mark.parametrize("made", [True, False])
async def test_katalysts_resource_is_made_where_it_is_missing(made: bool) -> None:
    async with serving(CNR) as (server, api):
        if made:
            server.make(RESOURCE, status={"topologyPolicy": "None", "resources": {"allocatable": {"x": "1"}}})
        target = KatalystTarget(api, "n1", wall=lambda: NOW)
        published = await target.publish(OFFER)
        assert published.offer == OFFER
        allocatable = server.objects[RESOURCE]["status"]["resources"]["allocatable"]
        assert allocatable[KATALYST_CPU] == "2400"
        assert ("x" in allocatable) is made
        assert ("POST " + CNR in server.requests) is not made
        await target.withdraw()
        assert server.objects[RESOURCE]["status"]["resources"]["allocatable"][KATALYST_CPU] == "0"


def theirs(amount: str | None) -> dict[str, Any]:
    return {"status": {"resources": {"allocatable": {KATALYST_CPU: amount}}}}


async def test_an_edit_of_katalysts_amounts_is_named_and_restored_and_the_third_is_left() -> None:
    async with serving(CNR) as (server, api):
        now = 0.0
        target = KatalystTarget(api, "n1", wall=lambda: NOW, clock=lambda: now)
        assert (await target.publish(OFFER)).edit == ""
        # Other fields of the object are others'.
        server.patch(RESOURCE, {"status": {"topologyPolicy": "x"}}, manager="katalyst-controller")
        assert (await target.publish(OFFER)).edit == ""
        for amount, manager, who in ((None, "x", "another program"), ("7", "bypassd", "another bypassd")):
            server.patch(RESOURCE, theirs(amount), manager=manager)
            published = await target.publish(OFFER)
            text = f"allocatable {KATALYST_CPU} from 2400 to {amount or 'none'}"
            assert (published.edit, published.offer) == (f"{who} changed {text}", OFFER)
        server.patch(RESOURCE, theirs("9"), manager="agent")
        with pytest.raises(PublishError, match=r"agent changed .* from 2400 to 9, 3 changes in 10 minutes") as caught:
            await target.publish(OFFER)
        assert caught.value.foreign
        # While the agent has it nothing is written, nothing withdrawn.
        with pytest.raises(PublishError, match="agent writes the status"):
            await target.publish(OFFER)
        await target.withdraw()
        assert server.objects[RESOURCE]["status"]["resources"]["allocatable"][KATALYST_CPU] == "9"
        # A restart does not begin a fight of its own.
        with pytest.raises(PublishError, match="agent writes the status"):
            await KatalystTarget(api, "n1", wall=lambda: NOW).publish(OFFER)
        server.wall = lambda: NOW + 301
        server.patch(RESOURCE, {"status": {"a": 1}}, manager="x")
        now = 700.0
        published = await KatalystTarget(api, "n1", wall=lambda: NOW + 301, clock=lambda: now).publish(OFFER)
        assert published.offer == OFFER


async def test_an_edit_of_a_report_is_named_and_restored_and_the_third_is_left() -> None:
    async with serving(METRICS) as (server, api):
        now = NOW
        target = KoordinatorTarget(api, "n1", Meter(USE), wall=lambda: now, clock=lambda: now)
        await target.publish(OFFER)
        begun = server.objects[METRIC]["status"]["updateTime"]
        # The manager's own fields, and its spec, are no edits.
        server.patch(METRIC, {"status": {"x": 1}}, manager="koord-manager")
        now += 60
        server.wall = lambda: now
        assert (await target.publish(OFFER)).edit == ""
        at = server.objects[METRIC]["status"]["updateTime"]
        assert at != begun
        server.patch(METRIC, {"status": {"hostApplicationMetric": []}}, manager="kubectl-edit")
        now += 60
        published = await target.publish(OFFER)
        assert published.edit == "kubectl-edit changed hostApplicationMetric of the NodeMetric"
        (held,) = server.objects[METRIC]["status"]["hostApplicationMetric"]
        assert held["name"] == WITHHELD
        at = server.objects[METRIC]["status"]["updateTime"]
        server.patch(METRIC, {"status": {"updateTime": None}}, manager="kubectl-edit")
        now += 60
        published = await target.publish(OFFER)
        assert published.edit == f"another program changed updateTime of the NodeMetric from {at} to none"
        server.patch(METRIC, {"status": {"nodeMetric": {"systemUsage": {"cpu": "1"}}}}, manager="kubectl-edit")
        now += 60
        with pytest.raises(PublishError, match=r"changed nodeMetric of the NodeMetric, 3 changes in 10 minutes"):
            await target.publish(OFFER)
        # Left for as long as the publisher waits; then it is ours again.
        now += 300
        assert (await target.publish(OFFER)).edit == ""
        # A whole report of another program is no edit: it is a koordlet, and has the object at once.
        now += 60
        at = shown(now)
        server.patch(METRIC, {"status": {"updateTime": at}}, manager="koordlet")
        with pytest.raises(PublishError, match="koordlet writes the status of the NodeMetric, too: left to it"):
            await target.publish(OFFER)


async def test_a_report_whose_answer_was_lost_is_no_koordlets() -> None:
    async with serving(METRICS) as (server, api):
        now = NOW
        server.wall = lambda: now
        target = KoordinatorTarget(api, "n1", Meter(USE), wall=lambda: now, clock=lambda: now)
        await target.publish(OFFER)
        # Carried out, but the answer is cut off: twice, as a retry is.
        original = server.patch
        for _ in range(2):
            now += 60
            server.raw[f"{METRIC}/status"] = (200, b'{"metadata": {')
            with pytest.raises(PublishError, match="not the object"):
                await target.publish(OFFER)
            del server.raw[f"{METRIC}/status"]
            at = shown(now)
            assert original(METRIC, {"status": {"updateTime": at}}, manager="bypassd") == 200
        now += 60
        assert (await target.publish(OFFER)).edit == ""


async def test_the_manager_gets_use_and_its_last_result_is_what_is_reported() -> None:
    async with serving(METRICS) as (server, api):
        make_node(server, **{KOORDINATOR_CPU: "5000", KOORDINATOR_MEMORY: str(20 * GI)})
        policy = {"aggregateDurationSeconds": 120, "reportIntervalSeconds": 45}
        server.make(METRIC, spec={"metricCollectPolicy": policy}, status={})
        meter = Meter(USE)
        target = KoordinatorTarget(api, "n1", meter, wall=lambda: NOW)
        published = await target.publish(OFFER)
        assert published.offer == Offer(cpu_milli=5000, memory_bytes=20 * GI)
        assert (published.next_s, meter.windows) == (45.0, [120])
        status = server.objects[METRIC]["status"]
        assert status["updateTime"] == shown(NOW)
        (held,) = status["hostApplicationMetric"]
        assert (held["name"], held["usage"]["cpu"]) == (WITHHELD, "2600m")
        # Its spec is not ours.
        assert server.objects[METRIC]["spec"] == {"metricCollectPolicy": policy}
        await target.publish(Offer())
        (held,) = server.objects[METRIC]["status"]["hostApplicationMetric"]
        assert held["usage"] == {"cpu": "8000m", "memory": str(32 * GI)}
        await target.withdraw()
        assert "updateTime" not in server.objects[METRIC]["status"]


async def test_a_restart_goes_on_from_what_was_withheld() -> None:
    async with serving(METRICS) as (server, api):
        make_node(server, **{KOORDINATOR_CPU: "2400", KOORDINATOR_MEMORY: str(GI)})
        for held in ("2600m", "2600m"):
            # The manager's last result has it subtracted; without it the node would offer 5000 for one interval.
            target = KoordinatorTarget(api, "n1", Meter(USE), wall=lambda: NOW)
            if not server.objects[METRIC]["status"]:
                usage = {"cpu": "2600m", "memory": "0"}
                at = shown(NOW - 60)
                application = {"name": WITHHELD, "usage": usage}
                server.objects[METRIC]["status"] = {"updateTime": at, "hostApplicationMetric": [application]}
            await target.publish(OFFER)
            (application,) = server.objects[METRIC]["status"]["hostApplicationMetric"]
            assert application["usage"]["cpu"] == held


async def test_nothing_is_reported_before_it_is_measured() -> None:
    async with serving(METRICS) as (server, api):
        target = KoordinatorTarget(api, "n1", Meter(None), wall=lambda: NOW)
        published = await target.publish(OFFER)
        assert published.offer == Offer()
        assert server.objects[METRIC]["status"] == {}


@pytest.mark.parametrize(("age_s", "left"), [(60, True), (3600, False)])
async def test_an_object_that_another_agent_writes_is_left_to_it(age_s: float, left: bool) -> None:
    async with serving(METRICS, CNR) as (server, api):
        server.make(RESOURCE, status={})
        server.wall = lambda: NOW - age_s
        at = shown(NOW - age_s)
        for path in (METRIC, RESOURCE):
            resources = {"allocatable": {KATALYST_CPU: "5"}}
            server.patch(path, {"status": {"updateTime": at, "resources": resources}}, manager="koordlet")
        server.wall = lambda: NOW
        before = {path: dict(item["status"]) for path, item in server.objects.items()}
        targets = (
            KoordinatorTarget(api, "n1", Meter(USE), wall=lambda: NOW),
            KatalystTarget(api, "n1", wall=lambda: NOW),
        )
        for target in targets:
            if left:
                with pytest.raises(PublishError, match="koordlet") as caught:
                    await target.publish(OFFER)
                assert not caught.value.missing
            else:
                await target.publish(OFFER)
        same = {path: item["status"] for path, item in server.objects.items()} == before
        assert same is left


@pytest.mark.parametrize("tracked", [True, False])
async def test_who_writes_over_ours_is_found_also_without_managed_fields(tracked: bool) -> None:
    """Not every API server keeps managedFields of custom resources."""
    now = NOW
    async with serving(METRICS, CNR) as (server, api):
        server.tracks = tracked
        server.wall = lambda: now
        server.make(RESOURCE, status={})

        def targets() -> tuple[KoordinatorTarget, KatalystTarget]:
            return KoordinatorTarget(api, "n1", Meter(USE), wall=lambda: now), KatalystTarget(
                api, "n1", wall=lambda: now
            )

        for _ in range(2):
            # The second is a restart a minute later: what is there is its own.
            for target in (*targets(), *targets()):
                await target.publish(OFFER)
            now += 60
        first = targets()
        for target in first:
            await target.publish(OFFER)
        now += 30
        at = shown(now)
        server.objects[METRIC]["status"] = {"updateTime": at}
        for target in (first[0], targets()[0]):
            with pytest.raises(PublishError, match="left to it"):
                await target.publish(OFFER)
        for count in range(3):
            server.objects[RESOURCE]["status"] = {"resources": {"allocatable": {KATALYST_CPU: "99"}}}
            if count < 2:
                assert (await first[1].publish(OFFER)).edit.endswith("from 2400 to 99")
                continue
            with pytest.raises(PublishError, match="left to it"):
                await first[1].publish(OFFER)
        # Nor is what the other one has written taken back.
        kept = dict(server.objects[METRIC]["status"])
        for target in (first[0], targets()[0]):
            await target.withdraw()
        await withdraw_from(ClusterTarget.KOORDINATOR, api, "n1", wall=lambda: now)
        assert server.objects[METRIC]["status"] == kept
        # The other one has ended.
        now += 301
        for target in (*first, *targets()):
            await target.publish(OFFER)


@pytest.mark.parametrize(
    ("trouble", "denied", "missing"),
    [(0, f"PATCH {NODES}", False), (503, "", False), (429, "", False), (404, "", True)],
)
async def test_a_refusal_has_its_reason(trouble: int, denied: str, missing: bool) -> None:
    async with serving() as (server, api):
        server.trouble = trouble
        server.denied = {denied} if denied else set()
        target = at_node(api)
        with pytest.raises(PublishError) as caught:
            await target.publish(OFFER)
        assert caught.value.missing is missing
        assert ("docs/kubernetes.md" in str(caught.value)) is bool(denied)


@pytest.mark.parametrize("name", ["n1/../../secrets/x", "n 1", "n1?x=y", "n1#"])
async def test_a_nodes_name_is_one_part_of_the_path(name: str) -> None:
    async with serving() as (server, api):
        target = at_node(api, name)
        with pytest.raises(PublishError):
            await target.find()
        (request,) = server.requests
        assert request.startswith(f"GET {NODES}/n")
        assert request.count("/") == 4


PAGE = (404, b"<html>no such page</html>")


async def test_a_proxys_page_is_no_missing_object() -> None:
    async with serving() as (server, api):
        for path in (NODE, f"{NODE}/status", METRIC, RESOURCE, "/apis"):
            server.raw[path] = PAGE
        targets = (
            at_node(api),
            KoordinatorTarget(api, "n1", Meter(USE), wall=lambda: NOW),
            KatalystTarget(api, "n1", wall=lambda: NOW),
        )
        for target in targets:
            for request in (target.find, target.withdraw):
                with pytest.raises(PublishError, match="no such page") as caught:
                    await request()
                assert not caught.value.missing
        # What was published there is still to be withdrawn.
        with pytest.raises(PublishError):
            await withdraw_from(ClusterTarget.KATALYST, api, "n1")


async def test_a_kind_that_is_not_installed_is_missing_and_one_of_another_version_is_said() -> None:
    async with serving() as (server, api):
        target = KoordinatorTarget(api, "n1", Meter(USE), wall=lambda: NOW)
        for kinds in (set(), {METRICS.replace("nodemetrics", "nodeslos")}):
            server.kinds = {NODES, *kinds}
            with pytest.raises(PublishError, match="does not have its kind") as caught:
                await target.find()
            assert caught.value.missing
        # A manager of another version may be there.
        server.kinds = {NODES, METRICS.replace("v1alpha1", "v1beta1")}
        with pytest.raises(PublishError, match="this version of its kind: /apis/slo") as caught:
            await target.find()
        assert not caught.value.missing


async def test_an_answer_that_was_cut_off_is_an_error() -> None:
    async with serving() as (server, api):
        server.raw[f"{NODE}/status"] = (200, b'{"metadata": {')
        target = at_node(api)
        with pytest.raises(PublishError, match="not the object"):
            await target.publish(OFFER)


async def test_the_delay_that_the_api_server_requests_is_kept() -> None:
    async with serving() as (server, api):
        server.trouble, server.retry_after = 429, "45"
        target = at_node(api)
        with pytest.raises(PublishError) as caught:
            await target.publish(OFFER)
        assert caught.value.wait_s == 45.0


@pytest.mark.parametrize("skew_s", [-1200, 1200, 10])
async def test_times_are_those_of_the_cluster_where_the_nodes_clock_is_wrong(skew_s: float) -> None:
    """Koordinator's manager resets what is older than 15 minutes by its own clock."""

    def wall() -> float:
        return NOW + skew_s

    def of_cluster(at: float) -> str:
        return shown(at if abs(skew_s) > 60 else at + skew_s)

    async with serving(METRICS) as (server, api):
        await KoordinatorTarget(api, "n1", Meter(USE), wall=wall).publish(OFFER)
        assert server.objects[METRIC]["status"]["updateTime"] == of_cluster(NOW)
        target = at_node(api, wall=wall)
        for _ in range(2):
            await target.publish(OFFER)
        assert server.objects[NODE]["metadata"]["annotations"] == {VALID_UNTIL: of_cluster(NOW + 240)}
        # The API server dates other writers by its own clock.
        server.patch(METRIC, {"status": {"updateTime": of_cluster(NOW - 20)}}, manager="koordlet")
        with pytest.raises(PublishError, match="koordlet"):
            await KoordinatorTarget(api, "n1", Meter(USE), wall=wall).publish(OFFER)


async def test_katalysts_object_is_left_when_the_node_becomes_another_machines() -> None:
    """And one request more in five minutes shows it; without a Node there is no other machine."""
    async with serving(CNR) as (server, api):
        now = 0.0
        server.objects[NODE]["status"]["nodeInfo"] = {"bootID": "b"}
        target = KatalystTarget(api, "n1", wall=lambda: NOW, boot="b", clock=lambda: now)
        for _ in range(5):
            await target.publish(OFFER)
            now += 60
        assert server.requests.count(f"GET {NODE}") == 1
        server.objects[NODE]["status"]["nodeInfo"] = {"bootID": "another"}
        for change in (target.publish(OFFER), target.withdraw()):
            with pytest.raises(PublishError, match="is of another machine"):
                await change
        assert server.objects[RESOURCE]["status"]["resources"]["allocatable"][KATALYST_CPU] == "2400"
        del server.objects[NODE]
        with pytest.raises(PublishError) as caught:
            await target.publish(OFFER)
        assert caught.value.missing
        await target.withdraw()
        assert server.objects[RESOURCE]["status"]["resources"]["allocatable"][KATALYST_CPU] == "0"


@pytest.mark.parametrize("jump_s", [7200, -7200])
async def test_times_are_right_as_soon_as_the_nodes_clock_is_set(jump_s: float) -> None:
    """Koordinator's manager would reset the node's resources for a report of two hours ago."""
    at = wall = NOW

    def passes(seconds: float) -> None:
        nonlocal at, wall
        at, wall = at + seconds, wall + seconds

    async with serving(METRICS, CNR) as (server, api):
        server.wall = lambda: at
        report = KoordinatorTarget(api, "n1", Meter(USE), wall=lambda: wall, clock=lambda: at)
        own = at_node(api, wall=lambda: wall, clock=lambda: at)
        resource = KatalystTarget(api, "n1", wall=lambda: wall, clock=lambda: at)
        targets = (report, own, resource)
        for target in targets:
            await target.publish(OFFER)
        passes(60)
        wall += jump_s
        for _ in range(3):
            for target in targets:
                assert (await target.publish(OFFER)).edit == ""
            assert server.objects[METRIC]["status"]["updateTime"] == shown(at)
            assert server.objects[NODE]["metadata"]["annotations"] == {VALID_UNTIL: shown(at + 240)}
            passes(60)
        wall = at
        passes(60)
        for target in targets:
            assert (await target.publish(OFFER)).edit == ""
            await target.withdraw()
        assert "updateTime" not in server.objects[METRIC]["status"]
