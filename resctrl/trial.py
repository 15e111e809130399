"""One control group for a trial: the smallest share of the last-level cache, and how much of it a process occupies."""

import mmap
import os
from contextlib import suppress
from typing import Final, Self, final

from cgroupfs.errors import AgentError, CgroupRefusedError, cgroup_error
from cgroupfs.lines import lines_of
from resctrl.capability import ResctrlStatus, read_capability
from resctrl.files import REAL, GroupFiles
from resctrl.groups import PREFIX, ControlGroups

NAME: Final = f"{PREFIX}prove-cache"
_L3: Final = "L3"
_OCCUPANCY: Final = "llc_occupancy"
_SWEPT: Final = 64 << 20
"""Bytes that the process reads over and over: more than the smallest share of any cache."""


@final
class CacheTrial:
    """Use as a context: the group is removed after it. Errors: `CgroupRefusedError` where there can be none."""

    def __init__(self, root: str = "/", files: GroupFiles = REAL) -> None:
        self._files = files
        self._capability = read_capability(root)
        self._cache = next((cache for cache in self._capability.caches if cache.name == _L3), None)
        monitoring = self._capability.monitoring
        if self._capability.status is not ResctrlStatus.READY or self._capability.root is None:
            raise CgroupRefusedError("resctrl", self._capability.reason)
        if self._cache is None or monitoring is None or _OCCUPANCY not in monitoring.features:
            raise CgroupRefusedError("resctrl", "no L3 shares, or their occupancy is not counted")
        self._groups = ControlGroups(self._capability.root, files)
        self.share_bytes = 0

    def __enter__(self) -> Self:
        if self._cache is None:
            raise AssertionError("checked at construction")
        self._groups.create(NAME)
        try:
            ways = max(1, self._cache.min_ways)
            low = (1 << ways) - 1
            wanted = {_L3: dict.fromkeys(self._cache.domains, low)}
            self._groups.set_schemata(NAME, wanted, self._capability)
            self.share_bytes = self._size()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def add(self, pid: int) -> None:
        """Put a process of one thread into the group. Errors: `CgroupError`."""
        directory = self._groups.path(NAME)
        try:
            self._files.write(directory, "tasks", str(pid))
        except OSError as exc:
            raise cgroup_error(f"{directory}/tasks", exc, f"write '{pid}'") from exc

    def sweep(self) -> None:
        """Read more than the share, for ever: the work of the planted process."""
        area = mmap.mmap(-1, _SWEPT)
        while True:
            for start in range(0, _SWEPT, mmap.PAGESIZE):
                area[start : start + mmap.PAGESIZE].count(b"x")

    def occupied_bytes(self) -> int:
        """What the group occupies in all caches together. Errors: `CgroupError` where it cannot be read now."""
        directory = f"{self._groups.path(NAME)}/mon_data"
        total = 0
        for domain in self._files.listdir(directory):
            if domain.startswith("mon_L3_"):
                try:
                    total += int(self._files.read(f"{directory}/{domain}", _OCCUPANCY))
                except (OSError, ValueError) as exc:
                    raise CgroupRefusedError(f"{directory}/{domain}", "occupancy is not available") from exc
        return total

    def _size(self) -> int:
        """The share of all caches together. Source: kernel documentation, filesystems/resctrl, ``size``."""
        for line in lines_of(self._files.read(self._groups.path(NAME), "size")):
            name, _, parts = line.strip().partition(":")
            if name == _L3:
                return sum(int(part.partition("=")[2]) for part in parts.split(";"))
        raise CgroupRefusedError(self._groups.path(NAME), "size has no L3")

    def _remove(self) -> None:
        with suppress(AgentError):  # `remove_left_groups` finds one that remains
            self._groups.remove(NAME)


def remove_left_groups(root: str = "/", files: GroupFiles = REAL) -> list[str]:
    """Remove the group that a killed trial left; its name, if there was one."""
    try:
        capability = read_capability(root)
        groups = ControlGroups(capability.root or "", files)
        return [NAME] if capability.root is not None and NAME in groups.ours() and groups.remove(NAME) else []
    except AgentError:
        return []


def group_left(root: str = "/") -> list[str]:
    """The group that a killed trial left; its path, if there is one."""
    try:
        capability = read_capability(root)
    except AgentError:
        return []
    path = f"{capability.root}/{NAME}"
    return [path] if capability.root is not None and os.path.isdir(path) else []
