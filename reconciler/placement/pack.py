"""Chooses each online pool's CPUs, given their number: few change pools, cores remain whole, pools compact.

The objective: CPUs moved first (a move costs a cpuset write and caches), then cores that a pool has only in part, then
NUMA nodes and L3 caches that pools are spread over. The first is always the minimum. The others are bin packing,
solved by the usual heuristics: the tightest place that holds all of it, the largest pools first.

1. Every pool keeps what it holds, or as much of it as its size allows (`PackingMachine.assign`).
2. Every pool that lacks CPUs takes free ones, those that may choose least first.
3. Only if a bound pool still lacks CPUs because another is in its node: `complete` finds the pools that yield,
   with the fewest moves in all, and 1 and 2 are repeated within each part.

Source: Katalyst packs all pools from scratch in the order of their names at each change, so that the growth of one pool
moves every later one. Only the order, low CPUs first, is the same: BE work takes the high ones.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from cgroupfs.cpuset import CpuSet
from state.topology import Topology

Masks = dict[str, int]
"""Sets of CPUs by pool."""


class _PackingRegion:
    """A part of one node under one L3 cache, and its cores (what is free of them); all as masks of free CPUs."""

    __slots__ = ("cores", "mask", "node", "socket")

    def __init__(self, mask: int, node: int, socket: int) -> None:
        self.mask = mask
        self.node = node
        self.socket = socket
        self.cores: list[int] = []


class _PackingOption(NamedTuple):
    """A place to take CPUs from: how many, how many of them without breaking a core; of ``rank`` less is better."""

    at: int
    cpus: int
    unbroken: int
    rank: tuple[bool, bool, bool]


class PackingMachine:
    """The free CPUs by node, cache and core."""

    def __init__(self, topology: Topology, free: int) -> None:
        self.topology = topology
        # Masks and not `CpuSet`: a packing of a thousand CPUs is some ten thousand operations on sets.
        self.free = free
        self.regions: list[_PackingRegion] = []
        self.threads = 1
        by_place: dict[tuple[int, int], _PackingRegion] = {}
        region = _PackingRegion(0, 0, 0)  # of no CPU, until the first one is looked up
        for core in topology.cores():
            rest = core.mask & free
            if not rest:
                continue
            self.threads = max(self.threads, rest.bit_count())
            while rest:
                # Neighbours in the list of cores are neighbours on the machine, most of the time.
                if not rest & region.mask:
                    region = self._region_of((rest & -rest).bit_length() - 1, by_place)
                region.cores.append(rest & region.mask)
                rest &= ~region.mask

    def _region_of(self, cpu: int, by_place: dict[tuple[int, int], _PackingRegion]) -> _PackingRegion:
        item = self.topology.cpu(cpu)
        place = item.node, item.l3
        if place not in by_place:
            mask = self.topology.node_cpus(item.node).mask & self.topology.l3_domains()[item.l3].mask & self.free
            by_place[place] = _PackingRegion(mask, item.node, item.socket)
            self.regions.append(by_place[place])
        return by_place[place]

    def assign(self, wanted: Mapping[str, int], holds: Masks, allowed: Masks) -> Masks:
        """The sets by pool; a bound pool may lack CPUs afterwards, any other only where there are too few in all."""
        lacking = {name: size - holds[name].bit_count() for name, size in wanted.items()}
        growing = 0  # CPUs of pools that take more: threads beside them are released first
        for name, missing in lacking.items():
            if missing > 0:
                growing |= holds[name]
        assigned: Masks = {}
        free = self.free
        for name, missing in lacking.items():
            assigned[name] = holds[name] if missing >= 0 else self._shrunk(holds[name], -missing, growing)
            free &= ~assigned[name]
        confined = 0  # CPUs that bound pools may have: the others take them last
        for mask in allowed.values():
            if mask != self.free:
                confined |= mask
        takers = [name for name, missing in lacking.items() if missing > 0]
        for name in sorted(takers, key=lambda name: (allowed[name].bit_count(), -lacking[name], name)):
            took = self._taken(assigned[name], lacking[name], free & allowed[name], confined)
            assigned[name] |= took
            free &= ~took
        return assigned

    def _shrunk(self, own: int, excess: int, growing: int) -> int:
        """Without ``excess`` CPUs: lone threads first, beside a pool that grows before all; then whole cores."""
        by_node: dict[int, int] = {}
        for region in self.regions:
            by_node[region.node] = by_node.get(region.node, 0) + (region.mask & own).bit_count()
        lone: list[tuple[int, int]] = []
        full: list[tuple[int, int]] = []
        # From the nodes and caches where the pool has least; of equal ones the highest.
        regions = [(by_node[region.node], (region.mask & own).bit_count(), region) for region in self.regions[::-1]]
        for _, _, region in sorted(regions, key=lambda row: row[:2]):
            for core in reversed(region.cores):
                if mine := core & own:
                    (full if mine == core else lone).append((mine, core))
        lone.sort(key=lambda pair: not pair[1] & growing)
        singles = sum(mine.bit_count() for mine, _ in lone)
        first = min(singles, excess)
        over = (excess - first) % self.threads
        if over and first >= self.threads - over:
            # The rest is then whole cores, and as many lone threads remain as are needed for that.
            first -= self.threads - over
        released = _first_cpus((mine for mine, _ in lone), first, highest=True)
        for mine, _ in full:
            if mine.bit_count() <= excess - released.bit_count():
                released |= mine
        rest = excess - released.bit_count()
        return own & ~(released | _first_cpus((mine & ~released for mine, _ in (*lone, *full)), rest, highest=True))

    def _taken(self, own: int, need: int, usable: int, confined: int) -> int:
        """``need`` of the ``usable`` CPUs (all, if there are fewer) for a pool that has ``own``."""
        regions = [region for region in self.regions if region.mask & usable]
        unbroken = [_unbroken(region, own, usable) for region in regions]
        near = {region.socket for region in self.regions if region.mask & own}
        by_node: dict[int, list[int]] = {}
        for at, region in enumerate(regions):
            by_node.setdefault(region.node, []).append(at)
        nodes = []
        for node, members in by_node.items():
            mask = 0
            for at in members:
                mask |= regions[at].mask
            # This test needs the whole node, also the parts without a free CPU.
            home = any(region.mask & own for region in self.regions if region.node == node)
            # Where it is already; away from nodes that others are bound to; in a socket where it is.
            rank = (not home, bool(mask & confined), regions[members[0]].socket not in near)
            nodes.append(_PackingOption(node, (mask & usable).bit_count(), sum(unbroken[at] for at in members), rank))
        took = 0
        for node, amount in _divided(need, nodes, self.threads):
            options = [
                _PackingOption(
                    at,
                    (regions[at].mask & usable).bit_count(),
                    unbroken[at],
                    (not regions[at].mask & own, bool(regions[at].mask & confined), False),
                )
                for at in by_node[node]
            ]
            for at, count in _divided(amount, options, self.threads):
                took |= _picked(regions[at], count, own, usable)
        return took


def _unbroken(region: _PackingRegion, own: int, usable: int) -> int:
    """How many usable CPUs make up whole cores, alone or with what the pool has already."""
    mine = own | usable
    return sum((core & usable).bit_count() for core in region.cores if core & usable and not core & ~mine)


def _divided(need: int, options: Sequence[_PackingOption], threads: int) -> list[tuple[int, int]]:
    """From which places, and how many from each: a place that holds all, else whole cores of the best ones first."""
    open_ones = list(options)
    pairs: list[tuple[int, int]] = []
    while need and open_ones:
        cores = need - need % threads
        fitting = [option for option in open_ones if option.cpus >= need and option.unbroken >= cores]
        if fitting:
            best = min(fitting, key=lambda option: (option.rank, option.cpus, option.at))
            pairs.append((best.at, need))
            break
        whole = [option for option in open_ones if option.unbroken]
        if whole:
            best = min(whole, key=lambda option: (option.rank, -option.unbroken, option.at))
            amount = min(best.unbroken, need)
            amount -= amount % threads if amount >= threads else 0
        else:
            best = min(open_ones, key=lambda option: (option.rank, -option.cpus, option.at))
            amount = min(best.cpus, need)
        need -= amount
        pairs.append((best.at, amount))
        open_ones.remove(best)
        if amount < best.cpus:
            # The rest of this place is one where the pool is now.
            rank = (False, *best.rank[1:])
            open_ones.append(_PackingOption(best.at, best.cpus - amount, max(0, best.unbroken - amount), rank))
    totals: dict[int, int] = {}
    for at, amount in pairs:
        totals[at] = totals.get(at, 0) + amount
    return list(totals.items())


def _picked(region: _PackingRegion, need: int, own: int, usable: int) -> int:
    """That many CPUs of the region: what completes the pool's cores, whole cores, then threads of broken ones."""
    completing: list[int] = []
    whole: list[int] = []
    begun: list[int] = []
    broken: list[int] = []
    for core in region.cores:
        part = core & usable
        if not part:
            continue
        if core & own:
            (begun if core & ~(own | usable) else completing).append(part)
        else:
            (whole if part == core else broken).append(part)
    # A core of which only one thread is free is whole too, but it is for the odd CPU.
    whole.sort(key=int.bit_count, reverse=True)
    took = 0
    for part in (*completing, *whole):
        if took.bit_count() + part.bit_count() <= need:
            took |= part
    rest = need - took.bit_count()
    return took | _first_cpus((part & ~took for part in (*begun, *completing, *broken, *whole)), rest) if rest else took


