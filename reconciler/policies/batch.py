"""batch: a pod's requests under the colocation control planes' own names become its weight and its limits.

The kubelet does not interpret ``batch-cpu``, ``batch-memory``, ``mid-cpu``, ``mid-memory`` or ``reclaimed_*``: it
treats such a pod as BestEffort, with the minimum shares and no limit. The mid names count for online pods too, the
others for BE pods only.

Source: Koordinator's batchresource hook (shares from the request, quota and memory limit from the limit, both divided
by the node's CPU normalisation ratio).
"""

from typing import Annotated, Final, NamedTuple

from msgspec import Meta
from msgspec.structs import replace

from cgroupfs.codecs import swap_value
from cgroupfs.naming import QosClass
from reconciler.policies.base import (
    QUOTA_MIN_US,
    Policy,
    PolicyConfig,
    owns_cpus,
    period_us,
    pod_asks,
    pod_shares,
    pod_total,
    quota_us,
    setting_of,
    shares_of,
    unsupported_reason,
    weighs_by_request,
)
from reconciler.policies.normalise import normalised
from reconciler.runtime.format import cpu, size
from state.model import Container, ContainerKind, NodeView, Pod, PodClass, Pools, Setting
from state.plan import NodePlan

NAME: Final = "batch"


class BatchConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which of a BE pod's extended resources are enforced."""

    weight: Annotated[bool, Meta(description="CPU shares from the batch CPU request, of pod and container")] = True
    quota: Annotated[
        bool,
        Meta(
            description="CPU quota from the batch CPU limit, of the container; of the pod if each container has a limit"
        ),
    ] = True
    memory: Annotated[bool, Meta(description="memory limit from the batch memory limit, of the container")] = True


def decide_resources(view: NodeView, plan: NodePlan, previous: NodePlan | None, config: BatchConfig) -> NodePlan:
    """Whether containers get their batch memory limits: on cgroup v1 a bound of swap needs one."""
    if not config.enabled or config.dry_run:
        return plan
    return replace(plan, memory=replace(plan.memory, batch_limits=config.memory))


def for_pod(pod: Pod, view: NodeView, plan: NodePlan, config: BatchConfig) -> list[Setting]:
    """Weight, quota and memory limit of a pod with extended resources; nothing for any other pod."""
    if pod.pod_class is not PodClass.RECLAIMED and not any(map(_mid, pod.members)):
        return []
    if pod.sandbox is not None:
        return _for_sandboxed(pod, view, plan, config)
    settings: list[Setting] = []
    most = view.capacity_milli
    requested = 0
    # With the init containers that run (Koordinator: without): a BE pod is limited from its first instruction.
    for container in pod.workload:
        if owns_cpus(pod, container, plan.pools):
            continue
        if pod.pod_class is not PodClass.RECLAIMED and not _mid(container):
            continue
        limits = container.limits
        if (own := _request(pod, container, most)) is not None:
            requested += own.milli
            # A kubelet that rewrites everything of a container every few seconds rewrites its shares, too.
            if config.weight and view.kubelet.reasserts_s is None:
                shares = shares_of(own.milli)
                settings.append(setting_of(pod, container, "cpu.weight", shares, policy=NAME, reason=own.reason))
        if config.quota and limits.batch_cpu_milli is not None:
            settings.append(_quota(pod, container, limits.batch_cpu_milli, view, plan.pools))
        # On containers only: lowered in step with every container that ends, the pod's own limit would force reclaim,
        # or on v2 an OOM kill.
        if config.memory and limits.batch_memory_bytes is not None:
            value = limits.batch_memory_bytes
            settings += _memory(pod, container, value, view, plan, reason=f"batch memory limit of {size(value)}")
    if config.weight and requested:
        settings += _pod_weight(pod, requested, view, plan)
    if config.quota:
        settings += _pod_quota(pod, view, plan.pools)
    return settings


class _BatchRequest(NamedTuple):
    """A container's request, in thousandths of a CPU."""

    milli: int
    reason: str


