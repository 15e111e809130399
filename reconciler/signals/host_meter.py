"""Measures host workloads with the readers of pods' signals: each group is given to them as if it were a pod's.

What has no CPU counter of its own (a user's processes; on cgroup v1 a unit without CPU accounting) is measured by its
processes' times. Nothing is written.

**Cost**: a tenth of a millisecond a group and pass (64 entries with 256 groups: 23 ms), 2 to 3 µs a process (of a
user's one read of 10 µs more); a listing of a group's processes every five seconds, of the groups every ten, and of all
processes of the machine (20 µs each) every fifteen where an entry names a user.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, final

from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.naming import QosClass
from cgroupfs.steps import ancestors
from reconciler.runtime.cooperative import TimeSlice
from reconciler.signals.counter_delta import CounterDelta
from reconciler.signals.host_config import HostKind, HostMatch, HostWorkloadConfig, parse_match
from reconciler.signals.host_groups import HostGroup, HostGroupFinder, HostGroupsFound, outermost
from reconciler.signals.host_processes import MOST, HostProcesses
from reconciler.signals.podcpu import PodCpu
from reconciler.signals.poddisk import PodDisk
from reconciler.signals.podmemory import PodMemory
from reconciler.signals.psi import Psi
from reconciler.signals.readers import Reader, ReaderContext, SampleContext, SampleSheet, SharedReaders
from reconciler.signals.runqueue import DelaySource, RunQueue
from reconciler.signals.taskstats import Taskstats
from state.evidence import Sample, host_subject, pod_subject
from state.hosts import CountsAs, HostValue, HostWorkload, HostWorkloads
from state.model import Classification, GroupRef, NodeView, Pod, PodClass
from state.topology import Topology

SIGNALS: Final = (
    *("cpu.use", "cpu.throttled", "cpu.throttled_milli", "cpu.wait", "cpu.wait_milli", "cpu.wait_own", "cpu.delay"),
    *("cpu.pressure", "cpu.pressure_full", "memory.pressure", "memory.pressure_full", "io.pressure"),
    *("io.pressure_full", "memory.use", "memory.rss", "memory.limit", "memory.refaults"),
    *("disk.read", "disk.write", "disk.ops"),
)
"""What is read of a host workload, as far as the kernel has it."""
_SUMS: Final = frozenset(
    {"cpu.use", "cpu.throttled_milli", "cpu.wait_milli", "cpu.wait_own", "memory.use", "memory.rss"}
    | {"memory.refaults", "disk.read", "disk.write", "disk.ops"}
)
_FIND_S: Final = 10.0
_FIND_USERS_S: Final = 15.0
_SOON_S: Final = 2.0
"""After a group has vanished."""
_LIST_S: Final = 5.0
"""Between two listings of a group's processes."""
_CPU_READS: Final = 1024
"""Threads whose CPUs are read at a listing, of all parts together: 15 µs each."""
_FEW: Final = 8
"""Processes of a group that are read at least."""
_BY_TIMES: Final = 0.8
"""Confidence where the CPU use is that of processes: short ones, and the last part of each, are missed."""
_SHARED_PAGES: Final = 0.5
"""Confidence of resident memory: pages that processes share count in each."""
_NOWHERE: Final = "/bypassd-no-such-group"
"""The readers take the pods' directories from the view: no host workload is below them."""


class _Part(NamedTuple):
    """A group of an entry, or a user's processes (no group)."""

    entry: str
    pod: Pod
    group: HostGroup | None


class HostVictim(NamedTuple):
    """A group of a victim's entry, or a user's processes, as `reconciler.signals.onlinewait.OnlineWait` measures it.

    ``cpus``: where they may run; empty: not known.
    """

    pod: Pod
    pids: tuple[int, ...]
    cpus: CpuSet


class _Listing(NamedTuple):
    started: dict[int, int]
    total: int
    again_at: float
    outside: bool = False


@final
class _Lists:
    """The processes by part, as `reconciler.signals.runqueue.RunQueue` takes them."""

    def __init__(self) -> None:
        self.known: dict[str, _Listing] = {}

    @property
    def outside(self) -> bool:
        return any(known.outside for known in self.known.values())

    def get(self, pod: Pod, _now: float) -> tuple[int, ...]:
        known = self.known.get(pod.uid)
        return () if known is None else tuple(known.started)

    def ended(self, uid: str) -> None:
        """List it again, and soon."""
        if (known := self.known.get(uid)) is not None:
            self.known[uid] = known._replace(again_at=0.0)

    def keep_only(self, uids: Iterable[str]) -> None:
        kept = set(uids)
        self.known = {uid: known for uid, known in self.known.items() if uid in kept}


