import random
from typing import Any

import pytest

from reconciler.detectors.ewma import DETECTOR, EwmaConfig, expected
from state.evidence import NODE, ContendedResource, DetectorVerdict
from tests.fakes.constants import varied
from tests.reconciler.detectors.scene import VICTIM, Scene, Values, judged, verdicts


def run(values: Values, steps: int, **config: Any) -> list[DetectorVerdict]:
    made = varied(EwmaConfig(), **{"signal": "cpu.wait", **config})
    return judged(DETECTOR, made, Scene({VICTIM: {"cpu.wait": values}}), steps)


def peers_test_fires(values: list[float], count: int) -> bool:
    """The peer's: the newest sample is part of mean and deviation."""
    decay = 2 / (count + 1)
    mean = sum(values[:10]) / 10
    for value in values[10:]:
        mean = value * decay + mean * (1 - decay)
    sigma: float = (sum((value - mean) ** 2 for value in values[-count:]) / count) ** 0.5
    return abs(values[-1] - mean) > 3 * sigma


@pytest.mark.parametrize("count", [11, 12])
@pytest.mark.parametrize("height", [2.0, 100.0, 1e6])
def test_a_spike_on_a_flat_line_is_found_at_the_least_number_of_samples(count: int, height: float) -> None:
    values = [1.0] * (count - 1) + [height]
    assert not peers_test_fires(values, count)  # the flaw of the peer
    text = verdicts(run([1.0, *values], count + 1, samples=11))
    assert text == "u" * 11 + "o" * (count - 11) + "s"


FLAT = [100.0] * 20


@pytest.mark.parametrize(
    ("values", "config", "end"),
    [
        ([1.0] * 14, {}, "u" * 11 + "ooo"),  # fewer samples than eleven are unknown
        ([1.0] * 20 + [1.0000001] * 20, {}, "o" * 29),  # rounding
        ([5.0] * 30 + [50.0] * 10 + [5.0] * 10, {}, "ss" + "i" * 8 + "o" * 10),  # recovery is seen at once
        *(
            ([*FLAT, 180], {"direction": direction}, end)
            for direction, end in (("up", "s"), ("down", "o"), ("both", "s"))
        ),
        *(
            ([*FLAT, 20], {"direction": direction}, end)
            for direction, end in (("up", "o"), ("down", "s"), ("both", "s"))
        ),
        ([0.0] * 20 + [4.0], {}, "s"),
        ([0.0] * 20 + [4.0], {"floor": 2.0}, "o"),  # floors widen what is usual
        ([10.0] * 20 + [14], {"floor_fraction": 0.5}, "o"),
    ],
)
def test_the_newest_samples(values: list[float], config: dict[str, Any], end: str) -> None:
    assert verdicts(run(values, len(values), **config)).endswith(end)


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_hardly_ever_out_three_times_in_a_row(seed: int) -> None:
    made = random.Random(seed)
    assert "i" not in verdicts(run([made.gauss(10, 2) for _ in range(500)], 500))


def test_a_step_is_found_each_time_until_it_is_the_new_normal() -> None:
    made = random.Random(2)
    values = [made.gauss(5, 0.3) + (20 if at >= 50 else 0) for at in range(160)]
    opinions = run(values, 160, relearn_s=40)
    text = verdicts(opinions)
    assert text[50:53] == "ssi"
    assert set(text[52:90]) == {"i"}  # the outliers do not become part of what they are compared with
    assert set(text[91:]) == {"o"}
    assert opinions[90].evidence.endswith("; for 40 s: accepted as the new normal")
    assert opinions[60].evidence.endswith("; 11 in a row")


def test_what_lasts_longer_than_the_kept_past_is_the_new_normal_too() -> None:
    text = verdicts(run(lambda at: 5.0 if at < 50 else 25.0, 400, relearn_s=3600))
    assert text[100] == "i"
    assert text[-1] == "o"


def test_gaps_break_a_row_and_a_sample_seen_twice_counts_once() -> None:
    values: list[float | None] = [5.0] * 20 + [50, None, None, 50] + [None] * 5 + [50, 50]
    text = verdicts(run(values, len(values)))
    assert text[20:24] == "ssss"  # two outliers, the first seen three times
    assert text[24:29] == "sssuu"
    assert "i" not in text


def test_evidence_and_gap() -> None:
    config = EwmaConfig(signal="memory.available", of="node", direction="down")
    scene = Scene({NODE: {"memory.available": lambda at: float((100 if at < 20 else 40) << 20)}})
    last = judged(DETECTOR, config, scene, 21)[-1]
    assert last.evidence == "memory.available 40 MiB, usually 100 MiB ± 10 MiB"
    assert (last.resource, last.gap, last.severity) == (ContendedResource.MEMORY, 30 << 20, 2.0)


def test_mean_follows_and_deviation_is_around_it() -> None:
    assert expected([3.0]).mean == 3
    usual = expected([1.0] * 10 + [2.0])
    assert usual.mean == pytest.approx(1 + 2 / 12)
    assert usual.sigma**2 == pytest.approx((10 * (2 / 12) ** 2 + (10 / 12) ** 2) / 11)


def test_an_unknown_signal_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown signal 'cpu'"):
        EwmaConfig(signal="cpu")
