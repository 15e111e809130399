"""How late a trio loop's timers are, and what of that is the program's own doing."""

import threading
from pathlib import Path

import trio


class Lag:
    """Measures the loop that it is made in. Seconds.

    ``ours`` leaves out the wait for a CPU that another program had, which a busy machine adds to everything: it is what
    work on the loop cost, and threads of ours that held the interpreter.
    """

    def __init__(self) -> None:
        self.all: list[float] = []
        self.ours: list[float] = []
        self._file = f"/proc/self/task/{threading.get_native_id()}/schedstat"

    def _waited_s(self) -> float:
        return int(Path(self._file).read_text().split()[1]) / 1e9

    async def measure(self) -> None:
        """Wake every two milliseconds, for ever."""
        before = self._waited_s()
        while True:
            due = trio.current_time() + 0.002
            await trio.sleep_until(due)
            late = trio.current_time() - due
            waited = self._waited_s()
            self.all.append(late)
            self.ours.append(max(0.0, late - (waited - before)))
            before = waited

    @staticmethod
    def p99_ms(values: list[float]) -> float:
        return sorted(values)[int(len(values) * 0.99)] * 1000
