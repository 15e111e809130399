"""Division of the CPUs that no pool requests over the online pools, in mode overlap. Arithmetic only; sizes are CPUs.

Each pool's part is in proportion to its weight. Where no pool has CPUs yet, each gets its part. Later a size remains as
long as the pool has a third of its part.

Source: Katalyst's pools in mode overlap, which have all CPUs, weighted by their pods' requests. It divides again at
each change of any pool.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, final

from reconciler.placement.sizes import proportional


class NodeRoom(NamedTuple):
    """Pools that are bound to one NUMA node, and the CPUs that they may have together."""

    pools: Sequence[str]
    cpus: int


def expand(
    requested: Mapping[str, int],
    weights: Mapping[str, int],
    held: Mapping[str, int],
    available: int,
    *,
    rest: str,
    rooms: Sequence[NodeRoom] = (),
    used: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Sizes of these pools, ``available`` CPUs in all, each at least as ``requested``.

    ``weights``: positive, by pool; ``held``: the present sizes; ``used``: CPUs in use, where that is measured.
    ``rooms``: disjoint; the pools in none of them may be anywhere. ``rest``: one of these, the default pool. If the
    requests do not fit, they are the sizes. CPUs of a removed pool are the default pool's.

    CPUs are taken from a pool only for one that requests more than it has, or that has less than a third of its part:
    from the default pool while it has more than its part, and for the second reason none that are in use.
    """
    if sum(requested.values()) >= available:
        return dict(requested)
    targets = _targets(requested, weights, available, rooms)
    if not any(held.get(key) for key in requested):
        return targets
    division = _Division(requested, targets, rooms, rest)
    division.start({key: held.get(key, 0) for key in requested}, available)
    for key in sorted(requested):
        if division.lacks(key):
            division.give(key, used or {})
    return division.sizes


def _targets(
    requested: Mapping[str, int], weights: Mapping[str, int], available: int, rooms: Sequence[NodeRoom]
) -> dict[str, int]:
    """Each pool's size by its weight; where that exceeds a node's room, that room is divided by itself."""
    fixed: dict[str, int] = {}
    left = list(rooms)
    while True:
        keys = [key for key in requested if key not in fixed]
        targets = _part(keys, requested, weights, available - sum(fixed.values()))
        over = [room for room in left if sum(targets[key] for key in room.pools) > room.cpus]
        if not over:
            return {**targets, **fixed}
        for room in over:
            left.remove(room)
            fixed |= _part(room.pools, requested, weights, room.cpus)


def _part(keys: Sequence[str], requested: Mapping[str, int], weights: Mapping[str, int], cpus: int) -> dict[str, int]:
    least = {key: requested[key] for key in keys}
    return dict(proportional({key: weights[key] for key in keys}, least, cpus, least))


@final
class _Division:
    """Sizes on their way from those that are there; never below a request, never above a node's room."""

    def __init__(
        self, requested: Mapping[str, int], targets: Mapping[str, int], rooms: Sequence[NodeRoom], rest: str
    ) -> None:
        self._requested, self._targets, self._rest = requested, targets, rest
        self._room = {key: room for room in rooms for key in room.pools}
        self._rooms = rooms
        self.sizes: dict[str, int] = {}

    def start(self, held: Mapping[str, int], available: int) -> None:
        self.sizes = {key: max(held[key], self._requested[key]) for key in sorted(held)}
        for room in self._rooms:
            self._take(sum(self.sizes[key] for key in room.pools) - room.cpus, room.pools)
        missing = available - sum(self.sizes.values())
        self._take(-missing, self.sizes)
        self.sizes[self._rest] += max(0, missing)

    def lacks(self, key: str) -> bool:
        """Whether it has less than a third of its part (beyond its request), by more than the rounding."""
        requested = self._requested[key]
        # A third: a pool that grows and shrinks within its part moves no CPU.
        return 3 * (self.sizes[key] - requested) < self._targets[key] - requested - 2

    def give(self, key: str, used: Mapping[str, int]) -> None:
        """A pool that `lacks` CPUs the missing ones, from pools above their targets; in its own node if that is full.

        ``used``: CPUs that a pool keeps.
        """
        while self.lacks(key):
            near = self._room[key].pools if self._full(key) else self.sizes
            givers = [other for other in near if self.sizes[other] > max(self._targets[other], used.get(other, 0))]
            if not givers:
                return
            self._take(1, givers)
            self.sizes[key] += 1

    def _take(self, count: int, keys: Collection[str]) -> None:
        for _ in range(count):
            self.sizes[max(keys, key=self._order)] -= 1

    def _order(self, key: str) -> tuple[bool, int, str]:
        """The pool that is last in it gives a CPU next: the default pool, then the one furthest above its target."""
        return key == self._rest and self._over(key) > 0, self._over(key), key

    def _over(self, key: str) -> int:
        return self.sizes[key] - self._targets[key]

    def _full(self, key: str) -> bool:
        room = self._room.get(key)
        return room is not None and sum(self.sizes[other] for other in room.pools) >= room.cpus
