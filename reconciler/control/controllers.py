"""cgroup v2: a controller that was taken out of ``cgroup.subtree_control`` on the way to the containers.

A group has a controller's files only where every directory above passes the controller on. systemd takes out what its
units do not use whenever it realizes one below its own slices: every CPU set below no longer exists then, unnoticed by
kubelet and runtime. Each whole pass checks the directories, and puts the controller back in kubepods and below.

Source: kernel documentation, admin-guide/cgroup-v2 (top-down constraint, no internal process constraint).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, final

import trio

from cgroupfs.errors import errno_name
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.naming import Layout, QosClass
from reconciler.actuators.cgroup.control_files import SUBTREE_CONTROL
from reconciler.runtime.cooperative import TimeSlice
from reconciler.runtime.format import first_of, plural
from reconciler.runtime.stints import in_worker
from state.model import Pod, SourceStatus

NAME: Final = "cgroup controllers"
NEEDED: Final = ("cpu", "cpuset", "memory")
"""What a kubelet enables for every pod, once, at its start."""
_OFTEN: Final = 3
"""A directory that lost its controllers this often within `_OFTEN_S` is only reported: another program removes them."""
_OFTEN_S: Final = 3600.0
_SHOWN: Final = 3


@final
class ControllerCheck:
    """Finds directories that pass a controller on no longer, and enables it again in kubepods."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        layout: Layout,
        *,
        may_write: Callable[[], bool],
        alert: Callable[[str], None],
        files: FileOps = REAL,
    ) -> None:
        """``may_write``: whether anything may be changed now. ``alert`` is called with what was put back."""
        self._hierarchy = hierarchy
        self._layout = layout
        self._may_write = may_write
        self._alert = alert
        self._files = files
        self._repaired: dict[str, list[float]] = {}
        self._missing: list[tuple[str, str]] = []
        """Directory, and the text of its problem."""

    async def check(self, pods: Mapping[str, Pod]) -> bool:
        """Check every directory and repair what is safe; True when something was put back."""
        missing: list[tuple[str, str]] = []
        repaired: list[str] = []
        slices = TimeSlice()
        # Where the pod's own group has its processes, as in gVisor, the kernel passes no controller on.
        on_v2 = any(self._hierarchy.version(name) == 2 for name in NEEDED)
        below = [pod.group.path for pod in pods.values() if on_v2 and pod.containers and pod.sandbox is None]
        for path, inside in directories(self._layout, below):
            lacks = lacking(self._hierarchy, path, self._files)
            if lacks:
                what = not_passed_on(path, lacks)
                # Directories above kubepods are systemd's and the kubelet's.
                failed = await self._repair(path, lacks) if inside else "not bypassd's to change"
                if failed:
                    missing.append((path, f"{what}: {failed}"))
                else:
                    repaired.append(what)
            await slices.checkpoint()
        if prefix := without_prefix(self._hierarchy, self._files):
            missing.append(("/", prefix))
        self._missing = missing
        there = {path for path, _ in directories(self._layout, below)}
        self._repaired = {path: times for path, times in self._repaired.items() if path in there}
        if repaired:
            self._alert(f"{first_of(repaired, _SHOWN)}; put back")
        return bool(repaired)

    def status(self) -> SourceStatus:
        """Whether every directory passes the controllers on."""
        detail = first_of([text for _, text in self._missing], _SHOWN) or "passed on to every pod"
        if self._missing:
            detail += "; its settings are not in force there"
        return SourceStatus(name=NAME, ok=not self._missing, age_s=0.0, detail=detail)

    def problems(self, path: str) -> list[str]:
        """The problems of the directories above one group, and of its own."""
        return [text for at, text in self._missing if at in ("/", path) or path.startswith(f"{at}/")]

    async def _repair(self, path: str, lacks: list[str]) -> str:
        """Put the controllers back; why not, empty: done.

        That moves no process, and gives each group what it would have without a setting. The kernel refuses it (EBUSY)
        where processes are in the directory itself.
        """
        if not self._may_write():
            return "nothing may be written now"
        now = trio.current_time()
        times = self._repaired.setdefault(path, [])
        times[:] = [at for at in times if now - at < _OFTEN_S]
        if len(times) >= _OFTEN:
            return f"taken out again {plural(len(times), 'time')} within an hour"
        directory = self._hierarchy.directory(lacks[0], path)
        try:
            # All of them or none: the kernel takes a line as a whole. In a thread: it makes the controller's part of
            # every group below, and waits for forks and exits.
            await in_worker(self._files.write, directory, SUBTREE_CONTROL, " ".join(f"+{name}" for name in lacks))
        except OSError as exc:
            return f"cannot put it back: {errno_name(exc.errno or 0)}"
        times.append(now)
        return ""


def directories(layout: Layout, pods: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Every directory that has groups below it, and whether it is kubepods or in it.

    From the root down: the kernel enables a controller only where the directory above passes it on.
    """
    parts = layout.kubepods.strip("/").split("/")
    for depth in range(len(parts)):
        yield (f"/{'/'.join(parts[:depth])}" if depth else "/"), False
    yield from ((path, True) for path in (layout.kubepods, layout.qos(QosClass.BURSTABLE)))
    yield layout.qos(QosClass.BESTEFFORT), True
    yield from ((path, True) for path in pods)


def lacking(hierarchy: Hierarchy, path: str, files: FileOps = REAL) -> list[str]:
    """The controllers that a directory has and does not pass on; none on v1, and of what cannot be read."""
    names = [name for name in NEEDED if hierarchy.version(name) == 2]
    if not names:
        return []
    # All of v2 is one hierarchy.
    directory = hierarchy.directory(names[0], path)
    try:
        passed = files.read(directory, SUBTREE_CONTROL).split()
        has = files.read(directory, "cgroup.controllers").split()
    except OSError:
        return []
    return [name for name in names if name in has and name not in passed]


def without_prefix(hierarchy: Hierarchy, files: FileOps = REAL) -> str:
    """Why no CPU set can be set where v1's cpuset was mounted with ``noprefix``; empty: it was not."""
    if hierarchy.version("cpuset") != 1:
        return ""
    try:
        names = files.files(hierarchy.directory("cpuset", "/"))
    except OSError:
        return ""
    if "cpus" not in names or "cpuset.cpus" in names:
        return ""
    return "cpuset is mounted with noprefix: its files are called cpus and mems, which runtimes do not use either"


def not_passed_on(path: str, lacks: Sequence[str]) -> str:
    return f"{' and '.join(lacks)} {'is' if len(lacks) == 1 else 'are'} not in {SUBTREE_CONTROL} of {path}"
