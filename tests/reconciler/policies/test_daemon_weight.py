"""The control law of the weight of the node's daemons."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from reconciler.policies.node_daemons import (
    LATE,
    LOWER_S,
    WeightRules,
    WeightSample,
    WeightState,
    step,
    weight_for,
)
from tests.examples import examples

RULES = WeightRules(percent=200, floor=50, window_s=60.0)
IDLE = WeightSample(use_milli=50, waits=0.0, original=1024, competing=1024, cpus=1)
"""5 % of one CPU, as a kubelet with its runtime needs."""


def run(
    samples: list[WeightSample], rules: WeightRules = RULES, *, state: WeightState | None = None
) -> list[int | None]:
    """One sample a second; the weights."""
    begin = 0.0 if state is None else 1000.0
    weights: list[int | None] = []
    for second, sample in enumerate(samples):
        state = step(state, sample, begin + second, rules)
        weights.append(state.weight)
    return weights


def settled(sample: WeightSample, rules: WeightRules = RULES) -> WeightState:
    state = None
    for second in range(200):
        state = step(state, sample, 800.0 + second, rules)
    assert state is not None
    return state


@pytest.mark.parametrize(
    ("milli", "competing", "cpus", "weight"),
    [
        (100, 1024, 1, 114),  # a tenth beside one CPU's pods: 114 of 1138
        (100, 64 * 1024, 64, 114),  # the pods' weight divides over their CPUs, that of a single task does not
        (500, 1024, 1, 1024),
        (750, 1024, 1, 3072),
        (751, 1024, 1, None),  # of one CPU no weight assures more
        (1500, 2048, 2, 6144),
        (1000, 4096, 4, 2048),  # two CPUs, half of each
        (0, 1024, 1, 0),
    ],
)
def test_the_weight_for_an_amount_of_cpu(milli: int, competing: int, cpus: int, weight: int | None) -> None:
    assert weight_for(milli, competing, cpus) == weight


@given(st.integers(1, 3000), st.integers(2, 262144), st.integers(1, 64))
def test_the_weight_assures_the_amount_on_as_few_cpus_as_can_have_it(milli: int, competing: int, cpus: int) -> None:
    weight = weight_for(milli, competing, cpus)
    if weight is None:
        assert milli > 750 * cpus
        return
    spread = max(1, -(-milli // 750))
    per_cpu = weight / spread / (weight / spread + competing / cpus)
    assert 1000 * spread * per_cpu >= milli * (1 - 1e-9)


def test_a_group_that_has_used_nothing_needs_nothing() -> None:
    assert WeightState(since=0.0).need_milli == 0
    assert step(None, replace(IDLE, use_milli=0, waits=LATE), 0.0, RULES).need_milli == 0


@pytest.mark.parametrize("uses", [(100, 50), (50, 100)])
def test_the_need_is_the_largest_use_of_the_window(uses: tuple[int, int]) -> None:
    state = None
    for second, use in zip((0.0, 30.0), uses, strict=True):
        state = step(state, replace(IDLE, use_milli=use), second, RULES)
    assert state is not None
    assert state.need_milli == 100


def test_nothing_is_changed_before_a_whole_window_is_known() -> None:
    weights = run([IDLE] * 62)
    assert weights[:60] == [None] * 60
    assert weights[60] == 512


def test_it_is_lowered_by_half_each_five_seconds_and_ends_at_twice_the_need() -> None:
    weights = run([IDLE] * 120)[60:]
    assert list(dict.fromkeys(weights)) == [512, 256, 128] or list(dict.fromkeys(weights)) == [512, 256, 114]
    assert [weights.index(weight) for weight in dict.fromkeys(weights)] == [0, 5, 10]
    assert weights[-1] == 114


@pytest.mark.parametrize("floor", [50, 300])
def test_it_is_never_below_the_floor_whatever_is_needed(floor: int) -> None:
    rules = WeightRules(percent=200, floor=floor, window_s=60.0)
    assert run([replace(IDLE, use_milli=0)] * 200, rules)[-1] == floor


def test_the_floor_never_exceeds_the_groups_own_weight() -> None:
    assert run([replace(IDLE, use_milli=0, original=20)] * 200)[-1] == 20


@pytest.mark.parametrize(
    ("change", "weight"),
    [
        pytest.param({"use_milli": 100}, 281, id="a need that grows: a fifth beside 1024, and a margin"),
        pytest.param({"use_milli": 900}, 1024, id="a need that no weight assures: the group's own"),
        pytest.param({"original": 100}, 100, id="a lower own weight is not exceeded"),
        pytest.param({"waits": LATE}, 228 + 22, id="waiting most of the time doubles it at once"),
        pytest.param({"waits": LATE - 0.01}, 114, id="waiting less does not"),
    ],
)
def test_the_next_step(change: dict[str, float], weight: int) -> None:
    sample = replace(IDLE, **change)
    assert step(settled(IDLE), sample, 1000.0, RULES).weight == weight


def test_while_a_container_is_in_creation_it_has_the_own_weight_at_once_and_keeps_the_need_of_before() -> None:
    """Also for longer than the window."""
    state = settled(IDLE)
    for second in range(200):
        state = step(state, replace(IDLE, use_milli=700, busy=True), 1000.0 + second, RULES)
        assert (state.weight, state.need_milli) == (1024, 50)
    weights = []
    for second in range(60):
        state = step(state, replace(IDLE, use_milli=0), 1200.0 + second, RULES)
        weights.append(state.weight)
    assert weights[0] == 512
    assert weights[-1] == 114


def test_a_weight_that_was_not_enough_is_kept_longer_each_time() -> None:
    state = settled(IDLE)
    kept: list[float] = []
    now = 1000.0
    for _ in range(3):
        state = step(state, replace(IDLE, waits=1.0), now, RULES)
        began = now
        while state.weight != 114:
            now += 1.0
            state = step(state, IDLE, now, RULES)
            assert now - began < 1000
        kept.append(now - began)
    assert kept[0] >= RULES.window_s
    assert kept[1] >= 2 * RULES.window_s
    assert kept[2] >= 4 * RULES.window_s


def slowed(weight: int) -> WeightSample:
    """A daemon that works 5 ms and then sleeps 95 ms, beside pods that want the whole CPU for ever."""
    share = weight / (weight + 1024)
    turn = 0.005 / share
    return replace(IDLE, use_milli=round(5 / (0.095 + turn)), waits=(turn - 0.005) / (0.095 + turn))


def test_a_daemon_that_uses_less_because_it_is_slowed_down_keeps_its_need() -> None:
    state = settled(IDLE)
    for second in range(600):
        assert state.weight is not None
        state = step(state, slowed(state.weight), 1000.0 + second, RULES)
        assert state.need_milli == 50
    assert state.weight == 114
    for second in range(100):
        state = step(state, replace(IDLE, use_milli=10), 1600.0 + second, RULES)
    assert state.weight == RULES.floor, "it needs less once it does not wait"


def test_an_unknown_use_has_the_own_weight_and_a_new_window() -> None:
    state = step(settled(IDLE), replace(IDLE, use_milli=None), 1000.0, RULES)
    assert state.weight == 1024
    weights = run([IDLE] * 70, state=replace(state, since=1000.0))
    assert set(weights[:60]) == {1024}
    assert weights[-1] is not None
    assert weights[-1] < 1024


SAMPLES = st.builds(
    WeightSample,
    use_milli=st.none() | st.integers(0, 4000),
    waits=st.none() | st.floats(0, 1),
    original=st.sampled_from([100, 1024]),
    competing=st.sampled_from([1024, 2048, 8192]),
    cpus=st.sampled_from([1, 2, 8]),
    busy=st.booleans(),
)


@settings(max_examples=examples(50))
@given(st.lists(SAMPLES, max_size=200), st.sampled_from([200, 300]), st.sampled_from([2, 50, 500]))
def test_never_below_twice_the_need_nor_the_floor_nor_above_the_own_weight(
    samples: list[WeightSample], percent: int, floor: int
) -> None:
    rules = WeightRules(percent=percent, floor=floor, window_s=10.0)
    state = None
    for second, sample in enumerate(samples):
        state = step(state, sample, float(second), rules)
        if state.weight is None:
            continue
        least = weight_for(state.need_milli * percent // 100, sample.competing, sample.cpus)
        assert state.need_milli >= (sample.use_milli or 0) or sample.busy
        assert state.weight <= sample.original
        assert state.weight >= min(sample.original, floor)
        assert state.weight >= (sample.original if least is None else min(sample.original, least))
        if sample.busy or sample.use_milli is None:
            assert state.weight == sample.original


@settings(max_examples=30)
@given(st.integers(0, 700), st.sampled_from([1024, 4096]), st.sampled_from([1, 4]), st.sampled_from([100, 1024]))
def test_it_converges_and_stays(use: int, competing: int, cpus: int, original: int) -> None:
    sample = WeightSample(use_milli=use, waits=0.4, original=original, competing=competing, cpus=cpus)
    weights = run([sample] * 300)
    needed = weight_for(use * 2, competing, cpus)
    target = original if needed is None else min(original, max(needed, RULES.floor))
    assert target <= (weights[-1] or 0) <= 1.25 * target
    assert len(set(weights[120:])) == 1


@settings(max_examples=10)
@given(st.lists(st.integers(47, 53), min_size=600, max_size=600))
def test_a_need_that_varies_by_some_percent_moves_nothing(uses: list[int]) -> None:
    weights = run([replace(IDLE, use_milli=use) for use in uses])[150:]
    changes = sum(before != after for before, after in pairwise(weights))
    assert changes <= 2


@settings(max_examples=10)
@given(st.lists(st.tuples(st.integers(0, 300), st.floats(0, 1)), min_size=300, max_size=300))
def test_it_is_lowered_slowly_whatever_is_measured(pairs: list[tuple[int, float]]) -> None:
    weights = run([replace(IDLE, use_milli=use, waits=waits) for use, waits in pairs])
    lowered = -LOWER_S
    for second in range(62, len(weights)):
        before, after = weights[second - 1] or 0, weights[second] or 0
        if after < before:
            assert second - lowered >= LOWER_S
            # At the last step to the target a little more than half.
            assert after >= before / 2 / 1.26
            lowered = second
