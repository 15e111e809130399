"""``bypassctl doctor --prove`` on the real kernel: the trials hold, and nothing is left, not even by a killed run."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cgroupfs.errors import CgroupError
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.trial import PREFIX, TrialGroup, remove_left
from reconciler.cli import prove
from reconciler.cli.exits import Exit
from reconciler.cli.planted import Planted, measured, spin
from reconciler.cli.prove import ProofState
from reconciler.runtime.lock import InstanceLock
from reconciler.runtime.trials import DIRECTORY, clean_left
from state.store import Store, boot_id
from tests.fakes.daemonprocess import environment
from tests.fakes.forkserver import forked_program
from tests.fakes.livenode import LiveNode
from tests.reconciler.cli.conftest import Run

PROJECT = Path(__file__).parents[3]


def real_hierarchy() -> Hierarchy:
    if os.geteuid() != 0:
        pytest.skip("REAL KERNEL TEST NOT RUN: needs root")
    hierarchy = Hierarchy.detect()
    if hierarchy.version("cpu") is None:
        pytest.skip("REAL KERNEL TEST NOT RUN: no cpu controller is mounted")
    try:
        with TrialGroup(hierarchy, "test", ["cpu"]):
            pass
    except CgroupError as exc:
        pytest.skip(f"REAL KERNEL TEST NOT RUN: {exc}")
    return hierarchy


def left(hierarchy: Hierarchy) -> list[str]:
    roots = {hierarchy.directory(controller, "/").rstrip("/") for controller in hierarchy.versions()}
    return [f"{root}/{name}" for root in roots for name in os.listdir(root) if name.startswith(PREFIX)]


def killed_run(state_directory: Path) -> list[int]:
    """A ``doctor --prove`` that was killed with processes in its groups, which have ended: their pids."""
    hierarchy = real_hierarchy()
    words = ["doctor", "--prove", "--store", f"{state_directory}/state.db"]
    doctor = forked_program(words, environment(), os.devnull)
    try:
        deadline = time.monotonic() + 60
        pids: list[int] = []
        while not pids and time.monotonic() < deadline:
            time.sleep(0.005)
            for directory in left(hierarchy):
                pids = [int(pid) for pid in Path(directory, "cgroup.procs").read_text().split()] or pids
        assert pids
        assert clean_left(hierarchy, str(state_directory)) == ((), ())  # it runs: its lock is held
        assert left(hierarchy)
    finally:
        doctor.kill()
        doctor.wait(60)
    while not all(map(gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return pids


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.kernel
def test_the_kernel_holds_what_it_offers_and_the_results_are_kept(run: Run, tmp_path: Path) -> None:
    hierarchy = real_hierarchy()
    code, out, err = run("doctor", "--prove", "--store", str(tmp_path / "state.db"), "-o", "json")
    proofs = {row["name"]: row for row in json.loads(out)["proofs"]}
    assert (code, err) == (Exit.OK, "")
    assert list(proofs) == list(prove.TRIALS)
    assert proofs["CPU quota"]["state"] == "holds", proofs
    assert all(row["state"] in {"holds", "unknown"} for row in proofs.values()), proofs
    assert left(hierarchy) == []
    record = tmp_path / DIRECTORY / prove.RESULTS
    assert record.stat().st_mode & 0o777 == 0o600
    assert [row["name"] for row in json.loads(record.read_text())[-1]] == list(prove.TRIALS)


@pytest.mark.kernel
def test_a_limit_that_is_not_there_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    hierarchy = real_hierarchy()
    written: list[tuple[str, str]] = []

    def without(_group: TrialGroup, _controller: str, file: str, text: str) -> None:
        written.append((file, text))

    monkeypatch.setattr(TrialGroup, "write", without)
    holds, found = prove._quota(hierarchy, "/")
    assert written
    assert not holds, found
    assert left(hierarchy) == []


@pytest.mark.kernel
def test_a_killed_run_leaves_no_process_and_the_next_one_or_the_daemon_removes_its_groups(tmp_path: Path) -> None:
    hierarchy = real_hierarchy()
    assert all(map(gone, killed_run(tmp_path)))
    there = left(hierarchy)
    assert there
    removed, remaining = clean_left(hierarchy, str(tmp_path))
    assert (sorted(removed), remaining) == (sorted(there), ())
    assert left(hierarchy) == []


@pytest.mark.kernel
def test_restore_removes_what_a_killed_run_left_with_and_without_a_store(run: Run, tmp_path: Path) -> None:
    hierarchy = real_hierarchy()
    words = ("restore", "--socket", str(tmp_path / "none"), "--store", str(tmp_path / "state.db"))
    killed_run(tmp_path)
    assert left(hierarchy)
    ran = run(*words)
    assert ran.code == Exit.UNREACHABLE, "what bypassd wrote is unknown without a store"
    assert ran.err.startswith("bypassctl: removed what a killed doctor --prove left: ")
    assert left(hierarchy) == []
    Store(str(tmp_path / "state.db"), boot=boot_id(), version="1", node="n").close()
    killed_run(tmp_path)
    there = left(hierarchy)
    code, out, err = run(*words, "-o", "json")
    assert (code, err) == (Exit.OK, "")
    assert sorted(json.loads(out)["trials"]["removed"]) == sorted(there)
    assert left(hierarchy) == []
    killed_run(tmp_path)
    assert run(*words).out.splitlines()[-1].startswith("removed what a killed doctor --prove left: ")
    assert left(hierarchy) == []
    assert run(*words).out == "nothing to restore\n"


@pytest.mark.kernel
def test_a_group_that_cannot_be_removed_is_named_and_is_no_success(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hierarchy = real_hierarchy()
    Store(str(tmp_path / "state.db"), boot=boot_id(), version="1", node="n").close()
    (tmp_path / DIRECTORY).mkdir()
    with TrialGroup(hierarchy, "busy", ["cpu"]) as group:
        # A process that the kernel does not end for two seconds, such as one in an uninterruptible sleep.
        monkeypatch.setattr("cgroupfs.trial.os.rmdir", lambda path: (_ for _ in ()).throw(OSError(errno.EBUSY, path)))
        ran = run("restore", "--socket", str(tmp_path / "none"), "--store", str(tmp_path / "state.db"))
        monkeypatch.undo()
    assert ran.code == Exit.NOT_OK
    assert f"{group.path}: left by a killed doctor --prove, and cannot be removed" in ran.err


@pytest.mark.kernel
def test_terminated_it_undoes_what_it_was_doing(tmp_path: Path) -> None:
    hierarchy = real_hierarchy()
    command = [sys.executable, "-m", "reconciler.cli", "doctor", "--prove", "--store", str(tmp_path / "state.db")]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.DEVNULL) as doctor:
        deadline = time.monotonic() + 60
        while not left(hierarchy) and time.monotonic() < deadline:
            time.sleep(0.005)
        doctor.terminate()
        assert doctor.wait(30) == 128 + signal.SIGTERM
    assert left(hierarchy) == []


class _Finalized:
    """An object whose finalizer gets the signal: what a handler raises in it is dropped by the interpreter."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.kernel
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_terminated_where_an_exception_is_lost_it_ends_after_the_trial(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real_hierarchy()
    tried: list[str] = []

    def terminated(_hierarchy: Hierarchy, _directory: str) -> tuple[bool, str]:
        tried.append("first")
        _Finalized()
        return True, ""

    def never(_hierarchy: Hierarchy, _directory: str) -> tuple[bool, str]:
        tried.append("second")
        return True, ""

    monkeypatch.setattr(prove, "TRIALS", {"first": terminated, "second": never})
    before = signal.getsignal(signal.SIGTERM)
    code, _, _ = run("doctor", "--prove", "--store", str(tmp_path / "state.db"))
    assert code == 128 + signal.SIGTERM
    assert tried == ["first"]
    assert signal.getsignal(signal.SIGTERM) == before
    assert not (tmp_path / DIRECTORY / prove.RESULTS).exists()


@pytest.mark.kernel
def test_a_group_is_removed_with_its_processes_and_only_groups_of_our_names_are() -> None:
    hierarchy = real_hierarchy()
    with Planted(spin) as child:
        group = TrialGroup(hierarchy, "test", ["cpu"]).__enter__()
        group.add(child.pid)
        other = hierarchy.directory("cpu", "/bypassd-test-other")
        os.mkdir(other)
        try:
            assert remove_left(hierarchy) == [hierarchy.directory("cpu", group.path)]
            assert os.path.isdir(other)
        finally:
            os.rmdir(other)
        assert gone(child.pid)


def test_a_planted_process_uses_no_more_than_its_cpu_time() -> None:
    with Planted(spin, cpu_s=1) as child:
        child.start()
        _, status, usage = os.wait4(child.pid, 0)
        child._ended = usage
    assert os.WIFSIGNALED(status)
    # Only the limit ends it so. It counts the ticks that found the process running: beside four that run for 3 ms and
    # sleep for 1 ms, its second was 0.58 to 1.05 s by what ``wait4`` says, and 1.00 s on a quiet machine.
    assert os.WTERMSIG(status) in {signal.SIGKILL, signal.SIGXCPU}
    assert usage.ru_utime + usage.ru_stime < 1.5


def test_one_that_was_not_started_does_nothing() -> None:
    with Planted(spin) as idle, Planted(lambda: None) as short:
        assert measured([short], 0.0)[0] < 0.5
        assert idle.end() < 0.5


def test_it_is_refused_without_root_on_a_copy_and_beside_another_run(
    run: Run, live: LiveNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("doctor", "--prove", "--root", str(live.root)).code == Exit.USAGE
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    code, out, err = run("doctor", "--prove", "--store", str(tmp_path / "state.db"))
    assert (code, out) == (Exit.REFUSED, "")
    assert "sudo" in err
    assert list(tmp_path.glob(DIRECTORY)) == []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    lock = InstanceLock(str(tmp_path / DIRECTORY))
    try:
        refused = run("doctor", "--prove", "--store", str(tmp_path / "state.db"))
    finally:
        lock.release()
    assert refused.code == Exit.REFUSED
    assert str(os.getpid()) in refused.err


@pytest.mark.parametrize(
    ("error", "reason"),
    [(PermissionError(1, "no"), "EPERM"), (psutil.NoSuchProcess(7), "process no longer exists (pid=7)")],
)
def test_a_trial_that_cannot_be_made_is_unknown_with_its_reason(
    live: LiveNode, tmp_path: Path, error: Exception, reason: str
) -> None:
    def broken(_hierarchy: Hierarchy, _directory: str) -> tuple[bool, str]:
        raise error

    proof = prove._tried("x", broken, Hierarchy.detect(str(live.root)), str(tmp_path))
    assert (proof.state, proof.found) == (ProofState.UNKNOWN, reason)


def test_the_daemons_start_removes_what_a_killed_run_left(live: LiveNode) -> None:
    state = os.path.dirname(live.config.store.path)
    group = live.place().hierarchy.directory("cpu", f"/{PREFIX}quota")
    os.mkdir(group)
    with live.agent():
        assert os.path.isdir(group)  # no trial was ever run with this state directory
    os.makedirs(os.path.join(state, DIRECTORY))
    with live.agent():
        assert not os.path.exists(group)


def test_the_record_is_bounded_and_a_damaged_one_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / prove.RESULTS
    path.write_text("{")
    for _ in range(30):
        prove._keep(str(tmp_path), [prove.Proof("x", ProofState.HOLDS, "y", 1.0, 0.1)])
    assert len(prove.kept(str(path))) == 20
