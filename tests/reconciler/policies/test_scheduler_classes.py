"""The idle class, group identity and QoS level: which pods get each, and what is planned on a kernel without them."""

import msgspec
import pytest
from msgspec.structs import replace

from cgroupfs.naming import QosClass
from reconciler.control.planner import plan
from reconciler.policies.group_identity import GroupIdentityConfig
from reconciler.policies.idle_class import IdleClassConfig
from reconciler.policies.qos_level import QosLevelConfig
from reconciler.policies.table import PoliciesConfig
from state.cpu import KernelScheduler
from state.model import ContainerKind, CpuPolicy, Phase, Pod, PodClass
from state.plan import Desired
from tests.fakes.constants import varied
from tests.reconciler.nodes import MAINLINE, V1, V2, container, kubelet, node, online, pod

ON = PoliciesConfig(
    idle_class=IdleClassConfig(enabled=True),
    group_identity=GroupIdentityConfig(enabled=True),
    qos_level=QosLevelConfig(enabled=True),
)
ANOLIS = MAINLINE | {"cpu.identity"}
OPENEULER = MAINLINE | {"cpu.qos"}
BESTEFFORT, BURSTABLE = "/kubepods/besteffort", "/kubepods/burstable"
BE, WEB = f"{BESTEFFORT}/podbe", f"{BURSTABLE}/podweb"
PAUSE = container("pause", kind=ContainerKind.SANDBOX)


def of(desired: Desired, knob: str) -> dict[str, object]:
    return {path: setting.value for (path, name), setting in desired.settings.items() if name == knob}


@pytest.mark.parametrize("knob", ["cpu.idle", "cpu.identity", "cpu.qos"])
@pytest.mark.parametrize("versions", [V1, V2], ids=["v1", "v2"])
def test_all_are_off_by_default_and_without_the_kernel(knob: str, versions: dict[str, int]) -> None:
    view = node(pod("be"), online("web"), knobs=MAINLINE | ANOLIS | OPENEULER, versions=versions)
    assert of(plan(view, None, PoliciesConfig()), knob) == {}
    without = plan(replace(view, knobs=view.knobs - {knob}), None, ON)
    assert of(without, knob) == {}
    assert without.refusals == ()


def test_what_a_kernel_lacks_is_said_once_for_the_node() -> None:
    reasons = plan(node(knobs=MAINLINE - {"cpu.idle"}), None, ON).plan.pools.reasons
    assert reasons["idle_class"] == "this kernel has no cpu.idle (cpu.idle, from Linux 5.15 on)"
    assert (
        reasons["group_identity"] == "this kernel has no cpu.identity (cpu.bvt_warp_ns, from Linux 4.19 of Anolis on)"
    )
    assert reasons["qos_level"] == "this kernel has no cpu.qos (cpu.qos_level, from Linux 4.19 of openEuler on)"
    unseen = plan(node(knobs=frozenset()), None, ON).plan.pools.reasons["idle_class"]
    assert unseen.startswith("unknown: no kubepods directory")
    assert (
        plan(node(versions={}), None, ON).plan.pools.reasons["qos_level"] == "no cpu controller is mounted on this node"
    )


# Idle class


def test_be_pods_own_directories_are_idle_and_no_other() -> None:
    view = node(pod("be", container("main"), PAUSE), online("web"), pod("late", qos=QosClass.BURSTABLE))
    desired = plan(view, None, ON)
    assert of(desired, "cpu.idle") == {BE: 1, f"{BURSTABLE}/podlate": 1}
    assert desired.refusals == ()
    assert of(desired, "cpu.weight")[BE] == 1024, "still wanted: it counts when the class is left"


