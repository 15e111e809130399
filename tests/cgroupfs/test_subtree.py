"""One group with all below it, on this machine's kernel: identified by inode, read, frozen and thawed."""

import errno
import os
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from cgroupfs import subtree
from cgroupfs.errors import CgroupError
from cgroupfs.hierarchy import FREEZER, Hierarchy, HierarchyMode, Mount
from cgroupfs.subtree import Subtree
from tests.fakes.victims import CONTROLLERS, Victim, a_victim


@pytest.fixture
def victim() -> Iterator[Victim]:
    with a_victim("subtree") as item:
        yield item


@pytest.mark.kernel
def test_it_is_populated_while_any_hierarchy_lists_a_process_anywhere_below(victim: Victim) -> None:
    with Subtree.open(victim.hierarchy, victim.group) as tree:
        assert tree.exists
        assert not any(tree.scan())
        process = victim.sleep()
        assert any(tree.scan())
        # Moved out of every hierarchy but one, it is still there.
        for controller in set(CONTROLLERS) - {"pids"}:
            top = victim.hierarchy.directory(controller, "/")
            Path(top, "cgroup.procs").write_text(str(process.pid))
        assert any(tree.scan())
        assert {pid for group in tree.groups() for pid in group.pids()} == {process.pid}
        process.kill()
        process.wait()
        assert not any(tree.scan())


@pytest.mark.kernel
def test_every_stopped_group_of_it_is_let_go_and_the_number_told(victim: Victim) -> None:
    if victim.hierarchy.version(FREEZER) != 1:
        pytest.skip("needs the freezer of cgroup v1")
    victim.sleep()
    victim.freeze("/c")
    victim.freeze()
    Path(victim.directory("unified"), "cgroup.freeze").write_text("1")
    with Subtree.open(victim.hierarchy, victim.group) as tree:
        assert tree.stopped()
        assert tree.thaw() == 3
        assert tree.thaw() == 0
        assert not tree.stopped()
        assert tree.stop()
    assert victim.frozen() in {"FREEZING", "FROZEN"}


@pytest.mark.kernel
def test_cgroup_kill_ends_everybody_at_once(victim: Victim) -> None:
    processes = [victim.sleep(), victim.sleep()]
    with Subtree.open(victim.hierarchy, victim.group) as tree:
        if not os.path.exists(f"{victim.directory('unified')}/cgroup.kill"):
            pytest.skip("needs cgroup.kill (kernel 5.14)")
        assert tree.kill()
    assert [process.wait() for process in processes] == [-signal.SIGKILL] * 2


@pytest.mark.kernel
def test_a_removed_group_has_nobody_in_it_and_takes_no_order(victim: Victim) -> None:
    with Subtree.open(victim.hierarchy, victim.group) as tree:
        for controller in CONTROLLERS:
            os.rmdir(victim.directory(controller))
            os.rmdir(victim.directory(controller, ""))
        assert not tree.exists
        assert not any(tree.scan())
        assert (tree.thaw(), tree.kill(), tree.stop()) == (0, False, False)
    with Subtree.open(victim.hierarchy, victim.group) as nothing:
        assert nothing.inodes == {}


def one_mount(directory: Path) -> Hierarchy:
    mount = Mount(directory=str(directory), version=1, controllers=(FREEZER,))
    return Hierarchy(root="/", mode=HierarchyMode.V1, controllers={FREEZER: mount})


def test_another_group_by_its_name_is_not_opened_and_a_symlink_neither(tmp_path: Path) -> None:
    (tmp_path / "pod").mkdir()
    (tmp_path / "pod/cgroup.procs").write_text("7\n")
    (tmp_path / "link").symlink_to(tmp_path / "pod")
    hierarchy = one_mount(tmp_path)
    with Subtree.open(hierarchy, "/pod") as tree:
        inodes = tree.inodes
        assert any(tree.scan())
    with Subtree.open(hierarchy, "/pod", inodes) as tree:
        assert any(tree.scan())
    with Subtree.open(hierarchy, "/pod", {str(tmp_path): inodes[str(tmp_path)] + 1}) as tree:
        assert not tree.exists
    with Subtree.open(hierarchy, "/link") as tree:
        assert not tree.exists


