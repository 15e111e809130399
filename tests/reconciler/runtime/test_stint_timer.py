"""The stint timer on the running kernel, in processes of its own: a signal has one handler in a process."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cgroupfs.scheduling import has_eevdf, runner_keeps_cpu
from reconciler.runtime.stint_timer import StintTimer
from reconciler.runtime.stints import LoopTimer

_BESIDE = """
    import ctypes, json, os, resource, signal, struct, subprocess, sys, threading, time
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
    def events():
        places = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum("perf_event" in os.readlink(place) for place in places if os.path.lexists(place))
    def install(by_event, release="5.10.0"):
        if not by_event:
            # As a container's seccomp filter: load the call's number; perf_event_open: EPERM; others: allowed.
            number = {"x86_64": 298, "aarch64": 241}[os.uname().machine]
            rows = (0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)
            table = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *row) for row in rows))
            program = struct.pack("=HxxxxxxQ", len(rows), ctypes.addressof(table))
            assert ctypes.CDLL(None).prctl(22, 2, ctypes.c_char_p(program), 0, 0) == 0
        result["problem"] = TIMER.install(release)
        result["refused"] = TIMER.refused
    try:
        result = {}
        BODY
    finally:
        spinner.kill()
        spinner.wait()
    print(json.dumps(result))
