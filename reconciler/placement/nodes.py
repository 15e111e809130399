"""The NUMA nodes of one container, from its pod's wishes, free capacity and the hints of all its resources. Pure.

The kubelet merges hints before it starts a container and may refuse it. Here the container runs already, so there is
always a result, and ``admitted`` is the policy's verdict. In four cases the result is not the merge: nodes that are
decided (`_named`), a merge without enough CPUs (`_for_cpus`), one that not all resources prefer (`_all_fit`), and none
at all (`_own_best`).
"""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from reconciler.placement.hints import (
    MergedHint,
    NodeMaskOptions,
    NodeMaskRanker,
    ResourceHints,
    TopologyHint,
    common,
    merge,
)
from reconciler.placement.resource_hints import ResourceCapacity, fewest, hints_of
from state.cpu import CpuPreferences, TopologyPolicy
from state.topology import Topology


class NodeChoice(Struct, frozen=True, kw_only=True):
    """The nodes for one container's CPUs, none for any.

    ``preferred``: all resources are as close as possible; ``admitted``: the policy would admit it.
    """

    nodes: tuple[int, ...] = ()
    preferred: bool = False
    admitted: bool = True
    reason: str = ""


def choose_nodes(
    cpu: ResourceCapacity,
    others: Sequence[ResourceCapacity],
    topology: Topology,
    *,
    policy: TopologyPolicy,
    wish: CpuPreferences | None = None,
) -> NodeChoice:
    """The nodes for a container. ``cpu``: `FreeCapacity.cpus` of what it may have; ``others``: its memory and devices.

    The pod's own ``topology_policy`` counts before the node's ``policy``, and ``numa_binding`` makes best-effort of
    none. A node that the container must not use (another demand's exclusively) has nothing free in ``cpu``.
    """
    wish = wish or CpuPreferences()
    named = _named(cpu, wish)
    if named is not None and named.admitted:
        return named
    before = "" if named is None else f"{named.reason}; "
    rule = wish.topology_policy or policy
    if rule is TopologyPolicy.NONE:
        if not wish.numa_binding and wish.node_count is None:
            return NodeChoice(reason=f"{before}policy none: any NUMA node")
        rule = TopologyPolicy.BEST_EFFORT
    supplies = (cpu, *others)
    hints = fewest(supplies) if wish.node_count is None and rule is not TopologyPolicy.NUMERIC else None
    if hints is None or (rule is TopologyPolicy.SINGLE_NUMA_NODE and _has_several_nodes(hints)):
        hints = hints_of(supplies, topology)
    if not hints[0].hints:
        reason = f"{before}{sum(cpu.free.values())} CPUs are free, {cpu.request} are requested"
        return NodeChoice(admitted=cpu.request <= 0, reason=reason)
    if wish.node_count is not None:
        hints, note = _of_size(hints, wish.node_count)
        before += note
    every = CpuSet(node for supply in supplies for node in supply.total)
    merged = merge(hints, rule, every, closest=topology)
    if not merged.preferred and rule is not TopologyPolicy.NUMERIC:
        merged = _all_fit(cpu, hints, merged, NodeMaskRanker(topology))
    if not merged.preferred and merged.nodes == every and not merged.fits:
        merged = _own_best(hints[0], merged, NodeMaskRanker(topology))
    nodes, after = _for_cpus(cpu, merged, topology)
    return NodeChoice(
        nodes=tuple(nodes),
        preferred=merged.preferred,
        admitted=merged.admitted,
        reason=f"{before}{merged.reason}{after}",
    )


def _has_several_nodes(hints: Sequence[ResourceHints]) -> bool:
    """Whether the hints are of several nodes, which single-numa-node merges otherwise."""
    return any(len(hint.nodes) > 1 for resource in hints for hint in resource.hints or ())


