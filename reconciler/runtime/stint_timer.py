"""Makes a thread of the daemon leave its CPU after each `STINT_S` of work, between any two instructions.

The kernel signals the thread after each `STINT_S` of its CPU time, and the handler is a function of the C library:

- sched_yield(2) for ordinary work before Linux 6.6: pods' tasks run, and the thread continues when the kernel's weights
  give it the CPU again. Unlike after a sleep its group keeps its lag, so that work is not starved;
- a sleep to the next multiple of `PACE_S` or `CREATION_PACE_S`, where a large weight or the real-time priority would
  keep the CPU: the daemon's start and end, and a container in creation (`StintTimer.pace`, `.follow_creation`).

Jobs that may wait in the kernel have no timer (`reconciler.runtime.stints`).

Source: perf_event_open(2), F_SETSIG in fcntl(2), timer_create(2) with SIGEV_THREAD_ID, sched_yield(2), the kernel's
perf_swevent_hrtimer(), wakeup_gran() and pick_next_entity().
"""

# Few modules: the timer begins before the program's other imports.
import ctypes
import errno
import fcntl
import math
import os
import signal
import struct
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, Protocol, final

from cgroupfs.scheduling import has_eevdf, runner_keeps_cpu

STINT_S: Final = 100e-6
PACE_S: Final = 500e-6
"""A fifth of a CPU. Start and end are seconds of work, for which the weight of late work is too little beside busy
CPUs, and a turn of which is then up to a millisecond. So the group has the usual weight then, with which a wake-up
gets the CPU at once."""
CREATION_PACE_S: Final = 250e-6
"""Two fifths. Unpaced the work before a container's signal is some milliseconds at once in which no online task runs,
as nothing preempts its real-time priority."""
_BUSY_AGAIN_S: Final = 0.005
_SIGNAL: Final = signal.SIGALRM
_CLOCK_MONOTONIC: Final = 1
_SIGEV_THREAD_ID: Final = 4
_SA_SIGINFO: Final = 4
"""The handler has three arguments, of which the second is a place that it may write to."""
_SA_RESTART: Final = 0x10000000

_PERF_EVENT_OPEN: Final = {"x86_64": 298, "aarch64": 241}
# type, size, config, sample_period, sample_type, read_format, flags, wakeup_events, bp_type, config1: up to 64 bytes,
# which every kernel knows. PERF_TYPE_SOFTWARE, PERF_COUNT_SW_TASK_CLOCK, disabled.
_CPU_CLOCK: Final = struct.pack("=IIQQQQQIIQ", 1, 64, 1, round(STINT_S * 1e9), 0, 0, 1, 0, 0, 0)
_ENABLE: Final = 0x2400
_DISABLE: Final = 0x2401
_FLAG_CLOEXEC: Final = 8
_F_SETSIG: Final = 10
_F_SETOWN_EX: Final = 15
_THIS_THREAD: Final = 0
_TFD_CLOEXEC: Final = os.O_CLOEXEC
_LOAD: Final = "/proc/loadavg"
_RATE: Final = "/proc/sys/kernel/perf_event_max_sample_rate"


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("first", _Timespec))


class _Sigaction(ctypes.Structure):
    """As glibc and musl have it on x86-64 and arm64: a set of 1024 signals."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class _Sigevent(ctypes.Structure):
    """As the kernel has it: 64 bytes, the thread's id first in the union."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("rest", ctypes.c_byte * (64 - ctypes.sizeof(ctypes.c_void_p) - 12)),
    )


def _spec(seconds: float) -> _Itimerspec:
    each = _Timespec(0, round(seconds * 1e9))
    return _Itimerspec(each, each)


_EACH_STINT: Final = _spec(STINT_S)
_STOPPED: Final = _spec(0)


# The interpreter remains locked in these short calls: what another thread does with a timer is in order with them.


def _makes_event() -> Callable[[], "_CpuEvent"]:
    """Errors: `OSError` where an event would stop for a while after some signals."""
    with open(_RATE, encoding="ascii", newline="\n") as file:
        if int(file.read()) * STINT_S < 2:
            raise OSError(errno.ERANGE, f"{_RATE} is below {2 / STINT_S:g}")
    return partial(_CpuEvent, ctypes.PyDLL(None, use_errno=True))


