"""Sums over windows, compared with the documents' definition, computed anew for each window."""

import random
from collections.abc import Sequence

import pytest

from reconciler.detectors.base import VictimView
from reconciler.detectors.run_queue import RunQueueConfig, _seen
from reconciler.detectors.windows import COVERED, highest, mean, weighed
from reconciler.signals.history import STALE_S, History, SampleSeries
from state.evidence import SampleFrame

Points = Sequence[tuple[float, float]]


def stood(points: Points, start: float, end: float, fresh_s: float) -> list[tuple[float, float]]:
    """(value, seconds that it counts for in the window)."""
    pairs = []
    for index, (at, value) in enumerate(points):
        before = points[index - 1][0] if index else at - fresh_s / STALE_S
        gap = at - before > 2.5 * fresh_s / STALE_S
        if gap and not start < at <= end:
            continue
        if (part := min(at, end) - max(before, at - fresh_s, start)) > 0:
            pairs.append((value, part))
    return pairs


def a_series(made: random.Random, every_s: float) -> SampleSeries:
    series, at = SampleSeries(60), 1000.0
    for _ in range(made.randint(1, 150)):
        at += every_s * made.choice([1.0, 1.0, 1.0, made.uniform(0.9, 1.1), 2.0, 9.0])
        series.add(at, made.choice([0.0, made.random(), 50 * made.random()]))
    return series


@pytest.mark.parametrize("seed", range(60))
def test_a_window_is_its_samples_by_the_time_that_they_stand_for(seed: int) -> None:
    made = random.Random(seed)
    every_s = made.choice([0.5, 1.0, 10.0])
    series, fresh_s = a_series(made, every_s), STALE_S * every_s
    points = list(series)
    for _ in range(20):
        end = points[-1][0] + every_s * made.choice([0.0, 0.3, 1.0, -5.0, -30.0])
        length = every_s * made.choice([1, 2, 10, 60])
        parts = stood(points, end - length, end, fresh_s)
        seen_s = sum(span for _, span in parts)
        pair, high = weighed(series, end - length, end, fresh_s), highest(series, end - length, end, fresh_s)
        if not parts:
            assert (pair, high) == (None, None)
            continue
        expected = sum(value * span for value, span in parts) / seen_s
        assert pair == pytest.approx((expected, seen_s), rel=1e-12)
        # Of a sample that was measured after the window a small part says nothing about its highest value.
        inside = [value for at, value in points if end - length < at <= end]
        much = [value for value, part in parts if value in inside or part > every_s / 2] or [parts[-1][0]]
        assert high == max(much)
        enough = seen_s >= COVERED * max(length, every_s) - every_s
        assert mean(series, end, length, fresh_s) == (pytest.approx(expected, rel=1e-12) if enough else None)


@pytest.mark.parametrize("seed", range(60))
def test_windows_of_waiting_are_each_what_lies_in_them(seed: int) -> None:
    made = random.Random(seed)
    every_s = made.choice([0.5, 1.0, 3.0])
    config = RunQueueConfig(windows=made.choice([3, 5, 10]), bad=2, window_s=made.choice([1.5, 2.0, 7.0]))
    series = a_series(made, every_s)
    points = list(series)
    now = points[-1][0] + made.choice([0.0, 0.2, 1.0])
    fresh_s = STALE_S * every_s
    frame = SampleFrame(at_s=now, wall_s=0.0)
    sight = VictimView(subject="node", pod=None, frame=frame, history=History(), fresh_s=fresh_s)
    length = max(config.window_s, every_s)
    expected: list[float | None] = []
    for index in range(config.windows):
        parts = stood(points, now - (index + 1) * length, now - index * length, fresh_s)
        seen_s = sum(span for _, span in parts)
        enough = parts and seen_s >= length / 2
        expected.append(sum(value * span for value, span in parts) / seen_s if enough else None)
    values = _seen(config, sight, series)
    assert [value is None for value in values] == [value is None for value in expected]
    assert [value for value in values if value is not None] == pytest.approx(
        [value for value in expected if value is not None], rel=1e-12
    )
