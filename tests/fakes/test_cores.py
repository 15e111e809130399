"""The fake of core scheduling answers as the kernel does: one list of calls, on both."""

import contextlib
import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reconciler.actuators.core_sched.prctl import CookieCarrier, Prctl, RealPrctl, unable
from tests.fakes.cores import FakeCores

Spawn = Callable[[], int]
NOBODY = 2**22 - 1
"""No task has it: above the largest number that the kernel gives by default."""


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.kernel)])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Prctl, Spawn]]:
    """The calls, and a way to start a process without a cookie; on the fake, and on this machine's kernel."""
    if request.param == "fake":
        cores = FakeCores(tmp_path)
        cores.group("/a")
        yield cores, lambda: cores.spawn("/a")
        return
    real = RealPrctl()
    if why := unable(real):
        pytest.skip(f"THE FAKE IS NOT HELD AGAINST THE KERNEL: {why} (tests/vm/cores.sh)")
    with contextlib.ExitStack() as stack:

        def spawn() -> int:
            process = stack.enter_context(subprocess.Popen(["/bin/sleep", "600"]))
            stack.callback(process.kill)
            return process.pid

        yield real, spawn


def answer(call: Callable[[], object]) -> object:
    """What a call answers: a value, or the errno's name."""
    try:
        return call()
    except OSError as exc:
        return errno.errorcode[exc.errno or 0]


def test_a_cookie_goes_from_thread_to_thread_and_ends_with_the_last(machine: tuple[Prctl, Spawn]) -> None:
    prctl, spawn = machine
    number, other = spawn(), spawn()
    assert [prctl.get(number), prctl.get(other), prctl.get(0)] == [0, 0, 0]
    with CookieCarrier() as carrier:
        assert carrier.call(prctl.get, 0) == 0
        carrier.call(prctl.create)
        cookie = carrier.call(prctl.get, 0)
        assert cookie
        carrier.call(prctl.share_to, number)
        # Shared, not moved; and of no other.
        assert [carrier.call(prctl.get, 0), prctl.get(number), prctl.get(other), prctl.get(0)] == [cookie, cookie, 0, 0]
        carrier.call(prctl.create)
        assert carrier.call(prctl.get, 0) not in {0, cookie}
    # The thread that carried it is gone, the cookie is not.
    assert prctl.get(number) == cookie
    with CookieCarrier() as carrier:
        assert carrier.call(prctl.get, 0) == 0
        carrier.call(prctl.share_from, number)
        carrier.call(prctl.share_to, other)
        assert [carrier.call(prctl.get, 0), prctl.get(other)] == [cookie, cookie]
    with CookieCarrier() as carrier:
        carrier.call(prctl.share_to, number)
        assert [prctl.get(number), prctl.get(other)] == [0, cookie]
        # From one without any: none.
        carrier.call(prctl.create)
        carrier.call(prctl.share_from, number)
        assert carrier.call(prctl.get, 0) == 0


def test_a_task_that_is_not_there_is_esrch(machine: tuple[Prctl, Spawn]) -> None:
    prctl, _ = machine
    with CookieCarrier() as carrier:
        for call in (prctl.get, prctl.share_from, prctl.share_to):
            assert answer(lambda call=call: carrier.call(call, NOBODY)) == "ESRCH"  # type: ignore[misc]


def test_a_thread_inherits_from_the_one_that_starts_it() -> None:
    prctl = RealPrctl()
    if why := unable(prctl):
        pytest.skip(f"WHAT FORK DOES TO A COOKIE IS NOT TESTED: {why} (tests/vm/cores.sh)")
    numbers: list[int] = []

    def parent() -> None:
        prctl.create()
        numbers.append(prctl.get(0))
        child = threading.Thread(target=lambda: numbers.append(prctl.get(0)))
        child.start()
        child.join()
        process = subprocess.Popen(["/bin/sleep", "600"])
        numbers.append(prctl.get(process.pid))
        process.kill()
        process.wait()

    thread = threading.Thread(target=parent)
    thread.start()
    thread.join()
    assert len(set(numbers)) == 1
    assert numbers[0]
    assert prctl.get(os.getpid()) == 0


def test_a_kernel_without_it_answers_einval_and_one_core_threads_enodev(tmp_path: Path) -> None:
    cores = FakeCores(tmp_path)
    cores.smt = False
    assert answer(lambda: cores.get(0)) == "ENODEV"
    cores.built = False
    assert answer(lambda: cores.get(0)) == "EINVAL"
    # This machine's kernel: one of the three, and in words.
    expected = {0: "", errno.EINVAL: "CONFIG_SCHED_CORE", errno.ENODEV: "two threads online"}
    try:
        RealPrctl().get(0)
        number = 0
    except OSError as exc:
        number = exc.errno or 0
    assert expected[number] in unable(RealPrctl())
    assert bool(unable(RealPrctl())) == bool(number)
