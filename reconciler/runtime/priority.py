"""The loop's scheduling: real-time while it waits and while a container starts, else a nice value.

A few milliseconds are left between the runtime's signal and the container's first instruction. On a busy node the loop
would spend them waiting for a CPU whatever its nice value, which counts within its own cgroup (or session) only. So it
waits under SCHED_FIFO, and keeps that priority only for a container in creation. Its work is paced, or has a budget of
CPU time (`SHARE`); the kernel bounds a step that does not yield (`_STEP_S`, `_KILL_S`).

Source: sched(7), setrlimit(2), trio's Instrument.
"""

import errno
import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from types import FrameType
from typing import Final, final

import trio
from msgspec import Struct

from cgroupfs.errors import errno_name
from cgroupfs.log import get_log
from reconciler.runtime.stint_timer import TIMER

_LOG: Final = get_log("priority")
_LEVEL: Final = 1
"""The lowest real-time priority: above every usual task, and below everything that the kernel or others run so."""
SHARE: Final = 0.2
"""Of one CPU: so much of it the loop may use at real-time priority in the long run.

The budget grows by it with time, up to one slice. When it is used up, the work continues at the nice value: neither a
long pass nor starts without end keep a CPU from the pods. Long work yields each millisecond
(`reconciler.runtime.cooperative`), so this is the usual end.
"""
_PAUSE_AFTER_S: Final = 0.0003
"""Without the stint timer: CPU time of ordinary work after which it leaves the CPU for a moment (`_PAUSE_S`)."""
_PAUSE_S: Final = 0.00005
_STEP_S: Final = 0.1
"""So long a step that does not yield stays at real-time priority (RLIMIT_RTTIME, whose SIGXCPU has a handler).

The kernel counts in ticks of up to 10 ms.
"""
_KILL_S: Final = 3.0
"""The kernel sends SIGKILL when not even that handler has run by then."""
_ADVICE: Final = "CAP_SYS_NICE, and where the kernel shares out real-time CPU: cpu.rt_runtime_us of the daemon's cgroup"


class PriorityCalls:
    """The system calls about the calling thread, and its process's limit. Errors: `OSError`, `ValueError`."""

    def set_scheduler(self, policy: int, level: int) -> None:
        """See sched_setscheduler(2). The threads and programs that this one starts get neither of its priorities."""
        os.sched_setscheduler(0, policy | os.SCHED_RESET_ON_FORK, os.sched_param(level))

    def set_nice(self, nice: int) -> None:
        os.setpriority(os.PRIO_PROCESS, 0, nice)

    def limit(self, soft_us: int, hard_us: int) -> None:
        """RLIMIT_RTTIME, never above a hard limit that exists. Children inherit it; it is for real-time tasks only."""
        _, most = resource.getrlimit(resource.RLIMIT_RTTIME)
        if most != resource.RLIM_INFINITY:
            hard_us = min(hard_us, most)
        resource.setrlimit(resource.RLIMIT_RTTIME, (min(soft_us, hard_us), hard_us))

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def used(self) -> float:
        """CPU seconds of the calling thread."""
        return time.thread_time()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


class PriorityState(StrEnum):
    OFF = "off"
    REAL_TIME = "real-time"
    REFUSED = "refused"


class PriorityStatus(Struct, frozen=True, kw_only=True):
    """``problem``: why not all that is configured is in force, "" if it is.

    ``lowered``: times that work for a starting container used up its budget and continued at the nice value.
    ``overruns``: times that the kernel's limit ended a step that did not yield.
    """

    state: PriorityState
    nice: int
    lowered: int = 0
    overruns: int = 0
    problem: str = ""


