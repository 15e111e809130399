"""The text of a snapshot's metrics, made at once; and the pods' part of it as the library makes it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from reconciler.runtime.cooperative import all_steps
from reconciler.telemetry.metrics import MetricsSnapshot, PodMetrics
from reconciler.telemetry.prometheus import accepted, rendering
from state.printable import printable_lines


def render(snapshot: MetricsSnapshot, accept: str = "") -> tuple[bytes, str]:
    return all_steps(rendering(snapshot, accepted(accept)))


_FAMILIES: Final[tuple[tuple[str, str, Callable[[PodMetrics], float | None]], ...]] = (
    ("cpuset_cpus", "CPUs a managed pod may run on.", lambda pod: pod.cpus),
    ("wanted_cpuset_cpus", "CPUs a managed pod shall run on.", lambda pod: pod.wanted_cpus),
    ("quota_cpus", "CPU quota in force on a pod.", lambda pod: _cpus(pod.quota_milli)),
    ("wanted_quota_cpus", "Planned CPU quota of a pod.", lambda pod: _cpus(pod.wanted_quota_milli)),
    ("cpu_usage_seconds", "CPU time used of a pod.", lambda pod: pod.used.use),
    ("cpu_throttled_seconds", "Time in which quotas stopped run queues of a pod.", lambda pod: pod.used.throttled),
    ("cpu_wait_seconds", "Time in which tasks waited for a CPU of a pod.", lambda pod: pod.used.wait),
    ("settings", "Settings of a pod by state.", lambda _: None),
    ("llc_occupancy_bytes", "Last-level cache occupancy of a pod.", lambda pod: pod.llc_bytes),
    ("memory_bandwidth_bytes_per_second", "Memory bandwidth of a pod.", lambda pod: pod.memory_bytes_s),
)


def _cpus(milli: int | None) -> float | None:
    return None if milli is None else milli / 1000


class LibraryPods:
    """A collector of the pods' families."""

    def __init__(self, pods: Sequence[PodMetrics]) -> None:
        self._pods = pods

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        labels = ("uid", "namespace", "pod")
        titles = [[printable_lines(text) for text in (pod.uid, pod.namespace, pod.name)] for pod in self._pods]
        message = "A pod, its class and the source of the class."
        info = GaugeMetricFamily("bypassd_pod_info", message, labels=(*labels, "class", "source"))
        for title, pod in zip(titles, self._pods, strict=True):
            info.add_metric([*title, printable_lines(pod.pod_class), printable_lines(pod.source)], 1.0)
        yield info
        for name, message, value_of in _FAMILIES:
            kind = CounterMetricFamily if name.startswith("cpu_") else GaugeMetricFamily
            own = ("state",) if name == "settings" else ()
            family = kind(f"bypassd_pod_{name}", message, labels=(*labels, *own))
            for title, pod in zip(titles, self._pods, strict=True):
                if (value := value_of(pod)) is not None:
                    family.add_metric(title, value)
                for state in ("in_force", "pending", "held_or_yielded") if own else ():
                    family.add_metric([*title, state], getattr(pod, state))
            yield family
