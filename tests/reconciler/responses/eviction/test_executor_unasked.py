"""Disruption budgets that could not be asked: which pods are ended anyway, one at a time, reported first."""

import time
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from msgspec.structs import replace

from reconciler.alerts.alert import Alert, AlertKind, Severity
from reconciler.responses.eviction.case import SingleTurn
from reconciler.responses.eviction.executor import Evictor
from reconciler.responses.means.base import EvictionResult, EvictionWork
from reconciler.responses.means.config import ApiMeans, RestartRules
from state.eviction import EvictionCase, EvictionMethodName, EvictionOrder, EvictionOutcome, EvictionStep
from tests.fakes.constants import varied
from tests.fakes.plainpod import PlainPod, ScriptedWay, ends, fails, order_for
from tests.reconciler.responses.bench import CONFIG, Bench, all_ended, carried_out, left_at
from tests.until import until

WHY = "HTTP 401: Unauthorized"
API, CRI, SIGNAL = EvictionMethodName.API, EvictionMethodName.CRI, EvictionMethodName.SIGNAL


def refused_token(how: str = "replied") -> ScriptedWay:
    """The API server as it is with a token that it refuses, or with credentials that are missing."""
    if how == "unusable":
        return ScriptedWay(API, fails("not reached"), unusable=WHY, unasked=True)
    return ScriptedWay(API, fails(WHY, unasked=True))


def critical(uid: str) -> EvictionOrder:
    return order_for(uid, critical=True, decided_s=time.time())


@pytest.mark.parametrize("how", ["replied", "unusable"])
@pytest.mark.parametrize("forced", [False, True])
async def test_no_other_method_follows_where_the_budget_could_not_be_asked(
    bench: Bench, how: str, forced: bool
) -> None:
    pod = bench.node.add("a")
    cri, last = ScriptedWay(CRI, ends(pod)), ScriptedWay(SIGNAL, ends(pod))
    (case,) = await carried_out(bench.evictor(refused_token(how), cri, last), order_for("a", forced=forced))
    assert (case.outcome, cri.log, last.log, pod.alive) == (EvictionOutcome.REFUSED, [], [], True)
    assert case.detail == f"its disruption budget could not be asked: {WHY}"
    assert (case.unasked, case.dying) == (WHY, False)
    assert bench.kinds() == [AlertKind.EVICTION_PLANNED, AlertKind.EVICTION_REFUSED]
    assert bench.told[-1].details["unasked"] == WHY


@pytest.mark.parametrize("order", [order_for("a"), critical("a")])
async def test_the_api_server_alone_in_the_order_ends_as_refused_too(bench: Bench, order: EvictionOrder) -> None:
    pod = bench.node.add("a")
    (case,) = await carried_out(bench.evictor(refused_token()), order)
    assert (case.outcome, pod.alive) == (EvictionOutcome.REFUSED, True)
    assert bench.kinds() == [AlertKind.EVICTION_PLANNED, AlertKind.EVICTION_REFUSED]


async def test_a_node_without_an_api_server_has_no_budgets_to_ask(bench: Bench) -> None:
    pod = bench.node.add("a")
    api = ScriptedWay(API, fails("no"), unusable="neither a kubeconfig nor a service account found")
    (case,) = await carried_out(bench.evictor(api, ScriptedWay(CRI, ends(pod))), order_for("a"))
    assert (case.outcome, case.unasked) == (EvictionOutcome.DONE, "")
    assert bench.kinds() == [AlertKind.EVICTION_PLANNED, AlertKind.EVICTION_DONE]


async def test_a_shortage_that_kills_online_pods_goes_on_and_is_reported_durably_before_the_first_action(
    bench: Bench,
) -> None:
    pod = bench.node.add("a")
    seen: list[tuple[list[AlertKind], bool, bool]] = []

    def act(work: EvictionWork) -> EvictionResult:
        (row,) = bench.rows()
        seen.append((bench.kinds(), row.announced, pod.alive))
        return ends(pod)(work)

    evictor = bench.evictor(refused_token(), ScriptedWay(CRI, fails("the shim is dead")), ScriptedWay(SIGNAL, act))
    (case,) = await carried_out(evictor, critical("a"))
    assert case.outcome is EvictionOutcome.DONE
    planned_then_said = [AlertKind.EVICTION_PLANNED, AlertKind.EVICTION_UNGUARDED]
    assert seen == [(planned_then_said, True, True)]
    assert bench.kinds() == [*planned_then_said, AlertKind.EVICTION_DONE], "once, not once for each method"
    alert: Alert = bench.told[1]
    assert (alert.severity, alert.durable) == (Severity.CRITICAL, True)
    assert alert.summary == (
        f"shop/a is ended without its disruption budget, which could not be asked ({WHY}): node_memory: memory 91 %"
    )


