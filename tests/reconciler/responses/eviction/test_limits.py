"""How many may go, and what the past of it remembers."""

import msgspec
import pytest

from reconciler.responses.eviction.config import LimitsConfig
from reconciler.responses.eviction.limits import (
    EvictionHistory,
    EvictionRecord,
    cooldown_left,
    load_history,
    owner_of,
    owner_room,
    retry_block,
    room,
    saved_history,
    unasked_block,
    update,
)
from state.eviction import EvictionCase, EvictionOrder, EvictionOutcome
from tests.fakes.constants import varied
from tests.reconciler.responses.eviction.world import START, WALL, World, be


def turn(
    at: float,
    outcome: EvictionOutcome | None = EvictionOutcome.DONE,
    *,
    uid: str = "a",
    ended: float | None = None,
    unasked: str = "",
    returned: bool = False,
) -> EvictionRecord:
    ended_s = 0.0 if outcome is None else at if ended is None else ended
    return EvictionRecord(
        id=f"{at}-{uid}",
        uid=uid,
        owner=f"ci/ReplicaSet/{uid}",
        trigger="node_memory",
        at_s=at,
        outcome=outcome,
        ended_s=ended_s,
        unasked=unasked,
        returned=returned,
    )


def case(
    uid: str, outcome: EvictionOutcome | None, *, decided: float = WALL, ended: float = 0.0, id_: str = ""
) -> EvictionCase:
    order = EvictionOrder(
        id=id_ or f"order-{uid}",
        uid=uid,
        title=f"ci/{uid}",
        namespace="ci",
        name=uid,
        owner=f"ReplicaSet/{uid}",
        cause="node_memory",
        evidence="",
        decided_s=decided,
    )
    return EvictionCase(order=order, outcome=outcome, ended_s=ended)


LIMITS = varied(LimitsConfig(per_minute=2, per_10_minutes=4, per_owner=2, per_owner_percent=50), per_pass=3)


@pytest.mark.parametrize(
    ("turns", "count"),
    [
        ([], 2),
        ([turn(START - 10)], 1),
        ([turn(START - 61)], 2),
        ([turn(START - 300, uid=str(n)) for n in range(3)], 1),
        ([turn(START - 601, uid=str(n)) for n in range(9)], 2),
        # A long grace is no way round a cap: it counts until a minute after its end.
        ([turn(START - 300, ended=START - 10)], 1),
        ([turn(START - 3000, None)], 1),
        ([turn(START - 10, EvictionOutcome.FAILED)], 1),
        (
            [
                turn(START - 10, outcome)
                for outcome in (EvictionOutcome.REFUSED, EvictionOutcome.GONE, EvictionOutcome.ABANDONED)
            ],
            2,
        ),
    ],
)
def test_what_the_caps_leave(turns: list[EvictionRecord], count: int) -> None:
    assert room(LIMITS, EvictionHistory(turns=tuple(turns)), START).count == count


def test_the_reason_names_the_cap_that_binds() -> None:
    assert room(LIMITS, EvictionHistory(turns=(turn(START),)), START).reason == "limit per minute, 1 of 2 used"
    assert room(varied(LimitsConfig(), per_pass=1), EvictionHistory(), START).reason == "limit per pass"


