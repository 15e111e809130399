from collections.abc import Mapping
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.placement.sizes import FittedSizes, SizeConfig, fit, granted, next_sizes, regulate
from state.cpu import PoolSize
from tests.fakes.constants import varied

PLAIN = varied(SizeConfig(headroom_percent=0), headroom_milli=0, minimum_cpus=1)


def size(cpus: int, *, at: float = 0.0, shrunk: float = 0.0) -> PoolSize:
    return PoolSize(wanted_milli=cpus * 1000, cpus=cpus, changed_at=at, shrunk_at=shrunk, reason="before")


@pytest.mark.parametrize(
    ("wanted", "threads", "config", "expected"),
    [
        pytest.param(7100, 1, PLAIN, 8, id="rounded up"),
        pytest.param(8000, 1, PLAIN, 8, id="a whole number stays"),
        pytest.param(8001, 2, PLAIN, 10, id="whole cores"),
        pytest.param(0, 1, varied(SizeConfig(), headroom_milli=0), 2, id="the minimum"),
        pytest.param(-5, 2, varied(SizeConfig(), headroom_milli=0, minimum_cpus=3), 4, id="the minimum in whole cores"),
        pytest.param(4000, 1, SizeConfig(), 5, id="the least headroom"),
        pytest.param(40_000, 1, SizeConfig(), 44, id="headroom in percent"),
    ],
)
def test_a_new_pool_gets_what_it_wants_at_once(wanted: int, threads: int, config: SizeConfig, expected: int) -> None:
    pool_size = regulate(None, wanted, 7.0, config, threads=threads)
    assert (pool_size.cpus, pool_size.changed_at, pool_size.wanted_milli) == (expected, 7.0, wanted)


@pytest.mark.parametrize(
    ("before", "wanted", "after_s", "threads", "expected"),
    [
        pytest.param(8, 12_000, 1, 1, 12, id="growth within a step"),
        pytest.param(8, 40_000, 1, 1, 18, id="growth by a step of ten"),
        pytest.param(60, 200_000, 1, 1, 90, id="growth by half of a large pool"),
        pytest.param(8, 12_000, 0.9, 1, 8, id="growth waits for its interval"),
        pytest.param(9, 40_000, 1, 2, 20, id="growth ends on a whole core"),
        pytest.param(12, 4000, 29, 1, 12, id="shrinking waits for its interval"),
        pytest.param(12, 4000, 30, 1, 10, id="shrinking by a step of two"),
        pytest.param(100, 4000, 30, 1, 90, id="shrinking by a tenth of a large pool"),
        pytest.param(12, 10_500, 30, 1, 11, id="shrinking within a step, not below what is wanted"),
        pytest.param(12, 10_600, 30, 1, 12, id="half a CPU below is noise"),
        pytest.param(12, 9200, 30, 2, 12, id="with cores of two threads a whole CPU below is"),
        pytest.param(16, 1000, 30, 4, 12, id="a core of four threads is more than the step"),
        pytest.param(15, 1000, 30, 4, 12, id="an uneven size shrinks to a whole core"),
        pytest.param(12, 12_000, 99, 1, 12, id="what fits stays"),
        pytest.param(8, 40_000, -5, 1, 18, id="after a reboot it may grow"),
        pytest.param(12, 4000, -5, 1, 10, id="after a reboot it may shrink"),
    ],
)
def test_a_step(before: int, wanted: int, after_s: float, threads: int, expected: int) -> None:
    pool_size = regulate(size(before, at=100.0), wanted, 100.0 + after_s, PLAIN, threads=threads)
    assert pool_size.cpus == expected
    if expected == before:
        assert pool_size == size(before, at=100.0)
    else:
        assert pool_size.changed_at == 100.0 + after_s
        assert (pool_size.shrunk_at == pool_size.changed_at) == (expected < before)


def test_a_pool_that_has_just_grown_does_not_shrink_at_once() -> None:
    grown = regulate(size(8), 12_000, 100.0, PLAIN)
    assert regulate(grown, 8000, 129.0, PLAIN) == grown
    assert regulate(grown, 8000, 130.0, PLAIN).cpus == 10


def test_after_a_reboot_the_times_start_again_and_limits_hold() -> None:
    held = regulate(size(8, at=5000.0, shrunk=4000.0), 8000, 10.0, PLAIN)
    assert (held.cpus, held.changed_at, held.shrunk_at) == (8, 10.0, 10.0)
    assert regulate(held, 1000, 11.0, PLAIN) == held
    grown = regulate(size(8, at=5000.0, shrunk=4000.0), 9000, 10.0, PLAIN)
    assert (grown.cpus, grown.changed_at, grown.shrunk_at) == (9, 10.0, 10.0)


