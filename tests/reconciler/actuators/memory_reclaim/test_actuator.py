"""Memory reclaim on fake kernels: the requests, one at a time, bounded, and cancelled when no longer wanted."""

import errno
import threading
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.hierarchy import Hierarchy
from reconciler.actuators.base import PlanSnapshot
from reconciler.actuators.memory_reclaim.actuator import ReclaimActuator
from reconciler.control.planner import plan_node
from reconciler.control.reclaim_loop import MemoryReclaimLoop
from reconciler.policies.memory_reclaim import MemoryReclaimConfig
from reconciler.policies.table import PoliciesConfig
from state.model import Container, GroupRef, Hold, NodeView, PodClass, Resources
from tests.fakes.kernel import FakeKernel, Mode
from tests.reconciler.nodes import container, node, pod
from tests.until import until

MEGA = 1 << 20
ON = MemoryReclaimConfig(enabled=True)
POD = "/kubepods/besteffort/podbe"
SHORT = "Node 0, zone Normal\n  pages free 50\n min 1\n low 10000\n high 20000\n managed 9000000\n"
CALM = "Node 0, zone Normal\n  pages free 5000000\n min 1\n low 10000\n high 20000\n managed 9000000\n"


class Machine:
    """`FileOps` of a fake kernel with a /proc and memory pressure of the test's own."""

    def __init__(self, root: Path, mode: Mode, release: tuple[int, int] = (6, 18), nodes: int = 1) -> None:
        self.kernel = FakeKernel(mode, root=str(root), release=release, nodes=nodes)
        self.kernel.install()
        self.root = str(root)
        self.hierarchy = Hierarchy.detect(self.root)
        self.proc = {"meminfo": "MemTotal: 99999999 kB\nMemAvailable: 9999999 kB\n", "zoneinfo": CALM}
        self.stalled_us: dict[str, int] = {}
        self.now = 100.0
        self.block = threading.Event()
        self.block.set()
        self.inside = 0
        self.most = 0
        self.read_pressure = True
        self.no_pressure: set[str] = set()
        """Groups without the file."""
        self.ends = ""
        """A group that is removed as its file is read."""
        self.unread: set[str] = set()
        self.inode, self.groups, self.files = self.kernel.inode, self.kernel.groups, self.kernel.files
        self.actuator = ReclaimActuator(self.hierarchy, files=self, clock=lambda: self.now)
        self.reclaimer = MemoryReclaimLoop(self.actuator, root=self.root, files=self, clock=lambda: self.now)

    def read(self, directory: str, file: str) -> str:
        if directory == f"{self.root}/proc":
            return self.proc[file]
        if file == "memory.pressure":
            name = str(directory).rpartition("/")[2]
            if name == self.ends:
                self.kernel.remove_group(f"{POD}/{name}")
            if not self.read_pressure or name in {self.ends, *self.no_pressure}:
                raise OSError(errno.ENOENT, "no such file")
            total = self.stalled_us.get(name, 0)
            return f"some avg10=0.00 avg60=0.00 avg300=0.00 total={total}\n"
        if file in self.unread:
            raise OSError(errno.ENOENT, "no such file")
        return self.kernel.read(directory, file)

    def write(self, directory: str, file: str, text: str) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            assert self.block.wait(10)
            self.kernel.write(directory, file, text)
        finally:
            self.inside -= 1

    def group(self, name: str, *, anon: int = 0, cache: int = 0, node: int = 0) -> None:
        path = f"{POD}/id-{name}"
        self.kernel.make_group(path)
        directory = self.hierarchy.directory("memory", path)
        self.kernel.charge(directory, anon=anon * MEGA, cache=cache * MEGA, node=node)

    def used(self, name: str) -> int:
        file = "memory.usage_in_bytes" if self.hierarchy.version("memory") == 1 else "memory.current"
        return int(self.kernel.read(self.hierarchy.directory("memory", f"{POD}/id-{name}"), file)) // MEGA

    def asked(self) -> list[tuple[str, int]]:
        """The requests by group, in MiB."""
        return [(name, int(text.split()[0]) // MEGA) for name, text, _ in self.said()]

    def said(self) -> list[tuple[str, str, int]]:
        """The same in the words of the file, with the errno that was answered."""
        rows = []
        for path, text, code in self.kernel.writes:
            directory, _, file = path.rpartition("/")
            if file in {"memory.reclaim", "memory.force_empty"}:
                rows.append((directory.rpartition("/id-")[2], text, code))
        return rows

    def plan(
        self,
        *names: str,
        config: MemoryReclaimConfig = ON,
        enforce: bool = True,
        request: int = 0,
        cls: PodClass = PodClass.RECLAIMED,
        holds: dict[str, Hold] | None = None,
    ) -> None:
        resources = Resources(batch_memory_bytes=request * MEGA)
        view = self.view(*(container(name, requests=resources) for name in names), cls=cls)
        plan = plan_node(view, None, PoliciesConfig(memory_reclaim=config))
        self.reclaimer.planned(PlanSnapshot(view=view, plan=plan, enforce=enforce, holds=holds or {}))

    def view(self, *containers: Container, cls: PodClass) -> NodeView:
        item = pod("be", *containers, cls=cls)
        trigger = self.hierarchy.trigger_directory
        placed = tuple(
            replace(each, group=GroupRef(path=each.group.path, inode=self.kernel.inode(trigger(each.group.path))))
            for each in item.containers
        )
        return node(replace(item, containers=placed), versions=self.hierarchy.versions())

    async def look(self) -> None:
        situation = self.reclaimer._situation
        assert situation is not None
        wish = situation.plan.memory.reclaim
        assert wish is not None
        await self.reclaimer.reclaim(wish)
        self.now += wish.interval_s


async def test_each_gives_one_percent_while_nobody_waits_one_after_the_other(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "v2")
    for name in ("a", "b"):
        machine.group(name, anon=1000, cache=3000)
    machine.plan("a", "b")
    await machine.look()
    assert machine.asked() == [], "a first look knows no pressure"
    await machine.look()
    assert machine.asked() == [("a", 16), ("a", 16), ("a", 8), ("b", 16), ("b", 16), ("b", 8)]
    assert (machine.used("a"), machine.used("b"), machine.most) == (3960, 3960, 1)
    machine.stalled_us["id-a"] = 60_000
    await machine.look()
    assert machine.used("a") == 3960
    assert machine.actuator.counts["probe reclaimed"] == 3
    assert (machine.actuator.counts["bytes"] // MEGA, machine.used("b")) == (119, 3920), (
        "then a waits, and b gives 39.6"
    )


@pytest.mark.parametrize(("mode", "left", "asked"), [("v1", 100, [("b", 0)]), ("v2", 2846, [])])
async def test_a_short_node_is_relieved_by_the_largest_cache(
    tmp_path: Path, mode: Mode, left: int, asked: list[tuple[str, int]]
) -> None:
    machine = Machine(tmp_path, mode)
    machine.group("a", anon=100, cache=300)
    machine.group("b", anon=100, cache=3000)
    machine.proc["zoneinfo"] = SHORT
    machine.plan("a", "b")
    await machine.look()
    assert (machine.used("a"), machine.used("b")) == (400, left)
    assert not asked or machine.asked() == asked
    await machine.look()
    assert machine.used("a") < 400, "the next one, for the first has just given"
    assert machine.actuator.counts["relief reclaimed"] == 2
    facts = machine.reclaimer.status()
    assert facts["short_nodes"] == {"0": "hard"}


@pytest.mark.parametrize("mode", ["v1", "v2"])
@pytest.mark.parametrize(("told", "relieved"), [(True, "b"), (False, "a")])
async def test_cache_is_dropped_on_the_node_that_is_short_where_that_is_known(
    tmp_path: Path, mode: Mode, *, told: bool, relieved: str
) -> None:
    machine = Machine(tmp_path, mode, nodes=2)
    machine.group("a", anon=100, cache=3000, node=0)
    machine.group("b", anon=100, cache=300, node=1)
    machine.proc["zoneinfo"] = CALM + SHORT.replace("Node 0", "Node 1")
    machine.unread = set() if told else {"memory.numa_stat"}
    machine.plan("a", "b", config=MemoryReclaimConfig(enabled=True, probe=False))
    await machine.look()
    assert {name for name, _ in machine.asked()} == {relieved}
    await machine.look()
    assert not told or machine.used("a") == 3100, "what lies elsewhere would not help"


@pytest.mark.parametrize(
    ("swap", "said"),
    [
        pytest.param("", " swappiness=0", id="there is no swap"),
        pytest.param("SwapTotal: 100 kB\nSwapFree: 10 kB\n", " swappiness=0", id="swap is full"),
        pytest.param("SwapTotal: 100 kB\nSwapFree: 90 kB\n", "", id="there is room in swap"),
    ],
)
async def test_what_is_to_be_page_cache_is_asked_for_as_such(tmp_path: Path, swap: str, said: str) -> None:
    machine = Machine(tmp_path, "v2")
    machine.group("a", anon=1000, cache=600)
    machine.proc["meminfo"] += swap
    machine.plan("a")
    await machine.look()
    await machine.look()
    assert machine.said() == [("a", f"{16 * MEGA}{said}", 0)]


async def test_a_kernel_that_does_not_know_swappiness_is_asked_with_it_once(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "v2", release=(6, 8))
    machine.group("a", anon=1000, cache=600)
    machine.plan("a")
    for _ in range(3):
        await machine.look()
    first, again, later = (text for _, text, _ in machine.said())
    assert (first, again) == (f"{16 * MEGA} swappiness=0", f"{16 * MEGA}")
    assert later.isdecimal()
    assert machine.actuator.counts["probe reclaimed"] == 2


async def test_on_v1_only_who_uses_more_than_asked_is_emptied_and_nobody_is_probed(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "v1")
    machine.group("a", anon=100, cache=300)
    machine.proc["zoneinfo"] = SHORT
    machine.plan("a", request=500)
    await machine.look()
    await machine.look()
    assert (machine.asked(), machine.used("a")) == ([], 400)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({"enforce": False}, id="observe mode"),
        pytest.param({"config": MemoryReclaimConfig(enabled=True, dry_run=True)}, id="practised"),
        pytest.param({"cls": PodClass.SHARED}, id="an online pod"),
        pytest.param({"holds": {"pod:be": Hold(target="pod:be", reason="r", by="b")}}, id="a held pod"),
    ],
)
async def test_nothing_is_taken(tmp_path: Path, plan: dict[str, object]) -> None:
    machine = Machine(tmp_path, "v2")
    machine.group("a", anon=1000, cache=3000)
    machine.plan("a", **plan)  # type: ignore[arg-type]
    await machine.look()
    await machine.look()
    assert (machine.asked(), machine.used("a")) == ([], 4000)
    assert machine.actuator.counts["bytes"] == 0


