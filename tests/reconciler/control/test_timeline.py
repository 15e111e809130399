"""Times of a container's start: of writes that were made, and of those that would be."""

import time

import pytest
import trio
from msgspec.structs import replace

from reconciler.config.model import AgentMode
from reconciler.daemon.agent import Agent
from reconciler.sources.runtime_signal import RuntimeEvent
from state.model import Hold
from tests.fakes.livenode import BATCH, LiveNode, container_id


async def start(node: LiveNode, agent: Agent) -> dict[str, object]:
    """A BE container that appears after the first pass, and its signal; what its timeline shows."""
    await node.look(agent)
    agent.control.reconciler.timelines.ready()
    cid = container_id(BATCH)
    agent.control.reconciler.timelines.came(cid)
    agent.control.reconciler.settled(cid, trio.current_time(), RuntimeEvent.STATE)
    agent.writes.fastpath.clear()
    agent.control.reconciler._signalled[cid] = time.monotonic()
    agent.hub.changed.mark_all("test")
    await agent.control.reconciler.reconcile(agent.hub.changed.take_nowait())
    timeline = agent.control.reconciler.timelines.get(cid)
    assert timeline is not None
    return timeline.status()


@pytest.mark.parametrize("mode", list(AgentMode))
async def test_nothing_is_called_written_that_was_not_and_planned_writes_have_their_own_metric(
    live: LiveNode, mode: AgentMode
) -> None:
    with live.agent(replace(live.config, mode=mode)) as agent:
        shown = await start(live, agent)
        counted = agent.control.counters.values
        enforced = mode is AgentMode.ENFORCE
        assert bool(shown["written_at"]) == bool(shown["verified_at"]) == enforced
        assert bool(shown["would_write_at"]) == (not enforced)
        assert shown["signal_at"]
        assert (shown["signal_to_last_write_s"] is not None) == enforced
        assert sum(counted.signal_to_write.counts) == enforced
        assert sum(counted.signal_to_would_write.counts) == (not enforced)
        assert sum(counted.starts.values()) == enforced


async def test_settings_on_hold_are_neither(live: LiveNode) -> None:
    with live.agent() as agent:
        agent.record.holds.all["node"] = Hold(target="node", reason="x", by="ana")
        agent.record.holds.refresh()
        shown = await start(live, agent)
        assert shown["written_at"] is shown["verified_at"] is shown["would_write_at"] is None
        assert sum(agent.control.counters.values.starts.values()) == 0
