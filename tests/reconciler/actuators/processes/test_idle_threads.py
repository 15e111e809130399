"""The idle class on this machine's own threads: set, inherited, kept and restored, also after the agent was killed.

Longer than other modules because each case begins with the same live threads and ends with the same check: whose
class it is.
"""

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.errors import StoreError
from cgroupfs.files import REAL, RealFiles
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.scheduling import IDLE, OTHER, REAL_SCHEDULER, Scheduler, policy_number, policy_text
from reconciler.actuators import base
from reconciler.actuators.base import ActuatorContext
from reconciler.actuators.cgroup.fastpath import FastPath, FastResult
from reconciler.actuators.codec import read_rows
from reconciler.actuators.processes import idle_threads, process_values
from reconciler.actuators.processes.idle_threads import ACTUATOR, CODEC, IdleThreads
from reconciler.actuators.processes.process_values import MemberValues
from reconciler.actuators.processes.value_records import ContainerRecord
from reconciler.policies.idle_class import IdleClassConfig
from reconciler.policies.table import PoliciesConfig
from state.entry import RestoreOutcome, RestoreResult
from state.ledger import Ledger
from state.model import Hold, Phase, PodClass
from state.store import Store, StoreBatch
from tests.reconciler.actuators.acting import context
from tests.reconciler.actuators.processes.live import Killed, Live, Mortal, live_container
from tests.reconciler.nodes import node
from tests.until import until

pytestmark = pytest.mark.kernel
BATCH, FIFO = 3, 1
CONTAINER = "id-main"
ON = IdleClassConfig(enabled=True, threads=True)
TALKER = """
import os, subprocess, sys, threading
wait = threading.Event()
print("ready", flush=True)
for line in sys.stdin:
    match line.strip():
        case "thread":
            thread = threading.Thread(target=wait.wait, daemon=True)
            thread.start()
            print(thread.native_id, flush=True)
        case "init":
            with open("/proc/self/comm", "w") as file:
                file.write("runc:[2:INIT]")
            print(os.getpid(), flush=True)
        case "exec":
            print(subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL).pid, flush=True)
"""
"""Starts a thread or a program, or takes the name of runc's init, and prints the id."""
CHAIN = """
import os, sys, time
sys.stdin.readline()
end = time.monotonic() + 60
while os.path.exists(sys.argv[1]) and time.monotonic() < end:
    if os.fork():
        os._exit(0)
"""
"""Forks a child and exits, again and again, until a file is removed."""
WORK = "while True: sum(range(10_000))"


class Idle(Live[IdleThreads]):
    """With one actuator for the threads' policy, and its fast path."""

    def __init__(self, hierarchy: Hierarchy, root: str, path: Path) -> None:
        self.results: list[FastResult] = []
        self.fastpath = FastPath(self.results.append)
        super().__init__(hierarchy, root, path, self._idle_threads)

    def _idle_threads(self, given: ActuatorContext) -> IdleThreads:
        self.fastpath = FastPath(self.results.append)
        return IdleThreads(replace(given, fastpath=self.fastpath))

    def process(self, policy: int = OTHER, name: str = "main") -> int:
        pid = self.start().pid
        os.sched_setscheduler(pid, policy, os.sched_param(1 if policy == FIFO else 0))
        return self.enter(pid, name)

    def talker(self) -> subprocess.Popen[bytes]:
        popen = self.start((sys.executable, "-c", TALKER))
        assert popen.stdout is not None
        popen.stdout.readline()
        self.enter(popen.pid)
        return popen

    async def sweep(self, config: IdleClassConfig = ON, **how: Any) -> None:  # as `Live.situation`
        await self.apply(self.situation(PoliciesConfig(idle_class=config), **how))

    def create(self, **how: Any) -> None:  # as `Live.situation`
        """A pass sees the container in creation."""
        self.actuator.planned(self.situation(PoliciesConfig(idle_class=ON), phase=Phase.CREATING, **how))

    async def prepare(self, **how: Any) -> None:  # as `Live.situation`
        self.create(**how)
        await self.actuator.prepare()

    def rows(self) -> set[str]:
        return set(read_rows(Ledger(self.store), CODEC).containers)

    def standing(self, name: str = "main") -> tuple[str, str, str | None]:
        status = self.actuator.statuses[self.group(name)]["thread.policy"]
        return status.state, status.wanted, status.actual


