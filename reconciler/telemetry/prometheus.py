"""Prometheus' text from a `MetricsSnapshot`. Imported by the web part only, and run in steps on the loop.

Names follow Prometheus' rules: base units, ``_total`` for counters.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, final

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from reconciler.control.pod_minutes import CpuSeconds
from reconciler.runtime.cooperative import Steps
from reconciler.runtime.counters import HistogramValues, InterferenceCounters
from reconciler.runtime.priority import PriorityState
from reconciler.runtime.supervisor import ComponentHealth
from reconciler.telemetry.metrics import MetricsSnapshot, PodMetrics
from state.cache import CacheUsage
from state.daemons import DaemonRow
from state.hosts import HostWorkload
from state.printable import printable_lines


@final
class SnapshotCollector:
    def __init__(self, snapshot: MetricsSnapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Every family but the pods', in a fixed order."""
        yield from _daemon(self._snapshot)
        yield from _node(self._snapshot)
        yield from _writes(self._snapshot)
        yield from _parts(self._snapshot)
        yield from _alerts(self._snapshot)
        yield from _http(self._snapshot)
        if self._snapshot.watched is not None:
            yield from _watched(self._snapshot.watched)
        if self._snapshot.cache is not None:
            yield from _cache(self._snapshot.cache, self._snapshot.cache_age_s)


OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0"
TEXT: Final = "text/plain"

_SAMPLES: Final = 100
"""Samples of one family that are rendered in one step."""
_PODS: Final = 20
"""Pods whose series are rendered in one step."""
_EOF: Final = b"# EOF\n"


def accepted(accept: str) -> str:
    """One of the two forms, by the ``Accept`` header. Nothing of the header itself is used in the answer."""
    kinds = (part.partition(";")[0].strip() for part in accept[:1024].split(","))
    return OPENMETRICS if "application/openmetrics-text" in kinds else TEXT


def rendering(snapshot: MetricsSnapshot, form: str) -> Steps[tuple[bytes, str]]:
    """The text and its content type, in steps. ``form`` is what `accepted` returned."""
    encoder, content_type = choose_encoder(form)
    written: list[bytes] = []
    for family in SnapshotCollector(snapshot).collect():
        samples = family.samples
        # Once without samples, too, for the comments.
        for first in range(0, max(1, len(samples)), _SAMPLES):
            family.samples = samples[first : first + _SAMPLES]
            # OpenMetrics' encoder ends each call's text; the end belongs behind the last family.
            text = encoder(_Families([family])).removesuffix(_EOF)
            # The family's comments, in front of its first samples only.
            written.append(text if not first else _COMMENTS.sub(b"", text))
            yield
    if snapshot.pods:
        written.append((yield from _pod_text(snapshot.pods, form)))
    if form == OPENMETRICS:
        written.append(_EOF)
    return b"".join(written), content_type


_COMMENTS: Final = re.compile(rb"\A(?:# .*\n)+")


@final
class _Families:
    """What an encoder of the library reads: a registry that does not check all names at each scrape."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _printable(values: Iterable[str]) -> list[str]:
    """Labels' values: the library escapes line ends and quotes only, and a lone surrogate would end the scrape."""
    return [printable_lines(value) for value in values]


def _gauge(name: str, message: str, value: float) -> Metric:
    return GaugeMetricFamily(f"bypassd_{name}", message, value=value)


def _gauges(name: str, message: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]) -> Metric:
    family = GaugeMetricFamily(f"bypassd_{name}", message, labels=labels)
    for names, value in values:
        family.add_metric(_printable(names), value)
    return family


def _counter(name: str, message: str, value: float) -> Metric:
    return CounterMetricFamily(f"bypassd_{name}", message, value=value)


def _counters(name: str, message: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]) -> Metric:
    family = CounterMetricFamily(f"bypassd_{name}", message, labels=labels)
    for names, value in values:
        family.add_metric(_printable(names), value)
    return family


def _by_one_label(values: Mapping[str, int]) -> Iterator[tuple[Sequence[str], float]]:
    return (((name,), value) for name, value in sorted(values.items()))


