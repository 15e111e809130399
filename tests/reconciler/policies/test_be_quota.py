"""The BE budget among several quotas: nothing is left while a taker is throttled, and no pod loses its fair part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.naming import QosClass
from reconciler.control.planner import plan
from reconciler.policies.be_quota import parts_of, split
from reconciler.policies.table import PoliciesConfig
from state.cpu import GroupUse, QuotaFloor
from state.model import NodeView, Pod, Resources, RuntimeSpec
from tests.reconciler.nodes import container, cpu, node, pod

DIRECTORY = "/kubepods/besteffort"
IDLE = GroupUse(cpu_milli=0, throttled=0.0)
MINIMUM = 10


def burstable(uid: str, *, milli: int | None = None, limit_us: int | None = None) -> Pod:
    requests = Resources() if milli is None else Resources(cpu_milli=milli)
    spec = RuntimeSpec(shares=2, quota_us=limit_us)
    return pod(uid, container("main", requests=requests, spec=spec), qos=QosClass.BURSTABLE)


def with_uses(uses: dict[str, GroupUse], *pods: Pod) -> NodeView:
    """``uses``: by uid of a pod with one container; the directory's by its path."""
    paths = {key: key if key.startswith("/") else f"/kubepods/burstable/pod{key}/id-main" for key in uses}
    return node(*pods, uses={paths[key]: use for key, use in uses.items()})


TEN = [burstable(f"b{number}") for number in range(10)]
ALL_IDLE = {item.uid: IDLE for item in TEN}


def test_the_one_busy_pod_among_ten_gets_what_the_others_do_not_use() -> None:
    """1.20 CPU; by requests alone it would have 0.12 for ever."""
    fair, _ = split(1200, with_uses({}, *TEN))
    assert fair == {DIRECTORY: MINIMUM, **{item.uid: 120 for item in TEN}}
    busy = ALL_IDLE | {"b3": GroupUse(cpu_milli=120, throttled=0.9)}
    parts, _ = split(1200, with_uses(busy, *TEN), fair)
    assert parts["b3"] >= 1050
    assert sum(parts.values()) <= 1200 + MINIMUM
    # Another one is throttled at what it kept: one division later both have the same.
    two = busy | {"b7": GroupUse(cpu_milli=parts["b7"], throttled=0.5)}
    later, _ = split(1200, with_uses(two, *TEN), parts)
    assert later["b3"] == later["b7"] >= 520


def test_a_pod_that_is_not_throttled_keeps_what_it_uses_and_a_part_more() -> None:
    uses = ALL_IDLE | {"b0": GroupUse(cpu_milli=60, throttled=0.0), "b1": GroupUse(cpu_milli=120, throttled=1.0)}
    parts, _ = split(1200, with_uses(uses, *TEN))
    assert 90 <= parts["b0"] <= 120
    assert parts["b1"] > 900


def test_when_all_are_throttled_requests_decide() -> None:
    pods = [burstable("big", milli=3000), burstable("small", milli=1000)]
    full = GroupUse(cpu_milli=500, throttled=1.0)
    assert split(1000, with_uses({"big": full, "small": full}, *pods))[0] == {
        DIRECTORY: MINIMUM,
        "big": 750,
        "small": 250,
    }


def test_what_is_unknown_or_old_has_its_fair_part() -> None:
    pods = [burstable("new"), burstable("old"), burstable("known")]
    uses = {"old": GroupUse(cpu_milli=0, throttled=0.0, age_s=9.0), "known": GroupUse(cpu_milli=10, throttled=0.0)}
    parts, _ = split(900, with_uses(uses, *pods))
    assert parts["new"] == parts["old"] >= 300
    assert parts["known"] < 100


def test_who_is_throttled_by_his_own_limit_gets_no_more_than_that() -> None:
    pods = [burstable("bound", limit_us=10_000), burstable("free")]
    full = GroupUse(cpu_milli=100, throttled=1.0)
    parts, _ = split(1000, with_uses({"bound": full, "free": full}, *pods))
    assert parts["bound"] <= 125
    assert parts["free"] >= 875


def test_the_besteffort_directory_lends_and_borrows_like_a_pod() -> None:
    inside, outside = pod("in"), burstable("out")
    uses = {DIRECTORY: IDLE, "out": GroupUse(cpu_milli=500, throttled=1.0)}
    parts, _ = split(1000, with_uses(uses, inside, outside))
    assert parts["out"] >= 900
    uses = {DIRECTORY: GroupUse(cpu_milli=60, throttled=1.0), "out": IDLE}
    assert split(1000, with_uses(uses, inside, outside), parts)[0][DIRECTORY] >= 900


def test_noise_and_constant_input_divide_nothing_anew() -> None:
    uses = ALL_IDLE | {"b3": GroupUse(cpu_milli=1000, throttled=0.0), "b4": GroupUse(cpu_milli=40, throttled=0.0)}
    first, _ = split(1200, with_uses(uses, *TEN))
    now = first
    for shift in (0, 7, -9, 15, 0):
        noisy = {**uses, "b4": GroupUse(cpu_milli=40 + shift, throttled=0.0)}
        now, _ = split(1200, with_uses(noisy, *TEN), now)
        assert now == first
    # A smaller budget is divided at once.
    assert sum(split(600, with_uses(uses, *TEN), now)[0].values()) <= 600 + MINIMUM


