"""The daemon as a process on a `DirectoryNode`: what its log, its document and its exit code say."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml

from tests.daemon.node import Box, DirectoryNode

ROOT: Final = Path(__file__).parents[2]
COMMAND: Final = (sys.executable, "-m", "reconciler.daemon.main")

WITHIN_S: Final = 15.0
"""Generous: the machine may be busy with everybody else's work."""
T = TypeVar("T")


def environment() -> dict[str, str]:
    """As the unit file has it: optimised, and with byte code kept, or each start compiles every module anew."""
    found = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**found, "PYTHONPYCACHEPREFIX": f"{sys.prefix}/bytecode", "PYTHONOPTIMIZE": "2"}


def wait_for(question: Callable[[], T], *, within_s: float = WITHIN_S, told: Callable[[], str] = str) -> T:
    """Ask until the answer is true. ``told`` is what a failure shows."""
    deadline = time.monotonic() + within_s
    while True:
        answer = question()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {within_s:.0f} s: {answer!r}\n{told()}"
        time.sleep(0.02)


def bounded(node: DirectoryNode, box: Box) -> bool:
    """True when a container has BE's CPU (half of the two that are divided) and the least weight."""
    return node.cpus(box) != "0-1" and node.shares(box) == "2"


class DaemonFailed(Exception):
    """The daemon ended, or is not ready in time; the text ends in its log."""


class Daemon:
    """One daemon on one node; its configuration is the node's, with ``more`` above it."""

    def __init__(self, node: DirectoryNode, **more: object) -> None:
        self.node = node
        self.directory = f"{node.directory}/daemon"
        self.config_file = f"{self.directory}/config.yaml"
        self.log = f"{self.directory}/log"
        self.socket = f"{node.directory}/bypassd.sock"
        self.within: tuple[str, ...] = ()
        """The command by which it is started: to be in other namespaces than the test is."""
        self._process: subprocess.Popen[bytes] | None = None
        os.makedirs(self.directory, exist_ok=True)
        self.configure(**more)

    def configure(self, **more: object) -> None:
        """Write the configuration file; a running daemon reads it at SIGHUP."""
        with open(self.config_file, "w", encoding="utf-8") as file:
            yaml.safe_dump(self.node.config(**more), file)

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """True until somebody has seen its end."""
        return self._process is not None

    def start(self, *words: str) -> None:
        """Start ``run``; further words are its options."""
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [*self.within, *COMMAND, "run", "--config", self.config_file, *words],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment(),
            )

    def up(self, *words: str) -> "Daemon":
        """Start it and wait until it is ready."""
        self.start(*words)
        deadline = time.monotonic() + 2 * WITHIN_S
        answer = "no socket"
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise DaemonFailed(f"the daemon ended:\n{self.tail()}")
            try:
                status, body = self.call("GET", "/readyz")
            except (OSError, http.client.HTTPException) as exc:
                answer = str(exc)
            else:
                if status == 200:
                    return self
                answer = f"{status} {body}"
            time.sleep(0.02)
        raise DaemonFailed(f"not ready ({answer}):\n{self.tail()}")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL: the crash."""
        self.signal(signal.SIGKILL)
        self.end_code()

    def stop(self, *, within_s: float = 2 * WITHIN_S) -> int | None:
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

    def end_code(self, *, within_s: float = WITHIN_S) -> int:
        """Wait for the end; the exit code."""
        assert self._process is not None
        code = self._process.wait(within_s)
        self._process = None
        return code

    def tail(self, lines: int = 40) -> str:
        """The end of its log."""
        with open(self.log, encoding="utf-8", errors="replace") as file:
            return "".join(file.readlines()[-lines:])

    def call(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """One request over the unix socket: status and decoded answer."""
        connection = _UnixConnection(self.socket)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def answers(self, path: str) -> int:
        """The status of a GET; 0 while stale socket."""
        try:
            return self.call("GET", path)[0]
        except (OSError, http.client.HTTPException):
            return 0

    def state(self, *sections: str) -> dict[str, Any]:
        """The document, or some of its parts."""
        status, body = self.call("GET", "/state?" + "&".join(f"section={name}" for name in sections))
        assert status == 200, body
        found: dict[str, Any] = body
        return found

    def pod(self, uid: str) -> dict[str, Any]:
        """One pod of the document; empty while it is not known."""
        return next((pod for pod in self.state("pods")["pods"] if pod["uid"] == uid), {})

    def standing(self, group: str, knob: str) -> dict[str, Any]:
        """How one setting of a pod's or container's group stands; empty when none is wanted."""
        for pod in self.state("pods")["pods"]:
            for one in (pod, *pod["containers"]):
                if one["group"] == group:
                    return next((row for row in one["settings"] if row["knob"] == knob), {})
        return {}

    def problems(self) -> list[str]:
        found: list[str] = self.state("problems")["problems"]
        return found

    def metric(self, name: str) -> dict[str, float]:
        """A metric's values by its one label's value (the empty text where it has none)."""
        rows = re.findall(rf'^{name}(?:{{\w+="([^"]*)"}})? (\S+)$', self._metrics(), re.MULTILINE)
        return {label: float(value) for label, value in rows}

    def metric_sum(self, name: str) -> float:
        """A metric's sum over all labels."""
        return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", self._metrics(), re.MULTILINE)))

    def _metrics(self) -> str:
        connection = _UnixConnection(self.socket)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def alerts(self, kind: str) -> int:
        count: int = self.state("agent")["agent"]["alerts"].get(kind, 0)
        return count

    def lines(self, *levels: str) -> list[dict[str, Any]]:
        """The log's lines, of some levels or all."""
        found = []
        with open(self.log, encoding="utf-8") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except ValueError:
                    row = {"level": "error", "message": line.rstrip()}
                if not levels or row["level"] in levels:
                    found.append(row)
        return found

    def said(self, *words: str) -> list[str]:
        """The log's messages at warning or above in which all the words stand."""
        rows = [json.dumps(row, ensure_ascii=False) for row in self.lines("warning", "error", "critical")]
        return [row for row in rows if all(word in row for word in words)]

    def look_again(self, count: int) -> None:
        """Have everything looked at again so many times, by reloads of the same configuration."""
        for _ in range(count):
            looks = self.state("agent")["agent"]["looks"]
            assert self.call("POST", "/reload")[0] == 200
            wait_for(lambda looks=looks: self.state("agent")["agent"]["looks"] > looks, told=self.tail)  # type: ignore[misc]


def run_to_end(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the daemon's program to its end."""
    return subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=30, check=False
    )


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=WITHIN_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
