"""Core scheduling without a kernel that has it: tasks in groups, their cookies, and the errors of prctl(2).

As strict as the real one where it hurts: a cookie lives as long as some task has it, the number of one that is gone is
given to the next (the real one is the hash of an address that the allocator uses again), a thread inherits the cookie
of the task that started it, and a caller that ends gives back its own. `tests.fakes.test_cores` holds it against a real
kernel where there is one.
"""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from cgroupfs.hierarchy import UNIFIED, Hierarchy, HierarchyMode, Mount

_FIRST_COOKIE: Final = 0x1000


def fail(number: int) -> None:
    raise OSError(number, os.strerror(number))


class _Caller:
    """The calling thread's own cookie. Its end is the thread's: Python drops it with the thread's locals."""

    def __init__(self, kernel: "FakeCores") -> None:
        self.kernel = kernel
        self.cookie = 0

    def __del__(self) -> None:
        self.kernel.put(self.cookie)


class FakeCores:
    """The machine: `Prctl`, and what a test does to it."""

    def __init__(self, path: Path, version: int = 1) -> None:
        self.built = True
        self.smt = True
        self.forbidden: set[int] = set()
        """Tasks that a caller without the right may not look at."""
        self.calls: list[tuple[str, int]] = []
        self.before: Callable[[str, int], None] = lambda _call, _tid: None
        """Told of each call before it is done: what happens on the machine meanwhile."""
        self.mount = str(path / "cgroup")
        self.proc = str(path / "proc")
        self.version = version
        self._file = "tasks" if version == 1 else "cgroup.threads"
        self._cookies: dict[int, int] = {}
        self._groups: dict[int, str] = {}
        self._leaders: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self._free: list[int] = []
        self._next = 100
        self._own = threading.local()
        self._lock = threading.RLock()
        os.makedirs(self.mount)
        os.makedirs(self.proc)

    def hierarchy(self) -> Hierarchy:
        names = ("cpuset", "cpu") if self.version == 1 else ("cpuset", "cpu", UNIFIED)
        mount = Mount(directory=self.mount, version=self.version, controllers=names)
        mode = HierarchyMode.V1 if self.version == 1 else HierarchyMode.V2
        return Hierarchy(root="/", mode=mode, controllers=dict.fromkeys(names, mount))

    # What happens on the machine

    def group(self, path: str) -> None:
        """Make a group, with those above it."""
        os.makedirs(self.mount + path, exist_ok=True)
        while path:
            self._write(path)
            path = path.rpartition("/")[0]

    def remove(self, path: str) -> None:
        for tid in self.tids(path):
            self.exit(tid)
        shutil.rmtree(self.mount + path)

    def spawn(self, path: str, *, tid: int | None = None) -> int:
        """A process that was put into a group: by the runtime, which has no cookie, at its start or by exec."""
        with self._lock:
            tid = self._number() if tid is None else tid
            self._add(tid, path, tid, 0)
            return tid

    def thread(self, of: int) -> int:
        """One more thread of a process: with its group and its cookie."""
        with self._lock:
            tid = self._number()
            self._add(tid, self._groups[of], self._leaders[of], self._get(self._cookies[of]))
            return tid

    def fork(self, of: int) -> int:
        """A child process: with its group and its cookie."""
        with self._lock:
            tid = self._number()
            self._add(tid, self._groups[of], tid, self._get(self._cookies[of]))
            return tid

    def exit(self, tid: int) -> None:
        """The thread ends."""
        with self._lock:
            self.put(self._cookies.pop(tid))
            path = self._groups.pop(tid)
            shutil.rmtree(f"{self.proc}/{self._leaders.pop(tid)}/task/{tid}")
            self._write(path)

    def move(self, tid: int, path: str) -> None:
        """Another program attaches it to another group."""
        with self._lock:
            before, self._groups[tid] = self._groups[tid], path
            self._write(before)
            self._write(path)
            self._tell(tid)

    def own(self, tid: int) -> int:
        """A program gives itself a cookie of its own."""
        with self._lock:
            self._set(tid, self._new())
            return self._cookies[tid]

    def tids(self, path: str) -> list[int]:
        """The threads of a group."""
        return sorted(tid for tid, group in self._groups.items() if group == path)

    def cookie(self, tid: int) -> int:
        """The cookie of a task, without asking."""
        return self._cookies[tid]

    def cookies(self, path: str) -> set[int]:
        return {self._cookies[tid] for tid in self.tids(path)}

    @property
    def alive(self) -> set[int]:
        """All cookies that anybody has."""
        return set(self._counts)

    # The four calls

    def get(self, tid: int) -> int:
        with self._lock:
            return self._caller().cookie if self._check("get", tid) is None else self._cookies[tid]

    def create(self) -> None:
        with self._lock:
            self._check("create", 0)
            self._replace(self._new())

    def share_from(self, tid: int) -> None:
        with self._lock:
            self._check("share_from", tid)
            self._replace(self._get(self._cookies[tid]))

    def share_to(self, tid: int) -> None:
        with self._lock:
            self._check("share_to", tid)
            self._set(tid, self._get(self._caller().cookie))

    # Within

    def put(self, cookie: int) -> None:
        """One task fewer has it."""
        with self._lock:
            if cookie:
                self._counts[cookie] -= 1
                if not self._counts[cookie]:
                    del self._counts[cookie]
                    self._free.append(cookie)

    def _check(self, call: str, tid: int) -> int | None:
        self.before(call, tid)
        self.calls.append((call, tid))
        if not self.built:
            fail(errno.EINVAL)
        if not self.smt:
            fail(errno.ENODEV)
        if tid == 0:
            return None
        if tid not in self._cookies:
            fail(errno.ESRCH)
        if tid in self.forbidden:
            fail(errno.EPERM)
        return tid

    def _caller(self) -> _Caller:
        if not hasattr(self._own, "caller"):
            self._own.caller = _Caller(self)
        caller: _Caller = self._own.caller
        return caller

    def _replace(self, cookie: int) -> None:
        caller = self._caller()
        before, caller.cookie = caller.cookie, cookie
        self.put(before)

    def _set(self, tid: int, cookie: int) -> None:
        before, self._cookies[tid] = self._cookies[tid], cookie
        self.put(before)

    def _new(self) -> int:
        cookie = self._free.pop() if self._free else _FIRST_COOKIE + len(self._counts)
        self._counts[cookie] = 1
        return cookie

    def _get(self, cookie: int) -> int:
        if cookie:
            self._counts[cookie] += 1
        return cookie

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _add(self, tid: int, path: str, leader: int, cookie: int) -> None:
        self._cookies[tid], self._groups[tid], self._leaders[tid] = cookie, path, leader
        os.makedirs(f"{self.proc}/{leader}/task/{tid}", exist_ok=True)
        self._tell(tid)
        self._write(path)

    def _tell(self, tid: int) -> None:
        Path(f"{self.proc}/{self._leaders[tid]}/task/{tid}/cgroup").write_text(f"3:cpuset:{self._groups[tid]}\n")

    def _write(self, path: str) -> None:
        _put(f"{self.mount}{path}/{self._file}", self.tids(path))


def _put(path: str, numbers: Iterable[int]) -> None:
    # As the kernel lists them: all of one moment, never half a file.
    Path(f"{path}.new").write_text("".join(f"{number}\n" for number in numbers))
    os.replace(f"{path}.new", path)
