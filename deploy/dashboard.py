"""Writes deploy/grafana-dashboard.json: the panels are declared here, so that each query stands once and in one place.

Counters of CPU time grow once a minute, so their rates are over five minutes. A panel with a line for each node or pod
shows at most 20 of each query, or the faulty ones only: a fleet has 1,000 nodes. ``python deploy/dashboard.py`` (or
``make docs``); tests/test_monitoring.py compares the file with it and each query with the real exposition.
"""

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

FILE: Final = Path(__file__).parent / "grafana-dashboard.json"
_WIDTH: Final = 24
_HEIGHT: Final = 8


class Panel(NamedTuple):
    """``queries``: expression and legend. ``unit``: Grafana's name of it."""

    title: str
    description: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    width: int = 8


_SHORT: Final = {
    "{NODE": '{instance=~"$instance"',
    "{POD": '{instance=~"$instance",namespace=~"$namespace",pod=~"$pod"',
    "ONLINE": 'class=~"shared|dedicated"',
}
"""What the queries below write instead of these selectors."""


def _p99(name: str) -> str:
    return f"topk(20, histogram_quantile(0.99, sum by (instance, le) (rate({name}_bucket{{NODE}}[5m]))))"


def _by_node(name: str, labels: str) -> str:
    return f"topk(20, sum by ({labels}) (rate(bypassd_{name}{{NODE,ONLINE}}[5m])))"


def _query(text: str) -> str:
    for short, whole in _SHORT.items():
        text = text.replace(short, whole)
    return text


def _stat(title: str, description: str, query: str) -> Panel:
    """One number."""
    return Panel(title, description, "short", ((query, ""),), "stat", 4)


def _graph(title: str, description: str, query: str, legend: str, unit: str = "short") -> Panel:
    """The lines of one query."""
    return Panel(title, description, unit, ((query, legend),))


