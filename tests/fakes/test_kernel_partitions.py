"""The fake kernel grants a CPU partition where Linux does, and ends it where Linux does."""

import pytest

from tests.fakes.kernel import FakeKernel

TOP = "/sys/fs/cgroup"
FULL = "Parent unable to distribute cpu downstream"
SHARED = "Cpu list in cpuset.cpus not exclusive"


class Tree:
    """Groups with CPU sets on a v2 machine of eight CPUs."""

    def __init__(self, release: tuple[int, int] = (6, 18)) -> None:
        self.kernel = FakeKernel("v2", cpus=8, release=release)
        for path in ("/a/c", "/b", "/a/d"):
            self.kernel.make_group(path)

    def put(self, path: str, cpus: str) -> None:
        self.kernel.write(TOP + path, "cpuset.cpus", cpus)

    def ask(self, path: str, kind: str = "root") -> str:
        self.kernel.write(TOP + path, "cpuset.cpus.partition", kind)
        return self.state(path)

    def state(self, path: str) -> str:
        return self.kernel.read(TOP + path, "cpuset.cpus.partition").strip()

    def effective(self, path: str) -> str:
        return self.kernel.read(TOP + path, "cpuset.cpus.effective").strip()


def test_one_overlapping_a_siblings_set_is_not_granted_and_keeps_nothing() -> None:
    tree = Tree()
    tree.put("/a", "0-3")
    tree.put("/b", "3-4")
    assert tree.ask("/a") == f"root invalid ({SHARED})"
    assert tree.effective("/b") == "3-4"
    tree.put("/b", "4")
    assert tree.state("/a") == f"root invalid ({SHARED})", "until it is written again"
    assert tree.ask("/a") == "root"


def test_an_empty_one_one_below_no_partition_and_one_that_takes_all_is_not_granted() -> None:
    tree = Tree()
    assert tree.ask("/a") == "root invalid (cpuset.cpus and cpuset.cpus.exclusive are empty)"
    tree.put("/a/c", "1")
    assert tree.ask("/a/c") == "root invalid (Parent is an invalid partition root)"
    tree.ask("/a", "member")
    assert tree.ask("/a/c") == "root invalid (Parent is not a partition root)"
    tree.put("/b", "0-7")
    assert tree.ask("/b") == f"root invalid ({FULL})", "the root has processes"


def test_a_partition_may_give_all_it_has_while_no_process_is_left_without_a_cpu() -> None:
    tree = Tree()
    tree.put("/a", "0-3")
    tree.put("/a/c", "0-3")
    assert (tree.ask("/a"), tree.ask("/a/c"), tree.effective("/a")) == ("root", "root", "")
    tree = Tree()
    tree.put("/a", "0-3")
    tree.put("/a/c", "0-3")
    tree.ask("/a")
    pid = tree.kernel.spawn()
    tree.kernel.write(f"{TOP}/a/d", "cgroup.procs", str(pid))
    assert tree.ask("/a/c") == f"root invalid ({FULL})"


def test_a_set_written_over_a_partition_ends_it_and_those_inside() -> None:
    tree = Tree()
    tree.put("/a", "0-3")
    tree.put("/a/c", "1")
    assert (tree.ask("/a"), tree.ask("/a/c", "isolated")) == ("root", "isolated")
    tree.put("/b", "3-5")
    assert tree.state("/a") == f"root invalid ({SHARED})"
    assert tree.state("/a/c") == "isolated invalid (Parent is an invalid partition root)"


def test_a_partition_without_an_online_cpu_ends_where_it_has_processes_until_one_is_back() -> None:
    tree = Tree()
    tree.put("/b", "7")
    tree.ask("/b")
    tree.kernel.write(f"{TOP}/b", "cgroup.procs", str(tree.kernel.spawn()))
    tree.kernel.unplug(7)
    assert tree.state("/b") == "root invalid (No cpu available due to hotplug)"
    assert tree.effective("/b") == "0-6"
    tree.kernel.plug(7)
    assert (tree.state("/b"), tree.effective("/b")) == ("root", "7")


def test_before_6_1_what_is_not_granted_is_an_error() -> None:
    tree = Tree((5, 10))
    with pytest.raises(OSError, match="Invalid argument"):
        tree.ask("/a", "isolated")
    tree.put("/a", "0-1")
    tree.put("/b", "1-2")
    with pytest.raises(OSError, match="Invalid argument"):
        tree.ask("/a")
    tree.put("/b", "2")
    assert tree.ask("/a") == "root"
    with pytest.raises(OSError, match="Invalid argument"):
        tree.put("/b", "1-2")
    assert (tree.state("/a"), tree.effective("/b")) == ("root", "2")
