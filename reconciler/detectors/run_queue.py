"""run_queue: tasks of the victim wait for a CPU while its own quota lets them run.

Time is cut into windows of 2 s. A window is bad when the waiting's share of waiting and running is above mean + 3 sigma
of the victim's own healthy past, or above a fixed limit, and the waits are long (`_hurts`). Three bad ones of the last
five are interference.

Source: Netflix's run-queue latency (always reported together with throttling).
"""

from functools import partial
from typing import Annotated, ClassVar, Final, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import replace

from reconciler.detectors.base import CALM_S, WINDOWED, Detector, VictimView, unknown
from reconciler.detectors.moments import Moments
from reconciler.detectors.threshold import severity
from reconciler.detectors.windows import GAP, highest, interval_s, weighed
from reconciler.runtime.format import number, percent
from reconciler.signals.history import SampleSeries
from state.evidence import DetectorVerdict, Verdict

_LEARN: Final = 30
"""Windows that must have been seen before the own past means anything: a minute."""
_KEEP: Final = 900.0
"""The past weighs as much as this many windows at most (half an hour), so that it follows the day."""
_SIGMA_SHARE: Final = 0.1
_SIGMA_LEAST: Final = 0.3
"""The deviation counts as at least this share of the mean and this many points: a flat line is not that exact."""
_SHORTER: Final = 5
"""Where waiting is severe, waits of a fifth of ``delay_us`` count."""
_SLACK: Final = 0.5
"""A window is evaluated when at least this part of it was sampled."""


class RunQueueConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Waiting in windows of time."""

    limit_percent: Annotated[
        float, Meta(gt=0, le=100, description="wait / (wait + run) that is bad for every workload")
    ] = 5.0
    sigmas: Annotated[
        float, Meta(ge=1, le=20, description="standard deviations above the workload's own past that are bad")
    ] = 3.0
    delay_us: Annotated[
        float, Meta(ge=0, le=10_000_000, description="a window is bad only if the mean wait is longer than this")
    ] = 1000.0
    window_s: Annotated[float, Meta(ge=0.1, le=60, description="length of a window")] = 2.0
    windows: Annotated[int, Meta(ge=1, le=20, description="number of last windows evaluated")] = 5
    bad: Annotated[int, Meta(ge=1, le=20, description="bad windows that make an interference")] = 3

    # A workload that hardly ever waits has a spread near zero: less than this harms no one.
    floor_percent: ClassVar[float] = 1.0
    # So large a share of waiting matters at short waits, too.
    severe_percent: ClassVar[float] = 20.0
    # A pod that its own quota stops waits for itself.
    throttled_percent: ClassVar[float] = 0.0
    # What lasts for half an hour is the workload's new normal: for the deviation, never for the fixed limit.
    relearn_s: ClassVar[float] = 1800.0

    def __post_init__(self) -> None:
        if self.bad > self.windows:
            raise ValueError(f"bad {self.bad} is more than windows {self.windows}")


class RunQueueMemory(Struct, frozen=True, kw_only=True):
    """The own past; ``learned_s``: up to when it has been taken in.

    ``since_s``: interference all the time since; ``last_s``: when there was trouble last.
    """

    healthy: Moments = Moments()
    learned_s: float
    since_s: float | None = None
    last_s: float = 0.0


class _Bad(NamedTuple):
    """A window, the newest 0, whose share of waiting is too high and whose waits are long; None: not measured."""

    number: int
    wait: float
    delay: float | None
    throttled: float | None


def _length(config: RunQueueConfig, sight: VictimView) -> float:
    """A window is at least as long as the sample interval."""
    return max(config.window_s, interval_s(sight))


def _seen(config: RunQueueConfig, sight: VictimView, series: SampleSeries) -> list[float | None]:
    """The share of waiting in each of the last windows, the newest first; None: too little of it was measured."""
    length, now, fresh_s = _length(config, sight), sight.now, sight.fresh_s
    seen: list[float | None] = [None] * config.windows
    index = config.windows - 1
    end = now - index * length
    start = end - length  # of the oldest window
    patience_s = fresh_s * GAP
    times, waits = series.after(start)
    before = times[0] - interval_s(sight)
    total = seen_s = 0.0
    for at, wait in zip(times, waits, strict=True):
        begin, before = before, at
        if at <= start:
            continue
        whole = at - begin <= patience_s
        if at - begin > fresh_s:
            begin = at - fresh_s
        if begin < start:  # noqa: PLR1730  # as in `windows.weighed`
            begin = start
        while at > end and index:
            if begin < end:
                if whole:
                    # The part that it covers of a window before its own.
                    total += wait * (end - begin)
                    seen_s += end - begin
                begin = end
            seen[index] = _share(total, seen_s, length)
            index -= 1
            end = now - index * length
            total = seen_s = 0.0
        total += wait * (at - begin)
        seen_s += at - begin
    seen[index] = _share(total, seen_s, length)
    return seen


def _share(total: float, seen_s: float, length: float) -> float | None:
    return total / seen_s if seen_s > 0 and seen_s >= _SLACK * length else None


def _mean(sight: VictimView, signal: str, start: float, end: float) -> float | None:
    series = sight.series(signal)
    pair = None if series is None else weighed(series, start, end, sight.fresh_s)
    return None if pair is None else pair[0]


def _throttled(config: RunQueueConfig, sight: VictimView, index: int) -> float | None:
    """The highest percentage of periods throttled by the pod's own quota, in or just before a window."""
    length = _length(config, sight)
    end = sight.now - index * length
    series = sight.series("cpu.throttled")
    # Just before, too: the wait of a task that was stopped at the end of one sample is counted in the next.
    return None if series is None else highest(series, end - length - interval_s(sight), end, sight.fresh_s)