async def test_without_pressure_files_nobody_is_probed_and_that_is_said(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "v2")
    machine.group("a", anon=1000, cache=3000)
    machine.read_pressure = False
    machine.plan("a")
    await machine.look()
    await machine.look()
    assert machine.asked() == []
    assert "no memory pressure per container" in machine.reclaimer.problems()[0]
    machine.plan("a", config=replace(ON, probe=False))
    await machine.look()
    assert machine.reclaimer.problems() == [], "no pressure is needed any more"


async def test_a_container_that_ends_or_has_no_pressure_is_not_taken_for_all(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "v2")
    for name in ("a", "b"):
        machine.group(name, anon=1000, cache=3000)
    machine.plan("a", "b")
    machine.no_pressure.add("id-b")
    await machine.look()
    await machine.look()
    assert (machine.used("a"), machine.reclaimer.problems()) == (3960, [])
    machine.plan("a")
    machine.ends = "id-a"
    await machine.look()
    assert machine.reclaimer.problems() == [], "it has ended while it was read"


async def test_a_kernel_without_the_file_and_less_than_asked_are_outcomes(tmp_path: Path) -> None:
    old = Machine(tmp_path, "v2", release=(5, 10))
    old.group("a", anon=1000, cache=3000)
    old.plan("a")
    await old.look()
    await old.look()
    assert "this kernel has no memory.reclaim" in old.reclaimer.problems()[0]
    assert old.used("a") == 4000


