import os
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cgroupfs.errors import SourceError
from cgroupfs.files import RealFiles
from reconciler.signals import runqueue
from reconciler.signals.podcpu import Throttling
from reconciler.signals.processes import PodProcesses
from reconciler.signals.readers import SampleSheet
from reconciler.signals.runqueue import RunQueue, own_wait_ns, parse_schedstat
from reconciler.signals.taskstats import Delays
from tests.reconciler.signals.podtree import Tree, read, scene, values

MS = 1_000_000
SECOND = 1_000 * MS


class Answers:
    """A `DelaySource` that answers as the test says; those that it does not know have ended."""

    def __init__(self, known: Mapping[int, Delays] | None = None) -> None:
        self.known = dict(known or {})
        self.closed = False
        self.sizes: list[int] = []
        """Of the queries."""
        self.error: OSError | None = None

    def query(self, pids: Sequence[int]) -> dict[int, Delays]:
        if self.error is not None:
            raise self.error
        self.sizes.append(len(pids))
        return {pid: self.known[pid] for pid in pids if pid in self.known}

    def close(self) -> None:
        self.closed = True


class Quota:
    """A `QuotaLookup` for all pods."""

    def __init__(self, throttling: Throttling | None) -> None:
        self.now = throttling

    def throttling(self, uid: str) -> Throttling | None:
        return self.now


def refused() -> Answers:
    raise SourceError("taskstats", "CAP_NET_ADMIN is needed")


class Node:
    """A pod of these processes; a pass each second."""

    def __init__(
        self,
        tmp_path: Path,
        pids: str = "11\n12\n",
        throttling: Throttling | None = None,
        source: Callable[[], Answers] | None = None,
    ) -> None:
        self.tree = Tree(tmp_path)
        self.pod = self.tree.pod()
        self.list(pids)
        self.answers = Answers()
        quota = Quota(throttling)
        self.reader = RunQueue(
            self.tree.shared(), PodProcesses(self.tree.hierarchy), quota, source or (lambda: self.answers)
        )

    def list(self, pids: str) -> None:
        self.tree.put("cpuset", self.pod.containers[0].group.path, "cgroup.procs", pids)

    def next(self, known: Mapping[int, Delays], sheet: SampleSheet | None = None, after_s: float = 1.0) -> SampleSheet:
        self.answers.known = dict(known)
        self.tree.now += after_s
        return read(self.reader, scene(self.tree, self.pod), self.tree.now, sheet)

    def threads(self, pid: int, threads: Mapping[int, Delays]) -> None:
        shutil.rmtree(self.tree.root / f"proc/{pid}/task", ignore_errors=True)
        for tid, delays in threads.items():
            self.tree.proc(f"{pid}/task/{tid}/schedstat", f"{delays.run_ns} {delays.wait_ns} {delays.switches}\n")


