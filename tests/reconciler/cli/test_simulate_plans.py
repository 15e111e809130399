"""``simulate`` over a recording with views: the plans of another configuration, and older recordings without them."""

import json
import time
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
from state.evidence import Sample, SampleFrame
from state.memory import NodeMemoryReading
from tests.reconciler.cli.conftest import Ran, Run, keep_settings, kept_row
from tests.reconciler.interference.nodescript import BEGIN_S, Step, night, recording, steps, view

Replay = Callable[..., dict[str, Any]]


@pytest.fixture
def simulate(run: Run, tmp_path: Path) -> Callable[..., Ran]:
    """These steps, or a recording's bytes, under a configuration's text."""

    def call(items: list[Step] | bytes, config: str = "{}", *more: str) -> Ran:
        (tmp_path / "a.rec").write_bytes(items if isinstance(items, bytes) else recording(items))
        (tmp_path / "c.yaml").write_text(config)
        return run("simulate", "--record", str(tmp_path / "a.rec"), "--config", str(tmp_path / "c.yaml"), *more)

    return call


@pytest.fixture
def replayed(simulate: Callable[..., Ran]) -> Replay:
    """The report as JSON."""

    def call(items: list[Step] | bytes, config: str = "{}", *more: str) -> dict[str, Any]:
        ran = simulate(items, config, "-o", "json", *more)
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


def test_an_older_recording_has_no_plans(simulate: Callable[..., Ran], replayed: Replay) -> None:
    packer = RecordingWriter()
    packer.add(SampleFrame(at_s=1.0, wall_s=BEGIN_S))
    old = HEAD + packer.block()
    assert replayed(old)["plans"] is None
    assert "no views" in simulate(old).out


