"""Monitors online pods: reads signals, evaluates them, requests relief from the plan, orders evictions, sends alerts.

One pass each ``interference.sample_s``, fewer while nothing is wrong (`reconciler.interference.pace`), and one at once
when memory or CPU pressure of the node begins (`reconciler.sources.pressure_events`): readers fill a sheet, the sheet
and the pods' snapshots are a `SampleFrame`, the engine evaluates it. Its demands reach the groups through the plan like
any other setting. What `MonitorState` has is stored at intervals; everything else starts empty with each run.

Longer than other modules because a pass, from the readers to what it announces, is read as one sequence.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Protocol, final

import msgspec
import trio
from msgspec import Struct

from cgroupfs.bounded import decoded
from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import StoreError
from cgroupfs.log import get_log
from reconciler.actuators.holds import OFF_NODE, pod_hold
from reconciler.config.model import Config
from reconciler.control.hub import NodeBase
from reconciler.control.loop import ControlLoop
from reconciler.control.record import NodeRecord
from reconciler.interference.alerts import alerts_of, closing_alert, effect_events, opened_alert, resolutions
from reconciler.interference.engine import EngineState, Evaluation, InterferenceEngine
from reconciler.interference.nodesteps import NodeStep, PlannerSettings, settings_of
from reconciler.interference.pace import PassPace
from reconciler.interference.recorder import Recorder
from reconciler.interference.recording import LearnedState
from reconciler.interference.snapshots import host_samples, host_snapshot, snapshot_of
from reconciler.policies.cache import signals_of as cache_signals
from reconciler.responses.closing import ClosingPast, ClosingState, ClosingTurn, advance, causes_of
from reconciler.responses.closing import kept as closing_kept
from reconciler.responses.closing import resumed as closing_resumed
from reconciler.responses.eviction.limits import EvictionHistory
from reconciler.responses.eviction.limits import load_history as past_restored
from reconciler.responses.eviction.limits import saved_history as past_kept
from reconciler.responses.eviction.plan import EvictionDecision, decide, initial_state, signals_of
from reconciler.responses.eviction.plan import EvictionPlanState as EvictionMemory
from reconciler.responses.measure import announced
from reconciler.runtime.cooperative import TimeSlice, measured_steps
from reconciler.runtime.stints import in_worker
from reconciler.runtime.wakeup import beat_after
from reconciler.runtime.workqueue import NODE, TICK, pod_key
from reconciler.signals.devicestats import whole_disks
from reconciler.signals.readers import ReaderContext, SampleContext, SampleSheet
from reconciler.signals.reading import MeteredReader, ReaderTasks, build, costs
from state.closing import ClosedNode, MarkState, MarkStatus, NodeClosing
from state.eviction import EvictionCase, EvictionOrder, EvictionOutcome, EvictionStep
from state.evidence import PodSnapshot, SampleFrame
from state.measures import Restrictions
from state.memory import MemoryPlan
from state.model import Hold, NodeView, Pod, PodClass, Pools
from state.plan import NodePlan
from state.schema import META
from state.store import Store, StoreBatch

_LOG: Final = get_log("monitor")
ROW: Final = "interference"
"""Row of the store's META table: what outlives the daemon."""
_KEEP_S: Final = 60.0
_DISKS_S: Final = 60.0
_STOP_S: Final = 5.0
_SOONEST_S: Final = 0.1
"""At least between two passes, however many events come: rates over less time are noise."""
_NO_MEASURES: Final = Restrictions()
_ENDING: Final = frozenset(
    {EvictionStep.WAIT, EvictionStep.STOP, EvictionStep.TERMINATE, EvictionStep.KILL, EvictionStep.VERIFY}
)
"""The pod's end has been announced, and cannot be refused any more."""


class MonitorState(Struct, frozen=True, kw_only=True):
    """The body of the row `ROW`."""

    brain: EngineState = EngineState()
    past: EvictionHistory = EvictionHistory()
    closing: ClosingPast = ClosingPast()


class EvictionExecutor(Protocol):
    """Carries out evictions."""

    def submit(self, order: EvictionOrder) -> None: ...

    def measured(self, critical: Collection[tuple[str, str]]) -> None: ...

    def withdraw(self, order: str, why: str) -> None: ...

    def cases(self) -> Sequence[EvictionCase]: ...

    def ending(self) -> frozenset[str]: ...

    @property
    def ended(self) -> Mapping[EvictionOutcome, int]: ...


