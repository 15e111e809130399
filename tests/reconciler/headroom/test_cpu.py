"""What BE may be promised: the reading, the window, the steps, and what happens when nothing is known."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.cpuset import CpuSet
from reconciler.headroom.cpu import HeadroomConfig, HeadroomSample, update
from reconciler.headroom.smoothing import SmoothedAmount, restored, step
from state.model import NodeCpu, Pools
from state.topology import Topology, uniform
from tests.fakes.constants import varied
from tests.reconciler.nodes import EMPTY, cpu, cpus

CONFIG = varied(HeadroomConfig(window_s=120), report_s=30)
ONE = uniform(cores=8, threads=1)
TWO = uniform(nodes=2, cores=8, threads=1)


def pools(reclaimed: str, budget: int = 100_000, *, confined: bool = True, shared: str = "0-7") -> Pools:
    return Pools(
        online_cpus=CpuSet.span(8),
        reserved=EMPTY,
        dedicated={},
        shared=cpus(shared),
        reclaimed=cpus(reclaimed),
        budget_milli=budget,
        confined=confined,
    )


def sample(*supply: int | None, count: int = 8, budget: int = 1_000_000) -> HeadroomSample:
    """By node; every node has ``count`` CPUs. One None: unknown."""
    known = {node: milli for node, milli in enumerate(supply) if milli is not None}
    return HeadroomSample(
        cpus={node: CpuSet.span(count) for node in range(len(supply))},
        tops=dict.fromkeys(range(len(supply)), 1000 * count),
        supply=known if len(known) == len(supply) else None,
        budget=budget,
    )


def run(
    samples: Sequence[HeadroomSample], state: SmoothedAmount | None = None, config: HeadroomConfig = CONFIG
) -> list[SmoothedAmount]:
    """One sample each 10 s, from second 10 on or from where the state was."""
    state = state or SmoothedAmount()
    start = state.known_at or 0.0
    amounts = []
    for index, headroom_sample in enumerate(samples, 1):
        state = step(state, headroom_sample, start + 10.0 * index, config.smoothing)
        amounts.append(state)
    return amounts


def reports(
    samples: Sequence[HeadroomSample], state: SmoothedAmount | None = None, config: HeadroomConfig = CONFIG
) -> list[int]:
    """The sums promised, each once as long as it lasts."""
    sums = [amount.total for amount in run(samples, state, config)]
    return [value for index, value in enumerate(sums) if index == 0 or value != sums[index - 1]]


# The reading


@pytest.mark.parametrize(
    ("where", "use", "topology", "supply"),
    [
        pytest.param(
            pools("4-7"),
            cpu(idle=dict.fromkeys(range(8), 0.75)),
            ONE,
            {0: 3000},
            id="idle time of the reclaimed CPUs only",
        ),
        pytest.param(
            pools("4-7"),
            cpu(reclaimed=1000, idle=dict.fromkeys(range(8), 0.5)),
            ONE,
            {0: 3000},
            id="and what BE uses there",
        ),
        pytest.param(
            pools("4-7"),
            cpu(reclaimed=6000, idle=dict.fromkeys(range(8), 0.5)),
            ONE,
            {0: 4000},
            id="BE use elsewhere is not counted",
        ),
        pytest.param(
            pools("2-5"),
            cpu(reclaimed=1000, idle={2: 1.0, 3: 1.0, 4: 0.0, 5: 0.0}),
            TWO,
            {0: 2000, 1: 1000},
            id="BE use goes where the busy time is",
        ),
        pytest.param(pools("4-7"), cpu(idle={4: 1.0}), ONE, {0: 1000}, id="a CPU that cannot be told gives nothing"),
        pytest.param(pools("4-7"), cpu(idle={4: 7.0, 5: -3.0}), ONE, {0: 1000}, id="nonsense is bounded"),
        pytest.param(pools(""), cpu(idle=dict.fromkeys(range(8), 1.0)), ONE, {0: 0}, id="no CPU for BE"),
        pytest.param(
            pools("7", confined=False, shared="0-3"),
            cpu(idle=dict.fromkeys(range(8), 1.0)),
            ONE,
            {0: 5000},
            id="not confined: BE runs where online pods run",
        ),
        pytest.param(pools("4-7"), cpu(age=4.0), ONE, None, id="an old reading"),
        pytest.param(pools("4-7"), cpu(age=None), ONE, None, id="a reading of unknown age"),
        pytest.param(pools("4-7"), None, ONE, None, id="no reading"),
    ],
)
def test_a_reading(where: Pools, use: NodeCpu | None, topology: Topology, supply: Mapping[int, int] | None) -> None:
    assert update(where, topology, use, CONFIG).supply == supply


# The promise


@pytest.mark.parametrize(
    ("before", "samples", "promised"),
    [
        pytest.param(None, [6000] * 20, [0, 4000, 6000], id="nothing before the first report, then by steps"),
        pytest.param(None, [0] * 20, [0], id="a full node promises nothing at all; Katalyst raises it to 4 CPUs"),
        pytest.param(None, [400] * 20, [0, 400], id="a small node promises what little it has"),
        pytest.param(3000, [3250] * 40, [3000], id="noise below the smallest step is never promised"),
        pytest.param(3000, [3300] * 40, [3000, 3300], id="a step"),
        pytest.param(8000, [0, 8000, 8000, 8000], [8000, 7333], id="one bad second costs a mean of the window only"),
    ],
)
def test_the_promise(before: int | None, samples: list[int], promised: list[int]) -> None:
    state = None if before is None else run([sample(before)] * 40)[-1]
    assert reports([sample(supply) for supply in samples], state) == promised


def test_the_control_plane_has_no_part_in_it() -> None:
    """Katalyst reads its last answer back from the API server; here the state is all there is."""
    first = run([sample(6000)] * 20)[-1]
    assert step(first, sample(6000), 1000.0, CONFIG.smoothing).amounts == first.amounts


def test_a_fall_is_as_fast_as_the_window_and_not_slower() -> None:
    state = run([sample(8000)] * 40)[-1]
    assert state.amounts == {0: 8000}
    assert reports([sample(0)] * 40, state) == [8000, 6000, 4000, 2000, 0]


def test_cpus_and_nodes_that_leave_the_pools_leave_the_promise_at_once() -> None:
    state = run([sample(4000, 4000)] * 20)[-1]
    assert state.amounts == {0: 4000, 1: 4000}
    gone = HeadroomSample(
        cpus={0: CpuSet.span(1), 1: CpuSet()}, tops={0: 1000, 1: 0}, supply={0: 900, 1: 0}, budget=10_000
    )
    assert step(state, gone, 201.0, CONFIG.smoothing).amounts == {0: 1000, 1: 0}
    assert step(state, sample(4000), 201.0, CONFIG.smoothing).amounts == {0: 4000}


@pytest.mark.parametrize(
    ("reading", "amounts"),
    [
        (sample(3000, 1000, budget=2000), {0: 1500, 1: 500}),  # the budget caps the sum in proportion
        (sample(3000, 1000, budget=-5), {0: 0, 1: 0}),
        (sample(7000, 100), {0: 7000, 1: 0}),  # one by one
    ],
)
def test_nodes(reading: HeadroomSample, amounts: dict[int, int]) -> None:
    assert run([reading] * 20)[-1].amounts == amounts


# Unknown


def test_unknown_holds_then_falls_to_nothing_and_says_so() -> None:
    state = run([sample(3000)] * 20)[-1]
    states = run([sample(None)] * 30, state)
    assert [amount.total for amount in states] == [3000] * 24 + [0] * 6
    assert "unknown: no increase" in states[0].reason
    assert "headroom 0" in states[-1].reason


def test_after_a_gap_it_grows_again_from_nothing() -> None:
    lost = run([*[sample(6000)] * 20, *[sample(None)] * 30])[-1]
    assert reports([sample(6000)] * 20, SmoothedAmount(amounts=lost.amounts, known_at=1.0)) == [0, 4000, 6000]


def test_readings_around_a_gap_are_no_mean() -> None:
    states = run([sample(8000), sample(8000), sample(None), *[sample(1000)] * 4])
    assert states[-1].amounts == {0: 1000}


def test_never_known_promises_nothing() -> None:
    state = run([sample(None)])[-1]
    assert (state.amounts, state.reason) == ({0: 0}, "not measured yet")


# Restart


def test_a_restart_changes_nothing_until_it_is_measured() -> None:
    state = restored({0: 3000}, 20.0, 5.0, CONFIG.smoothing)
    assert reports([sample(3000)] * 20, state) == [3000]
    assert reports([sample(None)] * 2, state) == [3000]


@pytest.mark.parametrize("age", [241.0, -1.0, float("nan")])
def test_what_was_promised_too_long_ago_is_nothing(age: float) -> None:
    assert restored({0: 3000}, age, 5.0, CONFIG.smoothing) == SmoothedAmount()


def test_a_reboots_clock_loses_the_window_and_not_the_promise() -> None:
    state = run([sample(3000)] * 20)[-1]
    again = step(state, sample(3000), 1.0, CONFIG.smoothing)
    assert (again.amounts, again.window, again.known_at) == ({0: 3000}, (), 1.0)
    assert step(state, sample(None), 1.0, CONFIG.smoothing).amounts == {0: 3000}


# Properties

_MILLI = st.integers(0, 8000)
_READING = st.none() | st.tuples(_MILLI, _MILLI, st.integers(-100, 20_000), st.integers(0, 8))


def _as_sample(reading: tuple[int, int, int, int] | None) -> HeadroomSample:
    if reading is None:
        return sample(None, None)
    first, second, budget, count = reading
    return sample(min(first, count * 1000), min(second, count * 1000), count=count, budget=budget)


@given(st.lists(_READING, max_size=60))
def test_never_above_what_was_there_in_the_window_nor_above_the_pools(
    readings: list[tuple[int, int, int, int]],
) -> None:
    samples = [_as_sample(reading) for reading in readings]
    for index, state in enumerate(run(samples)):
        tops = samples[index].tops
        assert all(0 <= milli <= tops[node] for node, milli in state.amounts.items())
        if state.window and samples[index].supply is not None and state.count == 0:
            for node, milli in state.amounts.items():
                assert milli <= max(mean.amounts[node] for mean in state.window)
        seen = [headroom_sample for headroom_sample in samples[: index + 1] if headroom_sample.supply is not None]
        assert state.total <= max((max(0, headroom_sample.budget) for headroom_sample in seen), default=0)


@given(st.lists(_READING, max_size=60))
def test_steps_up_are_bounded_and_none_is_taken_on_an_unknown(readings: list[tuple[int, int, int, int]]) -> None:
    samples = [_as_sample(reading) for reading in readings]
    before = SmoothedAmount()
    for index, state in enumerate(run(samples)):
        for node, milli in state.amounts.items():
            grown = milli - before.amounts.get(node, 0)
            assert grown <= CONFIG.max_step_milli
            assert grown <= 0 or grown >= CONFIG.min_step_milli
            assert grown <= 0 or samples[index].supply is not None
        before = state


@given(st.lists(_READING, max_size=30))
def test_the_same_readings_give_the_same_promise(readings: list[tuple[int, int, int, int]]) -> None:
    samples = [_as_sample(reading) for reading in readings]
    assert run(samples) == run(samples)


@given(
    st.dictionaries(st.integers(0, 7), st.floats(0, 1)),
    st.integers(0, 20_000),
    st.sets(st.integers(0, 7)),
)
def test_supply_is_never_more_than_the_cpus(idle: dict[int, float], used: int, reclaimed: set[int]) -> None:
    headroom_sample = update(pools(str(CpuSet(reclaimed))), TWO, cpu(reclaimed=used, idle=idle), CONFIG)
    assert headroom_sample.supply is not None
    assert all(0 <= milli <= headroom_sample.tops[node] for node, milli in headroom_sample.supply.items())