def _in_window(config: RunQueueConfig, sight: VictimView, signal: str, index: int) -> float | None:
    length = _length(config, sight)
    end = sight.now - index * length
    return _mean(sight, signal, end - length, end)


def _hurting(config: RunQueueConfig, sight: VictimView, index: int, wait: float) -> _Bad | None:
    """None: the waits are too short. On a busy node that is the usual case, so the delay is read first."""
    delay = _in_window(config, sight, "cpu.delay", index)
    return _Bad(index, wait, delay, _throttled(config, sight, index)) if _hurts(config, wait, delay) else None


def evaluate(
    config: RunQueueConfig, sight: VictimView, memory: RunQueueMemory | None
) -> tuple[DetectorVerdict, RunQueueMemory]:
    if memory is None:
        memory = RunQueueMemory(learned_s=sight.now)
    series = sight.series("cpu.wait")
    if series is None or series.fresh(sight.now, sight.fresh_s) is None or sight.value("cpu.delay") is None:
        lost = "cpu.wait" if sight.value("cpu.wait") is None else "cpu.delay"
        return unknown(f"{lost} not available"), replace(memory, learned_s=sight.now, since_s=None)
    windows = _seen(config, sight, series)
    seen = [wait for wait in windows if wait is not None]
    if not seen:
        return unknown("less than one window of cpu.wait"), memory
    limit = _limit(config, memory.healthy)
    high = [(index, wait) for index, wait in enumerate(windows) if wait is not None and wait > limit]
    opinion = _opinion(config, sight, seen, high, limit)
    interfered = opinion.verdict is Verdict.INTERFERED
    return opinion, _learn(config, sight, memory, windows[-1], len(high), interfered=interfered)


