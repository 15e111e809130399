import os
from pathlib import Path

import pytest

from cgroupfs.kept import FdCache, GroupDirectories
from tests.cgroupfs.kernelgroup import kernel_groups


def _open(prefix: str) -> set[str]:
    texts = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if target.startswith(prefix):
            texts.add(target)
    return texts


def test_files_stay_open_while_they_are_read_and_no_longer(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1\n")
    (tmp_path / "two").write_text("2\n")
    files = FdCache()
    text = str(tmp_path)
    assert (files.read(text, "one"), files.read(text, "two")) == ("1\n", "2\n")
    (tmp_path / "one").write_text("11\n")
    assert files.read(text, "one") == "11\n"
    files.rotate()
    files.read(text, "one")
    assert _open(text) == {f"{text}/one", f"{text}/two"}
    for _ in range(4):
        files.rotate()
        files.read(text, "one")
    assert _open(text) == {f"{text}/one"}
    files.close()
    assert _open(text) == set()
    assert files.read(text, "two") == "2\n"
    files.close()


def test_long_files_come_whole(tmp_path: Path) -> None:
    (tmp_path / "long").write_text("x" * 300_000)
    files = FdCache()
    assert files.read(str(tmp_path), "long") == "x" * 300_000
    assert files.read(str(tmp_path), "long") == "x" * 300_000
    files.close()


def test_beyond_the_bound_files_are_read_all_the_same(tmp_path: Path) -> None:
    files = FdCache(most=2)
    for name in "abcd":
        (tmp_path / name).write_text(name)
    assert [files.read(str(tmp_path), name) for name in "abcdabcd"] == list("abcdabcd")
    assert len(files) == 2
    files.close()


def test_what_is_not_there_is_the_kernels_own_answer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FdCache().read(str(tmp_path), "missing")


@pytest.mark.kernel
def test_a_namesake_of_a_removed_group_is_read_and_not_the_old_one() -> None:
    with kernel_groups("kept", "pids") as (hierarchy, group):
        path = GroupDirectories(hierarchy, "pids")(f"{group}/child")
        files = FdCache()
        os.mkdir(path)
        Path(path, "pids.max").write_text("7")
        assert files.read(path, "pids.max") == "7\n"
        os.rmdir(path)
        with pytest.raises(OSError, match="No such"):
            files.read(path, "pids.max")
        os.mkdir(path)
        assert files.read(path, "pids.max") == "max\n"
        os.rmdir(path)
        os.mkdir(path)
        Path(path, "pids.max").write_text("9")
        assert files.read(path, "pids.max") == "9\n"
        files.close()
