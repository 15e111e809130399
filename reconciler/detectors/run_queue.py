"""run_queue: tasks of the victim wait for a CPU while its own quota lets them run.

Time is cut into windows of 2 s. A window is bad when the waiting's share of waiting and running is above mean +
3 sigma of the victim's own healthy past, or above a fixed limit, and each wait took more than 1 ms. Three bad ones of
the last five are interference. A window in which the victim's own quota stopped it counts for nothing: a throttled task
waits in the run queue as well, and no neighbour is to blame for that.

Source: Netflix's run-queue latency (always told together with throttling); peers have nothing of the kind. The past is
learned from all windows but those of confirmed interference, see `moments`; what lasts ``relearn_s`` is the new normal
for the deviation, never for the fixed limit.
"""

from typing import Annotated, Final, NamedTuple

from msgspec import Meta, Struct

from reconciler.detectors.base import Detector, Sight, unknown
from reconciler.detectors.moments import Moments
from reconciler.detectors.threshold import severity
from reconciler.detectors.windows import interval_s, over, past
from reconciler.detectors.words import number
from state.evidence import Opinion, Verdict

_LEARN: Final = 30
"""Windows that must have been seen before the own past means anything: a minute."""
_KEEP: Final = 900.0
"""The past weighs as much as this many windows at most (half an hour), so that it follows the day."""
_SIGMA_SHARE: Final = 0.1
_SIGMA_LEAST: Final = 0.3
"""The deviation counts as at least this share of the mean and this many points: a flat line is not that exact."""
_SLACK: Final = 0.5
"""A window is judged when at least this part of it was seen."""


class RunQueueConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is a bad window, and how many make interference."""

    limit_percent: Annotated[
        float, Meta(gt=0, le=100, description="waiting's share of waiting and running that is bad for anyone")
    ] = 5.0
    floor_percent: Annotated[
        float, Meta(ge=0, le=100, description="below this share no window is bad, whatever the past was")
    ] = 1.0
    sigmas: Annotated[float, Meta(ge=1, le=20, description="deviations above the own past that are bad")] = 3.0
    delay_us: Annotated[
        float,
        Meta(ge=0, le=10_000_000, description="a window is bad only if a task waited longer than this on average"),
    ] = 1000.0
    window_s: Annotated[float, Meta(ge=0.1, le=60, description="length of a window")] = 2.0
    windows: Annotated[int, Meta(ge=1, le=20, description="this many of the last windows are looked at")] = 5
    bad: Annotated[int, Meta(ge=1, le=20, description="this many bad ones of them are interference")] = 3
    throttled_percent: Annotated[
        float,
        Meta(ge=0, le=100, description="a window in which the own quota cut more of the periods short does not count"),
    ] = 0.0
    relearn_s: Annotated[
        float, Meta(ge=60, le=86400, description="after this long what was interference is learned as normal")
    ] = 1800.0

    def __post_init__(self) -> None:
        if self.bad > self.windows:
            raise ValueError(f"bad {self.bad} is more than windows {self.windows}")
        if self.floor_percent > self.limit_percent:
            raise ValueError(
                f"floor_percent {number(self.floor_percent)} is above limit_percent {number(self.limit_percent)}"
            )


class RunQueueMemory(Struct, frozen=True, kw_only=True):
    """The own past; ``learned_s``: up to when it has been taken in; ``since_s``: interference all the time since."""

    healthy: Moments = Moments()
    learned_s: float
    since_s: float | None = None


class _Seen(NamedTuple):
    """One window. ``throttled`` None: not measured."""

    end: float
    wait: float
    delay: float
    throttled: float | None
    milli: float | None


def _windows(config: RunQueueConfig, sight: Sight) -> list[_Seen | None]:
    """The last windows, the newest first; None: not measured. A window is no shorter than the sample interval."""
    length = max(config.window_s, interval_s(sight))
    subject = sight.subject
    names = ("cpu.wait", "cpu.delay", "cpu.wait_milli")
    points = {name: past(sight, subject, name) for name in (*names, "cpu.throttled")}
    seen: list[_Seen | None] = []
    for index in range(config.windows):
        end = sight.now - index * length
        wait, delay, milli = (over(points[name], end - length, end, sight.fresh_s) for name in names)
        # A task that was stopped at the end of one sample has its wait told in the next.
        before = end - length - interval_s(sight)
        throttled = over(points["cpu.throttled"], before, end, sight.fresh_s)
        if wait is None or delay is None or wait.seen_s < _SLACK * length:
            seen.append(None)
            continue
        seen.append(
            _Seen(
                end,
                wait.mean,
                delay.mean,
                None if throttled is None else throttled.high,
                None if milli is None else milli.mean,
            )
        )
    return seen


def judge(config: RunQueueConfig, sight: Sight, memory: RunQueueMemory | None) -> tuple[Opinion, RunQueueMemory]:
    """Count the bad windows."""
    if memory is None:
        memory = RunQueueMemory(learned_s=sight.now)
    lacking = [name for name in ("cpu.wait", "cpu.delay") if sight.value(name) is None]
    if lacking:
        return unknown(f"no fresh {lacking[0]}"), RunQueueMemory(
            healthy=memory.healthy, learned_s=sight.now, since_s=None
        )
    windows = _windows(config, sight)
    seen = [window for window in windows if window is not None]
    if not seen:
        return unknown("not yet one window of cpu.wait"), memory
    limit = _limit(config, memory.healthy)
    high = [one for one in seen if one.wait > limit and one.delay > config.delay_us]
    own = [one for one in high if one.throttled is not None and one.throttled > config.throttled_percent]
    untold = [one for one in high if one.throttled is None]
    bad = [one for one in high if one.throttled is not None and one.throttled <= config.throttled_percent]
    newest = seen[0]
    worst = max(bad, key=lambda one: one.wait) if bad else newest
    text = (
        f"waits for a CPU {number(worst.wait)} % of its time, {number(worst.delay / 1000)} ms each; "
        f"bad above {number(limit)} %"
    )
    gap = None
    if len(bad) >= config.bad:
        verdict = Verdict.INTERFERED
        text += f"; {len(bad)} of the last {len(seen)} windows"
        milli = [one.milli for one in bad if one.milli is not None]
        gap = sum(milli) / len(milli) if milli else None
    elif own:
        verdict = Verdict.OK
        text = (
            f"own quota: waits {number(own[0].wait)} % of its time while its quota cuts "
            f"{number(own[0].throttled or 0.0)} % of its periods short"
        )
    elif len(bad) + len(untold) >= config.bad:
        return unknown(f"{text}; cpu.throttled is not measured: it may be its own quota"), _learn(
            config, sight, memory, windows, limit, interfered=False
        )
    elif len(seen) < config.windows and len(bad) + config.windows - len(seen) >= config.bad:
        # What was not measured could make it interference.
        return unknown(f"only {len(seen)} of {config.windows} windows of cpu.wait"), _learn(
            config, sight, memory, windows, limit, interfered=False
        )
    else:
        verdict = Verdict.SUSPECT if bad else Verdict.OK
        text += f"; {len(bad)} of the last {len(seen)} windows" if bad else ""
    held = _learn(config, sight, memory, windows, limit, interfered=verdict is Verdict.INTERFERED)
    return Opinion(verdict=verdict, evidence=text, severity=severity(worst.wait, limit), gap=gap), held


def _limit(config: RunQueueConfig, healthy: Moments) -> float:
    """The share above which a window is bad: the own past's if that is stricter than the fixed one."""
    if healthy.count < _LEARN:
        return config.limit_percent
    own = healthy.limit(config.sigmas, max(_SIGMA_LEAST, _SIGMA_SHARE * healthy.mean))
    return min(config.limit_percent, max(config.floor_percent, own))


