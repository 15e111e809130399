import os
import subprocess
import sys
from pathlib import Path

import pytest

from reconciler.runtime.cgroup_namespace import join_host_cgroups
from tests.real_cgroups import make_root, remove_tree

INSIDE = """
import ctypes, os, sys
from pathlib import Path
from reconciler.runtime.cgroup_namespace import join_host_cgroups
from reconciler.sources.host_processes import find_host_process
group, host = sys.argv[1:]
Path(group, "cgroup.procs").write_text(str(os.getpid()))
if ctypes.CDLL(None, use_errno=True).unshare(0x02000000):
    sys.exit(9)
def own():
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    return {line.split(":", 2)[2] for line in lines if ":cpuset:" in line}
print(own() == {"/"}, "/.." in Path(host, "cgroup").read_text())
print(join_host_cgroups(host))
print(own() == {"/" + os.path.basename(group)}, "/.." in Path(host, "cgroup").read_text())
"""


@pytest.mark.kernel
def test_a_process_of_its_own_cgroup_namespace_sees_the_nodes_paths_afterwards() -> None:
    if os.geteuid() != 0:
        pytest.skip("REAL KERNEL TEST NOT RUN: needs root")
    group = make_root("cpuset", f"cgroupns-{os.getpid()}")
    try:
        for name in ("cpuset.cpus", "cpuset.mems"):
            Path(group, name).write_text(Path(os.path.dirname(group), name).read_text())
        done = subprocess.run(
            [sys.executable, "-c", INSIDE, group, f"/proc/{os.getpid()}"], capture_output=True, text=True, check=False
        )
    finally:
        remove_tree(group)
    if done.returncode == 9:
        pytest.skip("REAL KERNEL TEST NOT RUN: no cgroup namespaces here")
    assert done.stdout.splitlines() == ["True True", "None", "True False"], done.stderr


def test_what_keeps_it_from_joining_is_a_problem_only_where_paths_are_relative(tmp_path: Path) -> None:
    assert join_host_cgroups("/proc/self") is None
    (tmp_path / "cgroup").write_text("0::/init.scope\n")
    assert join_host_cgroups(str(tmp_path)) is None
    (tmp_path / "cgroup").write_text("0::/../../../../init.scope\n")
    problem = join_host_cgroups(str(tmp_path))
    assert problem is not None
    assert "(ENOENT)" in problem
