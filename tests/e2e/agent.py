"""The daemon under test as a process of its own, spoken to as an operator would: command line and unix socket."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import yaml

from tests.e2e.node import Node

ROOT: Final = Path(__file__).parents[2]


# In software emulation everything takes its time; said by the virtual machine's start script.
PATIENCE: Final = float(os.environ.get("BYPASSD_TEST_PATIENCE", "1"))


def _environment() -> dict[str, str]:
    """As installed: with byte code kept, or each start compiles every module anew (0.3 s here).

    A read-only tree (the virtual machine's) was compiled before it was packed.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    if os.access(ROOT, os.W_OK):
        environment["PYTHONPYCACHEPREFIX"] = f"{sys.prefix}/bytecode"
    environment["PYTHONOPTIMIZE"] = "2"
    return environment


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


def eventually(what: str, holds: Callable[[], bool], *, within_s: float = 10.0) -> None:
    """Wait until something holds; ``what`` says in words what did not."""
    deadline = time.monotonic() + within_s * PATIENCE
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s * PATIENCE:.0f} s: {what}")
        time.sleep(0.02)


class AgentFailed(Exception):
    """The daemon ended, or is not ready in time; the text ends in its log."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.timeout = 10 * PATIENCE
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Agent:
    """One daemon. ``config`` is its configuration file as data; the socket it must serve is ``http_socket``."""

    def __init__(self, config: dict[str, object], directory: str, *, http_socket: str | None = None) -> None:
        os.makedirs(directory, exist_ok=True)
        self.directory = directory
        self.config_file = f"{directory}/config.yaml"
        self.log = f"{directory}/agent.log"
        self.http_socket = http_socket or f"{directory}/agent.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.configure(config)

    def configure(self, config: dict[str, object]) -> None:
        """Write the configuration file; a running daemon reads it at SIGHUP."""
        with open(self.config_file, "w", encoding="utf-8") as file:
            yaml.safe_dump(config, file)

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        assert self._process is not None
        return self._process.pid

    def command(self, *words: str) -> list[str]:
        """The command line of the daemon's program."""
        return [sys.executable, "-m", "reconciler.daemon.main", *words]

    def start(self, *words: str) -> None:
        """Start ``run``; further words are its options."""
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                self.command("run", "--config", self.config_file, *words),
                cwd=ROOT,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=_environment(),
            )

    def get(self, path: str) -> tuple[int, bytes]:
        """One request over the unix socket: status and body."""
        connection = _UnixConnection(self.http_socket)
        try:
            connection.request("GET", path, headers={"Connection": "close"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def state(self, *sections: str) -> dict[str, Any]:
        """The agent's own document, or some of its sections. `Any`: it is JSON, whose shape the tests look into."""
        query = "&".join(f"section={name}" for name in sections)
        status, body = self.get(f"/state?{query}" if query else "/state")
        if status != 200:
            raise AgentFailed(f"/state answers {status} {body[:200]!r}")
        found: dict[str, Any] = json.loads(body)
        return found

    def pod(self, uid: str) -> dict[str, Any] | None:
        """What it knows of one pod."""
        return next((pod for pod in self.state("pods")["pods"] if pod["uid"] == uid), None)

    def control(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """``bypassctl`` with this daemon's configuration."""
        command = [sys.executable, "-m", "reconciler.cli", *words, "--config", self.config_file]
        return subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False)

    def wait_ready(self, *, within_s: float = 30.0 * PATIENCE) -> float:
        """Wait until /readyz answers 200; how long that took."""
        began = time.monotonic()
        answer = "no socket"
        while time.monotonic() - began < within_s:
            if self._process is None or self._process.poll() is not None:
                raise AgentFailed(f"the daemon ended:\n{self.tail()}")
            try:
                status, body = self.get("/readyz")
            except (OSError, http.client.HTTPException) as exc:
                answer = str(exc)
            else:
                if status == 200:
                    return time.monotonic() - began
                answer = f"{status} {body[:200]!r}"
            time.sleep(0.02)
        raise AgentFailed(f"not ready after {within_s:.0f} s ({answer}):\n{self.tail()}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL: the crash."""
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait(10)
        self._process = None

    def stop(self, *, within_s: float = 20.0 * PATIENCE) -> int | None:
        """SIGTERM and wait; SIGKILL if it does not end. Its exit code, None if it was not running."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def tail(self, lines: int = 40) -> str:
        """The end of its log."""
        with open(self.log, encoding="utf-8", errors="replace") as file:
            return "".join(file.readlines()[-lines:])
