"""config show: the values in force, as lines and as a document."""

import json
from pathlib import Path

import pytest
import yaml

from reconciler.cli.exits import Exit
from reconciler.cli.recorded import ABOUT
from reconciler.cli.windowed import moment_of
from reconciler.config import load
from reconciler.config.model import Config
from reconciler.settings.schema import section_of
from tests.reconciler.cli.conftest import Run, keep_settings, kept_row

SECRET = "hunter2-s3cr3t"
FILE = f"""\
mode: enforce
node: {{resync_s: 5s}}
alerts:
  sinks:
    chat: {{webhook: {{url: "https://x.example/{SECRET}"}}}}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(FILE)
    return str(path)


@pytest.mark.parametrize("action", ["show", "explain"])
def test_the_document_has_every_setting_with_value_and_source(run: Run, file: str, action: str) -> None:
    ran = run("config", action, "--config", file, "-o", "json")
    assert (ran.code, ran.err) == (Exit.OK, "")
    document = json.loads(ran.out)
    settings = document["settings"]
    assert document["files"] == [file]
    assert len(settings) == load.setting_count()
    assert settings["node.resync_s"] == {"value": 5.0, "source": [f"{file}:2:18"], "changed": True}
    assert settings["node.sample_s"] == {"value": 1.0, "source": [], "changed": False}
    assert settings["mode"]["value"] == "enforce"
    assert settings["node.cgroup_root"]["value"] is None
    assert SECRET not in ran.out


def test_a_section_and_the_other_forms(run: Run, file: str) -> None:
    ran = run("config", "show", "node", "--config", file, "-o", "yaml")
    settings = yaml.safe_load(ran.out)["settings"]
    assert {name.split(".")[0] for name in settings} == {"node"}
    assert run("config", "show", "nod", "--config", file, "-o", "json").code == Exit.NOT_FOUND
    assert run("config", "schema", "-o", "yaml").code == Exit.USAGE
    assert json.loads(run("config", "schema", "-o", "json").out)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("resync_s", "node.resync_s"),
        ("limit_percent", "policies.reclaimed.budget.limit_percent"),
        ("budget.limit_percent", "policies.reclaimed.budget.limit_percent"),
        ("node.resync", "node.resync_s"),
        ("resinc_s", "node.resync_s"),
        ("Resync", "node.resync_s"),
        ("idle_buffer", "policies.idle_buffer"),
    ],
)
def test_a_key_that_is_none_has_the_settings_with_such_a_name(run: Run, file: str, key: str, near: str) -> None:
    ran = run("config", "explain", key, "--config", file)
    assert (ran.code, ran.out) == (Exit.NOT_FOUND, "")
    said, _, names = ran.err.strip().partition("; nearest: ")
    assert said == f"bypassctl: {key}: no such setting"
    assert near in names.split(", ")
    assert len(names) < 600


@pytest.mark.parametrize("key", ["", ".", "zzzzzz", "x" * 5000])
def test_no_key_is_near_by_accident(run: Run, file: str, key: str) -> None:
    ran = run("config", "explain", key, "--config", file)
    assert (ran.code == Exit.OK) == (key == "")
    assert "nearest" not in ran.err


def test_a_preset_is_listed_with_what_the_node_lacks(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    # What the file has as the level has it is not overridden.
    path.write_text("protect: cpu\npolicies: {idle_buffer: {enabled: false}, reclaimed: {form: both}}\nmode: enforce\n")
    ran = run("config", "explain", "policies", "--config", str(path), "--root", str(tmp_path), "-o", "json")
    assert (ran.code, ran.err) == (Exit.OK, "")
    document = json.loads(ran.out)
    notes = {entry["setting"]: (entry["value"], entry["note"]) for entry in document["preset"]}
    assert notes["mode"] == ("enforce", "")
    assert notes["policies.idle_buffer.enabled"] == (True, f"overridden in {path}:2:35")
    assert notes["policies.idle_class.enabled"][1].startswith("this node lacks it: ")
    settings = document["settings"]
    assert notes["policies.reclaimed.form"] == ("both", "")
    written = {"value": "both", "source": [f"{path}:2:61"], "changed": False}
    assert settings["policies.reclaimed.form"] == written
    assert settings["policies.reclaimed.enabled"]["source"] == ["protect: cpu"]
    assert settings["policies.idle_class.enabled"]["changed"]
    text = run("config", "show", "mode", "--config", str(path), "--root", str(tmp_path)).out
    assert text == f"mode = enforce   [{path}:3:7]\n"


@pytest.mark.parametrize("key", [[], ["node"], ["node.resync_s"], ["policies.reclaimed"]])
def test_show_has_the_first_line_of_each_setting_that_explain_has(run: Run, file: str, key: list[str]) -> None:
    shown, explained = (run("config", action, *key, "--config", file).out for action in ("show", "explain"))
    assert shown.splitlines() == [line for line in explained.splitlines() if not line.startswith("  ")]
    assert shown


def test_a_sections_keys_are_made_once() -> None:
    top = section_of(Config)
    assert top.fields["node"].schema.fields["resync_s"] is top.fields["node"].schema.fields["resync_s"]


def test_settings_of_a_control_plane_have_their_origin_and_the_others_are_listed(run: Run, tmp_path: Path) -> None:
    section = "resourceUsedThresholdWithBE"
    values: dict[str, str | int] = {
        f"{section}.cpuSuppressThresholdPercent": 55,
        f"{section}.cpuSuppressPolicy": "cfsQuota",
        f"{section}.memoryEvictThresholdPercent": "many\x1b[2J",
        "news": 1,
    }
    keep_settings(tmp_path, kept_row(values))
    path = tmp_path / "config.yaml"
    path.write_text(f"protect: cpu\napiserver: {{node_settings: koordinator}}\nstore: {{path: {tmp_path}/state.db}}\n")
    ran = run("config", "explain", "--config", str(path))
    assert (ran.code, ran.err) == (Exit.OK, "")
    origin = f"NodeSLO n1: {section}.cpuSuppressThresholdPercent = 55"
    assert f"policies.reclaimed.budget.limit_percent = 55%   [{origin}]\n" in ran.out
    assert "policies.reclaimed.form = both   [protect: cpu]\n" in ran.out
    left = [line.removeprefix("  not taken: ") for line in ran.out.splitlines() if line.startswith("  not taken: ")]
    assert len(left) == 3
    assert f"NodeSLO n1: {section}.cpuSuppressPolicy = cfsQuota: policies.reclaimed.form: protect has it" in left
    assert "NodeSLO n1: news = 1: not known to this version" in left
    assert "\x1b" not in ran.out
    document = json.loads(run("config", "explain", "policies.reclaimed", "--config", str(path), "-o", "json").out)
    assert document["settings"]["policies.reclaimed.budget.limit_percent"]["source"] == [origin]
    assert document["not_taken"] == left


@pytest.mark.parametrize(("zone", "link", "named"), [("Asia/Kathmandu", "", "w"), ("", "Asia/Kathmandu", None)])
def test_of_a_captured_node_the_window_is_that_of_its_time(
    run: Run, tmp_path: Path, zone: str, link: str, named: str | None
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("windows: [{name: w, when: 'daily 10:00-11:00', limit_percent: 40}]\n")
    about = tmp_path / ABOUT
    about.parent.mkdir()
    # 10:45 there, 05:00 in UTC.
    document = {"version": "1", "node": "n", "at": 20_000 * 86_400.0 + 5 * 3600, "files": 1, "zone": zone}
    about.write_text(json.dumps(document))
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/localtime").symlink_to(f"/usr/share/zoneinfo/{link or 'UTC'}")
    for command in (("config", "show"), ("protect",)):
        words = (*command, "--config", str(path), "--root", str(tmp_path), "-o", "json")
        assert json.loads(run(*words).out)["window"]["name"] == named
    # A tree without a description has the zone of its own files.
    moment = moment_of(str(tmp_path / "none"))
    assert (moment.zone, moment.at > 1.7e9) == (None, True)


@pytest.mark.parametrize(
    ("first", "source", "note"),
    [
        ("protect: observe\n", "protect: observe", " (overridden in protect: observe)"),
        ("protect: cpu\n", "protect: cpu", ""),
        ("mode: observe\nprotect: cpu\n", "{path}:1:7", " (overridden in {path}:1:7)"),
        ("", "default", " (the same in every window)"),
    ],
)
def test_the_mode_is_not_of_the_windows_level(run: Run, tmp_path: Path, first: str, source: str, note: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"{first}windows: [{{name: always, when: 'daily 00:00-24:00 UTC', protect: full}}]\n")
    mode = "enforce" if first == "protect: cpu\n" else "observe"
    shown = run("config", "show", "mode", "--config", str(path)).out
    assert shown == f"mode = {mode}   [{source.format(path=path)}]\n"
    explained = run("config", "explain", "protect", "--config", str(path)).out
    assert f"  preset: mode: enforce{note.format(path=path)}\n" in explained
    assert "  preset: policies.idle_buffer.enabled: true\n" in explained


def test_the_window_in_force_and_the_next_change_are_shown(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("windows: [{name: always, when: 'daily 00:00-24:00 UTC', protect: full, limit_percent: 40}]\n")
    document = json.loads(run("config", "show", "--config", str(path), "-o", "json").out)
    assert document["window"] == {"name": "always", "until": None, "then": None, "names": ["always"]}
    setting = document["settings"]["policies.reclaimed.budget.limit_percent"]
    assert setting == {"value": 40.0, "source": [f"window always ({path}:1:87)"], "changed": True}
    assert document["settings"]["mode"] == {"value": "observe", "source": [], "changed": False}
    assert "  now: always, no change within two weeks" in run("config", "explain", "windows", "--config", str(path)).out
