from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from reconciler.control.planner import plan_node, plan_pod, plan_pools
from reconciler.policies import quota_burst
from reconciler.policies.lending import QuotaBorrower, borrowers
from reconciler.policies.normalise import NormaliseConfig
from reconciler.policies.quota_burst import (
    FRESH_S,
    BurstGuard,
    BurstSample,
    BurstState,
    NodeCpuState,
    QuotaBurstConfig,
    first_tokens,
    guard,
    start,
    step,
    step_all,
    takes_part,
)
from reconciler.policies.quota_turbo import QuotaTurboConfig
from reconciler.policies.table import PoliciesConfig
from state.cpu import BurstLimit, CpuPreferences
from state.model import Container, ContainerKind, Phase, Pod, PodClass, Pools, RuntimeSpec
from tests.reconciler.nodes import V2, container, cpu, kubelet, node, online, pod

CONFIG = QuotaBurstConfig(enabled=True)
ON = PoliciesConfig(quota_burst=CONFIG)
LIMIT = 100_000
ONE = QuotaBorrower(path="/c", inode=1, container_id="c", limit_us=LIMIT, period_us=100_000)
"""One CPU."""


def sample(use: int | None = 1000, throttled: float | None = 0.5, **more: Any) -> BurstSample:
    values: dict[str, Any] = {"borrower": ONE, "percent": 300, "budget_s": -1, "cpus": 8} | more
    return BurstSample(use_milli=use, throttled=throttled, **values)


def holding(quota_us: int, **more: Any) -> BurstState:
    return BurstState(quota_us=quota_us, limit_us=LIMIT, **more)


@pytest.mark.parametrize(
    ("held", "look", "state", "after"),
    [
        pytest.param(LIMIT, sample(), NodeCpuState.IDLE, 120_000, id="throttled: a fifth up"),
        pytest.param(120_000, sample(), NodeCpuState.IDLE, 144_000, id="and again"),
        pytest.param(290_000, sample(), NodeCpuState.IDLE, 300_000, id="up to the ceiling"),
        pytest.param(
            290_000, sample(percent=100), NodeCpuState.IDLE, LIMIT, id="a ceiling of 100 percent is the limit"
        ),
        pytest.param(150_000, sample(cpus=1), NodeCpuState.IDLE, LIMIT, id="no more than the node has CPUs"),
        pytest.param(150_000, sample(throttled=0.0), NodeCpuState.IDLE, 150_000, id="not throttled: kept"),
        pytest.param(150_000, sample(throttled=None), NodeCpuState.IDLE, 150_000, id="throttling unknown: kept"),
        pytest.param(150_000, sample(use=None), NodeCpuState.IDLE, 150_000, id="use unknown: never up"),
        pytest.param(150_000, sample(), NodeCpuState.COOLING, 150_000, id="cooling: never up"),
        pytest.param(150_000, sample(), NodeCpuState.UNKNOWN, 150_000, id="node unknown: never up"),
        pytest.param(150_000, sample(), NodeCpuState.OVERLOAD, 120_000, id="overload: a fifth down, throttled or not"),
        pytest.param(150_000, sample(throttled=0.0), NodeCpuState.OVERLOAD, 120_000, id="overload: kept becomes down"),
        pytest.param(110_000, sample(), NodeCpuState.OVERLOAD, LIMIT, id="never below the limit"),
        pytest.param(150_000, sample(budget_s=0), NodeCpuState.IDLE, 120_000, id="no budget: down"),
    ],
)
def test_one_step(held: int, look: BurstSample, state: NodeCpuState, after: int) -> None:
    assert step(holding(held), look, state, 1.0, CONFIG).quota_us == after


def test_a_tiny_quota_rises_too() -> None:
    tiny = QuotaBorrower(path="/c", inode=1, container_id="c", limit_us=1000, period_us=1000)
    state = BurstState(quota_us=1000, limit_us=1000)
    assert step(state, sample(borrower=tiny), NodeCpuState.IDLE, 1.0, CONFIG).quota_us == 1200


