"""Keep, give back and take CPUs on one machine: steps 1 and 2 of `reconciler.placement.pack`, on bit masks.

Masks and not `CpuSet`: a packing of a thousand CPUs is some ten thousand operations on sets. A core is here what is
free of it; regions are the parts of a node under one L3 cache.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from state.topology import Topology

Masks = dict[str, int]
"""Sets of CPUs by pool."""


class _PackingRegion:
    """A part of one node under one L3 cache, and its cores; all as masks of free CPUs."""

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
        self.free = free
        self.regions: list[_PackingRegion] = []
        self.threads = 1
        by_place: dict[tuple[int, int], _PackingRegion] = {}
        region = _PackingRegion(0, 0, 0)
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
        growing = 0
        for name, missing in lacking.items():
            if missing > 0:
                growing |= holds[name]
        given: Masks = {}
        free = self.free
        for name, missing in lacking.items():
            given[name] = holds[name] if missing >= 0 else self._shrunk(holds[name], -missing, growing)
            free &= ~given[name]
        confined = 0
        for mask in allowed.values():
            if mask != self.free:
                confined |= mask
        takers = [name for name, missing in lacking.items() if missing > 0]
        for name in sorted(takers, key=lambda name: (allowed[name].bit_count(), -lacking[name], name)):
            took = self._taken(given[name], lacking[name], free & allowed[name], confined)
            given[name] |= took
            free &= ~took
        return given

    def _shrunk(self, own: int, excess: int, growing: int) -> int:
        """Without ``excess`` CPUs: lone threads first, beside a pool that grows before all; then whole cores."""
        by_node: dict[int, int] = {}
        for region in self.regions:
            by_node[region.node] = by_node.get(region.node, 0) + (region.mask & own).bit_count()
        lone: list[tuple[int, int]] = []
        full: list[tuple[int, int]] = []
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
            # The rest is then whole cores, and as many lone threads stay as are needed for that.
            first -= self.threads - over
        released = _some((mine for mine, _ in lone), first, highest=True)
        for mine, _ in full:
            if mine.bit_count() <= excess - released.bit_count():
                released |= mine
        rest = excess - released.bit_count()
        return own & ~(released | _some((mine & ~released for mine, _ in (*lone, *full)), rest, highest=True))

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
    return took | _some((part & ~took for part in (*begun, *completing, *broken, *whole)), rest) if rest else took


def _some(parts: Iterable[int], count: int, *, highest: bool = False) -> int:
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
