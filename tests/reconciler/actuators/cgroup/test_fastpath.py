"""Whether a container's last write came before its program; and the idle class of its init, beside the writes."""

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from cgroupfs.cpuset import CpuSet
from cgroupfs.scheduling import BATCH, IDLE, OTHER
from reconciler.actuators.cgroup.fastpath import MOST_MISSED, FastPath, FastResult, FastWrite, InitClass
from state.entry import BeforeSource
from state.model import RuntimeSpec
from tests.reconciler.actuators.acting import CID, GROUP, Acting


@pytest.mark.parametrize(
    ("comm", "waits", "before"),
    [
        ("runc:[2:INIT]", False, True),
        ("crun", True, True),
        ("3", True, True),
        ("crun", False, False),
        ("app", False, False),
    ],
)
def test_the_runtimes_file_proves_what_the_name_of_cruns_init_does_not(
    tmp_path: Path, comm: str, waits: bool, before: bool
) -> None:
    results: list[FastResult] = []
    fastpath = FastPath(results.append, waits=lambda name: waits and name == "a", root=str(tmp_path))
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "comm").write_text(f"{comm}\n")
    (tmp_path / "cgroup.procs").write_text("7\n")
    (tmp_path / "cpu.shares").write_text("1024")
    write = FastWrite(str(tmp_path), "cpu.shares", "2", ("cpu", "/g", "cpu.shares"))
    fastpath.prepare("a", [write], procs=str(tmp_path), settled=False)
    assert fastpath.execute("a", 0.0)
    assert [result.before_exec for result in results] == [before]


class FakeThreads:
    """Policies by thread; ``refused`` are those that no process may change."""

    def __init__(self, policies: dict[int, int], refused: Sequence[int] = ()) -> None:
        self.policies = policies
        self.refused = refused

    def policy(self, tid: int) -> int:
        if tid not in self.policies:
            raise ProcessLookupError(errno.ESRCH, "no such thread")
        return self.policies[tid]

    def set_policy(self, tid: int, policy: int) -> None:
        if tid in self.refused:
            raise PermissionError(errno.EPERM, "not permitted")
        self.policies[tid] = policy


class Prepared:
    """A fast path, a process 7 with threads, and what was reported."""

    def __init__(self, path: Path, threads: FakeThreads, procs: str = "7\n") -> None:
        self.results: list[FastResult] = []
        self.inits: list[InitClass] = []
        self.directory = str(path)
        self.lane = FastPath(self.results.append, scheduler=threads, root=str(path))
        for tid in threads.policies:
            (path / "proc" / "7" / "task" / str(tid)).mkdir(parents=True)
        (path / "proc" / "7" / "comm").write_text("runc:[2:INIT]\n")
        (path / "cgroup.procs").write_text(procs)
        (path / "cpu.shares").write_text("1024")

    def prepare_init(self) -> None:
        self.lane.prepare_init("a", procs=self.directory, done=self.inits.append)

    def prepare_write(self, *, settled: bool = False, ahead: bool = False) -> None:
        write = FastWrite(self.directory, "cpu.shares", "2", ("cpu", "/g", "cpu.shares"), ahead=ahead)
        self.lane.prepare("a", [write], procs=self.directory, settled=settled)


def test_all_threads_of_the_init_get_the_class_beside_the_writes_and_before_the_exec(tmp_path: Path) -> None:
    threads = FakeThreads({7: OTHER, 8: BATCH, 9: 1})
    given = Prepared(tmp_path, threads)
    given.prepare_init()
    given.prepare_write()
    assert given.lane.execute("a", 0.0)
    assert threads.policies == {7: IDLE, 8: IDLE, 9: 1}
    (result,) = given.results
    assert (result.errnos, result.init, result.before_exec) == ([0], InitClass(2, 1, 0), True)
    assert given.inits == [InitClass(2, 1, 0)]


