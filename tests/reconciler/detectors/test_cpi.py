import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from reconciler.detectors.cpi import DETECTOR, CpiBaseline, CpiConfig, CpiMemory
from reconciler.detectors.moments import Moments
from state.evidence import ContendedResource, DetectorVerdict
from tests.fakes.constants import varied
from tests.reconciler.detectors.scene import VICTIM, Scene, Values, be, facts, judged, verdicts

KNOWN = Moments(1000, 1.0, 0.01)


def memory(name: str = "cpi", moments: Moments = KNOWN, wall_s: float = 1_800_001_000.0) -> CpiMemory:
    return CpiMemory(clock_s=1_800_000_000.0, learned={name: CpiBaseline(moments, wall_s)})


def run(
    cpi: Values, minutes: int, known: CpiMemory | None = None, config: Mapping[str, Any] | None = None, **more: Values
) -> list[DetectorVerdict]:
    """One frame each ten seconds."""
    signals: dict[str, Values] = {"cpi": cpi, "cpu.use": 1000, **{key.replace("__", "."): more[key] for key in more}}
    scene = Scene({VICTIM: signals}, every_s=10)
    return judged(DETECTOR, CpiConfig(**(config or {})), scene, minutes * 6 + 1, known)


def at_minutes(bad: set[int], good: float = 1.0, value: float = 2.0) -> Callable[[int], float]:
    # The frame that closes a minute is its last one.
    return lambda index: value if (index - 1) // 6 in bad else good


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (set[int](), "oooooooooo"),
        ({3}, "ooosssssso"),
        ({3, 4}, "ooosssssss"),
        ({3, 4, 5}, "ooossiiiis"),  # the first is six minutes old at the end
        ({0, 4, 8}, "ssssssssss"),  # never three within five minutes
        ({3, 5, 7}, "ooossssiis"),
    ],
)
def test_three_outliers_in_five_minutes(bad: set[int], expected: str) -> None:
    text = verdicts(run(at_minutes(bad), 10, memory()))[6::6]
    assert text == expected


def test_learns_before_it_judges() -> None:
    opinions = run(lambda index: 1.0 + index % 7 * 0.01, 70)
    text = verdicts(opinions)
    # 60 values, each known to be no part of trouble five minutes later.
    assert text.index("o") in range(65 * 6, 67 * 6)
    assert opinions[100].evidence.endswith("of 60 samples")


def test_below_a_quarter_of_a_cpu_nothing_counts() -> None:
    opinions = run(5.0, 10, memory(), cpu__use=200)
    assert set(verdicts(opinions)) == {"u"}
    assert opinions[-1].evidence == "CPI: no usable value in 5 min (CPU use 0.20 CPU)"
    assert verdicts(run(5.0, 10, memory(), cpu__use=250))[-1] == "i"
    assert set(verdicts(run(5.0, 10, memory(), cpu__use=[]))) == {"u"}


def test_noise_of_a_week_leaves_sigma_as_it_is_and_hardly_ever_alarms() -> None:
    made = random.Random(11)
    values = [made.gauss(1.0, 0.1) for _ in range(10_000)]
    config = varied(CpiConfig(), half_life_s=31_536_000)
    scene = Scene({VICTIM: {"cpi": values, "cpu.use": 1000}}, every_s=60)
    kept: CpiMemory | None = None
    alarms = 0
    for _ in range(len(values)):
        opinion, kept = DETECTOR.judge(config, scene.step(), kept)
        alarms += verdicts([opinion]) == "i"
    assert kept is not None
    learned = kept.learned["cpi"].moments
    assert learned.mean == pytest.approx(1.0, rel=0.01)
    assert learned.sigma == pytest.approx(0.1, rel=0.04)
    assert alarms < 80  # by chance 3 of 5 lie above 2 sigma with probability 1.2e-4; an alarm lasts up to 5 minutes


