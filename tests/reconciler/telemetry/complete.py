"""A snapshot that has every series, and what is on the wire of it: the names with their labels and values."""

from collections import defaultdict
from collections.abc import Mapping

from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from reconciler.alerts.service import AlertNumbers, SinkNumbers
from reconciler.control.pod_minutes import CpuSeconds
from reconciler.runtime.counters import AgentCounters, InterferenceCounters
from reconciler.runtime.own_group import OwnGroupStatus, Placement
from reconciler.runtime.priority import PriorityState, PriorityStatus
from reconciler.runtime.stints import ComponentWork, StintValues
from reconciler.runtime.supervisor import ComponentHealth, ComponentStatus
from reconciler.telemetry.metrics import MetricsSnapshot, PodMetrics
from state.cache import CacheConsumption, CacheUsage, ShareLevel
from state.closing import MarkState, MarkStatus, NodeMark
from state.daemons import DaemonRow
from state.hosts import CountsAs, HostValue, HostWorkload, HostWorkloads
from state.model import SourceStatus
from state.owners import OwnerAccount
from tests.reconciler.telemetry.rendered import render

Labels = Mapping[str, frozenset[str]]


POD = PodMetrics(
    uid="u1",
    namespace="prod",
    name='we"ird\n',
    pod_class="reclaimed",
    source="cri",
    cpus=3,
    wanted_cpus=2,
    quota_milli=1500,
    wanted_quota_milli=1250,
    used=CpuSeconds(12.5, 1.5, None),
    in_force=4,
    pending=1,
)
"""A BE pod whose name needs escapes."""


def full() -> MetricsSnapshot:
    """What every node has."""
    counters = AgentCounters()
    counters.events = 2
    counters.cpus_moved, counters.pools_changed = 3, 2
    counters.started(0.0004, before_exec=True)
    counters.started(None, before_exec=None)
    counters.passes.observe(0.002)
    counters.lag.observe(0.0)
    counters.lag.observe(0.5)
    return MetricsSnapshot(
        version="0.1.0",
        mode="observe",
        ready=True,
        pods=(POD,),
        pods_by_class={"reclaimed": 1, "shared": 0},
        pools={"reserved": 1, "shared": 3},
        claims_cut=2,
        claims_missing_cpus=5,
        budget_milli=1250,
        used_milli={"online": 500},
        settings={("cpu.set", "in_force"): 4},
        refused={"quota below a child": 2},
        holds={"pod": 2, "node": 1},
        pods_without_series=7,
        cpu_by_class={"shared": CpuSeconds(90.0, 4.0, 2.0), "reclaimed": CpuSeconds(30.0)},
        yielded=1,
        ledger_files=9,
        sources=(SourceStatus(name="cri", ok=True, age_s=1.5), SourceStatus(name="kubelet", ok=False)),
        components=(ComponentStatus(name="web", health=ComponentHealth.WAITING, failures=2, error="x"),),
        store_ok=False,
        watches=440,
        rss_bytes=42,
        cpu_s=1.25,
        started_at=7.0,
        own_group=OwnGroupStatus(placement=Placement.OWN, group="/bypassd.slice", shares=50, raised=4, starved=1),
        priority=PriorityStatus(state=PriorityState.REAL_TIME, nice=-10, lowered=3, overruns=2),
        counters=replace(
            counters.values,
            writes={
                ("cpu.set", "written"): 2,
                ("cpu.set", "hot"): 1,
                ("cpu.set", "refused"): 1,
                ("cpu.quota", "blocked"): 1,
                ("cpu.quota", "written"): 1,
            },
            foreign={"kubelet": 1},
            resyncs={"start": 1},
            yields=1,
            systemd_events=2,
        ),
    )


def complete() -> MetricsSnapshot:
    """With all that only some nodes have."""
    used = CpuSeconds(2.0, 1.0, 0.5)
    base = full()
    pod = replace(POD, name="web", used=used, llc_bytes=512, memory_bytes_s=9.0)
    return replace(
        base,
        windows={"office": True, "night": False},
        pods=(pod,),
        cpu_by_class={"shared": used, "reclaimed": used},
        headroom_milli={"0": 500},
        headroom_memory_bytes=4096,
        headroom_minutes={("cpu", "broken"): 3, ("memory", "kept"): 4},
        headroom_edits=2,
        headroom_workloads={"known": 5, "cold": 1},
        owner_cpu_s={"ci": OwnerAccount(sold_s=2.5)},
        alerts=AlertNumbers(
            counts={("store", "critical"): 2},
            sinks={"oncall": SinkNumbers(outcomes={"failed": 2}, waiting=3, late_s=1.5, failing=True)},
        ),
        counters=replace(base.counters, object_errors={("file", "EINVAL"): 1}),
        cache=CacheUsage(
            groups={"bypassd-be": {0: CacheConsumption(occupancy_bytes=1, total_bytes_s=1e9)}},
            classes={"bypassd-be": "reclaimed"},
            level=ShareLevel(cache_percent=25, mba_percent=15),
        ),
        cache_age_s=2.5,
        token_expires_at=1_800_000_000.0,
        stints=StintValues(components={"sampler": ComponentWork(cpu_s=0.5, long=3, longest_s=0.001)}),
        daemons=(
            DaemonRow(
                group="/system.slice",
                weight=114,
                original=1024,
                wanted=114,
                use_milli=50,
                need_milli=50,
                waits=0.25,
                credit_us=334,
            ),
        ),
        hosts=HostWorkloads(
            entries={
                "db": HostWorkload(
                    name="db",
                    counts_as=CountsAs.VICTIM,
                    match="unit:db",
                    processes=3,
                    values={
                        "cpu.use": HostValue(1500.0),
                        "cpu.wait": HostValue(2.0),
                        "cpu.pressure": HostValue(1.0),
                        "memory.use": HostValue(4096.0),
                    },
                )
            }
        ),
        watched=InterferenceCounters(
            verdicts={("cpu", "interfered"): 1},
            steps={"squeeze": 1},
            changes={("squeeze", "applied"): 3},
            read_s={"runqueue": 0.25},
            orders={"done": 2},
            ended={"done": 2},
            closed=True,
            closings={"closed": 1},
            mark=MarkStatus(mark=NodeMark.AUTO, state=MarkState.IN_PLACE),
        ),
        http_requests={("tcp", "200"): 3},
        http_aborted={("tcp", "timeout"): 1},
    )


def exposed(snapshot: MetricsSnapshot | None = None) -> Labels:
    """All series by their names on the wire, with the names of their labels; without the snapshot: of all that is."""
    text, _ = render(complete() if snapshot is None else snapshot)
    found: defaultdict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found[sample.name] |= sample.labels.keys()
    return {name: frozenset(labels) for name, labels in found.items()}
