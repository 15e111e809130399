"""Evictions through an API server that answers, refuses, fails and hangs."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from cgroupfs.subtree import Subtree
from reconciler.clients.http import HttpResponse
from reconciler.clients.kube import KubeApi
from reconciler.clients.kube_config import ApiServer
from reconciler.responses.means.api import ApiEviction, EvictionAnswer, parse_reply
from reconciler.responses.means.base import EvictionResult
from reconciler.responses.means.config import ApiMeans, EvictionMeans
from state.eviction import EvictionCase, EvictionOrder, EvictionOutcome, EvictionStep, EvictionTarget
from tests.fakes.constants import varied
from tests.fakes.http_peer import HttpPeer, Reply
from tests.fakes.work import FakeWork

UID = "33333333-3333-4333-8333-333333333333"
CONFIG = varied(
    EvictionMeans(api=varied(ApiMeans(), refused_s=0.5, failing_s=0.3, first_wait_s=0.1, longest_wait_s=0.2)),
    margin_s=0.4,
)
ORDER = EvictionOrder(
    id="o", uid=UID, title="shop/web-1", namespace="shop", name="web-1", owner=None, cause="x", evidence="y", grace_s=7
)


def listed(version: str) -> Reply:
    resources = [{"name": "pods"}, {"name": "pods/eviction", "kind": "Eviction", "group": "policy", "version": version}]
    return Reply(json.dumps({"kind": "APIResourceList", "resources": resources}).encode())


def status(code: int, reason: str, message: str = "", *headers: str, **details: Any) -> Reply:
    body = {"kind": "Status", "reason": reason, "message": message, "details": details}
    return Reply(json.dumps(body).encode(), status=f"{code} {reason}", headers=headers)


BUDGET = {"causes": [{"reason": "DisruptionBudget", "message": "needs 2 healthy pods and has 2"}]}
CREATED = Reply(b'{"kind":"Status","status":"Success"}', status="201 Created")


class Pod:
    """A group that is a plain directory: its processes are those in the file."""

    def __init__(self, directory: Path) -> None:
        self.procs = directory / "cgroup.procs"
        self.procs.write_text("4242\n")
        self.tree = Subtree({"x": (os.open(directory, os.O_RDONLY | os.O_DIRECTORY), 1)})

    def end(self) -> None:
        self.procs.write_text("")


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    item = Pod(tmp_path)
    yield item
    item.tree.close()


async def evict(
    nursery: trio.Nursery,
    pod: Pod,
    *replies: Reply,
    config: EvictionMeans = CONFIG,
    order: EvictionOrder = ORDER,
    **more: Any,
) -> tuple[EvictionResult, HttpPeer, FakeWork]:
    # Only an answer that is never sent is waited for a short time: others may be slow on a busy machine.
    timeout_s = 0.1 if any(reply.hang_s for reply in replies) else 5.0
    server = HttpPeer(list(replies))
    port = await nursery.start(server.serve)
    api = KubeApi(varied(ApiServer(server=f"http://127.0.0.1:{port}"), timeout_s=timeout_s))
    work = FakeWork(EvictionCase(order=order, target=EvictionTarget(grace_s=9.0)), pod.tree, grace_s=0.3, **more)
    result = await ApiEviction(config, api).terminate(work)
    await api.aclose()
    nursery.cancel_scope.cancel()
    return result, server, work


async def test_an_accepted_eviction_is_done_when_nobody_is_left(
    nursery: trio.Nursery, pod: Pod, idle_clock: MockClock
) -> None:
    def step(step: EvictionStep) -> None:
        if step is EvictionStep.WAIT:
            pod.end()

    result, server, work = await evict(nursery, pod, listed("v1"), CREATED, before=step)
    assert result.outcome is EvictionOutcome.DONE
    assert (work.steps, work.case.accepted) == ([EvictionStep.ASK, EvictionStep.WAIT], True)
    assert [texts[""] for texts in server.requests] == [
        "GET /api/v1 HTTP/1.1",
        "POST /api/v1/namespaces/shop/pods/web-1/eviction HTTP/1.1",
    ]
    assert json.loads(server.bodies[1]) == {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": "web-1", "namespace": "shop"},
        "deleteOptions": {"preconditions": {"uid": UID}, "gracePeriodSeconds": 1},
    }


async def test_a_pods_own_grace_is_not_spoken_of_where_nothing_shortens_it(
    nursery: trio.Nursery, pod: Pod, idle_clock: MockClock
) -> None:
    pod.end()
    server = HttpPeer([listed("v1"), CREATED])
    port = await nursery.start(server.serve)
    api = KubeApi(ApiServer(server=f"http://127.0.0.1:{port}"))
    case = EvictionCase(order=replace(ORDER, grace_s=None), target=EvictionTarget(grace_s=9.0))
    await ApiEviction(CONFIG, api).terminate(FakeWork(case, pod.tree, grace_s=9.0))
    await api.aclose()
    assert json.loads(server.bodies[1])["deleteOptions"] == {"preconditions": {"uid": UID}}


async def test_an_accepted_one_that_lives_on_is_left_to_the_next_means(
    nursery: trio.Nursery, pod: Pod, idle_clock: MockClock
) -> None:
    result, _, work = await evict(nursery, pod, listed("v1"), CREATED)
    assert (result.outcome, result.unasked, work.case.accepted) == (None, False, True), "its budgets have allowed it"
    assert result.detail == "accepted, but the pod is still running after 700 ms"


@pytest.mark.parametrize("version", ["v1beta1", "v1"])
async def test_the_core_groups_list_tells_which_version_evicts(
    nursery: trio.Nursery, pod: Pod, version: str, idle_clock: MockClock
) -> None:
    pod.end()
    _, server, _ = await evict(nursery, pod, listed(version), CREATED)
    assert json.loads(server.bodies[1])["apiVersion"] == f"policy/{version}"


@pytest.mark.parametrize(
    "unlisted",
    [status(403, "Forbidden"), Reply(b"{}"), Reply(b"[1]"), Reply(b'{"resources":[{"name":"pods/eviction"}]}')],
)
async def test_where_the_list_does_not_tell_the_version_is_found_by_trying(
    nursery: trio.Nursery, pod: Pod, unlisted: Reply, idle_clock: MockClock
) -> None:
    pod.end()
    wrong = status(400, "BadRequest", 'no kind "Eviction" is registered for version "policy/v1"')
    result, server, _ = await evict(nursery, pod, unlisted, wrong, CREATED)
    assert result.outcome is EvictionOutcome.DONE
    assert [json.loads(body)["apiVersion"] for body in server.bodies[1:]] == ["policy/v1", "policy/v1beta1"]


async def test_the_version_that_was_found_by_trying_is_kept(
    nursery: trio.Nursery, pod: Pod, idle_clock: MockClock
) -> None:
    def step(step: EvictionStep) -> None:
        if step is EvictionStep.WAIT:
            pod.end()

    wrong = status(400, "BadRequest", 'no kind "Eviction" is registered for version "policy/v1"')
    busy = status(503, "ServiceUnavailable")
    result, server, _ = await evict(nursery, pod, status(403, "Forbidden"), wrong, busy, CREATED, before=step)
    assert result.outcome is EvictionOutcome.DONE
    versions = [json.loads(body)["apiVersion"] for body in server.bodies[1:]]
    assert versions == ["policy/v1", "policy/v1beta1", "policy/v1beta1"]


@pytest.mark.parametrize("header", [("Retry-After: 0",), ()])
async def test_a_disruption_budget_is_asked_again_until_it_gives_way(
    nursery: trio.Nursery, pod: Pod, header: tuple[str, ...], idle_clock: MockClock
) -> None:
    refusal = status(429, "TooManyRequests", "Cannot evict pod", *header, **BUDGET)
    begun = trio.current_time()

    def step(step: EvictionStep) -> None:
        if step is EvictionStep.WAIT:
            pod.end()

    result, server, work = await evict(nursery, pod, listed("v1"), refusal, refusal, CREATED, before=step)
    assert result.outcome is EvictionOutcome.DONE
    assert len(server.requests) == 4
    assert work.checks == 3  # a person may have held it in between
    waited = trio.current_time() - begun
    assert waited < 0.3 if header else waited >= 0.3


@pytest.mark.parametrize(
    "failure",
    [
        status(500, "InternalError", "etcd is gone"),
        status(409, "Conflict", "the object has been modified"),
        status(403, "Forbidden", "not any more"),
        status(405, "MethodNotAllowed", "no such version"),
        Reply(hang_s=60),
    ],
)
async def test_a_budget_that_has_refused_is_obeyed_also_where_the_api_server_fails_then(
    nursery: trio.Nursery, pod: Pod, failure: Reply, idle_clock: MockClock
) -> None:
    refusal = status(429, "TooManyRequests", "Cannot evict pod", **BUDGET)
    # It has refused for longer than failures are borne, and most of the time is left for the failures.
    waits = {"first_wait_s": 0.05, "longest_wait_s": 0.05}
    long = replace(CONFIG, api=varied(CONFIG.api, refused_s=0.8, failing_s=0.1, **waits))
    result, server, work = await evict(nursery, pod, listed("v1"), *[refusal] * 3, failure, config=long)
    assert result.outcome is EvictionOutcome.REFUSED
    words = "HTTP 429: Cannot evict pod (needs 2 healthy pods and has 2)"
    assert result.detail.startswith(f"refused by its disruption budget: {words}; ")
    assert work.case.budget == words
    assert not result.unasked
    assert 4 <= work.case.requests < len(server.requests)
    assert len(server.requests) >= 5


async def test_a_budgets_refusal_to_an_earlier_run_is_obeyed_when_nobody_answers_now(
    nursery: trio.Nursery, pod: Pod, idle_clock: MockClock
) -> None:
    outcomes = []
    over = replace(CONFIG, api=replace(CONFIG.api, hard_over_budget=True))
    for config, budget in ((CONFIG, ""), (CONFIG, "HTTP 429"), (over, "HTTP 429")):
        async with trio.open_nursery() as inner:
            server = HttpPeer([listed("v1"), status(500, "InternalError", "etcd is gone")])
            port = await inner.start(server.serve)
            api = KubeApi(varied(ApiServer(server=f"http://127.0.0.1:{port}"), timeout_s=0.1))
            order = replace(ORDER, forced=True)
            case = EvictionCase(order=order, step=EvictionStep.ASK, step_s=time.time() - 1000, budget=budget)
            result = await ApiEviction(config, api).terminate(FakeWork(case, pod.tree, resumed=EvictionStep.ASK))
            await api.aclose()
            inner.cancel_scope.cancel()
        outcomes.append((result.outcome, len(server.requests) > 2))
    # Failures are borne for their time again, for they begin now; the budget's time was over long ago.
    assert outcomes == [(None, True), (EvictionOutcome.REFUSED, False), (None, False)]


async def test_a_server_that_wants_no_wait_is_not_asked_without_a_pause(
    nursery: trio.Nursery, pod: Pod, idle_clock: MockClock
) -> None:
    """Each refusal is a request, and a row of the store that is made durable."""
    refusal = status(429, "TooManyRequests", "Cannot evict pod", "Retry-After: 0", **BUDGET)
    result, server, _ = await evict(nursery, pod, listed("v1"), *[refusal] * 100)
    assert result.outcome is EvictionOutcome.REFUSED
    assert 4 <= len(server.requests) <= 1 + 0.5 / 0.1 + 1


async def test_a_list_of_the_api_servers_that_is_nested_too_deeply_is_none(
    nursery: trio.Nursery, pod: Pod, idle_clock: MockClock
) -> None:
    deep = Reply(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    _, _, work = await evict(nursery, pod, deep, CREATED)
    assert work.case.accepted


async def test_a_budget_that_gives_way_in_the_end_has_not_refused(
    nursery: trio.Nursery, pod: Pod, idle_clock: MockClock
) -> None:
    refusal = status(429, "TooManyRequests", "Cannot evict pod", "Retry-After: 0", **BUDGET)
    result, _, work = await evict(nursery, pod, listed("v1"), refusal, CREATED)
    assert (result.outcome, work.case.accepted) == (None, True)
    assert result.detail == "accepted, but the pod is still running after 700 ms"


async def test_a_budget_that_asks_for_more_time_than_it_gets_has_refused(
    nursery: trio.Nursery, pod: Pod, idle_clock: MockClock
) -> None:
    refusal = status(429, "TooManyRequests", "Cannot evict pod", "Retry-After: 10", **BUDGET)
    patient = replace(CONFIG, api=varied(ApiMeans(), refused_s=5.0, longest_wait_s=30.0))
    result, server, _ = await evict(nursery, pod, listed("v1"), refusal, config=patient)
    assert result.outcome is EvictionOutcome.REFUSED
    assert result.detail == (
        "refused by its disruption budget: no success within 5 s; "
        "HTTP 429: Cannot evict pod (needs 2 healthy pods and has 2)"
    )
    assert len(server.requests) == 2


async def test_only_a_hard_trigger_that_was_allowed_to_passes_over_a_budget(
    nursery: trio.Nursery, pod: Pod, idle_clock: MockClock
) -> None:
    refusal = status(429, "TooManyRequests", "Cannot evict pod", **BUDGET)
    over = replace(CONFIG, api=replace(CONFIG.api, hard_over_budget=True))
    outcomes = []
    for config, forced in ((CONFIG, True), (over, False), (over, True)):
        async with trio.open_nursery() as inner:
            result, _, _ = await evict(
                inner, pod, listed("v1"), refusal, config=config, order=replace(ORDER, forced=forced)
            )
        outcomes.append(result.outcome)
    assert outcomes == [EvictionOutcome.REFUSED, EvictionOutcome.REFUSED, None]


async def test_several_budgets_for_one_pod_refuse_at_once(
    nursery: trio.Nursery, pod: Pod, idle_clock: MockClock
) -> None:
    several = status(500, "InternalError", "This pod has more than one PodDisruptionBudget, which the API does not...")
    result, server, _ = await evict(nursery, pod, listed("v1"), several)
    assert (result.outcome, len(server.requests)) == (EvictionOutcome.REFUSED, 2)


@pytest.mark.parametrize(
    "answer",
    [
        status(404, "NotFound", 'pods "web-1" not found', kind="pods", name="web-1"),
        status(409, "Conflict", "the UID in the precondition (1) does not match the UID in record (2)"),
    ],
)
async def test_a_pod_that_the_api_server_no_longer_has_is_waited_for(
    nursery: trio.Nursery, pod: Pod, answer: Reply, idle_clock: MockClock
) -> None:
    async def kubelet() -> None:
        await trio.sleep(0.3)
        pod.end()

    nursery.start_soon(kubelet)
    result, _, work = await evict(nursery, pod, listed("v1"), answer)
    assert (result.outcome, work.steps) == (EvictionOutcome.GONE, [EvictionStep.ASK])


async def test_one_that_the_api_server_does_not_have_and_that_lives_is_left_to_the_next_means(
    nursery: trio.Nursery, pod: Pod, idle_clock: MockClock
) -> None:
    result, _, _ = await evict(nursery, pod, listed("v1"), status(404, "NotFound", "no", kind="pods"))
    assert result.detail == "the pod does not exist at the API server, but it runs (HTTP 404: no)"
    # As from an etcd that was restored to an older version: it may have a budget.
    assert (result.outcome, result.unasked) == (None, True)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (status(500, "InternalError", "etcd is gone"), "no success within 300 ms; HTTP 500: etcd is gone"),
        (status(409, "Conflict", "the object has been modified"), "HTTP 409"),
        (Reply(b"Too many requests, please try again later.", status="429 Too Many"), "HTTP 429: Too many"),
        (Reply(hang_s=60), "no answer within 100 ms"),
        (Reply(raw=b""), "API server: http://127.0.0.1"),
    ],
)
async def test_an_api_server_that_fails_is_asked_for_a_while(
    nursery: trio.Nursery, pod: Pod, answer: Reply, words: str, idle_clock: MockClock
) -> None:
    result, server, work = await evict(nursery, pod, listed("v1"), answer)
    assert (result.outcome, result.unasked) == (None, True)
    assert words in result.detail
    assert len(server.requests) > 2
    assert work.case.requests >= 2
    assert work.case.reply


async def test_one_that_hangs_and_then_answers_evicts(nursery: trio.Nursery, pod: Pod, idle_clock: MockClock) -> None:
    pod.end()
    result, _, _ = await evict(nursery, pod, Reply(hang_s=60), listed("v1"), CREATED)
    assert result.outcome in {EvictionOutcome.DONE, EvictionOutcome.GONE}


@pytest.mark.parametrize("code", [302, 400, 401, 403, 404, 405, 422])
async def test_who_may_not_ask_does_not_know_the_budget_and_says_so_at_once(
    nursery: trio.Nursery, pod: Pod, code: int, idle_clock: MockClock
) -> None:
    result, server, work = await evict(nursery, pod, listed("v1"), status(code, "Forbidden", "you may not"))
    assert (result.outcome, result.detail, result.unasked) == (None, f"HTTP {code}: you may not", True)
    assert len(server.requests) == 2 + (code in {404, 405})
    assert (work.case.reply, work.case.requests, work.case.budget) == (f"HTTP {code}: you may not", 1, "")


async def test_taken_up_while_waiting_it_is_not_asked_again(
    nursery: trio.Nursery, pod: Pod, idle_clock: MockClock
) -> None:
    pod.end()
    result, server, work = await evict(nursery, pod, CREATED, resumed=EvictionStep.WAIT)
    assert (result.outcome, server.requests, work.steps) == (EvictionOutcome.DONE, [], [])


async def test_a_pod_that_ends_while_a_budget_refuses_is_gone(
    nursery: trio.Nursery, pod: Pod, idle_clock: MockClock
) -> None:
    async def itself() -> None:
        await trio.sleep(0.25)
        pod.end()

    nursery.start_soon(itself)
    result, _, _ = await evict(nursery, pod, listed("v1"), status(429, "TooManyRequests", "no", **BUDGET))
    assert result.outcome is EvictionOutcome.GONE


def test_static_and_nameless_pods_are_no_matter_for_the_api_server() -> None:
    way = ApiEviction(CONFIG, KubeApi(ApiServer(server="http://127.0.0.1:1")))

    def why(way: ApiEviction, case: EvictionCase) -> tuple[str, bool]:
        result = way.unusable(case)
        assert result is not None
        assert result.outcome is None
        return result.detail, result.unasked

    assert way.unusable(EvictionCase(order=ORDER)) is None
    static = EvictionCase(order=ORDER, target=EvictionTarget(static=True))
    assert why(way, static) == ("static pod: the API server holds only a mirror pod", False)
    # A pod whose name is not known may have a budget all the same.
    assert why(way, EvictionCase(order=replace(ORDER, name=None))) == ("pod name unknown", True)
    for name in ("..", ".", "", "a/../b", "a?b", "A", "a" * 254):
        invalid = ("pod name is not valid for the API server", True)
        assert why(way, EvictionCase(order=replace(ORDER, name=name))) == invalid
        assert why(way, EvictionCase(order=replace(ORDER, namespace=name))) == invalid
    off = ApiEviction(CONFIG, KubeApi(ApiServer(enabled=False)))
    message, unasked = why(off, EvictionCase(order=ORDER))
    assert "enabled is false" in message
    assert not unasked, "an operator switched the API server off: there is none to ask"
    exposed = ApiEviction(CONFIG, KubeApi(ApiServer(server="http://10.0.0.1:1", token_file="/x")))
    assert why(exposed, EvictionCase(order=ORDER))[1]


def test_a_refusal_names_the_budget_of_its_cause_once_and_bounded() -> None:
    def words(message: str, *causes: dict[str, Any]) -> str:
        body = {"kind": "Status", "message": message, "details": {"causes": list(causes)}}
        return parse_reply(HttpResponse(status=429, body=json.dumps(body).encode())).words

    budget = "The disruption budget web needs 2 healthy pods and has 2 currently"
    named = {"reason": "DisruptionBudget", "message": budget}
    assert words("Cannot evict pod", {"reason": "Other", "message": "x"}, named, named) == (
        f"HTTP 429: Cannot evict pod ({budget})"
    )
    assert words(f"Cannot evict pod: {budget}", named) == f"HTTP 429: Cannot evict pod: {budget}"
    assert len(words("a" * 5000, {"reason": "DisruptionBudget", "message": "b\n" * 5000})) < 500


def test_a_wait_is_read_from_the_header_or_the_status() -> None:
    body = json.dumps({"kind": "Status", "details": {"retryAfterSeconds": 9}}).encode()
    assert parse_reply(HttpResponse(status=429, body=body)).wait_s == 9
    assert parse_reply(HttpResponse(status=429, body=body, headers={"retry-after": "3"})).wait_s == 3
    assert parse_reply(HttpResponse(status=429, body=body, headers={"retry-after": "Wed, 21 Oct"})).wait_s == 9
    assert parse_reply(HttpResponse(status=429, body=b"")).wait_s is None
    assert parse_reply(HttpResponse(status=302, body=b"")).said is EvictionAnswer.NOT_ALLOWED


@pytest.mark.parametrize(
    ("message", "details", "said"),
    [
        ("Cannot evict pod", {"causes": [{"reason": "DisruptionBudget"}]}, EvictionAnswer.BUDGET),
        ("Cannot evict pod as it would violate the pod's disruption budget.", None, EvictionAnswer.BUDGET),
        ("storage is (re)initializing", {"retryAfterSeconds": 1}, EvictionAnswer.BUSY),
    ],
)
def test_only_a_budgets_429_is_a_refusal_by_a_budget(message: str, details: Any, said: EvictionAnswer) -> None:
    body = {"kind": "Status", "reason": "TooManyRequests", "message": message, "details": details}
    assert parse_reply(HttpResponse(status=429, body=json.dumps(body).encode())).said is said
