"""Dashboard and alert rules: every series and label in a query is in the exposition, and each rule has its runbook.

With Debian's ``prometheus`` package (``make monitoring``) promtool also parses each query, and fires each rule.
"""

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from reconciler.alerts.alert import AlertKind
from tests.reconciler.telemetry.complete import exposed

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "deploy/grafana-dashboard.json"
RULES = ROOT / "deploy/alert-rules.yaml"
FIRED = ROOT / "tests/fixtures/monitoring/alert-rules-tests.yaml"
OF_PROMETHEUS = {"instance", "job"}
_SELECTOR = re.compile(r"\b((?:bypassd|process)_\w+|up)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(?:=~|!~|!=|=)"')
_GROUPING = re.compile(r"\b(?:by|without|ignoring|on)\s*\(([^)]*)\)")
_VARIABLE = re.compile(r"label_values\((.*), (\w+)\)")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str, set[str]]]:
    """Every query with its origin, and the labels that its texts or legends use."""
    for rule in rules():
        texts = " ".join(rule["annotations"].values())
        yield rule["alert"], rule["expr"], set(re.findall(r"\$labels\.(\w+)", texts))
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"], set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            match = _VARIABLE.fullmatch(variable["query"]["query"])
            assert match is not None
            yield variable["name"], match[1], {match[2]}


def unknown(query: str, shown: set[str]) -> list[str]:
    """What a query names that no scrape has."""
    series = {**exposed(), "up": frozenset[str]()}
    found = []
    have = set(OF_PROMETHEUS)
    for name, matchers in _SELECTOR.findall(query):
        labels = series.get(name)
        if labels is None:
            found.append(name)
            continue
        have |= labels
        found += [f"{name}{{{label}}}" for label in _MATCHER.findall(matchers) if label not in labels | OF_PROMETHEUS]
    grouped = {label.strip() for group in _GROUPING.findall(query) for label in group.split(",")}
    return found + sorted((grouped | shown) - have)


def test_every_series_and_label_of_every_query_is_in_the_exposition() -> None:
    every = list(queries())
    assert len(every) > 50
    assert {origin: bad for origin, query, shown in every if (bad := unknown(query, shown))} == {}


@pytest.mark.parametrize(
    ("query", "shown", "found"),
    [
        ("sum(bypassd_pod{class='x'})", set(), ["bypassd_pod"]),
        ('bypassd_pods{klass="x"}', set(), ["bypassd_pods{klass}"]),
        ("sum by (klass) (bypassd_pods)", set(), ["klass"]),
        ("bypassd_pods", {"pod"}, ["pod"]),
        ('rate(bypassd_pod_cpu_wait_seconds{pod="x"}[5m])', set(), ["bypassd_pod_cpu_wait_seconds"]),
        ('sum by (class) (bypassd_pods{instance="n"})', {"class"}, []),
    ],
)
def test_a_wrong_name_in_a_query_is_found(query: str, shown: set[str], found: list[str]) -> None:
    assert unknown(query, shown) == found


def test_a_counter_is_never_drawn_as_it_is() -> None:
    bare = re.compile(r"(?<![a-z]\()\b(?:bypassd|process)_\w+_(?:total|bucket)\b")
    for origin, query, _ in queries():
        assert not bare.search(query), origin


def test_no_panel_has_a_line_for_each_node_or_pod_of_a_fleet() -> None:
    bounded = re.compile(r"^topk\(20, | (?:== [01]|> 0)$")
    for panel in panels():
        for target in panel["targets"]:
            if re.search(r"\{\{(?:instance|pod)\}\}", target["legendFormat"]):
                assert bounded.search(target["expr"]), panel["title"]


def test_the_dashboard_is_what_its_program_writes() -> None:
    spec = importlib.util.spec_from_file_location("dashboard", ROOT / "deploy/dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert json.loads(DASHBOARD.read_text()) == module.dashboard()
    ids = [panel["id"] for panel in module.dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24


def test_every_rule_has_its_runbook_with_cause_look_and_do() -> None:
    text = (ROOT / "docs/runbooks.md").read_text()
    parts = {part.partition("\n")[0]: part for part in text.split("\n## ")[1:]}
    alerts = [rule["alert"] for rule in rules()]
    assert len(set(alerts)) == len(alerts) >= 15
    for rule in rules():
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["runbook_url"].endswith(f"/docs/runbooks.md#{rule['alert'].lower()}")
        assert all(f"**{word}.**" in parts[rule["alert"]] for word in ("Cause", "Look", "Do"))
    assert set(parts) == set(alerts)


def test_every_kind_of_alert_of_the_daemon_leads_to_a_runbook() -> None:
    introduction = (ROOT / "docs/runbooks.md").read_text().split("\n## ")[0]
    rows = [line.split("|")[1] for line in introduction.splitlines() if line.startswith("| `")]
    assert sorted(kind for row in rows for kind in re.findall(r"`([a-z-]+)`", row)) == sorted(AlertKind)


def test_every_rule_is_fired_and_kept_silent_by_a_test() -> None:
    tests = yaml.safe_load(FIRED.read_text())["tests"]
    fires = [(case["alertname"], bool(case["exp_alerts"])) for test in tests for case in test["alert_rule_test"]]
    expected = [(rule["alert"], fired) for rule in rules() for fired in (True, False)]
    assert sorted(fires) == sorted(expected)


def promtool(*arguments: str, directory: Path) -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("NOT RUN: promtool is not installed (make monitoring)")
    command = [program, *arguments]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_parses_every_query(tmp_path: Path) -> None:
    texts = {f"q{number}": query for number, (_, query, _) in enumerate(queries())}
    made = [{"record": f"test:{name}", "expr": re.sub(r"\$\w+", ".*", query)} for name, query in texts.items()]
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": made}]}))
    shutil.copy(RULES, tmp_path)
    assert f"{len(made)} rules found" in promtool("check", "rules", "queries.yaml", directory=tmp_path)
    assert f"{len(rules())} rules found" in promtool("check", "rules", RULES.name, directory=tmp_path)


def test_promtool_fires_every_rule(tmp_path: Path) -> None:
    shutil.copy(RULES, tmp_path)
    shutil.copy(FIRED, tmp_path)
    assert "SUCCESS" in promtool("test", "rules", FIRED.name, directory=tmp_path)


def test_promtool_accepts_the_example_of_a_scrape(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", (ROOT / "docs/monitoring.md").read_text(), re.DOTALL)
    for name in ("bypassd-ca.crt", "bypassd-token"):
        (tmp_path / name).write_text("x")
    (tmp_path / "prometheus.yml").write_text(shown.replace("/etc/prometheus/", f"{tmp_path}/"))
    promtool("check", "config", "--syntax-only", "prometheus.yml", directory=tmp_path)
