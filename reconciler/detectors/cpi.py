"""cpi: the victim's instructions take more cycles than this workload's usually do (CPI²).

Every minute gives one value: the mean of what was measured in it while the pod used at least a quarter of a CPU. A
workload's usual value is learned from all its pods on this node, kept over restarts, and halved in weight every day. A
value above mean + 2 sigma is an outlier; three within five minutes are interference.

Without a PMU another measure is used (`MEASURES`), and named in the verdict.

Source: CPI² (Google, EuroSys 2013), the merge as in rubik; what is learned differs (`reconciler.detectors.moments`).
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, ClassVar, Final, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import replace

from reconciler.detectors.base import WINDOWED, Detector, VictimView, unknown
from reconciler.detectors.moments import Moments, moments_of
from reconciler.detectors.threshold import severity
from reconciler.runtime.format import cpu, duration, number
from state.evidence import ContendedResource, DetectorVerdict, Verdict

_BANDWIDTH_FLOOR: Final = 1e6
"""Bytes/s of memory traffic below which time per byte is not significant."""
_CLOCK_S: Final = 60.0
"""Wall clock and monotonic clock moved apart by more: another boot, or the clock was set."""
_SLEW_S: Final = 1.0
"""Both clocks drift less than this; a larger difference is recorded again."""


class CpiConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Outliers of cycles per instruction."""

    sigmas: Annotated[
        float, Meta(ge=1, le=10, description="standard deviations above the workload's mean that are an outlier")
    ] = 2.0
    outliers: Annotated[int, Meta(ge=1, le=20, description="outliers that make an interference")] = 3
    within_s: Annotated[float, Meta(ge=10, le=3600, description="time window of the outliers")] = 300.0
    every_s: Annotated[float, Meta(ge=1, le=120, description="one value per interval")] = 60.0
    gate_milli: Annotated[
        int, Meta(ge=0, le=64_000, description="values are ignored while the pod uses less CPU than this")
    ] = 250
    samples: Annotated[
        int, Meta(ge=10, le=100_000, description="values of a workload needed before it is evaluated")
    ] = 60
    proxies: Annotated[bool, Meta(description="use another signal on machines without a PMU")] = True

    # Load repeats by the day.
    half_life_s: ClassVar[float] = 86400.0
    # A level that lasts so long is a new version of the program, not interference: it is learned.
    relearn_s: ClassVar[float] = 21600.0
    # Counters are read once a minute: two of them, and some.
    stale_s: ClassVar[float] = 130.0

    def __post_init__(self) -> None:
        if self.outliers * self.every_s > self.within_s:
            raise ValueError(
                f"within_s {number(self.within_s)} holds no {self.outliers} outliers of {number(self.every_s)} s each"
            )


class CpiBaseline(Struct, frozen=True, array_like=True):
    """What a workload needs by one measure, and up to when (wall clock) it has been aged."""

    moments: Moments = Moments()
    wall_s: float = 0.0


class PodPast(Struct, frozen=True, array_like=True):
    """The last minutes of one pod, on the monotonic clock.

    ``values``: (at, value) not learned yet. ``bad``: when outliers were. ``since_s``: interference all the time since.
    ``last``: the newest value, learned or not.
    """

    measure: str
    begun_s: float
    values: tuple[tuple[float, float], ...] = ()
    bad: tuple[float, ...] = ()
    since_s: float | None = None
    last: tuple[float, float] | None = None


class CpiMemory(Struct, frozen=True, kw_only=True):
    """All that is known of one workload. ``clock_s``: wall clock minus monotonic clock when ``pods`` was written."""

    clock_s: float = 0.0
    learned: Mapping[str, CpiBaseline] = {}
    pods: Mapping[str, PodPast] = {}


class _Measure(NamedTuple):
    """One of them: the series it needs and the least deviation, as a share of the mean and in its own unit."""

    name: str
    unit: str
    resource: ContendedResource
    share: float
    floor: float


MEASURES: Final = (
    _Measure("cpi", "", ContendedResource.CACHE, 0.05, 0.0),
    _Measure("cpu.wait", " %", ContendedResource.CPU, 0.1, 0.5),
    _Measure("memory.bandwidth", " CPU-ns/B", ContendedResource.CACHE, 0.1, 0.0),
    _Measure("cpu.pressure", " %", ContendedResource.CPU, 0.1, 1.0),
)
"""In the order in which they are taken: cycles per instruction, the share of waiting in the run queue, CPU time for
each byte of memory traffic, time in which tasks waited for a CPU.
"""


