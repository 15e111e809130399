"""What tests of several packages need."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from trio.testing import MockClock

from reconciler.cli import plan, why
from tests.fakes.livenode import LiveNode
from tests.fakes.threadclock import thread_clock


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory whose path is short enough for a unix socket (107 bytes); pytest's own can be longer."""
    with tempfile.TemporaryDirectory(prefix="bypassd-") as path:
        yield Path(path)


@pytest.fixture
def idle_clock() -> Iterator[MockClock]:
    """Virtual time for a test whose peers are in its loop: it passes only while nothing happens there for a moment.

    A time limit is not over because the machine is busy.
    """
    with thread_clock(threshold_s=0.05) as clock:
        yield clock


@pytest.fixture
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that read the kernel twice read it again at once: most of their tests are about other facts."""
    monkeypatch.setattr(why, "_SAMPLE_S", 0.02)
    monkeypatch.setattr(plan, "_INTERVAL_S", 0.02)


@pytest.fixture
def live(tmp_path: Path) -> LiveNode:
    """A node in memory with three pods, and the agent that a test runs on it: it has no need of files on the disk."""
    return LiveNode(tmp_path, files=False)


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory that root alone can change, up to the top."""
    if os.geteuid() != 0:
        pytest.skip("NOT RUN: only root can make files that root alone can change")
    path = tempfile.mkdtemp(prefix="bypassd-test-", dir="/run")
    yield Path(path)
    shutil.rmtree(path)
