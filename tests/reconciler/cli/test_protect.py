"""protect: the level is checked, written, reloaded and reported; what the daemon refuses is taken back."""

import errno
import json
import os
from argparse import Namespace
from pathlib import Path

import pytest

from reconciler.cli import protect
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.nodeview import InspectedNode, inspect_node
from reconciler.config.load import Loaded
from tests.reconciler.cli.conftest import Run, keep_settings, kept_row
from tests.reconciler.cli.fakedaemon import FakeDaemon

RELOAD = "POST /reload"
EXAMPLE = Path(__file__).parents[3] / "deploy/config.yaml"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("# ours\nprotect: observe # until May\non_stop: restore\n")
    path.chmod(0o640)
    return path


def test_a_level_is_written_and_reloaded(ctl: Run, file: Path, daemon: FakeDaemon) -> None:
    daemon.answers[RELOAD] = 200, {"mode": "enforce", "protect": "cpu"}
    ran = ctl("protect", "cpu", "--config", str(file))
    assert (ran.code, ran.err) == (Exit.OK, "")
    assert file.read_text() == "# ours\nprotect: cpu     # until May\non_stop: restore\n"
    assert file.stat().st_mode & 0o777 == 0o640
    assert [path for path, _ in daemon.asked] == [RELOAD]
    assert "observe -> cpu" in ran.out
    assert "mode: observe -> enforce" in ran.out
    assert os.listdir(file.parent) == [file.name]


def test_each_difference_is_named_with_what_the_node_lacks(ctl: Run, file: Path, daemon: FakeDaemon) -> None:
    daemon.answers[RELOAD] = 200, {"mode": "enforce", "protect": "full"}
    ran = ctl("protect", "full", "--config", str(file), "-o", "json")
    answer = json.loads(ran.out)
    assert answer["changed"]["mode"] == {"from": "observe", "to": "enforce"}
    assert answer["changed"]["policies.network.enabled"] == {"from": "false", "to": "true"}
    assert answer["changed"]["interference.rules.cpu.dry_run"] == {"from": "default", "to": "false"}
    assert "interfaces" in answer["notes"]["policies.network.enabled"]
    assert answer["written"]


def test_a_dry_run_writes_nothing(ctl: Run, file: Path, daemon: FakeDaemon) -> None:
    before = file.read_text()
    ran = ctl("protect", "full", "--dry-run", "--config", str(file))
    assert ran.code == Exit.OK
    assert "mode: observe -> enforce" in ran.out
    assert (file.read_text(), daemon.asked) == (before, [])


def test_a_reload_that_is_refused_puts_the_text_back(ctl: Run, file: Path, daemon: FakeDaemon) -> None:
    before = file.read_text()
    daemon.answers[RELOAD] = 409, {"error": "conf.d/a.yaml:1: mode: expected observe"}
    ran = ctl("protect", "cpu", "--config", str(file))
    assert ran.code == Exit.REFUSED
    assert "conf.d/a.yaml:1" in ran.err
    assert file.read_text() == before
    problems = ["conf.d/a.yaml:1: mode: no", "conf.d/a.yaml:2: also no"]
    daemon.answers[RELOAD] = 400, {"error": "\n".join(problems), "problems": problems}
    ran = ctl("protect", "cpu", "--config", str(file))
    assert (ran.code, ran.err.splitlines()) == (Exit.USAGE, [f"{file} is as before:", *problems])
    assert file.read_text() == before


def test_a_new_file_that_is_refused_is_removed(ctl: Run, tmp_path: Path, daemon: FakeDaemon) -> None:
    daemon.answers[RELOAD] = 409, {"error": "no"}
    path = tmp_path / "config.yaml"
    assert ctl("protect", "cpu", "--config", str(path)).code == Exit.REFUSED
    assert not path.exists()
    daemon.answers[RELOAD] = 200, {"mode": "enforce", "protect": "cpu"}
    assert ctl("protect", "cpu", "--config", str(path)).code == Exit.OK
    assert path.read_text() == "protect: cpu\n"