@pytest.mark.parametrize(
    ("outcome", "waits"),
    [
        (EvictionOutcome.DONE, 10.0),
        (EvictionOutcome.FAILED, 0.0),
        (EvictionOutcome.REFUSED, 0.0),
        (EvictionOutcome.GONE, 0.0),
        (None, 0.0),
    ],
)
def test_only_a_success_starts_the_pause_and_it_starts_at_its_end(
    outcome: EvictionOutcome | None, waits: float
) -> None:
    """rubik pauses whenever it has looked."""
    past = EvictionHistory(turns=(turn(START - 100, outcome, ended=START - 20),))
    assert cooldown_left(past, "node_memory", 30, START) == waits
    assert cooldown_left(past, "disk", 30, START) == 0.0


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (turn(START - 10, None), "is being evicted"),
        (turn(START - 10, EvictionOutcome.REFUSED), "its eviction was refused 10 s ago"),
        (turn(START - 10, EvictionOutcome.FAILED), "its eviction failed 10 s ago"),
        (turn(START - 10, EvictionOutcome.DONE), "was evicted 10 s ago and restarted in place"),
        (turn(START - 121, EvictionOutcome.REFUSED), None),
        (turn(START - 301, EvictionOutcome.DONE), None),
        (turn(START - 299, EvictionOutcome.FAILED, returned=True), "was ended 5 min ago and restarted in place"),
        (turn(START - 301, EvictionOutcome.FAILED, returned=True), None),
        (turn(START - 10, EvictionOutcome.GONE), None),
        (turn(START - 10, EvictionOutcome.ABANDONED), None),
        (turn(START - 10, EvictionOutcome.DONE, uid="b"), None),
    ],
)
def test_who_was_tried_is_left_alone_for_a_while(last: EvictionRecord, words: str | None) -> None:
    assert retry_block(LimitsConfig(), EvictionHistory(turns=(last,)), "a", START) == words


REFUSED, WHY = EvictionOutcome.REFUSED, "HTTP 401"


def test_a_pod_whose_budget_could_not_be_asked_may_be_ordered_at_once_when_it_is_critical() -> None:
    past = EvictionHistory(turns=(turn(START - 10, REFUSED, unasked=WHY), turn(START - 10, REFUSED, uid="b")))
    assert retry_block(LimitsConfig(), past, "a", START) == "its eviction was refused 10 s ago"
    assert retry_block(LimitsConfig(), past, "a", START, critical=True) is None
    assert retry_block(LimitsConfig(), past, "b", START, critical=True) == "its eviction was refused 10 s ago"


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ([turn(START - 10, REFUSED, unasked=WHY)], None),  # it may be this pod
        ([turn(START - 10, REFUSED, unasked=WHY, uid="a"), turn(START - 20, REFUSED, unasked="old", uid="b")], WHY),
        ([turn(START - 10, REFUSED, unasked=WHY, uid="a"), turn(START - 20, REFUSED, unasked=WHY, uid="a")], None),
        ([turn(START - 10, REFUSED, unasked=WHY, uid="a"), turn(START - 121, REFUSED, unasked=WHY, uid="b")], None),
        # Since then the API server has decided about a pod.
        ([*(turn(START - 20, REFUSED, unasked=WHY, uid=uid) for uid in "ab"), turn(START - 5, uid="c")], None),
        ([*(turn(START - 20, REFUSED, unasked=WHY, uid=uid) for uid in "ab"), turn(START - 5, REFUSED, uid="c")], None),
        ([*(turn(START - 20, REFUSED, unasked=WHY, uid=uid) for uid in "ab"), turn(START - 5, None, uid="c")], WHY),
        ([*(turn(START - 20, REFUSED, unasked=WHY, uid=uid) for uid in "ab"), turn(START - 5, unasked=WHY)], WHY),
    ],
)
def test_two_pods_whose_budgets_could_not_be_asked_stop_further_orders(
    turns: list[EvictionRecord], words: str | None
) -> None:
    assert unasked_block(LimitsConfig(), EvictionHistory(turns=tuple(turns)), START) == words


def test_the_record_has_what_the_case_could_not_ask_and_that_its_pod_returned() -> None:
    world = World()
    refused = msgspec.structs.replace(case("a", REFUSED, ended=WALL), unasked=WHY)
    failed = msgspec.structs.replace(case("b", EvictionOutcome.FAILED, ended=WALL), rounds=1)
    accepted = msgspec.structs.replace(case("c", EvictionOutcome.DONE, ended=WALL), unasked=WHY, accepted=True)
    past = update(EvictionHistory(), [refused, failed, accepted], world.frame())
    assert {record.uid: (record.unasked, record.returned) for record in past.turns} == {
        "a": (WHY, False),
        "b": ("", True),
        "c": ("", False),
    }
    row = msgspec.msgpack.encode(saved_history(past, world.frame()))
    assert msgspec.msgpack.decode(row, type=EvictionHistory).turns[0].unasked in {WHY, ""}


