"""Waiting for the lock, and the request to its holder: found in the kernel's list, sent if it catches the signal."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from reconciler.runtime import standby
from reconciler.runtime.lock import InstanceLock, holder
from reconciler.runtime.standby import NotHandedOverError, StopSignals

HOLDER = """
import signal, sys, time
from reconciler.runtime.lock import InstanceLock
lock = InstanceLock(sys.argv[1])
mode = sys.argv[2]
if mode == "yields":
    signal.signal(signal.SIGUSR2, lambda *_: (lock.release(), print("asked", flush=True)))
elif mode == "keeps":
    signal.signal(signal.SIGUSR2, lambda *_: print("asked", flush=True))
print("held", flush=True)
time.sleep(60)
"""


def wait_for_lock(directory: str, *, request: bool, waiting: Callable[[str], None]) -> InstanceLock:
    with StopSignals() as stops:
        lock = standby.wait_for_lock(directory, stops, request=request, waiting=waiting)
    assert lock is not None
    return lock


def held(directory: Path, mode: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory), mode], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_free_lock_is_taken_without_a_word(tmp_path: Path) -> None:
    with wait_for_lock(str(tmp_path), request=True, waiting=pytest.fail):
        assert holder(str(tmp_path / "lock")) == os.getpid()


def test_a_holder_that_knows_the_request_yields(tmp_path: Path) -> None:
    texts: list[str] = []
    with held(tmp_path, "yields") as process:
        with wait_for_lock(str(tmp_path), request=True, waiting=texts.append):
            pass
        process.kill()
    (text,) = texts
    assert text.endswith("; it hands over")


@pytest.mark.parametrize("request_it", [True, False])
def test_a_holder_that_would_die_of_the_signal_is_waited_for(tmp_path: Path, *, request_it: bool) -> None:
    texts: list[str] = []
    with held(tmp_path, "unaware" if request_it else "yields") as process:
        threading.Timer(0.5, process.kill).start()
        with wait_for_lock(str(tmp_path), request=request_it, waiting=texts.append):
            assert process.wait() == -signal.SIGKILL
    assert texts[0].endswith("; waiting for its end")


def test_a_holder_that_refuses_ends_the_requester(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "_YIELDS_S", 0.3)
    with held(tmp_path, "keeps") as process:
        with pytest.raises(NotHandedOverError, match="does not hand over"):
            wait_for_lock(str(tmp_path), request=True, waiting=lambda _: None)
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait_and_leaves_no_handler(tmp_path: Path, number: signal.Signals) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
    before = [signal.getsignal(each) for each in numbers]
    with held(tmp_path, "unaware") as process, StopSignals() as stops:
        threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
        assert standby.wait_for_lock(str(tmp_path), stops, request=True, waiting=lambda _: None) is None
        process.kill()
    assert stops.received == number.name
    assert [signal.getsignal(each) for each in numbers] == before


def test_a_refused_requester_ends_before_a_rollout_counts_it_as_available() -> None:
    """Until then the holder answers its probes: both are on the node's port."""
    text = (Path(__file__).parents[3] / "deploy/kubernetes/base/daemonset.yaml").read_text()
    ready_s = yaml.safe_load(text)["spec"]["minReadySeconds"]
    # A start on a busy node takes up to 10 s; the margin is for more.
    assert ready_s >= 2 * (standby._YIELDS_S + 10)
    assert standby._YIELDS_S > 15


def test_a_signal_before_the_wait_is_not_lost(tmp_path: Path) -> None:
    with StopSignals() as stops:
        os.kill(os.getpid(), signal.SIGTERM)
        assert standby.wait_for_lock(str(tmp_path), stops, request=True, waiting=pytest.fail) is None


def test_requests_to_a_daemon_do_not_end_a_standby(tmp_path: Path) -> None:
    with held(tmp_path, "unaware") as process:
        for delay_s, number in ((0.1, signal.SIGHUP), (0.2, signal.SIGUSR2)):
            threading.Timer(delay_s, os.kill, (os.getpid(), number)).start()
        threading.Timer(0.5, process.kill).start()
        wait_for_lock(str(tmp_path), request=True, waiting=lambda _: None).release()


def test_without_pidfds_the_holders_end_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    monkeypatch.delattr(os, "pidfd_open")
    with held(tmp_path, "yields") as process:
        threading.Timer(0.3, process.kill).start()
        wait_for_lock(str(tmp_path), request=True, waiting=texts.append).release()
    assert texts[0].endswith("; waiting for its end")


def test_a_pid_in_the_lock_file_is_not_believed(tmp_path: Path) -> None:
    InstanceLock(str(tmp_path)).release()
    (tmp_path / "lock").write_text(f"{os.getpid()}\n")
    assert holder(str(tmp_path / "lock")) is None
    assert not standby._request(str(tmp_path / "lock"))


def test_the_holder_is_found_on_a_file_system_whose_files_have_devices_of_their_own(tmp_path: Path) -> None:
    """An overlay of two file systems here, as btrfs is on some distributions: stat(2) and the kernel's list differ."""
    for name in ("low", "high", "joined"):
        (tmp_path / name).mkdir()
    script = """
set -e; cd "$1"
mount -t tmpfs none high; mkdir high/up high/work
mount -t overlay none -o lowerdir=low,upperdir=high/up,workdir=high/work,xino=off joined
exec "$2" -c '
import os
from reconciler.runtime.lock import InstanceLock, holder
with InstanceLock("joined/state"):
    print(holder("joined/state/lock") == os.getpid())
'
"""
    run = ["unshare", "--mount", "bash", "-c", script, "bash", str(tmp_path), sys.executable]
    result = subprocess.run(
        run, check=False, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    if "mount" in result.stderr or "unshare" in result.stderr:
        pytest.skip(f"REAL KERNEL TEST NOT RUN: no mount can be made: {result.stderr}")
    assert result.stdout == "True\n", result.stderr


@pytest.mark.parametrize("line", ["", "1: FLOCK", "1: -> FLOCK ADVISORY WRITE 9 {inode} 0 EOF", "x" * 999])
def test_other_lines_of_the_kernels_list_name_no_holder(tmp_path: Path, line: str) -> None:
    (tmp_path / "lock").touch()
    status = os.stat(tmp_path / "lock")
    inode = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    (tmp_path / "locks").write_text(f"{line.format(inode=inode)}\n")
    assert holder(str(tmp_path / "lock"), str(tmp_path / "locks")) is None
    (tmp_path / "locks").write_text(f"{line.format(inode=inode)}\n2: FLOCK  ADVISORY  WRITE 77 {inode} 0 EOF\n")
    assert holder(str(tmp_path / "lock"), str(tmp_path / "locks")) == 77
