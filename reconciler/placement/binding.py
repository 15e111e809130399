"""NUMA nodes for the demands that own none yet, one after the other, then CPUs on them. Pure.

`bind` chooses the nodes, each demand from what the ones before it leave. A demand that holds CPUs remains on their
nodes; hints are for new demands.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.placement.allocate import allocate
from reconciler.placement.chain import PluginChain
from reconciler.placement.cpu_accumulator import CpuAccumulator
from reconciler.placement.demand import Allocation, CpuDemand, NumaOccupancy
from reconciler.placement.floors import CUT_POOLS, Floor, PoolFloors
from reconciler.placement.hints import MEMORY
from reconciler.placement.joint import propose
from reconciler.placement.nodes import NodeChoice, choose_nodes
from reconciler.placement.pool_members import bound_nodes
from reconciler.placement.resource_hints import FreeCapacity, NumaFreeMemory, ResourceCapacity, fixed
from state.cpu import CpuPreferences, TopologyPolicy
from state.topology import Topology


class NodeBinding(Struct, frozen=True, kw_only=True):
    """The demands with their nodes. ``reasons``: by key, where there was a choice."""

    demands: tuple[CpuDemand, ...]
    reasons: Mapping[str, str] = {}


def bind(
    demands: Sequence[CpuDemand],
    free: CpuSet,
    topology: Topology,
    *,
    policy: TopologyPolicy,
    wishes: Mapping[str, CpuPreferences],
    affinity: Mapping[str, Mapping[str, CpuSet]],
    memory: NumaFreeMemory | None = None,
    seated: Mapping[str, CpuSet] | None = None,
    first: Sequence[str] = (),
    found: Mapping[str, int] = MappingProxyType({}),
) -> NodeBinding:
    """``wishes`` by pod uid; ``affinity``: by demand the nodes of its assigned resources, by the resource's name.

    ``first``: demands that choose before all others, in this order. ``found``: by demand, a node that a search for all
    of them has decided.

    ``memory`` None: memory is unknown, and gives no hints. ``seated``: pods that are bound to nodes without owning CPUs
    there, by uid.
    """
    newcomers = [
        demand
        for demand in sorted(
            demands,
            key=lambda cpu_demand: (
                first.index(cpu_demand.key) if cpu_demand.key in first else len(first),
                -cpu_demand.priority,
                not cpu_demand.numa_exclusive,
                not cpu_demand.numa_binding,
                -cpu_demand.count,
                cpu_demand.key,
            ),
        )
        if not (demand.held & free or demand.explicit is not None)
        and (
            demand.key in found
            or affinity.get(demand.key)
            or _needs_nodes(demand, wishes.get(demand.uid, CpuPreferences()), policy)
        )
    ]
    if not newcomers:
        # In most plans every demand has CPUs already.
        return NodeBinding(demands=tuple(sorted(demands, key=lambda cpu_demand: cpu_demand.key)))
    room = FreeCapacity(demands, free, topology, memory)
    room.expect(demand for demand in newcomers if demand.nodes)
    occupancy = NumaOccupancy(wishes)
    for uid, nodes in sorted((seated or {}).items()):
        occupancy.assign_pod(uid, nodes)
    for demand in demands:
        if cpus := demand.held & free or (demand.explicit or EMPTY) & free:
            occupancy.assign(demand, CpuSet(map(topology.node_of, cpus)))
        elif demand.key in found:
            occupancy.assign(demand, CpuSet((found[demand.key],)))
            room.reserve(demand, (found[demand.key],))
    cpu_demands = {demand.key: demand for demand in demands}
    reasons: dict[str, str] = {}
    for demand in newcomers:
        if demand.key in found:
            cpu_demands[demand.key] = replace(demand, nodes=(found[demand.key],))
            reasons[demand.key] = f"cpu on NUMA node {found[demand.key]}: there it leaves the others what they need"
            continue
        wish = wishes.get(demand.uid, CpuPreferences())
        assigned = affinity.get(demand.key, {})
        # The CPUs follow what the kubelet has assigned already: memory of its memory manager, devices.
        others = [fixed(name, nodes, topology.nodes()) for name, nodes in sorted(assigned.items()) if nodes]
        others += room.memory(demand) if MEMORY not in assigned else []

        choice = partial(choose_nodes, others=others, topology=topology, policy=policy, wish=wish)
        decided = CpuSet(node for other in newcomers for node in other.nodes if other.key not in reasons)
        chosen, note = _by_occupancy(demand, room, occupancy, choice, named=bool(wish.nodes), decided=decided)
        reasons[demand.key] = chosen.reason + note
        every = len(chosen.nodes) > 1 and len(chosen.nodes) == wish.node_count
        cpu_demands[demand.key] = replace(demand, nodes=chosen.nodes, every_node=every)
        room.reserve(demand, chosen.nodes)
        occupancy.assign(demand, CpuSet(chosen.nodes))
    return NodeBinding(demands=tuple(cpu_demands[key] for key in sorted(cpu_demands)), reasons=reasons)


def _needs_nodes(demand: CpuDemand, wish: CpuPreferences, policy: TopologyPolicy) -> bool:
    """Whether any resource needs nodes; otherwise the plug-in chain keeps the demand together as far as possible."""
    return (
        demand.numa_binding
        or bool(wish.nodes)
        or wish.node_count is not None
        or (wish.topology_policy or policy) is not TopologyPolicy.NONE
    )


def _by_occupancy(
    demand: CpuDemand,
    room: FreeCapacity,
    occupancy: NumaOccupancy,
    choice: Callable[[ResourceCapacity], NodeChoice],
    *,
    named: bool,
    decided: CpuSet,
) -> tuple[NodeChoice, str]:
    """The choice without the nodes of pods that want no neighbours, and an addition to its reason.

    ``named``: another component has decided the nodes. ``decided``: nodes of new demands that are not placed yet.
    """
    # A node that another demand has exclusively is never used; an exclusive demand gets one without owners.
    closed = occupancy.exclusive_nodes(demand)
    if named:
        # The decision counts before the wishes below, but not before an exclusive node.
        return choice(room.cpus(demand, closed)), ""
    if demand.numa_exclusive and decided and room.cpus(demand, closed | decided).enough:
        closed |= decided
    note = ""
    barred = closed
    # Katalyst's ``numa_share`` false: such a node is avoided while the others have the CPUs.
    if unshared := occupancy.unshareable_nodes(demand.uid) - closed:
        if room.cpus(demand, closed | unshared).enough:
            barred |= unshared
            note = f"; not on node {unshared}, used exclusively by a bound pod"
        else:
            note = f"; other nodes have too few CPUs: also on node {unshared}, meant for exclusive use"
    # Koordinator's NUMANodeLevel: such a node is avoided while that costs no node more.
    apart = occupancy.anti_affinity_nodes(demand.uid) - barred
    if not apart:
        return choice(room.cpus(demand, barred)), note
    first = choice(room.cpus(demand, barred | apart))
    if not first.preferred:
        second = choice(room.cpus(demand, barred))
        if second.preferred or not first.nodes:
            return second, f"{note}; shares node {apart} with pods to avoid: otherwise more nodes would be needed"
    return first, f"{note}; avoids the pods on node {apart}"


ROUNDS: Final = 8
"""At most; a second one is rare."""


class NodeBindingChoice(Struct, frozen=True, kw_only=True):
    """The CPUs of each owner, and the reasons by demand: first for its nodes, then for its CPUs.

    ``seats``: as in `PoolFloors`. ``cut``: a demand was refused, or got its CPUs from what the pools request.
    """

    allocation: Allocation
    reasons: Mapping[str, str]
    seats: Mapping[str, str] = {}
    cut: bool = False


def choose(
    demands: Sequence[CpuDemand],
    free: CpuSet,
    topology: Topology,
    chain: PluginChain,
    *,
    policy: TopologyPolicy,
    wishes: Mapping[str, CpuPreferences],
    affinity: Mapping[str, Mapping[str, CpuSet]],
    memory: NumaFreeMemory | None = None,
    interrupts: CpuSet = EMPTY,
    remembered: CpuSet = EMPTY,
    floors: PoolFloors | None = None,
) -> NodeBindingChoice:
    """The arguments are those of `bind` and `allocate`. The order of ``demands`` does not matter.

    ``floors``: what is not to be given out, step by step, for the demands without their CPUs after the step before.
    Where a demand is refused or a pool cut by that, `joint` looks for other nodes, and what fits by these is preferred.
    """
    # Its tables of domains serve every round.
    fitter = CpuAccumulator(topology)

    def assign(
        demands: tuple[CpuDemand, ...],
        floor: Floor | None,
        *,
        first: Sequence[str],
        room: PoolFloors | None,
        found: Mapping[str, int],
    ) -> _Assigned:
        some = free if floor is None else free - floor.withheld
        bind_to = partial(
            bind,
            free=some,
            topology=topology,
            policy=policy,
            wishes=wishes,
            affinity=affinity,
            memory=memory,
            seated=bound_nodes(room.bound) if room is not None else None,
            first=first,
            found=found,
        )
        allocate_to = partial(
            allocate,
            free=some,
            topology=topology,
            chain=chain,
            interrupts=interrupts,
            remembered=remembered,
            most=None if floor is None else floor.most,
            first=first,
            fitter=fitter,
        )
        return _in_rounds(demands, bind_to, allocate_to, len(free) if floor is None else floor.most)

    plain = _by_steps(tuple(demands), free, floors, partial(assign, room=floors, found={}))
    if floors is None or not (plain.cut or floors.short or _any_misplaced(demands, plain.allocation, free, topology)):
        return plain
    if any(wish.numa_share is False or (wish.node_count or 1) > 1 for wish in wishes.values()):
        return plain  # the search has no rule for these wishes
    possible = partial(
        _possible, room=FreeCapacity(demands, free, topology, memory), affinity=affinity, every=topology.nodes()
    )
    proposal = propose(demands, floors, free, topology, possible)
    if proposal is None:
        return plain
    by_search = partial(assign, room=proposal.floors, found=proposal.nodes)
    joint = _by_steps(tuple(demands), free, proposal.floors, by_search, proposal.order)
    worse = joint.cut or proposal.floors.short or _any_misplaced(demands, joint.allocation, free, topology)
    return plain if worse else joint


def _possible(
    demand: CpuDemand, room: FreeCapacity, affinity: Mapping[str, Mapping[str, CpuSet]], every: Sequence[int]
) -> CpuSet:
    """The nodes with its assigned resources and its memory; all where no single node has them."""
    nodes = CpuSet(every)
    for near in affinity.get(demand.key, {}).values():
        nodes &= near
    for supply in room.memory(demand):
        nodes = CpuSet(node for node in nodes if supply.fits(1 << node))
    return nodes or CpuSet(every)


def _any_misplaced(demands: Sequence[CpuDemand], allocation: Allocation, free: CpuSet, topology: Topology) -> bool:
    """Whether a new demand got CPUs off the nodes that are decided for it, or on several though one could have them."""
    widest = max(len(topology.node_cpus(node)) for node in topology.nodes())
    for demand in demands:
        if demand.held & free or demand.explicit is not None or not (demand.nodes or demand.numa_binding):
            continue
        nodes = set(map(topology.node_of, allocation.cpus.get(demand.key, EMPTY)))
        if not nodes <= set(demand.nodes) if demand.nodes else len(nodes) > 1 and demand.count <= widest:
            return True
    return False


class _Assign(Protocol):
    def __call__(self, demands: tuple[CpuDemand, ...], floor: Floor | None, *, first: Sequence[str]) -> "_Assigned":
        """One choice for all demands besides what a step leaves to the pools."""


def _by_steps(
    demands: tuple[CpuDemand, ...],
    free: CpuSet,
    floors: PoolFloors | None,
    assign: _Assign,
    order: tuple[str, ...] = (),
) -> NodeBindingChoice:
    """Step by step, see `floors`.

    ``order``: in which the demands choose; empty: in their own, or in another one that refuses fewer.
    """
    parts: dict[str, str] = {}
    errors: dict[str, str] = {}
    cut = False
    step, floor = 1, floors.step(1, _owned(demands)) if floors is not None else None
    while True:
        most = len(free) if floor is None else floor.most
        result = assign(demands, floor, first=order)
        for first in () if order else _other_orders(demands, result.allocation, most):
            # What was chosen before them may be what they need, and the others may have a choice.
            other = assign(demands, floor, first=first)
            if other.allocation.refused.keys() < result.allocation.refused.keys():
                result = other
                break
        allocation = result.allocation
        for key in allocation.cpus:
            parts.setdefault(key, result.parts.get(key, ""))
        errors = {**allocation.errors, **errors}
        demands = tuple(replace(demand, held=allocation.cpus.get(demand.key, demand.held)) for demand in demands)
        missing = _least_missing(demands, allocation)
        floor, before = None, floor
        while missing and floors and (step := step + 1) and (floor := floors.step(step, allocation.owned)) is not None:
            cut = cut or step >= CUT_POOLS
            if floor.most - len(allocation.owned) >= missing and floor != before:
                break  # else it is too little for every one of them
        if floor is None:
            break
    return NodeBindingChoice(
        allocation=replace(allocation, errors=errors),
        reasons=parts,
        seats=floors.seats if floors is not None else {},
        cut=cut or bool(allocation.refused),
    )


class _Assigned(NamedTuple):
    """One choice for all demands, and the reasons by demand."""

    allocation: Allocation
    parts: Mapping[str, str]


def _in_rounds(
    demands: tuple[CpuDemand, ...],
    bind_to: Callable[[Sequence[CpuDemand]], NodeBinding],
    allocate_to: Callable[[Sequence[CpuDemand]], Allocation],
    most: int,
) -> _Assigned:
    """Bind and allocate until no bound demand is refused, in at most ``ROUNDS`` rounds.

    Nodes are assigned before CPUs, for all new demands at once, and which CPUs of several nodes one takes is only known
    afterwards. So a later demand may find its node full although another one has room.

    ``most``: so many CPUs may be owned in all.
    """
    parts: dict[str, str] = {}
    errors: dict[str, str] = {}
    for _ in range(ROUNDS):
        bound = bind_to(demands)
        allocation = allocate_to(bound.demands)
        for key in allocation.cpus:
            texts = filter(None, (bound.reasons.get(key), allocation.notes.get(key)))
            # The reason of the first round; in the next one the CPUs are simply kept.
            parts.setdefault(key, "; ".join(texts))
        errors = {**allocation.errors, **errors}
        nodes = {demand.key: demand.nodes for demand in bound.demands}
        if not any(nodes[key] and key not in allocation.cpus for key in allocation.refused):
            break
        if most - len(allocation.owned) < _least_missing(demands, allocation):
            break  # no other node helps: too few CPUs are left for any of them
        # Demands with CPUs keep them, the others are bound again to what is really left.
        kept = tuple(replace(demand, held=allocation.cpus.get(demand.key, demand.held)) for demand in demands)
        if kept == demands:
            break
        demands = kept
    return _Assigned(replace(allocation, errors=errors), parts)


def _least_missing(demands: Sequence[CpuDemand], allocation: Allocation) -> int:
    """How many CPUs the refused demand that lacks the fewest would need more; 0 where none was refused."""
    return min(
        (
            demand.count - len(allocation.cpus.get(demand.key, EMPTY))
            for demand in demands
            if demand.key in allocation.refused
        ),
        default=0,
    )


def _other_orders(demands: Sequence[CpuDemand], allocation: Allocation, most: int) -> list[tuple[str, ...]]:
    """Orders with the refused demands after those of certain or single nodes; after those of certain nodes; first."""
    refused = tuple(allocation.refused)
    others = [
        demand
        for demand in demands
        if demand.key not in allocation.refused and allocation.cpus.get(demand.key) != demand.held
    ]
    if not refused or not others or sum(demand.count for demand in demands) > most:
        return []  # with too few CPUs in all, another order would refuse other demands
    others.sort(key=lambda demand: (not demand.nodes, not demand.numa_exclusive, -demand.count, demand.key))
    decided = tuple(demand.key for demand in others if demand.nodes)
    near = tuple(demand.key for demand in others if demand.nodes or demand.numa_binding)
    return list(dict.fromkeys(((*near, *refused), (*decided, *refused), refused)))


def _owned(demands: Sequence[CpuDemand]) -> CpuSet:
    return CpuSet.union(demand.held or demand.explicit or EMPTY for demand in demands)
