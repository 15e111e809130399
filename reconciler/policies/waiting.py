"""How much of an online pod's waiting for a CPU BE work can have caused. Arithmetic only.

A pod's tasks also wait for each other and for other online pods. What they wait while BE work is cut to its minimum or
asleep is learned for each pod, by its CPU use (powers of two), as waiting grows with load: a mean and a mean deviation,
as TCP's round-trip time (RFC 6298); bursts of waiting, which a mean does not show, are counted by themselves. Only what
is above that counts. What was learned fades, so that a bad hour does not hide harm for ever: then BE work is cut once,
and it is learned again. What turns out to be too high is forgotten at once, as BE work only adds to waiting.

Units: thousandths: of a CPU (running), of a task (waiting); percent of both together; seconds.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from reconciler.policies.harm import HarmConfig

_MOST: Final = 20
"""The past weighs as much as this many samples at most."""
_DEVIATIONS: Final = 2.0
_HALF_S: Final = 300.0
"""Half of what was learned has faded after this time without BE at its minimum."""
_QUIET: Final = 1.25
"""BE work that is cut to its minimum is seen to use up to this multiple: periods of its quota end beside samples."""
_ASLEEP_MILLI: Final = 20
"""BE work that uses no more is asleep, however small its minimum."""
_AT_ONCE: Final = float("-inf")
"""In place of the time: nothing has faded."""
_CONFIRMED_S: Final = 30.0
"""Time without BE work at its minimum after which the same waiting confirms what was learned."""
_MOST_CONFIRMED: Final = 3
"""It fades at most two to the power of this more slowly."""
_DISPROVED: Final = 20
"""Samples in a row that are lower than what was learned, from which on that is forgotten."""
_NO_HARM: Final = 0.99
"""Just below harm: nothing is cut, and nothing rises."""
_LASTING: Final = 40
"""Harmful samples in a row, without BE work, that are no burst."""
_ROW_S: Final = 1.0
"""Samples in a row are not further apart."""
_ENOUGH: Final = 50
"""Samples without BE work from which on the share of harmful ones is believed."""
_MOST_COUNTED: Final = 600
"""Older samples count less: these are a minute's."""
_MARGIN: Final = 1.5
"""Bursts beside BE work may be so much more frequent, longer and worse than without it."""
_SAVED: Final = 2
"""Bursts that are excused one soon after another; in the long run the share counts."""
_MOST_EXCUSED: Final = 40
"""Harmful samples in a row that are excused at most: four seconds."""


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
    """The waiting in one range of CPU use, in percent, from ``count`` samples, the last at ``at``.

    ``confirmed``: how often it was the same after it had faded for a while: the longer it lasts the next time.
    ``below``: the newest samples in a row, with BE work, that are clearly below it: BE work only adds to waiting.
    """

    mean: float
    deviation: float
    count: int
    at: float
    below: int = 0
    confirmed: int = 0


OwnWaiting = Mapping[int, LearnedWait]
"""By the number of bits of the CPU use."""


def learn(known: OwnWaiting, waiting: PodWaiting, now: float) -> OwnWaiting:
    """Add a sample without BE work, or with BE work at its minimum."""
    key, percent = _range(waiting), waiting.percent
    before = known.get(key)
    if before is None:
        # Not half of it, as TCP does: one sample would hide harm of the same size for minutes.
        return {**known, key: LearnedWait(mean=percent, deviation=0.0, count=1, at=now)}
    count = min(before.count + 1, _MOST)
    deviation = before.deviation + (abs(percent - before.mean) - before.deviation) / count
    mean = before.mean + (percent - before.mean) / count
    # Confirmed by the same waiting: within the usual deviation, or one percent where there is hardly any.
    same = now - before.at >= _CONFIRMED_S and abs(percent - before.mean) <= max(_DEVIATIONS * before.deviation, 1.0)
    confirmed = min(_MOST_CONFIRMED, before.confirmed + same)
    item = LearnedWait(mean=mean, deviation=deviation, count=count, at=now, confirmed=confirmed)
    return {**known, key: item}


def disprove(known: OwnWaiting, waiting: PodWaiting) -> OwnWaiting:
    """Add a sample with BE work: after some that are lower than what was learned, that is forgotten."""
    key = _range(waiting)
    if (item := known.get(key)) is None:
        return known
    below = item.below + 1 if waiting.percent < item.mean - item.deviation else 0
    if below >= _DISPROVED:
        return {number: other for number, other in known.items() if number != key}
    return known if below == item.below else {**known, key: replace(item, below=below)}


def expected(known: OwnWaiting, waiting: PodWaiting, now: float) -> float:
    """The waiting, in percent, that this pod has without BE work at most; 0 while nothing is known."""
    key = _range(waiting)
    item = known.get(key)
    # Else of the nearest lower range, else of the next one above: use varies, and a pod that waits runs less.
    if item is None:
        item = known.get(max((number for number in known if number < key), default=key + 1))
    if item is None:
        return 0.0
    faded: float = 0.5 ** (max(0.0, now - item.at) / (_HALF_S * 2**item.confirmed))
    return min(100.0, (item.mean + _DEVIATIONS * item.deviation) * faded)


