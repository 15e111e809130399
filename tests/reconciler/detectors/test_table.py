from typing import Any

import pytest
from msgspec import json, msgpack, structs

from reconciler.detectors.base import check_detector
from reconciler.detectors.table import DETECTORS, DetectorEntry
from reconciler.settings.schema import section_of
from state.evidence import NODE, Verdict
from tests.reconciler.detectors.scene import VICTIM, Scene


def test_an_entry_has_exactly_one_detector() -> None:
    for name, detector in DETECTORS.items():
        entry = DetectorEntry(**{name: detector.config_type()})
        assert (entry.name, entry.config) == (name, detector.config_type())
    with pytest.raises(ValueError, match=r"exactly one detector, one of threshold, pressure, .*; got none"):
        DetectorEntry()
    two: dict[str, Any] = {name: DETECTORS[name].config_type() for name in ("threshold", "run_queue")}
    with pytest.raises(ValueError, match="got threshold and run_queue"):
        DetectorEntry(**two)


@pytest.mark.parametrize("name", DETECTORS)
def test_every_detector_answers_unknown_when_nothing_is_measured(name: str) -> None:
    detector = DETECTORS[name]
    for subject in (VICTIM, NODE):
        memory = None
        scene = Scene({})
        for _ in range(3):
            opinion, memory = detector.judge(detector.config_type(), scene.step(subject), memory)
            assert opinion.verdict is Verdict.UNKNOWN
            assert opinion.evidence


@pytest.mark.parametrize("name", DETECTORS)
def test_every_memory_survives_the_store(name: str) -> None:
    detector = DETECTORS[name]
    signals = dict.fromkeys(detector.signals(detector.config_type()), 50.0)
    scene = Scene({VICTIM: signals, NODE: signals, "pool:shared": signals})
    memory = None
    for _ in range(60):
        _, memory = detector.judge(detector.config_type(), scene.step(), memory)
    assert msgpack.decode(msgpack.encode(memory), type=detector.memory_type) == memory


@pytest.mark.parametrize("name", DETECTORS)
def test_every_config_is_a_documented_section(name: str) -> None:
    config = DETECTORS[name].config_type
    assert config.__struct_config__.frozen
    assert config.__struct_config__.forbid_unknown_fields
    section = section_of(config)
    assert section.struct is config
    assert section.summary
    assert all(field.description for field in section.fields.values())
    assert json.decode(b"{}", type=config) == config()


def test_a_half_defined_detector_is_refused() -> None:
    threshold = DETECTORS["threshold"]
    check_detector(threshold)
    with pytest.raises(ValueError, match="needs a summary"):
        check_detector(structs.replace(threshold, summary=""))
    with pytest.raises(ValueError, match=r"unknown signal cpu\.nothing"):
        check_detector(structs.replace(threshold, signals=lambda _: ("cpu.nothing",)))
