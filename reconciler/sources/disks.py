"""The whole disks behind the names that the configuration gives them, read from /sys and the mount table.

A name is a device's ``major:minor``, a path below /dev, a kernel name such as ``nvme0n1``, or any directory: then it is
the disk below the directory's file system. A partition means its disk. A device-mapper or md device is a disk of its
own to the kernel.
"""

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from typing import Final, final

import trio

from cgroupfs.errors import SourceError
from cgroupfs.lines import lines_of
from reconciler.runtime.format import duration
from reconciler.runtime.stints import in_worker
from reconciler.runtime.wakeup import WakeUp
from reconciler.sources.checkpoints import DirtyMarker
from state.disk import Disk
from state.model import SourceStatus

NAME: Final = "disks"
_REFRESH_S: Final = 30.0
"""Disks and mounts change."""
_LONGEST_S: Final = 2.0
"""For one name."""
_NUMBERS: Final = re.compile(r"\d+:\d+", re.ASCII)
_KERNEL_NAME: Final = re.compile(r"[A-Za-z0-9_.!-]+", re.ASCII)
_IN_USE: Final = re.compile(r"\[([^]]+)\]")


def find_disk(name: str, root: str = "/") -> Disk:
    """The whole disk behind a name. ``root``: prefix of all paths.

    Errors: `SourceError` naming what exists instead.
    """
    numbers = _numbers(name, root)
    below = os.path.join(root, "sys/dev/block", numbers)
    if not os.path.isdir(below):
        raise SourceError(NAME, f"{name}: no block device {numbers}")
    text = os.path.realpath(below)
    # The kernel takes limits of whole disks only: ENODEV for a partition, on v1 and v2.
    if os.path.exists(os.path.join(text, "partition")):
        text = os.path.dirname(text)
    device = _text(os.path.join(text, "dev"))
    if not _NUMBERS.fullmatch(device):
        raise SourceError(NAME, f"{name}: {os.path.basename(text)} has no device number")
    # The kernel writes the slash of a name such as cciss/c0d0 as an exclamation mark.
    kernel = os.path.basename(text).replace("!", "/")
    message = _text(os.path.join(text, "queue/scheduler"))
    match = _IN_USE.search(message)
    return Disk(device=device, kernel=kernel, scheduler=match[1] if match else message)


def _numbers(name: str, root: str) -> str:
    if _NUMBERS.fullmatch(name):
        return name
    if not name.startswith("/"):
        if _KERNEL_NAME.fullmatch(name) and (numbers := _text(os.path.join(root, "sys/class/block", name, "dev"))):
            return numbers
        raise SourceError(NAME, f"{name}: expected a directory, a path below /dev, a disk's name or its major:minor")
    path = root.rstrip("/") + name
    try:
        status = os.stat(path)
    except OSError as exc:
        raise SourceError(NAME, f"{name}: {exc.strerror}") from exc
    if stat.S_ISBLK(status.st_mode):
        return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    if not stat.S_ISDIR(status.st_mode):
        raise SourceError(NAME, f"{name}: neither a block device nor a directory")
    # Major number 0: a device number of the file system's own, of no disk.
    if os.major(status.st_dev):
        return f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    return _mounted_device(name, f"0:{os.minor(status.st_dev)}", root)


def _mounted_device(name: str, number: str, root: str) -> str:
    """The device that a file system was mounted from, where its device number is not a disk's (btrfs)."""
    kind = "a file system"
    for line in lines_of(_text(os.path.join(root, "proc/self/mountinfo"))):
        fields, _, rest = line.partition(" - ")
        parts = rest.split(" ")
        if len(parts) < 2 or fields.split(" ")[2:3] != [number]:
            continue
        kind = parts[0]
        try:
            status = os.stat(root.rstrip("/") + parts[1]) if parts[1].startswith("/dev/") else None
        except OSError:
            continue
        if status is not None and stat.S_ISBLK(status.st_mode):
            return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    raise SourceError(NAME, f"{name}: is on {kind}, which has no single disk")


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            return file.read().strip()
    except OSError:
        return ""


def find_disks(names: Iterable[str], root: str = "/") -> tuple[dict[str, Disk], list[str]]:
    """The disks behind names, and why other names have none. Waits for file systems that do not answer."""
    disks: dict[str, Disk] = {}
    problems = []
    for name in sorted(set(names)):
        try:
            disks[name] = find_disk(name, root)
        except SourceError as exc:
            problems.append(str(exc))
    return disks, problems


@final
class DiskSource:
    """The whole disks behind the configured names, and why other names have none."""

    def __init__(self, names: Callable[[], Iterable[str]], dirty: DirtyMarker, *, root: str = "/") -> None:
        self.found: Mapping[str, Disk] = {}
        self._names = names
        self._dirty = dirty
        self._root = root
        self.problems: tuple[str, ...] = ()
        self.again = WakeUp()
        """Set when the names have changed."""
        self._lanes: dict[str, trio.CapacityLimiter] = {}

    async def refresh(self) -> None:
        """Read again; all pods are reconciled when something is different now."""
        before = self.found
        disks: dict[str, Disk] = {}
        problems: list[str] = []
        for name in sorted(set(self._names())):
            # A directory may be on a file system whose server is down: that keeps one thread, and its own name only.
            lane = self._lanes.setdefault(name, trio.CapacityLimiter(1))
            try:
                with trio.fail_after(_LONGEST_S):
                    disks[name] = await in_worker(find_disk, name, self._root, limiter=lane, abandon_on_cancel=True)
            except SourceError as exc:
                problems.append(str(exc))
            except trio.TooSlowError:
                problems.append(f"{NAME}: {name}: no answer within {duration(_LONGEST_S)}")
                if name in before:
                    disks[name] = before[name]
        self.found, self.problems = disks, tuple(problems)
        if disks != before:
            self._dirty.mark_all(NAME)

    def status(self) -> SourceStatus:
        message = "; ".join(self.problems) or ", ".join(f"{name} is {disk.title}" for name, disk in self.found.items())
        return SourceStatus(name=NAME, ok=not self.problems, age_s=0.0, detail=message or "none configured")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Reports its start when it has read once, so that the first reconcile pass has the disks."""
        await self.refresh()
        task_status.started()
        while True:
            await self.again.wait(_REFRESH_S)
            await self.refresh()
