"""One NUMA node for every new claim of a single node at once, so that all claims fit: a bounded search. Pure.

`floors`, `seats` and `binding` place one kind of claim after the other, each in its order of preference. On a nearly
full machine that may end with a container refused or a pool cut although everything would fit: mostly where a container
with a node of its own (`numa_exclusive`) takes one whose rest other containers need, while pods that are bound to a
node, which may use that rest, are elsewhere. Then this search looks for a node for all of them together.

The result is a proposal: the claims are placed by it with all other rules, and it counts only if nothing is cut then.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, final

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.placement.demand import CpuDemand
from reconciler.placement.floors import PoolFloors
from reconciler.placement.seats import cpus_of
from state.topology import Topology

STEPS: Final = 600
"""Tries of one search."""
CLAIMS: Final = 64
"""Of more claims at once, which is the start of an agent on a full node, no search is made."""
_CPU: Final = 1000


class JointClaim(NamedTuple):
    """A claim of one node. ``nodes``: those that it may have; ``milli``: its request in thousandths of a CPU.

    ``pool``: the pool that a bound pod joins on its node, without the node; empty for a container that is to own whole
    CPUs. ``alone``: no other container may own CPUs of its node. ``cores``: whole cores only.
    """

    key: str
    milli: int
    nodes: tuple[int, ...]
    pool: str = ""
    alone: bool = False
    cores: bool = False


class JointRest(NamedTuple):
    """What has no node of its own. ``owned``: CPUs of containers on any nodes, ``cores`` of them in whole cores.

    ``loose``: CPUs of pools that may be anywhere, and of BE work; ``threads`` of a core.
    """

    owned: int
    cores: int
    loose: int
    threads: int


class JointNode(NamedTuple):
    """A node: CPUs without an owner that no bound pool needs, and how many whole cores are free.

    ``pools``: by pool that is bound to it, the requests and the CPUs set aside for them. ``owners``: whether some
    container owns CPUs; ``closed``: whether no other may.
    """

    left: int
    cores: int
    pools: Mapping[str, tuple[int, int]] = {}
    owners: bool = False
    closed: bool = False


@final
class JointSearch:
    """One search, depth first. ``steps`` counts its tries.

    First what has no choice, then the containers with a node of their own, then the other claims of one node, the
    largest first. Those that may be on several nodes are not placed: whether they fit is a sum, and they choose last.
    """

    def __init__(self, nodes: Mapping[int, JointNode], claims: Sequence[JointClaim], rest: JointRest) -> None:
        """``nodes``: all that there are; ``claims``: each of one node."""
        self.steps = 0
        self._rest = rest
        self._nodes = dict(nodes)
        self._claims = sorted(claims, key=_fewest_choices)
        # Nodes that different claims may have are not alike.
        self._apart = {
            place: tuple(claim.key for claim in claims if place in claim.nodes and 1 < len(claim.nodes) < len(nodes))
            for place in nodes
        }

    def found(self) -> dict[str, int] | None:
        """The node of each claim, by key; None: they do not all fit, or too many tries."""
        if len(self._claims) > CLAIMS:
            return None
        owned = [(_cpus(claim), claim.cores) for claim in self._claims if not claim.pool]
        return self._place_from(
            0,
            self._rest.owned + sum(count for count, _ in owned),
            self._rest.cores + sum(count for count, cores in owned if cores),
        )

    def _place_from(self, number: int, owned: int, cores: int) -> dict[str, int] | None:
        """The nodes of the claims from this number on. ``owned``, ``cores``: as in `JointRest`, of these claims too."""
        if not self._possible(owned, cores):
            return None
        if number == len(self._claims):
            return {}
        claim = self._claims[number]
        count = 0 if claim.pool else _cpus(claim)
        tried: set[tuple[object, ...]] = set()
        for place in self._order(claim):
            before = self._nodes[place]
            # A node like one that was tried: as much free, as many whole cores, the same pools.
            alike = *before[:2], *before[3:], tuple(sorted(before.pools.items())), self._apart[place]
            if alike in tried:
                continue
            tried.add(alike)
            if self.steps >= STEPS:
                return None
            self.steps += 1
            self._nodes[place] = self._after(before, claim)
            rest = self._place_from(number + 1, owned - count, cores - count if claim.cores else cores)
            if rest is not None:
                return {claim.key: place, **rest}
            self._nodes[place] = before
        return None

    def _possible(self, owned: int, cores: int) -> bool:
        """Whether the sums allow so many more CPUs with owners, and in whole cores."""
        nodes = self._nodes.values()
        # A closed node has an owner of its own; the pools may use its rest.
        return (
            sum(node.left for node in nodes if not node.closed) >= owned
            and sum(node.cores for node in nodes if not node.closed) * self._rest.threads >= cores
            and sum(node.left for node in nodes) >= owned + self._rest.loose
        )

    def _order(self, claim: JointClaim) -> list[int]:
        """The nodes with room for a claim: first those that others may not own, then by free CPUs, fewest first."""
        fitting = [place for place in claim.nodes if place in self._nodes and self._fits(self._nodes[place], claim)]
        return sorted(fitting, key=lambda place: (not self._nodes[place].closed, self._nodes[place].left, place))

    def _fits(self, node: JointNode, claim: JointClaim) -> bool:
        if claim.pool:
            return _added_cpus(node, claim) <= node.left
        if node.closed or (claim.alone and node.owners):
            return False
        return _cpus(claim) <= (node.cores * self._rest.threads if claim.cores else node.left)

    def _after(self, node: JointNode, claim: JointClaim) -> JointNode:
        """The node with this claim on it: what needs no whole cores takes single threads first."""
        threads = self._rest.threads
        if not claim.pool:
            left = node.left - _cpus(claim)
            cores = node.cores - _cpus(claim) // threads if claim.cores else min(node.cores, left // threads)
            return node._replace(left=left, cores=cores, owners=True, closed=claim.alone)
        more = _added_cpus(node, claim)
        milli, cpus = node.pools.get(claim.pool, (0, 0))
        pools = {**node.pools, claim.pool: (milli + claim.milli, cpus + more)}
        left = node.left - more
        return node._replace(left=left, cores=min(node.cores, left // threads), pools=pools)


def _fewest_choices(claim: JointClaim) -> tuple[bool, bool, int, int, bool, str]:
    return len(claim.nodes) > 1, not claim.alone, len(claim.nodes), -claim.milli, not claim.pool, claim.key


def _cpus(claim: JointClaim) -> int:
    return -(-claim.milli // _CPU)


def _added_cpus(node: JointNode, claim: JointClaim) -> int:
    """The CPUs that a pod's request adds to those of its pool on this node."""
    milli, cpus = node.pools.get(claim.pool, (0, 0))
    return max(0, cpus_of(milli + claim.milli) - cpus)


