import errno
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from cgroupfs import pressure
from cgroupfs.errors import CgroupBusyError, CgroupError, CgroupGoneError, CgroupRefusedError, InputError, SourceError
from cgroupfs.hierarchy import Hierarchy, HierarchyMode, Mount
from cgroupfs.pressure import (
    PressureResource,
    PressureTrigger,
    TriggerSpec,
    group_pressure_file,
    has_sys_resource,
    node_pressure_file,
    open_trigger,
    parse_totals,
    read_pressure,
    try_trigger,
)
from tests.cgroupfs.kernelgroup import kernel_groups

SPEC = TriggerSpec(stall_us=100_000, window_us=1_000_000)
SOME = "some avg10=1.64 avg60=1.39 avg300=1.15 total=18234046"
FULL = "full avg10=0.00 avg60=0.50 avg300=0.00 total=7"
OLD_CPU = "some avg10=1.23 avg60=0.90 avg300=0.10 total=123456\n"
"""5.10 and RHEL 8: no full line."""


@pytest.mark.parametrize(
    ("given", "expected"),
    [(OLD_CPU, (123456, None)), (f"{SOME}\n{FULL}\n", (18_234_046, 7)), (f"{SOME}\n{FULL}", (18_234_046, 7))],
)
def test_totals_of_several_kernels(given: str, expected: tuple[int, int | None]) -> None:
    assert tuple(parse_totals(given)) == expected


@pytest.mark.parametrize(
    "given", ["", "some\n", "full avg10=0.00 total=3\n", "some avg10=1.00 total=x\n", "some total=\n", "0\n"]
)
def test_other_texts_are_refused(given: str) -> None:
    with pytest.raises(ValueError, match="no total"):
        parse_totals(given)


def test_a_file_with_other_content_is_named(tmp_path: Path) -> None:
    (tmp_path / "cpu.pressure").write_text("junk")
    with pytest.raises(InputError, match=r"/cpu\.pressure: .*junk.* expected pressure information"):
        read_pressure(str(tmp_path / "cpu.pressure"))


def test_a_group_with_psi_switched_off_is_told_from_a_group_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"cpu\.pressure: not supported"):
        read_pressure(str(tmp_path / "cpu.pressure"))
    with pytest.raises(CgroupGoneError):
        read_pressure(str(tmp_path / "gone/cpu.pressure"))
    with pytest.raises(SourceError, match="not supported"):
        open_trigger(str(tmp_path / "cpu.pressure"), SPEC)
    with pytest.raises(CgroupGoneError):
        open_trigger(str(tmp_path / "gone/cpu.pressure"), SPEC)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_kernel_without_psi_says_not_supported(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, flags: int) -> int:
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SourceError, match="not supported; needs psi=1"):
        read_pressure(str(tmp_path / "cpu"))


def test_files_are_found_in_the_unified_tree_or_in_patched_cpuacct(tmp_path: Path) -> None:
    acct = Mount(directory=f"{tmp_path}/cpuacct", version=1, controllers=("cpuacct",))
    unified = Mount(directory=f"{tmp_path}/unified", version=2, controllers=("unified",))
    hybrid = Hierarchy(root="/", mode=HierarchyMode.HYBRID, controllers={"cpuacct": acct, "unified": unified})
    pure = Hierarchy(root="/", mode=HierarchyMode.V1, controllers={"cpuacct": acct})
    assert group_pressure_file(hybrid, "/pod", PressureResource.CPU) is None
    for tree in ("cpuacct", "unified"):
        (tmp_path / tree / "pod").mkdir(parents=True)
        (tmp_path / tree / "pod/memory.pressure").touch()
    assert group_pressure_file(hybrid, "/pod", PressureResource.MEMORY) == f"{tmp_path}/unified/pod/memory.pressure"
    assert group_pressure_file(pure, "/pod", PressureResource.MEMORY) == f"{tmp_path}/cpuacct/pod/memory.pressure"
    assert group_pressure_file(pure, "/pod", PressureResource.IO) is None
    assert node_pressure_file(PressureResource.IO, "/copy") == "/copy/proc/pressure/io"


def test_a_trigger_string_ends_in_a_newline() -> None:
    assert SPEC.text() == "some 100000 1000000\n"
    assert TriggerSpec(stall_us=5, window_us=2_000_000, full=True).text() == "full 5 2000000\n"


@pytest.mark.parametrize(("stall_us", "window_us"), [(0, 1), (-1, 5), (6, 5)])
def test_a_stall_that_cannot_happen_is_refused(stall_us: int, window_us: int) -> None:
    with pytest.raises(ValueError, match="cannot happen"):
        TriggerSpec(stall_us=stall_us, window_us=window_us)


