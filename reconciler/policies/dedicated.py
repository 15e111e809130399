"""dedicated: the CPUs that the kubelet gave to a single container are adopted, never fought, never handed out."""

from collections import Counter
from typing import Final

from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.naming import QosClass
from reconciler.policies.base import OF_KUBELET, Policy, PolicyConfig, whole_pod
from state.model import ContainerKind, CpuPolicy, NodeView, Pod, Pools, Setting
from state.plan import NodePlan

NAME: Final = OF_KUBELET
_SHARES_PER_CPU: Final = 1024


class DedicatedConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Adoption of exclusive CPUs.

    Source: the kubelet's static CPU manager, ``cpu_manager_state``. A checkpoint that *shrinks* for a bad reason (torn,
    emptied by a restart, another policy's) is not used: agents that use it put BE work on a pinned pod's CPUs until the
    kubelet has recovered.
    """


def decide_node(view: NodeView, pools: Pools, previous: Pools | None, config: DedicatedConfig) -> Pools:
    """Adopt the checkpoint; while it is held or unknown, add what was exclusive before and what the cgroups show."""
    kubelet = view.kubelet
    owned: dict[str, CpuSet] = {}
    for uid, containers in kubelet.exclusive.items():
        for name, cpus in containers.items():
            owned[f"{uid}/{name}"] = cpus
    reason = f"adopted from the kubelet ({kubelet.policy} policy)"
    if kubelet.held or kubelet.policy is CpuPolicy.UNKNOWN:
        # Also of pods that were removed: the present owners of their CPUs are exactly what cannot be read.
        for key, cpus in (previous.dedicated if previous is not None else {}).items():
            if previous is not None and key not in previous.placed:
                owned[key] = owned.get(key, EMPTY) | cpus
        reason = f"kept from the last valid checkpoint: {kubelet.problem or 'checkpoint unreadable'}"
        if kubelet.policy is CpuPolicy.UNKNOWN:
            for key, cpus in _inferred(view, pools.online_cpus).items():
                if key not in owned:
                    owned[key] = cpus
                    reason += f"; {key} owns {cpus} by its cgroup"
    dedicated = {key: owned[key] & pools.online_cpus for key in sorted(owned) if owned[key] & pools.online_cpus}
    return replace(
        pools,
        dedicated=dedicated,
        shared=pools.shared - CpuSet.union(dedicated.values()),
        reasons={**pools.reasons, "dedicated": reason if dedicated else "no container has exclusive CPUs"},
    )


def for_pod(pod: Pod, view: NodeView, plan: NodePlan, config: DedicatedConfig) -> list[Setting]:
    """The CPU set of a pod in gVisor or kata all of whose containers own CPUs by the kubelet.

    The kubelet gives them to groups without a process, and the runtime does not write the pod's; so the claim would be
    kept for an empty group.
    """
    pools, members = plan.pools, pod.members if pod.sandbox is not None else []
    keys = [f"{pod.uid}/{item.name or item.id}" for item in members if item.kind is not ContainerKind.INIT]
    if not keys or any(key not in pools.dedicated or key in pools.placed for key in keys):
        return []  # a pod with a container that owns none may run on all shared CPUs
    cpus = CpuSet.union(cpus for key, cpus in pools.dedicated.items() if key.startswith(f"{pod.uid}/"))
    return whole_pod(pod, "cpu.set", cpus, policy=NAME, reason="the kubelet's exclusive CPUs of its containers")


def _inferred(view: NodeView, online: CpuSet) -> dict[str, CpuSet]:
    """Guaranteed containers on a CPU set of their own, by ``uid/container`` (the id where the name is unknown)."""
    seen: list[tuple[str, CpuSet]] = []
    times: Counter[int] = Counter()
    for uid in sorted(view.pods):
        pod = view.pods[uid]
        for container in pod.workload:
            spec = container.spec
            if spec is None or spec.cpus is None:
                continue
            try:
                cpus = CpuSet.parse(spec.cpus)
            except ValueError:
                continue  # the reader of the spec reports it; nothing follows from it
            times.update(cpus)
            # The kubelet gives exclusive CPUs to whole-CPU requests only, and a request is 1024 shares a CPU. All CPUs
            # of the node are the default set of a kubelet without exclusive CPUs.
            if pod.qos is QosClass.GUARANTEED and spec.shares == _SHARES_PER_CPU * len(cpus) and not online <= cpus:
                seen.append((f"{uid}/{container.name or container.id}", cpus))
    return {key: cpus for key, cpus in seen if all(times[cpu] == 1 for cpu in cpus)}


POLICY = Policy(
    name=NAME,
    summary="the kubelet's exclusive CPUs are never used by other pools",
    config_type=DedicatedConfig,
    precedence=10,
    counts_in_dry_run=True,
    decide_node=decide_node,
    pod=for_pod,
)
