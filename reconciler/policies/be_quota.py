"""The BE budget as quotas: which group gets which part of it. Arithmetic only; units are thousandths of a CPU and µs.

The besteffort directory gets the whole budget where all BE pods and no others are in it; otherwise it is divided
between the containers, in proportion to their requests.
"""

from typing import Final

from cgroupfs.naming import QosClass
from reconciler.policies.base import MILLI_MIN, period_us, quota_us
from state.model import Container, ContainerKind, NodeView, Pod, PodClass, Pools

_CPU: Final = 1000


def split(budget: int, view: NodeView) -> tuple[dict[str, int], str]:
    """Divide the budget into quotas: in proportion to the CPU request, a whole CPU where there is none.

    With more takers than the budget has hundredths of a CPU the sum exceeds it: the kernel takes no smaller quota.
    """
    inside: list[Pod] = []
    outside: list[Pod] = []
    online: list[str] = []
    for pod in view.pods.values():
        if pod.pod_class is PodClass.RECLAIMED:
            (inside if pod.qos is QosClass.BESTEFFORT else outside).append(pod)
        elif pod.qos is QosClass.BESTEFFORT:
            online.append(pod.title)
    weights = {item.uid: _asked(item) for item in outside}
    reason = "enforced as CPU quota on kubepods/besteffort"
    if online:
        weights |= {item.uid: _asked(item) for item in inside}
        reason = f"enforced as CPU quota per container: online pod {min(online)} is inside kubepods/besteffort"
    else:
        weights[view.besteffort] = sum(_asked(item) for item in inside)
        if outside:
            reason = f"enforced as CPU quota on kubepods/besteffort and on {len(outside)} BE pods outside it"
    total = sum(weights.values())
    if not total:
        return ({} if online else {view.besteffort: budget}), reason
    return {key: max(MILLI_MIN, budget * weights[key] // total) for key in sorted(weights)}, reason


def _asked(pod: Pod) -> int:
    return (
        sum(container_asks(container) for container in pod.containers if container.kind is not ContainerKind.SANDBOX)
        or _CPU
    )


def container_asks(container: Container) -> int:
    """A container's CPU request: the measure by which a pod's share is split."""
    return container.requests.be_cpu_milli or _CPU


def part_of_pod(pod: Pod, view: NodeView, pools: Pools) -> int | None:
    """The part of the budget of a pod that no directory bounds; None: one does, or none has a quota."""
    if pools.quota_milli is None or (pod.qos is QosClass.BESTEFFORT and view.besteffort in pools.quota_milli):
        return None
    return pools.quota_milli.get(pod.uid, MILLI_MIN)


def parts_of(pod: Pod, view: NodeView, pools: Pools) -> dict[str, int]:
    """The part of the budget of each container, for a pod that no directory bounds. Newcomers start with the least."""
    share = part_of_pod(pod, view, pools)
    if share is None:
        return {}
    containers = [container for container in pod.containers if container.kind is not ContainerKind.SANDBOX]
    total = sum(container_asks(container) for container in containers)
    return {container.id: max(MILLI_MIN, share * container_asks(container) // total) for container in containers}


def own_quota(part: int, container: Container, view: NodeView) -> int:
    """The part as a quota, and never more than the kubelet gave: on v1 that would be above the pod's."""
    value = quota_us(part, period_us(view, container.group.path, container))
    given = container.spec.quota_us if container.spec is not None else None
    return min(value, given) if given is not None and given > 0 else value
