from typing import Any

import pytest

from reconciler.detectors.threshold import DETECTOR, ThresholdConfig, severity
from state.evidence import NODE, ContendedResource, DetectorVerdict
from tests.reconciler.detectors.scene import VICTIM, Scene, Values, facts, judged, verdicts


def run(
    values: Values, steps: int, signal: str = "cpu.wait", subject: str = VICTIM, **config: Any
) -> list[DetectorVerdict]:
    made = ThresholdConfig(**{"signal": signal, "above": 5.0, "for_s": 2, "clear_s": 3, **config})
    return judged(DETECTOR, made, Scene({subject: {signal: values}}), steps)


BELOW: dict[str, Any] = {"above": None, "below": 10.0, "clear": 20.0, "for_s": 0}


@pytest.mark.parametrize(
    ("values", "config", "expected"),
    [
        ([1, 1, 1, 1], {}, "oooo"),
        ([1, 9, 1, 1], {}, "osoo"),  # a spike
        ([9, 9, 9, 9], {}, "ssii"),
        ([9, 9, 9, 1, 1, 1, 1, 1], {}, "ssiiiioo"),  # clears after 3 s
        ([9, 9, 9, 1, 1, 9, 1, 1, 1, 1], {}, "ssiiiiiiio"),  # the time of calm restarts
        ([9, 9, 9, 1, None, None, None, None, 1, 1, 1, 1], {}, "ssiiiiiuiiio"),  # a gap is no calm, and not the end
        ([9, None, None, None, None, 9, 9, 9], {}, "ssssussi"),  # nor does it add to a breach
        ([None, None], {}, "uu"),
        ([5, 5], {}, "oo"),  # at the limit is not above it
        ([9, 9, 9, 4, 4, 4, 4, 4, 2, 2, 2, 2], {"clear": 2.0}, "ssiiiiiiiiio"),  # between limit and clear value
        ([4, 4, 4], {"clear": 2.0}, "ooo"),
        ([15, 9, 15, 20, 20, 20, 20], BELOW, "oiiiiio"),
    ],
)
def test_breach_and_clear(values: list[float | None], config: dict[str, Any], expected: str) -> None:
    assert verdicts(run(values, len(values), **config)) == expected


def test_gap_is_told_in_the_resource_s_unit_only() -> None:
    assert run(700, 1, "cpu.wait_milli", above=500.0)[0].gap == 200
    assert run(700, 1, "cpu.wait", above=500.0)[0].gap is None
    verdict = run(3e9, 1, "memory.available", NODE, above=None, below=4e9)[0]
    assert (verdict.gap, verdict.resource) == (1e9, ContendedResource.MEMORY)
    assert run(3e9, 1, "memory.available", NODE, above=None, below=4e9, resource=ContendedResource.IO)[0].gap is None


def test_an_estimate_counts_only_if_it_is_sure_enough() -> None:
    config = ThresholdConfig(above=5.0, for_s=0)
    for confidence, expected in ((0.4, "u"), (0.5, "i")):
        scene = Scene({VICTIM: {"cpu.wait": 9}}, confidence=confidence)
        assert verdicts(judged(DETECTOR, config, scene, 1)) == expected


def test_of_the_pool_and_of_a_pod_without_one() -> None:
    config = ThresholdConfig(signal="cpu.idle", of="pool", below=500.0, for_s=0)
    assert verdicts(judged(DETECTOR, config, Scene({"pool:shared": {"cpu.idle": 100}}), 1)) == "i"
    alone = Scene({"pool:shared": {"cpu.idle": 100}}, [facts("v", pool=None)])
    opinions = judged(DETECTOR, config, alone, 1)
    assert (verdicts(opinions), opinions[0].evidence) == ("u", "the victim has no pool")


def test_a_pause_of_the_daemon_is_no_time_in_breach() -> None:
    config = ThresholdConfig(above=5.0, for_s=60)
    scene = Scene({VICTIM: {"cpu.wait": 9}})
    _, memory = DETECTOR.judge(config, scene.step(), None)
    scene.start_s += 300
    opinion, _ = DETECTOR.judge(config, scene.step(), memory)
    assert verdicts([opinion]) == "s"


def test_what_is_measured_once_a_minute_is_not_stale_in_between() -> None:
    values = [3.0 if at % 60 == 0 and at < 200 else None for at in range(400)]
    text = verdicts(run(values, 400, "cpi", above=2.0, for_s=100))
    assert text[:120] == "s" * 120  # two samples, 60 s apart
    assert text[120:311] == "i" * 191
    assert set(text[311:]) == {"u"}


def test_evidence_has_number_limit_and_time() -> None:
    assert run(9.25, 2)[1].evidence == "cpu.wait 9.25 %, limit 5 % (1 s of 2 s)"
    node = run(2 << 30, 1, "memory.available", NODE, above=None, below=4.0 * (1 << 30))
    assert node[0].evidence.startswith("node: memory.available 2 GiB, minimum 4 GiB")


def test_without_anything_it_is_the_wait_for_a_cpu() -> None:
    assert ThresholdConfig().limit == 5.0
    assert ThresholdConfig(below=1.0).limit == 1.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"signal": "cpu.wiat", "above": 1.0}, "unknown signal 'cpu.wiat'; did you mean 'cpu.wait'?"),
        ({"signal": "cpu.delay"}, "expected above or below with signal 'cpu.delay'"),
        ({"above": 1.0, "below": 2.0}, "above and below are both set"),
        ({"above": 5.0, "clear": 6.0}, "clear 6 is itself above the limit 5"),
        ({"below": 5.0, "clear": 4.0}, "clear 4 is itself below the limit 5"),
        ({"signal": "cpu.idle", "above": 1.0}, "cpu.idle is not measured for pods; expected of: node or pool"),
        ({"signal": "cpu.wait", "of": "node"}, "cpu.wait is not measured of node, but of victim or pool"),
        ({"signal": "cpu.use", "of": "host"}, "expected victim, node, pool, numa:N or fs:NAME; got 'host'"),
        ({"signal": "memory.free", "of": "numa:x", "below": 1.0}, "expected victim, node, pool"),
    ],
)
def test_wrong_configs_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        ThresholdConfig(**config)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("value", "limit", "sign", "expected"),
    [(10, 5, 1, 2), (5, 5, 1, 1), (5, 10, -1, 2), (1, 0, 1, 2), (0, 0, 1, 1), (0, 10, -1, 2), (-3, 5, 1, 2 - 1)],
)
def test_severity_has_no_holes(value: float, limit: float, sign: int, expected: float) -> None:
    assert severity(value, limit, sign) == expected
