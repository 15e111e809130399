"""The fake kernel's own rules, those among them that few machines can show."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cgroupfs.files import write_now
from cgroupfs.hierarchy import Hierarchy
from tests.fakes.kernel import IN_CREATE, IN_DELETE, IN_ISDIR, IN_MODIFY, Actor, Event, FakeKernel, Mode


def code_of(action: Callable[[], object]) -> str:
    try:
        action()
    except OSError as exc:
        return errno.errorcode[exc.errno or 0]
    return "ok"


def v2(release: tuple[int, int] = (6, 12)) -> FakeKernel:
    kernel = FakeKernel("v2", release=release)
    kernel.make_group("/p/a")
    kernel.write("/sys/fs/cgroup/p/a", "cgroup.subtree_control", "+cpu +cpuset +memory +pids")
    kernel.mkdir("/sys/fs/cgroup/p/a/c")
    return kernel


P = "/sys/fs/cgroup/p"


@pytest.mark.parametrize(
    ("file", "text", "code", "shown"),
    [
        ("cpu.max", "50000", "ok", "50000 100000"),
        ("cpu.max", "50000 20000", "ok", "50000 20000"),
        ("cpu.max", "max", "ok", "max 100000"),
        ("cpu.max", "2000 junk", "ok", "2000 100000"),
        ("cpu.max", "999", "EINVAL", "max 100000"),
        ("cpu.max", "5000 999", "EINVAL", "max 100000"),
        ("cpu.max", "5000 1000001", "EINVAL", "max 100000"),
        ("cpu.max", "-1", "EINVAL", "max 100000"),
        ("cpu.max.burst", "5", "ok", "5"),
        ("cpu.weight", "0", "ERANGE", "100"),
        ("cpu.weight", "10001", "ERANGE", "100"),
        ("cpu.weight", "39", "ok", "39"),
        ("cpuset.cpus", "0-1", "ok", "0-1"),
        ("cpuset.cpus", "9", "ERANGE", ""),
        ("memory.max", "4097", "ok", "4096"),
        ("memory.max", "-1", "EINVAL", "max"),
        ("memory.low", "abc", "EINVAL", "0"),
        ("memory.high", "1M", "ok", "1048576"),
        ("memory.swap.max", "0", "ok", "0"),
        ("memory.oom.group", "1", "ok", "1"),
        ("memory.oom.group", "2", "EINVAL", "0"),
        ("memory.oom.group", "max", "EINVAL", "0"),
        ("pids.max", "-1", "EINVAL", "max"),
        ("cgroup.subtree_control", "+nothing", "EINVAL", ""),
        ("cgroup.subtree_control", "cpu", "EINVAL", ""),
        ("cgroup.subtree_control", "+io", "ENOENT", ""),
        ("cgroup.freeze", "2", "ERANGE", "0"),
        ("cpu.stat", "1", "EINVAL", "usage_usec 0\nnr_throttled 0\nthrottled_usec 0"),
    ],
)
def test_v2_answers(file: str, text: str, code: str, shown: str) -> None:
    kernel = v2()
    assert code_of(lambda: kernel.write(f"{P}/a/c", file, text)) == code
    assert kernel.read(f"{P}/a/c", file) == ("" if file == "cgroup.subtree_control" else f"{shown}\n")


def test_v2_takes_any_order_of_cpusets_and_its_effective_set_is_the_intersection() -> None:
    kernel = v2()
    kernel.write(f"{P}/a/c", "cpuset.cpus", "0-1")
    kernel.write(f"{P}/a", "cpuset.cpus", "1-2")
    assert kernel.read(f"{P}/a/c", "cpuset.cpus.effective") == "1\n"
    kernel.write(f"{P}/a", "cpuset.cpus", "3")
    assert kernel.read(f"{P}/a/c", "cpuset.cpus.effective") == "3\n"


def test_v2_on_5_10_refuses_a_parent_that_shrinks_below_a_child() -> None:
    kernel = v2((5, 10))
    kernel.write(f"{P}/a/c", "cpuset.cpus", "0-1")
    assert code_of(lambda: kernel.write(f"{P}/a", "cpuset.cpus", "0")) == "EBUSY"
    assert "cpu.idle" not in kernel.files(f"{P}/a")
    assert "cpu.max.burst" not in kernel.files(f"{P}/a")


def test_v2_memory_below_usage_kills_and_v2_high_does_not() -> None:
    kernel = v2()
    pid = kernel.spawn()
    kernel.write(f"{P}/a/c", "cgroup.procs", str(pid))
    kernel.charge(f"{P}/a/c", anon=8 << 20, cache=4 << 20)
    kernel.write(f"{P}/a", "memory.high", "9M")
    assert kernel.read(f"{P}/a", "memory.current") == f"{9 << 20}\n"
    assert kernel.killed == []
    kernel.write(f"{P}/a", "memory.max", "8M")
    assert kernel.killed == []
    kernel.write(f"{P}/a", "memory.max", "7M")
    assert kernel.killed == [pid]
    assert kernel.read(f"{P}/a", "memory.max") == f"{7 << 20}\n"


def test_v2_reclaim_takes_what_it_can_and_says_when_that_was_less() -> None:
    kernel = v2()
    kernel.charge(f"{P}/a/c", anon=8 << 20, cache=4 << 20)
    kernel.write(f"{P}/a", "memory.reclaim", "1M")
    assert kernel.read(f"{P}/a", "memory.current") == f"{11 << 20}\n"
    assert code_of(lambda: kernel.write(f"{P}/a", "memory.reclaim", "4M")) == "EAGAIN"
    assert kernel.read(f"{P}/a", "memory.current") == f"{8 << 20}\n"
    assert code_of(lambda: kernel.read(f"{P}/a", "memory.reclaim")) == "EINVAL"
    assert "memory.reclaim" not in v2((5, 18)).files(f"{P}/a")


@pytest.mark.parametrize(
    ("release", "text", "code"),
    [
        ((6, 9), "1M swappiness=0", "ok"),
        ((6, 9), "1M swappiness=201", "EINVAL"),
        ((6, 9), "1M swap=0", "EINVAL"),
        ((6, 8), "1M swappiness=0", "EINVAL"),
        ((6, 8), "1M", "ok"),
    ],
)
def test_v2_reclaim_takes_swappiness_from_6_9_on(release: tuple[int, int], text: str, code: str) -> None:
    kernel = v2(release)
    kernel.charge(f"{P}/a/c", cache=4 << 20)
    assert code_of(lambda: kernel.write(f"{P}/a", "memory.reclaim", text)) == code


def test_a_groups_memory_by_node() -> None:
    kernel = FakeKernel("v1", nodes=2)
    kernel.make_group("/kubepods/pod1")
    top = place(kernel, "memory", "/kubepods")
    kernel.charge(f"{top}/pod1", anon=4096, cache=8192, node=1)
    texts = kernel.read(top, "memory.numa_stat").splitlines()
    assert texts[:2] == ["total=0 N0=0 N1=0", "file=0 N0=0 N1=0"]
    assert texts[4:7] == [
        "hierarchical_total=3 N0=0 N1=3",
        "hierarchical_file=2 N0=0 N1=2",
        "hierarchical_anon=1 N0=0 N1=1",
    ]


def test_v2_groups_that_pass_controllers_on_hold_no_processes() -> None:
    kernel = v2()
    pid = str(kernel.spawn())
    assert code_of(lambda: kernel.write(f"{P}/a", "cgroup.procs", pid)) == "EBUSY"
    kernel.write(f"{P}/a/c", "cgroup.procs", pid)
    assert kernel.read(f"{P}/a", "cgroup.events") == "populated 1\nfrozen 0\n"
    assert code_of(lambda: kernel.write(f"{P}/a/c", "cgroup.subtree_control", "+memory")) == "EBUSY"
    assert code_of(lambda: kernel.write(f"{P}", "cgroup.subtree_control", "-memory")) == "EBUSY"
    kernel.write(f"{P}/a/c", "cgroup.subtree_control", "+cpu")
    kernel.mkdir(f"{P}/a/c/d")
    other = str(kernel.spawn())
    assert code_of(lambda: kernel.write(f"{P}/a/c/d", "cgroup.procs", other)) in {"EOPNOTSUPP", "ENOTSUP"}
    assert code_of(lambda: kernel.write(f"{P}/a/c", "cgroup.kill", "2")) == "ERANGE"
    kernel.write(f"{P}/a/c", "cgroup.kill", "1")
    assert kernel.killed == [int(pid)]


def test_v2_idle_blocks_the_weight_and_the_release_shows() -> None:
    for release, idle_weight in (((6, 1), "0\n"), ((6, 12), "1\n")):
        kernel = v2(release)
        kernel.write(f"{P}/a", "cpu.idle", "1")
        assert kernel.read(f"{P}/a", "cpu.weight") == idle_weight
        assert code_of(lambda kernel=kernel: kernel.write(f"{P}/a", "cpu.weight", "50")) == "EINVAL"  # type: ignore[misc]
        kernel.write(f"{P}/a", "cpu.idle", "0")
        assert kernel.read(f"{P}/a", "cpu.weight") == "100\n"


def test_events_tell_who_did_what_and_a_failed_write_tells_nothing() -> None:
    kernel = FakeKernel("v1")
    seen: list[Event] = []
    end = kernel.subscribe(seen.append)
    cpu = "/sys/fs/cgroup/cpu"
    runc = Actor(kernel, 77)
    runc.mkdir(f"{cpu}/x")
    runc.write(f"{cpu}/x", "cpu.shares", "2")
    assert write_now(runc, f"{cpu}/x", "cpu.shares", "junk") == errno.EINVAL
    kernel.rmdir(f"{cpu}/x")
    end()
    kernel.mkdir(f"{cpu}/y")
    assert seen == [
        Event(cpu, IN_CREATE | IN_ISDIR, "x", 77),
        Event(f"{cpu}/x", IN_MODIFY, "cpu.shares", 77),
        Event(cpu, IN_DELETE | IN_ISDIR, "x", 1),
    ]
    assert kernel.writes == [(f"{cpu}/x/cpu.shares", "2", 0), (f"{cpu}/x/cpu.shares", "junk", errno.EINVAL)]


def test_an_inode_is_never_used_twice() -> None:
    kernel = FakeKernel("v1")
    seen = set()
    for _ in range(5):
        kernel.mkdir("/sys/fs/cgroup/cpu/x")
        seen.add(kernel.inode("/sys/fs/cgroup/cpu/x"))
        kernel.rmdir("/sys/fs/cgroup/cpu/x")
    assert len(seen) == 5


MODES: list[tuple[Mode, dict[str, int]]] = [
    ("v1", {"cpu": 1, "cpuset": 1, "memory": 1}),
    ("hybrid", {"cpu": 1, "cpuset": 1, "memory": 1, "unified": 2}),
    ("v2", {"cpu": 2, "cpuset": 2, "memory": 2, "unified": 2}),
]


@pytest.mark.parametrize(("mode", "versions"), MODES)
def test_the_agent_finds_its_hierarchies_on_an_installed_fake(
    tmp_path: Path, mode: Mode, versions: dict[str, int]
) -> None:
    kernel = FakeKernel(mode, root=str(tmp_path))
    kernel.install()
    hierarchy = Hierarchy.detect(str(tmp_path))
    assert {name: hierarchy.version(name) for name in versions} == versions
    kernel.make_group("/kubepods/besteffort")
    for controller in versions:
        directory = hierarchy.directory(controller, "/kubepods/besteffort")
        assert "cgroup.procs" in kernel.files(directory)
    kernel.remove_group("/kubepods")
    assert all(not tree.root.children for tree in kernel.trees)


@pytest.mark.parametrize("mode", ["v1", "v2"])
def test_a_mirrored_node_reads_the_same_through_the_file_system(tmp_path: Path, mode: Mode) -> None:
    kernel = FakeKernel(mode, root=str(tmp_path), mirror=True)
    kernel.install()
    kernel.make_group("/kubepods/pod1/c1")
    pid = kernel.spawn()
    tree = kernel.trees[0]
    leaf = f"{tree.mount}/kubepods/pod1/c1"
    kernel.write(leaf, "cgroup.procs", str(pid))
    kernel.write(leaf, "cpuset.cpus", "1")
    for group in tree.root.walk():
        directory = tree.path(group)
        assert kernel.inode(directory) == os.stat(directory).st_ino
        for file in kernel.files(directory):
            unreadable = file in {"cgroup.kill", "memory.reclaim", "memory.force_empty"}
            assert Path(directory, file).read_text() == ("" if unreadable else kernel.read(directory, file))
    kernel.remove_group("/kubepods")
    assert not os.path.exists(f"{tree.mount}/kubepods")


# What distributions add: documented, not seen here


@pytest.mark.parametrize("mode", ["v1", "v2"])
def test_an_anolis_group_has_an_identity_which_new_groups_below_it_share(mode: Mode) -> None:
    kernel = FakeKernel(mode, distribution="anolis")
    kernel.make_group("/kubepods/pod1")
    directory = place(kernel, "cpu", "/kubepods/pod1")
    for text in ("3", "-2", "x"):
        with pytest.raises(OSError, match="Invalid argument"):
            kernel.write(directory, "cpu.bvt_warp_ns", text)
    kernel.write(directory, "cpu.bvt_warp_ns", "-1")
    kernel.make_group("/kubepods/pod1/c")
    assert kernel.read(place(kernel, "cpu", "/kubepods/pod1/c"), "cpu.bvt_warp_ns") == "-1\n"
    assert "cpu.qos_level" not in kernel.files(directory)


@pytest.mark.parametrize("mode", ["v1", "v2"])
def test_an_openeuler_group_goes_offline_once(mode: Mode) -> None:
    kernel = FakeKernel(mode, distribution="openeuler")
    kernel.make_group("/kubepods/pod1")
    directory = place(kernel, "cpu", "/kubepods/pod1")
    kernel.write(directory, "cpu.qos_level", "0")
    kernel.write(directory, "cpu.qos_level", "-1")
    kernel.write(directory, "cpu.qos_level", "-1")
    for text in ("0", "1", "-2"):
        with pytest.raises(OSError, match="Invalid argument"):
            kernel.write(directory, "cpu.qos_level", text)
    assert kernel.read(directory, "cpu.qos_level") == "-1\n"


def place(kernel: FakeKernel, controller: str, group: str) -> str:
    """A group's directory in a controller's hierarchy."""
    return next(tree.mount for tree in kernel.trees if controller in {item.name for item in tree.controllers}) + group
