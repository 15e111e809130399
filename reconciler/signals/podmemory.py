"""Memory of each pod from its group's counters: in use, anonymous, the limit, refaults, scanning, limits hit, kills.

**Cost**: a read each of usage, statistics and limits a pod, 1-5 µs; where a refault or the anonymous memory is wanted,
``memory.stat`` is half of it. Source: kernel documentation, admin-guide/cgroup-v1/memory and admin-guide/cgroup-v2.
"""

from typing import Final, NamedTuple, final

from cgroupfs.codecs import LIMIT_V1, LIMIT_V2
from cgroupfs.kept import GroupDirectories
from reconciler.runtime.cooperative import TimeSlice
from reconciler.signals.counter_delta import CounterDelta, CounterIncrease, parse_counters, prefixes
from reconciler.signals.readers import BaseReader, SampleContext, SampleSheet, SharedReaders
from reconciler.signals.vmstat import refaulted, scanned
from state.evidence import NODE
from state.model import GroupRef, Pod

_FROM_STAT: Final = ("memory.rss", "memory.limit", "memory.refaults", "memory.scanned")
_PODS_HITS: Final = "memory.pods_hits"
SIGNALS: Final = ("memory.use", *_FROM_STAT, "memory.high_events", _PODS_HITS, "oom.kills")
_LIMITS: Final = prefixes("high", "max")
_KILLS: Final = prefixes("oom_kill")
_STILL_S: Final = 10.0
"""A pod's ``memory.stat``, for which the kernel adds up counters of each CPU, is read again after so long even if the
pod's use is the same and the node has reclaimed nothing: the use hides changes of 32 pages a CPU and of the limit.
"""
_MISSING: Final = {
    "memory.refaults": "no refault counter per group in this kernel",
    "memory.scanned": "no reclaim scan counter per group on cgroup v1",
}


class MemoryStat(NamedTuple):
    """The fields used of ``memory.stat``, of the group and all below it; None: this kernel does not have the field.

    ``limit``: as v1 writes it, the minimum of all levels.
    """

    anonymous: int | None
    refaults: int | None
    scanned: int | None
    limit: int | None


_NAMES: Final = ("workingset_refault_anon", "workingset_refault_file", "workingset_refault")
_V1: Final = prefixes("total_rss", "hierarchical_memory_limit", *(f"total_{name}" for name in _NAMES))
_V2: Final = prefixes("anon", "pgscan", *_NAMES)


def parse_memory_stat(text: str, version: int) -> MemoryStat:
    """v1 has the group's own numbers and the whole subtree's (``total_``); v2's are the subtree's."""
    anonymous, other, anon, file, both = parse_counters(text, _V1 if version == 1 else _V2)
    # One counter before 5.9, then two.
    came = both if anon is None and file is None else (anon or 0) + (file or 0)
    scanned, limit = (None, other) if version == 1 else (other, None)
    return MemoryStat(anonymous, came, scanned, limit)


class _LastStat(NamedTuple):
    """A pod's ``memory.stat`` as read at ``at_s``, and its memory then."""

    at_s: float
    use: float | None
    stat: MemoryStat


