"""The evictor with pods of plain files and means that do as they are told: order of steps, ends, and what is told."""

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from msgspec.structs import replace

from cgroupfs.errors import StoreError
from reconciler.alerts.alert import Alert, Kind
from reconciler.apiserver import ApiServer
from reconciler.kubeapi import KubeApi
from reconciler.responses import evictor as module
from reconciler.responses.evictor import Evictor
from reconciler.responses.journal import cases_of, row_of
from reconciler.responses.means.base import Result, Way, Work
from reconciler.responses.means.config import ApiMeans, EvictionMeans, NoticeConfig, NoticeKind, RestartRules
from reconciler.responses.means.processes import Processes
from state.eviction import Case, Means, Order, Outcome, Step, Target
from state.schema import EVICTIONS
from state.store import Batch, Store
from tests.fakes.plainpod import PlainNode, PlainPod, ScriptedWay, ends, fails, order_for

CONFIG = EvictionMeans(margin_s=1.0, restarts=RestartRules(watch_s=0.0), at_once=2)


class Bench:
    """An evictor on a store of its own; what it tells stays in ``told``."""

    def __init__(self, directory: Path) -> None:
        (directory / "groups").mkdir()
        self.node = PlainNode(directory / "groups")
        self.path = str(directory / "state.db")
        self.kubelet = directory / "kubelet"
        self.told: list[Alert] = []
        self.why: str | None = None
        self.lane = trio.CapacityLimiter(1)
        self.open_store()

    def open_store(self, boot: str = "boot-1") -> None:
        self.store = Store(self.path, boot=boot, retry_s=0.0)

    async def stage(self, batch: Batch, alert: Alert) -> Callable[[], None]:
        assert EVICTIONS in batch.rows
        return lambda: self.told.append(alert)

    def evictor(self, *ways: Way, config: EvictionMeans = CONFIG, **more: Any) -> Evictor:
        return Evictor(
            config,
            hierarchy=self.node.hierarchy,
            store=self.store,
            lane=self.lane,
            stage=self.stage,
            api=KubeApi(ApiServer(enabled=False)),
            cri=lambda: None,
            kubelet_dir=str(self.kubelet),
            pods=self.node.pods.get,
            forbidden=lambda _: self.why,
            ways=ways,
            **more,
        )

    def rows(self) -> list[Case]:
        return cases_of(self.store.rows(EVICTIONS))

    def leave(self, case: Case) -> None:
        """As an earlier run would have left it."""
        batch = Batch()
        batch.put(EVICTIONS, case.order.id, row_of(case))
        self.store.apply(batch)

    def kinds(self) -> list[Kind]:
        return [alert.kind for alert in self.told]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while True:
            if condition():
                return
            await trio.sleep(0.01)


async def carried_out(evictor: Evictor, *orders: Order) -> tuple[Case, ...]:
    """Run until every case has ended."""
    async with trio.open_nursery() as nursery:
        await nursery.start(evictor.run)
        for order in orders:
            evictor.submit(order)
        await until(lambda: not any(case.open for case in evictor.cases()))
        nursery.cancel_scope.cancel()
    return evictor.cases()


def left_at(pod: PlainPod, step: Step, **more: Any) -> Case:
    inode = pod.directory.stat().st_ino
    uid = pod.directory.name.removeprefix("pod")
    target = Target(group=f"/{pod.directory.name}", inodes={str(pod.directory.parent): inode}, grace_s=0.2)
    now = time.time()
    return Case(order=order_for(uid), target=target, boot="boot-1", step=step, step_s=now, begun_s=now, **more)


