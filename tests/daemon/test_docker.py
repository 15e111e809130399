"""docker.io's own groups inside a BE container, made by dockerd and its runc, on real v1 hierarchies.

``--cgroup-parent`` puts them where a dockerd in the container has them, which sees the container's group as its root.
"""

import contextlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator

import pytest

from tests.daemon.process import Daemon, wait_for
from tests.e2e.mounts import hierarchies
from tests.e2e.programs import program
from tests.fakes.node import DirectoryNode, NodePod

Make = Callable[..., Daemon]
pytestmark = [
    pytest.mark.skipif(shutil.which("dockerd") is None, reason="REAL KERNEL TEST NOT RUN: no dockerd (docker.io)"),
    pytest.mark.skipif(os.cpu_count() != 2, reason="REAL KERNEL TEST NOT RUN: it divides two CPUs"),
]
START_S = 60.0
DEDICATED = {"katalyst.kubewharf.io/qos_level": "dedicated_cores"}
QUOTA = {"reclaimed": {"form": "quota", "budget": {"law": "quota", "limit_percent": 1, "floor_percent": 50}}}
"""One of two CPUs."""


def cpus(node: DirectoryNode, path: str) -> str:
    return node.read(path, "cpuset", "cpuset.cpus")


class Docker:
    """One dockerd with everything of its own below ``directory``."""

    def __init__(self, directory: str, parent: str) -> None:
        self.parent = parent
        self._log = f"{directory}/dockerd.log"
        self._host = f"unix://{directory}/docker.sock"
        command = [
            "dockerd",
            "--host",
            self._host,
            "--data-root",
            f"{directory}/data",
            "--exec-root",
            f"{directory}/run",
        ]
        command += ["--pidfile", f"{directory}/dockerd.pid", "--storage-driver", "vfs", "--cgroup-parent", parent]
        command += ["--bridge", "none", "--iptables=false", "--ip-forward=false", "--ip-masq=false"]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        wait_for(lambda: self._client("version").returncode == 0, within_s=START_S, told=self.tail)
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            tar.add(str(program("app")), arcname="app")
        self._done("import", "-", "app", data=archive.getvalue())

    def run(self, *options: str) -> str:
        """A container that sleeps; its group's path."""
        words = ("run", "--detach", "--network", "none", *options, "app", "/app", "-", "sleep")
        return f"{self.parent}/{self._done(*words).strip()}"

    def remove(self, group: str) -> None:
        self._done("rm", "--force", group.rpartition("/")[2])

    def stop(self) -> None:
        for name in self._client("ps", "--all", "--quiet").stdout.split():
            self._client("rm", "--force", name.decode())
        self._process.terminate()
        self._process.wait(30)

    def tail(self) -> str:
        with open(self._log, encoding="utf-8", errors="replace") as file:
            return file.read()[-3000:]

    def _client(self, *words: str, data: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
        command = ["docker", "--host", self._host, *words]
        return subprocess.run(command, input=data, capture_output=True, check=False, timeout=START_S)

    def _done(self, *words: str, data: bytes = b"") -> str:
        ended = self._client(*words, data=data)
        assert ended.returncode == 0, f"{ended.stderr.decode()}\n{self.tail()}"
        return ended.stdout.decode()


@pytest.fixture
def ci(node: DirectoryNode) -> NodePod:
    return node.add("ci", cpus="0-1")


@pytest.fixture
def docker(node: DirectoryNode, ci: NodePod) -> Iterator[Docker]:
    with tempfile.TemporaryDirectory(prefix="bypassd-docker-") as directory:
        made = Docker(directory, f"{ci.main.group}/docker")
        try:
            yield made
        finally:
            made.stop()
            # In the hierarchies that the node does not use, too.
            for mount in set(hierarchies().values()):
                for path, _, _ in os.walk(f"{mount}{ci.main.group}/docker", topdown=False):
                    with contextlib.suppress(OSError):
                        os.rmdir(path)
                above = f"{mount}{ci.main.group}"
                while above.startswith(f"{mount}{node.cgroup_root}") and not os.path.exists(f"{above}/cpuset.cpus"):
                    with contextlib.suppress(OSError):
                        os.rmdir(above)
                    above = os.path.dirname(above)


def test_an_inner_container_with_two_cpus_frees_no_other_be_pod(
    node: DirectoryNode, ci: NodePod, docker: Docker, daemon: Make
) -> None:
    other = node.add("other")
    inner = docker.run("--cpus", "2")
    assert node.quota(inner) == "200000"
    item = daemon(policies=QUOTA).up()
    wait_for(lambda: node.quota(node.besteffort) == "200000", told=item.tail)
    wait_for(lambda: 0 < int(node.quota(other.main.group)) <= 100_000, told=item.tail)
    docker.remove(inner)
    wait_for(lambda: node.quota(node.besteffort) == "100000", told=item.tail)
    wait_for(lambda: node.quota(other.main.group) == "-1", told=item.tail)


def test_an_inner_container_with_a_cpu_set_leaves_an_owned_cpu(
    node: DirectoryNode, ci: NodePod, docker: Docker, daemon: Make
) -> None:
    inner = docker.run("--cpuset-cpus", "0-1")
    assert cpus(node, inner) == "0-1"
    item = daemon().up()
    own = node.add("own", qos="", annotations=DEDICATED, cpus="0-1", shares=1024, requests={"cpu": "1"})
    wait_for(lambda: node.cpus(own.main) in {"0", "1"}, told=item.tail)
    rest = "1" if node.cpus(own.main) == "0" else "0"
    wait_for(lambda: node.cpus(ci.main) == rest, told=item.tail)
    assert cpus(node, inner) == rest
    (pid, *_) = node.read(inner, "cpuset", "cgroup.procs").split()
    assert os.sched_getaffinity(int(pid)) == {int(rest)}
    late = docker.run()
    assert cpus(node, late) == rest
    status, answer = item.call("POST", "/restore", {"by": "test"})
    assert (status, answer["left"]) == (200, 0), answer
    assert [cpus(node, path) for path in (ci.main.group, inner, late)] == ["0-1"] * 3
    node.remove(own)
