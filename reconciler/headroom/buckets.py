"""Exponential buckets of amounts: of CPU use in thousandths of a CPU, of memory in bytes. Pure.

Bucket N begins at ``first * (RATIO**N - 1) / (RATIO - 1)``: each is 5 % wider than the one before it, so a quantile is
exact to 5 % of the amount, and small amounts to ``first``. Source: Koordinator's and the Vertical Pod Autoscaler's
histograms (growth 5 %; CPU from 0.025 to 1024 CPUs, memory from 5 MiB to 2 TiB).
"""

from bisect import bisect_right
from collections.abc import Mapping
from typing import Final, final

RATIO: Final = 1.05


@final
class Buckets:
    """One scale. Amounts from ``most`` on are in the last bucket."""

    def __init__(self, first: float, most: float) -> None:
        starts = [0.0]
        width = first
        while starts[-1] < most:
            starts.append(starts[-1] + width)
            width *= RATIO
        self._starts: Final = tuple(starts)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def index(self, amount: float) -> int:
        """The bucket of an amount; negative ones are in the first."""
        return min(len(self._starts) - 2, max(0, bisect_right(self._starts, amount) - 1))

    def start(self, index: int) -> float:
        """The smallest amount of a bucket."""
        return self._starts[index]

    def end(self, index: int) -> float:
        """The first amount beyond a bucket."""
        return self._starts[index + 1]

    def middle(self, index: int) -> float:
        """What an amount in this bucket is shown as: 0 in the first bucket."""
        return 0.0 if index == 0 else (self._starts[index] + self._starts[index + 1]) / 2

    def median(self, counts: Mapping[int, int]) -> float | None:
        """Of amounts counted by bucket; None: of no amount. Buckets that the scale does not have count as its last."""
        left = (sum(counts.values()) + 1) // 2
        for index in sorted(counts):
            left -= counts[index]
            if left <= 0:
                return self.middle(min(max(0, index), len(self) - 1))
        return None


CPU_MILLI: Final = Buckets(25.0, 1_024_000.0)
MEMORY_BYTES: Final = Buckets(float(5 << 20), float(2 << 40))