def _first_cpus(parts: Iterable[int], count: int, *, highest: bool = False) -> int:
    """The first ``count`` CPUs of these masks, the lowest or the highest of each first."""
    number = 0
    for part in parts:
        rest = part
        while rest and count:
            item = 1 << (rest.bit_length() - 1) if highest else rest & -rest
            number |= item
            rest ^= item
            count -= 1
        if not count:
            break
    return number


_FAR: Final = 1 << 30

Counts = dict[str, list[int]]
"""CPUs by pool and cell."""


class QuotaCells(NamedTuple):
    """The parts of the machine as masks, and by pool the numbers of those in which it may have CPUs."""

    masks: Sequence[int]
    open_to: Mapping[str, Sequence[int]]

    def numbers(self, owned: Mapping[str, int]) -> Counts:
        """How many CPUs of each cell the pools have; ``owned`` are masks."""
        return {name: [(mask & cell).bit_count() for cell in self.masks] for name, mask in owned.items()}


def cells(free: int, allowed: Mapping[str, int]) -> QuotaCells:
    """Cut ``free`` so that each pool may use a cell completely or not at all."""
    masks = [free]
    for bound in dict.fromkeys(allowed.values()):
        masks = [part for mask in masks for part in (mask & bound, mask & ~bound) if part]
    open_to = {name: [at for at, mask in enumerate(masks) if not mask & ~bound] for name, bound in allowed.items()}
    return QuotaCells(masks, open_to)