def ask(popen: subprocess.Popen[bytes], what: str) -> int:
    assert popen.stdin is not None
    assert popen.stdout is not None
    popen.stdin.write(what.encode() + b"\n")
    popen.stdin.flush()
    return int(popen.stdout.readline())


def policies(*tids: int) -> list[int]:
    return [REAL_SCHEDULER.policy(tid) for tid in tids]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Idle]:
    with live_container("idle", tmp_path, Idle) as made:
        yield made


async def test_every_thread_gets_the_class_and_its_own_policy_back(live: Idle) -> None:
    popen = live.talker()
    thread, other = ask(popen, "thread"), live.process()
    await live.sweep()
    assert policies(popen.pid, thread, other) == [IDLE] * 3
    assert live.actuator.status()["containers"] == {live.main: "idle"}
    assert live.standing() == ("written", "idle", "idle")
    await live.sweep()
    assert live.standing() == ("in place", "idle", "idle")
    await live.sweep(IdleClassConfig())
    assert policies(popen.pid, thread, other) == [OTHER] * 3
    assert live.rows() == set()


async def test_threads_and_programs_started_below_inherit_it_and_get_the_usual_policy_back(live: Idle) -> None:
    popen = live.talker()
    await live.sweep()
    thread, child = ask(popen, "thread"), ask(popen, "exec")
    assert policies(thread, child) == [IDLE, IDLE]
    (done,) = await live.actuator.restore()
    assert (done.undo, policies(popen.pid, thread, child)) == (RestoreOutcome.RESTORED, [OTHER] * 3)


async def test_a_process_that_came_from_outside_is_found_by_the_next_sweep(live: Idle) -> None:
    live.process()
    await live.sweep()
    probe = live.process()
    assert policies(probe) == [OTHER]
    await live.sweep()
    assert policies(probe) == [IDLE]


@pytest.mark.parametrize("daemon", [True, False], ids=["by the daemon", "without a daemon"])
async def test_threads_in_groups_that_a_container_has_made_count_as_its_own(live: Idle, daemon: bool) -> None:
    first, inner = live.process(), live.process()
    live.move(inner, "docker/inner")
    await live.sweep()
    assert policies(first, inner) == [IDLE, IDLE]
    done = await live.actuator.restore() if daemon else live.undone(ACTUATOR)
    assert [result.undo for result in done] == [RestoreOutcome.RESTORED]
    assert policies(first, inner) == [OTHER, OTHER]


async def test_real_time_and_earlier_idle_threads_are_left_and_counted_and_batch_is_no_way_out(live: Idle) -> None:
    usual, batch, fifo, idle = (live.process(policy) for policy in (OTHER, BATCH, FIFO, IDLE))
    await live.sweep()
    assert policies(usual, batch, fifo, idle) == [IDLE, IDLE, FIFO, IDLE]
    await live.sweep()
    assert live.actuator.status()["kept"] == {live.main: 2}
    live.crash()
    assert all(result.ok for result in await live.actuator.restore())
    assert policies(usual, batch, fifo, idle) == [OTHER, BATCH, FIFO, IDLE]


async def test_threads_of_groups_that_a_tenant_nests_deeply_get_the_class_and_give_it_back(live: Idle) -> None:
    """A process that is in the class takes it along into any group."""
    early, late = live.process(), live.process()
    deep = "/".join("abcdefghijkl")
    live.move(early, deep)
    await live.sweep()
    live.move(late, deep)
    assert policies(early, late) == [IDLE, IDLE]
    await live.sweep(IdleClassConfig())
    assert (policies(early, late), live.rows()) == ([OTHER, OTHER], set())


