"""Alerts in the metrics."""

from reconciler.alerts.service import AlertNumbers, SinkNumbers
from reconciler.runtime.supervisor import ComponentHealth, ComponentStatus
from reconciler.telemetry.metrics import MetricsSnapshot, PodMetrics
from state.model import SourceStatus
from tests.reconciler.telemetry.rendered import render

NUMBERS = AlertNumbers(
    counts={("store", "critical"): 2},
    sinks={
        "oncall": SinkNumbers(
            outcomes={"told": 5, "ignored": 0, "folded": 1, "dropped": 0, "failed": 2},
            waiting=3,
            late_s=1.5,
            failing=True,
        )
    },
    stored=4,
)


def scraped(numbers: AlertNumbers) -> str:
    pod = PodMetrics(uid="u", namespace="n", name="p", pod_class="shared", source="cri", cpus=1, quota_milli=1)
    snapshot = MetricsSnapshot(
        version="1",
        mode="enforce",
        pods=(pod,),
        sources=(SourceStatus(name="cri", ok=True, age_s=1.0),),
        components=(ComponentStatus(name="web", health=ComponentHealth.RUNNING),),
        budget_milli=1,
        alerts=numbers,
    )
    return render(snapshot)[0].decode()


def test_alerts_are_counted_by_kind_and_by_sink() -> None:
    lines = scraped(NUMBERS).splitlines()
    for line in (
        'bypassd_alerts_total{kind="store",severity="critical"} 2.0',
        "bypassd_alerts_stored 4.0",
        'bypassd_alert_sink_alerts_total{outcome="folded",sink="oncall"} 1.0',
        'bypassd_alert_sink_alerts_total{outcome="told",sink="oncall"} 5.0',
        'bypassd_alert_sink_waiting{sink="oncall"} 3.0',
        'bypassd_alert_sink_late_seconds{sink="oncall"} 1.5',
        'bypassd_alert_sink_failing{sink="oncall"} 1.0',
    ):
        assert line in lines


def test_without_sinks_there_are_no_series_of_sinks() -> None:
    assert "bypassd_alert_sink" not in scraped(AlertNumbers())
