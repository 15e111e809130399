"""Private groups in the cgroup2 hierarchy of a node that uses v1, for readings that v1 does not have.

A kernel always has the cgroup2 hierarchy, mounted or not, and every process is in its root until it is moved. A process
can be put into a group there without leaving its v1 groups: pressure, for one, is counted for it then. Nothing is
limited. Everything here blocks and belongs in a thread: the first attach after a while takes the kernel 8-20 ms.

Source: kernel documentation, admin-guide/cgroup-v2.
"""

import errno
import os
from collections.abc import Iterable
from typing import Final, NamedTuple, final

from cgroupfs.errors import CgroupError, cgroup_error
from cgroupfs.files import REAL, mount, unmount
from cgroupfs.hierarchy import UNIFIED, Hierarchy
from cgroupfs.lines import lines_of

POINT: Final = "/run/bypassd/cgroup2"
PREFIX: Final = "bypassd-psi-"
_DETACH: Final = 2
"""``MNT_DETACH``. Source: umount2(2)."""
_ROUNDS: Final = 5
"""Attempts to empty a group whose processes fork."""
_ENDED: Final = frozenset({errno.ESRCH, errno.ENOENT})


def private_tree(hierarchy: Hierarchy) -> "PrivateTree | None":
    """For a node whose pods are in v1 groups; None where the cgroup2 hierarchy is the one that pods are in."""
    if hierarchy.trigger == UNIFIED:
        return None
    mounted = hierarchy.directory(UNIFIED, "/") if hierarchy.writable(UNIFIED) else None
    return PrivateTree(mounted)


class AttachResult(NamedTuple):
    """Result of attaching processes.

    ``foreign``: the group of one that was not moved; None: all are attached, or ended.
    """

    moved: int
    foreign: str | None


