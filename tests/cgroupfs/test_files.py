import errno
import os
from pathlib import Path

import pytest

from cgroupfs.errors import CgroupGoneError
from cgroupfs.files import REAL, read_text, write_now


@pytest.fixture
def group(tmp_path: Path) -> Path:
    (tmp_path / "cpu.shares").write_text("1024\n")
    (tmp_path / "child").mkdir()
    return tmp_path


def test_long_files_come_whole(group: Path) -> None:
    text = "123456\n" * 40_000
    (group / "cgroup.procs").write_text(text)
    assert REAL.read(str(group), "cgroup.procs") == read_text(f"{group}/cgroup.procs") == text


def test_write_now_answers_zero_or_the_errno_and_leaks_nothing(group: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert write_now(REAL, str(group), "cpu.shares", "4096") == 0
    assert (group / "cpu.shares").read_text() == "4096\n"
    assert write_now(REAL, str(group / "absent"), "cpu.shares", "1") == errno.ENOENT
    assert write_now(REAL, str(group), "child", "1") == errno.EISDIR
    assert write_now(REAL, "/dev", "full", "1") == errno.ENOSPC
    assert len(os.listdir("/proc/self/fd")) == before


def test_groups_and_files_are_told_apart(group: Path) -> None:
    assert REAL.groups(str(group)) == ["child"]
    assert REAL.files(str(group)) == ["cpu.shares"]


def test_no_more_groups_are_listed_than_wanted_and_a_group_without_any_is_not_listed(
    group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abcd":
        (group / name).mkdir()
    assert len(REAL.groups(str(group), 3)) == 3
    assert REAL.groups(str(group), 0) == []
    assert len(REAL.groups(str(group))) == 5
    monkeypatch.setattr(os, "scandir", lambda _: pytest.fail("it has two links"))
    assert REAL.groups(str(group / "a")) == []
    with pytest.raises(FileNotFoundError):
        REAL.groups(str(group / "none"))


def test_a_missing_group_is_gone_and_not_some_other_error(group: Path) -> None:
    with pytest.raises(CgroupGoneError):
        read_text(f"{group}/none/cpu.shares")
