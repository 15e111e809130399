import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.policies.cachelevel import LevelState, Strain, begin, step
from state.cache import Level, LevelLaw, Levels

LAW, LEVELS = LevelLaw(), Levels()
MIDDLE = LevelState(level=Level(cache_percent=35, mba_percent=35))
CALM = Strain(bandwidth={0: 10.0})


@pytest.mark.parametrize(
    ("strain", "cache", "memory", "words"),
    [
        pytest.param(
            Strain(misses={"a": 30.0, "b": 25.0}), 20, 10, "a misses the cache in 30 %", id="misses take both"
        ),
        pytest.param(
            Strain(bandwidth={0: 95.0, 1: 20.0}), 35, 10, "domain 0 is 95 % used", id="a full bus takes bandwidth only"
        ),
        pytest.param(
            Strain(bandwidth={0: 95.0}, reclaimed={0: 1.0}), 35, 35, "between", id="a bus full of online work is left"
        ),
        pytest.param(Strain(bandwidth={0: 95.0}, online=0), 35, 35, "waiting", id="nobody is there to suffer"),
        pytest.param(Strain(misses={"a": 15.0}, bandwidth={0: 10.0}), 35, 35, "between the marks", id="the dead band"),
        pytest.param(Strain(), 35, 35, "nothing grows", id="unknown"),
        pytest.param(Strain(bandwidth={0: 95.0}, age_s=60.0), 35, 35, "nothing grows", id="stale"),
        pytest.param(CALM, 35, 35, "waiting", id="calm, not for long enough"),
    ],
)
def test_one_step(strain: Strain, cache: int, memory: int, words: str) -> None:
    after = step(MIDDLE, strain, 100.0, LAW, LEVELS)
    assert after.level == Level(cache_percent=cache, mba_percent=memory)
    assert words in after.reason


def test_growth_is_slow_and_starts_over_after_every_worry() -> None:
    state = begin(LEVELS)
    log = []
    for now in range(26):
        strain = Strain(bandwidth={0: 70.0}) if now == 12 else CALM
        state = step(state, strain, float(now), LAW, LEVELS)
        log.append(state.level.cache_percent)
    assert log[:6] == [20, 20, 20, 20, 20, 25]
    assert log[10] == 30
    assert log[12:18] == [30] * 6
    assert log[18] == 35


def test_a_level_that_the_configuration_no_longer_allows_is_left_at_once() -> None:
    narrow = Levels(
        low_cache_percent=5,
        low_mba_percent=5,
        middle_cache_percent=5,
        middle_mba_percent=5,
        high_cache_percent=10,
        high_mba_percent=8,
    )
    assert step(MIDDLE, CALM, 0.0, LAW, narrow).level == narrow.high


STRAINS = st.builds(
    Strain,
    misses=st.dictionaries(st.sampled_from("abc"), st.floats(0, 100)),
    bandwidth=st.none() | st.dictionaries(st.integers(0, 3), st.floats(0, 150)),
    reclaimed=st.dictionaries(st.integers(0, 3), st.floats(0, 100)),
    online=st.integers(0, 3),
    age_s=st.floats(0, 30),
)


@given(st.lists(STRAINS, max_size=40))
def test_the_level_stays_within_its_bounds_and_never_grows_on_what_is_unknown(strains: list[Strain]) -> None:
    state = begin(LEVELS)
    for now, strain in enumerate(strains):
        after = step(state, strain, float(now), LAW, LEVELS)
        for name in ("cache_percent", "mba_percent"):
            value, before = getattr(after.level, name), getattr(state.level, name)
            assert getattr(LEVELS.low, name) <= value <= getattr(LEVELS.high, name)
            assert value <= before + LAW.step_up_percent
            if strain.online and (strain.age_s > LAW.stale_s or not (strain.bandwidth or strain.misses)):
                assert value <= before
        state = after
