"""Pods in gVisor or kata: each setting is written to the pod's directory, or refused and reported.

In gVisor each container has a group that no process is in, all processes are in the pod's own; kata has one group.
"""

from typing import Any

import pytest
from msgspec.structs import replace

from cgroupfs.naming import QosClass
from reconciler.control.bounds_in_force import sandboxed_status
from reconciler.control.planner import plan, plan_node, plan_pod, plan_pools
from reconciler.interference.snapshots import snapshot_of
from reconciler.placement.claims import cpu_claims
from reconciler.placement.estimate import DemandEstimate, EstimateConfig, estimate
from reconciler.placement.isolation import limit_milli
from reconciler.pods.assemble import PodInput, assemble
from reconciler.pods.selectors import ClassRules
from reconciler.policies.base import Policy
from reconciler.policies.memory_qos import MemoryQosConfig, OnlineMemory
from reconciler.policies.pinned import PinnedConfig
from reconciler.policies.table import PoliciesConfig
from reconciler.policies.yielding import obstacle
from reconciler.signals.besteffort import requested
from state.cpu import CpuPreferences, GroupUse
from state.model import (
    ContainerKind,
    ContainerMeta,
    CpuPolicy,
    NodeView,
    Pod,
    PodClass,
    PodMeta,
    Resources,
    RuntimeSpec,
    Setting,
)
from tests.reconciler.nodes import V1, V2, container, cpus, kubelet, node, online, pod

CONFIG = PoliciesConfig()
MIB = 1 << 20


def meta(name: str, kind: ContainerKind = ContainerKind.APP, **limits: Any) -> ContainerMeta:
    amounts = Resources(**limits)
    return ContainerMeta(name=name, kind=kind, id=f"id-{name}", requests=amounts, limits=amounts)


def sandboxed(one: Pod, *declared: ContainerMeta, runtime: str = "gVisor", overhead: int | None = None) -> Pod:
    """The pod in gVisor; in kata without any group for a container."""
    boxes = one.containers if runtime == "gVisor" else ()
    more = Resources(memory_bytes=overhead)
    return replace(one, sandbox=runtime, declared=declared, overhead=more, containers=boxes)


def be(*declared: ContainerMeta, **more: Any) -> Pod:
    """Groups for the first container only: the others have not started, or are in kata."""
    return sandboxed(pod("b", container(declared[0].name)), *declared, **more)


def settings_of(one: Pod, view: NodeView, config: PoliciesConfig = CONFIG) -> dict[tuple[str, str], Setting]:
    return {key: item for key, item in plan(view, None, config).settings.items() if item.pod_uid == one.uid}


@pytest.mark.parametrize("versions", [V1, V2], ids=["v1", "v2"])
@pytest.mark.parametrize("runtime", ["gVisor", "kata"])
def test_batch_limits_hold_at_the_pods_directory(runtime: str, versions: dict[str, int]) -> None:
    main, side = (meta(name, batch_cpu_milli=500, batch_memory_bytes=256 * MIB) for name in ("main", "side"))
    one = be(main, side, runtime=runtime, overhead=128 * MIB)
    settings = settings_of(one, node(one, versions=versions))
    memory = {path: item.value for (path, knob), item in settings.items() if knob == "memory.max"}
    assert memory == {one.group.path: 640 * MIB}
    assert settings[one.group.path, "memory.swap"].value == (640 * MIB if versions is V1 else 0)
    quota = settings.get((one.group.path, "cpu.quota"))
    assert quota is not None
    assert quota.value == 100_000
    assert not any(item.container_id for item in settings.values() if item.knob != "cpu.set")


def test_an_init_container_counts_as_the_kubelet_counts_it() -> None:
    first = meta("init", ContainerKind.INIT, batch_memory_bytes=900 * MIB)
    one = be(first, meta("main", batch_memory_bytes=256 * MIB))
    assert settings_of(one, node(one))[one.group.path, "memory.max"].value == 900 * MIB
    one = be(first, meta("main", batch_memory_bytes=1000 * MIB))
    assert settings_of(one, node(one))[one.group.path, "memory.max"].value == 1000 * MIB


def test_a_sidecar_counts_beside_the_init_containers_after_it_only() -> None:
    before, after = meta("before", batch_memory_bytes=MIB), meta("after", batch_memory_bytes=10 * MIB)
    first = meta("init", ContainerKind.INIT, batch_memory_bytes=900 * MIB)
    one = be(before, first, after, meta("main", batch_memory_bytes=256 * MIB))
    assert settings_of(one, node(one))[one.group.path, "memory.max"].value == 901 * MIB


