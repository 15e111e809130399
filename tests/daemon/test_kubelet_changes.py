"""A kubelet that starts after the daemon, and restarts with other settings: followed by the same process."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.process import wait_for
from tests.fakes.daemonprocess import DaemonProcess
from tests.fakes.kernel import FakeKernel
from tests.fakes.kubelet.cpu_manager import checkpoint

POD = "/kubepods/burstable/pod11111111-1111-4111-8111-111111111111"


class Node:
    """A copied node whose files change: a process is a command line in its /proc."""

    def __init__(self, root: Path) -> None:
        self.root = root
        kernel = FakeKernel("v1", root=str(root), cpus=4, mirror=True)
        kernel.install()
        for path in ("/kubepods", "/kubepods/besteffort", "/kubepods/burstable", POD):
            kernel.make_group(path)
        self.put("sys/devices/system/cpu/online", "0-3\n")
        self.put("sys/devices/system/cpu/present", "0-3\n")
        for cpu in range(4):
            self.put(f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list", f"{cpu}\n")

    def put(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def kubelet_config(self, reserved: str) -> None:
        self.put(
            "etc/k.yaml",
            "kind: KubeletConfiguration\ncgroupDriver: cgroupfs\ncpuManagerPolicy: static\n"
            f'reservedSystemCPUs: "{reserved}"\n',
        )

    def kubelet_starts(self, pid: int, *flags: str) -> None:
        self.put(f"proc/{pid}/cmdline", "\0".join(["kubelet", *flags, ""]))
        self.kubelet_listens()

    def kubelet_listens(self) -> None:
        plugins = self.root / "var/lib/kubelet/device-plugins"
        plugins.mkdir(parents=True, exist_ok=True)
        (plugins / "kubelet.sock").unlink(missing_ok=True)
        (plugins / "kubelet.sock").touch()

    def kubelet_ends(self, pid: int) -> None:
        shutil.rmtree(self.root / f"proc/{pid}")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "node")


@pytest.fixture
def daemon(node: Node, tmp_path: Path) -> Iterator[DaemonProcess]:
    if os.geteuid() != 0:
        pytest.skip("REAL KERNEL TEST NOT RUN: needs root")
    socket = str(tmp_path / "agent.sock")
    config: dict[str, object] = {
        "mode": "observe",
        "operator_file": None,
        "node": {"root": str(node.root)},
        "kubelet": {"endpoint": "off"},
        "runtime": {"cri": "off"},
        "store": {"path": str(tmp_path / "state.db")},
        "http": {"enabled": False, "socket": socket},
        "log": {"format": "json"},
    }
    daemon = DaemonProcess(config, str(tmp_path / "daemon"), http_socket=socket)
    daemon.start()
    try:
        daemon.wait_ready()
        yield daemon
    finally:
        if daemon.running:
            daemon.kill()


def facts(daemon: DaemonProcess) -> dict[str, object]:
    """What the running daemon uses; empty while its parts are built again."""
    try:
        agent = daemon.state("agent")["agent"]
        return {**agent["kubelet"], "node": agent["node"], "policy": agent["kubelet_policy"], "ready": agent["ready"]}
    except OSError:
        return {}


def test_a_kubelet_that_starts_later_and_one_that_restarts_are_followed_without_a_restart(
    node: Node, daemon: DaemonProcess
) -> None:
    assert (facts(daemon)["root_dir"], facts(daemon)["policy"]) == ("/var/lib/kubelet", "unknown")
    pid = daemon.pid
    node.kubelet_config("0")
    flags = ("--root-dir=/data/kubelet", "--hostname-override=n1", "--config=/etc/k.yaml")
    node.put("data/kubelet/cpu_manager_state", checkpoint("static", "0-3"))
    node.kubelet_starts(77, *flags)
    wait_for(lambda: facts(daemon).get("ready") and facts(daemon).get("root_dir") == "/data/kubelet", told=daemon.tail)
    now = facts(daemon)
    assert (now["node"], now["policy"], now["reserved_cpus"], now["pid"]) == ("n1", "static", "0", 77)
    # Edited: in effect when the kubelet restarts.
    node.kubelet_config("0-1")
    assert facts(daemon)["reserved_cpus"] == "0"
    node.kubelet_ends(77)
    node.kubelet_starts(78, *flags)
    wait_for(lambda: facts(daemon).get("reserved_cpus") == "0-1", told=daemon.tail)
    wait_for(lambda: daemon.state("pools")["pools"].get("reserved") == "0-1", told=daemon.tail)
    assert daemon.pid == pid
    text = Path(daemon.log).read_text()
    assert text.count('"setting": "reserved_cpus"') == 2
    assert text.count('"setting": "root_dir"') == 1
    assert daemon.stop() == 0, daemon.tail()


def test_a_kubelet_inside_k3s_that_restarts_is_followed_and_its_reserved_cpus_are_kept(
    node: Node, daemon: DaemonProcess
) -> None:
    unit = "[Service]\nExecStart=/usr/local/bin/k3s \\\n    agent \\\n\t'--kubelet-arg=reserved-cpus={}' \\\n"
    node.put("etc/systemd/system/k3s-agent.service", unit.format("0"))
    node.put("var/lib/kubelet/cpu_manager_state", checkpoint("static", "0-3"))
    node.put("proc/77/cgroup", "0::/system.slice/k3s-agent.service\n")
    node.put("proc/77/cmdline", "/usr/local/bin/k3s agent\0\0\0")
    wait_for(lambda: facts(daemon).get("ready") and facts(daemon).get("reserved_cpus") == "0", told=daemon.tail)
    node.put("etc/systemd/system/k3s-agent.service", unit.format("0-1"))
    node.kubelet_ends(77)
    node.put("proc/78/cgroup", "0::/system.slice/k3s-agent.service\n")
    node.put("proc/78/cmdline", "/usr/local/bin/k3s agent\0")
    node.kubelet_listens()
    wait_for(lambda: facts(daemon).get("reserved_cpus") == "0-1", told=daemon.tail)
    wait_for(lambda: daemon.state("pools")["pools"].get("reserved") == "0-1", told=daemon.tail)
    assert daemon.stop() == 0, daemon.tail()
