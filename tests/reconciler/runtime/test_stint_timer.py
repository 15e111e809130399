"""The stint timer on the running kernel, in processes of its own: a signal has one handler in a process."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cgroupfs.scheduling import has_eevdf
from reconciler.runtime.stint_timer import StintTimer
from reconciler.runtime.stints import LoopTimer

_BESIDE = """
    import json, os, resource, signal, subprocess, sys, threading, time
    from reconciler.runtime.stint_timer import TIMER
    cpu = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpu})
    # It ends with this process, also when a timeout kills that.
    spins = "import os; parent = os.getppid()\\nwhile os.getppid() == parent: pass"
    spinner = subprocess.Popen([sys.executable, "-c", spins])
    def switches():
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        return usage.ru_nivcsw + usage.ru_nvcsw
    def burn(seconds=0.02):
        before, end = switches(), time.thread_time() + seconds
        while time.thread_time() < end:
            pass
        return switches() - before
    def timers():
        with open("/proc/self/timers") as file:
            return sum(line.startswith("ID:") for line in file)
    try:
        result = {}
        BODY
    finally:
        spinner.kill()
        spinner.wait()
    print(json.dumps(result))
"""


def run(body: str) -> dict[str, Any]:
    """What the body put into ``result``, in a process beside a spinner on the same CPU."""
    script = textwrap.dedent(_BESIDE).replace("    BODY", textwrap.indent(textwrap.dedent(body), "    "))
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False, cwd=os.getcwd()
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.mark.kernel
@pytest.mark.alone
def test_a_thread_leaves_its_cpu_some_times_each_millisecond_while_the_timer_runs_and_it_is_not_held() -> None:
    result = run("""
        result["before"] = burn()
        result["problem"] = TIMER.install("5.10.0")
        TIMER.run()
        result["running"] = burn()
        TIMER.stop()
        result["stopped"] = burn()
        TIMER.run()
        TIMER.hold(held=True)
        result["held"] = burn()
        TIMER.run()
        result["held again"] = burn()
        TIMER.hold(held=False)
        TIMER.run()
        result["at last"] = burn()
    """)
    assert result["problem"] == ""
    # 200 stints each; another process on the CPU may take some of the turns.
    assert min(result["running"], result["at last"]) > 32
    for state in ("before", "stopped", "held", "held again"):
        assert result[state] < result["running"] / 2, state


@pytest.mark.kernel
@pytest.mark.alone
def test_each_thread_has_a_timer_of_its_own_which_ends_with_it() -> None:
    result = run("""
        def work():
            TIMER.run()
            result["worker"] = burn()
            result["during"] = timers()
            TIMER.stop()
        TIMER.install("5.10.0")
        result["main alone"] = timers()
        for _ in range(3):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        result["after"] = timers()
    """)
    assert (result["main alone"], result["during"], result["after"]) == (1, 2, 1)
    assert result["worker"] > 32


@pytest.mark.kernel
def test_a_kernel_that_charges_a_yield_with_a_slice_has_no_timer() -> None:
    result = run("""
        result["problem"] = TIMER.install("6.6.0")
        TIMER.run()
        result["installed"], result["timers"] = TIMER.installed, timers()
    """)
    assert result == {"problem": "", "installed": False, "timers": 0}


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("4.18.0-553.el8_10.x86_64", False),
        ("5.10.0-32-cloud-amd64", False),
        ("6.1.0-28-amd64", False),
        ("6.5.13", False),
        ("6.6.0", True),
        ("6.18.44", True),
        ("7.0-rc1", True),
        ("6.6-rc1", True),
        ("5.10-custom", False),
        ("5.x", True),
        ("strange", True),
    ],
)
def test_which_kernels_charge_a_yield_with_a_slice(release: str, *, expected: bool) -> None:
    assert has_eevdf(release) is expected


@pytest.mark.kernel
def test_sleeps_reads_and_children_are_as_without_it() -> None:
    result = run("""
        TIMER.install("5.10.0")
        TIMER.run()
        began = time.monotonic()
        time.sleep(0.05)
        result["slept"] = time.monotonic() - began
        ours, theirs = os.pipe()
        threading.Timer(0.05, os.write, (theirs, b"x")).start()
        result["read"] = os.read(ours, 1).decode()
        # The default action of the signal ends a process that still had a timer.
        child = "import time; time.sleep(0.05); print('ended')"
        result["child"] = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout
    """)
    assert 0.05 <= result["slept"] < 5
    assert result["read"] == "x"
    assert result["child"] == "ended\n"


def test_without_the_signal_nothing_runs() -> None:
    timer = StintTimer()
    timer.run()
    timer.stop()
    timer.hold(held=True)
    assert not timer.installed


@pytest.mark.parametrize(("starting", "expected"), [(False, ["run", "run", "stop"]), (True, ["hold", "hold", "stop"])])
def test_the_loop_runs_it_while_it_works_and_no_container_is_in_creation(
    *, starting: bool, expected: list[str]
) -> None:
    calls: list[str] = []
    note: Callable[[str], Callable[[], None]] = lambda name: lambda: calls.append(name)
    timer: Any = SimpleNamespace(
        run=note("run"), stop=note("stop"), hold=lambda *, held: calls.append("hold") if held else None
    )
    loop = LoopTimer(lambda: starting, timer)
    loop.after_io_wait(0.5)
    loop.before_io_wait(0)
    loop.after_io_wait(0)
    loop.before_io_wait(0.5)
    assert calls == expected
