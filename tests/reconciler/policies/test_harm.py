import math
import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from reconciler.policies.harm import Comparison, HarmSample, HarmState, interval_s, start, step, top_of
from tests.reconciler.policies.harm_plant import CONFIG, FLOOR, TOP, Moment, harmed_share, mean_use, run

NEAR = TOP * CONFIG.raise_percent // 100 // 4


def sample(levels: Mapping[str, float] | None, used: int | None = 4000, *, excused: bool = False) -> HarmSample:
    return HarmSample(top_milli=TOP, floor_milli=FLOOR, used_milli=used, levels=levels, excused=excused)


def after(*samples: HarmSample, begin: int = 6000) -> HarmState:
    """The state after samples, each a tenth of a second after the other."""
    state = start(begin)
    for number, item in enumerate(samples):
        state = step(state, item, number / 10, CONFIG)
    return state


CLEAR = sample({"a": 9.0})
SMALL = sample({"a": 1.5})
OTHER = sample({"b": 1.5})
CALM = sample({"a": 0.1})


@pytest.mark.parametrize(
    ("samples", "ceiling"),
    [
        ((CLEAR,), 2000),
        ((SMALL,), 6000),
        ((SMALL, SMALL), 3000),
        ((SMALL, CALM, SMALL), 3000),
        ((SMALL, CALM, CALM, SMALL), 6000),
        ((SMALL, OTHER), 6000),
        ((SMALL, OTHER, sample({"c": 1.5})), 3000),
        ((sample({"a": 9.0}, None),), 3000),
        ((sample({"a": 9.0}, FLOOR),), 6000),
        ((sample({"a": 9.0}, excused=True),), 6000),
        ((sample(None),), 6000),
        ((CLEAR, CLEAR), 2000),
    ],
    ids=[
        "clear harm: half of what is used, at once",
        "small harm: not by one sample",
        "small harm twice: a quarter",
        "twice of three",
        "not twice of four",
        "two pods, once each",
        "some pod in each of three",
        "use unknown: of the ceiling",
        "BE at its minimum is not the cause",
        "a start allowance",
        "unknown",
        "the second one may be of before the cut",
    ],
)
def test_what_is_cut(samples: tuple[HarmSample, ...], ceiling: int) -> None:
    assert after(*samples).ceiling_milli == ceiling


@pytest.mark.parametrize(
    ("levels", "cause"), [({"a": 5.0, "b": 9.0, "c": 8.0}, "b"), ({"b": 9.0, "a": 9.0, "c": 0.1}, "b"), ({}, None)]
)
def test_the_cause_is_the_pod_with_the_most_harm(levels: dict[str, float], cause: str | None) -> None:
    assert after(sample(levels)).cause == cause


def test_lasting_harm_is_cut_again_down_to_the_floor() -> None:
    state = start(TOP)
    for number in range(40):
        used = state.ceiling_milli
        state = step(state, sample({"a": 9.0}, used), number / 10, CONFIG)
    assert state.ceiling_milli == FLOOR


def test_it_rises_by_a_step_after_each_calm_while() -> None:
    ceilings = {after(*[CALM] * count).ceiling_milli for count in range(1, 22)}
    assert sorted(ceilings) == [6000, 6800, 7600]


@pytest.mark.parametrize("level", [0.6, 0.99])
def test_between_calm_and_harm_it_stays(level: float) -> None:
    assert after(*[sample({"a": level})] * 100).ceiling_milli == 6000


def test_unknown_never_raises_and_remembers_since_when() -> None:
    state = after(*[sample(None)] * 100)
    assert (state.ceiling_milli, state.unknown_since) == (6000, 0.0)
    assert step(state, CALM, 10.0, CONFIG).unknown_since is None


