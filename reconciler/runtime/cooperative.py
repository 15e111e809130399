"""Long work in short slices: neither the fast path's reaction to the runtime nor an online task waits longer than that.

In the loop the work yields explicitly (`TimeSlice`); between worker threads Python switches (`share_interpreter`). Work
whose amount others choose is kept to a share of one CPU (`PacedWork`).
"""

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final, TypeVar, final

import trio

from reconciler.runtime.stint_timer import TIMER, StintTimer

_SLICE_S: Final = 0.0004
_TURN_S: Final = 0.002
"""CPU time after which other tasks of the loop have their turn, where nothing is urgent."""
_SWITCH_S: Final = 0.001
_REST: Final = 10
"""The pause after paced work, as a multiple of the CPU time that it took."""
_DEBT_S: Final = 0.25
"""Owed pauses up to here are not made: a burst is worked on at once."""

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that may be interrupted between any two steps, and its result. The caller decides where it runs."""


def all_steps(steps: Steps[T]) -> T:
    """The result, without an interruption."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def share_interpreter() -> None:
    """For the whole process: no thread but one in a call of C code blocks the loop for longer than a millisecond."""
    # A thread that needs the interpreter waits until the thread that has it makes a system call, or for this interval,
    # 5 ms by default. While 500 pods' resctrl was swept in a thread, the loop's timers were 5.3 ms late in the median
    # (p99 7-11), and with this 1.3 ms (p99 2-5). It costs nothing while only one thread is runnable.
    sys.setswitchinterval(_SWITCH_S)


@final
class TimeSlice:
    """Begins with the work. By the clock and not by a count: one listing costs 10 to 100 µs."""

    def __init__(self, timer: StintTimer = TIMER) -> None:
        self._timer = timer
        self._since = time.monotonic()
        self._turn = time.thread_time()

    @property
    def is_over(self) -> bool:
        """Whether a slice has passed since others could run."""
        return time.monotonic() - self._since > _SLICE_S

    async def checkpoint(self) -> None:
        now, timer = time.monotonic(), self._timer
        if now - self._since <= _SLICE_S:
            return
        # The stint timer keeps the work from delaying online tasks. So it yields at once only where an event waits that
        # may be of a container in creation, and else seldom: a pass of the loop costs as much as a quarter of a slice.
        if not timer.installed or time.thread_time() - self._turn > _TURN_S or timer.is_urgent(now, _SLICE_S):
            await trio.lowlevel.checkpoint()
            self._turn = time.thread_time()
        self._since = time.monotonic()


async def measured_steps(steps: Steps[T], slices: TimeSlice) -> tuple[T, float]:
    """The result, with turns for others in between, and the CPU seconds that it took of this thread."""
    spent_s, began = 0.0, time.thread_time()
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, spent_s + time.thread_time() - began
        if slices.is_over:
            spent_s += time.thread_time() - began
            await slices.checkpoint()
            began = time.thread_time()


@final
class PacedWork:
    """Pauses in proportion to the CPU time of work whose amount tenants choose: a tenth of a CPU in the long run."""

    def __init__(self) -> None:
        self._debt_s = 0.0
        self._paid_at = 0.0

    @contextmanager
    def measured(self) -> Generator[None]:
        """Work of the calling thread, without a checkpoint in it."""
        began = time.thread_time()
        try:
            yield
        finally:
            self._debt_s += _REST * (time.thread_time() - began)

    def charge(self, cpu_s: float) -> None:
        """Work that cannot be measured by itself, such as that of a library between two calls."""
        self._debt_s += _REST * cpu_s

    async def rest(self) -> None:
        """Make the pause that is owed, if it is long."""
        now = trio.current_time()
        self._debt_s = max(0.0, self._debt_s - (now - self._paid_at))
        self._paid_at = now
        if self._debt_s > _DEBT_S:
            await trio.sleep(self._debt_s)
