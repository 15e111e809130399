"""What the online pools and BE work will need, while containers take CPUs of their own. Pure.

Containers with CPUs of their own are placed before the pools are packed, and never move. So they leave what the pools
will need: on each NUMA node the CPUs of the pools bound to it (`Floor.withheld`), and as a number the CPUs of the pools
that may be anywhere and of BE work (`Floor.most`). That is done in steps (`floor`), each for the containers that did
not get their CPUs in the one before:

1. what all pools request, and on each node the CPUs that its pools have now;
2. the same numbers, but the CPUs of bound pools are those that leave the most whole cores;
3. without the pools that may be anywhere and BE work: these are cut first;
4. with one CPU for each bound pool.

The CPUs that are never to be owned (``keep``) remain in every step. Under `shared` the pools are cut in the same order.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from cgroupfs.cpuset import CpuSet
from reconciler.placement.pool_members import PoolMembers, request_milli
from reconciler.placement.seats import cpus_of
from state.cpu import PoolTerms
from state.topology import Topology


class Floor(NamedTuple):
    """``withheld``: CPUs that are not to be owned; ``most``: so many CPUs may be owned in all."""

    withheld: CpuSet
    most: int


class PoolNeeds(NamedTuple):
    """CPUs by pool: of those bound to a node, by that node, and of all others together, BE work's own included."""

    bound: Mapping[int, Mapping[str, int]]
    loose: int


def needs(found: PoolMembers, terms: PoolTerms) -> PoolNeeds:
    """What the pools will request: their pods' requests, or a size of their own where that is larger or fixed."""
    if not terms.own:
        return PoolNeeds({}, cpus_of(sum(request_milli(pod) for pods in found.pods.values() for pod in pods)))
    bound: dict[int, dict[str, int]] = {}
    loose = terms.leave
    for key, pods in found.pods.items():
        cpus = max(terms.cpus.get(key, 0), cpus_of(sum(map(request_milli, pods))))
        if key in found.nodes:
            bound.setdefault(found.nodes[key], {})[key] = cpus
        else:
            loose += cpus
    return PoolNeeds(bound, loose)


def floor(
    step: int, need: PoolNeeds, free: CpuSet, owned: CpuSet, held: Mapping[str, CpuSet], topology: Topology, keep: int
) -> Floor:
    """One step of the module's text, from 1 on. ``owned``: the CPUs of ``free`` that have an owner already.

    ``held``: the pools' CPUs now, by pool.
    """
    withheld = 0
    for node, pools in sorted(need.bound.items()):
        avail = (topology.node_cpus(node) & free - owned).mask
        want = min(sum(pools.values()) if step < _CUT_BOUND else len(pools), avail.bit_count())
        mine = 0
        for key in pools if step == 1 else ():
            mine |= held[key].mask & avail if key in held else 0
        if mine.bit_count() > want:
            mine = CpuSet.from_mask(mine).lowest(want).mask
        withheld |= mine | _lone_first(avail & ~mine, want - mine.bit_count(), topology)
    loose = need.loose if step < _CUT_LOOSE else 0
    return Floor(CpuSet.from_mask(withheld), len(free) - withheld.bit_count() - max(keep, loose))


STEPS: Final = 4
_CUT_LOOSE: Final = 3
_CUT_BOUND: Final = 4


def _lone_first(avail: int, count: int, topology: Topology) -> int:
    """So many of these CPUs: threads of cores that are not whole, then whole cores from the highest on."""
    taken = 0
    cores = [core.mask for core in topology.cores() if core.mask & avail] if count > 0 else []
    threads = max((len(core) for core in topology.cores()), default=1)
    for core in sorted(cores, key=lambda core: ((core & avail).bit_count() == threads, -core)):
        part, left = core & avail, count - taken.bit_count()
        if left <= 0:
            break
        taken |= part if part.bit_count() <= left else CpuSet.from_mask(part).lowest(left).mask
    return taken
