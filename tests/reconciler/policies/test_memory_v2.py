"""Memory settings on the strict fake v2 kernel, in the planner's order: none refused, no process killed, restored."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from cgroupfs.codecs import PAGE
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG
from cgroupfs.naming import QosClass
from cgroupfs.plan import KnobChange, order_changes
from cgroupfs.probe import offered
from cgroupfs.writer import KernelWriter
from reconciler.control.planner import plan
from reconciler.policies.be_memory import BeMemoryConfig
from reconciler.policies.memory_qos import MemoryQosConfig, ReclaimedMemory
from reconciler.policies.table import PoliciesConfig
from state.memory import NodeMemoryReading
from state.model import NodeView, PodClass, Resources
from tests.fakes.kernel import FakeKernel
from tests.reconciler.nodes import container, node, pod

MEGA = 1 << 20
WEB = pod(
    "web",
    container("main", requests=Resources(memory_bytes=300 * MEGA)),
    cls=PodClass.SHARED,
    qos=QosClass.BURSTABLE,
)
BE = pod(
    "be",
    container(
        "main",
        requests=Resources(batch_memory_bytes=100 * MEGA),
        limits=Resources(batch_memory_bytes=200 * MEGA),
    ),
)
BE_MAIN, WEB_MAIN = f"{BE.group.path}/id-main", f"{WEB.group.path}/id-main"
CONFIG = PoliciesConfig(
    memory_qos=MemoryQosConfig(enabled=True, reclaimed=ReclaimedMemory(oom_group=True)),
    be_memory=BeMemoryConfig(enabled=True, hard_percent=10),
)


class Node:
    """The fake kernel with two pods, and what the actuator does on it, without a ledger."""

    def __init__(self, root: Path) -> None:
        self.kernel = FakeKernel("v2", root=str(root), cpus=8)
        self.kernel.install()
        self.hierarchy = Hierarchy.detect(str(root))
        for path in (BE_MAIN, WEB_MAIN):
            self.kernel.make_group(path)
        self.versions = self.hierarchy.versions()

    def view(self) -> NodeView:
        memory = NodeMemoryReading(total_bytes=4000 * MEGA, available_bytes=1000 * MEGA)
        knobs = offered(self.hierarchy, "/kubepods", self.kernel)
        view = node(WEB, BE, versions=self.versions, node_memory=memory, knobs=knobs)
        return replace(view, reclaimed_memory_bytes=500 * MEGA)

    def read(self, path: str, file: str) -> str:
        return self.kernel.read(self.hierarchy.directory("memory", path), file).strip()

    def charge(self, path: str, *, anon: int = 0, cache: int = 0) -> None:
        directory = self.hierarchy.directory("memory", path)
        self.kernel.write(directory, "cgroup.procs", str(self.kernel.spawn()))
        self.kernel.charge(directory, anon=anon * MEGA, cache=cache * MEGA)

    async def bring(self, config: PoliciesConfig) -> dict[tuple[str, str], bool]:
        """Write what is wanted of memory, and the kernel's default where nothing is; what became of each write."""
        settings = plan(self.view(), None, config).settings
        changes = []
        for path in ("/kubepods", "/kubepods/burstable", "/kubepods/besteffort", *(WEB.group.path, BE.group.path)):
            changes += self._changes(path, settings)
        for path in (WEB_MAIN, BE_MAIN):
            changes += self._changes(path, settings)
        ordered = order_changes(changes, {}, self.versions)
        assert not ordered.blocked
        outcomes = await KernelWriter(self.hierarchy, files=self.kernel).perform(ordered.steps)
        return {(outcome.step.path, outcome.step.knob): outcome.ok for outcome in outcomes}

    def _changes(self, path: str, settings: object) -> list[KnobChange]:
        assert isinstance(settings, dict)
        changes = []
        for knob in CATALOG.values():
            if knob.controller != "memory" or knob.file(2) is None:
                continue
            have = knob.decode(self.read(path, knob.file(2) or ""), 2)
            setting = settings.get((path, knob.name))
            want = setting.value if setting is not None else knob.decode(knob.default(2), 2)
            changes.append(KnobChange(path=path, knob=knob.name, want=want, have=have, reclaim=True))
        return changes


@pytest.fixture
def machine(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_all_of_it_reads_back_and_goes_away_again(machine: Node) -> None:
    outcomes = await machine.bring(CONFIG)
    assert all(outcomes.values()), outcomes
    for path in ("/kubepods", "/kubepods/burstable", WEB.group.path, WEB_MAIN):
        assert machine.read(path, "memory.low") == str(300 * MEGA)
    assert machine.read(BE_MAIN, "memory.high") == str(190 * MEGA // PAGE * PAGE)
    assert (machine.read(BE_MAIN, "memory.max"), machine.read(BE_MAIN, "memory.oom.group")) == (str(200 * MEGA), "1")
    besteffort = "/kubepods/besteffort"
    assert machine.read(besteffort, "memory.high") == str(500 * MEGA)
    assert machine.read(besteffort, "memory.max") == str(550 * MEGA)
    assert await machine.bring(CONFIG) == {}, "what is there is not written again"
    assert all((await machine.bring(PoliciesConfig())).values())
    assert machine.read("/kubepods", "memory.low") == machine.read(WEB_MAIN, "memory.low") == "0"
    assert machine.read(besteffort, "memory.high") == machine.read(BE_MAIN, "memory.high") == "max"


async def test_a_be_pod_above_its_bounds_is_reclaimed_and_not_killed(machine: Node) -> None:
    machine.charge(BE_MAIN, anon=150, cache=200)
    outcomes = await machine.bring(CONFIG)
    assert all(outcomes.values())
    assert int(machine.read(BE_MAIN, "memory.current")) <= 190 * MEGA
    assert machine.kernel.killed == []


async def test_a_limit_that_cannot_be_reached_stays_unwritten_and_the_rest_is_done(machine: Node) -> None:
    machine.charge(BE_MAIN, anon=300)
    outcomes = await machine.bring(CONFIG)
    assert [place for place, ok in outcomes.items() if not ok] == [(BE_MAIN, "memory.max")]
    assert machine.read(BE_MAIN, "memory.max") == "max"
    assert machine.read(BE_MAIN, "memory.high") == str(190 * MEGA // PAGE * PAGE)
    assert machine.kernel.killed == []
