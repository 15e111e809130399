"""Applies the plan for cache and memory bandwidth to resctrl, and reads their usage.

The reading is the planner's next input (`reconciler.control.cache_loop`). All file work runs in slices in the worker
thread.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, final

import trio
from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.errors import AgentError
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.lines import lines_of
from cgroupfs.log import get_log
from cgroupfs.threads import GroupThreads, threads_of, together
from reconciler.actuators.base import PlanSnapshot
from reconciler.actuators.cgroup.status import SettingStatus, unread
from reconciler.actuators.holds import holding
from reconciler.actuators.resctrl.mount import ResctrlMount, ResctrlWorker
from reconciler.actuators.resctrl.sweep import GroupMember, ResctrlSweep, SweepResult
from reconciler.actuators.resctrl.undo import about_to_write, pod_threads, undo_default, undo_pod
from reconciler.runtime.format import plural
from reconciler.signals.resctrl import ResctrlSampler, ResctrlUsage
from resctrl.capability import Capability, ResctrlStatus, read_capability
from resctrl.capability import ResctrlStatus as Readiness
from resctrl.files import REAL as REAL_GROUPS
from resctrl.files import GroupFiles, Mounter, RealMounter
from resctrl.groups import DEFAULT, ControlGroups
from resctrl.monitor import BandwidthRate, MonitorGroups, total
from resctrl.schemata import format_schemata
from state.cache import CACHE, RESCTRL_GROUP, CacheConsumption, CachePlan, CacheRequest, CacheUsage
from state.entry import US, LedgerEvent, RestoreResult
from state.ledger import Ledger
from state.model import NodeView, Pod, PodClass, Setting
from state.setting_state import SettingState

_DEFAULT: Final = "(default)"
_COUNTERS: Final = {"llc.occupancy": "llc_occupancy", "memory.bandwidth": "mbm_total_bytes"}
_LOG: Final = get_log("resctrl")
_SLICE_S: Final = 0.02
_PATIENCE: Final = 5
"""How often within `_COUNTED_S` a group's values are rewritten after foreign changes; then they stay for a while."""
_COUNTED_S: Final = 3600.0
_EVERY: Final = 15
"""Every so many sweeps everything is read again, regardless of the last result: a thread id may have been reused."""
# Of pods, for a monitoring group where there are fewer of these than pods: the lower first.
_RANK: Final = {PodClass.DEDICATED: 0, PodClass.SHARED: 0, PodClass.RECLAIMED: 1, PodClass.SYSTEM: 2}


class ResctrlActuatorStatus(Struct, frozen=True, kw_only=True):
    """The actuator's state. ``ours`` and ``foreign``: control groups; ``problem``: why it is unavailable as a whole."""

    capability: Capability | None = None
    plan: CachePlan = CachePlan()
    outcome: SweepResult
    use: ResctrlUsage | None = None
    ours: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    problem: str = ""


def status_document(status: ResctrlActuatorStatus, now: float) -> dict[str, object]:
    """The machine's capability, the groups, their pods, and their usage. Units: bytes, bytes per second."""
    capability, plan, outcome, use = status.capability, status.plan, status.outcome, status.use
    return {
        "status": "not checked yet" if capability is None else capability.status.value,
        "reason": "" if capability is None else capability.reason,
        "control_groups": {
            "limit": 0 if capability is None else capability.control_groups,
            "ours": list(status.ours),
            "others": list(status.foreign),
        },
        "monitoring_groups": {"budget": outcome.budget, "used": outcome.monitors, "waiting": dict(outcome.unwatched)},
        "groups": {
            group.name: {
                "schemata": lines_of(format_schemata(group.schemata)),
                "reason": group.reason,
                "pods": sorted(uid for uid, home in plan.members.items() if home == group.name),
                "refused": outcome.refused.get(group.name),
            }
            for group in plan.groups
        },
        "crowded": dict(plan.crowded),
        "unsettled": dict(outcome.unsettled),
        "in_others_groups": dict(outcome.foreign),
        "level": None
        if plan.level is None
        else {
            "cache_percent": plan.level.cache_percent,
            "mba_percent": plan.level.mba_percent,
            "reason": plan.level_reason,
        },
        "use": {}
        if use is None
        else {
            "age_s": round(now - use.at_s, 3),
            "pods": {uid: _use(rates) for uid, rates in sorted(use.pods.items())},
            "groups": {name or _DEFAULT: _use(rates) for name, rates in sorted(use.groups.items())},
        },
        "moved": outcome.moved,
    }


