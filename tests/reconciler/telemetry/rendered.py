"""The text of a snapshot's metrics, made at once; and the pods' part of it as the library makes it."""

from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from reconciler.runtime.cooperative import all_steps
from reconciler.telemetry.metrics import MetricsSnapshot, PodMetrics
from reconciler.telemetry.prometheus import accepted, rendering
from state.printable import printable_lines


def render(snapshot: MetricsSnapshot, accept: str = "") -> tuple[bytes, str]:
    return all_steps(rendering(snapshot, accepted(accept)))


class LibraryPods:
    """A collector of the pods' families."""

    def __init__(self, pods: Sequence[PodMetrics]) -> None:
        self._pods = pods

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        names = ("uid", "namespace", "pod")
        info = GaugeMetricFamily(
            "bypassd_pod_info", "A pod, its class and the source of the class.", labels=(*names, "class", "source")
        )
        cpus = GaugeMetricFamily("bypassd_pod_cpuset_cpus", "CPUs a managed pod may run on.", labels=names)
        wanted = GaugeMetricFamily("bypassd_pod_wanted_cpuset_cpus", "CPUs a managed pod shall run on.", labels=names)
        quota = GaugeMetricFamily("bypassd_pod_quota_cpus", "CPU quota in force on a pod.", labels=names)
        planned = GaugeMetricFamily("bypassd_pod_wanted_quota_cpus", "Planned CPU quota of a pod.", labels=names)
        used, throttled, waited = (
            CounterMetricFamily(f"bypassd_pod_cpu_{name}_seconds", f"{message} of a pod.", labels=names)
            for name, message in (
                ("usage", "CPU time used"),
                ("throttled", "Time in which quotas stopped run queues"),
                ("wait", "Time in which tasks waited for a CPU"),
            )
        )
        settings = GaugeMetricFamily("bypassd_pod_settings", "Settings of a pod by state.", labels=(*names, "state"))
        cache = GaugeMetricFamily(
            "bypassd_pod_llc_occupancy_bytes", "Last-level cache occupancy of a pod.", labels=names
        )
        moved = GaugeMetricFamily(
            "bypassd_pod_memory_bandwidth_bytes_per_second", "Memory bandwidth of a pod.", labels=names
        )
        for pod in self._pods:
            title = [printable_lines(text) for text in (pod.uid, pod.namespace, pod.name)]
            info.add_metric([*title, printable_lines(pod.pod_class), printable_lines(pod.source)], 1.0)
            for family, value in (
                (cpus, pod.cpus),
                (wanted, pod.wanted_cpus),
                (quota, None if pod.quota_milli is None else pod.quota_milli / 1000),
                (planned, None if pod.wanted_quota_milli is None else pod.wanted_quota_milli / 1000),
                (used, pod.used.use),
                (throttled, pod.used.throttled),
                (waited, pod.used.wait),
                (cache, pod.llc_bytes),
                (moved, pod.memory_bytes_s),
            ):
                if value is not None:
                    family.add_metric(title, value)
            for state in ("in_force", "pending", "held_or_yielded"):
                settings.add_metric([*title, state], getattr(pod, state))
        yield from (info, cpus, wanted, quota, planned, used, throttled, waited, settings, cache, moved)
