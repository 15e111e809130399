import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.naming import QosClass
from reconciler.control.planner import plan, plan_node
from reconciler.policies.be_memory import (
    BeMemoryConfig,
    MemorySample,
    MemoryState,
    reserve_bytes,
    start,
    step,
)
from reconciler.policies.table import PoliciesConfig
from state.model import PodClass
from tests.reconciler.nodes import V1, V2, node, pod

GIGA = 1 << 30
TOTAL = 100 * GIGA
CONFIG = BeMemoryConfig(enabled=True)
TOP = 90 * GIGA
"""All but the reserve of 10 %."""
ON = PoliciesConfig(be_memory=CONFIG)


def sample(available: int | None, used: int | None = None) -> MemorySample:
    known = None if available is None else available * GIGA
    return MemorySample(total_bytes=TOTAL, available_bytes=known, used_bytes=None if used is None else used * GIGA)


@pytest.mark.parametrize(
    ("percent", "number", "reserve"),
    [(10, 0, 10 * GIGA), (10, 30 * GIGA, 30 * GIGA), (90, 99 * GIGA, 90 * GIGA), (1, 0, GIGA)],
)
def test_the_reserve_is_the_larger_setting_and_never_everything(percent: int, number: int, reserve: int) -> None:
    assert reserve_bytes(TOTAL, BeMemoryConfig(reserve_percent=percent, reserve_bytes=number)) == reserve


@pytest.mark.parametrize(
    ("high", "look", "after"),
    [
        pytest.param(90, sample(5, 60), 50, id="a tenth of the node below what is used"),
        pytest.param(90, sample(9, 0), 10, id="down to the floor, not below"),
        pytest.param(90, sample(0, 95), 80, id="use above the allowance counts as the allowance"),
        pytest.param(90, sample(5), 80, id="use not known: from the allowance"),
        pytest.param(12, sample(5, 11), 10, id="the floor holds"),
        pytest.param(5, sample(5, 4), 5, id="never up while the node is short, floor or not"),
        pytest.param(50, sample(10, 40), 50, id="at the reserve it holds"),
        pytest.param(50, sample(19, 40), 50, id="and in the dead band"),
        pytest.param(50, sample(None, 40), 50, id="and on an unknown"),
    ],
)
def test_one_look(high: int, look: MemorySample, after: int) -> None:
    assert step(MemoryState(high_bytes=high * GIGA, calm_since=0.0), look, 1.0, CONFIG).high_bytes == after * GIGA


def test_a_shortage_larger_than_the_step_is_taken_at_once() -> None:
    config = BeMemoryConfig(reserve_percent=40)
    state = step(MemoryState(high_bytes=60 * GIGA), sample(5, 55), 1.0, config)
    assert state.high_bytes == (55 - 35) * GIGA


def test_it_comes_back_by_one_step_after_each_calm_minute() -> None:
    state, log = MemoryState(high_bytes=50 * GIGA), []
    for look in range(25):
        state = step(state, sample(40, 45), look * 5.0, CONFIG)
        log.append(state.high_bytes // GIGA)
    assert (log[0], log[11], log[12], log[23], log[24]) == (50, 50, 51, 51, 52)


@pytest.mark.parametrize(("percent", "clear"), [(10, 20), (30, 60), (40, 70), (50, 75), (90, 95)])
def test_it_comes_back_with_every_reserve_that_may_be_configured(percent: int, clear: int) -> None:
    """Twice a reserve of half of the node is never available."""
    config = BeMemoryConfig(reserve_percent=percent, floor_percent=0)
    for available, grows in ((clear - 1, False), (clear, True)):
        state = MemoryState(high_bytes=GIGA)
        for look in range(13):
            state = step(state, sample(available, 1), look * 5.0, config)
        assert state.high_bytes == (2 if grows else 1) * GIGA


def test_the_first_state_is_what_is_in_force_and_never_above_all_but_the_reserve() -> None:
    assert start(None, TOTAL, CONFIG).high_bytes == TOP
    assert start(70 * GIGA, TOTAL, CONFIG).high_bytes == 70 * GIGA
    assert start(200 * GIGA, TOTAL, CONFIG).high_bytes == TOP


amounts = st.integers(0, 120).map(lambda gigas: gigas * GIGA)


@given(looks=st.lists(st.tuples(st.none() | amounts, st.none() | amounts), max_size=60), first=amounts)
def test_it_stays_in_bounds_and_only_a_calm_node_raises_it(
    looks: list[tuple[int | None, int | None]], first: int
) -> None:
    state, grown = MemoryState(high_bytes=first), 0
    for turn, (available, used) in enumerate(looks):
        look = MemorySample(total_bytes=TOTAL, available_bytes=available, used_bytes=used)
        after = step(state, look, turn * 5.0, CONFIG)
        assert 0 <= after.high_bytes <= TOP
        if available is None or available < 2 * reserve_bytes(TOTAL, CONFIG):
            assert after.high_bytes <= state.high_bytes
        grown += max(0, after.high_bytes - state.high_bytes)
        state = after
    assert grown <= GIGA * (len(looks) // 12)


@pytest.mark.parametrize(
    ("versions", "hard", "wanted"),
    [
        (V2, 0, {"memory.high": 50 * GIGA}),
        (V2, 10, {"memory.high": 50 * GIGA, "memory.max": 55 * GIGA}),
        (V1, 0, {"memory.soft": 50 * GIGA}),
        (V1, 10, {"memory.soft": 50 * GIGA, "memory.max": 55 * GIGA}),
    ],
)
def test_the_bound_is_the_besteffort_directorys(versions: dict[str, int], hard: int, wanted: dict[str, int]) -> None:
    config = PoliciesConfig(be_memory=BeMemoryConfig(enabled=True, hard_percent=hard))
    desired = plan(node(pod("be"), versions=versions, reclaimed_memory_bytes=50 * GIGA + 4097), None, config)
    values = {setting.knob: setting.value for setting in desired.settings.values() if setting.policy == "be_memory"}
    assert values == wanted
    assert {setting.path for setting in desired.settings.values() if setting.policy == "be_memory"} == {
        "/kubepods/besteffort"
    }


def test_an_online_pod_in_besteffort_is_not_bounded_and_a_be_pod_elsewhere_is_named() -> None:
    view = node(pod("a", cls=PodClass.SHARED), versions=V2, reclaimed_memory_bytes=50 * GIGA)
    desired = plan(view, None, ON)
    assert [refusal.rule for refusal in desired.refusals if refusal.setting.policy == "be_memory"] == [
        "online-under-memory"
    ]
    view = node(pod("b", qos=QosClass.BURSTABLE), versions=V2, reclaimed_memory_bytes=50 * GIGA)
    assert (
        "1 BE pods outside besteffort are not limited, such as ns/b" in plan_node(view, None, ON).reasons["be_memory"]
    )


def test_a_silent_law_leaves_the_last_bound_and_nothing_known_wants_nothing() -> None:
    before = plan_node(node(reclaimed_memory_bytes=50 * GIGA), None, ON)
    assert plan_node(node(), before, ON).memory.reclaimed_high_bytes == 50 * GIGA
    assert plan_node(node(), None, ON).memory.reclaimed_high_bytes is None
    assert (
        plan_node(node(reclaimed_memory_bytes=50 * GIGA), before, PoliciesConfig()).memory.reclaimed_high_bytes is None
    )
