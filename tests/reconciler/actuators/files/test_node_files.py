"""The kernel's memory watermarks: what is written, what remains unchanged, and the restore, also after a crash."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from cgroupfs.files import REAL, FileOps
from reconciler.actuators.base import PlanSnapshot
from reconciler.actuators.codec import read_rows
from reconciler.actuators.files.node_files import ACTUATOR, CODECS, FileAccess, NodeFiles
from reconciler.actuators.restore import restore_ledger
from reconciler.control import side_actuators
from reconciler.control.planner import plan_node
from reconciler.policies.table import PoliciesConfig
from reconciler.policies.watermarks import WatermarksConfig
from state.entry import LedgerEntry, RestoreOutcome
from state.kinds import SYSCTL
from state.ledger import Ledger
from state.memory import MIN_FREE, SCALE, NodeMemoryReading
from state.model import Hold
from state.store import Store
from tests.fakes.no_api import no_api
from tests.reconciler.actuators.acting import context, undone
from tests.reconciler.nodes import node

GIGA = 1 << 30
RICH = NodeMemoryReading(total_bytes=100 * GIGA, available_bytes=60 * GIGA, age_s=0.0)
BEFORE = {MIN_FREE: 67584, SCALE: 10}
"""As many digits as what the tests write: a file on a disk is not cut by a shorter value, as the kernel's is."""
ON = WatermarksConfig(enabled=True, scale_factor=50, min_free_factor=9)
OURS = {MIN_FREE: 94371, SCALE: 50}


class Crash(BaseException):
    """The daemon is killed."""


