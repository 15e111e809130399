"""Divides cache and memory bandwidth among the pods through resctrl, watches who uses them, and keeps it so.

A side actuator: after each look, and every few seconds because ``exec`` brings threads in that inherit nothing, it
reads the counters, lets the law move BE's share, plans, and brings resctrl there. All file work runs in a worker
thread of its own, in slices; on hardware a single ``mkdir`` interrupts other CPUs.

What cannot be found again by the groups' prefix is in the store before the first touch (`resctrl_undo`). When the
policy is switched off everything is undone, as with any other policy.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, final

import trio
from msgspec.structs import replace

from cgroupfs.errors import AgentError
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from reconciler.actuators.base import PeriodicWorker, PlanSnapshot
from reconciler.actuators.cgroup.status import SettingStatus
from reconciler.actuators.holds import holding
from reconciler.actuators.resctrl import status as show
from reconciler.actuators.resctrl.mount import ResctrlMount
from reconciler.actuators.resctrl.sweep import GroupMember, ResctrlSweep, SweepResult
from reconciler.actuators.resctrl.undo import about_to_write, pod_threads, threads_of, undo_default, undo_pod
from reconciler.policies.cache import KNOB
from reconciler.policies.cache import NAME as POLICY
from reconciler.policies.cachelevel import LevelState, begin, step
from reconciler.policies.cacheplan import CachePlan, plan_cache
from reconciler.signals.resctrl import ResctrlSampler, ResctrlUsage, strain
from resctrl.capability import Capability, ResctrlStatus, read_capability
from resctrl.files import REAL as REAL_GROUPS
from resctrl.files import GroupFiles
from resctrl.groups import DEFAULT, ControlGroups
from resctrl.monitor import MonitorGroups
from resctrl.mount import Mounter, RealMounter
from state.cache import CacheMode, CacheRequest, CacheUsage
from state.entry import US, LedgerEvent
from state.evidence import Sample
from state.ledger import Ledger
from state.model import Pod, PodClass
from state.store import Store
from state.undo import RestoreResult

_LOG: Final = logging.getLogger(__name__)
_SLICE_S: Final = 0.02
_GAP_S: Final = 0.2
_PATIENCE: Final = 5
"""So often a group's values are put back after somebody changed them; then they are left until the wish changes."""
_EVERY: Final = 15
"""So often everything is looked into, whatever is known of the last sweep: a thread's number may be another's."""
_ONLINE: Final = frozenset({PodClass.SHARED, PodClass.DEDICATED})
_RANK: Final = {PodClass.DEDICATED: 0, PodClass.SHARED: 0, PodClass.RECLAIMED: 1, PodClass.SYSTEM: 2}


class _ResctrlPass(NamedTuple):
    """What is there before a sweep."""

    ours: tuple[str, ...]
    foreign: tuple[str, ...]
    default: Mapping[str, Mapping[int, int]]
    use: ResctrlUsage