@final
class PodMemory(BaseReader):
    def __init__(self, shared: SharedReaders) -> None:
        super().__init__(shared)
        hierarchy = shared.means.hierarchy
        self._places = GroupDirectories(hierarchy, "memory")
        self._version = hierarchy.version("memory")
        self._use = "memory.usage_in_bytes" if self._version == 1 else "memory.current"
        self._counters = shared.vmstat
        self._stat = CounterDelta()
        self._events = CounterDelta()
        self._kills = CounterDelta()
        self._node_kills: int | None = None
        self._reclaimed: tuple[int, int] | None = None
        self._last: dict[int | str, _LastStat] = {}

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        if self._version is None:
            self._problems = dict.fromkeys(SIGNALS, "no memory controller is mounted")
            return
        wanted = set(scene.wanted)
        self._problems = {}
        for growth in (self._stat, self._events, self._kills):
            growth.rotate()
        killed = "oom.kills" in wanted and self._node_killed(sheet, now)
        if _PODS_HITS in wanted:
            sheet.enter(NODE, {_PODS_HITS: self._pods_hits(scene.view.kubepods)})
        stat_wanted = not wanted.isdisjoint(_FROM_STAT)
        before, self._reclaimed = self._reclaimed, self._node_reclaimed(now)
        idle = self._reclaimed is not None and self._reclaimed == before
        known, self._last = self._last, {}
        slices = TimeSlice()
        for pod in scene.view.pods.values():
            subject = f"pod:{pod.uid}"
            directory = self._places(pod.group.path)
            values: dict[str, float | None] = {}
            if "memory.use" in wanted:
                values["memory.use"] = self._number(directory, self._use)
            if stat_wanted:
                use, last = values.get("memory.use"), known.get(_key(pod.group)) if idle else None
                if last is not None and (use is None or last.use != use or self._clock() - last.at_s >= _STILL_S):
                    last = None
                self._enter_stat(directory, pod.group, wanted, values, last)
            if "memory.high_events" in wanted:
                values["memory.high_events"] = self._limits_hit(pod)
            if "oom.kills" in wanted:
                values["oom.kills"] = self._read_kills(pod, killed=killed)
            sheet.enter(subject, values)
            await slices.checkpoint()

    def _enter_stat(
        self,
        directory: str,
        group: GroupRef,
        wanted: set[str],
        values: dict[str, float | None],
        last: _LastStat | None,
    ) -> None:
        """``last``: still valid; None: the file is read."""
        key = _key(group)
        if last is None:
            try:
                stat = parse_memory_stat(self._files.read(directory, "memory.stat"), self._version or 0)
            except OSError:
                return
            last = _LastStat(self._clock(), values.get("memory.use"), stat)
        self._last[key] = last
        stat = last.stat
        values["memory.rss"] = stat.anonymous
        if "memory.limit" in wanted:
            values["memory.limit"] = self._limit(directory, stat)
        if stat.refaults is None:
            self._problems["memory.refaults"] = _MISSING["memory.refaults"]
        if stat.scanned is None:
            self._problems["memory.scanned"] = _MISSING["memory.scanned"]
        grew = self._stat.grown(key, self._clock(), (stat.refaults, stat.scanned))
        if grew is not None:
            values["memory.refaults"], values["memory.scanned"] = grew.rate(0), grew.rate(1)

    def _limit(self, directory: str, stat: MemoryStat) -> int | None:
        """The limit that binds the pod; v1 has the minimum of all levels. None: no limit, or unknown."""
        try:
            if self._version == 1:
                value = LIMIT_V1.decode(str(-1 if stat.limit is None else stat.limit))
            else:
                value = LIMIT_V2.decode(self._files.read(directory, "memory.max"))
        except (OSError, ValueError):
            return None
        return value if isinstance(value, int) else None

    def _limits_hit(self, pod: Pod) -> float | None:
        """Per second. v2: reaching memory.high or memory.max, of the pod and all in it."""
        if self._version == 2:
            try:
                text = self._files.read(self._places(pod.group.path), "memory.events")
            except OSError:
                return None
            high, most = parse_counters(text, _LIMITS)
            counts = ((high or 0) + (most or 0),)
            return _rate(self._events.grown(_key(pod.group), self._clock(), counts))
        total: float | None = None
        # ``memory.failcnt`` counts for the group only, not for what is below it.
        for group in _groups(pod):
            hit = self._number(self._places(group.path), "memory.failcnt")
            rate = _rate(self._events.grown(_key(group), self._clock(), (hit,)))
            if rate is not None:
                total = (total or 0.0) + rate
        return total

    def _pods_hits(self, kubepods: str) -> float | None:
        """How often all pods together met the limit that the kubelet has set for them, per second."""
        directory = self._places(kubepods)
        if self._version == 1:
            count = self._number(directory, "memory.failcnt")
        else:
            try:
                # Without ``.local`` it counts the limits of the groups below, too.
                count = parse_counters(self._files.read(directory, "memory.events.local"), _LIMITS)[1]
            except OSError:
                count = None
        return _rate(self._events.grown(kubepods, self._clock(), (count,)))

    def _node_reclaimed(self, now: float) -> tuple[int, int] | None:
        """The node's pages that were scanned and that were read back; None: unknown."""
        counters = self._counters.counters(now)
        scans, refaults = scanned(counters), refaulted(counters)
        return None if scans is None or refaults is None else (scans, refaults)

    def _node_killed(self, sheet: SampleSheet, now: float) -> bool:
        """Whether a process was killed since the previous pass, by the node's count (``oom_kill``, from 4.13 on)."""
        count = self._counters.counters(now).get("oom_kill")
        before, self._node_kills = self._node_kills, count
        if count is not None and before is not None and count >= before:
            sheet.put(NODE, "oom.kills", count - before)
        return count is None or count != before

    def _read_kills(self, pod: Pod, *, killed: bool) -> int | None:
        """Kills in the pod since the previous pass. A container that started since then began at 0."""
        total, known = 0, False
        # v1's ``memory.oom_control`` counts for the group only; v2 counts for the subtree.
        for group in _groups(pod) if self._version == 1 else (pod.group,):
            key = _key(group)
            # The node's own count has not moved: no group's has.
            if not killed and self._kills.knew(key):
                self._kills.carry(key)
                known = True
                continue
            directory = self._places(group.path)
            file = "memory.oom_control" if self._version == 1 else "memory.events"
            try:
                count = parse_counters(self._files.read(directory, file), _KILLS)[0]
            except OSError:
                continue
            if count is None:
                self._problems["oom.kills"] = "no OOM kill counter per group in this kernel (added in 4.13)"
                continue
            first = not self._kills.knew(key)
            grew = self._kills.grown(key, self._clock(), (count,))
            if grew is not None:
                known = True
                total += grew.by[0] or 0
            # A new container of a pod that was known: all of its kills are since the previous pass.
            elif first and group is not pod.group and self._kills.knew(_key(pod.group)):
                total += count
        return total if known else None

    def _number(self, directory: str, file: str) -> int | None:
        try:
            return int(self._files.read(directory, file))
        except (OSError, ValueError):
            return None


def _key(group: GroupRef) -> int | str:
    return group.inode or group.path


def _groups(pod: Pod) -> tuple[GroupRef, ...]:
    """The pod's own and its containers', but for the sandbox, which the runtime gives no limit."""
    return (pod.group, *(container.group for container in pod.workload))


def _rate(grew: CounterIncrease | None) -> float | None:
    return None if grew is None else grew.rate(0)
