"""Host workloads as measured: on v1, v2 and hybrid nodes, as groups and as a user's processes."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import trio

from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import SourceError
from cgroupfs.files import REAL
from reconciler.signals.host_config import HostWorkloadConfig
from reconciler.signals.host_meter import HostMeter, together
from reconciler.signals.taskstats import Delays
from state.evidence import Sample
from state.hosts import CountsAs, HostValue, HostWorkload, HostWorkloads
from tests.reconciler.signals.podtree import Tree
from tests.reconciler.signals.test_host_processes import put, stat_text
from tests.reconciler.signals.test_runqueue import Answers

TICK = os.sysconf("SC_CLK_TCK")
MS = 1_000_000
FILES = type(REAL)()
"""Opens each file anew: a directory's open file does not fail when it is moved, as a removed group's does."""


class Node:
    """A meter on directories; each pass is a second after the one before."""

    def __init__(self, tree: Tree, answers: Answers | None = None, **entries: tuple[str, str]) -> None:
        self.tree, self.answers = tree, answers or Answers()

        def taskstats() -> Answers:
            return self.answers

        self.meter = HostMeter(
            {
                name: HostWorkloadConfig(match=match, counts_as=CountsAs(role))
                for name, (role, match) in entries.items()
            },
            tree.hierarchy,
            "/kubepods",
            root=str(tree.root),
            files=FILES,
            taskstats=taskstats,
            clock=tree.clock,
        )

    def read(self, after_s: float = 1.0) -> HostWorkloads:
        self.tree.now += after_s
        return trio.run(self.meter.read, self.tree.now)

    def one(self, name: str = "db", after_s: float = 1.0) -> HostWorkload:
        return self.read(after_s).entries[name]

    def use(self, path: str, ns: int) -> None:
        if self.tree.hierarchy.version("cpuacct") == 1:
            self.tree.put("cpuacct", path, "cpuacct.usage", str(ns))
        else:
            self.tree.put("unified", path, "cpu.stat", f"usage_usec {ns // 1000}\n")

    def group(self, path: str, pids: str = "", *, used_ns: int = 0) -> None:
        self.tree.group(path)
        for mount in self.tree.hierarchy.mounts():
            Path(mount.path(path), "cgroup.procs").write_text(pids)
        for pid in pids.split():
            put(self.tree, int(pid))
        self.use(path, used_ns)


def numbers(host: HostWorkload) -> Mapping[str, float]:
    return {name: round(known.value, 3) for name, known in host.values.items()}


@pytest.mark.parametrize(("version", "unified"), [(1, False), (1, True), (2, False)])
def test_groups_of_an_entry_are_one_row(tmp_path: Path, version: int, unified: bool) -> None:
    node = Node(Tree(tmp_path, version, unified=unified), db=("victim", "cgroup:/db-*"))
    node.group("/db-1", "11\n")
    node.group("/db-2", "12\n")
    node.answers.known = {11: Delays(0, 0, 1), 12: Delays(0, 0, 1)}
    first = node.one()
    assert (first.groups, first.processes, first.matched, first.problem) == (("/db-1", "/db-2"), 2, 2, None)
    assert first.cpus == CpuSet.parse("0-3")
    node.use("/db-1", 300 * MS)
    node.use("/db-2", 200 * MS)
    node.answers.known = {11: Delays(300 * MS, 100 * MS, 11), 12: Delays(200 * MS, 0, 11)}
    measured = numbers(node.one())
    assert measured["cpu.use"] == 500.0
    assert measured["cpu.wait_milli"] == 100.0
    assert measured["cpu.wait"] == pytest.approx(100 * 100 / 600, abs=0.01)
    assert measured["cpu.delay"] == 10_000.0


def test_pressure_and_disk_and_memory_are_read_where_the_kernel_has_them(tmp_path: Path) -> None:
    node = Node(Tree(tmp_path, 2), db=("victim", "unit:db"))
    path = "/system.slice/db.service"
    node.group(path, "11\n")
    for total in (0, 250_000):
        for resource in ("cpu", "memory", "io"):
            text = f"some avg10=0.00 avg60=0.00 avg300=0.00 total={total}\nfull avg10=0.00 total=0\n"
            node.tree.put("unified", path, f"{resource}.pressure", text)
        node.tree.put("unified", path, "memory.current", "4096\n")
        node.tree.put("unified", path, "memory.max", "max\n")
        node.tree.put("unified", path, "memory.stat", "anon 2048\n")
        measured = numbers(node.one())
    assert measured["cpu.pressure"] == measured["memory.pressure"] == measured["io.pressure"] == 25.0
    assert (measured["memory.use"], measured["memory.rss"]) == (4096.0, 2048.0)
    assert "memory.limit" not in measured


def test_without_pressure_files_the_other_signals_are_read(tmp_path: Path) -> None:
    node = Node(Tree(tmp_path), db=("victim", "cgroup:/db"))
    node.group("/db", "11\n")
    node.one()
    node.use("/db", 10 * MS)
    measured = numbers(node.one())
    assert measured["cpu.use"] == 10.0
    assert not [name for name in measured if "pressure" in name]


def test_a_unit_without_cpu_accounting_is_measured_by_its_processes(tmp_path: Path) -> None:
    tree = Tree(tmp_path, 1, unified=True)
    directory = Path(tree.hierarchy.directory("unified", "/system.slice/db.service"))
    directory.mkdir(parents=True)
    (directory / "cgroup.procs").write_text("11\n")
    node = Node(tree, db=("be", "unit:db"))
    put(tree, 11)
    node.one()
    tree.proc("11/stat", stat_text(ticks=30 + TICK // 4))
    host = node.read()
    assert host.entries["db"].values["cpu.use"] == HostValue(250.0, 0.8)
    assert host.be_milli == 250


def test_a_users_processes_count_until_they_end_and_not_as_another_ones(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    node = Node(tree, ci=("be", "user:7"), none=("be", "user:nobody-here"))
    put(tree, 11)
    put(tree, 12)
    put(tree, 13, group="/kubepods/podx")
    node.answers.known = {11: Delays(0, 0, 1), 12: Delays(0, 0, 1)}
    first = node.read()
    assert first.entries["ci"].processes == 2
    assert first.entries["none"].problem == "no such user in /etc/passwd"
    tree.proc("11/stat", stat_text(ticks=30 + TICK // 10))
    # The pid is another process' by now, which has used much more.
    tree.proc("12/stat", stat_text(ticks=30 + 100 * TICK, started=900))
    node.answers.known = {11: Delays(100 * MS, 100 * MS, 11), 12: Delays(0, 0, 1)}
    host = node.read()
    assert host.entries["ci"].processes == 1
    assert host.entries["ci"].value("cpu.use") == pytest.approx(100.0)
    assert host.be_milli == 100
    # A process has ended: they are listed again soon, and not at once.
    put(tree, 14)
    assert node.one("ci").processes == 1
    node.read(6.0)
    assert node.one("ci").processes >= 2


def test_a_group_that_vanishes_and_one_made_again_begin_without_a_past(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    node = Node(tree, db=("victim", "cgroup:/db"))
    node.group("/db", "11\n", used_ns=MS)
    node.one()
    assert node.one().present
    for mount in tree.hierarchy.mounts():
        # The directory's inode is not given to the next one.
        shutil.move(mount.path("/db"), f"{mount.path('/gone')}")
    gone = node.one()
    assert (gone.present, gone.values) == (False, {})
    node.group("/db", "12\n", used_ns=900 * MS)
    assert not node.one().present
    again = node.one(after_s=2.0)
    assert (again.groups, again.processes) == (("/db",), 1)
    assert "cpu.use" not in again.values
    node.use("/db", 950 * MS)
    assert node.one().value("cpu.use") == 50.0


def test_be_use_counts_no_group_twice_and_no_victim_inside(tmp_path: Path) -> None:
    node = Node(
        Tree(tmp_path),
        all=("be", "cgroup:/batch"),
        part=("be", "cgroup:/batch/*"),
        db=("victim", "cgroup:/batch/db"),
        web=("victim", "cgroup:/web"),
        webs=("be", "cgroup:/web/batch"),
        alone=("victim", "cgroup:/web/batch/db"),
    )
    uses = {"/batch": 900, "/batch/a": 400, "/batch/db": 300, "/web": 500, "/web/batch": 200, "/web/batch/db": 50}
    for path in uses:
        node.group(path)
    assert node.read().be_milli is None
    for path, ms in uses.items():
        node.use(path, ms * MS)
    assert node.read().be_milli == 600 + 150


def test_be_use_counts_no_process_of_a_user_twice(tmp_path: Path) -> None:
    """One in a group of another entry is in the group's use, or a victim's; and two entries may name one user."""
    tree = Tree(tmp_path)
    node = Node(
        tree,
        batch=("be", "cgroup:/batch"),
        db=("victim", "cgroup:/db"),
        ci=("be", "user:7"),
        also=("be", "user:7"),
    )
    node.group("/batch", "11\n")
    node.group("/db", "12\n")
    put(tree, 11, group="/batch/a")
    put(tree, 12, group="/db")
    put(tree, 13)
    node.read()
    node.use("/batch", 400 * MS)
    for pid, ms in ((11, 400), (12, 200), (13, 100)):
        tree.proc(f"{pid}/stat", stat_text(ticks=30 + ms * TICK // 1000))
    host = node.read()
    # Each entry's own numbers are of all that it names.
    assert host.entries["ci"].value("cpu.use") == host.entries["also"].value("cpu.use") == pytest.approx(700.0)
    assert host.be_milli == 500


def test_what_cannot_be_read_of_one_entry_does_not_touch_another(tmp_path: Path) -> None:
    tree = Tree(tmp_path)

    class Refused(Answers):
        def query(self, pids: object) -> dict[int, Delays]:
            raise OSError(1, "not permitted")

    node = Node(tree, Refused(), bad=("victim", "cgroup:/bad"), good=("victim", "cgroup:/good"))
    node.group("/bad", "11\n")
    node.group("/good", "12\n")
    tree.put("cpuacct", "/bad", "cpuacct.usage", "many")
    node.read()
    node.use("/good", 10 * MS)
    entries = node.read().entries
    assert entries["bad"].present
    assert entries["bad"].value("cpu.use") is None
    assert entries["good"].value("cpu.use") == 10.0


def test_no_taskstats_is_no_waiting_and_no_failure(tmp_path: Path) -> None:
    tree = Tree(tmp_path)

    def refused() -> Answers:
        raise SourceError("taskstats", "not permitted")

    entry = HostWorkloadConfig(match="cgroup:/db", counts_as=CountsAs.VICTIM)
    meter = HostMeter({"db": entry}, tree.hierarchy, "/kubepods", root=str(tmp_path), taskstats=refused)
    tree.group("/db")
    assert "cpu.wait" not in trio.run(meter.read, 1.0).entries["db"].values
    trio.run(meter.aclose)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([], {}),
        ([{"cpu.use": Sample(5.0)}], {"cpu.use": HostValue(5.0)}),
        ([{"cpu.use": Sample(5.0)}, {"cpu.use": Sample(7.0, 0.0, 0.5)}], {"cpu.use": HostValue(12.0, 0.5)}),
        ([{"cpu.pressure": Sample(5.0)}, {"cpu.pressure": Sample(7.0)}], {"cpu.pressure": HostValue(7.0)}),
        ([{"memory.limit": Sample(5.0)}, {"memory.limit": Sample(7.0)}], {}),
        ([{"memory.limit": Sample(5.0)}], {"memory.limit": HostValue(5.0)}),
    ],
)
def test_parts_of_an_entry_together(parts: list[dict[str, Sample]], expected: dict[str, HostValue]) -> None:
    assert together(parts) == expected
