"""Every write to a control file below one group, with who wrote it, as the kernel reports it, not the agent."""

import threading
import time
from collections.abc import Iterable
from typing import Final, NamedTuple, Self

import trio

from cgroupfs.attribution import FanotifyWatch
from tests.e2e.mounts import hierarchies

VALUES: Final = frozenset(
    {"cpuset.cpus", "cpu.shares", "cpu.cfs_quota_us", "cpu.cfs_period_us", "memory.limit_in_bytes"}
)


class Written(NamedTuple):
    """One write. ``at``: monotonic seconds, when it was read; two writes of one process within it are one."""

    at: float
    group: str
    file: str
    pid: int

    @property
    def place(self) -> tuple[str, str]:
        return self.group, self.file


class WriteLog:
    """Collects while the block runs, in a thread of its own. Writes of this process are left out.

    Errors: `SourceError` where the kernel does not report writers.
    """

    def __init__(self, below: str) -> None:
        texts = hierarchies()
        mounts = [texts[name] for name in ("cpuset", "cpu", "memory") if name in texts]
        self._watch = FanotifyWatch(mounts, files=VALUES, below=below)
        self._entries: list[Written] = []
        self._lock = threading.Lock()
        self._token: trio.lowlevel.TrioToken | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._collect,), name="writes", daemon=True)
        self.lost = False
        """The kernel's queue ran over: counts are too low."""

    def __enter__(self) -> Self:
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            self._token.run_sync_soon(self._watch.close)
        self._thread.join()

    def since(self, began: float, until: float = float("inf")) -> list[Written]:
        """What was written from one moment of the monotonic clock on, in order."""
        with self._lock:
            return [written for written in self._entries if began <= written.at < until]

    async def _collect(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._begun.set()
        while True:
            try:
                batch = await self._watch.next_batch()
            except trio.ClosedResourceError:
                return
            now = time.monotonic()
            with self._lock:
                self.lost = self.lost or any(write.lost for write in batch)
                self._entries += [
                    Written(now, write.group, write.file, write.writer.pid) for write in batch if not write.lost
                ]


def count(entries: Iterable[Written]) -> dict[tuple[str, str], int]:
    """How often each file was written."""
    numbers: dict[tuple[str, str], int] = {}
    for written in entries:
        numbers[written.place] = numbers.get(written.place, 0) + 1
    return numbers
