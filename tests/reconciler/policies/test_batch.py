import pytest
from msgspec.structs import replace

from cgroupfs.naming import QosClass
from reconciler.control.planner import plan
from reconciler.policies.batch import BatchConfig
from reconciler.policies.table import PoliciesConfig
from state.model import Container, ContainerKind, Pod, PodClass, Resources
from state.plan import Desired
from tests.reconciler.nodes import MAINLINE, V1, V2, container, cpu, kubelet, node, pod

CONFIG = PoliciesConfig()
POD = "/kubepods/besteffort/podbe"
MAIN = f"{POD}/id-main"


def batch(cpu_milli: int | None, memory: int | None = None, name: str = "main") -> Container:
    resources = Resources(batch_cpu_milli=cpu_milli, batch_memory_bytes=memory)
    return container(name, requests=resources, limits=resources)


def of(desired: Desired, path: str = MAIN) -> dict[str, object]:
    return {
        setting.knob: setting.value
        for setting in desired.settings.values()
        if setting.path == path and setting.policy == "batch"
    }


@pytest.mark.parametrize(("milli", "shares"), [(0, 2), (1, 2), (1000, 1024), (1500, 1536), (300_000, 8192)])
def test_the_request_becomes_shares(milli: int, shares: int) -> None:
    assert of(plan(node(pod("be", batch(milli))), None, CONFIG))["cpu.weight"] == shares


def test_request_and_limits_become_weight_quota_and_memory_limit() -> None:
    desired = plan(node(pod("be", batch(500, 1 << 30))), None, CONFIG)
    bounded = {"memory.max": 1 << 30, "memory.swap": 1 << 30}
    assert of(desired) == {"cpu.weight": 512, "cpu.quota": 50_000, **bounded}
    assert of(desired, POD) == {"cpu.weight": 512, "cpu.quota": 50_000}


@pytest.mark.parametrize(
    ("versions", "accounted", "swap"),
    [
        pytest.param(V1, True, 1 << 30, id="v1: memory and swap together"),
        pytest.param(V2, True, 0, id="v2: no swap beside it"),
        pytest.param(V1, False, None, id="a kernel that does not account swap"),
    ],
)
def test_a_memory_limit_bounds_memory_and_swap_as_the_runtimes_do(
    versions: dict[str, int], accounted: bool, swap: int | None
) -> None:
    knobs = MAINLINE if accounted else MAINLINE - {"memory.swap"}
    desired = plan(node(pod("be", batch(500, 1 << 30)), versions=versions, knobs=knobs), None, CONFIG)
    assert of(desired)["memory.max"] == 1 << 30
    assert of(desired).get("memory.swap") == swap


def test_a_pod_weighs_what_its_containers_asked_for_together() -> None:
    item = pod("be", batch(500), batch(1000, name="side"), container("pause", kind=ContainerKind.SANDBOX))
    assert of(plan(node(item), None, CONFIG), POD) == {"cpu.weight": 1536, "cpu.quota": 150_000}


@pytest.mark.parametrize(
    ("qos", "sibling", "shares"),
    [
        (QosClass.BESTEFFORT, None, 8192),
        (QosClass.BESTEFFORT, pod("other", batch(500)), 8192),
        (QosClass.BESTEFFORT, pod("proxy", container("main"), cls=PodClass.SYSTEM), 2),
        (QosClass.BESTEFFORT, pod("web", container("main"), cls=PodClass.SHARED), 2),
        (QosClass.BESTEFFORT, pod("web", container("main"), cls=PodClass.SHARED, qos=QosClass.BURSTABLE), 8192),
        (QosClass.BURSTABLE, None, 2),
        (QosClass.GUARANTEED, None, 2),
    ],
)
def test_the_weight_of_a_be_pod_follows_its_request_only_among_be_pods(
    qos: QosClass, sibling: Pod | None, shares: int
) -> None:
    pods = [pod("be", batch(8000), qos=qos), *([sibling] if sibling is not None else [])]
    desired = plan(node(*pods), None, CONFIG)
    path = next(item.group.path for item in pods)
    weights = {s.path: s.value for s in desired.settings.values() if s.knob == "cpu.weight" and s.pod_uid == "be"}
    assert weights[path] == shares