def test_a_side_car_that_idles_lends_to_the_container_beside_it() -> None:
    both = pod("o", container("main"), container("proxy"), qos=QosClass.BURSTABLE)
    group = "/kubepods/burstable/podo/id-"
    uses = {f"{group}main": GroupUse(cpu_milli=400, throttled=0.8), f"{group}proxy": IDLE}
    view = node(both, cpu=cpu(online=2000), uses=uses)
    desired = plan(view, None, PoliciesConfig())
    parts = parts_of(both, view, desired.plan.pools)
    assert parts["id-main"] >= 6 * parts["id-proxy"]
    assert sum(parts.values()) <= (desired.plan.pools.quota_milli or {})["o"]


USES = st.one_of(
    st.none(),
    st.builds(
        GroupUse,
        cpu_milli=st.integers(0, 4000),
        throttled=st.sampled_from([None, 0.0, 0.04, 0.05, 1.0]),
        age_s=st.sampled_from([0.0, 2.9, 3.1]),
    ),
)


@given(
    budget=st.integers(10, 64_000),
    uses=st.lists(st.tuples(st.integers(0, 5000), USES), min_size=1, max_size=12),
    earlier=st.lists(st.integers(10, 3000), max_size=13),
)
def test_the_sum_the_fair_parts_and_the_rest_hold_for_every_use(
    budget: int, uses: list[tuple[int, GroupUse | None]], earlier: list[int]
) -> None:
    pods = [burstable(f"p{number:02}", milli=milli) for number, (milli, _) in enumerate(uses)]
    known = {item.uid: use for item, (_, use) in zip(pods, uses, strict=True) if use is not None}
    view = with_uses(known, *pods)
    before = dict(zip([DIRECTORY, *(item.uid for item in pods)], earlier, strict=False))
    parts, _ = split(budget, view, before)
    assert split(budget, view, parts)[0] == parts, "the same input again changes nothing"
    assert min(parts.values()) >= MINIMUM
    least = MINIMUM * len(parts)
    assert sum(parts.values()) <= budget + least
    fresh, _ = split(budget, view)
    weighed = [part for key, part in fresh.items() if key != DIRECTORY]
    assert sum(weighed) <= max(budget, MINIMUM * len(weighed)), "the directory, in which nobody is, uses none"
    requests = {item.uid: milli or 1000 for item, (milli, _) in zip(pods, uses, strict=True)}
    held = [
        uid for uid in requests if (use := known.get(uid)) is None or use.age_s > 3 or (use.throttled or 0.0) >= 0.05
    ]
    raised = any(budget * milli // sum(requests.values()) < MINIMUM for milli in requests.values())
    for uid in held:
        whole = max(0, budget - least) if raised else budget
        assert fresh[uid] >= whole * requests[uid] // sum(requests.values()), "its fair part at least"
    if held:
        assert sum(fresh.values()) >= budget - len(fresh), "nothing is left"


def test_many_takers_with_the_least_requests_add_nothing_to_the_budget() -> None:
    """Each has the least quota that the kernel takes, ten times its fair part; the largest pod yields that."""
    pods = [burstable("big", milli=4000), *(burstable(f"s{number:03}", milli=1) for number in range(400))]
    parts, _ = split(8000, with_uses({}, *pods))
    assert {parts[item.uid] for item in pods[1:]} == {MINIMUM}
    assert parts["big"] == 8000 - 400 * MINIMUM
    small, _ = split(2000, with_uses({}, *pods))
    assert {small[item.uid] for item in pods} == {MINIMUM}


@pytest.mark.parametrize("budget", [10, 160, 5000])
def test_without_be_work_the_directory_has_the_whole_budget(budget: int) -> None:
    assert split(budget, node())[0] == {DIRECTORY: budget}


INNER = f"{DIRECTORY}/podci/id-main/docker/build"
CI, OTHER = pod("ci", container("main")), pod("other", container("main"))


def wanted_quotas(view: NodeView) -> dict[str, object]:
    settings = plan(view, None, PoliciesConfig()).settings.values()
    return {setting.path: setting.value for setting in settings if setting.knob == "cpu.quota"}


def test_where_an_inner_group_forbids_the_directorys_quota_the_pods_have_their_own() -> None:
    """The directory has the least that v1 takes, and the other pods are not free for that reason."""
    parts, reason = split(1_000, node(CI, OTHER, quota_floors={DIRECTORY: QuotaFloor(2_000, INNER)}))
    assert parts == {"ci": 500, "other": 500}
    assert reason == ("CPU quota per container: kubepods/besteffort takes no less than 2.00 CPU, because of " + INNER)
    # Of a budget that is no smaller it forbids nothing.
    assert split(2_000, node(CI, OTHER, quota_floors={DIRECTORY: QuotaFloor(2_000, INNER)}))[0] == {DIRECTORY: 2_000}
    assert split(1_000, node(CI, OTHER))[0] == {DIRECTORY: 1_000}


def test_the_directory_wants_the_budget_still_and_each_container_its_part() -> None:
    view = node(CI, OTHER, cpu=cpu(online=3_000), quota_floors={DIRECTORY: QuotaFloor(64_000, INNER)})
    quotas = wanted_quotas(view)
    inside = {f"{DIRECTORY}/podci/id-main", f"{DIRECTORY}/podother/id-main"}
    assert quotas.keys() == {DIRECTORY, *inside}
    assert sum(quotas[path] for path in inside) == quotas[DIRECTORY]  # type: ignore[misc]
    assert wanted_quotas(node(CI, OTHER, cpu=cpu(online=3_000))).keys() == {DIRECTORY}
