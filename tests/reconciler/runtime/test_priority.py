"""The loop's priority: real-time while it waits, a budget of CPU time for the work after that, refusals."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from reconciler.runtime import priority as priority_module
from reconciler.runtime.priority import SHARE, LoopPriority, PriorityCalls, PriorityState
from reconciler.runtime.stints import LoopTimer

SLICE_S = 0.01


class FakeCalls(PriorityCalls):
    """Notes what is in force. ``refuse``: by policy, the errno that the kernel answers. ``starting``: the node's."""

    def __init__(self) -> None:
        self.policy = os.SCHED_OTHER
        self.level = 0
        self.nice = 0
        self.soft_us = self.hard_us = 0
        self.changes = 0
        self.refuse: dict[int, int] = {}
        self.wall = 100.0
        self.cpu = 5.0
        self.starting = True
        self.pauses = 0

    def set_scheduler(self, policy: int, level: int) -> None:
        if code := self.refuse.get(policy):
            raise OSError(code, os.strerror(code))
        self.policy, self.level = policy, level
        self.changes += 1

    def set_nice(self, nice: int) -> None:
        self.nice = nice

    def limit(self, soft_us: int, hard_us: int) -> None:
        self.soft_us, self.hard_us = soft_us, hard_us

    def now(self) -> float:
        return self.wall

    def used(self) -> float:
        return self.cpu

    def work(self, seconds: float) -> None:
        self.wall += seconds
        self.cpu += seconds

    def pause(self, seconds: float) -> None:
        self.pauses += 1
        self.wall += seconds

    def sleep(self, seconds: float) -> None:
        self.wall += seconds


@contextmanager
def started(
    *, slice_s: float = SLICE_S, starting: bool = True, **refuse: int
) -> Iterator[tuple[FakeCalls, LoopPriority]]:
    """Inside a loop, whose own waits do not count here: what is done inside counts as the loop."""
    calls = FakeCalls()
    calls.starting = starting
    calls.refuse = {getattr(os, policy): code for policy, code in refuse.items()}
    priority = LoopPriority(nice=-10, slice_s=slice_s, starting=lambda: calls.starting, calls=calls)
    priority.start()
    try:
        yield calls, priority
    finally:
        priority.stop()


def event(calls: FakeCalls, priority: LoopPriority) -> None:
    """A wait that an event ends."""
    priority.before_io_wait(1.0)
    calls.sleep(0.5)
    priority.after_io_wait(1.0)


def step(calls: FakeCalls, priority: LoopPriority, seconds: float) -> int:
    """One step of work; the policy that is in force after it."""
    calls.work(seconds)
    priority.before_io_wait(0.0)
    priority.after_io_wait(0.0)
    return calls.policy


