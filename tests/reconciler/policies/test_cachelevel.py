import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.policies.cacheplan import LevelState, begin, step
from state.cache import Contention, LevelControl, ShareLevel, ShareLevels
from state.evidence import Sample

LAW, LEVELS = LevelControl(), ShareLevels()
MIDDLE = LevelState(level=ShareLevel(cache_percent=35, mba_percent=35))
CALM = Contention(bandwidth={0: 10.0})


def missing(age_s: float = 1.0, **pods: float) -> dict[str, Sample]:
    """Misses per 1000 instructions, all counted so long ago."""
    return {uid: Sample(value, age_s) for uid, value in pods.items()}


@pytest.mark.parametrize(
    ("strain", "cache", "memory", "words"),
    [
        pytest.param(Contention(misses=missing(a=15.0, b=12.0)), 20, 10, "a: 15 cache misses", id="misses take both"),
        pytest.param(
            Contention(bandwidth={0: 95.0, 1: 20.0}),
            35,
            10,
            "domain 0: 95 % in use",
            id="a full bus takes bandwidth only",
        ),
        pytest.param(
            Contention(bandwidth={0: 95.0}, reclaimed={0: 1.0}), 35, 35, "above", id="a bus full of online work is left"
        ),
        pytest.param(Contention(bandwidth={0: 95.0}, online=0), 35, 35, "waiting", id="nobody is there to suffer"),
        pytest.param(
            Contention(misses=missing(a=7.0), bandwidth={0: 10.0}),
            35,
            35,
            "above the lower thresholds",
            id="the dead band",
        ),
        pytest.param(
            Contention(misses=missing(a=1.0, b=7.0), bandwidth={0: 10.0}, online=2),
            *(35, 35, "above the lower thresholds"),
            id="one of two pods in the dead band",
        ),
        pytest.param(
            Contention(misses=missing(a=5.0), bandwidth={0: 10.0}),
            *(35, 35, "above the lower thresholds"),
            id="misses at the lower threshold",
        ),
        pytest.param(
            Contention(bandwidth={0: 10.0, 1: 60.0}),
            *(35, 35, "above the lower thresholds"),
            id="one of two domains at the lower threshold",
        ),
        pytest.param(
            Contention(misses=missing(a=1.0), bandwidth={0: 70.0}),
            *(35, 35, "above the lower thresholds"),
            id="no misses, and bandwidth in the dead band",
        ),
        pytest.param(Contention(), 35, 35, "no increase", id="unknown"),
        pytest.param(Contention(bandwidth={0: 95.0}, age_s=60.0), 35, 35, "no increase", id="stale bandwidth"),
        pytest.param(Contention(misses=missing(500.0, a=90.0)), 35, 35, "no increase", id="stale misses"),
        pytest.param(
            Contention(bandwidth={0: 10.0}, blind=True), 35, 35, "no increase", id="one domain of two is unknown"
        ),
        pytest.param(
            Contention(misses=missing(a=1.0), online=2), 35, 35, "no increase", id="one online pod of two is counted"
        ),
        pytest.param(Contention(misses=missing(a=1.0)), 35, 35, "waiting", id="all are counted, and calm"),
        pytest.param(
            Contention(misses=missing(a=1.0), bandwidth={0: 95.0}, age_s=60.0),
            *(35, 35, "waiting"),
            id="all are counted, and bandwidth is unknown",
        ),
        pytest.param(CALM, 35, 35, "waiting", id="calm, not for long enough"),
    ],
)
def test_one_step(strain: Contention, cache: int, memory: int, words: str) -> None:
    after = step(MIDDLE, strain, 100.0, LAW, LEVELS)
    assert after.level == ShareLevel(cache_percent=cache, mba_percent=memory)
    assert words in after.reason


def test_a_count_moves_the_ways_once_and_keeps_them_low_while_it_is_high() -> None:
    law = LevelControl(step_down_percent=5, calm_s=0.0)
    state, log = MIDDLE, []
    for now in range(100, 106):
        # Counted at 99 and again at 103.5, while the bus is calm.
        strain = Contention(misses=missing(now - (99.0 if now < 104 else 103.5), a=30.0), bandwidth={0: 10.0})
        state = step(state, strain, float(now), law, LEVELS)
        log.append(state.level.cache_percent)
    assert log == [30, 30, 30, 30, 25, 25]


def test_a_full_bus_does_not_make_a_count_of_misses_old() -> None:
    state = step(MIDDLE, Contention(bandwidth={0: 95.0}), 100.0, LAW, LEVELS)
    assert state.level.cache_percent == 35
    late = Contention(bandwidth={0: 95.0}, misses=missing(3.0, a=30.0))
    assert step(state, late, 102.0, LAW, LEVELS).level.cache_percent == 20


def test_each_step_up_waits_for_counts_from_after_the_last() -> None:
    law = LevelControl(calm_s=0.0)
    state, log = begin(LEVELS), []
    for now in range(9):
        # Each pod is counted for a while, in turns: both again every four seconds.
        strain = Contention(misses=missing(now % 4 + 0.5, a=1.0) | missing((now + 2) % 4 + 0.5, b=1.0), online=2)
        state = step(state, strain, float(now), law, LEVELS)
        log.append(state.level.cache_percent)
    assert log == [25, 25, 25, 25, 30, 30, 30, 30, 35]


def test_growth_is_slow_and_starts_over_after_every_worry() -> None:
    state = begin(LEVELS)
    log = []
    for now in range(26):
        strain = Contention(bandwidth={0: 70.0}) if now == 12 else CALM
        state = step(state, strain, float(now), LAW, LEVELS)
        log.append(state.level.cache_percent)
    assert log[:6] == [20, 20, 20, 20, 20, 25]
    assert log[10] == 30
    assert log[12:18] == [30] * 6
    assert log[18] == 35


def test_a_level_that_the_configuration_no_longer_allows_is_left_at_once() -> None:
    narrow = ShareLevels(
        low_cache_percent=5,
        low_mba_percent=5,
        middle_cache_percent=5,
        middle_mba_percent=5,
        high_cache_percent=10,
        high_mba_percent=8,
    )
    assert step(MIDDLE, CALM, 0.0, LAW, narrow).level == narrow.high


STRAINS = st.builds(
    Contention,
    misses=st.dictionaries(st.sampled_from("abc"), st.builds(Sample, st.floats(0, 100), st.floats(0, 300))),
    blind=st.booleans(),
    bandwidth=st.none() | st.dictionaries(st.integers(0, 3), st.floats(0, 150)),
    reclaimed=st.dictionaries(st.integers(0, 3), st.floats(0, 100)),
    online=st.integers(0, 3),
    age_s=st.floats(0, 30),
)


@given(st.lists(STRAINS, max_size=40))
def test_the_level_stays_within_its_bounds_and_never_grows_on_what_is_unknown(strains: list[Contention]) -> None:
    state = begin(LEVELS)
    for now, strain in enumerate(strains):
        after = step(state, strain, float(now), LAW, LEVELS)
        for name in ("cache_percent", "mba_percent"):
            value, before = getattr(after.level, name), getattr(state.level, name)
            assert getattr(LEVELS.low, name) <= value <= getattr(LEVELS.high, name)
            assert value <= before + LAW.step_up_percent
            buses = bool(strain.bandwidth) and not strain.blind and strain.age_s <= LAW.stale_s
            counted = sum(sample.age_s <= LAW.miss_stale_s for sample in strain.misses.values())
            if strain.online and not buses and counted < strain.online:
                assert value <= before
        state = after
