"""The daemon under test as a process of its own: started, queried over its unix socket, stopped or killed."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import yaml

from tests.fakes.forkserver import PATIENCE, Forked, forked_control, forked_daemon

ROOT: Final = Path(__file__).parents[2]
COMMAND: Final = (sys.executable, "-m", "reconciler.daemon.main")
WITH_CONSTANTS: Final = (sys.executable, "-m", "tests.fakes.launch")
CONSTANTS: Final = "BYPASSD_TEST_CONSTANTS"
WITHIN_S: Final = 60.0 * PATIENCE
"""Generous: other programs may keep the machine busy."""


class DaemonFailed(Exception):
    """The daemon ended, is not ready in time or does not answer; the text ends in its log."""


def environment() -> dict[str, str]:
    """As the unit file has it: optimised, and with byte code kept, or each start compiles every module again (0.3 s).

    A read-only tree (the virtual machine's) was compiled before it was packed.
    """
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    if os.access(ROOT, os.W_OK):
        variables["PYTHONPYCACHEPREFIX"] = f"{sys.prefix}/bytecode"
    return {**variables, "PYTHONOPTIMIZE": "2"}


class DaemonProcess:
    """One daemon. ``config`` is its configuration file as data; ``http_socket`` the socket that it must serve.

    A key ``constants`` of the configuration is not in the file: see `tests.fakes.constants.applied`. They are those of
    the next start.
    """

    def __init__(self, config: dict[str, object], directory: str, *, http_socket: str) -> None:
        os.makedirs(directory, exist_ok=True)
        self.directory = directory
        self.config_file = f"{directory}/config.yaml"
        self.log = f"{directory}/agent.log"
        self.http_socket = http_socket
        self.forked = False
        """Whether a fork server starts it: see `tests.fakes.forkserver`."""
        self.host: int | None = None
        """The process in whose network and mounts a forked one is; None: the test's."""
        self.within: tuple[str, ...] = ()
        """The command by which it is started: to be in other namespaces than the test is."""
        self.program: tuple[str, ...] = COMMAND
        """What is started. Another one than this checkout's is neither forked nor given constants."""
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self.write_config(config)

    def write_config(self, config: dict[str, object]) -> None:
        """Write the configuration file; a running daemon reads it at SIGHUP."""
        config = dict(config)
        self.constants = config.pop("constants", {})
        with open(self.config_file, "w", encoding="utf-8") as file:
            yaml.safe_dump(config, file)

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """True until its end was waited for."""
        return self._process is not None

    def start(self, *options: str) -> None:
        arguments = ["run", "--config", self.config_file, *options]
        variables, command, ours = environment(), self.program, self.program == COMMAND
        if self.constants and ours:
            variables, command = {**variables, CONSTANTS: json.dumps(self.constants)}, WITH_CONSTANTS
        if self.forked and ours and not self.within:
            self._process = forked_daemon(arguments, variables, self.log, self.host)
            return
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [*self.within, *command, *arguments],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=variables,
            )

    def wait_ready(self, *, within_s: float = 2 * WITHIN_S) -> float:
        """Wait until /readyz answers 200; how long that took. Errors: `DaemonFailed`."""
        began = time.monotonic()
        answer = "no socket"
        while time.monotonic() - began < within_s:
            if self._process is None or self._process.poll() is not None:
                raise DaemonFailed(f"the daemon ended:\n{self.tail()}")
            try:
                status, body = self.request("GET", "/readyz")
            except (OSError, http.client.HTTPException) as exc:
                answer = str(exc)
            else:
                if status == 200:
                    return time.monotonic() - began
                answer = f"{status} {body[:200]!r}"
            time.sleep(0.02)
        raise DaemonFailed(f"not ready after {within_s:.0f} s ({answer}):\n{self.tail()}")

    def request(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        """One request over the unix socket: status and body. Errors: OSError, HTTPException."""
        connection = _UnixConnection(self.http_socket)
        try:
            text = None if body is None else json.dumps(body)
            headers = {"Connection": "close"} | ({} if text is None else {"Content-Type": "application/json"})
            connection.request(method, path, text, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> tuple[int, bytes]:
        """One GET: status and body."""
        return self.request("GET", path)

    def state(self, *sections: str) -> dict[str, Any]:
        """The daemon's document, or some of its sections. `Any`: it is JSON, whose shape the tests look into."""
        query = "&".join(f"section={name}" for name in sections)
        status, body = self.get(f"/state?{query}" if query else "/state")
        if status != 200:
            raise DaemonFailed(f"/state answers {status} {body[:200]!r}")
        document: dict[str, Any] = json.loads(body)
        return document

    def control(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """``bypassctl`` with this daemon's configuration."""
        words = [*arguments, "--config", self.config_file]
        if self.forked:
            return forked_control(words, environment(), self.host)
        command = [*self.within, sys.executable, "-m", "reconciler.cli", *words]
        return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL: the crash."""
        self.signal(signal.SIGKILL)
        self.end_code()

    def end_code(self, *, within_s: float = WITHIN_S) -> int:
        """Wait for the end; the exit code."""
        assert self._process is not None
        code = self._process.wait(within_s)
        self._process = None
        return code

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

    def tail(self, lines: int = 40) -> str:
        """The end of its log."""
        with open(self.log, encoding="utf-8", errors="replace") as file:
            return "".join(file.readlines()[-lines:])


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=WITHIN_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