@pytest.mark.parametrize(("forced", "outcome"), [(False, EvictionOutcome.REFUSED), (True, EvictionOutcome.DONE)])
async def test_a_configuration_that_passes_over_refusals_passes_over_silence(
    bench: Bench, forced: bool, outcome: EvictionOutcome
) -> None:
    pod = bench.node.add("a")
    config = replace(CONFIG, api=ApiMeans(hard_over_budget=True))
    evictor = bench.evictor(refused_token(), ScriptedWay(CRI, ends(pod)), config=config)
    (case,) = await carried_out(evictor, order_for("a", forced=forced))
    assert case.outcome is outcome
    assert (AlertKind.EVICTION_UNGUARDED in bench.kinds()) is forced


async def test_a_refusal_counts_more_than_the_danger(bench: Bench) -> None:
    pod = bench.node.add("a")

    async def act(work: EvictionWork) -> EvictionResult:
        await work.replied("HTTP 429: the budget says no", budget=True)
        await work.replied(WHY)
        return EvictionResult(outcome=None, detail=WHY, unasked=True)

    cri = ScriptedWay(CRI, ends(pod))
    (case,) = await carried_out(bench.evictor(ScriptedWay(API, act), cri), critical("a"))
    assert (case.outcome, cri.log, case.reply, case.requests) == (EvictionOutcome.REFUSED, [], WHY, 2)
    assert case.detail == "refused by its disruption budget: HTTP 429: the budget says no"


async def test_a_pod_that_the_kubelet_starts_again_is_not_ended_a_second_time(
    bench: Bench, nursery: trio.Nursery
) -> None:
    pod = bench.node.add("a")
    config = varied(CONFIG, restarts=RestartRules(watch_s=0.3, times=3))
    cri, last = ScriptedWay(CRI, ends(pod)), ScriptedWay(SIGNAL, ends(pod))

    async def kubelet() -> None:
        await until(lambda: not pod.alive)
        pod.live(4_000_002)

    nursery.start_soon(kubelet)
    (case,) = await carried_out(bench.evictor(refused_token(), cri, last, config=config), critical("a"))
    assert (case.outcome, case.rounds, case.dying) == (EvictionOutcome.FAILED, 1, False)
    assert (len(cri.log), len(last.log), pod.alive) == (1, 0, True)
    assert case.detail == (
        "restarted by the kubelet after it was ended; not ended again, as its disruption budget could not be "
        f"asked: {WHY}"
    )


class Slow:
    """``way``: a runtime that takes until ``go``."""

    def __init__(self, pods: dict[str, PlainPod]) -> None:
        self.pods = pods
        self.go = {uid: trio.Event() for uid in pods}
        self.way = ScriptedWay(CRI, self.act)
        self.begun = self.way.log

    async def act(self, work: EvictionWork) -> EvictionResult:
        uid = work.case.order.uid
        await self.go[uid].wait()
        return ends(self.pods[uid])(work)


async def test_one_pod_at_a_time_until_it_has_stayed_ended_and_the_relief_withdraws_the_others(
    bench: Bench, nursery: trio.Nursery
) -> None:
    pods = {uid: bench.node.add(uid) for uid in "abc"}
    slow = Slow(pods)
    config = varied(CONFIG, at_once=3, restarts=RestartRules(watch_s=0.2))
    evictor = bench.evictor(refused_token(), slow.way, config=config)

    def case(uid: str) -> EvictionCase:
        return next(case for case in evictor.cases() if case.order.uid == uid)

    await nursery.start(evictor.run)
    for uid in "abc":
        evictor.submit(critical(uid))
    await until(lambda: bool(slow.begun))
    await trio.sleep(0.1)
    (first,) = slow.begun
    waiting = [uid for uid in "abc" if uid != first]
    assert bench.kinds().count(AlertKind.EVICTION_UNGUARDED) == 1
    evictor.withdraw(f"1-{waiting[0]}", "the shortage has ended")
    await until(lambda: case(waiting[0]).outcome is EvictionOutcome.ABANDONED)
    slow.go[first].set()
    await until(lambda: not pods[first].alive)
    await trio.sleep(0.1)
    assert slow.begun == [first], "its effect is awaited"
    await until(lambda: len(slow.begun) == 2)
    assert case(first).outcome is EvictionOutcome.DONE
    slow.go[waiting[1]].set()
    await until(lambda: case(waiting[1]).outcome is EvictionOutcome.DONE)
    assert (slow.way.most_at_once, pods[waiting[0]].alive) == (1, True)