def _learn(
    config: RunQueueConfig,
    sight: Sight,
    memory: RunQueueMemory,
    windows: list[_Seen | None],
    limit: float,
    *,
    interfered: bool,
) -> RunQueueMemory:
    """Take in the oldest window once it has left the five: by then it is known whether it was part of trouble."""
    since = (sight.now if memory.since_s is None else memory.since_s) if interfered else None
    length = max(config.window_s, interval_s(sight))
    oldest = windows[-1]
    if oldest is None or sight.now - memory.learned_s < length:
        return RunQueueMemory(healthy=memory.healthy, learned_s=memory.learned_s, since_s=since)
    healthy = memory.healthy
    normal = since is None or sight.now - since >= config.relearn_s
    throttled = oldest.throttled is not None and oldest.throttled > config.throttled_percent
    # One bad window alone is part of any healthy past; those around confirmed interference are not.
    troubled = sum(1 for one in windows if one is not None and one.wait > limit) >= config.bad
    if (normal and not throttled and not troubled) or (since is not None and normal):
        healthy = healthy.with_one(oldest.wait)
        if healthy.count > _KEEP:
            healthy = healthy.aged(_KEEP / healthy.count)
    return RunQueueMemory(healthy=healthy, learned_s=sight.now, since_s=since)


DETECTOR = Detector(
    name="run_queue",
    summary="tasks wait for a CPU although the victim's own quota lets them run",
    config_type=RunQueueConfig,
    memory_type=RunQueueMemory,
    signals=lambda _: ("cpu.wait", "cpu.delay", "cpu.wait_milli", "cpu.throttled"),
    judge=judge,
)
