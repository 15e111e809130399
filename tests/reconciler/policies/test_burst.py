"""Who may burst and how far; on fake kernels the burst is lowered before the quota, and raised after it."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from cgroupfs.hierarchy import Hierarchy
from cgroupfs.naming import QosClass
from cgroupfs.plan import KnobChange, order_changes
from cgroupfs.writer import KernelWriter
from reconciler.control.planner import plan
from reconciler.policies.burst import BurstConfig, percent_of
from reconciler.policies.normalise import NormaliseConfig
from reconciler.policies.table import PoliciesConfig
from state.cpu import BurstLimit, CpuPreferences
from state.model import Container, ContainerKind, NodeView, Pod, PodClass, RuntimeSpec
from state.plan import Desired
from tests.fakes.kernel import FakeKernel, Mode
from tests.reconciler.nodes import MAINLINE, container, kubelet, node, online, pod

ON = PoliciesConfig(burst=BurstConfig(enabled=True))
POD = "/kubepods/burstable/podweb"
MAIN, SIDE = f"{POD}/id-main", f"{POD}/id-side"


def limited(name: str = "main", quota: int | None = 100_000) -> Container:
    return container(name, spec=RuntimeSpec(quota_us=quota, period_us=100_000))


def web(*containers: Container, wish: CpuPreferences = CpuPreferences()) -> Pod:  # noqa: B008  # frozen
    return replace(online("web", *(containers or (limited(),))), wish=wish)


def bursts(desired: Desired) -> dict[str, object]:
    return {setting.path: setting.value for setting in desired.settings.values() if setting.knob == "cpu.burst"}


def view(*pods: Pod, pod_quota: int | None = 250_000, knobs: frozenset[str] = MAINLINE) -> NodeView:
    return node(*pods, actual={(POD, "cpu.quota"): pod_quota}, knobs=knobs)


@pytest.mark.parametrize(
    ("wish", "percent", "expected"),
    [
        pytest.param(CpuPreferences(), 100, 100, id="the config's"),
        pytest.param(CpuPreferences(), 30, 30, id="a smaller one"),
        pytest.param(CpuPreferences(), 0, 0, id="only who asks"),
        pytest.param(CpuPreferences(burst_policy=BurstLimit.STATIC), 0, 100, id="who asks"),
        pytest.param(CpuPreferences(burst_policy=BurstLimit.AUTO), 30, 30, id="auto"),
        pytest.param(CpuPreferences(burst_policy=BurstLimit.CLOSED, burst_percent=50), 100, 0, id="closed"),
        pytest.param(CpuPreferences(burst_policy=BurstLimit.QUOTA), 100, 0, id="a raised quota only"),
        pytest.param(CpuPreferences(burst_percent=50), 100, 50, id="its own number"),
        pytest.param(CpuPreferences(burst_percent=0), 100, 0, id="0 switches off"),
        pytest.param(CpuPreferences(burst_percent=1000), 30, 100, id="Koordinator's default: never above the quota"),
    ],
)
def test_the_pods_wish_goes_before_the_config(wish: CpuPreferences, percent: int, expected: int) -> None:
    config = BurstConfig(enabled=True, percent=percent)
    assert percent_of(web(wish=wish), config) == expected
    assert percent_of(replace(pod("be"), wish=wish), config) == 0


@pytest.mark.parametrize(
    ("one", "pod_quota", "expected"),
    [
        pytest.param(web(), 100_000, {POD: 100_000, MAIN: 100_000}, id="container and pod"),
        pytest.param(web(), None, {MAIN: 100_000}, id="a pod without a quota needs none"),
        pytest.param(web(limited(quota=None)), None, {}, id="nothing to burst over"),
        pytest.param(web(limited(quota=-1)), None, {}, id="nor with -1"),
        pytest.param(
            web(limited(), limited("side", 50_000)), 150_000, {POD: 150_000, MAIN: 100_000, SIDE: 50_000}, id="the sum"
        ),
        pytest.param(
            web(limited(), limited("side", 50_000)), 120_000, {POD: 120_000, MAIN: 100_000, SIDE: 50_000}, id="cap"
        ),
        pytest.param(
            web(limited(), container("pause", kind=ContainerKind.SANDBOX)),
            None,
            {MAIN: 100_000},
            id="no pause container",
        ),
        pytest.param(
            web(limited(), wish=CpuPreferences(burst_policy=BurstLimit.CLOSED)),
            100_000,
            {POD: 0, MAIN: 0},
            id="closed is written",
        ),
        pytest.param(
            web(limited(quota=1_001), wish=CpuPreferences(burst_percent=50)), None, {MAIN: 500}, id="rounded down"
        ),
    ],
)
def test_bursts_are_within_quotas(one: Pod, pod_quota: int | None, expected: dict[str, int]) -> None:
    desired = plan(view(one, pod_quota=pod_quota), None, ON)
    assert bursts(desired) == expected
    assert desired.refusals == ()


def test_be_containers_have_none() -> None:
    assert bursts(plan(view(pod("be")), None, ON)) == {"/kubepods/besteffort/podbe/id-main": 0}


def test_pinned_containers_and_their_lifted_pod_have_none() -> None:
    item = pod("p", limited(), limited("side", 50_000), cls=PodClass.DEDICATED, qos=QosClass.GUARANTEED)
    have = {("/kubepods/podp", "cpu.quota"): 150_000}
    seen = node(item, kubelet=kubelet(default="0-5", exclusive={"p/main": "6-7"}), actual=have)
    desired = plan(seen, None, ON)
    assert bursts(desired) == {"/kubepods/podp/id-side": 50_000}
    assert desired.refusals == ()


def test_an_old_kernel_is_told_once_and_no_pod_is_bothered() -> None:
    desired = plan(view(web(), pod("be"), knobs=MAINLINE - {"cpu.burst"}), None, ON)
    assert bursts(desired) == {}
    assert desired.refusals == ()
    assert desired.plan.pools.reasons["burst"] == (
        "this kernel has no cpu.burst (cpu.cfs_burst_us, from Linux 5.14 on)"
    )


@pytest.mark.parametrize("mode", ["v1", "v2"])
async def test_no_burst_ever_stands_above_its_quota(tmp_path: Path, mode: Mode) -> None:
    kernel = FakeKernel(mode, root=str(tmp_path))
    kernel.install()
    hierarchy = Hierarchy.detect(str(tmp_path))
    versions = hierarchy.versions()
    quota, burst = ("cpu.cfs_quota_us", "cpu.cfs_burst_us") if mode == "v1" else ("cpu.max", "cpu.max.burst")
    for path in (POD, MAIN):
        kernel.make_group(path)
        kernel.write(hierarchy.directory("cpu", path), quota, "100000")
    known: dict[tuple[str, str], int] = {(path, "cpu.quota"): 100_000 for path in (POD, MAIN)}
    known |= {(path, "cpu.burst"): 0 for path in (POD, MAIN)}
    writer = KernelWriter(hierarchy, files=kernel)
    lines: list[list[str]] = []
    for config in (ON, PoliciesConfig(burst=BurstConfig(enabled=True), normalise=NormaliseConfig(ratio=2.0)), ON):
        seen = node(web(), versions=versions, actual=dict(known))
        wanted = {key: setting.value for key, setting in plan(seen, None, config).settings.items() if key in known}
        # What the plan no longer has is restored.
        changes = [
            KnobChange(path=path, knob=knob, want=wanted.get((path, knob), 100_000 if knob == "cpu.quota" else 0))
            for path, knob in known
        ]
        ordered = order_changes(changes, known, versions)
        assert not ordered.blocked
        lines.append([f"{step.path.rpartition('/')[2]} {step.file} {step.text}" for step in ordered.steps])
        for step, outcome in zip(ordered.steps, await writer.perform(ordered.steps), strict=True):
            assert outcome.ok, (step, outcome.error)
        known = {(change.path, change.knob): change.want for change in changes if isinstance(change.want, int)}
    assert lines == [
        [f"podweb {burst} 100000", f"id-main {burst} 100000"],
        [f"podweb {burst} 50000", f"id-main {burst} 50000", f"id-main {quota} 50000"],
        [f"id-main {quota} 100000", f"podweb {burst} 100000", f"id-main {burst} 100000"],
    ]


@pytest.mark.parametrize(
    ("policy", "config", "value"),
    [
        pytest.param(BurstLimit.STATIC, BurstConfig(), 100_000, id="requested"),
        pytest.param(BurstLimit.AUTO, BurstConfig(), 100_000, id="both kinds requested"),
        pytest.param(BurstLimit.QUOTA, BurstConfig(), None, id="the other kind alone"),
        pytest.param(BurstLimit.CLOSED, BurstConfig(), None, id="refused"),
        pytest.param(None, BurstConfig(), None, id="not requested"),
        pytest.param(BurstLimit.STATIC, BurstConfig(pods=False), None, id="pods may not"),
    ],
)
def test_a_pod_may_request_bursts_where_they_are_off_for_the_node(
    policy: BurstLimit | None, config: BurstConfig, value: int | None
) -> None:
    asking = web(wish=CpuPreferences(burst_policy=policy))
    desired = plan(view(asking, online("other", limited())), None, PoliciesConfig(burst=config))
    given = bursts(desired)
    assert given.get(MAIN) == value
    assert not any("podother" in path for path in given)
    assert desired.plan.reasons.get("burst", "off").startswith("off" if value is None else "off, except for 1 pod")


def test_a_be_pod_that_requests_bursts_gets_none() -> None:
    be = replace(pod("be", limited()), wish=CpuPreferences(burst_policy=BurstLimit.STATIC))
    assert bursts(plan(view(be), None, PoliciesConfig(burst=BurstConfig()))) == {}


@pytest.mark.parametrize(
    ("wish", "config", "value"),
    [
        pytest.param(CpuPreferences(burst_us=2000), BurstConfig(enabled=True), 2000, id="an amount"),
        pytest.param(CpuPreferences(burst_us=2000), BurstConfig(), 2000, id="off for the node"),
        pytest.param(CpuPreferences(burst_us=1 << 40), BurstConfig(), 100_000, id="never above the quota"),
        pytest.param(CpuPreferences(burst_us=0), BurstConfig(), None, id="nothing requested"),
        pytest.param(CpuPreferences(burst_us=0), BurstConfig(enabled=True), 0, id="none of the node's"),
        pytest.param(CpuPreferences(burst_us=9, burst_policy=BurstLimit.CLOSED), BurstConfig(), None, id="refused"),
        pytest.param(CpuPreferences(burst_us=9, burst_percent=50), BurstConfig(enabled=True), 50_000, id="Katalyst's"),
    ],
)
def test_an_amount_of_burst(wish: CpuPreferences, config: BurstConfig, value: int | None) -> None:
    assert bursts(plan(view(web(wish=wish)), None, PoliciesConfig(burst=config))).get(MAIN) == value
