import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cgroupfs.naming import QosClass
from reconciler.control.planner import plan, plan_pools
from reconciler.policies.normalise import NormaliseConfig, normalised
from reconciler.policies.table import PoliciesConfig
from state.model import Container, ContainerKind, PodClass, Resources, RuntimeSpec
from tests.reconciler.nodes import V1, V2, container, kubelet, node, online, pod

MAIN = "/kubepods/burstable/podweb/id-main"


def at(ratio: float) -> PoliciesConfig:
    return PoliciesConfig(normalise=NormaliseConfig(ratio=ratio))


def limited(quota: int | None, name: str = "main") -> Container:
    return container(name, spec=RuntimeSpec(quota_us=quota, period_us=100_000))


@pytest.mark.parametrize(
    ("quota", "ratio", "expected"),
    [
        (100_000, 1.0, None),
        (120_000, 1.2, 100_000),
        (100_000, 1.1, 90_910),
        (100_000, 1.25, 80_000),
        (100_000, 3.0, 33_334),
        (1_000, 2.0, None),
        (1_500, 2.0, 1_000),
        (None, 2.0, None),
        (-1, 2.0, None),
    ],
)
@pytest.mark.parametrize("versions", [V1, V2], ids=["v1", "v2"])
def test_a_quota_is_divided_and_rounded_up(
    quota: int | None, ratio: float, expected: int | None, versions: dict[str, int]
) -> None:
    view = node(online("web", limited(quota)), versions=versions)
    desired = plan(view, None, at(ratio))
    values = {key: setting.value for key, setting in desired.settings.items() if setting.policy == "normalise"}
    assert values == ({} if expected is None else {(MAIN, "cpu.quota"): expected})
    assert desired.refusals == ()


@given(st.integers(1, 10**9), st.integers(100, 1000))
def test_it_is_the_smallest_whole_number_that_is_enough(amount: int, hundredths: int) -> None:
    pools = replace(plan_pools(node(), None, PoliciesConfig()), quota_ratio=hundredths / 100)
    value = normalised(amount, pools)
    assert (value - 1) * hundredths < amount * 100 <= value * hundredths


@pytest.mark.parametrize("cls", [PodClass.SYSTEM, PodClass.DEDICATED, PodClass.RECLAIMED])
def test_only_shared_pods_count_in_reference_cpus(cls: PodClass) -> None:
    item = pod("web", limited(200_000), cls=cls, qos=QosClass.BURSTABLE)
    assert "normalise" not in {each.policy for each in plan(node(item), None, at(2.0)).settings.values()}


def test_containers_with_cpus_of_their_own_and_the_pause_container_are_left_out() -> None:
    item = pod(
        "web",
        limited(200_000),
        limited(50_000, "side"),
        replace(limited(50_000, "pause"), kind=ContainerKind.SANDBOX),
        cls=PodClass.SHARED,
        qos=QosClass.GUARANTEED,
    )
    view = node(item, kubelet=kubelet(default="0-5", exclusive={"web/main": "6-7"}))
    pairs = [key for key, each in plan(view, None, at(2.0)).settings.items() if each.policy == "normalise"]
    assert pairs == [("/kubepods/podweb/id-side", "cpu.quota")]


def test_a_loan_stands_while_it_lasts() -> None:
    item = online("web", limited(100_000))
    assert (MAIN, "cpu.quota") not in plan(node(item, lent_us={MAIN: 120_000}), None, at(2.0)).settings
    assert plan(node(item, lent_us={MAIN: 50_000}), None, at(2.0)).settings[MAIN, "cpu.quota"].value == 50_000


def test_batch_limits_are_in_reference_cpus_too() -> None:
    resources = Resources(batch_cpu_milli=500)
    view = node(pod("be", container("main", requests=resources, limits=resources)))
    desired = plan(view, None, at(1.25))
    assert desired.settings["/kubepods/besteffort/podbe/id-main", "cpu.quota"].value == 40_000
    assert desired.settings["/kubepods/besteffort/podbe", "cpu.quota"].value == 40_000
    assert desired.settings["/kubepods/besteffort/podbe", "cpu.weight"].value == 512


def test_off_it_tells_the_others_nothing() -> None:
    config = PoliciesConfig(normalise=NormaliseConfig(enabled=False, ratio=2.0))
    assert plan_pools(node(), None, config).quota_ratio == 1.0
    assert plan_pools(node(), None, at(2.0)).reasons["normalise"] == "quotas are divided by 2"


@pytest.mark.parametrize("text", [b'{"ratio": 0.9}', b'{"ratio": 11}', b'{"ratio": "1.2"}'])
def test_a_ratio_below_one_or_beyond_belief_is_refused(text: bytes) -> None:
    with pytest.raises(msgspec.ValidationError, match="ratio"):
        msgspec.json.decode(text, type=NormaliseConfig)
