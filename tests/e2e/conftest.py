"""Fixtures of the tests that run real containers. Everything they make is undone, also after a failure."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.agent import Agent, config_for
from tests.e2e.containerd import Containerd, Unavailable
from tests.e2e.mounts import hierarchies
from tests.e2e.node import Node, NodeBusy, RunningPod
from tests.e2e.pods import PodSpec
from tests.fakes.kubelet.cgroups import CGROUPFS

HERE = Path(__file__).parent

# The virtual machines say which names the kubelet would use there; a machine without systemd can only have cgroupfs.
DRIVER = os.environ.get("BYPASSD_TEST_DRIVER", CGROUPFS)

# "/" is where a node has its kubepods; below a root of its own a run needs to wait for no other one.
CGROUP_ROOT = os.environ.get("BYPASSD_TEST_CGROUP_ROOT", "/")

PodFactory = Callable[[PodSpec], RunningPod]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A node starts in seconds, but may have to wait for another run's; 120 s would be short."""
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(400))


@pytest.fixture(scope="session")
def containerd_node() -> Iterator[Node]:
    """One legacy node for the whole session: containerd, runc, kubepods. Skips, saying what is missing."""
    reason = Containerd.missing()
    if reason is None and not ({"cpu", "cpuset", "memory"} <= hierarchies().keys() or "unified" in hierarchies()):
        reason = "no cgroup hierarchy with cpu, cpuset and memory is mounted"
    if reason:
        pytest.skip(f"real containers cannot run here: {reason}")
    try:
        with Node.start(driver=DRIVER, cgroup_root=CGROUP_ROOT) as node:
            yield node
    except (NodeBusy, Unavailable) as exc:
        pytest.skip(f"real containers cannot run here: {exc}")


@pytest.fixture
def run_pod(containerd_node: Node) -> Iterator[PodFactory]:
    """Run a pod; the test's pods are removed after it."""
    before = set(containerd_node.pods)
    try:
        yield containerd_node.run_pod
    finally:
        containerd_node.remove_pods([pod for uid, pod in containerd_node.pods.items() if uid not in before])


StartAgent = Callable[..., Agent]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[StartAgent]:
    """``agent(node, **sections)`` starts the daemon for a node and waits until it is ready. It is stopped afterwards.

    ``ready=False`` does not wait; ``directory`` is where an earlier one of the same test had its store;
    ``forked=False``: with its imports (`tests.fakes.forkserver`).
    """
    started: list[Agent] = []

    def start(
        node: Node, *, ready: bool = True, directory: str | None = None, forked: bool = True, **sections: object
    ) -> Agent:
        directory = directory or str(tmp_path / f"agent-{len(started)}")
        item = Agent(config_for(node, directory, **sections), directory)
        item.forked = forked
        started.append(item)
        item.start()
        if ready:
            item.wait_ready()
        return item

    try:
        yield start
    finally:
        for one in started:
            one.stop()


@pytest.fixture
def visitor() -> Iterator[subprocess.Popen[bytes]]:
    """A process that enters a container from outside, as exec brings it."""
    process = subprocess.Popen(["/bin/sleep", "600"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def pod_list(containerd_node: Node) -> Iterator[dict[str, object]]:
    """The kubelet's read-only list of pods (memory requests, init containers): the agent's sections that use it."""
    api = containerd_node.kubelet.api
    root = {"root_dir": containerd_node.kubelet_root, "config_file": f"{containerd_node.kubelet_root}/config.yaml"}
    api.start()
    try:
        yield {"kubelet": {**root, "endpoint": "http", "address": "127.0.0.1", "http_port": api.port}}
    finally:
        api.stop()