def test_waiting_and_running_of_all_processes(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert values(node.next({11: Delays(SECOND, 0, 100), 12: Delays(0, 0, 0)})) == {}
    known = {11: Delays(2 * SECOND, 500 * MS, 200), 12: Delays(500 * MS, 0, 50)}
    assert values(node.next(known, after_s=2.0)) == {
        "cpu.wait": pytest.approx(25.0),
        "cpu.wait_milli": pytest.approx(250.0),
        "cpu.wait_own": 0.0,
        "cpu.delay": pytest.approx(500_000 / 150),
    }


def test_who_has_ended_is_listed_again_at_once_and_nobody_inherits_its_past(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.next({11: Delays(SECOND, SECOND, 100), 12: Delays(SECOND, SECOND, 100)})
    node.list("11\n13\n")
    known = {11: Delays(SECOND + 900 * MS, SECOND + 100 * MS, 200), 13: Delays(SECOND, 9 * SECOND, 9)}
    assert values(node.next(known))["cpu.wait"] == pytest.approx(10.0)
    assert values(node.next(known))["cpu.wait"] == 0.0
    # The newcomer counts from the pass on after the one that saw it first.
    known[13] = Delays(SECOND + 500 * MS, 9 * SECOND + 500 * MS, 10)
    assert values(node.next(known))["cpu.wait"] == pytest.approx(50.0)


def test_another_process_by_the_same_number_is_no_negative_and_no_huge_wait(tmp_path: Path) -> None:
    node = Node(tmp_path, "11\n")
    node.next({11: Delays(5 * SECOND, 5 * SECOND, 500)})
    sheet = node.next({11: Delays(6 * SECOND, 0, 5)})
    assert values(sheet)["cpu.wait_milli"] == 0.0
    assert sheet.samples["pod:a"]["cpu.wait"].confidence == 0.5


def test_own_throttling_is_taken_off_and_told(tmp_path: Path) -> None:
    node = Node(tmp_path, "11\n", Throttling(1.0, 790 * MS, 0))
    node.next({11: Delays(0, 0, 0)})
    sheet = node.next({11: Delays(200 * MS, 800 * MS, 100)})
    assert values(sheet)["cpu.wait_own"] == pytest.approx(790.0)
    assert values(sheet)["cpu.wait_milli"] == pytest.approx(10.0)
    assert sheet.samples["pod:a"]["cpu.wait"].confidence == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("run", "wait", "throttled", "cpus", "left"),
    [
        # Measured on 6.18 with 2 CPUs: spinners, their quota in CPUs, other spinners beside them.
        (0.20, 0.80, 0.79, 2, 0.01),  # one, 0.2
        (0.20, 3.80, 1.80, 2, 0.20),  # four, 0.2: what is left is their own company
        (0.40, 3.60, 1.60, 2, 0.40),  # four, 0.4
        (0.50, 1.50, 1.48, 2, 0.02),  # two, 0.5
        (0.50, 1.50, 0.55, 2, 0.95),  # two, 0.5, beside two of a neighbour
        (0.53, 0.47, 0.00, 2, 0.47),  # one without a quota beside three of a neighbour
    ],
)
def test_what_was_measured_is_told_apart(run: float, wait: float, throttled: float, cpus: int, left: float) -> None:
    own = own_wait_ns(int(run * SECOND), int(wait * SECOND), 1.0, throttled, cpus)
    assert wait - own / SECOND == pytest.approx(left, abs=0.01)


@given(
    run=st.integers(0, 10 * SECOND),
    wait=st.integers(0, 100 * SECOND),
    throttled=st.floats(0, 64),
    cpus=st.integers(0, 64),
)
def test_no_more_than_all_of_the_waiting_is_ever_taken_off(run: int, wait: int, throttled: float, cpus: int) -> None:
    assert 0 <= own_wait_ns(run, wait, 1.0, throttled, cpus) <= wait


def test_processes_that_are_not_known_lower_the_confidence(tmp_path: Path) -> None:
    node = Node(tmp_path, "11\n")
    node.next({11: Delays(0, 0, 0)})
    sheet = node.next({11: Delays(200 * MS, 200 * MS, 10)})
    assert sheet.samples["pod:a"]["cpu.wait"].confidence == 1.0
    known = SampleSheet()
    known.put("pod:a", "cpu.use", 800.0)
    sheet = node.next({11: Delays(400 * MS, 400 * MS, 20)}, known)
    assert sheet.samples["pod:a"]["cpu.wait"].confidence == pytest.approx(0.25)


def test_without_taskstats_threads_are_read_and_those_that_ended_drop_out(tmp_path: Path) -> None:
    node = Node(tmp_path, "11\n", source=refused)
    node.threads(11, {11: Delays(0, 0, 0), 12: Delays(7 * SECOND, 7 * SECOND, 70)})
    node.next({})
    assert "CAP_NET_ADMIN" in node.reader.problems()["cpu.wait"]
    node.threads(11, {11: Delays(300 * MS, 100 * MS, 10), 13: Delays(SECOND, SECOND, 10)})
    assert values(node.next({}))["cpu.wait"] == pytest.approx(25.0)


def test_a_refusal_in_between_is_a_problem_and_no_sample(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.next({11: Delays(0, 0, 0), 12: Delays(0, 0, 0)})
    node.answers.error = PermissionError(1, "Operation not permitted")
    assert values(node.next({})) == {}
    assert "Operation not permitted" in node.reader.problems()["cpu.wait"]
    assert node.answers.closed


def test_processes_outside_of_this_pid_namespace_are_told(tmp_path: Path) -> None:
    node = Node(tmp_path, "0\n0\n")
    assert values(node.next({})) == {}
    assert "hostPID" in node.reader.problems()["cpu.wait"]
    # A process that is just ending is listed as 0, too: later listings show the pid namespace.
    node.list("11\n")
    node.next({11: Delays(0, 0, 0)})
    assert node.reader.problems() == {}


@given(st.text(max_size=40))
def test_any_text_is_a_line_of_schedstat_or_an_error(text: str) -> None:
    try:
        delays = parse_schedstat(text)
    except ValueError:
        return
    assert [int(word) for word in text.split()] == list(delays)


def test_nested_groups_count_and_sandboxes_do_not(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    pod = tree.pod(sandbox=True)
    sandbox, app = pod.containers
    tree.group(f"{app.group.path}/inner")
    tree.put("cpuset", sandbox.group.path, "cgroup.procs", "1\n")
    tree.put("cpuset", app.group.path, "cgroup.procs", "2\n")
    tree.put("cpuset", f"{app.group.path}/inner", "cgroup.procs", "3\n4\n")
    assert sorted(PodProcesses(tree.hierarchy).get(pod, 0.0)) == [2, 3, 4]


def test_listings_of_removed_pods_are_dropped_whichever_reader_asks(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    processes = PodProcesses(tree.hierarchy)
    lasting = tree.pod("lasting")
    tree.put("cpuset", lasting.containers[0].group.path, "cgroup.procs", "5\n")
    for second in range(600):
        processes.get(lasting, float(second))
        processes.get(replace(lasting, uid=f"job-{second}"), float(second))
    assert len(processes) < 150


def test_of_a_tenants_groups_without_number_a_bounded_number_is_listed(tmp_path: Path) -> None:
    """The listing is in the event loop."""
    tree = Tree(tmp_path)
    pod = tree.pod()
    top = tree.hierarchy.directory("cpuset", pod.containers[0].group.path)

    class Many(RealFiles):
        listed = 0

        def groups(self, directory: str, most: int | None = None) -> list[str]:
            names = [f"g{number}" for number in range(10_000)] if directory == top else []
            return names[:most] if directory.startswith(top) else super().groups(directory, most)

        def read(self, directory: str, file: str) -> str:
            self.listed += 1
            return "7\n" if directory == top else ""

    files = Many()
    assert PodProcesses(tree.hierarchy, files).get(pod, 0.0) == (7,)
    assert files.listed < 3_000


def test_of_one_group_no_more_is_listed_than_is_taken(tmp_path: Path) -> None:
    """Groups count, too: a tenant makes any number of them, and of any depth."""
    tree = Tree(tmp_path)
    path = tree.pod().containers[0].group.path
    top = tree.hierarchy.directory("cpuset", path)

    class Deep(RealFiles):
        listed = 0

        def groups(self, directory: str, most: int | None = None) -> list[str]:
            return ["g"] if directory.startswith(top) else super().groups(directory, most)

        def read(self, directory: str, file: str) -> str:
            self.listed += 1
            return "7\n" if directory.removeprefix(top) == 12 * "/g" else ""

    files = Deep()
    ids = PodProcesses(tree.hierarchy, files).threads_of_group(path)
    taken = list(islice(ids, 20))
    assert {tid for tid in taken if tid} == {7}
    assert (len(taken), files.listed) == (20, 19)


def test_listings_are_kept_for_seconds_and_spread(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    processes = PodProcesses(tree.hierarchy)
    pods = [tree.pod(f"u{random.random()}") for _ in range(40)]
    for pod in pods:
        tree.put("cpuset", pod.containers[0].group.path, "cgroup.procs", "5\n")
        assert processes.get(pod, 0.0) == (5,)
        os.unlink(Path(tree.hierarchy.directory("cpuset", pod.containers[0].group.path)) / "cgroup.procs")
    assert all(processes.get(pod, 3.9) == (5,) for pod in pods)
    again = [bool(processes.get(pod, 5.0)) for pod in pods]
    assert any(again)
    assert not all(again)
    assert not any(processes.get(pod, 6.1) for pod in pods)


def test_processes_are_queried_in_parts_so_that_others_can_run(tmp_path: Path) -> None:
    pids = range(1000, 1300)
    node = Node(tmp_path, "".join(f"{pid}\n" for pid in pids))
    node.next(dict.fromkeys(pids, Delays(0, 0, 0)))
    sheet = node.next(dict.fromkeys(pids, Delays(1 * MS, 1 * MS, 1)))
    assert values(sheet)["cpu.wait_milli"] == pytest.approx(300.0)
    assert node.answers.sizes == [128, 128, 44] * 2


def test_threads_are_read_up_to_a_bound_where_each_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runqueue, "_THREADS", 10)
    node = Node(tmp_path, source=refused)
    for second in range(2):
        for pid in (11, 12):
            used = Delays(second * MS, second * MS, second)
            node.threads(pid, {pid * 100 + thread: used for thread in range(8)})
        sheet = node.next({})
    assert values(sheet)["cpu.wait_milli"] == pytest.approx(10.0), "eight threads of the one, two of the other"
