"""Processes that want a whole CPU each: the load of a busy node."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Self

_HOG: Final = "while True: pass"


class Hogs:
    """As many of them, at the usual priority.

    Each in a session of its own, as services and pods are: the kernel divides CPU among groups and sessions first
    (kernel.sched_autogroup_enabled), and a nice value counts only within one.
    """

    def __init__(self, count: int) -> None:
        self._running = [subprocess.Popen([sys.executable, "-c", _HOG], start_new_session=True) for _ in range(count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._signal(signal.SIGKILL)
        for process in self._running:
            process.wait()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is measured within: the removal of pods would take seconds."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._running:
            process.send_signal(number)
