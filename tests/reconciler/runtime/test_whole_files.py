"""Whole files: the old or the new one, and what is durable when."""

import os
import stat
from pathlib import Path

import pytest

from reconciler.runtime.safe_files import replace_file


def test_a_failed_replacement_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "headroom.json"
    target.mkdir()
    with pytest.raises(OSError, match="headroom"):
        replace_file(str(target), b"{}")
    assert os.listdir(tmp_path) == ["headroom.json"]


def test_the_file_is_not_written_through_a_link_that_waits_under_a_temporary_name(tmp_path: Path) -> None:
    victim, target = tmp_path / "victim", tmp_path / "headroom.json"
    victim.write_text("mine")
    Path(f"{target}.{os.getpid()}").symlink_to(victim)
    replace_file(str(target), b"{}")
    assert (victim.read_text(), target.read_text(), target.is_symlink()) == ("mine", "{}", False)


def test_a_durable_replacement_syncs_the_content_before_the_name_and_then_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    fsync, rename = os.fsync, os.replace

    def synced(number: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(number).st_mode)
        log.append("directory" if is_directory else Path(f"/proc/self/fd/{number}").read_text())
        fsync(number)

    def renamed(source: str, target: str) -> None:
        log.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    replace_file(str(tmp_path / "plain"), b"plain")
    assert log == ["rename"]
    replace_file(str(tmp_path / "token"), b"content", mode=0o600, durable=True)
    assert log[1:] == ["content", "rename", "directory"]
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


def test_a_content_that_does_not_reach_the_disk_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "token"
    target.write_text("old")

    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        replace_file(str(target), b"new", durable=True)
    assert (target.read_text(), os.listdir(tmp_path)) == ("old", ["token"])


def test_a_file_that_exists_keeps_owner_and_mode_where_that_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    path.chmod(0o604)
    if os.geteuid() == 0:
        os.chown(path, 1234, 4321)
    was = path.stat()
    replace_file(str(path), b"new", mode=0o644, keep_owner=True)
    now = path.stat()
    assert path.read_bytes() == b"new"
    assert (now.st_uid, now.st_gid, stat.S_IMODE(now.st_mode)) == (was.st_uid, was.st_gid, 0o604)
    replace_file(str(path), b"newer", mode=0o640)
    now = path.stat()
    assert (now.st_uid, stat.S_IMODE(now.st_mode)) == (os.geteuid(), 0o640)
