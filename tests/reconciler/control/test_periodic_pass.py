"""A pass that only the clock has caused reads everything again, and plans what can have become another plan."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from reconciler.actuators.cgroup.conflict import WriteAttribution
from reconciler.control import reconciler as module
from reconciler.control.planner import READ_FOR_PODS, plan_node, plan_pod, same_for_pods
from reconciler.daemon.agent import Agent
from reconciler.policies.table import REGISTRY
from reconciler.runtime.workqueue import DirtyBatch
from state.model import NodeView
from tests.fakes.livenode import BOX, WEB, LiveNode, group

PERIODIC: Final = DirtyBatch(frozenset(), ("periodic",))
CONSTANT: Final = {"kubepods", "besteffort", "burstable", "versions", "node_memory"}
"""The node's layout; of its memory the amounts, which are compared by themselves."""
EXCLUDED: Final = {"quota_turbo", "group_identity"}
"""Not together with the policies that remain; they read what those read."""
OF_OTHERS: Final = {"cpus", "capacity_milli", "online_in_besteffort", "unweighed_in_besteffort"}
"""What follows from the topology, the kubepods directory and the pods."""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveNode]:
    # All at one moment: no reading ages.
    with (
        patch.object(WriteAttribution, "last_writer", return_value=("other", "tuned")),
        patch.object(time, "monotonic", return_value=time.monotonic()),
    ):
        yield LiveNode(tmp_path, files=False)


async def settled(live: LiveNode, agent: Agent) -> None:
    await live.look(agent)
    for _ in range(2):
        await agent.control.reconciler.reconcile(PERIODIC)
    agent.hub.changed.take_nowait()


async def planned_pods(agent: Agent) -> set[str]:
    """Those that the next periodic pass plans."""
    with patch.object(module, "plan_pod", side_effect=plan_pod) as pod:
        await agent.control.reconciler.reconcile(PERIODIC)
    return {call.args[0].uid for call in pod.call_args_list}


async def test_where_nothing_differs_no_pod_is_planned_and_nothing_is_to_be_stored(live: LiveNode) -> None:
    with live.agent() as agent:
        await settled(live, agent)
        changes = agent.control.reconciler.changes
        assert await planned_pods(agent) == set()
        assert agent.control.reconciler.changes == changes


async def test_a_value_that_another_program_wrote_without_an_event_is_put_back_all_the_same(live: LiveNode) -> None:
    with live.agent() as agent:
        await settled(live, agent)
        ours = live.read(BOX, "cpuset", "cpuset.cpus")
        live.write(BOX, "cpuset", "cpuset.cpus", "0-7")
        assert await planned_pods(agent) == set()
        assert live.read(BOX, "cpuset", "cpuset.cpus") == ours != "0-7"


def _bound(live: LiveNode, _: Agent) -> None:
    live.write(group(WEB), "cpu", "cpu.cfs_quota_us", "150000")


def _period(live: LiveNode, agent: Agent) -> None:
    _bound(live, agent)
    live.write(group(WEB), "cpu", "cpu.cfs_period_us", "50000")


def _policies(_: LiveNode, agent: Agent) -> None:
    agent.control.reconciler.use(agent.control.reconciler.policies)


def _loan(_: LiveNode, agent: Agent) -> None:
    agent.control.inventory.take(lent_us={BOX: 1000})


@pytest.mark.parametrize("change", [_bound, _period, _policies, _loan])
async def test_every_pod_is_planned_where_something_of_their_settings_may_differ(
    live: LiveNode, change: Callable[[LiveNode, Agent], None]
) -> None:
    with live.agent() as agent:
        await settled(live, agent)
        change(live, agent)
        assert await planned_pods(agent) == live.pods.keys()
        assert await planned_pods(agent) == set(), "the same node as before"


async def test_a_pods_settings_follow_from_nothing_of_the_view_that_is_not_compared(live: LiveNode) -> None:
    with live.agent() as agent:
        await settled(live, agent)
        view = agent.control.reconciler.view
        assert view is not None
        config = agent.control.reconciler.policies
        every = replace(
            config,
            **{
                name: replace(section, enabled=True)
                for name in REGISTRY.keys() - EXCLUDED
                if hasattr(section := getattr(config, name), "enabled")
            },
        )
        read: set[str] = set()

        def noted(self: NodeView, name: str) -> object:
            if not name.startswith("_"):
                read.add(name)
            return object.__getattribute__(self, name)

        plan = plan_node(view, None, every)
        with patch.object(NodeView, "__getattribute__", noted):
            for pod in view.pods.values():
                plan_pod(pod, view, plan, every)
        assert len(read) > len(CONSTANT), "the view's readers are noted"
        assert read <= {*READ_FOR_PODS, *CONSTANT, *OF_OTHERS}


async def test_the_time_and_the_node_s_use_make_no_pod_another(live: LiveNode) -> None:
    with live.agent() as agent:
        await settled(live, agent)
        view = agent.control.reconciler.view
        assert view is not None
        assert same_for_pods(view, replace(view, now=view.now + 30, cpu=None, actual=dict(view.actual)))
        assert not same_for_pods(view, replace(view, lent_us={BOX: 1}))
