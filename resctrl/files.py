"""The only access to resctrl's files: that of `cgroupfs.files`, making and removing groups, and the mount.

The same code runs on the kernel (`REAL`) and on a strict model of it. On hardware a ``mkdir`` and a ``schemata`` write
send interrupts to other CPUs, and a ``tasks`` file walks every thread of the machine: all of it must remain out of the
loop. Only bypassd's own mount is ever unmounted: that deletes every group, also those of others.
"""

import os
from collections.abc import Sequence
from typing import Final, Protocol, final

from cgroupfs.errors import CgroupDeniedError, cgroup_error
from cgroupfs.files import ReadOps, RealFiles, mount, unmount
from cgroupfs.lines import lines_of


class GroupFiles(ReadOps, Protocol):
    """What is done to resctrl's files. Every `FileOps` that can list, make and remove directories is one."""

    def write(self, directory: str, file: str, text: str) -> None:
        """One write of the whole value."""

    def inode(self, directory: str) -> int:
        """The directory's inode number: distinguishes a group from a later one of the same name."""

    def listdir(self, directory: str) -> list[str]:
        """Names of all that is inside, in no order."""

    def mkdir(self, path: str) -> None: ...

    def rmdir(self, path: str) -> None:
        """Remove a group; its threads go back to the default group, of a monitoring group to the group around it."""


@final
class RealGroupFiles(RealFiles):
    def listdir(self, directory: str) -> list[str]:
        return os.listdir(directory)

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)


REAL: Final[GroupFiles] = RealGroupFiles()
"""The running kernel."""


SOURCE: Final = "bypassd"
"""Source of bypassd's mount; other mounts have ``resctrl``, ``none`` or the like.

The kernel shows it in the mount table and ignores it. The mount's number does not identify it: the kernel reuses
numbers. There is one mount at most, as the kernel refuses a second one anywhere (EBUSY).
"""


class Mounter(Protocol):
    """What is done to mounts. ``place`` is the directory, root prefix included. All raise `CgroupError`."""

    def mount(self, place: str, options: Sequence[str]) -> None: ...

    def unmount(self, place: str) -> None: ...

    def source(self, place: str) -> str | None:
        """The source of the resctrl mount there; None when there is none."""

    def sees_the_host(self) -> bool:
        """Whether the daemon's mounts are those of process 1; True if that is unknown."""


def unseen(place: str, options: Sequence[str]) -> CgroupDeniedError:
    """Why a process with mounts of its own does not mount it, and where it must be mounted."""
    # From a container, or a systemd unit with ``ProtectSystem``, the host would not have the mount, and it would vanish
    # with all groups when that process ends.
    return CgroupDeniedError(
        place,
        "mount: this process has a private mount namespace; mount resctrl on the host instead, in "
        f"/etc/fstab: resctrl {place} resctrl {','.join(options) or 'defaults'} 0 0",
    )


@final
class RealMounter:
    def __init__(self, root: str = "/") -> None:
        self._table = os.path.join(root, "proc/self/mountinfo")
        self._host = os.path.join(root, "proc/1/ns/mnt")

    def mount(self, place: str, options: Sequence[str]) -> None:
        if not self.sees_the_host():
            raise unseen(place, options)
        text = ",".join(options)
        if code := mount(SOURCE, place, "resctrl", text):
            raise cgroup_error(place, OSError(code, "mount"), f"mount resctrl ({text})")

    def unmount(self, place: str) -> None:
        if code := unmount(place):
            raise cgroup_error(place, OSError(code, "umount"), "unmount resctrl")

    def source(self, place: str) -> str | None:
        try:
            with open(self._table, encoding="utf-8", errors="replace", newline="\n") as file:
                lines = lines_of(file.read())
        except OSError:
            return None
        for line in lines:
            before, _, after = line.partition(" - ")
            fields = before.split(" ")
            # ``place`` has the root prefix, the table may not have it.
            if after.startswith("resctrl ") and len(fields) > 4 and place.endswith(fields[4]):
                return after.split(" ")[1]
        return None

    def sees_the_host(self) -> bool:
        try:
            return os.readlink(self._host) == os.readlink("/proc/self/ns/mnt")
        except OSError:
            return True
