from typing import Any

import pytest

from reconciler.detectors.pressure import DETECTOR, PressureDetectorConfig
from state.evidence import NODE, ContendedResource, DetectorVerdict
from tests.reconciler.detectors.scene import VICTIM, Scene, Values, judged, verdicts


def run(values: Values, steps: int, **config: Any) -> list[DetectorVerdict]:
    made = PressureDetectorConfig(**{"resource": "memory", "above_percent": 10, "for_s": 5, "clear_s": 5, **config})
    return judged(DETECTOR, made, Scene({VICTIM: {made.signal: values}}), steps)


def test_unknown_until_most_of_ten_seconds_has_been_seen() -> None:
    assert verdicts(run(0, 10)) == "uuuuuuoooo"


def test_a_spike_is_averaged_away_and_a_step_is_found() -> None:
    spike = run(lambda at: 90 if at == 20 else 0, 40)
    assert "i" not in verdicts(spike)
    step = verdicts(run(lambda at: 50 if at >= 20 else 0, 40))
    # avg10 passes 10 % with the third bad second, then 5 s must pass.
    assert step.index("s") == 22
    assert step.index("i") == 27
    assert step[27:] == "i" * 13


def test_recovery_needs_a_low_average_for_a_while() -> None:
    text = verdicts(run(lambda at: 50 if 20 <= at < 40 else 0, 70))
    # The last bad second leaves the window at 50; avg10 is at most 5 % from the second before it.
    assert text.rindex("i") == 52
    assert set(text[53:]) == {"o"}


def test_counter_gaps_are_unknown_and_clear_nothing() -> None:
    opinions = run(lambda at: None if 30 <= at < 45 else 50, 60)
    text = verdicts(opinions)
    assert text[28:33] == "iiiii"  # the last sample is fresh for 3 s
    assert set(text[33:48]) == {"u"}
    assert text[-1] == "i"


@pytest.mark.parametrize(
    ("values", "for_s", "fires"),
    [
        (lambda at: 30, 10, True),
        (lambda at: 30 if at < 90 else 0, 10, True),
        (lambda at: 60 if 60 <= at < 66 else 0, 10, False),  # avg60 stays below
        (lambda at: 0 if at < 60 else 30 if at < 75 else max(0, 30 - 4 * (at - 75)), 10, False),  # falls fast in time
        # avg60 passes 10 % at 75 and stays there for long; at 91, when its time is up, avg10 is low.
        (lambda at: 40 if 60 <= at < 80 else 0, 16, False),
    ],
)
def test_rising(values: Values, for_s: float, fires: bool) -> None:
    text = verdicts(run(values, 120, form="rising", for_s=for_s))
    assert ("i" in text) is fires
    assert fires or text[-1] == "o"


def test_rising_names_both_averages_and_the_fall() -> None:
    last = run(lambda at: 40 if at < 80 else 0, 86, form="rising", for_s=10)[-1]
    assert last.evidence.startswith("memory.pressure 16 % over 10 s, ")
    assert "falling from 36 %" in last.evidence


def test_a_stall_that_falls_fast_is_not_rising() -> None:
    opinions = run(lambda at: 40 if 60 <= at < 80 else 0, 120, form="rising", for_s=10)
    # At 85 its time is up, and avg10 is still 20 %, down from 40 %.
    assert opinions[85].evidence.startswith("memory.pressure 16 % over 10 s, ")
    assert verdicts(opinions)[84:87] == "sss"
    assert "i" not in verdicts(opinions)


def test_cpu_gap_is_the_waiting_time_and_memory_has_none() -> None:
    scene = Scene({VICTIM: {"cpu.pressure": 40, "cpu.wait_milli": 700}})
    last = judged(DETECTOR, PressureDetectorConfig(), scene, 30)[-1]
    assert (last.resource, last.gap, last.severity) == (ContendedResource.CPU, 700, 4.0)
    assert run(40, 30)[-1].gap is None


def test_of_the_node() -> None:
    config = PressureDetectorConfig(resource="io", of="node", full=True)
    last = judged(DETECTOR, config, Scene({NODE: {"io.pressure_full": 40}}), 30)[-1]
    assert verdicts([last]) == "i"
    assert last.evidence == "io.pressure_full of the node 40 % over 10 s, limit 10 %"


def test_samples_further_apart_than_the_window() -> None:
    config = PressureDetectorConfig(for_s=0)
    scene = Scene({VICTIM: {"cpu.pressure": 40}}, every_s=15)
    assert verdicts(judged(DETECTOR, config, scene, 3)) == "iii"


def test_wrong_configs_are_refused() -> None:
    with pytest.raises(ValueError, match="clear_percent 20 is above above_percent 10"):
        PressureDetectorConfig(clear_percent=20)
    with pytest.raises(ValueError, match="the kernel does not provide it"):
        PressureDetectorConfig(full=True, of="node")
