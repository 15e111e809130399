"""A claim on CPUs that is cut: a message and a metric at once, an alert when it lasts, and the end of that alert.

The daemon's own agent on the fake kernel, from a pod's group to the file of a sink, with its alert component running on
trio's clock.
"""

import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock, wait_all_tasks_blocked

from reconciler.alerts.config import AlertsConfig
from reconciler.alerts.sinks.file import FileSinkConfig
from reconciler.alerts.sinks.table import SinkSection
from reconciler.clients.kube_config import ApiServer
from reconciler.daemon.agent import Agent
from state.model import PodMeta
from state.reader import read_history
from tests.fakes.constants import varied
from tests.fakes.livenode import LiveNode
from tests.fakes.node import NodePod
from tests.fakes.report import status_report
from tests.reconciler.daemon.test_wiring import component
from tests.reconciler.telemetry.rendered import render

POOL = '{"cpuset_pool": "batch"}'
SINK = SinkSection(file=FileSinkConfig(path="/alerts"), batch_delay_s=0.0)
DOWN_S = 60.0
LOOKS_S = 20.0
"""Statuses are looked at as often, so that an alert may be as late."""


@pytest.fixture
def mock_clock() -> MockClock:
    """It runs only on command: a node that is looked at takes none of its time."""
    return MockClock()


class Scene:
    """The agent on a node of eight CPUs, of which six are shared."""

    def __init__(self, live: LiveNode, agent: Agent, clock: MockClock) -> None:
        self.live, self.agent, self.clock = live, agent, clock
        self.report = status_report(agent)
        self.sinks = len(agent.config.alerts.sinks)
        self.marks: dict[str, PodMeta] = {}

    async def add(self, name: str, cpus: int, *, pool: str = "") -> NodePod:
        """An online pod that requests so many CPUs; ``pool``: the annotation that names its pool."""
        pod = self.live.add(name, qos="burstable", shares=1024 * cpus, cpus="0-6")
        if pool:
            annotations = {
                "katalyst.kubewharf.io/qos_level": "shared_cores",
                "katalyst.kubewharf.io/cpu_enhancement": pool,
            }
            self.marks[pod.uid] = PodMeta(
                uid=pod.uid, source="test", namespace="shop", name=name, annotations=annotations
            )
        self.agent.sources.metadata.set_manifests(self.marks.values())
        await self.live.look(self.agent)
        return pod

    async def remove(self, pod: NodePod) -> None:
        self.live.remove(pod)
        await self.live.look(self.agent)

    async def seconds(self, count: float) -> None:
        """The clock moves on, and what is due by then is delivered before the next second."""
        for _ in range(int(count)):
            self.clock.jump(1)
            await wait_all_tasks_blocked()
            # A sink writes in a thread, whose time this clock does not count: jumps would be its timeout.
            await self._until(self._delivered)
        await self._until(lambda: len(self.agent.alerts.numbers().sinks) == self.sinks and self._delivered())

    def _delivered(self) -> bool:
        return not any(sink.waiting for sink in self.agent.alerts.numbers().sinks.values())

    async def _until(self, done: Callable[[], bool]) -> None:
        for _ in range(5000):
            if done():
                return
            await trio.to_thread.run_sync(time.sleep, 0.002)
        raise AssertionError("an alert is not delivered")

    def message(self) -> str:
        """What the daemon's state reports of claims that are cut."""
        state: Any = dict(self.report.state(("sources", "problems")))
        (placement,) = (row for row in state["sources"] if row["name"] == "placement")
        problems = [text for text in state["problems"] if text.startswith("placement")]
        assert placement["ok"] is not bool(problems)
        return "" if placement["ok"] else placement["detail"]

    def metrics(self) -> tuple[float, float]:
        """Claims that are cut, and the CPUs that they lack."""
        text = render(self.report.metrics())[0].decode()
        rows = dict(line.split(" ") for line in text.splitlines() if line.startswith("bypassd_claims_"))
        return float(rows["bypassd_claims_cut"]), float(rows["bypassd_claims_missing_cpus"])

    def cut(self) -> list[str]:
        """The owners of claims that are cut."""
        return [claim.owner for claim in self.agent.control.claims() if claim.cut]

    def alerts(self) -> list[tuple[str, str]]:
        """What the sink got: status and owner of the claim, the oldest first."""
        return [(row["status"], row["labels"].get("claim", "")) for row in self.rows()]

    def rows(self) -> list[Mapping[str, Any]]:
        """Those about claims: the daemon's other sources do not run here."""
        path = Path(self.live.root, "alerts")
        rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        return [row for row in rows if row["labels"]["source"] == "placement"]


