"""What the online pools and BE work will need, while containers take CPUs of their own. Pure.

Containers with CPUs of their own are placed before the pools are packed, and never move. So they leave what the pools
will need: on each NUMA node the CPUs of the pools bound to it (`Floor.withheld`), and as a number the CPUs of the pools
that may be anywhere and of BE work (`Floor.most`). That is done in steps (`PoolFloors.step`), each for the containers
that did not get their CPUs in the one before. Before a pool is cut, `joint` looks for other nodes for all new claims.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, final

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.placement.demand import CpuDemand
from reconciler.placement.pool_members import DEFAULT, PoolMembers, base_of, members, owners_of, pool_on
from reconciler.placement.seats import CPU, NodeRivals, SeatRequest, cpus_of
from state.cpu import PoolTerms
from state.model import NodeView, Pools
from state.topology import Topology


class Floor(NamedTuple):
    """``withheld``: CPUs that are not to be owned; ``most``: so many CPUs may be owned in all."""

    withheld: CpuSet
    most: int


class PoolNeeds(NamedTuple):
    """CPUs by pool: of those bound to nodes, by these, and of all others together, BE work's own included.

    ``least``: one for each of the others.
    """

    bound: Mapping[tuple[int, ...], Mapping[str, int]]
    loose: int
    least: int = 1


def needs(found: PoolMembers, terms: PoolTerms) -> PoolNeeds:
    """What the pools will request: their pods' requests, or a size of their own where that is larger or fixed."""
    if not terms.own:
        return PoolNeeds({}, cpus_of(sum(pod.request_milli for pods in found.pods.values() for pod in pods)))
    bound: dict[tuple[int, ...], dict[str, int]] = {}
    loose, least = terms.leave, int(terms.leave > 0)
    small: dict[tuple[int, ...], list[tuple[int, str]]] = {}
    for key, pods in found.pods.items():
        milli = sum(pod.request_milli for pod in pods)
        if key != DEFAULT and milli < CPU and key not in terms.cpus:
            small.setdefault(found.nodes.get(key, ()), []).append((milli, key))
            continue
        cpus = max(terms.cpus.get(key, 0), cpus_of(milli))
        if key in found.nodes:
            bound.setdefault(found.nodes[key], {})[key] = cpus
        else:
            loose += cpus
            least += 1
    # Of less than a CPU: together what they request, rounded up. `reconciler.policies.shared` merges the rest.
    for nodes, pools in small.items():
        kept = sorted(pools)[-cpus_of(sum(milli for milli, _ in pools)) :]
        if nodes:
            bound.setdefault(nodes, {}).update((key, 1) for _, key in kept)
            loose += -(-sum(milli for milli, _ in set(pools).difference(kept)) // CPU)
        else:
            loose, least = loose + len(kept), least + len(kept)
    return PoolNeeds(bound, loose, least)


STEPS: Final = 4
CUT_POOLS: Final = 3
"""From this step on pools that may be anywhere are cut, and from the next one on bound pools, too."""
_CUT_BOUND: Final = 4


@final
class PoolFloors:
    """What demands leave to the online pools, and the nodes of the pods that are bound to one.

    ``seats``: pool by pod; empty where no demand is new. ``bound``: the same, then of the last plan. ``waiting``: pods
    that got their node here.
    ``avail``: CPUs that no demand holds. ``short``: some bound pool needs more of these than its nodes have.
    """

    def __init__(
        self,
        demands: Sequence[CpuDemand],
        free: CpuSet,
        view: NodeView,
        plans: tuple[Pools, Pools | None],
        *,
        keep: int,
        seats: Mapping[str, str] | None = None,
    ) -> None:
        """``free``: CPUs that the demands may have, their own included. ``plans``: this one so far, and the last one.

        ``keep``: CPUs that are never to be owned. ``seats``: pool by pod, for those that are to have this one.
        """
        pools, previous = plans
        self._keep, self._free, self._topology = keep, free, view.topology
        self._need = PoolNeeds({}, 0)
        self._held = previous.named if previous is not None else {}
        self._again = partial(PoolFloors, demands, free, view, plans, keep=keep)
        self._fixed: dict[int, dict[str, tuple[int, int]]] = {}
        self.seats: Mapping[str, str] = {}
        self.bound: Mapping[str, str] = {**(previous.bound if previous is not None else {}), **(seats or {})}
        self.waiting: Sequence[SeatRequest] = ()
        self.avail, self.short = free, False
        terms = pools.terms
        if terms is None or all(len(demand.held & free) >= demand.count for demand in demands):
            return  # nothing is to be decided: the pools' own policy follows the last plan
        owned = CpuSet.union((demand.held or demand.explicit or EMPTY) & free for demand in demands)
        self.avail = free - owned
        new = [demand for demand in demands if not demand.held & free and demand.explicit is None]
        owners = owners_of({**pools.dedicated, **{demand.key: demand.held & free for demand in demands}}, view)
        rivals = rivals_of(new, free - owned, view.topology)
        found = members(view.pods, free - owned, view.topology, self.bound, owners, rivals=rivals)
        self._need = needs(found, terms)
        if terms.own:
            self.seats = self.bound = found.bound
            self.waiting = found.seated
            self._fixed = _fixed(found, terms)
            self.short = any(
                sum(pools.values()) > len(self.avail & CpuSet.union(map(view.topology.node_cpus, nodes)))
                for nodes, pools in self._need.bound.items()
            )

    def fixed(self, node: int) -> Mapping[str, tuple[int, int]]:
        """The pools of one node without `waiting` pods: name without the node -> requests in thousandths, and CPUs."""
        return self._fixed.get(node, {})

    @property
    def loose(self) -> int:
        """CPUs that remain for all that is not bound to a single node."""
        several = sum(sum(pools.values()) for nodes, pools in self._need.bound.items() if len(nodes) > 1)
        return max(self._keep, self._need.loose) + several

    def seated(self, nodes: Mapping[str, int]) -> "PoolFloors":
        """The same with other nodes for the `waiting` pods, by uid."""
        return self._again(
            seats={pod.uid: pool_on(pod.pool, (nodes[pod.uid],)) for pod in self.waiting if pod.uid in nodes}
        )

    def step(self, number: int, owned: CpuSet) -> Floor | None:
        """Step 1 to 4 of what the pools keep; None after the last one. ``owned``: CPUs that have an owner.

        1. what all pools request, and on each node the CPUs that its pools have now;
        2. the same numbers, but the CPUs of bound pools are those that leave the most whole cores;
        3. one CPU for each pool that may be anywhere and for BE work: `shared` cuts these first, too;
        4. one CPU for each bound pool, too.

        The CPUs that are never to be owned (``keep``) remain in every step.
        """
        # Without needs (nothing is to be decided) every step leaves the same.
        if number > (STEPS if self._need.loose else 1):
            return None
        withheld = 0
        # Pools of one node first: those of several have a choice.
        for nodes, pools in sorted(self._need.bound.items(), key=lambda item: (len(item[0]), item[0])):
            avail = (CpuSet.union(map(self._topology.node_cpus, nodes)) & self._free - owned).mask & ~withheld
            want = min(sum(pools.values()) if number < _CUT_BOUND else len(pools), avail.bit_count())
            mine = 0
            for key in pools if number == 1 else ():
                mine |= self._held[key].mask & avail if key in self._held else 0
            if mine.bit_count() > want:
                mine = CpuSet.from_mask(mine).lowest(want).mask
            withheld |= mine | _lone_first(avail & ~mine, want - mine.bit_count(), self._topology)
        loose = self._need.loose if number < CUT_POOLS else self._need.least
        return Floor(CpuSet.from_mask(withheld), len(self._free) - withheld.bit_count() - max(self._keep, loose))


def _fixed(found: PoolMembers, terms: PoolTerms) -> dict[int, dict[str, tuple[int, int]]]:
    waiting = {request.uid for request in found.seated}
    fixed: dict[int, dict[str, tuple[int, int]]] = {}
    for key, nodes in found.nodes.items():
        pods = [pod for pod in found.pods[key] if pod.uid not in waiting]
        if pods and len(nodes) == 1:
            milli = sum(pod.request_milli for pod in pods)
            cpus = max(terms.cpus.get(key, 0), cpus_of(milli))
            fixed.setdefault(nodes[0], {})[base_of(key)] = milli, cpus
    return fixed


def rivals_of(demands: Sequence[CpuDemand], free: CpuSet, topology: Topology) -> NodeRivals:
    """What new demands will take of the nodes, for the choice of pods' nodes before them."""
    fixed: Counter[int] = Counter()
    near: list[int] = []
    for demand in demands:
        if len(demand.nodes) == 1:
            fixed[demand.nodes[0]] += demand.count
        elif demand.numa_binding and not demand.nodes:
            near.append(demand.count)
    cores: Counter[int] = Counter()
    threads = topology.threads
    if any(demand.full_cores for demand in demands):
        cores.update(topology.node_of(min(core)) for core in topology.cores() if len(core) == threads and core <= free)
    return NodeRivals(fixed, near, cores, threads)


def _lone_first(avail: int, count: int, topology: Topology) -> int:
    """So many of these CPUs: threads of cores that are not whole, then whole cores from the highest on."""
    taken = 0
    cores = [core.mask for core in topology.cores() if core.mask & avail] if count > 0 else []
    threads = topology.threads
    for core in sorted(cores, key=lambda core: ((core & avail).bit_count() == threads, -core)):
        part, left = core & avail, count - taken.bit_count()
        if left <= 0:
            break
        taken |= part if part.bit_count() <= left else CpuSet.from_mask(part).lowest(left).mask
    return taken
