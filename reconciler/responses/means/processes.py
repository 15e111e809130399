"""Signals to the processes of one pod, and to no other process, although a process id may be reused by another one.

Source: pidfd_open(2), pidfd_send_signal(2), proc(5).
"""

import errno
import os
import resource
import signal
from collections.abc import Iterable, Mapping
from typing import Final, final

import trio
from msgspec import Struct

from cgroupfs.errors import AgentError
from cgroupfs.lines import stat_fields, stat_name, stat_numbers
from cgroupfs.subtree import Subtree, SubtreeGroup
from reconciler.runtime.cooperative import TimeSlice

_BATCH: Final = (64, 4096)
"""Processes held at once, from and to: each is an open file. For each batch its group is listed once more."""
_PART: Final = 16
"""Of the descriptors that this process may have, at most this part is held."""
_KERNEL_THREAD: Final = 0x00200000
"""Source: include/linux/sched.h, PF_KTHREAD."""
_NO_PIDFD: Final = frozenset({errno.ENOSYS, errno.EPERM})


class OwnPodError(AgentError):
    """This daemon's own process is in the pod that it is to end."""


class ProcessStat(Struct, frozen=True):
    """Fields of ``/proc/PID/stat``. ``start``: ticks since boot."""

    comm: str
    state: str
    parent: int
    flags: int
    start: int


def read_stat(pid: int, proc: str = "/proc") -> ProcessStat | None:
    """One process; None when it has ended."""
    text = _text(f"{proc}/{pid}/stat")
    try:
        parent, flags, start = stat_numbers(text, 4, 9, 22)
        state = stat_fields(text)[0]
    except ValueError:
        return None
    return ProcessStat(comm=stat_name(text), state=state, parent=parent, flags=flags, start=start)


class ProcessHandle(Struct, frozen=True):
    """One opened process. ``number``: its pidfd, -1 on a kernel without."""

    pid: int
    stat: ProcessStat
    number: int = -1


