"""The readings behind the promise of memory: whose memory is BE's, and what is reported."""

import pytest
from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.naming import QosClass
from cgroupfs.usage import UsageReader
from reconciler.headroom.cpu import HeadroomConfig, HeadroomLaw
from reconciler.headroom.memory_sampler import MemoryHeadroom
from reconciler.headroom.report import HeadroomReport
from state.memory import NodeMemoryReading
from state.model import NodeCpu, Pod, PodClass, Pools
from state.plan import NodePlan
from tests.fakes.clock import Clock
from tests.fakes.constants import varied
from tests.fakes.kernel import FakeKernel
from tests.reconciler.nodes import pod

GIGA = 1 << 30
BESTEFFORT = "/kubepods/besteffort"
PLAN = NodePlan(
    pools=Pools(online_cpus=CpuSet.span(2), reserved=EMPTY, dedicated={}, shared=EMPTY, reclaimed=EMPTY, budget_milli=0)
)
CONFIG = varied(HeadroomConfig(), report_s=10)


class Known(Struct):
    node_memory: NodeMemoryReading | None = NodeMemoryReading(
        total_bytes=100 * GIGA, available_bytes=60 * GIGA, age_s=0.0
    )
    besteffort: str = BESTEFFORT
    pods: dict[str, Pod] = {}


class Machine:
    """A fake kernel with pods, and the promise on top of it."""

    def __init__(self, root: str) -> None:
        self.kernel = FakeKernel("v1", root=root)
        self.kernel.install()
        self.known, self.clock = Known(), Clock()
        self.plan: NodePlan | None = PLAN
        self.kernel.make_group(BESTEFFORT)
        self.usage = UsageReader(Hierarchy.detect(root), ops=self.kernel)
        self.memory = self.made()
        self.report = HeadroomReport(CONFIG, memory=self.memory, clock=self.clock, wall=self.clock.wall)

    def made(self) -> MemoryHeadroom:
        return MemoryHeadroom(CONFIG, self.usage, self.known, lambda: self.plan, changed=lambda: None, clock=self.clock)

    def add(self, uid: str, cls: PodClass, qos: QosClass, gigas: int) -> None:
        item = pod(uid, cls=cls, qos=qos)
        self.known.pods[uid] = item
        self.kernel.make_group(item.group.path)
        tree = next(tree for tree in self.kernel.trees if "memory" in {each.name for each in tree.controllers})
        self.kernel.charge(tree.mount + item.group.path, anon=gigas * GIGA)

    async def gigas(self, seconds: int = 20) -> float:
        """What is promised after so long."""
        for _ in range(seconds // 5):
            self.clock.now += 5
            await self.memory.sample()
        return self.memory.state.total / GIGA


@pytest.fixture
def machine(tmp_path: object) -> Machine:
    return Machine(str(tmp_path))


async def test_be_pods_count_wherever_they_are_and_online_ones_nowhere(machine: Machine) -> None:
    config = machine.memory.config
    machine.memory.use(replace(config, memory=varied(config.memory, max_step_bytes=1 << 50)))
    machine.add("be", PodClass.RECLAIMED, QosClass.BESTEFFORT, 4)
    machine.add("executor", PodClass.RECLAIMED, QosClass.BURSTABLE, 6)
    machine.add("online", PodClass.SHARED, QosClass.BESTEFFORT, 3)
    machine.add("web", PodClass.SHARED, QosClass.BURSTABLE, 7)
    # 60 left and 10 of BE's, less 10 of reserve, less a tenth of the 30 that others keep.
    assert await machine.gigas() == 57.0


async def test_before_the_first_plan_nothing_is_read_and_nothing_promised(machine: Machine) -> None:
    machine.plan = None
    assert await machine.gigas() == 0
    assert machine.memory.status() == {
        "bytes": 0,
        "supply_bytes": None,
        "reason": "not measured yet",
        "known_s": None,
    }


async def test_an_online_pod_in_besteffort_that_cannot_be_read_makes_it_unknown(machine: Machine) -> None:
    assert await machine.gigas() == 5
    item = pod("gone", cls=PodClass.SHARED, qos=QosClass.BESTEFFORT)
    machine.known.pods["gone"] = item
    assert await machine.gigas() == 5
    assert "memory use unknown" in str(machine.memory.status()["reason"])
    assert await machine.gigas(300) == 0


async def test_it_is_told_beside_the_cpus_kept_and_gone_on_with(machine: Machine) -> None:
    promised = await machine.gigas()
    assert promised == 5
    machine.report.state = replace(machine.report.state, amounts={0: 1000}, known_at=machine.clock.now)
    assert machine.report.document()["memory_bytes"] == 5 * GIGA
    message = machine.report.status()["memory"]
    assert message == machine.memory.status()
    kept = machine.report.persisted()
    assert kept is not None
    assert (kept.memory_bytes, kept.memory_at) == (5 * GIGA, machine.clock.wall())
    machine.clock.now += 60
    fresh = machine.made()
    HeadroomReport(machine.memory.config, kept, memory=fresh, clock=machine.clock, wall=machine.clock.wall)
    assert fresh.state.total == 5 * GIGA
    machine.clock.now += 600
    late = machine.made()
    HeadroomReport(machine.memory.config, kept, memory=late, clock=machine.clock, wall=machine.clock.wall)
    assert late.state.total == 0


class MadePeaks:
    """What the peaks leave, as a test has it."""

    left: int | None = None

    def second(self, cpu: NodeCpu | None) -> None:
        raise AssertionError

    def cpu_left(self, pools: Pools) -> int | None:
        raise AssertionError

    def memory_left(self, node: NodeMemoryReading, reserve_bytes: int) -> int | None:
        assert reserve_bytes == node.total_bytes // 10
        return self.left


async def test_by_the_law_of_peaks_no_more_is_promised_than_they_leave(machine: Machine) -> None:
    peaks = MadePeaks()
    machine.memory.config = varied(HeadroomConfig(law=HeadroomLaw.HISTOGRAM), report_s=10)
    machine.memory._peaks = peaks
    machine.add("web-0", PodClass.SHARED, QosClass.BURSTABLE, 2)
    assert await machine.gigas() == 0, "there is no prediction"
    peaks.left = 3 * GIGA
    assert await machine.gigas(40) == 3
    assert machine.memory.state.reason.endswith("below predicted peaks of online workloads")
    promised, available = machine.memory.promises.minute()
    assert promised == 3 * GIGA
    assert available is not None
    assert available > 3 * GIGA
