import errno
import os
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from cgroupfs.errors import (
    CgroupBusyError,
    CgroupChangedError,
    CgroupGoneError,
    CgroupRefusedError,
    CgroupUnderWayError,
)
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG
from cgroupfs.plan import KnobChange, WriteStep, order_changes
from cgroupfs.writer import YIELD_S, KernelWriter, StepOutcome
from tests.fakes.kernel import FakeKernel, Mode
from tests.real_cgroups import make_root, remove_tree

GROUP = "/kubepods/pod1/c1"
MEGA = 1 << 20


class FakePlaces:
    def __init__(self, kernel: FakeKernel) -> None:
        self._mounts = {c.name: tree.mount for tree in kernel.trees for c in tree.controllers}

    def directory(self, controller: str, group_path: str) -> str:
        return self._mounts[controller] + group_path

    def identity_directory(self, group_path: str) -> str:
        return self.directory("cpuset", group_path)


class Slow:
    """Another's file operations, with writes that take real time and record their thread."""

    def __init__(self, inner: FileOps, seconds: float) -> None:
        self._inner = inner
        self._seconds = seconds
        self.inode = inner.inode
        self.read = inner.read
        self.groups = inner.groups
        self.files = inner.files
        self.writers: list[tuple[str, bool]] = []

    def write(self, directory: str, file: str, text: str) -> None:
        self.writers.append((file, threading.current_thread() is threading.main_thread()))
        time.sleep(self._seconds)
        self._inner.write(directory, file, text)


def machine(mode: Mode = "v1") -> tuple[FakeKernel, FakePlaces]:
    kernel = FakeKernel(mode)
    kernel.make_group(GROUP)
    return kernel, FakePlaces(kernel)


def step(
    knob: str,
    text: str,
    *,
    version: int = 1,
    slow: bool = False,
    guard: str | None = None,
    reclaim: bool = False,
    anyway: bool = False,
) -> WriteStep:
    entry = CATALOG[knob]
    return WriteStep(
        path=GROUP,
        knob=knob,
        file=entry.file(version) or "",
        controller=entry.controller,
        version=version,
        text=text,
        slow=slow,
        guard=guard,
        reclaim=reclaim,
        anyway=anyway,
    )


def test_a_step_is_written_and_read_back() -> None:
    kernel, places = machine()
    outcome = KernelWriter(places, files=kernel, clock=lambda: 7.0).write(step("cpu.set", "0,1"))
    assert (outcome.ok, outcome.wrote, outcome.before, outcome.after, outcome.at) == (True, True, "0-3", "0-1", 7.0)
    assert outcome.error is None


def test_a_value_that_is_there_already_is_not_written_and_counts_as_ok() -> None:
    kernel, places = machine()
    writer = KernelWriter(places, files=kernel)
    kernel.writes.clear()
    for same in (step("cpu.set", "0,1,2,3"), step("memory.max", "-1"), step("cpu.quota", "-1")):
        outcome = writer.write(same)
        assert (outcome.ok, outcome.wrote, outcome.before) == (True, False, outcome.after)
    assert kernel.writes == []


def test_a_refused_value_is_an_outcome_with_its_errno() -> None:
    kernel, places = machine()
    kernel.write(places.directory("cpuset", "/kubepods/pod1"), "cgroup.clone_children", "0")
    kernel.write(places.directory("cpuset", GROUP), "cpuset.cpus", "1")
    kernel.write(places.directory("cpuset", "/kubepods/pod1"), "cpuset.cpus", "1")
    outcome = KernelWriter(places, files=kernel).write(step("cpu.set", "0-1"))
    assert (outcome.ok, outcome.wrote, outcome.after) == (False, False, "1")
    assert isinstance(outcome.error, CgroupRefusedError)
    assert outcome.error.errno == errno.EACCES


