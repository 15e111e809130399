"""The daemon's priority is the loop's: what it leaves to threads and to programs is no higher than the pods.

Real-time priority: the kernel's answers, in a process of its own, whose loop is made to work too long.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.daemon.process import Daemon, configuration
from tests.e2e.mounts import hierarchies
from tests.fakes.daemonprocess import ROOT
from tests.fakes.forkserver import PATIENCE
from tests.fakes.node import DirectoryNode, merged

NICE = -10
BEGIN = """
import json, os, resource, subprocess, sys, threading, time
import trio
from reconciler.runtime.priority import LoopPriority
found = {}
def policy():
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK
"""
SCRIPT = """
async def main():
    priority = LoopPriority(nice=NICE, slice_s=SLICE, starting=lambda: True)
    priority.start()
    found["loop"] = os.getpriority(os.PRIO_PROCESS, 0)
    found["policy"] = policy()
    def look():
        found["thread"] = [os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), policy()]
    await trio.to_thread.run_sync(look)
    text = "import os; print([os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)])"
    found["program"] = json.loads(subprocess.check_output([sys.executable, "-c", text]))
    found["state"] = priority.status.state.value
trio.run(main)
print(json.dumps(found))
"""
REFUSING = """
import errno
def refuse(*_):
    raise OSError(errno.EPERM, "refused")
os.sched_setscheduler = refuse
"""
OVERRUN = """
async def main():
    priority = LoopPriority(nice=0, slice_s=0.01, starting=lambda: True)
    priority.start()
    found["waits"] = policy()
    end = time.thread_time() + 1.0
    while time.thread_time() < end and policy() == os.SCHED_FIFO:
        pass
    found["worked_s"] = 1.0 - (end - time.thread_time())
    found["policy"] = policy()
    found["overruns"] = priority.status.overruns
    await trio.sleep(0.05)
    found["again"] = policy()
    found["soft"], found["hard"] = resource.getrlimit(resource.RLIMIT_RTTIME)
    priority.stop()
    found["end"] = policy()
trio.run(main)
print(json.dumps(found))
"""


def run(script: str, *, slice_s: float = 0.01, within: tuple[str, ...] = ()) -> dict[str, Any]:
    text = BEGIN + script.replace("NICE", str(NICE)).replace("SLICE", str(slice_s))
    command = [*within, sys.executable, "-c", text]
    out = subprocess.check_output(command, cwd=ROOT, text=True, stderr=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def may(act: Callable[[], object]) -> bool:
    """Whether a process here may do that."""
    child = os.fork()
    if child == 0:
        try:
            act()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


nice = pytest.mark.skipif(
    not may(lambda: os.setpriority(os.PRIO_PROCESS, 0, NICE)),
    reason="REAL KERNEL TEST NOT RUN: no right to raise a priority (CAP_SYS_NICE)",
)
real_time = pytest.mark.skipif(
    not may(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))),
    reason="REAL KERNEL TEST NOT RUN: no real-time priority here (CAP_SYS_NICE, cpu.rt_runtime_us)",
)


@nice
def test_only_the_loop_has_a_higher_priority_than_pods() -> None:
    found = run(SCRIPT, slice_s=0)
    assert (found["loop"], found["policy"], found["state"]) == (NICE, os.SCHED_OTHER, "off")
    assert (found["thread"], found["program"]) == ([0, os.SCHED_OTHER], [0, os.SCHED_OTHER])


@nice
@real_time
def test_only_the_loop_has_real_time_priority() -> None:
    found = run(SCRIPT)
    assert (found["loop"], found["policy"], found["state"]) == (NICE, os.SCHED_FIFO, "real-time")
    assert (found["thread"], found["program"]) == ([0, os.SCHED_OTHER], [0, os.SCHED_OTHER])


@nice
def test_a_sandbox_that_refuses_the_calls_leaves_the_loop_its_nice_value() -> None:
    """As systemd's RestrictRealtime does, which an operator's drop-in may set."""
    found = run(REFUSING + SCRIPT)
    assert (found["loop"], found["policy"], found["state"]) == (NICE, os.SCHED_OTHER, "refused")


@pytest.fixture
def group() -> Iterator[str]:
    """A group of the cpu controller, as systemd makes one for a service."""
    mount = hierarchies().get("cpu", "")
    path = f"{mount}/bypassd-test-priority-{os.getpid()}"
    if not os.path.exists(f"{mount}/cpu.rt_runtime_us"):
        pytest.skip("REAL KERNEL TEST NOT RUN: this kernel does not share out real-time CPU to groups")
    os.mkdir(path)
    try:
        yield path
    finally:
        os.rmdir(path)


@nice
@real_time
def test_a_group_without_real_time_cpu_leaves_the_nice_value_and_one_with_some_does_not(group: str) -> None:
    within = ("sh", "-c", f'echo $$ > {group}/tasks && exec "$@"', "sh")
    found = run(SCRIPT, within=within)
    assert (found["loop"], found["policy"], found["state"]) == (NICE, os.SCHED_OTHER, "refused")
    with open(f"{group}/cpu.rt_runtime_us", "w") as file:
        file.write("50000")
    found = run(SCRIPT, within=within)
    assert (found["policy"], found["state"]) == (os.SCHED_FIFO, "real-time")


@real_time
def test_the_kernel_ends_a_step_that_does_not_yield_and_the_next_wait_is_real_time_again() -> None:
    found = run(OVERRUN)
    assert (found["waits"], found["policy"], found["overruns"]) == (os.SCHED_FIFO, os.SCHED_OTHER, 1)
    # 0.1 s, in ticks of the kernel; the loop that never ends by itself would have had a second.
    assert found["worked_s"] < 0.9
    assert (found["again"], found["end"]) == (os.SCHED_FIFO, os.SCHED_OTHER)
    # The kernel raises the limit by a second at each signal.
    assert found["soft"] < found["hard"]
    assert found["soft"] <= 100_000


def policies(pid: int, *, seconds: float) -> set[int]:
    found = set()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found.add(os.sched_getscheduler(pid) & ~os.SCHED_RESET_ON_FORK)
        time.sleep(0.002)
    return found


def waits_at(pid: int, policy: int) -> bool:
    end = time.monotonic() + 60 * PATIENCE
    while policy not in policies(pid, seconds=0.05):
        if time.monotonic() > end:
            return False
    return True


@real_time
def test_the_daemon_waits_at_real_time_priority_and_its_threads_do_not(daemon: Callable[..., Daemon]) -> None:
    process = daemon()
    process.start()
    process.wait_ready()
    assert waits_at(process.pid, os.SCHED_FIFO)
    others = [int(name) for name in os.listdir(f"/proc/{process.pid}/task") if int(name) != process.pid]
    assert all(policies(tid, seconds=0.01) <= {os.SCHED_OTHER} for tid in others)
    assert process.state("agent")["agent"]["priority"]["state"] == "real-time"
    assert process.stop() == 0


@real_time
def test_zero_keeps_the_daemon_from_real_time_priority(daemon: Callable[..., Daemon], node: DirectoryNode) -> None:
    process = daemon()
    process.write_config(merged(configuration(node), {"node": {"realtime_ms": 0}}))
    process.start()
    process.wait_ready()
    assert process.state("agent")["agent"]["priority"]["state"] == "off"
    assert policies(process.pid, seconds=0.2) == {os.SCHED_OTHER}
