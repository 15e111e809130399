import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.detectors.moments import Moments, moments_of

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)


@given(st.lists(VALUES, min_size=1, max_size=5))
def test_merged_pieces_are_the_whole(pieces: list[list[float]]) -> None:
    whole = [value for piece in pieces for value in piece]
    merged = Moments()
    for piece in pieces:
        merged = merged.merged(moments_of(piece))
    assert merged.count == len(whole)
    assert merged.mean == pytest.approx(statistics.fmean(whole), rel=1e-9, abs=1e-6)
    assert merged.variance == pytest.approx(statistics.pvariance(whole), rel=1e-6, abs=1e-3)


def test_leaving_outliers_out_is_what_makes_sigma_shrink() -> None:
    made = random.Random(3)
    ours = theirs = moments_of([made.gauss(1.0, 0.1) for _ in range(60)])
    for _ in range(5000):
        value = made.gauss(1.0, 0.1)
        ours = ours.with_one(value)
        if value <= theirs.limit(2):
            theirs = theirs.with_one(value)
    assert ours.sigma == pytest.approx(0.1, rel=0.03)
    assert theirs.sigma < 0.095


def test_aging_changes_the_weight_only() -> None:
    moments = moments_of([1.0, 3.0]).aged(0.5)
    assert (moments.count, moments.mean, moments.variance) == (1, 2, 1)
    assert Moments().merged(Moments()) == Moments()
    assert moments_of([5.0, 5.0]).limit(3, floor=0.5) == 6.5
