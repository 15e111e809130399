"""Settings of the bandwidth policies, written to this machine's own kernel in the planner's order."""

import os
from collections.abc import Iterator, Mapping

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.codecs import Value
from cgroupfs.files import REAL
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG
from cgroupfs.naming import QosClass
from cgroupfs.plan import KnobChange, WritePlan, order_changes
from cgroupfs.probe import offered
from cgroupfs.writer import KernelWriter
from reconciler.control.planner import plan
from reconciler.policies.burst import BurstConfig
from reconciler.policies.idle_class import IdleClassConfig
from reconciler.policies.normalise import NormaliseConfig
from reconciler.policies.table import PoliciesConfig
from state.model import Container, GroupRef, NodeView, Pod, PodClass, RuntimeSpec
from tests.cgroupfs.kernelgroup import kernel_groups
from tests.reconciler.nodes import container, kubelet, node, pod
from tests.until import until

LIMIT = 50_000
LEAST = 1_000
"""1 % of a CPU: what uses less of it than that is not throttled, and other programs may keep the machine busy."""


class Real:
    """A pod with one container below a group of the test's own, on this machine's cpu controller."""

    def __init__(self, hierarchy: Hierarchy, root: str) -> None:
        self.hierarchy = hierarchy
        self.root = root
        self.pod = f"{root}/podp"
        self.container = f"{self.pod}/id-main"
        self.versions = hierarchy.versions()
        for path in (self.pod, self.container):
            os.mkdir(hierarchy.directory("cpu", path))

    def set(self, path: str, knob: str, value: Value) -> None:
        known = CATALOG[knob]
        version = self.versions["cpu"]
        REAL.write(self.hierarchy.directory("cpu", path), known.file(version) or "", known.encode(value, version))

    def get(self, path: str, knob: str) -> Value:
        known = CATALOG[knob]
        version = self.versions["cpu"]
        return known.decode(
            REAL.read(self.hierarchy.directory("cpu", path), known.file(version) or "").strip(), version
        )

    def view(self, cls: PodClass, qos: QosClass, *, pinned: bool = False) -> NodeView:
        item = pod("p", self._container(), cls=cls, qos=qos)
        placed = replace(item.containers[0], group=GroupRef(path=self.container))
        current: Pod = replace(item, group=GroupRef(path=self.pod), containers=(placed,))
        owners = {"p/main": "1"} if pinned else {}
        return replace(
            node(current, topology=2, kubelet=kubelet(default="0" if pinned else "0-1", exclusive=owners)),
            kubepods=self.root,
            versions=self.versions,
            knobs=offered(self.hierarchy, self.pod),
            actual={(path, "cpu.quota"): self.get(path, "cpu.quota") for path in (self.pod, self.container)},
        )

    @staticmethod
    def _container() -> Container:
        return container("main", spec=RuntimeSpec(quota_us=LIMIT, period_us=100_000, shares=512))

    async def bring(self, view: NodeView, config: PoliciesConfig, undo: Mapping[tuple[str, str], Value]) -> WritePlan:
        """Write what is wanted of the pod, and for what is not what ``undo`` says, as the actuator does."""
        desired = plan(view, None, config)
        knobs = [(path, knob) for path, knob in {**desired.settings, **undo} if path.startswith(self.pod)]
        changes = []
        for path, knob in knobs:
            if CATALOG[knob].controller == "cpu":
                setting = desired.settings.get((path, knob))
                want = setting.value if setting is not None else undo[path, knob]
                changes.append(KnobChange(path=path, knob=knob, want=want, have=self.get(path, knob)))
        ordered = order_changes(changes, {}, self.versions)
        assert not ordered.blocked
        for step, outcome in zip(ordered.steps, await KernelWriter(self.hierarchy).perform(ordered.steps), strict=True):
            assert outcome.ok, (step, outcome.error)
        return ordered


@pytest.fixture
def real() -> Iterator[Real]:
    with kernel_groups("bandwidth", "cpu") as (hierarchy, root):
        yield Real(hierarchy, root)


