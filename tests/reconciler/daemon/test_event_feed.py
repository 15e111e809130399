"""``GET /events``: plans, holds, modes and writes of a real agent, followed without a gap and over a restart."""

import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from reconciler.alerts.alert import Alert, AlertKind
from reconciler.daemon.agent import Agent
from reconciler.daemon.event_feed import MOST
from reconciler.daemon.status import StatusReport
from reconciler.web.interface import HoldRequest
from state.entry import LedgerEvent
from tests.fakes.livenode import BATCH, LiveNode
from tests.fakes.report import status_report

Events = list[dict[str, Any]]


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Agent]:
    """After its first pass."""
    async with LiveNode(tmp_path, files=False).looked() as agent:
        yield agent


@pytest.fixture
def shown(agent: Agent) -> StatusReport:
    return status_report(agent)


async def feed(shown: StatusReport, after: int | None, run: str, since: float | None) -> Mapping[str, object]:
    head, rows, _ = await shown.events(after, run, since)
    return {**head, "events": list(rows)}


def events(answer: Mapping[str, object]) -> Events:
    found = answer["events"]
    assert isinstance(found, list)
    return found


def kinds(answer: Mapping[str, object]) -> list[str]:
    return [event["kind"] for event in events(answer)]


async def test_a_first_pass_is_a_start_a_mode_a_plan_and_writes_with_the_pods_name(
    agent: Agent, shown: StatusReport
) -> None:
    answer = await feed(shown, 0, agent.record.ledger.events.run, None)
    first = kinds(answer)
    assert first[:3] == ["start", "mode", "plan"]
    assert "write" in first
    assert "touch" not in first
    written = [event for event in events(answer) if event["pod_uid"] == BATCH and event["kind"] == "write"]
    assert {event["pod"] for event in written} == {agent.control.inventory.pods[BATCH].title}
    assert answer["missing"] == 0


async def test_a_reader_gets_each_event_once(agent: Agent, shown: StatusReport) -> None:
    start = await feed(shown, None, "", None)
    assert events(start) == [], "only what is to come"
    await shown.hold(HoldRequest(target=f"pod:{BATCH}", reason="INC-1", by="ana", seconds=60.0))
    answer = await feed(shown, int(str(start["next"])), str(start["run"]), None)
    assert [(event["kind"], event["process"], event["pod_uid"]) for event in events(answer)] == [("hold", "ana", BATCH)]
    await agent.commands.release(f"pod:{BATCH}")
    then = await feed(shown, int(str(answer["next"])), str(answer["run"]), None)
    assert kinds(then) == ["release"]
    assert events(await feed(shown, int(str(then["next"])), str(then["run"]), None)) == []


async def test_after_a_restart_the_reader_goes_on_and_known_holds_are_no_events(live: LiveNode) -> None:
    async with live.shown() as (agent, shown):
        await shown.hold(HoldRequest(target="node", reason="INC-1", by="ana", until_released=True))
        before = await feed(shown, 0, agent.record.ledger.events.run, None)
    with live.agent() as agent:
        answer = await feed(status_report(agent), int(str(before["next"])), str(before["run"]), None)
        assert answer["run"] != before["run"]
        assert answer["missing"] == 0
        assert kinds(answer) == ["stop", "start", "mode"]
        everything = await feed(status_report(agent), None, "", time.time() - 60)
        seen = [event["number"] for event in events(everything)]
        assert seen == sorted(set(seen)), "from the store and from memory, each once"
        assert kinds(everything).count("hold") == 1


async def test_alerts_of_responses_and_evictions_are_events(agent: Agent, shown: StatusReport) -> None:
    start = await feed(shown, None, "", None)
    labels = {"uid": BATCH, "namespace": "ci", "pod": "batch-7"}
    agent.alerts.send(Alert(kind=AlertKind.INTERFERENCE, key="k", summary="ci/batch-7: slow", at_s=1.0, labels=labels))
    answer = await feed(shown, int(str(start["next"])), str(start["run"]), None)
    assert [(event["kind"], event["pod"]) for event in events(answer)] == [("alert:interference", "ci/batch-7")]


async def test_one_answer_is_bounded_and_counts_what_it_leaves_out(agent: Agent, shown: StatusReport) -> None:
    for number in range(MOST + 500):
        agent.record.ledger.note(LedgerEvent(at=time.time(), kind="plan", reason=str(number)))
    agent.record.ledger.flush()
    answer = await feed(shown, None, "", 0.0)
    assert len(events(answer)) == MOST
    assert events(answer)[-1]["reason"] == str(MOST + 499)
    assert int(str(answer["missing"])) >= 500