class Kernel:
    """/proc/sys/vm of a node root, and a daemon that can be killed at any write."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.vm = root / "proc/sys/vm"
        self.vm.mkdir(parents=True)
        self.dies_at: int | None = None
        self.refuses = 0
        self.keeps: dict[str, str] = {}
        """What the kernel makes of a text that it accepts."""
        self.steps = 0
        for name, value in BEFORE.items():
            self.set(name, value)

    def set(self, name: str, value: int) -> None:
        (self.vm / name.removeprefix("vm.")).write_text(f"{value}\n")

    def values(self) -> dict[str, int]:
        return {name: int((self.vm / name.removeprefix("vm.")).read_text()) for name in BEFORE}

    def step(self) -> None:
        """Something is about to be changed that a crash could precede."""
        if self.dies_at == self.steps:
            raise Crash
        self.steps += 1

    def write(self, directory: str, file: str, text: str) -> None:
        if self.refuses:
            raise OSError(self.refuses, os.strerror(self.refuses))
        self.step()
        REAL.write(directory, file, self.keeps.get(text, text))

    def __getattr__(self, name: str) -> Any:  # the rest of FileOps
        return getattr(REAL, name)


class DyingStore:
    """A store whose daemon may be killed before it writes."""

    def __init__(self, store: Store, kernel: Kernel) -> None:
        self._store = store
        self._kernel = kernel

    def apply(self, batch: Any) -> None:
        self._kernel.step()
        self._store.apply(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path / "node")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(str(tmp_path / "state.db"), boot="b", version="1", node="n1", history_limit=100)) as made:
        yield made


Make = Callable[[], NodeFiles]


@pytest.fixture
def make(kernel: Kernel, store: Store) -> Make:
    """The next life of the daemon."""
    # Both hand on what they do not have themselves.
    files, dying = cast(FileOps, kernel), cast(Store, DyingStore(store, kernel))
    return lambda: NodeFiles(context(Ledger(dying), root=str(kernel.root), files=files))


def situation(
    config: WatermarksConfig = ON,
    *,
    memory: NodeMemoryReading | None = RICH,
    enforce: bool = True,
    holds: dict[str, Hold] | None = None,
) -> PlanSnapshot:
    view = replace(node(), node_memory=memory)
    plan = plan_node(view, None, PoliciesConfig(watermarks=config))
    return PlanSnapshot(view=view, plan=plan, enforce=enforce, holds=holds or {})


async def turn(side: NodeFiles, now: PlanSnapshot) -> dict[str, str]:
    """One turn; the values after it."""
    side.planned(now)
    await side.sweep()
    return {name: status.state for name, status in side.statuses.get("/", {}).items()}


OFF = WatermarksConfig()


async def test_they_come_with_the_configuration_and_go_with_it(kernel: Kernel, make: Make) -> None:
    side = make()
    assert await turn(side, situation()) == dict.fromkeys(OURS, "written")
    assert kernel.values() == OURS
    assert await turn(side, situation()) == dict.fromkeys(OURS, "in place")
    assert side.problems() == []
    assert await turn(side, situation(OFF)) == {}
    assert kernel.values() == BEFORE
    assert side.status()["values"]


async def test_a_policy_that_becomes_a_dry_run_gives_them_back(kernel: Kernel, make: Make, store: Store) -> None:
    side = make()
    await turn(side, situation())
    assert await turn(side, situation(replace(ON, dry_run=True))) == dict.fromkeys(OURS, "would write")
    assert kernel.values() == BEFORE
    assert read_rows(Ledger(store), CODECS[SYSCTL]).values == {}
    assert await turn(side, situation()) == dict.fromkeys(OURS, "written")


async def test_nothing_is_written_unless_it_is_enforced(kernel: Kernel, make: Make, store: Store) -> None:
    side = make()
    hold = Hold(target=f"knob:{SCALE}", reason="mine", by="me")
    assert await turn(side, situation(enforce=False)) == dict.fromkeys(OURS, "would write")
    assert await turn(side, situation(replace(ON, dry_run=True))) == dict.fromkeys(OURS, "would write")
    assert kernel.values() == BEFORE
    assert await turn(side, situation(holds={hold.target: hold})) == {MIN_FREE: "written", SCALE: "held"}
    assert kernel.values() == {MIN_FREE: OURS[MIN_FREE], SCALE: BEFORE[SCALE]}


async def test_what_an_administrator_has_set_higher_stays(kernel: Kernel, make: Make, store: Store) -> None:
    kernel.set(SCALE, 90)
    side = make()
    assert (await turn(side, situation()))[SCALE] == "in place"
    assert kernel.values()[SCALE] == 90
    assert "never set below" in side.statuses["/"][SCALE].detail
    assert SCALE not in read_rows(Ledger(store), CODECS[SYSCTL]).values, (
        "who has written nothing has nothing to give back"
    )


@pytest.mark.parametrize("memory", [replace(RICH, available_bytes=GIGA // 100), replace(RICH, age_s=None)])
async def test_without_room_or_knowledge_they_wait(kernel: Kernel, make: Make, memory: NodeMemoryReading) -> None:
    side = make()
    assert (await turn(side, situation(memory=memory)))[SCALE] == "waiting"
    assert await turn(side, situation(memory=None)) is not None
    assert kernel.values()[SCALE] == BEFORE[SCALE]
    assert (await turn(side, situation()))[SCALE] == "written"


async def test_somebody_elses_value_is_left_and_told_and_not_given_back(kernel: Kernel, make: Make) -> None:
    side = make()
    await turn(side, situation())
    kernel.set(SCALE, 77)
    assert await turn(side, situation()) == {MIN_FREE: "in place", SCALE: "yielded"}
    assert "set to 77 by another program" in side.problems()[0]
    # Back to the original is another program's decision, too, as long as we know that ours was there.
    kernel.set(SCALE, BEFORE[SCALE])
    assert (await turn(side, situation()))[SCALE] == "yielded"
    kernel.set(SCALE, 77)
    undone = {result.file: result.undo for result in await side.restore()}
    assert undone == {MIN_FREE: RestoreOutcome.RESTORED, SCALE: RestoreOutcome.FOREIGN}
    assert kernel.values() == {MIN_FREE: BEFORE[MIN_FREE], SCALE: 77}
    assert await side.restore() == []


async def test_a_changed_wish_keeps_the_first_original(kernel: Kernel, make: Make, store: Store) -> None:
    side = make()
    await turn(side, situation())
    assert (await turn(side, situation(replace(ON, scale_factor=70))))[SCALE] == "written"
    assert kernel.values()[SCALE] == 70
    assert read_rows(Ledger(store), CODECS[SYSCTL]).values[SCALE].original == BEFORE[SCALE]
    assert [result.undo for result in await side.restore()] == [RestoreOutcome.RESTORED] * 2
    assert kernel.values() == BEFORE
    assert await side.restore("a-pod") == ()


async def test_a_refusal_is_told_and_tried_again(kernel: Kernel, make: Make) -> None:
    side = make()
    kernel.refuses = 30
    assert await turn(side, situation()) == dict.fromkeys(OURS, "refused")
    assert side.problems() == [f"{MIN_FREE}: EROFS", f"{SCALE}: EROFS"]
    kernel.refuses = 0
    assert await turn(side, situation()) == dict.fromkeys(OURS, "written")


async def test_an_original_that_is_refused_is_reported_and_tried_again(
    kernel: Kernel, make: Make, autojump_clock: trio.testing.MockClock
) -> None:
    side = make()
    await turn(side, situation())
    kernel.refuses = 30
    async with trio.open_nursery() as nursery:
        await nursery.start(side.run)
        side.planned(situation(OFF))
        while not side.problems():  # noqa: ASYNC110 - it is set, not announced
            await trio.sleep(1)
        assert side.problems() == [f"{MIN_FREE}: not restored: EROFS", f"{SCALE}: not restored: EROFS"]
        kernel.refuses = 0
        with trio.fail_after(1000):
            while kernel.values() != BEFORE or side.problems():  # noqa: ASYNC110 - it is set, not announced
                await trio.sleep(10)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("restart", [False, True])
async def test_a_value_that_the_kernel_altered_is_no_other_programs(
    kernel: Kernel, make: Make, *, restart: bool
) -> None:
    kernel.keeps = {"50": "45"}
    side = make()
    for _ in range(2):
        assert (await turn(side, situation()))[SCALE] == "refused"
        assert side.problems() == [f"{SCALE}: accepted, but it reads 45"]
        assert side.statuses["/"][SCALE].actual == "45"
    side = make() if restart else side
    assert {result.undo for result in await side.restore()} == {RestoreOutcome.RESTORED}
    assert kernel.values() == BEFORE


async def test_values_that_are_refused_one_after_another_lose_no_original(kernel: Kernel, make: Make) -> None:
    """The first value stays in force while others are recorded and refused."""
    side = make()
    await turn(side, situation())
    kernel.refuses = errno.EINVAL
    for scale in (60, 70, 80):
        assert (await turn(side, situation(replace(ON, scale_factor=scale))))[SCALE] == "refused"
    kernel.refuses = 0
    assert {result.undo for result in await make().restore()} == {RestoreOutcome.RESTORED}
    assert kernel.values() == BEFORE


async def test_a_kernel_without_them_is_told(kernel: Kernel, make: Make) -> None:
    (kernel.vm / "watermark_scale_factor").unlink()
    side = make()
    assert (await turn(side, situation()))[SCALE] == "missing"
    assert side.problems() == [f"{SCALE}: this kernel has no {SCALE}"]


@pytest.mark.parametrize("daemon", [True, False], ids=["by the next daemon", "without a daemon"])
@pytest.mark.parametrize("second", [False, True], ids=["first values", "changed values"])
async def test_a_crash_at_any_step_is_undone(
    kernel: Kernel, make: Make, store: Store, *, daemon: bool, second: bool
) -> None:
    steps = 0
    while True:
        for name, value in BEFORE.items():
            kernel.set(name, value)
        kernel.dies_at, side = None, make()
        if second:
            await turn(side, situation(replace(ON, scale_factor=30)))
        kernel.steps, kernel.dies_at = 0, steps
        try:
            await turn(side, situation())
            finished = True
        except Crash:
            finished = False
        kernel.dies_at = None
        if daemon:
            undone = list(await make().restore())
        else:
            ledger = Ledger(store)
            table = side_actuators.restore_table_without_daemon(str(kernel.root), ledger, None, no_api)
            undone = await restore_ledger(ledger, table, side_actuators.codec_of)
        assert all(result.ok for result in undone), (steps, undone)
        assert kernel.values() == BEFORE, steps
        assert read_rows(Ledger(store), CODECS[SYSCTL]).values == {}
        if finished:
            break
        steps += 1
    assert steps >= 2


@pytest.mark.parametrize("at", range(4))
async def test_a_crash_at_any_step_is_gone_on_from(kernel: Kernel, make: Make, at: int) -> None:
    kernel.dies_at = at
    with pytest.raises(Crash):
        await turn(make(), situation())
    kernel.dies_at = None
    side = make()
    assert set((await turn(side, situation())).values()) <= {"written", "in place"}
    assert kernel.values() == OURS
    assert [result.undo for result in await side.restore()] == [RestoreOutcome.RESTORED] * 2
    assert kernel.values() == BEFORE


async def test_a_row_of_another_boot_tells_of_nothing(kernel: Kernel, make: Make, store: Store, tmp_path: Path) -> None:
    await turn(make(), situation())
    with closing(Store(str(tmp_path / "state.db"), boot="c", version="1", node="n1", history_limit=100)) as later:
        assert undone(ACTUATOR, Ledger(later), root=str(kernel.root)) == []


async def test_it_acts_when_its_wish_changes_and_each_minute(
    kernel: Kernel, make: Make, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    side = make()
    await nursery.start(side.run)
    side.planned(situation(memory=None))
    await trio.sleep(1)
    assert kernel.values() == BEFORE
    side.planned(situation())
    await trio.sleep(1)
    assert kernel.values() == OURS
    kernel.set(SCALE, 77)
    side.planned(situation())
    await trio.sleep(1)
    assert side.problems() == [], "a look at the pods is no reason"
    await trio.sleep(60)
    assert "another program" in side.problems()[0]


async def test_what_was_only_shown_is_no_more_at_once_when_it_is_switched_off(
    make: Make, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    side = make()
    await nursery.start(side.run)
    side.planned(situation(enforce=False))
    await trio.sleep(1)
    assert side.statuses
    side.planned(situation(OFF, enforce=False))
    await trio.sleep(1)
    assert not side.statuses


@pytest.mark.parametrize("name", [".tmp.w.file", "../w", "vm/../../w", "w", ""])
async def test_a_row_with_a_name_of_its_own_is_never_a_path(
    kernel: Kernel, make: Make, store: Store, tmp_path: Path, name: str
) -> None:
    for place in (tmp_path / "w", tmp_path / "node/proc/sys/w", kernel.vm / "file"):
        place.write_text("7\n")
    row = LedgerEntry(
        kind=SYSCTL, controller="", path="/", file=name, knob=name, original="5", ours=("7",), wanted="7", policy="x"
    )
    Ledger(store).record([row], [], kind="gone")
    done = undone(ACTUATOR, Ledger(store), root=str(kernel.root), files=kernel)
    done += await make().restore()
    assert kernel.steps == 0, "nothing is written"
    assert not [result for result in done if result.ok]


@pytest.mark.kernel
def test_this_kernel_takes_what_it_has() -> None:
    """The machine keeps its values: each is written over itself."""
    access = FileAccess("/", REAL)
    for name in BEFORE:
        there = access.value(name)
        assert isinstance(there, int)
        if not os.access(f"/proc/sys/{name.replace('.', '/')}", os.W_OK):
            pytest.skip("REAL KERNEL TEST NOT RUN: /proc/sys/vm is not writable here")
        assert access.set(name, there) == ""
        assert access.value(name) == there


async def test_a_value_that_is_written_while_the_original_becomes_durable_is_the_original(
    kernel: Kernel, make: Make, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, apply, fired = MIN_FREE, store.apply, list[str]()

    def slow(batch: Any) -> None:
        apply(batch)
        if not fired:
            fired.append(name)
            kernel.set(name, BEFORE[name] + 1)

    monkeypatch.setattr(store, "apply", slow)
    side = make()
    assert (await turn(side, situation()))[name] == "due"
    assert kernel.values()[name] == BEFORE[name] + 1
    assert (await turn(side, situation()))[name] == "written"
    assert kernel.values() == OURS
    await turn(side, situation(OFF))
    assert kernel.values() == {**BEFORE, name: BEFORE[name] + 1}
