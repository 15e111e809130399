"""The kernel's cumulative counters of a group, and the rates between two readings of them.

A group is identified by its inode: a later namesake never inherits the old one's last reading. A value that the kernel
does not report remains None; None is not zero.

Units: CPU in thousandths of a CPU (``milli``), time in nanoseconds, memory in bytes, shares 0.0-1.0. Source: kernel
documentation, admin-guide/cgroup-v1/cpuacct, admin-guide/cgroup-v2 and scheduler/sched-bwc.
"""

import re
import time
from collections.abc import Callable, Iterable
from typing import Final, final

from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.bounded import whole
from cgroupfs.codecs import Version
from cgroupfs.errors import CgroupError, CgroupGoneError, InputError, cgroup_error, translated
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import UNIFIED, Hierarchy
from cgroupfs.kept import FdCache
from cgroupfs.knobs import CATALOG
from cgroupfs.lines import lines_of

SHORTEST_S: Final = 0.05
"""Between two samples: closer ones say more about the kernel's tick (1-10 ms) than about a group or a CPU."""
_DROPPABLE: Final = frozenset({"inactive_file", "active_file"})
_WRITTEN_FIRST: Final = frozenset({"dirty", "writeback", "file_dirty", "file_writeback"})
"""The names on cgroup v1, then those on v2."""
_NAMES: Final = "|".join(sorted(_DROPPABLE | _WRITTEN_FIRST))
_CACHE_LINES: Final[dict[Version, re.Pattern[str]]] = {
    1: re.compile(rf"^total_({_NAMES}) (\d{{1,20}})$", re.MULTILINE | re.ASCII),
    2: re.compile(rf"^({_NAMES}) (\d{{1,20}})$", re.MULTILINE | re.ASCII),
}
"""Of the group and all below it."""
_KEPT_OPEN: Final = 64
_ROTATE_S: Final = 1.0
"""So often `FdCache` looks for what was not read for a while, such as a removed group's, and closes it in the end."""
_LEAST_INTERVAL_S: Final = 0.005
"""Of a rate: what two closer readings differ by is the time of the reading itself."""


class UsageCounters(Struct, frozen=True, kw_only=True):
    """One reading. All but the memory only grow while the group exists."""

    at_s: float  # on the monotonic clock
    cpu_ns: int | None = None
    periods: int | None = None
    throttled_periods: int | None = None
    throttled_ns: int | None = None
    memory_bytes: int | None = None


class UsageRates(Struct, frozen=True, kw_only=True):
    """Rates between two readings."""

    interval_s: float
    cpu_milli: int | None = None
    # Of the bandwidth periods, those in which the group hit its quota (0.0 without a quota).
    throttled_share: float | None = None
    throttled_milli: int | None = None  # CPUs' worth of time that its run queues were stopped for that, thousandths
    memory_bytes: int | None = None


class MemoryUsage(Struct, frozen=True, kw_only=True):
    """A group's memory and that of all below it."""

    limit_bytes: int | None  # None: no limit of its own
    used_bytes: int
    # Page cache on the reclaim lists that is clean, so that the kernel can take it at once. Shared memory, which only
    # swap can take, is not among it.
    droppable_bytes: int = 0

    @property
    def kept_bytes(self) -> int:
        """Memory that remains in use after dropping page cache."""
        return max(0, self.used_bytes - self.droppable_bytes)


def rates_between(before: UsageCounters, after: UsageCounters) -> UsageRates | None:
    """The rates of the time between two readings; None when there was (next to) none."""
    interval_s = after.at_s - before.at_s
    if interval_s < _LEAST_INTERVAL_S:
        return None
    cpu_ns = grown(before.cpu_ns, after.cpu_ns)
    periods = grown(before.periods, after.periods)
    hit = grown(before.throttled_periods, after.throttled_periods)
    waited_ns = grown(before.throttled_ns, after.throttled_ns)
    return UsageRates(
        interval_s=interval_s,
        cpu_milli=_milli(cpu_ns, interval_s),
        throttled_share=None if periods is None or hit is None else min(1.0, hit / max(1, periods)),
        throttled_milli=_milli(waited_ns, interval_s),
        memory_bytes=after.memory_bytes,
    )