async def test_groups_without_number_are_not_listed_in_the_event_loop(
    live: Idle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few threads, and as many groups as a tenant likes: 20 us each."""
    pid = live.process()
    await live.sweep()
    for number in range(600):
        os.mkdir(f"{live.hierarchy.trigger_directory(live.main)}/g{number}")
    read, in_loop = RealFiles.read, [0]

    def counted(files: RealFiles, directory: str, file: str) -> str:
        in_loop[0] += threading.current_thread() is threading.main_thread()
        return read(files, directory, file)

    monkeypatch.setattr(RealFiles, "read", counted)
    await live.sweep()
    assert in_loop[0] < 300
    in_loop[0] = 0
    await live.sweep()
    assert in_loop[0] < 10
    assert policies(pid) == [IDLE]


def policies_inside(live: Idle, number: int) -> set[int]:
    """The policies of so many readings of threads in the container that were still there when they were read."""
    seen: list[int] = []
    directory = live.hierarchy.trigger_directory(live.main)
    deadline = time.monotonic() + 60
    while len(seen) < number and time.monotonic() < deadline:
        for pid in REAL.read(directory, "cgroup.procs").split():
            with suppress(ProcessLookupError):
                seen.append(REAL_SCHEDULER.policy(int(pid)))
    assert len(seen) >= number
    return set(seen)


@pytest.mark.parametrize("own", [OTHER, BATCH])
async def test_a_chain_of_short_forks_gets_the_class_in_one_sweep(live: Idle, own: int, tmp_path: Path) -> None:
    on = tmp_path / "on"
    on.touch()
    popen = live.start((sys.executable, "-c", CHAIN, str(on)))
    os.sched_setscheduler(popen.pid, own, os.sched_param(0))
    live.enter(popen.pid)
    assert popen.stdin is not None
    popen.stdin.write(b"go\n")
    popen.stdin.flush()
    popen.wait(10)
    try:
        assert policies_inside(live, 20) == {own}
        await live.sweep()
        assert policies_inside(live, 100) == {IDLE}
    finally:
        on.unlink()
        await until(lambda: not REAL.read(live.hierarchy.trigger_directory(live.main), "cgroup.procs"))


class Links:
    """`MemberAccess` of a chain: what was listed has exited by the second listing; a set link's child inherits."""

    def __init__(self, before: int) -> None:
        self.number, self.value, self.before, self.listings = 1, OTHER, before, 0

    def ids(self, path: str) -> tuple[int, ...]:
        del path
        self.listings += 1
        self.number += 1
        # The first ones exit before they are written.
        return (self.number,)

    def value_of(self, number: int) -> int:
        if self.listings <= self.before:
            raise ProcessLookupError(number)
        return self.value

    def set_value(self, number: int, value: int) -> None:
        del number
        self.value = value


@pytest.mark.parametrize(
    ("before", "expected"), [(0, (1, 4)), (1, (1, 5)), (2, (1, 6))], ids=["first", "second", "third"]
)
def test_links_are_set_as_they_are_listed_until_three_listings_find_none(
    live: Idle, before: int, expected: tuple[int, int]
) -> None:
    members = MemberValues(idle_threads._KIND, Links(before), live.hierarchy, "/", REAL)
    assert members.set_at_once(live.main, IDLE, 100) == expected


def test_the_listings_are_bounded(live: Idle) -> None:
    links = Links(0)
    links.set_value = lambda number, value: None  # type: ignore[method-assign]
    members = MemberValues(idle_threads._KIND, links, live.hierarchy, "/", REAL)
    assert members.set_at_once(live.main, IDLE, 10) == (10, 10)
    assert members.set_at_once(live.main, IDLE, 1_000) == (64, 64)


class Members(RealFiles):
    """`MemberAccess` of one container, and the files with the start times. ``forks``: a new one at each write."""

    def __init__(self, count: int, *, forks: bool = False) -> None:
        self.values = dict.fromkeys(range(1, count + 1), IDLE)
        self.forks = forks

    def ids(self, path: str) -> tuple[int, ...]:
        del path
        return tuple(self.values)

    def value_of(self, number: int) -> int:
        return self.values[number]

    def set_value(self, number: int, value: int) -> None:
        self.values[number] = value
        if self.forks:
            self.values[len(self.values) + 1] = IDLE

    def inode(self, directory: str) -> int:
        del directory
        return 7

    def read(self, directory: str, file: str) -> str:
        del file
        return f"{directory.rpartition('/')[2]} (x) S {'1 ' * 21}"


def restored(live: Idle, members: Members) -> RestoreResult:
    record = ContainerRecord(pod_uid="", inode=7, ours=[IDLE], original=OTHER)
    return MemberValues(idle_threads._KIND, members, live.hierarchy, "/", members).restore(live.main, record)


def test_of_a_container_with_many_threads_each_is_restored(live: Idle) -> None:
    members = Members(20_001)
    assert restored(live, members).undo is RestoreOutcome.RESTORED
    assert set(members.values.values()) == {OTHER}


def test_threads_that_start_with_our_policy_all_the_time_are_no_restore_that_is_over(live: Idle) -> None:
    result = restored(live, Members(1, forks=True))
    assert result.undo is RestoreOutcome.REFUSED
    assert result.detail == "1 threads: started with it as others were restored"


async def test_a_container_whose_threads_all_have_their_own_gets_no_row(live: Idle) -> None:
    live.process(FIFO)
    await live.sweep()
    assert (live.standing()[0], live.rows()) == ("yielded", set())


async def test_what_one_sweep_reads_is_bounded_and_the_next_begins_with_the_others(
    live: Idle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_values, "_MOST_READ", 2)
    live.add("side")
    main, side = [live.process() for _ in range(2)], live.process(name="side")
    await live.sweep()
    assert (policies(*main, side), live.standing("side")[0]) == ([IDLE, IDLE, OTHER], "waiting")
    await live.sweep()
    assert (policies(side), live.standing("side")[0]) == ([IDLE], "written")


@pytest.mark.parametrize("own", [IDLE, BATCH])
async def test_many_threads_with_their_own_policy_keep_no_other_out(
    live: Idle, monkeypatch: pytest.MonkeyPatch, own: int
) -> None:
    monkeypatch.setattr(process_values, "_MOST_ODD", 1)
    pids = [live.process(policy) for policy in (own, own, OTHER)]
    await live.sweep()
    assert policies(*pids) == [IDLE, IDLE, IDLE]
    assert live.standing()[0] == "written"
    live.crash()
    assert all(result.ok for result in await live.actuator.restore())
    restored = policies(*pids)
    assert (restored.count(own), restored[-1]) == (1, OTHER), "as many as have a row have their own again"


def sweeps(live: Idle) -> int:
    return int(str(live.actuator.status()["sweeps"]))


@pytest.mark.parametrize("before", [0, 1])
async def test_what_enters_a_new_container_without_an_event_gets_the_class_at_once(live: Idle, before: int) -> None:
    """Equal pods that appear one after the other, too: each new container counts, not a new plan."""
    live.add("side")
    async with trio.open_nursery() as nursery:
        await nursery.start(live.actuator.run)
        live.actuator.planned(live.situation(PoliciesConfig(idle_class=ON)))
        await until(lambda: sweeps(live) > before)
        pid = live.process()
        with trio.move_on_after(2) as waiting:
            while policies(pid) != [IDLE]:  # noqa: ASYNC110
                await trio.sleep(0.005)
        nursery.cancel_scope.cancel()
    assert not waiting.cancelled_caught, "seconds before the periodic search"


def test_what_enters_within_half_a_second_waits_for_no_more_than_80_ms() -> None:
    times = (0.0, *idle_threads._EARLY_S)
    assert max(after - before for before, after in pairwise(times) if before < 0.5) <= 0.0801


@contextmanager
def listed(live: Idle) -> Iterator[list[str]]:
    """The containers whose threads are listed within the block."""
    seen: list[str] = []
    access = live.actuator._members._access
    listing = access.ids

    def ids(path: str) -> Iterable[int]:
        seen.append(path)
        return listing(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(access, "ids", ids)
        yield seen


@asynccontextmanager
async def sweeping(live: Idle) -> AsyncIterator[None]:
    """The actuator runs and has swept once."""
    async with trio.open_nursery() as nursery:
        await nursery.start(live.actuator.run)
        live.actuator.planned(live.situation(PoliciesConfig(idle_class=ON)))
        await until(lambda: sweeps(live) >= 1)
        yield
        nursery.cancel_scope.cancel()


async def test_only_the_containers_that_a_plan_changes_are_swept(live: Idle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IdleThreads, "_enters_unseen", lambda *_: False)
    live.process()
    same = partial(live.situation, PoliciesConfig(idle_class=ON))
    async with sweeping(live):
        with listed(live) as seen:
            live.actuator.planned(same())
            await trio.sleep(0.1)
            assert not seen, "the plan wants the same"
            live.add("next")
            pid = live.process(name="next")
            live.actuator.planned(same())
            await until(lambda: policies(pid) == [IDLE])
            assert set(seen) == {live.group("next")}
            assert live.standing() == ("written", "idle", "idle"), "the others keep their status"
            live.actuator.planned(same(holds={"node": Hold(target="node", reason="r", by="b")}))
            await until(lambda: live.standing()[0] == "held")
            assert live.standing("next")[0] == "held", "a hold concerns all"


async def test_what_a_plan_no_longer_wants_is_restored_at_once_and_has_no_status(live: Idle) -> None:
    pid = live.process()
    live.add("next")
    other = live.process(name="next")
    async with sweeping(live):
        await until(lambda: policies(pid, other) == [IDLE, IDLE])
        live.names.remove("main")  # as a container whose pod is not BE any more
        live.actuator.planned(live.situation(PoliciesConfig(idle_class=ON)))
        await until(lambda: live.actuator.statuses.keys() == {live.group("next")})
        assert policies(pid, other) == [OTHER, IDLE]


async def test_a_container_whose_init_had_the_class_at_the_signal_is_not_swept_again_and_again(live: Idle) -> None:
    """Every process of it inherits the class; one sweep looks at what its threads have."""
    async with sweeping(live):
        live.names.remove("main")
        live.add("late")
        live.create()
        await until(lambda: live.fastpath.is_init_prepared("id-late"))
        pid = live.process(name="late")
        assert live.fastpath.execute("id-late", 0.0)
        assert policies(pid) == [IDLE]
        with listed(live) as seen:
            live.actuator.planned(live.situation(PoliciesConfig(idle_class=ON)))
            await trio.sleep(0.3)
        assert seen == [live.group("late")]


async def test_a_sweep_that_writes_nothing_needs_no_thread_unless_there_are_many_members(
    live: Idle, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.process()
    await live.sweep()
    jobs: list[object] = []

    async def in_worker(job: Callable[[], object], **_: object) -> object:
        jobs.append(job)
        return job()

    monkeypatch.setattr(base, "in_worker", in_worker)
    await live.actuator.sweep()
    assert not jobs
    monkeypatch.setattr(process_values, "_FEW", 0)
    await live.actuator.sweep()
    assert len(jobs) == 1
    # One that has grown since its last reading is not read by the loop to its end.
    monkeypatch.setattr(process_values, "_FEW", 64)
    monkeypatch.setattr(process_values, "_MOST_IN_LOOP", 1)
    await live.actuator.sweep()
    assert len(jobs) == 2
    monkeypatch.undo()
    late = live.process()
    await live.sweep()
    assert policies(late) == [IDLE]


async def test_nice_and_reset_on_fork_stay(live: Idle) -> None:
    pid = live.process()
    os.setpriority(os.PRIO_PROCESS, pid, 7)
    flag = os.SCHED_RESET_ON_FORK
    os.sched_setscheduler(pid, OTHER | flag, os.sched_param(0))
    await live.sweep()
    assert (os.sched_getscheduler(pid), os.getpriority(os.PRIO_PROCESS, pid)) == (IDLE | flag, 7)
    await live.actuator.restore()
    assert (os.sched_getscheduler(pid), os.getpriority(os.PRIO_PROCESS, pid)) == (OTHER | flag, 7)


@pytest.mark.parametrize("daemon", [True, False], ids=["by the next daemon", "without a daemon"])
async def test_killed_at_any_step_each_thread_gets_its_own_back(live: Idle, daemon: bool) -> None:
    pids = {live.process(policy): policy for policy in (OTHER, IDLE, OTHER)}
    steps = 0
    while True:
        left = [steps]
        scheduler, store = Mortal(REAL_SCHEDULER, "set_policy", left), Mortal(live.store, "apply", left)
        given = context(Ledger(cast(Store, store)), hierarchy=live.hierarchy, fastpath=live.fastpath)
        live.actuator = IdleThreads(given, cast(Scheduler, scheduler))
        ended = True
        try:
            await live.sweep()
        except Killed:
            ended = False
        live.crash()
        done = await live.actuator.restore() if daemon else live.undone(ACTUATOR)
        assert all(result.ok for result in done), (steps, done)
        assert dict(zip(pids, policies(*pids), strict=True)) == pids, f"killed after {steps} changes"
        assert live.rows() == set()
        if ended:
            break
        steps += 1
    assert steps == 3, "one row, and two threads"


async def test_a_restart_adopts_what_the_last_run_has_set(live: Idle) -> None:
    pid = live.process()
    await live.sweep()
    live.crash()
    await live.sweep()
    assert (live.standing()[0], live.rows()) == ("in place", {live.main})
    assert [result.undo for result in live.undone(ACTUATOR, "another")] == []
    assert [result.undo for result in live.undone(ACTUATOR, "be")] == [RestoreOutcome.RESTORED]
    assert policies(pid) == [OTHER]


NOTHING = pytest.mark.parametrize(
    "how",
    [
        pytest.param({"enforce": False}, id="observe mode"),
        pytest.param({"cls": PodClass.SHARED}, id="an online pod"),
        pytest.param({"holds": {"node": Hold(target="node", reason="r", by="b")}}, id="a held node"),
        pytest.param({"holds": {"pod:be": Hold(target="pod:be", reason="r", by="b")}}, id="a held pod"),
        pytest.param(
            {"holds": {"knob:thread.policy": Hold(target="knob:thread.policy", reason="r", by="b")}}, id="knob"
        ),
    ],
)


@NOTHING
async def test_nothing_is_set(live: Idle, how: dict[str, Any]) -> None:
    pid = live.process()
    await live.sweep(**how)
    await live.prepare(**how)
    assert not live.fastpath.execute(CONTAINER, 0.0)
    assert (policies(pid), live.rows()) == ([OTHER], set())


async def test_a_hold_leaves_what_was_set(live: Idle) -> None:
    pid = live.process()
    await live.sweep()
    probe = live.process()
    await live.sweep(holds={"pod:be": Hold(target="pod:be", reason="r", by="b")})
    assert (policies(pid, probe), live.rows(), live.standing()[0]) == ([IDLE, OTHER], {live.main}, "held")


async def test_what_cannot_be_recorded_is_not_set(live: Idle, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = live.process()
    apply = Store.apply

    def full(store: Store, batch: StoreBatch) -> None:
        raise StoreError("no space")

    monkeypatch.setattr(Store, "apply", full)
    await live.sweep()
    await live.prepare()
    assert not live.fastpath.is_init_prepared(CONTAINER)
    assert (policies(pid), "no space" in live.actuator.problems()) == ([OTHER], True)
    monkeypatch.setattr(Store, "apply", apply)
    await live.sweep()
    assert policies(pid) == [IDLE]


async def test_a_restore_that_cannot_be_recorded_is_not_reported_as_done(
    live: Idle, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.process()
    await live.sweep()

    def full(store: Store, batch: StoreBatch) -> None:
        raise StoreError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(Store, "apply", full)
        assert [(result.undo, result.detail) for result in await live.actuator.restore()] == [
            (RestoreOutcome.REFUSED, "no space")
        ]
    assert live.rows() == {live.main}
    assert [result.ok for result in await live.actuator.restore()] == [True]
    assert live.rows() == set()


# At the runtime's signal


async def test_the_init_gets_it_at_the_signal_once_its_row_is_durable(live: Idle) -> None:
    live.create()
    assert not live.fastpath.is_init_prepared(CONTAINER)
    await live.actuator.prepare()
    assert live.rows() == {live.main}
    popen = live.talker()
    thread = ask(popen, "thread")
    assert live.fastpath.awaits(CONTAINER)
    assert live.fastpath.execute(CONTAINER, 0.0)
    assert policies(popen.pid, thread) == [IDLE, IDLE]
    (result,) = live.results
    assert (result.init, result.creation) == ((2, 0, 0), True)
    assert policies(ask(popen, "exec")) == [IDLE]
    live.crash()
    await live.actuator.restore()
    assert policies(popen.pid, thread) == [OTHER, OTHER]


async def test_an_update_of_the_runtime_sets_nothing_and_undoes_nothing(live: Idle) -> None:
    pid = live.process()
    await live.prepare()
    live.fastpath.execute(CONTAINER, 0.0)
    os.sched_setscheduler(pid, FIFO, os.sched_param(1))
    live.fastpath.execute(CONTAINER, 0.0)
    await live.sweep()
    assert policies(pid) == [FIFO]
    assert live.actuator.status()["kept"] == {live.main: 1}


async def test_a_runtime_that_is_in_the_idle_class_itself_is_not_ours_to_undo(live: Idle) -> None:
    pid = live.process(IDLE)
    await live.prepare()
    live.fastpath.execute(CONTAINER, 0.0)
    assert live.results[0].init == (0, 1, 0)
    await live.sweep()
    await live.actuator.restore()
    assert (policies(pid), live.rows()) == ([IDLE], set())


async def test_without_an_init_the_outcome_says_so(live: Idle) -> None:
    await live.prepare()
    live.fastpath.execute(CONTAINER, 0.0)
    assert live.results[0].init == (0, 0, errno.ESRCH)
    assert live.actuator.status()["counts"] == {"at the signal": 1}


async def test_a_hold_or_a_restore_takes_the_preparation_back(live: Idle) -> None:
    pid = live.process()
    await live.prepare()
    live.create(holds={"pod:be": Hold(target="pod:be", reason="r", by="b")})
    assert not live.fastpath.execute(CONTAINER, 0.0)
    await live.prepare()
    await live.actuator.restore("be")
    assert not live.fastpath.execute(CONTAINER, 0.0)
    assert policies(pid) == [OTHER]


async def test_the_row_of_a_container_in_creation_outlives_a_sweep_and_not_its_group(live: Idle) -> None:
    await live.prepare()
    await live.actuator.sweep()
    assert (live.rows(), live.standing()[0]) == ({live.main}, "prepared")
    empty = live.situation(PoliciesConfig(idle_class=ON))
    await live.apply(type(empty)(view=node(), plan=empty.plan, enforce=True))
    assert live.rows() == set()


@pytest.mark.parametrize("seen", [True, False], ids=["seen in creation", "seen too late for that"])
@pytest.mark.parametrize("executed", [False, True], ids=["before exec", "after exec"])
async def test_an_init_whose_signal_came_too_early_gets_it_before_exec_all_the_same(
    live: Idle, seen: bool, executed: bool
) -> None:
    live.actuator.planned(live.situation(PoliciesConfig(idle_class=ON), phase=Phase.CREATING, cls=PodClass.SHARED))
    if seen:
        live.create()
    popen = live.talker()
    if not executed:
        ask(popen, "init")
    assert not live.fastpath.execute(CONTAINER, 0.0)
    live.actuator.planned(live.situation(PoliciesConfig(idle_class=ON)))
    await live.actuator.prepare()
    assert policies(popen.pid) == [OTHER if executed else IDLE]
    assert [(result.init, result.before_exec) for result in live.results] == ([] if executed else [((1, 0, 0), True)])
    await live.actuator.sweep()
    assert policies(popen.pid) == [IDLE]
    live.crash()
    await live.actuator.restore()
    assert policies(popen.pid) == [OTHER]


# What it does


def cpu_ticks(pid: int) -> int:
    fields = REAL.read(f"/proc/{pid}", "stat").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.alone
async def test_a_normal_thread_beside_an_idle_one_gets_nearly_all_of_the_cpu(live: Idle) -> None:
    cpu = min(os.sched_getaffinity(0))
    usual, idle = (live.start((sys.executable, "-c", WORK)).pid for _ in range(2))
    for pid in (usual, idle):
        os.sched_setaffinity(pid, {cpu})
    live.enter(idle)
    await live.sweep()
    assert policies(usual, idle) == [OTHER, IDLE]
    before = cpu_ticks(usual), cpu_ticks(idle)
    await until(lambda: cpu_ticks(usual) - before[0] >= 150)
    assert cpu_ticks(idle) - before[1] < (cpu_ticks(usual) - before[0]) / 5


# Parts


def test_names_of_policies_are_read_back_and_others_refused() -> None:
    assert [policy_number(policy_text(number)) for number in (0, 1, 2, 3, 5, 6, 7)] == [0, 1, 2, 3, 5, 6, 7]
    assert policy_text(9) == "9"
    for text in ("9", "", "IDLE", "idle "):
        with pytest.raises(ValueError, match="policy"):
            policy_number(text)


@pytest.mark.parametrize("tid", [0, -1])
def test_a_process_outside_the_pid_namespace_never_stands_for_the_daemon(tid: int) -> None:
    own = REAL_SCHEDULER.policy(threading.get_native_id())
    with pytest.raises(ProcessLookupError):
        REAL_SCHEDULER.set_policy(tid, IDLE)
    with pytest.raises(ProcessLookupError):
        REAL_SCHEDULER.policy(tid)
    assert REAL_SCHEDULER.policy(threading.get_native_id()) == own
