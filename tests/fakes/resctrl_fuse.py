"""The resctrl model behind a real mount, in a process of its own: real files, real errno, real inotify.

`mounted(shape, release, where)` starts the process, waits for the mount and yields a `Mounted`; at the end it unmounts
and stops the process, which also ends with the one that started it. The threads are this machine's.

One thing FUSE cannot do: a write of no bytes never leaves the kernel, and succeeds where the kernel may refuse it.
"""

import contextlib
import ctypes
import errno
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.kernel_files import fail
from tests.fakes.resctrl_model import Node, ResctrlModel
from tests.fakes.resctrl_shapes import ALL_SHAPES, Release, Shape
from tests.fakes.resctrl_tasks import ProcTasks

PATIENCE_S = 20.0
REPOSITORY = Path(__file__).parent.parent.parent
PR_SET_PDEATHSIG = 1


class Mounted:
    """A mounted model: ``root`` is where, ``call`` uses a method of the model in its process."""

    def __init__(self, root: str, server: "subprocess.Popen[str]") -> None:
        self.root = root
        self._server = server

    def call(self, method: str, *arguments: object) -> object:
        """Call ``method`` of the `ResctrlModel`. Errors: `RuntimeError` with what it raised."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps([method, *arguments]), file=self._server.stdin, flush=True)
        answer = json.loads(self._server.stdout.readline())
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]


@contextlib.contextmanager
def mounted(shape: Shape, release: Release, where: Path) -> Iterator[Mounted]:
    """Mount a fresh model on the directory ``where``; skips the test where FUSE or the right to mount is missing."""
    where.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "tests.fakes.resctrl_fuse", str(where), shape.name, f"{release[0]}.{release[1]}"]
    with subprocess.Popen(words, cwd=REPOSITORY, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not os.path.ismount(where):
                if server.poll() is not None or time.monotonic() > deadline:
                    pytest.skip(f"RESCTRL MOUNT TEST NOT RUN: no mount; the server ended with {server.poll()}")
                time.sleep(0.02)
            yield Mounted(str(where), server)
        finally:
            subprocess.run(["umount", "-l", str(where)], check=False, capture_output=True)
            server.terminate()
            try:
                server.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                server.kill()


def _operations(model: ResctrlModel, lock: threading.Lock) -> Any:  # mfusepy can only be imported where libfuse is
    import mfusepy  # noqa: PLC0415

    texts: dict[int, bytes] = {}
    """For each open file its text, made when it is read from its beginning, as the kernel does."""

    def find(path: str) -> Node:
        return model.find(model.root + path.rstrip("/"))

    def attributes(node: Node) -> dict[str, int]:
        return {"st_mode": node.mode, "st_ino": node.inode, "st_nlink": 1 if node.inside is None else 2}

    class Files(mfusepy.Operations):  # type: ignore[misc]  # untyped library
        use_ns = True
        # Open files are known by number: their path may be gone, or another file's.
        flag_nopath = True
        flag_nullpath_ok = True

        def getattr(self, path: str | None, fh: int | None = None) -> dict[str, int]:
            return attributes(find(path) if path is not None else model.node(fh or 0))

        def opendir(self, path: str) -> int:
            return model.open_dir(model.root + path.rstrip("/"))

        def readdir(self, path: str | None, fh: int) -> list[tuple[str, dict[str, int], int]]:
            directory = model.node(fh)
            near = {".": directory, "..": directory.parent or directory, **directory.entries}
            return [(name, attributes(node), 0) for name, node in near.items()]

        def open(self, path: str, flags: int) -> int:
            if flags & os.O_ACCMODE != os.O_RDONLY and find(path).write is None:
                fail(errno.EACCES)
            return self.opendir(path)

        def read(self, path: str | None, size: int, offset: int, fh: int) -> bytes:
            if offset == 0 or fh not in texts:
                texts[fh] = model.read_file(model.node(fh)).encode("utf-8", "surrogateescape")
            return texts[fh][offset : offset + size]

        def write(self, path: str | None, data: bytes, offset: int, fh: int) -> int:
            text = data.decode("utf-8", "surrogateescape")
            model.write_file(model.node(fh), text, mfusepy.fuse_get_context()[2])
            return len(data)

        def release(self, path: str | None, fh: int) -> None:
            model.close_dir(fh)
            texts.pop(fh, None)

        releasedir = release

        def truncate(self, path: str | None, length: int, fh: int | None = None) -> None:
            pass

        def create(self, path: str, mode: int, fi: object = None) -> int:
            fail(errno.EACCES)

        def mkdir(self, path: str, mode: int) -> None:
            model.mkdir(model.root + path, mode & 0o7777)

        def rmdir(self, path: str) -> None:
            model.rmdir(model.root + path)

        def unlink(self, path: str) -> None:
            fail(errno.EPERM)

        def rename(self, old: str, new: str) -> None:
            model.rename(model.root + old, model.root + new)

    for name, operation in list(vars(Files).items()):
        if callable(operation):
            setattr(Files, name, _locked(operation, lock))
    return Files()


def _locked(work: Callable[..., object], lock: threading.Lock) -> Callable[..., object]:
    @functools.wraps(work)
    def run(*arguments: object) -> object:
        with lock:
            return work(*arguments)

    return run


def _answer(model: ResctrlModel, lock: threading.Lock) -> None:
    """Carry out what comes on standard input, one call a line, until it ends."""
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            answer = {"result": _locked(getattr(model, method), lock)(*arguments)}
        except (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, TypeError, ValueError) as exc:
            answer = {"error": repr(exc)}
        print(json.dumps(answer), flush=True)


def _serve(where: str, shape: str, release: str) -> None:
    import mfusepy  # noqa: PLC0415

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    major, minor = map(int, release.split("."))
    model = ResctrlModel(ALL_SHAPES[shape], (major, minor), root=where, tasks=ProcTasks(), clock=time.monotonic)
    lock = threading.Lock()
    threading.Thread(target=_answer, args=(model, lock), daemon=True).start()
    options = {"direct_io": True, "use_ino": True, "entry_timeout": 0, "negative_timeout": 0, "attr_timeout": 0}
    mfusepy.FUSE(_operations(model, lock), where, foreground=True, nothreads=True, fsname="resctrl-model", **options)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
