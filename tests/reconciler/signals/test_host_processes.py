"""Which processes are a host workload's: texts of /proc whose names are chosen by processes."""

from pathlib import Path

import pytest
import trio

from cgroupfs.cpuset import CpuSet
from cgroupfs.files import REAL
from reconciler.runtime.cooperative import TimeSlice
from reconciler.signals.host_processes import (
    GroupProcesses,
    HostProcesses,
    HostProcessStat,
    UserProcesses,
    is_in,
    parse_passwd,
    parse_process_stat,
    parse_process_status,
)
from tests.reconciler.signals.podtree import Tree

V1 = "12:cpuset:{0}\n5:cpu,cpuacct:{0}\n1:name=systemd:/system.slice/x.service\n0::/\n"


def stat_text(name: str = "x", *, started: int = 500, ticks: int = 30, pages: int = 7) -> str:
    return f"1 ({name}) S 1 1 1 0 -1 0 0 0 0 0 {ticks - 10} 10 0 0 20 0 1 0 {started} 4096 {pages} 0\n"


def status_text(
    name: str = "x", *, uid: int = 7, effective: int | None = None, cpus: str = "0-3", threads: int = 1
) -> str:
    return (
        f"Name:\t{name}\nUmask:\t0022\nState:\tS (sleeping)\n"
        f"Uid:\t{uid}\t{uid if effective is None else effective}\t{uid}\t{uid}\nGid:\t1\t1\t1\t1\n"
        f"Threads:\t{threads}\nCpus_allowed:\tf\nCpus_allowed_list:\t{cpus}\n"
    )


def put(tree: Tree, pid: int, name: str = "x", *, uid: int = 7, group: str = "/user.slice", started: int = 500) -> None:
    tree.proc(f"{pid}/stat", stat_text(name, started=started))
    tree.proc(f"{pid}/status", status_text(name, uid=uid))
    tree.proc(f"{pid}/cgroup", V1.format(group))


@pytest.mark.parametrize("name", ["x", ") S 9 9 (", "a b", "\v", "\x1c\u2028\x85", "("])
def test_a_process_chooses_its_name_and_nothing_else(name: str) -> None:
    assert parse_process_stat(stat_text(name)) == HostProcessStat(started=500, ticks=30, pages=7)
    forged = f"{name}\vUid:\t0\t0\t0\t0\vCpus_allowed_list:\t9"
    assert parse_process_status(status_text(forged)) == ((7, 7), CpuSet.parse("0-3"), 1)