@pytest.mark.parametrize("old", ["protect: observe\n", "protect: cpu\n", None])
def test_an_edit_during_a_refused_reload_is_kept(
    ctl: Run, tmp_path: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, old: str | None
) -> None:
    path = tmp_path / "config.yaml"
    if old is not None:
        path.write_text(old)
    edited = "protect: cpu\non_stop: restore\n"

    def refuse(_method: str, _path: str, _body: bytes) -> tuple[int, object]:
        path.write_text(edited)
        return 409, {"error": "no"}

    monkeypatch.setattr(daemon, "answer", refuse)
    ran = ctl("protect", "cpu", "--config", str(path))
    assert (ran.code, path.read_text()) == (Exit.REFUSED, edited)
    assert ("is unchanged" if old == "protect: cpu\n" else "was edited meanwhile and keeps the edit") in ran.err


def test_what_cannot_be_taken_back_is_said_with_the_daemons_reason(
    ctl: Run, file: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_method: str, _path: str, _body: bytes) -> tuple[int, object]:
        monkeypatch.setattr(protect, "replace_file", full)
        return 409, {"error": "conf.d/a.yaml:1: wrong"}

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(daemon, "answer", refuse)
    ran = ctl("protect", "cpu", "--config", str(file))
    assert ran.code == Exit.REFUSED
    assert "keeps protect: cpu" in ran.err
    assert "ENOSPC" in ran.err
    assert "conf.d/a.yaml:1" in ran.err


def test_a_node_that_cannot_be_inspected_gets_no_level(
    ctl: Run, file: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read_text()

    def fail(*_: object, **__: object) -> None:
        raise CliError("no cgroups", Exit.UNREACHABLE)

    monkeypatch.setattr(protect, "inspect_node", fail)
    ran = ctl("protect", "cpu", "--config", str(file))
    assert (ran.code, file.read_text(), daemon.asked) == (Exit.UNREACHABLE, before, [])


def test_an_edit_before_the_write_is_kept(
    ctl: Run, file: Path, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(options: Namespace, *, loaded: Loaded) -> InspectedNode:
        file.write_text("on_stop: keep\n")
        return inspect_node(options, loaded=loaded)

    monkeypatch.setattr(protect, "inspect_node", edit)
    ran = ctl("protect", "cpu", "--config", str(file))
    assert (ran.code, file.read_text(), daemon.asked) == (Exit.REFUSED, "on_stop: keep\n", [])
    assert "edited meanwhile" in ran.err


def test_the_undo_restores_what_was_there(ctl: Run, file: Path, daemon: FakeDaemon) -> None:
    daemon.answers[RELOAD] = 200, {"mode": "enforce", "protect": "cpu"}
    arguments = ("protect", "cpu", "--config", str(file))
    assert "undo:" not in ctl(*arguments, "--dry-run").out
    assert "undo: bypassctl protect observe" in ctl(*arguments).out
    assert "undo:" not in ctl(*arguments).out, "it was the level already"
    # Beside it the level observe is refused, so it cannot be the undo.
    file.write_text("mode: enforce\n")
    out = " ".join(ctl(*arguments).out.split())
    assert f"undo: remove protect from {file}, then bypassctl reload" in out
    assert "bypassctl protect observe" not in out


def test_a_daemon_that_reads_another_file_is_found_out(ctl: Run, file: Path, daemon: FakeDaemon) -> None:
    daemon.answers[RELOAD] = 200, {"mode": "observe", "protect": None}
    ran = ctl("protect", "cpu", "--config", str(file))
    assert ran.code == Exit.REFUSED
    assert "another file" in ran.err


def test_without_the_daemon_it_is_for_the_next_start(run: Run, file: Path, tmp_path: Path) -> None:
    ran = run("protect", "cpu", "--config", str(file), "--socket", str(tmp_path / "none"))
    assert ran.code == Exit.OK
    assert "not reloaded" in ran.out
    assert "protect: cpu" in file.read_text()


def test_the_file_that_decides_is_changed(ctl: Run, file: Path, daemon: FakeDaemon) -> None:
    daemon.answers[RELOAD] = 200, {"mode": "enforce", "protect": "cpu"}
    before = file.read_text()
    more = file.parent / "conf.d" / "level.yaml"
    more.parent.mkdir()
    more.write_text("protect: full\n")
    assert ctl("protect", "cpu", "--config", str(file)).code == Exit.OK
    assert (file.read_text(), more.read_text()) == (before, "protect: cpu\n")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("protect: observe\nmode: enforcee\n", Exit.USAGE),
        ("{protect: observe}\n", Exit.REFUSED),
        ("{mode: observe}\n", Exit.USAGE),
        ("mode: enforce\n", Exit.USAGE),
    ],
)
def test_what_cannot_be_changed_safely_is_refused(
    run: Run, file: Path, daemon: FakeDaemon, text: str, code: Exit
) -> None:
    file.write_text(text)
    ran = run("protect", "observe" if text.startswith("mode") else "cpu", "--config", str(file))
    assert (ran.code, ran.out, daemon.asked) == (code, "", [])
    assert str(file) in ran.err
    assert file.read_text() == text