@final
class InterferenceMonitor:
    """Samples, evaluates and responds, once an interval. ``tell`` never waits."""

    def __init__(
        self,
        base: NodeBase,
        record: NodeRecord,
        control: ControlLoop,
        *,
        config: Callable[[], Config],
        settings: Callable[[], bytes] = bytes,
        means: Callable[[Config], ReaderContext],
        tell: Callable[..., None],
        kept: MonitorState,
        evictor: EvictionExecutor | None = None,
        building: Callable[
            [Collection[str], ReaderContext, Sequence[MeteredReader]], tuple[MeteredReader, ...]
        ] = build,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``config``: the one in use. ``means``: the environment of readers.

        ``settings``: the control plane's, to record. ``kept``: by `read_kept`.
        ``building``: makes the readers of the signals that are wanted.
        """
        self._building = building
        self._hierarchy, self._samples, self._record, self._control = (
            base.place.hierarchy,
            base.samples,
            record,
            control,
        )
        self._in_use, self._means, self._tell, self._evictor = config, means, tell, evictor
        self._mode, self._settings = control.writes.mode, settings
        self._clock, self._wall = clock, wall
        self._readers: tuple[MeteredReader, ...] = ()
        self._config: Config | None = None
        self._signals: frozenset[str] = frozenset()
        """The signals that are measured by that configuration."""
        self._cached = self._followed = False
        """Whether the cache policy, and the sizes of pools, need samples."""
        self._resting: Config | None = None
        """The configuration with which a restore has suspended it: no pass before another one is read."""
        # A pass that is under way ends before `suspend` takes anything back.
        self._looking = trio.Lock()
        self.engine = InterferenceEngine(config().interference, kept.brain, **_carried_out(config()))
        self._past = kept.past
        self.evictions: EvictionMemory | None = None
        """What the eviction planner remembers; None before the first pass."""
        self._saved: MonitorState | None = None
        self._saved_at = 0.0
        self._created: dict[str, tuple[int, float]] = {}
        """By uid, the inode of the pod's directory and when it was made (seconds since the epoch)."""
        self._known: dict[str, tuple[Pod, PodSnapshot]] = {}
        """The snapshots of the last pass, with the pod that each describes."""
        self._pools: Pools | None = None
        self._default_cpus = CpuSet()
        self._disks: tuple[str, ...] = ()
        self._disks_at = float("-inf")
        self._listeners: frozenset[str] = frozenset()
        """Pods whose capacity file could be written, by uid: they get notice."""
        self.frame: SampleFrame | None = None
        self.judgement: Evaluation | None = None
        self.decision = EvictionDecision()
        self.closing = ClosingState()
        """Whether the node is closed to new BE pods."""
        self._closing_past: ClosingPast | None = kept.closing
        """What an earlier run knew of that; None once it is in ``closing``."""
        self.closings: Counter[str] = Counter()
        """How often it was closed and opened, by turn."""
        self._settled_s: float | None = None
        """Since when the cluster can know that the node is closed."""
        self.changes: Counter[tuple[str, str]] = Counter()
        """Changes on the ladder, by response and turn."""
        self.passes = 0
        self.pass_s = 0.0
        """CPU seconds of the last pass: reading and judging."""
        self.recorder = Recorder()
        self._woken = trio.Event()
        self._pace = PassPace()
        self.wakes: Counter[str] = Counter()
        """Passes that an event requested, by its cause."""
        self._tasks: ReaderTasks | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Monitor until cancelled; then no demand on the plan remains."""
        task_status.started()
        began = trio.current_time()
        self._pace.sign(self._clock())
        try:
            async with trio.open_nursery() as nursery:
                self._tasks = ReaderTasks(nursery)
                while True:
                    if self._resting is not self._in_use():
                        async with self._looking:
                            await self.evaluate()
                    due = min(self._due(began), trio.current_time() + self._notice_left_s())
                    began = await self._wait_until(due)
        finally:
            self._tasks = None
            self._samples.put(None)
            self._publish(Restrictions())
            self._closing_past = self._past_closing()  # before it is forgotten: the next run counts its age on
            self._forget("interference detection stopped")
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _STOP_S):
                await self._keep(self._clock())
                for reader in self._readers:
                    await reader.aclose()
                # A component that failed is run again: it makes its readers again.
                self._readers, self._config = (), None
                await self.recorder.aclose()

    def wake(self, cause: str) -> None:
        """Run a pass at once, before the next one is due; the interval starts again from it."""
        self.wakes[cause] += 1
        self._pace.sign(self._clock())
        self._woken.set()

    def _due(self, began: float) -> float:
        """When the pass after the one that began then is due. One that took too long is not made up for."""
        interval_s = float(self._pace.interval_s(self._in_use().interference.sample_s, self._clock()))
        if interval_s.is_integer():
            return beat_after(interval_s)  # one wake-up of the loop with its other periodic tasks
        return max(began + interval_s, trio.current_time())

    async def _wait_until(self, due: float) -> float:
        """Wait for the next pass; when it begins."""
        soonest = trio.current_time() + _SOONEST_S
        with trio.move_on_at(due):
            await self._woken.wait()
            await trio.sleep_until(soonest)
        self._woken = trio.Event()
        return min(due, trio.current_time())

    async def suspend(self) -> None:
        """Ask for nothing and hold nothing until the configuration is read again: everything is being restored."""
        self._resting = self._in_use()
        async with self._looking:
            self._publish(Restrictions())
            if self._tasks is not None:
                self._tasks.arrange(())
            for reader in self._readers:
                await reader.aclose()
            self._readers, self._config = (), None
            self._forget("a restore is running")
            self._closing_past = None

    def _forget(self, why: str) -> None:
        """End what lasts, and report the end: no later pass would."""
        if self.frame is not None:
            frame = msgspec.structs.replace(self.frame, wall_s=self._wall())
            if self.closing.closed is not None:
                self._tell(opened_alert(self.closing.closed, why, frame.wall_s))
            for alert in resolutions(self.engine.active, self.engine.ladder.climbs.values(), frame, why):
                self._tell(alert)
        self.engine.forget()
        self.judgement, self.decision = None, EvictionDecision()
        self.closing, self._settled_s = ClosingState(), None

    async def evaluate(self) -> Evaluation:
        await self._configure()
        config, before = self._in_use(), self._read_s()
        view, plan = self._control.current()
        slices = TimeSlice()
        frame = await self._frame(config, view, plan)
        await slices.checkpoint()
        judgement, judging_s = await measured_steps(self.engine.evaluate(frame), TimeSlice())
        await slices.checkpoint()
        self.pass_s = self._read_s() - before + judging_s
        self._decide(config, frame, judgement)
        # After the decision: its shortages close the node.
        measures = msgspec.structs.replace(self._allowed(judgement.measures), closed=self._close(config, frame))
        self._publish(self._announced(config, measures, frame.at_s))
        for mode in judgement.modes:
            _LOG.info("rule mode changed by evidence", rule=mode.rule, enforcing=mode.enforcing, reason=mode.reason)
        for alert in alerts_of(judgement, frame, self.engine.ladder.climbs.values()):
            self._tell(alert)
        for event in effect_events(judgement, frame):
            self._record.ledger.note(event)
        for change in judgement.changes:
            response = change.step.response.value if change.step is not None else ""
            self.changes[response, f"would-{change.turn}" if change.shadow else change.turn.value] += 1
        self.judgement = judgement
        if self._is_sign(judgement, measures):
            self._pace.sign(frame.at_s)
        await slices.checkpoint()
        self.recorder.add(
            config.interference.record,
            frame,
            lambda: LearnedState(self.engine.remember().learned),
            lambda: NodeStep(view=view, plan=plan, settings=self._planner_settings(config)),
        )
        self.passes += 1
        if judgement.modes or frame.at_s - self._saved_at >= _KEEP_S:
            await self._keep(frame.at_s)
        return judgement

    def _planner_settings(self, config: Config) -> PlannerSettings:
        return settings_of(config, self._control.inventory, self._settings())

    def _is_sign(self, judgement: Evaluation, measures: Restrictions) -> bool:
        """Whether something is wrong, begins, or is done about it; or a policy works by each second's samples."""
        return (
            judgement.signs
            or measures != _NO_MEASURES
            or bool(self.decision.pressures)
            or self._cached
            or self._followed
            or any(case.open for case in self.cases())
        )

    # The frame

    async def _configure(self) -> None:
        """Use the newest configuration; readers that are no longer needed are closed."""
        config = self._in_use()
        if config is self._config:
            return
        self._config = config
        self._samples.put(None)
        self.engine.configure(config.interference, **_carried_out(config))
        wanted = self._signals = self._wanted(config)
        before, self._readers = self._readers, self._building(wanted, self._means(config), self._readers)
        if self._tasks is not None:
            self._tasks.arrange(metered_reader.reader for metered_reader in self._readers)
        for reader in before:
            if reader not in self._readers:
                await reader.aclose()

    def _wanted(self, config: Config) -> frozenset[str]:
        cached, followed = cache_signals(config.policies.cache), config.policies.shared.signals
        self._cached, self._followed = bool(cached), bool(followed)
        by_eviction = signals_of(config.eviction, network=self.engine.finds_network())
        return self.engine.wanted() | by_eviction | cached | followed

    async def _frame(self, config: Config, view: NodeView, plan: NodePlan | None) -> SampleFrame:
        now = self._clock()
        pools = plan.pools if plan is not None else None
        capacity = plan.capacity if plan is not None else None
        asked = capacity.pods if capacity is not None and not capacity.dry_run else ()
        # A pod without the volume that it names would only delay each step.
        self._listeners = self._control.sides.notified().intersection(asked) if asked else frozenset()
        wanted = self._signals
        memory = plan.memory if plan is not None else MemoryPlan()
        scene, sheet = SampleContext(view=view, pools=pools, wanted=wanted, memory=memory), SampleSheet()
        slices = TimeSlice()
        for reader in self._readers:
            await reader.read(scene, sheet, now)
            # Most take some tenths of a millisecond and do not yield themselves.
            await slices.checkpoint()
        holds, wall_s = self._mode.holds, self._wall()
        if pools != self._pools or view.kubelet.default_cpus != self._default_cpus:
            self._known.clear()  # a snapshot has the pod's pool and CPUs
            self._pools, self._default_cpus = pools, view.kubelet.default_cpus
        pods = {uid: self._facts(pod, view, pools, holds, wall_s) for uid, pod in view.pods.items()}
        for uid in self._ended_by_us() & pods.keys():
            pods[uid] = msgspec.structs.replace(pods[uid], terminating=True)
        for uid in self._created.keys() - pods.keys():
            del self._created[uid]
            self._known.pop(uid, None)
        if now - self._disks_at >= _DISKS_S:
            self._disks, self._disks_at = whole_disks(config.node.root), now
        hosts = self._hosts(sheet, now)
        return SampleFrame(
            at_s=now,
            hosts=hosts,
            wall_s=wall_s,
            pods=pods,
            samples=sheet.samples,
            knobs=tuple(sorted(view.knobs)),
            disks=self._disks,
            enforce=self._mode.enforce,
            be_yields=pools is not None and pools.harm is not None and pools.harm.in_force,
            closing=self._closing(config, now),
        )

    def _hosts(self, sheet: SampleSheet, now: float) -> dict[str, PodSnapshot]:
        """Host workloads that are there, with their samples entered."""
        known, hosts = self._control.inventory.readings.hosts, dict[str, PodSnapshot]()
        for host in known.entries.values():
            if host.present:
                snapshot = host_snapshot(host)
                hosts[snapshot.uid] = snapshot
                sheet.merge(snapshot.uid, host_samples(host, max(0.0, now - known.at_s)))
        return hosts

    def _closing(self, config: Config, now: float) -> NodeClosing | None:
        """None where it cannot be closed now: by the configuration, or because it was for as long as that may last."""
        if not config.closing.enabled or self.closing.spent or self._open_because(config):
            return None
        if self.closing.closed is None or self._control.closing():
            self._settled_s = None
            return NodeClosing()
        if self._settled_s is None:
            self._settled_s = now
        mark = self._control.sides.mark()
        in_place = mark is not None and mark.state is MarkState.IN_PLACE
        return NodeClosing(closed_s=self._settled_s, mark=mark.mark if mark is not None and in_place else None)

    def _ended_by_us(self) -> set[str]:
        """Pods that bypassd is evicting, by uid: the kubelet reports that late, or never without its API."""
        return {case.order.uid for case in self.cases() if case.open and case.step in _ENDING}

    def _facts(
        self, pod: Pod, view: NodeView, pools: Pools | None, holds: Mapping[str, Hold], wall_s: float
    ) -> PodSnapshot:
        held = bool(holds) and pod_hold(holds, pod.uid, pod.paths) is not None
        known = self._known.get(pod.uid)
        if known is None or known[0] is not pod or known[1].held is not held or known[1].created_s > wall_s:
            cpus = _cpus(pod, view, pools)
            known = pod, snapshot_of(pod, pools, created_s=self._created_s(pod, wall_s), held=held, cpus=cpus)
            self._known[pod.uid] = known
        return known[1]

    def _created_s(self, pod: Pod, wall_s: float) -> float:
        """When the pod's directory was made, at the latest ``wall_s``; read once for each inode."""
        known = self._created.get(pod.uid)
        if known is None or known[0] != pod.group.inode:
            try:
                # Only its own chmod or chown moves a directory's ctime; the mtime moves with each container.
                made = os.stat(self._hierarchy.trigger_directory(pod.group.path)).st_ctime
            except OSError:
                made = 0.0
            known = self._created[pod.uid] = pod.group.inode, made
        if known[1] > wall_s:
            # The clock was set back since: the pod would be young until it has caught up.
            known = self._created[pod.uid] = pod.group.inode, wall_s
        return known[1]

    # Responses

    def _allowed(self, measures: Restrictions) -> Restrictions:
        """Without freezing a pod that is being ended: a frozen process neither handles a signal nor exits."""
        ending = self._evictor.ending() if self._evictor is not None else frozenset[str]()
        if not ending & measures.frozen.keys():
            return measures
        frozen = {uid: reason for uid, reason in measures.frozen.items() if uid not in ending}
        return msgspec.structs.replace(measures, frozen=frozen)

    def _announced(self, config: Config, measures: Restrictions, now: float) -> Restrictions:
        """Without what a pod with a capacity file gets notice of first."""
        policies = config.policies
        if not (self._listeners and policies.capacity.notice_s and self._mode.enforce):
            return measures
        return announced(
            measures, self._control.inventory.readings.measures, self._listeners, now, policies.capacity.notice_s
        )

    def _close(self, config: Config, frame: SampleFrame) -> ClosedNode | None:
        """Whether the node takes new BE pods, by the newest shortages and the ladder."""
        eviction = config.eviction
        enforced: list[str] = []
        if frame.enforce and eviction.enabled and not eviction.dry_run:
            triggers = eviction.triggers
            names = (name for name in triggers.__struct_fields__ if not getattr(triggers, name).dry_run)
            enforced = list(names)
        causes = causes_of(self.decision.pressures, enforced, self.engine.ladder)
        now = frame.at_s, frame.wall_s
        if self._closing_past is not None:
            self.closing, self._closing_past = closing_resumed(self._closing_past, now), None
        self.closing, change = advance(self.closing, causes, now, config.closing, off=self._open_because(config))
        if change is not None:
            closes = change.turn is ClosingTurn.CLOSED
            _LOG.warning("node closed to new BE pods" if closes else "node open to new BE pods", reason=change.words)
            self._tell(closing_alert(change, frame.wall_s))
            self.closings[change.turn.value] += 1
        return self.closing.closed

    def _open_because(self, config: Config) -> str:
        """Why the node must not be closed now; empty: it may be."""
        policy = config.policies.responses
        if not policy.enabled or policy.dry_run:
            return "the policy responses is off" if not policy.enabled else "the policy responses is a dry run"
        hold = self._mode.holds.get(OFF_NODE)
        return "" if hold is None else f"off by {hold.by}: {hold.reason}"

    def _notice_left_s(self) -> float:
        """Seconds until the first announced step begins."""
        steps = self._control.inventory.readings.measures.announced.values()
        return max(0.0, min((step.at_s for step in steps), default=math.inf) - self._clock())

    def _publish(self, measures: Restrictions) -> None:
        knowledge, dirty = self._control.inventory, self._control.reconciler.dirty
        before = knowledge.readings.measures
        if measures == before:
            return
        knowledge.take(measures=measures)
        dirty.mark(TICK)
        if (before.cache_percent, before.cache_reason) != (measures.cache_percent, measures.cache_reason):
            dirty.mark(NODE)
        if before.closed != measures.closed:
            dirty.mark(NODE)
        for mine, theirs in ((before.squeezed, measures.squeezed), (before.frozen, measures.frozen)):
            for uid in mine.keys() | theirs.keys():
                if mine.get(uid) != theirs.get(uid):
                    dirty.mark(pod_key(uid))

    def _decide(self, config: Config, frame: SampleFrame, judgement: Evaluation) -> None:
        if self.evictions is None:
            self.evictions = initial_state(frame, past_restored(self._past, at_s=frame.at_s, wall_s=frame.wall_s))
        enforced = set(filter(self.engine.enforces, self.engine.rules))
        self.decision, self.evictions = decide(
            config.eviction,
            frame,
            self.engine.history,
            self.evictions,
            self.cases(),
            self._mode.holds,
            judgement.named,
            [finding for finding in judgement.findings if finding.rule in enforced],
        )
        for line in self.decision.news:
            _LOG.info(line)
        if self._evictor is not None:
            for order in self.decision.orders:
                self._evictor.submit(order)
            self._evictor.measured(self.decision.critical)
            for identifier, why in self.decision.over.items():
                self._evictor.withdraw(identifier, why)
        self.frame = frame
        if self._followed or self._cached:
            self._samples.put(frame, followed=self._followed)

    # The store

    def _past_closing(self) -> ClosingPast:
        if self._closing_past is not None:
            return self._closing_past
        return closing_kept(self.closing, (self._clock(), self._wall()))

    async def _keep(self, now: float) -> None:
        """Store what outlives the daemon. A failing store is reported by the state writer, not here."""
        self._saved_at = now
        past = self._past
        if self.evictions is not None and self.frame is not None:
            past = past_kept(self.evictions.past, self.frame)
        kept = MonitorState(brain=self.engine.remember(), past=past, closing=self._past_closing())
        if kept == self._saved:
            return
        batch = StoreBatch()
        batch.put(META, ROW, msgspec.msgpack.encode(kept))
        try:
            await in_worker(self._record.store.apply, batch, limiter=self._record.lane)
        except StoreError:
            return
        self._saved = kept

    # Status

    def cases(self) -> Sequence[EvictionCase]:
        """Evictions under way, and the last that ended."""
        return self._evictor.cases() if self._evictor is not None else ()

    def ended(self) -> Mapping[EvictionOutcome, int]:
        """Evictions that ended since the daemon's start, by outcome."""
        return self._evictor.ended if self._evictor is not None else {}

    def mark(self) -> MarkStatus | None:
        """What became of the mark on the node's object; None: none is wanted."""
        return self._control.sides.mark()

    def costs(self) -> dict[str, float]:
        """CPU seconds that each reader has taken so far."""
        return {name: cost.cpu_s for name, cost in costs(self._readers).items()}

    def _read_s(self) -> float:
        return sum(reader.cpu_s for reader in self._readers)

    def problems(self) -> dict[str, str]:
        """Why a signal is unavailable, by signal."""
        return {signal: message for reader in self._readers for signal, message in reader.problems().items()}


def read_kept(store: Store) -> MonitorState:
    """What an earlier run has left; nothing where it cannot be read. In the store's lane.

    Errors: as `Store.rows`.
    """
    row: Any = dict(store.rows(META)).get(ROW)
    if row is None:
        return MonitorState()
    try:
        return decoded(msgspec.msgpack.Decoder(MonitorState).decode, row)
    except ValueError as exc:
        _LOG.warning("cannot read the learned baselines of the last run, learning again", error=str(exc))
        return MonitorState()


def _carried_out(config: Config) -> dict[str, bool]:
    """Which requests of a rule are carried out, as `InterferenceEngine.configure` takes it."""
    policy = config.policies.responses
    return {"evicts": config.eviction.serves_rules, "responds": policy.enabled and not policy.dry_run}


def _cpus(pod: Pod, view: NodeView, pools: Pools | None) -> CpuSet | None:
    """The CPUs of the pod's containers, if they are not simply its pool's: no setting confines them to it."""
    if pools is None or pools.pool_of(pod) not in {"shared", "reclaimed"}:
        return None
    confined = pools.confined if pod.pod_class is PodClass.RECLAIMED else pools.confine_shared
    if confined:
        return None
    return (view.kubelet.default_cpus & pools.online_cpus) or (pools.online_cpus - pools.dedicated_cpus)