def test_a_thread_that_ends_meanwhile_is_no_failure(tmp_path: Path) -> None:
    threads = FakeThreads({7: OTHER, 8: OTHER, 9: OTHER})
    given = Prepared(tmp_path, threads)
    del threads.policies[8]
    given.prepare_init()
    given.lane.execute("a", 0.0)
    assert (threads.policies, given.results[0].init) == ({7: IDLE, 9: IDLE}, InitClass(2, 0, 0))


def test_a_signal_before_anything_was_prepared_counts_when_it_is(tmp_path: Path) -> None:
    given = Prepared(tmp_path, FakeThreads({7: OTHER}))
    (tmp_path / "cpu.shares").write_text("9")
    assert not given.lane.execute("a", 5.0)
    given.prepare_write()
    (result,) = given.results
    assert (result.signal_at, result.errnos, result.creation) == (5.0, [0], True)
    assert (tmp_path / "cpu.shares").read_text() == "2"
    # Once: it is prepared again in each pass.
    given.prepare_write()
    assert len(given.results) == 1


@pytest.mark.parametrize("settled", [True, False])
def test_a_missed_signal_counts_only_for_the_creation_that_it_ended(tmp_path: Path, *, settled: bool) -> None:
    given = Prepared(tmp_path, FakeThreads({7: OTHER}))
    (tmp_path / "cpu.shares").write_text("9")
    given.lane.execute("a", 5.0)
    if not settled:
        given.lane.drop("a")
    given.prepare_write(settled=settled)
    assert (given.results, (tmp_path / "cpu.shares").read_text()) == ([], "9")


@pytest.mark.parametrize(("others", "executed"), [(MOST_MISSED - 1, 1), (MOST_MISSED, 0)])
def test_signals_of_containers_that_are_never_prepared_are_bounded(tmp_path: Path, others: int, executed: int) -> None:
    """Containers of no pod, and those that end at once, are signalled too, and nothing ever drops them."""
    given = Prepared(tmp_path, FakeThreads({7: OTHER}))
    (tmp_path / "cpu.shares").write_text("9")
    given.lane.execute("a", 5.0)
    for number in range(others):
        given.lane.execute(f"other {number}", 6.0)
    given.prepare_write()
    assert len(given.results) == executed


def test_what_is_written_ahead_is_written_again_at_the_signal(tmp_path: Path) -> None:
    threads = FakeThreads({7: OTHER})
    given = Prepared(tmp_path, threads)
    (tmp_path / "cpu.shares").write_text("9")
    given.lane.write_ahead("a")
    assert given.results == []
    given.prepare_init()
    given.prepare_write()
    # What the runtime sets it reads back: another value there would fail the container.
    given.lane.write_ahead("a")
    assert (given.results, (tmp_path / "cpu.shares").read_text()) == ([], "9")
    given.prepare_write(ahead=True)
    given.lane.write_ahead("a")
    (ahead,) = given.results
    assert (ahead.errnos, ahead.creation, ahead.before_exec, ahead.init) == ([0], False, None, None)
    assert ((tmp_path / "cpu.shares").read_text(), threads.policies[7]) == ("2", OTHER)
    # The runtime's own values come up to the signal.
    (tmp_path / "cpu.shares").write_text("9")
    given.lane.execute("a", 0.0)
    assert (given.results[1].creation, given.results[1].before_exec, threads.policies[7]) == (True, True, IDLE)
    assert (tmp_path / "cpu.shares").read_text() == "2"
    # From then on it is not in creation.
    (tmp_path / "cpu.shares").write_text("9")
    given.lane.write_ahead("a")
    assert (tmp_path / "cpu.shares").read_text() == "9"


def test_only_the_first_signal_sets_it(tmp_path: Path) -> None:
    threads = FakeThreads({7: OTHER})
    given = Prepared(tmp_path, threads)
    given.prepare_init()
    given.prepare_write()
    given.lane.execute("a", 0.0)
    threads.policies[7] = OTHER
    given.prepare_write(settled=True)
    given.lane.execute("a", 0.0)
    assert (threads.policies[7], given.results[1].init, len(given.inits)) == (OTHER, None, 1)


