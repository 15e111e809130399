"""Alerts in the metrics."""

from reconciler.alerts.service import AlertNumbers, SinkNumbers
from reconciler.telemetry.metrics import MetricsSnapshot
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
    return render(MetricsSnapshot(version="1", mode="enforce", alerts=numbers))[0].decode()


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