def measured(status: ResctrlActuatorStatus, view: NodeView, request: CacheRequest) -> CacheUsage:
    """The same usage for signals and metrics: numbers only, None for unknown ones."""
    use = status.use
    return CacheUsage(
        at_s=None if use is None else use.at_s,
        pods={} if use is None else {uid: _consumption(total(rates)) for uid, rates in use.pods.items()},
        groups={}
        if use is None
        else {
            name or _DEFAULT: {domain: _consumption(rate) for domain, rate in rates.items()}
            for name, rates in use.groups.items()
        },
        classes=_classes(status, view),
        level=status.plan.level,
        lacks=_lacks(status, view, request),
    )


def _classes(status: ResctrlActuatorStatus, view: NodeView) -> dict[str, str]:
    texts: dict[str, set[str]] = {}
    for uid, home in status.outcome.homes.items():
        if uid in view.pods:
            texts.setdefault(home or _DEFAULT, set()).add(view.pods[uid].pod_class.value)
    # The default group also contains all processes of the host.
    return {home: classes.pop() for home, classes in texts.items() if len(classes) == 1 and home != _DEFAULT}


def _lacks(status: ResctrlActuatorStatus, view: NodeView, request: CacheRequest) -> dict[str, str]:
    capability, outcome = status.capability, status.outcome
    if capability is None or capability.status is not Readiness.READY:
        message = status.problem or "resctrl not checked yet"
        return dict.fromkeys(_COUNTERS, message)
    features = capability.monitoring.features if capability.monitoring is not None else ()
    lacks = {
        signal: f"not counted by this machine's resctrl (no {counter} in info/L3_MON/mon_features)"
        for signal, counter in _COUNTERS.items()
        if counter not in features
    }
    if not request.monitor:
        lacks |= dict.fromkeys(_COUNTERS, "per pod only with policies.cache.monitor")
    elif len(outcome.watched) < len(view.pods):
        message = (
            f"{len(outcome.watched)} of {len(view.pods)} pods monitored now, with {outcome.budget} monitoring groups"
        )
        lacks |= {signal: message for signal in _COUNTERS if signal not in lacks}
    return lacks


def _consumption(rate: BandwidthRate) -> CacheConsumption:
    return CacheConsumption(occupancy_bytes=rate.occupancy, total_bytes_s=rate.total_s)


def problems(status: ResctrlActuatorStatus, titles: Mapping[str, str]) -> list[str]:
    """What does not work now, as texts for people, each once. ``titles``: of pods, by uid."""
    outcome = status.outcome
    texts = [status.problem, outcome.problem, *status.plan.problems]
    texts += [f"{name or 'the default group'}: {message}" for name, message in sorted(outcome.refused.items())]
    texts += [f"{titles.get(uid, uid)}: {message}" for uid, message in sorted(outcome.unsettled.items())]
    texts += [
        f"{titles.get(uid, uid)}: {count} threads stay in the group of another program"
        for uid, count in sorted(outcome.foreign.items())
    ]
    return [problem for problem in dict.fromkeys(texts) if problem]


def statuses(
    status: ResctrlActuatorStatus, situation: PlanSnapshot, *, writes: bool
) -> dict[str, dict[str, SettingStatus]]:
    """The status of every pod that is in a group, or wanted one of its own; by the path of its directory."""
    groups = {group.name: group for group in status.plan.groups}
    found: dict[str, dict[str, SettingStatus]] = {}
    for uid, pod in situation.view.pods.items():
        home = status.plan.members.get(uid)
        if home is None or (home == DEFAULT and uid not in status.plan.crowded):
            continue
        path = pod.group.path
        reason = groups[home].reason if home in groups else status.plan.crowded.get(uid, "")
        setting = Setting(path=path, knob=RESCTRL_GROUP, value=None, policy=CACHE, reason=reason, pod_uid=uid)
        state, detail = _state(status, uid, situation, setting, writes=writes)
        actual = status.outcome.homes.get(uid) if writes else None
        found[path] = {RESCTRL_GROUP: SettingStatus(setting, state, home or _DEFAULT, actual, detail, time.time())}
    return found


