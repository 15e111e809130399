"""Memory of each pod from its group's counters: in use, anonymous, the limit, refaults, scanning, limits hit, kills.

v1 counts limits hit (``memory.failcnt``) and kills (``memory.oom_control``) by group, not for what is below it, so
those of the containers are added up; v2 counts both for a whole subtree. v1 does not tell scanning by group at all.

**Cost**: a read each of usage, statistics and limits a pod, 1-5 µs; where a refault or the anonymous memory is wanted,
``memory.stat`` alone is half of it. Kills are only looked for when the node's own count (/proc/vmstat) has moved.
Source: kernel documentation, admin-guide/cgroup-v1/memory and admin-guide/cgroup-v2.
"""

import time
from collections.abc import Callable, Collection, Mapping
from typing import Final, final

from cgroupfs.codecs import LIMIT_V1, LIMIT_V2
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from reconciler.signals.growth import Grown, Growth, numbers
from reconciler.signals.readers import Scene, Sheet
from reconciler.signals.vmstat import VmStat
from reconciler.slices import Slices
from state.evidence import NODE
from state.model import GroupRef, Pod

NAME: Final = "memory"
_FROM_STAT: Final = ("memory.rss", "memory.limit", "memory.refaults", "memory.scanned")
SIGNALS: Final = ("memory.use", *_FROM_STAT, "memory.high_events", "oom.kills")
_REFAULTS: Final = (
    ("workingset_refault_anon", "workingset_refault_file"),
    ("workingset_refault",),
    ("total_workingset_refault_anon", "total_workingset_refault_file"),
    ("total_workingset_refault",),
)
_UNTOLD: Final = {
    "memory.refaults": "this kernel does not count refaults by group",
    "memory.scanned": "cgroup v1 does not count by group what reclaim looks at",
}


def refaults(stat: Mapping[str, int]) -> int | None:
    """Pages that came back, of a group and all below it: one counter before 5.9, then two."""
    # v1 has both the group's own and the whole subtree's; v2's are the subtree's.
    choices = _REFAULTS[2:] if "total_rss" in stat else _REFAULTS[:2]
    for names in choices:
        found = [stat[name] for name in names if name in stat]
        if found:
            return sum(found)
    return None


def scanned(stat: Mapping[str, int]) -> int | None:
    """Pages that reclaim looked at; v2 only."""
    return stat.get("pgscan")


