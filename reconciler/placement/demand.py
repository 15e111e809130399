"""The CPU demand of a container, and the result for all demands. Values only; `allocate.allocate` decides.

Source of exclusive nodes: Katalyst's ``numa_exclusive`` and ``numa_share``; Koordinator's preferredCPUExclusivePolicy,
whose NUMANodeLevel concerns pods with the same wish only.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Final, final

from msgspec import Meta, Struct

from cgroupfs.cpuset import EMPTY, CpuSet
from state.cpu import AntiAffinity, CpuPreferences
from state.model import PodClass


class CpuDemand(Struct, frozen=True, kw_only=True):
    """One container that is to own CPUs. ``key`` is ``uid/container``; ``count`` whole CPUs (hardware threads).

    bypassd's choice never exceeds ``nodes`` and ``full_cores``.
    """

    key: str
    count: Annotated[int, Meta(ge=1)]
    # The NUMA nodes it may use, as the merge of the hints has decided; empty: any.
    nodes: tuple[int, ...] = ()
    # No restriction by itself: it requests the fewest nodes even if that fills one.
    numa_binding: bool = False
    # No other demand may own a CPU of its nodes; it still owns ``count`` only.
    numa_exclusive: bool = False
    # The kubelet's full-pcpus-only, distribute-cpus-across-numa, align-by-socket, prefer-align-cpus-by-uncorecache.
    full_cores: bool = False
    distribute: bool = False
    align_socket: bool = False
    prefer_l3: bool = True
    # As many CPUs on each of ``nodes``, also where fewer nodes would do (Katalyst's ``numa_number``).
    every_node: bool = False
    # Each CPU on a core of its own, whose other threads others may have (Koordinator's). Not together with full_cores.
    spread_cores: bool = False
    # Refused where that is impossible; else it gets what is available.
    strict_cores: bool = False
    # Off the cores or nodes of other pods that want the same, while there are enough others (Koordinator's).
    apart: AntiAffinity | None = None
    # What it has now or had last: while that is free and right it never moves, whatever ``nodes`` or ``explicit`` now,
    # as its memory is where it ran. To move a container, leave this empty.
    held: CpuSet = EMPTY
    # A scheduler's choice: used unchanged, on any nodes, when all of it is free, in whole cores where requested.
    explicit: CpuSet | None = None
    # The pod's; the higher chooses first.
    priority: int = 0
    pod_class: PodClass = PodClass.DEDICATED

    @property
    def uid(self) -> str:
        """The pod's part of ``key``."""
        return self.key.partition("/")[0]


class Allocation(Struct, frozen=True, kw_only=True):
    """The owners of CPUs. Every mapping is in the order of its sorted keys.

    ``cpus``: by demand; those without any are missing, never empty. ``refused``: demands that did not get their
    request, and why; one that is in ``cpus`` as well keeps what it held. ``notes``: the reasons of the others.
    ``closed``: node -> the demand that has it exclusively. ``errors``: by plug-in, the first error it raised; it was
    skipped then.
    """

    cpus: Mapping[str, CpuSet]
    refused: Mapping[str, str] = {}
    notes: Mapping[str, str] = {}
    closed: Mapping[int, str] = {}
    errors: Mapping[str, str] = {}

    @property
    def owned(self) -> CpuSet:
        mask = 0
        for cpus in self.cpus.values():
            mask |= cpus.mask
        return CpuSet.from_mask(mask)


_NO_PREFERENCES: Final = CpuPreferences()


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
        wish = self._wishes.get(uid, _NO_PREFERENCES)
        if not is_bound(wish):
            return EMPTY
        alone = wish.numa_share is False
        return CpuSet.union(
            nodes for other, nodes in self._others(uid) if is_bound(other) and (alone or other.numa_share is False)
        )

    def anti_affinity_nodes(self, uid: str) -> CpuSet:
        """For a pod that wants so: the nodes of other pods that want it, too."""
        if self._wishes.get(uid, _NO_PREFERENCES).apart is not AntiAffinity.NODE:
            return EMPTY
        return CpuSet.union(nodes for other, nodes in self._others(uid) if other.apart is AntiAffinity.NODE)

    def _others(self, own: str) -> Iterator[tuple[CpuPreferences, CpuSet]]:
        for uid, nodes in self._pods.items():
            if uid != own:
                yield self._wishes.get(uid, _NO_PREFERENCES), nodes


def is_bound(wish: CpuPreferences) -> bool:
    """Whether the pod is to remain on some NUMA nodes, by its own wish or by a decision."""
    return wish.numa_binding or bool(wish.nodes)
