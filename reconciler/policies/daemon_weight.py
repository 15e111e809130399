"""The CPU weight of a group of daemons: near twice what they need, so that each wake-up delays online pods little.

CFS puts a group that has slept back by up to half a latency period against kubepods, which never sleeps while BE work
runs; the CPU time of that credit is proportional to the group's weight. With twice its need it still gets all of the
CPU that it needs where every CPU is busy for ever, and runs half of the time. `step` is the control law, once a second:

- The need is the largest use of a second in the last ``window_s``. Nothing is lowered before a whole window is known,
  and the need does not fall while the group waits: a daemon that sleeps for a time after its work uses less when it is
  slowed down, and would be slowed down further.
- Raised at once: by the whole difference where the need has grown, to the original while a container is being made or
  the use is unknown, and to twice the weight where the group waits for a CPU most of the time. That weight then is the
  least for a window, and for twice as long each time that it was not enough.
- Lowered slowly: by half at most each `LOWER_S`, and not for less than a quarter.

The weight divides over the CPUs where the group's tasks run, the pods' over all. So the weight is computed for tasks
that run on as few CPUs as can have them.

Units: thousandths of a CPU; weights as in the kernel's file. Source: the kernel's sched-design-CFS; the delay of online
tasks by weight is in docs/performance.md.
"""

from typing import Final

from msgspec import Struct

LATE: Final = 0.75
"""With twice its need a group of one task waits at most half of the time; from this share on it gets too little."""
WAITS: Final = 0.2
"""From this share of the time on the use shows what the group gets, which may be less than what it needs."""
LOWER_S: Final = 5.0
"""Between two steps down."""
_PARTS: Final = 6
"""The window is kept as the largest use in each of so many parts."""
_MOST_MILLI: Final = 750
"""Of one CPU: for more the group's tasks must run on several, or its weight would exceed all others' many times."""
_DEADBAND: Final = 1.25
"""A weight this many times above the target stays: the need changes by a few percent all the time."""
_MARGIN: Final = 10
"""Percent added where it is raised, for the same reason."""
_LONGEST_S: Final = 3600.0


class WeightRules(Struct, frozen=True, kw_only=True):
    """``percent``: of the need that the weight assures; ``floor``: the least weight."""

    percent: int
    floor: int
    window_s: float


class WeightSample(Struct, frozen=True, kw_only=True):
    """What was measured of one group in the last second. None is "unknown".

    ``original``: the weight without bypassd. ``competing``: the sum of the other groups' weights. ``waits``: the share
    of the time in which one of its tasks waited for a CPU. ``starting``: a container is being made.
    """

    use_milli: int | None
    waits: float | None
    original: int
    competing: int
    cpus: int
    starting: bool = False


class WeightState(Struct, frozen=True, kw_only=True):
    """``weight`` None: the window is not complete. ``parts``: number and largest use of each part of the window.

    ``since``: since when the use is known without a gap. ``least``: the weight that was needed against waiting, until
    ``least_until``; ``least_s``: for how long the last one was kept.
    """

    since: float
    weight: int | None = None
    parts: tuple[tuple[int, int], ...] = ()
    lowered_at: float = float("-inf")
    least: int = 0
    least_until: float = float("-inf")
    least_s: float = 0.0

    @property
    def need_milli(self) -> int:
        """The largest use in the window."""
        return max((use for _, use in self.parts), default=0)


def weight_for(milli: int, competing: int, cpus: int) -> int | None:
    """The least weight that assures so much CPU while all CPUs are busy; None: no weight does."""
    milli = max(0, milli)
    spread = max(1, -(-milli // _MOST_MILLI))
    if spread > cpus:
        return None
    return -(-milli * competing * spread // (cpus * (1000 * spread - milli)))


def credit_us(weight: int | None, latency_ns: int | None, version: int) -> int | None:
    """The CPU time that a group which has slept may use before kubepods, which has not; None: not known.

    Half of the scheduler's latency, in proportion to the weight (1024 on cgroup v1 and 100 on v2 are the same).
    """
    if weight is None or latency_ns is None:
        return None
    return latency_ns * weight // (2000 * (1024 if version == 1 else 100))


def step(state: WeightState | None, sample: WeightSample, now: float, rules: WeightRules) -> WeightState:
    """The state after one more sample. ``now``: monotonic seconds."""
    original = sample.original
    if sample.use_milli is None:
        weight = None if state is None or state.weight is None else original
        return WeightState(since=now, weight=weight)
    if state is None:
        state = WeightState(since=now)
    parts = state.parts
    if not sample.starting:
        waits = sample.waits is not None and sample.waits >= WAITS
        least_use = state.need_milli if waits else 0
        parts = _with_use(parts, max(least_use, sample.use_milli), now, rules.window_s)
    least, least_until, least_s, weight = state.least, state.least_until, state.least_s, state.weight
    whole = now - state.since >= rules.window_s
    if weight is None and not (whole and parts):
        return WeightState(since=state.since, parts=parts)
    weight = min(original if weight is None else weight, original)
    lowered_at = state.lowered_at
    late = sample.waits is not None and sample.waits >= LATE and weight < original
    if late:
        if now >= least_until + least_s:
            least_s = rules.window_s
        elif now >= least_until:
            # Without it the group waited again.
            least_s = min(_LONGEST_S, 2 * least_s)
        least, least_until = min(original, 2 * weight), now + least_s
    need = max((use for _, use in parts), default=0)
    needed = weight_for(need * rules.percent // 100, sample.competing, sample.cpus)
    target = original if needed is None else max(needed, rules.floor, least if now < least_until else 0)
    target = min(original, target)
    if sample.starting:
        weight = original
    elif weight < target:
        weight = min(original, target + target * _MARGIN // 100)
    elif whole and weight > target * _DEADBAND and now - lowered_at >= LOWER_S:
        weight = max(target, weight // 2)
        # The last step ends at the target, and not a little above it for good.
        weight = target if weight <= target * _DEADBAND else weight
        lowered_at = now
    return WeightState(
        since=state.since,
        weight=weight,
        parts=parts,
        lowered_at=lowered_at,
        least=least,
        least_until=least_until,
        least_s=least_s,
    )


def _with_use(parts: tuple[tuple[int, int], ...], use: int, now: float, window_s: float) -> tuple[tuple[int, int], ...]:
    number = int(now * _PARTS / window_s)
    kept = [(at, most) for at, most in parts if number - _PARTS <= at < number]
    last = next((most for at, most in parts if at == number), 0)
    return (*kept, (number, max(last, use)))
