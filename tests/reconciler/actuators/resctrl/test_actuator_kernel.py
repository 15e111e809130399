"""Real programs in real cgroups and the kernel's own resctrl: in `make vm-resctrl` only."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.hierarchy import Hierarchy
from reconciler.actuators.base import PlanSnapshot
from reconciler.actuators.codec import read_rows
from reconciler.actuators.resctrl.actuator import ResctrlActuator
from reconciler.actuators.resctrl.undo import CODEC, ResctrlState, restore_resctrl
from reconciler.control.cache_loop import CacheLoop
from reconciler.control.planner import plan_node
from reconciler.policies.cache import CachePolicyConfig
from reconciler.policies.table import PoliciesConfig
from reconciler.runtime.cooperative import share_interpreter
from resctrl.files import REAL
from resctrl.groups import members
from state.entry import RestoreOutcome
from state.ledger import Ledger
from state.model import GroupRef, Pod
from state.store import Store
from tests.cgroupfs.kernelgroup import kernel_groups
from tests.lag import Lag
from tests.real_resctrl import ours
from tests.reconciler.nodes import node, pod

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not ours(), reason="REAL KERNEL TEST NOT RUN: resctrl is used only in `make vm-resctrl`"),
]
ROOT = "/sys/fs/resctrl"

BOMB = """
import os, time
def reap():
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
print("ready", flush=True)
input()
for number in range(2000):
    if os.fork() == 0:
        time.sleep(0.02 + number % 20 * 0.02)
        os._exit(0)
    reap()
    time.sleep(0.001)
for _ in range(30):
    if os.fork() == 0:
        time.sleep(300)
        os._exit(0)
print("done", flush=True)
time.sleep(300)
"""
THREADS = """
import threading, time
for _ in range(7):
    threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