def _histogram(name: str, message: str, values: HistogramValues) -> Metric:
    family = HistogramMetricFamily(f"bypassd_{name}", message)
    below = 0
    buckets: list[tuple[str, float]] = []
    # Prometheus' buckets are cumulative; ours are not.
    for bound, count in zip((*values.bounds, None), values.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound is None else f"{bound:.6g}", below))
    family.add_metric([], buckets, values.total)
    return family


def _daemon(now: MetricsSnapshot) -> Iterator[Metric]:
    yield InfoMetricFamily("bypassd_build", "Running version.", value={"version": now.version})
    # A set of states: a series for each mode, 1 or 0.
    modes = [((mode,), float(mode == now.mode)) for mode in ("observe", "enforce")]
    yield _gauges("mode", "1 for the active mode.", ("mode",), modes)
    windows = [((name,), float(held)) for name, held in now.windows.items()]
    yield _gauges("window", "1 for the window of time in force.", ("name",), windows)
    yield _gauge("paused", "1 while a restore suspends the configured mode enforce.", now.paused)
    yield _gauge("ready", "1 after the first complete reconciliation.", now.ready)
    yield _gauge("store_ok", "1 if the store is writable.", now.store_ok)
    yield _gauge("watches", "inotify watches in use.", now.watches)
    # In place of the library's default collectors, whose cost at every scrape is saved.
    yield GaugeMetricFamily("process_resident_memory_bytes", "Resident memory.", value=now.rss_bytes)
    yield GaugeMetricFamily(
        "process_start_time_seconds", "Start time in seconds since the epoch.", value=now.started_at
    )
    yield CounterMetricFamily("process_cpu_seconds", "CPU time used.", value=now.cpu_s)
    yield _histogram("loop_lag_seconds", "Delay of the main loop's timers.", now.counters.lag)
    yield _histogram("reconcile_duration_seconds", "Duration of a reconciliation.", now.counters.passes)
    priority = now.priority
    yield _gauge("realtime", "1 if the loop waits at real-time priority.", priority.state is PriorityState.REAL_TIME)
    ended = {"budget": priority.lowered, "kernel_limit": priority.overruns}
    yield _counters("realtime_ended", "Work continued at the nice value, by bound.", ("bound",), _by_one_label(ended))
    own = now.own_group
    if own.shares is not None:
        text = "CPU weight of the group directly below the root that the daemon is in, in cpu.shares."
        yield _gauges("own_shares", text, ("placement",), [((own.placement.value,), own.shares)])
    yield _counter(
        "own_shares_raised", "Times that the daemon's work waited for a CPU and got more weight.", own.raised
    )
    yield _counter("own_shares_starved", "Times that it had no CPU for a second and got more at rest.", own.starved)
    stints = now.stints
    yield _histogram("step_seconds", "CPU time of a step of the loop between two checkpoints.", stints.steps)
    yield _histogram("job_seconds", "CPU time of a job of a worker thread.", stints.jobs)
    by_component = sorted(stints.components.items())
    yield _counters(
        *("component_cpu_seconds", "CPU time of a component's steps and jobs.", ("component",)),
        (((name,), work.cpu_s) for name, work in by_component),
    )
    yield _counters(
        *("long_steps", "Steps and jobs of a component that took more than 0.1 ms of CPU time.", ("component",)),
        (((name,), work.long) for name, work in by_component),
    )
    for name, part, message in _DAEMONS:
        values = [((row.group,), value) for row in now.daemons if (value := part(row)) is not None]
        yield _gauges(name, message, ("group",), values)
    for name, read, message in _HOSTS:
        known = [
            ((host.name, host.counts_as.value), value)
            for host in now.hosts.entries.values()
            if (value := read(host)) is not None
        ]
        if known:
            yield _gauges(name, message, ("name", "counts_as"), known)
    if now.token_expires_at is not None:
        yield GaugeMetricFamily(
            "bypassd_apiserver_token_expiry_timestamp_seconds",
            "End of the token for the API server, in seconds since the epoch.",
            value=now.token_expires_at,
        )
    yield _counters("resyncs", "Full reconciliations by reason.", ("reason",), _by_one_label(now.counters.resyncs))