@pytest.mark.parametrize("qos", [QosClass.BURSTABLE, QosClass.GUARANTEED])
def test_a_pod_that_the_kubelet_may_resize_is_not_idle_and_says_why(qos: QosClass) -> None:
    late = pod("late", qos=qos)
    desired = plan(node(pod("be"), late, kubelet=kubelet(CpuPolicy.NONE, may_resize=True)), None, ON)
    assert of(desired, "cpu.idle") == {BE: 1}
    (refusal,) = desired.refusals
    assert (refusal.setting.path, refusal.rule) == (late.group.path, "idle-resized")
    assert "resize the pod in place" in refusal.reason


def test_a_be_pod_with_cpus_of_its_own_is_not_idle_on_them() -> None:
    item = pod("be", qos=QosClass.GUARANTEED)
    assert of(plan(node(item, kubelet=kubelet(default="0-6", exclusive={"be/main": "7"})), None, ON), "cpu.idle") == {}


def sides(**given: bool) -> PoliciesConfig:
    return PoliciesConfig(idle_class=IdleClassConfig(enabled=True, **given))


def idle_threads(desired: Desired) -> dict[str, object]:
    part = desired.plan.idle_threads
    return {} if part is None else {path: setting.value for path, setting in part.settings.items()}


@pytest.mark.parametrize(
    ("given", "groups", "threads"),
    [({}, True, False), ({"threads": True}, True, True), ({"group": False, "threads": True}, False, True)],
    ids=["default", "both", "threads"],
)
def test_each_side_is_a_choice_of_its_own(given: dict[str, bool], groups: bool, threads: bool) -> None:
    view = node(pod("be", container("main"), PAUSE), online("web"), pod("late", qos=QosClass.BURSTABLE))
    desired = plan(view, None, sides(**given))
    assert bool(of(desired, "cpu.idle")) == groups
    assert idle_threads(desired) == ({f"{BE}/id-main": 5, f"{BURSTABLE}/podlate/id-main": 5} if threads else {})


@pytest.mark.parametrize(
    ("group", "offers", "threads"), [(True, True, False), (True, False, True), (False, True, True)]
)
def test_threads_are_left_out_beside_idle_groups_where_the_kernel_heeds_them_within_groups_only(
    group: bool, offers: bool, threads: bool
) -> None:
    knobs = frozenset({"cpu.set", "cpu.quota", "cpu.weight"} | ({"cpu.idle"} if offers else set()))
    view = node(pod("be", container("main")), knobs=knobs, scheduler=KernelScheduler(threads_yield=False))
    desired = plan(view, None, sides(group=group, threads=True))
    assert bool(idle_threads(desired)) is threads
    assert bool(of(desired, "cpu.idle")) is (group and offers)


@pytest.mark.parametrize(
    ("more", "actual", "pods", "groups"),
    [
        ({}, {}, (), False),
        ({}, {("/kubepods/besteffort", "cpu.weight"): 2}, (), False),
        ({}, {("/kubepods/besteffort", "cpu.weight"): 1024}, (), True),
        ({}, {}, (online("inside", qos=QosClass.BESTEFFORT),), True),
        ({"always": True}, {}, (), True),
    ],
    ids=["as the kubelet has it", "as read", "raised by somebody", "an online pod beside it", "always"],
)
def test_from_linux_6_6_on_the_least_weight_of_besteffort_takes_the_place_of_the_class(
    more: dict[str, bool], actual: dict[tuple[str, str], int], pods: tuple[Pod, ...], groups: bool
) -> None:
    late = pod("late", qos=QosClass.BURSTABLE)
    for eevdf in (False, True):
        scheduler = KernelScheduler(threads_yield=False, eevdf=eevdf)
        view = node(pod("be"), late, *pods, scheduler=scheduler, actual=actual)
        idle = of(plan(view, None, sides(**more)), "cpu.idle")
        assert (BE in idle) is (groups or not eevdf)
        assert f"{BURSTABLE}/podlate" in idle


