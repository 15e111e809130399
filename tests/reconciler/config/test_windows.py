"""The section ``windows``: what a window changes, what it cannot, and every mistake of every window."""

import time
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from reconciler.config import load
from reconciler.config.docs import explain, show
from reconciler.config.model import AgentMode, Config, Protection
from reconciler.config.window_time import SETTINGS, WindowConfig
from reconciler.settings.binder import ConfigError
from reconciler.settings.schema import section_of, settings

OFFICE = """
windows:
- name: office
  when: weekdays 09:00-20:00 UTC
  protect: full
  limit_percent: 50%
  reserve_percent: 10
  memory_reserve_percent: 20
  rules:
    cpu: {dry_run: true}
    mine: {enabled: false}
- name: night
  when: daily 22:00-06:00 UTC
"""
MONDAY_NOON = 1_796_040_000.0
assert time.strftime("%a %H:%M", time.gmtime(MONDAY_NOON)) == "Mon 12:00"
NIGHT = MONDAY_NOON + 12 * 3600
EVENING = MONDAY_NOON + 9 * 3600


def loaded(path: Path, text: str) -> load.Loaded:
    file = path / "config.yaml"
    file.write_text(text)
    return load.load(str(file))


def problems(path: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loaded(path, text)
    return [str(problem).removeprefix(f"{path}/config.yaml:") for problem in caught.value.problems]


def test_a_window_changes_the_settings_that_it_names_and_the_files_key_wins_over_its_level(tmp_path: Path) -> None:
    base = loaded(
        tmp_path,
        "protect: cpu\npolicies: {idle_buffer: {enabled: false}}\n"
        f"interference: {{rules: {{mine: {{when: [[{{pressure: {{resource: io}}}}]]}}}}}}\n{OFFICE}",
    )
    config = load.in_force(base, MONDAY_NOON).config
    assert base.config.protect is Protection.CPU
    assert config.protect is Protection.FULL
    assert config.policies.reclaimed.budget.limit_percent == 50
    assert config.policies.reclaimed.budget.harm.reserve_percent == 10
    assert config.headroom.memory.reserve_percent == 20
    assert config.interference.enabled
    assert not config.policies.idle_buffer.enabled
    assert config.interference.rules["cpu"].dry_run
    assert not config.interference.rules["memory"].dry_run
    assert not config.interference.rules["mine"].enabled
    assert config.interference.rules["mine"].when
    assert config.windows == base.config.windows
    assert load.in_force(base, NIGHT).config == base.config
    assert load.in_force(base, NIGHT).window == "night"
    assert load.in_force(base, EVENING) is base


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("", AgentMode.OBSERVE),
        ("protect: observe", AgentMode.OBSERVE),
        ("{protect: cpu, mode: observe}", AgentMode.OBSERVE),
        ("mode: enforce", AgentMode.ENFORCE),
        ("protect: cpu", AgentMode.ENFORCE),
    ],
)
def test_no_window_changes_the_mode(tmp_path: Path, text: str, mode: AgentMode) -> None:
    directory = tmp_path / "conf.d"
    directory.mkdir()
    (directory / "windows.yaml").write_text(OFFICE.replace("    mine: {enabled: false}\n", ""))
    now = load.in_force(loaded(tmp_path, text), MONDAY_NOON)
    assert now.window == "office"
    assert now.config.mode is mode


def test_where_a_value_of_a_window_comes_from_is_shown(tmp_path: Path) -> None:
    text = OFFICE.replace("    mine: {enabled: false}\n", "")
    now = load.in_force(loaded(tmp_path, text), MONDAY_NOON)
    file = f"{tmp_path}/config.yaml"
    assert show(now, "protect") == f"protect = full   [window office ({file}:5:12)]\n"
    assert show(now, "mode") == "mode = observe   [default]\n"
    assert f"limit_percent = 50%   [window office ({file}:6:18)]" in show(now, "policies.reclaimed")
    assert "policies.reclaimed.enabled = true   [protect: full]" in show(now, "policies.reclaimed")
    assert f"window office ({file}:10:20)" in show(now, "interference.rules")
    assert "  now: office until" in explain(now, "windows", window="office until 20:00:00, then no window")