def _node(now: MetricsSnapshot) -> Iterator[Metric]:
    yield _gauges("pods", "Pods by class.", ("class",), _by_one_label(now.pods_by_class))
    yield _gauge("pods_without_series", "Pods beyond http.pod_metrics_limit.", now.pods_without_series)
    for part, name, message in _CPU_SECONDS:
        known = [((kind,), value) for kind, cpu in sorted(now.cpu_by_class.items()) if (value := part(cpu)) is not None]
        yield _counters(f"class_{name}", f"{message} of all pods of a class.", ("class",), known)
    yield _gauges("pool_cpus", "CPUs by pool.", ("pool",), _by_one_label(now.pools))
    yield _gauge("claims_cut", "Claims on CPUs with fewer or other CPUs than they asked.", now.claims_cut)
    yield _gauge("claims_missing_cpus", "CPUs that claims asked and did not get.", now.claims_missing_cpus)
    if now.budget_milli is not None:
        yield _gauge("budget_cpus", "CPU budget of all BE pods.", now.budget_milli / 1000)
    yield _gauge("harm_law", "1 while the harm law sets the BE budget, not a limit on CPU use.", int(now.harm_law))
    yield _gauge("harm_unknown", "1 while the harm law cannot measure online pods' waiting.", int(now.harm_unknown))
    yield _counter("harm_cuts", "Cuts of the BE budget, because online pods waited for a CPU.", now.harm_cuts)
    yield _counter("starts_late", "Starts of BE containers that a quota of bypassd delayed.", now.starts_late)
    used = ((name, milli / 1000) for name, milli in sorted(now.used_milli.items()))
    yield _gauges("used_cpus", "CPUs in use.", ("by",), (((name,), cpus) for name, cpus in used))
    sold = {"sold": "sold_s", "taken_back": "taken_s", "lost": "lost_s"}
    accounts = (
        ((owner, kind), getattr(account, field))
        for owner, account in sorted(now.owner_cpu_s.items())
        for kind, field in sold.items()
    )
    yield _counters("be_owner_cpu_seconds", "CPU time of BE pods by owner.", ("owner", "kind"), accounts)
    promised = (((node,), milli / 1000) for node, milli in sorted(now.headroom_milli.items()))
    yield _gauges("headroom_cpus", "CPU headroom for BE pods.", ("numa_node",), promised)
    if now.headroom_memory_bytes is not None:
        yield _gauge("headroom_memory_bytes", "Memory headroom for BE pods.", now.headroom_memory_bytes)
    yield _counters(
        "headroom_promise_minutes",
        "Minutes in which the headroom of the last hour was there (kept) or not (broken).",
        ("resource", "result"),
        sorted(now.headroom_minutes.items()),
    )
    yield _counter("headroom_edits", "Changes of the published headroom by other programs.", now.headroom_edits)
    yield _gauges(
        "headroom_workloads",
        "Online workloads whose predicted peak bounds the headroom (known), or whose requests do (cold).",
        ("state",),
        _by_one_label(now.headroom_workloads),
    )


def _writes(now: MetricsSnapshot) -> Iterator[Metric]:
    counters = now.counters
    yield _gauges("settings", "Settings by knob and state.", ("knob", "state"), sorted(now.settings.items()))
    yield _gauges("settings_refused", "Settings refused by the planner.", ("rule",), _by_one_label(now.refused))
    yield _gauge("ledger_files", "Values of every kind with a recorded original.", now.ledger_files)
    yield _gauges("holds", "Active holds by kind of target.", ("kind",), _by_one_label(now.holds))
    yield _gauge("files_yielded", "Files given up to other writers now.", now.yielded)
    yield _counter("yields", "Times a file was given up to other writers.", counters.yields)
    yield _counters(
        "object_errors",
        "Errors of single objects by kind and errno.",
        ("object", "error"),
        sorted(counters.object_errors.items()),
    )
    yield _counters("writes", "Writes by knob and outcome.", ("knob", "outcome"), sorted(counters.writes.items()))
    yield _counter("plan_events", "Reconciliations not caused by the timer, or that moved CPUs.", counters.events)
    yield _counter("cpus_moved", "CPUs moved between pools.", counters.cpus_moved)
    yield _counter("pools_changed", "Changes of a pool's CPUs.", counters.pools_changed)
    yield _counter("cpuset_writes", "CPU set writes accepted by the kernel.", counters.cpuset_writes)
    yield _counters("foreign_writes", "Foreign changes by writer.", ("writer",), _by_one_label(counters.foreign))
    yield _counter(
        "systemd_events", "Events in which systemd wrote its units' values over managed ones.", counters.systemd_events
    )
    yield _counters(
        "container_starts",
        "Container starts by whether all settings were written before exec.",
        ("before_exec",),
        _by_one_label(counters.starts),
    )
    yield _histogram(
        "signal_to_write_seconds", "Time from the runtime event to the last write.", counters.signal_to_write
    )
    yield _histogram(
        "signal_to_would_write_seconds",
        "Time from the runtime event to the plan of writes that are not made (observe mode, dry run).",
        counters.signal_to_would_write,
    )