@pytest.mark.parametrize("version", [1, 2])
def test_a_weight_that_the_idle_class_forbids_is_refused_with_that_reason(version: int) -> None:
    kernel, places = machine("v1" if version == 1 else "v2")
    kernel.write(places.directory("cpu", GROUP), "cpu.idle", "1")
    outcome = KernelWriter(places, files=kernel).write(step("cpu.weight", "20", version=version))
    assert isinstance(outcome.error, CgroupRefusedError)
    assert str(outcome.error).endswith("cpu.idle of this group is 1, so the kernel takes no cpu.weight (EINVAL)")
    kernel.write(places.directory("cpu", GROUP), "cpu.idle", "0")
    outcome = KernelWriter(places, files=kernel).write(step("cpu.weight", "0", version=version))
    assert "cpu.idle" not in str(outcome.error)


async def test_a_text_that_the_file_cannot_hold_is_another_one_and_costs_no_other_step() -> None:
    """As of a file of another kind that is mounted over it."""
    kernel, places = machine()
    directory = places.directory("cpu", GROUP)

    class Covered(Slow):
        def read(self, where: str, file: str) -> str:
            return "not a number\n" if (where, file) == (directory, "cpu.shares") else kernel.read(where, file)

    covered = Covered(kernel, 0.0)
    covered.read = Covered.read.__get__(covered)  # type: ignore[method-assign]
    writer = KernelWriter(places, files=covered)
    steps = [replace(step("cpu.weight", "512"), expects="1024"), step("pids.max", "100")]
    first, second = await writer.perform(steps)
    assert isinstance(first.error, CgroupChangedError)
    assert "'not a number' by now" in str(first.error)
    assert (second.ok, second.after) == (True, "100")


def test_busy_and_gone_are_told_apart() -> None:
    kernel, places = machine()
    kernel.charge(places.directory("memory", GROUP), anon=8 * MEGA)
    writer = KernelWriter(places, files=kernel)
    busy = writer.write(step("memory.max", str(MEGA)))
    assert isinstance(busy.error, CgroupBusyError)
    assert busy.after == busy.before == "9223372036854771712"
    kernel.remove_group(GROUP)
    gone = writer.write(step("memory.max", str(MEGA)))
    assert isinstance(gone.error, CgroupGoneError)
    assert (gone.ok, gone.before) == (False, None)


def test_a_group_with_another_inode_in_the_watched_hierarchy_is_gone_and_left_alone() -> None:
    kernel, places = machine()
    inode = kernel.inode(places.identity_directory(GROUP))
    writer = KernelWriter(places, files=kernel)
    assert writer.write(step("cpu.weight", "2"), inode).ok
    kernel.remove_group(GROUP)
    kernel.make_group(GROUP)
    outcome = writer.write(step("cpu.weight", "2"), inode)
    assert isinstance(outcome.error, CgroupGoneError)
    assert kernel.read(places.directory("cpu", GROUP), "cpu.shares") == "1024\n"


def test_a_value_that_the_kernel_changes_on_the_way_in_is_not_ok() -> None:
    kernel, places = machine()

    class Clamping(Slow):
        def write(self, directory: str, file: str, text: str) -> None:
            super().write(directory, file, "77")

    outcome = KernelWriter(places, files=Clamping(kernel, 0)).write(step("cpu.weight", "9"))
    assert (outcome.ok, outcome.wrote, outcome.after) == (False, True, "77")
    assert "accepted, but the value is '77'" in str(outcome.error)


def test_a_v2_limit_below_the_memory_in_use_is_not_written_even_if_the_plan_says_so() -> None:
    kernel, places = machine("v2")
    directory = places.directory("memory", GROUP)
    pid = kernel.spawn()
    kernel.write(directory, "cgroup.procs", str(pid))
    kernel.charge(directory, anon=8 * MEGA)
    guarded = step("memory.max", str(4 * MEGA), version=2, guard="memory.current")
    outcome = KernelWriter(places, files=kernel).write(guarded)
    assert isinstance(outcome.error, CgroupBusyError)
    assert "the OOM killer would run" in str(outcome.error)
    assert kernel.killed == []
    assert kernel.read(directory, "memory.max") == "max\n"
    fits = step("memory.max", str(9 * MEGA), version=2, guard="memory.current")
    assert KernelWriter(places, files=kernel).write(fits).ok


