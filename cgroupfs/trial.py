"""Groups for a trial of the kernel: each next to the pods' tree, with a name of ours, and removed whatever happens.

A group that a killed program left is found by its name. Only processes within groups of these names are ever ended.
"""

import os
import signal
import time
from collections.abc import Iterable
from typing import Final, Self, final

from cgroupfs.errors import CgroupError, cgroup_error
from cgroupfs.files import REAL
from cgroupfs.hierarchy import Hierarchy

PREFIX: Final = "bypassd-prove-"
_SUBTREE: Final = "cgroup.subtree_control"
"""Only on cgroup v2."""
_PATIENCE_S: Final = 2.0
"""How long killed processes may take to exit, before the group remains."""
_PAUSE_S: Final = 0.01


@final
class TrialGroup:
    """One group in the hierarchies of some controllers. Use as a context: it ends its processes and is removed."""

    def __init__(self, hierarchy: Hierarchy, name: str, controllers: Iterable[str]) -> None:
        self._hierarchy, self._name, self._controllers = hierarchy, name, tuple(controllers)
        self.path = f"/{PREFIX}{name}"
        self._directories = list(dict.fromkeys(hierarchy.directory(item, self.path) for item in self._controllers))

    def __enter__(self) -> Self:
        self._make()
        return self

    def child(self, name: str) -> "TrialGroup":
        """A new group within this one, with the same controllers, CPUs and memory nodes. Removed with it.

        Errors: `CgroupError`.
        """
        inner = TrialGroup(self._hierarchy, f"{self._name}/{name}", self._controllers)
        for directory in self._directories:
            if os.path.exists(f"{directory}/{_SUBTREE}"):
                offered = set(self._text(directory, "cgroup.controllers").split())
                for controller in offered & set(self._controllers):
                    self._put(directory, _SUBTREE, f"+{controller}")
        inner._make()
        return inner

    def __exit__(self, *_: object) -> None:
        self._remove()

    def write(self, controller: str, file: str, text: str) -> None:
        """Write one control file. Errors: `CgroupError`, also where the parent does not enable the controller."""
        self._put(self._hierarchy.directory(controller, self.path), file, text)

    def read(self, controller: str, file: str) -> str:
        """Read one control file. Errors: `CgroupError`."""
        return self._text(self._hierarchy.directory(controller, self.path), file)

    def add(self, pid: int) -> None:
        """Put a process into the group, in all its hierarchies. Errors: `CgroupError`."""
        for directory in self._directories:
            self._put(directory, "cgroup.procs", str(pid))

    def _make(self) -> None:
        try:
            for directory in self._directories:
                os.mkdir(directory, 0o755)
            for directory in self._directories:
                # On v1 no process can be put into a group without CPUs and memory nodes.
                for file in ("cpuset.cpus", "cpuset.mems"):
                    if os.path.exists(f"{directory}/{file}") and not os.path.exists(f"{directory}/{_SUBTREE}"):
                        self._put(directory, file, self._text(os.path.dirname(directory), file).strip())
        except OSError as exc:
            self._remove()
            raise cgroup_error(self.path, exc, "make the group") from exc
        except CgroupError:
            self._remove()
            raise

    @staticmethod
    def _put(directory: str, file: str, text: str) -> None:
        try:
            REAL.write(directory, file, text)
        except OSError as exc:
            raise cgroup_error(f"{directory}/{file}", exc, f"write '{text}'") from exc

    @staticmethod
    def _text(directory: str, file: str) -> str:
        try:
            return REAL.read(directory, file)
        except OSError as exc:
            raise cgroup_error(f"{directory}/{file}", exc, "read") from exc

    def _remove(self) -> None:
        for directory in self._directories:
            _empty_and_remove(directory)


def remove_left(hierarchy: Hierarchy) -> list[str]:
    """Remove what a killed trial left, and end its processes. Returns the directories that it removed."""
    return [directory for directory in list_left(hierarchy) if _empty_and_remove(directory)]


def list_left(hierarchy: Hierarchy) -> list[str]:
    """The directories of our names, each once, in all hierarchies: controllers may share one."""
    found: list[str] = []
    for mount in hierarchy.mounts():
        root = mount.path("/").rstrip("/")
        found += [f"{root}/{name}" for name in _within(root) if name.startswith(PREFIX)]
    return found


def _empty_and_remove(directory: str) -> bool:
    """End every process of the group and of those within it, and remove them. False: it is still there."""
    for name in _within(directory):
        _empty_and_remove(f"{directory}/{name}")
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            pids = REAL.read(directory, "cgroup.procs").split()
        except OSError:
            pids = []
        for pid in pids:
            if pid == "0":
                continue  # outside this pid namespace; for kill(2) it is the caller's own process group
            try:
                os.kill(int(pid), signal.SIGKILL)
            except (ProcessLookupError, ValueError):
                continue
        try:
            os.rmdir(directory)
        except FileNotFoundError:
            return True
        except OSError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_S)
        else:
            return True


def _within(directory: str) -> Iterable[str]:
    try:
        return REAL.groups(directory)
    except OSError:
        return ()
