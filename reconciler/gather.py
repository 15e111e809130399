"""How everything stands and the numbers of one scrape, gathered from the agent's parts. Nothing here decides."""

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from reconciler import __version__
from reconciler.actuators.side import ByGroup
from reconciler.actuators.standing import Standing
from reconciler.agent import Agent
from reconciler.config import Mode
from reconciler.metrics import CounterValues, MetricsSnapshot, PodMetrics, rss_bytes
from reconciler.sides import cache_use
from reconciler.slices import Steps
from reconciler.supervisor import ComponentStatus
from state.cache import CacheUse, Use
from state.model import Pod, PodClass

_IN_FORCE: Final = frozenset({"in place", "written"})
_LEFT: Final = frozenset({"held", "yielded", "waiting"})
_FAILING: Final = frozenset({"refused", "unreadable", "not recorded", "blocked"})


def standings_of(agent: Agent, path: str) -> Mapping[str, Standing]:
    """How everything stands that is wanted of one group, by knob."""
    beside = [side.standings.get(path) for side in agent.sides if isinstance(side, ByGroup)]
    found = agent.judge.standings.by_group.get(path, {})
    return {knob: one for here in (found, *filter(None, beside)) for knob, one in here.items()}


def pods_in_order(agent: Agent) -> list[Pod]:
    """All pods, by class and title."""
    return sorted(agent.knowledge.pods.values(), key=lambda pod: (pod.pod_class, pod.title))


def nothing_in_force(agent: Agent) -> str | None:
    """Why not a single BE pod is as wanted, though something is to be had there; None when one is.

    A pod that is refused what another one gets is that pod's problem, and no reason to call the node unready. Neither
    is what a person or another writer wants, nor what is only practised (``mode: observe``).
    """
    failing: Counter[str] = Counter()
    pods = 0
    for pod in agent.knowledge.pods.values():
        if pod.pod_class is not PodClass.RECLAIMED:
            continue
        paths = (pod.group.path, *(one.group.path for one in pod.containers))
        found = [one for path in paths for one in agent.judge.standings.by_group.get(path, {}).values()]
        bad = [one.detail for one in found if one.state in _FAILING]
        if found and not bad:
            return None
        pods += bool(bad)
        failing.update(bad)
    if not pods:
        return None
    reason, _ = failing.most_common(1)[0]
    return f"not one of {pods} BE pods is as wanted: {failing.total()} settings fail: {reason}"


def counters(agent: Agent) -> CounterValues:
    """All counters, those of the actuators among them."""
    return replace(
        agent.counters.values,
        writes=dict(agent.actuator.writes),
        foreign=dict(agent.judge.others.writes),
        resyncs=dict(agent.dirty.resyncs),
        yields=agent.judge.others.yields,
        object_errors=dict(agent.errors.counts),
    )


def snapshot(agent: Agent, *, ready: bool, components: Sequence[ComponentStatus]) -> Steps[MetricsSnapshot]:
    """The newest numbers, in steps of one pod or group: 500 pods are 20 ms of the loop."""
    settings: Counter[tuple[str, str]] = Counter()
    yielded = 0
    for standings in standings_by_group(agent):
        for standing in standings.values():
            settings[standing.setting.knob, _bucket(standing)] += 1
            yielded += standing.state == "yielded"
        yield
    pods: list[PodMetrics] = []
    if agent.config.http.pod_metrics:
        cache = cache_use(agent.sides)
        for pod in pods_in_order(agent):
            pods.append(_pod_metrics(agent, pod, cache))
            yield
    pools, cpu = agent.reconciler.pools, agent.knowledge.cpu
    refused = Counter(one.rule for refusals in agent.reconciler.refusals.values() for one in refusals)
    used = {}
    if cpu is not None:
        used = {"online": cpu.online_milli, "reclaimed": cpu.reclaimed_milli, "system": cpu.system_milli}
    times = os.times()
    cache = cache_use(agent.sides)
    return MetricsSnapshot(
        version=__version__,
        mode=Mode.ENFORCE.value if agent.judge.enforce else Mode.OBSERVE.value,
        ready=ready,
        pods=tuple(pods),
        pods_by_class=Counter(pod.pod_class.value for pod in agent.knowledge.pods.values()),
        pools={name: len(cpus) for name, cpus in _pool_sets(agent).items()},
        budget_milli=pools.budget_milli if pools is not None else None,
        used_milli=used,
        headroom_milli={str(node): milli for node, milli in agent.headroom.state.amounts.items()},
        headroom_memory_bytes=agent.memory_headroom.state.total,
        settings=settings,
        refused=refused,
        holds=len(agent.judge.holds),
        yielded=yielded,
        ledger_files=len(agent.ledger),
        sources=tuple(agent.statuses()),
        components=tuple(components),
        store_ok=agent.store.writable,
        alerts=agent.telling.numbers(),
        watches=sum(one.watches for one in (agent.tree.stats, agent.signal.stats) if one is not None),
        rss_bytes=rss_bytes(),
        cpu_s=times.user + times.system,
        started_at=agent.started_at,
        counters=counters(agent),
        cache=cache,
        watched=agent.watching.numbers(),
        cache_age_s=time.monotonic() - cache.at_s if cache is not None and cache.at_s is not None else None,
    )


def standings_by_group(agent: Agent) -> list[Mapping[str, Standing]]:
    """How every wanted setting stands, by group. A list, as what it is made of may change between two steps."""
    found: list[Mapping[str, Standing]] = list(agent.judge.standings.by_group.values())
    for side in agent.sides:
        if isinstance(side, ByGroup):
            found += side.standings.values()
    return found


def _bucket(standing: Standing) -> str:
    if standing.state in _IN_FORCE:
        return "in_force"
    return "left_alone" if standing.state in _LEFT else "pending"


def _pod_metrics(agent: Agent, pod: Pod, cache: CacheUse | None) -> PodMetrics:
    pools = agent.reconciler.pools
    use = cache.pods.get(pod.uid, Use()) if cache is not None else Use()
    paths = [pod.group.path, *(one.group.path for one in pod.containers)]
    states = Counter(_bucket(one) for path in paths for one in standings_of(agent, path).values())
    return PodMetrics(
        uid=pod.uid,
        namespace=pod.namespace or "",
        name=pod.name or "",
        pod_class=pod.pod_class.value,
        source=pod.classification.source,
        cpus=len(pools.reclaimed) if pools is not None and pod.pod_class is PodClass.RECLAIMED else None,
        quota_milli=(pools.quota_milli or {}).get(pod.uid) if pools is not None else None,
        in_force=states["in_force"],
        pending=states["pending"],
        left_alone=states["left_alone"],
        llc_bytes=use.occupancy_bytes,
        memory_bytes_s=use.total_bytes_s,
    )


def _pool_sets(agent: Agent) -> Mapping[str, CpuSet]:
    pools = agent.reconciler.pools
    if pools is None:
        return {}
    return {
        "reserved": pools.reserved,
        "dedicated": pools.dedicated_cpus,
        "shared": pools.shared,
        "reclaimed": pools.reclaimed,
        **({"interrupt": pools.interrupt} if pools.interrupt else {}),
        **pools.named,
    }
