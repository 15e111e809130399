"""pinned: the quota is lifted off containers that run on whole CPUs of their own, and off their pods.

A container that owns its CPUs cannot use more than those, so its quota bounds nothing; but it throttles: the kernel
distributes a quota in slices per CPU, and threads that together remain at their limit are stopped at the end of periods
all the same. It is restored when the container ceases to own its CPUs.

Source: Koordinator lifts it for LSE and LSR pods (pod and container), the kubelet does from 1.33 on
(DisableCPUQuotaWithExclusiveCPUs), for the pod as soon as one of its containers has exclusive CPUs.
"""

from typing import Final

from cgroupfs.cpuset import CpuSet
from reconciler.policies.base import Policy, PolicyConfig, setting_of
from state.model import Container, ContainerKind, NodeView, Pod, Pools, Setting
from state.plan import NodePlan

NAME: Final = "pinned"


class PinnedConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """There is nothing to set: a quota on CPUs of one's own never helps."""


def is_pinned(pod: Pod, container: Container, pools: Pools) -> bool:
    """True when the container, and surely this one, runs on CPUs that no other container may use."""
    if not pod.pod_class.online or container.kind is ContainerKind.SANDBOX or pod.sandbox is not None:
        return False
    # By its own key: a side-car on another container's CPUs, and a container that only may be the owner, keep their
    # quotas, which bound something there.
    key = f"{pod.uid}/{container.name or container.id}"
    owned = pools.dedicated.get(key)
    # The kernel lets a container of ``elsewhere`` run on other CPUs, too.
    if owned is None or key in pools.elsewhere:
        return False
    # The kubelet's CPUs count once the runtime has received them. Up to 1.21 that is some seconds after the container's
    # start, and until then it runs on all shared CPUs.
    return key in pools.placed or not _has_other_cpus(container, owned)


def lifts_pod(pod: Pod, pools: Pools) -> bool:
    """True when a container owns CPUs and each other one has a quota of its own: the pod's then bounds nothing."""
    pinned = False
    for container in pod.workload if pod.sandbox is None else ():
        if is_pinned(pod, container, pools):
            pinned = True
        elif container.spec is None or not _has_quota(container):
            return False
    return pinned


def for_pod(pod: Pod, view: NodeView, plan: NodePlan, config: PinnedConfig) -> list[Setting]:
    """No quota for pinned containers, and for the pod where that is safe."""
    if not plan.pools.dedicated:
        return []
    if pod.sandbox is not None:
        return _for_sandboxed(pod, view, plan.pools)
    settings: list[Setting] = []
    for container in pod.containers:
        if is_pinned(pod, container, plan.pools) and _has_quota(container):
            cpus = plan.pools.dedicated[f"{pod.uid}/{container.name or container.id}"]
            reason = f"exclusive CPU {cpus}: a quota would only throttle it"
            settings.append(setting_of(pod, container, "cpu.quota", None, policy=NAME, reason=reason))
    # A kubelet that rewrites each container's own quota leaves nothing to be won at the pod.
    if settings and view.kubelet.reasserts_s is None and lifts_pod(pod, plan.pools):
        reason = "some containers have exclusive CPUs, all others have their own quota"
        settings.append(setting_of(pod, None, "cpu.quota", None, policy=NAME, reason=reason))
    return settings


def _for_sandboxed(pod: Pod, view: NodeView, pools: Pools) -> list[Setting]:
    """A pod in a machine or kernel of its own: where each container owns CPUs and the pod's own set has no others."""
    owned = [pools.dedicated.get(f"{pod.uid}/{item.name or item.id}") for item in pod.members]
    cpus, have = CpuSet.union(item for item in owned if item), view.actual.get((pod.group.path, "cpu.set"))
    if not (pod.pod_class.online and owned and all(owned) and isinstance(have, CpuSet) and have and have <= cpus):
        return []
    reason = f"the pod runs on exclusive CPU {have} alone"
    return [setting_of(pod, None, "cpu.quota", None, policy=NAME, reason=reason)]


def _has_quota(container: Container) -> bool:
    """Whether the runtime received a quota, or may have."""
    return container.spec is None or (container.spec.quota_us or 0) > 0


def _has_other_cpus(container: Container, owned: CpuSet) -> bool:
    """Whether the runtime last received more CPUs than the container owns."""
    if container.spec is None or container.spec.cpus is None:
        return False
    try:
        return not CpuSet.parse(container.spec.cpus) <= owned
    except ValueError:
        return True


POLICY = Policy(
    name=NAME,
    summary="no quota on containers with exclusive CPUs",
    config_type=PinnedConfig,
    precedence=12,
    pod=for_pod,
)