@pytest.mark.parametrize(
    ("privileged", "given_us", "fitted"),
    [
        (True, (100_000, 1_000_000), (100_000, 1_000_000)),
        (True, (10_000, 100_000), (50_000, 500_000)),
        (True, (1_000_000, 20_000_000), (500_000, 10_000_000)),
        (False, (100_000, 1_000_000), (200_000, 2_000_000)),
        (False, (100_000, 2_000_000), (100_000, 2_000_000)),
        (False, (100_000, 2_000_001), (200_000, 4_000_000)),
        (False, (1, 60_000_000), (1, 10_000_000)),
    ],
)
def test_windows_are_fitted_to_what_the_kernel_takes(
    privileged: bool, given_us: tuple[int, int], fitted: tuple[int, int]
) -> None:
    spec = TriggerSpec(stall_us=given_us[0], window_us=given_us[1], full=True).fitted(privileged=privileged)
    assert spec == TriggerSpec(stall_us=fitted[0], window_us=fitted[1], full=True)


@given(st.integers(1, 10**8), st.integers(1, 10**8), st.booleans())
def test_a_fitted_spec_is_always_acceptable_and_stays_as_it_is(one: int, other: int, privileged: bool) -> None:
    spec = TriggerSpec(stall_us=min(one, other), window_us=max(one, other)).fitted(privileged=privileged)
    assert 500_000 <= spec.window_us <= 10_000_000
    assert privileged or spec.window_us % 2_000_000 == 0
    assert spec.fitted(privileged=privileged) == spec


@pytest.mark.parametrize(
    ("status", "free"),
    [
        ("Name:\tx\nCapPrm:\t0\nCapEff:\t000001ffffffffff\nCapBnd:\t0\n", True),
        ("CapEff:\t000001fffeffffff\n", False),
        ("CapEff:\t0000000001000000\n", True),
        ("CapEff:\t0000000000000000\nCapBnd:\t000001ffffffffff\n", False),
        ("", False),
    ],
)
def test_the_right_to_choose_a_window_is_read_from_the_effective_set(status: str, free: bool) -> None:
    assert has_sys_resource(status) is free


class Kernel:
    """Answers each write of a trigger string with the next errno (0: accepted) and records the strings."""

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)
        self.written: list[str] = []

    def arm(self, path: str, spec: TriggerSpec) -> int:
        self.written.append(spec.text())
        code = self.answers.pop(0)
        if code:
            raise OSError(code, os.strerror(code), path)
        return socket.socket().detach()


async def test_a_capability_that_does_not_count_leads_to_the_unprivileged_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(errno.EINVAL, 0)
    monkeypatch.setattr(pressure, "_arm", kernel.arm)
    monkeypatch.setattr(pressure, "_privileged", lambda: True)
    async with open_trigger(str(tmp_path / "cpu.pressure"), SPEC) as trigger:
        assert trigger.spec == SPEC.fitted(privileged=False)
    assert kernel.written == ["some 100000 1000000\n", "some 200000 2000000\n"]


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ((errno.EINVAL, errno.EINVAL), CgroupRefusedError, "write 'some 200000 2000000': EINVAL"),
        ((errno.EACCES,), SourceError, "needs CAP_SYS_RESOURCE"),
        ((errno.EOPNOTSUPP,), SourceError, "not supported"),
        ((errno.ENODEV,), CgroupGoneError, "group is gone"),
    ],
)
def test_each_refusal_of_a_trigger_is_told_apart(
    answers: tuple[int, ...], error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pressure, "_arm", Kernel(*answers).arm)
    with pytest.raises(error, match=message):
        open_trigger(str(tmp_path / "cpu.pressure"), SPEC)


def test_a_trigger_that_is_tried_is_closed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "cpu.pressure"
    copy.write_text("")
    opened: list[int] = []

    def arm(path: str, spec: TriggerSpec) -> int:
        del spec
        opened.append(os.open(path, os.O_RDONLY))
        return opened[-1]

    monkeypatch.setattr(pressure, "_arm", arm)
    monkeypatch.setattr(pressure, "_privileged", lambda: False)
    assert try_trigger(str(copy), SPEC) == SPEC.fitted(privileged=False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


@pytest.mark.parametrize("short_of", ["the descriptor of the trigger's events", "the descriptor of the own rights"])
def test_a_shortage_of_descriptors_is_an_error_of_the_kernel_and_leaves_none_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_of: str
) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(pressure, "_arm", Kernel(0).arm)
    if "events" in short_of:
        monkeypatch.setattr(select, "epoll", none_left)
    else:
        monkeypatch.setattr(pressure, "_privileged", none_left)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(CgroupBusyError, match="EMFILE"):
        open_trigger(str(tmp_path / "cpu.pressure"), SPEC)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_nothing_is_written_to_a_copy_of_a_pressure_file(tmp_path: Path) -> None:
    copy = tmp_path / "memory"
    copy.write_text("some avg10=0.00")
    with pytest.raises(CgroupError, match="EPERM"):
        open_trigger(str(copy), SPEC)
    assert copy.read_text() == "some avg10=0.00"