class JointProposal(NamedTuple):
    """``floors`` with other nodes for bound pods; ``nodes`` of demands; ``order``: in which they are to choose."""

    floors: PoolFloors
    nodes: Mapping[str, int]
    order: tuple[str, ...]


def propose(
    demands: Sequence[CpuDemand],
    floors: PoolFloors,
    free: CpuSet,
    topology: Topology,
    possible: Callable[[CpuDemand], CpuSet],
) -> JointProposal | None:
    """Nodes for the new demands and the bound pods that wait for one; None: nothing was found.

    ``free``: CPUs that the demands may have, their own included. ``possible``: the nodes that a demand may have for its
    other resources.
    """
    held = {demand.key: (demand.held or demand.explicit or EMPTY) & free for demand in demands}
    new = [demand for demand in demands if not held[demand.key] and demand.explicit is None]
    widest = max(len(topology.node_cpus(node)) for node in topology.nodes())
    single = [demand for demand in new if demand.count <= widest and _of_one_node(demand)]
    spread = [demand for demand in new if demand.count > widest or not _of_one_node(demand)]
    if any(demand.numa_exclusive for demand in spread):
        return None  # a claim closes one node at most
    threads = topology.threads
    claims = [
        JointClaim(
            demand.key,
            _CPU * _rounded_cpus(demand, threads),
            demand.nodes or tuple(possible(demand)),
            alone=demand.numa_exclusive,
            cores=demand.full_cores,
        )
        for demand in single
    ]
    every = topology.nodes()
    claims += [JointClaim(pod.uid, pod.milli, tuple(every), pod.pool) for pod in floors.waiting]
    grown = sum(max(0, demand.count - len(held[demand.key])) for demand in demands) - sum(each.count for each in new)
    rest = JointRest(
        owned=grown + sum(_rounded_cpus(demand, threads) for demand in spread),
        cores=sum(_rounded_cpus(demand, threads) for demand in spread if demand.full_cores),
        loose=floors.loose,
        threads=threads,
    )
    owners = {demand.key: CpuSet(map(topology.node_of, held[demand.key])) for demand in demands if held[demand.key]}
    closed = CpuSet.union(owners.get(demand.key, EMPTY) for demand in demands if demand.numa_exclusive)
    nodes = _nodes(floors, topology, CpuSet.union(owners.values()), closed)
    found = JointSearch(nodes, claims, rest).found()
    if found is None:
        return None
    order = (
        *(claim.key for claim in sorted(claims, key=_fewest_choices) if not claim.pool),
        *(demand.key for demand in sorted(spread, key=_cores_first)),
    )
    return JointProposal(floors.seated(found), {demand.key: found[demand.key] for demand in single}, order)


def _nodes(floors: PoolFloors, topology: Topology, owners: CpuSet, closed: CpuSet) -> dict[int, JointNode]:
    threads = topology.threads
    whole = topology.whole_cores(floors.avail)
    nodes = {}
    for node in topology.nodes():
        pools, cpus = floors.fixed(node), topology.node_cpus(node)
        left = len(cpus & floors.avail) - sum(count for _, count in pools.values())
        nodes[node] = JointNode(left, min(len(cpus & whole), left) // threads, pools, node in owners, node in closed)
    return nodes


def _of_one_node(demand: CpuDemand) -> bool:
    return len(demand.nodes) == 1 or ((demand.numa_binding or demand.numa_exclusive) and not demand.nodes)


def _rounded_cpus(demand: CpuDemand, threads: int) -> int:
    """Its CPUs, in whole cores where it is to have such."""
    return -(-demand.count // threads) * threads if demand.full_cores else demand.count


def _cores_first(demand: CpuDemand) -> tuple[bool, int, str]:
    return not demand.full_cores, -demand.count, demand.key
