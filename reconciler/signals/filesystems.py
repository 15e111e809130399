"""Free space of the node's file systems: ``nodefs`` (the kubelet's) and ``imagefs`` (the runtime's).

**Cost**: one thread every ten seconds a file system. Source: statvfs(3).
"""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple, final

from reconciler.runtime.format import duration
from reconciler.signals.background_job import BackgroundJob
from reconciler.signals.readers import BaseReader, SampleContext, SampleSheet, SharedReaders

SIGNALS: Final = ("fs.available", "fs.size", "fs.inodes_free", "fs.inodes")
_EVERY_S: Final = 10.0
_HANGS_S: Final = 5.0
"""A call that takes longer is a problem of its file system."""


class FreeSpace(NamedTuple):
    """``inodes`` 0: the file system has as many as it needs (btrfs); ``at_s``: monotonic, time of the call."""

    size: int
    available: int
    inodes: int
    inodes_free: int
    at_s: float


def statvfs(path: str, clock: Callable[[], float] = time.monotonic) -> FreeSpace:
    """Blocks until the file system's server replies. Errors: `OSError`."""
    at_s = clock()
    result = os.statvfs(path)
    return FreeSpace(
        result.f_blocks * result.f_frsize,
        result.f_bavail * result.f_frsize,  # without root's reserve, as the kubelet counts
        result.f_files,
        result.f_favail,
        at_s,
    )


@final
class FileSystems(BaseReader):
    def __init__(self, shared: SharedReaders, free_space: Callable[[str], FreeSpace] = statvfs) -> None:
        super().__init__(shared)
        prefix = shared.means.root.rstrip("/")
        self._directories = {name: f"{prefix}{path}" for name, path in shared.means.filesystems.items()}
        self._free_space = free_space
        # No pass waits for a file system whose server is down; a thread each, so that it does not hide the others.
        self._jobs = {name: BackgroundJob[FreeSpace](f"fs:{name}") for name in self._directories}
        self._spaces: dict[str, FreeSpace] = {}
        self._started: dict[str, float] = {}
        self._failed: dict[str, str] = {}

    def problems(self) -> Mapping[str, str]:
        message = "; ".join(self._failed[name] for name in sorted(self._failed))
        return dict.fromkeys(SIGNALS, message) if message else {}

    async def aclose(self) -> None:
        """Blocked threads are left behind; they hold no file of the agent."""

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        at_s = self._clock()
        for name, job in self._jobs.items():
            self._take(name, job)
            started = self._started.get(name)
            if (started is None or at_s - started >= _EVERY_S) and job.start(
                partial(self._free_space, self._directories[name])
            ):
                self._started[name] = at_s
            space = self._spaces.get(name)
            if space is not None:
                _enter(sheet, f"fs:{name}", space, max(0.0, at_s - space.at_s))

    def _take(self, name: str, job: BackgroundJob[FreeSpace]) -> None:
        path = self._directories[name]
        try:
            space = job.take()
        except OSError as exc:
            self._spaces.pop(name, None)
            self._failed[name] = f"{name} ({path}): {exc.strerror}"
            return
        if space is not None:
            self._spaces[name] = space
            self._failed.pop(name, None)
        elif job.busy_s() > _HANGS_S:
            self._failed[name] = f"{name} ({path}) no answer for {duration(job.busy_s())}"


def _enter(sheet: SampleSheet, subject: str, space: FreeSpace, age_s: float) -> None:
    sheet.put(subject, "fs.size", space.size, age_s=age_s)
    sheet.put(subject, "fs.available", space.available, age_s=age_s)
    if space.inodes:
        sheet.put(subject, "fs.inodes", space.inodes, age_s=age_s)
        sheet.put(subject, "fs.inodes_free", space.inodes_free, age_s=age_s)