@contextmanager
def priority_fd() -> Iterator[tuple[int, socket.socket]]:
    """An fd that shows EPOLLPRI, as PSI does, whenever the other end sends urgent data."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            yield near.detach(), far


async def test_an_event_wakes_the_waiting_task() -> None:
    with priority_fd() as (fd, far):
        async with PressureTrigger("x/cpu.pressure", fd, SPEC) as trigger, trio.open_nursery() as nursery:
            with trio.move_on_after(0.05) as quiet:
                await trigger.wait()
            assert quiet.cancelled_caught
            woken = trio.Event()

            async def waits() -> None:
                await trigger.wait()
                woken.set()

            nursery.start_soon(waits)
            await trio.testing.wait_all_tasks_blocked(0.02)
            far.send(b"!", socket.MSG_OOB)
            with trio.fail_after(60):
                await woken.wait()


async def test_an_event_from_before_the_wait_is_not_lost() -> None:
    with priority_fd() as (fd, far):
        async with PressureTrigger("x/cpu.pressure", fd, SPEC) as trigger:
            far.send(b"!", socket.MSG_OOB)
            with trio.fail_after(60):
                await trigger.wait()


async def test_a_removed_group_ends_the_wait_with_gone() -> None:
    with priority_fd() as (fd, far):
        async with PressureTrigger("x/cpu.pressure", fd, SPEC) as trigger:
            far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            far.close()
            with trio.fail_after(60), pytest.raises(CgroupGoneError, match=r"x/cpu\.pressure.*group is gone"):
                await trigger.wait()


async def test_closing_ends_waiting_tasks_and_may_be_repeated() -> None:
    with priority_fd() as (fd, _far):
        trigger = PressureTrigger("x", fd, SPEC)
        async with trio.open_nursery() as nursery:

            async def waits() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await trigger.wait()

            nursery.start_soon(waits)
            await trio.testing.wait_all_tasks_blocked(0.02)
            await trigger.aclose()
        await trigger.aclose()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


async def test_a_cancelled_close_still_closes(autojump_clock: MockClock) -> None:
    with priority_fd() as (fd, _far):
        trigger = PressureTrigger("x", fd, SPEC)
        with trio.CancelScope() as scope:
            scope.cancel()
            await trigger.aclose()
        assert scope.cancelled_caught
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


@pytest.mark.kernel
def test_this_kernels_pressure_is_readable() -> None:
    if not os.path.exists("/proc/pressure/cpu"):
        pytest.skip("needs a kernel with PSI: /proc/pressure/cpu is missing")
    for resource in PressureResource:
        assert read_pressure(node_pressure_file(resource)).some_us >= 0


@pytest.mark.kernel
async def test_real_stalls_fire_a_real_trigger_and_removal_ends_it() -> None:
    with kernel_groups("pressure", "unified") as (hierarchy, group):
        path = group_pressure_file(hierarchy, group, PressureResource.CPU)
        if path is None:
            pytest.skip(f"needs PSI per group: {hierarchy.directory('unified', group)}/cpu.pressure is missing")
        spinners = two_spinners(min(os.sched_getaffinity(0)))
        async with open_trigger(path, TriggerSpec(stall_us=50_000, window_us=1_000_000)) as trigger:
            try:
                for spinner in spinners:
                    Path(hierarchy.directory("unified", group), "cgroup.procs").write_text(str(spinner.pid))
                with trio.fail_after(60):
                    await trigger.wait()
                # An event that fires without a waiter is kept for the next wait, not one window later.
                await trio.sleep(4.5)
                with trio.fail_after(0.5):
                    await trigger.wait()
            finally:
                for spinner in spinners:
                    spinner.kill()
                for spinner in spinners:
                    await trio.to_thread.run_sync(spinner.wait)
            assert read_pressure(path).some_us > 50_000
            os.rmdir(hierarchy.directory("unified", group))
            with trio.fail_after(60), pytest.raises(CgroupGoneError):
                await wait_for_ever(trigger)


def two_spinners(cpu: int) -> list[subprocess.Popen[bytes]]:
    code = f"import os; os.sched_setaffinity(0, [{cpu}])\nwhile True: pass"
    return [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]


async def wait_for_ever(trigger: PressureTrigger) -> None:
    while True:
        await trigger.wait()