def evaluate(config: CpiConfig, sight: VictimView, memory: CpiMemory | None) -> tuple[DetectorVerdict, CpiMemory]:
    memory = _current(sight, memory)
    pods = memory.pods
    measure = _measure(config, sight)
    if sight.pod is None or measure is None:
        text = "CPI is measured for pods only" if sight.pod is None else f"{_wanted(config)} not available"
        return unknown(text), memory
    uid = sight.pod.uid
    past = pods.get(uid)
    # Each measure has its own history: values of two measures are not comparable.
    if past is None or past.measure != measure.name or past.begun_s > sight.now:
        past = PodPast(measure=measure.name, begun_s=sight.now)
    elif sight.now - past.begun_s > config.every_s + sight.patience_s(measure.name):
        # The daemon was down, or nothing was measured: a part of that period gives no mean of it.
        past = replace(past, begun_s=sight.now)
    learned = memory.learned.get(measure.name, CpiBaseline(wall_s=sight.frame.wall_s))
    limit = _limit(config, learned.moments, measure)
    judged = learned.moments.count >= config.samples
    if sight.now - past.begun_s >= config.every_s:
        past = _taken(config, sight, measure, past, limit if judged else None)
    past, ripe = _ripe(config, sight.now, _recent(config, sight.now, past))
    learned = _learn(config, learned, ripe, sight.frame.wall_s)
    kept = memory
    # Between two values nothing changes.
    if past is not pods.get(uid) or learned is not memory.learned.get(measure.name):
        kept = replace(memory, learned={**memory.learned, measure.name: learned}, pods={**pods, uid: past})
    if not judged:
        count = int(learned.moments.count)
        return unknown(f"{_title(measure)}: learning baseline, {count} of {config.samples} samples"), kept
    return _opinion(config, sight, measure, past, limit), kept


def learned_s(memory: CpiMemory) -> float:
    """When the workload was last learned from, by any measure."""
    return max((baseline.wall_s for baseline in memory.learned.values()), default=0.0)


def _current(sight: VictimView, memory: CpiMemory | None) -> CpiMemory:
    """The memory without outdated histories: of another boot, or of pods that were removed."""
    clock = sight.frame.wall_s - sight.now
    if memory is None:
        return CpiMemory(clock_s=clock)
    moved = abs(clock - memory.clock_s)
    pods = memory.pods if moved <= _CLOCK_S else {}
    for uid in pods:
        if uid not in sight.frame.pods:
            # Of a removed pod only what the workload learned from it remains.
            pods = {text: past for text, past in pods.items() if text in sight.frame.pods}
            break
    if pods is memory.pods and moved <= _SLEW_S:
        return memory
    return CpiMemory(clock_s=clock, learned=memory.learned, pods=pods)


def _recent(config: CpiConfig, now: float, past: PodPast) -> PodPast:
    """Without outliers that are long ago, and whether those that are left make interference."""
    if not past.bad and past.since_s is None:
        return past
    bad = tuple(at for at in past.bad if now - at <= config.within_s)
    since = (now if past.since_s is None else past.since_s) if len(bad) >= config.outliers else None
    return past if (bad, since) == (past.bad, past.since_s) else replace(past, bad=bad, since_s=since)


def _wanted(config: CpiConfig) -> str:
    return ", ".join(measure.name for measure in MEASURES) if config.proxies else MEASURES[0].name


def _measure(config: CpiConfig, sight: VictimView) -> _Measure | None:
    """The first measure available here; a measure that needs another signal is available only together with it."""
    for measure in MEASURES if config.proxies else MEASURES[:1]:
        if _fresh(config, sight, measure.name) and (
            measure.name != "cpu.wait" or _fresh(config, sight, "cpu.throttled")
        ):
            return measure
    return None


def _fresh(config: CpiConfig, sight: VictimView, signal: str) -> bool:
    series = sight.series(signal)
    return series is not None and series.fresh(sight.now, config.stale_s) is not None


def _limit(config: CpiConfig, moments: Moments, measure: _Measure) -> float:
    return moments.limit(config.sigmas, max(measure.floor, measure.share * moments.mean))


def _taken(config: CpiConfig, sight: VictimView, measure: _Measure, past: PodPast, limit: float | None) -> PodPast:
    """The past with the period that has just ended."""
    value = _value(config, sight, measure, past.begun_s)
    if value is None:
        return replace(past, begun_s=sight.now)
    point = (sight.now, value)
    bad = (*past.bad, sight.now) if limit is not None and value > limit else past.bad
    return replace(past, begun_s=sight.now, values=(*past.values, point), bad=bad, last=point)


