"""cache: the victim misses the last-level cache more than usual, and has lost its part of it to other pods.

Two signs: misses for each 1000 instructions above a multiple of what is usual for this pod, and a part of the cache
that has collapsed while the pod runs as much as usual and BE work has a significant part.

Source: rubik's dynCache (misses decide, by a fixed limit).
"""

from typing import Annotated, Final

from msgspec import Meta

from reconciler.detectors.base import Detector, VictimView, unknown
from reconciler.detectors.neighbours import be_use, change, collapsed
from reconciler.detectors.timer import DebounceState, DebounceTiming, paused, step
from reconciler.runtime.format import number, quantity
from state.evidence import ContendedResource, DetectorVerdict, Verdict

_MISSES: Final = "llc.misses"
_OCCUPANCY: Final = "llc.occupancy"


class CacheDetectorConfig(DebounceTiming, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """More misses, less of the cache."""

    rise_percent: Annotated[
        int, Meta(ge=105, le=10_000, description="cache misses above this percentage of the usual value are bad")
    ] = 150
    misses: Annotated[float, Meta(ge=0, le=1000, description="fewer misses per 1000 instructions are never bad")] = 2.0
    left_percent: Annotated[
        int, Meta(ge=5, le=95, description="cache occupancy below this percentage of the usual value is a collapse")
    ] = 50
    be_percent: Annotated[
        int, Meta(ge=0, le=100, description="minimum share of BE work in the cache used by it and the victim")
    ] = 30


def evaluate(
    config: CacheDetectorConfig, sight: VictimView, memory: DebounceState | None
) -> tuple[DetectorVerdict, DebounceState]:
    texts: list[str] = []
    degrees: list[float] = []
    signs: list[bool] = []
    missed = change(sight, _MISSES)
    if missed is not None:
        # A fixed limit, as rubik's, cannot identify a scanning program: the pod's own past is the measure.
        limit = max(config.misses, missed.usual * config.rise_percent / 100)
        texts.append(f"{number(missed.now)} misses per 1000 instructions, usually {number(missed.usual)}")
        signs.append(missed.now > limit)
        degrees.append(min(1000.0, missed.now / limit) if limit > 0 else float(missed.now > 0))
    held_by_be = be_use(sight, _OCCUPANCY)
    fallen = collapsed(sight, _OCCUPANCY, config.left_percent / 100)
    if fallen is not None and held_by_be is not None:
        part, down = fallen
        both = held_by_be + part.now
        share = 100 * held_by_be / both if both > 0 else 0.0
        texts.append(
            f"holds {quantity(part.now, 'bytes')} of the cache, usually {quantity(part.usual, 'bytes')}; "
            f"BE work {quantity(held_by_be, 'bytes')}"
        )
        signs.append(down and share >= config.be_percent)
        degrees.append(min(1000.0, config.left_percent / 100 / max(part.ratio, 1e-3)))
    if not signs:
        return unknown(f"too few samples of {_MISSES} and {_OCCUPANCY}"), paused(memory, sight.now)
    at = max(sight.measured_at(text) for text in (_MISSES, _OCCUPANCY) if sight.value(text) is not None)
    # Where both signs are measured both must agree.
    held = step(memory, at, config, breached=all(signs), cleared=not any(signs), look_s=sight.patience_s(_MISSES))
    verdict = held.verdict
    # One of two signs is a suspicion, for however long.
    if verdict is Verdict.OK and any(signs):
        verdict = Verdict.SUSPECT
    return DetectorVerdict(
        verdict=verdict, text=", ".join(texts), resource=ContendedResource.CACHE, severity=min(degrees)
    ), held


DETECTOR = Detector(
    name="cache",
    summary="more cache misses than usual, and cache space lost to others",
    config_type=CacheDetectorConfig,
    memory_type=DebounceState,
    signals=lambda _: (_MISSES, _OCCUPANCY, "cpu.use"),
    judge=evaluate,
)
