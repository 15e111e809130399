"""How much CPU a pod requests for BE work, as far as that may weigh against other pods. Pure.

The request divides the BE budget, the CPU time of the besteffort directory and the fair shares of owners between
tenants. So it counts only as far as a scheduler has counted it:

- A request in the pod's spec, and at most all CPUs that pods can have. A scheduler places no larger one, but a pod with
  a ``nodeName`` passes none, and the kubelet ignores requests for resources that its node does not offer.
- A pod without a request counts as a whole CPU, whatever the number of its containers; so does, within its pod, a
  container without one.
- A request that only the annotation has (`reconciler.pods.resources`) is the tenant's claim: it counts as a whole CPU
  at most, so it never weighs more than no request at all, and as nothing beside a request of the same pod.

Thousandths of a CPU. ``most``: what pods can have (`state.model.NodeView.capacity_milli`).
"""

from typing import Final

from state.model import Container, ContainerKind, Pod

CPU: Final = 1000
"""What a container without a request counts as."""


def container_asks(container: Container, most: int) -> int:
    """What one container counts as, the measure by which its pod's share is split."""
    requests = container.requests
    return requests.counted_cpu(most) or min(requests.claimed_cpu_milli or CPU, CPU)


def pod_asks(pod: Pod, most: int) -> int:
    """What a pod counts as beside other pods: its containers together, without the pause container."""
    requests = [container.requests for container in pod.containers if container.kind is not ContainerKind.SANDBOX]
    if counted := sum(item.counted_cpu(most) or 0 for item in requests):
        return min(counted, most)
    return min(sum(item.claimed_cpu_milli or 0 for item in requests) or CPU, CPU)
