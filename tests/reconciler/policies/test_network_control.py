"""The waterline law: down at once, up slowly, never up on an unknown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.policies.network_control import limits_of, split, step, use
from state.network import ByteCounters, LinkLimits, Throughput

LINK = limits_of(1_000, 10, 40, 80)
MBIT = 125_000


def test_percents_of_a_link_are_bytes_a_second() -> None:
    assert LinkLimits(link=1_000 * MBIT, floor=100 * MBIT, ceiling=400 * MBIT, waterline=800 * MBIT) == LINK
    assert limits_of(1, 1, 1, 50).floor == 1_250
    assert limits_of(1, 0.5, 0.5, 50) == LinkLimits(link=125_000, floor=1_000, ceiling=1_000, waterline=62_500)


@pytest.mark.parametrize(
    ("ceiling", "online", "after"),
    [
        (400, 0, 400),
        (400, 400, 400),
        (400, 500, 300),
        (400, 750, 100),
        (400, 5_000, 100),
        (100, 0, 130),
        (380, 0, 400),
        (100, 695, 100),
        (100, None, 100),
        (0, None, 100),
        (900, None, 400),
    ],
    ids=[
        *("idle", "at the line", "down at once", "the floor", "more than the link", "up by a tenth", "the last step"),
        *("too little to tell", "unknown", "unknown at start", "above the ceiling"),
    ],
)
def test_the_next_ceiling(ceiling: int, online: int | None, after: int) -> None:
    assert step(ceiling * MBIT, None if online is None else online * MBIT, LINK) == after * MBIT


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        (None, ByteCounters(at=2, online=10, be=0), None),
        (ByteCounters(at=1, online=0, be=0), ByteCounters(at=3, online=10, be=4), Throughput(online=5, be=2, pods=0)),
        (
            ByteCounters(at=1, online=0, be=0),
            ByteCounters(at=3, online=10, be=0, pods=6),
            Throughput(online=2, be=0, pods=3),
        ),
        (
            ByteCounters(at=1, online=0, be=0),
            ByteCounters(at=3, online=2, be=0, pods=6),
            Throughput(online=0, be=0, pods=3),
        ),
        (ByteCounters(at=1, online=20, be=0), ByteCounters(at=3, online=10, be=0), None),
        (ByteCounters(at=1, online=0, be=0, pods=9), ByteCounters(at=3, online=10, be=0), None),
        (ByteCounters(at=3, online=0, be=0), ByteCounters(at=3, online=10, be=0), None),
    ],
    ids=["first", "rate", "with pods", "pods within the node", "made anew", "our device made anew", "no time"],
)
def test_what_is_used_of_a_link(before: ByteCounters | None, now: ByteCounters, found: Throughput | None) -> None:
    assert use(before, now) == found


@pytest.mark.parametrize(
    ("be", "pods", "mine"),
    [(0, 0, 200), (400, 0, 360), (0, 400, 40), (200, 200, 200), (100, 300, 120)],
    ids=["nobody sends", "only the class", "only pods", "both", "by use"],
)
def test_one_ceiling_is_given_out_by_use(be: int, pods: int, mine: int) -> None:
    assert split(400 * MBIT, be * MBIT, pods * MBIT) == (mine * MBIT, (400 - mine) * MBIT)


@given(st.integers(20, 400 * MBIT), st.integers(0, 400 * MBIT), st.integers(0, 400 * MBIT))
def test_parts_are_never_more_than_the_whole_and_nobody_has_nothing(ceiling: int, be: int, pods: int) -> None:
    mine, theirs = split(ceiling, be, pods)
    assert mine + theirs == ceiling
    assert min(mine, theirs) >= ceiling // 10


def test_who_needs_it_comes_to_have_it() -> None:
    mine = theirs = 200
    for _ in range(20):
        mine, theirs = split(400, min(mine, 20), theirs)
    assert theirs >= 320


rates = st.integers(0, 2_000 * MBIT)


@given(rates, st.none() | rates, rates)
def test_the_ceiling_stays_within_its_bounds_and_more_use_never_raises_it(
    ceiling: int, online: int | None, more: int
) -> None:
    after = step(ceiling, online, LINK)
    assert LINK.floor <= after <= LINK.ceiling
    if online is not None:
        assert step(ceiling, online + more, LINK) <= after
        assert after <= max(LINK.floor, LINK.waterline - online)
    else:
        assert after <= max(LINK.floor, ceiling)


@given(rates, st.integers(0, 400 * MBIT))
def test_below_the_line_it_reaches_its_top_in_a_dozen_steps(ceiling: int, online: int) -> None:
    for _ in range(12):
        ceiling = step(ceiling, online, LINK)
    assert ceiling == LINK.ceiling


@pytest.mark.parametrize(("floor", "ceiling"), [(10, 15), (1, 10), (10, 11), (39, 40)])
def test_a_ceiling_close_to_the_floor_is_reached_as_well(floor: int, ceiling: int) -> None:
    bounds = limits_of(1_000, floor, ceiling, 80)
    now = bounds.floor
    for _ in range(12):
        now = step(now, 0, bounds)
    assert now == bounds.ceiling