@final
class HostMeter:
    """Finds, lists and reads the host workloads of one configuration; `read` once a second."""

    def __init__(
        self,
        entries: Mapping[str, HostWorkloadConfig],
        hierarchy: Hierarchy,
        kubepods: str,
        *,
        root: str = "/",
        files: FileOps = REAL,
        taskstats: Callable[[], DelaySource] = Taskstats,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``kubepods``: the path of all pods' group. ``root``: the prefix of all paths."""
        self._entries = entries
        self._matches: dict[str, HostMatch] = {name: parse_match(entry.match) for name, entry in entries.items()}
        self._clock = clock
        self._finder = HostGroupFinder(hierarchy, kubepods, files, root)
        self._processes = HostProcesses(kubepods, files, root)
        self._most = max(_FEW, MOST // max(1, len(entries)))
        shared = self._shared = SharedReaders(ReaderContext(hierarchy=hierarchy, root=root, files=files, clock=clock))
        self._lists = _Lists()
        cpu = shared.reader(PodCpu)
        self._waits = RunQueue(shared, self._lists, cpu, taskstats)
        # `Psi` without private groups, which are made for pods only.
        self._readers: tuple[Reader, ...] = (cpu, Psi(shared, cpu), PodMemory(shared), PodDisk(shared))
        self._view = NodeView(
            topology=Topology(online=CpuSet([0])),
            versions=hierarchy.versions(),
            kubepods=_NOWHERE,
            besteffort=_NOWHERE,
            burstable=_NOWHERE,
        )
        self._ticks = CounterDelta()
        self._tick_hz, self._page_bytes = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
        self._found: dict[str, HostGroupsFound] = {}
        self._parts: dict[str, _Part] = {}
        """By key: the entry, and after a blank the group's path; the entry alone for a user's processes."""
        self._users: dict[str, tuple[range, ...]] = {}
        """The user ids of each entry of a user; empty: the node has no such user."""
        self._grouped: set[int] = set()
        """Those of users' processes that are in the groups of entries, too."""
        self._cpus: dict[str, CpuSet] = {}
        """Where the processes of each part may run."""
        self._find_at = self._find_users_at = float("-inf")

    async def aclose(self) -> None:
        for reader in (*self._readers, self._waits):
            await reader.aclose()
        self._shared.close()

    async def read(self, now: float) -> HostWorkloads:
        """Read all entries. ``now``: the monotonic clock."""
        slices = TimeSlice()
        self._drop_vanished(now)
        if now >= self._find_at:
            self._find_at = now + _FIND_S
            self._found = await self._finder.find(self._matches, slices)
            self._arrange()
        if now >= self._find_users_at:
            await self._find_users(now, slices)
        await self._list(now, slices)
        self._shared.begin(now)
        sheet = SampleSheet()
        # A user's processes have no pressure, disk counters or limits: these are of groups.
        groups = {key: part.pod for key, part in self._parts.items() if part.group is not None}
        every = {key: part.pod for key, part in self._parts.items()}
        for reader in self._readers:
            await reader.read(self._scene(groups), sheet, now)
        be_users_milli = await self._by_times(sheet, slices)
        # Last: the confidence of a wait depends on the CPU use.
        await self._waits.read(self._scene(every), sheet, now)
        by_entry: dict[str, list[str]] = {name: [] for name in self._entries}
        for key, part in self._parts.items():
            by_entry[part.entry].append(key)
        entries = {name: self._entry(name, keys, sheet) for name, keys in by_entry.items()}
        return HostWorkloads(at_s=now, entries=entries, be_milli=self._be_milli(sheet, be_users_milli))

    def victims(self) -> dict[str, HostVictim]:
        """What of victims' entries has processes, by the entry's subject and, after a blank, the group."""
        victims: dict[str, HostVictim] = {}
        for key, part in self._parts.items():
            pids = self._lists.get(part.pod, 0.0)
            if pids and self._entries[part.entry].counts_as is CountsAs.VICTIM:
                uid = f"{host_subject(part.entry)} {part.pod.group.path}"
                victims[uid] = HostVictim(replace(part.pod, uid=uid), pids, self._cpus.get(key, EMPTY))
        return victims

    def _scene(self, pods: Mapping[str, Pod]) -> SampleContext:
        view = NodeView(
            topology=self._view.topology,
            versions=self._view.versions,
            kubepods=_NOWHERE,
            besteffort=_NOWHERE,
            burstable=_NOWHERE,
            pods=pods,
        )
        return SampleContext(view=view, pools=None, wanted=SIGNALS)

    # Finding

    def _drop_vanished(self, now: float) -> None:
        for key, part in list(self._parts.items()):
            if part.group is not None and not self._finder.is_same(part.group):
                del self._parts[key]
                self._find_at = min(self._find_at, now + _SOON_S)

    def _arrange(self) -> None:
        before, self._parts = self._parts, {}
        for name, found in self._found.items():
            for group in found.groups:
                key = f"{name} {group.path}"
                known = before.get(key)
                if known is None or known.group != group:
                    self._lists.known.pop(key, None)
                    known = _Part(name, _as_pod(key, group), group)
                self._parts[key] = known
        for name, (kind, _) in self._matches.items():
            if kind is HostKind.USER:
                self._parts[name] = before.get(name) or _Part(name, _as_pod(name, None), None)

    async def _find_users(self, now: float, slices: TimeSlice) -> None:
        self._find_users_at = now + _FIND_USERS_S
        self._users = {
            name: self._processes.uids(pattern)
            for name, (kind, pattern) in self._matches.items()
            if kind is HostKind.USER
        }
        users = {name: uids for name, uids in self._users.items() if uids}
        groups = {part.group.path for part in self._parts.values() if part.group is not None}
        found = await self._processes.of_users(users, groups, self._most, slices) if users else {}
        self._grouped = {pid for processes in found.values() for pid in processes.grouped}
        for name in self._users:
            started, total, _ = found.get(name, ({}, 0, ()))
            # Never due by itself: listed again with the next search of all processes.
            self._lists.known[name] = _Listing(dict(started), total, float("inf"))
            self._cpus[name] = await self._where(started, slices)

    async def _list(self, now: float, slices: TimeSlice) -> None:
        self._lists.keep_only(self._parts)
        for key, part in self._parts.items():
            known = self._lists.known.get(key)
            if known is not None and now < known.again_at:
                continue
            if part.group is None:
                # A process has ended. Where they come and go all the time, the listing is still the dearest part.
                self._find_users_at = min(self._find_users_at, now + _LIST_S)
                continue
            most = max(_FEW, self._most // max(1, len(self._found[part.entry].groups)))
            started, outside = await self._processes.of_group(part.group.directory, most, slices)
            self._lists.known[key] = _Listing(started, len(started), now + _LIST_S, outside)
            self._cpus[key] = await self._where(started, slices)
            await slices.checkpoint()
        self._cpus = {key: cpus for key, cpus in self._cpus.items() if key in self._parts}

    async def _where(self, started: Mapping[int, int], slices: TimeSlice) -> CpuSet:
        return await self._processes.cpus(list(started), max(_FEW, _CPU_READS // max(1, len(self._parts))), slices)

    # Measuring

    async def _by_times(self, sheet: SampleSheet, slices: TimeSlice) -> Sequence[float]:
        """CPU use and memory of what has no counters of its own; processes that are others by now are dropped.

        Returns what each process of BE entries' users uses that is in no group of an entry.
        """
        self._ticks.rotate()
        be_users: dict[int, float] = {}
        for key, part in self._parts.items():
            subject, known = pod_subject(key), self._lists.known.get(key)
            if known is None or (part.group is not None and self._finder.counts_cpu(part.group.path)):
                continue
            ticks_a_s, pages, measured = 0.0, 0, False
            is_be = self._entries[part.entry].counts_as is CountsAs.BE
            for pid, started in list(known.started.items()):
                stat = self._processes.stat(pid)
                if stat is None or stat.started != started:
                    del known.started[pid]
                    self._lists.ended(key)
                    continue
                pages += stat.pages
                grew = self._ticks.grown((pid, started), self._clock(), (stat.ticks,))
                if grew is not None and (rate := grew.rate(0)) is not None:
                    ticks_a_s, measured = ticks_a_s + rate, True
                    if part.group is None and pid not in self._grouped and is_be:
                        be_users[pid] = 1000.0 * rate / self._tick_hz
                await slices.checkpoint()
            if measured:
                sheet.put(subject, "cpu.use", 1000.0 * ticks_a_s / self._tick_hz, confidence=_BY_TIMES)
            if known.started:
                resident = pages * self._page_bytes
                sheet.enter(subject, {"memory.use": resident, "memory.rss": resident}, _SHARED_PAGES)
        return tuple(be_users.values())

    def _entry(self, name: str, keys: Sequence[str], sheet: SampleSheet) -> HostWorkload:
        entry, kind = self._entries[name], self._matches[name].kind
        parts = [sheet.samples.get(pod_subject(key), {}) for key in keys]
        listed = [known for key in keys if (known := self._lists.known.get(key)) is not None]
        groups = [part.group.path for key in keys if (part := self._parts[key]).group is not None]
        sets = [self._cpus.get(key, EMPTY) for key in keys if (known := self._lists.known.get(key)) and known.started]
        found = self._found.get(name)
        matched = 0 if found is None else found.matched
        return HostWorkload(
            name=name,
            counts_as=entry.counts_as,
            match=entry.match,
            groups=tuple(groups),
            matched=matched,
            processes=sum(len(known.started) for known in listed),
            cpus=CpuSet.union(sets) if all(sets) else EMPTY,
            values=together(parts),
            problem=self._problem(name, kind, len(found.groups) if found is not None else 0, matched, listed),
        )

    def _problem(self, name: str, kind: HostKind, read: int, matched: int, listed: Sequence[_Listing]) -> str | None:
        if kind is HostKind.USER:
            if not self._users.get(name):
                return "no such user in /etc/passwd"
            total = sum(known.total for known in listed)
            if not total:
                return "the user has no process outside of pods"
            return f"{total} processes; {self._most} of them are read" if total > self._most else None
        if not matched:
            return f"no {_NOUN[kind]} matches"
        return f"{matched} groups; {read} of them are read" if matched > read else None

    def _be_milli(self, sheet: SampleSheet, users_milli: Sequence[float]) -> int | None:
        """What BE entries use: no group and no process twice, and without victims inside of them."""
        uses = {key: sheet.get(pod_subject(key), "cpu.use") for key in self._parts}
        groups: dict[CountsAs, dict[str, str]] = {CountsAs.BE: {}, CountsAs.VICTIM: {}}
        total, known, has_groups = sum(users_milli), bool(users_milli), False
        for key, part in self._parts.items():
            if part.group is not None:
                groups[self._entries[part.entry].counts_as].setdefault(part.group.path, key)
        tops = set(outermost(groups[CountsAs.BE]))
        # The outermost of those inside: a victim may be in a BE group that is in a victim's.
        inside = outermost(path for path in groups[CountsAs.VICTIM] if not tops.isdisjoint((path, *ancestors(path))))
        for sign, paths, keys in ((1, tops, groups[CountsAs.BE]), (-1, inside, groups[CountsAs.VICTIM])):
            for path in paths:
                has_groups = True
                if (use := uses[keys[path]]) is not None:
                    total, known = total + sign * use, True
        # 0 where no entry has a group; unknown where none of their groups could be read.
        return max(0, round(total)) if known or not has_groups else None


_NOUN: Final = {HostKind.UNIT: "unit", HostKind.CGROUP: "cgroup", HostKind.DOCKER: "container of docker"}


def together(parts: Sequence[Mapping[str, Sample]]) -> dict[str, HostValue]:
    """The samples of an entry's parts as one: sums; of pressure, throttling and delay the largest. Pure.

    The share of waiting is that of all tasks together. A limit is only that of a single group.
    """
    if len(parts) == 1:
        return {name: HostValue(sample.value, sample.confidence) for name, sample in parts[0].items()}
    values: dict[str, HostValue] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        samples = [part[name] for part in parts if name in part]
        numbers = [sample.value for sample in samples]
        if name == "memory.limit":
            continue
        value = sum(numbers) if name in _SUMS else max(numbers)
        if name == "cpu.wait":
            value = _wait_percent(parts)
        values[name] = HostValue(value, min(sample.confidence for sample in samples))
    return values


def _wait_percent(parts: Sequence[Mapping[str, Sample]]) -> float:
    waited = ran = 0.0
    for part in parts:
        share, milli, use = part.get("cpu.wait"), part.get("cpu.wait_milli"), part.get("cpu.use")
        if share is None or milli is None:
            continue
        waited += milli.value
        # The share is of waiting and running together, so that running follows from it.
        ran += milli.value * (100.0 / share.value - 1.0) if share.value else use.value if use is not None else 0.0
    return 100.0 * waited / (waited + ran) if waited else 0.0


def _as_pod(key: str, group: HostGroup | None) -> Pod:
    """For the readers of pods' signals; it is in no inventory."""
    # Readers know a group by its inode: a later group of that name is another one to them.
    inode = 0 if group is None else hash((group.directory, group.inode)) & ((1 << 62) - 1)
    path = _NOWHERE if group is None else group.path
    return Pod(
        uid=key,
        qos=QosClass.GUARANTEED,
        group=GroupRef(path=path, inode=inode),
        containers=(),
        classification=Classification(pod_class=PodClass.SHARED, source="host_workloads"),
    )