@pytest.mark.parametrize("text", ["", "1 (x) S", "1 (x) " + "a " * 30, "Name:\tx\n"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_process_stat(text)
    with pytest.raises(ValueError):
        parse_process_status(text)


@pytest.mark.parametrize(
    ("path", "pod"),
    [
        ("/kube.slice/kubepods.slice/kubepods-pod1.slice/cri-containerd-1.scope", True),
        ("/kube.slice/kubepods.slice", True),
        ("/kubepods.slice/kubepods-pod1.slice", False),
        ("/user.slice/user-7.slice/kube.slice/kubepods.slice/pod1", False),
        ("/kube.slice/kubepods.slice-mine/pod1", False),
    ],
)
def test_a_pods_process_is_in_the_kubelets_own_tree(path: str, pod: bool) -> None:
    assert is_in(V1.format(path), {"/kube.slice/kubepods.slice"}) is pod
    assert is_in(f"0::{path}\n", {"/kube.slice/kubepods.slice"}) is pod


def test_a_user_is_found_in_passwd_alone(tmp_path: Path) -> None:
    text = "root:x:0:0::/:/bin/sh\nci:x:1001:1001::/home/ci:/bin/sh\nbad\nodd:x:٣:0::/:\n"
    assert (parse_passwd(text, "ci"), parse_passwd(text, "odd"), parse_passwd(text, "no")) == (1001, None, None)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text(text)
    processes = HostProcesses("/kubepods", REAL, str(tmp_path))
    (tmp_path / "etc/subuid").write_text("ci:100000:65536\n1001:300000:5\nother:1:9\nci:0:9\nci:x:1\nci:7\n")
    assert processes.uids("ci") == (range(1001, 1002), range(100000, 165536), range(300000, 300005))
    assert (processes.uids("77"), processes.uids("no")) == ((range(77, 78),), ())


def of_users(tree: Tree, *uids: int, most: int = 10) -> dict[int, UserProcesses]:
    processes = HostProcesses("/kubepods", REAL, str(tree.root))

    async def run() -> dict[int, UserProcesses]:
        users = {str(uid): [range(uid, uid + 1), range(100 * uid, 100 * uid + 5)] for uid in uids}
        return {
            int(name): found
            for name, found in (await processes.of_users(users, {"/user.slice/batch"}, most, TimeSlice())).items()
        }

    return trio.run(run)


def test_a_users_processes_are_found_wherever_they_are_but_in_pods(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    put(tree, 10)
    put(tree, 11, "evil\vUid:\t0\t0\t0\t0", group="/user.slice/kubepods/burstable/podx")
    put(tree, 12, group="/kubepods/burstable/podx/y")
    put(tree, 13, uid=0)
    tree.proc("14/status", status_text(uid=0, effective=7))
    tree.proc("14/stat", stat_text())
    tree.proc("14/cgroup", V1.format("/"))
    # In a user namespace of his own, as one of the ids that /etc/subuid gives him.
    put(tree, 16, uid=704, group="/user.slice/batch/a")
    # It ended in between.
    tree.proc("15/status", status_text())
    assert of_users(tree, 7, 99) == {7: ({10: 500, 11: 500, 14: 500, 16: 500}, 4, {16}), 99: ({}, 0, set())}
    assert of_users(tree, 7, most=2) == {7: ({10: 500, 11: 500}, 4, set())}


def test_a_groups_processes_are_those_below_it_too_and_their_number_is_bounded(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for number, path in enumerate(("/batch", "/batch/a", "/batch/a/b", "/batch/c")):
        tree.group(path)
        tree.put("cpu", path, "cgroup.procs", f"{100 + number}\n0\n{200 + number}\n")
        for pid in (100 + number, 200 + number):
            put(tree, pid)
    put(tree, 203)
    processes = HostProcesses("/kubepods", REAL, str(tree.root))

    async def listed(path: str, most: int) -> GroupProcesses:
        return await processes.of_group(tree.hierarchy.directory("cpu", path), most, TimeSlice())

    found = trio.run(listed, "/batch", 100)
    assert sorted(found.started) == [100, 101, 102, 103, 200, 201, 202, 203]
    assert found.outside
    assert len(trio.run(listed, "/batch", 3).started) == 3
    tree.put("cpu", "/batch/c", "cgroup.procs", "103\n")
    assert not trio.run(listed, "/batch/c", 100).outside


@pytest.mark.parametrize(("most", "expected"), [(8, "0-3,6-7"), (3, "0-1,2-3,6"), (1, "0-1")])
def test_the_cpus_are_those_of_threads_too_up_to_a_bound(tmp_path: Path, most: int, expected: str) -> None:
    tree = Tree(tmp_path)
    tree.proc("11/status", status_text(cpus="0-1", threads=3))
    for tid, cpus in ((11, "0-1"), (111, "6"), (112, "7")):
        tree.proc(f"11/task/{tid}/status", status_text(cpus=cpus))
    tree.proc("12/status", status_text(cpus="2-3"))
    processes = HostProcesses("/kubepods", REAL, str(tree.root))

    async def run() -> CpuSet:
        return await processes.cpus([11, 12, 13], most, TimeSlice())

    found = trio.run(run)
    # Which threads a bound leaves out is the order of the directory.
    assert found == CpuSet.parse(expected) or (most == 3 and found == CpuSet.parse("0-3,7"))
