"""Mask arithmetic of the choice of CPUs: fit a number into free CPUs, grow a set, shrink it, spread it over nodes.

One rule at every level (sockets, NUMA nodes, L3 domains, cores, the larger first): a domain whose free CPUs are exactly
the requested number, else the smallest that holds it, else the largest one whole and then the same for the rest. From
it follow whole sockets before nodes before L3 domains before cores before threads. Of equals, the one nearest to what
is taken already, else the lowest number.

Source: the kubelet's takeByTopologyNUMAPacked (whole units first, fullest first) and Katalyst's L3 rule, which is used
at all levels here. The kubelet searches *free whole* units only, so a request can straddle two half-free sockets
although one of them would hold it; exact and smallest-larger do not.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final, NamedTuple, final

from cgroupfs.cpuset import CpuSet
from state.topology import Topology

SOCKET: Final = "socket"
NODE: Final = "node"
L3: Final = "l3"


class CpuDomain(NamedTuple):
    """One socket, node, L3 domain or core.

    ``inner``: places of the next level's domains that it touches; ``outer``: the CPUs of the domains around it, its own
    where there are none.
    """

    mask: int
    inner: tuple[int, ...]
    outer: int


@final
class CpuAccumulator:
    """The masks of one topology."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.nodes: Mapping[int, int] = {node: topology.node_cpus(node).mask for node in topology.nodes()}
        self.sockets = tuple(cpus.mask for cpus in topology.sockets().values())
        self.cores = tuple(core.mask for core in topology.cores())
        self.threads = max((core.bit_count() for core in self.cores), default=1)
        levels = {
            SOCKET: self.sockets,
            NODE: tuple(self.nodes.values()),
            L3: tuple(cpus.mask for cpus in topology.l3_domains().values()),
        }
        # Fewer domains are larger ones: an interleaved node holds sockets, sub-NUMA clusters divide an L3 domain.
        self.starts: dict[str, int] = {}
        self._rows: list[tuple[int, ...]] = []
        for name in sorted(levels, key=lambda name: len(levels[name])):
            masks = levels[name]
            if not self._rows or set(masks) != set(self._rows[-1]):
                self._rows.append(masks)
            self.starts[name] = len(self._rows) - 1
        self._rows.append(self.cores)

    @cached_property
    def levels(self) -> tuple[tuple[CpuDomain, ...], ...]:
        """Every level that differs from the one above it, the largest domains first, cores last."""
        return tuple(_linked(self._rows, number) for number in range(len(self._rows)))

    # Masks

    def whole(self, mask: int) -> int:
        """Those CPUs of ``mask`` whose core is in it with all its online threads."""
        return self.topology.whole_cores(CpuSet.from_mask(mask)).mask

    def touched(self, mask: int) -> list[int]:
        """The cores (with all their threads) that have a CPU in ``mask``, by lowest CPU."""
        cores: list[int] = []
        siblings = self.topology.siblings
        while mask:
            core = siblings((mask & -mask).bit_length() - 1).mask
            cores.append(core)
            mask &= ~core
        return cores

    def one_each(self, mask: int, base: int = 0) -> int:
        """The lowest CPU of ``mask`` on each core that ``base`` has no thread of."""
        number = 0
        for core in self.touched(mask):
            if not core & base:
                free = core & mask
                number |= free & -free
        return number

    def nodes_of(self, mask: int) -> tuple[int, ...]:
        """The NUMA nodes that have a CPU in ``mask``, ascending."""
        return tuple(node for node, cpus in self.nodes.items() if cpus & mask)

    def node_mask(self, nodes: Iterable[int]) -> int:
        mask = 0
        for node in nodes:
            mask |= self.nodes.get(node, 0)
        return mask

    # Taking

    def single(self, count: int, avail: int, level: str, tiers: Sequence[CpuSet] = ()) -> int:
        """``count`` CPUs of ``avail`` inside one domain of a level, 0 when none holds them.

        With ``tiers`` the CPUs of the first are taken before those of the next.
        """
        start = self.starts[level]
        best: tuple[bool, int, int, int] | None = None
        for index, domain in enumerate(self.levels[start]):
            size = (domain.mask & avail).bit_count()
            if size >= count:
                # Of equally good ones that with the fewest free CPUs around it: an untouched node remains whole.
                key = (size != count, size, (domain.outer & avail).bit_count(), index)
                best = key if best is None or key < best else best
        if best is None:
            return 0
        chosen = self.levels[start][best[3]]
        got = 0
        for tier in tiers:
            got |= self._inside(start, chosen, count - got.bit_count(), avail & chosen.mask & tier.mask, got)
        return got or self._inside(start, chosen, count, avail & chosen.mask, 0)

    def anywhere(self, count: int, avail: int, near: int = 0) -> int:
        """``count`` CPUs of ``avail``, in as few and as well fitting domains as the rule gives; all when it has fewer.

        At most one core is started and not finished; `round_up` finishes it where ``avail`` is of whole cores.
        """
        return self._fill(0, range(len(self.levels[0])), count, avail, near)

    def _fill(self, level: int, indexes: Iterable[int], count: int, avail: int, near: int) -> int:
        domains = self.levels[level]
        by_size: dict[int, list[int]] = {}
        for index in indexes:
            size = (domains[index].mask & avail).bit_count()
            if size:
                by_size.setdefault(size, []).append(index)
        got, left = 0, count
        while left > 0 and by_size:
            # Exact, else the smallest that holds it, else the largest one whole.
            size = left if left in by_size else min((s for s in by_size if s > left), default=max(by_size))
            among = by_size[size]
            chosen = domains[self._nearest(level, among, near | got)]
            if not among:
                del by_size[size]
            free = chosen.mask & avail
            taken = free if free.bit_count() <= left else self._inside(level, chosen, left, free, near | got)
            got |= taken
            left -= taken.bit_count()
        return got

    def _inside(self, level: int, domain: CpuDomain, count: int, free: int, near: int) -> int:
        if count <= 0 or free.bit_count() <= count:
            return free if count > 0 else 0
        if level < len(self.levels) - 1:
            return self._fill(level + 1, domain.inner, count, free, near)
        return CpuSet.from_mask(free).lowest(count).mask

    def _nearest(self, level: int, among: list[int], near: int) -> int:
        """Take the nearest out of equally large domains; their order decides below the level of nodes."""
        if not near or level > self.starts[NODE] or len(among) == 1:
            return among.pop(0)
        domains = self.levels[level]
        where = min(range(len(among)), key=lambda place: (self.distance(domains[among[place]].mask, near), place))
        return among.pop(where)

    def distance(self, number: int, other: int) -> float:
        """The mean NUMA distance between the nodes of two masks (10 is local); 0.0 when one has none."""
        left, right = self.nodes_of(number), self.nodes_of(other)
        if not left or not right:
            return 0.0
        distance = self.topology.distance
        return sum(distance(a, b) for a in left for b in right) / (len(left) * len(right))

    def round_up(self, picked: int, avail: int) -> int:
        """``picked`` with the cores that it has started completed out of ``avail``."""
        mask = 0
        for core in self.touched(picked):
            mask |= core & avail
        return picked | mask

    # Resizing

    def grow(self, count: int, avail: int, base: int) -> int:
        """``count`` more CPUs of ``avail`` beside ``base``: its cores' other threads, its L3s, nodes, sockets."""
        rings = [sum(self.touched(base))]
        for level in reversed(self.levels[:-1]):
            ring = 0
            for domain in level:
                ring |= domain.mask if domain.mask & base else 0
            rings.append(ring)
        got = 0
        for ring in [*rings, -1]:  # the last one is everything
            near = ring & avail & ~got
            left = count - got.bit_count()
            if near.bit_count() >= left:
                return got | self.anywhere(left, near, base | got)
            got |= near
        return got

    def shrink(self, held: int, count: int, *, whole: bool = False, even: bool = False, spread: bool = False) -> int:
        """``count`` CPUs of ``held``: the nodes with the fewest go first that are not needed for ``count``.

        Then lone threads, then the cores of the node and L3 with the fewest; of equal ones the highest. ``whole`` gives
        back nothing but whole cores, so that up to a core less one thread too many remain; ``even`` takes each core
        from the node that has the most instead. ``spread``: the cores' second threads go before whole cores do.
        """
        if not even:
            held = self._fewest_nodes(held, count)
        if spread:
            held = self._spread_kept(held, count)
        parts = {core: core & held for core in self.touched(held)}
        if even:
            order = self._evenly(held, parts)
        else:
            weight = {core: self._counts_around(core, held) for core in parts}
            # First the cores that are held in part, and those with one thread.
            order = sorted(parts, key=lambda core: (parts[core] == core != core & -core, *weight[core], -core))
        surplus = held.bit_count() - count
        kept = held
        for core in order:
            size = parts[core].bit_count()
            if size <= surplus:
                kept &= ~core
                surplus -= size
        if surplus > 0 and not whole:
            core = next(core for core in order if core & kept)
            kept &= ~core | CpuSet.from_mask(core & kept).lowest(parts[core].bit_count() - surplus).mask
        return kept

    def _fewest_nodes(self, held: int, count: int) -> int:
        """Without the nodes that ``count`` CPUs do not need, those with the fewest first."""
        parts = sorted(
            (part for mask in self.nodes.values() if (part := mask & held)), key=lambda part: part.bit_count()
        )
        for part in parts:
            if (held & ~part).bit_count() < count:
                break
            held &= ~part
        return held

    def _spread_kept(self, held: int, count: int) -> int:
        """With fewer threads of the cores that have the most, as long as more than ``count`` CPUs remain."""
        parts = [core & held for core in self.touched(held)]
        while (surplus := held.bit_count() - count) > 0 and (full := [part for part in parts if part & (part - 1)]):
            most = max(part.bit_count() for part in full)
            for part in [part for part in full if part.bit_count() == most][::-1][:surplus]:
                held &= ~(1 << part.bit_length() - 1)
            parts = [core & held for core in parts]
        return held

    def _counts_around(self, core: int, held: int) -> tuple[int, int]:
        """How many of ``held`` are in the node and the L3 domain of a core."""
        number = (core & -core).bit_length() - 1
        cpu = self.topology.cpu(number)
        return (
            (self.nodes[cpu.node] & held).bit_count(),
            (self.topology.l3_domains()[cpu.l3].mask & held).bit_count(),
        )

    def _evenly(self, held: int, parts: Mapping[int, int]) -> list[int]:
        """The cores of ``held`` in an order that takes each from the node that then has the most."""
        stacks = {
            node: sorted(core for core in parts if core & mask) for node, mask in self.nodes.items() if mask & held
        }
        sizes = {node: (self.nodes[node] & held).bit_count() for node in stacks}
        order: list[int] = []
        while stacks:
            node = max(stacks, key=lambda node: (sizes[node], -node))
            core = stacks[node].pop()
            order.append(core)
            sizes[node] -= parts[core].bit_count()
            if not stacks[node]:
                del stacks[node]
        return order

    # Spreading

    def spread(self, count: int, avail: int, base: int = 0, group: int = 1, *, nodes: int = 1) -> int:
        """``count`` more CPUs so that with ``base`` every node used has as many: the fewest nodes that can, else 0.

        ``nodes``: that many at least. ``group`` CPUs are taken together (a core). The remainder is taken from the nodes
        with the most left, a group each.

        Source: KEP-2902, distribute-cpus-across-numa.
        """
        room = {node: (mask & (avail | base)).bit_count() for node, mask in self.nodes.items()}
        has = {node: (mask & base).bit_count() for node, mask in self.nodes.items()}
        # KEP-2902 tries all combinations of k nodes for the smallest deviation of free CPUs over the machine. That is
        # always the k nodes with the most room: the sum of squares falls the most where most is free.
        ranked = sorted((node for node in room if room[node]), key=lambda node: (not has[node], -room[node], node))
        total = count + base.bit_count()
        for used in range(max(nodes, sum(1 for node in has if has[node])), len(ranked) + 1):
            share = self._shares(ranked[:used], total, room, group)
            if share is None or any(share[node] < has[node] for node in share):
                continue
            got = 0
            for node, number in share.items():
                inside, own = self.nodes[node] & avail, self.nodes[node] & base
                more = number - has[node]
                got |= self.grow(more, inside, own) if own else self.anywhere(more, inside)
            return got
        return 0

    def _shares(self, nodes: list[int], total: int, room: Mapping[int, int], group: int) -> dict[int, int] | None:
        """CPUs by node, in multiples of a group but for an odd rest; None: these nodes cannot have as many each."""
        each = total // len(nodes) // group * group
        if not each or any(room[node] < each for node in nodes):
            return None
        share = dict.fromkeys(nodes, each)
        left = total - each * len(nodes)
        while left:
            roomy = [node for node in nodes if room[node] - share[node] >= min(group, left)]
            if not roomy:
                return None
            for node in sorted(roomy, key=lambda node: (share[node] - room[node], node)):
                step = min(group, left)
                share[node] += step
                left -= step
        return share


def _linked(rows: list[tuple[int, ...]], number: int) -> tuple[CpuDomain, ...]:
    """The domains of one level with what they hold and what holds them."""
    inner = _touched_by(rows[number], rows[number + 1]) if number + 1 < len(rows) else {}
    outer: dict[int, int] = {}
    for mask, places in _touched_by(rows[number - 1], rows[number]).items() if 0 < number < len(rows) - 1 else ():
        for place in places:
            outer[place] = outer.get(place, 0) | mask
    return tuple(
        CpuDomain(mask, tuple(inner.get(mask, ())), outer.get(index, mask)) for index, mask in enumerate(rows[number])
    )


def _touched_by(large: tuple[int, ...], small: tuple[int, ...]) -> dict[int, list[int]]:
    """Which of the smaller domains (by place in their row) each larger one touches."""
    home = {cpu: mask for mask in large for cpu in CpuSet.from_mask(mask)}
    held: dict[int, list[int]] = {}
    for place, mask in enumerate(small):
        for owner in dict.fromkeys(home[cpu] for cpu in CpuSet.from_mask(mask)):
            held.setdefault(owner, []).append(place)
    return held
