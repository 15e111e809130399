"""The worker: a foreign write alone is compared with the last plan; what a pass moves counts once; and its start."""

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import SourceError
from reconciler.actuators.cgroup.conflict import WriteAttribution
from reconciler.config.model import AgentMode
from reconciler.control import reconciler as module
from reconciler.control.planner import plan_node
from reconciler.daemon.agent import Agent
from reconciler.policies.node_daemons import NodeDaemonsConfig
from reconciler.runtime.workqueue import NODE, TICK, DirtyBatch, container_key, files_key, pod_key
from reconciler.sources.runtime_signal import RuntimeEvent
from reconciler.sources.tree import TreeSource
from state.daemons import DaemonGroup, Daemons
from state.setting_state import SettingState
from tests.fakes.kubelet.cpu_manager import checkpoint
from tests.fakes.livenode import BATCH, BOX, PINNED, LiveNode, container_id, group
from tests.fakes.report import status_report

OTHER = "dddddddd-4444-4444-8444-444444444444"


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveNode]:
    with patch.object(WriteAttribution, "last_writer", return_value=("other", "tuned")):
        yield LiveNode(tmp_path, files=False)


def cpus(live: LiveNode) -> str:
    return live.read(BOX, "cpuset", "cpuset.cpus")


async def disturbed(live: LiveNode, agent: Agent) -> str:
    """The agent's value, after which another program has written all CPUs."""
    await live.look(agent)
    agent.hub.changed.take_nowait()
    ours = cpus(live)
    live.write(BOX, "cpuset", "cpuset.cpus", "0-7")
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


async def test_cpus_that_change_pools_are_counted_by_event_and_the_clocks_passes_are_none(live: LiveNode) -> None:
    with live.agent() as agent:
        show = status_report(agent)
        seen = []
        await live.look(agent)
        seen.append(show.metrics().counters)
        await agent.control.reconciler.reconcile(DirtyBatch(frozenset({TICK}), ()))
        await agent.control.reconciler.reconcile(DirtyBatch(frozenset(), ("periodic",)))
        seen.append(show.metrics().counters)
        assert agent.control.reconciler.pools is not None
        assert len(agent.control.reconciler.pools.dedicated_cpus) == 1
        # The kubelet gives the pinned pod a second CPU.
        state = checkpoint("static", "0-5", {PINNED: {"main": "6-7"}})
        live.put("var/lib/kubelet/cpu_manager_state", state)
        agent.sources.checkpoints.read_all()
        await agent.control.reconciler.reconcile(DirtyBatch(frozenset({NODE}), ()))
        seen.append(show.metrics().counters)
        document = show.state(("agent",))["agent"]
        assert isinstance(document, dict)
        assert document["movement"] == {
            "events": seen[-1].events,
            "cpus_moved": seen[-1].cpus_moved,
            "pools_changed": seen[-1].pools_changed,
            "cpuset_writes": seen[-1].cpuset_writes,
            "systemd_events": 0,
        }
    first, idle, moved = seen
    assert (first.events, first.cpus_moved) == (1, 0)
    assert first.cpuset_writes == 1, "the best-effort container, off the pinned pod's CPU"
    assert (idle.events, idle.cpus_moved, idle.cpuset_writes) == (1, 0, 1)
    assert moved.events == 2
    assert moved.cpus_moved == 2, "CPU 6, and the one that best-effort work gets for it"
    assert moved.pools_changed >= 2
    assert moved.cpuset_writes == 2


