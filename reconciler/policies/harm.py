"""harm: the second budget law. BE work may have all CPU that is idle, and loses some when online pods wait for it.

It is in force while BE pods run in an effective idle class (`reconciler.policies.yielding`): then a limit on how full
the CPUs are costs BE work and protects nothing. `step` is the control law; the sampler keeps its state and runs it ten
times a second. Its ceiling reaches the planner as ``NodeView.harm``.

Source: additive increase and multiplicative decrease (Chiu, Jain: Analysis of the increase and decrease algorithms for
congestion avoidance, 1989), with TCP CUBIC's memory of the level of the last loss (RFC 9438) and exponential back-off
of failed probes; Heracles (Lo and others, 2015) cuts BE work by the latency of online work. Differences: the signal is
the waiting for a CPU that BE work can have caused (`reconciler.policies.waiting`), not latency, which only the service
can measure; a cut takes from what is used, as PerfIso's; a failed probe costs its step and not half of the window.

Units: thousandths of a CPU; seconds on the monotonic clock. Arithmetic only.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct
from msgspec.structs import replace

_SHORT: Final = 3
"""Samples in which small harm must appear twice: once may be noise."""
_LONG: Final = 9
"""Samples in which three times are enough: a load that rises and falls faster than samples are taken."""
_GAP_S: Final = 3.0
"""Samples that are further apart have nothing to do with each other."""
_NEAR: Final = 4
"""Close to the last harm a step is this part of a usual one."""
_NEAR_PERCENT: Final = 90
"""Close to the last harm: from this share of the use at which it began on."""
_QUIET_S: Final = 2.0
"""After so long a calm at the top samples are rarer."""
_LONG_AGO: Final = float("-inf")
_NO_PODS: Final = frozenset[str]()
_REPEATED: Final = 4
"""Cuts that are needed for a comparison."""
_MOST_PAUSE: Final = 16
"""Comparisons that change nothing come after at most so many times ``compare_after_s``."""
_MOST_LONGER: Final = 3
"""They are at most so many times ``compare_s`` long."""


class HarmConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is harm, and how BE's ceiling rises."""

    reserve_percent: Annotated[
        int,
        Meta(
            ge=0,
            le=50,
            description="share of its CPUs that BE work never gets; above 0 a quota is always written",
        ),
    ] = 0
    wait_percent: Annotated[
        float,
        Meta(
            gt=0,
            le=100,
            description="harm: an online pod waits for CPUs for more than this share of its waiting and running, "
            "beyond what it waits without BE work",
        ),
    ] = 5.0

    # Harm of so many times all limits cannot be noise: it needs no second sample.
    clear_factor: ClassVar[float] = 4.0
    # Between this share of a limit and the limit nothing rises: a step up would end in a cut.
    quiet_percent: ClassVar[int] = 50
    # A cut must precede a long queue of online requests.
    interval_s: ClassVar[float] = 0.1
    # With all CPUs lent and two quiet seconds, a measurement, which takes a CPU for up to 1 ms, is rarer.
    calm_interval_s: ClassVar[float] = 0.5
    # Bounds a measurement: first the pods that waited and the busiest, the others in turn.
    pods_per_round: ClassVar[int] = 64
    # The same where the kernel has no pressure files of pods.
    processes_per_round: ClassVar[int] = 512
    # Small harm may be noise, and a wrong cut costs BE work several calm seconds.
    cut_percent: ClassVar[int] = 25
    # Clear harm ends within two cuts.
    clear_cut_percent: ClassVar[int] = 50
    # A sample may still be of the time before the cut.
    settle_s: ClassVar[float] = 0.25
    # Harm this soon after a step up is that step's; a step of a whole CPU has longer.
    blame_s: ClassVar[float] = 2.0
    # A step up that failed is tried again at the latest after this.
    backoff_s: ClassVar[float] = 60.0
    # BE work is at its minimum for this long to learn what online pods wait without it; see `_MOST_LONGER`.
    compare_s: ClassVar[float] = 10.0
    # Of repeated cuts, before that; see `_MOST_PAUSE`.
    compare_after_s: ClassVar[float] = 60.0
    # So little waiting of a busy pod is noise; harm is above all three limits.
    wait_milli: ClassVar[float] = 5.0
    # And the mean wait before a task runs, in microseconds, where the kernel counts these.
    wait_us: ClassVar[float] = 100.0
    # Ten steps to the top: a step must not hide the next harm.
    raise_percent: ClassVar[int] = 10
    # Ten samples without harm before each step.
    calm_s: ClassVar[float] = 1.0