async def test_each_act_stands_in_the_journal_before_it_and_the_end_is_told_once(bench: Bench) -> None:
    pod = bench.node.add("a")
    seen: list[tuple[Step, Means | None, bool]] = []

    def act(work: Any) -> Any:
        seen.extend((case.step, case.means, pod.alive) for case in bench.rows())
        return ends(pod)(work)

    api = ScriptedWay(Means.API, fails("no API server"), unusable="it is not reachable")
    cri = ScriptedWay(Means.CRI, fails("the shim is dead"))
    last = ScriptedWay(Means.SIGNAL, act)
    (case,) = await carried_out(bench.evictor(api, cri, last), order_for("a"))
    assert seen == [(Step.STOP, Means.SIGNAL, True)]
    assert (case.outcome, case.detail, case.step) == (Outcome.DONE, "it is over", Step.ENDED)
    assert case.tried == ("api: it is not reachable", "cri: the shim is dead")
    assert bench.rows() == [case]
    assert bench.kinds() == [Kind.EVICTION_PLANNED, Kind.EVICTION_DONE]
    assert {alert.key for alert in bench.told} == {"eviction:1-a"}
    assert all(alert.durable for alert in bench.told)
    planned, done = bench.told
    assert planned.summary == "shop/a is going to be evicted (node_memory): memory 91 %"
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
    (case,) = await carried_out(bench.evictor(ScriptedWay(Means.CRI, fails("no"))), order_for("a"))
    assert (case.outcome, case.detail, pod.alive, pod.frozen) == (Outcome.FAILED, "cri: no", True, False)
    assert bench.kinds() == [Kind.EVICTION_PLANNED, Kind.EVICTION_FAILED]


async def test_a_pod_that_is_empty_already_is_gone_and_nothing_is_tried(bench: Bench) -> None:
    bench.node.add("a").end()
    way = ScriptedWay(Means.CRI, fails("no"))
    (case,) = await carried_out(bench.evictor(way), order_for("a"))
    assert (case.outcome, way.log) == (Outcome.GONE, [])


async def test_a_pod_that_nobody_knows_or_that_is_on_its_way_gets_no_second_case(bench: Bench) -> None:
    pod = bench.node.add("a")
    way = ScriptedWay(Means.CRI, ends(pod))
    way.takes_s = 0.1
    again = replace(order_for("a"), id="2-a")
    cases = await carried_out(bench.evictor(way), order_for("a"), again, order_for("a"), order_for("unknown"))
    assert [case.order.id for case in cases] == ["1-a"]
    assert way.log == ["a"]


async def test_so_many_at_once_and_no_more(bench: Bench) -> None:
    for uid in "abcd":
        bench.node.add(uid)
    way = ScriptedWay(Means.CRI, fails("no"))
    way.takes_s = 0.05
    cases = await carried_out(bench.evictor(way), *map(order_for, "abcd"))
    assert [case.outcome for case in cases] == [Outcome.FAILED] * 4
    assert way.most_at_once == 2


@pytest.mark.parametrize("when", ["before", "within"])
async def test_a_held_pod_is_given_up_before_the_next_act_and_does_not_stay_frozen(bench: Bench, when: str) -> None:
    pod = bench.node.add("a")
    pod.freeze()

    def held(work: Any) -> Any:
        bench.why = "a person holds it"
        return fails("no")(work)

    first, second = ScriptedWay(Means.CRI, held), ScriptedWay(Means.SIGNAL, ends(pod))
    bench.why = "a dry run" if when == "before" else None
    (case,) = await carried_out(bench.evictor(first, second), order_for("a"))
    assert case.outcome is Outcome.ABANDONED
    assert case.detail == ("a dry run" if when == "before" else "a person holds it")
    # The second way begins, but does not get beyond the word that it is about to act.
    assert (pod.alive, pod.frozen, len(first.log)) == (True, False, int(when == "within"))
    assert bench.kinds() == [Kind.EVICTION_PLANNED, Kind.EVICTION_REFUSED]
    assert bench.told[-1].labels["outcome"] == "abandoned"


async def test_a_withdrawn_order_is_given_up_only_while_nothing_has_been_done(bench: Bench) -> None:
    pods = {uid: bench.node.add(uid) for uid in "ab"}
    order = {uid: order_for(uid) for uid in "ab"}
    evictor: Evictor

    def withdrawn(work: Any) -> Any:
        evictor.withdraw("1-b", "the pressure is over")
        return ends(pods[work.case.order.uid])(work)

    evictor = bench.evictor(ScriptedWay(Means.CRI, withdrawn))
    evictor.submit(order["a"])
    evictor.withdraw("1-a", "the pressure is over")
    evictor.withdraw("unknown", "x")
    cases = await carried_out(evictor, order["b"])
    assert [case.outcome for case in cases] == [Outcome.ABANDONED, Outcome.DONE]
    assert [pods["a"].alive, pods["b"].alive] == [True, False]