async def passed(condition: Callable[[], object]) -> None:
    """Let the others run; the clock stops meanwhile."""
    while not condition():
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("event", [pod_key(BATCH), files_key(BATCH)])
async def test_a_look_at_one_pod_is_not_the_first_whole_look(live: LiveNode, event: str, mock_clock: MockClock) -> None:
    """A lost store: until everything was looked at, no value in a file is taken for an original."""
    refused = SourceError("cgroups", "cannot be listed")
    Path(live.store).write_bytes(b"no store" * 1000)
    with live.agent() as agent:
        assert agent.writes.judge.lost
        worker = agent.control.reconciler
        async with trio.open_nursery() as nursery:
            with patch.object(TreeSource, "scan_gently", side_effect=refused):
                nursery.start_soon(worker.run)
                await passed(lambda: worker.problem)
                agent.hub.changed.mark(event)
                await passed(lambda: worker.looks and worker.busy_since is None)
                assert (agent.writes.judge.lost, worker.ready.is_set(), worker.problem) == (True, False, str(refused))
            mock_clock.jump(2)
            await worker.ready.wait()
            assert (agent.writes.judge.lost, worker.problem) == (False, None)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("removed", ["by its directories", "by the runtime's event"])
async def test_nothing_is_kept_of_a_container_without_a_signal_that_was_removed(live: LiveNode, removed: str) -> None:
    async with live.looked() as agent:
        worker, cid = agent.control.reconciler, container_id(BATCH)
        worker.settled(cid, 0.0, RuntimeEvent.ABSENT)
        await live.look(agent)
        assert cid in worker._found
        if removed == "by its directories":
            live.kernel.remove_group(BOX)
            await live.look(agent)
        else:
            worker.gone(cid)
        assert not worker._found


async def test_what_bounds_a_pod_made_again_under_its_uid_is_read_before_it_is_planned(live: LiveNode) -> None:
    """A static pod keeps its uid: the kubelet may remove its group and make it again between two passes."""
    async with live.looked() as agent:
        live.kernel.remove_group(group(BATCH))
        live.admit(BATCH, "ci", "batch-7")
        live.run(BATCH)
        live.write(BOX, "cpuset", "cpuset.cpus", "0,5")
        live.write(group(BATCH), "cpuset", "cpuset.cpus", "0,5")
        await live.look(agent)
        view = agent.control.reconciler.view
        assert view is not None
        assert view.actual.get((group(BATCH), "cpu.set")) == CpuSet.parse("0,5")
        (refusal,) = agent.control.reconciler.refusals[BATCH]
        assert refusal.reason.endswith("has only CPU 0,5: of 5-6, CPU 5 is set")


async def test_a_setting_above_the_pods_that_was_only_shown_is_no_more_once_no_policy_wants_it(live: LiveNode) -> None:
    config = replace(live.by_quota(), mode=AgentMode.OBSERVE)
    async with live.looked(config) as agent:
        statuses = agent.writes.judge.statuses
        shown = statuses.get(("/kubepods/besteffort", "cpu.quota"))
        assert shown is not None
        assert shown.state is SettingState.WOULD_WRITE
        reclaimed = replace(config.policies.reclaimed, enabled=False)
        agent.control.reconciler.use(replace(config.policies, reclaimed=reclaimed))
        await live.look(agent)
        assert statuses.get(("/kubepods/besteffort", "cpu.quota")) is None


async def test_nothing_is_kept_of_a_group_beside_the_pods_that_was_removed(live: LiveNode) -> None:
    """systemd removes a slice with its last service or session."""
    slices = {"/system.slice": DaemonGroup(original=1024, wanted=100)}
    live.kernel.make_group("/system.slice")
    policies = replace(live.config.policies, node_daemons=NodeDaemonsConfig(enabled=True))
    with live.agent(replace(live.config, policies=policies)) as agent:
        worker, judge = agent.control.reconciler, agent.writes.judge
        agent.control.inventory.take(daemons=Daemons(groups=slices))
        await live.look(agent)
        assert judge.statuses.get(("/system.slice", "cpu.weight")) is not None
        live.kernel.remove_group("/system.slice")
        agent.control.inventory.take(daemons=Daemons())
        await worker.reconcile(DirtyBatch(frozenset({NODE}), ()))
        assert "/system.slice" not in {*judge.statuses.by_group, *agent.record.ledger.groups()}
        assert ("/system.slice", "cpu.weight") not in judge.control_files.actual
