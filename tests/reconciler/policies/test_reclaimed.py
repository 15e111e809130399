import pytest
from msgspec.structs import replace

from cgroupfs.naming import QosClass
from reconciler.control.planner import plan, plan_node, plan_pod, plan_pools
from reconciler.policies.budget import BudgetConfig
from reconciler.policies.reclaimed import ReclaimedConfig, ReclaimedForm
from reconciler.policies.table import PoliciesConfig
from state.model import (
    ContainerKind,
    CpuPolicy,
    KubeletView,
    PodClass,
    Resources,
    RuntimeSpec,
    Setting,
)
from state.plan import Desired
from state.topology import uniform
from tests.fakes.constants import varied
from tests.reconciler.nodes import NONE, V2, container, cpu, cpus, kubelet, node, online, pod

BOTH = PoliciesConfig()
CPUSET = PoliciesConfig(reclaimed=ReclaimedConfig(form=ReclaimedForm.CPUSET))
QUOTA = PoliciesConfig(reclaimed=ReclaimedConfig(form=ReclaimedForm.QUOTA))
DIRECTORY = "/kubepods/besteffort"


def of(desired: Desired, path: str) -> dict[str, object]:
    """Knob -> value of one group."""
    return {setting.knob: setting.value for setting in desired.settings.values() if setting.path == path}


def values(settings: tuple[Setting, ...]) -> dict[tuple[str, str], object]:
    return {setting.key: setting.value for setting in settings}


def test_be_containers_get_the_pool_the_least_weight_and_their_directory_the_budget() -> None:
    desired = plan(node(pod("be"), cpu=cpu(online=2000)), None, BOTH)
    assert desired.plan.pools.budget_milli == 3200
    assert desired.plan.pools.reclaimed == cpus("4-7")
    assert of(desired, DIRECTORY) == {"cpu.quota": 320_000}
    assert of(desired, f"{DIRECTORY}/podbe") == {"cpu.weight": 1024}
    assert of(desired, f"{DIRECTORY}/podbe/id-main") == {"cpu.set": cpus("4-7"), "cpu.weight": 2}
    assert desired.refusals == ()


def test_the_directory_is_bounded_before_the_first_be_pod_comes() -> None:
    assert of(plan(node(), None, BOTH), DIRECTORY) == {"cpu.quota": 512_000}


@pytest.mark.parametrize(
    ("config", "count", "knobs"),
    [(BOTH, 4, {"cpu.set"}), (CPUSET, 3, {"cpu.set"}), (QUOTA, 4, set())],
    ids=["both", "cpuset", "quota"],
)
def test_the_form_decides_what_is_written(config: PoliciesConfig, count: int, knobs: set[str]) -> None:
    desired = plan(node(pod("be"), cpu=cpu(online=1800)), None, config)
    assert desired.plan.pools.budget_milli == 3360
    assert len(desired.plan.pools.reclaimed) == count
    assert set(of(desired, f"{DIRECTORY}/podbe/id-main")) - {"cpu.weight"} == knobs
    assert bool(of(desired, DIRECTORY)) is (config is not CPUSET)


def test_the_quota_follows_the_period_of_the_group() -> None:
    view = node(actual={(DIRECTORY, "cpu.period"): 50_000})
    assert of(plan(view, None, BOTH), DIRECTORY) == {"cpu.quota": 256_000}


def test_no_quota_is_below_what_the_kernel_takes() -> None:
    config = PoliciesConfig(reclaimed=ReclaimedConfig(budget=varied(BudgetConfig(floor_percent=0), floor_milli=10)))
    view = node(cpu=cpu(online=8000), actual={(DIRECTORY, "cpu.period"): 20_000})
    assert of(plan(view, None, config), DIRECTORY) == {"cpu.quota": 1000}


# --- living with the kubelet ---------------------------------------------------------------------------------------


def test_under_static_the_pool_lies_inside_the_default_set_and_only_containers_are_confined() -> None:
    view = node(pod("be"), kubelet=kubelet(default="0-5", exclusive={"g/main": "6"}, reserved="0"))
    desired = plan(view, None, BOTH)
    # CPU 7 is in neither set: between the two renames of one allocation it is about to be allocated.
    assert desired.plan.pools.reclaimed == cpus("2-5")
    assert "cpu.set" not in of(desired, DIRECTORY)
    assert "cpu.set" not in of(desired, f"{DIRECTORY}/podbe")


