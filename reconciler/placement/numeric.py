"""Katalyst's topology policy ``numeric``: the aligned resources on the same nodes, the others nested around them. Pure.

The rules, strongest first: the aligned resources (CPU and memory) have equal nodes, and at least one of them prefers
those; of any two resources, one's nodes contain the other's; more of the other resources have nodes they prefer; the
widest has fewer nodes.

Katalyst tries every combination. Here the resources are added one after the other, and of the chains built so far only
the `CHAINS` best are carried on: exact on 4 nodes, and at most k x CHAINS x 255 steps on any machine. Three slips of
the original are left out: of three aligned resources only the last pair's preference counted; a resource that does not
care vouched for one that does; and fewer nodes won over more preferred resources, though that rule comes first.

Source: Katalyst, pkg/agent/orm/topology, policy numeric.
"""

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from reconciler.placement.masks import Options, Ranker, common

CHAINS: Final = 512


class Chain(NamedTuple):
    """Nested nodes. ``mask``: of the aligned resources, None when none of them cares; ``by_resource``: of each."""

    mask: int | None
    by_resource: dict[str, int]
    masks: frozenset[int]
    preferred: int
    score: int

    def key(self, rank: Ranker) -> tuple[object, ...]:
        """The better chain first."""
        widest = max((mask.bit_count() for mask in self.masks), default=0)
        return -self.preferred, widest, rank.key(self.mask or 0, self.score), sorted(self.masks)


def best_chain(
    options: Mapping[str, Options], aligned: Collection[str], rank: Ranker, *, limit: int | None
) -> Chain | None:
    """The best chain; None when the rules cannot be kept. ``limit``: hints of each resource that are looked at."""
    if not all(one.scores for one in options.values()):
        return None
    if limit is not None:
        options = {name: one.cut(rank, limit) for name, one in options.items()}
    together = {name: one for name, one in options.items() if name in aligned}
    chains = [Chain(None, {}, frozenset(), 0, 0)]
    if together:
        scores = common(together.values(), preferred=False)
        chains = [
            Chain(mask, dict.fromkeys(together, mask), frozenset({mask}), 0, score)
            for mask, score in scores.items()
            if any(mask in one.preferred for one in together.values())
        ]
    for name, one in options.items():
        if name not in together:
            chains = _extended(chains, name, one, rank)
    return min(chains, key=lambda chain: chain.key(rank), default=None)


def _extended(chains: list[Chain], name: str, options: Options, rank: Ranker) -> list[Chain]:
    """Every chain with every hint that keeps it nested; of equal ones the one with more that is preferred."""
    found: dict[tuple[int | None, frozenset[int]], Chain] = {}
    for chain in chains:
        for mask, score in options.scores.items():
            rank.steps += 1
            if any(mask & other not in (mask, other) for other in chain.masks):
                continue
            longer = Chain(
                chain.mask,
                {**chain.by_resource, name: mask},
                chain.masks | {mask},
                chain.preferred + (mask in options.preferred),
                chain.score + score,
            )
            known = found.get((chain.mask, longer.masks))
            if known is None or (known.preferred, known.score) < (longer.preferred, longer.score):
                found[chain.mask, longer.masks] = longer
    return sorted(found.values(), key=lambda chain: chain.key(rank))[:CHAINS]
