"""A file is replaced whole, with its owner and mode, and synced with its directory."""

import os
import stat
from pathlib import Path

import pytest

from reconciler.runtime.replaced import replace_durably


def test_owner_and_mode_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    path.chmod(0o604)
    if os.geteuid() == 0:
        os.chown(path, 1234, 4321)
    was = path.stat()
    replace_durably(str(path), b"new", mode=0o644)
    now = path.stat()
    assert path.read_bytes() == b"new"
    assert (now.st_uid, now.st_gid, stat.S_IMODE(now.st_mode)) == (was.st_uid, was.st_gid, 0o604)
    assert os.listdir(tmp_path) == ["f"]


def test_a_new_file_has_the_mode_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        replace_durably(str(tmp_path / "f"), b"x", mode=0o644)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o644


def test_content_and_directory_are_synced_around_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    sync, rename = os.fsync, os.rename

    def synced(number: int) -> None:
        steps.append("directory" if stat.S_ISDIR(os.fstat(number).st_mode) else "file")
        sync(number)

    def renamed(old: str, new: str) -> None:
        steps.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    replace_durably(str(tmp_path / "f"), b"x", mode=0o600)
    assert steps == ["file", "rename", "directory"]


@pytest.mark.parametrize("step", ["fsync", "rename", "fchmod"])
def test_an_error_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "f"
    path.write_text("old")

    def failing(*_: object) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr(os, step, failing)
    with pytest.raises(OSError, match="full"):
        replace_durably(str(path), b"new", mode=0o644)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["f"]
