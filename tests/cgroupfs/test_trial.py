"""What a killed trial left, in a directory of the test's own: which processes are ended before it is removed."""

import os
from pathlib import Path

import pytest

from cgroupfs import trial
from cgroupfs.hierarchy import Hierarchy, HierarchyMode, Mount
from cgroupfs.trial import PREFIX, remove_left


def test_a_process_outside_this_pid_namespace_is_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is listed as 0, which is the caller's own process group for kill(2)."""
    group = tmp_path / f"{PREFIX}left"
    group.mkdir()
    (group / "cgroup.procs").write_text("0\n4194303\n")
    ended: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: ended.append(pid))
    monkeypatch.setattr(trial, "_PATIENCE_S", 0.0)
    mount = Mount(directory=str(tmp_path), version=1, controllers=("cpu",))
    assert remove_left(Hierarchy(root="/", mode=HierarchyMode.V1, controllers={"cpu": mount})) == []
    assert ended == [4194303]
