"""What is counted and measured: plain numbers on the loop, and the frozen snapshot that a scrape shows.

Nothing here depends on Prometheus; `reconciler.telemetry.prometheus` makes its text from the newest snapshot. The
loop's task is the only writer, so counting is an addition without a lock, and `AgentCounters.values` is the only copy.
"""

import os
from collections.abc import Mapping

from msgspec import Struct

from reconciler.alerts.service import AlertNumbers
from reconciler.control.pod_minutes import CpuSeconds
from reconciler.runtime.counters import CounterValues, InterferenceCounters
from reconciler.runtime.own_group import OwnGroupStatus, Placement
from reconciler.runtime.priority import PriorityState, PriorityStatus
from reconciler.runtime.stints import StintValues
from reconciler.runtime.supervisor import ComponentStatus
from state.cache import CacheUsage
from state.daemons import DaemonRow
from state.hosts import HostWorkloads
from state.model import SourceStatus
from state.owners import OwnerAccount


class PodMetrics(Struct, frozen=True, kw_only=True):
    """One pod's series: thirteen at most. ``wanted_cpus`` and ``cpus``: how many its containers shall and may run on.

    ``wanted_quota_milli`` and ``quota_milli``: planned, and in force on the pod or on its containers; None: none, or
    unknown. ``used``: CPU time since the daemon first read the pod's group. ``llc_bytes`` and ``memory_bytes_s``: its
    use of the cache and of the memory bus; None: unknown.
    """

    uid: str
    namespace: str
    name: str
    pod_class: str
    source: str
    cpus: int | None = None
    wanted_cpus: int | None = None
    quota_milli: int | None = None
    wanted_quota_milli: int | None = None
    used: CpuSeconds = CpuSeconds()
    in_force: int = 0
    pending: int = 0
    held_or_yielded: int = 0
    """Settings that a hold or a yield keeps from being written."""
    llc_bytes: int | None = None
    memory_bytes_s: float | None = None


class MetricsSnapshot(Struct, frozen=True, kw_only=True):
    """Everything that a scrape shows, at one moment. Units as the names say; CPU in thousandths."""

    version: str
    mode: str
    paused: bool = False
    """Whether a restore suspends the configured mode enforce until a reload."""
    windows: Mapping[str, bool] = {}
    """The configured windows by name, and whether each is in force."""
    ready: bool = False
    pods: tuple[PodMetrics, ...] = ()
    """Empty where the configuration selects sums only."""
    pods_without_series: int = 0
    """Pods beyond the configured number."""
    cpu_by_class: Mapping[str, CpuSeconds] = {}
    """CPU time of all pods of a class since the start."""
    pods_by_class: Mapping[str, int] = {}
    pools: Mapping[str, int] = {}
    """CPUs by pool."""
    claims_cut: int = 0
    """Claims on CPUs that have fewer than requested, or others than were decided for them."""
    claims_missing_cpus: int = 0
    budget_milli: int | None = None
    harm_law: bool = False
    """Whether the harm law sets the BE budget."""
    harm_cuts: int = 0
    """Cuts of the BE budget by it, since the daemon's start."""
    harm_unknown: bool = False
    """Whether it is in force, or was, and the waiting of online pods is unknown."""
    starts_late: int = 0
    """Starts of BE containers that a quota of bypassd delayed, since the daemon's start."""
    used_milli: Mapping[str, int] = {}
    """CPU used by ``online``, ``reclaimed`` and ``system`` work."""
    headroom_milli: Mapping[str, int] = {}
    headroom_memory_bytes: int | None = None
    """What BE may be promised, by NUMA node."""
    headroom_minutes: Mapping[tuple[str, str], int] = {}
    """By resource, and ``kept`` or ``broken``: whether what was promised within the last hour was there."""
    headroom_edits: int = 0
    """How often another program was found to change, or to write, what is published to the cluster."""
    headroom_workloads: Mapping[str, int] = {}
    """Online workloads by whether their peak is ``known`` or ``cold``; empty: the law needs none."""
    owner_cpu_s: Mapping[str, OwnerAccount] = {}
    """CPU time of BE pods by owner, since the start; empty where the configuration selects sums only."""
    settings: Mapping[tuple[str, str], int] = {}
    """By knob and state: ``in_force``, ``pending``, ``held_or_yielded``."""
    refused: Mapping[str, int] = {}
    """Settings that the planner refuses now, by rule."""
    holds: Mapping[str, int] = {}
    """By kind of target: ``node``, ``pod``, ``knob``, ``file``, ``off``."""
    yielded: int = 0
    ledger_files: int = 0
    sources: tuple[SourceStatus, ...] = ()
    components: tuple[ComponentStatus, ...] = ()
    store_ok: bool = True
    alerts: AlertNumbers = AlertNumbers()
    watches: int = 0
    rss_bytes: int = 0
    cpu_s: float = 0.0
    started_at: float = 0.0
    """Wall-clock seconds."""
    priority: PriorityStatus = PriorityStatus(state=PriorityState.OFF, nice=0)
    token_expires_at: float | None = None
    """Wall-clock seconds; None where no token is used, or its end is not known."""
    own_group: OwnGroupStatus = OwnGroupStatus(placement=Placement.UNKNOWN)
    stints: StintValues = StintValues()
    """Of the loop and its worker threads, since readiness."""
    daemons: tuple[DaemonRow, ...] = ()
    """The node's other groups directly below the root."""
    hosts: HostWorkloads = HostWorkloads()
    """What is watched beside the pods, as read last."""
    counters: CounterValues = CounterValues()
    cache: CacheUsage | None = None
    watched: InterferenceCounters | None = None
    """None where nothing measures it."""
    cache_age_s: float | None = None
    http_requests: Mapping[tuple[str, str], int] = {}
    """Answers of our own listeners, by listener and status."""
    http_aborted: Mapping[tuple[str, str], int] = {}
    """Connections that ended early, by listener and reason."""


def rss_bytes(root: str = "/") -> int:
    """This process' resident memory, 0 where /proc is unreadable."""
    try:
        with open(os.path.join(root, "proc/self/statm"), encoding="ascii", newline="\n") as file:
            # Pages: size, resident, shared, …
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, IndexError, ValueError):
        return 0
