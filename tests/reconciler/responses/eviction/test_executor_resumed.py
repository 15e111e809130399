"""Evictions that an earlier run of the daemon had started: continued where they were, or given up."""

import time
from typing import Any

import msgspec
import pytest
import trio
from msgspec.structs import replace

from reconciler.alerts.alert import AlertKind
from reconciler.responses.eviction import executor as module
from reconciler.responses.means.base import EvictionResult, EvictionWork
from reconciler.responses.means.config import ApiMeans, RestartRules
from state.eviction import EvictionMethodName, EvictionOutcome, EvictionStep
from state.schema import EVICTIONS
from state.store import StoreBatch
from tests.fakes.constants import varied
from tests.fakes.plainpod import ScriptedWay, ends, fails, order_for
from tests.reconciler.responses.bench import CONFIG, Bench, carried_out, left_at
from tests.until import until


@pytest.mark.parametrize(
    ("step", "outcome"),
    [
        (EvictionStep.PLANNED, EvictionOutcome.GONE),
        (EvictionStep.NOTICE, EvictionOutcome.DONE),
        (EvictionStep.STOP, EvictionOutcome.DONE),
        (EvictionStep.ASK, EvictionOutcome.DONE),
    ],
)
async def test_a_pod_that_ended_while_we_were_away_is_told_as_what_it_is(
    bench: Bench, step: EvictionStep, outcome: EvictionOutcome
) -> None:
    pod = bench.node.add("a")
    bench.leave(
        left_at(
            pod, step, means=None if step in {EvictionStep.PLANNED, EvictionStep.NOTICE} else EvictionMethodName.CRI
        )
    )
    pod.end()
    way = ScriptedWay(EvictionMethodName.CRI, fails("no"))
    (case,) = await carried_out(bench.evictor(way))
    assert (case.outcome, way.log) == (outcome, [])
    assert len(bench.told) == 1


async def test_it_goes_on_with_the_means_and_the_step_where_it_was(bench: Bench) -> None:
    pod = bench.node.add("a")
    before = left_at(
        pod, EvictionStep.STOP, means=EvictionMethodName.CRI, left=(EvictionMethodName.API,), tried=("api: no",)
    )
    bench.leave(before)
    api, cri = ScriptedWay(EvictionMethodName.API, fails("no")), ScriptedWay(EvictionMethodName.CRI, ends(pod))
    (case,) = await carried_out(bench.evictor(api, cri))
    assert (case.outcome, api.log, cri.resumed) == (EvictionOutcome.DONE, [], [EvictionStep.STOP])
    assert bench.kinds() == [AlertKind.EVICTION_DONE]


async def test_a_means_that_is_no_longer_configured_is_followed_by_those_that_are(bench: Bench) -> None:
    pod = bench.node.add("a")
    bench.leave(left_at(pod, EvictionStep.STOP, means=EvictionMethodName.CRI))
    way = ScriptedWay(EvictionMethodName.SIGNAL, ends(pod))
    (case,) = await carried_out(bench.evictor(way))
    assert (case.outcome, way.resumed) == (EvictionOutcome.DONE, [None])


@pytest.mark.parametrize("step", [EvictionStep.ASK, EvictionStep.STOP, EvictionStep.VERIFY])
async def test_a_means_that_cannot_be_used_any_more_is_followed_by_the_next(bench: Bench, step: EvictionStep) -> None:
    """Such as CRI, switched off between two runs."""
    pod = bench.node.add("a")
    bench.leave(left_at(pod, step, means=EvictionMethodName.CRI))
    cri = ScriptedWay(EvictionMethodName.CRI, fails("no"), unusable="no CRI socket")
    last = ScriptedWay(EvictionMethodName.SIGNAL, ends(pod))
    (case,) = await carried_out(bench.evictor(cri, last))
    assert (case.outcome, case.means, cri.log, last.resumed) == (
        EvictionOutcome.DONE,
        EvictionMethodName.SIGNAL,
        [],
        [None],
    )
    assert case.tried == ("cri: no CRI socket",)


async def test_what_the_api_server_has_accepted_is_waited_for_also_where_it_cannot_be_asked_any_more(
    bench: Bench,
) -> None:
    pod = bench.node.add("a")
    bench.leave(left_at(pod, EvictionStep.WAIT, means=EvictionMethodName.API, accepted=True))
    api = ScriptedWay(EvictionMethodName.API, ends(pod), unusable="it is not reachable")
    (case,) = await carried_out(bench.evictor(api, ScriptedWay(EvictionMethodName.CRI, fails("no"))))
    assert (case.outcome, api.resumed) == (EvictionOutcome.DONE, [EvictionStep.WAIT])


@pytest.mark.parametrize("first", ["unusable", "fails", "not configured"])
async def test_a_budget_that_has_refused_an_earlier_run_keeps_every_other_means_away(bench: Bench, first: str) -> None:
    pod = bench.node.add("a")
    bench.leave(left_at(pod, EvictionStep.ASK, means=EvictionMethodName.API, budget="HTTP 429 Cannot evict pod"))
    api = ScriptedWay(
        EvictionMethodName.API, fails("no"), unusable="it is not reachable" if first == "unusable" else None
    )
    last = ScriptedWay(EvictionMethodName.SIGNAL, ends(pod))
    (case,) = await carried_out(bench.evictor(*([] if first == "not configured" else [api]), last))
    assert (case.outcome, last.log, pod.alive) == (EvictionOutcome.REFUSED, [], True)
    assert case.detail == "refused by its disruption budget: HTTP 429 Cannot evict pod"
    assert bench.kinds() == [AlertKind.EVICTION_REFUSED]


