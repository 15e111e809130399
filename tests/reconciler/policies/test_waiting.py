import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.policies.harm import HarmConfig
from reconciler.policies.waiting import (
    OwnWaiting,
    PodJudgement,
    PodWaiting,
    disprove,
    expected,
    is_quiet,
    judge,
    learn,
    level_of,
    quiet_since,
)

CONFIG = HarmConfig()
"""Harm is above 5 % and above 5 thousandths."""
BUSY = PodWaiting(900.0, 100.0)


def learned(waiting: PodWaiting, times: int = 30, at: float = 0.0) -> OwnWaiting:
    known: OwnWaiting = {}
    for _ in range(times):
        known = learn(known, waiting, at)
    return known


@pytest.mark.parametrize(
    ("waiting", "own", "level"),
    [
        (PodWaiting(0.0, 0.0), 0.0, 0.0),
        (BUSY, 0.0, 2.0),
        (BUSY, 10.0, 0.0),
        (BUSY, 7.5, 0.5),
        (PodWaiting(2.0, 2.0), 0.0, 0.4),
        (PodWaiting(0.0, 50.0), 0.0, 10.0),
        (PodWaiting(900.0, 100.0, 20_000.0), 0.0, 0.05),
        (PodWaiting(900.0, 100.0, 100.0), 0.0, 2.0),
    ],
    ids=[
        "asleep",
        "twice the share",
        "as without BE",
        "half of the limit",
        "too little to matter",
        "starved",
        "5 us each",
        "1 ms each",
    ],
)
def test_the_level_counts_what_is_above_the_own_waiting_by_all_limits(
    waiting: PodWaiting, own: float, level: float
) -> None:
    assert level_of(waiting, own, CONFIG) == pytest.approx(level)


def test_waiting_without_be_is_learned_and_is_no_harm() -> None:
    known = learned(BUSY)
    assert expected(known, BUSY, 0.0) == pytest.approx(10.0, rel=0.1)
    assert level_of(BUSY, expected(known, BUSY, 0.0), CONFIG) == 0.0


def test_it_is_learned_by_use_and_a_lower_use_stands_in_for_a_higher_one() -> None:
    known = learned(BUSY)
    assert expected(known, PodWaiting(100.0, 100.0), 0.0) == 0.0
    assert expected(known, PodWaiting(4000.0, 100.0), 0.0) == expected(known, BUSY, 0.0)


def test_where_no_lower_use_is_known_the_next_higher_one_stands_in() -> None:
    """Use varies from sample to sample about a power of two: one such pod was cut for, over and over."""
    known = learned(PodWaiting(520.0, 520.0))
    below = PodWaiting(500.0, 500.0)
    assert level_of(below, expected(known, below, 0.0), CONFIG) == 0.0
    assert expected(known, PodWaiting(250.0, 250.0), 0.0) == 0.0
    lower = {**known, **learned(PodWaiting(100.0, 1.0))}
    assert expected(lower, below, 0.0) == expected(lower, PodWaiting(100.0, 1.0), 0.0) < 5.0


def test_what_was_learned_fades() -> None:
    known = learned(BUSY)
    assert expected(known, BUSY, 300.0) == pytest.approx(expected(known, BUSY, 0.0) / 2)


def waiting(percent: float) -> PodWaiting:
    """So much of its time, at a use that is always of the same range."""
    return PodWaiting(900.0, 900.0 * percent / (100.0 - percent))


def half_lives(known: OwnWaiting, since: float, times: int) -> float:
    """By how many half-lives it fades in the time of so many."""
    now = since + 300.0 * times
    return math.log2(expected(known, waiting(10.0), since) / expected(known, waiting(10.0), now))


@pytest.mark.parametrize(
    ("first", "later", "after_s", "fades"),
    [
        ([10.0], 10.0, 30.0, 0.5),
        ([10.0], 10.0, 29.9, 1.0),
        ([10.0], 11.0, 30.0, 0.5),
        ([10.0], 11.1, 30.0, 1.0),
        ([10.0], 8.9, 30.0, 1.0),
        ([10.0, 14.0], 16.0, 30.0, 0.5),
        ([10.0, 14.0], 16.1, 30.0, 1.0),
    ],
    ids=["same", "too soon", "one point", "more than a point", "less", "twice the deviation", "above the deviation"],
)
def test_the_same_waiting_after_a_while_makes_what_was_learned_last_twice_as_long(
    first: list[float], later: float, after_s: float, fades: float
) -> None:
    known: OwnWaiting = {}
    for percent in first:
        known = learn(known, waiting(percent), 1000.0)
    known = learn(known, waiting(later), 1000.0 + after_s)
    assert half_lives(known, 1000.0 + after_s, 1) == pytest.approx(fades)


def test_what_was_learned_lasts_at_most_eight_times_as_long() -> None:
    known: OwnWaiting = {}
    for time in range(6):
        known = learn(known, waiting(10.0), 30.0 * time)
    assert half_lives(known, 150.0, 8) == pytest.approx(1.0)


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e5)), max_size=80))
def test_what_is_kept_of_a_pod_is_bounded_and_a_percentage(samples: list[tuple[float, float]]) -> None:
    known: OwnWaiting = {}
    for number, (run, wait) in enumerate(samples):
        known = learn(known, PodWaiting(run, wait), float(number))
        assert 0.0 <= expected(known, PodWaiting(run, wait), float(number)) <= 100.0
    assert len(known) <= 18