def test_a_hierarchy_that_cannot_be_opened_leaves_no_other_one_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit of open files every try would take more of them away."""
    mounts = {}
    for name in ("cpu", "pids", FREEZER):
        (tmp_path / name / "pod").mkdir(parents=True)
        mounts[name] = Mount(directory=str(tmp_path / name), version=1, controllers=(name,))
    hierarchy = Hierarchy(root="/", mode=HierarchyMode.V1, controllers=mounts)
    really = os.open

    def refuse_the_last(path: str, flags: int, *more: int, **options: int) -> int:
        if path == f"{tmp_path}/{FREEZER}/pod":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return really(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refuse_the_last)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CgroupError, match="EMFILE"):
        Subtree.open(hierarchy, "/pod")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_refused_thaw_is_an_error_and_not_silence(tmp_path: Path) -> None:
    (tmp_path / "pod").mkdir()
    (tmp_path / "pod/cgroup.procs").write_text("7\n")
    (tmp_path / "pod/freezer.state").mkdir()
    with Subtree.open(one_mount(tmp_path), "/pod") as tree, pytest.raises(CgroupError):
        tree.thaw()


def test_groups_nested_deeper_than_a_path_may_be_long_are_all_listed(tmp_path: Path) -> None:
    """A tenant that can make groups would have no process of its own found, nor ended."""
    (tmp_path / "pod").mkdir()
    numbers = [os.open(tmp_path / "pod", os.O_RDONLY)]
    for level in range(40):
        for name in ("beside", "n" * 200):
            os.mkdir(name, dir_fd=numbers[-1])
        numbers.append(os.open("n" * 200, os.O_RDONLY, dir_fd=numbers[-1]))
        for file, text in (("cgroup.procs", f"{level + 10}\n"), ("freezer.state", "FROZEN\n")):
            with open(os.open(file, os.O_CREAT | os.O_WRONLY, dir_fd=numbers[-1]), "w") as opened:
                opened.write(text)
    (tmp_path / "pod/freezer.state").write_text("THAWED\n")
    before = len(os.listdir("/proc/self/fd"))
    with Subtree.open(one_mount(tmp_path), "/pod") as tree:
        assert any(tree.scan())
        found = [list(group.pids()) for group in tree.groups()]
        # Each after the one that it is in.
        assert [pids for pids in found if pids] == [[level + 10] for level in range(40)]
        assert len(found) == 81
        assert tree.missing == ""
        # Plain files take the text as it is: "FROZEN" becomes "THAWED".
        assert (tree.thaw(), tree.thaw()) == (40, 0)
    assert len(os.listdir("/proc/self/fd")) == before
    for number in numbers:
        os.close(number)


@pytest.mark.kernel
def test_of_too_many_groups_some_are_listed_others_by_the_next_call_and_that_is_said(
    victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = victim.directory("pids")
    for number in range(30):
        os.mkdir(f"{directory}/{number}")
        os.mkdir(f"{directory}/{number}/in")
    monkeypatch.setattr(subtree, "MOST_GROUPS", 8)
    seen: list[set[int]] = []
    hierarchy = Hierarchy(root="/", mode=HierarchyMode.V1, controllers={"pids": victim.hierarchy.controllers["pids"]})
    with Subtree.open(hierarchy, victim.group) as tree:
        for _ in range(1000):
            seen.append({os.fstat(group.number).st_ino for group in tree.groups()})
            assert len(seen[-1]) <= 9
            assert tree.missing == "only 8 groups in it are listed at a time"
        assert any(tree.scan()), "unknown is not empty"
        assert any(before != after for before, after in pairwise(seen))
        inodes = {os.stat(above).st_ino for above, _, _ in os.walk(victim.directory("pids", ""))}
        assert set().union(*seen) == inodes
        monkeypatch.setattr(subtree, "MOST_GROUPS", 61)
        assert not any(tree.scan())
        assert len(list(tree.groups())) == 62
        assert tree.missing == ""


@pytest.mark.kernel
def test_of_more_groups_than_the_kernel_lists_at_once_each_is_listed_in_its_turn(
    victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a tenant chooses their names: the kernel sorts them by a hash of these."""
    names = [f"{number:0200}" for number in range(600)]
    for name in names:
        os.mkdir(f"{victim.directory('pids')}/{name}")
    monkeypatch.setattr(subtree, "MOST_GROUPS", 150)
    hierarchy = Hierarchy(root="/", mode=HierarchyMode.V1, controllers={"pids": victim.hierarchy.controllers["pids"]})
    number = os.open(victim.directory("pids"), os.O_RDONLY)
    with Subtree.open(hierarchy, victim.group) as tree:
        calls = [set(tree._names(number, 150)) for _ in range(60)]
        assert {len(call) for call in calls} == {150}
        assert set().union(*calls) == set(names)
        # Those of each call follow those of the call before.
        assert not calls[0] & calls[1]
    os.close(number)
