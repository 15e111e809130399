"""What each NUMA node has of a resource, and the hints that follow from a request. Pure.

A set of nodes is a hint when what is free on them covers the request; it is preferred when it has no more nodes than
the request would need on an empty machine (the kubelet's rule in its CPU, memory and device managers). On up to
`hints.EXACT` nodes all sets are tried, as the kubelet does; on more, only sets that are likely choices (`_likely`).

Source: the kubelet's generateCPUTopologyHints, calculateHints (memory) and generateDeviceTopologyHints.
"""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from typing import final

from msgspec import Struct

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.placement.demand import CpuDemand
from reconciler.placement.hints import CPU, EXACT, MEMORY, ResourceHints, TopologyHint
from state.topology import Topology


class ResourceCapacity(Struct, frozen=True, kw_only=True):
    """One resource on the NUMA nodes. Units: any, the same in ``request``, ``free`` and ``total``.

    ``total`` names every node that has the resource, with the amount on an empty machine, ``free`` the amount available
    now (a node left out: nothing). ``align_socket``: prefer as few sockets instead of as few nodes (the CPU manager's
    option). ``pack``: score nodes higher the less is left on them.
    """

    name: str
    request: int
    total: Mapping[int, int]
    free: Mapping[int, int]
    align_socket: bool = False
    pack: bool = False

    @property
    def nodes(self) -> CpuSet:
        return CpuSet(self.total)

    @property
    def enough(self) -> bool:
        """Whether the request can be had at all."""
        return sum(self.free.values()) >= self.request

    def has(self, mask: int) -> int:
        """What is free on a set of nodes."""
        return sum(amount for node, amount in self.free.items() if mask >> node & 1)

    def fits(self, mask: int) -> bool:
        """Whether the request can be had from exactly these nodes."""
        return self.has(mask) >= self.request and self._offers(mask)

    def fitting(self, masks: Iterable[int], amounts: Iterable[int]) -> list[tuple[int, int]]:
        """Of these sets of nodes, with what is free on each, those that `fits` is true of: fewer nodes first."""
        request = self.request
        pairs = zip(masks, amounts, strict=True)
        found = [(mask, amount) for mask, amount in pairs if amount >= request and self._offers(mask)]
        return sorted(found, key=lambda pair: (pair[0].bit_count(), pair[0]))

    def emptiest(self) -> list[int]:
        """Its nodes, the node with the most free first."""
        return sorted(self.total, key=lambda node: (-self.free.get(node, 0), node))

    def smallest(self) -> int:
        """How many nodes the request would need on an empty machine; all of them when even that is too little."""
        missing, count = self.request, 0
        for amount in sorted(self.total.values(), reverse=True):
            if missing <= 0:
                break
            missing -= amount
            count += 1
        return max(1, count)

    def _offers(self, mask: int) -> bool:
        """Whether all of these nodes have the resource."""
        return all(node in self.total for node in CpuSet.from_mask(mask))

    def score(self, amount: int) -> int:
        """Of nodes with so much of it."""
        return self.request - amount if self.pack else 0


def fixed(name: str, nodes: CpuSet, every: Iterable[int]) -> ResourceCapacity:
    """A resource that is where it is (a device in use, memory already promised): these nodes and no fewer."""
    there = dict.fromkeys(nodes, 1)
    return ResourceCapacity(
        name=name, request=len(nodes), total={node: there.get(node, 0) for node in every}, free=there
    )