@pytest.mark.parametrize("missing", [2, 3, 5])
def test_a_missing_sample_is_left_out(missing: int) -> None:
    """Of so many samples one is known: they are cut by as those alone, and rise as long after as these are calm."""
    unknowns = [sample(None)] * (missing - 1)
    assert after(SMALL, *unknowns, SMALL).ceiling_milli == 3000
    assert after(*[CALM, *unknowns] * 10).ceiling_milli == 6000
    assert after(*[CALM, *unknowns] * 12).ceiling_milli == 6800
    gap = [sample(None)] * 40
    assert after(SMALL, *gap, SMALL).ceiling_milli == 6000
    assert after(*[CALM] * 8, *gap, *[CALM] * 8).ceiling_milli == 6000


def whole(levels: Mapping[str, float], used: int, top: int = 2000) -> HarmSample:
    return HarmSample(top_milli=top, floor_milli=1000, grain_milli=1000, used_milli=used, levels=levels)


@pytest.mark.parametrize(
    ("begin", "used", "level", "ceiling"),
    [(2000, 1480, 9.0, 1000), (2000, 1480, 1.5, 1000), (7000, 6900, 1.5, 5000), (7000, 6900, 9.0, 3000)],
)
def test_by_whole_cpus_it_cuts_whole_cpus(begin: int, used: int, level: float, ceiling: int) -> None:
    item = whole({"a": level}, used, 8000)
    assert after(item, item, begin=begin).ceiling_milli == ceiling


def test_by_whole_cpus_a_step_is_one_and_comes_after_the_time_of_its_parts() -> None:
    """A tenth of two CPUs a second: a whole one five seconds after the last harm."""
    harmed, calm = whole({"a": 1.5}, 900), whole({}, 900)
    ceilings = [after(harmed, *[calm] * count, begin=1000).ceiling_milli for count in (49, 50)]
    assert ceilings == [1000, 2000]


def test_by_whole_cpus_a_step_that_harms_is_taken_back_as_a_whole() -> None:
    state = replace(start(7000), wall_milli=7000, raised_at=-0.5, raised_from=6000)
    harmed = whole({"a": 1.5}, 6900, 8000)
    state = step(step(state, harmed, 0.0, CONFIG), harmed, 0.1, CONFIG)
    assert (state.ceiling_milli, state.wall_milli, state.pause_s) == (6000, 6900, 2 * CONFIG.calm_s)


@pytest.mark.parametrize(
    ("grain", "late_s", "pause_s"), [(1000, 4.9, 8.0), (1000, 5.2, 4.0), (1, 1.9, 8.0), (1, 2.2, 4.0)]
)
def test_a_step_of_a_whole_cpu_is_blamed_as_long_as_its_parts_would_take(
    grain: int, late_s: float, pause_s: float
) -> None:
    """Else a step whose harm follows just after ``blame_s`` is repeated at the same pace for ever."""
    state = replace(start(2000), wall_milli=2000, raised_at=0.0, raised_from=1000, pause_s=4.0)
    harmed = replace(whole({"a": 1.5}, 2000), grain_milli=grain)
    state = step(step(state, harmed, late_s - 0.1, CONFIG), harmed, late_s, CONFIG)
    assert (state.pause_s, state.cuts) == (pause_s, 1)


def test_a_step_that_harms_is_taken_back_and_the_next_waits_twice_as_long() -> None:
    state = replace(after(CALM), wall_milli=6000, ceiling_milli=6200, raised_at=0.5, raised_from=6000)
    harmed = sample({"a": 1.5}, 6200)
    state = step(step(state, harmed, 0.6, CONFIG), harmed, 0.7, CONFIG)
    assert (state.ceiling_milli, state.pause_s, state.cuts) == (6000 - NEAR, 2 * CONFIG.calm_s, 1)


def test_without_a_pod_that_shares_cpus_it_rises_to_the_top() -> None:
    assert after(*[sample({})] * 60).ceiling_milli == TOP