CALM = PodWaiting(900.0, 1.0)
LEARNED_S = 20.0


def taught(burst: int, every: int) -> PodJudgement:
    """A pod that waits in bursts of so many samples, learned while BE work is at its minimum."""
    pod = PodJudgement()
    for number in range(round(LEARNED_S * 10)):
        waiting = PodWaiting(900.0, 300.0) if number % every < burst else CALM
        pod = judge(pod, waiting, number / 10, CONFIG, quiet=True)
    return pod


def harmful(pod: PodJudgement, waitings: list[PodWaiting]) -> list[bool]:
    """Of samples beside BE work: which of them count."""
    found = []
    for number, waiting in enumerate(waitings):
        pod = judge(pod, waiting, LEARNED_S + number / 10, CONFIG, quiet=False)
        found.append(pod.level >= 1)
    return found


def test_bursts_as_without_be_are_no_harm() -> None:
    bursts = [PodWaiting(900.0, 300.0) if number % 30 < 3 else CALM for number in range(600)]
    assert not any(harmful(taught(3, 30), bursts))
    assert any(harmful(PodJudgement(), bursts))


@pytest.mark.parametrize(
    "waitings",
    [
        [PodWaiting(900.0, 300.0)] * 10,
        [PodWaiting(900.0, 900.0)],
        [PodWaiting(900.0, 300.0) if number % 5 < 3 else CALM for number in range(100)],
    ],
    ids=["longer", "worse", "more frequent"],
)
def test_bursts_that_are_longer_worse_or_more_frequent_are_harm(waitings: list[PodWaiting]) -> None:
    assert any(harmful(taught(3, 30), waitings))


def test_waiting_that_lasts_is_learned_as_the_usual_one_and_is_no_burst() -> None:
    pod = taught(1, 1)
    assert pod.expected == pytest.approx(25.0, rel=0.1)
    assert pod.own_harm.harmful < 1


def test_no_sample_at_the_minimum_of_be_is_a_reason_to_cut_nor_to_raise_before_it_is_learned() -> None:
    first = judge(PodJudgement(), BUSY, 0.0, CONFIG, quiet=True)
    assert CONFIG.quiet_percent / 100 < first.level < 1


def test_less_waiting_beside_be_disproves_what_was_learned_and_a_short_while_does_not() -> None:
    known = learned(BUSY)
    for _ in range(10):
        known = disprove(known, CALM)
    known = disprove(known, BUSY)
    for _ in range(19):
        known = disprove(known, CALM)
    assert expected(known, BUSY, 0.0) > 0
    assert expected(disprove(known, CALM), BUSY, 0.0) == 0


@pytest.mark.parametrize(
    ("used", "ceiling", "quiet"),
    [
        (100, 8000, True),
        (101, 8000, False),
        (200, 8000, False),
        (120, 120, False),
        (120, 100, True),
        (126, 100, False),
        (None, 100, True),
        (None, 120, False),
    ],
)
def test_be_is_at_its_minimum_by_its_use_or_where_that_is_unknown_by_its_ceiling(
    used: int | None, ceiling: int, quiet: bool
) -> None:
    """More than the minimum only by what a quota at the minimum lets pass in one sample."""
    assert is_quiet(used, ceiling, 100) is quiet
    assert not is_quiet(None, 8000, 100)


def test_one_sample_without_be_work_hides_no_harm_of_the_same_size() -> None:
    own = learn({}, PodWaiting(500.0, 500.0), 0.0)
    assert expected(own, PodWaiting(500.0, 500.0), 0.0) == 50.0
    assert level_of(PodWaiting(500.0, 1500.0), expected(own, PodWaiting(500.0, 1500.0), 0.0), HarmConfig()) >= 4


def test_a_time_without_be_work_begins_anew_after_each_break_and_after_a_jump_of_the_clock() -> None:
    since = quiet_since(None, 1.0, quiet=True)
    assert since == quiet_since(since, 1.2, quiet=True) == 1.0
    assert quiet_since(since, 1.3, quiet=False) is None
    assert quiet_since(since, 0.5, quiet=True) == 0.5


@given(
    st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e5), st.booleans(), st.floats(-10, 100)), max_size=120),
)
def test_a_judgement_is_bounded_whatever_the_samples_and_the_clock_do(
    samples: list[tuple[float, float, bool, float]],
) -> None:
    pod, now = PodJudgement(), 0.0
    for run, wait, quiet, step_s in samples:
        now += step_s
        pod = judge(pod, PodWaiting(run, wait), now, CONFIG, quiet=quiet)
        assert 0 <= pod.own_harm.harmful <= pod.own_harm.samples <= 601
        assert 0 <= pod.left <= 40
        assert pod.level >= 0
        assert not quiet or pod.level < 1