def test_up_to_1_21_be_is_bounded_by_quota_alone_and_nothing_the_kubelet_rewrites_is_wanted() -> None:
    view = node(pod("be"), kubelet=kubelet(default="0-7", reasserts_s=10.0))
    desired = plan(view, None, BOTH)
    assert of(desired, f"{DIRECTORY}/podbe/id-main") == {}
    assert "cpu.quota" in of(desired, DIRECTORY)
    assert desired.plan.pools.reasons["cpuset"] == (
        "not used: this kubelet rewrites every container's CPU set every 10 s (static CPU manager up to 1.21); "
        "BE is limited by quota only"
    )
    assert "cpu.quota" in of(plan(view, None, CPUSET), DIRECTORY)


def test_exclusive_cpus_are_lent_only_when_configured() -> None:
    lend = PoliciesConfig(reclaimed=ReclaimedConfig(share_exclusive=True))
    view = node(kubelet=kubelet(default="0-3", exclusive={"g/main": "4-7"}), cpu=cpu())
    assert plan_pools(view, None, BOTH).reclaimed <= cpus("0-3")
    assert plan_pools(view, None, lend).reclaimed == cpus("2-7")


def test_reserved_cpus_are_lent_only_when_configured() -> None:
    lend = PoliciesConfig(reclaimed=ReclaimedConfig(share_reserved=True))
    view = node(topology=2, kubelet=kubelet(default="0-1", reserved="0"))
    assert plan_pools(view, None, BOTH).reclaimed == cpus("1")
    assert plan_pools(view, None, lend).reclaimed == cpus("0-1")


def test_a_container_with_cpus_of_its_own_is_left_alone_whatever_its_label() -> None:
    mine = pod("g", container("main"), container("side"), qos=QosClass.GUARANTEED)
    view = node(mine, kubelet=kubelet(default="0-6", exclusive={"g/main": "7"}))
    desired = plan(view, None, BOTH)
    assert of(desired, "/kubepods/podg/id-main") == {}
    assert "cpu.set" in of(desired, "/kubepods/podg/id-side")


def test_a_container_without_a_name_in_a_pod_with_exclusive_cpus_is_left_alone() -> None:
    mine = pod("g", container("main"), qos=QosClass.GUARANTEED)
    unnamed = replace(mine, containers=tuple(replace(item, name=None) for item in mine.containers))
    view = node(unnamed, kubelet=kubelet(default="0-6", exclusive={"g/main": "7"}))
    assert plan_pod(unnamed, view, plan_node(view, None, BOTH), BOTH)[0][0].path == "/kubepods/podg"
    assert of(plan(view, None, BOTH), "/kubepods/podg/id-main") == {}


# --- small machines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [BOTH, CPUSET, QUOTA], ids=["both", "cpuset", "quota"])
def test_with_one_cpu_reserved_and_the_other_exclusive_be_shares_the_default_set_bounded_by_quota(
    config: PoliciesConfig,
) -> None:
    view = node(pod("be"), topology=2, kubelet=kubelet(default="0", reserved="0", exclusive={"g/main": "1"}))
    desired = plan(view, None, config)
    assert desired.plan.pools.reclaimed == cpus("0")
    assert desired.plan.pools.budget_milli == 640
    assert of(desired, DIRECTORY) == {"cpu.quota": 64_000}
    assert desired.plan.pools.reasons["reclaimed"] == (
        "only reserved CPUs left: BE shares CPU 0 with the system, limited by quota"
    )


def test_with_every_cpu_dedicated_be_still_has_a_set_and_a_bound() -> None:
    view = node(pod("be"), topology=2, kubelet=kubelet(exclusive={"a/main": "0", "b/main": "1"}), cpu=cpu(online=2000))
    desired = plan(view, None, CPUSET)
    assert desired.plan.pools.reclaimed == cpus("1")
    assert of(desired, DIRECTORY) == {"cpu.quota": 10_000}
    assert "all CPUs are dedicated" in desired.plan.pools.reasons["reclaimed"]


def test_a_busy_exclusive_cpu_does_not_throttle_be_once_be_is_confined() -> None:
    busy = cpu(online=1000, system=100, idle={0: 0.9, 1: 0.0})
    view = node(topology=2, kubelet=kubelet(default="0", reserved="0", exclusive={"g/main": "1"}), cpu=busy)
    first = plan_pools(view, None, BOTH)
    assert first.budget_milli == 100  # BE work may still be anywhere
    later = plan_pools(replace(view, now=100.0), first, BOTH)
    assert later.budget_milli > first.budget_milli