def complete(
    sizes: Mapping[str, int], held: Mapping[str, int], assigned: Mapping[str, int], parts: QuotaCells
) -> Counts | None:
    """Numbers by pool and cell that give every pool its size and move the fewest CPUs; None: the sizes are impossible.

    Within a cell all CPUs are equal but for their present pools, so numbers are enough: a pool that holds ``h`` CPUs of
    a cell and gets ``x`` of it keeps ``min(x, h)`` and moves the rest. That is a transport problem with costs of 0 and
    1, solved by cheapest augmenting paths (Ford and Fulkerson; Busacker and Gowen): a pool that lacks CPUs takes from a
    cell, another one there yields and takes from another cell, and so on.

    ``held`` and ``assigned`` are disjoint masks by pool: what it has now, and a part of the answer in which each pool
    kept as much as its size allows (the cheapest answer for the CPUs it gives out, and so a place to start from).
    """
    has, holds = parts.numbers(assigned), parts.numbers(held)
    room = [mask.bit_count() for mask in parts.masks]
    for row in has.values():
        for at, count in enumerate(row):
            room[at] -= count
    lacking = {name: missing for name, size in sizes.items() if (missing := size - sum(has[name])) > 0}
    while lacking:
        path = _cheapest(lacking, has, holds, room, parts)
        if path is None:
            return None
        amount = min(lacking[path[0][0]], room[path[-1][1]])
        # As many CPUs as the path's cost is right for: at what a pool held a step becomes a move, or ceases to be one.
        for step, (name, at) in enumerate(path):
            mine, before = has[name][at], holds[name][at]
            if mine < before:
                amount = min(amount, before - mine)
            if step + 1 < len(path):
                giver = path[step + 1][0]
                mine, before = has[giver][at], holds[giver][at]
                amount = min(amount, mine - before if mine > before else mine)
        for step, (name, at) in enumerate(path):
            has[name][at] += amount
            if step + 1 < len(path):
                has[path[step + 1][0]][at] -= amount
        room[path[-1][1]] -= amount
        first = path[0][0]
        lacking[first] -= amount
        if not lacking[first]:
            del lacking[first]
    return has


def attainable(sizes: Mapping[str, int], parts: QuotaCells) -> dict[str, int]:
    """The sizes that can be had together: as many CPUs as possible in all, and handed out in this order.

    First one CPU for each pool; then, CPU by CPU, the pools that are bound to a part of the machine, which can go
    nowhere else; then the others; each time to the pool that has the smallest part of its size so far. What one pool
    has been given, no later one takes away (what can be had together is a matroid, so this loses no CPU).
    """
    numbers = dict.fromkeys(sizes, 0)
    has: Counts = {name: [0] * len(parts.masks) for name in sizes}
    room = [mask.bit_count() for mask in parts.masks]
    bound = {name for name in sizes if len(parts.open_to[name]) < len(parts.masks)}
    turns = [
        ((number > 0, number > 0 and name not in bound, number / size), name not in bound, name)
        for name, size in sizes.items()
        for number in range(size)
    ]
    full: set[str] = set()
    for _, _, name in sorted(turns):
        if name in full:
            continue
        if _one_more(name, has, room, parts):
            numbers[name] += 1
        else:
            full.add(name)
    return numbers


