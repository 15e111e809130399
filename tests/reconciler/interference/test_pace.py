"""Passes are half as many while nothing is wrong, and what begins then is found as soon as the document says."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import trio
import trio.testing

from reconciler.detectors.base import CALM_S
from reconciler.detectors.config import InterferenceConfig
from reconciler.detectors.evaluate import ready
from reconciler.detectors.ewma import EwmaConfig
from reconciler.detectors.pressure import PressureDetectorConfig
from reconciler.detectors.rule import SHIPPED, RuleConfig
from reconciler.detectors.run_queue import RunQueueConfig
from reconciler.detectors.table import DetectorEntry
from reconciler.interference.engine import InterferenceEngine
from reconciler.interference.pace import WATCHED_S, PassPace
from state.evidence import PodSnapshot, Sample, SampleFrame, Verdict
from state.model import PodClass
from tests.fakes.livenode import LiveNode
from tests.reconciler.interference.test_monitor import configured, stage

BEGIN: Final = 200.0
POD: Final = PodSnapshot(
    uid="v", pod_class=PodClass.SHARED, title="ns/v", group="/kubepods/podv", pool="shared", cpus="0-3"
)
WAITS: Final = {"cpu.wait": (0.2, 40.0), "cpu.delay": (10.0, 5000.0), "cpu.wait_milli": (1.0, 400.0)}
HARM: Final = {
    "cpu": {**WAITS, "cpu.throttled": (0.0, 0.0)},
    "memory": {"memory.pressure": (0.0, 60.0), "memory.refaults": (0.0, 0.0), "oom.kills": (0.0, 0.0)},
    "io": {"io.pressure": (0.0, 12.0)},
}
"""What the shipped rules' victims show when all is well, and while they are disturbed."""


def found_after(rule: str, paced: Callable[[PassPace, float], float], begin: float) -> float:
    """Seconds from the beginning of a disturbance to the verdict. Samples are the means since the frame before."""
    off = {name: RuleConfig(enabled=False) for name in SHIPPED if name != rule}
    config = InterferenceConfig(enabled=True, rules={rule: RuleConfig(needs_suspect=False), **off})
    engine, pace, now, before = InterferenceEngine(config), PassPace(), 100.0, 99.0
    pace.sign(now)
    while now < begin + 60:
        bad = min(1.0, max(0.0, (now - begin) / (now - before)))
        samples = {signal: Sample(well + bad * (ill - well), 0.0, 1.0) for signal, (well, ill) in HARM[rule].items()}
        frame = SampleFrame(at_s=now, wall_s=1.7e9 + now, pods={"v": POD}, samples={"pod:v": samples})
        evaluation = engine.evaluate_now(frame)
        if any(finding.verdict is Verdict.INTERFERED for finding in evaluation.findings):
            return now - begin
        if evaluation.signs:
            pace.sign(now)
        before, now = now, now + paced(pace, now)
    raise AssertionError("it was never found")


@pytest.mark.parametrize("rule", HARM)
def test_what_begins_in_a_calm_time_is_found_one_interval_later_at_most(rule: str) -> None:
    begins = [BEGIN + number / 10 for number in range(20)]
    usual = [found_after(rule, lambda *_: 1.0, begin) for begin in begins]
    calm = [found_after(rule, lambda pace, now: pace.interval_s(1.0, now), begin) for begin in begins]
    assert max(calm) <= max(usual) + 1.0
    assert all(mine <= theirs + 2.0 for mine, theirs in zip(calm, usual, strict=True))


def test_the_interval_is_the_configurations_from_each_sign_on_and_never_doubled_beyond_the_longest() -> None:
    pace = PassPace()
    assert pace.interval_s(1.0, 0.0) == 1.0
    pace.sign(100.0)
    assert pace.interval_s(1.0, 100.0 + WATCHED_S - 0.1) == 1.0
    assert [pace.interval_s(sample_s, 100.0 + WATCHED_S) for sample_s in (0.2, 1.0, 1.5, 5.0)] == [
        0.4,
        CALM_S,
        CALM_S,
        5.0,
    ]
    pace.sign(200.0)
    assert pace.interval_s(1.0, 200.0) == 1.0


def test_a_rule_that_counts_samples_is_never_calm_and_half_of_a_limit_is_a_sign() -> None:
    pressure, ewma = DetectorEntry(pressure=PressureDetectorConfig()), DetectorEntry(ewma=EwmaConfig(signal="cpu.use"))
    assert ready("a", RuleConfig(when=((pressure,), (ewma,)))).near == 0.0
    assert ready("a", RuleConfig(when=((pressure,),))).near == 0.5
    assert ready("cpu", SHIPPED["cpu"]).near == math.inf
    assert ready("cpu", RuleConfig(when=((DetectorEntry(run_queue=RunQueueConfig(window_s=1.0)),),))).near == 0.0


async def test_the_monitor_passes_each_second_from_the_first_sign_on(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    del autojump_clock
    async with stage(live := LiveNode(tmp_path, files=False), configured(live)) as scene:
        scene.observer._clock = trio.current_time
        seen: list[float] = []
        evaluate = scene.observer.evaluate

        async def noted() -> object:
            seen.append(trio.current_time())
            return await evaluate()

        scene.observer.evaluate = noted  # type: ignore[method-assign,assignment]

        async def passes(seconds: float) -> int:
            seen.clear()
            await trio.sleep(seconds)
            return len(seen)

        async with trio.open_nursery() as nursery:
            await nursery.start(scene.observer.run)
            await trio.sleep(0.5)
            assert await passes(WATCHED_S - 1) == WATCHED_S - 1
            assert await passes(30) in {15, 16}
            # An event makes a pass at once, and is a sign.
            scene.observer.wake("memory")
            assert await passes(WATCHED_S - 1) in {WATCHED_S - 1, WATCHED_S}
            assert await passes(30) in {15, 16}
            scene.script.bad = True
            assert await passes(12) in {8, 9, 10}
            assert scene.observer.engine.active
            assert await passes(20) == 20
            nursery.cancel_scope.cancel()
