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
from typing import Final, NamedTuple, TypeVar, final

import trio
from msgspec.structs import replace

from cgroupfs.errors import AgentError, InputError, StoreError
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from reconciler.actuators import resctrl_show as show
from reconciler.actuators.resctrl_undo import (
    Kept,
    about_to_write,
    pod_threads,
    read_kept,
    threads_of,
    undo_all,
    undo_default,
    undo_pod,
    write_kept,
)
from reconciler.actuators.resctrl_work import Member, Outcome, Sweep
from reconciler.actuators.side import Situation
from reconciler.actuators.standing import Standing
from reconciler.holds import holding
from reconciler.policies.cache import KNOB
from reconciler.policies.cache import NAME as POLICY
from reconciler.policies.cachelevel import LevelState, begin, step
from reconciler.policies.cacheplan import CachePlan, plan_cache
from reconciler.restore import Undone
from reconciler.signals.resctrl import Sample, Sampler, strain
from resctrl.capability import Capability, Status, read_capability
from resctrl.files import REAL as REAL_GROUPS
from resctrl.files import GroupFiles
from resctrl.groups import DEFAULT, Groups
from resctrl.monitor import Monitors
from resctrl.mount import Mounter, RealMounter
from state.cache import CacheMode, CacheWish
from state.entry import US, Event
from state.ledger import Ledger
from state.model import Pod, PodClass
from state.store import Store

_LOG: Final = logging.getLogger(__name__)
_SLICE_S: Final = 0.02
_GAP_S: Final = 0.2
_LOOK_AGAIN_S: Final = 60.0
_PATIENCE: Final = 5
"""So often a group's values are put back after somebody changed them; then they are left until the wish changes."""
_EVERY: Final = 15
"""So often everything is looked into, whatever is known of the last sweep: a thread's number may be another's."""
_RANK: Final = {PodClass.DEDICATED: 0, PodClass.SHARED: 0, PodClass.RECLAIMED: 1, PodClass.SYSTEM: 2}
T = TypeVar("T")


class _Look(NamedTuple):
    """What is there before a sweep."""

    ours: tuple[str, ...]
    foreign: tuple[str, ...]
    default: Mapping[str, Mapping[int, int]]
    sample: Sample


