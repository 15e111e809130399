"""The node is closed at once, opened late, and not closed for ever."""

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from reconciler.responses.closing import (
    ClosingChange,
    ClosingPast,
    ClosingState,
    ClosingTurn,
    advance,
    causes_of,
    kept,
    reopen_s,
    resumed,
)
from reconciler.responses.config import ClosingConfig
from reconciler.responses.eviction.resources import EvictedResource
from reconciler.responses.eviction.triggers.base import Shortage
from reconciler.responses.ladder import EscalationMemory, EscalationState
from reconciler.responses.steps import Dimension, ResponseStep
from state.closing import NodeMark
from state.measures import Response
from tests.fakes.constants import varied

CONFIG = varied(ClosingConfig(), reopen_s=100, longest_s=10_000)
SHORT = {"memory_pressure node": "memory_pressure: 1 GiB available"}
WALL = 1.8e9


class Node:
    """Advances second by second."""

    def __init__(self, config: ClosingConfig = CONFIG) -> None:
        self.config = config
        self.state = ClosingState()
        self.now = 0.0

    def at(self, now: float, causes: Mapping[str, str] = {}) -> ClosingChange | None:  # read only
        self.now = now
        self.state, change = advance(self.state, causes, (now, WALL + now), self.config)
        return change

    def restart(self, after_s: float = 5.0) -> None:
        """Another run, whose clock is another one; ``now`` is of the wall clock."""
        past = kept(self.state, (self.now, WALL + self.now))
        self.now += after_s
        self.state = resumed(past, (self.now, WALL + self.now))

    @property
    def is_closed(self) -> bool:
        return self.state.closed is not None


def test_a_shortage_closes_the_node_at_once_and_its_end_opens_it_later() -> None:
    node = Node()
    assert node.at(0) is None
    change = node.at(5, SHORT)
    assert change is not None
    assert (change.turn, change.closed.reason) == (ClosingTurn.CLOSED, "memory_pressure: 1 GiB available")
    assert (change.closed.since_s, change.closed.until_s) == (WALL + 5, WALL + 10_005)
    assert node.at(50) is None
    assert node.at(149) is None
    change = node.at(150)
    assert change is not None
    assert (change.turn, change.words) == (ClosingTurn.OPENED, "no shortage for 100 s")
    assert not node.is_closed


def test_a_shortage_that_comes_back_meanwhile_starts_the_time_anew_and_changes_no_text() -> None:
    node = Node()
    node.at(0, SHORT)
    before = node.state.closed
    node.at(10)
    node.at(90, {"disk node": "disk: 10 % free"})
    assert node.state.closed == before  # each other text would be another plan
    node.at(91)
    assert node.at(190) is None
    assert node.at(191) is not None


def test_each_relapse_doubles_the_time_up_to_eight_times_and_a_long_calm_forgets_them() -> None:
    node = Node()
    now, times = 0.0, []
    for _ in range(6):
        node.at(now, SHORT)
        times.append(reopen_s(node.state, CONFIG))
        node.at(now + 1)
        now += 1 + times[-1]
        assert node.at(now) is not None
        now += 60
    assert times == [100, 200, 400, 800, 800, 800]
    node.at(now + 601, SHORT)
    assert reopen_s(node.state, CONFIG) == 100


def test_after_the_longest_time_it_is_opened_and_stays_open_until_the_shortage_was_over() -> None:
    node = Node()
    node.at(0, SHORT)
    assert node.at(9_999, SHORT) is None
    change = node.at(10_000, SHORT)
    assert change is not None
    assert change.turn is ClosingTurn.AGED
    assert node.at(10_001, SHORT) is None
    assert not node.is_closed
    node.at(10_002)
    assert node.at(10_003, SHORT) is not None


def test_off_by_the_configuration_it_opens_and_another_mark_is_taken_over() -> None:
    node = Node()
    node.at(0, SHORT)
    node.config = replace(CONFIG, mark=NodeMark.NO_SCHEDULE)
    assert node.at(1, SHORT) is None
    assert node.state.closed is not None
    assert node.state.closed.mark is NodeMark.NO_SCHEDULE
    node.config = replace(CONFIG, enabled=False)
    change = node.at(2, SHORT)
    assert change is not None
    assert change.words == "closing.enabled is false"
    assert node.at(3, SHORT) is None


def test_the_text_is_bounded_and_names_how_many_more_causes_there_are() -> None:
    node = Node()
    node.at(0, {"a": "x" * 5000, "b": "second", "c": "third"})
    assert node.state.closed is not None
    assert node.state.closed.reason == f"{'x' * 200}; and 2 more causes"


def shortage(trigger: str) -> Shortage:
    return Shortage(trigger=trigger, good=EvictedResource.MEMORY, evidence="12 % free")