def _cheapest(
    lacking: Mapping[str, int], has: Counts, holds: Counts, room: Sequence[int], parts: QuotaCells
) -> list[tuple[str, int]] | None:
    """The path of steps "pool takes in cell", each but the last from the next pool of the path. Bellman and Ford."""
    to_pool = dict.fromkeys(has, _FAR)
    to_pool.update(dict.fromkeys(lacking, 0))
    to_cell = [_FAR] * len(parts.masks)
    taker = [""] * len(parts.masks)
    through: dict[str, int] = {}
    changed = sorted(lacking)
    while changed:
        cells_changed = set()
        for name in changed:
            far, mine, before = to_pool[name], has[name], holds[name]
            for at in parts.open_to[name]:
                # Back to a CPU that it holds now is not a move, any other is one.
                cost = far if mine[at] < before[at] else far + 1
                if cost < to_cell[at]:
                    to_cell[at], taker[at] = cost, name
                    cells_changed.add(at)
        changed = []
        for name, mine in has.items():
            before, best = holds[name], to_pool[name]
            for at in cells_changed:
                # Giving up a CPU that it did not hold takes back a move.
                if mine[at] and (cost := to_cell[at] - (mine[at] > before[at])) < best:
                    best = cost
                    through[name] = at
            if best < to_pool[name]:
                to_pool[name] = best
                changed.append(name)
    at = min((at for at, left in enumerate(room) if left), key=lambda at: (to_cell[at], at), default=-1)
    if at < 0 or to_cell[at] >= _FAR:
        return None
    path = [(taker[at], at)]
    while path[-1][0] in through:
        at = through[path[-1][0]]
        path.append((taker[at], at))
    return path[::-1]


def _one_more(name: str, has: Counts, room: list[int], parts: QuotaCells) -> bool:
    """Give the pool one more CPU; the others keep their numbers but may have to change cells. False: it cannot be."""
    for at in parts.open_to[name]:
        if room[at]:
            room[at] -= 1
            has[name][at] += 1
            return True
    taker: dict[int, str] = {}
    through: dict[str, int] = {}
    queue = [name]
    for pool in queue:
        for at in parts.open_to[pool]:
            if at in taker:
                continue
            taker[at] = pool
            if room[at]:
                room[at] -= 1
                while True:
                    pool = taker[at]  # noqa: PLW2901 (the walk back ends the search)
                    has[pool][at] += 1
                    if pool == name:
                        return True
                    at = through[pool]  # noqa: PLW2901
                    has[pool][at] -= 1
            for other, row in has.items():
                if row[at] and other != name and other not in through:
                    through[other] = at
                    queue.append(other)
    return False


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
    sizes are possible, the sum is as large as possible and shared by `attainable`: no pool gets nothing while
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
    assigned = machine.assign(wanted, holds, allowed)
    if any(mask.bit_count() < wanted[name] for name, mask in assigned.items()):
        counts = complete(wanted, holds, assigned, parts)
        if counts is None:
            # Each size fits its bounds, and so does the sum, but not that of several pools with common bounds.
            wanted = attainable(wanted, parts)
            assigned = machine.assign(wanted, holds, allowed)
            counts = complete(wanted, holds, assigned, parts) or parts.numbers(assigned)
        assigned = _moved(counts, holds, assigned, parts, topology)
    return {name: CpuSet.from_mask(assigned[name]) for name in names}


def _moved(counts: Counts, holds: Masks, assigned: Masks, parts: QuotaCells, topology: Topology) -> Masks:
    """Bring the cells in which the numbers are not as ``counts`` has them to these numbers."""
    before = parts.numbers(assigned)
    numbers = dict(assigned)
    for at, cell in enumerate(parts.masks):
        if all(counts[name][at] == before[name][at] for name in counts):
            continue
        current = {name: row[at] for name, row in counts.items()}
        held = {name: mask & cell for name, mask in holds.items()}
        packed = PackingMachine(topology, cell).assign(current, held, dict.fromkeys(current, cell))
        for name, mask in packed.items():
            numbers[name] = numbers[name] & ~cell | mask
    return numbers
