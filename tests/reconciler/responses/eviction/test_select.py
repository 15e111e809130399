"""Several hard shortages in one pass: what was taken for the first counts for the second."""

import pytest

from reconciler.responses.eviction.config import LimitsConfig
from reconciler.responses.eviction.limits import EvictionHistory
from reconciler.responses.eviction.resources import EvictedResource
from reconciler.responses.eviction.select import RefusalReason, SelectionContext, select
from reconciler.responses.eviction.triggers.base import Shortage
from state.eviction import EvictionOutcome
from tests.reconciler.responses.eviction.plans import memory
from tests.reconciler.responses.eviction.test_limits import turn
from tests.reconciler.responses.eviction.world import GI, START, World, be

MOST = LimitsConfig(per_minute=9, per_10_minutes=9, per_owner=9, per_owner_percent=100)
UNASKED = EvictionHistory(turns=(turn(START - 10, EvictionOutcome.REFUSED, unasked="HTTP 401"),))


@pytest.mark.parametrize(
    ("limits", "past", "owner", "needs", "orders", "refused"),
    [
        # Of the 15 GiB that the second shortage needs, 10 are being freed already: another pod frees the rest.
        (MOST, EvictionHistory(), "Job/x", (5, 15), ["a", "b"], []),
        (MOST, EvictionHistory(), "Job/x", (5, 9), ["a"], [RefusalReason.COMING]),
        # A pod that may be ordered again at once for a critical shortage is not ordered twice either.
        (MOST, UNASKED, "Job/x", (5, 15), ["a", "b"], []),
        (LimitsConfig(per_owner=1), EvictionHistory(), "Job/x", (5, 15), ["a"], [RefusalReason.LIMIT]),
        (LimitsConfig(per_minute=1), EvictionHistory(), None, (5, 15), ["a"], [RefusalReason.LIMIT]),
        (LimitsConfig(per_10_minutes=1), EvictionHistory(), None, (5, 15), ["a"], [RefusalReason.LIMIT]),
        (LimitsConfig(), EvictionHistory(), None, (1, 11, 19, 40), ["a", "b", "c"], [RefusalReason.LIMIT]),
    ],
)
def test_the_victims_of_a_shortage_count_for_the_next_one(
    limits: LimitsConfig,
    past: EvictionHistory,
    owner: str | None,
    needs: tuple[int, ...],
    orders: list[str],
    refused: list[RefusalReason],
) -> None:
    amounts = {"a": 10, "b": 8, "c": 7, "d": 6}
    world = World(*(be(uid, owner=owner or f"Job/{uid}") for uid in amounts))
    for uid, gib in amounts.items():
        world.put(f"pod:{uid}", memory__rss=gib * GI)
    grounds = SelectionContext(
        config=memory(limits=limits), scene=world.scene(), past=past, leaving={}, holds={}, started_s=START - 3600
    )
    selection = select(
        grounds,
        [
            Shortage(
                trigger="node_memory",
                good=EvictedResource.MEMORY,
                evidence="",
                need=need * GI,
                hard=True,
                critical=True,
            )
            for need in needs
        ],
    )
    assert [victim.candidate.pod.uid for victim in selection.picks] == orders
    assert [refusal.why for refusal in selection.refusals] == refused
