"""The waiting primitive on trio's mock clock: times, coalescing, and nothing lost by cancelling."""

import math

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from reconciler.runtime.wakeup import WakeUp, beat_after, next_beat


class Worker:
    """A loop that works for ``work_s`` each time; ``log`` has when it began and whether it was woken."""

    def __init__(self, wake: WakeUp, period_s: float = math.inf, *, work_s: float = 0.0, settle_s: float = 0.0) -> None:
        self.wake = wake
        self.period_s = period_s
        self.work_s = work_s
        self.settle_s = settle_s
        self.log: list[tuple[float, bool]] = []

    async def run(self) -> None:
        began = trio.current_time()
        while True:
            woken = await self.wake.wait(self.period_s, settle_s=self.settle_s)
            self.log.append((trio.current_time() - began, woken))
            await trio.sleep(self.work_s)


@pytest.mark.parametrize(
    ("worker", "delays_s", "log"),
    [
        pytest.param(Worker(WakeUp(), 10.0), [3], [(3, True), (13, False)], id="woken, and when it is time"),
        pytest.param(Worker(WakeUp()), [0] * 100, [(0, True)], id="many before a wait are one"),
        pytest.param(
            Worker(WakeUp(), 100.0, work_s=5.0), [1, 1, 1], [(1, True), (6, True)], id="one during the work is kept"
        ),
        pytest.param(
            Worker(WakeUp(), settle_s=2.0),
            [1, 1, 0.5, 1.5],
            [(3, True), (6, True)],
            id="what follows within the settling time is the same",
        ),
    ],
)
async def test_it_works_when_woken_and_when_it_is_time(
    nursery: trio.Nursery,
    autojump_clock: MockClock,
    worker: Worker,
    delays_s: list[float],
    log: list[tuple[float, bool]],
) -> None:
    """Woken after these delays, each after the one before, and left alone for a while then."""
    nursery.start_soon(worker.run)
    for delay_s in delays_s:
        if delay_s:
            await trio.sleep(delay_s)
        worker.wake.set()
    await trio.sleep(18)
    assert worker.log == log


async def test_a_deadline_within_the_settling_time_ends_it(autojump_clock: MockClock) -> None:
    wake = WakeUp()
    wake.set()
    began = trio.current_time()
    assert await wake.wait(1.0, settle_s=5.0)
    assert trio.current_time() - began == 1.0
    assert not await wake.wait(0.0)


@pytest.mark.parametrize("settle_s", [0.0, 5.0])
async def test_a_cancelled_wait_loses_nothing(settle_s: float, autojump_clock: MockClock) -> None:
    wake = WakeUp()
    with trio.move_on_after(1.0) as scope:
        wake.set()
        scope.cancel()
        await wake.wait(settle_s=settle_s)
    assert scope.cancelled_caught
    assert await wake.wait(0.0)


async def test_a_deadline_that_has_passed_still_sees_the_wake_up_and_lets_others_run(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    wake = WakeUp()
    with trio.testing.assert_checkpoints():
        assert not await wake.wait_until(-math.inf)
    wake.set()
    with trio.testing.assert_checkpoints():
        assert await wake.wait_until(-math.inf)


async def test_what_is_taken_back_wakes_nobody(autojump_clock: MockClock) -> None:
    wake = WakeUp()
    wake.set()
    wake.clear()
    assert not await wake.wait(1.0)


async def test_a_wake_up_that_is_taken_back_before_the_task_runs_does_not_end_its_wait(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    worker = Worker(WakeUp(), 10.0)
    nursery.start_soon(worker.run)
    await trio.sleep(1)
    worker.wake.set()
    worker.wake.clear()
    await trio.sleep(1)
    assert worker.log == []
    worker.wake.set()
    await trio.sleep(1)
    assert worker.log == [(2, True)]


async def test_two_waiting_tasks_are_a_mistake(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    wake = WakeUp()
    nursery.start_soon(wake.wait)
    await trio.sleep(1)
    with pytest.raises(RuntimeError, match="two tasks wait"):
        await wake.wait()


@pytest.mark.parametrize(
    ("now", "seconds", "due"),
    [
        (10.0, 1.0, 11.0),
        (10.3, 1.0, 11.0),
        (10.6, 1.0, 12.0),
        (10.6, 2.0, 12.0),
        (10.3, 10.0, 20.0),
        (10.9, 2.5, 13.0),
        (10.3, 0.1, 10.4),
        (10.3, 0.49, 10.79),
        (10.3, 0.99, 11.0),
        (10.3, 0.5, 11.0),
        (10.24, 0.5, 10.5),
        (10.26, 0.5, 11.0),
    ],
)
async def test_periodic_tasks_work_at_whole_seconds(
    autojump_clock: MockClock, now: float, seconds: float, due: float
) -> None:
    autojump_clock.jump(now)
    assert beat_after(seconds) == pytest.approx(due)


async def test_tasks_of_a_second_share_one_wake_up(autojump_clock: MockClock) -> None:
    del autojump_clock
    wakes: set[float] = set()

    async def task(offset_s: float, seconds: float) -> None:
        await trio.sleep(offset_s)
        while True:
            await next_beat(seconds)
            wakes.add(trio.current_time())

    with trio.move_on_after(30.5):
        async with trio.open_nursery() as nursery:
            for offset_s, seconds in ((0.1, 1.0), (0.45, 1.0), (0.7, 2.0), (0.9, 5.0), (0.2, 10.0)):
                nursery.start_soon(task, offset_s, seconds)
    assert wakes == {float(second) for second in range(1, 31)}


async def test_the_end_of_one_task_leaves_the_others_their_time(autojump_clock: MockClock) -> None:
    del autojump_clock
    woken: list[tuple[str, float]] = []
    scopes = {name: trio.CancelScope() for name in ("first", "second", "third", "fourth")}

    async def task(name: str) -> None:
        with scopes[name]:
            woken.append((name, await next_beat(2.0)))
            assert trio.current_time() == woken[-1][1]

    async with trio.open_nursery() as nursery:
        for name in scopes:
            nursery.start_soon(task, name)
            await trio.testing.wait_all_tasks_blocked()
        # The one that sleeps, and one that it was to wake up; then the one that sleeps instead.
        for name in ("first", "third", "second"):
            scopes[name].cancel()
            await trio.testing.wait_all_tasks_blocked()
    assert woken == [("fourth", 2.0)]