def test_a_loan_that_nobody_needs_goes_back_by_itself() -> None:
    """Koordinator keeps it until the node is overloaded."""
    state = holding(300_000)
    quotas = []
    for second in range(1, 70):
        state = step(state, sample(use=500, throttled=0.0), NodeCpuState.IDLE, float(second), CONFIG)
        quotas.append(state.quota_us)
    assert (quotas[58], quotas[59], quotas[-1]) == (300_000, 240_000, LIMIT)


def test_a_loan_in_use_stays() -> None:
    state = holding(300_000)
    for second in range(1, 200):
        state = step(state, sample(use=2500, throttled=0.0), NodeCpuState.IDLE, float(second), CONFIG)
    assert state.quota_us == 300_000


def test_after_ten_unknown_seconds_a_loan_goes_back() -> None:
    state, quotas = holding(300_000), []
    for second in range(13):
        state = step(state, sample(use=None, throttled=None), NodeCpuState.IDLE, float(second), CONFIG)
        quotas.append(state.quota_us)
    assert quotas[10:13] == [300_000, 240_000, 192_000]


def test_a_resize_ends_the_loan_on_the_old_limit() -> None:
    larger = replace(ONE, limit_us=200_000)
    after = step(holding(300_000), sample(borrower=larger, throttled=0.0), NodeCpuState.IDLE, 1.0, CONFIG)
    assert (after.quota_us, after.limit_us) == (200_000, 200_000)


def test_the_bucket_spends_above_the_limit_and_saves_below_sixty_percent() -> None:
    """Ten seconds at three times the limit are a capacity of 2000."""
    state = holding(LIMIT, tokens=100.0)
    look = sample(use=1500, budget_s=10)
    state = step(state, look, NodeCpuState.IDLE, 1.0, CONFIG)
    assert (state.tokens, state.quota_us) == (50.0, 120_000)
    state = step(state, look, NodeCpuState.IDLE, 2.0, CONFIG)
    assert (state.tokens, state.quota_us) == (0.0, LIMIT)
    for second in range(3, 6):
        state = step(state, sample(use=590, throttled=0.0, budget_s=10), NodeCpuState.IDLE, float(second), CONFIG)
    assert state.tokens == pytest.approx(123.0)
    assert step(state, sample(use=800, budget_s=10), NodeCpuState.IDLE, 6.0, CONFIG).tokens == state.tokens


@pytest.mark.parametrize(("use", "tokens"), [(9000, -2000.0), (0, 2000.0)])
def test_the_bucket_is_as_deep_as_it_is_high(use: int, tokens: float) -> None:
    state = step(holding(LIMIT, tokens=0.0), sample(use=use, budget_s=10), NodeCpuState.IDLE, 1000.0, CONFIG)
    assert state.tokens == tokens


def test_the_first_content_is_the_containers_own_and_always_the_same() -> None:
    contents = [first_tokens(f"container-{number}", 2000) for number in range(200)]
    assert contents == [first_tokens(f"container-{number}", 2000) for number in range(200)]
    assert (min(contents) < 100, max(contents) > 900) == (True, True), "spread over half a bucket"
    assert all(0 <= content < 1000 for content in contents)


# The guard


def pools(**more: Any) -> Pools:
    return plan_pools(node(**more), None, PoliciesConfig())


def idle(share: float, cpus: int = 8) -> dict[int, float]:
    return dict.fromkeys(range(cpus), share)


@pytest.mark.parametrize(
    ("idle_share", "reclaimed", "state", "room"),
    [
        pytest.param(0.9, 0, NodeCpuState.IDLE, 3200, id="idle"),
        pytest.param(0.54, 0, NodeCpuState.COOLING, 320, id="within a tenth of the threshold"),
        pytest.param(0.5, 0, NodeCpuState.OVERLOAD, 0, id="at the threshold"),
        pytest.param(0.1, 6000, NodeCpuState.IDLE, 2800, id="BE's use is room"),
    ],
)
def test_the_guard(idle_share: float, reclaimed: int, state: NodeCpuState, room: int) -> None:
    use = cpu(reclaimed=reclaimed, idle=idle(idle_share))
    burst_guard = guard(BurstGuard(), use, pools(), 1.0, 50)
    assert burst_guard.state is state
    assert burst_guard.room_milli == pytest.approx(room, abs=9)


