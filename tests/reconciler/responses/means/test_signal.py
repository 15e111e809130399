"""Ending real processes by signals: all of the pod's, none of any other pod, also while they fork or are stopped."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from cgroupfs import subtree
from cgroupfs.subtree import Subtree, SubtreeGroup
from reconciler.responses.eviction import journal
from reconciler.responses.means import base
from reconciler.responses.means import signal as way
from reconciler.responses.means.config import EvictionMeans
from reconciler.responses.means.processes import OwnPodError, PodTermination, ProcessStat, read_stat
from reconciler.responses.means.signal import SignalEviction
from state.eviction import EvictionCase, EvictionOutcome, EvictionStep
from state.schema import EVICTIONS
from state.store import Store, StoreBatch
from tests.fakes.constants import varied
from tests.fakes.victims import CONTROLLERS, FORKS, IGNORES_TERM, Victim, a_victim, an_order
from tests.fakes.work import FakeWork

pytestmark = pytest.mark.kernel
CONFIG = varied(EvictionMeans(), kill_s=15.0)


@pytest.fixture
def victim() -> Iterator[Victim]:
    with a_victim("signal") as item:
        yield item


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["/bin/sleep", "999"])
    yield process
    process.kill()
    process.wait()


async def end(
    victim: Victim, *, grace_s: float = 1.0, kill_s: float = 15.0
) -> tuple[FakeWork, EvictionOutcome | None, str]:
    with Subtree.open(victim.hierarchy, victim.group) as tree:
        work = FakeWork(EvictionCase(order=an_order(victim), target=victim.target), tree, grace_s=grace_s)
        result = await SignalEviction(varied(EvictionMeans(), kill_s=kill_s)).terminate(work)
    return work, result.outcome, result.detail


async def test_who_heeds_sigterm_is_not_killed(victim: Victim, bystander: subprocess.Popen[bytes]) -> None:
    ours = [victim.sleep(), victim.sleep()]
    work, outcome, _ = await end(victim, grace_s=10.0)
    assert outcome is EvictionOutcome.DONE
    assert work.steps == [EvictionStep.TERMINATE]
    assert [process.wait() for process in ours] == [-signal.SIGTERM] * 2
    assert victim.empty()
    assert bystander.poll() is None


async def test_who_ignores_sigterm_gets_the_grace_and_then_sigkill(victim: Victim) -> None:
    stubborn = victim.python(IGNORES_TERM)
    begun = time.monotonic()
    work, outcome, detail = await end(victim, grace_s=0.5)
    assert (outcome, work.steps) == (EvictionOutcome.DONE, [EvictionStep.TERMINATE, EvictionStep.KILL])
    assert "SIGKILL" in detail
    assert time.monotonic() - begun >= 0.5
    assert stubborn.wait() == -signal.SIGKILL


@pytest.mark.parametrize("how", ["cgroup.kill", "loop", "freezer"])
async def test_a_fork_bomb_ends_and_nothing_stays_frozen(
    victim: Victim, how: str, monkeypatch: pytest.MonkeyPatch, bystander: subprocess.Popen[bytes]
) -> None:
    victim.limit(100)
    stops: list[bool] = []
    real = Subtree.stop

    def stop(tree: Subtree) -> bool:
        stops.append(real(tree))
        return stops[-1]

    monkeypatch.setattr(Subtree, "stop", stop)
    if how != "cgroup.kill":
        monkeypatch.setattr(Subtree, "kill", lambda _: False)
        monkeypatch.setattr(way, "_LOOPS", 1 if how == "freezer" else 1000)
    for _ in range(10):
        victim.python(FORKS)
        _, outcome, detail = await end(victim, grace_s=0.1)
        assert outcome is EvictionOutcome.DONE, detail
        assert victim.empty()
        assert victim.frozen() == victim.frozen("/c") == "THAWED"
        if how != "freezer" or stops:
            break  # now and then the plain kill before it is quick enough
    # On a busy machine the killed may need more than one round to be gone, and a later one stops them.
    assert (set(stops) == {True}) if how == "freezer" else (how != "loop" or stops == [])
    assert bystander.poll() is None


@pytest.mark.parametrize("below", ["", "/c"])
async def test_a_frozen_v1_group_is_let_go_before_it_is_signalled(victim: Victim, below: str) -> None:
    if victim.hierarchy.version("freezer") != 1:
        pytest.skip("needs the freezer of cgroup v1")
    process = victim.sleep()
    victim.freeze(below)
    process.terminate()
    process.kill()
    await trio.sleep(0.1)
    assert process.poll() is None  # a frozen v1 group swallows both
    _, outcome, _ = await end(victim, grace_s=5.0)
    assert outcome is EvictionOutcome.DONE
    assert victim.frozen(below) == "THAWED"


async def test_helpers_that_are_started_to_end_well_get_no_sigterm(victim: Victim) -> None:
    script = (
        "trap '/bin/sleep 0.4; echo $?; exit 0' TERM; echo ready; while :; do /bin/sleep 0.05; done"  # sh waits for it
    )
    process = victim.run("/bin/sh", "-c", script)
    assert process.stdout is not None
    process.stdout.readline()
    work, outcome, _ = await end(victim, grace_s=10.0)
    assert (outcome, work.steps) == (EvictionOutcome.DONE, [EvictionStep.TERMINATE])
    assert process.stdout.read() == b"0\n"


@pytest.mark.parametrize("ago_s", [99.0, 1000.0])
async def test_taken_up_after_long_it_gets_a_little_grace_for_it_may_never_have_been_asked(
    victim: Victim, ago_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "LEAST_GRACE_S", 0.3 if ago_s > 100 else 1.3)
    process = victim.python(IGNORES_TERM)
    stat = read_stat(process.pid)
    assert stat is not None
    with Subtree.open(victim.hierarchy, victim.group) as tree:
        case = EvictionCase(
            order=an_order(victim),
            target=victim.target,
            step=EvictionStep.TERMINATE,
            step_s=time.time() - ago_s,
            pid_starts={str(process.pid): stat.start},
        )
        begun = time.monotonic()
        result = await SignalEviction(CONFIG).terminate(
            FakeWork(case, tree, grace_s=100.0, resumed=EvictionStep.TERMINATE)
        )
    assert result.outcome is EvictionOutcome.DONE
    assert base.LEAST_GRACE_S <= time.monotonic() - begun < 60


async def test_taken_up_again_only_those_that_were_there_at_first_are_terminated(
    victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "LEAST_GRACE_S", 0.1)
    first = victim.sleep()
    stat = read_stat(first.pid)
    assert stat is not None
    later = victim.sleep()
    with Subtree.open(victim.hierarchy, victim.group) as tree:
        case = EvictionCase(
            order=an_order(victim),
            target=victim.target,
            step=EvictionStep.TERMINATE,
            step_s=time.time() - 99.7,
            pid_starts={str(first.pid): stat.start, str(later.pid): stat.start - 1},
        )
        work = FakeWork(case, tree, grace_s=100.0, resumed=EvictionStep.TERMINATE)
        begun = time.monotonic()
        result = await SignalEviction(CONFIG).terminate(work)
    assert result.outcome is EvictionOutcome.DONE
    assert work.steps == [EvictionStep.KILL]  # what was journalled keeps its time
    assert (first.wait(), later.wait()) == (-signal.SIGTERM, -signal.SIGKILL)
    assert time.monotonic() - begun < 60  # 0.3 s are left of the grace


async def test_a_pid_that_somebody_else_has_by_now_is_not_signalled(
    victim: Victim, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group lists a process; before it is opened, it ends and its id is another process's."""
    process = victim.sleep()
    real = SubtreeGroup.pids
    looks: list[list[int]] = []

    def pids(group: SubtreeGroup) -> list[int]:
        if process.pid not in (pids := list(real(group))):
            return pids
        # Every first look at a group is followed by one when the listed ones are held.
        looks.append(pids if len(looks) % 2 else [bystander.pid])
        return looks[-1]

    monkeypatch.setattr(SubtreeGroup, "pids", lambda group: iter(pids(group)))
    with Subtree.open(victim.hierarchy, victim.group) as tree:
        assert await PodTermination().signal(tree, signal.SIGKILL) == 0
    assert looks[:2] == [[bystander.pid], [process.pid]]
    assert bystander.poll() is None


