"""How many CPUs each pool can have of each part of the machine, when pools bound to parts compete for them.

The exact half of `reconciler.placement.pack`. The machine falls into cells, the parts in which the same pools may have
CPUs (with pools bound to NUMA nodes: those nodes, and the rest). Within a cell all CPUs are equal but for their present
pools, so numbers are enough: a pool that holds ``h`` CPUs of a cell and gets ``x`` of it keeps ``min(x, h)`` and moves
the rest. That is a transport problem with costs of 0 and 1, solved by cheapest augmenting paths (Ford and Fulkerson;
Busacker and Gowen): a pool that lacks CPUs takes from a cell, another one there yields and takes from another cell, and
so on.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

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
    sizes: Mapping[str, int], held: Mapping[str, int], given: Mapping[str, int], parts: QuotaCells
) -> Counts | None:
    """Numbers by pool and cell that give every pool its size and move the fewest CPUs; None: the sizes are impossible.

    ``held`` and ``given`` are disjoint masks by pool: what it has now, and a part of the answer in which each pool kept
    as much as its size allows (which is the cheapest answer for the CPUs it gives out, and so a place to start from).

    """
    has, holds = parts.numbers(given), parts.numbers(held)
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
    news = sorted(lacking)
    while news:
        cells_changed = set()
        for name in news:
            far, mine, before = to_pool[name], has[name], holds[name]
            for at in parts.open_to[name]:
                # Back to a CPU that it holds now is not a move, any other is one.
                cost = far if mine[at] < before[at] else far + 1
                if cost < to_cell[at]:
                    to_cell[at], taker[at] = cost, name
                    cells_changed.add(at)
        news = []
        for name, mine in has.items():
            before, best = holds[name], to_pool[name]
            for at in cells_changed:
                # Giving up a CPU that it did not hold takes back a move.
                if mine[at] and (cost := to_cell[at] - (mine[at] > before[at])) < best:
                    best = cost
                    through[name] = at
            if best < to_pool[name]:
                to_pool[name] = best
                news.append(name)
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
