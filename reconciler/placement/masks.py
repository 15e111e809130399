"""Sets of NUMA nodes as bit masks: their order, reducing a list of hints, and a count of the masks examined."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, final

from cgroupfs.cpuset import CpuSet
from state.topology import Topology

WIDEST_COMPARED: Final = 8
"""Distances are compared in sets of up to so many nodes; in wider ones everything is far from something anyway."""

Key = tuple[int, ...]


@final
class NodeMaskRanker:
    """Orders masks, smallest key first, and counts the ``steps`` of its user."""

    def __init__(self, closest: Topology | None = None) -> None:
        """``closest``: the machine whose distances count; None: they do not."""
        self.steps = 0
        self._topology = closest
        self._spread: dict[int, int] = {}

    def key(self, mask: int, score: int = 0) -> Key:
        """Fewer nodes, then closer ones, then the higher score, then the lower numbers."""
        self.steps += 1
        return mask.bit_count(), self.spread(mask), -score, mask

    def key_near(self, mask: int, score: int, size: int) -> Key:
        """The same among masks of ``size`` nodes; before that the fewest missing, then the fewest too many."""
        self.steps += 1
        count = mask.bit_count()
        return int(count > size), abs(size - count), self.spread(mask), -score, mask

    def best(self, scores: Mapping[int, int]) -> int | None:
        """The first mask by `key`; ``scores`` by mask."""
        return min(scores, key=lambda mask: self.key(mask, scores[mask]), default=None)

    def kept(self, scores: Mapping[int, int], limit: int, size: int) -> dict[int, int]:
        """The ``limit`` first by `key_near`, in that order."""
        ordered = sorted(scores, key=lambda mask: self.key_near(mask, scores[mask], size))
        return {mask: scores[mask] for mask in ordered[:limit]}

    def spread(self, mask: int) -> int:
        """The sum of the distances between the mask's nodes, both ways; among masks of one size that is the mean."""
        if self._topology is None or mask.bit_count() > WIDEST_COMPARED:
            return 0
        number = self._spread.get(mask)
        if number is None:
            nodes = tuple(CpuSet.from_mask(mask))
            number = sum(self._topology.distance(node, other) for node in nodes for other in nodes)
            self._spread[mask] = number
        return number


@final
class NodeMaskOptions:
    """One resource's hints by mask. ``scores``: all masks; ``preferred``: those among them that it prefers."""

    def __init__(self, hints: Iterable[tuple[int, bool, int]]) -> None:
        """``hints``: (mask, preferred, score); of equal masks the best of each counts."""
        self.scores: dict[int, int] = {}
        self.preferred: set[int] = set()
        for mask, preferred, score in hints:
            if mask:
                self.scores[mask] = max(score, self.scores.get(mask, score))
                if preferred:
                    self.preferred.add(mask)

    @property
    def smallest(self) -> int:
        """How many nodes it needs at least; 0 when it is unavailable."""
        return min((mask.bit_count() for mask in self.scores), default=0)

    def cut(self, rank: NodeMaskRanker, limit: int) -> "NodeMaskOptions":
        """Only the ``limit`` best, the widest always among them: it meets every other resource's."""
        if len(self.scores) <= limit:
            return self
        kept = rank.kept(self.scores, limit - 1, 0)
        widest = max(self.scores, key=lambda mask: (mask.bit_count(), -mask))
        return NodeMaskOptions(
            (mask, mask in self.preferred, self.scores[mask]) for mask in sorted({*kept, widest}, key=rank.key)
        )


def common(options: Iterable[NodeMaskOptions], *, preferred: bool = True) -> dict[int, int]:
    """The masks that all have (and prefer), with the sum of their scores. At least one resource is needed."""
    first, *rest = options
    masks = set(first.preferred if preferred else first.scores)
    for other in rest:
        masks &= other.preferred if preferred else other.scores.keys()
    return {mask: sum(node_mask_options.scores[mask] for node_mask_options in (first, *rest)) for mask in sorted(masks)}


def reachable(
    options: Iterable[NodeMaskOptions], every: int, rank: NodeMaskRanker, *, size: int, limit: int | None
) -> dict[int, int]:
    """The intersections of one mask of each, with the best sum of scores. ``every``: the mask of all nodes.

    With a ``limit``, only so many masks of each resource and so many intersections are carried on.
    """
    given = list(options)
    if (
        limit is None
        and len(given) > 1
        and not any(any(node_mask_options.scores.values()) for node_mask_options in given)
    ):
        return dict.fromkeys(_met(given, every, rank), 0)
    reached = {every: 0}
    for item in given:
        table = item.scores if limit is None else item.cut(rank, limit).scores
        numbers: dict[int, int] = {}
        for mask, score in reached.items():
            for other, gain in table.items():
                rank.steps += 1
                both = mask & other
                if both and numbers.get(both, score + gain - 1) < score + gain:
                    numbers[both] = score + gain
        reached = numbers if limit is None or len(numbers) <= limit else rank.kept(numbers, limit, size)
    return reached


def _met(options: Sequence[NodeMaskOptions], every: int, rank: NodeMaskRanker) -> list[int]:
    """The intersections where no score distinguishes them, in (k + 1) n 2^n steps for k resources instead of k 4^n.

    How many combinations meet in exactly one set is the convolution of the lists under "and": count for each set in how
    many of each list it is contained, multiply, and subtract what was counted for wider sets.

    """
    nodes = tuple(CpuSet.from_mask(every))
    combinations = [1] * (1 << len(nodes))
    for node_mask_options in options:
        within = [0] * len(combinations)
        for mask in node_mask_options.scores:
            within[sum(1 << place for place, node in enumerate(nodes) if mask >> node & 1)] = 1
        _over_supersets(within, 1)
        combinations = [count * more for count, more in zip(combinations, within, strict=True)]
    _over_supersets(combinations, -1)
    rank.steps += (len(options) + 1) * len(nodes) * len(combinations)
    return [
        sum(1 << node for place, node in enumerate(nodes) if number >> place & 1)
        for number, count in enumerate(combinations)
        if number and count
    ]


def _over_supersets(table: list[int], sign: int) -> None:
    """Add (1) what every set's supersets have to what it has, or take it away again (-1)."""
    bit = 1
    while bit < len(table):
        for number in range(len(table)):
            if not number & bit:
                table[number] += sign * table[number | bit]
        bit <<= 1