def test_of_an_owners_pods_a_number_and_a_share_may_go() -> None:
    world = World(*(be(f"web-{n}", owner="ReplicaSet/web") for n in range(5)), be("one"), be("bare", owner=None))
    web = "ci/ReplicaSet/web"
    left = owner_room(LIMITS, EvictionHistory(), world.frame())
    assert left == {web: 2, "ci/ReplicaSet/one": 1, "ci/ci/bare": 1}
    assert owner_of(world.pods["bare"]) == "ci/ci/bare"
    gone = msgspec.structs.replace(turn(START - 10, uid="web-9"), owner=web)
    assert owner_room(LIMITS, EvictionHistory(turns=(gone,)), world.frame())[web] == 1
    # Two there were, one has gone: of the half that may go nothing is left.
    world.pods = {"web-0": world.pods["web-0"]}
    assert owner_room(LIMITS, EvictionHistory(turns=(gone,)), world.frame())[web] == 0
    refused = msgspec.structs.replace(gone, outcome=EvictionOutcome.REFUSED)
    assert owner_room(LIMITS, EvictionHistory(turns=(refused,)), world.frame())[web] == 1


def test_cases_tell_how_orders_ended_and_an_order_without_a_case_lapses() -> None:
    world = World()
    past = EvictionHistory(turns=(msgspec.structs.replace(turn(START, None), id="order-a"), turn(START, None, uid="b")))
    world.at = START + 30
    past = update(past, [case("a", None)], world.frame())
    assert sorted(past.leaving(LIMITS, world.frame())) == ["a", "b"]
    world.at = START + 61
    past = update(past, [case("a", None)], world.frame())
    assert sorted(past.leaving(LIMITS, world.frame())) == ["a"]
    world.at = START + 70
    past = update(past, [case("a", EvictionOutcome.DONE, ended=WALL + 65)], world.frame())
    assert sorted((record.uid, record.outcome, record.ended_s) for record in past.turns) == [
        ("a", EvictionOutcome.DONE, START + 65),
        ("b", EvictionOutcome.ABANDONED, START + 61),
    ]
    world.at = START + 4000
    assert update(past, [case("a", EvictionOutcome.DONE, ended=WALL + 65)], world.frame()) == EvictionHistory()


def test_cases_of_an_earlier_run_count_although_nothing_else_was_kept() -> None:
    world = World()
    cases = [case("a", EvictionOutcome.DONE, decided=WALL - 40, ended=WALL - 20), case("b", None, decided=WALL + 999)]
    past = update(EvictionHistory(), cases, world.frame())
    assert [(record.uid, record.at_s, record.open) for record in past.turns] == [
        ("a", START - 40, False),
        ("b", START, True),
    ]
    assert room(LIMITS, past, START).count == 0
    assert cooldown_left(past, "node_memory", 30, START) == 10


def test_the_past_survives_a_restart_and_a_clock_that_was_set_back_lifts_no_limit() -> None:
    world = World()
    past = EvictionHistory(turns=(turn(START - 30, ended=START - 20), turn(START - 5, None, uid="b")))
    row = msgspec.msgpack.encode(saved_history(past, world.frame()))
    stored = msgspec.msgpack.decode(row, type=EvictionHistory)
    again = load_history(stored, at_s=50.0, wall_s=WALL + 10)
    assert [record.at_s for record in again.turns] == pytest.approx([10.0, 35.0])
    assert cooldown_left(again, "node_memory", 50, 50.0) == pytest.approx(20.0)
    assert room(LIMITS, again, 50.0).count == 0
    back = load_history(stored, at_s=50.0, wall_s=WALL - 3600)
    assert [record.at_s for record in back.turns] == [50.0, 50.0]
    assert cooldown_left(back, "node_memory", 30, 50.0) == 30.0
    assert room(LIMITS, back, 51.0).count == 0