"""


BOTH = pytest.mark.parametrize("by_event", [True, False], ids=["by a perf event", "by a timer"])


def run(body: str, *, by_event: bool = True) -> dict[str, Any]:
    """What the body put into ``result``, in a process beside a spinner on the same CPU.

    ``by_event``: for ``install(BY_EVENT)`` in the body.
    """
    body = textwrap.dedent(body).replace("BY_EVENT", str(by_event))
    script = textwrap.dedent(_BESIDE).replace("    BODY", textwrap.indent(body, "    "))
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False, cwd=os.getcwd()
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@BOTH
@pytest.mark.kernel
@pytest.mark.alone
def test_a_thread_leaves_its_cpu_some_times_each_millisecond_while_the_timer_runs_and_it_is_not_held(
    *, by_event: bool
) -> None:
    script = """
        result["before"] = burn()
        install(BY_EVENT)
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
        TIMER.rest()
        result["timers"], result["events"] = timers(), events()
    """
    result = run(script, by_event=by_event)
    assert result["problem"] == ""
    assert result["refused"] == ("" if by_event else "[Errno 1] perf_event_open: Operation not permitted")
    assert (result["events"], result["timers"]) == ((1, 0) if by_event else (0, 1))
    # 200 stints each; another process on the CPU may take some of the turns.
    assert min(result["running"], result["at last"]) > 32
    for state in ("before", "stopped", "held", "held again"):
        assert result[state] < result["running"] / 2, state


@BOTH
@pytest.mark.kernel
@pytest.mark.alone
def test_each_thread_has_a_timer_of_its_own_which_ends_with_it(*, by_event: bool) -> None:
    script = """
        count = events if BY_EVENT else timers
        def work():
            TIMER.run()
            result["worker"] = burn()
            result["during"] = count()
            TIMER.stop()
        install(BY_EVENT)
        result["main alone"] = count()
        for _ in range(3):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        result["after"] = count()
    """
    result = run(script, by_event=by_event)
    assert (result["main alone"], result["during"], result["after"]) == (1, 2, 1)
    assert result["worker"] > 32


@pytest.mark.kernel
def test_a_kernel_that_starves_a_sleeper_has_no_timer() -> None:
    result = run("""
        result["problem"] = TIMER.install("6.18.44")
        TIMER.run()
        result["installed"], result["timers"], result["events"] = TIMER.installed, timers(), events()
    """)
    assert result == {"problem": "", "installed": False, "timers": 0, "events": 0}


@pytest.mark.kernel
def test_where_a_yield_costs_a_slice_ordinary_work_has_no_stints() -> None:
    result = run("""
        result["problem"] = TIMER.install("6.6.0")
        TIMER.run()
        result["installed"], result["running"] = TIMER.installed, TIMER._locals.timer.running
        TIMER.follow_creation(creating=True, paces=False)
        TIMER.run()
        result["unpaced"] = TIMER._locals.timer.running
    """)
    assert result == {"problem": "", "installed": False, "running": False, "unpaced": False}


@pytest.mark.kernel
def test_without_events_such_a_kernel_has_no_timer_and_says_why() -> None:
    result = run("""
        install(False, "6.12.9")
        TIMER.follow_creation(creating=True, paces=True)
        TIMER.run()
        result["paces"], result["installed"] = TIMER.paces_creation, TIMER.installed
        result["timers"], result["events"] = timers(), events()
    """)
    assert result.pop("refused") == "[Errno 1] perf_event_open: Operation not permitted"
    assert result == {"problem": "", "paces": False, "installed": False, "timers": 0, "events": 0}


@pytest.mark.kernel
def test_a_worker_that_makes_its_timer_when_pauses_begin_has_none(tmp_path: Path) -> None:
    load = tmp_path / "loadavg"
    load.write_text("0.10 0.20 0.30 9999/99999 678\n")
    result = run(f"""
        import reconciler.runtime.stint_timer as module
        module._LOAD = {str(load)!r}
        install(True)
        make, asked, done = TIMER._make, threading.Event(), threading.Event()
        def slow_make():
            asked.set()
            done.wait()
            return make()
        def work():
            TIMER.run()
            result["running"] = TIMER._locals.timer.running
        TIMER._make = slow_make
        worker = threading.Thread(target=work)
        worker.start()
        asked.wait()
        TIMER.follow_creation(creating=True, paces=True)
        done.set()
        worker.join()
        result["paces"] = TIMER.paces_creation
    """)
    assert (result["paces"], result["running"]) == (True, False)


@BOTH
@pytest.mark.kernel
def test_only_a_timer_expires_while_the_thread_sleeps_so_it_rests_meanwhile(*, by_event: bool) -> None:
    script = """
        def signalled():
            return signal.sigtimedwait([signal.SIGALRM], 0) is not None
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        install(BY_EVENT)
        TIMER.run()
        burn()
        result["after work"] = signalled()
        # The CPU time of the call itself may end a stint, but not each time.
        result["asleep"] = all([signal.sigtimedwait([signal.SIGALRM], 0.05) for _ in range(10)])
        TIMER.rest()
        signalled()
        result["at rest"] = all([signal.sigtimedwait([signal.SIGALRM], 0.05) for _ in range(10)])
        TIMER.run()
        burn()
        result["after more work"] = signalled()
        TIMER.stop()
        signalled()
        burn()
        result["stopped"] = signalled()
    """
    result = run(script, by_event=by_event)
    assert (result["asleep"], result["at rest"]) == (not by_event, False)
    assert (result["after work"], result["after more work"], result["stopped"]) == (True, True, False)


@pytest.mark.kernel
@pytest.mark.alone
def test_where_every_cpu_is_busy_a_paced_thread_sleeps_after_each_stint(tmp_path: Path) -> None:
    load = tmp_path / "loadavg"
    load.write_text(f"0.10 0.20 0.30 {(os.cpu_count() or 1) + 1}/345 678\n")
    result = run(f"""
        import reconciler.runtime.stint_timer as module
        module._LOAD = {str(load)!r}
        def sleeps():
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
            burn()
            return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
        install(True)
        result["before"] = TIMER.paced
        TIMER.run()
        result["yields"] = sleeps()
        began = time.monotonic()
        result["on"], result["sleeps"] = TIMER.pace(on=True), sleeps()
        result["took"] = time.monotonic() - began
        result["off"], result["yields again"] = TIMER.pace(on=False), sleeps()
        with open(module._LOAD, "w") as file:
            file.write("9.9 9.9 9.9 1/345 678")
        result["idle"] = TIMER.pace(on=True)
    """)
    assert (result["before"], result["on"], result["off"], result["idle"]) == (False, True, False, False)
    # 200 stints, of which some end in the kernel's own time.
    assert result["sleeps"] > 100 > max(result["yields"], result["yields again"])
    assert result["took"] > 0.05, "at most one stint in each half of a millisecond"


@pytest.mark.kernel
@pytest.mark.parametrize("why", ["by_event = False", "os.dup2(1, signal.SIGALRM)"])
def test_nothing_is_paced_without_events_or_where_the_descriptor_belongs_to_others(why: str, tmp_path: Path) -> None:
    load = tmp_path / "loadavg"
    load.write_text("0.10 0.20 0.30 9999/99999 678\n")
    result = run(f"""
        import reconciler.runtime.stint_timer as module
        module._LOAD = {str(load)!r}
        by_event = True
        {why}
        install(by_event)
        result["paced"] = TIMER.pace(on=True)
        TIMER.run()
        result["switches"] = burn()
    """)
    assert result["paced"] is False
    assert result["problem"] == ""


@pytest.mark.kernel
def test_where_the_kernel_would_throttle_an_event_there_is_a_timer(tmp_path: Path) -> None:
    rate = tmp_path / "rate"
    rate.write_text("15000\n")
    result = run(f"""
        import reconciler.runtime.stint_timer as module
        module._RATE = {str(rate)!r}
        result["problem"] = TIMER.install("5.10.0")
        result["refused"], result["timers"], result["events"] = TIMER.refused, timers(), events()
    """)
    assert "is below 20000" in result.pop("refused")
    assert result == {"problem": "", "timers": 1, "events": 0}


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


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("6.12.9-amd64", False),
        ("6.13-rc7", True),
        ("6.17.1", True),
        ("6.18.44-cloud-amd64", True),
        ("6.18.45", False),
        ("6.19.0", False),
        ("strange", False),
    ],
)
def test_which_kernels_let_a_running_group_keep_the_cpu(release: str, *, expected: bool) -> None:
    assert runner_keeps_cpu(release) is expected


@BOTH
@pytest.mark.kernel
def test_sleeps_reads_and_children_are_as_without_it(*, by_event: bool) -> None:
    script = """
        install(BY_EVENT)
        TIMER.run()
        began = time.monotonic()
        time.sleep(0.05)
        result["slept"] = time.monotonic() - began
        ours, theirs = os.pipe()
        threading.Timer(0.05, os.write, (theirs, b"x")).start()
        result["read"] = os.read(ours, 1).decode()
        # The default action of the signal ends a process that still had a timer.
        child = "import os, time; time.sleep(0.05); print([os.readlink('/proc/self/fd/' + fd) for fd in FDS])"
        child = child.replace("FDS", "os.listdir('/proc/self/fd') if fd != '3'")
        result["child"] = subprocess.run(
            [sys.executable, "-c", child], capture_output=True, text=True, close_fds=False
        ).stdout
    """
    result = run(script, by_event=by_event)
    assert 0.05 <= result["slept"] < 5
    assert result["read"] == "x"
    assert "perf_event" not in result["child"]
    assert result["child"].endswith("]\n"), "its end by the signal"


def test_without_the_signal_nothing_runs() -> None:
    timer = StintTimer()
    timer.run()
    timer.rest()
    timer.stop()
    timer.hold(held=True)
    assert not timer.installed


@pytest.mark.parametrize("starting", [False, True])
def test_the_loop_runs_it_while_it_works_and_says_whether_a_container_is_created(*, starting: bool) -> None:
    calls: list[object] = []
    note: Callable[[str], Callable[[], None]] = lambda name: lambda: calls.append(name)
    timer: Any = SimpleNamespace(
        run=note("run"), rest=note("rest"), follow_creation=lambda **given: calls.append(given)
    )
    loop = LoopTimer(lambda: starting, lambda: True, timer)
    loop.after_io_wait(0.5)
    loop.before_io_wait(0)
    loop.before_io_wait(0.5)
    assert calls == [{"creating": starting, "paces": starting}, "run", "rest"]


@pytest.mark.kernel
@pytest.mark.alone
@pytest.mark.parametrize("release", ["5.10.0", "6.6.0"])
def test_while_a_container_is_created_on_busy_cpus_a_thread_sleeps_after_each_stint(release: str) -> None:
    script = """
        others = [subprocess.Popen([sys.executable, "-c", spins]) for _ in range(2 * os.cpu_count())]
        def sleeps(seconds=0.02):
            before, end = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw, time.thread_time() + seconds
            while time.thread_time() < end:
                pass
            return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
        def follow(creating, paces=True):
            TIMER.follow_creation(creating=creating, paces=paces)
            TIMER.run()
            return sleeps()
        try:
            # The program's first lines do, and the daemon again.
            result["problem"] = TIMER.install(RELEASE) + TIMER.install(RELEASE)
            # The other processes have begun.
            deadline = time.monotonic() + 30
            while not TIMER.paces_creation and time.monotonic() < deadline:
                result["on"] = follow(True)
            TIMER.stop()
            result["stopped"] = sleeps()
            result["lowered"] = follow(True, paces=False)
            result["over"] = follow(False)
        finally:
            for other in others:
                other.kill()
                other.wait()
    """
    result = run(script.replace("RELEASE", repr(release)))
    assert result["problem"] == ""
    # 200 stints, of which each sleeps, or finds that the time for the next one has come.
    assert result["on"] > 50
    # Yields are involuntary switches.
    assert max(result[state] for state in ("stopped", "lowered", "over")) < 10