def _parts(now: MetricsSnapshot) -> Iterator[Metric]:
    sources = [((source.name,), float(source.ok)) for source in now.sources]
    yield _gauges("source_up", "1 if a source answers.", ("source",), sources)
    ages = [((source.name,), source.age_s) for source in now.sources if source.age_s is not None]
    yield _gauges("source_age_seconds", "Age of a source's last answer.", ("source",), ages)
    up = [((part.name,), float(part.health is ComponentHealth.RUNNING)) for part in now.components]
    yield _gauges("component_up", "1 if a component is running.", ("component",), up)
    failures = [((part.name,), float(part.failures)) for part in now.components]
    yield _counters("component_failures", "Failures by component.", ("component",), failures)


def _alerts(now: MetricsSnapshot) -> Iterator[Metric]:
    pairs = sorted(now.alerts.counts.items())
    yield _counters("alerts", "Alerts by kind and severity.", ("kind", "severity"), pairs)
    yield _gauge("alerts_stored", "Pending alerts in the store.", now.alerts.stored)
    if not now.alerts.sinks:
        return
    sinks = sorted(now.alerts.sinks.items())
    outcomes = [
        ((name, outcome), count) for name, numbers in sinks for outcome, count in sorted(numbers.outcomes.items())
    ]
    yield _counters("alert_sink_alerts", "Alerts by sink and outcome.", ("sink", "outcome"), outcomes)
    waiting = [((name,), float(numbers.waiting)) for name, numbers in sinks]
    yield _gauges("alert_sink_waiting", "Pending alerts by sink.", ("sink",), waiting)
    late = [((name,), numbers.late_s) for name, numbers in sinks]
    yield _gauges("alert_sink_late_seconds", "Age of the oldest pending alert.", ("sink",), late)
    failing = [((name,), float(numbers.failing)) for name, numbers in sinks]
    yield _gauges("alert_sink_failing", "1 while delivery to a sink fails.", ("sink",), failing)


def _http(now: MetricsSnapshot) -> Iterator[Metric]:
    requests = sorted(now.http_requests.items())
    yield _counters("http_requests", "HTTP responses by listener and status.", ("listener", "code"), requests)
    aborted = sorted(now.http_aborted.items())
    message = "Connections ended early, by listener and reason."
    yield _counters("http_connections_aborted", message, ("listener", "reason"), aborted)


def _watched(now: InterferenceCounters) -> Iterator[Metric]:
    verdicts = sorted(now.verdicts.items())
    yield _gauges("interference_victims", "Monitored pods by rule and verdict.", ("rule", "verdict"), verdicts)
    yield _gauges("response_steps", "Responses in force.", ("response",), _by_one_label(now.steps))
    changes = sorted(now.changes.items())
    yield _counters("response_changes", "Changes of responses.", ("response", "turn"), changes)
    reading = [((name,), value) for name, value in sorted(now.read_s.items())]
    yield _counters("signal_read_seconds", "CPU time of reading signals.", ("reader",), reading)
    yield _gauge("interference_pass_seconds", "CPU time of the last pass over all signals and rules.", now.pass_s)
    yield _gauges("evictions", "Evictions of the last two hours by outcome.", ("outcome",), _by_one_label(now.orders))
    yield _counters("evictions_ended", "Evictions that ended, by outcome.", ("outcome",), _by_one_label(now.ended))
    yield _gauge("evictions_wanted", "Pods that a dry run would evict now.", now.would)
    yield _gauge("node_closed", "1 while the node is closed to new BE pods.", int(now.closed))
    yield _counters("node_closings", "Times it was closed or opened.", ("turn",), _by_one_label(now.closings))
    mark = [] if now.mark is None else [((now.mark.mark.value, now.mark.state.value), 1)]
    yield _gauges("node_mark", "1 by mark on the node's object and its state.", ("mark", "state"), mark)


