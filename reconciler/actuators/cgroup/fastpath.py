"""The writes that are ready before they are needed: what is done at the instant the runtime says "I have finished".

Between a container's mkdir and the rename of runc's ``state.json`` there are 14-30 ms, enough to classify, plan and
make the pre-images durable; between that rename and the exec of the program there are as little as 7.7 ms, on a busy
machine shared with everybody. So at the rename only the writes are left: a dictionary look-up and a few system calls
within the very task that read the event, no await, no plan, no thread, no fsync. What was written is looked at
afterwards, level-triggered like everything else.

A container stays prepared for as long as it is there: ``runc update`` (the kubelet's CPU manager) ends in the same
rename, and then our values are back before anybody was scheduled on the others.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from cgroupfs.files import REAL, FileOps
from state.entry import FileKey

RUNC_INIT = "runc:["
"""The process name of a container between its creation and the exec of its program, cut by the kernel to 15 letters."""


class FastWrite(NamedTuple):
    """One write, ready: an absolute directory, a file, a text, and the ledger's key of the file."""

    directory: str
    file: str
    text: str
    key: FileKey


class FastResult(NamedTuple):
    """What became of one container's prepared writes. Times are monotonic seconds.

    ``errnos`` stand beside ``writes``, 0 for accepted. ``before_exec``: whether the last write came before the exec of
    the container's program; None when that could not be told, or when the program had been running for long (update).
    """

    container_id: str
    signal_at: float
    done_at: float
    writes: Sequence[FastWrite]
    errnos: Sequence[int]
    before_exec: bool | None
    creation: bool

    @property
    def seconds(self) -> float:
        """Signal to last write."""
        return self.done_at - self.signal_at


class _Prepared:
    __slots__ = ("fired", "procs", "writes")

    def __init__(self, writes: tuple[FastWrite, ...], procs: str, *, fired: bool) -> None:
        self.writes = writes
        self.procs = procs
        self.fired = fired


@final
class FastPath:
    """Prepared writes by container id. `execute` is called by the source that reads the runtime's signal."""

    def __init__(self, report: Callable[[FastResult], None], *, files: FileOps = REAL, root: str = "/") -> None:
        """``report`` is called once per firing, after the writes; it only notes and marks."""
        self._report = report
        self._files = files
        self._proc = os.path.join(root, "proc")
        self._prepared: dict[str, _Prepared] = {}

    def __len__(self) -> int:
        return len(self._prepared)

    def __contains__(self, container_id: str) -> bool:
        return container_id in self._prepared

    def prepare(self, container_id: str, writes: Sequence[FastWrite], *, procs: str, settled: bool) -> None:
        """Have these writes ready. Every file's original must be durable already.

        ``procs``: the directory whose ``cgroup.procs`` names the container's processes. ``settled``: the runtime has
        signalled before, so the next signal is an update and not a creation.
        """
        known = self._prepared.get(container_id)
        fired = settled or (known is not None and known.fired)
        self._prepared[container_id] = _Prepared(tuple(writes), procs, fired=fired)

    def drop(self, container_id: str) -> None:
        """The container is gone, held, or no longer ours to bound."""
        self._prepared.pop(container_id, None)

    def clear(self) -> None:
        """Fire nothing any more (observe mode, restore)."""
        self._prepared.clear()

    def awaits(self, container_id: str) -> bool:
        """True while a prepared container's first signal has not come."""
        prepared = self._prepared.get(container_id)
        return prepared is not None and not prepared.fired

    def execute(self, container_id: str, signal_at: float) -> bool:
        """Write what is prepared for this container, now. False when nothing is."""
        prepared = self._prepared.get(container_id)
        if prepared is None:
            return False
        write_now = self._files.write_now
        errnos = [write_now(write.directory, write.file, write.text) for write in prepared.writes]
        done_at = time.monotonic()
        creation = not prepared.fired
        prepared.fired = True
        before_exec = self.not_yet_executed(prepared.procs) if creation else None
        self._report(FastResult(container_id, signal_at, done_at, prepared.writes, errnos, before_exec, creation))
        return True

    def not_yet_executed(self, procs: str) -> bool | None:
        """Whether the first process is still the runtime's own init. Asked after the last write, so True is sure."""
        try:
            pids = self._files.read(procs, "cgroup.procs").split()
            if not pids:
                return None
            return self._files.read(f"{self._proc}/{pids[0]}", "comm").startswith(RUNC_INIT)
        except OSError:
            return None
