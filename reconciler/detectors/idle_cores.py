"""idle_cores: less CPU time is idle in the victim's pool than a burst of it would need, and BE work uses some of it.

The sizes are those of the policy ``idle_buffer``, which keeps to them ten times a second; this detector reports that it
could not, or is off.

Source: PerfIso (keep B cores idle always).
"""

from typing import Annotated, Final

from msgspec import Meta

from reconciler.detectors.base import Detector, VictimView, unknown
from reconciler.detectors.neighbours import be_use
from reconciler.detectors.subjects import POOL, subject_of
from reconciler.detectors.threshold import severity
from reconciler.detectors.timer import DebounceState, DebounceTiming, paused, step
from reconciler.runtime.format import cpu, cpus
from state.evidence import NODE, DetectorVerdict

_IDLE: Final = "cpu.idle"


class IdleCoresConfig(DebounceTiming, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Too little idle CPU while BE work runs."""

    for_s: Annotated[float, Meta(ge=0, le=86400, description="duration of the shortage before it counts")] = 3.0
    clear_s: Annotated[float, Meta(ge=0, le=86400, description="duration without shortage before it clears")] = 10.0
    buffer_milli: Annotated[
        int, Meta(ge=0, le=8_192_000, description="required idle CPU, in thousandths; the larger of the two applies")
    ] = 250
    buffer_percent: Annotated[
        int, Meta(ge=0, le=90, description="required idle share of the pool's CPUs; the larger of the two applies")
    ] = 10
    be_percent: Annotated[int, Meta(ge=0, le=100, description="minimum share of the victim's CPUs used by BE work")] = 5


def evaluate(
    config: IdleCoresConfig, sight: VictimView, memory: DebounceState | None
) -> tuple[DetectorVerdict, DebounceState]:
    subject = subject_of(sight, POOL) if sight.pod is not None else NODE
    idle = sight.value(_IDLE, subject) if subject is not None else None
    use = sight.value("cpu.use", subject) if subject is not None else None
    if subject is None or idle is None or use is None:
        what = "the victim has no pool" if subject is None else f"{_IDLE} not available"
        return unknown(what), paused(memory, sight.now)
    top = idle + use
    buffer = max(float(config.buffer_milli), top * config.buffer_percent / 100)
    short = buffer - idle
    be = be_use(sight, "cpu.use", near=True)
    where = "the node" if subject == NODE else subject
    text = f"idle in {where}: {cpus(idle)} of {cpu(top)}, required {cpus(buffer)}"
    if short > 0 and be is None:
        return unknown(f"{text}; cpu.use of BE pods not available"), paused(memory, sight.now)
    least = top * config.be_percent / 100
    # A pool that its own pods fill up is busy, not disturbed.
    blamed = be is not None and be >= least
    if be is not None:
        text += f"; BE work uses {cpu(be)} there"
    held = step(
        memory,
        sight.measured_at(_IDLE, subject),
        config,
        breached=short > 0 and blamed,
        # Without BE work there is nothing left to take.
        cleared=short <= 0 or not blamed,
        look_s=sight.fresh_s,
    )
    if short > 0 and not blamed:
        text += ": used by online work"
    gap = min(short, be or 0.0) if short > 0 and blamed else None
    return DetectorVerdict(
        verdict=held.verdict, text=text, severity=severity(idle, buffer, -1) if blamed else 0.0, gap=gap
    ), held


DETECTOR = Detector(
    name="idle_cores",
    summary="too little idle CPU in the victim's pool while BE work uses it",
    config_type=IdleCoresConfig,
    memory_type=DebounceState,
    signals=lambda _: (_IDLE, "cpu.use"),
    judge=evaluate,
)