def test_interference_is_not_learned_until_it_lasts() -> None:
    known = memory()
    scene = Scene({VICTIM: {"cpi": 3.0, "cpu.use": 1000}}, every_s=60)
    config = varied(CpiConfig(), relearn_s=3600)
    kept: Any = known
    for _ in range(60):
        opinion, kept = DETECTOR.judge(config, scene.step(), kept)
    assert verdicts([opinion]) == "i"
    assert kept.learned["cpi"].moments.mean == 1.0
    for _ in range(2000):
        opinion, kept = DETECTOR.judge(config, scene.step(), kept)
    assert kept.learned["cpi"].moments.mean > 2
    assert verdicts([opinion]) == "o"


def test_what_was_learned_halves_in_a_day() -> None:
    later = memory(wall_s=1_800_001_000.0 - 86400)
    scene = Scene({VICTIM: {"cpi": 1.0, "cpu.use": 1000}}, every_s=60)
    kept: Any = later
    for _ in range(8):
        _, kept = DETECTOR.judge(CpiConfig(), scene.step(), kept)
    assert kept.learned["cpi"].moments.count == pytest.approx(500, rel=0.01)


def test_what_was_learned_by_a_clock_that_was_ahead_ages_from_the_correction_on() -> None:
    """A machine whose clock was a year ahead at its boot: else the baseline would be fixed for that year."""
    scene = Scene({VICTIM: {"cpi": 1.0, "cpu.use": 1000}}, every_s=60)
    kept: Any = memory(wall_s=1_800_001_000.0 + 365 * 86400)
    for _ in range(120):
        _, kept = DETECTOR.judge(varied(CpiConfig(), half_life_s=600), scene.step(), kept)
    assert kept.learned["cpi"].moments.count < 100


def test_pods_of_one_workload_learn_together_and_suffer_alone() -> None:
    signals: dict[str, dict[str, Values]] = {
        VICTIM: {"cpi": 3.0, "cpu.use": 1000},
        "pod:w": {"cpi": 1.0, "cpu.use": 1000},
    }
    scene = Scene(signals, [facts("w")], every_s=60)
    kept: Any = memory()
    for _ in range(12):
        sight = scene.step()
        bad, kept = DETECTOR.judge(CpiConfig(), sight, kept)
        other = type(sight)(
            subject="pod:w",
            pod=scene.pods["w"],
            frame=sight.frame,
            history=sight.history,
            fresh_s=sight.fresh_s,
        )
        good, kept = DETECTOR.judge(CpiConfig(), other, kept)
    assert verdicts([bad, good]) == "io"
    assert set(kept.pods) == {"v", "w"}
    del scene.pods["w"]
    _, kept = DETECTOR.judge(CpiConfig(), scene.step(), kept)
    assert set(kept.pods) == {"v"}


def test_the_first_sample_after_a_restart_is_no_minute() -> None:
    """The daemon was down for four minutes: what it measures while it starts would be a whole period's value."""
    scene = Scene({VICTIM: {"cpi": 9.0, "cpu.use": 1000}}, every_s=1)
    _, before = DETECTOR.judge(CpiConfig(), scene.step(), memory())
    (uid,) = before.pods
    begun = replace(before.pods[uid], begun_s=before.pods[uid].begun_s - 240)
    kept: Any = replace(before, pods={uid: begun})
    for _ in range(55):
        _, kept = DETECTOR.judge(CpiConfig(), scene.step(), kept)
        assert kept.pods[uid].bad == (), "a period begins with the first sample"
    for _ in range(10):
        _, kept = DETECTOR.judge(CpiConfig(), scene.step(), kept)
    assert len(kept.pods[uid].bad) == 1


