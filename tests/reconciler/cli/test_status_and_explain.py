"""status, explain, diff, dump, holds: against a daemon with a real document, and against a real store."""

import json
import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import msgpack
import pytest
import yaml
from msgspec.structs import replace

from cgroupfs.hierarchy import Hierarchy
from reconciler.cli import explain, why
from reconciler.cli.exits import Exit
from reconciler.cli.main import main
from reconciler.config.model import AgentMode
from reconciler.policies.idle_class import IdleClassConfig
from reconciler.policies.table import PoliciesConfig
from state.schema import SETTINGS
from state.store import Store, StoreBatch
from tests.fakes.kernel import Mode
from tests.fakes.livenode import BATCH, PINNED, WEB, LiveNode, container_id, group
from tests.fakes.report import status_report
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon
from tests.reconciler.cli.test_doctor_machine import disk, with_disk


def test_status_is_one_screen_of_80_columns(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.document["sources"] = [{"name": "cpu", "ok": True, "age_s": 0.5, "detail": "/proc/stat"}]
    daemon.document["problems"] = []
    ran = ctl("status")
    assert (ran.code, ran.err) == (Exit.OK, "")
    lines = ran.out.splitlines()
    assert lines[0] == f"bypassd 0.1.0 on {os.uname().nodename}: enforce, ready"
    assert "pods     dedicated 1  shared 1  reclaimed 1  system 0" in lines
    assert "settings in place 3  written 1" in lines
    counted = daemon.document["agent"]["movement"]
    assert (
        f"churn    since start: {counted['cpus_moved']} CPUs moved, {counted['cpuset_writes']} cpuset writes" in ran.out
    )
    assert any(line.startswith("CPU      BE budget 1.60 CPU; in use: online 2.00, reclaimed 0.70") for line in lines)
    assert "alerts   yield 1" in lines
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24


def test_status_names_the_command_that_shows_a_setting_that_failed(ctl: Run, daemon: FakeDaemon) -> None:
    for state, shown in (("written", False), ("held", False), ("refused", True), ("unreadable", True)):
        daemon.document["classes"] = [{"class": None, "pods": 0, "refused": 0, "settings": {state: 1, "in place": 3}}]
        (line,) = (line for line in ctl("status").out.splitlines() if line.startswith("settings"))
        assert line.endswith("  (bypassctl diff)") == shown


def test_status_and_why_of_a_be_pod_name_the_law_of_headroom(ctl: Run, daemon: FakeDaemon) -> None:
    text = "headroom 0.00 CPU, 0 B memory; law recent: what the last minutes have left"
    daemon.document["budget"]["headroom"] = text.removeprefix("headroom ")
    assert text in " ".join(ctl("status").out.split())
    assert text in " ".join(ctl("why", "batch-7").out.split())
    assert "law recent" not in ctl("why", "web-0").out
    del daemon.document["budget"]["headroom"]
    assert ctl("status").code == Exit.OK, "a store has none"


@pytest.mark.parametrize(
    ("placement", "group", "shares", "starved", "shown"),
    [
        ("own", "/bypassd.slice/bypassd.service", 50, 0, "50 shares of its own"),
        ("own", "/bypassd.slice/bypassd.service", 256, 1, "256 shares of its own, 1 time without CPU for a second"),
        ("own", "/bypassd.slice/bypassd.service", 256, 3, "256 shares of its own, 3 times without CPU for a second"),
        ("shared", "/system.slice/bypassd.service", 1024, 0, "1024 shares with all of /system.slice"),
        ("root", "/", None, 0, "no CPU group of its own"),
        ("pod", "/kubepods/podx/y", 1024, 0, "in a pod"),
    ],
)
def test_status_shows_where_the_daemon_is_and_its_weight(
    ctl: Run, daemon: FakeDaemon, placement: str, group: str, shares: int | None, starved: int, shown: str
) -> None:
    top = "/" + group.split("/")[1]
    own = {"placement": placement, "group": group, "top": top, "shares": shares, "raised": 2, "problem": ""}
    daemon.document["agent"]["own_group"] = own | ({"starved": starved} if starved else {})
    ran = ctl("status")
    assert shown in " ".join(ran.out.split())
    assert max(map(len, ran.out.splitlines())) <= 80


def test_status_asks_only_for_what_it_shows(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.document["classes"] = [
        {"class": None, "pods": 0, "refused": 0, "settings": {"in place": 2}},
        {"class": "shared", "pods": 300, "refused": 1, "settings": {"written": 4, "in place": 1}},
    ]
    ran = ctl("status", "-o", "json")
    ((text, _),) = daemon.asked
    assert text.startswith("GET /state?section=agent,")
    assert not {"files", "history", "pods", "settings"} & set(text.partition("=")[2].split(","))
    facts = json.loads(ran.out)
    assert (facts["pods"], facts["refused"]) == ({"shared": 300}, 1)
    assert facts["settings"] == {"in place": 3, "written": 4}


def test_a_daemon_that_is_not_ready_is_not_ok(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.document["agent"] |= {"ready": False, "not_ready": ["the first reconciliation is not finished"]}
    ran = ctl("status")
    assert ran.code == Exit.NOT_OK
    first, reason = ran.out.splitlines()[:2]
    assert first.endswith("enforce, not ready")
    assert reason == "not ready: the first reconciliation is not finished"


def test_a_daemons_document_has_the_reasons_for_which_it_is_not_ready(live: LiveNode) -> None:
    with live.agent() as agent:
        report = status_report(agent)
        facts = report.state(("agent",))["agent"]
        assert isinstance(facts, dict)
        assert facts["ready"] is False
        assert facts["not_ready"] == list(report.not_ready()) != []


def test_status_distinguishes_observing_from_a_restore(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.document["agent"]["mode"] = "observe"
    assert "paused by `restore`; resume: bypassctl reload" in ctl("status").out
    daemon.document["agent"]["configured_mode"] = "observe"
    assert daemon.document["agent"]["ledger"] == {"cgroup": 4}
    assert "observe (no writes; 4 values set before stay: bypassctl restore)" in ctl("status").out
    daemon.document["agent"]["ledger"] = {}
    assert "observe (no writes)" in ctl("status").out


def test_status_has_the_reason_of_the_budget_and_that_of_its_cpus(ctl: Run, daemon: FakeDaemon) -> None:
    reasons = {"budget": "target 65 % of 8 CPUs", "reclaimed": "BE runs on CPU 5", "law": "quota: why"}
    daemon.document["budget"]["reasons"] = reasons
    out = ctl("status").out.splitlines()
    start = next(number for number, text in enumerate(out) if text.startswith("CPU "))
    assert [text.strip() for text in out[start + 1 : start + 4]] == [
        "target 65 % of 8 CPUs",
        "budget law quota: why",
        "BE runs on CPU 5",
    ]


def test_the_parts_that_are_a_dry_run_are_in_the_first_line(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.document["agent"]["dry_run"] = ["policies.cache", "eviction"]
    first = ctl("status").out.splitlines()[0]
    assert first.endswith("enforce (dry run: policies.cache, eviction), ready")


def test_status_names_a_component_that_keeps_failing(ctl: Run, daemon: FakeDaemon) -> None:
    failing = {"name": "web", "health": "waiting", "failures": 3, "error": "port in use"}
    daemon.document["agent"]["components"] = [failing]
    assert "! component web failed, retrying: port in use" in ctl("status").out


def test_explain_shows_signal_decision_and_outcome(ctl: Run) -> None:
    out = ctl("why", "batch-7").out
    assert "signal   online 2.00, BE 0.70, system 0.30 CPU in use" in out
    assert "budget   BE 1.60 CPU: target 65 % of" in out
    setting = out[out.index("  cpu.set ") :].splitlines()
    assert setting[0].startswith("  cpu.set     5-6  in place  ")
    assert setting[1] == "    reclaimed: BE pool"
    assert setting[2].startswith("    cpuset.cpus: written ")
    assert setting[2].endswith("; before 0-6, from the container's spec")
    assert "  seen " in out
    assert "history, newest first" in out


def test_explain_shows_times_in_their_order_and_whether_they_came_before_exec(ctl: Run, daemon: FakeDaemon) -> None:
    (pod,) = [pod for pod in daemon.document["pods"] if pod["uid"] == BATCH]
    pod["containers"][0]["times"] = {
        "seen_at": 1_700_000_000.0,
        "prepared_at": 1_700_000_000.002,
        "signal_at": 1_700_000_000.022,
        "written_at": 1_700_000_000.0225,
        "verified_at": 1_700_000_000.024,
        "signal_to_last_write_s": 0.0005,
        "before_exec": True,
    }
    out = ctl("why", BATCH).out
    assert "> prepared +2 ms > signal +20 ms > written +500 µs > verified +1.5 ms; signal to last write 500 µs" in out
    assert out.count("; before the program's exec") == 1


def test_explain_shows_foreign_writes_refusals_resizes_holds_and_failures(ctl: Run, daemon: FakeDaemon) -> None:
    (pod,) = [pod for pod in daemon.document["pods"] if pod["uid"] == BATCH]
    pod["refusals"] = [
        {"path": pod["group"], "knob": "cpu.quota", "value": 100, "rule": "pod quota", "reason": "starts would fail"}
    ]
    pod["resizes"] = {"main": "deferred: limits.cpu 400m -> 800m (node is full)"}
    pod["settings"][0] |= {"state": "yielded", "actual": "7", "detail": "left to systemd"}
    daemon.document["holds"] = [
        {"target": f"pod:{BATCH}", "reason": "debug", "by": "ana", "until": None},
        {"target": "pod:other", "reason": "not this one", "by": "ana", "until": None},
    ]
    for file in daemon.document["files"]:
        if file["path"] == pod["group"]:
            file |= {"foreign_count": 4, "process": "systemd[1]", "writer": "systemd", "yielded": True, "failures": 2}
            file["failed_errno"] = 22
    out = ctl("why", BATCH).out
    for text in (
        "cpu.weight  1024 shares  yielded; actual 7 shares",
        "left to systemd",
        "changed by others 4 times, last at - by systemd[1]; given up",
        "refused by the kernel 2 times EINVAL",
        "refused cpu.quota = 100 µs a period (pod quota)\n    starts would fail",
        "main: deferred: limits.cpu 400m -> 800m (node is full)",
        f"on hold pod:{BATCH} until release: debug (by ana)",
    ):
        assert text in out
    assert "not this one" not in out


def test_a_pod_with_nothing_wanted_says_so(ctl: Run) -> None:
    out = ctl("why", WEB).out
    assert "not managed: bypassd changes nothing here" in out
    assert "pool     shared: CPUs 1-6" in out
    assert "pool     dedicated: CPUs 7" in ctl("why", PINNED).out


def test_explain_lists_the_pods_processes_sanitized(ctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process in what is taken for its container's directory; its arguments are its own choice."""
    sleeps = "import sys; print('up', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", sleeps, "\x1b[2Jgone", "--password=hunter2"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    (tmp_path / "cgroup.procs").write_text(f"{child.pid}\n")

    class Tree:
        def trigger_directory(self, path: str) -> str:
            return str(tmp_path) if path.endswith("b" * 64) else "/nonexistent"

    monkeypatch.setattr(Hierarchy, "detect", lambda _root: Tree())
    monkeypatch.setattr(why, "_now", lambda *_: {"groups": [], "problem": "not read"})
    monkeypatch.setattr(explain, "_LONGEST_COMMAND", 300)
    try:
        text = ctl("why", BATCH, "--processes").out
        (process,) = json.loads(ctl("why", BATCH, "--processes", "-o", "json").out)["processes"]
    finally:
        child.communicate()
    assert "processes, 1, the largest first" in text
    (row,) = [line for line in text.splitlines() if line.split()[:1] == [str(child.pid)]]
    assert "\\x1b[2Jgone" in row
    assert "\x1b[2J" not in text
    assert "hunter2" not in text
    assert "hunter2" not in process["command"]
    assert process["rss_bytes"] > 1 << 20


def test_explain_as_json_joins_settings_with_their_files(ctl: Run) -> None:
    facts = json.loads(ctl("why", BATCH, "-o", "json").out)
    knobs = {setting["knob"]: setting["file"]["original"] for group in facts["groups"] for setting in group["settings"]}
    assert knobs == {"cpu.weight": "1024", "cpu.set": "0-6"}


def test_an_unknown_pod_and_two_of_one_name_are_different_mistakes(ctl: Run, daemon: FakeDaemon) -> None:
    ran = ctl("why", "nobody")
    assert (ran.code, ran.out) == (Exit.NOT_FOUND, "")
    assert ran.err.startswith("bypassctl: no pod 'nobody' on this node")
    for pod in daemon.document["pods"]:
        pod["name"] = "same"
    assert ctl("why", "same").code == Exit.AMBIGUOUS


def test_a_pod_that_is_gone_is_explained_from_what_was_written(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.document["pods"] = [pod for pod in daemon.document["pods"] if pod["uid"] != BATCH]
    out = ctl("why", "bbbb").out
    assert out.startswith(f"ci/batch-7: this pod no longer exists; below is what was written for it\nuid {BATCH}\n")
    assert "no longer managed" in out or "last known" in out


def test_a_setting_that_the_planner_refused_is_not_hidden_by_no_differences(ctl: Run, daemon: FakeDaemon) -> None:
    (pod,) = [pod for pod in daemon.document["pods"] if pod["uid"] == BATCH]
    refusal = {"path": pod["group"], "knob": "cpu.set", "value": "0-1", "rule": "parent", "reason": "only CPU 0"}
    pod["refusals"] = [refusal]
    ran = ctl("diff")
    assert (ran.code, ran.out.splitlines()) == (
        Exit.OK,
        [
            "4 settings in force, no differences",
            "1 setting refused by the planner:",
            "! ci/batch-7: cpu.set: only CPU 0",
        ],
    )
    facts = json.loads(ctl("diff", "-o", "json").out)
    assert facts["refused"] == [{"place": "ci/batch-7", **refusal}]
    assert "refused" not in ctl("diff", "-n", "shop").out
    pod["refusals"] = [refusal] * 12
    assert ctl("diff").out.splitlines()[-1] == "  and 2 more: bypassctl diff -o json"


def test_no_difference_or_a_knob_that_this_kernel_lacks_is_0_and_a_difference_is_1(
    ctl: Run, daemon: FakeDaemon
) -> None:
    ran = ctl("diff")
    assert (ran.code, ran.out) == (Exit.OK, "4 settings in force, no differences\n")
    setting = daemon.document["directories"][0]["settings"][0]
    setting |= {"state": "would write", "actual": "-1"}
    ran = ctl("diff")
    assert ran.code == Exit.NOT_OK
    assert ran.out.splitlines() == [
        "KNOB       WANTED     ACTUAL         STATE        GROUP",
        "cpu.quota  160000 µs  -1 (no limit)  would write  /kubepods/besteffort",
        "1 setting of 4 not in force",
    ]
    facts = json.loads(ctl("diff", "-o", "json").out)
    assert facts["differing"] == 1
    assert facts["settings"][0]["path"] == "/kubepods/besteffort"
    setting |= {"state": "missing", "actual": None, "detail": "no such file"}
    ran = ctl("diff")
    assert (ran.code, "missing" in ran.out) == (Exit.OK, True)


@pytest.mark.parametrize(
    ("form", "decode"), [("json", json.loads), ("yaml", yaml.safe_load), ("msgpack", msgpack.unpackb)]
)
def test_the_dump_is_the_document(
    daemon: FakeDaemon, form: str, decode: Any, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["dump", "--output", form, "--socket", daemon.socket]) == 0
    assert decode(capfdbinary.readouterr().out) == daemon.document


def test_the_dump_can_be_one_section_and_its_table_names_every_row(ctl: Run) -> None:
    result = json.loads(ctl("dump", "--section", "pools", "-o", "json").out)
    assert list(result) == ["schema", "kind", "source", "at", "pools"]
    out = ctl("dump").out
    assert re.search(
        r"cpu.cfs_quota_us  160000 µs +160000 µs +-1 \(no limit\)  bypassd  BestEffort pods: /kubepods/besteffort\n",
        out,
    )
    assert out.count("  ci/batch-7/main\n") >= 4, "settings, files and history of one container"
    part = ctl("dump", "--section", "files").out
    assert "  ci/batch-7/main\n" in part, "the names are fetched for a table"


# With the daemon down


def test_with_the_daemon_down_the_store_is_shown_and_that_is_said(run: Run, live: LiveNode) -> None:
    document = live.document()
    ran = run("dump", "-o", "json", "--root", live.root)
    assert ran.code == Exit.OK
    assert ran.err == (f"bypassctl: copied node; showing the state file {live.root}/var/lib/bypassd/state.db\n")
    result = json.loads(ran.out)
    assert result["source"] == "store"
    assert result["files"] == document["files"]
    assert result["pools"] == document["pools"]
    assert {pod["title"] for pod in result["pods"]} == {"shop/web-0", "ci/batch-7", "shop/db-0"}
    ran = run("dump", "--section", "budget", "--root", live.root)
    assert (ran.code, "only available from a running daemon" in ran.err) == (Exit.USAGE, True)


def test_status_and_explain_work_from_the_store(run: Run, live: LiveNode) -> None:
    live.document()
    ran = run("status", "--root", live.root)
    assert ran.code == Exit.NOT_OK
    assert "daemon stopped" in ran.out
    assert "in force" not in ran.out, "nothing was read back"
    assert "it has left 4 values (compare: bypassctl diff; undo: bypassctl restore)" in ran.out
    assert "pods     dedicated 1  shared 1  reclaimed 1" in ran.out
    ran = run("why", "batch-7", "--root", live.root)
    assert ran.code == Exit.OK
    assert "cpu.set     5-6  in place" in ran.out
    assert "decided  by bypassd (reclaimed): BE pool" in ran.out
    assert "No answer of the daemon" in ran.out
    live.write(f"{group(BATCH)}/{container_id(BATCH)}", "cpuset", "cpuset.cpus", "3")
    ran = run("explain", "batch-7", "--root", live.root)
    assert "cpu.set     5-6  differs; actual 3" in ran.out
    assert "decided  by kubelet and runtime" in ran.out


def test_diff_reads_the_kernel_itself_when_the_daemon_is_down(run: Run, live: LiveNode) -> None:
    live.document()
    ran = run("diff", "--root", live.root)
    assert (ran.code, ran.out) == (Exit.OK, "4 settings in force, no differences\n")
    directory = f"{live.root}/sys/fs/cgroup/cpu/kubepods/besteffort"
    live.kernel.write(directory, "cpu.cfs_quota_us", "-1")
    ran = run("diff", "--root", live.root)
    assert ran.code == Exit.NOT_OK
    assert "cpu.quota  160000 µs  -1 (no limit)  differs  /kubepods/besteffort" in ran.out
    live.kernel.remove_group(f"/kubepods/besteffort/pod{BATCH}")
    ran = run("diff", "--root", live.root)
    assert "its group is gone" in ran.out
    assert "1 setting of 4 not in force" in ran.out
    live.kernel.write(directory, "cpu.cfs_quota_us", "160000")
    ran = run("diff", "--root", live.root)
    assert ran.code == Exit.OK
    assert ran.out.endswith("\n1 setting in force, 3 without a file, no differences\n")


def test_a_weight_beside_the_idle_class_is_no_difference_for_diff_without_a_daemon(run: Run, live: LiveNode) -> None:
    live.config = replace(live.config, policies=PoliciesConfig(idle_class=IdleClassConfig(enabled=True)))
    live.document()
    (setting,) = (row for row in diff_of(run, live, "--all") if row["knob"] == "cpu.idle")
    assert (setting["path"], setting["actual"], setting["state"]) == (group(BATCH), "1", "in place")
    assert not diff_of(run, live)


@pytest.mark.parametrize("mode", ["v1", "v2"])
def test_limits_of_disks_are_compared_without_a_daemon(run: Run, tmp_path: Path, mode: Mode) -> None:
    live = LiveNode(tmp_path, mode)
    with_disk(live)
    live.config = replace(live.config, policies=disk("8:0"))
    live.document()
    (setting,) = (row for row in diff_of(run, live, "--all") if row["policy"] == "disk" and row["wanted"][:3] == "8:0")
    assert (setting["wanted"], setting["state"]) == (setting["actual"], "in place")
    live.write(setting["path"], *(("io", "io.max", "8:0 wbps=max") if mode == "v2" else ("blkio", THROTTLE, "8:0 0")))
    assert run("diff", "--root", live.root).code == Exit.NOT_OK
    assert run("why", "batch-7", "--root", live.root).code == Exit.OK


def test_a_stored_value_that_no_file_takes_is_one_row_of_diff(run: Run, live: LiveNode) -> None:
    live.document()
    with closing(Store(live.store)) as store:
        key, body = next((key, body) for key, body in store.rows(SETTINGS) if b"cpu.set" in body)
        batch = StoreBatch()
        batch.put(SETTINGS, key, msgpack.packb(msgpack.unpackb(body) | {"value": "5-6; x"}))
        store.apply(batch)
    (bad,) = diff_of(run, live)
    assert (bad["knob"], bad["state"], bad["wanted"]) == ("cpu.set", "unreadable", "5-6; x")
    assert bad["detail"].startswith("the stored value cannot be written: '5-6; x' is not a CPU list")


THROTTLE = "blkio.throttle.write_bps_device"


def diff_of(run: Run, live: LiveNode, *words: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(run("diff", *words, "-o", "json", "--root", live.root).out)["settings"]
    return rows


def test_what_observe_mode_would_write_differs(run: Run, live: LiveNode) -> None:
    live.document(mode=AgentMode.OBSERVE)
    assert run("diff", "--root", live.root).code == Exit.NOT_OK


def test_neither_daemon_nor_store_is_one_line_with_both_reasons(run: Run, tmp_path: Path) -> None:
    ran = run("status", "--socket", str(tmp_path / "none"), "--store", str(tmp_path / "state.db"))
    assert ran.code == Exit.UNREACHABLE
    assert ran.out == ""
    assert ran.err.count("\n") == 1
    assert "daemon not running (no such socket)" in ran.err
    assert "no state file" in ran.err


def test_a_store_of_a_newer_version_is_refused(run: Run, live: LiveNode) -> None:
    live.document()
    with sqlite3.connect(live.config.store.path) as connection:
        connection.execute("PRAGMA user_version = 999")
        connection.execute("UPDATE meta SET row = x'00' WHERE key = 'readable_by'")
    connection.close()
    assert run("dump", "--root", live.root).code == Exit.REFUSED


def daemon_row(**changes: object) -> dict[str, object]:
    return {
        "group": "/system.slice",
        "weight": 1024,
        "original": 1024,
        "wanted": None,
        "use_milli": 50,
        "need_milli": None,
        "waits": 0.02,
        "credit_us": 3000,
        **changes,
    }


@pytest.mark.parametrize(
    ("rows", "refused", "shown"),
    [
        ([daemon_row()], {}, ["others   /system.slice: weight 1024, uses 0.05 CPU; may delay pods 3 ms"]),
        (
            [daemon_row(weight=114, wanted=114, credit_us=334)],
            {},
            ["others   /system.slice: weight 114 of 1024, uses 0.05 CPU; may delay pods 334 µs"],
        ),
        ([daemon_row(credit_us=None)], {}, ["others   /system.slice: weight 1024, uses 0.05 CPU"]),
        ([], {"/system.slice": "why"}, ["others   /system.slice has no weight here (see doctor)"]),
        *(([*rows], {}, []) for rows in ([], [daemon_row(use_milli=None)], [daemon_row(use_milli=1)])),
    ],
)
def test_status_names_the_daemons_that_may_delay_online_pods_most(
    ctl: Run, daemon: FakeDaemon, rows: list[dict[str, object]], refused: dict[str, str], shown: list[str]
) -> None:
    daemon.document["agent"] |= {"daemons": rows, "daemons_refused": refused}
    lines = ctl("status").out.splitlines()
    assert [line for line in lines if line.startswith("others")] == shown
    assert max(map(len, lines)) <= 80


def test_why_explains_a_group_beside_the_pods_by_its_path(ctl: Run) -> None:
    """The besteffort directory is one; so is what `policies.node_daemons` manages."""
    ran = ctl("why", "/kubepods/besteffort")
    assert ran.code == Exit.OK
    assert ran.out.startswith("/kubepods/besteffort\n")
    assert "  cpu.quota " in ran.out
    assert "cpu.cfs_quota_us was -1 (no limit)" in ran.out
    facts = json.loads(ctl("why", "/kubepods/besteffort", "-o", "json").out)
    assert {setting["policy"] for group in facts["groups"] for setting in group["settings"]} == {"reclaimed"}
    pod = ctl("why", f"/kubepods/besteffort/pod{BATCH}")
    assert "ci/batch-7" in pod.out.splitlines()[0]
    assert ctl("why", "/system.slice").code == Exit.NOT_FOUND


def test_why_explains_such_a_group_from_the_store_too(run: Run, live: LiveNode) -> None:
    live.document(killed=True)
    ran = run("why", "/kubepods/besteffort", "--socket", f"{live.root}/none", "--store", live.store)
    assert ran.code == Exit.OK
    assert "  cpu.quota " in ran.out
    assert "No answer of the daemon" in ran.out
    assert BATCH not in ran.out