@final
class PodTermination:
    """Lists and signals the members of subtrees."""

    def __init__(self, proc: str = "/proc", *, ourselves: int | None = None) -> None:
        self.proc = proc
        self._ourselves = os.getpid() if ourselves is None else ourselves
        self._pidfd = hasattr(os, "pidfd_open")

    async def members(self, tree: Subtree) -> set[int]:
        """Ids of all processes in it; 0 for those outside this pid namespace. `Subtree.missing`: there may be others.

        Errors: `OwnPodError` when the daemon is one of them.
        """
        slices, members = TimeSlice(), set[int]()
        for group in tree.groups():
            members |= await _listed(group, slices)
        if self._ourselves in members:
            raise OwnPodError("this daemon runs in it")
        return members

    async def starts(self, pids: Iterable[int]) -> dict[int, int]:
        """The start time of each process that is still there and may be signalled."""
        slices, starts = TimeSlice(), dict[int, int]()
        for pid in pids:
            stat = read_stat(pid, self.proc)
            if stat is not None and self._ours(pid, stat):
                starts[pid] = stat.start
            await slices.checkpoint()
        return starts

    async def signal(self, tree: Subtree, number: int, only: Mapping[int, int] | None = None) -> int:
        """Send ``number`` to every member, once; to how many. ``only``: those ids with those start times."""
        slices, done = TimeSlice(), set[int]()
        most = min(max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _PART, _BATCH[0]), _BATCH[1])
        for group in tree.groups():
            pids = await _listed(group, slices)
            if self._ourselves in pids:
                raise OwnPodError("this daemon runs in it")
            listed = [pid for pid in pids if pid not in done and (only is None or pid in only)]
            for first in range(0, len(listed), most):
                done |= await self._signal_some(group, listed[first : first + most], number, only, slices)
        return len(done)

    async def _signal_some(
        self, group: SubtreeGroup, pids: Iterable[int], number: int, only: Mapping[int, int] | None, slices: TimeSlice
    ) -> set[int]:
        held, sent = list[ProcessHandle](), set[int]()
        try:
            for pid in pids:
                if (handle := self._hold(pid)) is not None:
                    held.append(handle)
                await slices.checkpoint()
            # Read after the processes were opened (pidfd): only then is the opened process the listed one. A number
            # that was reused meanwhile is not in the group.
            members = await _listed(group, slices) if held else set()
            for handle in held:
                wanted = only is None or only.get(handle.pid) == handle.stat.start
                if handle.pid in members and wanted and self._send(handle, number):
                    sent.add(handle.pid)
                await slices.checkpoint()
            return sent
        finally:
            for handle in held:
                if handle.number >= 0:
                    os.close(handle.number)

    def _hold(self, pid: int) -> ProcessHandle | None:
        if pid <= 1 or pid == self._ourselves:
            return None
        number = -1
        if self._pidfd:
            try:
                number = os.pidfd_open(pid)
            except OSError as exc:
                if exc.errno not in _NO_PIDFD:
                    return None  # it has ended (ESRCH), or is not a whole process (EINVAL)
                self._pidfd = False
        stat = read_stat(pid, self.proc)
        if stat is None or not self._ours(pid, stat):
            if number >= 0:
                os.close(number)
            return None
        return ProcessHandle(pid, stat, number)

    def _ours(self, pid: int, stat: ProcessStat) -> bool:
        """False for process 1, the daemon itself, kernel threads, and what is outside this pid namespace (0)."""
        return pid > 1 and pid != self._ourselves and not stat.flags & _KERNEL_THREAD

    def _send(self, held: ProcessHandle, number: int) -> bool:
        try:
            if held.number >= 0:
                signal.pidfd_send_signal(held.number, number)
            else:
                # Before kernel 5.3: in the microseconds from here the id would have to be released and reused.
                now = read_stat(held.pid, self.proc)
                if now is None or now.start != held.stat.start:
                    return False
                os.kill(held.pid, number)
        except OSError:
            return False  # it has ended; one that may not be signalled remains, and the caller's wait reports it
        return True

    async def describe(self, pids: Iterable[int], most: int = 5) -> str:
        """Those that do not die, for a person: ``1234 (dd, D, in nfs_wait)``."""
        slices, alive = TimeSlice(), list[tuple[int, ProcessStat]]()
        for pid in sorted(pids):
            if (stat := read_stat(pid, self.proc)) is not None:
                alive.append((pid, stat))
            await slices.checkpoint()
        shown = []
        for pid, stat in alive[:most]:
            where = _text(f"{self.proc}/{pid}/wchan").strip()
            asleep = f", in {where}" if stat.state == "D" and where not in {"", "0"} else ""
            shown.append(f"{pid} ({stat.comm}, {stat.state}{asleep})")
        more = [f"{len(alive) - most} more"] if len(alive) > most else []
        return ", ".join([*shown, *more])


async def _listed(group: SubtreeGroup, slices: TimeSlice) -> set[int]:
    pids = set[int]()
    await slices.checkpoint()
    for pid in group.pids():
        pids.add(pid)
        await slices.checkpoint()
    return pids


async def has_processes(tree: Subtree) -> bool:
    """Whether a process is in it, or may be (`Subtree.missing`); works for a millisecond at a time."""
    slices = TimeSlice()
    for occupied in tree.scan():
        if occupied:
            return True
        await slices.checkpoint()
    return False


async def thaw(tree: Subtree) -> int:
    """Let all of it run; how many groups were stopped. A stopped process handles no signal; on v1 it does not exit."""
    slices, count = TimeSlice(), 0
    for stopped in tree.thawing():
        count += stopped
        await slices.checkpoint()
    return count


async def wait_empty(tree: Subtree, within_s: float, *, every_s: float = 0.25) -> bool:
    """Wait until no process is in it; False on timeout."""
    with trio.move_on_after(within_s):
        pause_s = min(0.01, every_s)
        while await has_processes(tree):
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, every_s)
        return True
    return not await has_processes(tree)


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            return file.read()
    except OSError:
        return ""
