"""The last hour of the node's CPU, one mean value for every ten seconds: what online, BE and other work used.

From the readings that the sampler takes anyway: nothing is read for this. **Cost**: an addition per reading, and one
array of 4-byte numbers, 7 KiB. Units: thousandths of a CPU.
"""

import math
import time
from array import array
from collections.abc import Callable
from typing import Final, final

from state.model import NodeCpu

INTERVAL_S: Final = 10.0
LENGTH: Final = 360
SERIES: Final = ("online_milli", "reclaimed_milli", "system_milli", "idle_milli", "budget_milli")
_WIDTH: Final = len(SERIES)


@final
class NodeHour:
    """Means of `INTERVAL_S`, the oldest first; None where nothing was known."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._values = array("f")
        self._sums = [0.0] * _WIDTH
        self._counts = [0] * _WIDTH
        self._began: float | None = None

    def add(self, cpu: NodeCpu | None, budget_milli: int | None, cpus: int, now: float) -> None:
        """One reading, None while it is unknown. ``cpus``: how many are online."""
        if self._began is None:
            self._began = now
        while now - self._began >= INTERVAL_S:
            self._end()
        values: tuple[int | None, ...] = (None, None, None, None, budget_milli)
        if cpu is not None:
            idle = max(0, 1000 * cpus - cpu.busy_milli)
            values = (cpu.online_milli, cpu.reclaimed_milli, cpu.system_milli, idle, budget_milli)
        for index, value in enumerate(values):
            if value is not None:
                self._sums[index] += value
                self._counts[index] += 1

    def _end(self) -> None:
        assert self._began is not None
        pairs = zip(self._sums, self._counts, strict=True)
        self._values.extend(total / count if count else math.nan for total, count in pairs)
        del self._values[: -LENGTH * _WIDTH]
        self._sums, self._counts = [0.0] * _WIDTH, [0] * _WIDTH
        self._began += INTERVAL_S
        if self._clock() - self._began > LENGTH * INTERVAL_S:
            # After a suspend: no loop over hours of nothing.
            self._values, self._began = array("f"), self._clock()

    def series(self) -> dict[str, object]:
        """As plain values. ``age_s``: of the newest value's end."""
        return {
            "interval_s": INTERVAL_S,
            "age_s": None if self._began is None else max(0.0, self._clock() - self._began),
            **{
                name: [None if math.isnan(value) else round(value) for value in self._values[index::_WIDTH]]
                for index, name in enumerate(SERIES)
            },
        }