def test_a_container_for_debugging_takes_no_limit_from_the_pod() -> None:
    """It stays in the pod's spec for ever, also once it has ended."""
    limits, like = Resources(batch_cpu_milli=500, batch_memory_bytes=256 * MIB), pod("b")
    main, debug = ContainerMeta(name="main", limits=limits), ContainerMeta(name="debug", kind=ContainerKind.EPHEMERAL)
    read = PodMeta(uid="b", source="kubelet", containers=(main, debug))
    known = PodInput(uid="b", qos=like.qos, group=like.group, containers={}, metas=[read], sandbox="kata")
    one = replace(assemble(known, ClassRules()), classification=like.classification)
    settings = settings_of(one, node(one))
    assert settings[one.group.path, "memory.max"].value == 256 * MIB
    assert settings[one.group.path, "cpu.quota"].value == 50_000


@pytest.mark.parametrize(
    ("versions", "swap"), [(V1, {"memory.swap"}), (V2, set[str]())], ids=["v1", "v2: an empty group has no swap either"]
)
def test_a_limit_that_the_whole_pod_cannot_have_is_refused_and_a_problem_that_names_who_pays(
    versions: dict[str, int], swap: set[str]
) -> None:
    one = be(meta("main", batch_memory_bytes=256 * MIB, batch_cpu_milli=500), meta("side"))
    view = node(one, versions=versions)
    settings, refusals = plan_pod(one, view, plan_node(view, None, CONFIG), CONFIG)
    assert not [item for item in settings if item.knob in {"memory.max", "cpu.quota"}]
    assert {item.setting.knob for item in refusals} == {"memory.max", "cpu.quota"} | swap
    assert {item.rule for item in refusals} == {"sandboxed"}
    status = sandboxed_status({one.uid: refusals}, view.pods)
    assert not status.ok
    assert "ns/b in gVisor: no cpu.quota" in status.detail
    assert "no memory.max (the node's other pods bear what it uses beyond its limit)" in status.detail
    assert sandboxed_status({}, view.pods).ok


def test_of_what_the_whole_pod_has_a_container_keeps_its_set_and_no_limit() -> None:
    """And a set that the whole pod has not is refused, as a limit is."""
    one = be(meta("main"))
    (box,) = one.containers

    def wished(*settings: Setting) -> tuple[list[tuple[str | None, str]], list[tuple[str, str]]]:
        policy = Policy(
            name="pinned", summary="", config_type=PinnedConfig, precedence=1, pod=lambda *_: list(settings)
        )
        view = node(one)
        kept, refused = plan_pod(one, view, plan_node(view, None, CONFIG), CONFIG, [policy])
        return [(item.container_id, item.knob) for item in kept], [(item.setting.knob, item.rule) for item in refused]

    def setting(knob: str, value: Any, container_id: str | None) -> Setting:
        group = one.group if container_id is None else box.group
        return Setting(
            path=group.path,
            knob=knob,
            value=value,
            policy="pinned",
            reason="",
            pod_uid=one.uid,
            container_id=container_id,
        )

    of_pod = setting("cpu.quota", 100_000, None), setting("cpu.set", cpus("0-3"), None)
    of_box = setting("cpu.quota", 50_000, box.id), setting("cpu.set", cpus("0-1"), box.id)
    assert wished(*of_pod, *of_box) == ([(None, "cpu.quota"), (None, "cpu.set"), (box.id, "cpu.set")], [])
    assert wished(*of_box) == ([], [("cpu.quota", "sandboxed"), ("cpu.set", "sandboxed")])


def lsr(*declared: ContainerMeta, runtime: str = "gVisor", **more: Any) -> Pod:
    spec = RuntimeSpec(quota_us=100_000, period_us=100_000, shares=1024)
    boxes = [container(item.name, spec=spec, requests=item.requests, **more) for item in declared]
    one = pod("p", *boxes, cls=PodClass.DEDICATED, qos=QosClass.GUARANTEED)
    return sandboxed(one, *declared, runtime=runtime)


@pytest.mark.parametrize("runtime", ["gVisor", "kata"])
def test_exclusive_cpus_are_the_pods_and_its_quota_is_lifted_once_the_file_has_them(runtime: str) -> None:
    one = lsr(meta("main", cpu_milli=1000), runtime=runtime)
    view = node(one, pod("be"))
    settings = settings_of(one, view)
    own = plan_pools(view, None, CONFIG).dedicated["p/main"]
    assert len(own) == 1
    assert settings[one.group.path, "cpu.set"].value == own
    assert all(item.value == own for (_, knob), item in settings.items() if knob == "cpu.set")
    assert not [key for key in settings if key[1] == "cpu.quota"], "the pod may still run on all CPUs"
    assert not [claim for claim in cpu_claims(view, plan_pools(view, None, CONFIG)) if claim.cut]
    for have, lifted in (("0-7", False), (str(own), True)):
        actual = {(one.group.path, "cpu.set"): cpus(have), (one.group.path, "cpu.quota"): 100_000}
        settings = settings_of(one, replace(view, actual=actual))
        assert ((one.group.path, "cpu.quota") in settings) == lifted
        assert not [path for path, knob in settings if knob == "cpu.quota" and path != one.group.path]