def test_a_settled_container_is_never_taken_for_one_in_creation(tmp_path: Path) -> None:
    threads = FakeThreads({7: OTHER})
    given = Prepared(tmp_path, threads)
    given.prepare_init()
    given.prepare_write(settled=True)
    given.lane.execute("a", 0.0)
    assert (threads.policies[7], given.results[0].init) == (OTHER, None)


def test_writes_and_the_class_are_dropped_apart(tmp_path: Path) -> None:
    given = Prepared(tmp_path, FakeThreads({7: OTHER}))
    given.prepare_init()
    given.prepare_write()
    given.lane.drop("a")
    assert given.lane.is_init_prepared("a")
    given.prepare_write()
    given.lane.keep_inits({"b"})
    assert (given.lane.is_init_prepared("a"), "a" in given.lane) == (False, True)
    given.prepare_init()
    given.lane.drop("a")
    given.lane.keep_inits(())
    assert "a" not in given.lane
    given.prepare_init()
    given.lane.clear()
    assert not given.lane.execute("a", 0.0)


@pytest.mark.parametrize(
    ("procs", "refused", "init", "text"),
    [
        ("7\n", (), InitClass(1, 0, 0), "idle"),
        ("7\n", (7,), InitClass(0, 0, errno.EPERM), "EPERM"),
        ("", (), InitClass(0, 0, errno.ESRCH), "ESRCH"),
        ("0\n", (), InitClass(0, 0, errno.ESRCH), "ESRCH"),
        ("70\n", (), InitClass(0, 0, errno.ESRCH), "ESRCH"),
    ],
)
def test_the_outcome_has_the_kernels_errno(
    tmp_path: Path, procs: str, refused: tuple[int, ...], init: InitClass, text: str
) -> None:
    given = Prepared(tmp_path, FakeThreads({7: OTHER}, refused), procs)
    given.prepare_init()
    given.lane.execute("a", 0.0)
    assert (given.results[0].init, init.text) == (init, text)
    assert InitClass(0, 1, 0).text == "kept"


def test_the_threads_of_one_init_are_bounded(tmp_path: Path) -> None:
    threads = FakeThreads(dict.fromkeys(range(7, 500), OTHER))
    given = Prepared(tmp_path, threads)
    given.prepare_init()
    given.lane.execute("a", 0.0)
    assert threads.policies[7] == IDLE
    assert 32 < list(threads.policies.values()).count(IDLE) <= 64


async def test_a_write_at_the_signal_reads_no_value_and_its_event_has_the_source_of_the_one_before(
    acting: Acting,
) -> None:
    wanted: dict[str, CpuSet | int | None] = {"cpu.set": CpuSet.parse("2-3")}
    await acting.actuator.apply([acting.target(GROUP, wanted, creating=RuntimeSpec(shares=2))])
    reads: list[str] = []
    read = acting.files.read

    def noted(directory: str, file: str) -> str:
        reads.append(file)
        return read(directory, file)

    acting.files.read = noted  # type: ignore[method-assign]
    acting.lane.execute(CID, 0.0)
    assert not [file for file in reads if file.startswith("cpuset")]
    await acting.actuator.apply([acting.target(GROUP, wanted, signalled=True)])
    acting.write(GROUP, "cpu.set", "0-1")  # an update by the runtime, which only its signal reports
    acting.lane.execute(CID, 1.0)
    writes = [event for event in acting.ledger.events_after(0) if event.kind == "write"]
    assert [(event.before, event.before_source, event.after) for event in writes] == [
        ("0-3", BeforeSource.SPEC, "2-3"),
        ("2-3", BeforeSource.SEEN, "2-3"),
    ]
