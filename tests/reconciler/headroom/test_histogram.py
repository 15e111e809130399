"""The histogram that forgets: quantiles, half-lives, clocks that jump, and its row."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.headroom.histogram import CPU_MILLI, DecayingHistogram, HistogramRow

HALF_S = 3600.0
SAMPLES = st.lists(st.tuples(st.floats(0.0, 2e6), st.floats(0.0, 30 * HALF_S)), min_size=1, max_size=40)
ROW = msgspec.msgpack.Decoder(HistogramRow)


def made(samples: list[tuple[float, float]]) -> DecayingHistogram:
    result = DecayingHistogram(CPU_MILLI, HALF_S)
    for amount, at_s in samples:
        result.add(amount, at_s)
    return result


@given(samples=SAMPLES, ranks=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=5))
def test_quantiles_grow_with_their_rank_and_stay_within_the_amounts(
    samples: list[tuple[float, float]], ranks: list[float]
) -> None:
    histogram = made(samples)
    quantiles = [histogram.quantile(rank) for rank in sorted(ranks)]
    assert quantiles == sorted(quantiles)
    amounts = [amount for amount, _ in samples]
    assert CPU_MILLI.end(CPU_MILLI.index(min(amounts))) <= quantiles[0]
    assert quantiles[-1] <= CPU_MILLI.end(CPU_MILLI.index(max(amounts)))


@given(amounts=st.lists(st.floats(0.0, 9e5), min_size=1, max_size=60), rank=st.floats(0.01, 0.99))
def test_of_one_moment_the_quantile_is_that_of_the_samples(amounts: list[float], rank: float) -> None:
    histogram = made([(amount, 7.0) for amount in amounts])
    bounds = sorted(CPU_MILLI.end(CPU_MILLI.index(amount)) for amount in amounts)
    place = rank * len(amounts)
    if abs(place - round(place)) > 1e-6:
        assert histogram.quantile(rank) == bounds[math.ceil(place) - 1]


def test_a_sample_counts_half_after_each_half_life() -> None:
    histogram = made([(1000.0, 0.0)] * 8)
    assert histogram.samples(0.0) == pytest.approx(8)
    assert histogram.samples(HALF_S) == pytest.approx(4)
    assert histogram.samples(3 * HALF_S) == pytest.approx(1)
    for _ in range(2):
        histogram.add(200.0, 3 * HALF_S)
    assert histogram.quantile(0.6) < 1000 < histogram.quantile(0.7), "one old sample in three"


@given(samples=SAMPLES, later=st.floats(0.0, 40 * HALF_S))
def test_time_alone_changes_no_quantile(samples: list[tuple[float, float]], later: float) -> None:
    histogram, last = made(samples), max(at_s for _, at_s in samples)
    before = histogram.quantile(0.95), histogram.samples(last)
    assert histogram.samples(last + later) <= before[1] * (1 + 1e-9)
    assert histogram.quantile(0.95) == before[0]


@pytest.mark.parametrize("at_s", [-1e12, -1e6, 1e6, 1e9, 1e15])
def test_a_time_far_away_corrupts_nothing(at_s: float) -> None:
    histogram = made([(1000.0, 100.0)] * 5)
    histogram.add(3000.0, at_s)
    histogram.add(2000.0, max(at_s, 200.0))
    assert 900 < histogram.quantile(0.95) < 3300
    assert math.isfinite(histogram.samples(max(at_s, 200.0)))


@given(samples=SAMPLES, ranks=st.lists(st.sampled_from([0.5, 0.9, 0.95, 0.98]), min_size=1))
def test_a_row_gives_back_the_quantiles_and_the_weight(samples: list[tuple[float, float]], ranks: list[float]) -> None:
    histogram, at_s = made(samples), max(at_s for _, at_s in samples)
    row = histogram.row(at_s)
    assert row is not None
    packed = msgspec.msgpack.encode(row)
    assert len(packed) < 2048
    again = DecayingHistogram.restored(ROW.decode(packed), CPU_MILLI, HALF_S, 5.0)
    assert again.samples(5.0) == pytest.approx(histogram.samples(at_s))
    for rank in ranks:
        # A weight is rounded to a 10,000th of the heaviest.
        assert again.quantile(rank - 0.01) <= histogram.quantile(rank) or rank < 0.02
        assert histogram.quantile(rank) <= again.quantile(min(1.0, rank + 0.01))


def test_of_nothing_there_is_no_row_and_no_amount() -> None:
    histogram = DecayingHistogram(CPU_MILLI, HALF_S)
    assert (histogram.row(5.0), histogram.quantile(0.95), histogram.samples(9.0)) == (None, 0.0, 0.0)
    assert made([(5000.0, 0.0)]).row(100 * HALF_S) is None


@pytest.mark.parametrize(
    "row",
    [
        HistogramRow(1.0, ()),
        HistogramRow(1.0, (3, 0)),
        HistogramRow(1.0, (3,)),
        HistogramRow(1.0, (3, 5, 2, 5)),
        HistogramRow(1.0, (3, 5, 3, 5)),
        HistogramRow(1.0, (9999, 5)),
        HistogramRow(math.nan, (3, 5)),
        HistogramRow(math.inf, (3, 5)),
    ],
)
def test_a_row_that_no_histogram_writes_is_refused(row: HistogramRow) -> None:
    with pytest.raises(ValueError, match="bucket"):
        DecayingHistogram.restored(row, CPU_MILLI, HALF_S, 0.0)
