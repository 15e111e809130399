"""CPU time of the daemon's own steps and jobs, by component, and the stint timer of its loop.

A step of a trio task, from one checkpoint to the next, is the least that the loop can do at a time; a job of a worker
thread is one call. Without a stint timer (`reconciler.runtime.stint_timer`) a pod's task that wakes up on that CPU may
have to wait for as long, so the long ones are counted by component.

Units: CPU seconds of the calling thread. Source: trio's Instrument, CLOCK_THREAD_CPUTIME_ID in clock_gettime(2).
"""

import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Final, TypeVar, TypeVarTuple, final

import trio
from msgspec import Struct

from reconciler.runtime.counters import Histogram, HistogramValues
from reconciler.runtime.stint_timer import STINT_S, TIMER, StintTimer

_BOUNDS_S: Final = (50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3)
COMPONENT: Final[ContextVar[str]] = ContextVar("component", default="daemon")
"""Whose work it is. Tasks and worker threads inherit it from the task that starts them."""
_T = TypeVar("_T")
_A = TypeVarTuple("_A")


class ComponentWork(Struct, frozen=True, kw_only=True):
    """``long``: steps of more than `STINT_S`. ``longest_s``: of one step."""

    cpu_s: float
    long: int
    longest_s: float


class StintValues(Struct, frozen=True, kw_only=True):
    """A copy of all that was measured. ``steps`` and ``jobs``: of the loop and of worker threads."""

    steps: HistogramValues = Histogram(_BOUNDS_S).values
    jobs: HistogramValues = Histogram(_BOUNDS_S).values
    components: Mapping[str, ComponentWork] = {}


@final
class _Work:
    __slots__ = ("cpu_s", "long", "longest_s")

    def __init__(self) -> None:
        self.cpu_s = self.longest_s = 0.0
        self.long = 0

    def add(self, cpu_s: float) -> None:
        self.cpu_s += cpu_s
        if cpu_s > STINT_S:
            self.long += 1
            self.longest_s = max(self.longest_s, cpu_s)


@final
class Stints(trio.abc.Instrument):
    """Measures every step of a loop, and the jobs given to `in_worker`, between `start` and `stop`."""

    def __init__(self, used: Callable[[], float] = time.thread_time) -> None:
        """``used``: CPU seconds of the calling thread."""
        self._used = used
        self._began = used()
        self._steps = Histogram(_BOUNDS_S)
        self._jobs = Histogram(_BOUNDS_S)
        self._components: dict[str, _Work] = {}

    def start(self) -> None:
        """Measure this loop from now on, and the worker threads of `in_worker`."""
        _MEASURED.set(self)
        self._began = self._used()
        trio.lowlevel.add_instrument(self)

    def stop(self) -> None:
        """Measure no more. Errors: none, also if it was never started."""
        if _MEASURED.get() is self:
            _MEASURED.set(None)
            trio.lowlevel.remove_instrument(self)

    def after_io_wait(self, timeout: float) -> None:  # noqa: ARG002 - trio calls it so
        self._began = self._used()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        # A step begins where the last one ended: one system call, and one call of an instrument, for each.
        used = self._used()
        cpu_s, self._began = used - self._began, used
        self._steps.observe(cpu_s)
        self._of(task.context.get(COMPONENT, "daemon")).add(cpu_s)

    def ended(self, component: str, cpu_s: float) -> None:
        """A worker's job has ended; called in the loop's thread."""
        self._jobs.observe(cpu_s)
        self._of(component).add(cpu_s)

    @property
    def values(self) -> StintValues:
        return StintValues(
            steps=self._steps.values,
            jobs=self._jobs.values,
            components={
                name: ComponentWork(cpu_s=work.cpu_s, long=work.long, longest_s=work.longest_s)
                for name, work in self._components.items()
            },
        )

    def _of(self, component: str) -> _Work:
        # The components are the program's own: their number is bounded.
        work = self._components.get(component)
        if work is None:
            work = self._components[component] = _Work()
        return work


@final
class OncePerPass(trio.abc.Instrument):
    """A condition that several instruments need in each pass of the loop, and that takes system calls: checked once."""

    def __init__(self, check: Callable[[], bool]) -> None:
        self._check = check
        self._running = False
        self._result: bool | None = None

    def start(self) -> None:
        """Keep each pass's result from now on. To be started before the instruments that use it in `before_io_wait`."""
        self._running = True
        trio.lowlevel.add_instrument(self)

    def stop(self) -> None:
        """Keep none. Errors: none, also if it was never started."""
        if self._running:
            self._running, self._result = False, None
            trio.lowlevel.remove_instrument(self)

    def __call__(self) -> bool:
        result = self._result
        if result is None:
            result = self._check()
            self._result = result if self._running else None
        return result

    def before_io_wait(self, timeout: float) -> None:  # noqa: ARG002 - trio calls it so
        # A result from now on also counts after a check for events, a few microseconds later. Before a wait no
        # instrument needs one.
        self._result = None


@final
class LoopTimer(trio.abc.Instrument):
    """Runs the loop thread's stint timer while it works."""

    def __init__(self, starting: Callable[[], bool], may_pace: Callable[[], bool], timer: StintTimer = TIMER) -> None:
        """``starting``: a container is in creation, or an event of one waits. ``may_pace``: work for it may sleep."""
        self._starting = starting
        self._may_pace = may_pace
        self._timer = timer

    def before_io_wait(self, timeout: float) -> None:
        """The loop has nothing to do for ``timeout`` seconds, or (0) checks for events between two steps."""
        if timeout > 0:
            self._timer.rest()

    def after_io_wait(self, timeout: float) -> None:  # noqa: ARG002 - trio calls it so
        starting = self._starting()
        self._timer.follow_creation(creating=starting, paces=starting and self._may_pace())
        self._timer.run()


_MEASURED: Final = trio.lowlevel.RunVar[Stints | None]("stints", None)


async def in_worker(
    job: Callable[[*_A], _T],
    *args: *_A,
    limiter: trio.CapacityLimiter | None = None,
    abandon_on_cancel: bool = False,
) -> _T:
    """`trio.to_thread.run_sync`, whose CPU time counts as the calling task's component's.

    The thread has the stint timer meanwhile, unless the job may be abandoned.
    """
    spent_s = 0.0

    def timed() -> _T:
        nonlocal spent_s
        began = time.thread_time()
        # A job that may be abandoned waits in the kernel: a signal would end a reclaim half-way, or wake up a wait that
        # hangs.
        if not abandon_on_cancel:
            TIMER.run()
        try:
            return job(*args)
        finally:
            # Not only while it sleeps: its next job may be a write of `cgroupfs.writer`, which waits in the kernel.
            TIMER.stop()
            spent_s = time.thread_time() - began

    try:
        return await trio.to_thread.run_sync(timed, limiter=limiter, abandon_on_cancel=abandon_on_cancel)
    finally:
        if (stints := _MEASURED.get()) is not None:
            # Of an abandoned job it is what it had used when it ended, 0 as a rule.
            stints.ended(COMPONENT.get(), spent_s)
