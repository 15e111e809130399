import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.control.planner import plan_pools
from reconciler.policies.idle_buffer import (
    IdleBufferConfig,
    IdleSample,
    IdleState,
    buffer_milli,
    start,
    step,
    watched,
)
from reconciler.policies.table import PoliciesConfig
from tests.reconciler.nodes import cpus, kubelet, node

CONFIG = IdleBufferConfig()
TOP = 8000
"""Eight CPUs: the buffer is 800, a step up 800."""


def sample(idle: int | None, reclaimed: int | None = None) -> IdleSample:
    return IdleSample(top_milli=TOP, idle_milli=idle, reclaimed_milli=reclaimed)


@pytest.mark.parametrize(("top", "buffer"), [(8000, 800), (64_000, 6400), (2000, 250), (1000, 250), (400, 200)])
def test_the_buffer_is_the_larger_setting_and_at_most_half_of_the_set(top: int, buffer: int) -> None:
    assert buffer_milli(top, CONFIG) == buffer


@pytest.mark.parametrize(
    ("ceiling", "idle", "used", "after"),
    [
        pytest.param(5000, 300, 4000, 3500, id="a shortage is taken from what BE uses, at once"),
        pytest.param(5000, 300, None, 4500, id="without BE's use from the allowance"),
        pytest.param(5000, 0, 500, 0, id="a burst that fills the set ends BE in one look"),
        pytest.param(1000, 900, None, 1000, id="without room for a step the calm begins anew"),
        pytest.param(1000, None, None, 1000, id="unknown never raises"),
        pytest.param(1000, 0, None, 200, id="nor does an empty one"),
    ],
)
def test_one_look(ceiling: int, idle: int | None, used: int | None, after: int) -> None:
    calm = IdleState(ceiling_milli=ceiling, calm_since=0.0)
    assert step(calm, sample(idle, used), 99.0, CONFIG) == IdleState(ceiling_milli=after)


def test_it_comes_back_by_one_step_after_each_calm_while() -> None:
    state, log = IdleState(ceiling_milli=1000), []
    for look in range(31):
        state = step(state, sample(4000), look / 10, CONFIG)
        log.append(state.ceiling_milli)
    assert (log[0], log[9], log[10], log[20], log[30]) == (1000, 1000, 1800, 2600, 3400)


def test_the_first_state_is_what_is_in_force() -> None:
    assert start(None, TOP).ceiling_milli == TOP
    assert start(plan_pools(node(), None, PoliciesConfig()), TOP).ceiling_milli == 5120


def test_the_watched_set_has_no_dedicated_and_no_reserved_cpu() -> None:
    view = node(kubelet=kubelet(default="0-5", reserved="0", exclusive={"g/main": "6-7"}))
    assert watched(plan_pools(view, None, PoliciesConfig())) == cpus("1-5")


def test_the_ceiling_lowers_the_budget_and_the_cpu_set() -> None:
    config = PoliciesConfig()
    pools = plan_pools(node(reclaimed_ceiling_milli=1300), None, config)
    assert (pools.budget_milli, len(pools.reclaimed)) == (1280, 2)
    off = PoliciesConfig(idle_buffer=IdleBufferConfig(enabled=False))
    assert plan_pools(node(reclaimed_ceiling_milli=1300), None, off).budget_milli == 5120
    assert plan_pools(node(), None, config).budget_milli == 5120


@given(
    looks=st.lists(st.tuples(st.none() | st.integers(0, TOP), st.none() | st.integers(0, TOP)), max_size=60),
    first=st.integers(0, TOP),
)
def test_it_stays_in_bounds_and_never_grows_faster_than_its_rate(
    looks: list[tuple[int | None, int | None]], first: int
) -> None:
    state = IdleState(ceiling_milli=first)
    grown = 0
    for turn, (idle, used) in enumerate(looks):
        after = step(state, sample(idle, used), turn / 10, CONFIG)
        assert 0 <= after.ceiling_milli <= TOP
        if idle is None or idle < 1600:
            assert after.ceiling_milli <= state.ceiling_milli
        grown += max(0, after.ceiling_milli - state.ceiling_milli)
        state = after
    assert grown <= 800 * (len(looks) // 10)
