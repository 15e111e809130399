"""The daemon on a node with real processes: its configuration there, and what an operator asks of it."""

import time
from collections.abc import Callable
from typing import Any

from tests.e2e.node import Node
from tests.fakes.daemonprocess import DaemonProcess
from tests.fakes.forkserver import PATIENCE


def config_for(node: Node, directory: str, **more: object) -> dict[str, object]:
    """A configuration that writes, for a test's node: the defaults, but for where its things are.

    ``on_stop: restore``, so that a test leaves the QoS directories as it found them. ``more`` replaces whole sections.
    """
    containerd = node.containerd
    return {
        "mode": "enforce",
        "on_stop": "restore",
        "node": {"cgroup_root": node.record.cgroup_root, "resync_s": 5},
        "kubelet": {
            "root_dir": node.kubelet_root,
            "config_file": f"{node.kubelet_root}/config.yaml",
            "endpoint": "off",
        },
        "runtime": {
            "sockets": [containerd.socket],
            "state_dir": f"{containerd.directory}/state",
            "runc_roots": [containerd.runc_root],
        },
        "store": {"path": f"{directory}/store/state.db"},
        "http": {"enabled": False, "socket": f"{directory}/agent.sock"},
        **more,
    }


def eventually(what: str, holds: Callable[[], bool], *, within_s: float = 30.0) -> None:
    """Wait until something holds; ``what`` says in words what did not.

    ``within_s`` is generous: other programs may keep the machine busy.
    """
    deadline = time.monotonic() + within_s * PATIENCE
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s * PATIENCE:.0f} s: {what}")
        time.sleep(0.02)


class Agent(DaemonProcess):
    """One daemon with its files in ``directory``."""

    def __init__(self, config: dict[str, object], directory: str, *, http_socket: str | None = None) -> None:
        super().__init__(config, directory, http_socket=http_socket or f"{directory}/agent.sock")

    def pod(self, uid: str) -> dict[str, Any] | None:
        return next((pod for pod in self.state("pods")["pods"] if pod["uid"] == uid), None)