def climb(*steps: ResponseStep, shadow: bool = False) -> EscalationMemory:
    state = EscalationState(rule="cpu", victim="pod:a", title="shop/web", shadow=shadow, steps=steps)
    return EscalationMemory(climbs={"cpu pod:a": state})


CLOSE = ResponseStep(response=Response.CLOSE, what=Dimension.NODE, amount=0, before=0, at_s=1, severity=1)


@pytest.mark.parametrize(
    ("pressures", "enforced", "ladder", "expected"),
    [
        ([shortage("disk")], ["disk"], EscalationMemory(), {"disk node": "disk: 12 % free"}),
        ([shortage("disk")], [], EscalationMemory(), {}),
        ([shortage("rss_overuse")], ["rss_overuse"], EscalationMemory(), {}),
        ([], [], climb(CLOSE), {"cpu pod:a": "victim shop/web (cpu)"}),
        ([], [], climb(CLOSE, shadow=True), {}),
        ([], [], climb(replace(CLOSE, response=Response.HOLD, what=Dimension.BUDGET)), {}),
    ],
    ids=["trigger", "dry run", "one pod's own", "ladder", "shadow", "other step"],
)
def test_the_causes_are_what_is_enforced(
    pressures: list[Shortage], enforced: list[str], ladder: EscalationMemory, expected: dict[str, str]
) -> None:
    assert causes_of(pressures, enforced, ladder) == expected


def test_the_age_counts_from_the_first_closing_however_often_the_daemon_starts() -> None:
    node = Node()
    node.at(0, SHORT)
    for hour in range(1, 10):
        node.at(hour * 1000, SHORT)
        node.restart()
        node.restart()
        assert not node.is_closed
        # The first pass of a run has measured nothing yet.
        node.at(node.now + 1)
        change = node.at(node.now + 5, SHORT)
        assert change is not None
        assert (change.closed.since_s, change.closed.until_s) == (WALL, WALL + 10_000)
    change = node.at(10_000, SHORT)
    assert change is not None
    assert change.turn is ClosingTurn.AGED
    node.restart()
    node.at(node.now + 1)
    assert node.at(node.now + 5, SHORT) is None
    node.restart()
    assert node.at(node.now + 5, SHORT) is None
    # Gone for as long as a closed node waits for, it is another shortage.
    node.at(11_000)
    node.at(11_100)
    change = node.at(11_200, SHORT)
    assert change is not None
    assert change.closed.since_s == WALL + 11_200


@pytest.mark.parametrize("after_s", [5, 400])
def test_a_node_whose_age_is_over_before_it_is_closed_again_is_not_closed_for_a_moment(after_s: float) -> None:
    node = Node(varied(CONFIG, longest_s=300))
    node.at(0, SHORT)
    node.at(250, SHORT)
    node.restart(after_s=after_s)
    node.at(node.now + 1)
    assert node.at(node.now + 90, SHORT) is None
    assert node.state.spent


@pytest.mark.parametrize("after_s", [601, -1])
def test_what_an_earlier_run_knew_is_old_after_a_while_and_no_time_at_all_of_another_clock(after_s: float) -> None:
    node = Node()
    node.at(0, SHORT)
    node.at(100, SHORT)
    node.restart(after_s=after_s)
    assert node.state == ClosingState()


def test_of_an_open_node_nothing_is_kept() -> None:
    assert kept(ClosingState(), (1.0, WALL)) == ClosingPast()
    assert resumed(ClosingPast(), (1.0, WALL)) == ClosingState()


@pytest.mark.parametrize("jump_s", [7200.0, -7200.0])
def test_a_clock_that_is_set_changes_what_the_mark_says_and_nothing_else(jump_s: float) -> None:
    def at(now: float, causes: Mapping[str, str], wall_s: float) -> ClosingChange | None:
        state.append(advance(state[-1], causes, (now, wall_s), CONFIG)[0])
        return advance(state[-2], causes, (now, wall_s), CONFIG)[1]

    state = [ClosingState()]
    assert at(0, SHORT, WALL) is not None
    for now in range(1, 60):
        # It is adjusted, too: by less than the mark says.
        assert at(now, SHORT, WALL + now + now % 30) is None
        assert state[-1].closed == state[1].closed
    assert at(60, SHORT, WALL + 60 + jump_s) is None
    closed = state[-1].closed
    assert closed is not None
    assert (closed.since_s, closed.until_s) == (WALL + jump_s, WALL + jump_s + CONFIG.longest_s)
    assert at(61, {}, WALL + 61 + jump_s) is None
    change = at(161, {}, WALL + 161 + jump_s)
    assert change is not None
    assert change.turn is ClosingTurn.OPENED
