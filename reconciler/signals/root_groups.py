"""Groups directly below the root of the CPU hierarchy, besides the pods': weight, CPU use, and waiting for a CPU.

The use is read once a second, a counter of each group (3 µs). Waiting is the pressure of the group where the kernel has
that (cgroup v2, and hybrid), else, by taskstats, that of its process that waited most. On cgroup v1 services have a
group there only with CPU accounting (systemd's ``DefaultCPUAccounting``, or a unit that has it).

Source: kernel documentation, accounting/psi, accounting/taskstats, admin-guide/cgroup-v1/cpuacct and cgroup-v2.
"""

import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, final

from msgspec.structs import replace

from cgroupfs.bounded import digits, whole
from cgroupfs.errors import SourceError
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import UNIFIED, Hierarchy
from cgroupfs.pressure import parse_totals
from cgroupfs.scheduling import feature
from cgroupfs.steps import groups_below
from cgroupfs.usage import UsageReader
from reconciler.runtime.cooperative import TimeSlice
from reconciler.runtime.own_weight import GROUP, cpu_group, top_group
from state.daemons import HRTICK, TURN_FILES, DaemonGroup, Daemons

if TYPE_CHECKING:
    from reconciler.signals.runqueue import DelaySource  # with all readers of samples

LIST_S: Final = 10.0
"""Between two listings of processes; in between only those are read that ran then."""
_SHOWN: Final = 3
"""Where no group is named, processes are listed each third time only: what is shown follows within half a minute."""
_MOST: Final = 32
"""Groups; those that the caller names come first."""
_LISTED: Final = 1024
"""Groups directly below the root, of which `_MOST` are chosen by their names."""
_PROCESSES: Final = 512
"""Of one group, at each listing."""
_DIRECTORIES: Final = 512
"""The same of the groups below it: a user's containers have one each."""
_BUSY: Final = 64
"""Of one group, between two listings."""
_RAN_NS: Final = 1_000_000
"""A process that ran and waited less between two listings is not read in between."""
_BATCH: Final = 32
_DEEPEST: Final = 6
_SHORTEST_S: Final = 0.2
_TRY_AGAIN_S: Final = 60.0
"""After taskstats was refused: the right can be given at any time."""
_LATENCY: Final = ("proc/sys/kernel/sched_latency_ns", "sys/kernel/debug/sched/latency_ns")
"""Until Linux 5.12, and from 5.13 to 6.5; later kernels put no group back."""


class _Counter(NamedTuple):
    at_s: float
    value: int


def _taskstats() -> "DelaySource":
    from reconciler.signals.taskstats import Taskstats  # only where no pressure is reported

    return Taskstats()