def _request(pod: Pod, container: Container, most: int) -> _BatchRequest | None:
    """A container's request under the names for colocation, bounded by what pods can have; None: it has none."""
    requests = container.requests
    if requests.batch_cpu_milli is not None and (requests.mid or pod.pod_class is PodClass.RECLAIMED):
        milli = requests.counted_cpu(most) or 0
        return _BatchRequest(milli, f"batch CPU request of {cpu(requests.batch_cpu_milli)}")
    # Only the annotation has it: the tenant's claim. Koordinator has no other source, and trusts its webhook.
    if requests.claimed_cpu_milli is not None and pod.pod_class is PodClass.RECLAIMED:
        milli = min(requests.claimed_cpu_milli, most)
        return _BatchRequest(milli, f"batch CPU request of {cpu(milli)} in the annotation only")
    return None


def _pod_weight(pod: Pod, requested: int, view: NodeView, plan: NodePlan) -> list[Setting]:
    """The weight of a pod's directory beside other pods, from the requests of its containers together."""
    if pod.uid in plan.starts.raised and weighs_by_request(pod, view):
        return []  # `reclaimed` has it
    if pod.pod_class.online and pod.qos is not QosClass.BESTEFFORT:
        return []  # the kubelet has written one, by the plain request
    if pod.pod_class is PodClass.RECLAIMED:
        requested = pod_asks(pod, view.capacity_milli)
    # By request only among pods that have one: Koordinator writes 8192 shares for 8 CPUs beside an online pod's 2.
    shares, reason = pod_shares(requested, pod, view), f"sum of batch CPU requests: {cpu(requested)}"
    if not weighs_by_request(pod, view):
        reason = (
            f"low CPU weight, not the mid-tier CPU requests of {cpu(requested)}: beside online pods without a request"
            if pod.pod_class.online
            else f"minimum CPU weight, not the batch CPU requests of {cpu(requested)}: online pods go first"
        )
    return [setting_of(pod, None, "cpu.weight", shares, policy=NAME, reason=reason)]


def _for_sandboxed(pod: Pod, view: NodeView, plan: NodePlan, config: BatchConfig) -> list[Setting]:
    """A pod in gVisor or kata: its processes are in the pod's own group, which the kubelet bounds by plain limits only.

    By the containers of its spec, of which the group itself shows nothing; with the overhead of its RuntimeClass.
    """
    most = view.capacity_milli
    requested = pod_total(pod, lambda item: own.milli if (own := _request(pod, item, most)) is not None else 0) or 0
    settings = _pod_weight(pod, requested, view, plan) if config.weight and requested else []
    quotas = _pod_quota(pod, view, plan.pools) if config.quota else []
    # Where one has no limit, those of the others cannot be kept: the planner refuses these settings, which reports it.
    limited = [item for item in pod.members if item.limits.batch_cpu_milli is not None]
    if config.quota and not quotas and len(limited) < len(pod.members):
        quotas = [_quota(pod, item, item.limits.batch_cpu_milli or 0, view, plan.pools) for item in limited]
    settings += quotas
    limit = pod_total(pod, lambda item: item.limits.batch_memory_bytes)
    if config.memory and limit:
        overhead = pod.overhead.memory_bytes or 0
        reason = f"batch memory limits of its containers: {size(limit)}"
        reason += f", and {size(overhead)} overhead" if overhead else ""
        settings += _memory(pod, None, limit + overhead, view, plan, reason=f"{reason}; {pod.sandbox}: as a whole")
    elif config.memory:
        for item in pod.members:
            if (own := item.limits.batch_memory_bytes) is not None:
                settings += _memory(pod, item, own, view, plan, reason=f"batch memory limit of {size(own)}")
    return settings