def test_the_guard_leaves_out_cpus_that_somebody_owns() -> None:
    owned = pools(kubelet=kubelet(default="0-3", exclusive={"g/main": "4-7"}))
    busy = idle(0.9, 4) | dict.fromkeys(range(4, 8), 0.0)
    assert guard(BurstGuard(), cpu(idle=busy), owned, 1.0, 50).state is NodeCpuState.IDLE
    assert guard(BurstGuard(), cpu(idle=busy), pools(), 1.0, 50).state is NodeCpuState.OVERLOAD


def test_the_guard_takes_the_mean_of_five_looks() -> None:
    burst_guard = BurstGuard()
    for second in range(5):
        burst_guard = guard(burst_guard, cpu(idle=idle(0.9)), pools(), float(second), 50)
    burst_guard = guard(burst_guard, cpu(idle=idle(0.0)), pools(), 5.0, 50)
    assert burst_guard.state is NodeCpuState.IDLE, "one look of five is 28 percent on average"
    for second in range(6, 9):
        burst_guard = guard(burst_guard, cpu(idle=idle(0.0)), pools(), float(second), 50)
    assert burst_guard.state is NodeCpuState.OVERLOAD


@pytest.mark.parametrize("use", [None, cpu(age=None), cpu(age=9.0)], ids=["never read", "no age", "old"])
def test_the_guard_knows_nothing_without_a_fresh_reading(use: Any) -> None:
    assert guard(BurstGuard(), use, pools(), 1.0, 50).state is NodeCpuState.UNKNOWN
    before = guard(BurstGuard(), cpu(idle=idle(0.9)), pools(), 1.0, 50)
    assert guard(before, use, pools(), 2.0, 50).state is NodeCpuState.COOLING, "one missed look lends nothing"
    assert guard(before, use, pools(), 1.0 + FRESH_S + 0.1, 50).state is NodeCpuState.UNKNOWN


def test_a_cpu_that_cannot_be_told_is_busy() -> None:
    assert guard(BurstGuard(), cpu(idle={0: 1.0}), pools(), 1.0, 50).state is NodeCpuState.OVERLOAD


# All containers together


def many(count: int) -> dict[str, BurstSample]:
    return {f"/c{n}": sample(throttled=1.0, borrower=replace(ONE, path=f"/c{n}")) for n in range(count)}


HALF = QuotaBorrower(path="/c", inode=1, container_id="c", limit_us=50_000, period_us=50_000)
"""Also one CPU, of a shorter period."""
ODD = QuotaBorrower(path="/c", inode=1, container_id="c", limit_us=2500, period_us=123_457)
"""Its growth in thousandths of a CPU has no exact number."""
DOUBLED = replace(ONE, limit_us=200_000)


@pytest.mark.parametrize(
    ("before", "borrowers", "room", "quotas"),
    [
        # Koordinator raises every container by a fifth, however many there are.
        pytest.param({}, [ONE] * 50, 500, [101_000] * 50, id="every container the same share"),
        pytest.param({}, [ONE] * 3, 500, [116_666] * 3, id="rounded down"),
        pytest.param({}, [ONE, HALF], 200, [110_000, 55_000], id="CPUs are shared, not microseconds"),
        pytest.param({}, [ODD], 0, [2500], id="never below the limit"),
        pytest.param({"/c0": holding(150_000)}, [ONE], 150, [165_000], id="only what is new is bounded"),
        pytest.param({"/c0": holding(300_000)}, [DOUBLED], 200, [220_000], id="all of a loan on a new limit is new"),
    ],
)
def test_all_steps_of_one_second_together_fit_below_the_threshold(
    before: dict[str, BurstState], borrowers: list[QuotaBorrower], room: int, quotas: list[int]
) -> None:
    samples = {
        f"/c{number}": sample(throttled=1.0, borrower=replace(borrower, path=f"/c{number}"))
        for number, borrower in enumerate(borrowers)
    }
    after = step_all(before, samples, BurstGuard(state=NodeCpuState.IDLE, room_milli=room), 1.0, CONFIG)
    assert [after[path].quota_us for path in samples] == quotas


def test_a_container_that_is_gone_is_forgotten() -> None:
    room = BurstGuard(state=NodeCpuState.IDLE, room_milli=9000)
    assert step_all({"/gone": holding(200_000)}, many(1), room, 1.0, CONFIG).keys() == {"/c0"}


