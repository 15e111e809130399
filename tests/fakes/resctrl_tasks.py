"""Threads for the resctrl model: in memory, or this machine's own as /proc has them. None is the default group."""

import contextlib
import itertools
import os
import time
from pathlib import Path
from typing import NamedTuple

from tests.fakes.resctrl_schemata import Group

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class FakeTasks:
    """Threads in memory: spawn, fork, clone, end. A new thread is in the group of the thread that made it."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1_000)
        self._leaders: dict[int, int] = {}
        self._groups: dict[int, Group | None] = {}

    def spawn(self, threads: int = 1, parent: int = 0) -> int:
        """A process with so many threads, forked by ``parent`` (0: in the default group); its pid."""
        pid = next(self._numbers)
        self._leaders[pid], self._groups[pid] = pid, self._groups.get(parent)
        for _ in range(threads - 1):
            self.clone(pid)
        return pid

    def clone(self, tid: int) -> int:
        """A thread made by a thread; its number."""
        made = next(self._numbers)
        self._leaders[made], self._groups[made] = self._leaders[tid], self._groups[tid]
        return made

    def tids(self, pid: int) -> list[int]:
        """The threads of a process, its leader first."""
        return [tid for tid, leader in self._leaders.items() if leader == pid]

    def end(self, tid: int) -> None:
        """A thread ends; with its leader the whole process."""
        for ended in {tid, *self.tids(tid)}:
            del self._leaders[ended], self._groups[ended]

    def group(self, tid: int) -> Group | None:
        """One thread's group. Errors: `KeyError`: there is no such thread."""
        return self._groups[tid]

    def put(self, tid: int, group: Group | None) -> None:
        self._groups[tid] = group

    def threads(self) -> list[tuple[int, Group | None]]:
        """Every thread and its group, in the kernel's order: each process's leader, then its other threads."""
        return sorted(self._groups.items(), key=lambda item: (self._leaders[item[0]], item[0]))


class _Thread(NamedTuple):
    """``start`` identifies a thread of that number; ``since``: when it was moved (ticks since boot; 0: never)."""

    start: int
    group: Group | None
    since: int = 0


class ProcTasks:
    """Threads of the running machine.

    What was moved, and what lived then, is remembered by number and start time; a process that started later than its
    parent was moved is in the parent's group, a thread in its leader's. One case cannot be seen and counts as the
    default group, which only makes more work for code that moves until nothing is left: a child whose parent has ended.
    """

    def __init__(self) -> None:
        self._moved: dict[int, _Thread] = {}

    def group(self, tid: int) -> Group | None:
        return self._thread(tid, {}).group

    def put(self, tid: int, group: Group | None) -> None:
        now = int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS_PER_SECOND)
        thread = self._thread(tid, {})
        # Those that live stay where they are: also a child that began within this very tick, before its parent moved.
        self._moved = self._walk()
        self._moved[tid] = _Thread(thread.start, group, now)

    def threads(self) -> list[tuple[int, Group | None]]:
        return [(tid, thread.group) for tid, thread in self._walk().items()]

    def _walk(self) -> dict[int, _Thread]:
        read: dict[int, _Thread] = {}
        for pid in sorted(map(int, filter(str.isdigit, os.listdir("/proc")))):
            with contextlib.suppress(OSError):
                for tid in sorted(map(int, os.listdir(f"/proc/{pid}/task"))):
                    with contextlib.suppress(KeyError):
                        self._thread(tid, read, pid)
        return read

    def _thread(self, tid: int, read: dict[int, _Thread], leader: int = 0) -> _Thread:
        """One thread; ``read`` holds those of the same walk. Errors: `KeyError`."""
        if tid in read:
            return read[tid]
        try:
            fields = Path(f"/proc/{tid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            leader = leader or int(Path(f"/proc/{tid}/status").read_text(errors="replace").split("Tgid:")[1].split()[0])
        except OSError:
            self._moved.pop(tid, None)
            raise KeyError(tid) from None
        parent, start = int(fields[1]) if leader == tid else leader, int(fields[19])
        thread = self._moved.get(tid)
        if thread is None or thread.start != start:
            thread = _Thread(start, None)
            with contextlib.suppress(KeyError):
                above = self._thread(parent, read)
                if above.group is not None and start >= above.since:
                    thread = _Thread(start, above.group)
        read[tid] = thread
        return thread
