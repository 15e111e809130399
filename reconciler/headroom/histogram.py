"""A histogram of amounts that forgets: a sample counts half as much after each half-life. Pure.

Times are seconds on one clock that only grows (`reconciler.headroom.peaks` has which).

Source: Vertical Pod Autoscaler, decaying histogram; its checkpoint (whole weights up to 10,000).
"""

import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping
from typing import Annotated, Final, final

from msgspec import Meta, Struct

RATIO: Final = 1.05
"""Koordinator's and the Vertical Pod Autoscaler's."""


@final
class Buckets:
    """One scale, exponential. Amounts from ``most`` on are in the last bucket.

    Bucket N begins at ``first * (RATIO**N - 1) / (RATIO - 1)``: each is 5 % wider than the one before it, so a quantile
    is exact to 5 % of the amount, and small amounts to ``first``.
    """

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


# As Koordinator's and the Vertical Pod Autoscaler's: CPU from 0.025 to 1024 CPUs, memory from 5 MiB to 2 TiB.
CPU_MILLI: Final = Buckets(25.0, 1_024_000.0)
MEMORY_BYTES: Final = Buckets(float(5 << 20), float(2 << 40))


_FAR: Final = 16.0
"""Half-lives after which the reference moves: weights stay far from the limits of a float."""
_HEAVIEST: Final = 10_000
"""Weight of the heaviest bucket in a row; a bucket of less than a 10,000th of it is left out."""
_MOST_SAMPLES: Final = 1e9


class HistogramRow(Struct, frozen=True, array_like=True):
    """``samples``: how many the weight is worth at the time of the row. ``weights``: bucket, weight, bucket, ..."""

    samples: Annotated[float, Meta(gt=0, le=_MOST_SAMPLES)]
    weights: Annotated[tuple[Annotated[int, Meta(ge=0, le=_HEAVIEST)], ...], Meta(max_length=1024)]


@final
class DecayingHistogram:
    """Weights of samples by amount."""

    __slots__ = ("_buckets", "_half_life_s", "_reference_s", "_used", "_weights")

    def __init__(self, buckets: Buckets, half_life_s: float) -> None:
        self._buckets = buckets
        self._half_life_s = half_life_s
        self._reference_s: float | None = None
        self._weights = array("d", bytes(8 * len(buckets)))
        # Most of the scale is above what one workload uses: no bucket from this one on has had a weight.
        self._used = 0

    def add(self, amount: float, at_s: float, samples: float = 1.0) -> None:
        """One sample, or as many of the same amount."""
        index = self._buckets.index(amount)
        # New samples weigh more instead of old ones less: nothing is to be done while time passes. A wrong time changes
        # how much samples count, never an amount.
        self._weights[index] += samples * self._scale(at_s)
        self._used = max(self._used, index + 1)

    def samples(self, at_s: float) -> float:
        """How many samples of this moment the whole weight is worth."""
        if self._reference_s is None:
            return 0.0
        ages = (at_s - self._reference_s) / self._half_life_s
        return min(_MOST_SAMPLES, sum(self._weights) * math.pow(2.0, -min(max(ages, -_FAR), 1000.0)))

    def quantile(self, rank: float) -> float:
        """The end of the bucket that has this part (0.0-1.0) of the weight below; 0 without a sample."""
        weights = self._weights[: self._used]
        total = sum(weights)
        if total <= 0:
            return 0.0
        # From the largest amount down, as ranks are near to 1. The rounding error of sums is left out.
        left = max((1 - rank), 1e-9) * total
        lowest = 0
        for index in range(len(weights) - 1, -1, -1):
            if weights[index]:
                lowest = index
                left -= weights[index]
                if left < 0:
                    break
        return self._buckets.end(lowest)

    def row(self, at_s: float) -> HistogramRow | None:
        """For the store; None without a sample that still counts."""
        heaviest, samples = max(self._weights), self.samples(at_s)
        if heaviest <= 0 or samples < 1e-6:
            return None
        # Whole numbers relative to the heaviest, as in the Vertical Pod Autoscaler's checkpoint.
        pairs = ((index, round(weight / heaviest * _HEAVIEST)) for index, weight in enumerate(self._weights) if weight)
        return HistogramRow(samples, tuple(number for pair in pairs if pair[1] for number in pair))

    @classmethod
    def restored(cls, row: HistogramRow, buckets: Buckets, half_life_s: float, at_s: float) -> "DecayingHistogram":
        """The histogram of a row that was made at ``at_s``. Errors: `ValueError` for what no histogram writes."""
        indices, weights = row.weights[::2], row.weights[1::2]
        total = sum(weights)
        if len(indices) != len(weights) or not total or not math.isfinite(row.samples):
            raise ValueError("weights that belong to no buckets")
        if list(indices) != sorted(set(indices)) or indices[-1] >= len(buckets):
            raise ValueError("buckets out of order")
        result = cls(buckets, half_life_s)
        result._reference_s = at_s
        for index, weight in zip(indices, weights, strict=True):
            result._weights[index] = row.samples * weight / total
        result._used = indices[-1] + 1
        return result

    def _scale(self, at_s: float) -> float:
        """The weight of a sample of this moment. Moves the reference where it is too far behind."""
        if self._reference_s is None:
            self._reference_s = at_s
        ages = (at_s - self._reference_s) / self._half_life_s
        if ages > _FAR:
            factor = 2.0**-ages if ages < 1000 else 0.0
            for index, weight in enumerate(self._weights):
                if weight:
                    self._weights[index] = weight * factor
            self._reference_s, ages = at_s, 0.0
        # The clock only grows, so a sample that is much older than the reference is a mistake: it counts nothing.
        return math.pow(2.0, max(ages, -500.0))