@pytest.mark.parametrize("pidfd", [True, False])
async def test_another_process_under_a_known_id_is_not_signalled(victim: Victim, pidfd: bool) -> None:
    process = victim.sleep()
    stat = read_stat(process.pid)
    assert stat is not None
    ours = PodTermination()
    ours._pidfd = pidfd
    with Subtree.open(victim.hierarchy, victim.group) as tree:
        assert await ours.signal(tree, signal.SIGTERM, {process.pid: stat.start + 1}) == 0
        assert await ours.signal(tree, signal.SIGTERM, {process.pid: stat.start}) == 1
    assert process.wait() == -signal.SIGTERM


async def test_ourselves_process_1_and_kernel_threads_are_never_signalled(victim: Victim, tmp_path: Path) -> None:
    process = victim.sleep()
    with Subtree.open(victim.hierarchy, victim.group) as tree:
        ours = PodTermination(ourselves=process.pid)
        with pytest.raises(OwnPodError):
            await ours.members(tree)
        with pytest.raises(OwnPodError):
            await ours.signal(tree, signal.SIGKILL)
        directory = tmp_path / str(process.pid)
        directory.mkdir()
        fields = ["S", "2", *["0"] * 4, str(0x00200040), *["0"] * 12, "77", *["0"] * 10]
        (directory / "stat").write_text(f"{process.pid} (vhost (1) x) {' '.join(fields)}\n")
        thread = PodTermination(str(tmp_path))
        assert read_stat(process.pid, str(tmp_path)) == ProcessStat("vhost (1) x", "S", 2, 0x00200040, 77)
        assert await thread.signal(tree, signal.SIGKILL) == 0
    assert process.poll() is None
    assert PodTermination()._hold(1) is None


