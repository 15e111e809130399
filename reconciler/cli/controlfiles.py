"""The control files of pods' groups in a capture: which are taken, and how an archive's are read from its stream.

A node of 500 pods has 108,000 control files. A capture takes those that bypassd reads or writes, 42,000; a plan reads a
part of these from the archive's stream into memory, and makes no file of them.
"""

import errno
import os
import re
from typing import Final, final

from cgroupfs.files import REAL, Directory
from cgroupfs.knobs import CATALOG

_KUBEPODS: Final = re.compile(r"(?:\A|-)kubepods(?:\.slice)?\Z")
SETTINGS: Final = frozenset(
    name for knob in CATALOG.values() for version in (1, 2) if (name := knob.file(version)) is not None
)
"""The files that bypassd sets."""
PLANNED: Final = SETTINGS | {"memory.current"}
"""Those of them, and of the counters, that a plan reads in pods' groups."""
_COUNTERS: Final = (
    *("cpuacct.usage", "cpu.stat", "cpu.pressure", "cpuset.effective_cpus", "cpuset.effective_mems"),
    *("cpuset.cpus.effective", "cpuset.mems.effective"),
    *("memory.current", "memory.usage_in_bytes", "memory.stat", "memory.numa_stat", "memory.pressure"),
    *("memory.events", "memory.events.local", "memory.failcnt", "memory.oom_control", "memory.use_hierarchy"),
    *("memory.swap.current", "memory.memsw.usage_in_bytes"),
    *("io.stat", "io.pressure", "blkio.throttle.io_serviced", "blkio.throttle.io_service_bytes"),
    *("cgroup.controllers", "cgroup.subtree_control", "cgroup.type", "cgroup.events", "cgroup.freeze"),
    *("freezer.state", "freezer.parent_freezing", "pids.current"),
)
CAPTURED: Final = SETTINGS | frozenset(_COUNTERS)
"""What a capture takes of each pod's groups."""
LARGEST: Final = 64 << 10
"""Bytes that are taken of one control file."""
_MOST_MEMORY: Final = 128 << 20
"""Bytes of an archive's values that are kept in memory; what exceeds it is unpacked like any other file."""


def below_kubepods(parts: list[str]) -> bool:
    """Whether a file's path leads through kubepods to a group below it."""
    at = next((index for index, part in enumerate(parts) if _KUBEPODS.search(part)), None)
    return at is not None and len(parts) > at + 2


@final
class ArchivedControls:
    """Control files of an archive, by full path: read from memory, every other file from the file system.

    It is a `FileOps` of a copied node, where nothing is written.
    """

    def __init__(self) -> None:
        self._texts: dict[str, bytes] = {}
        self._bytes = 0

    def has_room(self, path: str, size: int) -> bool:
        """Whether a file of so many bytes can be kept here."""
        return size <= LARGEST and self._bytes + size + len(path) <= _MOST_MEMORY

    def put(self, path: str, data: bytes) -> None:
        """Keep one file."""
        self._bytes += len(data) + len(path)
        self._texts[path] = data

    def read(self, directory: Directory, file: str) -> str:
        """The whole file."""
        data = self._texts.get(f"{directory}/{file}")
        return REAL.read(directory, file) if data is None else data.decode()

    def inode(self, directory: Directory) -> int:
        """The directory's inode number."""
        return REAL.inode(directory)

    def groups(self, directory: Directory, most: int | None = None) -> list[str]:
        """Names of the directories inside, in no order; at most so many."""
        return REAL.groups(directory, most)

    def files(self, directory: Directory) -> list[str]:
        """Names of the files inside, in no order; of a pod's groups only those that were unpacked."""
        return REAL.files(directory)

    def write(self, directory: Directory, file: str, text: str) -> None:
        """Errors: `OSError`, always."""
        del text
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), f"{directory}/{file}")

    def write_now(self, directory: Directory, file: str, text: str) -> int:
        """The errno, always."""
        del directory, file, text
        return errno.EROFS