def test_isolated_cpus_are_not_for_be_work_where_there_are_others() -> None:
    shape = replace(uniform(cores=4, threads=1), isolated=cpus("2-3"))
    assert plan_pools(node(topology=shape), None, BOTH).reclaimed == cpus("0-1")


def test_the_hyper_thread_rule_shows_in_the_reason_when_it_must_give_way() -> None:
    view = node(topology=uniform(cores=2, threads=2), kubelet=kubelet(default="0,2-3", exclusive={"g/main": "1"}))
    pools = plan_pools(view, None, PoliciesConfig(reclaimed=ReclaimedConfig(minimum_cpus=3)))
    assert pools.reclaimed == cpus("0,2-3")
    assert "CPU 3 has a dedicated or reserved sibling: no other was free" in pools.reasons["reclaimed"]


# --- who is bounded where ------------------------------------------------------------------------------------------


def test_be_pods_outside_besteffort_get_their_part_of_the_budget_per_container() -> None:
    outside = pod("o", container("a"), container("b"), qos=QosClass.BURSTABLE)
    desired = plan(node(pod("be"), outside, cpu=cpu(online=2000)), None, BOTH)
    assert desired.plan.pools.budget_milli == 3200
    # One whole CPU is assumed for each pod that requests nothing, whatever the number of its containers.
    assert of(desired, DIRECTORY) == {"cpu.quota": 160_000}
    assert of(desired, "/kubepods/burstable/podo/id-a")["cpu.quota"] == 80_000
    assert of(desired, "/kubepods/burstable/podo/id-b")["cpu.quota"] == 80_000
    assert "cpu.quota" not in of(desired, "/kubepods/burstable/podo")
    assert "cpu.quota" not in of(desired, f"{DIRECTORY}/podbe/id-main")


def test_the_parts_follow_what_was_asked_for() -> None:
    big = pod("o", container("a", requests=Resources(cpu_milli=3000)), qos=QosClass.BURSTABLE)
    desired = plan(node(pod("be"), big, cpu=cpu(online=2000)), None, BOTH)
    assert desired.plan.pools.quota_milli == {DIRECTORY: 800, "o": 2400}


def test_a_part_is_never_looser_than_what_the_kubelet_gave() -> None:
    outside = pod("o", container("a", spec=RuntimeSpec(quota_us=5000, shares=51)), qos=QosClass.BURSTABLE)
    assert of(plan(node(outside), None, BOTH), "/kubepods/burstable/podo/id-a")["cpu.quota"] == 5000


def test_an_online_pod_in_besteffort_moves_the_bound_from_the_directory_to_the_containers() -> None:
    proxy = online("proxy", qos=QosClass.BESTEFFORT)
    desired = plan(node(pod("x"), pod("y"), proxy, cpu=cpu(online=2000)), None, BOTH)
    assert of(desired, DIRECTORY) == {}
    assert of(desired, f"{DIRECTORY}/podx/id-main")["cpu.quota"] == 160_000
    assert of(desired, f"{DIRECTORY}/pody/id-main")["cpu.quota"] == 160_000
    assert of(desired, f"{DIRECTORY}/podproxy/id-main") == {}
    assert "online pod ns/proxy is inside kubepods/besteffort" in desired.plan.pools.reasons["quota"]


def test_a_pod_newer_than_the_pools_starts_with_the_least() -> None:
    view = node(online("proxy", qos=QosClass.BESTEFFORT))
    before = plan_node(view, None, BOTH)
    late = pod("late")
    settings, _ = plan_pod(late, node(*view.pods.values(), late), before, BOTH)
    assert values(settings)[f"{DIRECTORY}/podlate/id-main", "cpu.quota"] == 1000


def test_more_takers_than_the_budget_has_parts_each_get_the_kernels_minimum() -> None:
    crowd = [pod(f"b{number}") for number in range(40)]
    view = node(*crowd, online("p", qos=QosClass.BESTEFFORT), cpu=cpu(online=8000))
    desired = plan(view, None, BOTH)
    assert desired.plan.pools.budget_milli == 160
    assert {of(desired, f"{item.group.path}/id-main")["cpu.quota"] for item in crowd} == {1000}


def test_the_sandbox_is_left_alone_and_a_container_that_may_be_one_is_bounded() -> None:
    item = pod("be", container("pause", kind=ContainerKind.SANDBOX), container("what", kind=ContainerKind.UNKNOWN))
    desired = plan(node(item), None, BOTH)
    assert of(desired, f"{DIRECTORY}/podbe/id-pause") == {}
    assert "cpu.set" in of(desired, f"{DIRECTORY}/podbe/id-what")