@final
class Resctrl:
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
        misses: Callable[[], Mapping[str, float]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``misses``: cache misses of online pods by uid, in percent of references, from whoever counts them."""
        self.standings: dict[str, dict[str, Standing]] = {}
        self.sample: Sample | None = None
        """The newest occupancies and bandwidths."""
        self._hierarchy = hierarchy
        self._store = store
        self._ledger = ledger
        self._store_lane = store_lane
        self._place = f"{root.rstrip('/')}/sys/fs/resctrl"
        self._writes = Counter[tuple[str, str]]() if writes is None else writes
        self._files = files
        self._cgroups = cgroups
        self._read = capability if capability is not None else partial(read_capability, root)
        self._mounter = mounter if mounter is not None else RealMounter(root)
        self._misses = misses
        self._clock = clock
        self._kept = read_kept(store)
        self._situation: Situation | None = None
        self._woken = trio.Event()
        self._alone = trio.Lock()
        self._lane = trio.CapacityLimiter(1)
        self._capability: Capability | None = None
        self._looked_at = float("-inf")
        self._sampler: Sampler | None = None
        self._level: LevelState | None = None
        self._plan = CachePlan()
        self._outcome = Outcome()
        self._ours: tuple[str, ...] = ()
        self._foreign: tuple[str, ...] = ()
        self._changed: Counter[str] = Counter()
        self._changed_plan: CachePlan | None = None
        self._problem = ""
        self._sweeps = 0
        self._swept_s = 0.0

    # The seam

    def planned(self, situation: Situation) -> None:
        """A look is over. Wakes the sweep when something of it has changed; else that comes when it is due."""
        before, self._situation = self._situation, situation
        if before is None or _substance(before) != _substance(situation):
            self._woken.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Sweep after each look, and now and then, for ever."""
        task_status.started()
        while True:
            with trio.move_on_after(self._period_s()):
                await self._woken.wait()
            self._woken = trio.Event()
            await self.sweep()
            await trio.sleep(_GAP_S)

    async def restore(self, only: str | None = None) -> Sequence[Undone]:
        """Remove our groups, put the default group's values back, take our mount away; or free one pod."""
        async with self._alone:
            # What is known of mode and holds is older than this: nothing is done before the next look.
            situation, self._situation = self._situation, None
            capability = await self._offered(again=True)
            if capability is None or capability.status is not Status.READY or capability.root is None:
                return ()
            if only is not None:
                pod = situation.view.pods.get(only) if situation is not None else None
                by_name = partial(pod_threads, self._hierarchy, only, self._cgroups)
                threads = self._threads(pod) if pod is not None else by_name
                done = await self._work(partial(undo_pod, self._files, capability.root, only, threads))
            else:
                done = await self._undo(capability)
        for one in done:
            self._note("restored" if one.ok else "failed", f"{one.path}/{one.file}", one.detail or one.undo.value)
        return done

    def facts(self) -> Mapping[str, object]:
        """Its section; see `resctrl_show.facts`."""
        return {**show.facts(self._status(), self._clock()), "sweeps": self._sweeps, "last_sweep_s": self._swept_s}

    def problems(self) -> Sequence[str]:
        """What does not work now."""
        situation = self._situation
        titles = {} if situation is None else {uid: pod.title for uid, pod in situation.view.pods.items()}
        return show.problems(self._status(), titles)

    def _status(self) -> show.Status:
        return show.Status(
            capability=self._capability,
            plan=self._plan,
            outcome=self._outcome,
            level=self._level,
            sample=self.sample,
            ours=self._ours,
            foreign=self._foreign,
            problem=self._problem,
        )

    # One sweep

    async def sweep(self) -> None:
        """Bring resctrl to what the newest look wants; one sweep at a time."""
        async with self._alone:
            situation = self._situation
            if situation is None:
                return
            began = self._clock()
            try:
                await self._sweep(situation)
            except AgentError as exc:
                if str(exc) != self._problem:
                    _LOG.warning("resctrl: %s", exc)
                self._problem = str(exc)
            self._sweeps += 1
            self._swept_s = self._clock() - began

    async def _sweep(self, situation: Situation) -> None:
        wish = situation.pools.cache
        writes = situation.enforce and (wish is None or not wish.dry_run) and "node" not in situation.holds
        if wish is None:
            await self._leave(writes=writes)
            return
        capability = await self._offered()
        if capability is not None and capability.status is Status.NOT_MOUNTED and wish.mount and writes:
            capability = await self._mount(wish)
        if capability is None or capability.status is not Status.READY or capability.root is None:
            self._plan, self._outcome, self.sample, self.standings = CachePlan(), Outcome(), None, {}
            self._problem = "" if capability is None else capability.reason
            return
        if self._sampler is None:
            self._sampler = Sampler(Monitors(capability.root, self._files))
        look = await self._work(partial(self._look, capability.root))
        self._ours, self._foreign, self.sample, self._problem = look.ours, look.foreign, look.sample, ""
        self._step(wish, situation)
        level = self._level or begin(wish.levels)
        pods = situation.view.pods
        plan = partial(plan_cache, wish, tuple(pods.values()), capability, level=level.level)
        self._plan = await self._work(partial(plan, foreign=len(look.foreign), having=frozenset(look.ours)))
        if writes:
            await self._bring(wish, capability, situation, look)
        self.standings = show.standings(self._status(), situation, writes=writes)

    def _look(self, root: str) -> _Look:
        groups = Groups(root, self._files)
        ours, foreign = tuple(groups.ours()), tuple(groups.foreign())
        assert self._sampler is not None
        sample = self._sampler.sample((DEFAULT, *ours, *foreign), self._outcome.watched, self._clock())
        return _Look(ours, foreign, groups.schemata(DEFAULT), sample)

    def _step(self, wish: CacheWish, situation: Situation) -> None:
        """Let the law move BE's share, with what was read before this sweep."""
        if wish.mode is not CacheMode.DYNAMIC and not any("-be-dynamic" in name for name in self._ours):
            self._level = None
            return
        state = self._level if self._level is not None else begin(wish.levels)
        pods = situation.view.pods.values()
        homes = {self._outcome.homes.get(pod.uid, DEFAULT) for pod in pods if pod.pod_class is PodClass.RECLAIMED}
        now = self._clock()
        feeling = strain(
            self.sample,
            homes - {DEFAULT},
            bandwidth_mbps=wish.bandwidth_mbps,
            online=sum(pod.pod_class in {PodClass.SHARED, PodClass.DEDICATED} for pod in pods),
            misses=self._misses(),
            now=now,
        )
        self._level = step(state, feeling, now, wish.law, wish.levels)
        if self._level.level != state.level:
            _LOG.info("BE's share of cache and memory bandwidth: %s", self._level)

    async def _bring(self, wish: CacheWish, capability: Capability, situation: Situation, look: _Look) -> None:
        if self._plan.default is not None:
            await self._keep(about_to_write(self._kept, look.default, self._plan.default))
        elif self._kept.original is not None:
            undone = await self._work(partial(undo_default, self._files, capability, self._kept))
            if undone is not None and undone.ok:
                await self._keep(replace(self._kept, original=None, written=()))
        members = [
            self._member(pod, situation) for pod in sorted(situation.view.pods.values(), key=lambda pod: pod.uid)
        ]
        sweep = Sweep(
            self._files,
            capability,
            self._plan,
            members,
            watch=self._outcome.watch,
            now=self._clock(),
            dwell_s=wish.dwell_s,
            monitor=wish.monitor,
            left_alone=self._yielded(),
            followed=self._outcome.followed if self._sweeps % _EVERY else None,
        )
        steps = sweep.steps()
        while not await self._work(partial(_advance, steps, _SLICE_S)):
            pass
        self._noted(sweep.outcome)
        self._outcome, self._ours = sweep.outcome, sweep.outcome.ours

    def _member(self, pod: Pod, situation: Situation) -> Member:
        hold = holding(situation.holds, path=pod.group.path, knob=KNOB, pod_uid=pod.uid)
        home = self._plan.members.get(pod.uid, DEFAULT)
        return Member(pod.uid, home, _RANK[pod.pod_class], hold is not None, self._threads(pod))

    def _threads(self, pod: Pod) -> Callable[[], set[int]]:
        paths = [box.group.path for box in pod.containers]

        def read() -> set[int]:
            return set().union(*(threads_of(self._hierarchy, path, self._cgroups) for path in paths))

        return read

    # The mount, and leaving

    async def _offered(self, *, again: bool = False) -> Capability | None:
        """What the machine offers; looked at again now and then while it is not ready."""
        known, now = self._capability, self._clock()
        ready = known is not None and known.status is Status.READY
        if again or not ready or now - self._looked_at >= _LOOK_AGAIN_S:
            self._looked_at = now
            try:
                found = await self._work(self._read)
            except InputError:
                self._capability = None
                raise
            if known is None or (found.root, found.options) != (known.root, known.options):
                self._sampler = None
            self._capability = found
        return self._capability

    async def _mount(self, wish: CacheWish) -> Capability | None:
        await self._keep(replace(self._kept, place=self._place, ident=0))
        options = [option.value for option in wish.mount_options]
        try:
            await self._work(partial(self._mounter.mount, self._place, options))
        except AgentError:
            await self._keep(replace(self._kept, place=None, ident=0))
            raise
        ident = await self._work(partial(self._mounter.ident, self._place))
        await self._keep(replace(self._kept, ident=ident or 0))
        self._note("mounted", self._place, f"options: {', '.join(options) or 'none'}")
        return await self._offered(again=True)

    async def _leave(self, *, writes: bool) -> None:
        """The policy is off: what it has done is undone."""
        self._plan, self._outcome, self.sample, self.standings, self._level = CachePlan(), Outcome(), None, {}, None
        if self._looked_at == float("-inf") or self._ours or self._kept.original or self._kept.place:
            capability = await self._offered()
            if capability is None or capability.status is not Status.READY or capability.root is None:
                return
            self._ours = tuple(await self._work(Groups(capability.root, self._files).ours))
            if writes:
                for one in await self._undo(capability):
                    self._note("restored" if one.ok else "failed", f"{one.path}/{one.file}", one.detail)
        self._problem = ""

    async def _undo(self, capability: Capability) -> list[Undone]:
        done, left = await self._work(partial(undo_all, self._files, capability, self._kept, self._mounter))
        self._ours, self._outcome, self.standings, self._sampler = (), Outcome(), {}, None
        if left != self._kept:
            await self._keep(left)
        self._looked_at = float("-inf") if left.place is not None else self._looked_at
        self._capability = None
        return done

    async def _keep(self, kept: Kept) -> None:
        """Make it durable. Errors: `StoreError`: then nothing is touched."""
        if kept == self._kept:
            return
        try:
            await trio.to_thread.run_sync(write_kept, self._store, kept, limiter=self._store_lane)
        except StoreError as exc:
            raise StoreError(f"resctrl is left as it is, what is there cannot be recorded: {exc}") from exc
        self._kept = kept

    # Small things

    async def _work(self, work: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(work, limiter=self._lane)

    def _period_s(self) -> float:
        wish = self._situation.pools.cache if self._situation is not None else None
        return wish.sweep_s if wish is not None else float("inf")

    def _yielded(self) -> dict[str, str]:
        if self._changed_plan is None or self._changed_plan.groups != self._plan.groups:
            self._changed.clear()
            self._changed_plan = self._plan
        words = f"somebody else has changed its values {_PATIENCE} times: they are left until another plan"
        return {name: words for name, count in self._changed.items() if count >= _PATIENCE}

    def _noted(self, outcome: Outcome) -> None:
        """Count, and put what somebody else had changed into the history."""
        before = {group.name: group.schemata for group in self._changed_plan.groups} if self._changed_plan else {}
        now = {group.name: group.schemata for group in self._plan.groups}
        for name in outcome.rewritten:
            if name in self._outcome.homes.values() and before.get(name) == now.get(name):
                self._changed[name] += 1
                self._note("foreign", name, "its values had been changed by somebody else; written again")
        for name in (*outcome.made, *outcome.removed):
            self._note("made" if name in outcome.made else "removed", name, "resctrl group")
        self._writes["resctrl.schemata", "written"] += len(outcome.written)
        self._writes["resctrl.schemata", "refused"] += len(outcome.refused)
        self._writes["resctrl.tasks", "written"] += outcome.moved

    def _note(self, kind: str, path: str, why: str) -> None:
        event = Event(at=time.time(), kind=kind, path=path, file="resctrl", writer=US, policy=POLICY, reason=why)
        self._ledger.note(event)


def _advance(steps: Iterator[None], seconds: float) -> bool:
    """Go on for a while; True at the end."""
    until = time.monotonic() + seconds
    return all(time.monotonic() < until for _ in steps)


def _substance(situation: Situation) -> tuple[object, ...]:
    """What a sweep goes by. Pods that have not changed are the same objects, so that comparing costs little."""
    return situation.enforce, situation.pools.cache, situation.holds, situation.view.pods