print("ready", flush=True)
time.sleep(300)
"""


class Machine:
    """This machine's cgroups and its resctrl, which the agent mounts itself."""

    def __init__(self, path: Path, hierarchy: Hierarchy, group: str) -> None:
        self.hierarchy = hierarchy
        self.group = group
        self.started: list[subprocess.Popen[str]] = []
        self.store = Store(str(path / "state.db"), boot="boot-1")
        make = partial(ResctrlActuator, hierarchy, Ledger(self.store), trio.CapacityLimiter(1))
        self.side = CacheLoop(make, misses=dict)

    def pod(self) -> Pod:
        item = pod("bomb")
        box = replace(item.containers[0], group=GroupRef(path=self.group))
        return replace(item, group=GroupRef(path=self.group), containers=(box,))

    def run(self, code: str) -> "subprocess.Popen[str]":
        """A program in the group, which has said that it is ready."""
        parts = [sys.executable, "-c", f"input()\n{code}"]
        process = subprocess.Popen(parts, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.started.append(process)
        Path(self.hierarchy.trigger_directory(self.group), "cgroup.procs").write_text(f"{process.pid}\n")
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def alive(self) -> set[int]:
        there = self.hierarchy.trigger_directory(self.group)
        file = "tasks" if self.hierarchy.version(self.hierarchy.trigger) == 1 else "cgroup.threads"
        return set(map(int, Path(there, file).read_text().split()))

    def kill(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        there = Path(self.hierarchy.trigger_directory(self.group), "cgroup.procs")
        deadline = time.monotonic() + 60
        while pids := there.read_text().split():
            assert time.monotonic() < deadline
            for pid in pids:
                try:
                    os.kill(int(pid), 9)
                except ProcessLookupError:
                    continue
            time.sleep(0.05)

    def plan(self, *pods: Pod) -> None:
        view = node(*pods)
        plan = plan_node(view, None, PoliciesConfig(cache=CachePolicyConfig(enabled=True, mount=True)))
        self.side.planned(PlanSnapshot(view=view, plan=plan, enforce=True))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with kernel_groups("resctrl", "cpuset") as (hierarchy, group):
        there = hierarchy.directory("cpuset", group)
        if hierarchy.version("cpuset") == 1:
            for file in ("cpuset.cpus", "cpuset.mems"):
                Path(there, file).write_text(Path(os.path.dirname(there), file).read_text())
        world = Machine(tmp_path, hierarchy, group)
        interval = sys.getswitchinterval()
        share_interpreter()  # as the daemon does
        try:
            yield world
        finally:
            sys.setswitchinterval(interval)
            world.kill()
            world.store.close()
            subprocess.run(["umount", ROOT], check=False, capture_output=True)


async def test_every_thread_of_a_program_is_moved_and_goes_home_at_restore(machine: Machine) -> None:
    process = machine.run(THREADS)
    machine.plan(machine.pod())
    await machine.side.sweep()
    assert machine.side.problems() == []
    be = f"{ROOT}/bypassd-be"
    tids = set(map(int, os.listdir(f"/proc/{process.pid}/task")))
    assert len(tids) == 8
    assert tids <= members(REAL, be)
    assert tids <= members(REAL, f"{be}/mon_groups/bypassd-bomb")
    done = await machine.side.restore()
    assert all(result.ok for result in done)
    assert not os.path.exists(be)
    # The mount was ours, and is gone: what it held is in no group at all.
    assert not os.path.ismount(ROOT)
    assert {result.file for result in done} == {"group", "mount"}


async def test_a_fork_bomb_ends_up_in_its_group_whole(machine: Machine) -> None:
    process = machine.run(BOMB)
    assert process.stdin is not None
    assert process.stdout is not None
    machine.plan(machine.pod())
    be, lag, passes = f"{ROOT}/bypassd-be", Lag(), list[float]()

    async def sweep() -> None:
        began = time.monotonic()
        await machine.side.sweep()
        passes.append(time.monotonic() - began)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lag.measure)
        process.stdin.write("go\n")
        process.stdin.flush()
        with trio.fail_after(300):
            while not await _said(process):
                await sweep()
            for _ in range(20):
                await sweep()
                if not machine.side.problems() and machine.alive() <= members(REAL, be):
                    break
        nursery.cancel_scope.cancel()
    assert machine.side.problems() == []
    alive = machine.alive()
    assert len(alive) >= 31
    assert alive <= members(REAL, be)
    # An emulated machine says nothing of speed: what its host takes from it, it does not see.
    print(
        f"the loop was late by {lag.p99_ms(lag.all):.1f} ms, {lag.p99_ms(lag.ours):.1f} of it ours (p99 of "
        f"{len(lag.all)}), {len(passes)} passes, the longest {max(passes):.2f} s"
    )


KILLED = """
import os, sys
from reconciler.actuators.codec import write_rows
from reconciler.actuators.resctrl.undo import CODEC, ResctrlState
from resctrl.files import RealMounter
from state.ledger import Ledger
from state.store import Store
store = Store(sys.argv[1], boot="boot-1")
write_rows(Ledger(store), CODEC, ResctrlState(place="/sys/fs/resctrl"))
if sys.argv[2] == "ours":
    RealMounter().mount("/sys/fs/resctrl", [])
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("whose", ["ours", "another's"])
def test_what_a_kill_right_after_mounting_left_is_taken_away_and_nobody_elses(tmp_path: Path, whose: str) -> None:
    path = str(tmp_path / "state.db")
    done = subprocess.run([sys.executable, "-c", KILLED, path, whose], check=False, cwd=Path(__file__).parents[4])
    assert done.returncode == -9
    if whose != "ours":
        subprocess.run(["mount", "-t", "resctrl", "resctrl", ROOT], check=True)
    store = Store(path, boot="boot-1")
    try:
        assert os.path.ismount(ROOT)
        undone = restore_resctrl("/", Ledger(store), None)
        assert [result.file for result in undone if result.undo is RestoreOutcome.RESTORED] == (
            ["mount"] if whose == "ours" else []
        )
        assert os.path.ismount(ROOT) == (whose != "ours")
        assert read_rows(Ledger(store), CODEC) == ResctrlState()
    finally:
        store.close()
        subprocess.run(["umount", ROOT], check=False, capture_output=True)


async def _said(process: "subprocess.Popen[str]") -> bool:
    """Whether the program has written its next line."""
    assert process.stdout is not None
    with trio.move_on_after(0.05) as scope:
        await trio.lowlevel.wait_readable(process.stdout)
    return not scope.cancelled_caught
