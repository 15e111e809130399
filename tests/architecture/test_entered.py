"""Two ways through the program stay short: how many product files each enters is a fact of its structure."""

import os
from pathlib import Path

import pytest

from tests.architecture.scenes import EVICTION_FILES, FOREIGN_CPUSET_FILES, eviction, foreign_cpuset
from tests.e2e.mounts import hierarchies
from tests.fakes.node import HIERARCHIES


@pytest.mark.kernel
def test_a_foreign_cpu_set_is_put_back_through_few_files(tmp_path: Path) -> None:
    if os.geteuid() != 0 or set(HIERARCHIES) - set(hierarchies()) or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("REAL KERNEL TEST NOT RUN: needs root, cgroup v1 hierarchies and two CPUs")
    files = foreign_cpuset(str(tmp_path / "node"))
    for number in range(4):
        if len(files) <= FOREIGN_CPUSET_FILES:
            break
        # A component may have looked around meanwhile, as each does now and then: it is not there the next time.
        again = foreign_cpuset(str(tmp_path / f"again-{number}"))
        files = {name: functions for name, functions in files.items() if name in again}
    assert "reconciler/actuators/cgroup/apply.py" in files
    assert "reconciler/control/planner.py" not in files, "a foreign write alone is no reason to plan"
    assert len(files) <= FOREIGN_CPUSET_FILES, "\n".join(files)


def test_an_eviction_is_ordered_through_few_files(tmp_path: Path) -> None:
    files = eviction(str(tmp_path))
    assert {"reconciler/responses/ladder.py", "reconciler/responses/eviction/executor.py"} <= files.keys()
    assert len(files) <= EVICTION_FILES, "\n".join(files)
