"""What tests of the cgroup actuator need."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.kernel import Mode
from tests.reconciler.actuators.acting import Acting, make_node


@pytest.fixture
def mode() -> Mode:
    """The node's version of cgroups: another one where a test is parametrized by it."""
    return "v1"


@pytest.fixture
def acting(tmp_path: Path, mode: Mode) -> Iterator[Acting]:
    """An actuator on a node of its own."""
    kernel, hierarchy = make_node(tmp_path, mode=mode)
    made = Acting(kernel, hierarchy, tmp_path)
    yield made
    made.close()