def _named(cpu: ResourceCapacity, wish: CpuPreferences) -> NodeChoice | None:
    """The nodes that the annotations name (a scheduler's result, the pod's own ``numa_ids``), unchanged.

    Not admitted when they do not exist or lack the CPUs.
    """
    if not wish.nodes:
        return None
    wanted = CpuSet(wish.nodes)
    if not wanted <= cpu.nodes:
        reason = f"the pod's annotations name NUMA nodes {wanted}, some of which do not exist"
        return NodeChoice(admitted=False, reason=reason)
    if cpu.has(wanted.mask) < cpu.request:
        reason = f"NUMA nodes {wanted} of the pod's annotations have {cpu.has(wanted.mask)} of {cpu.request} CPUs"
        return NodeChoice(admitted=False, reason=reason)
    return NodeChoice(nodes=wish.nodes, preferred=True, reason="named by the pod's annotations")


def _of_size(hints: tuple[ResourceHints, ...], count: int) -> tuple[tuple[ResourceHints, ...], str]:
    """The CPUs' hints of the wanted number of nodes, which they prefer then; unchanged when there are none."""
    cpu, *others = hints
    fitting = tuple(
        TopologyHint(nodes=hint.nodes, preferred=True, score=hint.score)
        for hint in cpu.hints or ()
        if len(hint.nodes) == count
    )
    if not fitting:
        return hints, f"no {count} NUMA nodes have enough CPUs together; "
    return (ResourceHints(name=cpu.name, hints=fitting), *others), ""


def _own_best(cpu: ResourceHints, merged: MergedHint, rank: NodeMaskRanker) -> MergedHint:
    """The merge with the best nodes of the CPUs only, in place of all nodes, which mean that none is common."""
    hints = sorted(cpu.hints or (), key=lambda hint: (not hint.preferred, rank.key(hint.nodes.mask, hint.score)))
    if not hints or hints[0].nodes == merged.nodes:
        return merged
    reason = f"{merged.reason}; no common node: the best for the CPUs is {hints[0].nodes}"
    return replace(merged, nodes=hints[0].nodes, by_resource={}, reason=reason)


def _all_fit(
    cpu: ResourceCapacity, hints: tuple[ResourceHints, ...], merged: MergedHint, rank: NodeMaskRanker
) -> MergedHint:
    """The fewest nodes on which every resource fits, in place of a merge of different sets: that may have no room."""
    if len(merged.nodes) == 1 and cpu.fits(merged.nodes.mask):
        return merged  # one node with all CPUs, wherever the other resources are
    options = [
        NodeMaskOptions((hint.nodes.mask, hint.preferred, hint.score) for hint in resource.hints)
        for resource in hints
        if resource.hints
    ]
    mask = rank.best(common(options, preferred=False))
    if mask is None:
        return merged
    nodes = CpuSet.from_mask(mask)
    reason = merged.reason if nodes == merged.nodes else f"{merged.reason}; all fit on {nodes}"
    return replace(merged, nodes=nodes, fits=True, by_resource={}, reason=reason)


def _for_cpus(cpu: ResourceCapacity, merged: MergedHint, topology: Topology) -> tuple[CpuSet, str]:
    """The merge's nodes for the CPUs, with the nearest others until there are enough CPUs, and what was added.

    Best-effort may yield too few; the kubelet takes the rest from anywhere.
    """
    nodes = wider = merged.by_resource.get(cpu.name, merged.nodes) & cpu.nodes
    spare = [node for node in cpu.nodes - nodes if cpu.free.get(node, 0) > 0]
    for node in sorted(spare, key=lambda node: (_distance(topology, nodes, node), -cpu.free[node], node)):
        if cpu.has(wider.mask) >= cpu.request:
            break
        wider |= CpuSet((node,))
    return wider, f"; too few CPUs there: extended by node {wider - nodes}" if wider != nodes else ""


def _distance(topology: Topology, nodes: CpuSet, other: int) -> int:
    known = {node.id for node in topology.numa}
    return min((topology.distance(node, other) for node in nodes if {node, other} <= known), default=0)
