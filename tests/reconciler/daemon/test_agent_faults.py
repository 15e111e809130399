"""One failed call of a look is one object's problem: every read and write call fails once, and for a while.

By default a spread of them; in `make faults` (BYPASSD_FULL) each call with each errno (hours).
"""

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from reconciler.control.planner import plan_pod
from state.model import Pod
from tests.fakes.faults import Call, Fault
from tests.fakes.faultynode import LATE, Run, differences, owner, play, quiet_place
from tests.fakes.livenode import BATCH, PINNED, WEB, container_id

FULL: Final = bool(os.environ.get("BYPASSD_FULL"))
ERRNOS: Final = (
    *(errno.ENOMEM, errno.ENFILE, errno.EMFILE, errno.EACCES, errno.EOPNOTSUPP, errno.EIO, errno.EINTR),
    *(errno.EINVAL, errno.EBUSY, errno.ENOSPC, errno.EPERM, errno.ESTALE, errno.ENODEV),
)
SPREAD: Final = 40
# What a whole node's failure may keep from the pods, until it is over: the table that says which CPUs are exclusive,
# where originals are recorded, and the list of all pods of a class.
NODE_WIDE: Final = ("/var/lib/kubelet/cpu_manager_state", "/var/lib/bypassd", "/kubepods/besteffort", "/kubepods")


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with quiet_place(str(tmp_path_factory.mktemp("faults"))) as path:
        yield path


@pytest.fixture(scope="module")
def whole(ground: Path) -> Run:
    """A run in which nothing fails."""
    return play(ground / "whole", lambda _call: 0)


def failing(kind: str, path: str, nth: int, code: int) -> Fault:
    """One call fails, or (``nth`` 0) all of this kind on this path."""

    def fault(call: Call) -> int:
        return code if call.kind == kind and call.path == path and nth in {0, call.nth} else 0

    return fault


def cases(whole: Run) -> list[tuple[str, str, int, int]]:
    """Each call, the first two times that it is made and for a while, with each errno; or a spread of them."""
    places = sorted({(call.kind, call.path, call.nth) for call in whole.calls if call.nth <= 2})
    places += sorted({(call.kind, call.path, 0) for call in whole.calls})
    if FULL:
        return [(*place, code) for place, code in itertools.product(places, ERRNOS)]
    step = len(places) / SPREAD
    return [(*places[int(number * step)], ERRNOS[number % len(ERRNOS)]) for number in range(SPREAD)]


def right(run: Run, whole: Run, path: str, case: object) -> None:
    """What must hold after any failure."""
    assert run.fatal == "", (case, run.fatal)
    wrong = differences(run.early, whole.early)
    uid = owner(path)
    if uid is not None:
        assert {owner(text) for text in wrong} <= {uid}, (case, wrong)
    elif not path.startswith(NODE_WIDE) and not path.endswith(NODE_WIDE):
        # The newest pod may have to wait for the next look at everything; whatever else was found at the start.
        assert {owner(text) for text in wrong} <= {LATE}, (case, wrong)
    assert not differences(run.late, whole.late), case
    assert not differences(run.restored, whole.restored), case


def test_the_whole_run_is_right_and_quiet(whole: Run) -> None:
    assert (whole.fatal, whole.not_ready, whole.problems, whole.counted, whole.failures) == ("", [], [], {}, {})
    assert whole.early == whole.late
    for uid in (BATCH, LATE):
        assert (
            whole.late[f"/sys/fs/cgroup/cpuset/kubepods/besteffort/pod{uid}/{container_id(uid)}/cpuset.cpus"] == "3-6"
        )


def test_every_call_on_the_nodes_files_passes_the_seam(whole: Run) -> None:
    assert whole.unseen == []
    kinds = {call.kind for call in whole.calls}
    assert kinds >= {"open", "read", "stat", "scandir", "fopen", "cg.read", "cg.write", "inode", "add_watch", "fsync"}


def test_a_failed_call_is_one_objects_problem(whole: Run, ground: Path) -> None:
    faults: list[str] = []
    for number, case in enumerate(cases(whole)):
        kind, path, nth, code = case
        named = (kind, path, nth, errno.errorcode[code])
        run = play(ground / str(number), failing(*case), whole.late)
        try:
            assert run.hits, named
            right(run, whole, path, named)
            if kind.startswith("cg.") and differences(run.early, whole.early) and nth == 0:
                assert run.said, named
        except AssertionError as exc:
            faults.append(str(exc))
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("file", ["cpuset.cpus", "cpu.shares"])
@pytest.mark.parametrize("code", [errno.ENOMEM, errno.ENFILE, errno.EMFILE, errno.EACCES, errno.EOPNOTSUPP])
def test_a_control_file_that_cannot_be_read_is_said_and_counted(whole: Run, ground: Path, file: str, code: int) -> None:
    controller = file.partition(".")[0]
    path = f"/sys/fs/cgroup/{controller}/kubepods/besteffort/pod{BATCH}/{container_id(BATCH)}/{file}"
    run = play(ground / "one", failing("cg.read", path, 0, code), whole.late)
    right(run, whole, path, (path, code))
    assert any(path in line for line in run.problems), run.problems
    assert run.counted["file", errno.errorcode[code]] > 1
    assert run.not_ready == []


