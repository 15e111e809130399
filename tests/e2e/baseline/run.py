"""Run ``watchwrite`` and read what it logged."""

import os
import signal
import subprocess
from collections.abc import Mapping
from typing import Self

from msgspec import Struct

from tests.e2e.programs import program


class Answer(Struct, frozen=True, kw_only=True):
    """One container: the event in hand, the last write returned (CLOCK_MONOTONIC ns), writes the kernel refused."""

    container: str
    signal_ns: int
    last_write_ns: int
    failed: int

    @property
    def took_us(self) -> float:
        """From the signal to the last write."""
        return (self.last_write_ns - self.signal_ns) / 1000


class WatchWrite:
    """The bare loop on one runc root. ``files``: path with ``%s`` for the cgroup path, to the value written."""

    def __init__(self, *, runc_root: str, bundles: str, files: Mapping[str, str], directory: str) -> None:
        self._root = runc_root
        self._log = os.path.join(directory, "watchwrite.log")
        self._command = [
            *(str(program("watchwrite")), runc_root, bundles, self._log),
            *(f"{path}={value}" for path, value in files.items()),
        ]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        # runc makes its root with the node's first container.
        os.makedirs(self._root, exist_ok=True)
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line != "ready\n":
            raise RuntimeError(f"watchwrite does not start: {line!r}")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(10)
            assert self._process.stdout is not None
            self._process.stdout.close()

    @property
    def pid(self) -> int:
        """The loop's process id."""
        assert self._process is not None
        return self._process.pid

    def answers(self) -> list[Answer]:
        """What it has done so far, in order."""
        answers = []
        with open(self._log, encoding="utf-8") as file:
            for line in file:
                container, signal_ns, last_ns, failed = line.split()
                answers.append(
                    Answer(
                        container=container, signal_ns=int(signal_ns), last_write_ns=int(last_ns), failed=int(failed)
                    )
                )
        return answers