def _cache(use: CacheUsage, age_s: float | None) -> Iterator[Metric]:
    """What control groups use, by cache; their sum is the machine. What is not known now has no series now."""
    if age_s is not None:
        yield _gauge("cache_use_age_seconds", "Age of the readings of cache and memory bandwidth.", age_s)
    if use.level is not None:
        level = {"cache": use.level.cache_percent, "memory_bandwidth": use.level.mba_percent}
        shares = [((name,), percent / 100) for name, percent in level.items()]
        yield _gauges("be_level_ratio", "Current BE share of a dynamic level, 0 to 1.", ("of",), shares)
    labels = ("group", "class", "cache")
    rows = [
        ((name, use.classes.get(name, ""), str(cache)), consumption)
        for name, caches in sorted(use.groups.items())
        for cache, consumption in sorted(caches.items())
    ]
    held = [
        (names, consumption.occupancy_bytes) for names, consumption in rows if consumption.occupancy_bytes is not None
    ]
    yield _gauges("llc_occupancy_bytes", "Last-level cache occupancy of a resctrl group.", labels, held)
    moved = [(names, consumption.total_bytes_s) for names, consumption in rows if consumption.total_bytes_s is not None]
    yield _gauges("memory_bandwidth_bytes_per_second", "Memory bandwidth of a resctrl group.", labels, moved)


class _PodFamily(NamedTuple):
    """A family with a value of each pod. ``values``: each with a label of its own, between ``pod`` and ``uid``."""

    name: str
    message: str
    values: tuple[tuple[str, Callable[[PodMetrics], float | None]], ...]
    kind: str = "gauge"


_CPU_SECONDS: Final[tuple[tuple[Callable[[CpuSeconds], float | None], str, str], ...]] = (
    (lambda cpu: cpu.use, "cpu_usage_seconds", "CPU time used"),
    (lambda cpu: cpu.throttled, "cpu_throttled_seconds", "Time in which quotas stopped run queues"),
    (lambda cpu: cpu.wait, "cpu_wait_seconds", "Time in which tasks waited for a CPU"),
)


_DAEMONS: Final[tuple[tuple[str, Callable[[DaemonRow], float | None], str], ...]] = (
    ("daemon_weight", lambda row: row.weight, "CPU weight of a group of other daemons, as in its file."),
    ("daemon_own_weight", lambda row: row.original, "The same without bypassd."),
    ("daemon_used_cpus", lambda row: _cpus(row.use_milli), "CPUs in use by the group."),
    ("daemon_needed_cpus", lambda row: _cpus(row.need_milli), "Largest use of a second in the policy's window."),
    ("daemon_wait_ratio", lambda row: row.waits, "Share of the time in which one of its tasks waited for a CPU."),
    ("daemon_credit_seconds", lambda row: _seconds(row.credit_us), "CPU time at a wake-up before an online task."),
)


def _host(signal: str, per: float) -> Callable[[HostWorkload], float | None]:
    return lambda host: None if (value := host.value(signal)) is None else value / per


_HOSTS: Final[tuple[tuple[str, Callable[[HostWorkload], float | None], str], ...]] = (
    ("host_workload_processes", lambda host: host.processes, "Processes of a host workload that are read."),
    ("host_workload_used_cpus", _host("cpu.use", 1000), "CPUs in use by a host workload."),
    ("host_workload_wait_ratio", _host("cpu.wait", 100), "Run-queue wait of its tasks / wait and run."),
    ("host_workload_cpu_pressure_ratio", _host("cpu.pressure", 100), "Share of the time with a task waiting."),
    ("host_workload_memory_bytes", _host("memory.use", 1), "Memory in use by a host workload."),
)