def _makes_timer() -> Callable[[], "_ClockTimer"]:
    """Errors: `OSError`."""
    # timer_create is in the C library itself, and in librt before glibc 2.34.
    library = ctypes.PyDLL(None, use_errno=True)
    has_timers = hasattr(library, "timer_create")
    return partial(_ClockTimer, library if has_timers else ctypes.PyDLL("librt.so.1", use_errno=True))


def _is_busy() -> bool:
    """Whether more tasks than the node has CPUs want one; this thread is one of them."""
    with suppress(OSError, ValueError, IndexError), open(_LOAD, encoding="ascii", newline="\n") as file:
        return int(file.read().split()[3].partition("/")[0]) > (os.cpu_count() or 1)
    return False


class _ThreadTimer(Protocol):
    """What signals the thread that has made it, until nothing refers to it any more."""

    running: bool
    counts_sleep: bool
    """It also expires while the thread sleeps."""

    def run(self) -> None:
        """From now on, once in each stint."""

    def stop(self) -> None:
        """No signal from now on. Another thread may call this."""


@final
class _CpuEvent:
    """A perf event that counts the calling thread's CPU time. Errors: `OSError`.

    It needs no hardware counter and no buffer. A thread of another process, such as a child, is not counted and gets no
    signal. No real-time signal: they queue.
    """

    counts_sleep = False

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._ioctl, self._close = library.ioctl, os.close
        self._fd = -1
        self.running = False
        if (number := _PERF_EVENT_OPEN.get(os.uname().machine)) is None:
            raise OSError(errno.ENOSYS, "perf_event_open has no known number here")
        place = (ctypes.c_int(0), ctypes.c_int(-1), ctypes.c_int(-1), ctypes.c_ulong(_FLAG_CLOEXEC))
        self._fd = library.syscall(ctypes.c_long(number), ctypes.c_char_p(_CPU_CLOCK), *place)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), f"perf_event_open: {os.strerror(ctypes.get_errno())}")
        fcntl.fcntl(self._fd, _F_SETOWN_EX, struct.pack("=ii", _THIS_THREAD, threading.get_native_id()))
        fcntl.fcntl(self._fd, _F_SETSIG, _SIGNAL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) | os.O_ASYNC)

    def run(self) -> None:
        self.running = True
        self._ioctl(self._fd, _ENABLE, 0)

    def stop(self) -> None:
        self.running = False
        self._ioctl(self._fd, _DISABLE, 0)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self._close(self._fd)


@final
class _ClockTimer:
    """An interval timer on the monotonic clock for the calling thread. Errors: `OSError`."""

    # It also expires while the thread waits for the CPU after its yield: half of the signals follow at once after
    # another, a tenth more CPU time in all than with `_CpuEvent`.
    counts_sleep = True

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library
        self._id = ctypes.c_void_p()
        event = _Sigevent(signo=_SIGNAL, notify=_SIGEV_THREAD_ID, thread=threading.get_native_id())
        ctypes.set_errno(0)
        if library.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._id)) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._made = True
        self.running = False

    def run(self) -> None:
        self.running = True
        self._library.timer_settime(self._id, 0, ctypes.byref(_EACH_STINT), None)

    def stop(self) -> None:
        self.running = False
        self._library.timer_settime(self._id, 0, ctypes.byref(_STOPPED), None)

    def __del__(self) -> None:
        # A thread's locals go with it: a timer left behind by each worker thread would reach the limit in days.
        if getattr(self, "_made", False):
            self._library.timer_delete(self._id)


class _Locals(threading.local):
    timer: _ThreadTimer | None = None


