"""Each rule refuses what was observed to fail, and permits the cases next to it."""

import pytest
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.naming import QosClass
from reconciler.control.planner import plan_pools
from reconciler.policies.refusals import RefusalContext, check
from reconciler.policies.table import PoliciesConfig
from state.daemons import DaemonGroup, Daemons
from state.model import (
    ContainerKind,
    CpuPolicy,
    NodeView,
    Pod,
    PodClass,
    Refusal,
    RuntimeSpec,
    Setting,
)
from state.topology import Cpu, Topology
from tests.reconciler.nodes import V2, container, cpu, cpus, kubelet, node, online, pod

CONFIG = PoliciesConfig()
TWO_NODES = Topology(
    online=CpuSet(range(8)), cpus=tuple(Cpu(id=number, core=number, node=number // 4) for number in range(8))
)
BE = "/kubepods/besteffort"
BURSTABLE = "/kubepods/burstable"


def want(path: str, knob: str, value: CpuSet | int | None) -> Setting:
    return Setting(path=path, knob=knob, value=value, policy="test", reason="test")


def refused(view: NodeView, item: Pod | None, *settings: Setting) -> list[str]:
    """Rules that refuse, in the order of the settings."""
    return [refusal.rule for refusal in judge(view, item, *settings)]


def context(view: NodeView, item: Pod | None, *settings: Setting) -> RefusalContext:
    return RefusalContext(
        view=view,
        pools=plan_pools(view, None, CONFIG),
        wanted={setting.key: setting for setting in settings},
        pod=item,
        containers={inner.group.path: inner for inner in item.containers} if item is not None else {},
    )


def judge(view: NodeView, item: Pod | None, *settings: Setting) -> list[Refusal]:
    allowed, refusals = check(context(view, item, *settings))
    assert allowed.keys() | {refusal.setting.key for refusal in refusals} == {setting.key for setting in settings}
    return refusals


APP = pod(
    "p",
    container("a", spec=RuntimeSpec(quota_us=50_000, period_us=100_000, shares=512)),
    container("pause", kind=ContainerKind.SANDBOX),
    qos=QosClass.BURSTABLE,
)
POD, A, PAUSE = APP.group.path, *(item.group.path for item in APP.containers)
NODE = node(APP)


@pytest.mark.parametrize(
    ("path", "knob", "value", "rule"),
    [
        ("/system.slice", "cpu.weight", 2, "outside-kubepods"),
        ("/kubepods-other/podp", "cpu.weight", 2, "outside-kubepods"),
        ("/kubepods/burstable/podother/x", "cpu.weight", 2, "unknown-group"),
        (A, "io.weight", 2, "controller-missing"),
        (PAUSE, "cpu.weight", 2, "sandbox"),
        (PAUSE, "cpu.set", cpus("1"), "sandbox"),
        (A, "cpu.set", EMPTY, "empty-cpuset"),
        (A, "cpu.set", None, "empty-cpuset"),
        (A, "cpu.mems", EMPTY, "empty-cpuset"),
        (A, "cpu.set", cpus("7-8"), "cpuset-not-online"),
        (A, "cpu.quota", 999, "quota-minimum"),
        (POD, "cpu.quota", 49_999, "quota-below-child"),
        (A, "cpu.burst", 50_001, "burst-above-quota"),
        (A, "cpu.idle", 1, "idle-not-pod"),
    ],
)
def test_a_setting_of_a_pod_is_refused(path: str, knob: str, value: CpuSet | int | None, rule: str) -> None:
    assert refused(NODE, APP, want(path, knob, value)) == [rule]


@pytest.mark.parametrize(
    ("path", "knob", "value"),
    [
        (A, "cpu.weight", 2),
        (A, "cpu.set", cpus("1-7")),
        (A, "cpu.quota", 1000),
        (A, "cpu.quota", None),
        (A, "memory.max", 1 << 20),
        (POD, "cpu.quota", 50_000),
        (POD, "cpu.weight", 2),
        (POD, "cpu.idle", 1),
        (A, "cpu.idle", 0),
        (A, "cpu.burst", 50_000),
        (A, "cpu.burst", 0),
    ],
)
def test_what_lies_just_beside_is_let_through(path: str, knob: str, value: CpuSet | int | None) -> None:
    assert refused(NODE, APP, want(path, knob, value)) == []


@pytest.mark.parametrize(
    ("path", "knob", "value", "rule"),
    [
        ("/kubepods", "cpu.quota", 500_000, "quota-below-child"),
        (BURSTABLE, "cpu.quota", 10_000_000, "quota-below-child"),
        (BURSTABLE, "cpu.set", cpus("0-3"), "besteffort-cpuset"),
        ("/kubepods", "cpu.weight", 2, "qos-weight"),
        (BE, "cpu.weight", 2, "qos-weight"),
        (BE, "cpu.idle", 1, "idle-not-pod"),
        (f"{BE}/podp", "cpu.weight", 2, "unknown-group"),
    ],
)
def test_a_setting_above_the_pods_is_refused(path: str, knob: str, value: CpuSet | int, rule: str) -> None:
    assert refused(NODE, None, want(path, knob, value)) == [rule]


def test_of_groups_beside_the_pods_only_the_weight_of_known_daemons_is_let_through() -> None:
    view = node(APP, daemons=Daemons(groups={"/system.slice": DaemonGroup(weight=1024)}))
    weight = want("/system.slice", "cpu.weight", 50)
    assert refused(view, None, weight) == []
    assert refused(NODE, None, weight) == ["outside-kubepods"]
    others = ("/", "/user.slice", "/system.slice/kubelet.service", "/bypassd.slice")
    assert {*refused(view, None, *(want(path, "cpu.weight", 50) for path in others))} == {"outside-kubepods"}
    assert refused(view, None, want("/system.slice", "cpu.quota", 50_000)) == ["outside-kubepods"]
    assert refused(view, None, want("/kubepods", "cpu.weight", 50)) == ["qos-weight"]


def test_lifting_a_quota_above_the_pods_is_let_through() -> None:
    assert refused(NODE, None, want(BURSTABLE, "cpu.quota", None), want(BE, "cpu.quota", 1000)) == []


@pytest.mark.parametrize(
    ("policy", "rules"),
    [(CpuPolicy.NONE, []), (CpuPolicy.STATIC, ["besteffort-cpuset"]), (CpuPolicy.UNKNOWN, ["besteffort-cpuset"])],
)
def test_besteffort_may_be_narrowed_under_policy_none_only(policy: CpuPolicy, rules: list[str]) -> None:
    assert refused(node(kubelet=kubelet(policy)), None, want(BE, "cpu.set", cpus("1-3"))) == rules
    assert refused(node(kubelet=kubelet(policy)), None, want(BE, "cpu.set", cpus("0-7"))) == []


def test_an_online_pod_in_besteffort_is_neither_narrowed_nor_bounded_with_it() -> None:
    view = node(online("proxy", qos=QosClass.BESTEFFORT))
    refusals = judge(view, None, want(BE, "cpu.set", cpus("1-3")), want(BE, "cpu.quota", 100_000))
    assert [refusal.rule for refusal in refusals] == ["besteffort-cpuset", "online-under-quota"]
    assert {refusal.reason for refusal in refusals} == {"ns/proxy is an online pod inside besteffort"}


def test_a_pods_quota_is_refused_while_a_containers_own_is_not_known() -> None:
    blind = pod("p", container("a"), qos=QosClass.BURSTABLE)
    unknown = type(blind.containers[0])(id="id-a", name="a", group=blind.containers[0].group)
    item = type(blind)(
        uid="p", qos=blind.qos, group=blind.group, containers=(unknown,), classification=blind.classification
    )
    assert refused(node(item), item, want(POD, "cpu.quota", 800_000)) == ["quota-below-child"]


def test_ratios_are_compared_not_numbers() -> None:
    slow = {(POD, "cpu.period"): 50_000}
    assert refused(node(APP, actual=slow), APP, want(POD, "cpu.quota", 25_000)) == []
    assert refused(node(APP, actual=slow), APP, want(POD, "cpu.quota", 24_999)) == ["quota-below-child"]


def test_on_v1_no_childs_quota_is_above_its_parents() -> None:
    bounded = {(POD, "cpu.quota"): 50_000}
    assert refused(node(APP, actual=bounded), APP, want(A, "cpu.quota", 50_001)) == ["v1-quota-above-parent"]
    assert refused(node(APP, actual=bounded), APP, want(A, "cpu.quota", 50_000)) == []
    assert refused(node(APP, actual=bounded, versions=V2), APP, want(A, "cpu.quota", 50_001)) == []
    unlimited = {(POD, "cpu.quota"): None}
    assert refused(node(APP, actual=unlimited), APP, want(A, "cpu.quota", 50_001)) == []


def test_on_v1_the_planned_quota_of_besteffort_binds_the_containers_below() -> None:
    be = pod("be")
    view = node(be, cpu=cpu(online=4000))
    path = be.containers[0].group.path
    assert refused(view, be, want(path, "cpu.quota", 112_001)) == ["v1-quota-above-parent"]
    assert refused(view, be, want(path, "cpu.quota", 112_000)) == []


def test_a_wanted_quota_of_the_pod_counts_before_the_one_it_has() -> None:
    tight = {(POD, "cpu.quota"): 50_000}
    wider = want(POD, "cpu.quota", 80_000)
    assert refused(node(APP, actual=tight), APP, wider, want(A, "cpu.quota", 80_000)) == []


def test_a_burst_is_measured_against_the_quota_wanted_with_it() -> None:
    assert refused(NODE, APP, want(A, "cpu.quota", 20_000), want(A, "cpu.burst", 30_000)) == ["burst-above-quota"]
    assert refused(NODE, APP, want(A, "cpu.quota", 40_000), want(A, "cpu.burst", 30_000)) == []
    assert refused(NODE, APP, want(A, "cpu.quota", None), want(A, "cpu.burst", 30_000)) == ["burst-above-quota"]


def test_a_burst_is_measured_against_the_runtimes_quota_where_ours_is_put_back() -> None:
    ours = {(A, "cpu.quota"): 20_000}
    assert refused(node(APP, actual=ours), APP, want(A, "cpu.burst", 50_000)) == []
    pods = {(POD, "cpu.quota"): 20_000}
    assert refused(node(APP, actual=pods), APP, want(POD, "cpu.burst", 50_000)) == ["burst-above-quota"]


def test_an_offline_group_does_not_come_back_and_none_is_made_for_others_to_live_in() -> None:
    gone = {(A, "cpu.qos"): -1}
    view = node(APP, actual=gone)
    assert refused(view, APP, want(A, "cpu.qos", 0), want(POD, "cpu.qos", 0)) == ["one-way"]
    assert refused(view, APP, want(POD, "cpu.qos", -1)) == []
    assert refused(view, None, want(BE, "cpu.qos", -1)) == ["shared-level"]


def test_on_v1_a_cpu_set_outside_the_pods_is_refused_where_that_is_known() -> None:
    narrow = {(POD, "cpu.set"): cpus("0-3")}
    assert refused(node(APP, actual=narrow), APP, want(A, "cpu.set", cpus("3-4"))) == ["cpuset-outside-parent"]
    assert refused(node(APP, actual=narrow), APP, want(A, "cpu.set", cpus("2-3"))) == []
    assert refused(node(APP, actual=narrow, versions=V2), APP, want(A, "cpu.set", cpus("3-4"))) == []
    wide = want(POD, "cpu.set", cpus("3-4"))
    assert refused(node(APP, actual=narrow), APP, wide, want(A, "cpu.set", cpus("3-4"))) == []


def possible(view: NodeView, item: Pod, *settings: Setting) -> dict[str, str]:
    """The CPU sets that may be written, by group."""
    return {path: str(setting.value) for (path, _), setting in check(context(view, item, *settings))[0].items()}


def test_of_a_set_that_the_pod_has_in_part_the_part_is_written_and_the_rest_is_said() -> None:
    view = node(APP, actual={(POD, "cpu.set"): cpus("0-3")})
    part = want(A, "cpu.set", cpus("3-4"))
    assert possible(view, APP, part) == {A: "3"}
    (refusal,) = judge(view, APP, part)
    assert refusal.reason == f"its parent {POD} has only CPU 0-3: of 3-4, CPU 3 is set"
    assert possible(view, APP, want(A, "cpu.set", cpus("4-5"))) == {}
    assert judge(view, APP, want(A, "cpu.set", cpus("4")))[0].reason == f"its parent {POD} has only CPU 0-3"
    whole = replace(part, policy="exclusive")
    assert possible(view, APP, whole) == {}, "a claim on CPUs is kept whole or not"


def test_so_is_the_part_of_a_set_of_memory_nodes() -> None:
    path, inner = POD, A
    view = replace(node(APP, actual={(path, "cpu.mems"): cpus("0")}), topology=TWO_NODES)
    both = want(inner, "cpu.mems", cpus("0-1"))
    assert possible(view, APP, both) == {inner: "0"}
    (refusal,) = judge(view, APP, both)
    assert refusal.reason == f"its parent {path} has only NUMA node 0: of 0-1, NUMA node 0 is set"
    assert possible(view, APP, want(inner, "cpu.mems", cpus("1"))) == {}


def test_the_part_of_the_pods_own_directory_bounds_its_containers() -> None:
    be = pod("be", container("a"))
    path, inner = be.group.path, be.containers[0].group.path
    wide, sets = cpus("1-4"), (cpus("0-2"), cpus("0,5"))
    for have, expected in zip(sets, ({path: "1-2", inner: "1-2"}, {inner: "0"}), strict=True):
        known = {(BE, "cpu.set"): have, (path, "cpu.set"): cpus("0,6")}
        settings = want(path, "cpu.set", wide), want(inner, "cpu.set", cpus("0-4") if have == sets[1] else wide)
        assert possible(node(be, actual=known), be, *settings) == expected


def test_a_besteffort_that_we_narrowed_does_not_stop_its_own_widening() -> None:
    be = pod("be")
    have = {(BE, "cpu.set"): cpus("6-7")}
    assert refused(node(be, actual=have), be, want(be.group.path, "cpu.set", cpus("4-7"))) == []
    foreign = {(BE, "cpu.set"): cpus("0-1")}
    assert refused(node(be, actual=foreign), be, want(be.group.path, "cpu.set", cpus("4-7"))) == [
        "cpuset-outside-parent"
    ]


def test_the_kubelets_exclusive_container_keeps_its_cpu_set() -> None:
    view = node(APP, kubelet=kubelet(default="0-6", exclusive={"p/a": "7"}))
    assert refused(view, APP, want(A, "cpu.set", cpus("1"))) == ["exclusive-container"]


REWRITTEN = ["kubelet-reasserts"]


@pytest.mark.parametrize(
    ("knob", "value", "spec", "rules"),
    [
        ("cpu.set", cpus("1-3"), RuntimeSpec(), REWRITTEN),
        ("cpu.weight", 2, RuntimeSpec(shares=512), REWRITTEN),
        ("cpu.weight", 512, RuntimeSpec(shares=512), []),
        ("cpu.weight", 2, None, REWRITTEN),
        ("cpu.quota", 1000, RuntimeSpec(quota_us=50_000), REWRITTEN),
        ("cpu.quota", 1000, RuntimeSpec(quota_us=-1), []),
        ("cpu.quota", 1000, RuntimeSpec(), []),
        ("cpu.quota", 1000, None, []),
        ("memory.max", 1 << 30, RuntimeSpec(memory_bytes=1), REWRITTEN),
        ("memory.max", 1 << 30, RuntimeSpec(memory_bytes=0, swap_bytes=1), []),
        ("memory.max", 1 << 30, None, []),
        ("memory.swap", 1 << 30, RuntimeSpec(swap_bytes=1), REWRITTEN),
        ("memory.swap", 1 << 30, RuntimeSpec(swap_bytes=0, memory_bytes=1), []),
        ("memory.swap", 1 << 30, None, []),
        ("pids.max", 100, RuntimeSpec(quota_us=50_000, memory_bytes=1), []),
    ],
)
def test_what_an_old_kubelet_rewrites_is_not_fought_over(
    knob: str, value: CpuSet | int, spec: RuntimeSpec | None, rules: list[str]
) -> None:
    item = replace(APP, containers=(replace(APP.containers[0], spec=spec), *APP.containers[1:]))
    view = node(item, kubelet=kubelet(default="0-7", reasserts_s=10.0))
    assert refused(view, item, want(A, knob, value)) == rules
    assert refused(view, item, want(POD, "cpu.weight", 2)) == []


def test_an_old_kubelet_does_not_rewrite_the_pause_container() -> None:
    """It follows its pod's directory, which v1 narrows only with all below it."""
    view = node(APP, kubelet=kubelet(default="0-7", reasserts_s=10.0))
    sets = want(POD, "cpu.set", cpus("1-3")), want(PAUSE, "cpu.set", cpus("1-3"))
    assert refused(view, APP, *sets) == []
    assert refused(view, APP, *sets, want(PAUSE, "cpu.weight", 2)) == ["sandbox"]


def test_every_refusal_says_why_in_words() -> None:
    view = node(APP, kubelet=kubelet(default="0-7", reasserts_s=10.0))
    (refusal,) = judge(view, APP, want(A, "cpu.set", cpus("1")))
    assert refusal.reason == "this kubelet rewrites it every 10 s"
    assert refusal.setting.path == A


def test_pods_of_guaranteed_qos_hang_below_kubepods_itself() -> None:
    item = pod("g", cls=PodClass.RECLAIMED, qos=QosClass.GUARANTEED)
    bounded = {("/kubepods", "cpu.quota"): 100_000}
    assert refused(node(item, actual=bounded), item, want(item.group.path, "cpu.quota", 100_001)) == [
        "v1-quota-above-parent"
    ]
