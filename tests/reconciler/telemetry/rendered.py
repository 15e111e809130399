"""The text of a snapshot's metrics, made at once."""

from reconciler.runtime.cooperative import all_steps
from reconciler.telemetry.metrics import MetricsSnapshot
from reconciler.telemetry.prometheus import accepted, rendering


def render(snapshot: MetricsSnapshot, accept: str = "") -> tuple[bytes, str]:
    return all_steps(rendering(snapshot, accepted(accept)))