def _seconds(value_us: int | None) -> float | None:
    return None if value_us is None else value_us / 1e6


def _of_use(part: Callable[[CpuSeconds], float | None]) -> Callable[[PodMetrics], float | None]:
    return lambda pod: part(pod.used)


_POD_FAMILIES: Final = (
    _PodFamily("pod_cpuset_cpus", "CPUs a managed pod may run on.", (("", lambda pod: pod.cpus),)),
    _PodFamily("pod_wanted_cpuset_cpus", "CPUs a managed pod shall run on.", (("", lambda pod: pod.wanted_cpus),)),
    _PodFamily("pod_quota_cpus", "CPU quota in force on a pod.", (("", lambda pod: _cpus(pod.quota_milli)),)),
    _PodFamily(
        "pod_wanted_quota_cpus", "Planned CPU quota of a pod.", (("", lambda pod: _cpus(pod.wanted_quota_milli)),)
    ),
    *(
        _PodFamily(f"pod_{name}", f"{message} of a pod.", (("", _of_use(part)),), "counter")
        for part, name, message in _CPU_SECONDS
    ),
    _PodFamily(
        "pod_settings",
        "Settings of a pod by state.",
        (
            (',state="in_force"', lambda pod: pod.in_force),
            (',state="pending"', lambda pod: pod.pending),
            (',state="held_or_yielded"', lambda pod: pod.held_or_yielded),
        ),
    ),
    _PodFamily("pod_llc_occupancy_bytes", "Last-level cache occupancy of a pod.", (("", lambda pod: pod.llc_bytes),)),
    _PodFamily(
        "pod_memory_bandwidth_bytes_per_second", "Memory bandwidth of a pod.", (("", lambda pod: pod.memory_bytes_s),)
    ),
)


def _cpus(milli: int | None) -> float | None:
    return None if milli is None else milli / 1000


def _pod_text(pods: Sequence[PodMetrics], form: str) -> Steps[bytes]:
    """Seven to thirteen series a pod; `MetricsSnapshot.pods` is bounded by ``http.pod_metrics_limit``."""
    # Not by the library, which takes ten times as long: it makes, sorts and escapes labels for each sample.
    # The samples are the same in both forms, the comments of counters are not.
    lines = {family.name: [_comments(family, form)] for family in _POD_FAMILIES}
    info = [_comments(_PodFamily("pod_info", "A pod, its class and the source of the class.", ()), form)]
    for number, pod in enumerate(pods):
        if number % _PODS == 0:
            yield
        # Labels in the order of their names, as the library sorts them.
        namespace, name, uid = (_escaped(text) for text in (pod.namespace, pod.name, pod.uid))
        kind = f'{{class="{_escaped(pod.pod_class)}",namespace="{namespace}",pod="{name}"'
        info.append(f'bypassd_pod_info{kind},source="{_escaped(pod.source)}",uid="{uid}"}} 1.0\n')
        first, last = f'{{namespace="{namespace}",pod="{name}"', f',uid="{uid}"}} '
        for family in _POD_FAMILIES:
            end = "_total" if family.kind == "counter" else ""
            for label, value_of in family.values:
                if (value := value_of(pod)) is not None:
                    text = f"bypassd_{family.name}{end}{first}{label}{last}{_number(value)}\n"
                    lines[family.name].append(text)
    return "".join("".join(part) for part in (info, *lines.values())).encode()


def _number(value: float) -> str:
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


def _comments(family: _PodFamily, form: str) -> str:
    """In OpenMetrics a counter's comments are without ``_total``."""
    name = f"bypassd_{family.name}{'_total' if family.kind == 'counter' and form != OPENMETRICS else ''}"
    return f"# HELP {name} {family.message}\n# TYPE {name} {family.kind}\n"


def _escaped(text: str) -> str:
    """A label's value as both forms have it. Source: Prometheus, "Exposition formats", line format."""
    text = printable_lines(text)
    if text.isalnum():
        return text
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
