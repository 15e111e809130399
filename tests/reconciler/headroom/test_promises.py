"""Whether promised headroom was there, minute by minute; and the buckets of the amounts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.headroom.histogram import CPU_MILLI, MEMORY_BYTES, RATIO, Buckets
from reconciler.headroom.promises import WINDOW, PromiseHour, PromiseMinute, PromiseSum, PromiseWindow

SCALES = (CPU_MILLI, MEMORY_BYTES)
MINUTES = st.lists(st.builds(PromiseMinute, st.integers(0, 1 << 50), st.none() | st.integers(0, 1 << 50)), max_size=20)


@pytest.mark.parametrize("buckets", SCALES)
@given(amount=st.floats(0.0, 1e15))
def test_an_amount_is_in_its_bucket_and_the_bucket_is_narrow(buckets: Buckets, amount: float) -> None:
    index = buckets.index(amount)
    assert buckets.start(index) <= amount
    if index < len(buckets) - 1:
        assert amount < buckets.end(index)
    assert buckets.end(index) <= max(buckets.end(0), buckets.start(index) * (1 + RATIO))


@pytest.mark.parametrize("buckets", SCALES)
@given(amounts=st.lists(st.integers(0, 1 << 38), min_size=1, max_size=30))
def test_a_median_is_exact_to_a_bucket(buckets: Buckets, amounts: list[int]) -> None:
    counts: dict[int, int] = {}
    for amount in amounts:
        counts[buckets.index(amount)] = counts.get(buckets.index(amount), 0) + 1
    middle = sorted(amounts)[(len(amounts) - 1) // 2]
    median = buckets.median(counts)
    assert median is not None
    assert buckets.index(median) == buckets.index(middle)


def test_of_no_amount_there_is_no_median_and_of_an_unknown_bucket_the_last() -> None:
    assert CPU_MILLI.median({}) is None
    assert CPU_MILLI.median({99_999: 1}) == CPU_MILLI.middle(len(CPU_MILLI) - 1)
    assert CPU_MILLI.median({-5: 1}) == 0.0


def test_a_promise_counts_for_an_hour_after_it_has_fallen() -> None:
    window = PromiseWindow()
    window.add(8000, 8000)
    window.add(6000, 6000)
    assert window.minute() == PromiseMinute(8000, 7000)
    for _ in range(WINDOW - 1):
        window.add(2000, 2000)
        assert window.minute() == PromiseMinute(8000, 2000)
    window.add(2000, 2000)
    assert window.minute() == PromiseMinute(2000, 2000)


def test_a_minute_without_a_reading_is_neither_kept_nor_broken() -> None:
    window, hour = PromiseWindow(), PromiseHour()
    window.add(4000, None)
    hour.cpu.add(window.minute(), CPU_MILLI)
    hour.cpu.add(window.minute(), CPU_MILLI)
    assert (hour.cpu.kept, hour.cpu.broken, hour.cpu.unknown) == (0, 0, 2)
    assert hour.cpu.promised == {}


@pytest.mark.parametrize(
    ("promised", "available", "broken"),
    [(1000, 950, False), (1000, 949, True), (0, 0, False), (10, 9, True), (1000, 2000, False)],
)
def test_a_twentieth_less_is_no_broken_promise(promised: int, available: int, broken: bool) -> None:
    assert PromiseMinute(promised, available).is_broken is broken


def test_a_restart_goes_on_with_the_promises_of_the_last_hour() -> None:
    window = PromiseWindow()
    window.add(8000, 8000)
    window.minute()
    window.add(500, 500)
    for age_s, promised in ((0.0, 8000), (57 * 60.0, 8000), (58 * 60.0, 500), (3600.0, 0), (-9e9, 8000), (9e12, 0)):
        again = PromiseWindow(window.tops, age_s)
        again.add(0, 0)
        assert again.minute().promised == promised, age_s
        assert len(again.tops) <= WINDOW


@given(one=MINUTES, two=MINUTES)
def test_two_rows_merged_are_the_row_of_all_their_minutes(one: list[PromiseMinute], two: list[PromiseMinute]) -> None:
    sums = [PromiseSum(), PromiseSum(), PromiseSum()]
    for minute in one:
        sums[0].add(minute, MEMORY_BYTES)
    for minute in two:
        sums[1].add(minute, MEMORY_BYTES)
    for minute in one + two:
        sums[2].add(minute, MEMORY_BYTES)
    sums[0].merge(sums[1])
    assert sums[0] == sums[2]
    assert sums[2].kept + sums[2].broken + sums[2].unknown == len(one + two)