def level_of(waiting: PodWaiting, expected_percent: float, config: HarmConfig) -> float:
    """The harm of a sample in multiples of the limits: the smallest multiple counts, so all must be exceeded."""
    share = waiting.percent - expected_percent
    if share <= 0:
        return 0.0
    excess = max(0.0, waiting.wait_milli - expected_percent / 100 * (waiting.run_milli + waiting.wait_milli))
    level = min(share / config.wait_percent, excess / config.wait_milli)
    # For pods whose tasks wake up thousands of times a second: the switch from BE work costs a few microseconds each
    # time, which adds up to a large share. A cut would not shorten them: an idle CPU needs longer to wake up.
    if waiting.waits > 0:
        level = min(level, excess * 1000 / waiting.waits / config.wait_us)
    return level


class OwnHarm(Struct, frozen=True, kw_only=True):
    """How often a pod has harmful samples without BE work: of ``samples``, ``harmful`` ones, both fading, at ``at``.

    ``worst``: the highest level; ``longest``: the most in a row in a burst; ``row``: the newest in a row.
    """

    samples: float = 0.0
    harmful: float = 0.0
    worst: float = 0.0
    longest: int = 0
    row: int = 0
    at: float = 0.0


class PodJudgement(Struct, frozen=True, kw_only=True):
    """One online pod: what it waited in its last sample, what it waits without BE work, and the harm of that sample.

    ``left``: harmful samples that are still excused; ``row``: the newest ones in a row, excused or not.
    """

    waits: PodWaiting = PodWaiting(0.0, 0.0)
    own: OwnWaiting = {}
    own_harm: OwnHarm = OwnHarm()
    left: float = 0.0
    row: int = 0
    expected: float = 0.0
    level: float = 0.0


def is_quiet(used: int | None, ceiling_milli: int, floor_milli: int) -> bool:
    """Whether BE work is at its minimum or asleep. ``used`` None: unknown, then its ceiling counts."""
    least = max(_ASLEEP_MILLI, floor_milli)
    if used is None:
        return ceiling_milli <= least
    # Above the minimum by a higher ceiling it is not quiet: harm of that would be learned as online pods' own.
    return used <= (least * _QUIET if ceiling_milli <= least else least)


def quiet_since(before: float | None, now: float, *, quiet: bool) -> float | None:
    """Since when BE work has been at its minimum or asleep without a break; None: it is not.

    Samples may be late: the first ones are of the time before, and would be learned as waiting without BE work. So they
    count as quiet only after `HarmConfig.settle_s`.
    """
    if not quiet:
        return None
    return before if before is not None and before <= now else now


def judge(before: PodJudgement, waiting: PodWaiting, now: float, config: HarmConfig, *, quiet: bool) -> PodJudgement:
    """Judge a sample; one while BE work is at its minimum or asleep is learned."""
    # Without BE work nothing can be hidden by what was learned: it need not have faded.
    likely = expected(before.own, waiting, _AT_ONCE if quiet else now)
    level = level_of(waiting, likely, config)
    if quiet:
        own, own_harm = before.own, _learn_harm(before.own_harm, level, now)
        # Bursts are no part of the mean, which is far below them. But the first sample of a range is learned in any
        # case: else nothing is known.
        if not 0 < own_harm.row < _LASTING or _range(waiting) not in own:
            own = learn(own, waiting, now)
        # Not BE work's doing, so no reason to cut; but none to raise either before it is learned.
        burst = 0 < own_harm.row < _LASTING and own_harm.samples >= _ENOUGH
        level = 0.0 if burst else min(level, _NO_HARM)
        left = _most_left(own_harm)
        return PodJudgement(waits=waiting, own=own, own_harm=own_harm, left=left, expected=likely, level=level)
    known, left = before.own_harm, 0.0
    # As many harmful samples as without BE work, and half as many more, are excused.
    if known.longest:
        faded: float = 0.5 ** (max(0.0, now - known.at) / _HALF_S)
        rate = known.harmful * faded / max(_ENOUGH, known.samples * faded)
        left = min(_most_left(known), before.left + _MARGIN * rate)
    row = before.row + 1 if level >= 1.0 else 0
    excused = 1.0 <= level <= _MARGIN * known.worst and left >= 1.0 and row <= _MARGIN * known.longest
    return PodJudgement(
        waits=waiting,
        own=disprove(before.own, waiting),
        own_harm=known,
        left=left - excused,
        row=row,
        expected=likely,
        level=0.0 if excused else level,
    )


def _most_left(known: OwnHarm) -> float:
    """The excused samples that a pod can have saved: bursts follow each other, and each of them would be a cut."""
    return min(_SAVED * _MARGIN * known.longest, _MOST_EXCUSED)


def _learn_harm(known: OwnHarm, level: float, now: float) -> OwnHarm:
    harmful = level >= 1.0
    faded: float = 0.5 ** (max(0.0, now - known.at) / _HALF_S)
    before = known.row if 0.0 <= now - known.at <= _ROW_S else 0
    row = before + 1 if harmful else 0
    # By time, and by number: a long quiet time must not outweigh what is new.
    keeps = min(faded, _MOST_COUNTED / (known.samples + 1))
    count = known.harmful * keeps + (harmful and row < _LASTING)
    if row == _LASTING:
        # No burst: `learn` has it from now on.
        count = max(0.0, count - before)
    forgotten = count < 0.5  # nothing counts that the worst and the longest could be of
    return OwnHarm(
        samples=known.samples * keeps + 1,
        harmful=count,
        worst=max(level if harmful else 0.0, 0.0 if forgotten else known.worst),
        longest=0 if forgotten else max(row if row < _LASTING else 0, known.longest),
        row=row,
        at=now,
    )


def _range(waiting: PodWaiting) -> int:
    return max(0, int(waiting.run_milli)).bit_length()