def fewest(supplies: Sequence[ResourceCapacity]) -> tuple[ResourceHints, ...] | None:
    """Only the preferred hints, where all resources have one in common; None where more than those is needed.

    A merge that is preferred by all needs no other hint, and is what is found nearly always: 8 sets of one node instead
    of 255. The merge of these hints is the merge of all hints (but for ``numeric``, which nests). Only sets of as many
    nodes as every resource needs at least can be preferred by all.
    """
    asking = [supply for supply in supplies if supply.request > 0]
    sizes = {supply.smallest() for supply in asking}
    nodes = sorted({node for supply in asking for node in supply.total})
    if len(sizes) != 1 or any(supply.align_socket or not supply.enough for supply in asking):
        return None
    size = sizes.pop()
    if size > 1 and len(nodes) > EXACT:
        return None
    every = (sum(1 << node for node in chosen) for chosen in combinations(nodes, size))
    masks = [mask for mask in every if all(supply.fits(mask) for supply in asking)]
    if not masks:
        return None
    sets = [CpuSet.from_mask(mask) for mask in masks]
    return tuple(
        ResourceHints(
            name=supply.name, hints=tuple(_hint(supply, nodes) for nodes in sets) if supply.request > 0 else None
        )
        for supply in supplies
    )


def _hint(supply: ResourceCapacity, nodes: CpuSet) -> TopologyHint:
    return TopologyHint(nodes=nodes, preferred=True, score=supply.score(supply.has(nodes.mask)))


def hints_of(supplies: Sequence[ResourceCapacity], topology: Topology) -> tuple[ResourceHints, ...]:
    """Every resource's hints over the same sets of nodes. A resource without a request has no preference."""
    asking = [supply for supply in supplies if supply.request > 0]
    nodes = sorted({node for supply in asking for node in supply.total})
    exact = len(nodes) <= EXACT
    masks: list[int] = []
    if any(supply.enough for supply in asking):
        masks = _every(nodes) if exact else _likely(nodes, asking, topology)
    hints = []
    for supply in supplies:
        if supply.request <= 0:
            hints.append(ResourceHints(name=supply.name))
            continue
        if not supply.enough:
            hints.append(ResourceHints(name=supply.name, hints=()))
            continue
        smallest = supply.smallest()
        fitting = tuple(
            TopologyHint(
                nodes=CpuSet.from_mask(mask),
                preferred=_preferred(supply, mask, smallest, topology),
                score=supply.score(amount),
            )
            for mask, amount in supply.fitting(masks, _amounts(supply, nodes) if exact else map(supply.has, masks))
        )
        hints.append(ResourceHints(name=supply.name, hints=fitting))
    return tuple(hints)