def test_a_mode_that_a_file_has_wins_and_is_said(ctl: Run, file: Path, daemon: FakeDaemon) -> None:
    daemon.answers[RELOAD] = 200, {"mode": "observe", "protect": "cpu"}
    file.write_text("mode: observe\n")
    ran = ctl("protect", "cpu", "--config", str(file))
    assert f"mode: observe at {file}:2" in ran.out


def test_a_link_stays_one(ctl: Run, file: Path, daemon: FakeDaemon) -> None:
    daemon.answers[RELOAD] = 200, {"mode": "enforce", "protect": "cpu"}
    link = file.parent / "link.yaml"
    link.symlink_to(file.name)
    assert ctl("protect", "cpu", "--config", str(link)).code == Exit.OK
    assert link.is_symlink()
    assert "protect: cpu" in file.read_text()


def test_the_levels_are_shown_with_what_each_adds(run: Run, file: Path) -> None:
    ran = run("protect", "--config", str(file), "-o", "json")
    answer = json.loads(ran.out)
    assert answer["protect"] == "observe"
    assert answer["origin"] == f"{file}:2:10"
    assert [level["level"] for level in answer["levels"]] == ["cpu", "cpu+memory", "full"]
    assert "BE CPU budget" in answer["levels"][0]["adds"]
    assert "protect: observe" in run("protect", "--config", str(file)).out


def test_the_examples_commented_line_becomes_the_setting(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(EXAMPLE.read_bytes())
    assert run("protect", "cpu", "--config", str(path), "--socket", str(tmp_path / "none")).code == Exit.OK
    old, new = EXAMPLE.read_text().splitlines(), path.read_text().splitlines()
    assert next(row for row in new if row not in old).startswith("protect: cpu ")
    assert len(new) == len(old)
    assert sum(a != b for a, b in zip(old, new, strict=True)) == 1


def test_the_level_of_the_window_in_force_is_named_beside_that_of_the_files(
    run: Run, ctl: Run, file: Path, daemon: FakeDaemon
) -> None:
    file.write_text("protect: observe\nwindows: [{name: always, when: daily 00:00-24:00 UTC, protect: cpu+memory}]\n")
    ran = run("protect", "--config", str(file))
    assert "protect: observe" in ran.out
    text = "window always, no change within two weeks: protect: cpu+memory while it lasts"
    assert text in ran.out
    daemon.answers[RELOAD] = 200, {"mode": "enforce", "protect": "cpu"}
    ran = ctl("protect", "cpu", "--config", str(file))
    assert (ran.code, ran.err) == (Exit.OK, "")
    assert text in ran.out


def test_what_a_control_plane_has_set_is_below_both_levels(run: Run, file: Path, tmp_path: Path) -> None:
    keep_settings(tmp_path, kept_row({"resourceQOSStrategy.beClass.resctrlQOS.enable": True}))
    file.write_text(f"protect: full\napiserver: {{node_settings: koordinator}}\nstore: {{path: {tmp_path}/state.db}}\n")
    ran = run("protect", "cpu", "--dry-run", "--config", str(file), "-o", "json")
    changed = json.loads(ran.out)["changed"]
    assert changed["policies.network.enabled"] == {"from": "true", "to": "false"}
    assert "policies.cache.enabled" not in changed
    file.write_text(file.read_text().replace("full", "observe"))
    changed = json.loads(run("protect", "full", "--dry-run", "--config", str(file), "-o", "json").out)["changed"]
    assert changed["policies.network.enabled"] == {"from": "false", "to": "true"}
    assert "policies.cache.enabled" not in changed