@pytest.mark.parametrize(("percent", "top"), [(0, 8000), (2, 7840), (50, 4000)])
def test_the_reserve_is_never_given(percent: int, top: int) -> None:
    assert top_of(8, FLOOR, replace(CONFIG, reserve_percent=percent)) == top


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_a_steady_load_has_no_cycle(delay: int) -> None:
    """The room of 4000 is below the law's top, and the harm grows with the excess."""
    tail = settled(list(run(lambda _: {"a": 4000}, 300, delay=delay)), 60)
    used = [moment.used for moment in tail]
    assert max(used) - min(used) <= TOP // 20
    assert min(used) >= 3600
    assert harmed_share(tail) <= 0.01


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_a_step_of_online_load_ends_harm_within_ten_samples(delay: int) -> None:
    moments = list(run(lambda now: {"a": TOP if now < 10 else 2000}, 20, delay=delay))
    late = [moment for moment in moments if 10.0 + 0.1 * (10 + delay) <= moment.at < 12]
    assert late
    assert all(moment.levels["a"] < 1 for moment in late)


def test_when_online_load_ends_be_has_everything_again_within_thirty_seconds() -> None:
    moments = list(run(lambda now: {"a": 2000 if now < 60 else TOP}, 90))
    assert moments[-1].used == TOP


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_a_ramp_is_followed(delay: int) -> None:
    """Over 200 s from the whole machine to an eighth."""
    moments = list(run(lambda now: {"a": max(1000, int(TOP - 35 * now))}, 240, delay=delay))
    assert harmed_share(moments) <= 0.04
    assert mean_use(moments) >= 0.75 * sum(max(1000, int(TOP - 35 * m.at)) for m in moments) / len(moments)


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_bursts_and_a_sawtooth_harm_for_a_small_part_of_the_time(delay: int) -> None:
    bursts = list(run(lambda now: {"a": 1000 if now % 10 < 1 else TOP}, 300, delay=delay))
    assert harmed_share(bursts, since=20) <= 0.12
    assert mean_use(bursts, since=20) >= 2000
    teeth = list(run(lambda now: {"a": int(TOP - 300 * (now % 20))}, 300, delay=delay))
    assert harmed_share(teeth, since=20) <= 0.02
    assert mean_use(teeth, since=20) >= 2000


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_two_pods_that_are_harmed_in_turn_are_both_protected(delay: int) -> None:
    def room(now: float) -> dict[str, int]:
        return {"a": TOP, "b": 3000} if round(now * 10) % 2 else {"a": 3000, "b": TOP}

    tail = settled(list(run(room, 200, delay=delay)), 60)
    assert harmed_share(tail) <= 0.01
    assert max(m.used for m in tail) - min(m.used for m in tail) <= TOP // 20


def test_noise_below_the_limits_costs_nothing() -> None:
    source = random.Random(1)
    moments = list(run(lambda _: {"a": TOP}, 300, noise=lambda _: min(0.9, abs(source.gauss(0, 0.3)))))
    assert mean_use(moments) == TOP


@given(at=st.integers(0, 300), level=st.floats(0, 1000))
def test_one_noisy_sample_costs_at_most_half_for_a_few_seconds(at: int, level: float) -> None:
    """Altogether at most what the whole machine does in 2.5 seconds; below clear harm, nothing."""
    moments = list(run(lambda _: {"a": TOP}, 60, noise=lambda now: level if round(now * 10) == at else 0.0))
    lost_s = sum(TOP - moment.used for moment in moments) / TOP / 10
    assert lost_s <= (2.5 if level >= CONFIG.clear_factor else 0.0)
    assert min(moment.used for moment in moments) >= TOP // 2
    assert moments[-1].used == TOP


LEVELS = st.one_of(st.none(), st.dictionaries(st.sampled_from("abc"), st.floats(0, 100), max_size=3))
SAMPLES = st.lists(
    st.builds(
        HarmSample,
        top_milli=st.integers(0, 16_000),
        floor_milli=st.integers(10, 500),
        used_milli=st.one_of(st.none(), st.integers(0, 20_000)),
        levels=LEVELS,
        excused=st.booleans(),
    ),
    max_size=60,
)


