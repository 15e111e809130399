"""The notice that a pod gets before it is evicted, and the bounded wait for its answer."""

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import trio
from msgspec.structs import replace

from reconciler.responses.means.config import NoticeConfig, NoticeKind
from state.eviction import EvictionMethodName, EvictionOutcome, EvictionStep
from tests.fakes.constants import varied
from tests.fakes.plainpod import ScriptedWay, ends, fails, order_for
from tests.reconciler.responses.bench import CONFIG, Bench, carried_out, left_at
from tests.until import until


def volume(bench: Bench, uid: str, name: str = "eviction-notice") -> Path:
    directory = bench.kubelet / "pods" / uid / "volumes" / "kubernetes.io~empty-dir" / name
    directory.mkdir(parents=True)
    return directory


NOTICE = replace(CONFIG, notice=NoticeConfig(kind=NoticeKind.VOLUME, wait_s=0.6))


async def test_the_pod_is_told_first_and_its_acknowledgement_ends_the_wait(bench: Bench) -> None:
    pod = bench.node.add("a")
    pod.freeze()
    note = volume(bench, "a") / "notice.json"
    parts: dict[str, Any] = {}

    async def program() -> None:
        await until(note.exists)
        assert not pod.frozen  # a stopped process cannot read
        parts.update(msgspec.json.decode(note.read_bytes()))
        note.unlink()

    way = ScriptedWay(EvictionMethodName.CRI, ends(pod))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(program)
        config = varied(NOTICE, notice=replace(NOTICE.notice, wait_s=60.0))
        (case,) = await carried_out(bench.evictor(way, config=config), order_for("a"))
    assert (case.outcome, case.tried) == (EvictionOutcome.DONE, ("notice: acknowledged",))
    assert (parts["uid"], parts["cause"], parts["graceS"]) == ("a", "node_memory", 1.0)


async def test_without_an_answer_the_wait_is_bounded_and_a_pod_that_is_spared_is_told(bench: Bench) -> None:
    pod = bench.node.add("a")
    note = volume(bench, "a") / "notice.json"

    def held(work: Any) -> Any:
        assert note.exists()
        bench.why = "a person holds it"
        return fails("no")(work)

    ways = ScriptedWay(EvictionMethodName.CRI, held), ScriptedWay(EvictionMethodName.SIGNAL, ends(pod))
    (case,) = await carried_out(bench.evictor(*ways, config=NOTICE), order_for("a"))
    assert (case.outcome, case.tried[0]) == (EvictionOutcome.ABANDONED, "notice: no answer within 600 ms")
    assert not note.exists()


async def test_a_notice_that_cannot_be_given_holds_up_nothing(bench: Bench) -> None:
    pod = bench.node.add("a")
    (case,) = await carried_out(
        bench.evictor(ScriptedWay(EvictionMethodName.CRI, ends(pod)), config=NOTICE), order_for("a")
    )
    assert case.tried == ("notice: notice failed: No such file or directory",)
    assert case.outcome is EvictionOutcome.DONE


async def test_a_pod_that_ends_after_the_notice_is_done_and_nothing_else_is_tried(bench: Bench) -> None:
    pod = bench.node.add("a")
    note = volume(bench, "a") / "notice.json"

    async def program() -> None:
        await until(note.exists)
        pod.end()

    way = ScriptedWay(EvictionMethodName.CRI, fails("no"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(program)
        config = varied(NOTICE, notice=replace(NOTICE.notice, wait_s=60.0))
        (case,) = await carried_out(bench.evictor(way, config=config), order_for("a"))
    assert (case.outcome, case.detail, way.log) == (EvictionOutcome.DONE, "ended after the notice", [])


async def test_a_pods_own_annotation_chooses_how_it_is_told(bench: Bench) -> None:
    pods = {
        "a": bench.node.add("a", annotations={"bypassd/eviction-notice": "none"}),
        "b": bench.node.add("b", annotations={"bypassd/eviction-notice": "volume:mine"}),
        "c": bench.node.add("c", annotations={"bypassd/eviction-notice": "command:rm -rf /"}),
    }
    mine = volume(bench, "b", "mine")

    def act(work: Any) -> Any:
        return ends(pods[work.case.order.uid])(work)

    config = varied(NOTICE, notice=replace(NOTICE.notice, wait_s=0.1), at_once=3)
    cases = await carried_out(
        bench.evictor(ScriptedWay(EvictionMethodName.CRI, act), config=config), *map(order_for, "abc")
    )
    assert [case.tried for case in cases[:2]] == [(), ("notice: no answer within 100 ms",)]
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
    note = volume(bench, "a") / "notice.json"
    step_s = time.time() - 299.0
    bench.leave(replace(left_at(pod, EvictionStep.NOTICE), step_s=step_s))
    config = varied(NOTICE, notice=replace(NOTICE.notice, wait_s=300.0))
    begun = time.monotonic()
    (case,) = await carried_out(bench.evictor(ScriptedWay(EvictionMethodName.CRI, ends(pod)), config=config))
    assert time.monotonic() - begun < 60, "a second is left of the wait"
    assert case.outcome is EvictionOutcome.DONE
    assert json.loads(note.read_text())["endsAt"] == round(step_s + 300), "as it was before the restart"
