"""The evictor with pods of plain files and scripted means: order of steps, ends, and alerts."""

import errno
import time
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.errors import StoreError
from reconciler.alerts.alert import AlertKind
from reconciler.responses.eviction.executor import Evictor
from reconciler.responses.means.base import EvictionResult, EvictionWork
from reconciler.responses.means.config import RestartRules
from reconciler.responses.means.processes import PodTermination
from state.eviction import EvictionMethodName, EvictionOutcome, EvictionStep
from state.schema import EVICTIONS
from state.store import Store, StoreBatch
from tests.fakes.constants import varied
from tests.fakes.plainpod import ScriptedWay, ends, fails, order_for
from tests.reconciler.responses.bench import CONFIG, Bench, carried_out
from tests.until import until


async def test_each_act_stands_in_the_journal_before_it_and_the_end_is_told_once(bench: Bench) -> None:
    pod = bench.node.add("a")
    seen: list[tuple[EvictionStep, EvictionMethodName | None, bool]] = []

    def act(work: Any) -> Any:
        seen.extend((case.step, case.means, pod.alive) for case in bench.rows())
        return ends(pod)(work)

    api = ScriptedWay(EvictionMethodName.API, fails("no API server"), unusable="it is not reachable")
    cri = ScriptedWay(EvictionMethodName.CRI, fails("the shim is dead"))
    last = ScriptedWay(EvictionMethodName.SIGNAL, act)
    evictor = bench.evictor(api, cri, last)
    (case,) = await carried_out(evictor, order_for("a"))
    assert evictor.ended == {**dict.fromkeys(EvictionOutcome, 0), EvictionOutcome.DONE: 1}
    assert seen == [(EvictionStep.STOP, EvictionMethodName.SIGNAL, True)]
    assert (case.outcome, case.detail, case.step) == (EvictionOutcome.DONE, "it is over", EvictionStep.ENDED)
    assert case.tried == ("api: it is not reachable", "cri: the shim is dead")
    assert bench.rows() == [case]
    assert bench.kinds() == [AlertKind.EVICTION_PLANNED, AlertKind.EVICTION_DONE]
    assert {alert.key for alert in bench.told} == {"eviction:1-a"}
    assert all(alert.durable for alert in bench.told)
    planned, done = bench.told
    assert planned.summary == "shop/a will be evicted (node_memory): memory 91 %"
    assert done.summary == "shop/a was evicted (node_memory): it is over"
    assert done.labels == {
        "namespace": "shop",
        "pod": "a",
        "uid": "a",
        "cause": "node_memory",
        "means": "signal",
        "outcome": "done",
    }
    assert done.details["tried"] == "api: it is not reachable\ncri: the shim is dead"
    assert done.details["ranking"] == "it: because"


async def test_when_every_means_has_failed_it_says_so_and_the_pod_lives(bench: Bench) -> None:
    pod = bench.node.add("a")
    pod.freeze()
    (case,) = await carried_out(bench.evictor(ScriptedWay(EvictionMethodName.CRI, fails("no"))), order_for("a"))
    assert (case.outcome, case.detail, pod.alive, pod.frozen) == (EvictionOutcome.FAILED, "cri: no", True, False)
    assert bench.kinds() == [AlertKind.EVICTION_PLANNED, AlertKind.EVICTION_FAILED]


async def test_a_pod_that_is_empty_already_is_gone_and_nothing_is_tried(bench: Bench) -> None:
    bench.node.add("a").end()
    way = ScriptedWay(EvictionMethodName.CRI, fails("no"))
    (case,) = await carried_out(bench.evictor(way), order_for("a"))
    assert (case.outcome, way.log) == (EvictionOutcome.GONE, [])


async def test_a_pod_that_nobody_knows_or_that_is_on_its_way_gets_no_second_case(bench: Bench) -> None:
    pod = bench.node.add("a")
    way = ScriptedWay(EvictionMethodName.CRI, ends(pod))
    way.takes_s = 0.1
    again = replace(order_for("a"), id="2-a")
    cases = await carried_out(bench.evictor(way), order_for("a"), again, order_for("a"), order_for("unknown"))
    assert [case.order.id for case in cases] == ["1-a"]
    assert way.log == ["a"]


async def test_so_many_at_once_and_no_more(bench: Bench) -> None:
    for uid in "abcd":
        bench.node.add(uid)
    way = ScriptedWay(EvictionMethodName.CRI, fails("no"))
    way.takes_s = 0.05
    cases = await carried_out(bench.evictor(way), *map(order_for, "abcd"))
    assert [case.outcome for case in cases] == [EvictionOutcome.FAILED] * 4
    assert way.most_at_once == 2