@final
class PrivateTree:
    """The groups, one a pod, directly below the root.

    ``mounted``: where the hierarchy is mounted already; None: mount it at ``point``. ``prefix``: of our groups' names.
    """

    def __init__(self, mounted: str | None = None, *, point: str = POINT, prefix: str = PREFIX) -> None:
        self._mounted = mounted
        self._point = point
        self._prefix = prefix

    @property
    def root(self) -> str:
        return self._mounted or self._point

    def open(self) -> None:
        """Have the hierarchy mounted. Errors: `CgroupError` when the kernel refuses."""
        # A second mount without the first one's options (nsdelegate, memory_recursiveprot) would remove them from it.
        # Source: kernel/cgroup/cgroup.c, apply_cgroup_root_flags.
        if self._mounted is not None or self._is_mounted():
            return
        try:
            os.makedirs(self._point, mode=0o700, exist_ok=True)
        except OSError as exc:
            raise cgroup_error(self._point, exc, "make the directory") from exc
        if code := mount("bypassd", self._point, "cgroup2"):
            raise cgroup_error(self._point, OSError(code, "mount"), "mount cgroup2")

    def close(self) -> None:
        """Unmount the hierarchy, if the mount is ours. Errors: `CgroupError`."""
        if self._mounted is not None or not self._is_mounted():
            return
        # A program that reads all mounts of the node (an exporter, another agent) may be using it.
        code = unmount(self._point)
        if code == errno.EBUSY:
            code = unmount(self._point, _DETACH)
        if code:
            raise cgroup_error(self._point, OSError(code, "umount"), "unmount cgroup2")
        try:
            os.rmdir(self._point)
        except OSError as exc:
            raise cgroup_error(self._point, exc, "remove the directory") from exc

    def directory(self, uid: str) -> str:
        """A pod's group, made or not."""
        # Not deeper: each level costs every task switch of its tasks a little.
        return f"{self.root}/{self._prefix}{uid}"

    def uids(self) -> frozenset[str]:
        """The pods that have a group. Errors: `CgroupError`."""
        try:
            names = REAL.groups(self.root)
        except OSError as exc:
            raise cgroup_error(self.root, exc, "list") from exc
        return frozenset(name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix))

    def pids(self, uid: str) -> frozenset[int]:
        """The processes in a pod's group; none when it has no group."""
        try:
            return frozenset(map(int, REAL.read(self.directory(uid), "cgroup.procs").split()))
        except OSError:
            return frozenset()

    def attach(self, uid: str, pids: Iterable[int], path: str) -> AttachResult:
        """Put processes into the pod's group, made if need be. ``path``: the pod's group in the v1 hierarchies.

        A process that is not (or no longer) in that group, or that is elsewhere in cgroup2, is left where it is.
        Errors: `CgroupError` when the kernel refuses one.
        """
        directory = self.directory(uid)
        moved, foreign = 0, None
        for pid in pids:
            place = self._place(pid, path)
            if place is None or place == f"/{self._prefix}{uid}":
                continue
            if place != "/":
                # Systemd's, the runtime's or another program's.
                foreign = place
                continue
            try:
                os.makedirs(directory, mode=0o755, exist_ok=True)
                REAL.write(directory, "cgroup.procs", str(pid))
            except OSError as exc:
                if exc.errno not in _ENDED:
                    raise cgroup_error(f"{directory}/cgroup.procs", exc, f"write '{pid}'") from exc
            else:
                moved += 1
        return AttachResult(moved, foreign)

    def _place(self, pid: int, path: str) -> str | None:
        """Where a process is in the cgroup2 hierarchy; None when it has ended or is not in the pod's v1 group."""
        try:
            text = REAL.read(f"/proc/{pid}", "cgroup")
        except OSError:
            return None
        place, inside = None, False
        for line in lines_of(text):
            number, _, rest = line.partition(":")
            controllers, _, group = rest.partition(":")
            if number == "0" and not controllers:
                place = group
            elif f"{path}/" in f"{group}/":
                inside = True
        return place if inside else None

    def remove(self, uid: str) -> None:
        """Put a group's processes back into the root, and remove it. Errors: `CgroupError`."""
        directory = self.directory(uid)
        for left in range(_ROUNDS, 0, -1):
            # 0 is a process outside this pid namespace; written, it moves the writer itself.
            for pid in self.pids(uid) - {0}:
                try:
                    REAL.write(self.root, "cgroup.procs", str(pid))
                except OSError as exc:
                    if exc.errno not in _ENDED:
                        raise cgroup_error(f"{self.root}/cgroup.procs", exc, f"write '{pid}'") from exc
            try:
                os.rmdir(directory)
            except FileNotFoundError:
                return
            except OSError as exc:
                # One of them has forked meanwhile: the child is in the group.
                if exc.errno != errno.EBUSY or left == 1:
                    raise cgroup_error(directory, exc, "remove") from exc
            else:
                return

    def clear(self, only: str | None = None) -> dict[str, CgroupError | None]:
        """Remove every private group (``only``: one pod's) and the mount; returns the results by uid."""
        done: dict[str, CgroupError | None] = {}
        for uid in sorted(self.uids()):
            if only in {None, uid}:
                try:
                    self.remove(uid)
                except CgroupError as exc:
                    done[uid] = exc
                else:
                    done[uid] = None
        if only is None:
            self.close()
        return done

    def traces(self) -> bool:
        """Whether an earlier run may have left something: a mount, a group with processes, a group that is seen."""
        if self._is_mounted():
            return True
        if self._mounted is not None:
            return bool(self.uids())
        # Of a hierarchy that is not mounted only the processes in its groups show.
        try:
            pids = [name for name in os.listdir("/proc") if name.isdecimal()]
        except OSError:
            return False
        return any(self._is_ours(pid) for pid in pids)

    def _is_ours(self, pid: str) -> bool:
        try:
            return f"\n0::/{self._prefix}" in f"\n{REAL.read(f'/proc/{pid}', 'cgroup')}"
        except OSError:
            return False

    def _is_mounted(self) -> bool:
        """Whether the mount at the private place exists: one of an earlier run is bypassd's as well."""
        try:
            lines = lines_of(REAL.read("/proc/self", "mountinfo"))
        except OSError:
            return False
        return any(line.split(" ")[4:5] == [self._point] and " - cgroup2 " in line for line in lines)
