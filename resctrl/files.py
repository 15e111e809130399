"""The only access to resctrl's files: that of `cgroupfs.files`, and making and removing groups.

The same code runs on the kernel (`REAL`) and on a strict model of it. On hardware a ``mkdir`` and a ``schemata`` write
send interrupts to other CPUs, and a ``tasks`` file walks every thread of the machine: all of it must stay out of the
loop.
"""

import os
from typing import Final, Protocol, final

from cgroupfs.files import REAL as REAL_FILES


class GroupFiles(Protocol):
    """What is done to resctrl's files. Directories are absolute paths. All raise plain `OSError`, as the kernel does.

    Every `FileOps` that can make and remove directories is one.
    """

    def read(self, directory: str, file: str) -> str:
        """The whole file."""

    def write(self, directory: str, file: str, text: str) -> None:
        """One write of the whole value."""

    def inode(self, directory: str) -> int:
        """The directory's inode number: distinguishes a group from a later one of the same name."""

    def listdir(self, directory: str) -> list[str]:
        """Names of all that is inside, in no order."""

    def groups(self, directory: str) -> list[str]:
        """Names of the directories inside, in no order."""

    def mkdir(self, path: str) -> None:
        """Make a group."""

    def rmdir(self, path: str) -> None:
        """Remove a group; its threads go back to the default group, of a monitoring group to the group around it."""


@final
class RealGroupFiles:
    def read(self, directory: str, file: str) -> str:
        return REAL_FILES.read(directory, file)

    def write(self, directory: str, file: str, text: str) -> None:
        REAL_FILES.write(directory, file, text)

    def inode(self, directory: str) -> int:
        return REAL_FILES.inode(directory)

    def listdir(self, directory: str) -> list[str]:
        return os.listdir(directory)

    def groups(self, directory: str) -> list[str]:
        return REAL_FILES.groups(directory)

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)


REAL: Final[GroupFiles] = RealGroupFiles()
"""The running kernel."""
