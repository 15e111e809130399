"""Work that takes long lets others run every millisecond, on the loop and beside it."""

import sys
import time
from collections.abc import Iterator

import pytest
import trio

from reconciler.runtime.cooperative import TimeSlice, share_interpreter
from tests.lag import Lag


@pytest.fixture
def shared() -> Iterator[None]:
    before = sys.getswitchinterval()
    share_interpreter()
    yield
    sys.setswitchinterval(before)


def compute(seconds: float) -> None:
    """Nothing but Python, without a system call that would let go of the interpreter."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(100))


@pytest.mark.usefixtures("shared")
async def test_a_thread_that_computes_keeps_the_loop_waiting_for_a_slice_only() -> None:
    lag = Lag()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lag.measure)
        await trio.to_thread.run_sync(compute, 1.0)
        nursery.cancel_scope.cancel()
    # By Python's own interval half of them are more than 5 ms late.
    assert sorted(lag.ours)[len(lag.ours) // 2] < 0.004


async def test_long_work_on_the_loop_lets_others_run() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        slices = TimeSlice()
        for _ in range(20):
            compute(0.0015)
            await slices.checkpoint()
        nursery.cancel_scope.cancel()
    assert turns >= 19