@final
class StintTimer:
    """Of the whole process. Until `install`, and where that was refused, the other methods do nothing."""

    def __init__(self) -> None:
        self._make: Callable[[], _ThreadTimer] | None = None
        self.refused = ""
        """Why there are no perf events, and so no pauses: timers on the clock for ordinary work; "" if there are."""
        self._locals = _Locals()
        self._timers: weakref.WeakValueDictionary[int, _ThreadTimer] = weakref.WeakValueDictionary()
        """By the kernel's id of the thread."""
        self._held = False
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._ordinary = False
        """Whether work that no container in creation waits for has stints.

        Not with EEVDF (6.6): a task that yields forfeits the rest of its slice and has next to nothing of a busy CPU
        (more than 100 s for 0.3 s of work beside eight busy processes on 6.18), and one that sleeps instead waits for a
        new deadline, 60 ms at 50 shares, for each stint.
        """
        self._may_pace = False
        self.paced = False
        """At the daemon's start and end: after a stint the threads sleep, instead of a yield."""
        self.paces_creation = False
        """The same while a container is in creation."""
        self._each_s = 0.0
        """After a stint the threads sleep to the next multiple; 0: they yield."""
        self._loop = 0
        """The kernel's id of the thread whose work is paced for a container in creation; 0: none."""
        self._busy, self._busy_at = False, -math.inf
        self._unread: Callable[[], bool] = lambda: True
        self._asked_at = -math.inf

    def ask(self, unread: Callable[[], bool]) -> None:
        """``unread`` says from now on whether an event waits to be read that may be of a container in creation."""
        self._unread = unread

    def is_urgent(self, now: float, again_s: float) -> bool:
        """Whether one waits, asked at most once in ``again_s``: the slices of works within each other end together."""
        if now - self._asked_at < again_s:
            return False
        self._asked_at = now
        return self._unread()

    def install(self, release: str = "") -> str:
        """Take the signal, in the main thread. What prevents it; "" if nothing does, or where there is none.

        Called again it does nothing. ``release``: of another kernel than the running one.
        """
        if self._make is not None:
            return ""
        release = release or os.uname().release
        # Paced work was late there: on 6.18.44 at a load of 16 the settings of 43 of 50 containers were in place at the
        # first instruction, unpaced 49.
        if runner_keeps_cpu(release):
            return ""
        self._ordinary = not has_eevdf(release)
        # A small weight alone is not enough (traced on 5.10: kernel's /proc/sched_debug): on Linux up to 6.5 (CFS) such
        # a group is picked only when it lags behind kubepods by the wake-up granularity (1 ms and more) divided by its
        # weight, as each sleep of an online task makes kubepods the next buddy. It then has that lag as credit: about
        # 1 ms of CPU time, in which nothing of a pod preempts it; Python steps between two checkpoints take up to 3 ms.
        try:
            self._handle("sched_yield")
            timer = self._own(_makes_event())
            with suppress(AttributeError):
                self._may_pace = self._makes_pace()
        except (OSError, AttributeError) as exc:
            # A seccomp filter, or no CAP_PERFMON.
            self.refused = str(exc)
            if not self._ordinary:
                # A clock's timer would go on in the sleep of a paced creation.
                return ""
            try:
                timer = self._own(_makes_timer())
            except (OSError, AttributeError) as none:
                return f"no timer: {none}"
        # Not ended by the interpreter's end, which is milliseconds of work.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(timer))
        return ""

    def pace(self, *, on: bool) -> bool:
        """From now on sleep after each stint, where every CPU is busy, or yield as usual; whether it sleeps now."""
        # `_may_pace`: only with perf events, as a timer on the clock would go on during the sleep.
        self.paced = on and self._ordinary and self._may_pace and _is_busy()
        self._use_handler()
        return self.paced

    def follow_creation(self, *, creating: bool, paces: bool) -> None:
        """Called in each pass of the loop: whether a container is in creation, or an event of one waits.

        ``paces``: whether the work for it may sleep: not without a real-time priority, as it would wait for a CPU each
        time, and not late (`reconciler.runtime.own_process`). In the fast path's writes no stint ends.
        """
        paces = creating and paces and self._may_pace and self._was_busy()
        if paces != self.paces_creation:
            # Of the threads only this one has the priority: a sleep of another one ends when it gets a CPU again.
            self._loop = threading.get_native_id() if paces else 0
            self.paces_creation = paces
            self._stop_all()
            self._use_handler()
        self.hold(held=creating and not paces)

    def _was_busy(self) -> bool:
        """Whether every CPU was busy at the last check."""
        now = time.monotonic()
        if now - self._busy_at > _BUSY_AGAIN_S:
            self._busy_at, self._busy = now, _is_busy()
        return self._busy

    def _use_handler(self) -> None:
        each_s = CREATION_PACE_S if self.paces_creation else PACE_S if self.paced else 0.0
        if each_s == self._each_s:
            return
        if each_s:
            # While nothing reads it, it counts without an interrupt.
            self._libc.timerfd_settime(_SIGNAL, 0, ctypes.byref(_spec(each_s)), None)
        if bool(each_s) != bool(self._each_s):
            # eventfd_read(3) has a descriptor for its argument: that of a timer with the signal's number. nanosleep(2)
            # would have slack, which joins its end with the timers that wake up online tasks.
            self._handle("eventfd_read" if each_s else "sched_yield")
        self._each_s = each_s

    def _handle(self, function: str) -> None:
        """Errors: `OSError`, `AttributeError`."""
        # A function of the C library: no Python code runs at a signal, so trio is not woken up, and C code is
        # interrupted, too. SA_RESTART: interrupted system calls begin again, as by PEP 475.
        address = ctypes.cast(getattr(self._libc, function), ctypes.c_void_p).value
        action = _Sigaction(handler=address, flags=_SA_RESTART | _SA_SIGINFO)
        # No other signal may end the sleep in the handler: that would change the errno of the interrupted code.
        ctypes.memset(action.mask, 0xFF, ctypes.sizeof(action.mask))
        if self._libc.sigaction(_SIGNAL, ctypes.byref(action), None) != 0:
            raise OSError(ctypes.get_errno(), f"SIGALRM: {os.strerror(ctypes.get_errno())}")

    def _makes_pace(self) -> bool:
        """Whether the descriptor with the signal's number is a timer now. Errors: `AttributeError`."""
        with suppress(OSError):
            # Some other file of the process that started this one.
            os.fstat(_SIGNAL)
            return False
        if (fd := self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_CLOEXEC)) < 0:
            return False
        if fd != _SIGNAL:
            os.dup2(fd, _SIGNAL, inheritable=False)
            os.close(fd)
        return True

    @property
    def installed(self) -> bool:
        """Whether ordinary work leaves the CPU after each stint."""
        return self._make is not None and self._ordinary

    def run(self) -> None:
        """The calling thread works from now on, and leaves its CPU after each stint."""
        timer = self._locals.timer
        if self._make is None or (timer is not None and timer.running) or not self._may_run():
            return
        try:
            timer = self._own(self._make)
        except OSError:
            # The limit of open files or of pending signals: this thread works without one.
            return
        timer.run()
        if not self._may_run():
            # The loop's thread has held it since the check above.
            timer.stop()

    def rest(self) -> None:
        """The calling thread sleeps until it calls `run` again."""
        if (timer := self._locals.timer) is not None and timer.counts_sleep:
            timer.stop()

    def stop(self) -> None:
        """No signal to the calling thread until it calls `run` again."""
        if (timer := self._locals.timer) is not None and timer.running:
            timer.stop()

    def hold(self, *, held: bool) -> None:
        """While held no thread leaves its CPU: a container in creation waits for them."""
        if held and not self._held:
            self._held = True
            self._stop_all()
        elif not held:
            self._held = False

    def _stop_all(self) -> None:
        # The list is made in one call: other threads add and drop timers meanwhile.
        for reference in self._timers.valuerefs():
            if (timer := reference()) is not None:
                timer.stop()

    def _may_run(self) -> bool:
        """Whether the calling thread is to leave its CPU after each stint."""
        # One reading: another thread may be the loop's.
        loop = self._loop
        return not self._held and (loop == threading.get_native_id() if loop else self._ordinary)

    def _own(self, make: Callable[[], _ThreadTimer]) -> _ThreadTimer:
        timer = self._locals.timer
        if timer is None:
            timer = self._locals.timer = make()
            self._timers[threading.get_native_id()] = timer
            self._make = make
        return timer


TIMER: Final = StintTimer()
"""The process': a signal has one handler."""
