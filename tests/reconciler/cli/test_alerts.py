"""bypassctl alert test and bypassctl alerts: through the daemon, from the store, with nothing but a configuration."""

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from reconciler.alerts.alert import Alert, AlertKind
from reconciler.alerts.config import AlertsConfig
from reconciler.alerts.service import AlertService
from reconciler.alerts.sinks.base import SinkContext
from reconciler.alerts.sinks.command import CommandSinkConfig
from reconciler.alerts.sinks.table import SinkSection
from reconciler.cli.exits import Exit
from reconciler.clients.kube_config import ApiServer
from state.store import Store
from tests.reconciler.alerts.durable import keep
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon

KNOWN: dict[str, Any] = {
    "id": "ab-1",
    "kind": "eviction-done",
    "key": "k",
    "status": "firing",
    "severity": "warning",
    "summary": "ci/batch-7 was\nevicted",
    "labels": {},
    "details": {},
    "count": 2,
    "first_s": 1.0,
    "last_s": 1000.0,
    "to": ["oncall"],
}
SINK = {
    "sink": "oncall",
    "kind": "webhook",
    "problem": "HTTP 500",
    "waiting": 1,
    "late_s": 3.0,
    "told": 7,
    "ignored": 0,
    "folded": 0,
    "dropped": 1,
    "failed": 2,
}


@pytest.fixture(autouse=True)
def person(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_USER", "ana")


def test_the_daemon_tests_its_sinks_and_a_bad_one_makes_the_exit_code(ctl: Run, daemon: FakeDaemon) -> None:
    results = [
        {"sink": "log", "kind": "journal", "ok": True, "detail": "taken", "seconds": 0.001},
        {"sink": "oncall", "kind": "webhook", "ok": False, "detail": "http://h: HTTP 500", "seconds": 0.25},
    ]
    daemon.answers["POST /alerts/test"] = (200, {"sinks": results})
    ran = ctl("alert", "test")
    assert (ran.code, ran.err) == (Exit.NOT_OK, "")
    assert [line.split() for line in ran.out.splitlines()] == [
        ["SINK", "KIND", "TIME", "DETAIL"],
        ["log", "journal", "ok", "1", "ms", "taken"],
        ["oncall", "webhook", "bad", "250", "ms", "http://h:", "HTTP", "500"],
    ]
    assert daemon.asked[-1] == ("POST /alerts/test", {"sink": None, "by": "ana"})
    daemon.answers["POST /alerts/test"] = (200, {"sinks": results[:1]})
    ran = ctl("alert", "test", "--sink", "log", "-o", "json")
    assert (ran.code, json.loads(ran.out)) == (Exit.OK, {"sinks": results[:1]})
    daemon.answers["POST /alerts/test"] = (400, {"error": "sink: 'x': expected one of log"})
    ran = ctl("alert", "test", "--sink", "x")
    assert (ran.code, ran.err) == (Exit.USAGE, "bypassctl: the daemon: sink: 'x': expected one of log\n")


def test_without_a_daemon_the_sinks_are_built_from_the_configuration(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"http: {{socket: {tmp_path}/none}}\n"
        f"node: {{root: {tmp_path}}}\n"
        "alerts:\n  labels: {cluster: east}\n"
        "  sinks: {lines: {file: {path: /alerts}}, bad: {command: {argv: [/nowhere/tell]}}}\n"
    )
    ran = run("alert", "test", "--config", str(config))
    assert ran.code == Exit.NOT_OK
    assert "testing the configured sinks without the daemon" in ran.err
    assert "/nowhere/tell: cannot run: No such file or directory" in ran.out
    message = json.loads((tmp_path / "alerts").read_text())
    assert (message["kind"], message["labels"]) == ("test", {"cluster": "east"}), (
        "it takes the way of every other alert"
    )
    assert run("alert", "test", "--sink", "lines", "--config", str(config)).code == Exit.OK
    ran = run("alert", "test", "--sink", "linse", "--config", str(config))
    assert (ran.code, ran.err.splitlines()[-1]) == (Exit.USAGE, "bypassctl: sink: 'linse': expected one of lines, bad")
    config.write_text("alerts: {sinks: {x: {}}}")
    assert run("alert", "test", "--config", str(config), "--socket", f"{tmp_path}/none").code == Exit.USAGE


def test_alerts_are_shown_with_their_sinks_and_newest_first(ctl: Run, daemon: FakeDaemon) -> None:
    over = {**KNOWN, "id": "ab-2", "last_s": 2000.0, "status": "resolved", "to": [], "count": 1}
    daemon.document["alerts"] = {"sinks": [SINK], "stored": [KNOWN], "recent": [over, KNOWN]}
    ran = ctl("alerts")
    lines = ran.out.splitlines()
    assert (ran.code, len(lines)) == (Exit.OK, 6)
    assert lines[1].split() == ["oncall", "webhook", "bad", "7", "1", "3", "HTTP", "500"]
    assert lines[4].endswith("eviction-done  1      -            ended: ci/batch-7 was evicted")
    assert lines[5].endswith("eviction-done  2      oncall       ci/batch-7 was evicted")
    ran = ctl("alerts", "-o", "json")
    assert json.loads(ran.out)["alerts"]["stored"][0]["id"] == "ab-1"


def test_a_real_daemon_without_sinks_says_so(ctl: Run) -> None:
    ran = ctl("alerts")
    assert ran.out == "no sinks configured (alerts.sinks); alerts are written to the daemon's log only\n"


def test_with_the_daemon_down_the_store_tells_what_has_yet_to_be_told(run: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "state.db")
    config = AlertsConfig(
        sinks={"pager": SinkSection(command=CommandSinkConfig(argv=("/bin/false",)))}, labels={"cluster": "east"}
    )

    async def left() -> None:
        store = Store(path)
        lane = trio.CapacityLimiter(1)
        service = AlertService(config, ApiServer(), store, lane, ground=SinkContext(node="n"))
        alert = Alert(kind=AlertKind.CLEARED, key="v", summary="it is over", at_s=1700000000.0, durable=True)
        await keep(service, store, lane, alert)
        store.close()

    trio.run(left)
    parts = ("--store", path, "--socket", str(tmp_path / "none"))
    ran = run("alerts", *parts)
    assert ran.code == Exit.OK
    assert "pager" in ran.out
    assert "ended: it is over" in ran.out
    (row,) = json.loads(run("alerts", "-o", "json", *parts).out)["alerts"]["stored"]
    assert (row["labels"], row["to"], row["status"]) == ({"cluster": "east"}, ["pager"], "resolved")