async def test_who_does_not_die_is_named_with_what_he_waits_for(
    victim: Victim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    process = victim.sleep()
    stat = Path(f"/proc/{process.pid}/stat").read_text()
    directory = tmp_path / str(process.pid)
    directory.mkdir()
    (directory / "stat").write_text(stat.replace(") S", ") D").replace(") R", ") D"))
    (directory / "wchan").write_text("nfs_wait_bit_killable")
    monkeypatch.setattr(Subtree, "kill", lambda _: False)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)
    with Subtree.open(victim.hierarchy, victim.group) as tree:
        work = FakeWork(
            EvictionCase(order=an_order(victim), target=victim.target),
            tree,
            grace_s=0.1,
            processes=PodTermination(str(tmp_path)),
        )
        result = await SignalEviction(varied(EvictionMeans(), kill_s=1.0)).terminate(work)
    assert result.outcome is None
    assert result.detail == f"still running 1 s after SIGKILL: {process.pid} (sleep, D, in nfs_wait_bit_killable)"


async def test_a_frozen_group_above_the_pod_is_named(victim: Victim) -> None:
    if victim.hierarchy.version("freezer") != 1:
        pytest.skip("needs the freezer of cgroup v1")
    process = victim.sleep()
    victim.freeze()
    try:
        with Subtree.open(victim.hierarchy, f"{victim.group}/c") as tree:
            case = EvictionCase(order=an_order(victim), target=victim.target)
            result = await SignalEviction(varied(EvictionMeans(), kill_s=1.0)).terminate(
                FakeWork(case, tree, grace_s=0.1)
            )
        assert result.outcome is None
        assert result.detail.startswith("a parent group is frozen")
        assert f"{process.pid} (sleep" in result.detail
    finally:
        victim.end()


