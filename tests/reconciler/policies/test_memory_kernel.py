"""Memory on this machine's own kernel: settings are written, limit real processes, and kill no other process."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from cgroupfs.files import REAL, RealFiles
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG
from cgroupfs.naming import QosClass
from cgroupfs.plan import KnobChange, order_changes
from cgroupfs.probe import offered
from cgroupfs.writer import KernelWriter, StepOutcome
from reconciler.actuators.base import PlanSnapshot
from reconciler.actuators.memory_reclaim.actuator import ReclaimActuator
from reconciler.control.planner import plan, plan_node
from reconciler.control.reclaim_loop import MemoryReclaimLoop
from reconciler.policies.be_memory import BeMemoryConfig
from reconciler.policies.memory_qos import MemoryQosConfig, ReclaimedMemory
from reconciler.policies.memory_reclaim import MemoryReclaimConfig
from reconciler.policies.table import PoliciesConfig
from state.model import Container, GroupRef, NodeView, Pod, PodClass, Resources
from tests.cgroupfs.kernelgroup import kernel_groups
from tests.fakes.constants import varied
from tests.reconciler.nodes import container, node, pod

MEGA = 1 << 20
ASKED = Resources(batch_memory_bytes=48 * MEGA)
LIMIT = Resources(batch_memory_bytes=64 * MEGA)
CONFIG = PoliciesConfig(
    memory_qos=MemoryQosConfig(enabled=True), be_memory=BeMemoryConfig(enabled=True, hard_percent=10)
)
HOLD = "import sys; sys.stdin.readline(); b = bytearray({size}); print('held', flush=True); sys.stdin.readline()"
CACHE = (
    "import sys; sys.stdin.readline(); f = open({path!r}, 'wb'); f.write(bytes({size})); f.flush(); "
    "import os; os.fsync(f.fileno()); print('held', flush=True); sys.stdin.readline()"
)
GROW = """import sys
sys.stdin.readline()
print("held", flush=True)
held = []
while True:
    held.append(bytearray(b"x") * (4 << 20))