@final
class RootGroups:
    def __init__(
        self,
        hierarchy: Hierarchy,
        usage: UsageReader,
        kubepods: str,
        *,
        root: str = "/",
        files: FileOps = REAL,
        taskstats: "Callable[[], DelaySource]" = _taskstats,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``kubepods``: the path of all pods' group."""
        self._hierarchy = hierarchy
        self._usage = usage
        self._kubepods = kubepods
        self._root = root
        self._files = files
        self._clock = clock
        self._version = hierarchy.version("cpu")
        self._file = "cpu.shares" if self._version == 1 else "cpu.weight"
        self._waits = _ProcessWaits(hierarchy, files, taskstats)
        self._used: dict[str, _Counter] = {}
        self._pressure: dict[str, _Counter] = {}
        self.known = Daemons(latency_ns=self._read_latency(), turns=self._read_turns())
        """As read last."""
        self._listed_at = float("-inf")
        self._listings = 0

    def close(self) -> None:
        self._waits.close()

    def key(self, path: str) -> tuple[str, str, str]:
        """The ledger's key of a group's weight."""
        return "cpu", path, self._file

    async def sample(self, named: Collection[str]) -> Daemons:
        """Read them now. ``named``: paths of the groups that are to be managed.

        Of the others weight and waiting are read with the list only.
        """
        now = self._clock()
        # The first two follow each other soon: a wait is known from the second listing on.
        every_s = LIST_S if named or self._listings < 2 else _SHOWN * LIST_S
        listing = now - self._listed_at >= every_s or any(
            path not in self.known.groups and path not in self.known.refused for path in named
        )
        if listing:
            self._listed_at = now
            self._listings += 1
            self._list(named)
        groups = dict(self.known.groups)
        slices = TimeSlice()
        for path, group in groups.items():
            changes: dict[str, int | float | None] = {"use_milli": self._use_milli(path, now)}
            if listing or path in named:
                changes["weight"] = self._weight(path)
                changes["waits"] = await self._waiting(path, now, slices, whole=listing)
            groups[path] = replace(group, **changes)
            await slices.checkpoint()
        pods_weight = self._weight(top_group(self._kubepods)) if listing else self.known.pods_weight
        self.known = replace(self.known, groups=groups, pods_weight=pods_weight)
        return self.known

    def _list(self, named: Collection[str]) -> None:
        names: list[str] = []
        refused: dict[str, str] = {}
        mount = self._hierarchy.controllers.get("cpu" if self._version is not None else UNIFIED)
        if mount is None or mount.root != "/":
            why = (
                "no cpu controller is mounted" if mount is None else "only a part of the CPU hierarchy is mounted here"
            )
            refused = dict.fromkeys(named, why)
        else:
            try:
                names = self._files.groups(mount.directory, _LISTED)
            except OSError:
                refused = dict.fromkeys(named, "the CPU hierarchy cannot be read")
        pods = top_group(self._kubepods)
        own = self._own_top()
        paths = {f"/{name}" for name in names} | {path for path in named if not refused and self._exists(path)}
        found = [path for path in paths if path not in {pods, GROUP} and "kubepods" not in path]
        found.sort(key=lambda path: (path not in named, path))
        for path in named:
            if path in refused:
                continue
            if path == pods:
                refused[path] = "the pods are in it"
            elif path not in found:
                refused[path] = (
                    "no such group in the CPU hierarchy: without CPU accounting the processes of services are in the "
                    "root group, which has no weight"
                    if self._version == 1
                    else "no such group"
                )
            elif path == own:
                refused[path] = "bypassd runs in it: it needs a group of its own first (bypassctl doctor)"
            elif self._weight(path) is None:
                refused[path] = f"it has no {self._file}: the cpu controller is not enabled for it"
        before = self.known.groups
        groups = {path: before.get(path, DaemonGroup()) for path in found[:_MOST]}
        self._used = {path: last for path, last in self._used.items() if path in groups}
        self._pressure = {path: last for path, last in self._pressure.items() if path in groups}
        self._waits.keep_only(groups)
        self.known = replace(self.known, groups=groups, refused=refused)

    def _exists(self, path: str) -> bool:
        """Whether a group that is named exists: of very many the listing has a part."""
        with suppress(OSError):
            return path.count("/") == 1 and self._files.inode(self._hierarchy.directory("cpu", path)) > 0
        return False

    def _own_top(self) -> str:
        """The group directly below the root that this process is in."""
        if self._root != "/" or self._version is None:
            return ""
        try:
            with open("/proc/self/cgroup", encoding="utf-8", errors="replace", newline="\n") as file:
                return top_group(cpu_group(file.read(), self._version) or "/")
        except OSError:
            return ""

    def _weight(self, path: str) -> int | None:
        try:
            return whole(self._files.read(self._hierarchy.directory("cpu", path), self._file))
        except (OSError, ValueError, SourceError):
            return None

    def _use_milli(self, path: str, now: float) -> int | None:
        value = self._usage.cpu_ns(path)
        share = _rate(self._used, path, now, value)
        return None if share is None else round(share * 1000)

    async def _waiting(self, path: str, now: float, slices: TimeSlice, *, whole: bool) -> float | None:
        total = self._pressure_ns(path)
        if total is not None:
            share = _rate(self._pressure, path, now, total)
            return None if share is None else min(1.0, share)
        return await self._waits.sample(path, now, slices, whole=whole)

    def _pressure_ns(self, path: str) -> int | None:
        if self._hierarchy.version(UNIFIED) is None:
            return None
        try:
            text = self._files.read(self._hierarchy.directory(UNIFIED, path), "cpu.pressure")
            return parse_totals(text).some_us * 1000
        except (OSError, ValueError):
            return None

    def _read_latency(self) -> int | None:
        for name in _LATENCY:
            directory, file = os.path.split(os.path.join(self._root, name))
            try:
                return whole(self._files.read(directory, file))
            except (OSError, ValueError):
                continue
        return None

    def _read_turns(self) -> dict[str, int]:
        """Before values of ours are in them, or with those of the run before."""
        for row in TURN_FILES:
            values: dict[str, int] = {}
            for name, path in row.items():
                directory, file = os.path.split(os.path.join(self._root, path))
                with suppress(OSError, ValueError):
                    text = self._files.read(directory, file)
                    values[name] = feature(text, HRTICK) if name.endswith(HRTICK) else whole(text)
            if len(values) == len(row):
                return values
        return {}


def _rate(known: dict[str, _Counter], path: str, now: float, value_ns: int | None) -> float | None:
    """Growth a second, in seconds; None for a first reading and one that went back."""
    before = known.pop(path, None)
    if value_ns is None:
        return None
    if before is not None and now - before.at_s < _SHORTEST_S:
        known[path] = before
        return None
    known[path] = _Counter(now, value_ns)
    if before is None or value_ns < before.value:
        return None
    return (value_ns - before.value) / 1e9 / (now - before.at_s)


@final
class _ProcessWaits:
    """The waiting of a group's processes, by taskstats."""

    def __init__(self, hierarchy: Hierarchy, files: FileOps, taskstats: "Callable[[], DelaySource]") -> None:
        self._hierarchy = hierarchy
        self._files = files
        self._open = taskstats
        self._socket: DelaySource | None = None
        self._try_at = float("-inf")
        self._last: dict[str, dict[int, tuple[float, int, int]]] = {}
        """By group and process: when it was read, what it had run and waited (ns)."""
        self._busy: dict[str, Sequence[int]] = {}

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def keep_only(self, paths: Collection[str]) -> None:
        for known in (self._last, self._busy):
            for path in known.keys() - set(paths):
                del known[path]

    async def sample(self, path: str, now: float, slices: TimeSlice, *, whole: bool) -> float | None:
        """The share of the time that the process waited which waited most, all of its threads together; at most 1."""
        if self._socket is None:
            if now < self._try_at:
                return None
            self._try_at = now + _TRY_AGAIN_S
            try:
                self._socket = self._open()
            except SourceError:
                return None
        pids = await self._listed(path, slices) if whole else self._busy.get(path, ())
        before = self._last.setdefault(path, {})
        known: dict[int, tuple[float, int, int]] = {}
        ran: list[tuple[int, int]] = []
        most: float | None = None
        for begin in range(0, len(pids), _BATCH):
            batch = pids[begin : begin + _BATCH]
            try:
                replies = self._socket.query(batch)
            except (OSError, ValueError):
                self.close()
                return None
            for pid, delays in replies.items():
                known[pid] = (now, delays.run_ns, delays.wait_ns)
                last = before.get(pid)
                if last is None or now - last[0] < _SHORTEST_S or delays.wait_ns < last[2]:
                    continue
                ran.append((delays.run_ns - last[1] + delays.wait_ns - last[2], pid))
                most = max(most or 0.0, (delays.wait_ns - last[2]) / 1e9 / (now - last[0]))
            await slices.checkpoint()
        if whole:
            self._last[path] = known
            ran.sort(reverse=True)
            first = [pid for amount, pid in ran if amount >= _RAN_NS]
            # A process that is new may be the busiest.
            new = [pid for pid in known if pid not in before]
            self._busy[path] = (*first, *new)[:_BUSY]
        else:
            before |= known
        return None if most is None else min(1.0, most)

    async def _listed(self, path: str, slices: TimeSlice) -> list[int]:
        def names(directory: str, most: int) -> list[str]:
            return self._files.groups(directory, most) if directory.count("/") < deepest else []

        top = self._hierarchy.directory("cpu", path)
        deepest = top.count("/") + _DEEPEST
        pids: list[int] = []
        for directory in (top, *groups_below(names, top, _DIRECTORIES)):
            with suppress(OSError):  # removed, or a threaded group of v2
                pids += [pid for word in self._files.read(directory, "cgroup.procs").split() if (pid := digits(word))]
            if len(pids) >= _PROCESSES:
                break
            await slices.checkpoint()
        return pids[:_PROCESSES]
