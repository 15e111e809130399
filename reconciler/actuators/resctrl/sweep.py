"""One sweep over resctrl: brings groups, their values, the pods' threads and the monitoring groups to a plan.

Synchronous and slow, for a worker thread; `ResctrlSweep.steps` yields after every operation, so that the thread is
never occupied for long. After a stop at any point the next sweep continues from the existing state.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple, final

from msgspec import Struct, field

from cgroupfs.errors import AgentError, CgroupBusyError, CgroupGoneError
from cgroupfs.threads import GroupThreads, together
from reconciler.signals.processes import OUTSIDE
from resctrl.capability import Capability
from resctrl.files import GroupFiles
from resctrl.groups import DEFAULT, PREFIX, ControlGroups, MoveResult, OutOfGroupsError, expel, gather
from resctrl.monitor import MonitorAssignment, MonitorGroups, rotate
from state.cache import CachePlan

_LOW_ON_RMIDS: Final = "no free monitoring id yet"


class GroupMember(NamedTuple):
    """One pod: its wanted group, its rank for monitoring, and how its threads are read."""

    uid: str
    home: str
    rank: int
    held: bool
    threads: Callable[[], GroupThreads]

    def ids(self) -> set[int]:
        """Its threads now, as far as they are known."""
        return self.threads().ids


class SweepResult(Struct, kw_only=True):
    """The outcome of a sweep. Filled while it runs; used by others only after the end.

    ``homes``: pod -> its group now, for pods that we placed. ``threads``: how many. ``unsettled``: pods with threads
    outside their group, and why. ``foreign``: pods with threads in other programs' groups. ``refused``: groups whose
    values could not be set. ``rewritten``: groups whose values another program had changed. ``watched``: pod -> control
    group and monitoring group. ``unwatched``: pods without one for now, and why. ``followed``: pod -> control group and
    threads that are in its monitoring group. ``ours``: our groups at the end.
    """

    homes: dict[str, str] = field(default_factory=dict)
    threads: dict[str, int] = field(default_factory=dict)
    unsettled: dict[str, str] = field(default_factory=dict)
    foreign: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    rewritten: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    watched: dict[str, tuple[str, str]] = field(default_factory=dict)
    unwatched: dict[str, str] = field(default_factory=dict)
    followed: dict[str, tuple[str, frozenset[int]]] = field(default_factory=dict)
    watch: MonitorAssignment = MonitorAssignment()
    moved: int = 0
    gone: int = 0
    ours: tuple[str, ...] = ()
    monitors: int = 0
    budget: int = 0
    problem: str = ""


@final
class ResctrlSweep:
    """One sweep. Errors: none; failures are recorded in `outcome`."""

    def __init__(
        self,
        files: GroupFiles,
        capability: Capability,
        plan: CachePlan,
        members: list[GroupMember],
        *,
        watch: MonitorAssignment,
        now: float,
        dwell_s: float,
        monitor: bool,
        yielded: Mapping[str, str],
        followed: Mapping[str, tuple[str, frozenset[int]]] | None,
    ) -> None:
        """``yielded``: groups whose values other programs keep changing, with the reason text: not written.

        ``followed``: from the last sweep's outcome; None: every monitoring group is read.
        """
        root = capability.root or ""
        self.outcome = SweepResult(watch=watch)
        self._groups = ControlGroups(root, files)
        self._monitors = MonitorGroups(root, files)
        self._files = files
        self._capability = capability
        self._plan = plan
        self._members = members
        self._now = now
        self._dwell_s = dwell_s
        self._monitor = monitor
        self._yielded = yielded
        self._followed = followed or {}
        self._foreign_threads: frozenset[int] = frozenset()
        self._usable: set[str] = {DEFAULT}
        self._staying: list[GroupMember] = []
        self._group_threads: dict[str, frozenset[int]] = {}
        self._pod_threads: dict[str, set[int]] = {}
        self._missing: dict[str, str] = {}
        """Pods of which not all threads could be listed, and why."""

    def steps(self) -> Iterator[None]:
        """The sweep, one operation after the other."""
        try:
            self._foreign_threads = self._groups.of_others()
            # Unneeded groups are removed late, and earlier only where their id is needed (`_free_group`).
            for act in (self._values, self._threads, self._evict_foreign_threads, self._remove_unused, self._watch):
                yield from act()
        except AgentError as exc:
            # The mount itself has disappeared, or cannot be listed.
            self.outcome.problem = str(exc)

    # Groups and their values

    def _values(self) -> Iterator[None]:
        existing = set(self._groups.ours())
        ordered = sorted(self._plan.groups, key=lambda group: (not group.reclaimed, group.name))
        be = [group for group in ordered if group.reclaimed]
        # BE's first: it releases ways before others take them.
        for group in be:
            self._set_group(group.name, group.schemata, existing)
            yield
        if self._plan.default is not None:
            self._set_group(DEFAULT, self._plan.default, existing | {DEFAULT})
            yield
        for group in ordered[len(be) :]:
            self._set_group(group.name, group.schemata, existing)
            yield

    def _set_group(self, name: str, values: Mapping[str, Mapping[int, int]], existing: set[str]) -> None:
        try:
            if name != DEFAULT and name not in existing:
                self._make(name)
                self.outcome.made.append(name)
            if name in self._yielded:
                self.outcome.refused[name] = self._yielded[name]
            elif self._groups.set_schemata(name, values, self._capability):
                self.outcome.written.append(name)
                if name in existing:
                    self.outcome.rewritten.append(name)
        except AgentError as exc:
            self.outcome.refused[name] = str(exc)
        else:
            # Threads are moved only into a group whose values are in place: at any stop each is in a legal group.
            self._usable.add(name)

    def _make(self, name: str) -> None:
        """Create a group; if ids are exhausted, remove an unneeded group or a monitoring group first."""
        try:
            self._groups.create(name)
        except OutOfGroupsError as exc:
            if not (self._free_monitor() if exc.what == "RMIDs" else self._free_group()):
                raise
            self._groups.create(name)

    def _free_group(self) -> bool:
        needed = {group.name for group in self._plan.groups}
        kept = together(member.threads() for member in self._members if member.held)
        for name in self._groups.ours() if not kept.missing else ():
            if name not in needed and not self._groups.members(name) & kept.ids and self._groups.remove(name):
                self.outcome.removed.append(name)
                return True
        return False

    def _free_monitor(self) -> bool:
        for control in (DEFAULT, *self._groups.ours()):
            for name in self._monitors.names(control)[0]:
                if self._monitors.remove(control, name):
                    return True
        return False

    # Threads

    def _threads(self) -> Iterator[None]:
        for name in self._groups.ours():
            with contextlib.suppress(CgroupGoneError):
                self._group_threads[name] = self._groups.members(name)
        for member in self._members:
            # After the groups: a thread that a member forks meanwhile is in both, or in neither.
            self._pod_threads[member.uid], missing = member.threads()
            if missing:
                self._missing[member.uid] = missing
            if member.held or member.home not in self._usable:
                self._staying.append(member)
                if not member.held:
                    message = f"{member.home}: {self.outcome.refused.get(member.home, 'does not exist')}"
                    self.outcome.unsettled[member.uid] = message
            else:
                self._assign_threads(member)
                if missing and member.home != DEFAULT:
                    self.outcome.unsettled.setdefault(member.uid, missing)
            yield

    def _assign_threads(self, member: GroupMember) -> None:
        threads = self._pod_threads[member.uid]
        others = threads & self._foreign_threads
        if others:
            self.outcome.foreign[member.uid] = len(others)
        self.outcome.homes[member.uid] = member.home
        self.outcome.threads[member.uid] = len(threads - {0})
        if member.home == DEFAULT or not threads - others - self._group_threads.get(member.home, frozenset()):
            return
        try:
            done = gather(self._files, self._groups.path(member.home), lambda: member.ids() - self._foreign_threads)
        except AgentError as exc:
            self.outcome.unsettled[member.uid] = str(exc)
            return
        self._count(done)
        if not done.complete:
            message = "new threads appear faster than they are moved"
            self.outcome.unsettled[member.uid] = f"refused: {dict(done.refused)}" if done.refused else message
        elif 0 in threads:
            self.outcome.unsettled[member.uid] = OUTSIDE

    def _evict_foreign_threads(self) -> Iterator[None]:
        """Move threads out of our groups that do not belong there: of pods for the default group, or of no pod."""
        for name, inside in self._group_threads.items():
            members = [*self._staying, *(member for member in self._members if member.home == name)]
            if not inside - set().union(*(self._pod_threads[member.uid] for member in members)):
                continue
            with contextlib.suppress(CgroupGoneError):
                leaving = partial(self._leaving, {member.uid for member in members})
                self.outcome.moved += expel(self._files, self._groups.path(name), leaving, self._groups.root)
            yield

    def _leaving(self, staying: Collection[str], inside: frozenset[int]) -> Iterable[int]:
        """Those of a group's threads that are of no pod whose threads stay there."""
        belonging = together(member.threads() for member in self._members if member.uid in staying)
        if not belonging.missing:
            return inside - belonging.ids
        # One that was not listed would count as one of no pod: only those of other pods leave.
        others = together(member.threads() for member in self._members if member.uid not in staying)
        return inside & (others.ids - belonging.ids)

    def _remove_unused(self) -> Iterator[None]:
        """Remove our groups that the plan does not name, unless a pod remains in one."""
        needed = {group.name for group in self._plan.groups}
        if any(member.uid in self._missing for member in self._staying):
            return
        for name in self._groups.ours():
            if name in needed:
                continue
            staying = set().union(*(self._pod_threads[member.uid] for member in self._staying))
            try:
                if not self._groups.members(name) & staying and self._groups.remove(name):
                    self.outcome.removed.append(name)
            except AgentError as exc:
                self.outcome.refused[name] = str(exc)
            yield

    # Monitoring groups

    def _watch(self) -> Iterator[None]:
        ours = self._groups.ours()
        controls = (DEFAULT, *ours)
        foreign = self._groups.foreign()
        self.outcome.ours = tuple(ours)
        existing: dict[str, list[str]] = {}
        others = 0
        for control in (*controls, *foreign):
            managed, unmanaged = self._monitors.names(control)
            others += len(unmanaged)
            for name in managed if control in controls else ():
                existing.setdefault(name.removeprefix(PREFIX), []).append(control)
        monitoring = self._capability.monitoring
        if monitoring is None or not self._monitor:
            self.outcome.watch = MonitorAssignment()
            yield from self._unwatch(existing, {})
            return
        # Every control group takes one id as well, also those that may still be created.
        reserved = max(self._capability.control_groups, 1 + len(ours) + len(foreign))
        self.outcome.budget = budget = max(0, monitoring.groups - reserved - others)
        homes = {member.uid: self.outcome.homes.get(member.uid, DEFAULT) for member in self._members}
        ranks = {
            member.uid: member.rank
            for member in self._members
            if not member.held
            and member.uid in self.outcome.homes
            and not {member.uid} & (self.outcome.foreign.keys() | self._missing.keys())
        }
        before = self.outcome.watch
        if not before.since and existing:
            # Monitoring groups of the last run: they are watched already.
            before = MonitorAssignment(since={uid: self._now for uid in existing if uid in ranks})
        self.outcome.watch = watch = rotate(before, ranks, budget, self._now, self._dwell_s)
        held = {member.uid for member in self._members if member.held}
        wanted = {uid: homes[uid] for uid in watch.since}
        yield from self._unwatch(existing, wanted, held)
        threads = {member.uid: member.ids for member in self._members}
        for uid, control in sorted(wanted.items()):
            self._ensure_monitor(uid, control, threads[uid], exists=control in existing.get(uid, ()))
            yield
        self.outcome.monitors = len(self.outcome.watched)

    def _unwatch(
        self, existing: Mapping[str, list[str]], wanted: Mapping[str, str], held: set[str] | None = None
    ) -> Iterator[None]:
        for uid, controls in existing.items():
            for control in controls:
                if wanted.get(uid) == control or uid in (held or ()):
                    continue
                try:
                    self._monitors.remove(control, f"{PREFIX}{uid}")
                except AgentError as exc:
                    self.outcome.unwatched[uid] = str(exc)
                yield

    def _ensure_monitor(self, uid: str, control: str, threads: Callable[[], set[int]], *, exists: bool) -> None:
        name = f"{PREFIX}{uid}"
        present = frozenset(self._pod_threads[uid])
        before = self._followed.get(uid)
        if exists and before is not None and before[0] == control and present <= before[1]:
            # No new thread, and the present ones are in the group. Reading a tasks file walks every thread of the
            # machine: not for each pod.
            self.outcome.watched[uid], self.outcome.followed[uid] = (control, name), (control, present)
            return
        try:
            if not exists:
                self._monitors.create(control, name)
            path = self._monitors.path(control, name)
            done = gather(self._files, path, partial(self._of_control, control, threads))
        except (OutOfGroupsError, CgroupBusyError):
            self.outcome.unwatched[uid] = _LOW_ON_RMIDS
        except AgentError as exc:
            self.outcome.unwatched[uid] = str(exc)
        else:
            self._count(done)
            self.outcome.watched[uid] = control, name
            if done.complete:
                self.outcome.followed[uid] = control, present

    def _of_control(self, control: str, threads: Callable[[], set[int]]) -> set[int]:
        """The threads in the control group: only these can be in a monitoring group of it."""
        if control == DEFAULT:
            return threads().difference(self._foreign_threads, *self._group_threads.values())
        return threads() & self._groups.members(control)

    def _count(self, done: MoveResult) -> None:
        self.outcome.moved += done.moved
        self.outcome.gone += done.gone
