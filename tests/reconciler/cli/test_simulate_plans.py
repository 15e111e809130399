"""``simulate`` over a recording with views: the plans of another configuration, and older recordings without them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from reconciler.cli.exits import Exit
from reconciler.cli.simulate import _Progress
from reconciler.config.model import Config
from reconciler.interference.recording import HEAD, RecordingWriter
from reconciler.policies.idle_buffer import IdleBufferConfig
from reconciler.runtime.format import clock
from state.evidence import SampleFrame
from tests.reconciler.cli.conftest import Run
from tests.reconciler.interference.nodescript import BEGIN_S, Step, night, recording, steps, view

Replay = Callable[..., dict[str, Any]]


@pytest.fixture
def replayed(run: Run, tmp_path: Path) -> Replay:
    """The section ``plans`` of the report, of these steps under a configuration's text."""

    def call(items: list[Step], config: str = "{}", *more: str) -> dict[str, Any]:
        (tmp_path / "a.rec").write_bytes(recording(items))
        (tmp_path / "c.yaml").write_text(config)
        words = ("--record", str(tmp_path / "a.rec"), "--config", str(tmp_path / "c.yaml"), "-o", "json")
        ran = run("simulate", *words, *more)
        assert ran.code == Exit.OK, ran.err
        document: dict[str, Any] = json.loads(ran.out)
        return document

    return call


def test_the_recorded_configuration_makes_no_difference(replayed: Replay) -> None:
    plans = replayed(list(steps(night())))["plans"]
    assert plans["compared_with"] == "recorded"
    assert plans["before"] == plans["now"]
    assert (plans["pools"], plans["settings"], plans["as_recorded"]) == ({}, {}, [])
    assert plans["agreement"]["same_cpu_sets"] == plans["agreement"]["same_budget"] == plans["steps"] == 120
    assert (plans["work"]["lost_cpu_s"], plans["work"]["won_most_cpu_s"]) == (0, 0)


SMALLER = "policies: {reclaimed: {budget: {limit_percent: 40}}}"


def test_a_smaller_limit_loses_be_work(replayed: Replay) -> None:
    plans = replayed(list(steps(night())), SMALLER)["plans"]
    assert 0 < plans["work"]["lost_cpu_s"] < plans["work"]["used_cpu_s"]
    assert plans["pools"]["reclaimed"]["differ_s"] > 0
    assert "cpu.quota" in plans["settings"]


def test_two_configurations_are_compared_with_each_other(replayed: Replay, tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(SMALLER)
    document = replayed(list(steps(night())), SMALLER, "--against", str(tmp_path / "old.yaml"))
    assert document["plans"]["compared_with"] == "against"
    assert document["plans"]["before"] == document["plans"]["now"]
    assert document["against"]["plans"] is None
    assert document["against"]["resources"] == document["resources"]


def test_classes_of_the_given_configuration_count(replayed: Replay) -> None:
    rule = "classes: {overrides: [{pod: ns/batch, class: system}]}"
    document = replayed(list(steps(night(30))), rule)
    changed = document["plans"]["settings"]["cpu.set"]["examples"]["/kubepods/besteffort/podbatch/id-batch-1"]
    assert changed[0] != "-"
    assert changed[1] == "-"


def test_a_reload_within_the_recording_changes_what_is_compared_with(replayed: Replay) -> None:
    items = list(steps(night(60)))
    other = replace(
        items[0][0].settings, policies=replace(Config().policies, idle_buffer=IdleBufferConfig(enabled=False))
    )
    plans = replayed([*items[:30], *((replace(step, settings=other), frame) for step, frame in items[30:])])["plans"]
    assert plans["as_recorded"] == ["idle_buffer"]
    assert plans["steps"] == 60


def test_a_gap_begins_with_the_plan_that_was_in_force(replayed: Replay) -> None:
    first, later = list(steps(night(20))), list(steps([view(4000 + second, 1500, 500) for second in range(20)]))
    plans = replayed([*first, *later], SMALLER)["plans"]
    assert plans["seconds"] == 19 + 19
    assert plans["agreement"]["same_cpu_sets"] == 40


def test_only_a_part_is_counted(replayed: Replay) -> None:
    plans = replayed(list(steps(night(60))), SMALLER, "--from", str(BEGIN_S + 50))["plans"]
    assert (plans["steps"], plans["seconds"]) == (10, 10)


def test_an_older_recording_has_no_plans(run: Run, tmp_path: Path) -> None:
    packer = RecordingWriter()
    packer.add(SampleFrame(at_s=1.0, wall_s=BEGIN_S))
    (tmp_path / "old.rec").write_bytes(HEAD + packer.block())
    (tmp_path / "c.yaml").write_text("{}")
    words = ("simulate", "--record", str(tmp_path / "old.rec"), "--config", str(tmp_path / "c.yaml"))
    assert json.loads(run(*words, "-o", "json").out)["plans"] is None
    assert "no views" in run(*words).out


def test_a_view_that_cannot_be_planned_is_reported_with_its_time(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impossible(*_: object) -> None:
        raise KeyError(99)

    (tmp_path / "a.rec").write_bytes(recording(list(steps([view(0, 1500, 500)]))))
    (tmp_path / "c.yaml").write_text("{}")
    monkeypatch.setattr("reconciler.control.replay.plan_node", impossible)
    ran = run("simulate", "--record", str(tmp_path / "a.rec"), "--config", str(tmp_path / "c.yaml"))
    assert (ran.code, ran.out) == (Exit.USAGE, "")
    assert f"{clock(BEGIN_S)} cannot be planned" in ran.err


def test_the_screen_has_the_plans_in_80_columns(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.rec").write_bytes(recording(list(steps(night()))))
    (tmp_path / "c.yaml").write_text(SMALLER)
    out = run("simulate", "--record", str(tmp_path / "a.rec"), "--config", str(tmp_path / "c.yaml")).out
    assert "BE work lost" in out
    assert "cpu.quota" in out
    _, heading, rest = out.partition("Plans over")
    assert max(map(len, (heading + rest).splitlines())) <= 80


class Terminal:
    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back."""


def test_a_long_replay_shows_how_far_it_is_and_clears_the_line(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    terminal = Terminal()
    with (tmp_path / "a").open("rb") as file, _Progress(terminal) as progress:  # type: ignore[arg-type]
        progress.at(file, BEGIN_S)
        assert not terminal.text
        progress._next = 0.0
        file.read(50)
        progress.at(file, BEGIN_S)
    assert "50 %" in terminal.text
    assert terminal.text.endswith("\r\x1b[K")