async def test_one_that_waits_for_its_turn_ends_at_once_when_it_is_withdrawn(bench: Bench) -> None:
    pods = {uid: bench.node.add(uid) for uid in "abc"}
    go = trio.Event()

    class Slow:
        means = Means.CRI

        def unusable(self, _: Case) -> None:
            return None

        async def end(self, work: Work) -> Result:
            await work.step(Step.STOP)
            await go.wait()
            return ends(pods[work.case.order.uid])(work)

    evictor = bench.evictor(Slow(), config=replace(CONFIG, at_once=1))

    def outcome(uid: str) -> Outcome | None:
        return next(case.outcome for case in evictor.cases() if case.order.uid == uid)

    async with trio.open_nursery() as nursery:
        await nursery.start(evictor.run)
        for uid in "abc":
            evictor.submit(order_for(uid))
            await until(lambda: len(bench.told) == len(evictor.cases()))
        evictor.withdraw("1-a", "the pressure is over")
        evictor.withdraw("1-b", "the pressure is over")
        await until(lambda: outcome("b") is Outcome.ABANDONED)
        assert (outcome("a"), outcome("c"), pods["b"].alive) == (None, None, True)
        go.set()
        await until(lambda: outcome("c") is Outcome.DONE)
        assert outcome("a") is Outcome.DONE, "what has begun to end goes on ending"
        nursery.cancel_scope.cancel()


