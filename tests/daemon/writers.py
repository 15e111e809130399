"""Other programs that write control files: named processes that live on, so that they can still be found.

A real runc is gone a few milliseconds after its write; that an unknown writer is called one is tested elsewhere.
"""

import os
import subprocess
import sys
from typing import Final, Self

from inotify_simple import INotify, flags

_PROGRAM: Final = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)
print("ready", flush=True)
for line in sys.stdin:
    path, _, text = line.rstrip("\\n").partition("\\t")
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError as exc:
        print(exc.errno, flush=True)
    else:
        print(0, flush=True)
"""
_SHELL: Final = 'while IFS="\t" read -r path text; do echo "$text" > "$path"; echo $?; done'


class Scribe:
    """A process that writes on command. ``name``: "runc", "kubelet", any program's, or "sh" for a person's shell."""

    def __init__(self, name: str) -> None:
        # A shell at work on a node is a person; every other one is this interpreter under another name.
        command = ["/bin/sh", "-c", _SHELL] if name == "sh" else [sys.executable, "-S", "-c", _PROGRAM, name]
        environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin")}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        if name != "sh":
            assert self._answer() == "ready"

    @property
    def pid(self) -> int:
        return self._process.pid

    def write(self, path: str, text: str) -> None:
        """Write ``text`` to one file; the file system's refusal is an OSError here."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{path}\t{text}\n")
        self._process.stdin.flush()
        code = int(self._answer())
        if code:
            raise OSError(code, os.strerror(code), path)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


class Modifications:
    """Counts writes to the control files of these directories, by any process, as the kernel reports each."""

    def __init__(self, directories: list[str]) -> None:
        self._inotify = INotify()
        self._names = {self._inotify.add_watch(path, flags.MODIFY): path for path in directories}

    def take(self) -> list[str]:
        """The files written since the last call."""
        return [f"{self._names[event.wd]}/{event.name}" for event in self._inotify.read(timeout=0)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._inotify.close()