@pytest.mark.parametrize(
    ("one", "quota"),
    [
        pytest.param(pod("be", batch(500), batch(250, name="side")), 75_000, id="the sum"),
        pytest.param(pod("be", batch(5), batch(5, name="side")), 2_000, id="of what the kernel takes"),
        pytest.param(pod("be", batch(500), container("free")), None, id="one without a limit"),
        pytest.param(pod("be", container("free")), None, id="no limit at all"),
        pytest.param(pod("be", batch(500), qos=QosClass.BURSTABLE), None, id="outside besteffort"),
        pytest.param(pod("be", replace(batch(250), kind=ContainerKind.INIT)), 25_000, id="an init container"),
        pytest.param(
            pod("be", batch(500), replace(container("debug"), kind=ContainerKind.EPHEMERAL)), 50_000, id="kubectl debug"
        ),
    ],
)
@pytest.mark.parametrize("versions", [V1, V2], ids=["v1", "v2"])
def test_a_pods_quota_is_the_sum_of_its_containers(one: Pod, quota: int | None, versions: dict[str, int]) -> None:
    desired = plan(node(one, versions=versions), None, CONFIG)
    assert of(desired, one.group.path).get("cpu.quota") == quota
    assert desired.refusals == ()


def test_a_pods_quota_is_in_its_own_period_and_never_below_a_childs() -> None:
    view = node(pod("be", batch(333)), actual={(POD, "cpu.period"): 70_001})
    quota = of(plan(view, None, CONFIG), POD)["cpu.quota"]
    assert isinstance(quota, int)
    assert quota * 100_000 >= 33_300 * 70_001 > (quota - 1) * 100_000


@pytest.mark.parametrize(
    ("milli", "period", "quota", "reason"),
    [
        (10, 100_000, 1000, "batch CPU limit of 0.01 CPU"),
        (8, 100_000, 1000, "batch CPU limit of 8 thousandths of a CPU, raised to 10, the kernel's least quota"),
        (50, 10_000, 1000, "batch CPU limit of 50 thousandths of a CPU, raised to 100, the kernel's least quota"),
    ],
)
def test_a_limit_below_the_kernels_least_quota_says_so(milli: int, period: int, quota: int, reason: str) -> None:
    view = node(pod("be", batch(milli)), actual={(MAIN, "cpu.period"): period})
    setting = plan(view, None, CONFIG).settings[MAIN, "cpu.quota"]
    assert (setting.value, setting.reason) == (quota, reason)


@pytest.mark.parametrize(("versions", "quota"), [(V1, None), (V2, 400_000)])
def test_on_v1_a_limit_above_the_directorys_quota_is_left_to_the_directory(
    versions: dict[str, int], quota: int | None
) -> None:
    desired = plan(node(pod("be", batch(4000)), cpu=cpu(online=4000), versions=versions), None, CONFIG)
    assert desired.plan.pools.budget_milli == 1120
    assert of(desired)["cpu.quota"] == quota
    assert of(desired, POD).get("cpu.quota") == quota
    assert desired.refusals == ()


def test_where_containers_are_bounded_one_by_one_the_tighter_bound_holds() -> None:
    proxy = pod("proxy", cls=PodClass.SYSTEM)
    tight = plan(node(pod("be", batch(500)), proxy), None, CONFIG)
    loose = plan(node(pod("be", batch(7000)), proxy), None, CONFIG)
    assert tight.settings[MAIN, "cpu.quota"].value == 50_000
    assert loose.settings[MAIN, "cpu.quota"].value == 512_000
    assert loose.settings[MAIN, "cpu.quota"].policy == "reclaimed"


def test_a_container_without_a_limit_keeps_the_others_theirs() -> None:
    item = pod("be", batch(500, 1 << 30), container("free"))
    desired = plan(node(item), None, CONFIG)
    assert of(desired)["memory.max"] == 1 << 30
    assert of(desired, "/kubepods/besteffort/podbe/id-free") == {}


def test_an_online_pods_extended_resources_are_not_enforced() -> None:
    assert of(plan(node(pod("be", batch(500), cls=PodClass.SHARED)), None, CONFIG)) == {}


def test_each_part_can_be_switched_off() -> None:
    config = PoliciesConfig(batch=BatchConfig(weight=False, quota=False, memory=False))
    assert of(plan(node(pod("be", batch(500, 1 << 30))), None, config)) == {}


def test_up_to_1_21_the_weight_is_on_the_pod_which_the_kubelet_does_not_rewrite() -> None:
    view = node(pod("be", batch(500, 1 << 30)), kubelet=kubelet(default="0-7", reasserts_s=10.0))
    desired = plan(view, None, CONFIG)
    assert of(desired) == {"cpu.quota": 50_000, "memory.max": 1 << 30, "memory.swap": 1 << 30}
    assert of(desired, POD) == {"cpu.weight": 512, "cpu.quota": 50_000}
    assert desired.refusals == ()


def test_a_container_with_exclusive_cpus_is_left_alone() -> None:
    view = node(
        pod("be", batch(500), qos=QosClass.GUARANTEED), kubelet=kubelet(default="0-6", exclusive={"be/main": "7"})
    )
    assert of(plan(view, None, CONFIG), "/kubepods/podbe/id-main") == {}


