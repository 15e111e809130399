"""The control loop reads the kernel by its `FileOps` only."""

from pathlib import Path

import pytest

from tests.fakes.livenode import LiveNode


@pytest.fixture
def live(tmp_path: Path) -> LiveNode:
    """A node in memory with three pods, whose control files are not on the disk."""
    return LiveNode(tmp_path, files=False)