async def test_a_pinned_containers_quota_is_lifted_with_its_pods_and_comes_back(real: Real) -> None:
    for path in (real.pod, real.container):
        real.set(path, "cpu.quota", LIMIT)
    before = dict.fromkeys(((real.pod, "cpu.quota"), (real.container, "cpu.quota")), LIMIT)
    ordered = await real.bring(
        real.view(PodClass.DEDICATED, QosClass.GUARANTEED, pinned=True), PoliciesConfig(), before
    )
    assert [step.path for step in ordered.steps] == [real.pod, real.container]
    assert [real.get(path, knob) for path, knob in before] == [None, None]
    # No longer its own: first the pod, as v1 takes no child above its parent and a limited pod above no limit at all.
    ordered = await real.bring(real.view(PodClass.SHARED, QosClass.GUARANTEED), PoliciesConfig(), before)
    assert [step.path for step in ordered.steps] == [real.pod, real.container]
    assert [real.get(path, knob) for path, knob in before] == [LIMIT, LIMIT]


async def test_a_busy_pinned_container_is_throttled_no_more(real: Real) -> None:
    for path in (real.pod, real.container):
        real.set(path, "cpu.quota", LEAST)
    before = dict.fromkeys(((real.pod, "cpu.quota"), (real.container, "cpu.quota")), LEAST)
    busy = await trio.lowlevel.open_process(["sh", "-c", "while :; do :; done"])
    try:
        REAL.write(real.hierarchy.directory("cpu", real.container), "cgroup.procs", str(busy.pid))
        first = _throttled(real)
        await until(lambda: _throttled(real) != first)
        await real.bring(real.view(PodClass.DEDICATED, QosClass.GUARANTEED, pinned=True), PoliciesConfig(), before)
        lifted = _throttled(real)
        await trio.sleep(0.3)
        assert _throttled(real) == lifted
    finally:
        busy.kill()
        await busy.wait()


def _throttled(real: Real) -> int:
    texts = [REAL.read(real.hierarchy.directory("cpu", path), "cpu.stat") for path in (real.pod, real.container)]
    return sum(int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("nr_throttled "))


async def test_bursts_grow_after_their_quota_and_go_before_it(real: Real) -> None:
    if "cpu.burst" not in offered(real.hierarchy, real.pod):
        pytest.skip("REAL KERNEL TEST NOT RUN: this kernel has no CFS burst")
    for path in (real.pod, real.container):
        real.set(path, "cpu.quota", LIMIT)
    burst = PoliciesConfig(burst=BurstConfig(enabled=True))
    tight = PoliciesConfig(burst=BurstConfig(enabled=True), normalise=NormaliseConfig(ratio=2.0))
    before: dict[tuple[str, str], Value] = {(real.container, "cpu.quota"): LIMIT}
    before |= dict.fromkeys(((real.pod, "cpu.burst"), (real.container, "cpu.burst")), 0)
    seen = []
    for config in (burst, tight, burst, PoliciesConfig()):
        await real.bring(real.view(PodClass.SHARED, QosClass.BURSTABLE), config, before)
        seen.append(
            [real.get(real.pod, "cpu.burst"), *(real.get(real.container, f"cpu.{name}") for name in ("burst", "quota"))]
        )
    assert seen == [[LIMIT, LIMIT, LIMIT], [25_000, 25_000, 25_000], [LIMIT, LIMIT, LIMIT], [0, 0, LIMIT]]


async def test_an_idle_pod_gets_its_weight_back(real: Real) -> None:
    if "cpu.idle" not in offered(real.hierarchy, real.pod):
        pytest.skip("REAL KERNEL TEST NOT RUN: this kernel has no idle class for groups")
    real.set(real.pod, "cpu.weight", 2)
    view = real.view(PodClass.RECLAIMED, QosClass.BESTEFFORT)
    before: dict[tuple[str, str], Value] = {(real.pod, "cpu.weight"): 2, (real.pod, "cpu.idle"): 0}
    await real.bring(view, PoliciesConfig(idle_class=IdleClassConfig(enabled=True)), before)
    assert real.get(real.pod, "cpu.idle") == 1
    with pytest.raises(OSError, match="Invalid argument"):
        real.set(real.pod, "cpu.weight", 512)
    # What the weight was is restored again, as the actuator does: the file itself does not show it now.
    left = order_changes(
        [
            KnobChange(path=real.pod, knob="cpu.idle", want=0, have=1),
            KnobChange(path=real.pod, knob="cpu.weight", want=2, have=real.get(real.pod, "cpu.weight")),
        ],
        {},
        real.versions,
    )
    assert all(outcome.ok for outcome in await KernelWriter(real.hierarchy).perform(left.steps))
    assert (real.get(real.pod, "cpu.idle"), real.get(real.pod, "cpu.weight")) == (0, 2)