@pytest.mark.parametrize("when", ["before", "within"])
async def test_a_held_pod_is_given_up_before_the_next_act_and_does_not_stay_frozen(bench: Bench, when: str) -> None:
    pod = bench.node.add("a")
    pod.freeze()

    def held(work: Any) -> Any:
        bench.why = "a person holds it"
        return fails("no")(work)

    first, second = ScriptedWay(EvictionMethodName.CRI, held), ScriptedWay(EvictionMethodName.SIGNAL, ends(pod))
    bench.why = "a dry run" if when == "before" else None
    (case,) = await carried_out(bench.evictor(first, second), order_for("a"))
    assert case.outcome is EvictionOutcome.ABANDONED
    assert case.detail == ("a dry run" if when == "before" else "a person holds it")
    # The second way begins, but does not get beyond the word that it is about to act.
    assert (pod.alive, pod.frozen, len(first.log)) == (True, False, int(when == "within"))
    assert bench.kinds() == [AlertKind.EVICTION_PLANNED, AlertKind.EVICTION_REFUSED]
    assert bench.told[-1].labels["outcome"] == "abandoned"


async def test_a_withdrawn_order_is_given_up_only_while_nothing_has_been_done(bench: Bench) -> None:
    pods = {uid: bench.node.add(uid) for uid in "ab"}
    order = {uid: order_for(uid) for uid in "ab"}
    evictor: Evictor

    def withdrawn(work: Any) -> Any:
        evictor.withdraw("1-b", "the shortage has ended")
        return ends(pods[work.case.order.uid])(work)

    evictor = bench.evictor(ScriptedWay(EvictionMethodName.CRI, withdrawn))
    evictor.submit(order["a"])
    evictor.withdraw("1-a", "the shortage has ended")
    evictor.withdraw("unknown", "x")
    cases = await carried_out(evictor, order["b"])
    assert [case.outcome for case in cases] == [EvictionOutcome.ABANDONED, EvictionOutcome.DONE]
    assert [pods["a"].alive, pods["b"].alive] == [True, False]


async def test_one_that_waits_for_its_turn_ends_at_once_when_it_is_withdrawn(
    bench: Bench, nursery: trio.Nursery
) -> None:
    pods = {uid: bench.node.add(uid) for uid in "abc"}
    go = trio.Event()

    async def act(work: EvictionWork) -> EvictionResult:
        await go.wait()
        return ends(pods[work.case.order.uid])(work)

    evictor = bench.evictor(ScriptedWay(EvictionMethodName.CRI, act), config=varied(CONFIG, at_once=1))

    def outcome(uid: str) -> EvictionOutcome | None:
        return next(case.outcome for case in evictor.cases() if case.order.uid == uid)

    await nursery.start(evictor.run)
    for uid in "abc":
        evictor.submit(order_for(uid))
        await until(lambda: len(bench.told) == len(evictor.cases()))
    evictor.withdraw("1-a", "the shortage has ended")
    evictor.withdraw("1-b", "the shortage has ended")
    await until(lambda: outcome("b") is EvictionOutcome.ABANDONED)
    assert (outcome("a"), outcome("c"), pods["b"].alive) == (None, None, True)
    go.set()
    await until(lambda: outcome("c") is EvictionOutcome.DONE)
    assert outcome("a") is EvictionOutcome.DONE, "what has begun to end goes on ending"