class HarmSample(Struct, frozen=True, kw_only=True):
    """One sample.

    ``levels``: by uid, the harm of the online pods that were measured, in multiples of the limits; None: unknown.
    ``used_milli``: BE work's use in the same time; None: unknown. ``excused``: BE work had a start allowance and used
    more than its ceiling: a lower ceiling would change nothing. ``grain_milli``: ceilings are multiples of it, as a CPU
    set has no parts of a CPU; so are ``top_milli`` and ``floor_milli`` then.
    """

    top_milli: int
    floor_milli: int
    grain_milli: int = 1
    used_milli: int | None = None
    levels: Mapping[str, float] | None = None
    excused: bool = False


class Comparison(Struct, frozen=True, kw_only=True):
    """When BE work is next at its minimum to learn what online pods wait without it (`reconciler.policies.waiting`).

    ``until``: it is now; ``before``: the ceiling to which it returns. ``cuts``: since ``since``, the first one's time.
    ``pause``: the multiple of ``compare_after_s``; ``ended_at``: of the last one.
    """

    until: float | None = None
    before: int = 0
    cuts: int = 0
    since: float = _LONG_AGO
    pause: int = 1
    ended_at: float = _LONG_AGO


class HarmState(Struct, frozen=True, kw_only=True):
    """What BE work may use, and what the next step depends on.

    ``at``: the last sample; ``harmed_at``: the last one with harm. ``wall_milli``: the use at which harm began last;
    None: none, or it was passed since. ``pause_s``: how long it must be without harm before a step close to that.
    ``hurt``: the pods above the limits in the last samples, the newest first. ``calm_since``: None while it is not
    calm. ``cuts``: how many there were; ``cause``: the pod of the last one.
    """

    ceiling_milli: int
    wall_milli: int | None = None
    pause_s: float = 0.0
    at: float | None = None
    hurt: tuple[frozenset[str], ...] = ()
    calm_since: float | None = None
    unknown_since: float | None = None
    harmed_at: float = _LONG_AGO
    raised_at: float = _LONG_AGO
    raised_from: int = 0
    cut_at: float = _LONG_AGO
    cuts: int = 0
    cause: str | None = None
    comparison: Comparison = Comparison()


def interval_s(state: HarmState, top_milli: int, now: float, config: HarmConfig) -> float:
    # At the top for so long: the step to it is watched as any other.
    calm = state.calm_since is not None and now - max(state.calm_since, state.raised_at) >= _QUIET_S
    if calm and state.ceiling_milli >= top_milli:
        return max(config.interval_s, config.calm_interval_s)
    return config.interval_s