_POD_LEGEND: Final = "{{namespace}}/{{pod}}"
ROWS: Final[tuple[tuple[str, tuple[Panel, ...]], ...]] = (
    (
        "Nodes",
        (
            _stat("Nodes that answer", "Targets that were scraped.", "count(bypassd_build_info)"),
            _stat("Not ready", "bypassctl status shows the reason.", "sum(bypassd_ready{NODE} == bool 0)"),
            _stat("Enforcing", "Nodes in mode enforce.", 'sum(bypassd_mode{NODE,mode="enforce"})'),
            _stat(
                "Victims now",
                "Online pods that a neighbour slows down.",
                'sum(bypassd_interference_victims{NODE,verdict="interfered"})',
            ),
            _stat("Evictions, 2 h", "Pods that were evicted.", 'sum(bypassd_evictions{NODE,outcome="done"})'),
            _stat("Holds", "Holds of persons and of bypassctl off.", "sum(bypassd_holds{NODE})"),
            _graph("CPUs in use", "By kind of work.", "sum by (by) (bypassd_used_cpus{NODE})", "{{by}}"),
            _graph("CPUs by pool", "As planned.", "sum by (pool) (bypassd_pool_cpus{NODE})", "{{pool}}"),
            _graph(
                "Nodes by version", "During a rollout.", "count by (version) (bypassd_build_info{NODE})", "{{version}}"
            ),
            _graph(
                "Nodes by mode",
                "observe: nothing is written, by configuration or after bypassctl restore.",
                "sum by (mode) (bypassd_mode{NODE})",
                "{{mode}}",
            ),
            _graph("Pods by class", "", "sum by (class) (bypassd_pods{NODE})", "{{class}}"),
        ),
    ),
    (
        "BE gained",
        (
            Panel(
                "CPU that BE work used",
                "And the budget that it had.",
                "short",
                (
                    ('sum(rate(bypassd_class_cpu_usage_seconds_total{NODE,class="reclaimed"}[5m]))', "used"),
                    ("sum(bypassd_budget_cpus{NODE})", "budget"),
                ),
            ),
            Panel(
                "CPU hours of BE work, last 24 h",
                "",
                "short",
                (('sum(increase(bypassd_class_cpu_usage_seconds_total{NODE,class="reclaimed"}[24h])) / 3600', ""),),
                "stat",
            ),
            _graph(
                "BE CPU by owner",
                "sold: used; taken_back: promised and withdrawn; lost: work of evicted pods.",
                "sum by (owner, kind) (rate(bypassd_be_owner_cpu_seconds_total{NODE}[5m]))",
                "{{owner}} {{kind}}",
            ),
        ),
    ),
    (
        "Online pods",
        (
            _graph(
                "Waiting for a CPU",
                "Seconds of each second in which tasks of online pods waited. No series: the kernel does not count it.",
                _by_node("class_cpu_wait_seconds_total", "instance"),
                "{{instance}}",
                "s",
            ),
            _graph(
                "Stopped by quotas",
                "Run queues of online pods that a quota stopped, on average.",
                _by_node("class_cpu_throttled_seconds_total", "instance, class"),
                "{{instance}} {{class}}",
            ),
            _graph(
                "CPU use",
                "",
                "sum by (class) (rate(bypassd_class_cpu_usage_seconds_total{NODE,ONLINE}[5m]))",
                "{{class}}",
            ),
        ),
    ),
    (
        "Pods (http.pod_metrics)",
        (
            _graph("CPU use", "", "topk(20, rate(bypassd_pod_cpu_usage_seconds_total{POD}[5m]))", _POD_LEGEND),
            _graph(
                "Stopped by quotas", "", "topk(20, rate(bypassd_pod_cpu_throttled_seconds_total{POD}[5m]))", _POD_LEGEND
            ),
            _graph(
                "Waiting for a CPU", "", "topk(20, rate(bypassd_pod_cpu_wait_seconds_total{POD}[5m]))", _POD_LEGEND, "s"
            ),
            Panel(
                "CPU set, wanted and in force",
                "Number of CPUs of managed pods.",
                "short",
                (
                    ("topk(20, bypassd_pod_wanted_cpuset_cpus{POD})", f"{_POD_LEGEND} wanted"),
                    ("topk(20, bypassd_pod_cpuset_cpus{POD})", f"{_POD_LEGEND} in force"),
                ),
            ),
            Panel(
                "Quota, wanted and in force",
                "Of pods with a quota of their own; BestEffort pods share that of their directory.",
                "short",
                (
                    ("topk(20, bypassd_pod_wanted_quota_cpus{POD})", f"{_POD_LEGEND} wanted"),
                    ("topk(20, bypassd_pod_quota_cpus{POD})", f"{_POD_LEGEND} in force"),
                ),
            ),
            _graph(
                "Settings not in force",
                "pending: not written yet, refused or failed; held_or_yielded: on hold, or left to another writer.",
                'topk(20, bypassd_pod_settings{POD,state!="in_force"} > 0)',
                f"{_POD_LEGEND} {{{{state}}}}",
            ),
        ),
    ),
    (
        "Interference and evictions",
        (
            _graph(
                "Online pods by verdict",
                "",
                'sum by (rule, verdict) (bypassd_interference_victims{NODE,verdict!="ok"})',
                "{{rule}} {{verdict}}",
            ),
            _graph("Responses in force", "", "sum by (response) (bypassd_response_steps{NODE})", "{{response}}"),
            _graph(
                "Changes of responses",
                "In the last 10 minutes.",
                "sum by (response, turn) (increase(bypassd_response_changes_total{NODE}[10m]))",
                "{{response}} {{turn}}",
            ),
            _graph(
                "Evictions that ended",
                "In the last hour. refused and failed: the pod still runs; gone: it ended before.",
                "sum by (outcome) (increase(bypassd_evictions_ended_total{NODE}[1h]))",
                "{{outcome}}",
            ),
            _graph(
                "Evictions that a dry run would order",
                "",
                "topk(20, sum by (instance) (bypassd_evictions_wanted{NODE}) > 0)",
                "{{instance}}",
            ),
            _graph(
                "Alerts",
                "In the last hour.",
                "sum by (kind, severity) (increase(bypassd_alerts_total{NODE}[1h]))",
                "{{severity}} {{kind}}",
            ),
        ),
    ),
    (
        "Health of bypassd",
        (
            _graph(
                "Starts before the first instruction",
                "true: every setting was written before the container's program ran.",
                "sum by (before_exec) (increase(bypassd_container_starts_total{NODE}[10m]))",
                "{{before_exec}}",
            ),
            _graph(
                "From the runtime's signal to the last write, p99",
                "",
                _p99("bypassd_signal_to_write_seconds"),
                "{{instance}}",
                "s",
            ),
            _graph(
                "Starts that a quota delayed",
                "In the last hour.",
                "topk(20, sum by (instance) (increase(bypassd_starts_late_total{NODE}[1h])) > 0)",
                "{{instance}}",
            ),
            Panel(
                "Loop lag and reconciliation, p99",
                "",
                "s",
                (
                    (_p99("bypassd_loop_lag_seconds"), "{{instance}} lag"),
                    (_p99("bypassd_reconcile_duration_seconds"), "{{instance}} reconcile"),
                ),
            ),
            _graph(
                "CPU of the daemon",
                "",
                'topk(20, rate(process_cpu_seconds_total{NODE,job="bypassd"}[5m]))',
                "{{instance}}",
                "percentunit",
            ),
            _graph(
                "Memory of the daemon",
                "",
                'topk(20, process_resident_memory_bytes{NODE,job="bypassd"})',
                "{{instance}}",
                "bytes",
            ),
            _graph(
                "Writes by outcome", "", "sum by (outcome) (increase(bypassd_writes_total{NODE}[10m]))", "{{outcome}}"
            ),
            Panel(
                "Foreign writes",
                "",
                "short",
                (
                    ("sum by (writer) (increase(bypassd_foreign_writes_total{NODE}[10m]))", "{{writer}}"),
                    ("sum(bypassd_files_yielded{NODE})", "files given up"),
                ),
            ),
            Panel(
                "Down",
                "Sources and components that do not answer, sinks that fail, a store that cannot be written.",
                "short",
                (
                    ("bypassd_source_up{NODE} == 0", "{{instance}} source {{source}}"),
                    ("bypassd_component_up{NODE} == 0", "{{instance}} component {{component}}"),
                    ("bypassd_alert_sink_failing{NODE} == 1", "{{instance}} sink {{sink}}"),
                    ("bypassd_store_ok{NODE} == 0", "{{instance}} store"),
                ),
            ),
        ),
    ),
)


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": {"query": query, "refId": name},
        "definition": query,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "refresh": 2,
        "sort": 1,
    }