"""


class Tree:
    """A BE pod and an online pod below a group of the test's own, in the memory hierarchy."""

    def __init__(self, hierarchy: Hierarchy, root: str) -> None:
        self.hierarchy = hierarchy
        self.root = root
        self.be = f"{root}/besteffort"
        self.main = f"{self.be}/podbe/id-main"
        self.online = f"{root}/podon/id-main"
        self.started: list[subprocess.Popen[bytes]] = []
        for path in (self.be, f"{self.be}/podbe", self.main, f"{root}/podon", self.online):
            os.mkdir(hierarchy.directory("memory", path))

    def view(self) -> NodeView:
        be = self._placed(pod("be", container("main", requests=ASKED, limits=LIMIT)), f"{self.be}/podbe")
        on = self._placed(
            pod("on", container("main"), cls=PodClass.SHARED, qos=QosClass.GUARANTEED), f"{self.root}/podon"
        )
        return replace(
            node(be, on, topology=2, versions=self.hierarchy.versions(), knobs=offered(self.hierarchy, self.be)),
            kubepods=self.root,
            besteffort=self.be,
            burstable=f"{self.root}/burstable",
            reclaimed_memory_bytes=200 * MEGA,
        )

    @staticmethod
    def _placed(item: Pod, path: str) -> Pod:
        containers: tuple[Container, ...] = tuple(
            replace(each, group=GroupRef(path=f"{path}/{each.id}")) for each in item.containers
        )
        return replace(item, group=GroupRef(path=path), containers=containers)

    async def bring(
        self, *, reclaim: bool = True, config: PoliciesConfig = CONFIG
    ) -> dict[tuple[str, str], StepOutcome]:
        """Write every memory setting that is wanted, as the actuator does."""
        desired = plan(self.view(), None, config)
        changes = []
        for (path, knob), setting in desired.settings.items():
            if CATALOG[knob].controller == "memory":
                have = CATALOG[knob].decode(self.read(path, CATALOG[knob].file(1) or ""), 1)
                changes.append(KnobChange(path=path, knob=knob, want=setting.value, have=have, reclaim=reclaim))
        ordered = order_changes(changes, {}, self.hierarchy.versions())
        assert not ordered.blocked
        outcomes = await KernelWriter(self.hierarchy).perform(ordered.steps)
        return {(outcome.step.path, outcome.step.knob): outcome for outcome in outcomes}

    def read(self, path: str, file: str) -> str:
        return REAL.read(self.hierarchy.directory("memory", path), file).strip()

    def start(self, path: str, code: str) -> subprocess.Popen[bytes]:
        """A process that is in the group before it takes any memory."""
        process = subprocess.Popen(["python3", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.started.append(process)
        REAL.write(self.hierarchy.directory("memory", path), "cgroup.procs", str(process.pid))
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"held\n"
        return process

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def tree() -> Iterator[Tree]:
    with kernel_groups("memory", "memory") as (hierarchy, root):
        if hierarchy.version("memory") != 1:
            pytest.skip("REAL KERNEL TEST NOT RUN: memory is not a v1 controller here")
        made = Tree(hierarchy, root)
        try:
            yield made
        finally:
            made.end()


@pytest.mark.kernel
async def test_limits_and_soft_limits_read_back_for_a_running_process(tree: Tree) -> None:
    held = tree.start(tree.main, HOLD.format(size=8 * MEGA))
    outcomes = await tree.bring()
    assert all(outcome.ok for outcome in outcomes.values()), outcomes
    assert int(tree.read(tree.main, "memory.limit_in_bytes")) == 64 * MEGA
    soft = (48 * MEGA + (64 - 48) * MEGA * 90 // 100) // 4096 * 4096
    assert int(tree.read(tree.main, "memory.soft_limit_in_bytes")) == soft
    assert int(tree.read(tree.be, "memory.soft_limit_in_bytes")) == 200 * MEGA
    assert int(tree.read(tree.be, "memory.limit_in_bytes")) == 220 * MEGA
    assert {path for path, _ in outcomes} == {tree.main, tree.be}, "the online pod's files are untouched"
    assert held.poll() is None


@pytest.mark.kernel
@pytest.mark.parametrize(("percent", "both"), [(None, 64 * MEGA), (0, 64 * MEGA), (50, 96 * MEGA)])
async def test_a_limit_above_the_runtimes_memory_with_swap_is_written_and_bounds_both(
    tree: Tree, percent: int | None, both: int
) -> None:
    memory = tree.hierarchy.directory("memory", tree.main)
    if not os.path.exists(f"{memory}/memory.memsw.limit_in_bytes"):
        pytest.skip("REAL KERNEL TEST NOT RUN: this kernel does not account swap")
    by_class = MemoryQosConfig(enabled=True, reclaimed=ReclaimedMemory(swap_percent=percent))
    for file in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
        REAL.write(memory, file, str(16 * MEGA))
    with pytest.raises(OSError, match="Invalid argument"):
        REAL.write(memory, "memory.limit_in_bytes", str(64 * MEGA))
    outcomes = await tree.bring(config=replace(CONFIG, memory_qos=by_class))
    assert all(outcome.ok for outcome in outcomes.values()), outcomes
    assert int(tree.read(tree.main, "memory.limit_in_bytes")) == 64 * MEGA
    assert int(tree.read(tree.main, "memory.memsw.limit_in_bytes")) == both


@pytest.mark.kernel
async def test_a_be_process_that_grows_without_end_is_held_by_its_limit_alone(tree: Tree) -> None:
    await tree.bring()
    online = tree.start(tree.online, HOLD.format(size=100 * MEGA))
    neighbour = tree.start(f"{tree.be}/podbe", HOLD.format(size=8 * MEGA))
    hog = tree.start(tree.main, GROW)
    assert hog.wait(60) == -signal.SIGKILL
    assert int(tree.read(tree.main, "memory.max_usage_in_bytes")) <= 64 * MEGA
    assert (online.poll(), neighbour.poll()) == (None, None)
    assert int(tree.read(tree.online, "memory.failcnt")) == 0


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("anon", "cache", "reclaim", "ok"),
    [
        pytest.param(16, 100, True, True, id="the page cache makes room"),
        pytest.param(100, 0, True, False, id="there is nothing to take: busy"),
        pytest.param(16, 100, False, False, id="nothing may be taken"),
    ],
)
async def test_a_limit_below_usage_reclaims_or_is_refused_and_nobody_dies(
    tree: Tree, tmp_path: Path, anon: int, cache: int, reclaim: bool, ok: bool
) -> None:
    held = tree.start(tree.main, HOLD.format(size=anon * MEGA))
    if cache:
        tree.start(tree.main, CACHE.format(path=str(tmp_path / "cached"), size=cache * MEGA))
    before = tree.read(tree.main, "memory.limit_in_bytes")
    used = int(tree.read(tree.main, "memory.usage_in_bytes"))
    assert used > 64 * MEGA
    outcome = (await tree.bring(reclaim=reclaim))[tree.main, "memory.max"]
    assert outcome.ok is ok
    if not ok and reclaim:
        assert "below the usage" in str(outcome.error)
    assert tree.read(tree.main, "memory.limit_in_bytes") == (str(64 * MEGA) if ok else before)
    if not reclaim:
        assert int(tree.read(tree.main, "memory.usage_in_bytes")) > used - MEGA
    assert held.poll() is None


class Short(RealFiles):
    """This machine, but with a NUMA node that is out of free memory."""

    def read(self, directory: str, file: str) -> str:
        if file == "zoneinfo":
            return "Node 0, zone Normal\n  pages free 5\n min 1\n low 10000\n high 20000\n managed 9000000\n"
        return super().read(directory, file)


@pytest.mark.kernel
async def test_a_short_node_empties_the_page_cache_of_a_be_container_that_is_over(tree: Tree, tmp_path: Path) -> None:
    held = tree.start(tree.main, CACHE.format(path=str(tmp_path / "cached"), size=100 * MEGA))
    assert int(tree.read(tree.main, "memory.usage_in_bytes")) > 100 * MEGA
    view = tree.view()
    actuator = ReclaimActuator(tree.hierarchy, files=Short())
    reclaimer = MemoryReclaimLoop(actuator, files=Short())
    for config in (MemoryReclaimConfig(enabled=True), varied(MemoryReclaimConfig(enabled=True), leave_bytes=0)):
        # Without its page cache it would have less than what each may keep: first it is left alone.
        assert not actuator.counts
        plan = plan_node(view, None, PoliciesConfig(memory_reclaim=config))
        reclaimer.planned(PlanSnapshot(view=view, plan=plan, enforce=True))
        assert plan.memory.reclaim is not None
        await reclaimer.reclaim(plan.memory.reclaim)
    assert actuator.counts["relief reclaimed"] == 1
    assert actuator.counts["bytes"] > 80 * MEGA
    assert int(tree.read(tree.main, "memory.usage_in_bytes")) < 40 * MEGA
    assert held.poll() is None