def test_another_boot_forgets_the_minutes_but_not_the_workload() -> None:
    scene = Scene({VICTIM: {"cpi": 3.0, "cpu.use": 1000}}, every_s=60)
    kept: Any = memory()
    for _ in range(10):
        opinion, kept = DETECTOR.judge(CpiConfig(), scene.step(), kept)
    assert verdicts([opinion]) == "i"
    booted = Scene({VICTIM: {"cpi": 1.0, "cpu.use": 1000}}, every_s=60, start_s=1600)
    sight = booted.step()
    moved = type(sight.frame)(
        at_s=sight.now, wall_s=sight.frame.wall_s + 5000, pods=sight.frame.pods, samples=sight.frame.samples
    )
    opinion, kept = DETECTOR.judge(
        CpiConfig(),
        type(sight)(subject=VICTIM, pod=sight.pod, frame=moved, history=sight.history, fresh_s=sight.fresh_s),
        kept,
    )
    assert verdicts([opinion]) == "u"
    assert not kept.pods["v"].bad
    assert kept.learned["cpi"].moments.count == 1000


@pytest.mark.parametrize(
    ("signals", "proxy", "resource", "gap"),
    [
        ({"cpu.wait": 30, "cpu.throttled": 0, "cpu.wait_milli": 400}, "cpu.wait", ContendedResource.CPU, 400),
        ({"cpu.pressure": 30}, "cpu.pressure", ContendedResource.CPU, None),
        # Without a word about throttling the wait may be its own quota.
        ({"cpu.wait": 30, "cpu.pressure": 30}, "cpu.pressure", ContendedResource.CPU, None),
    ],
)
def test_without_a_pmu_a_proxy_is_judged_and_named(
    signals: dict[str, Values], proxy: str, resource: ContendedResource, gap: float | None
) -> None:
    scene = Scene({VICTIM: {"cpu.use": 1000, **signals}}, every_s=60)
    last = judged(DETECTOR, CpiConfig(), scene, 10, memory(proxy))[-1]
    assert (verdicts([last]), last.proxy, last.resource, last.gap) == ("i", proxy, resource, gap)
    assert last.evidence.startswith(f"{proxy} 30 %, limit")
    refused = judged(DETECTOR, CpiConfig(proxies=False), scene, 1)[-1]
    assert (verdicts([refused]), refused.evidence) == ("u", "cpi not available")


def test_the_own_quota_is_no_proxy_for_a_neighbour() -> None:
    signals: dict[str, Values] = {"cpu.use": 1000, "cpu.wait": 60, "cpu.throttled": 30, "cpu.wait_milli": 400}
    opinions = judged(DETECTOR, CpiConfig(), Scene({VICTIM: signals}, every_s=60), 10, memory("cpu.wait"))
    assert set(verdicts(opinions)) == {"u"}


@pytest.mark.parametrize(("neighbour", "expected"), [(4e8, "i"), (1e7, "u")])
def test_bandwidth_stands_in_only_while_be_work_moves_much(neighbour: float, expected: str) -> None:
    signals: dict[str, dict[str, Values]] = {
        VICTIM: {"cpu.use": 1000, "memory.bandwidth": 1e8},
        "pod:b": {"memory.bandwidth": neighbour},
    }
    # 10 ns for each byte; usually 5.
    known = memory("memory.bandwidth", Moments(1000, 5.0, 0.1))
    last = judged(DETECTOR, CpiConfig(), Scene(signals, [be("b")], every_s=60), 10, known)[-1]
    assert verdicts([last]) == expected
    if expected == "i":
        assert last.evidence.startswith("memory.bandwidth 10 CPU-ns/B, limit 6 CPU-ns/B")
        assert last.proxy == "memory.bandwidth"


def test_another_measure_begins_another_past() -> None:
    signals: dict[str, Values] = {
        "cpi": lambda index: 3.0 if index < 8 else None,
        "cpu.use": 1000,
        "cpu.pressure": 1,
    }
    opinions = judged(DETECTOR, CpiConfig(), Scene({VICTIM: signals}, every_s=60), 16, memory())
    text = verdicts(opinions)
    assert text[7] == "i"
    assert text[-1] == "u"  # the proxy has nothing learned
    assert opinions[-1].evidence.startswith("cpu.pressure: learning baseline, 0 of 60")


def test_a_window_too_short_for_its_outliers_is_refused() -> None:
    with pytest.raises(ValueError, match="within_s 100 holds no 3 outliers of 60 s each"):
        CpiConfig(within_s=100)
