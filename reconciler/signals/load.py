"""Load of the machine and its variation: the input of `quota_turbo`.

iowait is idle, steal is busy, and a CPU without a usable difference is busy, as in `reconciler.signals.cpu`.
"""

from collections import deque
from typing import Final, final

from reconciler.signals.cpu import SHORTEST_S, CpuReading, idle_shares

SPAN_S: Final = 1.0
"""The load is of this long: shorter spans count single ticks of the kernel's clock."""


@final
class LoadMeter:
    """Keeps a second's readings and a window's loads."""

    def __init__(self) -> None:
        self._readings: deque[CpuReading] = deque()
        self._loads: deque[tuple[float, float]] = deque()
        self._since: float | None = None

    def forget(self) -> None:
        """A reading is missing: nothing is known of how steady the machine was."""
        self._readings.clear()
        self._loads.clear()
        self._since = None

    def add(self, reading: CpuReading, window_s: float) -> tuple[float | None, float | None]:
        """Add a reading; returns the load of the last second, and the spread of the window's loads (percent points).

        Each is None until the readings cover that time; readings that go back in time restart both.
        """
        now = reading.at_s
        if self._readings and now < self._readings[-1].at_s:
            self.forget()
        while len(self._readings) > 1 and now - self._readings[1].at_s >= SPAN_S:
            self._readings.popleft()
        self._readings.append(reading)
        before = self._readings[0]
        if now - before.at_s < max(SHORTEST_S, SPAN_S * 0.9) or not reading.cpus:
            return None, None
        shares = idle_shares(before.cpus, reading.cpus)
        load = 100.0 * (1.0 - sum(shares.get(cpu, 0.0) for cpu in reading.cpus) / len(reading.cpus))
        if self._since is None:
            self._since = now
        while self._loads and now - self._loads[0][0] > window_s:
            self._loads.popleft()
        self._loads.append((now, load))
        if now - self._since < window_s:
            return load, None
        loads = [value for _, value in self._loads]
        return load, max(loads) - min(loads)
