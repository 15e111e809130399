"""The daemon as a process on a `DirectoryNode`: what its log, its document and its exit code say."""

import http.client
import json
import re
import subprocess
import time
from collections.abc import Callable
from typing import Any, TypeVar

from tests.fakes.daemonprocess import COMMAND, ROOT, WITHIN_S, DaemonProcess, environment
from tests.fakes.node import Box, DirectoryNode, merged

T = TypeVar("T")
NOT_THERE = "00000000-0000-4000-8000-000000000000"


def wait_for(question: Callable[[], T], *, within_s: float = WITHIN_S, told: Callable[[], str] = str) -> T:
    """Ask until the answer is true. ``told`` is what a failure shows."""
    deadline = time.monotonic() + within_s
    while True:
        answer = question()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {within_s:.0f} s: {answer!r}\n{told()}"
        # Most questions are requests to the daemon, and cost it as much as its work.
        time.sleep(0.05)


def bounded(node: DirectoryNode, box: Box) -> bool:
    """True when a container has BE's CPU (half of the two that are divided) and the least weight."""
    return node.cpus(box) != "0-1" and node.shares(box) == "2"


def configuration(node: DirectoryNode, /, **more: object) -> dict[str, object]:
    """Quick to notice, and with a budget that the machine's noise does not move."""
    base = node.daemon_config(
        operator_file=f"{node.root}/classes.yaml",
        # Other tests start processes that call themselves kubelet, and every daemon on the machine sees them. The fake
        # kubelet, which runs in the test's process, answers late on a busy machine.
        kubelet={"executable": f"{node.root}/kubelet"},
        constants={"kubelet.period_s": 1, "kubelet.timeout_s": 30.0},
        runtime={"cri": "off"},
        policies={
            "idle_buffer": {"enabled": False},
            # Always at its floor: half of the machine.
            "reclaimed": {"budget": {"limit_percent": 1, "floor_percent": 50}},
        },
        http={"enabled": False},
        log={"format": "json"},
    )
    return merged(base, more)


class Daemon(DaemonProcess):
    """One daemon on one node; its configuration is the node's, with ``more`` above it."""

    def __init__(self, node: DirectoryNode, /, **more: object) -> None:
        self.node = node
        super().__init__(configuration(node, **more), f"{node.root}/daemon", http_socket=node.socket)
        self.forked = True

    def configure(self, **more: object) -> None:
        """Write the node's configuration with ``more`` above it; a running daemon reads it at SIGHUP."""
        self.write_config(configuration(self.node, **more))

    def up(self, *options: str) -> "Daemon":
        """Start it and wait until it is ready."""
        self.start(*options)
        self.wait_ready()
        return self

    def call(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """One request over the unix socket: status and decoded answer."""
        status, answer = self.request(method, path, body)
        return status, json.loads(answer)

    def answers(self, path: str) -> int:
        """The status of a GET; 0 while stale socket."""
        try:
            return self.call("GET", path)[0]
        except (OSError, http.client.HTTPException):
            return 0

    def pod(self, uid: str) -> dict[str, Any]:
        """One pod of the document; empty while it is not known."""
        return next((pod for pod in self.state("pods")["pods"] if pod["uid"] == uid), {})

    def standing(self, group: str, knob: str) -> dict[str, Any]:
        """The state of one setting of a pod's or container's group; empty when none is wanted."""
        for pod in self.state("pods")["pods"]:
            for entry in (pod, *pod["containers"]):
                if entry["group"] == group:
                    return next((row for row in entry["settings"] if row["knob"] == knob), {})
        return {}

    def problems(self) -> list[str]:
        problems: list[str] = self.state("problems")["problems"]
        return problems

    def metric(self, name: str) -> dict[str, float]:
        """A metric's values by its one label's value (the empty text where it has none)."""
        rows = re.findall(rf'^{name}(?:{{\w+="([^"]*)"}})? (\S+)$', self._metrics(), re.MULTILINE)
        return {label: float(value) for label, value in rows}

    def metric_sum(self, name: str) -> float:
        """A metric's sum over all labels."""
        return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", self._metrics(), re.MULTILINE)))

    def _metrics(self) -> str:
        return self.get("/metrics")[1].decode()

    def alerts(self, kind: str) -> int:
        count: int = self.state("agent")["agent"]["alerts"].get(kind, 0)
        return count

    def lines(self, *levels: str) -> list[dict[str, Any]]:
        """The log's lines, of some levels or all."""
        lines = []
        with open(self.log, encoding="utf-8") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except ValueError:
                    row = {"level": "error", "message": line.rstrip()}
                if not levels or row["level"] in levels:
                    lines.append(row)
        return lines

    def said(self, *message: str) -> list[str]:
        """The log's messages at warning or above that have all the words, in any field but the time."""
        found = self.lines("warning", "error", "critical")
        # A time has digits, too: "500" is in each message of one millisecond of a thousand.
        rows = [json.dumps({**row, "ts": ""}, ensure_ascii=False) for row in found]
        return [row for row in rows if all(word in row for word in message)]

    def look_again(self) -> None:
        """Have everything looked at again, twice: a hold on a pod that is not there begins and ends.

        A reload takes several times as long; it needs no store.
        """
        hold = {"target": f"pod:{NOT_THERE}", "reason": "look again", "by": "test", "until_released": True}
        self._look_after("POST", "/holds", hold)
        self._look_after("DELETE", f"/holds/pod:{NOT_THERE}")

    def reload(self) -> None:
        """Read the same configuration, or another one, and have everything looked at again."""
        self._look_after("POST", "/reload")

    def _look_after(self, method: str, path: str, body: object = None) -> None:
        looks = self.state("agent")["agent"]["looks"]
        status, answer = self.call(method, path, body)
        assert status < 300, answer
        wait_for(lambda: self.state("agent")["agent"]["looks"] > looks, told=self.tail)


def run_to_end(*message: str) -> subprocess.CompletedProcess[str]:
    """Run the daemon's program to its end."""
    return subprocess.run(
        [*COMMAND, *message], capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=60, check=False
    )
