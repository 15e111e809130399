import random

import pytest

from reconciler.signals.history import History, Series
from state.evidence import Frame, Sample


@pytest.mark.parametrize("seed", range(20))
def test_a_tail_is_what_came_after_and_the_one_before(seed: int) -> None:
    made = random.Random(seed)
    series = Series(made.randint(1, 8))
    kept: list[tuple[float, float]] = []
    at = 0.0
    for value in range(made.randint(0, 30)):
        at += made.choice([0.5, 1.0, 3.0])
        series.add(at, float(value))
        kept = [*kept, (at, float(value))][-series._length :]
        assert list(series) == kept
        for since in (-1.0, at - 4, at - 1, at, at + 1):
            later = [point for point in kept if point[0] > since]
            assert series.tail(since) == [*kept[: len(kept) - len(later)][-1:], *later]
            assert series.since(since) == later


def test_of_an_empty_ring_there_is_no_tail() -> None:
    assert Series().tail(0) == []
    assert Series().last is None


def test_a_reading_told_twice_counts_once_and_who_is_gone_is_forgotten() -> None:
    history = History()
    history.add(Frame(at_s=10, wall_s=0, samples={"pod:a": {"cpi": Sample(1.0, 0.0)}}))
    history.add(Frame(at_s=11, wall_s=0, samples={"pod:a": {"cpi": Sample(1.0, 1.0)}}))
    series = history.series("pod:a", "cpi")
    assert series is not None
    assert list(series) == [(10, 1.0)]
    assert history.fresh("pod:a", "cpi", 12, 3) == 1.0
    assert history.fresh("pod:a", "cpi", 14, 3) is None
    history.add(Frame(at_s=12, wall_s=0, samples={}))
    assert history.series("pod:a", "cpi") is None
