"""Failures of single system calls on a node below one directory: every call is known, counted, and may be made to fail.

The seam is the functions of `os`, `open`, the inotify calls and the fake kernel's `FileOps`. Only calls on paths below
the node's root count; what the fake kernel and the test do themselves does not.
"""

import builtins
import io
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple, final
from unittest import mock

from inotify_simple import INotify

from tests.fakes.kernel import FakeKernel

_BY_PATH: Final = (
    *("open", "stat", "lstat", "scandir", "listdir", "readlink", "statvfs"),
    *("mkdir", "rename", "replace", "unlink"),
)
_BY_NUMBER: Final = ("read", "pread", "write", "pwrite", "fstat", "fsync")

_AUDITED: Final = {"open": "open", "os.listdir": "listdir", "os.scandir": "scandir"}

_AUDITORS: Final[list["Faults"]] = []
_HOOKED: Final[list[bool]] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    for faults in _AUDITORS:
        faults.audit(event, arguments)


def _begin_audit() -> None:
    """A hook stays for the life of the process; it does nothing while no node is under test."""
    if not _HOOKED:
        _HOOKED.append(True)
        sys.addaudithook(_audit)


class Call(NamedTuple):
    """One call: what, on which path (without the root), and the how-manieth of this kind on this path."""

    kind: str
    path: str
    nth: int = 0


Fault = Callable[[Call], int]
"""The errno with which a call fails, 0 for none."""


@final
class Faults:
    """Counts system calls and lets chosen ones fail. ``fault`` may be replaced at any time."""

    def __init__(self, root: str, kernel: FakeKernel) -> None:
        self.calls: list[Call] = []
        self.hits = 0
        self.fault: Fault = lambda _call: 0
        self._root = root
        self._kernel = kernel
        self._counts: Counter[tuple[str, str]] = Counter()
        self._paths: dict[int, str] = {}
        self._within = threading.local()
        self.audited: Counter[tuple[str, str]] = Counter()
        """What the interpreter itself has seen of the agent: (kind, path without the root). See `audit`."""

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """The interpreter's audit event: no call on the node's files may pass the seam by."""
        if event not in _AUDITED or getattr(self._within, "apart", False) or not isinstance(arguments[0], str | bytes):
            return
        path = os.fsdecode(arguments[0])
        if path.startswith(self._root):
            self.audited[_AUDITED[event], path.removeprefix(self._root)] += 1

    # FileOps

    def inode(self, directory: str) -> int:
        self._enter("inode", directory)
        with self.apart():
            return self._kernel.inode(directory)

    def read(self, directory: str, file: str) -> str:
        self._enter("cg.read", f"{directory}/{file}")
        with self.apart():
            if "/sys/fs/cgroup" not in directory:
                with open(f"{directory}/{file}") as opened:
                    return opened.read()
            return self._kernel.read(directory, file)

    def write(self, directory: str, file: str, text: str) -> None:
        self._enter("cg.write", f"{directory}/{file}")
        with self.apart():
            self._kernel.write(directory, file, text)

    def groups(self, directory: str, most: int | None = None) -> list[str]:
        self._enter("groups", directory)
        with self.apart():
            return self._kernel.groups(directory, most)

    def files(self, directory: str) -> list[str]:
        self._enter("files", directory)
        with self.apart():
            return self._kernel.files(directory)

    # The seam

    def unseen(self) -> list[tuple[str, str]]:
        """Calls that the interpreter has seen and that did not pass here."""
        kinds = {"open": "open", "fopen": "open", "listdir": "listdir", "scandir": "scandir"}
        counts = Counter((kinds[call.kind], call.path) for call in self.calls if call.kind in kinds)
        return sorted(key for key, count in self.audited.items() if count > counts[key])

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What the test or the fake kernel does within is not the agent's."""
        before = getattr(self._within, "apart", False)
        self._within.apart = True
        try:
            yield
        finally:
            self._within.apart = before

    @contextmanager
    def installed(self) -> Iterator["Faults"]:
        """Within the block every call of this process passes here."""
        _begin_audit()
        with ExitStack() as stack:
            _AUDITORS.append(self)
            stack.callback(_AUDITORS.remove, self)
            for name in _BY_PATH:
                stack.enter_context(mock.patch.object(os, name, self._by_path(name, getattr(os, name))))
            for name in _BY_NUMBER:
                stack.enter_context(mock.patch.object(os, name, self._by_number(name, getattr(os, name))))
            opened = self._by_path("fopen", builtins.open)
            stack.enter_context(mock.patch.object(builtins, "open", opened))
            stack.enter_context(mock.patch.object(io, "open", opened))
            make, add = INotify.__init__, INotify.add_watch

            def begin(inotify: INotify, *arguments: Any, **more: Any) -> None:
                self._enter("inotify", f"{self._root}/inotify")
                make(inotify, *arguments, **more)

            def add_watch(inotify: INotify, path: str, mask: int) -> int:
                self._enter("add_watch", path)
                self._paths.setdefault(inotify.fd, f"{path}/inotify")
                number: int = add(inotify, path, mask)
                return number

            stack.enter_context(mock.patch.object(INotify, "__init__", begin))

            stack.enter_context(mock.patch.object(INotify, "add_watch", add_watch))
            close = os.close

            def forget(number: int) -> None:
                self._paths.pop(number, None)
                close(number)

            stack.enter_context(mock.patch.object(os, "close", forget))
            yield self

    def _by_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *arguments: Any, **more: Any) -> Any:
            where = self._under(path, more.get("dir_fd"))
            if where is None or getattr(self._within, "apart", False):
                return real(path, *arguments, **more)
            self._enter(name, where)
            answer = real(path, *arguments, **more)
            if name == "open":
                self._paths[answer] = where
            return answer

        return call

    def _by_number(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(number: int, *arguments: Any, **more: Any) -> Any:
            where = self._paths.get(number)
            if where is not None and not getattr(self._within, "apart", False):
                self._enter(name, where)
            return real(number, *arguments, **more)

        return call

    def _under(self, path: Any, directory: int | None) -> str | None:
        if isinstance(path, int):
            return self._paths.get(path)
        text = os.fsdecode(path)
        if directory is not None:
            text = f"{self._paths.get(directory, '')}/{text}"
        return text if text.startswith(self._root) else None

    def _enter(self, kind: str, path: str) -> None:
        if getattr(self._within, "apart", False):
            return
        place = path.removeprefix(self._root) or "/"
        self._counts[kind, place] += 1
        call = Call(kind, place, self._counts[kind, place])
        self.calls.append(call)
        if code := self.fault(call):
            self.hits += 1
            raise OSError(code, os.strerror(code), path)
