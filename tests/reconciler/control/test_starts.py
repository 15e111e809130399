"""The start allowance as it is carried out, and the alert about a start that waits for CPU."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.usage import UsageCounters
from reconciler.daemon.agent import Agent
from reconciler.pods.selectors import ClassOverride, ClassRules
from reconciler.policies.budget import BudgetConfig
from reconciler.policies.reclaimed import ReclaimedConfig
from reconciler.policies.start_allowance import StartConfig
from reconciler.policies.table import PoliciesConfig
from reconciler.runtime.workqueue import TICK, DirtyBatch, pod_key
from state.cpu import StartPlan
from state.model import ContainerMeta, PodClass, PodMeta, Resources
from state.setting_state import SettingState
from tests.fakes.constants import varied
from tests.fakes.livenode import BATCH, WEB, LiveNode, container_id, group

DIRECTORY: Final = "/kubepods/besteffort"
LONG_S: Final = 10.0
"""No start's own end comes within a test."""
AT_FLOOR: Final = PoliciesConfig(
    reclaimed=ReclaimedConfig(budget=BudgetConfig(limit_percent=1), start=varied(StartConfig(), command_s=LONG_S))
)
TICKED: Final = DirtyBatch(frozenset({TICK}), ())


@pytest.fixture
def node(tmp_path: Path) -> LiveNode:
    node = LiveNode(tmp_path, files=False)
    node.config = replace(node.config, policies=AT_FLOOR)
    return node


@pytest.fixture
def agent(node: LiveNode) -> Iterator[Agent]:
    with node.agent() as agent:
        yield agent


async def test_a_command_of_the_runtime_lifts_the_quota_in_the_next_pass_and_its_end_lowers_it(
    node: LiveNode, agent: Agent
) -> None:
    seen: list[tuple[str, str]] = []

    def note() -> None:
        seen.append((node.read(DIRECTORY, "cpu", "cpu.cfs_quota_us"), node.read(group(BATCH), "cpu", "cpu.shares")))

    await node.look(agent)
    note()
    assert agent.control.reconciler.view is not None
    at = agent.control.reconciler.view.now
    agent.hub.commanded(container_id(WEB), at + 0.3)
    assert not agent.hub.changed, "an online pod's commands count for nothing"
    agent.hub.commanded(container_id(BATCH), at + 0.3)
    assert agent.hub.changed.take_nowait() == TICKED
    agent.hub.commanded(container_id(BATCH), None)
    assert agent.hub.changed.take_nowait() == TICKED, "it was an update"
    assert agent.control.inventory.readings.commands == {}
    agent.hub.commanded(container_id(BATCH), None)
    assert not agent.hub.changed
    agent.control.inventory.take(commands={container_id(BATCH): at})
    await agent.control.reconciler.reconcile(TICKED)
    note()
    agent.control.inventory.take(commands={})
    await agent.control.reconciler.reconcile(TICKED)
    note()
    await agent.control.reconciler.reconcile(TICKED)
    assert seen == [("16000", "1024"), ("100000", "262144"), ("16000", "1024")]
    assert agent.writes.actuator.writes["cpu.quota", "written"] == 3
    status = agent.writes.judge.statuses.get((DIRECTORY, "cpu.quota"))
    assert status is not None
    assert status.state in {SettingState.WRITTEN, SettingState.IN_PLACE}


ONLINE: Final = "dddddddd-4444-4444-8444-444444444444"


def _shares(node: LiveNode) -> str:
    return node.read(group(BATCH), "cpu", "cpu.shares")


def _online_pod_in_besteffort(node: LiveNode, agent: Agent) -> None:
    """An online pod of QoS BestEffort, as the kubelet makes its group."""
    path = f"{DIRECTORY}/pod{ONLINE}"
    node.kernel.make_group(path)
    node.write(path, "cpu", "cpu.shares", "2")
    node.kernel.make_group(f"{path}/{'d' * 64}")
    online = ClassOverride(pod_class=PodClass.SHARED, uid=ONLINE)
    agent.reconfigure(replace(agent.config, classes=ClassRules(overrides=(online,))))


async def test_a_raised_pod_has_the_least_weight_as_soon_as_an_online_pod_is_beside_it(
    node: LiveNode, agent: Agent
) -> None:
    seen: list[str] = []

    await node.look(agent)
    assert agent.control.reconciler.view is not None
    agent.control.inventory.take(commands={container_id(BATCH): agent.control.reconciler.view.now})
    await agent.control.reconciler.reconcile(TICKED)
    seen.append(_shares(node))
    _online_pod_in_besteffort(node, agent)
    await agent.control.reconciler.reconcile(DirtyBatch(frozenset({pod_key(ONLINE)}), ()))
    seen.append(_shares(node))
    assert seen == ["262144", "2"]


async def test_without_the_reclaimed_policy_a_request_still_yields_to_an_online_pod_at_once(node: LiveNode) -> None:
    seen: list[str] = []
    meta = PodMeta(
        uid=BATCH,
        source="manifest",
        containers=(ContainerMeta(name="main", requests=Resources(batch_cpu_milli=8000)),),
    )

    off = replace(node.config, policies=PoliciesConfig(reclaimed=ReclaimedConfig(enabled=False)))
    with node.agent(off) as agent:
        agent.sources.metadata.set_manifests([meta])
        await node.look(agent)
        seen.append(_shares(node))
        _online_pod_in_besteffort(node, agent)
        await agent.control.reconciler.reconcile(DirtyBatch(frozenset({pod_key(ONLINE)}), ()))
        seen.append(_shares(node))
    assert seen == ["8192", "2"]


def test_a_command_right_after_a_start_counts(node: LiveNode, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a postStart hook or a first probe. Own readings are none: tests/daemon/test_runtime_commands.py."""
    # The pass takes no time, however busy the machine is.
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    trio.run(node.look, agent)
    view = agent.control.reconciler.view
    assert view is not None
    assert agent.control.inventory.command(container_id(BATCH), view.now)
    assert agent.control.inventory.readings.commands == {container_id(BATCH): view.now}


@pytest.mark.parametrize(
    ("throttled_ns", "waits", "alerts"),
    [(2_000_000_000, True, 1), (0, True, 0), (2_000_000_000, False, 0), (2_000_000_000, None, 0)],
    ids=["throttled", "slow, but not by us", "executed", "unknown"],
)
def test_a_throttled_start_that_does_not_get_on_is_an_alert_once(
    node: LiveNode,
    agent: Agent,
    monkeypatch: pytest.MonkeyPatch,
    throttled_ns: int,
    waits: bool | None,
    alerts: int,
) -> None:
    trio.run(node.look, agent)
    watch, plan = agent.accounts.sampler.starts, agent.control.reconciler.plan
    assert plan is not None
    agent.control.reconciler.plan = replace(plan, starts=StartPlan(created={container_id(BATCH): 100.0}))
    monkeypatch.setattr(agent.writes.fastpath, "not_yet_executed", lambda cid, procs: waits)
    throttled = {"ns": 5}
    monkeypatch.setattr(agent.usage, "read_cpu", lambda path: UsageCounters(at_s=0.0, throttled_ns=throttled["ns"]))
    watch.check(100.0)
    throttled["ns"] += throttled_ns
    watch.check(104.9)
    assert watch.late == 0
    # As long as it does not get on it is among the plan's starts.
    for second in range(20):
        throttled["ns"] += throttled_ns
        watch.check(105.0 + second)
    agent.control.reconciler.plan = plan
    for second in range(3):
        watch.check(125.0 + second)
    assert (watch.late, agent.alerts.raised["start"]) == (alerts, alerts)
