import random
from typing import Any

import pytest

from reconciler.detectors.run_queue import DETECTOR, RunQueueConfig, RunQueueMemory
from state.evidence import DetectorVerdict
from tests.fakes.constants import varied
from tests.reconciler.detectors.scene import VICTIM, Scene, Values, judged, verdicts


def run(
    wait: Values, steps: int, *, every_s: float = 1.0, config: dict[str, Any] | None = None, **more: Values
) -> list[DetectorVerdict]:
    signals: dict[str, Values] = {"cpu.wait": wait, "cpu.delay": 4000, "cpu.throttled": 0, "cpu.wait_milli": 300}
    for name, values in more.items():
        signals[name.replace("__", ".")] = values
    scene = Scene({VICTIM: signals}, every_s=every_s)
    return judged(DETECTOR, varied(RunQueueConfig(), **(config or {})), scene, steps)


def noise(seed: int, mean: float = 0.5, spread: float = 0.2) -> list[float]:
    made = random.Random(seed)
    return [max(0.0, made.gauss(mean, spread)) for _ in range(400)]


def test_a_step_is_found_within_three_windows() -> None:
    text = verdicts(run(lambda at: 20 if at >= 30 else 0.2, 60))
    assert text.index("s") <= 31
    assert 34 <= text.index("i") <= 36
    assert set(text[36:]) == {"i"}


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_never_interference(seed: int) -> None:
    assert "i" not in verdicts(run(noise(seed), 400))


@pytest.mark.parametrize("seed", range(5))
def test_a_small_step_far_out_of_the_own_past_is_found(seed: int) -> None:
    values = noise(seed, 0.5, 0.05)
    text = verdicts(run([*values[:150], *(value + 3 for value in values[:30])], 180))
    assert "i" not in text[:150]
    assert "i" in text[150:162]


@pytest.mark.parametrize(
    ("wait", "more", "worst"),
    [
        (15, {"cpu__delay": 800}, "o"),  # short waits are harmless ...
        (15, {"cpu__delay": 1200}, "i"),
        (60, {"cpu__delay": 650}, "i"),  # ... but for shorter requests, as measured with 8 runnable tasks on 2 CPUs
        (60, {"cpu__delay": 90}, "o"),  # a healthy machine
        (lambda at: 0.9 if at > 100 else 0.0, {}, "o"),  # below the floor
        (lambda at: 40 if at in {30, 31} else 0.2, {}, "s"),  # a spike of one window
        # The wait is reported one sample after the throttling.
        (lambda at: 30.0 if at % 4 == 1 else 0.0, {"cpu__throttled": lambda at: 50.0 if at % 4 == 0 else 0.0}, "o"),
    ],
)
def test_what_is_interference(wait: Values, more: dict[str, Any], worst: str) -> None:
    seen = set(verdicts(run(wait, 160, **more)))
    assert next(letter for letter in "iso" if letter in seen) == worst


def test_the_own_quota_is_told_apart() -> None:
    opinions = run(60, 60, cpu__throttled=40)
    assert set(verdicts(opinions)) <= {"u", "o"}
    assert opinions[-1].evidence == ("own quota: waits 60 % of the time, throttled in 40 % of its periods")


def test_throttling_that_ended_does_not_hide_a_neighbour() -> None:
    text = verdicts(run(60, 60, cpu__throttled=lambda at: 40 if at < 20 else 0))
    assert "i" not in text[:24]
    assert set(text[30:]) == {"i"}


def test_without_a_figure_for_throttling_nobody_is_blamed() -> None:
    opinions = run(60, 30, cpu__throttled=[])
    assert "i" not in verdicts(opinions)
    assert verdicts(opinions)[-1] == "u"
    assert verdicts(run(0.1, 30, cpu__throttled=[]))[-1] == "o"


def test_windows_without_a_delay_prove_nothing() -> None:
    opinions = run(30, 40, cpu__delay=lambda at: 4000 if at >= 38 else None)
    assert "i" not in verdicts(opinions)
    assert opinions[-1].evidence.endswith("cpu.throttled or cpu.delay is not measured: may be caused by its own quota")


@pytest.mark.parametrize(("throttled", "letter"), [(0.0, "i"), (None, "u")])
def test_trouble_leaves_no_trace_in_the_own_past(throttled: float | None, letter: str) -> None:
    made = random.Random(6)
    values = [max(0.0, made.gauss(0.5, 0.1)) + (3 if 150 <= at < 300 else 0) for at in range(360)]
    opinions = run(values, 360, cpu__throttled=lambda at: throttled if 150 <= at < 300 else 0.0)
    assert letter in verdicts(opinions)[150:160]
    before, after = (float(opinions[at].evidence.partition("limit ")[2].partition(" %")[0]) for at in (149, 359))
    assert after == pytest.approx(before, rel=0.1)


def test_missing_and_stale_samples_are_unknown() -> None:
    assert verdicts(run([], 3)) == "uuu"
    text = verdicts(run(lambda at: None if at >= 20 else 0.1, 30))
    assert text[19] == "o"
    assert text[-1] == "u"
    assert verdicts(run(0.1, 20, cpu__delay=[]))[-1] == "u"


def test_gaps_do_not_hide_what_could_be_interference() -> None:
    # Two bad windows seen, three not: it could be three bad ones.
    text = verdicts(run(lambda at: 30 if at in {36, 37, 38, 39} else None if 30 <= at < 36 else 0.1, 40))
    assert text[-1] == "u"


def test_recovery_is_seen_at_once_and_the_past_is_unharmed() -> None:
    text = verdicts(run(lambda at: 20 if 100 <= at < 200 else 0.3, 300))
    assert set(text[106:200]) == {"i"}
    assert set(text[211:]) == {"o"}
    again = verdicts(run(lambda at: 20 if 100 <= at < 200 or at >= 250 else 0.3, 300))
    assert again.index("i", 250) <= 256


def test_what_lasts_becomes_the_deviation_but_never_the_limit() -> None:
    config = {"relearn_s": 60.0}
    low = verdicts(run(lambda at: 3 if at >= 100 else 0.3, 600, config=config))
    assert "i" in low[100:150]
    assert low[-1] == "o"
    high = verdicts(run(lambda at: 30 if at >= 100 else 0.3, 600, config=config))
    assert high[-1] == "i"


def test_gap_is_what_waits_in_the_bad_windows() -> None:
    last = run(lambda at: 20 if at >= 20 else 0.1, 60, cpu__wait_milli=lambda at: 800 if at >= 20 else 3)[-1]
    assert (last.gap, last.severity) == (800, 20 / 5)


def test_samples_five_seconds_apart_make_windows_of_five_seconds() -> None:
    assert verdicts(run(lambda at: 20 if at >= 20 else 0.1, 40, every_s=5)).index("i") == 22


def test_memory_of_a_restarted_pod_is_a_new_one() -> None:
    # The brain forgets a pod that is gone: the same title with a new uid starts without a past.
    opinion, memory = DETECTOR.judge(RunQueueConfig(), Scene({}).step(), None)
    assert verdicts([opinion]) == "u"
    assert isinstance(memory, RunQueueMemory)
    assert memory.healthy.count == 0


def test_wrong_configs_are_refused() -> None:
    with pytest.raises(ValueError, match="bad 6 is more than windows 5"):
        RunQueueConfig(bad=6)
