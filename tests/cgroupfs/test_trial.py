"""What a killed trial left, in a directory of the test's own: which processes are ended before it is removed."""

import errno
import os
from pathlib import Path

import pytest

from cgroupfs import trial
from cgroupfs.errors import CgroupError
from cgroupfs.files import RealFiles
from cgroupfs.hierarchy import Hierarchy, HierarchyMode, Mount
from cgroupfs.trial import PREFIX, TrialGroup, remove_left


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


@pytest.mark.kernel
def test_a_group_that_cannot_be_given_cpus_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    hierarchy = Hierarchy.detect()
    if hierarchy.version("cpuset") != 1:
        pytest.skip("needs the cpuset controller of cgroup v1")

    def refuse(_: object, directory: str, file: str, text: str) -> None:
        raise OSError(errno.EACCES, "refused", f"{directory}/{file}", 0, text)

    monkeypatch.setattr(RealFiles, "write", refuse)
    group = TrialGroup(hierarchy, f"of-a-test-{os.getpid()}", ["cpuset"])
    with pytest.raises(CgroupError, match=r"cpuset\.cpus: write .* EACCES"), group:
        pass
    assert not os.path.exists(hierarchy.directory("cpuset", group.path))
