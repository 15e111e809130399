from typing import Any

import pytest

from reconciler.detectors.idle_cores import DETECTOR, IdleCoresConfig
from state.evidence import NODE, DetectorVerdict, PodSnapshot
from tests.reconciler.detectors.scene import VICTIM, Scene, Values, be, facts, judged, verdicts

POOL = "pool:shared"


def run(
    idle: Values, be_use: Values, steps: int, pods: tuple[PodSnapshot, ...] = (be("b"),), **config: Any
) -> list[DetectorVerdict]:
    signals: dict[str, dict[str, Values]] = {POOL: {"cpu.idle": idle, "cpu.use": 3800}, "pod:b": {"cpu.use": be_use}}
    return judged(DETECTOR, IdleCoresConfig(**config), Scene(signals, pods), steps)


def test_a_shortage_that_be_work_takes_part_in() -> None:
    opinions = run([100] * 6 + [900] * 12, 1500, 18)
    assert verdicts(opinions) == "sss" + "i" * 13 + "oo"
    assert opinions[5].evidence == ("idle in pool:shared: 0.10 of 3.90 CPU, required 0.39; BE work uses 1.50 CPU there")
    assert (opinions[5].gap, opinions[5].severity) == (290, 3.9)


@pytest.mark.parametrize("use", [0, 100])
def test_a_pool_that_online_work_fills_is_busy_and_not_disturbed(use: float) -> None:
    opinions = run(0, use, 10)
    assert set(verdicts(opinions)) == {"o"}
    assert opinions[-1].evidence.endswith(": used by online work")
    assert opinions[-1].severity == 0


def test_be_work_elsewhere_takes_nothing_and_no_more_can_be_taken_than_it_uses() -> None:
    for cpus, last in (("4-7", "o"), ("2-5", "i"), ("", "i")):
        assert verdicts(run(0, 3000, 10, (be("b", cpus=cpus),)))[-1] == last
    assert run(100, 300, 10, buffer_milli=2000)[-1].gap == 300


def test_without_figures_it_is_unknown() -> None:
    assert verdicts(run([], 1500, 2)) == "uu"
    assert verdicts(run(0, [], 2)) == "uu"
    assert verdicts(run(3000, [], 2)) == "oo"
    alone = Scene({POOL: {"cpu.idle": 0, "cpu.use": 1}}, [facts("v", pool=None)])
    assert judged(DETECTOR, IdleCoresConfig(), alone, 1)[0].evidence == "the victim has no pool"


def test_of_the_node() -> None:
    signals: dict[str, dict[str, Values]] = {NODE: {"cpu.idle": 0, "cpu.use": 8000}, "pod:b": {"cpu.use": 1500}}
    opinions = judged(DETECTOR, IdleCoresConfig(for_s=0), Scene(signals, [be("b")]), 1, subject=NODE)
    assert verdicts(opinions) == "i"
    assert opinions[0].evidence.startswith("idle in the node: 0.00 of 8.00 CPU, required 0.80")


def test_the_victim_itself_is_no_be_work() -> None:
    signals: dict[str, dict[str, Values]] = {POOL: {"cpu.idle": 0, "cpu.use": 4000}, VICTIM: {"cpu.use": 4000}}
    assert set(verdicts(judged(DETECTOR, IdleCoresConfig(), Scene(signals, [be("v")]), 5))) == {"o"}