@pytest.mark.parametrize("cls", [PodClass.SHARED, PodClass.RECLAIMED])
def test_mid_tier_resources_are_enforced_for_online_and_be_pods(cls: PodClass) -> None:
    resources = Resources(batch_cpu_milli=500, batch_memory_bytes=1 << 30, mid=True)
    item = pod("be", container("main", requests=resources, limits=resources), container("side"), cls=cls)
    desired = plan(node(item), None, CONFIG)
    assert of(desired) == {"cpu.weight": 512, "cpu.quota": 50_000, "memory.max": 1 << 30, "memory.swap": 1 << 30}
    assert of(desired, POD)["cpu.weight"] == 512
    assert of(desired, f"{POD}/id-side") == {}


def test_of_an_online_pod_only_the_mid_tier_counts() -> None:
    mid = Resources(batch_cpu_milli=500, mid=True)
    item = pod("be", container("main", requests=mid, limits=mid), batch(700, name="side"), cls=PodClass.SHARED)
    desired = plan(node(item), None, CONFIG)
    assert of(desired, f"{POD}/id-side") == {}
    assert of(desired, POD)["cpu.weight"] == 512


def claimed(milli: int, name: str = "main") -> Container:
    return container(name, requests=Resources(claimed_cpu_milli=milli), limits=Resources(batch_cpu_milli=milli))


def weights(desired: Desired) -> dict[str, object]:
    return {s.path.removeprefix("/kubepods/"): s.value for s in desired.settings.values() if s.knob == "cpu.weight"}


def test_a_claim_that_no_scheduler_counted_outweighs_no_pod() -> None:
    desired = plan(node(pod("be", claimed(1_000_000)), pod("fair"), pod("asks", batch(2000))), None, CONFIG)
    found = weights(desired)
    assert (found["besteffort/podbe"], found["besteffort/podfair"], found["besteffort/podasks"]) == (1024, 1024, 2048)


def test_a_claim_is_no_larger_part_of_the_budget_and_its_limit_bounds_it() -> None:
    # Beside an online pod each container has a quota of its own.
    proxy = pod("proxy", cls=PodClass.SYSTEM)
    desired = plan(node(pod("be", claimed(1_000_000)), pod("fair"), proxy), None, CONFIG)
    assert desired.plan.pools.quota_milli is not None
    assert desired.plan.pools.quota_milli["be"] == desired.plan.pools.quota_milli["fair"]
    small = plan(node(pod("be", claimed(300)), pod("fair"), proxy), None, CONFIG)
    assert small.settings[MAIN, "cpu.quota"].value == 30_000


def test_within_its_own_pod_a_claim_divides() -> None:
    found = weights(plan(node(pod("be", claimed(4000), claimed(1000, "side"))), None, CONFIG))
    assert found["besteffort/podbe/id-main"] == 4096
    assert found["besteffort/podbe/id-side"] == 1024


def test_a_request_of_the_spec_is_bounded_by_what_the_node_has() -> None:
    # A pod with a nodeName passes no scheduler, and the kubelet ignores resources that its node does not offer.
    found = weights(plan(node(pod("be", batch(1_000_000)), pod("fair")), None, CONFIG))
    assert found["besteffort/podbe"] == 8192


MID = Resources(batch_cpu_milli=6000, mid=True)


@pytest.mark.parametrize(
    ("siblings", "shares"),
    [
        pytest.param([], 6144, id="alone"),
        pytest.param([pod("other", batch(500))], 6144, id="beside BE pods, which have the least"),
        pytest.param([pod("m2", container("main", requests=MID), cls=PodClass.SHARED)], 6144, id="beside its like"),
        pytest.param([pod("proxy", cls=PodClass.SYSTEM)], 12, id="beside a system pod's 2 shares"),
        pytest.param([pod("web", cls=PodClass.SHARED)], 12, id="beside an online pod's 2 shares"),
    ],
)
def test_a_mid_tier_pod_weighs_no_more_than_its_cpus_against_online_pods(siblings: list[Pod], shares: int) -> None:
    mid = pod("mid", container("main", requests=MID), cls=PodClass.SHARED)
    found = weights(plan(node(mid, *siblings), None, CONFIG))
    assert found["besteffort/podmid"] == shares
    if any(item.pod_class is PodClass.RECLAIMED for item in siblings):
        assert found["besteffort/podother"] == 2


def test_a_mid_tier_claim_and_a_mid_tier_pod_outside_besteffort_keep_the_kubelets_weight() -> None:
    claims = Resources(claimed_cpu_milli=6000)
    for item in (
        pod("mid", container("main", requests=claims), cls=PodClass.SHARED),
        pod("mid", container("main", requests=MID), cls=PodClass.SHARED, qos=QosClass.BURSTABLE),
    ):
        assert item.group.path.removeprefix("/kubepods/") not in weights(plan(node(item), None, CONFIG))
