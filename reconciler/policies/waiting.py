"""How much of an online pod's waiting for a CPU BE work can have caused. Arithmetic only.

A pod's tasks also wait for each other and for other online pods. What they wait while BE work is cut to its minimum or
asleep is learned for each pod, by its CPU use (powers of two), as waiting grows with load: a mean and a mean deviation,
as TCP's round-trip time (RFC 6298). Only what is above that counts. What was learned fades, so that a bad hour does not
hide harm for ever: then BE work is cut once, and it is learned again.

Units: thousandths: of a CPU (running), of a task (waiting); percent of both together; seconds.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from msgspec import Struct

from reconciler.policies.harm import HarmConfig

_MOST: Final = 20
"""The past weighs as much as this many samples at most."""
_DEVIATIONS: Final = 2.0
_HALF_S: Final = 300.0
"""Half of what was learned has faded after this time without BE at its minimum."""


class PodWaiting(NamedTuple):
    """What a pod's tasks did in one sample, on average. ``waits``: a second, how often one began to run; 0: unknown."""

    run_milli: float
    wait_milli: float
    waits: float = 0.0

    @property
    def percent(self) -> float:
        """The waiting, of waiting and running."""
        both = self.run_milli + self.wait_milli
        return 100.0 * self.wait_milli / both if both > 0 else 0.0


class LearnedWait(Struct, frozen=True, kw_only=True):
    """The waiting in one range of CPU use, in percent, from ``count`` samples, the last at ``at``."""

    mean: float
    deviation: float
    count: int
    at: float


OwnWaiting = Mapping[int, LearnedWait]
"""By the number of bits of the CPU use."""


def learn(known: OwnWaiting, waiting: PodWaiting, now: float) -> OwnWaiting:
    """Add a sample without BE work, or with BE work at its minimum."""
    key, percent = _range(waiting), waiting.percent
    before = known.get(key)
    if before is None:
        return {**known, key: LearnedWait(mean=percent, deviation=percent / 2, count=1, at=now)}
    count = min(before.count + 1, _MOST)
    deviation = before.deviation + (abs(percent - before.mean) - before.deviation) / count
    mean = before.mean + (percent - before.mean) / count
    return {**known, key: LearnedWait(mean=mean, deviation=deviation, count=count, at=now)}


def expected(known: OwnWaiting, waiting: PodWaiting, now: float) -> float:
    """The waiting, in percent, that this pod has without BE work at most; 0 while nothing is known.

    Of the range of its CPU use, else of the nearest lower one.
    """
    key = _range(waiting)
    near = max((number for number in known if number <= key), default=None)
    if near is None:
        return 0.0
    item = known[near]
    faded: float = 0.5 ** (max(0.0, now - item.at) / _HALF_S)
    return min(100.0, (item.mean + _DEVIATIONS * item.deviation) * faded)


def level_of(waiting: PodWaiting, expected_percent: float, config: HarmConfig) -> float:
    """The harm of a sample in multiples of the limits: the smallest multiple counts, so all must be exceeded.

    The limit of each single wait is for pods whose tasks sleep and wake up thousands of times a second: the switch from
    BE work costs a few microseconds each time, which adds up to a large share. A cut would not shorten them, as an idle
    CPU needs longer to wake up.
    """
    share = max(0.0, waiting.percent - expected_percent)
    excess = max(0.0, waiting.wait_milli - expected_percent / 100 * (waiting.run_milli + waiting.wait_milli))
    level = min(share / config.wait_percent, excess / config.wait_milli)
    if waiting.waits > 0:
        level = min(level, excess * 1000 / waiting.waits / config.wait_us)
    return level


def _range(waiting: PodWaiting) -> int:
    return max(0, int(waiting.run_milli)).bit_length()