looks = st.builds(
    sample,
    st.none() | st.integers(0, 9000),
    st.none() | st.floats(0, 1),
    percent=st.integers(100, 1000),
    budget_s=st.integers(-1, 30),
    borrower=st.builds(
        QuotaBorrower,
        path=st.just("/c"),
        inode=st.just(1),
        container_id=st.text(max_size=3),
        limit_us=st.integers(1000, 900_000),
        period_us=st.integers(1000, 1_000_000),
    ),
)


@given(
    st.lists(
        st.tuples(st.lists(looks, max_size=4), st.sampled_from(NodeCpuState), st.integers(0, 8000), st.floats(-1, 20)),
        max_size=20,
    )
)
def test_no_sequence_breaks_the_law(seconds: list[tuple[list[BurstSample], NodeCpuState, int, float]]) -> None:
    states: dict[str, BurstState] = {}
    now = 100.0
    for burst_samples, state, room, passed in seconds:
        now += passed
        samples = {f"/c{n}": burst_sample for n, burst_sample in enumerate(burst_samples)}
        after = step_all(states, samples, BurstGuard(state=state, room_milli=room), now, CONFIG)
        grown = 0.0
        for path, item in samples.items():
            limit, held = item.borrower.limit_us, states.get(path)
            quota = after[path].quota_us
            top = max(limit, min(limit * item.percent // 100, item.cpus * item.borrower.period_us))
            assert limit <= quota <= top
            same = held is not None and held.limit_us == limit
            base = held.quota_us if held is not None and same else limit
            if quota > base:
                assert item.use_milli is not None
                assert item.throttled
                assert state is NodeCpuState.IDLE
                grown += (quota - base) * 1000 / item.borrower.period_us
        assert grown <= room + 1e-6
        states = after


# The policy


def bounded(name: str = "main", quota: int | None = LIMIT, **more: Any) -> Container:
    return container(name, spec=RuntimeSpec(shares=1024, quota_us=quota, period_us=100_000), **more)


def test_only_settled_containers_of_online_pods_with_a_known_quota_borrow() -> None:
    def names(item: Pod) -> list[str]:
        return [borrower.container_id for borrower in borrowers(item, pools())]

    pause = container("pause", kind=ContainerKind.SANDBOX)
    assert names(online("a", pause, bounded(), bounded("free", None), bounded("none", -1))) == ["id-main"]
    assert names(pod("b", bounded())) == []
    assert names(pod("c", bounded(), cls=PodClass.DEDICATED)) == []
    assert names(online("d", bounded(), replace(bounded("young"), phase=Phase.CREATING))) == ["id-main"]
    unknown = replace(bounded("dark"), spec=None)
    assert names(online("e", bounded(), unknown)) == []


@pytest.mark.parametrize(
    ("asked", "every", "asking"),
    [
        (None, True, False),
        (BurstLimit.CLOSED, False, False),
        (BurstLimit.STATIC, False, False),
        (BurstLimit.QUOTA, True, True),
        (BurstLimit.AUTO, True, True),
    ],
)
def test_who_takes_part(asked: BurstLimit | None, every: bool, asking: bool) -> None:
    item = replace(online("a", bounded()), wish=CpuPreferences(burst_policy=asked))
    assert takes_part(item, CONFIG) is every
    assert takes_part(item, QuotaBurstConfig(enabled=True, pods=False)) is every
    assert not takes_part(item, QuotaBurstConfig(pods=False))
    assert takes_part(item, QuotaBurstConfig()) is asking


def planned(item: Pod, lent: dict[str, int], config: PoliciesConfig = ON, **more: Any) -> dict[tuple[str, str], Any]:
    view = node(item, lent_us=lent, **more)
    settings, refusals = plan_pod(item, view, plan_node(view, None, config), config)
    assert not refusals
    return {(setting.path.rpartition("/")[2], setting.knob): setting.value for setting in settings}


@pytest.mark.parametrize("versions", [{}, {"versions": V2}], ids=["v1", "v2"])
def test_a_loan_becomes_the_containers_quota_and_its_pods(versions: dict[str, Any]) -> None:
    item = online("a", bounded(), bounded("side"))
    lent = {f"{item.group.path}/id-main": 120_000, item.group.path: 220_000}
    known = {(item.group.path, "cpu.quota"): 200_000}
    fields = planned(item, lent, actual=known, **versions)
    assert fields == {("id-main", "cpu.quota"): 120_000, ("poda", "cpu.quota"): 220_000}


@pytest.mark.parametrize(
    ("lent", "value"),
    [
        pytest.param(100_000, None, id="the limit is no loan"),
        pytest.param(90_000, None, id="less than the limit: resized meanwhile"),
        pytest.param(999_000, 300_000, id="above the ceiling: resized meanwhile"),
    ],
)
def test_a_loan_is_cut_to_the_limit_of_the_moment(lent: int, value: int | None) -> None:
    item = online("a", bounded())
    path = f"{item.group.path}/id-main"
    assert planned(item, {path: lent}) == ({("id-main", "cpu.quota"): value} if value else {})


def test_a_loan_is_made_on_the_normalised_limit() -> None:
    """On CPUs twice as fast a limit of one CPU is half a CPU: that is what is lent on, and three times that the top."""
    item, on = online("a", bounded()), PoliciesConfig(quota_burst=CONFIG, normalise=NormaliseConfig(ratio=2.0))
    path = f"{item.group.path}/id-main"
    half = borrowers(item, replace(pools(), quota_ratio=2.0))
    assert [(borrower.limit_us, borrower.limit_milli) for borrower in half] == [(50_000, 500)]
    for lent, value in ((0, 50_000), (50_000, 50_000), (60_000, 60_000), (120_000, 120_000), (300_000, 150_000)):
        assert planned(item, {path: lent}, on) == {("id-main", "cpu.quota"): value}


def test_nothing_is_wanted_where_the_policy_is_off_or_the_kubelet_rewrites_quotas() -> None:
    item = online("a", bounded())
    lent = {f"{item.group.path}/id-main": 120_000}
    assert planned(item, lent, PoliciesConfig()) == {}
    assert planned(item, lent, kubelet=kubelet(reasserts_s=10.0)) == {}
    assert planned(item, lent, actual={(f"{item.group.path}/id-main", "cpu.period"): 50_000}) == {}
    assert planned(replace(item, wish=CpuPreferences(burst_policy=BurstLimit.CLOSED)), lent) == {}
    assert planned(item, lent) != {}


def test_a_pods_own_percentage_is_its_ceiling() -> None:
    item = replace(online("a", bounded()), wish=CpuPreferences(quota_burst_percent=110))
    assert planned(item, {f"{item.group.path}/id-main": 300_000}) == {("id-main", "cpu.quota"): 110_000}


def test_a_new_container_starts_with_no_loan() -> None:
    assert start(ONE, 5.0) == BurstState(quota_us=LIMIT, limit_us=LIMIT, at=5.0, known_at=5.0, needed_at=5.0)


@pytest.mark.parametrize(
    ("asked", "config", "part"),
    [
        pytest.param(BurstLimit.AUTO, QuotaBurstConfig(), True, id="requested"),
        pytest.param(BurstLimit.QUOTA, QuotaBurstConfig(), True, id="this kind alone"),
        pytest.param(BurstLimit.STATIC, QuotaBurstConfig(), False, id="the other kind alone"),
        pytest.param(None, QuotaBurstConfig(), False, id="not requested"),
        pytest.param(BurstLimit.AUTO, QuotaBurstConfig(pods=False), False, id="pods may not"),
    ],
)
def test_a_pod_may_borrow_where_lending_is_off_for_the_node(
    asked: BurstLimit | None, config: QuotaBurstConfig, *, part: bool
) -> None:
    item = replace(online("web", bounded()), wish=CpuPreferences(burst_policy=asked))
    assert [pod.uid for pod, _ in quota_burst.borrowers({item.uid: item}, pools(), config)] == (["web"] if part else [])
    lent = {item.containers[0].group.path: 2 * LIMIT}
    assert (("id-main", "cpu.quota") in planned(item, lent, PoliciesConfig(quota_burst=config))) == part
    # Only one of the two laws moves quotas.
    turbo = PoliciesConfig(quota_burst=config, quota_turbo=QuotaTurboConfig(enabled=True))
    assert ("id-main", "cpu.quota") not in planned(item, lent, turbo)
