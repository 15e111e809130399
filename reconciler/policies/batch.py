"""batch: what a BE pod asked for under the colocation control planes' own names becomes its weight and its limits.

The kubelet knows nothing of ``batch-cpu``, ``batch-memory`` or ``reclaimed_*``: such a pod is BestEffort to it, with
the least shares and no limit. Source: Koordinator's batchresource hook (shares from the request, quota and memory limit
from the limit). Where we differ: init containers count (there they are to come), a pod with one container without a
limit keeps the limits of the others, and limits are written on containers only: a pod's own would have to be moved in
step with every container that starts.
"""

from typing import Annotated, Final

from msgspec import Meta

from cgroupfs.naming import QosClass
from reconciler.policies.base import SHARES_MAX, SHARES_MIN, Policy, PolicyConfig, owns_cpus, period_us, quota_us
from state.model import Container, ContainerKind, NodeView, Pod, PodClass, Pools, Setting

NAME: Final = "batch"
_SHARES_PER_CPU: Final = 1024


class BatchConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which of a BE pod's extended resources are enforced."""

    weight: Annotated[bool, Meta(description="cpu shares from the batch CPU request, pod and container")] = True
    quota: Annotated[bool, Meta(description="CPU quota from the batch CPU limit, container")] = True
    memory: Annotated[bool, Meta(description="memory limit from the batch memory limit, container")] = True


def for_pod(pod: Pod, view: NodeView, pools: Pools, config: BatchConfig) -> list[Setting]:
    """Weight, quota and memory limit of a BE pod with extended resources; nothing for any other pod."""
    if pod.pod_class is not PodClass.RECLAIMED:
        return []
    settings: list[Setting] = []
    requested = 0
    for container in pod.containers:
        if container.kind is ContainerKind.SANDBOX or owns_cpus(pod, container, pools):
            continue
        requests, limits = container.requests, container.limits
        if requests.batch_cpu_milli is not None:
            requested += requests.batch_cpu_milli
            if config.weight and view.kubelet.reasserts_s is None:
                reason = f"batch CPU request of {requests.batch_cpu_milli}"
                settings.append(_setting(pod, container, "cpu.weight", _shares(requests.batch_cpu_milli), reason))
        if config.quota and limits.batch_cpu_milli is not None:
            settings.append(_quota(pod, container, limits.batch_cpu_milli, view, pools))
        if config.memory and limits.batch_memory_bytes is not None:
            value = limits.batch_memory_bytes
            settings.append(_setting(pod, container, "memory.max", value, f"batch memory limit of {value} bytes"))
    if config.weight and requested:
        settings.append(
            Setting(
                path=pod.group.path,
                knob="cpu.weight",
                value=_shares(requested),
                policy=NAME,
                reason=f"batch CPU requests of {requested} in all",
                pod_uid=pod.uid,
            )
        )
    return settings


def _quota(pod: Pod, container: Container, limit: int, view: NodeView, pools: Pools) -> Setting:
    """The limit as a quota.

    On v1 a child's may not exceed its parent's. Where the besteffort directory is the tighter one, the container has
    none of its own: the directory bounds it, and a clamped quota would have to follow the budget at each step.
    """
    directory = (pools.quota_milli or {}).get(view.besteffort)
    if (
        view.versions.get("cpu") == 1
        and pod.qos is QosClass.BESTEFFORT
        and directory is not None
        and limit >= directory
    ):
        reason = f"batch CPU limit of {limit}, but the besteffort directory's quota is tighter"
        return _setting(pod, container, "cpu.quota", None, reason)
    value = quota_us(limit, period_us(view, container.group.path, container))
    return _setting(pod, container, "cpu.quota", value, f"batch CPU limit of {limit}")


def _shares(milli: int) -> int:
    """The kubelet's own conversion, within what the kernel takes."""
    return min(max(milli * _SHARES_PER_CPU // 1000, SHARES_MIN), SHARES_MAX)


def _setting(pod: Pod, container: Container, knob: str, value: int | None, reason: str) -> Setting:
    return Setting(
        path=container.group.path,
        knob=knob,
        value=value,
        policy=NAME,
        reason=reason,
        pod_uid=pod.uid,
        container_id=container.id,
    )


POLICY = Policy(
    name=NAME,
    summary="extended resources of BE pods become weight, quota and memory limit",
    config_type=BatchConfig,
    precedence=30,
    pod=for_pod,
)
