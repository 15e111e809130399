from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cgroupfs.hierarchy import Hierarchy
from reconciler.runtime.own_process import LATE_S, Creations, OwnProcess
from tests.fakes.kernel import FakeKernel


@pytest.mark.parametrize(
    ("real_time", "waited_s", "has_budget", "expected"),
    [
        (True, 0.0, True, True),
        (True, 0.9 * LATE_S, True, True),
        (True, LATE_S, True, False),
        # Late without end: paced it keeps the priority.
        (True, 9 * LATE_S, False, True),
        # A pause would end when it gets a CPU again.
        (False, 0.0, True, False),
        (False, 9 * LATE_S, False, False),
    ],
)
def test_work_for_a_creation_is_paced_with_the_priority_until_it_is_late(
    tmp_path: Path, *, real_time: bool, waited_s: float, has_budget: bool, expected: bool
) -> None:
    kernel = FakeKernel("v1", root=str(tmp_path))
    kernel.install()
    share: Any = SimpleNamespace(nice=0, realtime_ms=10.0, own_shares=1024)
    creations = Creations(lambda: True, lambda: True, lambda: waited_s)
    process = OwnProcess(Hierarchy.detect(str(tmp_path)), "/kubepods", share, creations, kernel)
    priority: Any = SimpleNamespace(is_real_time=real_time, has_budget=has_budget)
    process.priority = priority
    assert process.may_pace() is expected