@pytest.fixture(params=[False, True], ids=["pauses", "stint timer"], autouse=True)
def has_timer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With the timer the CPU time is read only where a decision depends on it."""
    installed: bool = request.param
    monkeypatch.setattr(priority_module, "TIMER", SimpleNamespace(installed=installed, paces_creation=False))
    return installed


async def test_the_loop_waits_and_begins_its_work_at_real_time_priority() -> None:
    with started() as (calls, priority):
        assert (calls.policy, calls.level, calls.nice) == (os.SCHED_FIFO, 1, -10)
        assert 0 < calls.soft_us < calls.hard_us
        before = calls.changes
        for _ in range(100):
            priority.before_io_wait(1.0)
            calls.sleep(0.1)
            priority.after_io_wait(1.0)
            assert calls.policy == os.SCHED_FIFO
            calls.work(SLICE_S / 2)
        # A calm loop makes no system call for it.
        assert calls.changes == before
        assert priority.status.state is PriorityState.REAL_TIME
        assert priority.status.lowered == 0
    assert calls.policy == os.SCHED_OTHER


async def test_long_work_goes_on_at_the_nice_value_and_the_next_wait_is_real_time_again() -> None:
    with started() as (calls, priority):
        event(calls, priority)
        at = [step(calls, priority, 0.001) for _ in range(30)]
        share = at.count(os.SCHED_FIFO) * 0.001
        assert SLICE_S <= share <= SLICE_S / (1 - SHARE) + 0.002
        assert at == sorted(at, reverse=True)
        assert priority.status.lowered == 1
        priority.before_io_wait(0.5)
        assert calls.policy == os.SCHED_FIFO


async def test_events_without_end_get_no_more_than_the_share() -> None:
    """A wait that is over at once is none: the kernel would never count it as the end of a stretch either."""
    with started() as (calls, priority):
        realtime = 0.0
        began = calls.wall
        for _ in range(20_000):
            priority.before_io_wait(1.0)
            priority.after_io_wait(1.0)
            if calls.policy == os.SCHED_FIFO:
                realtime += 0.0005
            calls.work(0.0005)
        assert realtime <= SHARE * (calls.wall - began) + 2 * SLICE_S
        assert realtime >= SHARE * (calls.wall - began) / 2


async def test_paced_work_keeps_the_priority_and_uses_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = SimpleNamespace(installed=True, paces_creation=True)
    monkeypatch.setattr(priority_module, "TIMER", timer)
    with started() as (calls, priority):
        event(calls, priority)
        for _ in range(100):
            assert (step(calls, priority, 0.001), priority.charge_budget() > 0) == (os.SCHED_FIFO, True)
        timer.paces_creation = False
        assert (step(calls, priority, 2 * SLICE_S), priority.charge_budget() > 0) == (os.SCHED_OTHER, False)
        assert priority.is_real_time


async def test_paced_work_gets_the_priority_in_the_midst_of_other_work_whatever_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timer = SimpleNamespace(installed=True, paces_creation=False)
    monkeypatch.setattr(priority_module, "TIMER", timer)
    with started() as (calls, priority):
        event(calls, priority)
        assert step(calls, priority, 2 * SLICE_S) == os.SCHED_OTHER
        # Every CPU is busy from now on.
        timer.paces_creation = True
        assert (step(calls, priority, 0.001), priority.charge_budget() > 0) == (os.SCHED_FIFO, False)


async def test_late_work_is_paced_when_its_budget_is_used_up_and_keeps_the_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def follow(*, creating: bool, paces: bool) -> None:
        timer.paces_creation = creating and paces

    timer: Any = SimpleNamespace(
        installed=True, paces_creation=False, run=lambda: None, rest=lambda: None, follow_creation=follow
    )
    monkeypatch.setattr(priority_module, "TIMER", timer)
    with started() as (calls, priority):
        # As of the daemon: it asks before the priority decides.
        loop = LoopTimer(lambda: True, lambda: priority.is_real_time and priority.charge_budget() <= 0, timer)
        event(calls, priority)
        for paced in (False, True):
            calls.work(0.9 * SLICE_S)
            loop.after_io_wait(0.0)
            priority.after_io_wait(0.0)
            assert (timer.paces_creation, calls.policy) == (paced, os.SCHED_FIFO)
        assert priority.status.lowered == 0


async def test_without_a_starting_container_only_the_wait_is_real_time() -> None:
    with started(starting=False) as (calls, priority):
        for _ in range(20):
            priority.before_io_wait(1.0)
            assert calls.policy == os.SCHED_FIFO
            calls.sleep(0.5)
            priority.after_io_wait(1.0)
            assert calls.policy == os.SCHED_OTHER
            assert step(calls, priority, 0.002) == os.SCHED_OTHER
        # That is the usual end, not a bound that was reached.
        assert priority.status.lowered == 0


async def test_without_the_stint_timer_work_leaves_the_cpu_between_its_steps_and_work_for_a_start_does_not(
    *, has_timer: bool
) -> None:
    pauses = 0 if has_timer else 10
    with started(starting=False) as (calls, priority):
        event(calls, priority)
        assert calls.pauses == 0
        for _ in range(10):
            step(calls, priority, 0.001)
        assert calls.pauses == pauses
        calls.starting = True
        for _ in range(10):
            step(calls, priority, 0.001)
        assert calls.pauses == pauses


async def test_a_container_that_starts_in_the_midst_of_other_work_makes_it_real_time() -> None:
    with started(starting=False) as (calls, priority):
        event(calls, priority)
        assert step(calls, priority, 0.005) == os.SCHED_OTHER
        calls.starting = True
        assert step(calls, priority, 0.001) == os.SCHED_FIFO
        assert step(calls, priority, 0.003) == os.SCHED_FIFO
        calls.starting = False
        assert step(calls, priority, 0.001) == os.SCHED_OTHER


async def test_a_refusal_leaves_the_nice_value_and_says_so() -> None:
    with started(SCHED_FIFO=errno.EPERM) as (calls, priority):
        assert priority.status.state is PriorityState.REFUSED
        assert "EPERM" in priority.status.problem
        assert (calls.policy, calls.nice) == (os.SCHED_OTHER, -10)


async def test_a_right_that_is_taken_away_later_is_a_problem_and_its_return_ends_it() -> None:
    with started() as (calls, priority):
        step(calls, priority, 0.2)
        calls.refuse[os.SCHED_FIFO] = errno.EPERM
        priority.before_io_wait(1.0)
        assert priority.status.state is PriorityState.REFUSED
        assert "EPERM" in priority.status.problem
        del calls.refuse[os.SCHED_FIFO]
        priority.before_io_wait(1.0)
        assert (priority.status.state, priority.status.problem) == (PriorityState.REAL_TIME, "")


def test_an_instrument_that_trio_has_given_up_does_not_disturb_the_end(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(FakeCalls):
        fails = False

        def now(self) -> float:
            if self.fails:
                raise OSError(errno.EINVAL, "clock")
            return super().now()

    async def main() -> None:
        calls = Failing()
        priority = LoopPriority(nice=-10, slice_s=SLICE_S, starting=lambda: True, calls=calls)
        priority.start()
        calls.fails = True
        await trio.sleep(0.001)
        calls.fails = False
        assert "Instrument has been disabled" in caplog.text
        priority.stop()
        assert calls.policy == os.SCHED_OTHER

    trio.run(main)


async def test_zero_is_no_real_time_priority_at_all() -> None:
    with started(slice_s=0.0) as (calls, priority):
        assert (calls.policy, calls.nice, calls.soft_us) == (os.SCHED_OTHER, -10, 0)
        assert priority.status.state is PriorityState.OFF


@pytest.mark.parametrize("lasts", [0.001, 0.05])
def test_it_follows_a_real_loop(lasts: float) -> None:
    """Trio calls it around each wait: the end of a step that took longer than the budget is seen there."""
    calls = FakeCalls()

    async def main() -> None:
        priority = LoopPriority(nice=0, slice_s=SLICE_S, starting=lambda: True, calls=calls)
        priority.start()
        await trio.sleep(1)
        calls.work(lasts)
        await trio.lowlevel.checkpoint()
        assert calls.policy == (os.SCHED_FIFO if lasts < SLICE_S else os.SCHED_OTHER)
        await trio.sleep(1)
        assert priority.status.state is PriorityState.REAL_TIME
        priority.stop()
        assert calls.policy == os.SCHED_OTHER

    trio.run(main, clock=MockClock(autojump_threshold=0))
