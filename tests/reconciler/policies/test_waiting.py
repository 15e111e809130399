import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.policies.harm import HarmConfig
from reconciler.policies.waiting import OwnWaiting, PodWaiting, expected, learn, level_of

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


def test_what_was_learned_fades() -> None:
    known = learned(BUSY)
    assert expected(known, BUSY, 300.0) == pytest.approx(expected(known, BUSY, 0.0) / 2)


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e5)), max_size=80))
def test_what_is_kept_of_a_pod_is_bounded_and_a_percentage(samples: list[tuple[float, float]]) -> None:
    known: OwnWaiting = {}
    for number, (run, wait) in enumerate(samples):
        known = learn(known, PodWaiting(run, wait), float(number))
        assert 0.0 <= expected(known, PodWaiting(run, wait), float(number)) <= 100.0
    assert len(known) <= 18