def test_what_only_a_restart_applies_is_kept_in_every_window(tmp_path: Path) -> None:
    text = OFFICE.replace("    mine: {enabled: false}\n", "")
    before = loaded(tmp_path, f"node: {{sample_s: 2}}\n{text}")
    (tmp_path / "config.yaml").write_text(f"node: {{sample_s: 5}}\n{text}")
    after, kept = load.reload(before)
    assert kept == ("node.sample_s",)
    assert load.in_force(after, MONDAY_NOON).config.node.sample_s == 2


def test_every_mistake_of_every_window_is_reported_with_its_place(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        "windows:\n"
        "- name: first\n"
        "  when: weekdys 09:00-25:00 UTC\n"
        "  protect: observe\n"
        "- name: Second\n"
        "  when: daily 09:00-20:00 UTC\n"
        "  limit_percent: 500\n"
        "- name: third\n"
        "  when: daily 09:00-20:00 UTC\n"
        "  mode: enforce\n"
        "  rules: {unknown: {dry_run: true}}\n"
        "- name: third\n"
        "  when: daily 09:00-09:00\n"
        "- when: daily 01:00-02:00 UTC\n"
        "  rules: {cpu: {clear_s: -1s}}\n",
    )
    expected = [
        "3:9: windows[0].when: days: expected daily",
        "4:12: windows[0].protect: expected one of cpu, cpu+memory, full; got 'observe'",
        "5:9: windows[1].name: expected",
        "7:18: windows[1].limit_percent: out of bounds: expected from 1% to 100%; got '500'",
        "10:3: windows[2].mode: unknown key 'mode'",
        "11:10: interference: rules.unknown: no detectors (when)",
        "12:3: windows[3].name: expected a name of its own; windows[2] is third, too",
        "13:9: windows[3].when: times: the window is empty",
        "14:3: windows[4]: missing key 'name'",
        "15:26: windows[4].rules.cpu.clear_s: out of bounds",
    ]
    assert len(found) == len(expected)
    assert [line for line, begin in zip(found, expected, strict=True) if not line.startswith(begin)] == []
    assert found[5].endswith("(in window third)")


def test_the_whole_configuration_of_a_window_is_checked_at_load(tmp_path: Path) -> None:
    text = (
        "windows:\n"
        "- name: one\n"
        "  when: daily 09:00-20:00 UTC\n"
        "  rules: {cpu: {when: [[]]}}\n"
        "- name: two\n"
        "  when: daily 09:00-20:00 UTC\n"
        "  rules: {mine: {dry_run: false}}\n"
    )
    found = problems(tmp_path, text)
    assert [line.partition(": ")[0] for line in found] == ["4:16", "7:10"]
    assert "an empty group would always be true" in found[0]
    assert "rules.mine: no detectors (when), and no shipped rule has this name" in found[1]
    rule = "interference: {rules: {mine: {when: [[{pressure: {resource: io}}]]}}}\n"
    assert loaded(tmp_path, rule + text.replace("cpu: {when: [[]]}", "")).config.windows


def test_there_are_at_most_sixteen(tmp_path: Path) -> None:
    rows = "".join(f"- {{name: w{number}, when: mon 0{number % 9}:00-09:30 UTC}}\n" for number in range(17))
    assert "expected at most 16 entries; got 17" in problems(tmp_path, f"windows:\n{rows}")[0]
    assert len(loaded(tmp_path, f"windows:\n{rows[: rows.rindex('- ')]}").config.windows) == 16


def test_the_bounds_of_a_windows_keys_are_those_of_the_settings() -> None:
    known, own = dict(settings(section_of(Config))), section_of(WindowConfig).fields
    for key, setting in SETTINGS.items():
        if key.endswith("_percent"):
            assert own[key].schema.bounds == known[setting].schema.bounds
    levels = get_args(get_args(get_type_hints(WindowConfig)["protect"])[0])
    assert set(levels) == set(Protection) - {Protection.OBSERVE}
    assert own.keys() - SETTINGS.keys() == {"name", "when"}
    restart = [setting for setting in SETTINGS.values() if known[setting].restart]
    assert restart == []