@pytest.mark.parametrize("other", [PodClass.SHARED, PodClass.SYSTEM, PodClass.DEDICATED])
def test_no_other_class_is_touched(other: PodClass) -> None:
    assert plan_pod(pod("x", cls=other), node(), plan_node(node(), None, BOTH), BOTH) == ((), ())


# --- the narrowed besteffort directory -----------------------------------------------------------------------------

NARROW = PoliciesConfig(reclaimed=ReclaimedConfig(besteffort_cpuset=True))


def narrow(view_kubelet: KubeletView) -> Desired:
    item = pod("be", container("main"), container("pause", kind=ContainerKind.SANDBOX))
    return plan(node(item, kubelet=view_kubelet, cpu=cpu(online=2000)), None, NARROW)


def test_under_policy_none_the_directory_and_all_below_it_can_be_narrowed() -> None:
    desired = narrow(NONE)
    for path in (DIRECTORY, f"{DIRECTORY}/podbe", f"{DIRECTORY}/podbe/id-main", f"{DIRECTORY}/podbe/id-pause"):
        assert of(desired, path)["cpu.set"] == cpus("4-7")
    assert desired.refusals == ()


@pytest.mark.parametrize("policy", [CpuPolicy.STATIC, CpuPolicy.UNKNOWN])
def test_under_any_other_policy_the_directory_is_refused_and_the_containers_are_confined_all_the_same(
    policy: CpuPolicy,
) -> None:
    desired = narrow(kubelet(policy, default="0-7"))
    assert [(refusal.rule, refusal.setting.path) for refusal in desired.refusals] == [("besteffort-cpuset", DIRECTORY)]
    assert "cpu.set" not in of(desired, f"{DIRECTORY}/podbe")
    assert "cpu.set" not in of(desired, f"{DIRECTORY}/podbe/id-pause")
    assert "cpu.set" in of(desired, f"{DIRECTORY}/podbe/id-main")


# --- over time -----------------------------------------------------------------------------------------------------


def test_noise_on_a_busy_node_leaves_the_pools_as_they_are() -> None:
    pools = plan_pools(node(cpu=cpu(online=2000)), None, BOTH)
    for turn in range(1, 200):
        noise = (turn * 7919) % 150
        after = plan_pools(node(cpu=cpu(online=2000 + noise), now=turn * 5.0), pools, BOTH)
        if turn > 10:
            assert after == pools
        pools = after


def test_a_new_exclusive_pod_takes_only_the_cpus_it_got() -> None:
    before = plan_pools(node(kubelet=kubelet(default="0-7")), None, BOTH)
    assert before.reclaimed == cpus("2-7")
    view = node(kubelet=kubelet(default="0-4,6-7", exclusive={"g/main": "5"}))
    assert plan_pools(view, before, BOTH).reclaimed == cpus("2-4,6-7")


def test_quota_is_the_same_on_v2() -> None:
    assert of(plan(node(versions=V2), None, BOTH), DIRECTORY) == {"cpu.quota": 512_000}


@pytest.mark.parametrize("groups", [0, 1], ids=["gVisor", "kata"])
def test_a_pod_in_a_machine_of_its_own_is_bounded_at_its_directory_and_no_container(groups: int) -> None:
    own = pod("be", container("machine", kind=ContainerKind.SANDBOX))
    inside = own.containers[:groups]
    own = replace(own, containers=inside, sandbox="kata")
    desired = plan(node(own, cpu=cpu(online=2000)), None, BOTH)
    assert of(desired, f"{DIRECTORY}/podbe") == {"cpu.set": cpus("4-7"), "cpu.weight": 1024}
    assert {setting.knob for setting in desired.settings.values() if setting.container_id is not None} <= {"cpu.set"}
    # Each group inside follows: on v1 the directory's set could not be smaller than theirs.
    assert [of(desired, item.group.path) for item in inside] == [{"cpu.set": cpus("4-7")} for _ in inside]


def test_a_pod_in_a_machine_of_its_own_outside_the_besteffort_directory_gets_its_part_as_a_quota() -> None:
    own = replace(pod("be", qos=QosClass.BURSTABLE), sandbox="kata")
    desired = plan(node(own, cpu=cpu(online=2000)), None, BOTH)
    path = own.group.path
    assert of(desired, path)["cpu.quota"] == 320_000
    assert of(desired, own.containers[0].group.path) == {"cpu.set": cpus("4-7")}
