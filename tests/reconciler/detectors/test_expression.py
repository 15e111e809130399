from typing import Any

import pytest
from msgspec import Struct

from reconciler.detectors.expression import DETECTOR, ExpressionConfig
from reconciler.detectors.table import DetectorEntry
from reconciler.settings.binder import ConfigError, Text, bind
from state.evidence import NODE, ContendedResource
from tests.reconciler.detectors.scene import VICTIM, Scene, Values, judged, verdicts


def run(signals: dict[str, Values], steps: int, **config: Any) -> str:
    made = ExpressionConfig(**{"for_s": 2, "clear_s": 2, **config})
    return verdicts(judged(DETECTOR, made, Scene({VICTIM: signals}), steps))


def test_true_for_a_while_then_false_for_a_while() -> None:
    signals: dict[str, Values] = {"cpu.wait": [9, 9, 9, 9, 1, 1, 1, 1], "cpu.throttled": 0}
    assert run(signals, 8) == "ssiiiioo"
    assert run({**signals, "cpu.throttled": 5}, 8) == "oooooooo"


def test_unknown_parts_make_it_unknown_unless_the_rest_decides() -> None:
    assert run({"cpu.wait": 9}, 2) == "uu"
    assert run({"cpu.wait": 1}, 2) == "oo"


def test_a_condition_of_its_own_to_clear() -> None:
    signals: dict[str, Values] = {"cpu.wait": [9, 9, 9, 4, 4, 4, 1, 1, 1, 1]}
    assert run(signals, 10, when="cpu.wait > 5", clear="cpu.wait < 2") == "ssiiiiiioo"


def test_old_samples_seen_again_add_no_time() -> None:
    assert run({"cpu.wait": [9, None, None, None, None]}, 5, when="cpu.wait > 5") == "ssssu"


def test_evidence_names_every_signal_with_its_number() -> None:
    config = ExpressionConfig(when="node.memory.available < 2Gi and memory.use > 1", for_s=0)
    scene = Scene({VICTIM: {"memory.use": 3 << 20}, NODE: {"memory.available": 1 << 30}})
    opinion = judged(DETECTOR, config, scene, 1)[0]
    assert opinion.evidence == (
        "node.memory.available 1 GiB, memory.use 3 MiB; bad when node.memory.available < 2Gi and memory.use > 1"
    )
    assert (opinion.resource, opinion.severity) == (ContendedResource.MEMORY, 2.0)
    lost = judged(DETECTOR, config, Scene({VICTIM: {"memory.use": 3 << 20}}), 1)[0]
    assert lost.evidence.startswith(
        "node.memory.available not available (node.memory.available unknown, memory.use 3 MiB)"
    )


def test_signals_of_both_conditions_are_asked_for() -> None:
    config = ExpressionConfig(when="cpu.wait > 1", clear="cpu.use > 1 and cpu.wait < 1")
    assert DETECTOR.signals(config) == ("cpu.wait", "cpu.use")


class _File(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    when: tuple[DetectorEntry, ...] = ()


def test_a_mistake_is_told_with_file_line_and_column_within_the_text() -> None:
    text = 'when:\n- expression:\n    when: "cpu.wait > 5 and cpu.trottled < 1"\n'
    with pytest.raises(ConfigError) as caught:
        bind(_File, [Text("rules.yaml", text)])
    assert str(caught.value) == (
        "rules.yaml:3:5: when[0].expression: when: column 18: unknown signal 'cpu.trottled'; did you mean "
        "'cpu.throttled'?"
    )
    bound = bind(_File, [Text("rules.yaml", text.replace("trottled", "throttled"))])
    assert bound.value.when[0].config == ExpressionConfig(when="cpu.wait > 5 and cpu.throttled < 1")


def test_what_names_no_signal_is_refused() -> None:
    with pytest.raises(ValueError, match="clear: '1 < 2' contains no signal"):
        ExpressionConfig(clear="1 < 2")
