from typing import Any

import pytest

from reconciler.detectors.cache import DETECTOR, CacheDetectorConfig
from state.evidence import ContendedResource, DetectorVerdict
from tests.reconciler.detectors.scene import VICTIM, Scene, Values, be, judged, verdicts

MIB = 1 << 20


def step(before: float, after: float) -> Values:
    return lambda at: before if at < 40 else after


def run(
    misses: Values, held: Values, be_held: Values, steps: int = 80, use: Values = 1000, **config: Any
) -> list[DetectorVerdict]:
    signals: dict[str, dict[str, Values]] = {
        VICTIM: {"llc.misses": misses, "llc.occupancy": held, "cpu.use": use},
        "pod:b": {"llc.occupancy": be_held},
    }
    made = CacheDetectorConfig(**{"for_s": 3, "clear_s": 3, **config})
    return judged(DETECTOR, made, Scene(signals, [be("b")], every_s=45), steps)


FALLS = step(20.0 * MIB, 4.0 * MIB)
GROWS = step(1.0 * MIB, 20.0 * MIB)


@pytest.mark.parametrize(
    ("misses", "held", "be_held", "expected"),
    [
        (step(4, 9), FALLS, GROWS, "i"),
        (step(4, 9), 20.0 * MIB, 1.0 * MIB, "s"),  # it misses more, and has its part
        (4, FALLS, GROWS, "s"),  # it has lost its part, and does not miss it
        (4, 20.0 * MIB, 1.0 * MIB, "o"),
        (step(4, 9), [], [], "i"),  # misses are all there is
        ([], FALLS, GROWS, "i"),  # so is the part
        ([], FALLS, 1.0 * MIB, "o"),  # no pod has taken it
        (step(0.2, 1.5), [], [], "o"),  # few misses are harmless
        ([], [], GROWS, "u"),
    ],
)
def test_signs(misses: Values, held: Values, be_held: Values, expected: str) -> None:
    assert verdicts(run(misses, held, be_held, 60))[-1] == expected


def test_less_to_do_loses_cache_to_nobody_and_too_short_a_past_is_unknown() -> None:
    assert verdicts(run([], FALLS, GROWS, 60, use=step(1000, 200)))[-1] == "o"
    assert set(verdicts(run(4, [], [], 8))) == {"u"}


def test_evidence() -> None:
    last = run(step(4, 9), FALLS, GROWS, 60)[-1]
    assert last.evidence == (
        "9 misses per 1000 instructions, usually 4, holds 4 MiB of the cache, usually 20 MiB; BE work 20 MiB"
    )
    assert (last.resource, last.severity) == (ContendedResource.CACHE, 1.5)