def grown(before: int | None, after: int | None) -> int | None:
    """Increase of a counter; None: unknown."""
    # Less than before: the counter was restarted. Its growth is unknown, never negative.
    if before is None or after is None or after < before:
        return None
    return after - before


def _milli(ns: int | None, interval_s: float) -> int | None:
    return None if ns is None else round(ns / interval_s / 1_000_000)


@final
class UsageReader:
    """Reads a group's counters, from whichever hierarchy has them on this node."""

    def __init__(
        self, hierarchy: Hierarchy, *, ops: FileOps = REAL, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._hierarchy = hierarchy
        self._ops = ops
        self._kept = FdCache(_KEPT_OPEN) if ops is REAL else None
        """The files that `cpu_ns` reads."""
        self._rotated_at = 0.0
        self._clock = clock
        # A cgroup2 group counts CPU time with or without the cpu controller.
        self._acct_v1 = hierarchy.version("cpuacct") == 1
        self._bandwidth = "cpu" if hierarchy.version("cpu") == 1 else UNIFIED
        self._memory_version: Version = 1 if hierarchy.version("memory") == 1 else 2
        v1 = self._memory_version == 1
        self._memory_file = "memory.usage_in_bytes" if v1 else "memory.current"
        self._limit_file = "memory.limit_in_bytes" if v1 else "memory.max"

    def read(self, path: str, inode: int = 0) -> UsageCounters:
        """One reading; what is missing (a controller, a directory not made yet) is None.

        Errors: `CgroupGoneError` when ``inode`` (not 0) is no longer what has this path, or nothing at all is left.
        """
        directory = self._check_inode(path, inode)
        cpu = self._read_cpu(path)
        memory_bytes = self._number("memory", path, self._memory_file)
        if cpu.cpu_ns is None and memory_bytes is None and cpu.periods is None:
            raise CgroupGoneError(directory, "no counter is left")
        return replace(cpu, memory_bytes=memory_bytes)

    def read_cpu(self, path: str, inode: int = 0) -> UsageCounters:
        """As `read`, of the CPU only: for reading every container once a second (two files on v1, one on v2).

        Errors: `CgroupGoneError` as in `read`.
        """
        directory = self._check_inode(path, inode)
        cpu = self._read_cpu(path)
        if cpu.cpu_ns is None and cpu.periods is None:
            raise CgroupGoneError(directory, "no counter is left")
        return cpu

    def cpu_ns(self, path: str) -> int | None:
        """CPU time of a group alone, for reading once a second; None when it was removed or cannot be read."""
        if self._kept is not None and not 0.0 <= (now := time.monotonic()) - self._rotated_at < _ROTATE_S:
            self._rotated_at = now
            self._kept.rotate()
        try:
            if self._acct_v1:
                return self._number("cpuacct", path, "cpuacct.usage", self._kept)
            return _thousandfold(self._table(UNIFIED, path, "cpu.stat", self._kept).get("usage_usec"))
        except (CgroupError, InputError):
            return None

    def memory_bytes(self, path: str) -> int | None:
        """Memory in use by a group and all below it, with page cache; None when it was removed or cannot be read."""
        try:
            return self._number("memory", path, self._memory_file)
        except (CgroupError, InputError):
            return None

    def memory_use(self, path: str, *, enough_bytes: int | None = None) -> MemoryUsage | None:
        """A group's memory and the droppable part of it; None when it was removed or cannot be read.

        ``enough_bytes``: of a group with so much left below its limit, or no limit, the page cache is not read.
        """
        try:
            used = self._number("memory", path, self._memory_file)
            limit_text = self._text("memory", path, self._limit_file)
            if used is None or limit_text is None:
                return None
            limit = CATALOG["memory.max"].decode(limit_text, self._memory_version)
            assert limit is None or isinstance(limit, int)
            memory_usage = MemoryUsage(limit_bytes=limit, used_bytes=used)
            if enough_bytes is not None and (limit is None or limit - used >= enough_bytes):
                return memory_usage
            # Six of some forty lines, from the directory of each group that has memory of BE work.
            lines = _CACHE_LINES[self._memory_version].findall(self._text("memory", path, "memory.stat") or "")
        except (CgroupError, InputError, ValueError):
            return None
        droppable = sum(int(number) if name in _DROPPABLE else -int(number) for name, number in lines)
        # Usage and statistics were read one after the other.
        return replace(memory_usage, droppable_bytes=min(used, max(0, droppable)))

    def _check_inode(self, path: str, inode: int) -> str:
        directory = self._hierarchy.identity_directory(path)
        if inode:
            with translated(directory, "look at"):
                number = self._ops.inode(directory)
            if number != inode:
                raise CgroupGoneError(directory, f"inode {inode} is gone, {number} has its name")
        return directory

    def _read_cpu(self, path: str) -> UsageCounters:
        at_s = self._clock()
        cpu_ns = self._number("cpuacct", path, "cpuacct.usage") if self._acct_v1 else None
        stat = self._table(self._bandwidth, path, "cpu.stat")
        if not self._acct_v1:
            usage = stat if self._bandwidth == UNIFIED else self._table(UNIFIED, path, "cpu.stat")
            cpu_ns = _thousandfold(usage.get("usage_usec"))
        return UsageCounters(
            at_s=at_s,
            cpu_ns=cpu_ns,
            periods=stat.get("nr_periods"),
            throttled_periods=stat.get("nr_throttled"),
            # Nanoseconds on v1, microseconds on v2.
            throttled_ns=stat.get("throttled_time", _thousandfold(stat.get("throttled_usec"))),
        )

    def _text(self, controller: str, path: str, file: str, kept: FdCache | None = None) -> str | None:
        if self._hierarchy.version(controller) is None:
            return None
        directory = self._hierarchy.directory(controller, path)
        try:
            return (self._ops if kept is None else kept).read(directory, file)
        except OSError as exc:
            error = cgroup_error(f"{directory}/{file}", exc, "read")
            if isinstance(error, CgroupGoneError):
                return None
            raise error from exc

    def _number(self, controller: str, path: str, file: str, kept: FdCache | None = None) -> int | None:
        text = self._text(controller, path, file, kept)
        if text is None:
            return None
        try:
            return whole(text)
        except ValueError as exc:
            raise InputError(f"{self._hierarchy.directory(controller, path)}/{file}", text, "a number") from exc

    def _table(self, controller: str, path: str, file: str, kept: FdCache | None = None) -> dict[str, int]:
        text = self._text(controller, path, file, kept)
        if text is None:
            return {}
        try:
            return {key: whole(value) for key, value in (line.split(" ") for line in lines_of(text))}
        except ValueError as exc:
            where = f"{self._hierarchy.directory(controller, path)}/{file}"
            raise InputError(where, text, "lines of a name and a number") from exc


@final
class QuietGroups:
    """Which directories' groups have used no CPU time since the round before: their counters need not be read again.

    A directory's CPU time is that of all below it, so a round reads some directories instead of every group in them.
    `begin` it before the groups are read: what runs meanwhile shows in the next round. What a group used remains in its
    counter, so a round that misses the last tick's time loses nothing.
    """

    def __init__(self, usage: UsageReader) -> None:
        self._usage = usage
        self._before: dict[str, int] = {}
        self._quiet: frozenset[str] = frozenset()

    def begin(self, directories: Iterable[str]) -> None:
        """Begin a round: read these directories; of a directory that cannot be read nothing is known."""
        now = {path: ns for path in sorted(set(directories)) if (ns := self._usage.cpu_ns(path)) is not None}
        self._quiet = frozenset(path for path, ns in now.items() if self._before.get(path) == ns)
        self._before = now

    def is_quiet(self, directory: str) -> bool:
        """Whether no group below it ran between the last two rounds, both of which read it."""
        return directory in self._quiet


def _thousandfold(value: int | None) -> int | None:
    return None if value is None else value * 1000