def _preferred(supply: ResourceCapacity, mask: int, smallest: int, topology: Topology) -> bool:
    if not supply.align_socket:
        return mask.bit_count() == smallest
    sockets = topology.sockets()
    used = {socket for node in CpuSet.from_mask(mask) for socket in topology.node_sockets(node)}
    per_socket = max(1, len(topology.nodes()) // max(1, len(sockets)))
    return len(used) == -(-smallest // per_socket)


def _every(nodes: Sequence[int]) -> list[int]:
    """All sets of the nodes but the empty one."""
    masks = [0]
    for node in nodes:
        masks += [mask | 1 << node for mask in masks]
    return masks[1:]


def _amounts(supply: ResourceCapacity, nodes: Sequence[int]) -> list[int]:
    """What is free on each set of `_every`, by one addition for each instead of one for each of its nodes."""
    amounts = [0]
    for node in nodes:
        more = supply.free.get(node, 0)
        amounts += [amount + more for amount in amounts]
    return amounts[1:]


def _likely(nodes: Sequence[int], supplies: Sequence[ResourceCapacity], topology: Topology) -> list[int]:
    """Sets that are likely choices, at most n x (2k + 3) + k + 1 of n nodes and k resources.

    From every node outwards, the nearest first (and again the emptiest first), the first set that is enough for each
    resource and the first that is enough for all; the nearest partner with which it is enough for all; and for each
    resource separately its emptiest nodes. All resources get hints of the same sets. What one or two nodes can do
    together is found always; of wider sets not every one is seen, and what is missed is a narrower set, never
    that there is none.
    """
    room = {node: _room(node, supplies) for node in nodes}
    masks: set[int] = {1 << node for node in nodes}
    # A node without any of the requested resource only makes a set wider.
    useful = [node for node in nodes if room[node]]
    for seed in useful:
        near = _distances(topology, seed, useful)
        by_distance = sorted(useful, key=lambda node: (node != seed, near[node], -room[node], node))
        by_room = sorted(useful, key=lambda node: (node != seed, -room[node], near[node], node))
        _grow(by_distance, supplies, masks)
        _grow(by_room, supplies, masks)
        _pair(by_distance, supplies, masks)
    for supply in supplies:
        _grow(supply.emptiest(), [supply], masks)
    masks.add(CpuSet(nodes).mask)
    return sorted(masks, key=lambda mask: (mask.bit_count(), mask))


def _grow(order: Iterable[int], supplies: Sequence[ResourceCapacity], masks: set[int]) -> None:
    """Add nodes in order until every resource has enough; keep the set whenever it is enough for one more."""
    missing = {supply.name: supply.request for supply in supplies}
    mask = 0
    for node in order:
        mask |= 1 << node
        enough = False
        for supply in supplies:
            if missing[supply.name] > 0:
                missing[supply.name] -= supply.free.get(node, 0)
                enough = enough or missing[supply.name] <= 0
        if enough:
            masks.add(mask)
        if all(amount <= 0 for amount in missing.values()):
            break


def _pair(order: Sequence[int], supplies: Sequence[ResourceCapacity], masks: set[int]) -> None:
    """Add the first node of the order with the first other node that makes it enough for all."""
    seed, *others = order
    for other in others:
        if all(supply.free.get(seed, 0) + supply.free.get(other, 0) >= supply.request for supply in supplies):
            masks.add(1 << seed | 1 << other)
            break


def _room(node: int, supplies: Iterable[ResourceCapacity]) -> Fraction:
    """How much of the request that is tightest on the node it covers, from 0 to 1; the rest's parts break ties.

    As fractions: equal nodes must be equal, whatever the units.
    """
    shares = [min(Fraction(1), Fraction(supply.free.get(node, 0), supply.request)) for supply in supplies]
    return min(shares, default=Fraction(0)) + sum(shares, Fraction(0)) / (len(shares) * 1000 or 1)


def _distances(topology: Topology, seed: int, nodes: Iterable[int]) -> dict[int, int]:
    known = {node.id for node in topology.numa}
    return {node: topology.distance(seed, node) if {seed, node} <= known else 0 for node in nodes}


class NumaFreeMemory(Struct, frozen=True, kw_only=True):
    """Memory by NUMA node in bytes: ``total`` and what can be had now, ``free``; ``requests`` by demand."""

    total: Mapping[int, int]
    free: Mapping[int, int]
    requests: Mapping[str, int] = {}


@final
class FreeCapacity:
    """The free CPUs and the memory by node, less what the demands hold and what newcomers took so far."""

    def __init__(
        self, demands: Sequence[CpuDemand], free: CpuSet, topology: Topology, memory: NumaFreeMemory | None
    ) -> None:
        held = CpuSet.union((cpu_demand.held or cpu_demand.explicit or EMPTY) & free for cpu_demand in demands)
        loose = free - held
        self._total = {node: len(topology.node_cpus(node)) for node in topology.nodes()}
        self._left = {node: len(topology.node_cpus(node) & loose) for node in self._total}
        self._threads = topology.threads
        # A machine has hundreds of cores: they are counted only where they matter.
        minds_cores = any(demand.full_cores or demand.spread_cores for demand in demands)
        cores = [core.mask for core in topology.cores()] if minds_cores else []
        masks = {node: topology.node_cpus(node).mask for node in self._total}
        self._cores = {node: sum(1 for core in cores if core & mask) for node, mask in masks.items()}
        self._begun = {node: sum(1 for core in cores if core & mask & loose.mask) for node, mask in masks.items()}
        whole = topology.whole_cores(loose).mask if cores else 0
        self._whole = {node: (mask & whole).bit_count() for node, mask in masks.items()}
        self._expected: dict[str, Mapping[int, int]] = {}
        self._memory = memory
        self._unused = dict(memory.free) if memory is not None else {}
        self._unpromised = dict(memory.total) if memory is not None else {}
        for demand in demands:
            cpus = (demand.held or demand.explicit or EMPTY) & free
            self._promise(demand, {node: len(topology.node_cpus(node) & cpus) for node in self._total})

    def expect(self, decided: Iterable[CpuDemand]) -> None:
        """New demands whose nodes are decided: the others leave them these CPUs, while there are enough elsewhere."""
        for demand in decided:
            missing, parts = demand.count, dict[int, int]()
            for node in demand.nodes:
                # A pod may name nodes that do not exist.
                parts[node] = min(missing, max(0, self._left.get(node, 0)))
                missing -= parts[node]
            self._expected[demand.key] = {node: count for node, count in parts.items() if count}

    def _unexpected(self, demand: CpuDemand) -> Mapping[int, int]:
        left = dict(self._left)
        for key, parts in self._expected.items():
            for node, count in parts.items() if key != demand.key else ():
                left[node] -= count
        return left

    def cpus(self, demand: CpuDemand, barred: CpuSet) -> ResourceCapacity:
        """The CPUs, or the cores where only whole ones or single threads of them count; none on ``barred`` nodes."""
        chosen = self._cpus(demand, barred, self._unexpected(demand)) if self._expected else None
        return chosen if chosen is not None and chosen.enough else self._cpus(demand, barred, self._left)

    def _cpus(self, demand: CpuDemand, barred: CpuSet, left: Mapping[int, int]) -> ResourceCapacity:
        total, request = self._total, demand.count
        # The kubelet counts CPUs whatever its policy's options, and then finds a node without whole cores.
        if demand.full_cores:
            left = {node: min(free, self._whole[node]) for node, free in left.items()}
            request = -(-request // self._threads) * self._threads
        elif demand.spread_cores and demand.strict_cores:
            total, left = self._cores, {node: min(free, self._begun[node]) for node, free in left.items()}
        return ResourceCapacity(
            name=CPU,
            request=request,
            total=total,
            free={node: 0 if node in barred else max(0, free) for node, free in left.items()},
            align_socket=demand.align_socket,
            # The rest of a node of its own is lost to all other demands.
            pack=demand.numa_exclusive,
        )

    def memory(self, demand: CpuDemand) -> list[ResourceCapacity]:
        """Its memory, where the nodes' memory and its request are known."""
        if self._memory is None or not (request := self._memory.requests.get(demand.key, 0)):
            return []
        # Free now, and not promised to existing demands: one that has just started has not touched its memory yet.
        free = {node: max(0, min(amount, self._unpromised[node])) for node, amount in self._unused.items()}
        return [ResourceCapacity(name=MEMORY, request=request, total=self._memory.total, free=free)]

    def reserve(self, demand: CpuDemand, nodes: Iterable[int]) -> None:
        """The demand's CPUs and memory come from these nodes, as much as possible from the first."""
        self._expected.pop(demand.key, None)
        missing, taken = demand.count, dict.fromkeys(nodes, 0)
        # First what no other new demand is expected to need.
        for left in (self._unexpected(demand), self._left):
            for node, count in taken.items():
                taken[node] += min(missing, max(0, left[node] - count))
                missing -= taken[node] - count
        for node, count in taken.items():
            self._left[node] -= count
            # Which CPUs it takes is not known yet: threads of as few cores as possible are assumed.
            whole = -(-count // self._threads)
            self._whole[node] -= whole * self._threads
            self._begun[node] -= count if demand.spread_cores else whole
        for node, amount in self._promise(demand, taken).items():
            self._unused[node] -= amount

    def _promise(self, demand: CpuDemand, cpus: Mapping[int, int]) -> Mapping[int, int]:
        """The demand's memory in the proportion of its CPUs, which it is near to."""
        request = self._memory.requests.get(demand.key, 0) if self._memory is not None else 0
        count = sum(cpus.values())
        if not request or not count:
            return {}
        parts = {node: request * number // count for node, number in cpus.items() if node in self._unpromised}
        for node, amount in parts.items():
            self._unpromised[node] -= amount
        return parts
