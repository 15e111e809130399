"""A foreign write alone leads to a comparison with the last plan; with anything else beside it, to a whole look."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from reconciler.actuators.cgroup.conflict import WriteAttribution
from reconciler.control import reconciler as module
from reconciler.control.planner import plan_node
from reconciler.daemon.agent import Agent
from reconciler.runtime.workqueue import container_key, files_key, pod_key
from tests.fakes.livenode import BATCH, LiveNode, container_id, group

OTHER = "dddddddd-4444-4444-8444-444444444444"


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveNode]:
    with patch.object(WriteAttribution, "last_writer", return_value=("other", "tuned")):
        yield LiveNode(tmp_path)


def directory(live: LiveNode) -> str:
    return f"{live.root}/sys/fs/cgroup/cpuset{group(BATCH)}/{container_id(BATCH)}"


def cpus(live: LiveNode) -> str:
    return live.kernel.read(directory(live), "cpuset.cpus").strip()


async def disturbed(live: LiveNode, agent: Agent) -> str:
    """The agent's value, after which another program has written all CPUs."""
    await live.look(agent)
    agent.hub.changed.take_nowait()
    ours = cpus(live)
    live.kernel.write(directory(live), "cpuset.cpus", "0-7")
    assert ours != cpus(live)
    return ours


async def test_a_foreign_value_is_put_back_without_a_plan(live: LiveNode) -> None:
    with live.agent() as agent:
        ours = await disturbed(live, agent)
        looks, changes = agent.control.reconciler.looks, agent.control.reconciler.changes
        agent.hub.changed.mark(files_key(BATCH))
        with patch.object(module, "plan_node") as node, patch.object(module, "plan_pod") as pod:
            await agent.control.reconciler.reconcile(agent.hub.changed.take_nowait())
        assert cpus(live) == ours
        assert (node.called, pod.called) == (False, False)
        assert (agent.control.reconciler.looks - looks, agent.control.reconciler.changes - changes) == (1, 1)


@pytest.mark.parametrize("beside", [pod_key(BATCH), container_key(container_id(BATCH)), "node"])
async def test_with_another_event_beside_it_the_node_is_planned(live: LiveNode, beside: str) -> None:
    with live.agent() as agent:
        ours = await disturbed(live, agent)
        agent.hub.changed.mark(files_key(BATCH))
        agent.hub.changed.mark(beside)
        with patch.object(module, "plan_node", wraps=plan_node) as node:
            await agent.control.reconciler.reconcile(agent.hub.changed.take_nowait())
        assert node.called
        assert cpus(live) == ours


async def test_files_of_a_pod_that_is_not_known_ask_for_a_look_at_the_pod(live: LiveNode) -> None:
    async with live.looked() as agent:
        agent.hub.changed.take_nowait()
        agent.hub.changed.mark(files_key(OTHER))
        await agent.control.reconciler.reconcile(agent.hub.changed.take_nowait())
        assert agent.hub.changed.take_nowait().keys == {pod_key(OTHER)}
