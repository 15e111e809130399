"""What tests of the cgroup actuator need."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reconciler.actuators.acting import Acting, make_node


@pytest.fixture
def acting(tmp_path: Path) -> Iterator[Acting]:
    """An actuator on a node of its own."""
    kernel, hierarchy = make_node(tmp_path)
    made = Acting(kernel, hierarchy, tmp_path)
    yield made
    made.close()
