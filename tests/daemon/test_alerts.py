"""Alerts of the running daemon: of its parts, a test on demand, a sink added by reload."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.daemon.process import Daemon, bounded, wait_for
from tests.daemon.test_foreign_writes import named
from tests.daemon.writers import Scribe
from tests.fakes.node import DirectoryNode

Make = Callable[..., Daemon]


def test_a_persons_write_reaches_a_file_and_a_program_beside_the_log(
    node: DirectoryNode, daemon: Make, tmp_path: Path
) -> None:
    pod = node.add("be")
    program = tmp_path / "tell"
    program.write_text(f"#!/bin/sh\ncat > {tmp_path}/part && mv {tmp_path}/part {tmp_path}/told\n")
    program.chmod(0o755)
    sinks = {
        "lines": {"file": {"path": str(tmp_path / "alerts")}, "batch_delay_s": 0},
        "program": {"command": {"argv": [str(program)]}, "batch_delay_s": 0},
    }
    item = daemon(alerts={"sinks": sinks, "labels": {"cluster": "east"}}).up()
    named(item)
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    with Scribe("sh") as shell:
        shell.write(node.path(pod.main.group, "cpuset", "cpuset.cpus"), "0-1")
        wait_for(lambda: _whole(tmp_path / "alerts") and (tmp_path / "told").exists(), told=item.tail)
    (row,) = [json.loads(text) for text in (tmp_path / "alerts").read_text().splitlines()]
    assert (row["kind"], row["severity"], row["status"]) == ("other", "info", "firing")
    assert row["labels"] | {"cluster": "east", "cause": "hold", "knob": "cpu.set", "uid": pod.uid} == row["labels"]
    assert "set manually" in row["summary"] or "person" in row["summary"], row
    (message,) = json.loads((tmp_path / "told").read_text())["alerts"]
    assert message["id"] == row["id"]
    alerts = item.state("alerts")["alerts"]
    assert [sink["told"] for sink in alerts["sinks"]] in ([1, 1], [1, 0]), "the program has told it, or is about to end"
    assert alerts["recent"][0]["id"] == row["id"]
    wait_for(lambda: item.metric_sum("bypassd_alert_sink_alerts_total") == 2, told=item.tail)
    assert item.alerts("hold") == 1
    status, answer = item.call("POST", "/alerts/test", {"sink": "lines", "by": "ana"})
    assert (status, [(sink["sink"], sink["ok"]) for sink in answer["sinks"]]) == (200, [("lines", True)])
    assert "TEST alert from bypassd (ana@" in (tmp_path / "alerts").read_text()
    assert item.call("POST", "/alerts/test", {"sink": "none"})[0] == 400
    assert item.stop() == 0


def _whole(path: Path) -> bool:
    return path.exists() and path.read_text().endswith("\n")


def test_a_reload_adds_and_removes_a_sink_and_reports_a_bad_one(
    node: DirectoryNode, daemon: Make, tmp_path: Path
) -> None:
    item = daemon().up()
    assert item.call("POST", "/alerts/test", {})[0] == 400
    assert item.state("alerts")["alerts"] == {"sinks": [], "stored": [], "recent": []}
    item.configure(alerts={"sinks": {"bad": {"command": {"argv": ["/nowhere/tell"]}}}})
    assert item.call("POST", "/reload")[0] == 200
    status, answer = item.call("POST", "/alerts/test", {})
    assert (status, answer["sinks"][0]["detail"]) == (200, "/nowhere/tell: cannot run: No such file or directory")
    item.configure(alerts={"sinks": {}})
    assert item.call("POST", "/reload")[0] == 200
    wait_for(lambda: item.state("alerts")["alerts"]["sinks"] == [], told=item.tail)
    item.configure(alerts={"sinks": {"x": {}}})
    assert item.call("POST", "/reload")[0] == 400
    assert item.said("expected exactly one of journal")