def test_a_container_in_creation_is_planned_too_and_one_with_its_own_cpus_is_not() -> None:
    creating = replace(container("main"), phase=Phase.CREATING)
    assert idle_threads(plan(node(pod("be", creating)), None, sides(threads=True))) == {f"{BE}/id-main": 5}
    owner = pod("be", qos=QosClass.GUARANTEED)
    owning = node(owner, kubelet=kubelet(default="0-6", exclusive={"be/main": "7"}))
    assert idle_threads(plan(owning, None, sides(threads=True))) == {}


def test_a_kernel_without_the_group_side_has_the_threads() -> None:
    view = node(pod("be"), knobs=MAINLINE - {"cpu.idle"})
    desired = plan(view, None, sides(threads=True))
    assert (of(desired, "cpu.idle"), len(idle_threads(desired))) == ({}, 1)
    reason = desired.plan.pools.reasons["idle_class"]
    assert reason == (
        "BE pods run only on idle CPU time (threads); this kernel has no cpu.idle (cpu.idle, from Linux 5.15 on)"
    )


def test_enabled_without_a_side_is_refused() -> None:
    with pytest.raises(ValueError, match="group or threads"):
        IdleClassConfig(enabled=True, group=False)
    assert not IdleClassConfig(group=False).threads


# Group identity


def test_both_sides_have_their_identity_at_every_level() -> None:
    view = node(pod("be", container("main"), PAUSE), online("web"), pod("sys", cls=PodClass.SYSTEM), knobs=ANOLIS)
    view = replace(view, pods={uid: item for uid, item in view.pods.items() if uid != "sys"})
    desired = plan(view, None, ON)
    assert of(desired, "cpu.identity") == {
        BURSTABLE: 2,
        WEB: 2,
        f"{WEB}/id-main": 2,
        BESTEFFORT: -1,
        BE: -1,
        f"{BE}/id-main": -1,
    }
    assert desired.refusals == ()


def test_besteffort_is_left_alone_while_an_online_pod_lives_there_and_system_pods_always() -> None:
    view = node(pod("be"), pod("sys", cls=PodClass.SYSTEM), knobs=ANOLIS)
    assert of(plan(view, None, ON), "cpu.identity") == {BURSTABLE: 2, BE: -1, f"{BE}/id-main": -1}


def test_identities_are_the_configs() -> None:
    config = PoliciesConfig(group_identity=varied(GroupIdentityConfig(enabled=True), online=1, reclaimed=0))
    assert of(plan(node(pod("be"), knobs=ANOLIS), None, config), "cpu.identity")[BE] == 0
    for text in (b'{"online": 3}', b'{"reclaimed": -2}', b'{"online": 0, "reclaimed": 1}'):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(text, type=GroupIdentityConfig)


# QoS level


def offline(*pods: Pod, seen: dict[tuple[str, str], int] | None = None) -> Desired:
    return plan(node(*pods, knobs=OPENEULER, actual=seen or {}), None, ON)


def test_be_pods_and_their_containers_go_offline_and_no_directory_above() -> None:
    desired = offline(pod("be", container("main"), PAUSE), online("web"))
    assert of(desired, "cpu.qos") == {BE: -1, f"{BE}/id-main": -1}
    assert desired.refusals == ()


def test_an_uncertain_class_sets_no_permanent_level() -> None:
    item = pod("be")
    unsure = replace(item, classification=replace(item.classification, certain=False))
    assert of(offline(unsure), "cpu.qos") == {}


def test_a_pod_that_became_online_has_the_reason_that_the_kernel_keeps_its_level() -> None:
    item = online("be", qos=QosClass.BESTEFFORT)
    desired = offline(item, seen={(BE, "cpu.qos"): -1, (f"{BE}/id-main", "cpu.qos"): 0})
    assert of(desired, "cpu.qos") == {}
    (refusal,) = desired.refusals
    assert (refusal.setting.path, refusal.rule) == (BE, "one-way")
    assert refusal.reason == "this kernel cannot put an offline group back online; recreate the pod"
