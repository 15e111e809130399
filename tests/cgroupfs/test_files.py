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


def test_a_file_is_read_by_path_and_by_open_directory(group: Path) -> None:
    number = os.open(group, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert REAL.read(number, "cpu.shares") == REAL.read(str(group), "cpu.shares") == "1024\n"
        assert read_text(f"{group}/cpu.shares") == "1024\n"
    finally:
        os.close(number)


def test_long_files_come_whole(group: Path) -> None:
    text = "123456\n" * 40_000
    (group / "cgroup.procs").write_text(text)
    assert REAL.read(str(group), "cgroup.procs") == text


def test_write_now_answers_zero_or_the_errno(group: Path) -> None:
    number = os.open(group, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert write_now(number, "cpu.shares", "2048") == 0
        assert write_now(str(group), "cpu.shares", "4096") == 0
        assert (group / "cpu.shares").read_text() == "4096\n"
        assert write_now(number, "absent", "1") == errno.ENOENT
        assert write_now(str(group / "absent"), "cpu.shares", "1") == errno.ENOENT
        assert write_now(number, "child", "1") == errno.EISDIR
    finally:
        os.close(number)


def test_write_now_answers_a_refused_write_and_leaks_nothing() -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert write_now("/dev", "full", "1") == errno.ENOSPC
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
    number = os.open(group, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert len(REAL.groups(number)) == 5
    finally:
        os.close(number)
    monkeypatch.setattr(os, "scandir", lambda _: pytest.fail("it has two links"))
    assert REAL.groups(str(group / "a")) == []
    with pytest.raises(FileNotFoundError):
        REAL.groups(str(group / "none"))


def test_a_missing_group_is_gone_and_not_some_other_error(group: Path) -> None:
    with pytest.raises(CgroupGoneError):
        read_text(f"{group}/none/cpu.shares")
