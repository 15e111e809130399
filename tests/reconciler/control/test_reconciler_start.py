"""Started means: everything was looked at once. What is decided only until then holds until then."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import trio
from trio.testing import MockClock

from cgroupfs.errors import SourceError
from reconciler.runtime.workqueue import files_key, pod_key
from reconciler.sources.tree import TreeSource
from tests.fakes.livenode import BATCH, LiveNode


async def until(condition: Callable[[], object]) -> None:
    """Let the others run; the clock stops meanwhile."""
    while not condition():
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("event", [pod_key(BATCH), files_key(BATCH)])
async def test_a_look_at_one_pod_is_not_the_first_whole_look(tmp_path: Path, event: str, mock_clock: MockClock) -> None:
    """A lost store: until everything was looked at, no value in a file is taken for an original."""
    refused = SourceError("cgroups", "cannot be listed")
    node = LiveNode(tmp_path)
    Path(node.store).write_bytes(b"no store" * 1000)
    with node.agent() as agent:
        assert agent.writes.judge.lost
        worker = agent.control.reconciler
        async with trio.open_nursery() as nursery:
            with patch.object(TreeSource, "scan_gently", side_effect=refused):
                nursery.start_soon(worker.run)
                await until(lambda: worker.problem)
                agent.hub.changed.mark(event)
                await until(lambda: worker.looks and worker.busy_since is None)
                assert (agent.writes.judge.lost, worker.ready.is_set(), worker.problem) == (True, False, str(refused))
            mock_clock.jump(2)
            await worker.ready.wait()
            assert (agent.writes.judge.lost, worker.problem) == (False, None)
            nursery.cancel_scope.cancel()
