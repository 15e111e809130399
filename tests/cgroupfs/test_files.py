import errno
import os
from pathlib import Path

import pytest

from cgroupfs.errors import CgroupGoneError
from cgroupfs.files import REAL, GroupDir, inode_of, read_text, write_now, write_text


@pytest.fixture
def group(tmp_path: Path) -> Path:
    (tmp_path / "cpu.shares").write_text("1024\n")
    (tmp_path / "child").mkdir()
    return tmp_path


def test_a_file_is_read_by_path_and_by_open_directory(group: Path) -> None:
    number = REAL.open_dir(str(group))
    try:
        assert REAL.read(number, "cpu.shares") == REAL.read(str(group), "cpu.shares") == "1024\n"
        assert read_text(f"{group}/cpu.shares") == "1024\n"
    finally:
        REAL.close_dir(number)


def test_long_files_come_whole(group: Path) -> None:
    text = "123456\n" * 40_000
    (group / "cgroup.procs").write_text(text)
    assert REAL.read(str(group), "cgroup.procs") == text


def test_write_now_answers_zero_or_the_errno(group: Path) -> None:
    number = REAL.open_dir(str(group))
    try:
        assert write_now(number, "cpu.shares", "2048") == 0
        assert write_now(str(group), "cpu.shares", "4096") == 0
        assert (group / "cpu.shares").read_text() == "4096\n"
        assert write_now(number, "absent", "1") == errno.ENOENT
        assert write_now(str(group / "absent"), "cpu.shares", "1") == errno.ENOENT
        assert write_now(number, "child", "1") == errno.EISDIR
    finally:
        REAL.close_dir(number)


def test_write_now_answers_a_refused_write_and_leaks_nothing() -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert write_now("/dev", "full", "1") == errno.ENOSPC
    assert len(os.listdir("/proc/self/fd")) == before


def test_groups_and_files_are_told_apart(group: Path) -> None:
    assert REAL.groups(str(group)) == ["child"]
    assert REAL.files(str(group)) == ["cpu.shares"]


def test_a_group_of_another_inode_is_gone(group: Path) -> None:
    inode = inode_of(str(group))
    with GroupDir(str(group), inode) as same:
        assert same.inode == inode
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CgroupGoneError, match="has its name"):
        GroupDir(str(group), inode + 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_held_group_is_not_the_one_that_took_its_path(group: Path) -> None:
    child = group / "child"
    (child / "cpu.shares").write_text("1\n")
    with GroupDir(str(child)) as held:
        assert held.read("cpu.shares") == "1\n"
        held.write("cpu.shares", "2")
        (child / "cpu.shares").unlink()
        child.rmdir()
        child.mkdir()
        (child / "cpu.shares").write_text("new\n")
        with pytest.raises(CgroupGoneError):
            held.read("cpu.shares")
        with pytest.raises(CgroupGoneError):
            held.write("cpu.shares", "3")
        assert write_now(held.fileno(), "cpu.shares", "3") == errno.ENOENT
    assert (child / "cpu.shares").read_text() == "new\n"


def test_a_missing_group_is_gone_and_not_some_other_error(group: Path) -> None:
    for use in (
        lambda: GroupDir(f"{group}/none"),
        lambda: inode_of(f"{group}/none"),
        lambda: read_text(f"{group}/none/cpu.shares"),
        lambda: write_text(f"{group}/none/cpu.shares", "1"),
    ):
        with pytest.raises(CgroupGoneError):
            use()


def test_writing_by_path_replaces_the_value(group: Path) -> None:
    write_text(f"{group}/cpu.shares", "9999")
    assert read_text(f"{group}/cpu.shares") == "9999\n"
