"""Chooses each online pool's CPUs, given their number: few change pools, cores stay whole, pools compact.

The objective: CPUs moved first (a v1 cpuset write costs time in proportion to all cpusets of the
machine, and a moved task loses its caches), then cores that a pool has only in part, then NUMA nodes and L3 caches that
pools are spread over. The first is always the minimum. The others are bin packing, solved by the usual heuristics: the
tightest place that holds all of it, the largest pools first.

1. Every pool keeps what it holds, or as much of it as its size allows: lone threads are released first, then CPUs in
   the nodes and caches where the pool has least.
2. Every pool that lacks CPUs takes free ones, those that may choose least first: where it is already, on whole cores,
   in one node and one cache if any holds all of it; away from nodes that others are bound to.
3. Only if a bound pool still lacks CPUs because another is in its node: `reconciler.placement.quotas` finds the pools
   that yield, with the fewest moves in all, and 1 and 2 are repeated within each part.

Source: Katalyst packs all pools from scratch in the order of their names at each change, so that the growth of one pool
moves every later one. Only the order, low CPUs first, is the same: BE work takes the high ones.
"""

from collections.abc import Mapping

from cgroupfs.cpuset import CpuSet
from reconciler.placement.quotas import Counts, QuotaCells, attainable, cells, complete
from reconciler.placement.region_packing import Masks, PackingMachine
from state.topology import Topology


def pack(
    sizes: Mapping[str, int],
    held: Mapping[str, CpuSet],
    free: CpuSet,
    topology: Topology,
    within: Mapping[str, CpuSet] | None = None,
) -> Mapping[str, CpuSet]:
    """Disjoint sets out of ``free`` of these sizes, by pool in the order of names.

    ``held``: the pools' present CPUs; CPUs that two of them hold count for the lower name, pools without a size release
    theirs, and nothing held is a packing from scratch. ``within``: the CPUs that a bound pool may have. If not all
    sizes are possible, the sum is as large as possible and shared by `quotas.attainable`: no pool gets nothing while
    another has two CPUs of which it could have one. `sizes.fit` cuts in proportion beforehand.
    """
    whole = (free & topology.online).mask
    names = sorted(sizes)
    bounds = within or {}
    allowed = {name: whole & bounds[name].mask if name in bounds else whole for name in names}
    wanted = {name: max(0, sizes[name]) for name in names}
    holds: Masks = {}
    left = whole
    for name in names:
        holds[name] = held[name].mask & allowed[name] & left if name in held else 0
        left &= ~holds[name]
    if all(holds[name].bit_count() == size for name, size in wanted.items()):
        return {name: CpuSet.from_mask(holds[name]) for name in names}
    machine = PackingMachine(topology, whole)
    parts = cells(whole, allowed)
    if any(wanted[name] > allowed[name].bit_count() for name in names) or sum(wanted.values()) > whole.bit_count():
        wanted = attainable(wanted, parts)
    given = machine.assign(wanted, holds, allowed)
    if any(mask.bit_count() < wanted[name] for name, mask in given.items()):
        counts = complete(wanted, holds, given, parts)
        if counts is None:
            wanted = attainable(wanted, parts)
            given = machine.assign(wanted, holds, allowed)
            counts = complete(wanted, holds, given, parts) or parts.numbers(given)
        given = _moved(counts, holds, given, parts, topology)
    return {name: CpuSet.from_mask(given[name]) for name in names}


def _moved(counts: Counts, holds: Masks, given: Masks, parts: QuotaCells, topology: Topology) -> Masks:
    """Bring the cells in which the numbers are not as ``counts`` has them to these numbers."""
    before = parts.numbers(given)
    numbers = dict(given)
    for at, cell in enumerate(parts.masks):
        if all(counts[name][at] == before[name][at] for name in counts):
            continue
        current = {name: row[at] for name, row in counts.items()}
        held = {name: mask & cell for name, mask in holds.items()}
        settled = PackingMachine(topology, cell).assign(current, held, dict.fromkeys(current, cell))
        for name, mask in settled.items():
            numbers[name] = numbers[name] & ~cell | mask
    return numbers