@pytest.mark.parametrize(
    ("anon", "cache", "limit", "asked", "ok"),
    [
        pytest.param(8, 100, 10, [32, 32, 32, 2], True, id="the page cache is enough"),
        pytest.param(10, 0, 4, [6, 6], False, id="nothing can be reclaimed"),
        pytest.param(8, 3, 4, [7, 4, 4], False, id="not enough can"),
        pytest.param(3, 0, 4, [], True, id="it fits"),
    ],
)
def test_a_v2_limit_that_may_reclaim_takes_memory_first_in_chunks_and_never_kills(
    anon: int, cache: int, limit: int, asked: list[int], ok: bool
) -> None:
    kernel, places = machine("v2")
    directory = places.directory("memory", GROUP)
    kernel.write(directory, "cgroup.procs", str(kernel.spawn()))
    kernel.charge(directory, anon=anon * MEGA, cache=cache * MEGA)
    kernel.writes.clear()
    lower = step("memory.max", str(limit * MEGA), version=2, guard="memory.current", reclaim=True)
    outcome = KernelWriter(places, files=kernel).write(lower)
    assert outcome.ok is ok
    assert [int(text) // MEGA for path, text, _ in kernel.writes if path.endswith("memory.reclaim")] == asked
    assert kernel.killed == []
    assert isinstance(outcome.error, CgroupBusyError) is not ok


@pytest.mark.parametrize(
    ("anon", "cache", "release", "asked"),
    [
        pytest.param(8, 100, (6, 18), [32, 32, 32, 2], id="the page cache is enough"),
        pytest.param(30, 0, (6, 18), [20, 20], id="nothing can be reclaimed"),
        pytest.param(8, 100, (5, 10), [], id="the kernel does it within the write"),
        pytest.param(3, 0, (6, 18), [], id="it fits"),
    ],
)
def test_a_v2_bound_that_kills_nobody_takes_memory_in_chunks_first_and_is_written_anyway(
    anon: int, cache: int, release: tuple[int, int], asked: list[int]
) -> None:
    kernel = FakeKernel("v2", release=release)
    kernel.make_group(GROUP)
    places = FakePlaces(kernel)
    directory = places.directory("memory", GROUP)
    kernel.write(directory, "cgroup.procs", str(kernel.spawn()))
    kernel.charge(directory, anon=anon * MEGA, cache=cache * MEGA)
    kernel.writes.clear()
    high = step("memory.high", str(10 * MEGA), version=2, guard="memory.current", reclaim=True, anyway=True)
    assert KernelWriter(places, files=kernel).write(high).ok
    accepted = [int(text) // MEGA for path, text, _ in kernel.writes if path.endswith("memory.reclaim")]
    assert (accepted if release >= (5, 19) else []) == asked
    assert kernel.read(directory, "memory.high") == f"{10 * MEGA}\n"
    assert kernel.read(directory, "memory.current") == f"{max(anon, min(10, anon + cache)) * MEGA}\n"
    assert kernel.killed == []


def test_without_memory_reclaim_a_limit_below_usage_is_busy() -> None:
    kernel = FakeKernel("v2", release=(5, 10))
    kernel.make_group(GROUP)
    places = FakePlaces(kernel)
    kernel.charge(places.directory("memory", GROUP), cache=8 * MEGA)
    lower = step("memory.max", str(4 * MEGA), version=2, guard="memory.current", reclaim=True)
    outcome = KernelWriter(places, files=kernel).write(lower)
    assert isinstance(outcome.error, CgroupBusyError)
    assert "no more memory can be reclaimed" in str(outcome.error)


async def test_a_whole_plan_is_performed_in_order_and_every_step_has_an_outcome() -> None:
    kernel, places = machine()
    plan = order_changes(
        [
            KnobChange(path=GROUP, knob="cpu.quota", have=None, want=5_000),
            KnobChange(path=GROUP, knob="memory.max", have=None, want=8 * MEGA),
            KnobChange(path=GROUP, knob="pids.max", have=None, want=9),
        ],
        {},
        {"cpu": 1, "memory": 1, "pids": 1},
    )
    inode = kernel.inode(places.identity_directory(GROUP))
    outcomes = await KernelWriter(places, files=kernel).perform(plan.steps, {GROUP: inode})
    assert [outcome.step for outcome in outcomes] == list(plan.steps)
    assert all(outcome.ok and outcome.wrote for outcome in outcomes)


async def test_slow_steps_leave_the_loop_and_fast_ones_do_not() -> None:
    kernel, places = machine()
    files = Slow(kernel, 0)
    steps = [step("cpu.weight", "2"), step("memory.max", str(MEGA), slow=True), step("pids.max", "9")]
    outcomes = await KernelWriter(places, files=files).perform(steps)
    assert all(outcome.ok for outcome in outcomes)
    assert files.writers == [("cpu.shares", True), ("memory.limit_in_bytes", False), ("pids.max", True)]


async def test_others_run_while_many_fast_steps_are_performed() -> None:
    kernel, places = machine()
    files = Slow(kernel, 0.0005)
    seen: list[int] = []

    async def other() -> None:
        while True:
            seen.append(len(files.writers))
            await trio.lowlevel.checkpoint()

    steps = [step("cpu.weight", str(2 + number % 2)) for number in range(60)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        outcomes = await KernelWriter(places, files=files).perform(steps)
        nursery.cancel_scope.cancel()
    assert all(outcome.wrote for outcome in outcomes)
    # A write takes 0.5 ms at least; trio may run the other one first in one turn and last in the next.
    assert max(after - before for before, after in pairwise(seen)) <= 2 * (1000 * YIELD_S / 0.5 + 1)


async def test_cancellation_waits_until_everything_is_written_and_the_outcomes_are_kept() -> None:
    kernel, places = machine()
    kept: list[bool] = []

    async def work() -> None:
        steps = [step("cpu.weight", str(2 + number % 2)) for number in range(30)]
        outcomes = await KernelWriter(places, files=Slow(kernel, 0.0005)).perform(steps)
        kept.extend(outcome.ok for outcome in outcomes)

    with trio.CancelScope() as scope:
        scope.cancel()
        await work()
    assert kept == [True] * 30


class Held(Slow):
    """Slow writes that end when the test says so."""

    def __init__(self, inner: FileOps) -> None:
        super().__init__(inner, 0)
        self.go_on = threading.Event()
        self.entered = threading.Event()

    def write(self, directory: str, file: str, text: str) -> None:
        if not self.go_on.is_set() and threading.current_thread() is not threading.main_thread():
            self.entered.set()
            assert self.go_on.wait(60)
        super().write(directory, file, text)


async def held(
    writer: KernelWriter, files: Held, clock: MockClock, seconds: float, *steps: WriteStep
) -> list[StepOutcome]:
    """Outcomes of steps, of which one is held in the kernel for so long."""
    clock.rate = 1.0
    outcomes: list[StepOutcome] = []

    async def perform() -> None:
        outcomes.extend(await writer.perform(steps))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(perform)
        assert await trio.to_thread.run_sync(files.entered.wait, 60)
        clock.jump(seconds)
    return outcomes


async def test_the_deadline_cuts_off_what_hangs_and_says_so_for_each_step(mock_clock: MockClock) -> None:
    kernel, places = machine()
    files = Held(kernel)
    writer = KernelWriter(places, files=files, deadline_s=60)
    hanging = [step("memory.max", str(MEGA), slow=True), step("memory.max", str(2 * MEGA), slow=True)]
    outcomes = await held(writer, files, mock_clock, 60, *hanging, step("cpu.weight", "2"))
    assert [type(outcome.error) for outcome in outcomes] == [CgroupBusyError] * 3
    assert "not done within 60 s" in str(outcomes[0].error)
    files.go_on.set()
    with trio.fail_after(60):
        await writer.quiet()
    # The thread that was given up finishes the write it was in, and takes no further step.
    assert [file for file, _ in files.writers] == ["memory.limit_in_bytes"]
    assert kernel.read(places.directory("cpu", GROUP), "cpu.shares") == "1024\n"


async def test_what_takes_long_is_left_under_way_and_told_when_it_is_done(mock_clock: MockClock) -> None:
    kernel, places = machine()
    other = "/kubepods/pod1/c2"
    kernel.make_group(other)
    files = Held(kernel)
    writer = KernelWriter(places, files=files, patience_s=1000, deadline_s=5000)
    lowered = step("memory.max", str(8 * MEGA), slow=True)
    elsewhere = replace(lowered, path=other)
    outcomes = await held(writer, files, mock_clock, 1000, step("cpu.weight", "2"), lowered, elsewhere)
    assert [type(outcome.error) for outcome in outcomes] == [type(None), CgroupUnderWayError, CgroupUnderWayError]
    assert "still in progress in the kernel" in str(outcomes[1].error)
    assert f"waiting for memory.limit_in_bytes of {GROUP}" in str(outcomes[2].error)
    assert writer.finished() == []
    # Meanwhile others go on; the lane and the file that the kernel is at are left alone.
    with trio.move_on_after(60) as scope:
        outcomes = await writer.perform([step("cpu.weight", "3"), step("memory.max", "-1"), elsewhere])
    assert not scope.cancel_called
    assert [outcome.ok for outcome in outcomes] == [True, False, False]
    files.go_on.set()
    with trio.fail_after(60):
        await writer.quiet()
    (late,) = writer.finished()
    assert (late.step, late.ok, late.after) == (lowered, True, str(8 * MEGA))
    assert writer.finished() == []
    outcomes = await writer.perform([step("memory.max", "-1"), elsewhere])
    assert [outcome.ok for outcome in outcomes] == [True, True]


async def test_pages_that_move_are_waited_for() -> None:
    kernel, places = machine()
    writer = KernelWriter(places, files=Slow(kernel, 0.1), patience_s=0.01)
    outcomes = await writer.perform([step("cpu.mems", "0", slow=True), step("cpu.set", "1", slow=True)])
    assert [outcome.ok for outcome in outcomes] == [True, True]
    (limit,) = await writer.perform([step("memory.max", str(8 * MEGA), slow=True)])
    assert isinstance(limit.error, CgroupUnderWayError)
    with trio.fail_after(60):
        await writer.quiet()


async def test_what_is_under_way_for_too_long_is_stuck(mock_clock: MockClock) -> None:
    kernel, places = machine()
    files = Held(kernel)
    writer = KernelWriter(places, files=files, deadline_s=200, patience_s=50)
    lowered = step("memory.max", str(8 * MEGA), slow=True)
    (first,) = await held(writer, files, mock_clock, 50, lowered)
    assert isinstance(first.error, CgroupUnderWayError)
    mock_clock.jump(200)
    (second,) = await writer.perform([lowered])
    assert not isinstance(second.error, CgroupUnderWayError)
    assert "not done within 200 s" in str(second.error)
    files.go_on.set()
    with trio.fail_after(60):
        await writer.quiet()


def test_a_period_and_its_quota_in_one_v2_line_are_read_back_together() -> None:
    kernel, places = machine("v2")
    outcome = KernelWriter(places, files=kernel).write(step("cpu.period", "5000 50000", version=2))
    assert (outcome.ok, outcome.after) == (True, "5000 50000")
    again = KernelWriter(places, files=kernel).write(step("cpu.period", "6000 50000", version=2))
    assert again.wrote


@pytest.fixture
def real_group() -> Iterator[str]:
    path = make_root("cpu", f"kwrite-writer-{os.getpid()}")
    try:
        yield path
    finally:
        remove_tree(path)


@pytest.mark.kernel
async def test_the_writer_on_the_real_kernel(real_group: str) -> None:
    places = Hierarchy.detect()
    writer = KernelWriter(places)
    group = f"/{os.path.basename(real_group)}"
    plan = order_changes(
        [
            KnobChange(path=group, knob="cpu.quota", have=None, want=5_000),
            KnobChange(path=group, knob="cpu.weight", have=1_024, want=2),
        ],
        {},
        places.versions(),
    )
    outcomes = await writer.perform(plan.steps)
    assert [(outcome.ok, outcome.wrote, outcome.after) for outcome in outcomes] == [
        (True, True, "2"),
        (True, True, "5000"),
    ]
    assert REAL.read(real_group, "cpu.cfs_quota_us") == "5000\n"
    again = await writer.perform(plan.steps)
    assert [(outcome.ok, outcome.wrote) for outcome in again] == [(True, False)] * 2