@final
class LoopPriority(trio.abc.Instrument):
    """The scheduling class of the loop: real-time while it waits or a container starts, else the nice value.

    All methods are called in the loop's thread.
    """

    def __init__(
        self, *, nice: int, slice_s: float, starting: Callable[[], bool], calls: PriorityCalls | None = None
    ) -> None:
        """``slice_s``: CPU seconds of work at real-time priority at a time; 0 for none at all.

        ``starting``: whether a container is in creation.
        """
        self._nice = nice
        self._slice_s = slice_s
        self._starting = starting
        self._calls = calls if calls is not None else PriorityCalls()
        self._wanted = False
        """Between `start` and `stop`, where the kernel has allowed it."""
        self._urgent = False
        """The loop has the real-time priority now."""
        self._budget_s = slice_s
        self._at = self._used = 0.0
        """When the budget was accounted last, and the CPU time until then."""
        self._paused = 0.0
        """The CPU time until the last pause or wait."""
        self._spent = False
        """The budget was used up since the last wait: the work continues at the nice value until then."""
        self._lowered = 0
        self._overruns = 0
        self._problem = ""

    @property
    def status(self) -> PriorityStatus:
        """What is in force, and how often a bound was reached."""
        state = PriorityState.OFF
        if self._slice_s and self._problem:
            state = PriorityState.REFUSED
        elif self._wanted:
            state = PriorityState.REAL_TIME
        return PriorityStatus(
            state=state, nice=self._nice, lowered=self._lowered, overruns=self._overruns, problem=self._problem
        )

    @property
    def is_real_time(self) -> bool:
        """Whether the loop may have the real-time priority: it has it while it waits."""
        return self._wanted and not self._problem

    def charge_budget(self) -> float:
        """Charge the budget with what this step has used so far. What is left of it, in CPU seconds.

        With nothing left, work at this priority continues with pauses only.
        """
        self._account()
        return self._budget_s

    def start(self) -> None:
        """Take the configured priorities. A refusal is logged and in `status`; the best that is allowed remains."""
        try:
            # The usual policy, but with the flag that keeps worker threads from the nice value set below.
            self._calls.set_scheduler(os.SCHED_OTHER, 0)
        except OSError as exc:
            _LOG.warning("worker threads will have the priority of the main loop", error=errno_name(exc.errno))
        try:
            self._calls.set_nice(self._nice)
        except OSError as exc:
            self._problem = f"nice {self._nice}: {errno_name(exc.errno)}"
            _LOG.warning("cannot set the scheduling priority", wanted=self._nice, error=errno_name(exc.errno))
        if not self._slice_s:
            return
        try:
            self._limit()
            signal.signal(signal.SIGXCPU, self._overrun)
            self._calls.set_scheduler(os.SCHED_FIFO, _LEVEL)
        except (OSError, ValueError) as exc:
            code = exc.errno if isinstance(exc, OSError) else errno.EINVAL
            self._problem = f"real-time priority: {errno_name(code)}"
            _LOG.warning(
                "no real-time priority: on a busy node more settings come after a container's first instruction",
                error=errno_name(code),
                advice=_ADVICE if code == errno.EPERM else "",
            )
            return
        self._wanted = self._urgent = True
        self._at, self._used = self._calls.now(), self._calls.used()
        trio.lowlevel.add_instrument(self)
        _LOG.info("the loop waits at real-time priority", slice_ms=round(self._slice_s * 1000, 1))

    def stop(self) -> None:
        """Take the nice value until the process ends: a restore at the end may take seconds."""
        if self._wanted:
            self._wanted = False
            # trio itself removes one that has failed; an orderly end, with its restore, follows all the same.
            with suppress(KeyError):
                trio.lowlevel.remove_instrument(self)
            self._lower()

    def before_io_wait(self, timeout: float) -> None:
        """The loop has nothing to do for ``timeout`` seconds; 0: it checks for events between two steps."""
        if timeout > 0:
            self._account()
            # A wait needs no CPU; whether the work after it may have one at once is decided then.
            self._paused = self._used
            self._spent = False
            if not self._urgent:
                self._raise()

    def after_io_wait(self, timeout: float) -> None:  # noqa: ARG002 - trio calls it so
        self._count()
        self._decide()

    def _decide(self) -> None:
        starting = self._starting()
        if starting and not self._urgent and TIMER.installed:
            # `_count` has left it out.
            self._account()
        if self._urgent:
            # Where every CPU is busy the work for a creation is paced instead (`StintTimer.follow_creation`; not on
            # Linux 6.13 to 6.18.44): two fifths of a CPU, and nothing waits longer than for a stint.
            if starting and self._budget_s <= 0 and not TIMER.paces_creation:
                self._lowered += 1
                self._spent = True
                self._lower()
            elif not starting:
                # Neither a container in creation, nor an unread event that may be of one. What the loop took from the
                # online pod on this CPU would be that pod's latency: twice the p99 of requests of 3 ms were measured,
                # with 10 ms at once for any work.
                self._lower()
        elif starting and (TIMER.paces_creation or (not self._spent and self._budget_s > 0)):
            # It appeared in the midst of other work, or every CPU is busy now. A pause at the nice value would last
            # until the thread gets a CPU again.
            self._raise()
        # With the timer ordinary work leaves the CPU after each stint of a tenth of a millisecond.
        elif not starting and not TIMER.installed and self._used - self._paused > _PAUSE_AFTER_S:
            self._calls.pause(_PAUSE_S)
            self._paused = self._used

    def _count(self) -> None:
        """Account where a decision may depend on it: at the nice value the budget grows with time only."""
        if self._urgent or not TIMER.installed:
            self._account()

    def _account(self) -> None:
        now, used = self._calls.now(), self._calls.used()
        grown = min(self._slice_s, self._budget_s + SHARE * (now - self._at))
        if self._urgent and not TIMER.paces_creation:
            # A step may overdraw it: paid back, or steps without end would have more than the share.
            grown = max(-self._slice_s, grown - (used - self._used))
        self._budget_s = grown
        self._at, self._used = now, used

    def _raise(self) -> None:
        try:
            self._calls.set_scheduler(os.SCHED_FIFO, _LEVEL)
        except OSError as exc:
            # Moved into a cgroup without real-time share, or the right was taken away. Tried at every wait.
            self._problem = f"real-time priority: {errno_name(exc.errno)}"
        else:
            self._urgent, self._problem = True, ""

    def _lower(self) -> None:
        self._urgent = False
        try:
            self._calls.set_scheduler(os.SCHED_OTHER, 0)
        except OSError as exc:
            self._problem = f"usual priority: {errno_name(exc.errno)}"

    def _overrun(self, _number: int, _frame: FrameType | None) -> None:
        """SIGXCPU: in the main thread, between two of Python's instructions."""
        self._overruns += 1
        self._lower()
        # At each signal the kernel raises the limit by a second.
        self._limit()

    def _limit(self) -> None:
        self._calls.limit(round(_STEP_S * 1e6), round(_KILL_S * 1e6))