def _memory(
    pod: Pod, container: Container | None, limit: int, view: NodeView, plan: NodePlan, *, reason: str
) -> list[Setting]:
    """The limit, and no swap besides it where the kernel accounts swap and no policy bounds swap by class.

    As containerd and the kubelet set a plain limit: memory and swap together are bounded by it.
    """
    settings = [setting_of(pod, container, "memory.max", limit, policy=NAME, reason=reason)]
    # Without it a container moves to swap what is above its limit. On v1 a limit above the runtime's memory+swap is
    # possible only together with that (`cgroupfs.plan` has the order).
    if unsupported_reason(view, "memory.swap") is None and pod.pod_class.value not in plan.memory.swap_percent:
        swap = swap_value(limit, limit, 1 if view.versions.get("memory") == 1 else 2)
        why = f"{reason}: memory and swap together"
        settings.append(setting_of(pod, container, "memory.swap", swap, policy=NAME, reason=why))
    return settings


def _pod_quota(pod: Pod, view: NodeView, pools: Pools) -> list[Setting]:
    """The sum of the containers' quotas as the pod's, in the pod's own period; none where one has no limit."""
    if pod.qos is not QosClass.BESTEFFORT:
        return []  # the kubelet has written one
    period, value, total = period_us(view, pod.group.path), 0, 0
    if pod.sandbox is not None:
        total = pod_total(pod, lambda item: item.limits.batch_cpu_milli) or 0
        value = _quota_us(total + (pod.overhead.cpu_milli or 0), period, pools) if total else 0
    for container in pod.workload if pod.sandbox is None else ():
        limit = container.limits.batch_cpu_milli
        if container.kind is ContainerKind.EPHEMERAL:
            continue
        if limit is None or owns_cpus(pod, container, pools):
            return []
        own = period_us(view, container.group.path, container)
        # Rounded up for each: on v1 no child may be above its parent, and a newcomer is let in before it is bounded.
        value += -(-_quota_us(limit, own, pools) * period // own)
        total += limit
    if not value or (view.versions.get("cpu") == 1 and _above_directory(total, view, pools)):
        return []
    reason = f"sum of batch CPU limits: {cpu(total)}"
    return [setting_of(pod, None, "cpu.quota", value, policy=NAME, reason=reason)]


def _above_directory(limit: int, view: NodeView, pools: Pools) -> bool:
    """Whether the besteffort directory's quota is the tighter bound."""
    directory = (pools.quota_milli or {}).get(view.besteffort)
    return directory is not None and normalised(limit, pools) >= directory


def _quota_us(limit: int, period: int, pools: Pools) -> int:
    return max(QUOTA_MIN_US, normalised(quota_us(limit, period), pools))


def _quota(pod: Pod, container: Container, limit: int, view: NodeView, pools: Pools) -> Setting:
    """The limit as a quota."""
    # On v1 a child's may not exceed its parent's. The directory bounds it, and a quota clamped to the directory's would
    # have to follow the budget at each step.
    if view.versions.get("cpu") == 1 and pod.qos is QosClass.BESTEFFORT and _above_directory(limit, view, pools):
        reason = f"batch CPU limit of {cpu(limit)} not written: the quota of the besteffort directory is smaller"
        return setting_of(pod, container, "cpu.quota", None, policy=NAME, reason=reason)
    period = period_us(view, container.group.path, container)
    value = _quota_us(limit, period, pools)
    reason = f"batch CPU limit of {cpu(limit)}"
    if limit * period < QUOTA_MIN_US * 1000:
        least = QUOTA_MIN_US * 1000 // period
        reason = f"batch CPU limit of {limit} thousandths of a CPU, raised to {least}, the kernel's least quota"
    return setting_of(pod, container, "cpu.quota", value, policy=NAME, reason=reason)


def _mid(container: Container) -> bool:
    return container.requests.mid or container.limits.mid


POLICY = Policy(
    name=NAME,
    summary="weight, quota and memory limit of BE pods from their extended resources",
    config_type=BatchConfig,
    precedence=30,
    decide_resources=decide_resources,
    pod=for_pod,
)
