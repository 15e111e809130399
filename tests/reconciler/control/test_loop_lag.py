"""How late the loop's timers come is counted, by the agent's own ticker."""

import time
from pathlib import Path

import trio

from tests.reconciler.cli.livenode import LiveNode


async def test_a_loop_that_was_busy_is_counted_as_late(tmp_path: Path) -> None:
    node = LiveNode(tmp_path, "v2")
    with node.agent() as agent:
        async with trio.open_nursery() as nursery:
            await nursery.start(agent.ticker.run)
            time.sleep(1.3)  # noqa: ASYNC251  # the loop is kept busy past the next tick
            with trio.fail_after(10):
                while agent.counters.values.lag.count < 2:  # noqa: ASYNC110  # nothing tells of a counter
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    assert agent.counters.values.lag.total >= 0.2
