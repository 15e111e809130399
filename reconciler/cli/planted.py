"""Processes for trials: children that wait for a start, use a bounded time of one CPU, and end with their parent."""

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Final, Self, final

import psutil

from cgroupfs.errors import AgentError

_PDEATHSIG: Final = 1
"""PR_SET_PDEATHSIG: the kernel ends the child when its parent is killed."""


class CannotTryError(AgentError):
    """This node lacks what a trial needs."""


@final
class Planted:
    """One child. ``work`` runs after `start`, for at most ``cpu_s`` seconds of CPU time. The context's end kills it."""

    def __init__(self, work: Callable[[], None], *, cpu_s: int = 3) -> None:
        waiting, self._start = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._start)
                ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
                # The signal of that limit would leave a core dump.
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                # The parent may have been killed before the kernel was asked to report.
                if os.getppid() == parent and os.read(waiting, 1):
                    work()
            finally:
                # Whatever happened: the child never runs the parent's code.
                os._exit(0)
        os.close(waiting)
        self._ended: resource.struct_rusage | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self) -> None:
        os.write(self._start, b"x")

    def end(self) -> float:
        """Kill it if it runs, and return the CPU seconds that it used."""
        if self._ended is None:
            os.kill(self.pid, signal.SIGKILL)
            _, _, self._ended = os.wait4(self.pid, 0)
            os.close(self._start)
        return self._ended.ru_utime + self._ended.ru_stime


def spin() -> None:
    """Use a CPU until killed, or until the limit of the CPU time."""
    number = 0
    while True:
        number += 1


def measured(children: list[Planted], seconds: float) -> list[float]:
    """Run all for so long; the CPU seconds that each used."""
    for child in children:
        child.start()
    time.sleep(seconds)
    return [child.end() for child in children]


def cpu_seconds(pid: int) -> float:
    """CPU time that a child has used."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