@given(
    before=st.integers(1, 400),
    wanted=st.integers(0, 400_000),
    elapsed=st.floats(-10, 100),
    threads=st.sampled_from([1, 2, 4]),
    config=st.builds(
        varied,
        st.just(SizeConfig()),
        minimum_cpus=st.integers(1, 10),
        grow_step_cpus=st.integers(1, 20),
        grow_step_percent=st.integers(0, 100),
        shrink_step_cpus=st.integers(1, 20),
        shrink_step_percent=st.integers(0, 100),
    ),
)
def test_a_step_goes_towards_the_demand_and_within_its_limit(
    before: int, wanted: int, elapsed: float, threads: int, config: SizeConfig
) -> None:
    previous = size(before, at=100.0)
    pool_size = regulate(previous, wanted, 100.0 + elapsed, config, threads=threads)
    goal = regulate(None, wanted, 0.0, config, threads=threads).cpus
    assert min(before, goal) <= pool_size.cpus <= max(before, goal)
    up = max(config.grow_step_cpus, before * config.grow_step_percent // 100)
    down = max(config.shrink_step_cpus, before * config.shrink_step_percent // 100)
    assert before - max(down, threads) <= pool_size.cpus <= before + up + threads - 1
    if pool_size.cpus != before:
        assert pool_size.cpus % threads == 0


@given(wanted=st.integers(0, 100_000), before=st.integers(1, 100), threads=st.sampled_from([1, 2]))
def test_a_steady_demand_ends_in_a_steady_size(wanted: int, before: int, threads: int) -> None:
    pool_size = size(before)
    for turn in range(1, 60):
        pool_size = regulate(pool_size, wanted, 30.0 * turn, SizeConfig(), threads=threads)
    goal = regulate(None, wanted, 0.0, SizeConfig(), threads=threads).cpus
    # At most the band of noise above, and whatever it is: it stays.
    assert (
        goal
        <= pool_size.cpus
        <= max(goal, regulate(None, wanted + 500 * threads, 0.0, SizeConfig(), threads=threads).cpus)
    )
    assert regulate(pool_size, wanted, 1e6, SizeConfig(), threads=threads) == pool_size


def test_what_the_cut_leaves_is_remembered_once_and_steps_go_on_from_what_was_asked() -> None:
    squeezed = granted(regulate(size(8), 20_000, 100.0, PLAIN), 9, size(8), 100.0)
    assert (squeezed.cpus, squeezed.asked, squeezed.cut, squeezed.changed_at) == (9, 18, True, 100.0)
    assert "reduced to 9" in squeezed.reason
    again = regulate(squeezed, 20_000, 200.0, PLAIN)
    assert (again.cpus, again.asked) == (20, 20)
    held = granted(again, 9, squeezed, 200.0)
    assert (held.cpus, held.asked) == (9, 20)
    assert regulate(held, 20_000, 300.0, PLAIN) == held
    assert granted(held, 9, held, 300.0) == held


def test_a_cut_that_changes_replaces_the_text_of_the_one_before() -> None:
    squeezed = granted(size(20, at=100.0), 9, None, 100.0)
    less = granted(squeezed, 7, squeezed, 200.0)
    assert (less.cpus, less.asked, less.changed_at) == (7, 20, 200.0)
    assert (less.reason.count("reduced to"), "reduced to 7" in less.reason) == (1, True)
    whole = granted(less, 20, less, 300.0)
    assert (whole.cpus, whole.cut, whole.changed_at, whole.reason) == (20, False, 300.0, "before")


def test_what_others_cut_away_is_given_up_without_steps() -> None:
    squeezed = granted(size(60), 20, None, 0.0)
    assert regulate(squeezed, 30_000, 100.0, PLAIN).asked == 31
    assert regulate(squeezed, 4000, 100.0, PLAIN).asked == 18


@given(cpus=st.integers(1, 100), threads=st.sampled_from([1, 2, 4]))
def test_the_demands_of_the_sizes_beside_one(cpus: int, threads: int) -> None:
    config = varied(SizeConfig(), minimum_cpus=1)
    beside = next_sizes(cpus, config, threads=threads)
    before = size(cpus)
    if beside.lower > 0 and beside.shrinks_at > 0:
        assert regulate(before, beside.shrinks_at, 100.0, config, threads=threads).cpus == beside.lower
        assert regulate(before, beside.shrinks_at + 1, 100.0, config, threads=threads).cpus >= cpus
    assert cpus < (upper := regulate(before, beside.grows_at, 100.0, config, threads=threads).cpus) <= cpus + threads
    if beside.grows_at:
        assert regulate(before, beside.grows_at - 1, 100.0, config, threads=threads).cpus < upper


@pytest.mark.parametrize(
    ("sizes", "available", "expected"),
    [
        pytest.param({"b": 3, "a": 4}, 8, {"a": 4, "b": 3}, id="room: what they ask for"),
        pytest.param({"a": 0, "b": 1}, 8, {"a": 1, "b": 1}, id="room: at least one"),
        pytest.param({"a": 8, "b": 4}, 6, {"a": 4, "b": 2}, id="in proportion"),
        pytest.param({"a": 5, "b": 3, "c": 2}, 7, {"a": 4, "b": 2, "c": 1}, id="the largest remainder, then size"),
        pytest.param({"a": 4, "b": 4, "c": 4}, 7, {"a": 3, "b": 2, "c": 2}, id="all alike: the lower name"),
        pytest.param({"a": 100, "b": 1, "c": 1}, 10, {"a": 8, "b": 1, "c": 1}, id="never to nothing"),
        pytest.param({"a": 9, "b": 9}, 2, {"a": 1, "b": 1}, id="one each"),
        pytest.param({}, 4, {}, id="no pool"),
    ],
)
def test_the_cut(sizes: dict[str, int], available: int, expected: dict[str, int]) -> None:
    fitted_sizes = fit(sizes, available)
    assert fitted_sizes == FittedSizes(sizes=expected)
    assert list(fitted_sizes.sizes) == sorted(sizes)


def test_fewer_cpus_than_pools_are_shared_by_those_that_ask_for_least() -> None:
    sizes = {"a": 1, "b": 9, "c": 1, "d": 4}
    assert fit(sizes, 3) == FittedSizes(sizes={"b": 1, "d": 1}, shared=("a", "c"))
    for few in (1, 0, -1):
        assert fit(sizes, few) == FittedSizes(sizes={}, shared=("a", "b", "c", "d"))


asks = st.dictionaries(st.sampled_from(["a", "b", "c", "d", "e", "f"]), st.integers(0, 60), min_size=1)


def exact(sizes: Mapping[str, int], available: int) -> dict[str, Fraction]:
    """Step 1 of the rule in fractions: the level at which max(1, level x size) fills all CPUs."""
    numbers = {name: max(1, size) for name, size in sizes.items()}
    # The level is linear between the points at which a pool leaves its one CPU.
    points = sorted({Fraction(1, number) for number in numbers.values()} | {Fraction(0), Fraction(1)})

    def total(level: Fraction) -> Fraction:
        return sum((max(Fraction(1), level * number) for number in numbers.values()), Fraction(0))

    low = max(point for point in points if total(point) <= available)
    slope = sum(number for number in numbers.values() if low * number >= 1)
    level = low + (available - total(low)) / slope if slope else low
    return {name: max(Fraction(1), level * number) for name, number in numbers.items()}


@given(sizes=asks, available=st.integers(0, 200))
def test_the_sum_fits_nobody_has_nothing_and_each_is_next_to_its_share(sizes: dict[str, int], available: int) -> None:
    fitted_sizes = fit(sizes, available)
    assert sum(fitted_sizes.sizes.values()) + bool(fitted_sizes.shared) <= max(1, available)
    assert sorted([*fitted_sizes.sizes, *fitted_sizes.shared]) == sorted(sizes)
    assert all(cpus >= 1 for cpus in fitted_sizes.sizes.values())
    number = sum(max(1, size) for size in sizes.values())
    assert bool(fitted_sizes.shared) == (available < len(sizes))
    if available >= number:
        assert sum(fitted_sizes.sizes.values()) == number
    elif not fitted_sizes.shared:
        assert sum(fitted_sizes.sizes.values()) == available
        for name, share in exact(sizes, available).items():
            assert abs(fitted_sizes.sizes[name] - share) < 1


@given(sizes=asks, available=st.integers(0, 200), data=st.data())
def test_the_cut_is_the_same_in_any_order_and_no_pool_gets_less_for_asking_more(
    sizes: dict[str, int], available: int, data: st.DataObject
) -> None:
    cut = fit(sizes, available)
    assert fit(dict(data.draw(st.permutations(sorted(sizes.items())))), available) == cut
    name, more = data.draw(st.sampled_from(sorted(sizes))), data.draw(st.integers(1, 30))
    assert fit({**sizes, name: sizes[name] + more}, available).sizes.get(name, 0) >= cut.sizes.get(name, 0)
    for larger, cpus in cut.sizes.items():
        assert all(cpus >= cut.sizes.get(other, 0) for other in sizes if sizes[larger] > sizes[other])


@given(sizes=asks, available=st.integers(6, 200))
def test_one_cpu_more_takes_at_most_one_from_any_pool(sizes: dict[str, int], available: int) -> None:
    before, after = (fit(sizes, count).sizes for count in (available, available + 1))
    assert all(after[name] >= before[name] - 1 for name in before)
