import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.policies.lending import QuotaBorrower, ceiling_us, pod_quota_us, rationed


def borrower(limit_us: int, period_us: int = 100_000) -> QuotaBorrower:
    return QuotaBorrower(path="/c", inode=1, container_id="c", limit_us=limit_us, period_us=period_us)


@pytest.mark.parametrize(
    ("limit", "percent", "cpus", "top"),
    [(100_000, 300, 8, 300_000), (100_000, 300, 2, 200_000), (100_000, 50, 8, 100_000), (900_000, 300, 8, 900_000)],
)
def test_the_ceiling(limit: int, percent: int, cpus: int, top: int) -> None:
    assert ceiling_us(limit, 100_000, percent, cpus) == top


def test_a_pod_gets_its_containers_loans_on_top_of_what_it_has_itself() -> None:
    loans = [(borrower(100_000), 150_000), (borrower(20_000, 50_000), 30_000)]
    assert pod_quota_us(170_000, 100_000, loans) == 170_000 + 50_000 + 20_000


@given(
    st.integers(1_000, 1_000_000),
    st.lists(
        st.tuples(st.integers(1_000, 10**6), st.integers(1_000, 10**6), st.integers(0, 10**6)), min_size=1, max_size=5
    ),
)
def test_no_child_is_above_a_pod_that_held_them_before(period: int, rows: list[tuple[int, int, int]]) -> None:
    """v1 refuses a child whose share of time is above its parent's."""
    loans = [(borrower(limit, own), limit + more) for limit, own, more in rows]
    own_us = -(-max(quota_borrower.limit_us * period / quota_borrower.period_us for quota_borrower, _ in loans) // 1)
    total = pod_quota_us(int(own_us), period, loans)
    assert all(lent * period <= total * quota_borrower.period_us for quota_borrower, lent in loans)


@given(st.lists(st.floats(0, 1e6), max_size=6), st.floats(-10, 1e6))
def test_what_is_granted_is_never_more_than_the_room_and_never_more_than_was_asked(
    asked: list[float], room: float
) -> None:
    wants = dict(zip("abcdef", asked, strict=False))
    granted = rationed(wants, room)
    assert granted.keys() == wants.keys()
    assert sum(granted.values()) <= max(room, 0.0) + 1e-3
    assert all(0.0 <= granted[path] <= value for path, value in wants.items())
