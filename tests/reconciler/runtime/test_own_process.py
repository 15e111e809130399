from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cgroupfs.hierarchy import Hierarchy
from reconciler.runtime.own_process import LATE_S, Creations, OwnProcess
from tests.fakes.kernel import FakeKernel


@pytest.mark.parametrize(
    ("real_time", "waited_s", "budget_s", "expected"),
    [
        (True, 0.0, 0.002, True),
        (True, 0.9 * LATE_S, 0.002, True),
        (True, LATE_S, 0.002, False),
        # Late without end: paced it keeps the priority.
        (True, 9 * LATE_S, 0.0, True),
        (True, 9 * LATE_S, -0.002, True),
        # A pause would end when it gets a CPU again.
        (False, 0.0, 0.002, False),
        (False, 9 * LATE_S, 0.0, False),
    ],
)
def test_work_for_a_creation_is_paced_with_the_priority_until_it_is_late(
    tmp_path: Path, *, real_time: bool, waited_s: float, budget_s: float, expected: bool
) -> None:
    kernel = FakeKernel("v1", root=str(tmp_path))
    kernel.install()
    share: Any = SimpleNamespace(nice=0, realtime_ms=10.0, own_shares=1024)
    creations = Creations(lambda: True, lambda: True, lambda: waited_s)
    process = OwnProcess(Hierarchy.detect(str(tmp_path)), "/kubepods", share, creations, kernel)
    priority: Any = SimpleNamespace(is_real_time=real_time, charge_budget=lambda: budget_s)
    process.priority = priority
    assert process.may_pace() is expected
