"""The numbers of a scrape, gathered from the agent's parts; nothing here decides."""

import os
import time
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from reconciler import __version__
from reconciler.config.model import AgentMode
from reconciler.daemon.agent import Agent
from reconciler.daemon.podlist import (
    BUCKETS,
    outcomes_of,
    pod_quota_milli,
    pods_in_order,
    statuses_by_group,
    statuses_of,
)
from reconciler.daemon.views import pool_sets
from reconciler.runtime.cooperative import Steps
from reconciler.runtime.counters import CounterValues
from reconciler.runtime.supervisor import ComponentStatus
from reconciler.telemetry.metrics import MetricsSnapshot, PodMetrics, rss_bytes
from state.cache import CacheConsumption, CacheUsage
from state.model import Pod
from state.setting_state import SettingState


def counters(agent: Agent) -> CounterValues:
    return replace(
        agent.control.counters.values,
        writes=dict(agent.writes.actuator.writes),
        foreign=dict(agent.writes.judge.foreign_writes.writes),
        resyncs=dict(agent.hub.changed.resyncs),
        yields=agent.writes.judge.foreign_writes.yields,
        systemd_events=agent.writes.judge.foreign_writes.systemd_events,
        object_errors=dict(agent.writes.judge.errors.counts),
    )


def snapshot(agent: Agent, *, ready: bool, components: Sequence[ComponentStatus]) -> Steps[MetricsSnapshot]:
    """The newest numbers, in steps of one pod or group: 500 pods are 20 ms of the loop."""
    settings: Counter[tuple[str, str]] = Counter()
    yielded = 0
    for statuses in statuses_by_group(agent):
        for status in statuses.values():
            settings[status.setting.knob, BUCKETS[status.state]] += 1
            yielded += status.state is SettingState.YIELDED
        yield
    pods: list[PodMetrics] = []
    if agent.config.http.pod_metrics:
        cache = agent.sides.cache_use()
        # Beyond the limit BE pods are left out first.
        ordered = sorted(pods_in_order(agent), key=lambda pod: not pod.pod_class.online)
        for pod in ordered[: agent.config.http.pod_metrics_limit]:
            pods.append(_pod_metrics(agent, pod, cache))
            yield
    pools, cpu = agent.control.reconciler.pools, agent.control.inventory.readings.cpu
    refused = Counter(refusal.rule for refusals in agent.control.reconciler.refusals.values() for refusal in refusals)
    used, window = {}, agent.base.window()
    if cpu is not None:
        used = {"online": cpu.online_milli, "reclaimed": cpu.reclaimed_milli, "system": cpu.system_milli}
    times = os.times()
    cache = agent.sides.cache_use()
    return MetricsSnapshot(
        version=__version__,
        mode=AgentMode.ENFORCE.value if agent.mode.enforce else AgentMode.OBSERVE.value,
        windows={name: name == window.name for name in window.names},
        paused=agent.config.mode is AgentMode.ENFORCE and not agent.mode.enforce,
        ready=ready,
        pods=tuple(pods),
        pods_without_series=max(0, len(agent.control.inventory.pods) - agent.config.http.pod_metrics_limit)
        if agent.config.http.pod_metrics
        else 0,
        cpu_by_class={pod_class.value: cpu for pod_class, cpu in agent.accounts.minutes.by_class.items()},
        pods_by_class=Counter(pod.pod_class.value for pod in agent.control.inventory.pods.values()),
        pools={name: len(cpus) for name, cpus in pool_sets(pools).items()} if pools is not None else {},
        claims_cut=sum(claim.cut for claim in agent.control.claims()),
        claims_missing_cpus=sum(max(0, claim.asked - claim.got) for claim in agent.control.claims()),
        budget_milli=pools.budget_milli if pools is not None else None,
        harm_law=pools is not None and pools.harm is not None and pools.harm.in_force,
        harm_cuts=agent.accounts.sampler.harm.cuts,
        harm_unknown=agent.accounts.sampler.harm.unknown,
        starts_late=agent.accounts.sampler.starts.late,
        used_milli=used,
        headroom_milli={str(node): milli for node, milli in agent.headroom.report.state.amounts.items()},
        owner_cpu_s=agent.accounts.owners.totals if agent.config.http.pod_metrics else {},
        headroom_memory_bytes=agent.headroom.memory.state.total,
        headroom_minutes=agent.headroom.minutes,
        headroom_edits=agent.headroom.publisher.edits,
        headroom_workloads=agent.headroom.peaks.workloads(),
        settings=settings,
        refused=refused,
        holds=Counter(target.partition(":")[0] for target in agent.mode.holds),
        yielded=yielded,
        ledger_files=len(agent.record.ledger),
        sources=tuple(agent.statuses()),
        components=tuple(components),
        store_ok=agent.record.store.writable,
        alerts=agent.alerts.numbers(),
        watches=sum(
            stats.watches for stats in (agent.sources.tree.stats, agent.sources.signal.stats) if stats is not None
        ),
        rss_bytes=rss_bytes(),
        cpu_s=times.user + times.system,
        started_at=agent.started_at,
        priority=agent.process.priority.status,
        own_group=agent.process.group.status,
        stints=agent.process.stints.values,
        daemons=agent.accounts.sampler.daemons.rows(),
        hosts=agent.control.inventory.readings.hosts,
        token_expires_at=agent.sources.credentials.expires_s,
        counters=counters(agent),
        cache=cache,
        watched=agent.interference.numbers(),
        cache_age_s=time.monotonic() - cache.at_s if cache is not None and cache.at_s is not None else None,
    )


def _pod_metrics(agent: Agent, pod: Pod, cache: CacheUsage | None) -> PodMetrics:
    pools = agent.control.reconciler.pools
    use = cache.pods.get(pod.uid, CacheConsumption()) if cache is not None else CacheConsumption()
    outcomes = outcomes_of(agent)
    statuses = [statuses_of(agent, path, outcomes) for path in pod.paths]
    states = Counter([BUCKETS[status.state] for of_group in statuses for status in of_group.values()])
    sets = [of_group["cpu.set"] for of_group in statuses if "cpu.set" in of_group]
    quota_milli = (pools.quota_milli or {}).get(pod.uid) if pools is not None else None
    return PodMetrics(
        uid=pod.uid,
        namespace=pod.namespace or "",
        name=pod.name or "",
        pod_class=pod.pod_class.value,
        source=pod.classification.source,
        cpus=_size([status.actual for status in sets]),
        wanted_cpus=_size([status.wanted for status in sets]),
        quota_milli=pod_quota_milli(agent, pod) if quota_milli is not None else None,
        wanted_quota_milli=quota_milli,
        used=agent.accounts.minutes.total(pod),
        in_force=states["in_force"],
        pending=states["pending"],
        held_or_yielded=states["held_or_yielded"],
        llc_bytes=use.occupancy_bytes,
        memory_bytes_s=use.total_bytes_s,
    )


def _size(sets: Sequence[str | None]) -> int | None:
    """The number of CPUs in all of the kernel's texts together; None: one is not known, or there is none."""
    known = [text for text in sets if text]
    return _union_size(tuple(known)) if known and len(known) == len(sets) else None


@lru_cache(maxsize=256)
def _union_size(texts: tuple[str, ...]) -> int | None:
    try:
        return len(CpuSet.union([CpuSet.parse(text) for text in texts]))
    except ValueError:
        return None
