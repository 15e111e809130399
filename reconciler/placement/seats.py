"""One NUMA node for each pod that is to be bound to one, so that all of them fit. Pure.

Each claim takes whole CPUs of its node: a pool of so many pods the sum of their requests, rounded up. Pods that have a
node keep it. The others are placed together (`NodeSeats.choose`).
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, final

from reconciler.placement.demand import NumaOccupancy

STEPS: Final = 500
"""Tries of one search."""
SEARCHED: Final = 32
"""Of more pods at once, which is the start of an agent on a full node, only the first order is tried."""
CPU: Final = 1000


class NodeRivals(NamedTuple):
    """New containers that are to own CPUs: ``fixed`` by node, as decided for them; ``near``: sizes, each on one node.

    ``cores``: by node, its free whole cores, if some container is to own such; each of so many ``threads``.
    """

    fixed: Mapping[int, int] = {}
    near: Sequence[int] = ()
    cores: Mapping[int, int] = {}
    threads: int = 1


NO_RIVALS: Final = NodeRivals()


class SeatRequest(NamedTuple):
    """A pod that needs a node. ``pool``: the name of its pool without the node; ``milli``: its request.

    ``alone``: it shares its node with no other bound pod, while others have the CPUs.
    """

    uid: str
    pool: str
    milli: int
    alone: bool = False


def cpus_of(milli: int) -> int:
    """The CPUs of a pool whose pods request so much together: whole ones, at least one."""
    return max(1, -(-milli // CPU))


@final
class NodeSeats:
    """The nodes' free CPUs, and what is taken of them so far."""

    def __init__(self, cpus: Mapping[int, int], rivals: NodeRivals) -> None:
        """``cpus``: those that pools may use, by node."""
        self._cpus = cpus
        self._rivals = rivals
        self._milli: dict[tuple[int, str], int] = {}
        self._load = dict.fromkeys(cpus, 0)
        self._left = {node: count - rivals.fixed.get(node, 0) for node, count in cpus.items()}
        self._new: dict[int, bool] = {}

    def join(self, node: int, pool: str, milli: int) -> None:
        self._left[node] -= self._added_cpus(node, pool, milli)
        self._milli[node, pool] = self._milli.get((node, pool), 0) + milli
        self._load[node] += milli

    def choose(self, waiting: Sequence[SeatRequest], occupancy: NumaOccupancy) -> dict[str, int]:
        """A node for each, by uid. There is at least one node.

        The largest first, each on the best node that has room for it (`nodes`). If that leaves one of them without
        room, others are searched in the same order of preference.
        """
        order = sorted(waiting, key=_largest_first)
        unshared = {request.uid: occupancy.unshareable_nodes(request.uid).mask for request in order}
        # New containers with CPUs of their own on one node take part: they are placed afterwards, by the hints of all
        # their resources, but find the room.
        near = [SeatRequest("", "", CPU * count) for count in self._rivals.near]
        # If not all fit, the pods are before them: such a container can be spread, a pool can not.
        for requests in (sorted((*order, *near), key=_largest_first), order) if near else (order,):
            found = self.copy().greedy(requests, unshared)
            if found is None and len(requests) <= SEARCHED:
                found = _SeatSearch(requests, unshared).found(self)
            if found is not None:
                return found
        # What does not fit is placed where the most room is, and its pool is cut.
        return self.copy().greedy(order, unshared, cut=True) or {}

    def greedy(
        self, order: Sequence[SeatRequest], unshared: Mapping[str, int], *, cut: bool = False
    ) -> dict[str, int] | None:
        """Each in turn on its best node; None when one fits nowhere, unless that is to be ``cut``."""
        found: dict[str, int] = {}
        for request in order:
            nodes = self.nodes(request, unshared.get(request.uid, 0))
            if not (nodes or cut):
                return None
            node = nodes[0] if nodes else max(self._left, key=lambda node: (self._left[node], -node))
            self.seat(request, node)
            found[request.uid] = node
        return found

    def nodes(self, request: SeatRequest, unshared: int) -> list[int]:
        """The nodes with room for a request, the best first. ``unshared``: a mask of nodes that it is to avoid."""
        fitting = [
            node for node, left in self._left.items() if self._added_cpus(node, request.pool, request.milli) <= left
        ]
        # A container with CPUs of its own: the tightest node.
        if not request.uid:
            return sorted(fitting, key=lambda node: (self._left[node], node))

        def key(node: int) -> tuple[bool, int, float, int]:
            # Nodes that are not to be shared last (Katalyst's ``numa_share`` false, of a pod there or its own).
            avoided = bool(unshared >> node & 1) or (node in self._new and (request.alone or self._new[node]))
            # The smallest requests for each CPU: spread, as the load of a pool is not known before.
            return avoided, self._broken_cores(node, request), self._load[node] / self._cpus[node], node

        return sorted(fitting, key=key)

    def _broken_cores(self, node: int, request: SeatRequest) -> int:
        """How many whole cores fewer the node has for others then."""
        cores, threads, left = self._rivals.cores.get(node, 0), self._rivals.threads, self._left[node]
        after = left - self._added_cpus(node, request.pool, request.milli)
        return min(cores, left // threads) - min(cores, after // threads)

    def seat(self, request: SeatRequest, node: int) -> None:
        self.join(node, request.pool, request.milli)
        if request.uid:
            self._new[node] = request.alone or self._new.get(node, False)

    def with_seat(self, request: SeatRequest, node: int) -> "NodeSeats":
        """A copy in which the request is placed."""
        seats = self.copy()
        seats.seat(request, node)
        return seats

    def copy(self) -> "NodeSeats":
        seats = NodeSeats(self._cpus, self._rivals)
        seats._milli, seats._load = dict(self._milli), dict(self._load)
        seats._left, seats._new = dict(self._left), dict(self._new)
        return seats

    def _added_cpus(self, node: int, pool: str, milli: int) -> int:
        has = self._milli.get((node, pool))
        return cpus_of(milli) if has is None else cpus_of(has + milli) - cpus_of(has)


def _largest_first(request: SeatRequest) -> tuple[int, bool, str]:
    return -cpus_of(request.milli), not request.uid, request.uid


@final
class _SeatSearch:
    """Depth first, with a bound on the number of tries."""

    def __init__(self, requests: Sequence[SeatRequest], unshared: Mapping[str, int]) -> None:
        self._requests = requests
        self._unshared = unshared
        self._steps = STEPS

    def found(self, seats: NodeSeats, number: int = 0) -> dict[str, int] | None:
        """The nodes of the requests from this number on; None: not all of them fit, or too many tries."""
        if number == len(self._requests):
            return {}
        request = self._requests[number]
        for node in seats.nodes(request, self._unshared.get(request.uid, 0)):
            if not self._steps:
                return None
            self._steps -= 1
            rest = self.found(seats.with_seat(request, node), number + 1)
            if rest is not None:
                return {request.uid: node, **rest}
        return None
