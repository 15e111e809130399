from hypothesis import given
from hypothesis import strategies as st

from reconciler.signals.cpu import UseBySide
from state.model import PodClass

ALL, BE = "/kubepods", "/kubepods/besteffort"


def test_besteffort_counts_as_reclaimed_the_rest_as_online_and_what_restarted_or_is_missing_adds_nothing() -> None:
    sums = UseBySide()
    for used, expected in (
        ({ALL: 900, BE: 400}, (0, 0)),  # where counting starts
        ({ALL: 1000, BE: 430}, (70, 30)),
        ({ALL: 1001, BE: 431}, (70, 31)),
        ({ALL: 10, BE: 5}, (70, 31)),
        ({ALL: 20}, (80, 31)),
    ):
        assert sums.add(used, ALL, BE, {}) == expected


def test_odd_pods_count_on_their_own_side() -> None:
    odd = {f"{BE}/podx": PodClass.SYSTEM, "/kubepods/burstable/pody": PodClass.RECLAIMED}
    sums = UseBySide()
    sums.add({ALL: 0, BE: 0, f"{BE}/podx": 0, "/kubepods/burstable/pody": 0}, ALL, BE, odd)
    used = {ALL: 100, BE: 50, f"{BE}/podx": 20, "/kubepods/burstable/pody": 5}
    assert sums.add(used, ALL, BE, odd) == (65, 35)


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
