"""The resctrl model behind a real mount, in a process of its own: real files, real errno, real inotify.

`mounted(shape, release, where)` starts the process, waits for the mount and yields a `Mounted`; at the end it unmounts
and stops the process, which also ends with the one that started it. The threads are this machine's.

One thing FUSE cannot do: a write of no bytes never leaves the kernel, and succeeds where the kernel may refuse it.
"""

import contextlib
import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fakes.kernel_files import fail
from tests.fakes.resctrl_model import Node, ResctrlModel
from tests.fakes.resctrl_shapes import ALL_SHAPES, Release, Shape
from tests.fakes.resctrl_tasks import ProcTasks

PATIENCE_S = 20.0
REPOSITORY = Path(__file__).parent.parent.parent
PR_SET_PDEATHSIG = 1
NO_FUSE = 77
"""The server's exit code where nothing can be mounted."""


class Mounted(NamedTuple):
    """A mounted model: ``root`` is where."""

    root: str


@contextlib.contextmanager
def mounted(shape: Shape, release: Release, where: Path, *calls: Sequence[object]) -> Iterator[Mounted]:
    """Mount a fresh model on the directory ``where``; skips the test where FUSE or the right to mount is missing.

    ``calls``: methods of `ResctrlModel` with their arguments, called before.
    """
    where.mkdir(parents=True, exist_ok=True)
    parts = [sys.executable, "-m", "tests.fakes.resctrl_fuse", json.dumps([str(where), shape.name, release, calls])]
    with subprocess.Popen(parts, cwd=REPOSITORY) as server:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not os.path.ismount(where):
                if server.poll() == NO_FUSE:
                    pytest.skip("RESCTRL MOUNT TEST NOT RUN: no root, /dev/fuse or libfuse (see standard error)")
                assert server.poll() is None, "the server failed"
                assert time.monotonic() < deadline, "the server does not mount"
                time.sleep(0.02)
            yield Mounted(str(where))
        finally:
            subprocess.run(["umount", "-l", str(where)], check=False, capture_output=True)
            server.terminate()
            try:
                server.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                server.kill()


def _operations(model: ResctrlModel) -> Any:  # mfusepy can only be imported where libfuse is
    import mfusepy

    texts: dict[int, bytes] = {}
    """For each open file its text, made when it is read from its beginning, as the kernel does."""

    def find(path: str) -> Node:
        return model.find(model.root + path.rstrip("/"))

    def attributes(node: Node) -> dict[str, int]:
        # As kernfs counts: of a directory its name, its own dot, and each directory's dots inside.
        inside = node.inside or {}
        links = 1 if node.inside is None else 2 + sum(entry.inside is not None for entry in inside.values())
        return {"st_mode": node.mode, "st_ino": node.inode, "st_nlink": links}

    class Files(mfusepy.Operations):  # type: ignore[misc]  # untyped library
        use_ns = True
        # Open files are known by number: their path may be gone, or another file's.
        flag_nopath = flag_nullpath_ok = True

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
            model.write_file(model.node(fh), data.decode("utf-8", "surrogateescape"))
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

    return Files()


def _serve(where: str, shape: str, release: Release, calls: Sequence[Sequence[str]]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    model = ResctrlModel(ALL_SHAPES[shape], release, root=where, tasks=ProcTasks(), clock=time.monotonic)
    for method, *arguments in calls:
        getattr(model, method)(*arguments)
    options = {"direct_io": True, "use_ino": True, "entry_timeout": 0, "negative_timeout": 0, "attr_timeout": 0}
    try:
        import mfusepy

        mfusepy.FUSE(_operations(model), where, foreground=True, nothreads=True, fsname="resctrl-model", **options)
    except (AttributeError, ImportError, OSError, RuntimeError) as exc:
        print(f"FUSE: {exc!r}", file=sys.stderr)
        sys.exit(NO_FUSE)


if __name__ == "__main__":
    place, name, (major, minor), before = json.loads(sys.argv[1])
    _serve(place, name, (major, minor), before)
