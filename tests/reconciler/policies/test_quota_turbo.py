from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from reconciler.control.planner import plan_node, plan_pod
from reconciler.policies.lending import QuotaBorrower
from reconciler.policies.quota_turbo import (
    ANNOTATION,
    QuotaTurboConfig,
    TurboNode,
    TurboSample,
    TurboState,
    step,
    takes_part,
)
from reconciler.policies.table import PoliciesConfig
from reconciler.runtime.format import cpu
from state.model import RuntimeSpec
from tests.reconciler.nodes import container, node, online

CONFIG = QuotaTurboConfig(enabled=True)
LIMIT = 100_000
ONE = QuotaBorrower(path="/c", inode=1, container_id="c", limit_us=LIMIT, period_us=100_000)
"""One CPU of 16: a look may lend 160 thousandths in all."""
CALM = TurboNode(cpus=16, load_percent=20.0, swing=1.0)
SAVED = (1000,) * 59
"""A whole window of doing nothing."""


def sample(use: int | None = 1000, hit: int | None = 1, throttled_ns: int | None = 50_000_000) -> TurboSample:
    """Throttled in its one period, for half of it on one CPU."""
    return TurboSample(borrower=ONE, use_milli=use, hit=hit, throttled_ns=throttled_ns)


QUIET = sample(use=500, hit=0, throttled_ns=0)


def one(
    state: TurboState | None, look: TurboSample, on: TurboNode = CALM, config: QuotaTurboConfig = CONFIG
) -> TurboState:
    return step({} if state is None else {"/c": state}, {"/c": look}, on, config)["/c"]


def holding(quota_us: int, saved: tuple[int, ...] = SAVED) -> TurboState:
    return TurboState(quota_us=quota_us, limit_us=LIMIT, saved=saved)


def load(percent: float | None, swing: float | None = 1.0) -> TurboNode:
    return TurboNode(cpus=16, load_percent=percent, swing=swing)


@pytest.mark.parametrize(
    ("held", "look", "on", "after"),
    [
        pytest.param(LIMIT, sample(throttled_ns=5 * 10**6), CALM, 105_000, id="throttled: what a period lacked"),
        pytest.param(LIMIT, sample(), CALM, 116_000, id="at most a hundredth of the node in one look"),
        pytest.param(198_000, sample(), CALM, 200_000, id="at most twice the limit"),
        pytest.param(LIMIT, QUIET, CALM, LIMIT, id="not throttled: nothing"),
        pytest.param(150_000, QUIET, CALM, 150_000, id="not throttled on a calm node: kept"),
        pytest.param(150_000, QUIET, load(60), 150_000, id="at the high mark: nothing yet"),
        pytest.param(150_000, QUIET, load(70), 147_400, id="halfway to the alarm: a twentieth back"),
        pytest.param(150_000, sample(), load(70, 11), 150_000, id="a throttled one keeps it below the alarm"),
        pytest.param(150_000, sample(), load(70), 166_000, id="and grows if the node is steady"),
        pytest.param(150_000, QUIET, load(80), 144_900, id="at the alarm: a tenth back"),
        pytest.param(150_000, sample(), load(80), 150_000, id="at the alarm nobody grows"),
        pytest.param(150_000, sample(), load(79.5), 150_000, id="and not within a point of it"),
        pytest.param(150_000, sample(), load(82), 118_000, id="above the alarm: taken at once"),
        pytest.param(150_000, sample(), load(100), LIMIT, id="to the limit and never below"),
        pytest.param(150_000, QUIET, load(300), LIMIT, id="a senseless load takes no more than all"),
        pytest.param(LIMIT, sample(), load(20, 10.1), LIMIT, id="no growth after a swing"),
        pytest.param(LIMIT, sample(), load(20, None), LIMIT, id="nor while it is unknown how steady the node was"),
        pytest.param(150_000, sample(), load(None, None), 150_000, id="load unknown: a throttled one keeps it"),
        pytest.param(150_000, QUIET, load(None, None), 144_900, id="load unknown: others give back"),
        pytest.param(LIMIT, sample(hit=0), CALM, LIMIT, id="time without a period: nothing to divide by"),
        pytest.param(LIMIT, sample(hit=None, throttled_ns=None), CALM, LIMIT, id="throttling unknown"),
        pytest.param(LIMIT, sample(use=None), CALM, LIMIT, id="use unknown"),
        pytest.param(LIMIT, sample(throttled_ns=2**63), CALM, 116_000, id="a huge counter"),
    ],
)
def test_one_look(held: int, look: TurboSample, on: TurboNode, after: int) -> None:
    assert one(holding(held), look, on).quota_us == after


def test_a_new_container_has_nothing_saved_and_gets_nothing() -> None:
    assert one(None, sample()) == TurboState(quota_us=LIMIT, limit_us=LIMIT)
    assert one(holding(150_000), TurboSample(borrower=replace(ONE, limit_us=LIMIT * 2))) == TurboState(
        quota_us=LIMIT * 2, limit_us=LIMIT * 2
    )


