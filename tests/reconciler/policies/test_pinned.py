"""Which quotas are lifted where containers own their CPUs; on fake kernels the order of the writes, and restoring."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from cgroupfs.hierarchy import Hierarchy
from cgroupfs.naming import QosClass
from cgroupfs.plan import KnobChange, order_changes
from cgroupfs.writer import KernelWriter
from reconciler.control.planner import plan, plan_node, plan_pod, plan_pools
from reconciler.policies.pinned import PinnedConfig, is_pinned, lifts_pod
from reconciler.policies.table import PoliciesConfig
from state.model import Container, ContainerKind, CpuPolicy, KubeletView, Pod, PodClass, Pools, RuntimeSpec
from tests.fakes.kernel import FakeKernel, Mode
from tests.reconciler.nodes import container, cpus, kubelet, node, pod

CONFIG = PoliciesConfig()
POD, MAIN, SIDE = "/kubepods/podp", "/kubepods/podp/id-main", "/kubepods/podp/id-side"
OWNS: KubeletView = kubelet(default="0-5", exclusive={"p/main": "6-7"})
PAUSE = container("pause", kind=ContainerKind.SANDBOX)


def limited(name: str, quota: int | None = 200_000, cpuset: str | None = None) -> Container:
    return container(name, spec=RuntimeSpec(quota_us=quota, period_us=100_000, cpus=cpuset))


def guaranteed(*containers: Container, cls: PodClass = PodClass.DEDICATED) -> Pod:
    return pod("p", *containers, cls=cls, qos=QosClass.GUARANTEED)


def lifted(item: Pod, view: KubeletView = OWNS) -> list[str]:
    desired = plan(node(item, kubelet=view), None, CONFIG)
    assert all(setting.value is None for setting in desired.settings.values() if setting.policy == "pinned")
    return [path for (path, knob), setting in desired.settings.items() if setting.policy == "pinned"]


@pytest.mark.parametrize(
    ("one", "paths"),
    [
        pytest.param(guaranteed(limited("main", cpuset="6-7"), PAUSE), [POD, MAIN], id="pinned, with its pod"),
        pytest.param(guaranteed(limited("main")), [POD, MAIN], id="the runtime was told of no CPUs"),
        pytest.param(guaranteed(limited("main", cpuset="0-7")), [], id="up to 1.21: not pinned yet"),
        pytest.param(guaranteed(limited("main", cpuset="6")), [POD, MAIN], id="about to get more"),
        pytest.param(guaranteed(limited("main", cpuset="7-6")), [], id="an unreadable list is unknown"),
        pytest.param(guaranteed(limited("main"), limited("side", 50_000)), [POD, MAIN], id="the other one is bounded"),
        pytest.param(guaranteed(limited("main"), limited("side", None)), [MAIN], id="the other one is not bounded"),
        pytest.param(guaranteed(limited("main"), limited("side", -1)), [MAIN], id="nor with -1"),
        pytest.param(guaranteed(limited("side", 50_000)), [], id="only the other one is there"),
        pytest.param(guaranteed(limited("main", -1)), [], id="from 1.33 on the kubelet does it itself"),
        pytest.param(guaranteed(limited("main"), cls=PodClass.SHARED), [POD, MAIN], id="shared by its label"),
        pytest.param(guaranteed(limited("main"), cls=PodClass.RECLAIMED), [], id="BE by its label"),
    ],
)
def test_the_quota_goes_where_it_bounds_nothing(one: Pod, paths: list[str]) -> None:
    assert lifted(one) == paths


def test_a_container_whose_quota_is_not_known_counts_as_having_one_and_bars_the_pod() -> None:
    item = guaranteed(limited("main"), limited("side"))
    blind = replace(item, containers=(item.containers[0], replace(item.containers[1], spec=None)))
    assert lifted(blind) == [MAIN]
    blind = replace(item, containers=(replace(item.containers[0], spec=None), item.containers[1]))
    assert lifted(blind) == [POD, MAIN]


def test_a_container_of_unknown_name_beside_one_that_owns_cpus_keeps_its_quota() -> None:
    item = guaranteed(limited("main"), limited("other"))
    nameless = replace(item, containers=(item.containers[0], replace(item.containers[1], name=None)))
    assert lifted(nameless) == [POD, MAIN]


def test_cpus_that_we_chose_count_before_the_runtime_was_told() -> None:
    item = guaranteed(limited("main", cpuset="0-7"), limited("side", cpuset="0-7"))
    view = node(item, kubelet=kubelet(CpuPolicy.NONE))
    pools = replace(plan_pools(view, None, CONFIG), dedicated={"p/main": cpus("6-7")}, placed=("p/main",))
    assert [is_pinned(item, each, pools) for each in item.containers] == [True, False]
    assert lifts_pod(item, pools)
    assert not is_pinned(item, item.containers[0], replace(pools, placed=()))


def test_nothing_is_lifted_where_nothing_is_owned_or_the_policy_is_off() -> None:
    item = guaranteed(limited("main"))
    assert lifted(item, kubelet(default="0-7")) == []
    off = PoliciesConfig(pinned=PinnedConfig(enabled=False))
    assert "pinned" not in {each.policy for each in plan(node(item, kubelet=OWNS), None, off).settings.values()}


def test_a_kubelet_that_rewrites_every_containers_quota_is_not_fought() -> None:
    item = guaranteed(limited("main"))
    view = node(item, kubelet=kubelet(default="0-5", exclusive={"p/main": "6-7"}, reasserts_s=10.0))
    settings, refusals = plan_pod(item, view, plan_node(view, None, CONFIG), CONFIG)
    assert [setting for setting in settings if setting.policy == "pinned"] == []
    assert [(refusal.setting.path, refusal.rule) for refusal in refusals] == [(MAIN, "kubelet-reasserts")]


# On the kernel: the pod first, and back the same way


@pytest.mark.parametrize(
    ("mode", "lift", "back"),
    [
        ("v1", ["{} cpu.cfs_quota_us -1"], ["{} cpu.cfs_quota_us {}"]),
        ("v2", ["{} cpu.max max"], ["{} cpu.max {}"]),
    ],
)
async def test_the_pod_is_lifted_before_its_container_and_bounded_before_it(
    tmp_path: Path, mode: Mode, lift: list[str], back: list[str]
) -> None:
    kernel = FakeKernel(mode, root=str(tmp_path))
    kernel.install()
    hierarchy = Hierarchy.detect(str(tmp_path))
    versions = hierarchy.versions()
    file = "cpu.cfs_quota_us" if mode == "v1" else "cpu.max"
    limits = {POD: 250_000, MAIN: 200_000}
    for path, quota in limits.items():
        kernel.make_group(path)
        kernel.write(hierarchy.directory("cpu", path), file, str(quota))
    item = guaranteed(limited("main"))
    wanted = plan(node(item, kubelet=OWNS, versions=versions), None, CONFIG).settings
    have = {(path, "cpu.quota"): quota for path, quota in limits.items()}
    changes = [
        KnobChange(path=path, knob=knob, want=each.value) for (path, knob), each in wanted.items() if path in limits
    ]
    there = order_changes([change for change in changes if change.knob == "cpu.quota"], have, versions)
    assert [f"{step.path} {step.file} {step.text}" for step in there.steps] == [
        lift[0].format(path) for path in (POD, MAIN)
    ]
    writer = KernelWriter(hierarchy, files=kernel)
    assert all(outcome.ok for outcome in await writer.perform(there.steps))
    undone = [KnobChange(path=path, knob="cpu.quota", want=quota) for path, quota in reversed(limits.items())]
    home = order_changes(undone, dict.fromkeys(have), versions)
    assert [f"{step.path} {step.file} {step.text}" for step in home.steps] == [
        back[0].format(path, limits[path]) for path in (POD, MAIN)
    ]
    assert all(outcome.ok for outcome in await writer.perform(home.steps))


def test_pools_without_owners_are_not_looked_at_pod_by_pod() -> None:
    empty = Pools(
        online_cpus=cpus("0-7"),
        reserved=cpus(""),
        dedicated={},
        shared=cpus("0-7"),
        reclaimed=cpus("0"),
        budget_milli=0,
    )
    assert not lifts_pod(guaranteed(limited("main")), empty)
