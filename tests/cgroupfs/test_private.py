"""Private groups, in a directory of the test's own: which processes are put back before a group is removed."""

from pathlib import Path

import pytest

from cgroupfs.errors import CgroupError
from cgroupfs.private import PREFIX, PrivateTree


@pytest.mark.parametrize(("listed", "moved"), [("0\n", ""), ("4194303\n", "4194303")])
def test_a_process_outside_this_pid_namespace_is_not_put_back(tmp_path: Path, listed: str, moved: str) -> None:
    """It is listed as 0, and a 0 that is written moves the writer itself."""
    group = tmp_path / f"{PREFIX}uid"
    group.mkdir()
    (group / "cgroup.procs").write_text(listed)
    (tmp_path / "cgroup.procs").write_text("")
    with pytest.raises(CgroupError, match="remove"):
        PrivateTree(str(tmp_path)).remove("uid")
    assert (tmp_path / "cgroup.procs").read_text() == moved
