"""The pods on each NUMA node, and their wishes for nodes without neighbours. Values in, sets of nodes out.

Source: Katalyst's ``numa_exclusive`` and ``numa_share``; Koordinator's preferredCPUExclusivePolicy, whose NUMANodeLevel
concerns pods with the same wish only.
"""

from collections.abc import Iterator, Mapping
from typing import Final, final

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.placement.demand import CpuDemand
from state.cpu import AntiAffinity, CpuPreferences

_NOBODY: Final = CpuPreferences()


@final
class NumaOccupancy:
    """The nodes assigned so far, by `assign` and `assign_pod`; none is given back: one of these is one choice."""

    def __init__(self, wishes: Mapping[str, CpuPreferences]) -> None:
        """``wishes`` by pod uid."""
        self._wishes = wishes
        self._owners: dict[str, tuple[CpuDemand, CpuSet]] = {}
        self._pods: dict[str, CpuSet] = {}

    def assign(self, demand: CpuDemand, nodes: CpuSet) -> None:
        """It owns CPUs of these nodes."""
        self._owners[demand.key] = demand, nodes
        self.assign_pod(demand.uid, nodes)

    def assign_pod(self, uid: str, nodes: CpuSet) -> None:
        """The pod is on these nodes."""
        self._pods[uid] = self._pods.get(uid, EMPTY) | nodes

    def exclusive_nodes(self, demand: CpuDemand) -> CpuSet:
        """Nodes that it must not use: exclusive ones of others; for an exclusive demand also all used ones."""
        return CpuSet.union(
            nodes
            for key, (owner, nodes) in self._owners.items()
            if key != demand.key and (owner.numa_exclusive or demand.numa_exclusive)
        )

    def unshareable_nodes(self, uid: str) -> CpuSet:
        """For a bound pod: nodes of those that share them with no other bound one, or of all bound ones if it is so."""
        wish = self._wishes.get(uid, _NOBODY)
        if not is_bound(wish):
            return EMPTY
        alone = wish.numa_share is False
        return CpuSet.union(
            nodes for other, nodes in self._others(uid) if is_bound(other) and (alone or other.numa_share is False)
        )

    def anti_affinity_nodes(self, uid: str) -> CpuSet:
        """For a pod that wants so: the nodes of other pods that want it, too."""
        if self._wishes.get(uid, _NOBODY).apart is not AntiAffinity.NODE:
            return EMPTY
        return CpuSet.union(nodes for other, nodes in self._others(uid) if other.apart is AntiAffinity.NODE)

    def _others(self, own: str) -> Iterator[tuple[CpuPreferences, CpuSet]]:
        for uid, nodes in self._pods.items():
            if uid != own:
                yield self._wishes.get(uid, _NOBODY), nodes


def is_bound(wish: CpuPreferences) -> bool:
    """Whether the pod is to stay on some NUMA nodes, by its own wish or by a decision."""
    return wish.numa_binding or bool(wish.nodes)
