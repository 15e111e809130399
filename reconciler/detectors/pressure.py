"""pressure: a victim (or the node) waits for CPU, memory or disk too much, by the kernel's stall times (PSI).

Two forms. ``above``: avg10 above the limit all the time. ``rising``: avg60 above the limit for as long, avg10 above it
too, and not falling fast. A stall of one minute that has just ended fulfils neither.

Source: oomd (pressure_above, pressure_rising_beyond with its factor 0.85), senpai (averages from stall totals).
"""

from functools import partial
from typing import Annotated, ClassVar, Final, Literal

from msgspec import Meta

from reconciler.detectors.base import Detector, VictimView, unknown
from reconciler.detectors.subjects import subject_of
from reconciler.detectors.threshold import severity
from reconciler.detectors.timer import DebounceState, DebounceTiming, paused, step
from reconciler.detectors.windows import mean
from reconciler.runtime.format import duration, number
from state.evidence import ContendedResource, DetectorVerdict, Verdict

SHORT_S: Final = 10.0
LONG_S: Final = 60.0
_BEFORE_S: Final = 5.0
"""Distance of the two avg10 that show whether it falls fast: oomd's tick."""
_FULL: Final = "_full"
_RESOURCES: Final = {"cpu": ContendedResource.CPU, "memory": ContendedResource.MEMORY, "io": ContendedResource.IO}


class PressureDetectorConfig(DebounceTiming, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stall time (PSI)."""

    resource: Annotated[Literal["cpu", "memory", "io"], Meta(description="the resource")] = "cpu"
    of: Annotated[Literal["victim", "node"], Meta(description="the subject")] = "victim"
    full: Annotated[
        bool, Meta(description="full pressure (all tasks waited) instead of some; not available for cpu on the node")
    ] = False
    form: Annotated[
        Literal["above", "rising"],
        Meta(description="above: avg10 above the limit; rising: avg60 and avg10 above it, not falling fast"),
    ] = "above"
    above_percent: Annotated[float, Meta(gt=0, le=100, description="limit in percent of time")] = 10.0
    clear_percent: (
        Annotated[
            float, Meta(ge=0, le=100, description="cleared when avg10 is at most this; omitted: half of the limit")
        ]
        | None
    ) = None

    # Oomd's fast_fall_ratio, over 5 s.
    falling_fraction: ClassVar[float] = 0.85

    def __post_init__(self) -> None:
        if self.clear_percent is not None and self.clear_percent > self.above_percent:
            raise ValueError(
                f"clear_percent {number(self.clear_percent)} is above above_percent {number(self.above_percent)}"
            )
        if self.full and self.of == "node" and self.resource == "cpu":
            raise ValueError("full with of: node and resource: cpu; the kernel does not provide it")

    @property
    def signal(self) -> str:
        return f"{self.resource}.pressure{_FULL if self.full else ''}"


def evaluate(
    config: PressureDetectorConfig, sight: VictimView, memory: DebounceState | None
) -> tuple[DetectorVerdict, DebounceState]:
    signal = config.signal
    subject = subject_of(sight, config.of)
    now, patience = sight.now, sight.patience_s(signal)
    series = sight.series(signal, subject)
    if series is None or series.fresh(now, patience) is None:
        return unknown(f"{signal} not available"), paused(memory, now)
    # Averages of bypassd's own samples are the same for node files, cgroup v2 and vendor kernels, and ``cpu.pressure``
    # is without the victim's own throttling.
    short = mean(series, now, SHORT_S, patience)
    if short is None:
        return unknown(f"{signal}: less than 10 s of samples"), paused(memory, now)
    limit = config.above_percent
    breached = high = short > limit
    ready, falling = True, False
    long = before = None
    if config.form == "rising":
        long, before = mean(series, now, LONG_S, patience), mean(series, now, SHORT_S, patience, _BEFORE_S)
        if long is None or before is None:
            return unknown(f"{signal}: less than 60 s of samples"), paused(memory, now)
        # Falling fast: recovery is under way.
        falling = short < config.falling_fraction * before
        # oomd times only the long average; the other two conditions must hold at the end of that time.
        breached, ready = long > limit, high and not falling
    at = series.times[-1]
    held = step(
        memory, at, config, breached=breached, cleared=_cleared(config, short), look_s=sight.fresh_s, ready=ready
    )
    verdict = held.verdict
    if verdict is Verdict.SUSPECT and not high:
        # What made the long average high is over.
        verdict = Verdict.OK
    return DetectorVerdict(
        verdict=verdict,
        text=partial(_words, config, held, verdict, short, long, before if falling else None),
        resource=_RESOURCES[config.resource],
        severity=severity(short, limit),
        gap=sight.value("cpu.wait_milli") if high and config.resource == "cpu" else None,
    ), held


def _words(  # noqa: PLR0917  # what a `partial` holds
    config: PressureDetectorConfig,
    held: DebounceState,
    verdict: Verdict,
    short: float,
    long: float | None,
    before: float | None,
) -> str:
    """``before``: from where it falls fast."""
    limit = config.above_percent
    text = f"{config.signal}{' of the node' if config.of == 'node' else ''} {number(short)} % over 10 s"
    if long is not None:
        text += f", {number(long)} % over 60 s"
    if before is not None and short > limit:
        text += f", falling from {number(before)} %"
    text += f", limit {number(limit)} %"
    if held.active and short <= limit:
        return f"{text}, not cleared yet"
    if verdict is Verdict.SUSPECT and held.since_s is not None:
        text += f" ({duration(min(config.for_s, held.at_s - held.since_s))} of {duration(config.for_s)})"
    return text


def _cleared(config: PressureDetectorConfig, short: float) -> bool:
    clear = config.above_percent / 2 if config.clear_percent is None else config.clear_percent
    return short <= clear


DETECTOR = Detector(
    name="pressure",
    summary="waiting for CPU, memory or disk (PSI) above a limit, or rising beyond it",
    config_type=PressureDetectorConfig,
    memory_type=DebounceState,
    signals=lambda config: (config.signal,),
    judge=evaluate,
)