def _opinion(
    config: RunQueueConfig, sight: VictimView, seen: list[float], too_high: list[tuple[int, float]], limit: float
) -> DetectorVerdict:
    missing = config.windows - len(seen)
    if not too_high and missing < config.bad:
        # The usual case.
        parts = partial(_words, seen[0], None, limit, "")
        return DetectorVerdict(verdict=Verdict.OK, text=parts, severity=severity(seen[0], limit))
    high = [item for index, wait in too_high if (item := _hurting(config, sight, index, wait)) is not None]
    # A throttled task waits in the run queue as well, which no neighbour causes.
    own = [item for item in high if item.throttled is not None and item.throttled > config.throttled_percent]
    unmeasured = [item for item in high if item.throttled is None or (item.delay is None and item not in own)]
    bad = [item for item in high if item not in own and item not in unmeasured]
    worst = max(bad or unmeasured, key=lambda item: item.wait, default=None)
    wait = seen[0] if worst is None else worst.wait
    parts = partial(_words, wait, worst, limit, f"; {len(bad)} of the last {len(seen)} windows" if bad else "")
    verdict = Verdict.SUSPECT if bad else Verdict.OK
    gap = None
    if len(bad) >= config.bad:
        verdict = Verdict.INTERFERED
        means = [_in_window(config, sight, "cpu.wait_milli", item.number) for item in bad]
        milli = [value for value in means if value is not None]
        gap = sum(milli) / len(milli) if milli else None
    elif own:
        wait = max(item.wait for item in own)
        verdict = Verdict.OK
        parts = partial(_own_words, wait, max(item.throttled or 0.0 for item in own))
    elif len(bad) + len(unmeasured) >= config.bad:
        return unknown(f"{parts()}; cpu.throttled or cpu.delay is not measured: may be caused by its own quota")
    elif missing and len(bad) + len(unmeasured) + missing >= config.bad:
        # What was not measured could make it interference.
        return unknown(f"{parts()}; only {len(seen)} of {config.windows} windows were measured")
    return DetectorVerdict(verdict=verdict, text=parts, severity=severity(wait, limit), gap=gap)


def _words(wait: float, worst: _Bad | None, limit: float, count: str) -> str:
    text = f"waits for a CPU {percent(wait)} of the time"
    if worst is not None and worst.delay is not None:
        text += f", {number(worst.delay / 1000)} ms each"
    return f"{text}, limit {percent(limit)}{count}"


def _own_words(wait: float, cut: float) -> str:
    return f"own quota: waits {percent(wait)} of the time, throttled in {percent(cut)} of its periods"


def _hurts(config: RunQueueConfig, wait: float, delay: float | None) -> bool:
    """Whether the wait is significant: long waits, or shorter ones that are a large part of short requests."""
    # A service with requests of 0.2 ms never waits for 1 ms on average, and is four times slower all the same.
    return delay is None or delay > config.delay_us / (_SHORTER if wait > config.severe_percent else 1)


def _limit(config: RunQueueConfig, healthy: Moments) -> float:
    """The share above which a window is bad: the own past's if that is stricter than the fixed one."""
    if healthy.count < _LEARN:
        return config.limit_percent
    own = healthy.limit(config.sigmas, max(_SIGMA_LEAST, _SIGMA_SHARE * healthy.mean))
    return min(config.limit_percent, max(config.floor_percent, own))


def _learn(
    config: RunQueueConfig,
    sight: VictimView,
    memory: RunQueueMemory,
    oldest: float | None,
    high: int,
    *,
    interfered: bool,
) -> RunQueueMemory:
    """Take in the oldest window: by now it is known whether it was part of trouble. ``high``: those above the limit."""
    since = (sight.now if memory.since_s is None else memory.since_s) if interfered else None
    # Several bad windows are trouble, proved or not; a single one is part of any healthy past.
    last = sight.now if interfered or high >= config.bad else memory.last_s
    # Frames come a little early or late: a window that is due is not left out for that.
    if oldest is None or sight.now - memory.learned_s < _length(config, sight) - interval_s(sight) / 2:
        # Most evaluations change nothing.
        same = since == memory.since_s and last == memory.last_s
        return memory if same else replace(memory, since_s=since, last_s=last)
    index = config.windows - 1
    troubled = sight.now - index * _length(config, sight) <= last
    lasting = since is not None and sight.now - since >= config.relearn_s
    healthy = memory.healthy
    if lasting or (not troubled and (_throttled(config, sight, index) or 0.0) <= config.throttled_percent):
        healthy = healthy.with_one(oldest)
        if healthy.count > _KEEP:
            healthy = healthy.aged(_KEEP / healthy.count)
    return RunQueueMemory(healthy=healthy, learned_s=sight.now, since_s=since, last_s=last)


DETECTOR = Detector(
    name="run_queue",
    summary="tasks wait for a CPU without being throttled",
    config_type=RunQueueConfig,
    memory_type=RunQueueMemory,
    signals=lambda _: ("cpu.wait", "cpu.delay", "cpu.wait_milli", "cpu.throttled"),
    judge=evaluate,
    near=lambda config: WINDOWED if config.window_s >= CALM_S else 0.0,
)