async def test_a_store_that_takes_nothing_for_a_while_takes_nothing_off_the_pods_grace(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.node.add("a")
    real, refused, elapsed, passed_s = Store.apply, 0, [], 0.0

    def apply(store: Store, batch: StoreBatch) -> None:
        nonlocal refused, passed_s
        if any(case.step is EvictionStep.PLANNED for case in bench.rows()) and refused < 3:
            refused += 1
            passed_s += 1000.0
            raise StoreError("disk: ENOSPC")
        real(store, batch)

    def act(work: EvictionWork) -> EvictionResult:
        elapsed.append(work.elapsed_s())
        return EvictionResult(outcome=None, detail="no")

    monkeypatch.setattr(Store, "apply", apply)
    monkeypatch.setattr("reconciler.responses.eviction.journal._RETRY_S", 0.01)
    evictor = bench.evictor(ScriptedWay(EvictionMethodName.CRI, act), clock=lambda: time.time() + passed_s)
    await carried_out(evictor, order_for("a"))
    assert refused == 3
    assert elapsed[0] < 1000


@pytest.mark.parametrize(("returns", "outcome"), [(1, EvictionOutcome.DONE), (3, EvictionOutcome.FAILED)])
async def test_a_pod_that_the_kubelet_starts_again_is_ended_again_twice(
    bench: Bench, nursery: trio.Nursery, returns: int, outcome: EvictionOutcome
) -> None:
    pod = bench.node.add("a")
    config = varied(CONFIG, restarts=RestartRules(watch_s=0.3, times=2))
    way = ScriptedWay(EvictionMethodName.CRI, ends(pod))

    async def kubelet() -> None:
        for _ in range(returns):
            await until(lambda: not pod.alive)
            pod.live(4_000_002)

    nursery.start_soon(kubelet)
    (case,) = await carried_out(bench.evictor(way, config=config), order_for("a"))
    assert (case.outcome, case.rounds, len(way.log)) == (outcome, returns, min(returns + 1, 3))
    if outcome is EvictionOutcome.FAILED:
        assert case.detail == "restarted by the kubelet 3 times after it was ended"


async def test_the_daemons_own_pod_is_refused(bench: Bench) -> None:
    pod = bench.node.add("a")
    way = ScriptedWay(EvictionMethodName.SIGNAL, ends(pod))
    evictor = bench.evictor(way, processes=PodTermination(ourselves=4_000_001))
    (case,) = await carried_out(evictor, order_for("a"))
    assert (case.outcome, way.log) == (EvictionOutcome.REFUSED, [])


async def test_nothing_is_done_while_the_journal_cannot_be_written(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = bench.node.add("a")
    way = ScriptedWay(EvictionMethodName.CRI, ends(pod))
    evictor = bench.evictor(way)
    real, refused = Store.apply, 0

    def apply(store: Store, batch: StoreBatch) -> None:
        nonlocal refused
        if refused < 2 and EVICTIONS in batch.rows:
            refused += 1
            assert pod.alive
            raise StoreError(f"disk: {errno.errorcode[errno.ENOSPC]}")
        real(store, batch)

    monkeypatch.setattr(Store, "apply", apply)
    monkeypatch.setattr("reconciler.responses.eviction.journal._RETRY_S", 0.02)
    assert evictor.status().ok
    (case,) = await carried_out(evictor, order_for("a"))
    assert (case.outcome, refused) == (EvictionOutcome.DONE, 2)
    assert bench.kinds() == [AlertKind.EVICTION_PLANNED, AlertKind.EVICTION_DONE]  # staged once, sent once


async def test_a_store_that_was_lost_gets_all_cases_again(bench: Bench) -> None:
    pods = [bench.node.add(uid) for uid in "ab"]
    (case,) = await carried_out(
        evictor := bench.evictor(ScriptedWay(EvictionMethodName.CRI, ends(pods[0]))), order_for("a")
    )
    Path(bench.path).unlink()
    pods[1].end()
    await carried_out(evictor, order_for("b"))
    assert [eviction_case.order.uid for eviction_case in bench.rows()] == ["a", "b"]
    assert bench.rows()[0] == case


@pytest.mark.parametrize("critical", [False, True])
async def test_a_pod_is_ended_when_the_cluster_can_know_that_the_node_is_closed_and_not_much_later(
    bench: Bench, autojump_clock: trio.testing.MockClock, *, critical: bool
) -> None:
    pod = bench.node.add("a")
    at: list[float] = []

    def act(work: Any) -> Any:
        at.append(trio.current_time())
        return ends(pod)(work)

    bench.closing = True
    evictor = bench.evictor(ScriptedWay(EvictionMethodName.SIGNAL, act))
    evictor.measured({("node_memory", "node")} if critical else ())
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(carried_out, evictor, replace(order_for("a"), critical=critical))
        await trio.sleep(2)
        assert len(at) == critical
        bench.closing = critical
    assert at[0] - began < (1.0 if critical else 2.2)


async def test_a_mark_that_does_not_come_delays_an_eviction_by_five_seconds(
    bench: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    pod = bench.node.add("a")
    bench.closing = True
    evictor = bench.evictor(ScriptedWay(EvictionMethodName.SIGNAL, ends(pod)))
    evictor.measured(())
    began = trio.current_time()
    (case,) = await carried_out(evictor, order_for("a"))
    assert case.outcome is EvictionOutcome.DONE
    assert 5.0 <= trio.current_time() - began < 6.5
