from hypothesis import given
from hypothesis import strategies as st

from reconciler.signals.cpu import UseBySide
from state.model import PodClass

ALL, BE = "/kubepods", "/kubepods/besteffort"


def test_the_first_reading_is_where_counting_starts() -> None:
    assert UseBySide().add({ALL: 900, BE: 400}, ALL, BE, {}) == (0, 0)


def test_besteffort_counts_as_reclaimed_and_the_rest_as_online() -> None:
    sums = UseBySide()
    sums.add({ALL: 900, BE: 400}, ALL, BE, {})
    assert sums.add({ALL: 1000, BE: 430}, ALL, BE, {}) == (70, 30)
    assert sums.add({ALL: 1001, BE: 431}, ALL, BE, {}) == (70, 31)


def test_odd_pods_count_on_their_own_side() -> None:
    odd = {f"{BE}/podx": PodClass.SYSTEM, "/kubepods/burstable/pody": PodClass.RECLAIMED}
    sums = UseBySide()
    sums.add({ALL: 0, BE: 0, f"{BE}/podx": 0, "/kubepods/burstable/pody": 0}, ALL, BE, odd)
    used = {ALL: 100, BE: 50, f"{BE}/podx": 20, "/kubepods/burstable/pody": 5}
    assert sums.add(used, ALL, BE, odd) == (65, 35)


def test_a_counter_that_restarted_or_is_missing_adds_nothing() -> None:
    sums = UseBySide()
    sums.add({ALL: 900, BE: 400}, ALL, BE, {})
    assert sums.add({ALL: 10, BE: 5}, ALL, BE, {}) == (0, 0)
    assert sums.add({ALL: 20}, ALL, BE, {}) == (10, 0)


@given(st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 10**12), st.integers(0, 10**12)), max_size=20))
def test_the_sums_never_fall(readings: list[tuple[int, int, int]]) -> None:
    sums = UseBySide()
    before = (0, 0)
    for whole, part, odd in readings:
        used = {ALL: whole, BE: part, f"{BE}/p": odd}
        now = sums.add(used, ALL, BE, {f"{BE}/p": PodClass.SHARED})
        assert now[0] >= before[0]
        assert now[1] >= before[1]
        before = now