async def test_after_one_that_the_kubelet_has_started_again_the_next_waits_until_it_may_be_ready(
    bench: Bench, nursery: trio.Nursery
) -> None:
    pods = {uid: bench.node.add(uid) for uid in "ab"}
    times: list[float] = []

    def act(work: EvictionWork) -> EvictionResult:
        times.append(trio.current_time())
        return ends(pods[work.case.order.uid])(work)

    async def kubelet() -> None:
        while True:
            await trio.sleep(0.01)
            for pod in pods.values():
                if not pod.alive:
                    pod.live(4_000_002)

    config = varied(CONFIG, restarts=RestartRules(watch_s=0.6))
    nursery.start_soon(kubelet)
    evictor = bench.evictor(refused_token(), ScriptedWay(CRI, act), config=config)
    cases = await carried_out(evictor, critical("a"), critical("b"))
    assert [case.outcome for case in cases] == [EvictionOutcome.FAILED] * 2
    first, second = times
    assert second - first >= 0.6


async def test_what_the_kubelet_started_again_while_it_was_stopped_is_not_ended_again(bench: Bench) -> None:
    pod = bench.node.add("a")
    cri = ScriptedWay(CRI, lambda _: EvictionResult(outcome=None, detail="restarted", returned=True))
    last = ScriptedWay(SIGNAL, ends(pod))
    (case,) = await carried_out(bench.evictor(refused_token(), cri, last), critical("a"))
    assert (case.outcome, case.rounds, cri.log, last.log) == (EvictionOutcome.FAILED, 1, ["a"], [])
    assert "restarted by the kubelet after it was ended; not ended again" in case.detail
    assert pod.alive


async def test_with_a_budget_that_was_asked_it_is_ended_again_a_few_times(bench: Bench) -> None:
    pod = bench.node.add("a")
    back = EvictionResult(outcome=None, detail="restarted", returned=True)
    cri = ScriptedWay(CRI, lambda _: back, lambda _: back, ends(pod))
    (case,) = await carried_out(bench.evictor(cri), order_for("a"))
    assert (case.outcome, case.rounds, cri.log) == (EvictionOutcome.DONE, 2, ["a"] * 3)
    endless = bench.node.add("b")
    cri = ScriptedWay(CRI, lambda _: back)
    config = varied(CONFIG, restarts=RestartRules(watch_s=0.0, times=2))
    cases = await carried_out(bench.evictor(cri, config=config), order_for("b"))
    assert (cases[-1].outcome, len(cri.log), endless.alive) == (EvictionOutcome.FAILED, 3, True)


