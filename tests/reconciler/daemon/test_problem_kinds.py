"""Every kind of problem is a condition: a line of ``status``, a metric, and after a minute an alert with a runbook."""

import errno
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cgroupfs.errors import AgentError
from reconciler.alerts.agent_alerts import _OF_ITS_OWN, RUNBOOKS, SourceHealth, runbook, source_states
from reconciler.alerts.alert import Alert
from reconciler.daemon.agent import Agent
from reconciler.daemon.problems import ACTUATOR
from reconciler.runtime.workqueue import container_key, pod_key
from state.model import PodMeta
from tests.fakes.livenode import BATCH, BOX, WEB, LiveNode, container_id, group
from tests.fakes.report import status_report
from tests.reconciler.telemetry.rendered import render

ROOT = Path(__file__).parents[3]
Make = Callable[[LiveNode, Agent, pytest.MonkeyPatch], object]


def unreadable(live: LiveNode, _agent: Agent, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(live.kernel, "read", live.failing("read", BOX, "cpu", "cpu.shares"))


def mark(agent: Agent, labels: Mapping[str, str]) -> None:
    meta = PodMeta(uid=BATCH, source="kubelet", name="batch-7", namespace="ci", labels=labels, annotations={})
    agent.sources.metadata.set_manifests([meta])


def marked(_live: LiveNode, agent: Agent, _patch: pytest.MonkeyPatch) -> None:
    mark(agent, {"koordinator.sh/qosClass": "FASTEST"})


def failed(_live: LiveNode, agent: Agent, _patch: pytest.MonkeyPatch) -> None:
    agent.writes.judge.errors.failed("node", OSError(errno.EIO, "gone wrong"))


def with_text(part: Callable[[Agent], object], name: str, value: object) -> Make:
    return lambda _live, agent, patch: patch.setattr(part(agent), name, value)


KINDS: dict[str, tuple[str, Make]] = {
    "own priority": ("EPERM", with_text(lambda agent: agent.process.priority, "_problem", "EPERM")),
    "own CPU group": ("EROFS", with_text(lambda agent: agent.process.group, "_problem", "EROFS")),
    "pod list": (
        "entry 3: no uid",
        with_text(lambda agent: agent.sources.pods, "kubelet", SimpleNamespace(problems=("entry 3: no uid",))),
    ),
    "recorded originals": ("row x", with_text(lambda agent: agent.record.ledger, "problems", ("row x: not a map",))),
    "state files": ("full", with_text(lambda agent: agent.record.ledger._intents, "problem", "writes: full")),
    "reconcile pass": ("cannot list", with_text(lambda agent: agent.control.reconciler, "problem", "cannot list it")),
    "single objects": ("gone wrong", failed),
    "unreadable files": (f"{BOX}: cpu.weight: ", unreadable),
    "alert sinks": (
        "alerts to pager",
        with_text(lambda agent: agent.alerts, "problems", lambda: ["alerts to pager: 500"]),
    ),
    "marks of pods": ("FASTEST", marked),
}


class Watch:
    """The alerts of one agent at moments of its own clock."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.health = SourceHealth(60)

    def at(self, now: float) -> dict[str, Alert]:
        alerts = self.health.check(source_states(self.agent.watched()), now, 0.0)
        return {alert.labels["source"]: alert for alert in alerts}

    def metric(self, name: str) -> str:
        report = status_report(self.agent)
        text = render(report.metrics())[0].decode()
        rows = [line for line in text.splitlines() if f'source_up{{source="{name}"}}' in line]
        return rows[0].split()[-1] if rows else "not there"

    def lines(self, text: str) -> list[str]:
        report = status_report(self.agent)
        problems: Any = report.state(("problems",))["problems"]
        return [line for line in problems if text in line]


def anchors() -> set[str]:
    text = (ROOT / RUNBOOKS).read_text()
    return {title.lower().replace(" ", "-") for title in re.findall(r"^##+ (.+)$", text, re.MULTILINE)}


async def test_every_kind_is_tried_here_and_has_a_part_in_the_runbooks(live: LiveNode) -> None:
    with live.agent() as agent:
        actuators = {f"{ACTUATOR}{side.name}" for side in agent.sides.all}
        assert set(agent.problems.names) == {*KINDS, *actuators}
        conditions = {status.name for status in agent.conditions()}
        sources = {status.name for status in agent.every_source()}
    assert actuators
    known = anchors()
    for name in {*KINDS, *actuators, *conditions, *sources}:
        path, _, part = runbook(name).partition("#")
        assert path == RUNBOOKS
        assert part in known, name
        assert part != "bypassdsourcedown" or name in sources
    assert {name.lower().replace(" ", "-") for name in _OF_ITS_OWN} <= known


@pytest.mark.parametrize("name", KINDS)
async def test_each_is_an_alert_after_a_minute_and_until_its_end(
    live: LiveNode, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.least_weight(group(BATCH))
    text, make = KINDS[name]
    async with live.looked() as agent:
        watch = Watch(agent)
        assert not watch.lines(text)
        with monkeypatch.context() as patch:
            make(live, agent, patch)
            if name in {"unreadable files", "marks of pods"}:
                await live.look(agent)
            await watched(watch, name, text)
        if name == "marks of pods":
            mark(agent, {})
        if name == "single objects":
            agent.writes.judge.errors.passed("node")
        if name in {"unreadable files", "marks of pods"}:
            await live.look_again(agent)
        ended(watch, name, text)


async def test_an_error_of_a_pod_or_of_its_container_is_a_problem_of_that_pod_alone(live: LiveNode) -> None:
    """The runbook sends its reader to `bypassctl why POD`."""
    async with live.looked() as agent:
        errors = agent.writes.judge.errors
        errors.failed(container_key(container_id(WEB)), AgentError("bundle: gone wrong"))
        errors.failed(pod_key(WEB), AgentError("its directory cannot be listed"))
        report = status_report(agent)
        pods: Any = report.state(("pods",))["pods"]
        problems = {pod["uid"]: pod["problems"] for pod in pods}
    assert problems[WEB] == ["main: bundle: gone wrong", "its directory cannot be listed"]
    assert not problems[BATCH]


async def test_each_actuator_of_other_files_is_one_too(live: LiveNode, monkeypatch: pytest.MonkeyPatch) -> None:
    async with live.looked() as agent:
        for side in agent.sides.all:
            watch, name = Watch(agent), f"{ACTUATOR}{side.name}"
            with monkeypatch.context() as patch:
                patch.setattr(type(side), "problems", lambda _self: ["it is read-only"])
                await watched(watch, name, f"{side.name}: it is read-only")
            ended(watch, name, f"{side.name}: it is read-only")


async def watched(watch: Watch, name: str, text: str) -> None:
    assert watch.lines(text)
    assert watch.metric(name) in {"0", "0.0"}
    assert name not in watch.at(0.0)
    assert name not in watch.at(59.0)
    alert = watch.at(60.0)[name]
    assert not alert.resolved
    assert text.removeprefix(f"{name.removeprefix(ACTUATOR)}: ") in alert.summary
    assert alert.details["runbook"].partition("#")[2] in anchors()
    assert name not in watch.at(120.0), "once for as long as it lasts"


def ended(watch: Watch, name: str, text: str) -> None:
    assert not watch.lines(text)
    assert watch.metric(name) == "not there"
    assert watch.at(180.0)[name].resolved


@pytest.mark.parametrize("source", ["kubelet", "watch", "metadata"])
async def test_entries_of_every_list_of_pods_are_problems(
    live: LiveNode, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live.looked() as agent:
        watch = Watch(agent)
        monkeypatch.setattr(agent.sources.pods, source, SimpleNamespace(problems=("item 7: no uid",)))
        (status,) = (status for status in agent.problems.conditions() if status.name == "pod list")
        assert (status.ok, status.detail) == (False, "item 7: no uid")
        monkeypatch.undo()
        assert not watch.lines("item 7")
