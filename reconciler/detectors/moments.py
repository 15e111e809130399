"""Mean and deviation learned piece by piece: merged without the samples, and aged so that the old weighs less.

Callers exclude the samples of confirmed interference, but not single outliers: without the tail of the distribution
sigma shrinks, and ever more healthy samples are outliers (rubik excludes each one above mean + 2 sigma).

Source: the incremental merge of CPI² as rubik has it.
"""

import math
from collections.abc import Iterable

from msgspec import Struct


class Moments(Struct, frozen=True, array_like=True):
    """``count`` samples (a fraction once aged) with their mean and variance (of the population)."""

    count: float = 0.0
    mean: float = 0.0
    variance: float = 0.0

    @property
    def sigma(self) -> float:
        return math.sqrt(self.variance)

    def merged(self, other: "Moments") -> "Moments":
        """Both together, as if all samples had been seen by one."""
        count = self.count + other.count
        if not count:
            return self
        mean = (self.count * self.mean + other.count * other.mean) / count
        # The pieces' own variance, and how far each piece lies from the common mean.
        ours = self.variance + (self.mean - mean) ** 2
        theirs = other.variance + (other.mean - mean) ** 2
        return Moments(count, mean, (self.count * ours + other.count * theirs) / count)

    def with_one(self, value: float) -> "Moments":
        return self.merged(Moments(1.0, value))

    def aged(self, factor: float) -> "Moments":
        """The same with ``factor`` of the weight."""
        return Moments(self.count * factor, self.mean, self.variance)

    def limit(self, sigmas: float, floor: float = 0.0) -> float:
        """Mean and so many deviations; the deviation counts as at least ``floor``."""
        return self.mean + sigmas * max(self.sigma, floor)


def moments_of(values: Iterable[float]) -> Moments:
    result = list(values)
    if not result:
        return Moments()
    mean = math.fsum(result) / len(result)
    return Moments(float(len(result)), mean, math.fsum((value - mean) ** 2 for value in result) / len(result))