@pytest.mark.parametrize("side", [True, False], ids=["with a container on shared CPUs", "all own CPUs"])
def test_the_kubelets_exclusive_cpus_are_the_pods_where_all_its_containers_own_some(side: bool) -> None:
    declared = [meta("main", cpu_milli=1000), *([meta("side", cpu_milli=100)] if side else [])]
    one = lsr(*declared)
    view = node(one, pod("be"), kubelet=kubelet(CpuPolicy.STATIC, "0-6", {"p/main": "7"}))
    sets = {path: item.value for (path, knob), item in settings_of(one, view).items() if knob == "cpu.set"}
    assert sets == ({} if side else dict.fromkeys(one.paths, cpus("7")))


def test_online_pods_of_a_pool_are_confined_at_their_directory() -> None:
    owner = pod("o", container("main", requests=Resources(cpu_milli=2000)), cls=PodClass.DEDICATED)
    web = sandboxed(online("w", container("main")), meta("main"))
    view = node(owner, web)
    pools = plan_pools(view, None, CONFIG)
    settings = settings_of(web, view)
    assert settings[web.group.path, "cpu.set"].value == pools.shared | pools.lenient
    assert not cpus("0-7") <= pools.shared
    ours = replace(web, wish=CpuPreferences(pool="search"))
    view = node(owner, ours)
    assert (
        settings_of(ours, view)[ours.group.path, "cpu.set"].value
        == plan_pools(view, None, CONFIG).named["shared/search"]
    )


@pytest.mark.parametrize("runtime", ["gVisor", "kata"])
def test_memory_protection_is_the_pods(runtime: str) -> None:
    of = OnlineMemory(min_percent=50, low_percent=100, throttling_percent=80)
    config = PoliciesConfig(memory_qos=MemoryQosConfig(enabled=True, shared=of))
    one = sandboxed(online("w", container("main")), meta("main", memory_bytes=100 * MIB), runtime=runtime)
    view = node(one, versions=V2)
    settings = settings_of(one, view, config)
    assert settings[one.group.path, "memory.min"].value == 50 * MIB
    assert settings[one.group.path, "memory.low"].value == 100 * MIB
    assert {path for path, knob in settings if knob.startswith("memory.")} == {one.group.path}
    assert plan_pod(one, view, plan_node(view, None, config), config)[1] == ()


@pytest.mark.parametrize("runtime", ["gVisor", "kata"])
def test_the_requests_and_limits_of_its_spec_count_as_those_of_other_pods(runtime: str) -> None:
    """Though in kata no container has a group."""
    main, init = meta("main", cpu_milli=4000), meta("init", ContainerKind.INIT, cpu_milli=5000)
    one = replace(sandboxed(online("p"), init, main, runtime=runtime), overhead=Resources(cpu_milli=250))
    config, group = EstimateConfig(), one.group.path
    assert estimate([one], {}, config) == DemandEstimate(5250, asked=1)
    assert estimate([one], {group: GroupUse(cpu_milli=2000)}, config) == DemandEstimate(2500, used=1)
    assert estimate([one], {group: GroupUse(cpu_milli=5000)}, config) == DemandEstimate(5250, used=1)
    assert limit_milli(one) == 4000
    bare = sandboxed(online("p"), runtime="kata")
    assert estimate([bare], {}, config) == DemandEstimate(1000, guessed=1)

    batch = be(meta("main", batch_cpu_milli=500, batch_memory_bytes=MIB), runtime=runtime)
    assert requested([batch], 8000) == (500, MIB)
    snapshot = snapshot_of(batch, None)
    assert (snapshot.be_cpu_milli, snapshot.be_memory_bytes) == (500, MIB)

    mid = replace(batch.declared[0], requests=Resources(batch_cpu_milli=500, mid=True))
    assert not node(sandboxed(online("p", qos=QosClass.BESTEFFORT), mid, runtime=runtime)).unweighed_in_besteffort


@pytest.mark.parametrize("runtime", ["gVisor", "kata"])
def test_a_guaranteed_pod_has_its_weight_beside_the_burstable_directory(runtime: str) -> None:
    one = sandboxed(online("p", qos=QosClass.GUARANTEED), meta("main"), runtime=runtime)
    other = pod("b", qos=QosClass.BURSTABLE)
    view = node(one, other, actual={(other.group.path, "cpu.idle"): 1}, versions=V2)
    assert "against ns/p" in (obstacle(view, plan_pools(view, None, CONFIG)) or "")
