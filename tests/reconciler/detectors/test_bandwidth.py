from typing import Any

import pytest

from reconciler.detectors.bandwidth import DETECTOR, BandwidthDetectorConfig
from state.evidence import NODE, ContendedResource, DetectorVerdict
from tests.reconciler.detectors.scene import VICTIM, Scene, Values, be, judged, verdicts

GB = 1e9


def run(
    node: Values, own: Values, be_bytes: Values, steps: int, use: Values = 1000, **config: Any
) -> list[DetectorVerdict]:
    signals: dict[str, dict[str, Values]] = {
        NODE: {"memory.bandwidth": node},
        VICTIM: {"memory.bandwidth": own, "cpu.use": use},
        "pod:b": {"memory.bandwidth": be_bytes},
    }
    made = BandwidthDetectorConfig(**{"for_s": 3, "clear_s": 3, **config})
    return judged(DETECTOR, made, Scene(signals, [be("b")]), steps)


def test_near_the_peak() -> None:
    opinions = run([45 * GB] * 5 + [95 * GB] * 6 + [45 * GB] * 6, 10 * GB, 60 * GB, 17, peak_bps=100_000_000_000)
    assert verdicts(opinions) == "ooooosssiiiiiiooo"
    assert opinions[9].evidence == "node 88.5 GiB/s of 93.1 GiB/s, BE share 63.2 %"
    assert opinions[9].resource is ContendedResource.CACHE
    assert opinions[9].severity == pytest.approx(95 / 90)


def test_a_node_that_online_work_loads_is_nobody_s_fault() -> None:
    opinions = run(95 * GB, 80 * GB, 5 * GB, 10, peak_bps=100_000_000_000)
    assert set(verdicts(opinions)) == {"o"}
    assert opinions[-1].severity == 0


def step(before: float, after: float) -> Values:
    return lambda at: before if at < 40 else after


def test_the_victim_s_share_collapses_while_be_work_moves_much() -> None:
    opinions = run([], step(20 * GB, 4 * GB), step(1 * GB, 30 * GB), 70)
    text = verdicts(opinions)
    assert "i" not in text[:40]
    assert text[-1] == "i"
    assert opinions[-1].evidence.startswith("victim 3.7 GiB/s, usually 18.6 GiB/s, BE share 88.2 %")
    assert opinions[-1].severity == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("use", "be_bytes"),
    [
        (step(1000, 300), 30 * GB),  # it has less to do
        (1000, 0.5 * GB),  # BE work moves next to nothing
    ],
)
def test_moving_less_for_another_reason_is_no_collapse(use: Values, be_bytes: Values) -> None:
    assert "i" not in verdicts(run([], step(20 * GB, 4 * GB), be_bytes, 70, use=use))


def test_without_figures_it_is_unknown() -> None:
    assert verdicts(run([], [], 1 * GB, 2)) == "uu"
    assert verdicts(run(1 * GB, 1 * GB, 1 * GB, 2)) == "uu"  # no peak, and no past yet
    assert verdicts(run(95 * GB, [], [], 2, peak_bps=100_000_000_000)) == "uu"  # whose traffic it is is unknown
