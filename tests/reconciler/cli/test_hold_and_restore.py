"""hold, release, off, reload, restore: through the daemon, and restoring without one."""

import fcntl
import functools
import json
import os
import shlex
import socket
import sqlite3
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from reconciler.actuators.holds import LONGEST_S
from reconciler.cli import document, ledger, limits, options
from reconciler.cli.exits import Exit
from tests.fakes.livenode import BATCH, LiveNode, container_id, group
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon

UNDONE = {"path": "/kubepods/besteffort", "file": "cpu.cfs_quota_us", "undo": "restored", "text": "-1", "detail": ""}


@pytest.fixture(autouse=True)
def person(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_USER", "ana")


@pytest.fixture
def offline(live: LiveNode, monkeypatch: pytest.MonkeyPatch) -> LiveNode:
    """A node whose daemon was killed after it had written; the command's writes go to the same fake kernel."""
    live.document(killed=True)
    plain = ledger.restore_without_daemon
    monkeypatch.setattr(ledger, "restore_without_daemon", functools.partial(plain, files=live.kernel))
    return live


def test_a_hold_that_is_not_there_is_named_as_it_was_typed_and_not_by_uid(ctl: Run) -> None:
    ran = ctl("release", "pod:ci/batch-7")
    assert ran.code == Exit.NOT_FOUND
    assert "pod:ci/batch-7" in ran.err
    assert BATCH not in ran.err


def test_a_hold_has_the_pods_uid_and_its_requester(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.answers["POST /holds"] = (201, {"target": f"pod:{BATCH}", "reason": "debug", "by": "ana", "until": None})
    ran = ctl("hold", "pod:ci/batch-7", "--for", "90m", "--reason", "debug")
    assert ran.code == Exit.OK
    assert "on hold until release" in ran.out
    assert "bypassctl restore --pod ci/batch-7" in ran.out
    assert ran.out.splitlines()[-1] == "end the hold: bypassctl release pod:ci/batch-7"
    body = {"target": f"pod:{BATCH}", "reason": "debug", "by": "ana", "seconds": 5400.0}
    assert daemon.asked[-1] == ("POST /holds", body)
    wide = ctl("hold", "batch-7", "--for", "90m", "--reason", "debug", "-o", "wide")
    assert wide.out.splitlines()[-1] == f"end the hold: bypassctl release pod:{BATCH}"


def test_a_hold_that_makes_no_sense_is_a_usage_error_in_the_daemons_words(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.answers["POST /holds"] = (400, {"error": "hold target: 'cpu': expected node, pod:UID"})
    ran = ctl("hold", "cpu", "--for", "1h", "--reason", "x")
    assert (ran.code, ran.err) == (Exit.USAGE, "bypassctl: the daemon: hold target: 'cpu': expected node, pod:UID\n")


@pytest.mark.parametrize("text", ["1", "h", "-1h", "-.5h", "0s", "1w", "1e99d", "nand", "infd", "31d", "720.1h", ""])
def test_a_time_is_a_number_with_a_unit_above_zero_and_bounded(run: Run, text: str) -> None:
    for parts in ([f"--for={text}"], ["--for", text]):
        ran = run("hold", "node", *parts, "--reason", "x")
        assert ran.code == Exit.USAGE
        assert "expected a duration such as 90s, 15m, 1h or 2d, above 0 and at most 30d" in ran.err


def test_a_hold_without_an_end_is_one_by_that_word_only(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.answers["POST /holds"] = (201, {"target": "node", "reason": "x", "by": "ana", "until": None})
    assert ctl("hold", "node", "--reason", "x").code == Exit.USAGE
    both = ctl("hold", "node", "--for", "1h", "--until-released", "--reason", "x")
    assert both.code == Exit.USAGE
    assert not daemon.asked
    assert ctl("hold", "node", "--until-released", "--reason", "x").code == Exit.OK
    assert daemon.asked[-1][1] == {"target": "node", "reason": "x", "by": "ana", "until_released": True}


def test_the_bound_of_the_command_line_is_the_daemons() -> None:
    assert options.seconds("30d") == LONGEST_S


def test_a_hold_without_an_end_is_shown_as_such_everywhere(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.document["holds"] = [{"target": "node", "reason": "debug", "by": "cy", "until": None}]
    for command in (["status"], ["holds"], ["dump", "--section", "holds"], ["why", "batch-7"]):
        assert "release" in ctl(*command).out


def test_restoring_one_pod_says_which_hold_is_on_it(ctl: Run, daemon: FakeDaemon) -> None:
    answer = {"files": [UNDONE], "restored": 1, "left": 0, "mode": "enforce"}
    hold = {"target": f"pod:{BATCH}", "reason": "INC-42", "by": "ben", "until": 4_000_000_000.0}
    daemon.answers["POST /restore"] = (200, {**answer, "hold": hold})
    said = ctl("restore", "--pod", "batch-7").out.splitlines()[-1]
    assert all(part in said for part in ("INC-42", "ben", "2096-", "bypassctl release pod:ci/batch-7"))
    daemon.answers["POST /restore"] = (200, {**answer, "hold": None})
    assert "not on hold" in ctl("restore", "--pod", "batch-7").out


def test_a_restored_pod_is_managed_again_when_all_its_holds_have_ended(ctl: Run, daemon: FakeDaemon) -> None:
    hold = {"target": f"pod:{BATCH}", "reason": "INC-42", "by": "ben", "until": 4_000_000_000.0}
    off = {"target": f"off:{BATCH}", "reason": "INC-43", "by": "cy", "until": None}
    daemon.document["podnames"] = [{"uid": BATCH, "namespace": "ci", "name": "batch-7"}]
    daemon.document["holds"] = [hold, off, {**off, "target": "off:other"}]
    answer = {"files": [UNDONE], "restored": 1, "left": 0, "mode": "enforce", "hold": hold}
    daemon.answers["POST /restore"] = (200, answer)
    said = ctl("restore", "--pod", "batch-7").out.splitlines()[-3:]
    assert "bypassctl release pod:ci/batch-7" in said[0]
    assert all(part in said[1] for part in ("until release", "INC-43", "cy", "bypassctl release off:ci/batch-7"))
    assert said[2] == "managed again when all 2 holds have ended"


def test_an_order_that_is_done_is_shown_though_the_daemon_ends_after_it(ctl: Run, daemon: FakeDaemon) -> None:
    hold = {"target": f"pod:{BATCH}", "reason": "INC-42", "by": "ben", "until": None, "budget": False}
    answer = {"files": [UNDONE], "restored": 1, "left": 0, "mode": "enforce", "hold": hold, "kept": None}
    orders = {
        "POST /restore": (("restore", "--pod", "batch-7"), "1 file: 1 restored"),
        "POST /off": (("off", "batch-7", "--for", "1h", "--reason", "x"), "1 value restored"),
        f"DELETE /holds/pod:{BATCH}": (("release", "pod:batch-7"), "released"),
    }
    for order, (words, text) in orders.items():
        daemon.raw, daemon.last, daemon.asked = None, order, []
        daemon.answers |= {order: (200, {**answer, "released": f"pod:{BATCH}"}), "GET /healthz": (200, {})}
        ran = ctl(*words)
        assert (ran.code, text in ran.out, ran.err) == (Exit.OK, True, "")


@pytest.mark.parametrize("ended", ["pod", "off", "file"])
def test_the_end_of_one_hold_names_the_others_on_the_same_pod(ctl: Run, daemon: FakeDaemon, ended: str) -> None:
    """It is not managed again before all have ended."""
    target = f"file:{group(BATCH)}:cpu.weight" if ended == "file" else f"{ended}:{BATCH}"
    other = "pod" if ended == "off" else "off"
    daemon.document["podnames"] = [{"uid": BATCH, "namespace": "ci", "name": "batch-7"}]
    daemon.answers[f"DELETE /holds/{target}"] = (200, {"released": target})
    daemon.document["holds"] = [
        {"target": f"{other}:{BATCH}", "reason": "INC-42", "by": "ben", "until": 4_000_000_000.0},
        {"target": "node", "reason": "upgrade", "by": "cy", "until": None},
        {"target": "pod:other", "reason": "other", "by": "cy", "until": None},
        {"target": "knob:cpu.quota", "reason": "other", "by": "cy", "until": None},
        {"target": f"{other}:{BATCH}x", "reason": "other", "by": "cy", "until": None},
        {"target": "node", "reason": "other", "by": "cy", "until": 1.0},
    ]
    ran = ctl("release", target)
    first, *rest = ran.out.splitlines()
    assert "managed again" not in ran.out
    assert first.endswith(" released")
    assert rest[0].startswith(f"still on hold: {other}:ci/batch-7 until 2096-")
    assert rest[1].strip() == f"end it, too: bypassctl release {other}:ci/batch-7"
    assert rest[2].startswith("still on hold: node until release")
    assert len(rest) == 4
    answer = json.loads(ctl("release", target, "-o", "json").out)
    assert [hold["target"] for hold in answer["still_held"]] == [f"{other}:{BATCH}", "node"]


@pytest.mark.parametrize(
    ("target", "holds", "released"),
    [
        ("batch-7", ("off",), "off"),
        ("batch-7", ("off", "pod"), "pod"),
        ("ci/batch-7", ("pod",), "pod"),
        ("pod:batch-7", ("off",), "pod"),
        ("batch-7", (), "pod"),
    ],
)
def test_a_pods_name_ends_its_hold_whichever_it_has(
    ctl: Run, daemon: FakeDaemon, target: str, holds: tuple[str, ...], released: str
) -> None:
    """Who freed it with off has typed no prefix."""
    daemon.document["holds"] = [
        {"target": f"{kind}:{BATCH}", "reason": "INC-42", "by": "ben", "until": None} for kind in holds
    ]
    ctl("release", target)
    assert [asked for asked, _ in daemon.asked if asked.startswith("DELETE")] == [f"DELETE /holds/{released}:{BATCH}"]


def test_in_observe_nothing_is_managed_again(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.document["agent"]["mode"] = "observe"
    daemon.answers["DELETE /holds/node"] = (200, {"released": "node"})
    ran = ctl("release", "node")
    assert ran.out == "hold on node released; mode observe: nothing is written\n"


def test_a_hold_is_ended_whatever_characters_its_target_has(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.answers["DELETE /holds/file:/kubepods/a%20b%3F"] = (200, {"released": "file:/kubepods/a b?"})
    ran = ctl("release", "file:/kubepods/a b?")
    assert (ran.code, ran.out) == (Exit.OK, "hold on file:/kubepods/a b? released; managed again\n")


def test_the_holds_are_listed_with_the_time_they_have_left(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.document["holds"] = [
        {"target": "node", "reason": "upgrade", "by": "ana", "until": 4_000_000_000.0},
        {"target": "knob:cpu.set", "reason": "old", "by": "ben", "until": 1.0},
        {"target": "pod:x", "reason": "debug", "by": "cy", "until": None},
    ]
    lines = ctl("holds").out.splitlines()
    assert lines[1].split()[2:] == ["d", "left", "ana", "upgrade"]
    assert lines[2].split() == ["knob:cpu.set", "expired", "ben", "old"]
    assert lines[3].split() == ["pod:x", "until", "release", "cy", "debug"]
    assert len(json.loads(ctl("holds", "-o", "json").out)["holds"]) == 3


def test_a_bad_configuration_is_refused_by_reload(ctl: Run, daemon: FakeDaemon) -> None:
    problems = [f"/etc/x.yaml:{number}:1: mode: no" for number in range(1, 400)]
    daemon.answers["POST /reload"] = (400, {"error": "\n".join(problems), "problems": problems})
    ran = ctl("reload")
    assert ran.code == Exit.USAGE
    assert ran.err.splitlines() == problems
    daemon.answers["POST /reload"] = (200, {"mode": "enforce", "needs_restart": []})
    assert ctl("reload").out == "reloaded; mode enforce\n"
    daemon.answers["POST /reload"] = (200, {"mode": "observe", "needs_restart": ["store.path", "kubelet.endpoint"]})
    shown = "reloaded; mode observe; takes effect with a restart: store.path, kubelet.endpoint\n"
    assert ctl("reload").out == shown


def test_an_order_without_a_daemon_says_what_to_do(run: Run, tmp_path: Path) -> None:
    for parts in (["reload"], ["hold", "node", "--until-released", "--reason", "x"], ["release", "node"]):
        ran = run(*parts, "--socket", str(tmp_path / "none"), "--store", str(tmp_path / "none"))
        assert ran.code == Exit.UNREACHABLE
        assert "this command needs the running daemon" in ran.err


def test_a_daemon_that_does_not_answer_is_not_called_stopped(
    run: Run, offline: LiveNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hung daemon, or one under SIGSTOP: it has its lock, and files with its values."""
    monkeypatch.setattr(document, "ANSWER_S", 0.2)
    lock = f"{offline.root}/var/lib/bypassd/lock"
    with socket.socket(socket.AF_UNIX) as silent, open(lock, "w") as file:
        silent.bind(str(tmp_path / "s"))
        silent.listen(16)
        print("4242", file=file, flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
        places = ("--socket", str(tmp_path / "s"), "--root", offline.root)
        ran = run("status", *places)
        assert "daemon does not answer" in ran.out
        assert "stopped" not in ran.out
        assert ran.code == Exit.NOT_OK
        began = time.monotonic()
        ran = run("restore", *places)
        assert time.monotonic() - began < 20, "not the two minutes that a whole restore may take"
        assert (ran.code, "pid 4242" in ran.err) == (Exit.REFUSED, True)
        assert "is running on this state directory, but does not answer; stop it first" in ran.err
        ran = run("reload", *places)
        assert "a daemon runs that does not answer (systemctl restart bypassd)" in ran.err
        for command in (["pods"], ["events", "--follow"], ["evictions"], ["owners"]):
            ran = run(*command, *places)
            assert ran.code == Exit.UNREACHABLE
            assert ran.err.endswith("a daemon runs that does not answer (systemctl restart bypassd)\n"), command
        assert "systemctl start" not in ran.err


def test_off_without_a_daemon_names_the_command_that_works(run: Run, offline: LiveNode, tmp_path: Path) -> None:
    places = ("--socket", str(tmp_path / "none"), "--store", offline.store)
    ran = run("off", "batch-7", "--for", "1h", "--reason", "x", *places)
    assert (ran.code, ran.out) == (Exit.UNREACHABLE, "")
    assert ran.err.endswith("without it the values are restored by: bypassctl restore --pod ci/batch-7\n")
    assert ran.err.count("\n") == 1


def test_what_only_a_daemon_knows_is_one_line_without_it(run: Run, offline: LiveNode, tmp_path: Path) -> None:
    for command in ("owners", "evictions", "interference", "pods", "top"):
        ran = run(command, "--socket", str(tmp_path / "none"), "--store", offline.store)
        assert (ran.code, ran.out, ran.err.count("\n")) == (Exit.UNREACHABLE, "", 1)
        assert "showing the state file" not in ran.err


def test_restore_through_the_daemon_shows_every_file(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.answers["POST /restore"] = (200, {"files": [UNDONE], "restored": 1, "left": 0, "mode": "observe"})
    ran = ctl("restore")
    assert daemon.asked == [("GET /healthz", None), ("POST /restore", {"pod_uid": None, "by": "ana"})]
    assert ran.code == Exit.OK
    assert ran.out.splitlines() == [
        "FILE              VALUE          OUTCOME   GROUP",
        "cpu.cfs_quota_us  -1 (no limit)  restored  /kubepods/besteffort",
        "",
        "1 file: 1 restored",
        "The daemon is now in mode observe; resume: bypassctl reload",
    ]
    answer = {"files": [], "restored": 0, "left": 0, "mode": "observe"}
    for configured, resumed in (("enforce", True), ("observe", False)):
        daemon.answers["POST /restore"] = (200, {**answer, "configured_mode": configured})
        assert ("bypassctl reload" in ctl("restore").out) == resumed


def test_a_file_that_is_left_is_a_failure_and_listed_first(ctl: Run, daemon: FakeDaemon) -> None:
    left = {**UNDONE, "undo": "changed by somebody else since; left", "text": "5", "detail": "by systemd"}
    daemon.answers["POST /restore"] = (200, {"files": [UNDONE, left], "restored": 1, "left": 1, "mode": "observe"})
    ran = ctl("restore", "--pod", "batch-7")
    assert ran.code == Exit.NOT_OK
    assert daemon.asked[-1] == ("POST /restore", {"pod_uid": BATCH, "by": "ana"})
    assert "changed by somebody else since; left  /kubepods/besteffort (by systemd)" in ran.out.splitlines()[1]
    assert "1 file not restored (changed by someone else); see above" in ran.out


def test_restore_works_on_the_ledger_of_a_killed_daemon(run: Run, offline: LiveNode) -> None:
    quota = f"{offline.root}/sys/fs/cgroup/cpu/kubepods/besteffort"
    assert offline.kernel.read(quota, "cpu.cfs_quota_us") == "160000\n"
    ran = run("restore", "--root", offline.root)
    assert (ran.code, ran.err) == (Exit.OK, "")
    assert "4 files: " in ran.out
    assert offline.kernel.read(quota, "cpu.cfs_quota_us") == "-1\n"
    cpuset = f"{offline.root}/sys/fs/cgroup/cpuset{group(BATCH)}/{container_id(BATCH)}"
    assert offline.kernel.read(cpuset, "cpuset.cpus") == "0-6\n", "what the runtime wants now, not what was there first"
    assert run("restore", "--root", offline.root).out == "nothing to restore\n"


def test_restoring_one_pod_leaves_the_others_in_the_ledger_and_then_a_changed_value_is_foreign(
    run: Run, offline: LiveNode
) -> None:
    assert run("restore", "--pod", "batch-7", "--root", offline.root).code == Exit.OK
    quota = f"{offline.root}/sys/fs/cgroup/cpu/kubepods/besteffort"
    assert offline.kernel.read(quota, "cpu.cfs_quota_us") == "160000\n"
    offline.kernel.write(quota, "cpu.cfs_quota_us", "70000")
    ran = run("restore", "-o", "json", "--root", offline.root)
    (file,) = json.loads(ran.out)["files"]
    assert (ran.code, file["file"]) == (Exit.NOT_OK, "cpu.cfs_quota_us")
    assert file["undo"] == "changed by somebody else since; left"
    assert offline.kernel.read(quota, "cpu.cfs_quota_us") == "70000\n"


def test_restore_takes_a_state_file_of_the_present_directory(
    run: Run, offline: LiveNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(os.path.dirname(offline.store))
    for command in ("thaw", "restore"):
        ran = run(command, "--store", os.path.basename(offline.store), "--root", offline.root)
        assert (ran.code, ran.err) == (Exit.OK, "")


def test_restore_where_nothing_was_ever_written_says_so(run: Run, tmp_path: Path) -> None:
    ran = run("restore", "--socket", str(tmp_path / "none"), "--store", str(tmp_path / "state.db"))
    assert ran.code == Exit.UNREACHABLE
    assert "no state file" in ran.err
    assert not os.listdir(tmp_path)


READING_THE_STORE = (("status",), ("dump",), ("diff",), ("why", "batch-7"), ("restore",))


def test_without_permission_to_read_no_command_reports_an_empty_store(
    run: Run, offline: LiveNode, nobody: Callable[[], AbstractContextManager[None]]
) -> None:
    store = f"{offline.root}/var/lib/bypassd/state.db"
    os.chmod(os.path.dirname(store), 0o700)
    for words in READING_THE_STORE:
        with nobody():
            ran = run(*words, "--root", offline.root, "--store", store)
        assert ran.code == Exit.UNREACHABLE
        assert "permission denied" in ran.err
        assert "never" not in ran.err
        assert "nothing" not in ran.out


def _damaged(path: str) -> None:
    for part in ("", ".copy"):
        Path(path + part).write_bytes(b"no store at all" * 1000)


def _gone(path: str) -> None:
    for part in ("", ".copy"):
        os.unlink(path + part)


def _newer(path: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.execute("DELETE FROM meta WHERE key = 'readable_by'")
    connection.commit()
    connection.close()


@pytest.mark.parametrize("damage", [_damaged, _gone, _newer])
def test_a_store_that_cannot_be_trusted_is_never_nothing(
    run: Run, offline: LiveNode, damage: Callable[[str], None]
) -> None:
    path = f"{offline.root}/var/lib/bypassd/state.db"
    Path(os.path.dirname(path), "lock").touch()
    damage(path)
    for words in READING_THE_STORE:
        ran = run(*words, "--root", offline.root)
        assert ran.code == (Exit.REFUSED if damage is _newer else Exit.UNREACHABLE), words
        assert "never" not in ran.err
        assert ran.out == ""


def test_a_partly_lost_store_is_restored_as_far_as_known_and_is_no_success(run: Run, offline: LiveNode) -> None:
    path = f"{offline.root}/var/lib/bypassd/state.db"
    os.unlink(f"{path}.copy")
    connection = sqlite3.connect(path)
    connection.execute("UPDATE files SET row = x'00' WHERE key LIKE 'cpu:/kubepods/besteffort:%'")
    connection.commit()
    connection.close()
    ran = run("restore", "-o", "json", "--root", offline.root)
    answer = json.loads(ran.out)
    assert (ran.code, answer["lost"], answer["left"]) == (Exit.NOT_OK, True, 0)
    assert "cpu.cfs_quota_us" not in {file["file"] for file in answer["files"]}
    assert "may be lost" in ran.err


ABOVE = "/kubepods/besteffort"
HOLD = {"target": f"off:{BATCH}", "reason": "INC-42", "by": "ana", "until": 4_000_000_000.0, "budget": False}


@pytest.fixture
def answer(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The daemon's answer, which a test may change; the kernel has a quota of ours above the pod."""
    fields: dict[str, Any] = {"files": [], "restored": 5, "left": 0, "hold": dict(HOLD), "kept": None}
    daemon.answers["POST /off"] = (200, fields)
    bounds = [
        {"role": "pod", "path": f"{ABOVE}/pod{BATCH}", "quota_milli": 500, "quota_by": "its own limit"},
        {"role": "QoS class", "path": ABOVE, "quota_milli": 400, "quota_by": "bypassd (reclaimed)"},
        {"role": "all pods", "path": "/kubepods", "quota_milli": None, "quota_by": None},
    ]
    monkeypatch.setattr(limits, "PodLimits", lambda *_: None)
    monkeypatch.setattr(limits, "measured", lambda *_: {"groups": bounds})
    return fields


@pytest.mark.usefixtures("answer")
def test_the_order_has_the_pods_uid_the_time_and_the_person(ctl: Run, daemon: FakeDaemon) -> None:
    words = ("off", "pod/batch", "-n", "ci", "--for", "1h", "--reason", "INC-42", "--with-budget")
    ran = ctl(*words)
    assert ran.code == Exit.OK
    body = {"pod_uid": BATCH, "reason": "INC-42", "by": "ana", "budget": True, "seconds": 3600.0}
    assert ("POST /off", body) in daemon.asked


@pytest.mark.usefixtures("answer")
def test_quotas_above_the_pod_are_named_and_how_to_lift_ours(ctl: Run) -> None:
    out = ctl("off", "batch-7", "--for", "1h", "--reason", "x").out
    assert f"still bounded by {ABOVE}: 0.40 CPU" in out
    assert f"{ABOVE}/pod" not in out
    assert "--with-budget" in out
    assert out.splitlines()[-1] == "back earlier: bypassctl release off:ci/batch-7"
    out = ctl("off", "batch-7", "--for", "1h", "--reason", "x", "-o", "wide").out
    assert out.splitlines()[-1] == f"back earlier: bypassctl release off:{BATCH}"


@pytest.mark.usefixtures("answer")
def test_a_command_to_copy_is_one_word_to_the_shell_whatever_the_pods_name(ctl: Run, daemon: FakeDaemon) -> None:
    for pod in daemon.document["pods"]:
        if pod["uid"] == BATCH:
            pod |= {"name": "$(touch owned)", "title": "ci/$(touch owned)"}
    out = ctl("off", BATCH, "--for", "1h", "--reason", "x").out
    assert shlex.split(out.splitlines()[-1].partition(": ")[2]) == ["bypassctl", "release", "off:ci/$(touch owned)"]


def test_a_kept_hold_is_shown_with_its_reason_and_person(ctl: Run, answer: dict[str, Any]) -> None:
    answer["kept"] = {"target": f"pod:{BATCH}", "reason": "debugging", "by": "ben", "until": None}
    out = ctl("off", "batch-7", "--for", "1h", "--reason", "x").out
    assert "hold pod:ci/batch-7 until release: debugging (by ben)" in out


def test_a_value_that_is_not_restored_is_a_failure(ctl: Run, answer: dict[str, Any]) -> None:
    answer["left"] = 2
    ran = ctl("off", "batch-7", "--for", "1h", "--reason", "x", "-o", "json")
    assert ran.code == Exit.NOT_OK
    facts = json.loads(ran.out)
    assert [bound["path"] for bound in facts["bounded_by"]] == [ABOVE]
    assert (facts["pod"], facts["left"]) == ("ci/batch-7", 2)


@pytest.mark.usefixtures("answer")
def test_it_needs_an_end_a_reason_and_one_pod(ctl: Run, daemon: FakeDaemon) -> None:
    for words in (["--for", "1h"], ["--reason", "x"], ["--for", "1h", "--until-released", "--reason", "x"]):
        assert ctl("off", "batch-7", *words).code == Exit.USAGE
    ran = ctl("off", "shop/", "--for", "1h", "--reason", "x")
    assert ran.code == Exit.AMBIGUOUS
    assert not any(path == "POST /off" for path, _ in daemon.asked)


def test_the_node_is_opened_and_kept_open_by_the_same_command(ctl: Run, daemon: FakeDaemon) -> None:
    hold = {**HOLD, "target": "off:node"}
    daemon.answers["POST /off"] = (200, {"files": [], "restored": 0, "left": 0, "hold": hold, "kept": None})
    ran = ctl("off", "node", "--for", "1h", "--reason", "INC-42", "--by", "ana")
    assert ran.code == Exit.OK
    assert ("POST /off", {"pod_uid": "node", "reason": "INC-42", "by": "ana", "seconds": 3600.0}) in daemon.asked
    assert ran.out.startswith("the node is open to new BE pods until ")
    assert ran.out.splitlines()[-1].endswith("bypassctl release off:node")
    refused = ctl("off", "node", "--for", "1h", "--reason", "x", "--with-budget")
    assert refused.code == Exit.USAGE
