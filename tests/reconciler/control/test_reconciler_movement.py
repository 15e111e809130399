"""What a look moves is counted once, and the clock's looks are no events."""

from pathlib import Path

import trio

from reconciler.runtime.counters import CounterValues
from reconciler.runtime.workqueue import NODE, TICK, DirtyBatch
from tests.fakes.kubelet.cpu_manager import checkpoint
from tests.fakes.livenode import PINNED, LiveNode
from tests.fakes.report import status_report


def test_cpus_that_change_pools_are_counted_by_event(tmp_path: Path) -> None:
    async def scenario() -> list[CounterValues]:
        node = LiveNode(tmp_path)
        with node.agent() as agent:
            show = status_report(agent)
            seen = []
            await node.look(agent)
            seen.append(show.metrics().counters)
            await agent.control.reconciler.reconcile(DirtyBatch(frozenset({TICK}), ()))
            await agent.control.reconciler.reconcile(DirtyBatch(frozenset(), ("periodic",)))
            seen.append(show.metrics().counters)
            assert agent.control.reconciler.pools is not None
            assert len(agent.control.reconciler.pools.dedicated_cpus) == 1
            # The kubelet gives the pinned pod a second CPU.
            state = checkpoint("static", "0-5", {PINNED: {"main": "6-7"}})
            node.put("var/lib/kubelet/cpu_manager_state", state)
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
        return seen

    first, idle, moved = trio.run(scenario)
    assert (first.events, first.cpus_moved) == (1, 0)
    assert first.cpuset_writes == 1, "the best-effort container, off the pinned pod's CPU"
    assert (idle.events, idle.cpus_moved, idle.cpuset_writes) == (1, 0, 1)
    assert moved.events == 2
    assert moved.cpus_moved == 2, "CPU 6, and the one that best-effort work gets for it"
    assert moved.pools_changed >= 2
    assert moved.cpuset_writes == 2