def test_a_view_that_cannot_be_planned_is_reported_with_its_time(
    simulate: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    def impossible(*_: object) -> None:
        raise KeyError(99)

    monkeypatch.setattr("reconciler.control.replay.plan_node", impossible)
    ran = simulate(list(steps([view(0, 1500, 500)])))
    assert (ran.code, ran.out) == (Exit.USAGE, "")
    assert f"{clock(BEGIN_S)} cannot be planned" in ran.err


def test_the_screen_has_the_plans_in_80_columns(simulate: Callable[..., Ran]) -> None:
    out = simulate(list(steps(night())), SMALLER).out
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


def _with_use(items: list[Step]) -> list[Step]:
    """With what signals measured of each pod; BE work keeps 1 GiB, the node has 64."""
    memory = NodeMemoryReading(total_bytes=64 << 30, available_bytes=40 << 30, age_s=0.0)
    result: list[Step] = []
    for step, frame in items:
        used = step.view.cpu.online_milli if step.view.cpu is not None else 0
        samples = {"pod:web": {"cpu.use": Sample(used), "memory.rss": Sample(4 << 30)}}
        samples |= {f"pod:{uid}": {"memory.use": Sample(1 << 30)} for uid in step.view.pods if uid != "web"}
        result.append((replace(step, view=replace(step.view, node_memory=memory)), replace(frame, samples=samples)))
    return result


def test_laws_of_headroom_are_compared_on_the_recording(replayed: Replay) -> None:
    items = _with_use(list(steps([view(second, 1500 if second < 120 else 9000, 500) for second in range(0, 240, 2)])))
    headroom = replayed(items)["headroom"]
    assert set(headroom["laws"]) == {"recent", "histogram"}
    assert headroom["workloads"] == {"known": 0, "cold": 1}
    recent, histogram = headroom["laws"]["recent"], headroom["laws"]["histogram"]
    for law in (recent, histogram):
        assert law["cpu"]["kept"] + law["cpu"]["broken"] == 3
        assert law["memory"]["kept"] + law["memory"]["broken"] == 3
    assert histogram["cpu"]["promised_milli"] <= recent["cpu"]["promised_milli"]
    assert recent["memory"]["available_bytes"] > 30 << 30


def test_only_counted_minutes_are_in_the_promises(replayed: Replay) -> None:
    items = _with_use(list(steps([view(second, 1500, 500) for second in range(0, 300, 2)])))
    laws = replayed(items, "{}", "--from", str(BEGIN_S + 190))["headroom"]["laws"]
    assert laws["recent"]["laws"] == {"recent": 1}


def test_a_table_has_both_laws(simulate: Callable[..., Ran]) -> None:
    text = simulate(_with_use(list(steps([view(second, 1500, 500) for second in range(0, 130, 2)])))).out
    rows = [line.split()[0] for line in text.splitlines() if line.startswith(("recent", "histogram"))]
    assert rows == ["recent", "histogram"]
    assert "0 workloads known at the end (after 24 h), 1 cold" in text


def test_a_gap_and_a_clock_that_is_set_back_end_no_replay(replayed: Replay) -> None:
    first = _with_use(list(steps([view(second, 1500, 500) for second in range(0, 130, 2)])))
    later = _with_use(list(steps([view(90_000 + second, 1500, 500) for second in range(0, 130, 2)])))
    later = [(step, replace(frame, wall_s=frame.wall_s - 1e6)) for step, frame in later]
    laws = replayed([*first, *later])["headroom"]["laws"]
    assert laws["recent"]["cpu"]["kept"] + laws["recent"]["cpu"]["broken"] == 4


def test_each_frame_is_planned_in_the_window_of_its_time(replayed: Replay) -> None:
    items = list(steps(night(every=2)))
    begin, change = (time.strftime("%H:%M", time.gmtime(items[at][1].wall_s)) for at in (0, 30))
    assert begin != change
    windows = f"windows: [{{name: quiet, when: 'daily {change}-{begin} UTC', limit_percent: 40}}]"
    changed = replayed(items, windows)["plans"]
    whole, none = replayed(items, SMALLER)["plans"], replayed(items)["plans"]
    assert none["pools"] == {}
    assert 0 < changed["pools"]["reclaimed"]["differ_s"] < whole["pools"]["reclaimed"]["differ_s"]


def test_a_window_without_a_zone_is_in_that_of_the_recorded_node(replayed: Replay) -> None:
    items = list(steps(night(every=2)))
    begin, change = (time.strftime("%H:%M", time.gmtime(items[at][1].wall_s + 20_700)) for at in (0, 30))
    windows = f"windows: [{{name: quiet, when: 'daily {change}-{begin}', limit_percent: 40}}]"
    there = [(replace(step, settings=replace(step.settings, zone="Asia/Kathmandu")), frame) for step, frame in items]
    named = replayed(items, windows.replace("', limit", " Asia/Kathmandu', limit"))["plans"]
    assert replayed(there, windows)["plans"]["pools"] == named["pools"] != {}


def settings_row(node: str, percent: int) -> bytes:
    return kept_row({"resourceUsedThresholdWithBE.cpuSuppressThresholdPercent": percent}, node)


def test_a_control_planes_settings_of_the_node_count_below_the_windows(replayed: Replay, tmp_path: Path) -> None:
    """Those of the recording at each step; this machine's own only where it has none, and that is said."""
    keep_settings(tmp_path, settings_row("here", 40))
    items = list(steps(night(every=2)))
    files = f"store: {{path: {tmp_path}/state.db}}\napiserver: {{node_settings: koordinator}}\n"
    smaller, without = replayed(items, SMALLER)["plans"], replayed(items, files)
    got = without["plans"]
    assert got["pools"]["reclaimed"]["differ_s"] == smaller["pools"]["reclaimed"]["differ_s"] > 0
    said = "60 frames without the control plane's settings: those stored here count, of node here"
    assert without["node_settings"] == said

    def set_to(*percent: int) -> list[Step]:
        rows = [settings_row("n1", percent[place * len(percent) // 60]) for place in range(60)]
        return [
            (replace(step, settings=replace(step.settings, node=row)), frame)
            for (step, frame), row in zip(items, rows, strict=True)
        ]

    recorded, half = replayed(set_to(65), files), replayed(set_to(65, 40), files, "--against", f"{tmp_path}/c.yaml")
    assert recorded["plans"]["pools"] == {}
    assert recorded["node_settings"] is half["node_settings"] is None
    assert half["plans"]["before"] == half["plans"]["now"]
    only_half = replayed(set_to(65, 40), files)["plans"]["pools"]["reclaimed"]["differ_s"]
    assert 0 < only_half < got["pools"]["reclaimed"]["differ_s"]
    elsewhere = replayed(items, "apiserver: {node_settings: koordinator}\nstore: {path: /nowhere}\n")
    assert elsewhere["node_settings"] == "60 frames without the control plane's settings: none count"
    begin, change = (time.strftime("%H:%M", time.gmtime(items[at][1].wall_s)) for at in (0, 30))
    window = f"windows: [{{name: quiet, when: 'daily {change}-{begin} UTC', limit_percent: 65}}]"
    part = replayed(items, files + window)["plans"]
    assert 0 < part["pools"]["reclaimed"]["differ_s"] < smaller["pools"]["reclaimed"]["differ_s"]
