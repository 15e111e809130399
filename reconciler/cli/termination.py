"""How a command that leaves something behind ends by a signal."""

import signal
import sys
import threading
from typing import Self, final


@final
class Termination:
    """While it is open SIGTERM and SIGHUP end the command as Ctrl-C does: what is open is undone on the way out.

    One that is ignored stays so: nohup(1).
    """

    def __enter__(self) -> Self:
        self._number: int | None = None
        main = threading.current_thread() is threading.main_thread()
        ends = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._arrived) for number in (ends if main else ())}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """End the command when a signal has come but what it raised was lost.

        The interpreter drops every exception that is raised within a finalizer or within a callback of ``fork``.
        """
        if self._number is not None:
            sys.exit(128 + self._number)

    def _arrived(self, number: int, _frame: object) -> None:
        self._number = number
        self.check()
