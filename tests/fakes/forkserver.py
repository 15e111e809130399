"""Processes of the product's programs without the half second of CPU time in which each one imports its modules.

A server process, started once, has imported them and forks. What it forks is a process of its own, as one that was
started anew but for its command line: with its own environment, standard files and exit code.
"""

import atexit
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Final, cast

ROOT: Final = Path(__file__).parents[2]
PATIENCE: Final = float(os.environ.get("BYPASSD_TEST_PATIENCE", "1"))
"""In software emulation everything takes longer; set by the virtual machine's start script."""
_STARTED_S: Final = 60.0 * PATIENCE


class Forked:
    """What of `subprocess.Popen` is asked of a process of the server's. Its exit code may be asked for ever."""

    def __init__(self, server: "ForkServer", pid: int) -> None:
        self._server = server
        self.pid = pid

    def poll(self) -> int | None:
        """Its exit code, None: it runs."""
        return self._server.code(self.pid, 0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Errors: `subprocess.TimeoutExpired`."""
        code = self._server.code(self.pid, timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Signal it; nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The server of one main function, ``module:function``, whose result is the exit code."""

    def __init__(self, main: str, environment: Mapping[str, str], also: Sequence[str] = ()) -> None:
        self._lock = threading.Lock()
        self._codes: dict[int, int] = {}
        self._buffer = b""
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno()), main, *also]
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=dict(environment), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        atexit.register(self.end)

    def end(self) -> None:
        """End the server, and what it has started and still runs."""
        self._socket.close()
        self._process.wait()

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: str,
        errors: str | None = None,
        host: int | None = None,
    ) -> Forked:
        """Start one, whose output is added to a file, or to two, and in whose network and mounts it is."""
        files = [output, errors or output]
        request = {"arguments": list(arguments), "environment": dict(environment), "files": files, "host": host}
        with self._lock:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            pid = None
            while pid is None:
                pid = self._read(_STARTED_S)
        return Forked(self, pid)

    def code(self, pid: int, within_s: float | None) -> int | None:
        """The exit code of a process, None: it has not ended within this time."""
        deadline = None if within_s is None else time.monotonic() + within_s
        while True:
            with self._lock:
                while pid not in self._codes and self._readable():
                    self._read(_STARTED_S)
                if pid in self._codes:
                    return self._codes[pid]
            if deadline is not None and time.monotonic() >= deadline:
                return None
            left = 0.05 if deadline is None else min(0.05, deadline - time.monotonic())
            select.select([self._socket], [], [], max(0.0, left))

    def _readable(self) -> bool:
        return b"\n" in self._buffer or bool(select.select([self._socket], [], [], 0)[0])

    def _read(self, within_s: float) -> int | None:
        """Read one message: the pid of a process that was started, or None for one that has ended."""
        while b"\n" not in self._buffer:
            if not select.select([self._socket], [], [], within_s)[0]:
                raise TimeoutError("the fork server does not answer")
            part = self._socket.recv(4096)
            if not part:
                raise ConnectionError("the fork server has ended")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        pid, code = json.loads(line)
        if code is None:
            return cast(int, pid)
        self._codes[pid] = code
        return None


def _serve(requests: socket.socket, main: str) -> None:
    """Fork at each request, and tell of each end, until the other side closes; what still runs is killed then."""
    running: dict[int, int] = {}
    try:
        _fork_on_request(requests, main, running)
    finally:
        # Also where the tests were aborted: a daemon that lives on keeps those of later tests out of its group.
        for pid in running.values():
            os.kill(pid, signal.SIGKILL)


def _fork_on_request(requests: socket.socket, main: str, running: dict[int, int]) -> None:
    """``running``: the processes by pidfd."""
    buffer = b""
    while True:
        watched: list[socket.socket | int] = [requests, *running]
        ready, _, _ = select.select(watched, [], [])
        for descriptor in ready:
            if isinstance(descriptor, int):
                pid = running.pop(descriptor)
                os.close(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                requests.sendall(json.dumps([pid, code]).encode() + b"\n")
        if requests in ready:
            part = requests.recv(1 << 16)
            if not part:
                return
            buffer += part
            while b"\n" in buffer:
                line, _, buffer = buffer.partition(b"\n")
                pid = os.fork()
                if pid == 0:
                    for descriptor in running:
                        os.close(descriptor)
                    requests.close()
                    _become(json.loads(line), main)
                running[os.pidfd_open(pid)] = pid
                requests.sendall(json.dumps([pid, None]).encode() + b"\n")


def _become(request: dict[str, object], main: str) -> None:
    """Be the program, and end."""
    for number, file in enumerate(cast(list[str], request["files"]), 1):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    if (host := request["host"]) is not None:
        entered = [os.open(f"/proc/{host}/ns/{name}", os.O_RDONLY) for name in ("net", "mnt")]
        for opened in entered:
            if ctypes.CDLL(None, use_errno=True).setns(opened, 0):
                os._exit(ctypes.get_errno())
            os.close(opened)
        os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(cast(dict[str, str], request["environment"]))
    module, _, function = main.partition(":")
    code = 1
    try:
        result = getattr(import_module(module), function)(request["arguments"])
        code = int(result or 0)
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:  # noqa: BLE001  (as an interpreter ends)
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@cache
def _daemons() -> ForkServer:
    # And what every daemon of the tests loads later.
    also = ("reconciler.signals.psi", "reconciler.web.app", "starlette.applications", "httpcore2")
    return ForkServer("tests.fakes.launch:main", {**os.environ, "PYTHONOPTIMIZE": "2"}, also)


@cache
def _programs() -> ForkServer:
    return ForkServer("reconciler.cli.main:main", {**os.environ, "PYTHONOPTIMIZE": "2"})


def forked_daemon(
    arguments: Sequence[str], environment: Mapping[str, str], log: str, host: int | None = None
) -> Forked:
    """Start ``bypassd``, optimised as its unit file has it. Its log is there at once, and appended to."""
    with open(log, "ab"):
        pass
    return _daemons().start(arguments, environment, log, host=host)


def forked_program(arguments: Sequence[str], environment: Mapping[str, str], output: str) -> Forked:
    """Start ``bypassctl``."""
    return _programs().start(arguments, environment, output)


def forked_control(
    arguments: Sequence[str], environment: Mapping[str, str], host: int | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run ``bypassctl`` to its end."""
    with tempfile.TemporaryDirectory(prefix="bypassd-") as place:
        process = _programs().start(arguments, environment, f"{place}/out", f"{place}/err", host)
        code = process.wait(_STARTED_S)
        out, err = (Path(place, name).read_text(encoding="utf-8") for name in ("out", "err"))
        return subprocess.CompletedProcess(["bypassctl", *arguments], code, out, err)


if __name__ == "__main__":
    number, name, *others = sys.argv[1:]
    for each in (name.partition(":")[0], *others):
        import_module(each)
    _serve(socket.socket(fileno=int(number)), name)
