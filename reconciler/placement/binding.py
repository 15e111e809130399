"""NUMA nodes for the demands that own none yet, one after the other, each with what the ones before it leave. Pure.

Who holds CPUs stays on their nodes; hints are for newcomers. Resources that the kubelet has given out already (memory
of its memory manager, devices) are where they are: the CPUs follow them.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from reconciler.placement.demand import CpuDemand
from reconciler.placement.hint import CPU
from reconciler.placement.nodes import choose_nodes
from reconciler.placement.supply import Supply, fixed
from state.cpu import CpuWish, TopologyPolicy
from state.topology import Topology


class Bound(Struct, frozen=True, kw_only=True):
    """The demands with their nodes, and by key why, where there was something to choose."""

    demands: tuple[CpuDemand, ...]
    reasons: Mapping[str, str] = {}


def bind(
    demands: Sequence[CpuDemand],
    free: CpuSet,
    topology: Topology,
    *,
    policy: TopologyPolicy,
    prefer_cpu: bool,
    wishes: Mapping[str, CpuWish],
    affinity: Mapping[str, Mapping[str, CpuSet]],
) -> Bound:
    """``wishes`` by pod uid; ``affinity``: by demand the nodes of what it has already, by the resource's name."""
    every = topology.nodes()
    left = {node: len(topology.node_cpus(node) & free) for node in every}
    for demand in demands:
        for node in every:
            left[node] -= len(topology.node_cpus(node) & free & demand.held)
    found: list[CpuDemand] = []
    reasons: dict[str, str] = {}
    for demand in sorted(demands, key=lambda one: (-one.priority, -one.count, one.key)):
        wish = wishes.get(demand.uid, CpuWish())
        near = affinity.get(demand.key, {})
        if demand.held & free or demand.explicit is not None or not (near or _asks(demand, wish, policy)):
            found.append(demand)
            continue
        cpu = Supply(
            name=CPU,
            request=demand.count,
            total={node: len(topology.node_cpus(node)) for node in every},
            free={node: max(0, left[node]) for node in every},
            align_socket=demand.align_socket,
        )
        others = [fixed(name, nodes, every) for name, nodes in sorted(near.items()) if nodes]
        choice = choose_nodes(cpu, others, topology, policy=policy, wish=wish, prefer_cpu=prefer_cpu)
        reasons[demand.key] = choice.reason
        found.append(replace(demand, nodes=choice.nodes))
        missing = demand.count
        for node in choice.nodes:
            taken = min(missing, max(0, left[node]))
            left[node] -= taken
            missing -= taken
    return Bound(demands=tuple(sorted(found, key=lambda one: one.key)), reasons=reasons)


def _asks(demand: CpuDemand, wish: CpuWish, policy: TopologyPolicy) -> bool:
    """Whether anybody wants nodes for it; without, the chain of plug-ins keeps it together as well as it can."""
    return (
        demand.numa_binding
        or bool(wish.nodes)
        or wish.node_count is not None
        or (wish.topology_policy or policy) is not TopologyPolicy.NONE
    )
