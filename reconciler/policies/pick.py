"""Which CPUs BE work gets, once it is known how many: the fewest change hands, and no pinned pod gets a BE neighbour.

A v1 ``cpuset.cpus`` write costs time in proportion to all cpusets of the machine, and a moved task loses its cache,
so what is held stays held. Two rules stand above that: a CPU that is no candidate is given back at once, and a thread
whose sibling is dedicated or reserved goes to BE work only when no other is left.

Source: Koordinator takes sibling pairs round-robin over sockets and starts from nothing at each step, Katalyst counts
from the highest ids down. We keep pairs and high ids (interrupts and host work gather on the low ones).
"""

from cgroupfs.cpuset import EMPTY, CpuSet
from state.topology import Topology


def choose(count: int, candidates: CpuSet, held: CpuSet, taken: CpuSet, topology: Topology) -> CpuSet:
    """``count`` of ``candidates`` (all, if there are fewer): those ``held`` now as far as possible.

    ``taken`` are the CPUs of others; threads of the same core as one of them are given last.
    """
    if count >= len(candidates):
        return candidates
    last = neighbours(candidates, taken, topology)
    first = candidates - last
    chosen = _fill(min(count, len(first)), first, held, topology)
    if len(chosen) == count:
        return chosen
    return chosen | _fill(count - len(chosen), last, held, topology)


def neighbours(cpus: CpuSet, taken: CpuSet, topology: Topology) -> CpuSet:
    """Those of ``cpus`` that share a core with one of ``taken``."""
    near = EMPTY
    for core in topology.cores():
        if core & taken:
            near |= core
    return cpus & near


def _fill(count: int, pool: CpuSet, held: CpuSet, topology: Topology) -> CpuSet:
    kept = held & pool
    if len(kept) > count:
        return _release(kept, len(kept) - count, topology)
    missing = count - len(kept)
    free, begun = pool - kept, kept
    # A core that BE work already has a thread of comes first: the other thread is of little use to anyone else.
    for core in sorted(topology.cores(), key=lambda core: (not core & begun, -min(core))):
        for cpu in sorted(core & free, reverse=True):
            if not missing:
                return kept
            kept |= CpuSet((cpu,))
            missing -= 1
    return kept


def _release(kept: CpuSet, count: int, topology: Topology) -> CpuSet:
    """Give back lone threads first, then whole cores from the lowest: online work gets cores, not halves."""
    released = EMPTY
    for core in sorted(topology.cores(), key=lambda core: len(core & kept)):
        for cpu in core & kept:
            if len(released) == count:
                return kept - released
            released |= CpuSet((cpu,))
    return kept - released
