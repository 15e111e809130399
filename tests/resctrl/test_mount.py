import os
from pathlib import Path

import pytest

from cgroupfs.errors import CgroupDeniedError
from resctrl.files import SOURCE, RealMounter

TABLE = """25 1 0:22 / /sys rw - sysfs sysfs rw
60 25 0:60 / /sys/fs/resctrl rw,relatime shared:9 - resctrl resctrl rw,cdp
"""


def node(path: Path, table: str, namespace: str) -> str:
    (path / "proc/self").mkdir(parents=True)
    (path / "proc/self/mountinfo").write_text(table)
    (path / "proc/1/ns").mkdir(parents=True)
    os.symlink(namespace, path / "proc/1/ns/mnt")
    return str(path)


def test_a_mount_of_ours_is_known_by_its_source(tmp_path: Path) -> None:
    place = f"{tmp_path}/sys/fs/resctrl"
    mounter = RealMounter(node(tmp_path, TABLE, "mnt:[1]"))
    assert mounter.source(place) == "resctrl"
    assert mounter.source("/mnt/elsewhere") is None
    (tmp_path / "proc/self/mountinfo").write_text(TABLE.replace("resctrl resctrl", f"resctrl {SOURCE}"))
    assert mounter.source(place) == SOURCE


def test_no_mount_and_no_table_have_no_source(tmp_path: Path) -> None:
    assert RealMounter(node(tmp_path, TABLE.splitlines()[0], "mnt:[1]")).source("/sys/fs/resctrl") is None
    assert RealMounter(str(tmp_path / "nothing")).source("/sys/fs/resctrl") is None


def test_a_process_with_mounts_of_its_own_names_the_line_for_the_host(tmp_path: Path) -> None:
    mounter = RealMounter(node(tmp_path, "", "mnt:[1]"))
    with pytest.raises(CgroupDeniedError, match=r"private mount namespace.* /sys/fs/resctrl resctrl cdp 0 0"):
        mounter.mount("/sys/fs/resctrl", ["cdp"])