@asynccontextmanager
async def scene(live: LiveNode, clock: MockClock, **sinks: SinkSection) -> AsyncIterator[Scene]:
    config = replace(live.config, alerts=varied(AlertsConfig(sinks=sinks), source_down_s=DOWN_S))
    with live.agent(config) as agent:
        made = Scene(live, agent, clock)
        await live.look(agent)
        async with trio.open_nursery() as nursery:
            await nursery.start(component(agent, "alerts").run)
            await nursery.start(component(agent, "source health").run)
            yield made
            nursery.cancel_scope.cancel()


async def test_a_claim_that_stays_cut_is_told_at_once_and_is_an_alert_in_time_and_until_its_end(
    live: LiveNode, mock_clock: MockClock
) -> None:
    async with scene(live, mock_clock, lines=SINK) as at:
        assert (at.message(), at.metrics()) == ("", (0, 0))
        big = await at.add("big", 20)
        assert at.message().startswith("shared has 6 of 20 CPUs: ")
        assert at.metrics() == (1, 14)
        await at.seconds(DOWN_S - 1)
        assert at.alerts() == []
        await at.seconds(2 * LOOKS_S + 1)
        (row,) = at.rows()
        assert (row["status"], row["kind"], row["severity"], row["count"]) == ("firing", "source", "warning", 1)
        assert "shared has 6 of 20 CPUs: " in row["summary"]
        await at.seconds(10 * DOWN_S)
        assert len(at.rows()) == 1, "once for as long as it lasts"
        await at.remove(big)
        assert (at.message(), at.metrics()) == ("", (0, 0))
        await at.seconds(2 * LOOKS_S)
        first, end = at.rows()
        assert (end["status"], end["severity"], end["id"]) == ("resolved", "info", first["id"])
        await at.seconds(10 * DOWN_S)
        assert len(at.rows()) == 2


async def test_a_claim_that_is_cut_for_a_short_time_is_no_alert(live: LiveNode, mock_clock: MockClock) -> None:
    async with scene(live, mock_clock, lines=SINK) as at:
        for _ in range(3):
            big = await at.add("big", 20)
            assert at.metrics()[0] == 1
            await at.seconds(DOWN_S - LOOKS_S - 1)
            await at.remove(big)
            await at.seconds(LOOKS_S + 1)
        await at.seconds(3 * DOWN_S)
        assert at.alerts() == []


async def test_claims_that_are_cut_in_turn_are_no_alert_as_none_lasts(live: LiveNode, mock_clock: MockClock) -> None:
    async with scene(live, mock_clock, lines=SINK) as at:
        for _ in range(3):
            default = await at.add("big", 20)
            await at.seconds(DOWN_S / 2)
            assert at.cut() == ["shared"]
            await at.remove(default)
            named = await at.add("batch", 20, pool=POOL)
            assert at.cut() == ["shared/batch"]
            await at.seconds(DOWN_S / 2)
            await at.remove(named)
        assert at.alerts() == []


async def test_each_claim_has_an_alert_and_an_end_of_its_own(live: LiveNode, mock_clock: MockClock) -> None:
    async with scene(live, mock_clock, lines=SINK) as at:
        named = await at.add("batch", 20, pool=POOL)
        await at.seconds(DOWN_S + 2 * LOOKS_S)
        assert at.alerts() == [("firing", "shared/batch")]
        default = await at.add("big", 20)
        assert at.metrics()[0] == 2
        await at.seconds(DOWN_S + 2 * LOOKS_S)
        assert at.alerts()[1:] == [("firing", "shared")]
        await at.remove(named)
        await at.seconds(2 * LOOKS_S)
        assert at.alerts()[2:] == [("resolved", "shared/batch")]
        await at.remove(default)
        await at.seconds(2 * LOOKS_S)
        assert at.alerts()[3:] == [("resolved", "shared")]


async def test_without_a_sink_the_alert_is_in_the_log_and_the_history_and_a_first_sink_gets_what_lasts(
    live: LiveNode, mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def logged() -> list[str]:
        lines = [(record.levelname, record.getMessage()) for record in caplog.records]
        return [level for level, text in lines if text.startswith("placement: shared ")]

    async with scene(live, mock_clock) as at:
        big = await at.add("big", 20)
        await at.seconds(DOWN_S - 1)
        assert logged() == []
        await at.seconds(2 * LOOKS_S)
        assert logged() == ["WARNING"]
        at.agent.alerts.reconfigure(varied(AlertsConfig(sinks={"lines": SINK}), source_down_s=DOWN_S), ApiServer())
        at.sinks = 1
        await at.seconds(DOWN_S + 2 * LOOKS_S)
        assert at.alerts() == [("firing", "shared")]
        await at.remove(big)
        await at.seconds(2 * LOOKS_S)
        assert at.alerts()[1:] == [("resolved", "shared")]
        assert logged() == ["WARNING", "WARNING", "INFO"]
        await at.agent.keeper.flush()
        events = [row for row in read_history(at.agent.record.store.path, 1000) if row["kind"] == "alert:source"]
        assert sum(str(row["reason"]).startswith("placement: shared ") for row in events) == 3