async def test_a_store_that_takes_nothing_for_a_while_takes_nothing_off_the_pods_grace(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.node.add("a")
    real, refused, elapsed = Store.apply, 0, []

    def apply(store: Store, batch: Batch) -> None:
        nonlocal refused
        if any(case.step is Step.PLANNED for case in bench.rows()) and refused < 3:
            refused += 1
            raise StoreError("disk: ENOSPC")
        real(store, batch)

    def act(work: Work) -> Result:
        elapsed.append(work.elapsed_s())
        return Result(outcome=None, detail="no")

    monkeypatch.setattr(Store, "apply", apply)
    monkeypatch.setattr("reconciler.responses.journal._RETRY_S", 0.2)
    await carried_out(bench.evictor(ScriptedWay(Means.CRI, act)), order_for("a"))
    assert refused == 3
    assert elapsed[0] < 0.3


async def test_a_pod_that_the_kubelet_starts_again_is_ended_again_so_often(bench: Bench) -> None:
    pod = bench.node.add("a")
    config = replace(CONFIG, restarts=RestartRules(watch_s=0.3, times=2))
    way = ScriptedWay(Means.CRI, ends(pod))
    async with trio.open_nursery() as nursery:

        async def kubelet() -> None:
            while True:
                await trio.sleep(0.02)
                if not pod.alive:
                    pod.live(4_000_002)

        nursery.start_soon(kubelet)
        (case,) = await carried_out(bench.evictor(way, config=config), order_for("a"))
        nursery.cancel_scope.cancel()
    assert (case.outcome, case.rounds, len(way.log)) == (Outcome.FAILED, 3, 3)
    assert case.detail == "the kubelet has started it again 3 times after it was ended"


async def test_one_that_comes_back_once_and_then_stays_away_is_done(bench: Bench) -> None:
    pod = bench.node.add("a")
    config = replace(CONFIG, restarts=RestartRules(watch_s=0.2, times=2))
    way = ScriptedWay(Means.CRI, ends(pod))
    async with trio.open_nursery() as nursery:

        async def kubelet() -> None:
            await until(lambda: not pod.alive)
            pod.live(4_000_002)

        nursery.start_soon(kubelet)
        (case,) = await carried_out(bench.evictor(way, config=config), order_for("a"))
    assert (case.outcome, case.rounds, len(way.log)) == (Outcome.DONE, 1, 2)


async def test_the_daemons_own_pod_is_refused(bench: Bench) -> None:
    pod = bench.node.add("a")
    way = ScriptedWay(Means.SIGNAL, ends(pod))
    evictor = bench.evictor(way, processes=Processes(ourselves=4_000_001))
    (case,) = await carried_out(evictor, order_for("a"))
    assert (case.outcome, way.log) == (Outcome.REFUSED, [])


async def test_nothing_is_done_while_the_journal_cannot_be_written(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = bench.node.add("a")
    way = ScriptedWay(Means.CRI, ends(pod))
    evictor = bench.evictor(way)
    real, refused = Store.apply, 0

    def apply(store: Store, batch: Batch) -> None:
        nonlocal refused
        if refused < 2 and EVICTIONS in batch.rows:
            refused += 1
            assert pod.alive
            raise StoreError(f"disk: {errno.errorcode[errno.ENOSPC]}")
        real(store, batch)

    monkeypatch.setattr(Store, "apply", apply)
    monkeypatch.setattr("reconciler.responses.journal._RETRY_S", 0.02)
    assert evictor.status().ok
    (case,) = await carried_out(evictor, order_for("a"))
    assert (case.outcome, refused) == (Outcome.DONE, 2)
    assert bench.kinds() == [Kind.EVICTION_PLANNED, Kind.EVICTION_DONE]  # staged once, told once


async def test_a_store_that_was_lost_gets_all_cases_again(bench: Bench) -> None:
    pods = [bench.node.add(uid) for uid in "ab"]
    (case,) = await carried_out(evictor := bench.evictor(ScriptedWay(Means.CRI, ends(pods[0]))), order_for("a"))
    Path(bench.path).unlink()
    pods[1].end()
    await carried_out(evictor, order_for("b"))
    assert [one.order.uid for one in bench.rows()] == ["a", "b"]
    assert bench.rows()[0] == case


# Taken up again


@pytest.mark.parametrize(
    ("step", "outcome"),
    [(Step.PLANNED, Outcome.GONE), (Step.NOTICE, Outcome.DONE), (Step.STOP, Outcome.DONE), (Step.ASK, Outcome.DONE)],
)
async def test_a_pod_that_ended_while_we_were_away_is_told_as_what_it_is(
    bench: Bench, step: Step, outcome: Outcome
) -> None:
    pod = bench.node.add("a")
    bench.leave(left_at(pod, step, means=None if step in {Step.PLANNED, Step.NOTICE} else Means.CRI))
    pod.end()
    way = ScriptedWay(Means.CRI, fails("no"))
    (case,) = await carried_out(bench.evictor(way))
    assert (case.outcome, way.log) == (outcome, [])
    assert len(bench.told) == 1


async def test_it_goes_on_with_the_means_and_the_step_where_it_was(bench: Bench) -> None:
    pod = bench.node.add("a")
    before = left_at(pod, Step.STOP, means=Means.CRI, left=(Means.API,), tried=("api: no",))
    bench.leave(before)
    api, cri = ScriptedWay(Means.API, fails("no")), ScriptedWay(Means.CRI, ends(pod))
    (case,) = await carried_out(bench.evictor(api, cri))
    assert (case.outcome, api.log, cri.resumed) == (Outcome.DONE, [], [Step.STOP])
    assert bench.kinds() == [Kind.EVICTION_DONE]


async def test_a_means_that_is_no_longer_configured_is_followed_by_those_that_are(bench: Bench) -> None:
    pod = bench.node.add("a")
    bench.leave(left_at(pod, Step.STOP, means=Means.CRI))
    way = ScriptedWay(Means.SIGNAL, ends(pod))
    (case,) = await carried_out(bench.evictor(way))
    assert (case.outcome, way.resumed) == (Outcome.DONE, [None])


@pytest.mark.parametrize("step", [Step.ASK, Step.STOP, Step.VERIFY])
async def test_a_means_that_cannot_be_used_any_more_is_followed_by_the_next(bench: Bench, step: Step) -> None:
    """Such as CRI, switched off between two runs."""
    pod = bench.node.add("a")
    bench.leave(left_at(pod, step, means=Means.CRI))
    cri = ScriptedWay(Means.CRI, fails("no"), unusable="there is no CRI socket")
    last = ScriptedWay(Means.SIGNAL, ends(pod))
    (case,) = await carried_out(bench.evictor(cri, last))
    assert (case.outcome, case.means, cri.log, last.resumed) == (Outcome.DONE, Means.SIGNAL, [], [None])
    assert case.tried == ("cri: there is no CRI socket",)


async def test_what_the_api_server_has_accepted_is_waited_for_also_where_it_cannot_be_asked_any_more(
    bench: Bench,
) -> None:
    pod = bench.node.add("a")
    bench.leave(left_at(pod, Step.WAIT, means=Means.API, accepted=True))
    api = ScriptedWay(Means.API, ends(pod), unusable="it is not reachable")
    (case,) = await carried_out(bench.evictor(api, ScriptedWay(Means.CRI, fails("no"))))
    assert (case.outcome, api.resumed) == (Outcome.DONE, [Step.WAIT])


@pytest.mark.parametrize("first", ["unusable", "fails", "not configured"])
async def test_a_budget_that_has_refused_an_earlier_run_keeps_every_other_means_away(bench: Bench, first: str) -> None:
    pod = bench.node.add("a")
    bench.leave(left_at(pod, Step.ASK, means=Means.API, budget="it answered 429 Cannot evict pod"))
    api = ScriptedWay(Means.API, fails("no"), unusable="it is not reachable" if first == "unusable" else None)
    last = ScriptedWay(Means.SIGNAL, ends(pod))
    (case,) = await carried_out(bench.evictor(*([] if first == "not configured" else [api]), last))
    assert (case.outcome, last.log, pod.alive) == (Outcome.REFUSED, [], True)
    assert case.detail == "its disruption budget refuses: it answered 429 Cannot evict pod"
    assert bench.kinds() == [Kind.EVICTION_REFUSED]


async def test_a_hard_trigger_that_was_allowed_to_passes_over_a_budget_also_after_a_restart(bench: Bench) -> None:
    pod = bench.node.add("a")
    case = left_at(pod, Step.ASK, means=Means.API, budget="it answered 429")
    bench.leave(replace(case, order=replace(case.order, forced=True)))
    config = replace(CONFIG, api=ApiMeans(hard_over_budget=True))
    ways = ScriptedWay(Means.API, fails("no")), ScriptedWay(Means.SIGNAL, ends(pod))
    (case,) = await carried_out(bench.evictor(*ways, config=config))
    assert case.outcome is Outcome.DONE


async def test_a_budgets_refusal_is_in_the_journal_before_it_is_asked_again(bench: Bench) -> None:
    bench.node.add("a")

    class Asking:
        means = Means.API

        def unusable(self, _: Case) -> None:
            return None

        async def end(self, work: Work) -> Result:
            await work.step(Step.ASK)
            for words in ("the budget says no", "it says so again"):
                await work.refused(words)
                assert [(one.budget, one.step) for one in bench.rows()] == [("the budget says no", Step.ASK)]
            return Result(outcome=None, detail="gave up")

    (case,) = await carried_out(bench.evictor(Asking()), order_for("a"))
    assert (case.outcome, case.detail) == (Outcome.REFUSED, "its disruption budget refuses: the budget says no")


async def test_what_the_api_server_accepts_at_the_very_moment_of_a_withdrawal_goes_on(bench: Bench) -> None:
    pod = bench.node.add("a")

    class Asking:
        means = Means.API

        def unusable(self, _: Case) -> None:
            return None

        async def end(self, work: Work) -> Result:
            await work.step(Step.ASK)
            evictor.withdraw("1-a", "the pressure is over")
            await work.step(Step.WAIT, accepted=True)
            pod.end()
            return Result(outcome=Outcome.DONE, detail="the API server evicted it")

    evictor = bench.evictor(Asking())
    (case,) = await carried_out(evictor, order_for("a"))
    assert (case.outcome, case.accepted) == (Outcome.DONE, True)


@pytest.mark.parametrize("alive", [True, False])
async def test_it_goes_on_watching_whether_the_kubelet_brings_it_back(bench: Bench, alive: bool) -> None:
    pod = bench.node.add("a")
    config = replace(CONFIG, restarts=RestartRules(watch_s=0.2, times=1))
    bench.leave(left_at(pod, Step.VERIFY, means=Means.CRI))
    if not alive:
        pod.end()
    way = ScriptedWay(Means.CRI, ends(pod))
    (case,) = await carried_out(bench.evictor(way, config=config))
    assert (case.outcome, case.rounds, way.log) == (Outcome.DONE, int(alive), ["a"] if alive else [])


@pytest.mark.parametrize("why", ["boot", "dry run", "another group"])
async def test_a_case_that_is_no_longer_true_touches_nobody(bench: Bench, why: str) -> None:
    pod = bench.node.add("a")
    pod.freeze()
    case = left_at(pod, Step.STOP, means=Means.CRI, accepted=True)
    if why == "another group":
        case = replace(case, target=replace(case.target, inodes={str(pod.directory.parent): 1}))
    bench.leave(case)
    if why == "boot":
        bench.store.close()
        bench.open_store("boot-2")
    bench.why = "a dry run" if why == "dry run" else None
    way = ScriptedWay(Means.CRI, ends(pod))
    (case,) = await carried_out(bench.evictor(way))
    assert (way.log, pod.alive) == ([], True)
    assert case.outcome is (Outcome.DONE if why == "another group" else Outcome.ABANDONED)
    # What we had stopped is let go; a pod of another boot, or another one by its name, was not stopped by us.
    assert pod.frozen is (why != "dry run")
    if why == "dry run":
        assert case.detail == "a dry run; the API server has accepted it already"
    assert len(bench.told) == 1


async def test_ended_cases_are_kept_for_the_limits_and_then_forgotten(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FORGET_S", 0.02)
    pods = [bench.node.add(uid) for uid in "ab"]
    for pod, age_s in zip(pods, (module.KEEP_S + 60, 60), strict=True):
        now = time.time()
        bench.leave(left_at(pod, Step.ENDED, outcome=Outcome.DONE, ended_s=now - age_s))
    evictor = bench.evictor()
    async with trio.open_nursery() as nursery:
        await nursery.start(evictor.run)
        await until(lambda: len(evictor.cases()) == 1)
        nursery.cancel_scope.cancel()
    assert [case.order.uid for case in bench.rows()] == ["b"]
    assert bench.told == []


async def test_rows_of_a_newer_version_and_broken_ones_are_left_as_they_are(bench: Bench) -> None:
    batch = Batch()
    batch.put(EVICTIONS, "new", msgspec.msgpack.encode({"v": 2, "case": 7}))
    batch.put(EVICTIONS, "bad", b"\xc1")
    bench.store.apply(batch)
    pod = bench.node.add("a")
    assert [
        case.outcome for case in await carried_out(bench.evictor(ScriptedWay(Means.CRI, ends(pod))), order_for("a"))
    ] == [Outcome.DONE]
    assert [key for key, _ in bench.store.rows(EVICTIONS)] == ["new", "bad", "1-a"]


async def test_who_is_being_ended_must_not_be_frozen(bench: Bench) -> None:
    pod = bench.node.add("a")
    seen: list[frozenset[str]] = []

    def act(work: Any) -> Any:
        seen.append(evictor.ending())
        return ends(pod)(work)

    evictor = bench.evictor(ScriptedWay(Means.CRI, act))
    evictor.submit(order_for("a"))
    assert evictor.ending() == frozenset()
    await carried_out(evictor)
    assert (seen, evictor.ending()) == ([frozenset("a")], frozenset())


# The notice


def volume(bench: Bench, uid: str, name: str = "eviction-notice") -> Path:
    directory = bench.kubelet / "pods" / uid / "volumes" / "kubernetes.io~empty-dir" / name
    directory.mkdir(parents=True)
    return directory


NOTICE = replace(CONFIG, notice=NoticeConfig(kind=NoticeKind.VOLUME, wait_s=0.6))


async def test_the_pod_is_told_first_and_its_acknowledgement_ends_the_wait(bench: Bench) -> None:
    pod = bench.node.add("a")
    pod.freeze()
    note = volume(bench, "a") / "notice.json"
    begun = time.monotonic()
    words: dict[str, Any] = {}

    async def program() -> None:
        await until(note.exists)
        assert not pod.frozen  # who stands still cannot read
        words.update(msgspec.json.decode(note.read_bytes()))
        note.unlink()

    way = ScriptedWay(Means.CRI, ends(pod))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(program)
        config = replace(NOTICE, notice=replace(NOTICE.notice, wait_s=60.0))
        (case,) = await carried_out(bench.evictor(way, config=config), order_for("a"))
    assert time.monotonic() - begun < 5
    assert (case.outcome, case.tried) == (Outcome.DONE, ("notice: acknowledged",))
    assert (words["uid"], words["cause"], words["graceS"]) == ("a", "node_memory", 1.0)


async def test_without_an_answer_the_wait_is_bounded_and_a_pod_that_is_spared_is_told(bench: Bench) -> None:
    pod = bench.node.add("a")
    note = volume(bench, "a") / "notice.json"

    def held(work: Any) -> Any:
        assert note.exists()
        bench.why = "a person holds it"
        return fails("no")(work)

    ways = ScriptedWay(Means.CRI, held), ScriptedWay(Means.SIGNAL, ends(pod))
    (case,) = await carried_out(bench.evictor(*ways, config=NOTICE), order_for("a"))
    assert (case.outcome, case.tried[0]) == (Outcome.ABANDONED, "notice: no answer within 0.6 s")
    assert not note.exists()


async def test_a_notice_that_cannot_be_given_holds_up_nothing(bench: Bench) -> None:
    pod = bench.node.add("a")
    (case,) = await carried_out(bench.evictor(ScriptedWay(Means.CRI, ends(pod)), config=NOTICE), order_for("a"))
    assert case.tried == ("notice: the notice could not be given: No such file or directory",)
    assert case.outcome is Outcome.DONE


async def test_a_pod_that_ends_after_the_notice_is_done_and_nothing_else_is_tried(bench: Bench) -> None:
    pod = bench.node.add("a")
    note = volume(bench, "a") / "notice.json"

    async def program() -> None:
        await until(note.exists)
        pod.end()

    way = ScriptedWay(Means.CRI, fails("no"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(program)
        config = replace(NOTICE, notice=replace(NOTICE.notice, wait_s=60.0))
        (case,) = await carried_out(bench.evictor(way, config=config), order_for("a"))
    assert (case.outcome, case.detail, way.log) == (Outcome.DONE, "it ended after the notice", [])


async def test_a_pods_own_annotation_chooses_how_it_is_told(bench: Bench) -> None:
    pods = {
        "a": bench.node.add("a", annotations={"bypassd/eviction-notice": "none"}),
        "b": bench.node.add("b", annotations={"bypassd/eviction-notice": "volume:mine"}),
        "c": bench.node.add("c", annotations={"bypassd/eviction-notice": "command:rm -rf /"}),
    }
    mine = volume(bench, "b", "mine")

    def act(work: Any) -> Any:
        return ends(pods[work.case.order.uid])(work)

    config = replace(NOTICE, notice=replace(NOTICE.notice, wait_s=0.1), at_once=3)
    cases = await carried_out(bench.evictor(ScriptedWay(Means.CRI, act), config=config), *map(order_for, "abc"))
    assert [case.tried for case in cases[:2]] == [(), ("notice: no answer within 0.1 s",)]
    assert (mine / "notice.json").exists()
    assert (
        cases[2]
        .tried[0]
        .startswith(
            "notice: annotation bypassd/eviction-notice: 'command:rm -rf /': expected none, volume:NAME or signal:NAME"
        )
    )


async def test_the_wait_for_an_answer_goes_on_and_not_anew_after_a_restart(bench: Bench) -> None:
    pod = bench.node.add("a")
    volume(bench, "a")
    bench.leave(replace(left_at(pod, Step.NOTICE), step_s=time.time() - 59.7))
    config = replace(NOTICE, notice=replace(NOTICE.notice, wait_s=60.0))
    begun = time.monotonic()
    (case,) = await carried_out(bench.evictor(ScriptedWay(Means.CRI, ends(pod)), config=config))
    assert 0.2 < time.monotonic() - begun < 5
    assert case.outcome is Outcome.DONE