def _value(config: CpiConfig, sight: VictimView, measure: _Measure, begun_s: float) -> float | None:
    """The mean of one period; None when half of it does not count, because the pod was below the gate or throttled."""
    points = _since(sight, sight.subject, measure.name, begun_s)
    uses = _since(sight, sight.subject, "cpu.use", begun_s - sight.fresh_s)
    quota = _since(sight, sight.subject, "cpu.throttled", begun_s - sight.fresh_s)
    good: list[float] = []
    for at, value in points.items():
        use = _near(uses, at, sight.fresh_s)
        if use is None or use < config.gate_milli:
            continue
        if measure.name == "cpu.wait":
            # A task that the own quota stops waits in the run queue, too.
            own = _near(quota, at, sight.fresh_s)
            if own is None or own > 0:
                continue
        if measure.name == "memory.bandwidth":
            if value < _BANDWIDTH_FLOOR:
                continue
            # Thousandths of a CPU are 10^6 ns of CPU time a second.
            value = use * 1e6 / value  # noqa: PLW2901  # the measure made of both
        good.append(value)
    if len(good) * 2 <= len(points):
        return None
    # A slow byte is the neighbours' doing only while they move at least as many.
    if measure.name == "memory.bandwidth" and _others(sight, begun_s) < moments_of(points.values()).mean:
        return None
    return moments_of(good).mean


def _others(sight: VictimView, begun_s: float) -> float:
    """Memory traffic of all BE pods together in one period, as far as it is known."""
    return sum(
        moments_of(_since(sight, pod.subject, "memory.bandwidth", begun_s).values()).mean
        for pod in sight.frame.pods.values()
        if not pod.pod_class.online
    )


def _since(sight: VictimView, subject: str, signal: str, at_s: float) -> dict[float, float]:
    series = sight.history.series(subject, signal)
    return {} if series is None else dict(point for point in series.tail(at_s) if point[0] > at_s)


def _near(points: Mapping[float, float], at: float, within_s: float) -> float | None:
    """The value measured at a moment, or closest to it. Most readers of one frame measure at the same moment."""
    if at in points:
        return points[at]
    best = min(points, key=lambda other: abs(other - at), default=None)
    return points[best] if best is not None and abs(best - at) <= within_s else None


def _ripe(config: CpiConfig, now: float, past: PodPast) -> tuple[PodPast, list[float]]:
    """What may be learned now: values of which it is known that they were no part of interference."""
    if past.since_s is not None and now - past.since_s < config.relearn_s:
        # All since the first outlier is left out, good values as well: half of a distribution teaches a wrong one.
        kept = tuple(value for value in past.values if value[0] < past.bad[0])
        past = past if len(kept) == len(past.values) else replace(past, values=kept)
    if not past.values or now - past.values[0][0] <= config.within_s:
        return past, []
    ripe = [value for at, value in past.values if now - at > config.within_s]
    return replace(past, values=tuple(value for value in past.values if now - value[0] <= config.within_s)), ripe


def _learn(config: CpiConfig, learned: CpiBaseline, values: list[float], wall_s: float) -> CpiBaseline:
    if not values:
        return learned
    # A clock that was set back ages nothing, and what is learned from then on ages by it.
    age_s = max(0.0, wall_s - learned.wall_s)
    aged = learned.moments.aged(0.5 ** (age_s / config.half_life_s))
    return CpiBaseline(aged.merged(moments_of(values)), wall_s)


def _title(measure: _Measure) -> str:
    return "CPI" if measure is MEASURES[0] else measure.name


def _opinion(config: CpiConfig, sight: VictimView, measure: _Measure, past: PodPast, limit: float) -> DetectorVerdict:
    name = _title(measure)
    if past.last is None or sight.now - past.last[0] > config.within_s:
        use = sight.value("cpu.use")
        used = "unknown" if use is None else cpu(use)
        return unknown(f"{name}: no usable value in {duration(config.within_s)} (CPU use {used})")
    verdict = Verdict.INTERFERED if past.since_s is not None else Verdict.SUSPECT if past.bad else Verdict.OK
    return DetectorVerdict(
        verdict=verdict,
        text=partial(_words, config, measure, past, past.last[1], limit),
        resource=measure.resource,
        severity=severity(past.last[1], limit),
        gap=sight.value("cpu.wait_milli") if measure.name == "cpu.wait" and past.bad else None,
        proxy=None if measure is MEASURES[0] else measure.name,
    )


def _words(config: CpiConfig, measure: _Measure, past: PodPast, value: float, limit: float) -> str:
    text = f"{_title(measure)} {number(value)}{measure.unit}, limit {number(limit)}{measure.unit}"
    if past.bad:
        text += f"; {len(past.bad)} outliers in {duration(config.within_s)}"
    return text


def _signals(config: CpiConfig) -> tuple[str, ...]:
    proxies = ("cpu.wait", "cpu.throttled", "cpu.wait_milli", "memory.bandwidth", "cpu.pressure")
    return ("cpi", "cpu.use", *(proxies if config.proxies else ()))


DETECTOR = Detector(
    name="cpi",
    summary="more cycles per instruction than usual for this workload (CPI²)",
    config_type=CpiConfig,
    memory_type=CpiMemory,
    signals=_signals,
    judge=evaluate,
    near=lambda _: WINDOWED,
    learned_s=learned_s,
)
