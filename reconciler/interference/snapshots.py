"""The snapshot of one pod: the facts by which it is judged, and by which a victim is chosen (`state.evidence`)."""

import sys
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from cgroupfs.cpuset import CpuSet
from reconciler.signals.pod_cpus import own_cpus
from state.evidence import ContainerSnapshot, PodSnapshot, Sample, host_subject
from state.hosts import CountsAs, HostWorkload
from state.model import Container, ContainerKind, Pod, PodClass, Pools, Resources

_FIELDS: Final = ("cpu_milli", "memory_bytes", "batch_cpu_milli", "batch_memory_bytes")


def snapshot_of(
    pod: Pod, pools: Pools | None, *, created_s: float = 0.0, held: bool = False, cpus: CpuSet | None = None
) -> PodSnapshot:
    """The facts of one pod.

    ``created_s``: when its cgroup was made, seconds since the epoch; 0.0 when it is not known. ``held``: an operator's
    hold covers it. ``cpus``: where its containers may run, where that is known better than by its pool.
    """
    # The pause container and init containers have no requests of their own while the pod runs.
    working = [item for item in pod.members if item.kind in {ContainerKind.APP, ContainerKind.UNKNOWN}]
    requests, partial = _sum(container.requests for container in working)
    limits, _ = _sum(container.limits for container in working)
    pool = pools.pool_of(pod) if pools is not None else None
    most = 1000 * len(pools.online_cpus) if pools is not None else sys.maxsize
    if cpus is None and pools is not None:
        cpus = _pool_cpus(pod, pools, pool)
    return PodSnapshot(
        uid=pod.uid,
        title=pod.title,
        pod_class=pod.pod_class,
        group=pod.group.path,
        namespace=pod.namespace,
        qos=pod.qos.value,
        priority=pod.priority,
        priority_class=pod.priority_class,
        owner=pod.owner,
        static=pod.static,
        labels=pod.labels,
        annotations=pod.annotations,
        containers=tuple(_container(container) for container in pod.containers),
        pool=pool,
        cpus="" if cpus is None else str(cpus),
        requests=requests,
        be_cpu_milli=_total(container.requests.counted_cpu(most) for container in working),
        be_memory_bytes=_total(container.requests.be_memory_bytes for container in working),
        limits=limits,
        created_s=created_s,
        terminating=pod.deleting,
        grace_s=pod.grace_s,
        held=held,
        certain=pod.classification.certain,
        partial=partial,
        tolerates=pod.tolerates,
    )


def host_snapshot(host: HostWorkload) -> PodSnapshot:
    """A host workload as a verdict needs it. It has no limits and no requests: nothing of it is bypassd's to bound."""
    return PodSnapshot(
        uid=host_subject(host.name),
        title=f"host workload {host.name}",
        pod_class=PodClass.SHARED if host.counts_as is CountsAs.VICTIM else PodClass.RECLAIMED,
        group="",
        cpus="" if not host.cpus else str(host.cpus),
    )


def host_samples(host: HostWorkload, age_s: float) -> Mapping[str, Sample]:
    """What was read of it ``age_s`` ago."""
    return {name: Sample(known.value, age_s, known.confidence) for name, known in host.values.items()}


def _container(container: Container) -> ContainerSnapshot:
    return ContainerSnapshot(
        id=container.id, path=container.group.path, name=container.name, sandbox=container.kind is ContainerKind.SANDBOX
    )


def _pool_cpus(pod: Pod, pools: Pools, pool: str | None) -> CpuSet | None:
    match pool:
        case None:
            return None
        case "dedicated":
            return own_cpus(pod.uid, pools)
        case "shared":
            return pools.shared
        case "reclaimed":
            return pools.reclaimed
        case _:
            return pools.named.get(pool)


def _sum(parts: Iterable[Resources]) -> tuple[Resources, tuple[str, ...]]:
    """The sums of what the containers have (None where none has it), and the fields that not all of them have."""
    all_parts = list(parts)
    sums: dict[str, int | None] = {}
    partial: list[str] = []
    for field in _FIELDS:
        items = [value for part in all_parts if (value := getattr(part, field)) is not None]
        sums[field] = _total(items)
        if items and len(items) < len(all_parts):
            partial.append(field)
    return msgspec.structs.replace(Resources(), **sums), tuple(partial)


def _total(parts: Iterable[int | None]) -> int | None:
    numbers = [part for part in parts if part is not None]
    return sum(numbers) if numbers else None
