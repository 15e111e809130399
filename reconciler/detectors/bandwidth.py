"""bandwidth: memory traffic is near the machine's peak, or the victim gets much less of it than usual.

Near: the node's traffic against a measured peak (``peak_bps``; the kernel reports none). Collapse, for machines with an
unknown peak: the victim moves less than half of its usual bytes while it runs as much as usual.

Source: Heracles (DRAM bandwidth above 90 % of peak takes cores from BE work).
"""

from typing import Annotated, Final

from msgspec import Meta

from reconciler.detectors.base import Detector, VictimView, unknown
from reconciler.detectors.neighbours import be_use, collapsed
from reconciler.detectors.timer import DebounceState, DebounceTiming, paused, step
from reconciler.runtime.format import percent, rate
from state.evidence import NODE, ContendedResource, DetectorVerdict

_SIGNAL: Final = "memory.bandwidth"


class BandwidthDetectorConfig(DebounceTiming, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bandwidth near the peak, or a collapse."""

    peak_bps: Annotated[
        int, Meta(ge=0, description="the node's peak memory bandwidth; 0: unknown, only the victim's drop counts")
    ] = 0
    limit_percent: Annotated[
        int, Meta(ge=10, le=100, description="node bandwidth above this share of the peak is near saturation")
    ] = 90
    left_percent: Annotated[
        int, Meta(ge=5, le=95, description="victim bandwidth below this share of its usual value is a collapse")
    ] = 50
    be_percent: Annotated[int, Meta(ge=0, le=100, description="minimum share of BE work in the bandwidth")] = 20


def evaluate(
    config: BandwidthDetectorConfig, sight: VictimView, memory: DebounceState | None
) -> tuple[DetectorVerdict, DebounceState]:
    total = sight.value(_SIGNAL, NODE)
    own = sight.value(_SIGNAL) if sight.pod is not None else None
    be = be_use(sight, _SIGNAL)
    fallen = collapsed(sight, _SIGNAL, config.left_percent / 100) if sight.pod is not None else None
    near = total / (config.peak_bps * config.limit_percent / 100) if total is not None and config.peak_bps else None
    if near is None and fallen is None:
        what = "the victim" if not config.peak_bps else "the node or the victim"
        return unknown(f"too few samples of {_SIGNAL} for {what}"), paused(memory, sight.now)
    if be is None:
        return unknown(f"{_SIGNAL} of BE pods not available"), paused(memory, sight.now)
    texts: list[str] = []
    degree = near or 0.0
    if near is not None and total is not None:
        texts.append(f"node {rate(total)} of {rate(config.peak_bps)}")
    if fallen is not None:
        change, down = fallen
        texts.append(f"victim {rate(change.now)}, usually {rate(change.usual)}")
        if down or near is None:
            degree = max(degree, min(1000.0, config.left_percent / 100 / max(change.ratio, 1e-3)))
    whole = total if total is not None else be + (own or 0.0)
    share = 100 * be / whole if whole > 0 else 0.0
    texts.append(f"BE share {percent(share)}")
    bad = (near is not None and near > 1) or (fallen is not None and fallen[1])
    # Without BE work the victim and other online pods cause it themselves.
    blamed = share >= config.be_percent
    at = max(
        (sight.measured_at(_SIGNAL, text) for text in (sight.subject, NODE) if sight.value(_SIGNAL, text) is not None),
        default=sight.now,
    )
    held = step(
        memory, at, config, breached=bad and blamed, cleared=not (bad and blamed), look_s=sight.patience_s(_SIGNAL)
    )
    return DetectorVerdict(
        verdict=held.verdict,
        text=", ".join(texts),
        resource=ContendedResource.CACHE,
        severity=degree if blamed else 0.0,
    ), held


DETECTOR = Detector(
    name="bandwidth",
    summary="memory bandwidth is near its peak, or the victim's share of it has collapsed",
    config_type=BandwidthDetectorConfig,
    memory_type=DebounceState,
    signals=lambda _: (_SIGNAL, "cpu.use"),
    judge=evaluate,
)
