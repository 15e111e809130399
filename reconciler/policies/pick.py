"""Which CPUs BE work gets, once it is known how many: the fewest change hands, and no pinned pod gets a BE neighbour.

A v1 ``cpuset.cpus`` write costs time in proportion to all cpusets of the machine, and a moved task loses its cache,
so what is held stays held. Two rules stand above that: a CPU that is no candidate is given back at once, and a thread
whose sibling is dedicated or reserved goes to BE work only when no other is left.

Where a machine has efficiency cores they are taken before the others and given back after them; a site's plug-ins can
order the CPUs otherwise (`reconciler.placement.take.preferred`).

Source: Koordinator takes sibling pairs round-robin over sockets and starts from nothing at each step, Katalyst counts
from the highest ids down. We keep pairs and high ids (interrupts and host work gather on the low ones).
"""

from collections.abc import Sequence

from cgroupfs.cpuset import EMPTY, CpuSet
from state.topology import CpuKind, Topology


def choose(
    count: int,
    candidates: CpuSet,
    held: CpuSet,
    taken: CpuSet,
    topology: Topology,
    *,
    tiers: Sequence[CpuSet] | None = None,
) -> CpuSet:
    """``count`` of ``candidates`` (all, if there are fewer): those ``held`` now as far as possible.

    ``taken`` are the CPUs of others; threads of the same core as one of them are given last. ``tiers`` are disjoint
    sets, the best first; candidates in none of them come last. Left out: efficiency cores, then the others.
    """
    if count >= len(candidates):
        return candidates
    if tiers is None:
        tiers = [cpus for cpus in (topology.kind_cpus(CpuKind.EFFICIENCY),) if cpus]
    rest = candidates
    for tier in tiers:
        rest -= tier
    ranked = [*tiers, rest]
    last = neighbours(candidates, taken, topology)
    first = candidates - last
    chosen = _fill(min(count, len(first)), first, held, topology, ranked)
    if len(chosen) == count:
        return chosen
    return chosen | _fill(count - len(chosen), last, held, topology, ranked)


def neighbours(cpus: CpuSet, taken: CpuSet, topology: Topology) -> CpuSet:
    """Those of ``cpus`` that share a core with one of ``taken``."""
    near = EMPTY
    for core in topology.cores():
        if core & taken:
            near |= core
    return cpus & near


def _fill(count: int, pool: CpuSet, held: CpuSet, topology: Topology, tiers: Sequence[CpuSet]) -> CpuSet:
    kept = held & pool
    if len(kept) > count:
        return _release(kept, len(kept) - count, topology, tiers)
    missing = count - len(kept)
    free, begun = pool - kept, kept
    # A core that BE work already has a thread of comes first: the other thread is of little use to anyone else.
    order = sorted(topology.cores(), key=lambda core: (not core & begun, -min(core)))
    for tier in tiers:
        for core in order:
            for cpu in sorted(core & free & tier, reverse=True):
                if not missing:
                    return kept
                kept |= CpuSet((cpu,))
                missing -= 1
    return kept


def _release(kept: CpuSet, count: int, topology: Topology, tiers: Sequence[CpuSet]) -> CpuSet:
    """Give back lone threads first, then whole cores from the lowest: online work gets cores, not halves.

    The last tier goes first.
    """
    released = EMPTY
    order = sorted(topology.cores(), key=lambda core: len(core & kept))
    for tier in reversed(tiers):
        for core in order:
            for cpu in core & kept & tier:
                if len(released) == count:
                    return kept - released
                released |= CpuSet((cpu,))
    return kept - released
