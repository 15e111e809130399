"""A node of real directories and a daemon on it, both gone after each test."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from reconciler.runtime.own_weight import GROUP
from tests.daemon.process import Daemon
from tests.e2e.mounts import hierarchies
from tests.fakes.node import HIERARCHIES, DirectoryNode, RealKernel

HERE = Path(__file__).parent
# Two runs of the tests may be active at the same time.
CGROUP_ROOT = f"/bypassd-test-daemon-{os.getpid()}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.kernel)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[DirectoryNode]:
    """An empty node. Skips, saying what is missing."""
    texts = hierarchies()
    lacking = [name for name in HIERARCHIES if name not in texts]
    if lacking:
        pytest.skip(f"REAL KERNEL TEST NOT RUN: no cgroup v1 hierarchy of {', '.join(lacking)} is mounted")
    if os.geteuid() != 0 or not os.access(f"{texts['cpuset']}/cgroup.procs", os.W_OK):
        pytest.skip("REAL KERNEL TEST NOT RUN: needs root and writable cgroups")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("REAL KERNEL TEST NOT RUN: one CPU leaves nothing to divide")
    kernel = RealKernel()
    with DirectoryNode(str(tmp_path / "node"), kernel, kernel.mounts, cgroup_root=CGROUP_ROOT, runc="runc") as made:
        yield made


@pytest.fixture
def daemon(node: DirectoryNode) -> Iterator[Callable[..., Daemon]]:
    """Make a daemon for the node (not started); it is killed after the test."""
    made: list[Daemon] = []
    own = f"{hierarchies()['cpu']}{GROUP}"
    existed = os.path.isdir(own)

    def make(**more: object) -> Daemon:
        made.append(Daemon(node, **more))
        return made[-1]

    try:
        yield make
    finally:
        for item in made:
            if item.running:
                item.kill()
        # A daemon that is killed leaves its group; it is not removed where another one is in it.
        if not existed:
            with suppress(OSError):
                os.rmdir(own)