@final
class ResctrlActuator:
    """See the module's text."""

    name = "resctrl"

    def __init__(
        self,
        hierarchy: Hierarchy,
        store: Store,
        ledger: Ledger,
        store_lane: trio.CapacityLimiter,
        *,
        root: str = "/",
        writes: Counter[tuple[str, str]] | None = None,
        files: GroupFiles = REAL_GROUPS,
        cgroups: FileOps = REAL,
        capability: Callable[[], Capability] | None = None,
        mounter: Mounter | None = None,
        misses: Callable[[], Mapping[str, Sample]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``misses``: the newest cache misses of pods by uid, per 1000 instructions, their age as of the call."""
        self.standings: dict[str, dict[str, SettingStatus]] = {}
        self.use: ResctrlUsage | None = None
        """The newest occupancies and bandwidths."""
        self._hierarchy = hierarchy
        self._ledger = ledger
        self._writes = Counter[tuple[str, str]]() if writes is None else writes
        self._files = files
        self._cgroups = cgroups
        self._misses = misses
        self._clock = clock
        self._turns = PeriodicWorker(self._sweep_once, _period_s, gap_s=_GAP_S, clock=clock)
        self._place = ResctrlMount(
            store,
            store_lane,
            place=f"{root.rstrip('/')}/sys/fs/resctrl",
            read=capability if capability is not None else partial(read_capability, root),
            files=files,
            mounter=mounter if mounter is not None else RealMounter(root),
            work=self._turns.work,
            clock=clock,
        )
        self._sampler: tuple[str, ResctrlSampler] | None = None
        self._level: LevelState | None = None
        self._plan = CachePlan()
        self._outcome = SweepResult()
        self._ours: tuple[str, ...] = ()
        self._foreign: tuple[str, ...] = ()
        self._changed: Counter[str] = Counter()
        self._changed_plan: CachePlan | None = None
        self._problem = ""

    # The seam

    def planned(self, situation: PlanSnapshot) -> None:
        """A look is over. Wakes the sweep when something of it has changed; else that comes when it is due."""
        before = self._turns.situation
        self._turns.planned(situation, wake=before is None or _substance(before) != _substance(situation))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Sweep after each look, and now and then, for ever."""
        await self._turns.run(task_status=task_status)

    async def sweep(self) -> None:
        """Bring resctrl to what the newest look wants; one sweep at a time."""
        await self._turns.sweep()

    async def restore(self, only: str | None = None) -> Sequence[RestoreResult]:
        """Remove our groups, put the default group's values back, take our mount away; or free one pod."""
        async with self._turns.restoring() as situation:
            if only is None:
                done: Sequence[RestoreResult] = await self._undo()
            else:
                capability = await self._place.offered(again=True)
                if capability is None or capability.status is not ResctrlStatus.READY or capability.root is None:
                    return ()
                pod = situation.view.pods.get(only) if situation is not None else None
                by_name = partial(pod_threads, self._hierarchy, only, self._cgroups)
                threads = self._threads(pod) if pod is not None else by_name
                done = await self._turns.work(partial(undo_pod, self._files, capability.root, only, threads))
        for one in done:
            self._note("restored" if one.ok else "failed", f"{one.path}/{one.file}", one.detail or one.undo.value)
        return done

    def measured(self) -> CacheUsage | None:
        """What pods and groups use, and how large BE's share is; None while nobody wants it."""
        situation = self._turns.situation
        wish = situation.pools.cache if situation is not None else None
        return None if situation is None or wish is None else show.measured(self._status(), situation.view, wish)

    def status(self) -> Mapping[str, object]:
        """Its section; see `resctrl_show.facts`."""
        turns = self._turns
        return {
            **show.status_document(self._status(), self._clock()),
            "sweeps": turns.sweeps,
            "last_sweep_s": turns.swept_s,
        }

    def problems(self) -> Sequence[str]:
        """What does not work now."""
        situation = self._turns.situation
        titles = {} if situation is None else {uid: pod.title for uid, pod in situation.view.pods.items()}
        return show.problems(self._status(), titles)

    def _status(self) -> show.ResctrlActuatorStatus:
        return show.ResctrlActuatorStatus(
            capability=self._place.capability,
            plan=self._plan,
            outcome=self._outcome,
            level=self._level,
            use=self.use,
            ours=self._ours,
            foreign=self._foreign,
            problem=self._problem,
        )

    # One sweep

    async def _sweep_once(self, situation: PlanSnapshot) -> None:
        try:
            await self._sweep(situation)
        except AgentError as exc:
            if str(exc) != self._problem:
                _LOG.warning("resctrl: %s", exc)
            self._problem = str(exc)

    async def _sweep(self, situation: PlanSnapshot) -> None:
        wish = situation.pools.cache
        writes = situation.enforce and (wish is None or not wish.dry_run) and "node" not in situation.holds
        if wish is None:
            await self._unmount_if_unused(writes=writes)
            return
        capability = await self._place.offered()
        if capability is not None and capability.status is ResctrlStatus.NOT_MOUNTED and wish.mount and writes:
            capability = await self._place.mount(wish)
            self._note("mounted", self._place.kept.place or "", f"options: {', '.join(wish.mount_options) or 'none'}")
        if capability is None or capability.status is not ResctrlStatus.READY or capability.root is None:
            self._plan, self._outcome, self.use, self.standings = CachePlan(), SweepResult(), None, {}
            self._problem = "" if capability is None else capability.reason
            return
        look = await self._turns.work(partial(self._look, capability.root))
        self._ours, self._foreign, self.use, self._problem = look.ours, look.foreign, look.use, ""
        self._step(wish, situation)
        level = self._level or begin(wish.levels)
        pods = situation.view.pods
        plan = partial(plan_cache, wish, tuple(pods.values()), capability, level=level.level)
        self._plan = await self._turns.work(partial(plan, foreign=len(look.foreign), having=frozenset(look.ours)))
        if writes:
            await self._bring(wish, capability, situation, look)
        # For each pod some 3 µs: not in the loop.
        self.standings = await self._turns.work(partial(show.standings, self._status(), situation, writes=writes))

    def _look(self, root: str) -> _ResctrlPass:
        if self._sampler is None or self._sampler[0] != root:
            self._sampler = root, ResctrlSampler(MonitorGroups(root, self._files))
        groups = ControlGroups(root, self._files)
        ours, foreign = tuple(groups.ours()), tuple(groups.foreign())
        use = self._sampler[1].sample((DEFAULT, *ours, *foreign), self._outcome.watched, self._clock())
        return _ResctrlPass(ours, foreign, groups.schemata(DEFAULT), use)

    def _step(self, wish: CacheRequest, situation: PlanSnapshot) -> None:
        """Let the law move BE's share, with what was read before this sweep."""
        if wish.mode is not CacheMode.DYNAMIC and not any("-be-dynamic" in name for name in self._ours):
            self._level = None
            return
        state = self._level if self._level is not None else begin(wish.levels)
        pods = situation.view.pods
        homes = {
            self._outcome.homes.get(uid, DEFAULT) for uid, pod in pods.items() if pod.pod_class is PodClass.RECLAIMED
        }
        online = frozenset(uid for uid, pod in pods.items() if pod.pod_class in _ONLINE)
        now = self._clock()
        feeling = strain(
            self.use,
            homes - {DEFAULT},
            bandwidth_mbps=wish.bandwidth_mbps,
            online=len(online),
            misses={uid: missed for uid, missed in self._misses().items() if uid in online},
            now=now,
        )
        self._level = step(state, feeling, now, wish.law, wish.levels)
        if self._level.level != state.level:
            _LOG.info("BE share of cache and memory bandwidth: %s", self._level)

    async def _bring(
        self, wish: CacheRequest, capability: Capability, situation: PlanSnapshot, look: _ResctrlPass
    ) -> None:
        await self._place.keep(replace(self._place.kept, groups=True))
        if self._plan.default is not None:
            await self._place.keep(about_to_write(self._place.kept, look.default, self._plan.default))
        elif self._place.kept.original is not None:
            undone = await self._turns.work(partial(undo_default, self._files, capability, self._place.kept))
            if undone is not None and undone.ok:
                await self._place.keep(replace(self._place.kept, original=None, written=()))
        sweep = ResctrlSweep(
            self._files,
            capability,
            self._plan,
            await self._turns.work(partial(self._members, situation)),
            watch=self._outcome.watch,
            now=self._clock(),
            dwell_s=wish.dwell_s,
            monitor=wish.monitor,
            left_alone=self._yielded(),
            followed=self._outcome.followed if self._turns.sweeps % _EVERY else None,
        )
        steps = sweep.steps()
        while not await self._turns.work(partial(_advance, steps, _SLICE_S)):
            pass
        self._noted(sweep.outcome)
        self._outcome, self._ours = sweep.outcome, sweep.outcome.ours

    def _members(self, situation: PlanSnapshot) -> list[GroupMember]:
        return [self._member(pod, situation) for _, pod in sorted(situation.view.pods.items())]

    def _member(self, pod: Pod, situation: PlanSnapshot) -> GroupMember:
        hold = holding(situation.holds, path=pod.group.path, knob=KNOB, pod_uid=pod.uid)
        home = self._plan.members.get(pod.uid, DEFAULT)
        return GroupMember(pod.uid, home, _RANK[pod.pod_class], hold is not None, self._threads(pod))

    def _threads(self, pod: Pod) -> Callable[[], set[int]]:
        paths = [box.group.path for box in pod.containers]

        def read() -> set[int]:
            return set().union(*(threads_of(self._hierarchy, path, self._cgroups) for path in paths))

        return read

    # Leaving

    async def _unmount_if_unused(self, *, writes: bool) -> None:
        """The policy is off: what it has done is undone."""
        self._plan, self._outcome, self.use, self.standings, self._level = CachePlan(), SweepResult(), None, {}, None
        self._problem = ""
        if self._place.to_undo or self._ours:
            capability = await self._place.offered()
            if capability is not None and capability.status is ResctrlStatus.READY and capability.root is not None:
                self._ours = tuple(await self._turns.work(ControlGroups(capability.root, self._files).ours))
            if writes:
                for one in await self._undo():
                    self._note("restored" if one.ok else "failed", f"{one.path}/{one.file}", one.detail)

    async def _undo(self) -> list[RestoreResult]:
        self._ours, self._outcome, self.standings, self._sampler = (), SweepResult(), {}, None
        return await self._place.undo()

    # Small things

    def _yielded(self) -> dict[str, str]:
        if self._changed_plan is None or self._changed_plan.groups != self._plan.groups:
            self._changed.clear()
            self._changed_plan = self._plan
        words = f"changed {_PATIENCE} times by another program; unchanged until the plan changes"
        return {name: words for name, count in self._changed.items() if count >= _PATIENCE}

    def _noted(self, outcome: SweepResult) -> None:
        """Count, and put what somebody else had changed into the history."""
        before = {group.name: group.schemata for group in self._changed_plan.groups} if self._changed_plan else {}
        now = {group.name: group.schemata for group in self._plan.groups}
        for name in outcome.rewritten:
            if name in self._outcome.homes.values() and before.get(name) == now.get(name):
                self._changed[name] += 1
                self._note("foreign", name, "changed by another program; written again")
        for name in (*outcome.made, *outcome.removed):
            self._note("made" if name in outcome.made else "removed", name, "resctrl group")
        self._writes["resctrl.schemata", "written"] += len(outcome.written)
        self._writes["resctrl.schemata", "refused"] += len(outcome.refused)
        self._writes["resctrl.tasks", "written"] += outcome.moved

    def _note(self, kind: str, path: str, why: str) -> None:
        event = LedgerEvent(at=time.time(), kind=kind, path=path, file="resctrl", writer=US, policy=POLICY, reason=why)
        self._ledger.note(event)


def _period_s(situation: PlanSnapshot) -> float | None:
    wish = situation.pools.cache
    return wish.sweep_s if wish is not None else None


def _advance(steps: Iterator[None], seconds: float) -> bool:
    """Go on for a while; True at the end."""
    until = time.monotonic() + seconds
    return all(time.monotonic() < until for _ in steps)


def _substance(situation: PlanSnapshot) -> tuple[object, ...]:
    """What a sweep goes by. Pods that have not changed are the same objects, so that comparing costs little."""
    return situation.enforce, situation.pools.cache, situation.holds, situation.view.pods