async def test_less_than_asked_is_partly(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "v2")
    machine.group("a", anon=3970, cache=30)
    machine.proc["meminfo"] += "SwapTotal: 100 kB\nSwapFree: 100 kB\n"
    machine.plan("a")
    await machine.look()
    await machine.look()
    assert machine.actuator.counts == {"probe partly reclaimed": 1, "bytes": 30 * MEGA}


async def test_a_group_with_another_inode_is_left_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "v2")
    machine.group("a", anon=1000, cache=3000)
    machine.plan("a")
    await machine.look()
    machine.kernel.remove_group(f"{POD}/id-a")
    machine.group("a", anon=1000, cache=3000)
    await machine.look()
    await machine.look()
    assert machine.asked() == []


async def test_an_action_that_is_no_longer_wanted_ends_at_its_next_chunk(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "v2")
    machine.group("a", anon=1000, cache=3000)
    machine.proc["zoneinfo"] = SHORT
    machine.block.clear()
    machine.plan("a")
    async with trio.open_nursery() as nursery:
        await nursery.start(machine.reclaimer.run)
        await until(lambda: machine.inside)
        machine.plan("a", config=MemoryReclaimConfig())
        await until(lambda: machine.actuator.counts["relief cancelled"])
        machine.block.set()
        await until(lambda: not machine.inside)
        nursery.cancel_scope.cancel()
    assert machine.asked() == [("a", 16)]
    assert list(await machine.reclaimer.restore()) == []