async def test_the_pause_after_a_restarted_pod_is_not_cut_short_by_another_order_that_ends(
    bench: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    turn = SingleTurn()
    turn.resume(["a", "b"])  # of an earlier run, both had acted
    turn.release("a", rest_s=15.0)
    turn.release("b")
    assert not turn.take("c")
    await trio.sleep(15.0)
    assert turn.take("c")


async def test_one_that_waits_is_refused_as_soon_as_the_shortage_is_not_critical_any_more(
    bench: Bench, nursery: trio.Nursery
) -> None:
    pods = {uid: bench.node.add(uid) for uid in "ab"}
    slow = Slow(pods)
    evictor = bench.evictor(refused_token(), slow.way)
    danger = [("node_memory", "node")]
    evictor.measured(danger)
    await nursery.start(evictor.run)
    for uid in "ab":
        evictor.submit(critical(uid))
    await until(lambda: bool(slow.begun))
    (first,) = slow.begun
    (other,) = set("ab") - {first}
    evictor.measured([("node_memory", "numa:0"), ("numa_memory", "node")])
    await until(lambda: any(case.outcome is EvictionOutcome.REFUSED for case in evictor.cases()))
    assert (pods[other].alive, slow.begun) == (True, [first])
    slow.go[first].set()
    await all_ended(evictor)
    assert {case.order.uid: case.outcome for case in evictor.cases()} == {
        first: EvictionOutcome.DONE,
        other: EvictionOutcome.REFUSED,
    }


@pytest.mark.parametrize("critical", [False, True])
async def test_what_an_earlier_run_could_not_ask_is_not_carried_out_also_if_it_was_critical_an_hour_ago(
    bench: Bench, *, critical: bool
) -> None:
    pod = bench.node.add("a")
    # Announced, but killed before the first action.
    left = left_at(pod, EvictionStep.ASK, means=API, left=(API,), unasked=WHY, announced=critical)
    bench.leave(replace(left, order=replace(left.order, critical=critical, decided_s=time.time() - 3600)))
    last = ScriptedWay(SIGNAL, ends(pod))
    (case,) = await carried_out(bench.evictor(last))
    assert (case.outcome, last.log) == (EvictionOutcome.REFUSED, [])


async def test_what_an_earlier_run_had_begun_to_end_is_ended(bench: Bench) -> None:
    pod = bench.node.add("a")
    left = left_at(pod, EvictionStep.STOP, means=CRI, left=(API,), unasked=WHY, announced=True)
    bench.leave(replace(left, order=replace(left.order, critical=True, decided_s=time.time() - 3600)))
    (case,) = await carried_out(bench.evictor(refused_token(), ScriptedWay(CRI, ends(pod))))
    assert (case.outcome, pod.alive) == (EvictionOutcome.DONE, False)
    assert bench.kinds() == [AlertKind.EVICTION_DONE]


async def test_one_that_waited_for_its_turn_asks_again_first(bench: Bench, nursery: trio.Nursery) -> None:
    pods = {uid: bench.node.add(uid) for uid in "ab"}
    slow = Slow(pods)
    answers = ["unasked"]

    async def act(work: EvictionWork) -> EvictionResult:
        if answers[0] == "unasked":
            return EvictionResult(outcome=None, detail=WHY, unasked=True)
        await work.replied("HTTP 429: no", budget=True)
        return EvictionResult(outcome=EvictionOutcome.REFUSED, detail="refused by its disruption budget")

    evictor = bench.evictor(ScriptedWay(API, act), slow.way)
    await nursery.start(evictor.run)
    for uid in "ab":
        evictor.submit(critical(uid))
    await until(lambda: bool(slow.begun))
    (first,) = slow.begun
    await trio.sleep(0.05)
    answers[0] = "refuses"
    slow.go[first].set()
    await all_ended(evictor)
    outcomes = {case.order.uid: case.outcome for case in evictor.cases()}
    (other,) = set("ab") - {first}
    assert outcomes == {first: EvictionOutcome.DONE, other: EvictionOutcome.REFUSED}
    assert pods[other].alive


async def test_an_earlier_runs_case_that_had_acted_precedes_one_that_waited(
    bench: Bench, nursery: trio.Nursery
) -> None:
    pods = {uid: bench.node.add(uid) for uid in "ab"}
    slow = Slow(pods)
    for uid, step, means in (("a", EvictionStep.ASK, API), ("b", EvictionStep.STOP, CRI)):
        left = left_at(pods[uid], step, means=means, left=(API,), unasked=WHY, announced=uid == "b")
        bench.leave(replace(left, order=replace(left.order, critical=True, decided_s=time.time())))
    evictor: Evictor = bench.evictor(refused_token(), slow.way)
    await nursery.start(evictor.run)
    await until(lambda: bool(slow.begun))
    await trio.sleep(0.1)
    assert slow.begun == ["b"]
    for go in slow.go.values():
        go.set()
    await all_ended(evictor)
    assert slow.way.most_at_once == 1
    told = [alert.labels["pod"] for alert in bench.told if alert.kind is AlertKind.EVICTION_UNGUARDED]
    assert told == ["a"], "the alert of b was stored by the earlier run"


def test_a_journal_without_the_newer_fields_is_read() -> None:
    case = EvictionCase(order=order_for("a"))
    fields: dict[str, Any] = msgspec.to_builtins(case)
    for name in ("unasked", "announced", "reply", "requests"):
        del fields[name]
    del fields["order"]["critical"]
    assert msgspec.convert(fields, EvictionCase) == case
