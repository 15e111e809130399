"""numa memory: containers that are bound to NUMA nodes take their memory there too (``cpuset.mems``).

Bound are: dedicated containers whose CPUs bypassd chose and whose pods ask for ``numa_binding``, online pods of a pool
on one node, and BE pods that ask for a node. It is written before the container's first instruction, so that there is
nothing to move. Off by default: a container that may take memory from one node only is out of memory when that one is.

Source: Katalyst (cpuset.mems of numa_binding pods).
"""

from typing import Annotated, Final

from msgspec import Meta

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.placement.pool_members import nodes_of
from reconciler.policies.base import Policy, PolicyConfig, placed_cpus, setting_of, unsupported_reason, whole_pod
from state.model import Container, NodeView, Phase, Pod, PodClass, Pools, Setting
from state.plan import NodePlan
from state.topology import Topology

NAME: Final = "numa_memory"


class NumaMemoryPolicyConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether memory follows."""

    enabled: Annotated[bool, Meta(description="allocate the memory of NUMA-bound containers from their nodes")] = False
    # A later write moves the pages on cgroup v2, which may take long and runs in the blocking writer's thread; cgroup
    # v1 leaves them where they are.
    migrate: Annotated[
        bool,
        Meta(
            description="cgroup v1: also migrate existing pages when the nodes change (cpuset.memory_migrate); "
            "copying slows the container down"
        ),
    ] = False


def nodes_with_memory(nodes: CpuSet, topology: Topology) -> CpuSet:
    """These nodes, each without memory (CXL machines, sub-NUMA with a bank out) replaced by the nearest with some."""
    has = topology.memory_nodes()
    numbers: set[int] = set()
    for node in nodes:
        numbers.add(next((near for near in topology.nearest(node) if near in has), node))
    return CpuSet(numbers)


def bound_nodes(pod: Pod, container: Container, view: NodeView, pools: Pools) -> CpuSet:
    """The NUMA nodes that the container's CPUs are bound to; empty: to none."""
    topology = view.topology
    if pod.uid in pools.bound:
        return CpuSet(nodes_of(pools.bound[pod.uid]))
    if not pod.wish.numa_binding:
        return EMPTY
    if pod.pod_class is PodClass.RECLAIMED:
        return CpuSet(node for node in pod.wish.nodes if pools.reclaimed & topology.node_cpus(node))
    cpus = placed_cpus(pod, container, pools)
    return EMPTY if cpus is None else CpuSet({topology.node_of(cpu) for cpu in cpus & topology.online})


def for_pod(pod: Pod, view: NodeView, plan: NodePlan, config: NumaMemoryPolicyConfig) -> list[Setting]:
    migrate = config.migrate and unsupported_reason(view, "cpu.mems_migrate") is None
    every = view.topology.memory_nodes()
    if pod.sandbox is not None:
        return _for_sandboxed(pod, view, plan.pools, every)
    settings: list[Setting] = []
    for container in pod.workload:
        if _is_the_kubelets(pod, container, view, every):
            continue
        nodes = bound_nodes(pod, container, view, plan.pools)
        mems = nodes_with_memory(nodes, view.topology)
        if not mems or mems >= every:
            continue  # bound to none, or to all
        reason = f"its CPUs are bound to NUMA node {nodes}"
        settings.append(setting_of(pod, container, "cpu.mems", mems, policy=NAME, reason=reason))
        # A starting container has too few pages to wait for.
        if migrate and container.phase is Phase.SETTLED:
            reason = "its pages are migrated when its nodes change"
            settings.append(setting_of(pod, container, "cpu.mems_migrate", 1, policy=NAME, reason=reason))
    return settings


def _for_sandboxed(pod: Pod, view: NodeView, pools: Pools, every: CpuSet) -> list[Setting]:
    """A pod in gVisor or kata: the nodes of all its containers together, where each is bound to some."""
    sets = [
        EMPTY
        if _is_the_kubelets(pod, item, view, every)
        else nodes_with_memory(bound_nodes(pod, item, view, pools), view.topology)
        for item in pod.members
    ]
    mems = CpuSet.union(sets)
    if not sets or not all(sets) or mems >= every:
        return []
    return whole_pod(pod, "cpu.mems", mems, policy=NAME, reason=f"its CPUs are bound to NUMA node {mems}")


def _is_the_kubelets(pod: Pod, container: Container, view: NodeView, every: CpuSet) -> bool:
    """Whether the kubelet's memory manager has given the container nodes, or that cannot be determined."""
    assigned = view.kubelet.affinity.get(f"{pod.uid}/{container.name}", {})
    if any(name == "memory" or name.startswith("hugepages-") for name in assigned):
        return True
    if container.spec is None or not container.spec.mems:
        return False
    # Without the manager a runtime's spec has no nodes, or all of them.
    try:
        return not CpuSet.parse(container.spec.mems) >= every
    except ValueError:
        return True


POLICY = Policy(
    name=NAME,
    summary="memory of NUMA-bound containers from their nodes",
    config_type=NumaMemoryPolicyConfig,
    precedence=76,
    pod=for_pod,
)