def top_of(cpus: int, floor_milli: int, config: HarmConfig) -> int:
    """What BE work may use at most on so many CPUs."""
    return max(floor_milli, 1000 * cpus * (100 - config.reserve_percent) // 100)


def start(ceiling_milli: int) -> HarmState:
    """The state before the first sample: it rises or falls from there."""
    return HarmState(ceiling_milli=ceiling_milli)


def unknown(state: HarmState, since: float) -> HarmState:
    """The same state, while nothing has been known since then."""
    return replace(state, hurt=(), calm_since=None, unknown_since=since)


def _missed(state: HarmState, last: float, now: float) -> HarmState:
    """A sample is missing: its time counts neither as calm nor as harm, as if the clock had stopped for so long."""
    since = state.unknown_since if state.unknown_since is not None else now
    if not 0.0 <= now - since <= _GAP_S:
        return unknown(state, since)
    # Where some samples are always missing a calm while would else never be long enough; nor does one that is missing
    # separate two harmful ones.
    skipped = min(max(0.0, now - last), _GAP_S)
    return replace(
        state,
        calm_since=state.calm_since + skipped if state.calm_since is not None else None,
        harmed_at=min(now, state.harmed_at + skipped),
        raised_at=min(now, state.raised_at + skipped),
        unknown_since=since,
    )


def step(state: HarmState, sample: HarmSample, now: float, config: HarmConfig) -> HarmState:
    """One step: down at harm, up by one step after a calm while, never up on an unknown."""
    low, top = sample.floor_milli, max(sample.floor_milli, sample.top_milli)
    ceiling = _whole(min(max(state.ceiling_milli, low), top), sample)
    last = state.at
    state = replace(_resumed(state, now), ceiling_milli=ceiling)
    if state.comparison.until is not None:
        # An end further away than any comparison lasts is of another clock, or configuration.
        if now < state.comparison.until <= now + _MOST_LONGER * config.compare_s:
            state = replace(state, ceiling_milli=low)
        elif sample.levels is not None:
            state = _compared(state, now, low, top)
    if sample.levels is None:
        return _missed(state, now if last is None else last, now)
    if state.comparison.until is not None:
        # BE work is at its minimum: the waiting is learned, and not its doing.
        return replace(state, hurt=(), calm_since=None, unknown_since=None)
    if sample.excused:
        return replace(state, hurt=(), calm_since=None, unknown_since=None)
    levels = sample.levels
    level = max(levels.values(), default=0.0)
    hurt = frozenset(uid for uid, number in levels.items() if number >= 1.0) if level >= 1.0 else _NO_PODS
    before = state.hurt
    state = replace(state, hurt=(hurt, *before)[: _LONG - 1], unknown_since=None)
    if hurt:
        worst = max(hurt, key=lambda uid: (levels[uid], uid))
        state = replace(state, calm_since=None, harmed_at=now)
        clear = level >= config.clear_factor
        if (clear or _lasts(hurt, before)) and now - state.cut_at >= config.settle_s:
            return _cut(state, sample, worst, now, config, clear=clear)
        return _stuck(state, low, top, now, config)
    if level * 100 > config.quiet_percent:
        return replace(state, calm_since=None)
    return _calm(state, sample, now, config)


def _lasts(hurt: frozenset[str], before: tuple[frozenset[str], ...]) -> bool:
    """Whether small harm has lasted: one pod twice in the last samples, or some pod in each of them.

    Or one pod three times in more of them.
    """
    short = before[: _SHORT - 1]
    if any(hurt & other for other in short) or (len(short) == _SHORT - 1 and all(short)):
        return True
    return any(sum(uid in other for other in before) >= _SHORT - 1 for uid in hurt)


def _resumed(state: HarmState, now: float) -> HarmState:
    """The state for the next sample: after a gap, or a step of the clock, without what has to be recent."""
    before = now if state.at is None else state.at
    state = replace(state, at=now)
    if 0.0 <= now - before <= _GAP_S:
        return state
    return replace(
        state,
        hurt=(),
        calm_since=None,
        harmed_at=min(state.harmed_at, now),
        raised_at=min(state.raised_at, now),
        cut_at=min(state.cut_at, now),
        unknown_since=min(state.unknown_since, now) if state.unknown_since is not None else None,
    )


def _cut(state: HarmState, sample: HarmSample, worst: str, now: float, config: HarmConfig, *, clear: bool) -> HarmState:
    ceiling, low = state.ceiling_milli, sample.floor_milli
    # Taking an unused allowance frees nothing, and costs a sample.
    base = ceiling if sample.used_milli is None else min(ceiling, max(0, sample.used_milli))
    if base <= low:
        # BE work has no more than its minimum: what online pods wait for now is not its doing.
        return state
    # A step of a whole CPU is as long suspected as the steps of which it is made would take. Not longer: waiting in
    # bursts that BE work does not cause would be blamed on steps, and BE work would never rise.
    probed = now - state.raised_at <= max(config.blame_s, _step_wait_s(sample, config))
    target = base * (100 - (config.clear_cut_percent if clear else config.cut_percent)) // 100
    if probed and not clear:
        # A failed attempt costs its step, and a small one more if that is not a whole CPU. Lasting harm is the next
        # cut's.
        small = _near_step(sample.top_milli, config)
        target = max(target, min(base, state.raised_from) - (small if small >= sample.grain_milli else 0))
    pause = max(state.pause_s, config.calm_s)
    ceiling = max(low, _whole(min(ceiling, target), sample))
    comparison = _repeated(state.comparison, now, ceiling, config)
    return replace(
        state,
        ceiling_milli=ceiling if comparison.until is None else low,
        comparison=comparison,
        wall_milli=base,
        # After a failed step the next attempt follows after twice the time.
        pause_s=max(config.calm_s, min(config.backoff_s, 2 * pause)) if probed else pause,
        hurt=(),
        # The step is taken back: the next harm is not this step's, too.
        raised_at=_LONG_AGO,
        cut_at=now,
        cuts=state.cuts + 1,
        cause=worst,
    )


def _repeated(comparison: Comparison, now: float, ceiling: int, config: HarmConfig) -> Comparison:
    """Count a cut. Repeated ones over a long time may be for waiting that BE work does not cause: then compare."""
    after = config.compare_after_s * comparison.pause
    # Failed attempts are up to ``backoff_s`` apart: as many as are needed may take this long.
    if now - comparison.since > 2 * after + _REPEATED * config.backoff_s:
        comparison = replace(comparison, cuts=0, since=now)
    comparison = replace(comparison, cuts=comparison.cuts + 1)
    if not config.compare_s or comparison.cuts < _REPEATED or now - comparison.since < after:
        return comparison
    return _compare(comparison, now, ceiling, config)


def _stuck(state: HarmState, low: int, top: int, now: float, config: HarmConfig) -> HarmState:
    """Compare also where waiting that returns again and again has prevented every attempt to rise."""
    comparison, ceiling = state.comparison, state.ceiling_milli
    last = max(state.cut_at, state.raised_at, comparison.ended_at)
    if not config.compare_s or state.wall_milli is None or not low < ceiling < top:
        return state
    if now - last < config.compare_after_s * comparison.pause:
        return state
    return replace(state, ceiling_milli=low, comparison=_compare(comparison, now, ceiling, config))


def _compare(comparison: Comparison, now: float, ceiling: int, config: HarmConfig) -> Comparison:
    """Begin a comparison at this moment."""
    # Soon after the last one: that has changed nothing.
    useless = now - comparison.ended_at < 3 * config.compare_after_s * comparison.pause
    pause = min(_MOST_PAUSE, 2 * comparison.pause) if useless else 1
    # It begins in a burst, and may have ended before the next one.
    longer = min(max(1, pause // 2), _MOST_LONGER)
    return replace(comparison, until=now + config.compare_s * longer, before=ceiling, pause=pause)


def _compared(state: HarmState, now: float, low: int, top: int) -> HarmState:
    """The end of a comparison: the last harm says nothing about BE work's part in the next one."""
    comparison = replace(state.comparison, until=None, cuts=0, since=_LONG_AGO, ended_at=now)
    ceiling = min(max(state.comparison.before, low), top)
    return replace(state, ceiling_milli=ceiling, calm_since=None, comparison=comparison)


def _calm(state: HarmState, sample: HarmSample, now: float, config: HarmConfig) -> HarmState:
    top, wall, ceiling = sample.top_milli, state.wall_milli, state.ceiling_milli
    calm = state.calm_since if state.calm_since is not None else now
    state = replace(state, calm_since=calm)
    tried = now - state.raised_at > config.blame_s
    if wall is not None and tried and ceiling > wall and calm <= state.raised_at + config.blame_s:
        # Beyond the last harm without a new one: it had another reason, or that has ended.
        state, wall = replace(state, wall_milli=None, pause_s=0.0), None
    if ceiling >= top:
        return state
    usual = _step(top, config)
    after, wait = _raised(ceiling, usual, sample), _step_wait_s(sample, config)
    if wall is not None and after > (near := _whole(wall * _NEAR_PERCENT // 100, sample)):
        if ceiling < near:
            # Up to there by usual steps.
            after = near
        else:
            if not tried:
                return state
            # What is not used shows nothing: then the next step waits longest.
            used = sample.used_milli is not None and sample.used_milli * 2 >= ceiling
            after = _raised(ceiling, _near_step(top, config), sample)
            wait = max(wait, state.pause_s if used else config.backoff_s)
    # The long wait is one without harm: calm for so long may never be.
    if now - max(calm, state.raised_at) < min(wait, max(config.calm_s, 2 * config.blame_s)):
        return state
    if now - max(state.harmed_at, state.raised_at) < wait:
        return state
    return replace(state, ceiling_milli=min(top, after), raised_at=now, raised_from=ceiling)


def _step_wait_s(sample: HarmSample, config: HarmConfig) -> float:
    """A step of a whole CPU follows after the time of the usual steps of which it is made."""
    return config.calm_s * max(1.0, sample.grain_milli / _step(sample.top_milli, config))


def _whole(milli: int, sample: HarmSample) -> int:
    return milli - milli % sample.grain_milli


def _raised(ceiling: int, rise: int, sample: HarmSample) -> int:
    return _whole(ceiling + max(rise, sample.grain_milli), sample)


def _step(top: int, config: HarmConfig) -> int:
    return max(1, top * config.raise_percent // 100)


def _near_step(top: int, config: HarmConfig) -> int:
    return max(1, _step(top, config) // _NEAR)