@final
class PodMemory:
    """A `Reader`."""

    name = NAME
    signals: Collection[str] = SIGNALS

    def __init__(
        self,
        hierarchy: Hierarchy,
        counters: VmStat,
        *,
        files: FileOps = REAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hierarchy = hierarchy
        self._version = hierarchy.version("memory")
        self._counters = counters
        self._files = files
        self._clock = clock
        self._stat = Growth()
        self._events = Growth()
        self._kills = Growth()
        self._node_kills: int | None = None
        self._problems: dict[str, str] = {}

    def problems(self) -> Mapping[str, str]:
        return self._problems

    async def aclose(self) -> None:
        """Holds nothing."""

    async def read(self, scene: Scene, sheet: Sheet, now: float) -> None:
        if self._version is None:
            self._problems = dict.fromkeys(SIGNALS, "no memory controller is mounted")
            return
        wanted = set(scene.wanted)
        self._problems = {}
        for growth in (self._stat, self._events, self._kills):
            growth.turn()
        killed = "oom.kills" in wanted and self._node_killed(sheet, now)
        slices = Slices()
        for pod in scene.view.pods.values():
            subject = f"pod:{pod.uid}"
            directory = self._hierarchy.directory("memory", pod.group.path)
            if "memory.use" in wanted:
                use = self._number(directory, "memory.usage_in_bytes" if self._version == 1 else "memory.current")
                if use is not None:
                    sheet.put(subject, "memory.use", use)
            if wanted.intersection(_FROM_STAT):
                self._read_stat(subject, directory, pod.group, wanted, sheet)
            if "memory.high_events" in wanted and (grew := self._limits_hit(pod)) is not None:
                sheet.put(subject, "memory.high_events", grew)
            if "oom.kills" in wanted:
                self._read_kills(subject, pod, sheet, killed=killed)
            await slices.checkpoint()

    def _read_stat(self, subject: str, directory: str, group: GroupRef, wanted: set[str], sheet: Sheet) -> None:
        try:
            stat = numbers(self._files.read(directory, "memory.stat"))
        except OSError:
            return
        anonymous = stat.get("total_rss", stat.get("anon"))
        if anonymous is not None:
            sheet.put(subject, "memory.rss", anonymous)
        if "memory.limit" in wanted and (limit := self._limit(directory, stat)) is not None:
            sheet.put(subject, "memory.limit", limit)
        counts = (refaults(stat), scanned(stat))
        grew = self._stat.grown(_key(group), self._clock(), counts)
        for index, signal in enumerate(("memory.refaults", "memory.scanned")):
            if counts[index] is None:
                self._problems[signal] = _UNTOLD[signal]
            elif grew is not None and (rate := grew.rate(index)) is not None:
                sheet.put(subject, signal, rate)

    def _limit(self, directory: str, stat: Mapping[str, int]) -> int | None:
        """What binds the pod; v1 tells the least of all levels. None: nothing does, or it is not known."""
        try:
            if self._version == 1:
                value = LIMIT_V1.decode(str(stat.get("hierarchical_memory_limit", -1)))
            else:
                value = LIMIT_V2.decode(self._files.read(directory, "memory.max"))
        except (OSError, ValueError):
            return None
        return value if isinstance(value, int) else None

    def _limits_hit(self, pod: Pod) -> float | None:
        """Per second. v2: reaching memory.high or memory.max, of the pod and all in it."""
        if self._version == 2:
            try:
                events = numbers(self._files.read(self._hierarchy.directory("memory", pod.group.path), "memory.events"))
            except OSError:
                return None
            counts = (events.get("high", 0) + events.get("max", 0),)
            return _rate(self._events.grown(_key(pod.group), self._clock(), counts))
        total: float | None = None
        for group in _groups(pod):
            hit = self._number(self._hierarchy.directory("memory", group.path), "memory.failcnt")
            rate = _rate(self._events.grown(_key(group), self._clock(), (hit,)))
            if rate is not None:
                total = (total or 0.0) + rate
        return total

    def _node_killed(self, sheet: Sheet, now: float) -> bool:
        """Whether anything was killed since the pass before, as far as the node tells (``oom_kill``, from 4.13 on)."""
        count = self._counters.counters(now).get("oom_kill")
        before, self._node_kills = self._node_kills, count
        if count is not None and before is not None and count >= before:
            sheet.put(NODE, "oom.kills", count - before)
        return count is None or count != before

    def _read_kills(self, subject: str, pod: Pod, sheet: Sheet, *, killed: bool) -> None:
        """Kills in the pod since the pass before. A container that came since then began at none."""
        total, known = 0, False
        # v2 counts for the subtree: the containers' own counts are in the pod's.
        for group in _groups(pod) if self._version == 1 else (pod.group,):
            key = _key(group)
            if not killed and self._kills.knew(key):
                self._kills.carry(key)
                known = True
                continue
            directory = self._hierarchy.directory("memory", group.path)
            file = "memory.oom_control" if self._version == 1 else "memory.events"
            try:
                count = numbers(self._files.read(directory, file)).get("oom_kill")
            except OSError:
                continue
            if count is None:
                self._problems["oom.kills"] = "this kernel does not count kills by group (4.13 does)"
                continue
            first = not self._kills.knew(key)
            grew = self._kills.grown(key, self._clock(), (count,))
            if grew is not None:
                known = True
                total += grew.by[0] or 0
            elif first and group is not pod.group and self._kills.knew(_key(pod.group)):
                total += count
        if known:
            sheet.put(subject, "oom.kills", total)

    def _number(self, directory: str, file: str) -> int | None:
        try:
            return int(self._files.read(directory, file))
        except (OSError, ValueError):
            return None


def _key(group: GroupRef) -> int | str:
    return group.inode or group.path


def _groups(pod: Pod) -> tuple[GroupRef, ...]:
    return (pod.group, *(container.group for container in pod.containers))


def _rate(grew: Grown | None) -> float | None:
    return None if grew is None else grew.rate(0)