def test_a_pods_directory_that_cannot_be_listed_is_that_pods_problem(whole: Run, ground: Path) -> None:
    path = f"/sys/fs/cgroup/cpuset/kubepods/besteffort/pod{BATCH}"
    run = play(ground / "pod", failing("scandir", path, 0, errno.EACCES), whole.late)
    right(run, whole, path, path)
    assert any(BATCH in line for line in run.problems)
    assert run.not_ready == []


def test_where_all_pods_of_a_class_cannot_be_listed_the_node_is_not_ready(whole: Run, ground: Path) -> None:
    path = "/sys/fs/cgroup/cpuset/kubepods/besteffort"
    run = play(ground / "class", failing("scandir", path, 0, errno.EIO), whole.late)
    right(run, whole, path, path)
    assert run.not_ready
    assert run.failures == {}


def test_where_nothing_can_be_written_the_node_is_not_ready(whole: Run, ground: Path) -> None:
    run = play(ground / "deaf", lambda call: errno.EACCES if call.kind == "cg.write" else 0, whole.late)
    assert run.fatal == ""
    assert run.not_ready
    assert not differences(run.late, whole.late)


def test_without_descriptors_for_a_while_the_agent_says_so_and_recovers(whole: Run, ground: Path) -> None:
    needs = {"open", "fopen", "scandir", "listdir", "cg.read", "cg.write", "inotify"}
    begun: list[Call] = []

    def fault(call: Call) -> int:
        # From the first container's write on: before, there is no agent yet.
        if call.kind == "cg.write":
            begun.append(call)
        return errno.EMFILE if begun and call.kind in needs else 0

    run = play(ground / "descriptors", fault, whole.late)
    assert run.fatal == ""
    assert run.hits > 10
    assert run.problems
    assert not differences(run.late, whole.late)
    assert not differences(run.restored, whole.restored)


@pytest.mark.parametrize(("kind", "code"), [("add_watch", errno.ENOSPC), ("inotify", errno.EMFILE)])
def test_without_inotify_everything_is_polled(whole: Run, ground: Path, kind: str, code: int) -> None:
    run = play(ground / kind, lambda call: code if call.kind == kind else 0, whole.late)
    assert run.fatal == ""
    assert run.problems
    assert not differences(run.early, whole.early)
    assert not differences(run.restored, whole.restored)


def test_an_unreadable_inotify_queue_ends_in_a_full_listing(whole: Run, ground: Path) -> None:
    run = play(
        ground / "queue",
        lambda call: errno.ENOMEM if call.kind == "read" and call.path.endswith("/inotify") else 0,
        whole.late,
    )
    assert (run.fatal, run.failures) == ("", {})
    assert run.hits
    assert not differences(run.early, whole.early)


def test_an_unreadable_file_keeps_its_original(whole: Run, ground: Path) -> None:
    """A directory that the kernel does not show for a while is not one that is gone, with its row of the ledger."""
    wanted = f"/sys/fs/cgroup/cpuset/kubepods/besteffort/pod{BATCH}/{container_id(BATCH)}"
    seen: list[Call] = []

    def fault(call: Call) -> int:
        if call.kind == "cg.write":
            seen.append(call)
        return errno.EMFILE if seen and (call.kind, call.path) == ("stat", wanted) else 0

    run = play(ground / "original", fault, whole.late)
    right(run, whole, wanted, wanted)


def test_the_pods_of_other_classes_are_as_they_were(whole: Run) -> None:
    for uid in (WEB, PINNED):
        assert {path for path in differences(whole.late, whole.restored) if uid in path} == set()


@pytest.mark.parametrize("error", [KeyError("x"), RecursionError(), ValueError("4300 digits")])
def test_a_programming_error_with_one_pod_affects_that_pod_alone(
    whole: Run, ground: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def plan(pod: Pod, *arguments: Any) -> Any:
        if pod.uid == BATCH:
            raise error
        return plan_pod(pod, *arguments)

    monkeypatch.setattr("reconciler.control.reconciler.plan_pod", plan)
    run = play(ground / "poison", lambda _call: 0)
    assert run.fatal == ""
    assert {owner(path) for path in differences(run.late, whole.late)} == {BATCH}
    assert any(BATCH in line for line in run.problems)
    assert run.counted["pod", type(error).__name__] > 1
