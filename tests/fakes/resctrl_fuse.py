"""The resctrl model behind a real mount, in a process of its own: real files, real errno, real inotify.

`mounted(shape, release, where)` starts the process, waits for the mount and yields a `Mounted`; it ends the process and
takes the mount away whatever happens. The process also ends with the one that started it.

The threads are this machine's (resctrl_proc.py). One thing FUSE cannot do: a write of no bytes never leaves the kernel,
and answers success where the real file system may refuse it.
"""

import contextlib
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.kernel_files import fail
from tests.fakes.resctrl_model import ResctrlModel
from tests.fakes.resctrl_proc import ProcTasks
from tests.fakes.resctrl_shapes import ALL_SHAPES, Release, Shape
from tests.fakes.resctrl_tree import Dir, File

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
        self._server.stdin.write(json.dumps([method, *arguments]) + "\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline())
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]


def missing() -> str:
    """Why nothing can be mounted through FUSE here; empty where it can."""
    if os.geteuid() != 0:
        return "it needs root"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as exc:
        return f"/dev/fuse: {exc.strerror}"
    try:
        import mfusepy  # noqa: F401, PLC0415  (without libfuse the import itself fails)
    except (ImportError, OSError, AttributeError) as exc:
        return f"mfusepy: {exc}"
    return ""


@contextlib.contextmanager
def mounted(shape: Shape, release: Release, where: Path) -> Iterator[Mounted]:
    """Mount a fresh model on the directory ``where``; skips the test, loudly, where FUSE cannot be had."""
    if why := missing():
        pytest.skip(f"RESCTRL MOUNT TEST NOT RUN: {why}")
    where.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "tests.fakes.resctrl_fuse", str(where), shape.name, f"{release[0]}.{release[1]}"]
    server = subprocess.Popen(words, cwd=REPOSITORY, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not os.path.ismount(where):
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.skip(f"RESCTRL MOUNT TEST NOT RUN: the server ended with {server.poll()} instead of mounting")
            time.sleep(0.02)
        yield Mounted(str(where), server)
    finally:
        subprocess.run(["umount", "-l", str(where)], check=False, capture_output=True)
        server.terminate()
        try:
            server.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        for pipe in (server.stdin, server.stdout):
            if pipe is not None:
                pipe.close()


def _attributes(node: Dir | File) -> dict[str, int]:
    kind = stat.S_IFDIR if isinstance(node, Dir) else stat.S_IFREG
    links = 2 if isinstance(node, Dir) else 1
    return {"st_mode": kind | node.mode, "st_ino": node.inode, "st_nlink": links, "st_size": 0}


class _Handles:
    """Open files and directories. A file's text is made when it is read from its beginning, as the kernel does."""

    def __init__(self) -> None:
        self._nodes: dict[int, Dir | File] = {}
        self._texts: dict[int, bytes] = {}
        self._next = 0

    def open(self, node: Dir | File) -> int:
        self._next += 1
        self._nodes[self._next] = node
        return self._next

    def node(self, number: int) -> Dir | File:
        return self._nodes[number]

    def text(self, number: int, offset: int, model: ResctrlModel) -> bytes:
        node = self._nodes[number]
        assert isinstance(node, File)
        if not node.alive:
            fail(errno.ENODEV)
        if offset == 0 or number not in self._texts:
            self._texts[number] = model.read_file(node).encode("utf-8", "surrogateescape")
        return self._texts[number]

    def close(self, number: int) -> None:
        self._nodes.pop(number, None)
        self._texts.pop(number, None)


def _operations(model: ResctrlModel) -> Any:  # mfusepy can only be imported where libfuse is
    import mfusepy  # noqa: PLC0415

    handles = _Handles()

    class Files(mfusepy.Operations):  # type: ignore[misc]  # untyped library
        use_ns = True
        # Open files are known by number: their path may be gone, or somebody else's.
        flag_nopath = True
        flag_nullpath_ok = True

        def getattr(self, path: str | None, fh: int | None = None) -> dict[str, int]:
            node = model.find(model.root + path.rstrip("/")) if path is not None else handles.node(fh or 0)
            return _attributes(node)

        def opendir(self, path: str) -> int:
            return handles.open(model.find(model.root + path.rstrip("/")))

        def readdir(self, path: str | None, fh: int) -> list[tuple[str, dict[str, int], int]]:
            node = handles.node(fh)
            assert isinstance(node, Dir)
            if not node.alive:
                fail(errno.ENOENT)
            near = {".": node, "..": node.parent or node, **node.inside}
            return [(name, _attributes(one), 0) for name, one in near.items()]

        def releasedir(self, path: str | None, fh: int) -> int:
            handles.close(fh)
            return 0

        def open(self, path: str, flags: int) -> int:
            node = model.find(model.root + path)
            if isinstance(node, Dir):
                fail(errno.EISDIR)
            if flags & os.O_ACCMODE != os.O_RDONLY and node.write is None:
                fail(errno.EACCES)
            return handles.open(node)

        def read(self, path: str | None, size: int, offset: int, fh: int) -> bytes:
            return handles.text(fh, offset, model)[offset : offset + size]

        def write(self, path: str | None, data: bytes, offset: int, fh: int) -> int:
            node = handles.node(fh)
            assert isinstance(node, File)
            model.write_file(node, data.decode("utf-8", "surrogateescape"), mfusepy.fuse_get_context()[2])
            return len(data)

        def release(self, path: str | None, fh: int) -> int:
            handles.close(fh)
            return 0

        def flush(self, path: str | None, fh: int) -> int:
            return 0

        def truncate(self, path: str | None, length: int, fh: int | None = None) -> int:
            return 0

        def create(self, path: str, mode: int, fi: object = None) -> int:
            fail(errno.EACCES)

        def mkdir(self, path: str, mode: int) -> int:
            model.mkdir(model.root + path, mode & 0o7777)
            return 0

        def rmdir(self, path: str) -> int:
            model.rmdir(model.root + path)
            return 0

        def unlink(self, path: str) -> int:
            model.unlink(model.root + path)
            return 0

        def rename(self, old: str, new: str) -> int:
            model.rename(model.root + old, model.root + new)
            return 0

    return Files()


def _answer(model: ResctrlModel) -> None:
    """Carry out what comes on standard input, one call a line, until it ends."""
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            answer = {"result": getattr(model, method)(*arguments)}
        except (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, TypeError, ValueError) as exc:
            answer = {"error": repr(exc)}
        print(json.dumps(answer), flush=True)


def _serve(arguments: Sequence[str]) -> None:
    import ctypes  # noqa: PLC0415

    import mfusepy  # noqa: PLC0415

    where, shape, release = arguments
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    major, minor = map(int, release.split("."))
    model = ResctrlModel(ALL_SHAPES[shape], (major, minor), root=where, tasks=ProcTasks(), clock=time.monotonic)
    threading.Thread(target=_answer, args=(model,), daemon=True).start()
    mfusepy.FUSE(
        _operations(model),
        where,
        foreground=True,
        nothreads=True,
        direct_io=True,
        use_ino=True,
        entry_timeout=0,
        negative_timeout=0,
        attr_timeout=0,
        fsname="resctrl-model",
    )


if __name__ == "__main__":
    _serve(sys.argv[1:])