@given(begin=st.integers(0, 20_000), samples=SAMPLES)
def test_never_above_the_top_nor_below_the_floor_and_up_by_a_step_at_most(
    begin: int, samples: list[HarmSample]
) -> None:
    state = start(begin)
    for number, item in enumerate(samples):
        top, before = max(item.top_milli, item.floor_milli), state.ceiling_milli
        state = step(state, item, number / 10, CONFIG)
        assert item.floor_milli <= state.ceiling_milli <= top
        grown = state.ceiling_milli - min(max(before, item.floor_milli), top)
        assert grown <= max(1, top * CONFIG.raise_percent // 100)
        if item.levels is None or item.excused or any(level >= 1 for level in item.levels.values()):
            assert grown <= 0


@given(room=st.integers(1000, TOP), delay=st.integers(0, 2), begin=st.integers(FLOOR, TOP))
def test_it_settles_close_to_any_constant_room(room: int, delay: int, begin: int) -> None:
    """Within 60 s, with a cycle of at most a twentieth of the machine, and at least three quarters of the room used."""
    tail = settled(list(run(lambda _: {"a": room}, 200, delay=delay, begin=begin)), 60)
    used = [moment.used for moment in tail]
    assert max(used) - min(used) <= TOP // 20
    assert min(used) >= 0.75 * room
    assert harmed_share(tail) <= 0.02


def settled(moments: list[Moment], since: float) -> list[Moment]:
    return [moment for moment in moments if moment.at >= since]


def test_samples_are_rarer_after_a_calm_while_at_the_top_only() -> None:
    usual, rare = CONFIG.interval_s, CONFIG.calm_interval_s
    state = start(TOP)
    assert interval_s(state, TOP, 0.0, CONFIG) == usual < rare
    state = step(state, CALM, 0.0, CONFIG)
    assert [interval_s(state, TOP, now, CONFIG) for now in (1.0, 3.0)] == [usual, rare]
    # The step to the top is watched as any other.
    assert interval_s(replace(state, raised_at=2.5), TOP, 3.0, CONFIG) == usual
    # Any waiting ends that at once, harm or not.
    waits = step(state, sample({"a": 0.6}), 3.0, CONFIG)
    assert interval_s(waits, TOP, 3.0, CONFIG) == usual
    cut = step(step(state, CLEAR, 3.0, CONFIG), CALM, 3.1, CONFIG)
    assert interval_s(cut, TOP, 6.0, CONFIG) == usual


@pytest.mark.parametrize(
    ("pause", "since_last_s", "next_pause", "long_s"),
    [
        (1, math.inf, 1, 10.0),
        (1, 60.0, 2, 10.0),
        (1, 179.0, 2, 10.0),
        (1, 180.0, 1, 10.0),
        (2, 120.0, 4, 20.0),
        (4, 240.0, 8, 30.0),
        (4, 720.0, 1, 10.0),
        (8, 480.0, 16, 30.0),
        (16, 960.0, 16, 30.0),
    ],
)
def test_a_comparison_soon_after_the_last_is_the_longer_before_the_next_one(
    pause: int, since_last_s: float, next_pause: int, long_s: float
) -> None:
    now = 10_000.0
    before = Comparison(pause=pause, ended_at=now - since_last_s)
    state = HarmState(ceiling_milli=4000, wall_milli=4100, at=now - 0.1, cut_at=now - 5000, comparison=before)
    found = step(state, SMALL, now, CONFIG)
    assert (found.ceiling_milli, found.comparison.before) == (FLOOR, 4000)
    assert (found.comparison.pause, found.comparison.until) == (next_pause, now + long_s)


def test_no_comparison_begins_before_its_pause_is_over() -> None:
    before = Comparison(pause=4, ended_at=0.0)
    state = HarmState(ceiling_milli=4000, wall_milli=4100, at=239.8, comparison=before)
    assert step(state, SMALL, 239.9, CONFIG).comparison.until is None