def _panel(panel: Panel, number: int, x: int, y: int, height: int) -> dict[str, Any]:
    return {
        "id": number,
        "title": panel.title,
        "description": panel.description,
        "type": panel.kind,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": height},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": _query(expr), "legendFormat": legend}
            for index, (expr, legend) in enumerate(panel.queries)
        ],
    }


def dashboard() -> dict[str, Any]:
    """The whole document, for Grafana 9 and later."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, members in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1},
            }
        )
        y += 1
        x = used = 0
        for panel in members:
            height = _HEIGHT // 2 if panel.kind == "stat" and panel.width < 8 else _HEIGHT
            if x + panel.width > _WIDTH:
                x, y, used = 0, y + used, 0
            panels.append(_panel(panel, len(panels) + 1, x, y, height))
            x, used = x + panel.width, max(used, height)
        y += used
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Data source"}
    variables = [
        source,
        _variable("instance", "label_values(bypassd_build_info, instance)"),
        _variable("namespace", 'label_values(bypassd_pod_info{instance=~"$instance"}, namespace)'),
        _variable("pod", 'label_values(bypassd_pod_info{instance=~"$instance",namespace=~"$namespace"}, pod)'),
    ]
    return {
        "uid": "bypassd",
        "title": "bypassd",
        "tags": ["bypassd"],
        "schemaVersion": 37,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "1m",
        "templating": {"list": variables},
        "panels": panels,
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")
