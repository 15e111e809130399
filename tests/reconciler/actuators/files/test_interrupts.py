"""Interrupts are moved off the CPUs that pods own, and restored to their own places, also after a crash."""

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from cgroupfs.files import REAL, FileOps
from reconciler.actuators.base import PlanSnapshot
from reconciler.actuators.codec import read_rows
from reconciler.actuators.files.interrupts import ACTUATOR, CODEC, InterruptPlaces, target_of
from reconciler.control.planner import plan_node
from reconciler.policies.interrupts import InterruptsConfig
from reconciler.policies.table import PoliciesConfig
from state.cpu import INTERRUPTS, InterruptPlan
from state.entry import RestoreOutcome, RestoreResult
from state.ledger import Ledger
from state.model import Hold
from state.store import Store
from state.topology import Cpu, Topology
from tests.reconciler.actuators.acting import context, undone
from tests.reconciler.nodes import node

TWO_NODES = Topology(online=CpuSet(range(8)), cpus=tuple(Cpu(id=cpu, core=cpu, node=cpu // 4) for cpu in range(8)))
OWNED = CpuSet([2, 3])


class Crash(BaseException):
    """The daemon is killed."""


class Kernel:
    """/proc/irq: a write is refused as by Linux, which has no empty place and keeps its own interrupts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.managed: set[int] = set()
        self.dies = False
        self.refuses: dict[int, int] = {}
        """Errors of writes, by number."""
        self.rounds: dict[int, str] = {}
        """Places that an interrupt's controller makes of any other."""
        self.unreadable: set[int] = set()
        """Interrupts that cannot be read after the next write."""
        self.writes: list[tuple[int, str]] = []

    def add(self, number: int, cpus: str, device: str = "eth0-rx-0") -> None:
        directory = self.root / f"proc/irq/{number}"
        for old in directory.iterdir() if directory.exists() else ():
            if old.is_dir():
                old.rmdir()
        (directory / device).mkdir(parents=True) if device else directory.mkdir(parents=True, exist_ok=True)
        self.set(number, cpus)

    def set(self, number: int, cpus: str) -> None:
        (self.root / f"proc/irq/{number}/smp_affinity_list").write_text(f"{cpus}\n")

    def remove(self, number: int) -> None:
        directory = self.root / f"proc/irq/{number}"
        (directory / "smp_affinity_list").unlink()
        for child in directory.iterdir():
            child.rmdir()
        directory.rmdir()

    def places(self) -> dict[int, str]:
        found = (self.root / "proc/irq").iterdir()
        return {int(item.name): (item / "smp_affinity_list").read_text().strip() for item in found if item.is_dir()}

    def write(self, directory: str, file: str, text: str) -> None:
        number = int(os.path.basename(str(directory)))
        self.writes.append((number, text))
        if number in self.managed:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if not CpuSet.parse(text) & TWO_NODES.online:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if self.dies:
            raise Crash
        if number in self.refuses:
            raise OSError(self.refuses[number], os.strerror(self.refuses[number]))
        self.set(number, self.rounds.get(number, text))

    def read(self, directory: str, file: str) -> str:
        name = os.path.basename(str(directory))
        number = int(name) if name.isdecimal() else -1
        if number in self.unreadable and self.writes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return REAL.read(directory, file)

    def __getattr__(self, name: str) -> Any:  # the rest of FileOps
        return getattr(REAL, name)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    made = Kernel(tmp_path)
    made.add(24, "0-7")
    made.add(25, "2")
    made.add(26, "0-1")
    return made


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with closing(Store(str(tmp_path / "state.db"), boot="b", version="1", node="n1", history_limit=100)) as store:
        yield Ledger(store)


def make(kernel: Kernel, ledger: Ledger) -> InterruptPlaces:
    """The next life of the daemon."""
    return InterruptPlaces(context(ledger, root=str(kernel.root), files=cast(FileOps, kernel)))


def situation(
    owned: CpuSet | None = OWNED, *, enforce: bool = True, dry: bool = False, holds: dict[str, Hold] | None = None
) -> PlanSnapshot:
    """None: the policy is off."""
    view = replace(node(), topology=TWO_NODES)
    plan = plan_node(view, None, PoliciesConfig(interrupts=InterruptsConfig(enabled=owned is not None, dry_run=dry)))
    pools = replace(plan.pools, dedicated={"uid/main": owned} if owned else {})
    part = None if owned is None else InterruptPlan(avoid=owned, free=TWO_NODES.online - owned, dry_run=dry)
    return PlanSnapshot(view=view, plan=replace(plan, pools=pools, interrupts=part), enforce=enforce, holds=holds or {})


def _restored(kernel: Kernel, ledger: Ledger) -> list[RestoreResult]:
    """While no daemon runs."""
    return undone(ACTUATOR, ledger, root=str(kernel.root), files=kernel)


async def turn(side: InterruptPlaces, now: PlanSnapshot) -> None:
    side.planned(now)
    await side.sweep()


async def killed(kernel: Kernel, ledger: Ledger, now: PlanSnapshot) -> None:
    """A life of the daemon that ends at its first write."""
    kernel.dies = True
    with pytest.RaisesGroup(Crash, flatten_subgroups=True, allow_unwrapped=True):
        await turn(make(kernel, ledger), now)
    kernel.dies = False


@pytest.mark.parametrize(
    ("original", "avoid", "expected"),
    [
        ("0-7", "2-3", "0-1,4-7"),
        ("2", "2-3", "0-1"),  # its own NUMA node's
        ("2-3", "0-3", "4-7"),  # none is left there
        ("6", "2-3,6", "4-5,7"),
        ("2,9", "2", "0-1,3"),  # CPU 9 is not online
    ],
)
def test_where_an_interrupt_goes(original: str, avoid: str, expected: str) -> None:
    owned = CpuSet.parse(avoid)
    free = TWO_NODES.online - owned
    found = target_of(CpuSet.parse(original), owned, free, TWO_NODES)
    assert str(found) == expected


def test_the_plan_keeps_them_off_owned_cpus_only() -> None:
    plan = plan_node(node(), None, PoliciesConfig(interrupts=InterruptsConfig(enabled=True)))
    assert plan.interrupts == InterruptPlan()
    assert plan_node(node(), None, PoliciesConfig()).interrupts is None


async def test_they_leave_and_come_back_with_the_owner(kernel: Kernel, ledger: Ledger) -> None:
    before, side = kernel.places(), make(kernel, ledger)
    await turn(side, situation())
    assert kernel.places() == {24: "0-1,4-7", 25: "0-1", 26: "0-1"}
    assert (side.status()["moved"], side.problems()) == (2, [])
    kernel.writes.clear()
    await turn(side, situation())
    assert kernel.writes == []
    await turn(side, situation(CpuSet([2])))
    assert kernel.places() == {24: "0-1,3-7", 25: "0-1,3", 26: "0-1"}
    await turn(side, situation(CpuSet([5])))
    assert kernel.places() == {24: "0-4,6-7", 25: "2", 26: "0-1"}
    await turn(side, situation(CpuSet()))
    assert kernel.places() == before
    assert read_rows(ledger, CODEC).by_number == {}


async def test_a_policy_that_is_switched_off_gives_them_back(kernel: Kernel, ledger: Ledger) -> None:
    before, side = kernel.places(), make(kernel, ledger)
    await turn(side, situation())
    await turn(side, situation(None))
    assert kernel.places() == before


async def test_a_policy_that_becomes_a_dry_run_gives_them_back(kernel: Kernel, ledger: Ledger) -> None:
    before, side = kernel.places(), make(kernel, ledger)
    await turn(side, situation())
    await turn(side, situation(dry=True))
    assert kernel.places() == before
    assert (side.status()["moved"], side.status()["would_move"]) == (0, 2)


@pytest.mark.parametrize(
    "now",
    [
        pytest.param(situation(enforce=False), id="observe"),
        pytest.param(situation(dry=True), id="dry run"),
        pytest.param(
            situation(holds={f"knob:{INTERRUPTS}": Hold(target=f"knob:{INTERRUPTS}", reason="", by="me")}), id="on hold"
        ),
    ],
)
async def test_nothing_is_moved_unless_it_is_enforced(kernel: Kernel, ledger: Ledger, now: PlanSnapshot) -> None:
    side = make(kernel, ledger)
    await turn(side, now)
    assert kernel.writes == []
    assert side.status()["moved"] == 0
    assert side.status()["would_move"] == (0 if now.holds else 2)


async def test_the_kernels_own_interrupts_are_tried_once(kernel: Kernel, ledger: Ledger) -> None:
    kernel.managed = {25}
    side = make(kernel, ledger)
    for _ in range(3):
        await turn(side, situation())
    assert [number for number, _ in kernel.writes].count(25) == 1
    assert (side.status()["placed_by_kernel"], side.problems()) == (1, [])
    assert read_rows(ledger, CODEC).by_number.keys() == {24}


async def test_another_programs_place_stays(kernel: Kernel, ledger: Ledger) -> None:
    side = make(kernel, ledger)
    await turn(side, situation())
    kernel.set(24, "3")
    for _ in range(2):
        await turn(side, situation())
    assert kernel.places()[24] == "3"
    assert ["24 on CPU 3" in text for text in side.problems()] == [True]
    await side.restore()
    assert kernel.places() == {24: "3", 25: "2", 26: "0-1"}


@pytest.mark.parametrize("seen", ["while offline", "after they came back", "by restore"])
async def test_a_place_whose_cpus_went_offline_is_the_kernels_doing_and_no_other_programs(
    kernel: Kernel, ledger: Ledger, seen: str
) -> None:
    side = make(kernel, ledger)
    await turn(side, situation(TWO_NODES.online - CpuSet.parse("0-1")))
    assert kernel.places()[24] == "0-1"
    kernel.set(24, "2-7")
    online = "2-7" if seen == "while offline" else "0-7"
    (kernel.root / "sys/devices/system/cpu").mkdir(parents=True)
    (kernel.root / "sys/devices/system/cpu/online").write_text(f"{online}\n")
    if seen == "while offline":
        cpus = tuple(cpu for cpu in TWO_NODES.cpus if cpu.id >= 2)
        left = replace(TWO_NODES, cpus=cpus, online=CpuSet.parse("2-7"))
        now = situation(CpuSet.parse("2-5"))
        now = replace(now, view=replace(now.view, topology=left))
        now = replace(
            now, plan=replace(now.plan, interrupts=InterruptPlan(avoid=CpuSet.parse("2-5"), free=CpuSet.parse("6-7")))
        )
        await turn(side, now)
        assert kernel.places()[24] == "6-7"
        assert side.problems() == []
    elif seen == "after they came back":
        await turn(side, situation(TWO_NODES.online - CpuSet.parse("0-1")))
        assert (kernel.places()[24], side.problems()) == ("0-1", [])
    done = await side.restore() if seen != "by restore" else _restored(kernel, ledger)
    assert all(result.ok for result in done), done
    assert kernel.places()[24] == "0-7"


async def test_a_removed_interrupt_is_counted_no_more_and_its_number_may_be_anothers(
    kernel: Kernel, ledger: Ledger
) -> None:
    """A virtual function of a network card ends with its pod, and the next one gets its numbers."""
    kernel.managed = {24}
    side = make(kernel, ledger)
    await turn(side, situation())
    kernel.set(25, "2")
    await turn(side, situation())
    assert (side.status()["placed_by_kernel"], side.status()["placed_by_others"]) == (1, 1)
    kernel.remove(24)
    kernel.remove(25)
    await turn(side, situation())
    assert (side.status()["placed_by_kernel"], side.status()["placed_by_others"], side.problems()) == (0, 0, [])
    kernel.managed = set()
    kernel.add(24, "2-3", "eth1-rx-0")
    kernel.add(25, "2-3", "eth1-rx-1")
    await turn(side, situation())
    assert kernel.places() == {24: "0-1", 25: "0-1", 26: "0-1"}


async def test_an_original_that_another_program_restores_is_its_choice(kernel: Kernel, ledger: Ledger) -> None:
    side = make(kernel, ledger)
    await turn(side, situation())
    await turn(side, situation())
    kernel.set(24, "0-7")
    await turn(side, situation())
    assert kernel.places()[24] == "0-7"


async def test_a_number_that_serves_another_device_has_its_own_place(kernel: Kernel, ledger: Ledger) -> None:
    side = make(kernel, ledger)
    await turn(side, situation())
    kernel.add(25, "3", device="nvme0q1")
    kernel.remove(24)
    await turn(side, situation())
    assert kernel.places() == {25: "0-1", 26: "0-1"}
    assert {number: place.original for number, place in read_rows(ledger, CODEC).by_number.items()} == {25: "3"}
    results = await side.restore()
    assert [(result.path, result.undo) for result in results] == [("25 nvme0q1", RestoreOutcome.RESTORED)]
    assert kernel.places()[25] == "3"


async def test_after_a_kill_at_the_write_the_next_life_finishes_or_undoes_it(kernel: Kernel, ledger: Ledger) -> None:
    before = kernel.places()
    await killed(kernel, ledger, situation())
    await turn(make(kernel, ledger), situation())
    assert kernel.places() == {24: "0-1,4-7", 25: "0-1", 26: "0-1"}
    results = _restored(kernel, ledger)
    assert {result.undo for result in results} == {RestoreOutcome.RESTORED}
    assert kernel.places() == before
    assert read_rows(ledger, CODEC).by_number == {}


@pytest.mark.parametrize("device", ["", "eth0-rx-1", "eth0-rx-0,mei"])
@pytest.mark.parametrize("offline", [False, True])
async def test_a_place_survives_its_devices_and_so_does_the_original(
    kernel: Kernel, ledger: Ledger, device: str, offline: bool
) -> None:
    """An interface is set down, or up with another name; a second device joins a shared line."""
    side = make(kernel, ledger)
    await turn(side, situation())
    place = kernel.places()[24]
    first, *more = device.split(",")
    kernel.add(24, place, device=first)
    for name in more:
        (kernel.root / f"proc/irq/24/{name}").mkdir()
    await turn(side, situation())
    await turn(side, situation(CpuSet([3])))
    if offline:
        _restored(kernel, ledger)
    else:
        await turn(side, situation(CpuSet()))
    assert kernel.places()[24] == "0-7"
    assert read_rows(ledger, CODEC).by_number == {}


async def test_a_place_that_the_controller_changes_has_its_original_back(kernel: Kernel, ledger: Ledger) -> None:
    kernel.rounds = {24: "4"}
    side = make(kernel, ledger)
    for _ in range(3):
        await turn(side, situation())
        assert side.problems() == ["1 interrupt not moved, such as 24: accepted, but it reads 4"]
        assert (side.status()["moved"], side.status()["refused"]) == (1, 1)
    kernel.rounds = {}
    await turn(side, situation(CpuSet()))
    assert kernel.places()[24] == "0-7"


async def test_a_place_that_cannot_be_read_again_has_its_original_back(kernel: Kernel, ledger: Ledger) -> None:
    kernel.unreadable = {24}
    side = make(kernel, ledger)
    await turn(side, situation())
    assert side.problems() == ["1 interrupt not moved, such as 24: EIO"]
    kernel.unreadable = set()
    await turn(side, situation(CpuSet()))
    assert kernel.places()[24] == "0-7"


async def test_a_refusal_after_a_kill_leaves_no_row_of_what_was_never_moved(kernel: Kernel, ledger: Ledger) -> None:
    await killed(kernel, ledger, situation())
    kernel.refuses = {24: errno.ENOSPC, 25: errno.ENOSPC}
    again = make(kernel, ledger)
    await turn(again, situation())
    assert again.status()["moved"] == 0
    assert read_rows(ledger, CODEC).by_number == {}


async def test_kills_one_after_another_at_a_second_move_lose_no_original(kernel: Kernel, ledger: Ledger) -> None:
    before = kernel.places()
    await turn(make(kernel, ledger), situation())
    for _ in range(3):
        await killed(kernel, ledger, situation(CpuSet([1, 2, 3])))
    await turn(make(kernel, ledger), situation(CpuSet()))
    assert kernel.places() == before


async def test_a_refused_move_is_seldom_tried_again_and_stays_reported(kernel: Kernel, ledger: Ledger) -> None:
    """A read-only /proc, or a machine without a free vector, must not fill the store's history."""
    kernel.refuses = {24: errno.EROFS, 25: errno.EROFS}
    side = make(kernel, ledger)
    for _ in range(10):
        await turn(side, situation())
        assert side.problems() == ["2 interrupts not moved, such as 24: EROFS"]
    assert [number for number, _ in kernel.writes] == [24, 25]
    await turn(side, situation())
    assert len(kernel.writes) == 4
    await turn(side, situation(CpuSet([3])))  # 25 may stay
    assert (len(kernel.writes), side.problems()) == (5, ["1 interrupt not moved, such as 24: EROFS"])
    kernel.refuses = {}
    await turn(side, situation())
    assert (kernel.places()[24], side.problems()) == ("0-1,4-7", [])


async def test_an_original_that_is_refused_is_reported_and_tried_again(
    kernel: Kernel, ledger: Ledger, autojump_clock: trio.testing.MockClock
) -> None:
    side = make(kernel, ledger)
    await turn(side, situation())
    kernel.refuses = {25: errno.EINVAL}  # its only CPU is offline
    async with trio.open_nursery() as nursery:
        await nursery.start(side.run)
        side.planned(situation(CpuSet()))
        while not side.problems():  # noqa: ASYNC110 - it is set, not announced
            await trio.sleep(1)
        assert side.problems() == ["1 interrupt not given back, such as 25: EINVAL"]
        assert side.status()["not_restored"] == 1
        kernel.refuses = {}
        while kernel.places()[25] != "2":  # noqa: ASYNC110 - it is set, not announced
            await trio.sleep(10)
        while side.problems():  # noqa: ASYNC110 - it is set, not announced
            await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert read_rows(ledger, CODEC).by_number == {}


async def test_after_a_failed_listing_the_originals_are_not_left_behind(
    kernel: Kernel, ledger: Ledger, autojump_clock: trio.testing.MockClock
) -> None:
    before, side = kernel.places(), make(kernel, ledger)
    await turn(side, situation())
    directory, away = kernel.root / "proc/irq", kernel.root / "proc/away"
    directory.rename(away)
    async with trio.open_nursery() as nursery:
        await nursery.start(side.run)
        side.planned(situation(CpuSet()))
        while not side.problems():  # noqa: ASYNC110 - it is set, not announced
            await trio.sleep(1)
        away.rename(directory)
        while side.problems():  # noqa: ASYNC110 - it is set, not announced
            await trio.sleep(10)
        nursery.cancel_scope.cancel()
    assert kernel.places() == before


async def test_a_machine_without_the_directory_says_so(tmp_path: Path, ledger: Ledger) -> None:
    side = make(Kernel(tmp_path), ledger)
    await turn(side, situation())
    assert side.problems() == ["/proc/irq: ENOENT"]


async def test_names_in_the_ledger_are_bounded_and_printable(kernel: Kernel, ledger: Ledger) -> None:
    kernel.add(30, "2", device="x\x1b[31m" + "y" * 200)
    side = make(kernel, ledger)
    await turn(side, situation())
    (row,) = [row for row in ledger.of_kind("interrupt") if row.path.startswith("30 ")]
    assert row.path.isprintable()
    assert len(row.path) <= 204
    await side.restore()
    assert kernel.places()[30] == "2"


class OneInterrupt:
    """The machine's own /proc/irq with one interrupt that hardly ever fires."""

    def __init__(self, number: int) -> None:
        self._number = str(number)

    def groups(self, directory: str, most: int | None = None) -> list[str]:
        names = REAL.groups(directory, most)
        return [self._number] if directory == "/proc/irq" else names

    def __getattr__(self, name: str) -> Any:  # the rest of FileOps
        return getattr(REAL, name)


@pytest.mark.kernel
async def test_this_kernels_interrupt_leaves_an_owned_cpu_and_comes_back(ledger: Ledger) -> None:
    every = CpuSet.parse(Path("/sys/devices/system/cpu/online").read_text().strip())
    rare = [
        number
        for number in map(int, filter(str.isdecimal, os.listdir("/proc/irq")))
        if any("config" in name or "tty" in name for name in REAL.groups(f"/proc/irq/{number}"))
        and every <= CpuSet.parse(Path(f"/proc/irq/{number}/smp_affinity_list").read_text().strip())
    ]
    if len(every) < 2 or not rare or os.geteuid() != 0:
        pytest.skip("REAL KERNEL TEST NOT RUN: needs root, two CPUs and an interrupt that may be moved")
    place = Path(f"/proc/irq/{rare[0]}/smp_affinity_list")
    before, owned = place.read_text(), CpuSet([max(every)])
    side = InterruptPlaces(context(ledger, files=cast(FileOps, OneInterrupt(rare[0]))))
    now = situation(owned)
    part = InterruptPlan(avoid=owned, free=every - owned)
    try:
        await turn(side, replace(now, plan=replace(now.plan, interrupts=part)))
        if not side.status()["placed_by_kernel"]:
            assert CpuSet.parse(place.read_text().strip()) == every - owned
            assert side.status()["moved"] == 1
        await turn(side, situation(None))
        assert place.read_text() == before
    finally:
        if place.read_text() != before:
            place.write_text(before)
