"""A start on a node without a kubelet: it counts as started, says what is missing, and shows signs of life."""

import signal
import socket
import subprocess
import time
from pathlib import Path

import yaml

from tests.fakes.daemonprocess import COMMAND, ROOT, environment
from tests.fakes.kernel import FakeKernel


def test_a_start_without_a_kubelet_is_ready_and_alive(tmp_path: Path) -> None:
    root = tmp_path / "node"
    root.mkdir()
    FakeKernel("v1", root=str(root), mirror=True).install()
    config = {
        "node": {"root": str(root)},
        "store": {"path": str(tmp_path / "state.db")},
        "http": {"enabled": False, "socket": str(tmp_path / "agent.sock")},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(60)
        variables = {**environment(), "NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
        command = [*COMMAND, "run", "--config", str(file)]
        with (
            (tmp_path / "log").open("wb") as log,
            subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log) as process,
        ):
            try:
                messages: list[str] = []
                deadline = time.monotonic() + 60
                while sum(text == "WATCHDOG=1" for text in messages) < 3 or not any(
                    "READY=1" in text for text in messages
                ):
                    assert time.monotonic() < deadline, messages
                    messages.append(listening.recv(4096).decode())
            finally:
                process.send_signal(signal.SIGTERM)
        assert process.returncode == 0, Path(log.name).read_text()
    (ready,) = [text for text in messages if "READY=1" in text]
    assert "waiting for the kubelet" in ready
