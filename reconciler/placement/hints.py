"""Topology hints of resources, and merging them into one set of NUMA nodes, by the kubelet's policies or ``numeric``.

A hint is a set of nodes (here a mask) from which a resource is available, and whether that is the smallest possible
number of nodes (*preferred*). A preferred merge is before any other. Among preferred ones the fewest nodes; among the
others as many nodes as the most demanding resource needs at least, rather fewer than more (kubelet 1.24 and later).
Then the smallest distances where asked (prefer-closest-numa-nodes), then the higher score, then the lower node numbers.

Source: the kubelet's topology manager (KEP-693, KEP-3545, KEP-4622); ``numeric``: Katalyst, pkg/agent/orm/topology.
Pure.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, final

from msgspec import Struct

from cgroupfs.cpuset import CpuSet
from state.cpu import TopologyPolicy
from state.topology import Topology

WIDEST_COMPARED: Final = 8
"""Distances are compared in sets of up to so many nodes; in wider ones everything is far from something anyway."""

Key = tuple[int, ...]


@final
class NodeMaskRanker:
    """Orders masks, smallest key first."""

    def __init__(self, closest: Topology | None = None) -> None:
        """``closest``: the machine whose distances count; None: they do not."""
        self._topology = closest
        self._spread: dict[int, int] = {}

    def key(self, mask: int, score: int = 0) -> Key:
        """Fewer nodes, then closer ones, then the higher score, then the lower numbers."""
        return mask.bit_count(), self.spread(mask), -score, mask

    def key_near(self, mask: int, score: int, size: int) -> Key:
        """The same among masks of ``size`` nodes; before that the fewest missing, then the fewest too many."""
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
    """The masks that all have (and prefer), with the sum of their scores. At least one resource is needed.

    A merge is preferred only if all resources have the very same nodes, preferred by each: no combinations are tried.
    """
    first, *rest = options
    masks = set(first.preferred if preferred else first.scores)
    for other in rest:
        masks &= other.preferred if preferred else other.scores.keys()
    return {mask: sum(node_mask_options.scores[mask] for node_mask_options in (first, *rest)) for mask in sorted(masks)}


def reachable(
    options: Iterable[NodeMaskOptions], every: int, rank: NodeMaskRanker, *, size: int, limit: int | None
) -> dict[int, int]:
    """The intersections of one mask of each, with the best sum of scores. ``every``: the mask of all nodes.

    The kubelet tries every combination of one hint of each resource: with n nodes and k resources up to (2^n - 1)^k of
    them, which is why it refuses to run on more than 8 nodes. But only which nodes the chosen hints have in common
    matters. So each reachable set of nodes is kept once: at most 255 of 8 nodes, and k x 255^2 steps.

    With a ``limit``, only so many masks of each resource and so many intersections are carried on.
    """
    resources = list(options)
    if (
        limit is None
        and len(resources) > 1
        and not any(any(node_mask_options.scores.values()) for node_mask_options in resources)
    ):
        return dict.fromkeys(_intersections(resources, every), 0)
    reached = {every: 0}
    for item in resources:
        table = item.scores if limit is None else item.cut(rank, limit).scores
        numbers: dict[int, int] = {}
        for mask, score in reached.items():
            for other, gain in table.items():
                both = mask & other
                # New, or with a higher score than before.
                if both and numbers.get(both, score + gain - 1) < score + gain:
                    numbers[both] = score + gain
        reached = numbers if limit is None or len(numbers) <= limit else rank.kept(numbers, limit, size)
    return reached


def _intersections(options: Sequence[NodeMaskOptions], every: int) -> list[int]:
    """The intersections where no score distinguishes them, in (k + 1) n 2^n steps for k resources instead of k 4^n.

    How many combinations meet in exactly one set is the convolution of the lists under "and": count for each set in how
    many of each list it is contained, multiply, and subtract what was counted for wider sets.
    """
    nodes = tuple(CpuSet.from_mask(every))
    combinations = [1] * (1 << len(nodes))
    for node_mask_options in options:
        within = [0] * len(combinations)
        # By the nodes' places and not their numbers, which may have gaps.
        for mask in node_mask_options.scores:
            within[sum(1 << place for place, node in enumerate(nodes) if mask >> node & 1)] = 1
        _over_supersets(within, 1)
        combinations = [count * more for count, more in zip(combinations, within, strict=True)]
    _over_supersets(combinations, -1)
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


CHAINS: Final = 512
"""Chains that are carried on: exact on 4 nodes, and at most k x CHAINS x 255 steps for k resources on any machine."""


class DistanceChain(NamedTuple):
    """Nested nodes. ``mask``: of the aligned resources, None when none of them cares; ``by_resource``: of each."""

    mask: int | None
    by_resource: dict[str, int]
    masks: frozenset[int]
    preferred: int
    score: int

    def key(self, rank: NodeMaskRanker) -> tuple[object, ...]:
        """The better chain first."""
        widest = max((mask.bit_count() for mask in self.masks), default=0)
        # In Katalyst fewer nodes win over more preferred resources, although that rule is first.
        return -self.preferred, widest, rank.key(self.mask or 0, self.score), sorted(self.masks)


def best_chain(
    options: Mapping[str, NodeMaskOptions], rank: NodeMaskRanker, *, limit: int | None
) -> DistanceChain | None:
    """The best chain by ``numeric``; None when the rules cannot be kept. ``limit``: hints of each that are tried.

    The rules, strongest first: the aligned resources (CPU and memory) have equal nodes, and at least one of them
    prefers those; of any two resources, one's nodes contain the other's; more of the other resources have preferred
    nodes; the widest has fewer nodes.

    Katalyst tries every combination, and counts a resource without a preference as preferring. Here the resources are
    added one after the other.
    """
    if not all(node_mask_options.scores for node_mask_options in options.values()):
        return None
    if limit is not None:
        options = {name: node_mask_options.cut(rank, limit) for name, node_mask_options in options.items()}
    together = {name: node_mask_options for name, node_mask_options in options.items() if name in ALIGNED}
    chains = [DistanceChain(None, {}, frozenset(), 0, 0)]
    if together:
        scores = common(together.values(), preferred=False)
        chains = [
            DistanceChain(mask, dict.fromkeys(together, mask), frozenset({mask}), 0, score)
            for mask, score in scores.items()
            # In Katalyst only the preference of the last pair of aligned resources counts.
            if any(mask in node_mask_options.preferred for node_mask_options in together.values())
        ]
    for name, item in options.items():
        if name not in together:
            chains = _extended(chains, name, item, rank)
    return min(chains, key=lambda chain: chain.key(rank), default=None)


def _extended(
    chains: list[DistanceChain], name: str, options: NodeMaskOptions, rank: NodeMaskRanker
) -> list[DistanceChain]:
    """Every chain with every hint that keeps it nested; of equal ones the chain with more preferred hints."""
    result: dict[tuple[int | None, frozenset[int]], DistanceChain] = {}
    for chain in chains:
        for mask, score in options.scores.items():
            if any(mask & other not in (mask, other) for other in chain.masks):
                continue
            longer = DistanceChain(
                chain.mask,
                {**chain.by_resource, name: mask},
                chain.masks | {mask},
                chain.preferred + (mask in options.preferred),
                chain.score + score,
            )
            known = result.get((chain.mask, longer.masks))
            if known is None or (known.preferred, known.score) < (longer.preferred, longer.score):
                result[chain.mask, longer.masks] = longer
    return sorted(result.values(), key=lambda chain: chain.key(rank))[:CHAINS]


CPU: Final = "cpu"
MEMORY: Final = "memory"


class TopologyHint(Struct, frozen=True, kw_only=True):
    """Nodes from which one resource can be had. ``score``: higher is better among hints that are equal otherwise."""

    nodes: CpuSet
    preferred: bool = False
    score: int = 0


class ResourceHints(Struct, frozen=True, kw_only=True):
    """All hints of one resource. None: no preference; empty: unavailable on every node."""

    name: str
    hints: tuple[TopologyHint, ...] | None = None


class MergedHint(Struct, frozen=True, kw_only=True):
    """The nodes for a container, and the policy's verdict on it.

    ``nodes`` are the best available even where the policy would not admit the container: one that runs cannot be
    refused. ``by_resource`` differs from ``nodes`` under ``numeric`` only. ``fits``: every resource is known to fit on
    ``nodes``.
    """

    nodes: CpuSet
    preferred: bool
    admitted: bool
    reason: str
    by_resource: Mapping[str, CpuSet] = {}
    fits: bool = False


ALIGNED: Final = (CPU, MEMORY)
EXACT: Final = 8
"""On up to so many nodes every set of nodes is tried."""
KEPT: Final = 64
"""On more: how many hints of a resource, and how many sets of nodes while merging, are kept, the best ones. That is at
most k x KEPT^2 steps for k resources, and three for each hint."""
_SHOWN: Final = 4


def merge(
    resources: Sequence[ResourceHints],
    policy: TopologyPolicy,
    nodes: CpuSet,
    *,
    closest: Topology | None = None,
) -> MergedHint:
    """One set of nodes out of ``nodes`` (all that there are) for all resources.

    ``closest``: the machine whose distances count, if they do. The order of the hints never matters; that of the
    resources only where lists are cut.
    Errors: `ValueError` for two resources of one name.
    """
    if len({hints.name for hints in resources}) != len(resources):
        raise ValueError(f"resources of the same name: {', '.join(hints.name for hints in resources)}")
    if policy is TopologyPolicy.NONE:
        return MergedHint(nodes=nodes, preferred=False, admitted=True, reason="policy none: any NUMA node")
    rank = NodeMaskRanker(closest)
    options = {
        hints.name: NodeMaskOptions((hint.nodes.mask & nodes.mask, hint.preferred, hint.score) for hint in hints.hints)
        for hints in resources
        if hints.hints is not None
    }
    limit = None if len(nodes) <= EXACT else KEPT
    if policy is TopologyPolicy.NUMERIC:
        chain = best_chain(options, rank, limit=limit)
        if chain is not None:
            kept = {name: CpuSet.from_mask(mask) for name, mask in chain.by_resource.items()}
            where = _nodes_text(chain.mask or nodes.mask)
            return MergedHint(
                nodes=nodes if chain.mask is None else CpuSet.from_mask(chain.mask),
                preferred=True,
                admitted=True,
                reason=f"{_names_text(ALIGNED, options)} on {where}, the others next to them",
                by_resource=kept,
            )
    number = _aligned(options, nodes, rank)
    # single-numa-node admits no merge of several nodes, even where all resources prefer it.
    keeps = policy is not TopologyPolicy.SINGLE_NUMA_NODE or not options or (number or 0).bit_count() == 1
    if number is not None and keeps and policy is not TopologyPolicy.NUMERIC:
        reason = (
            f"{_names_text(options, options)} on {_nodes_text(number)}" if options else "no resource has NUMA hints"
        )
        return MergedHint(nodes=CpuSet.from_mask(number), preferred=True, admitted=True, reason=reason)
    mask = _not_aligned(options, nodes, rank, limit) if number is None else number
    reason = _reason(options, policy)
    if CPU in options and (chosen := _cpu_node(options, mask, rank)) is not None:
        mask = chosen
        reason += f"; the CPUs' preference for {_nodes_text(mask)} applies"
    else:
        reason += f"; nearest to it: {_nodes_text(mask)}"
    admitted = policy is TopologyPolicy.BEST_EFFORT
    return MergedHint(nodes=CpuSet.from_mask(mask), preferred=False, admitted=admitted, reason=reason)


def _aligned(options: dict[str, NodeMaskOptions], nodes: CpuSet, rank: NodeMaskRanker) -> int | None:
    """The best nodes that every resource prefers, a single one if there is any; all nodes when none cares."""
    return rank.best(common(options.values())) if options else nodes.mask


def _not_aligned(options: dict[str, NodeMaskOptions], nodes: CpuSet, rank: NodeMaskRanker, limit: int | None) -> int:
    """The best that the resources have in common, without those that are unavailable; all nodes when nothing is."""
    possible = [node_mask_options for node_mask_options in options.values() if node_mask_options.scores]
    size = max((node_mask_options.smallest for node_mask_options in possible), default=0)
    reached = reachable(possible, nodes.mask, rank, size=size, limit=limit)
    return min(reached, key=lambda mask: rank.key_near(mask, reached[mask], size), default=nodes.mask)


def _cpu_node(options: dict[str, NodeMaskOptions], merged: int, rank: NodeMaskRanker) -> int | None:
    """A node that the CPUs prefer: where most of the other resources are available, too, then one of the merge's.

    It wins over a merge that is not preferred: a device on the other node costs one crossing a request, CPUs away from
    their memory one each cache miss. With a device on node 0 and no CPUs left there, the kubelet's best-effort chooses
    node 0, and the container's CPUs end up anywhere (kubernetes issue 106270).
    """
    cpu = options[CPU]
    singles = {mask: cpu.scores[mask] for mask in sorted(cpu.preferred) if mask.bit_count() == 1}

    def key(mask: int) -> tuple[int, ...]:
        others = sum(mask in node_mask_options.scores for name, node_mask_options in options.items() if name != CPU)
        return -others, int(not mask & merged), rank.spread(mask | merged), *rank.key(mask, singles[mask])

    return min(singles, key=key, default=None)


def _reason(options: dict[str, NodeMaskOptions], policy: TopologyPolicy) -> str:
    """The preferred nodes of each resource, as text for people."""
    parts = []
    for name, node_mask_options in options.items():
        if not node_mask_options.scores:
            parts.append(f"{name} does not fit on any node")
            continue
        shown = sorted(node_mask_options.preferred, key=lambda mask: (mask.bit_count(), mask))
        more = " ..." if len(shown) > _SHOWN else ""
        where = " or ".join(str(CpuSet.from_mask(mask)) for mask in shown[:_SHOWN])
        parts.append(f"{name} prefers {where}{more}" if shown else f"{name} needs more nodes than preferred")
    single = "a single node" if policy is TopologyPolicy.SINGLE_NUMA_NODE else "the same nodes"
    return f"not all on {single}: {', '.join(parts)}"


def _names_text(names: Collection[str], options: dict[str, NodeMaskOptions]) -> str:
    return " and ".join(name for name in names if name in options) or "nothing"


def _nodes_text(mask: int) -> str:
    return f"NUMA node{'s' if mask.bit_count() > 1 else ''} {CpuSet.from_mask(mask)}"