async def test_a_group_of_the_same_name_that_came_later_is_left_alone(victim: Victim) -> None:
    inodes = victim.target.inodes
    for controller in ("cpu", "memory", "pids", "freezer", "unified"):
        os.rmdir(victim.directory(controller))
        os.rmdir(victim.directory(controller, ""))
    # The kernel gives a new group a new number.
    for controller in ("cpu", "memory", "pids", "freezer", "unified"):
        os.makedirs(victim.directory(controller))
    process = victim.sleep()
    with Subtree.open(victim.hierarchy, victim.group, inodes) as tree:
        assert not tree.exists
        assert not any(tree.scan())
        assert not tree.kill()
        assert await PodTermination().signal(tree, signal.SIGKILL) == 0
    assert process.poll() is None


def only_in(victim: Victim, controller: str, group: str) -> subprocess.Popen[bytes]:
    """A process that no other hierarchy has in the pod: neither they nor cgroup.kill find it."""
    process = victim.python(IGNORES_TERM)
    for each in CONTROLLERS:
        above = victim.hierarchy.directory(each, "/") if each != controller else f"{victim.directory(each)}/{group}"
        Path(above, "cgroup.procs").write_text(str(process.pid))
    return process


async def test_a_process_in_one_of_very_many_groups_is_killed_round_by_round(
    victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subtree, "MOST_GROUPS", 15)
    monkeypatch.setattr(way, "_LONGEST_PAUSE_S", 0.01)
    for number in range(30):
        os.mkdir(f"{victim.directory('pids')}/{number}")
    process = only_in(victim, "pids", "29")
    work, outcome, detail = await end(victim, grace_s=0.1, kill_s=3.0)
    assert process.wait() == -signal.SIGKILL
    assert work.steps == [EvictionStep.TERMINATE, EvictionStep.KILL]
    # The groups are still too many to say that nothing is left.
    assert outcome is None
    assert detail == "processes may be left 3 s after SIGKILL: only 15 groups in it are listed at a time"


async def test_a_process_nested_deeper_than_a_path_may_be_long_is_killed(victim: Victim) -> None:
    process, name = only_in(victim, "pids", ""), "n" * 250
    numbers = [os.open(victim.directory("pids"), os.O_RDONLY)]
    try:
        for _ in range(20):
            os.mkdir(name, dir_fd=numbers[-1])
            numbers.append(os.open(name, os.O_RDONLY, dir_fd=numbers[-1]))
        file = os.open("cgroup.procs", os.O_WRONLY, dir_fd=numbers[-1])
        os.write(file, str(process.pid).encode())
        os.close(file)
        _, outcome, detail = await end(victim, grace_s=0.1)
        assert (outcome, detail) == (EvictionOutcome.DONE, "killed with SIGKILL")
        assert process.wait() == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
        while len(numbers) > 1:
            os.close(numbers.pop())
            os.rmdir(name, dir_fd=numbers[-1])
        os.close(numbers[0])


def test_a_thaw_without_a_daemon_says_that_very_many_groups_may_still_be_frozen(
    victim: Victim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if victim.hierarchy.version("freezer") != 1:
        pytest.skip("needs the freezer of cgroup v1")
    case = EvictionCase(order=an_order(victim), target=victim.target, step=EvictionStep.KILL, boot="b")
    store = Store(str(tmp_path / "state.db"), boot="b")
    batch = StoreBatch()
    batch.put(EVICTIONS, case.order.id, journal._FORM.encode(journal._CaseRow(case=case)))
    store.apply(batch)
    victim.freeze()
    assert journal.thaw_killed(victim.hierarchy, store) == ([victim.group], [])
    for number in range(9):
        os.mkdir(f"{victim.directory('freezer')}/{number}")
    monkeypatch.setattr(subtree, "MOST_GROUPS", 4)
    assert journal.thaw_killed(victim.hierarchy, store) == (
        [],
        [f"{victim.group}: groups in it may still be frozen: only 4 groups in it are listed at a time"],
    )
    store.close()