def _state(
    status: ResctrlActuatorStatus, uid: str, situation: PlanSnapshot, setting: Setting, *, writes: bool
) -> tuple[SettingState, str]:
    outcome = status.outcome
    hold = holding(situation.holds, path=setting.path, knob=RESCTRL_GROUP, pod_uid=uid)
    if hold is not None:
        return SettingState.HELD, f"{hold.reason} (by {hold.by})"
    if not writes:
        return SettingState.WOULD_WRITE, setting.reason
    if uid in outcome.unsettled:
        return SettingState.WAITING, outcome.unsettled[uid]
    if uid in outcome.foreign:
        return SettingState.YIELDED, f"{outcome.foreign[uid]} threads are in a group of another program"
    if (home := outcome.homes.get(uid)) is None:
        # The sweep has ended before this pod: of its threads nothing was read.
        return SettingState.UNREADABLE, outcome.problem or "its threads were not read"
    if (why := outcome.refused.get(home)) is not None:
        return SettingState.YIELDED, f"{home or 'the default group'}: {why}"
    return SettingState.IN_PLACE, status.plan.crowded.get(uid) or plural(outcome.threads.get(uid, 0), "thread")


def _use(rates: Mapping[int, BandwidthRate]) -> Mapping[str, object]:
    whole = total(rates)
    return {
        "occupancy_bytes": whole.occupancy,
        "total_bytes_s": whole.total_s,
        "local_bytes_s": whole.local_s,
        "domains": {
            str(domain): {
                "occupancy_bytes": rate.occupancy,
                "total_bytes_s": rate.total_s,
                "local_bytes_s": rate.local_s,
            }
            for domain, rate in sorted(rates.items())
        },
    }


class ResctrlReading(NamedTuple):
    """The state before a sweep. ``default``: the default group's values; ``homes``: pod uid -> its group."""

    capability: Capability
    ours: tuple[str, ...]
    foreign: tuple[str, ...]
    default: Mapping[str, Mapping[int, int]]
    use: ResctrlUsage
    homes: Mapping[str, str]