def test_over_a_window_it_uses_its_limit_on_average() -> None:
    """It did nothing for a second, then wants two CPUs for ever: it gets a second's worth and no more."""
    state: TurboState | None = None
    for _ in range(11):
        state = one(state, sample(use=0, hit=0, throttled_ns=0))
    assert state is not None
    used = []
    for _ in range(100):
        use = min(2000, state.quota_us // 100)
        used.append(use)
        state = one(state, sample(use=use))
    assert 10_000 - 500 <= sum(used) - 100_000 <= 10_000
    assert (state.quota_us, len(state.saved)) == (LIMIT, CONFIG.window_looks - 1)


def test_an_unknown_use_counts_as_all_that_it_had() -> None:
    after = one(holding(150_000, (700,)), sample(use=None))
    assert after.saved == (700, -500)
    assert after.quota_us == 120_000


def test_loans_are_taken_back_in_proportion() -> None:
    other = replace(ONE, path="/d", container_id="d")
    samples = {"/c": sample(), "/d": TurboSample(borrower=other, use_milli=1, hit=1, throttled_ns=1)}
    states = {"/c": holding(160_000), "/d": holding(120_000)}
    after = step(states, samples, load(82.5), CONFIG)
    assert [after[path].quota_us for path in ("/c", "/d")] == [130_000, 110_000]


def test_a_container_that_is_gone_is_forgotten() -> None:
    assert step({"/gone": holding(150_000)}, {"/c": sample()}, CALM, CONFIG).keys() == {"/c"}


@pytest.mark.parametrize("marks", [(60, 60), (80, 60)])
def test_marks_that_do_not_leave_room_between_are_an_error(marks: tuple[int, int]) -> None:
    """In rubik equal marks are a division by zero in each tick."""
    text = f'{{"high_percent": {marks[0]}, "alarm_percent": {marks[1]}}}'
    with pytest.raises(
        msgspec.ValidationError, match=f"high_percent {marks[0]} must be below alarm_percent {marks[1]}"
    ):
        msgspec.json.decode(text, type=QuotaTurboConfig)


def test_both_laws_at_once_are_an_error() -> None:
    text = '{"quota_burst": {"enabled": true}, "quota_turbo": {"enabled": true}}'
    with pytest.raises(msgspec.ValidationError, match=r"quota_burst\.enabled and quota_turbo\.enabled are both true"):
        msgspec.json.decode(text, type=PoliciesConfig)


@pytest.mark.parametrize(
    ("mark", "marked", "every"),
    [("true", True, True), ("True", True, True), ("false", False, False), ("yes", False, False), (None, False, True)],
)
def test_who_takes_part(mark: str | None, marked: bool, every: bool) -> None:
    pod = replace(online("a"), annotations={} if mark is None else {ANNOTATION: mark})
    assert takes_part(pod, CONFIG) is marked
    assert takes_part(pod, QuotaTurboConfig(enabled=True, every_online_pod=True)) is every


def test_a_loan_becomes_a_setting_of_marked_pods_only() -> None:
    bounded = container("main", spec=RuntimeSpec(shares=1024, quota_us=LIMIT, period_us=100_000))
    pod = replace(online("a", bounded), annotations={ANNOTATION: "true"})
    lent = {f"{pod.group.path}/id-main": 250_000, pod.group.path: 350_000}

    def planned(wanted: Any, config: PoliciesConfig) -> dict[str, Any]:
        view = node(wanted, lent_us=lent)
        settings, refusals = plan_pod(wanted, view, plan_node(view, None, config), config)
        assert not refusals
        return {setting.path: setting.value for setting in settings}

    on = PoliciesConfig(quota_turbo=CONFIG)
    view = node(pod, lent_us=lent)
    reasons = {
        setting.container_id: setting.reason for setting in plan_pod(pod, view, plan_node(view, None, on), on)[0]
    }
    assert reasons.keys() == {"id-main", None}
    assert reasons["id-main"].startswith(f"borrows {cpu(1000)} above")
    assert planned(pod, on) == {f"{pod.group.path}/id-main": 200_000, pod.group.path: 350_000}
    assert planned(replace(pod, annotations={}), on) == {}
    assert planned(pod, PoliciesConfig()) == {}


samples = st.builds(
    TurboSample,
    borrower=st.builds(
        QuotaBorrower,
        path=st.just("/c"),
        inode=st.just(1),
        container_id=st.just("c"),
        limit_us=st.integers(1000, 10**6),
        period_us=st.integers(1000, 10**6),
    ),
    use_milli=st.none() | st.integers(0, 16_000),
    hit=st.none() | st.integers(0, 3),
    throttled_ns=st.none() | st.integers(0, 2**60),
)
nodes = st.builds(
    TurboNode,
    cpus=st.integers(1, 256),
    load_percent=st.none() | st.floats(0, 100),
    swing=st.none() | st.floats(0, 100),
)


@given(st.lists(st.tuples(st.lists(samples, max_size=4), nodes), max_size=12))
def test_no_sequence_breaks_the_law(ticks: list[tuple[list[TurboSample], TurboNode]]) -> None:
    states: dict[str, TurboState] = {}
    for turbo_samples, on in ticks:
        looks = {f"/c{n}": look for n, look in enumerate(turbo_samples)}
        after = step(states, looks, on, CONFIG)
        assert after == step(states, dict(reversed(looks.items())), on, CONFIG)
        grown = 0.0
        for path, look in looks.items():
            limit, period = look.borrower.limit_us, look.borrower.period_us
            assert limit <= after[path].quota_us <= max(limit, min(2 * limit, on.cpus * period))
            assert len(after[path].saved) < CONFIG.window_looks
            held = states.get(path)
            base = held.quota_us if held is not None and held.limit_us == limit else limit
            grown += max(0, after[path].quota_us - base) * 1000 / period
        assert grown <= CONFIG.grow_percent / 100 * on.cpus * 1000 + 0.001
        if on.load_percent is None or on.swing is None or on.swing > 10 or on.load_percent > 79:
            assert grown == 0.0
        states = after


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=150))
def test_what_it_uses_in_all_never_exceeds_its_limit_in_all(wishes: list[int]) -> None:
    state: TurboState | None = None
    used = 0
    for looks, wish in enumerate(wishes, start=1):
        quota = LIMIT if state is None else state.quota_us
        use = min(wish, quota // 100)
        state = one(state, sample(use=use))
        used += use
        assert used <= 1000 * looks