async def test_a_hard_trigger_that_was_allowed_to_passes_over_a_budget_also_after_a_restart(bench: Bench) -> None:
    pod = bench.node.add("a")
    case = left_at(pod, EvictionStep.ASK, means=EvictionMethodName.API, budget="HTTP 429")
    bench.leave(replace(case, order=replace(case.order, forced=True)))
    config = replace(CONFIG, api=ApiMeans(hard_over_budget=True))
    ways = ScriptedWay(EvictionMethodName.API, fails("no")), ScriptedWay(EvictionMethodName.SIGNAL, ends(pod))
    (case,) = await carried_out(bench.evictor(*ways, config=config))
    assert case.outcome is EvictionOutcome.DONE


async def test_a_budgets_refusal_is_in_the_journal_before_it_is_asked_again(bench: Bench) -> None:
    bench.node.add("a")

    async def act(work: EvictionWork) -> EvictionResult:
        for message in ("the budget says no", "it says so again"):
            await work.replied(message, budget=True)
            assert [(row.budget, row.step) for row in bench.rows()] == [("the budget says no", EvictionStep.ASK)]
        return EvictionResult(outcome=None, detail="gave up")

    (case,) = await carried_out(bench.evictor(ScriptedWay(EvictionMethodName.API, act)), order_for("a"))
    assert (case.outcome, case.detail) == (
        EvictionOutcome.REFUSED,
        "refused by its disruption budget: the budget says no",
    )


async def test_what_the_api_server_accepts_at_the_very_moment_of_a_withdrawal_goes_on(bench: Bench) -> None:
    pod = bench.node.add("a")

    async def act(work: EvictionWork) -> EvictionResult:
        evictor.withdraw("1-a", "the shortage has ended")
        await work.step(EvictionStep.WAIT, accepted=True)
        return ends(pod)(work)

    evictor = bench.evictor(ScriptedWay(EvictionMethodName.API, act))
    (case,) = await carried_out(evictor, order_for("a"))
    assert (case.outcome, case.accepted) == (EvictionOutcome.DONE, True)


@pytest.mark.parametrize("alive", [True, False])
async def test_it_goes_on_watching_whether_the_kubelet_brings_it_back(bench: Bench, alive: bool) -> None:
    pod = bench.node.add("a")
    config = varied(CONFIG, restarts=RestartRules(watch_s=0.2, times=1))
    bench.leave(left_at(pod, EvictionStep.VERIFY, means=EvictionMethodName.CRI))
    if not alive:
        pod.end()
    way = ScriptedWay(EvictionMethodName.CRI, ends(pod))
    (case,) = await carried_out(bench.evictor(way, config=config))
    assert (case.outcome, case.rounds, way.log) == (EvictionOutcome.DONE, int(alive), ["a"] if alive else [])


@pytest.mark.parametrize("why", ["boot", "dry run", "another group"])
async def test_a_case_that_is_no_longer_true_touches_nobody(bench: Bench, why: str) -> None:
    pod = bench.node.add("a")
    pod.freeze()
    case = left_at(pod, EvictionStep.STOP, means=EvictionMethodName.CRI, accepted=True)
    if why == "another group":
        case = replace(case, target=replace(case.target, inodes={str(pod.directory.parent): 1}))
    bench.leave(case)
    if why == "boot":
        bench.store.close()
        bench.open_store("boot-2")
    bench.why = "a dry run" if why == "dry run" else None
    way = ScriptedWay(EvictionMethodName.CRI, ends(pod))
    (case,) = await carried_out(bench.evictor(way))
    assert (way.log, pod.alive) == ([], True)
    assert case.outcome is (EvictionOutcome.DONE if why == "another group" else EvictionOutcome.ABANDONED)
    # What we had stopped is let go; a pod of another boot, or another one by its name, was not stopped by us.
    assert pod.frozen is (why != "dry run")
    if why == "dry run":
        assert case.detail == "a dry run; the API server had already accepted it"
    assert len(bench.told) == 1


async def test_ended_cases_are_kept_for_the_limits_and_then_forgotten(
    bench: Bench, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FORGET_S", 0.02)
    pods = [bench.node.add(uid) for uid in "ab"]
    for pod, age_s in zip(pods, (module.KEEP_S + 60, 60), strict=True):
        now = time.time()
        bench.leave(left_at(pod, EvictionStep.ENDED, outcome=EvictionOutcome.DONE, ended_s=now - age_s))
    evictor = bench.evictor()
    await nursery.start(evictor.run)
    await until(lambda: len(evictor.cases()) == 1)
    assert [case.order.uid for case in bench.rows()] == ["b"]
    assert bench.told == []


async def test_rows_of_a_newer_version_and_broken_ones_are_left_as_they_are(bench: Bench) -> None:
    batch = StoreBatch()
    batch.put(EVICTIONS, "new", msgspec.msgpack.encode({"v": 2, "case": 7}))
    batch.put(EVICTIONS, "bad", b"\xc1")
    bench.store.apply(batch)
    pod = bench.node.add("a")
    assert [
        case.outcome
        for case in await carried_out(bench.evictor(ScriptedWay(EvictionMethodName.CRI, ends(pod))), order_for("a"))
    ] == [EvictionOutcome.DONE]
    assert [key for key, _ in bench.store.rows(EVICTIONS)] == ["new", "bad", "1-a"]


async def test_who_is_being_ended_must_not_be_frozen(bench: Bench) -> None:
    pod = bench.node.add("a")
    seen: list[frozenset[str]] = []

    def act(work: Any) -> Any:
        seen.append(evictor.ending())
        return ends(pod)(work)

    evictor = bench.evictor(ScriptedWay(EvictionMethodName.CRI, act))
    evictor.submit(order_for("a"))
    assert evictor.ending() == frozenset()
    await carried_out(evictor)
    assert (seen, evictor.ending()) == ([frozenset("a")], frozenset())
