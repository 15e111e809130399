"""Prepared writes, executed at the instant of the runtime's signal that a container is set up.

Between a container's mkdir and the rename of runc's ``state.json`` there are 14-30 ms, enough to classify, plan and
make the originals durable. Between that rename and the exec of the program there are as little as 7.7 ms on a busy
machine. So at the rename only the writes are left: a dictionary look-up and a few system calls within the task that
read the event, with no await, plan, thread or fsync. A later pass verifies the written values.

A container stays prepared for its whole life: ``runc update`` (the kubelet's CPU manager) ends in the same rename, and
our values are written back before any process was scheduled with the runtime's.
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
    """One prepared write: an absolute directory, a file, a text, and the file's key in the ledger."""

    directory: str
    file: str
    text: str
    key: FileKey


class FastResult(NamedTuple):
    """The outcome of one container's prepared writes. Times are monotonic seconds.

    ``errnos`` match ``writes`` by index, 0 for accepted. ``before_exec``: whether the last write preceded the exec of
    the container's program; None if undetermined, or if the program was running already (an update).
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
        """Time from the signal to the last write."""
        return self.done_at - self.signal_at


class _Prepared:
    __slots__ = ("procs", "signalled", "writes")

    def __init__(self, writes: tuple[FastWrite, ...], procs: str, *, signalled: bool) -> None:
        self.writes = writes
        self.procs = procs
        self.signalled = signalled


@final
class FastPath:
    """Prepared writes by container id. `execute` is called by the source that reads the runtime's signal."""

    def __init__(
        self,
        report: Callable[[FastResult], None],
        *,
        waits: Callable[[str], bool] = lambda _: False,
        files: FileOps = REAL,
        root: str = "/",
    ) -> None:
        """``report`` is called once per execution, after the writes; it only records and marks.

        ``waits``: whether a file of the runtime proves that a container's program was not executed yet.
        """
        self._report = report
        self._waits = waits
        self._files = files
        self._proc = os.path.join(root, "proc")
        self._prepared: dict[str, _Prepared] = {}

    def __len__(self) -> int:
        return len(self._prepared)

    def __contains__(self, container_id: str) -> bool:
        return container_id in self._prepared

    def prepare(self, container_id: str, writes: Sequence[FastWrite], *, procs: str, settled: bool) -> None:
        """Prepare these writes. Every file's original must be durable already.

        ``procs``: the directory whose ``cgroup.procs`` lists the container's processes. ``settled``: the runtime has
        signalled before, so the next signal is an update and not a creation.
        """
        earlier = self._prepared.get(container_id)
        signalled = settled or (earlier is not None and earlier.signalled)
        self._prepared[container_id] = _Prepared(tuple(writes), procs, signalled=signalled)

    def drop(self, container_id: str) -> None:
        """Drop the writes of a container that is gone, held or no longer managed."""
        self._prepared.pop(container_id, None)

    def clear(self) -> None:
        """Drop all prepared writes (observe mode, restore)."""
        self._prepared.clear()

    def awaits(self, container_id: str) -> bool:
        """True until the first signal of a prepared container."""
        prepared = self._prepared.get(container_id)
        return prepared is not None and not prepared.signalled

    def execute(self, container_id: str, signal_at: float) -> bool:
        """Execute the writes prepared for this container. False if there are none."""
        prepared = self._prepared.get(container_id)
        if prepared is None:
            return False
        write_now = self._files.write_now
        errnos = [write_now(write.directory, write.file, write.text) for write in prepared.writes]
        done_at = time.monotonic()
        creation = not prepared.signalled
        prepared.signalled = True
        before_exec = self.not_yet_executed(container_id, prepared.procs) if creation else None
        self._report(FastResult(container_id, signal_at, done_at, prepared.writes, errnos, before_exec, creation))
        return True

    def not_yet_executed(self, container_id: str, procs: str) -> bool | None:
        """Whether the first process is still the runtime's init; None if unknown.

        Read after the last write: True is sure.
        """
        try:
            pids = self._files.read(procs, "cgroup.procs").split()
            if not pids:
                return None
            init = self._files.read(f"{self._proc}/{pids[0]}", "comm").startswith(RUNC_INIT)
            return init or self._waits(container_id)
        except OSError:
            return None
