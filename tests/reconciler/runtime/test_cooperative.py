"""Work that takes long lets others run every millisecond, on the loop and beside it."""

import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from reconciler.runtime.cooperative import PacedWork, TimeSlice, share_interpreter
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
    assert sys.getswitchinterval() == pytest.approx(0.001)
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


@pytest.mark.parametrize(
    ("installed", "urgent", "least", "most"), [(False, False, 7, 8), (True, True, 7, 8), (True, False, 1, 3)]
)
async def test_with_a_stint_timer_a_turn_of_others_is_longer_unless_an_event_is_urgent(
    monkeypatch: pytest.MonkeyPatch, *, installed: bool, urgent: bool, least: int, most: int
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    timer: Any = SimpleNamespace(installed=installed, is_urgent=lambda *_: urgent)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await trio.lowlevel.checkpoint()
        turns = 0
        slices = TimeSlice(timer)
        for _ in range(8):
            clock[0] += 0.0006
            await slices.checkpoint()
        nursery.cancel_scope.cancel()
    assert least <= turns <= most


async def test_work_above_a_tenth_of_a_cpu_is_followed_by_a_pause(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    used = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: used[0])
    pace = PacedWork()
    await trio.sleep(1)
    await pace.rest()
    began = trio.current_time()
    for cost_s, pause_s in ((0.02, 0.0), (0.02, 0.4), (0.01, 0.0), (1.0, 10.1)):
        before = trio.current_time()
        with pace.measured():
            used[0] += cost_s
        await pace.rest()
        assert trio.current_time() - before == pytest.approx(pause_s)
    assert trio.current_time() - began == pytest.approx(10 * used[0])