@final
class ResctrlActuator:
    """The actuator for resctrl. One call at a time."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        ledger: Ledger,
        store_lane: trio.CapacityLimiter,
        work: ResctrlWorker,
        *,
        root: str = "/",
        writes: Counter[tuple[str, str]] | None = None,
        files: GroupFiles = REAL_GROUPS,
        cgroups: FileOps = REAL,
        capability: Callable[[], Capability] | None = None,
        mounter: Mounter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``work``: runs blocking work in one thread that is not the event loop's."""
        self.statuses: dict[str, dict[str, SettingStatus]] = {}
        self.use: ResctrlUsage | None = None
        """The newest occupancies and bandwidths."""
        self._hierarchy = hierarchy
        self._ledger = ledger
        self._writes = Counter[tuple[str, str]]() if writes is None else writes
        self._files = files
        self._cgroups = cgroups
        self._work = work
        self._clock = clock
        self._mount = ResctrlMount(
            ledger,
            store_lane,
            place=f"{root.rstrip('/')}/sys/fs/resctrl",
            read=capability if capability is not None else partial(read_capability, root),
            files=files,
            mounter=mounter if mounter is not None else RealMounter(root),
            work=work,
            clock=clock,
        )
        self._sampler: tuple[str, ResctrlSampler] | None = None
        self._plan = CachePlan()
        self._sweeps = 0
        self._outcome = SweepResult()
        self._ours: tuple[str, ...] = ()
        self._foreign: tuple[str, ...] = ()
        self._changed: dict[str, list[float]] = {}
        """By group: when another program had changed its values."""
        self._swept_plan: CachePlan | None = None
        """The plan of the last sweep."""
        self._problem = ""

    async def restore(self, only: str | None, situation: PlanSnapshot | None) -> Sequence[RestoreResult]:
        """Remove our groups, restore the default group's values, unmount our mount; or release one pod.

        ``situation``: the last one, None without any.
        """
        if only is None:
            done: Sequence[RestoreResult] = await self._undo()
        else:
            capability = await self._mount.offered(again=True)
            if capability is None or capability.status is not ResctrlStatus.READY or capability.root is None:
                return ()
            pod = situation.view.pods.get(only) if situation is not None else None
            by_name = partial(pod_threads, self._hierarchy, only, self._cgroups)
            threads = self._threads(pod) if pod is not None else by_name
            done = await self._work(partial(undo_pod, self._files, capability.root, only, threads))
        for result in done:
            self._note(
                "restored" if result.ok else "failed",
                f"{result.path}/{result.file}",
                result.detail or result.undo.value,
            )
        return done

    def measured(self, view: NodeView, request: CacheRequest) -> CacheUsage:
        """The usage of pods and groups, and the size of BE's share."""
        return measured(self._status(), view, request)

    def status(self) -> dict[str, object]:
        """Its section of the state document."""
        return status_document(self._status(), self._clock())

    def problems(self, titles: Mapping[str, str]) -> Sequence[str]:
        """What does not work now. ``titles``: of pods, by uid."""
        return problems(self._status(), titles)

    def failed(self, error: AgentError) -> None:
        """A sweep ended early: the reason is among the problems until the next one, and nothing counts as in force."""
        if str(error) != self._problem:
            _LOG.warning("resctrl sweep failed", error=str(error))
        self._problem = str(error)
        self.statuses = unread(self.statuses, str(error))

    def _status(self) -> ResctrlActuatorStatus:
        return ResctrlActuatorStatus(
            capability=self._mount.capability,
            plan=self._plan,
            outcome=self._outcome,
            use=self.use,
            ours=self._ours,
            foreign=self._foreign,
            problem=self._problem,
        )

    # One sweep

    async def observe(self, request: CacheRequest, *, writes: bool) -> ResctrlReading | None:
        """The machine's capability, the existing groups, and their usage; None if resctrl is not ready.

        ``writes``: mount resctrl if it is not mounted and the request wants that. Errors: `AgentError`.
        """
        capability = await self._mount.offered()
        if capability is not None and capability.status is ResctrlStatus.NOT_MOUNTED and request.mount and writes:
            capability = await self._mount.mount(request)
            self._note(
                "mounted", self._mount.state.place or "", f"options: {', '.join(request.mount_options) or 'none'}"
            )
        if capability is None or capability.status is not ResctrlStatus.READY or capability.root is None:
            self._plan, self._outcome, self.use, self.statuses = CachePlan(), SweepResult(), None, {}
            self._ours = self._foreign = ()
            self._problem = "" if capability is None else capability.reason
            return None
        reading = await self._work(partial(self._read, capability, capability.root))
        self._ours, self._foreign, self.use, self._problem = reading.ours, reading.foreign, reading.use, ""
        return reading

    async def apply(
        self, plan: CachePlan, request: CacheRequest, situation: PlanSnapshot, reading: ResctrlReading, *, writes: bool
    ) -> None:
        """Write the difference between the plan and the reading; without ``writes`` only report it.

        Errors: `AgentError`.
        """
        self._plan = plan
        if writes:
            await self._apply(request, situation, reading)
        # About 3 µs for each pod: not in the event loop.
        self.statuses = await self._work(partial(statuses, self._status(), situation, writes=writes))

    def _read(self, capability: Capability, root: str) -> ResctrlReading:
        if self._sampler is None or self._sampler[0] != root:
            self._sampler = root, ResctrlSampler(MonitorGroups(root, self._files))
        groups = ControlGroups(root, self._files)
        ours, foreign = tuple(groups.ours()), tuple(groups.foreign())
        use = self._sampler[1].sample((DEFAULT, *ours, *foreign), self._outcome.watched, self._clock())
        return ResctrlReading(capability, ours, foreign, groups.schemata(DEFAULT), use, self._outcome.homes)

    async def _apply(self, request: CacheRequest, situation: PlanSnapshot, reading: ResctrlReading) -> None:
        capability = reading.capability
        # Durable before the first group is made, and before the default group is changed: what a restore cannot find by
        # the groups' prefix.
        await self._mount.save(replace(self._mount.state, groups=True))
        if self._plan.default is not None:
            await self._mount.save(about_to_write(self._mount.state, reading.default, self._plan.default))
        elif self._mount.state.original is not None:
            undone = await self._work(partial(undo_default, self._files, capability, self._mount.state))
            if undone is not None and undone.over:
                await self._mount.save(replace(self._mount.state, original=None, written=()), dropped="restored")
        yielded = self._yielded()
        sweep = ResctrlSweep(
            self._files,
            capability,
            self._plan,
            await self._work(partial(self._members, situation)),
            watch=self._outcome.watch,
            now=self._clock(),
            dwell_s=request.dwell_s,
            monitor=request.monitor,
            yielded=yielded,
            followed=self._outcome.followed if self._sweeps % _EVERY else None,
        )
        steps = sweep.steps()
        while not await self._work(partial(_advance, steps, _SLICE_S)):
            pass
        self._sweeps += 1
        self._record_outcome(sweep.outcome, yielded)
        self._outcome, self._ours = sweep.outcome, sweep.outcome.ours

    def _members(self, situation: PlanSnapshot) -> list[GroupMember]:
        return [self._member(pod, situation) for _, pod in sorted(situation.view.pods.items())]

    def _member(self, pod: Pod, situation: PlanSnapshot) -> GroupMember:
        hold = holding(situation.holds, path=pod.group.path, knob=RESCTRL_GROUP, pod_uid=pod.uid)
        home = self._plan.members.get(pod.uid, DEFAULT)
        return GroupMember(pod.uid, home, _RANK[pod.pod_class], hold is not None, self._threads(pod))

    def _threads(self, pod: Pod) -> Callable[[], GroupThreads]:
        # gVisor has its processes in the pod's own group.
        paths = [box.group.path for box in pod.containers] if pod.sandbox is None else [pod.group.path]
        return lambda: together(threads_of(self._hierarchy, path, self._cgroups) for path in paths)

    # Policy switched off

    @property
    def to_undo(self) -> bool:
        """Whether there is anything to restore."""
        return self._mount.to_undo or bool(self._ours)

    async def leave(self, *, writes: bool) -> None:
        """The policy is off: restore its changes. Errors: `AgentError`."""
        self._plan, self._outcome, self.use, self.statuses = CachePlan(), SweepResult(), None, {}
        self._problem = ""
        if self.to_undo:
            capability = await self._mount.offered()
            if capability is not None and capability.status is ResctrlStatus.READY and capability.root is not None:
                self._ours = tuple(await self._work(ControlGroups(capability.root, self._files).ours))
            if writes:
                for result in await self._undo():
                    self._note("restored" if result.ok else "failed", f"{result.path}/{result.file}", result.detail)

    async def _undo(self) -> list[RestoreResult]:
        self._ours, self._outcome, self.statuses, self._sampler = (), SweepResult(), {}, None
        return await self._mount.undo()

    # Events and counts

    def _yielded(self) -> dict[str, str]:
        if self._swept_plan is None or _wanted_values(self._swept_plan) != _wanted_values(self._plan):
            self._changed.clear()
        since = self._clock() - _COUNTED_S
        recent = {name: [at for at in times if at > since] for name, times in self._changed.items()}
        self._changed = {name: times for name, times in recent.items() if times}
        message = f"changed {_PATIENCE} times by another program within an hour; unchanged for up to an hour"
        return {name: message for name, times in self._changed.items() if len(times) >= _PATIENCE}

    def _record_outcome(self, outcome: SweepResult, yielded: Collection[str]) -> None:
        """Count the writes, and record foreign changes in the history. ``yielded``: groups that were not written."""
        before = _wanted_values(self._swept_plan) if self._swept_plan is not None else {}
        now, self._swept_plan = _wanted_values(self._plan), self._plan
        for name in outcome.rewritten:
            # In place after the last sweep, and the plan has not changed them: another program has.
            if name in self._outcome.homes.values() and before.get(name) == now.get(name):
                self._changed.setdefault(name, []).append(self._clock())
                self._note("foreign", name, "changed by another program; written again")
        for name in (*outcome.made, *outcome.removed):
            self._note("made" if name in outcome.made else "removed", name, "resctrl group")
        self._writes["resctrl.schemata", "written"] += len(outcome.written)
        self._writes["resctrl.schemata", "refused"] += len(outcome.refused.keys() - yielded)
        self._writes["resctrl.groups", "written"] += outcome.moved

    def _note(self, kind: str, path: str, why: str) -> None:
        event = LedgerEvent(at=time.time(), kind=kind, path=path, file="resctrl", writer=US, policy=CACHE, reason=why)
        self._ledger.note(event)


def _wanted_values(plan: CachePlan) -> dict[str, Mapping[str, Mapping[int, int]] | None]:
    """By group, the default one included."""
    return {DEFAULT: plan.default, **{group.name: group.schemata for group in plan.groups}}


def _advance(steps: Iterator[None], seconds: float) -> bool:
    """Continue for so many seconds; True at the end."""
    until = time.monotonic() + seconds
    return all(time.monotonic() < until for _ in steps)
