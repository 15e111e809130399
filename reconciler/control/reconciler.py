"""The one worker: take the dirty marks, read the node again, plan, and bring the groups concerned to the plan.

Events only mark (`DirtyKeys`); every value that decides is read here. One reconcile pass at a time; each ends with a
node that is as planned, or with a recorded reason why it is not and a time to retry.

Longer than other modules because what a pass reads, plans, writes and leaves for the next one shares one state.
"""

import heapq
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Final, final

import trio
from msgspec.structs import replace

from cgroupfs.errors import AgentError
from cgroupfs.hierarchy import covered
from cgroupfs.log import get_log
from reconciler.actuators.cgroup.apply import CgroupActuator
from reconciler.actuators.cgroup.compare import GroupTarget
from reconciler.actuators.cgroup.control_files import BOUNDS
from reconciler.actuators.cgroup.fastpath import FastPath, FastResult
from reconciler.control.controllers import ControllerCheck
from reconciler.control.earlier_run import EarlierRun, Unexamined
from reconciler.control.event_notes import plan_event
from reconciler.control.inventory import Inventory, PodChange
from reconciler.control.planner import plan_node, plan_parents, plan_pod, same_for_pods
from reconciler.control.timeline import Timelines
from reconciler.placement.churn import moved as movement
from reconciler.pods.metadata import Metadata
from reconciler.policies.table import PoliciesConfig
from reconciler.runtime.cooperative import TimeSlice
from reconciler.runtime.counters import AgentCounters
from reconciler.runtime.stints import in_worker
from reconciler.runtime.workqueue import FILES, LOAN, NODE, TICK, DirtyBatch, DirtyKeys, container_key, pod_key
from reconciler.sources.reassertion import Reassertion
from reconciler.sources.runtime_signal import RuntimeEvent
from reconciler.sources.tree import PodDirs, TreeSource
from state.cpu import StartPlan
from state.entry import LedgerEntry, same_group
from state.ledger import Ledger
from state.model import GroupRef, KubeletView, NodeView, Pod, PodClass, Pools, Refusal, Setting
from state.plan import FileTarget, NodePlan

_LOG: Final = get_log("reconciler")
_FIRST_LABELS_S: Final = 1.0
"""How long the first pass after a start waits for labels: no pod is limited by its QoS if a label exempts it."""
_NO_EVENT: Final = frozenset({RuntimeEvent.FOUND, RuntimeEvent.ABSENT})
_VERIFY_S: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 5.0, 10.0)
"""Delays of further passes after a container was found whose runtime reports no end of its writes."""
_ERROR_S: Final = 1.0
"""From a pass that failed as a whole to the next one."""
_WRITTEN_S: Final = 0.03
"""From the runtime's signal to the pass that compares the written files. A removal, and the end of a start's allowance,
have one by then, too."""
_TICK: Final = frozenset({TICK})

Wanted = dict[str, dict[str, Setting]]
"""Settings by group path and knob."""


@final
class Reconciler:
    """The worker that brings the node to the plan, and the receiver of the runtime's signal."""

    def __init__(
        self,
        *,
        dirty: DirtyKeys,
        tree: TreeSource,
        knowledge: Inventory,
        metadata: Metadata,
        actuator: CgroupActuator,
        lane: FastPath,
        ledger: Ledger,
        policies: PoliciesConfig,
        kubelet: Callable[[Mapping[str, Pod]], KubeletView],
        reassertion: Reassertion,
        planned: Callable[[NodeView, NodePlan], None],
        resync_s: float,
        verify_s: float,
        plan: NodePlan | None,
        counters: AgentCounters,
        unexamined: Unexamined,
    ) -> None:
        """``plan``: the last plan of an earlier run, so that a restart moves nothing.

        ``unexamined``: groups that may have values of an earlier run that no store has.

        ``planned`` is called after each pass with its input; it must not wait. ``kubelet``: the kubelet's allocations,
        given the pods that exist. ``reassertion`` learns from each event of the runtime.
        """
        self.dirty = dirty
        self.inventory = knowledge
        self.actuator = actuator
        self.policies = policies
        self.plan = plan
        """The last plan; None before the first pass without an earlier run's."""
        self.view: NodeView | None = None
        """The view that the last plan was made from; None before the first pass."""
        self.refusals: dict[str, tuple[Refusal, ...]] = {}
        self.wanted: dict[str, Wanted] = {}
        """By pod uid; the directories above the pods under ``""``."""
        self.ready = trio.Event()
        self.looks = 0
        self.changes = 0
        """Counts passes that may have changed inventory or plan: the state writer compares when it differs."""
        self.look_s = 0.0
        self.busy_since: float | None = None
        self.problem: str | None = None
        self._tree = tree
        self._metadata = metadata
        self.lane = lane
        self._ledger = ledger
        self._resync_s = resync_s
        self._verify = (*(delay for delay in _VERIFY_S if delay < verify_s), verify_s)
        self._counters = counters
        self.timelines = Timelines(lane, actuator.judge, self._counters)
        self._one_look = trio.Lock()
        self.controllers = ControllerCheck(
            actuator.judge.hierarchy,
            knowledge.layout,
            may_write=lambda: actuator.judge.mode.enforce and NODE not in actuator.judge.mode.holds,
            alert=lambda message: actuator.judge.alert("controllers", message, None),
            files=actuator.judge.files,
        )
        self.earlier_run = EarlierRun(
            actuator,
            knowledge,
            unexamined=unexamined,
            inode=self._inode,
            alert=lambda message: actuator.judge.alert("earlier run", message, None),
        )
        self.errors = actuator.judge.errors
        self._unlisted: str | None = None
        self._moved = self._regrouped = self._reweighted = False
        self._beside: tuple[int, bool, bool, bool] | None = None
        """Facts of the view from which settings of all BE pods follow, beside the plan."""
        self._starts: set[str] = set()
        self._due: float | None = None
        self._kubelet = kubelet
        self._reassertion = reassertion
        self._planned = planned
        self._signalled: dict[str, float] = {}
        """Containers that were signalled since the last pass, with the time (monotonic)."""
        self._found: set[str] = set()
        """Containers that were found as they are: who wrote their values, and when, is not known."""
        self._later: list[tuple[float, str]] = []
        """A heap of times (trio's clock) with the keys to mark then; an empty key: everything."""
        self._whole: NodeView | None = None
        """By this view, and the last plan, every pod was planned; None: not all were."""

    @property
    def pools(self) -> Pools | None:
        """The pools of the last plan; None before the first pass."""
        return self.plan.pools if self.plan is not None else None

    def use(self, policies: PoliciesConfig) -> None:
        self.policies = policies
        self._whole = None

    # The runtime's signal (called in the reader's task)

    def settled(self, container_id: str, at: float, which: RuntimeEvent) -> None:
        """The runtime has finished writing: write bypassd's values, then reconcile."""
        if which is RuntimeEvent.INIT_PID and not self.lane.awaits(container_id):
            self._metadata.container_changed()
            return
        written = False
        if which not in _NO_EVENT or self.lane.awaits(container_id):
            written = self.lane.execute(container_id, at)
        # A container that was merely found was written earlier, by an unknown program: it is not a runtime event.
        (self._found.add if which in _NO_EVENT else self._found.discard)(container_id)
        if which is RuntimeEvent.FOUND:
            self.actuator.runs(container_id)
        if which is RuntimeEvent.ABSENT:
            self._verify_until_stable(container_id)
        self._signalled[container_id] = at
        # The pass only compares what was written, or finds that nothing is wanted of a container that it knows.
        known = written or self.inventory.owner(container_id) is not None
        self.dirty.mark(container_key(container_id), within_s=_WRITTEN_S if known else 0.0)
        self._metadata.container_changed()

    def commanded(self, container_id: str, at: float | None) -> None:
        """The runtime was called for a container: an exec, a kill, a start. ``at`` None: the last one was an update."""
        if self.inventory.command(container_id, at):
            self.dirty.mark(TICK)

    def gone(self, container_id: str) -> None:
        """The runtime has deleted the container; its directories show the rest."""
        self._reassertion.gone(container_id)
        self._found.discard(container_id)
        self.dirty.mark(container_key(container_id), within_s=_WRITTEN_S)
        self._metadata.container_changed()

    def on_executed(self, result: FastResult) -> None:
        self.actuator.on_executed(result)
        self.timelines.on_executed(result)

    # The worker

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Reconcile until cancelled. Reports its start after the first whole pass."""
        self.dirty.mark_all("start")
        resync_at = trio.current_time() + self._resync_s
        started = False
        while True:
            with trio.move_on_at(min(resync_at, self._next_deadline())):
                await self.dirty.take_ready()
            self._mark_due()
            if trio.current_time() >= resync_at:
                self.dirty.mark_all("periodic")
            batch = self.dirty.take_nowait()
            if batch.everything:
                resync_at = trio.current_time() + self._resync_s
            self.busy_since = time.monotonic()
            try:
                async with self._one_look:
                    await self.reconcile(batch)
                if batch.everything or self.problem is None:
                    # A failed look is over with the next whole one only: what it was to find is not known before.
                    self.problem = self._unlisted
            except (AgentError, OSError) as exc:
                # Unknown is not empty: applied settings remain, and the pass is retried.
                self.errors.counted(NODE, exc)
                if self.problem != str(exc):
                    _LOG.warning(str(exc))
                self.problem = str(exc)
                heapq.heappush(self._later, (trio.current_time() + _ERROR_S, ""))
            self.busy_since = None
            self.dirty.passed()
            if not started and self.problem is None:
                started = True
                # Events from now on were sent after the loss, if there was one.
                self.actuator.judge.all_seen()
                self.timelines.ready()
                self.ready.set()
                task_status.started()

    async def reconcile(self, batch: DirtyBatch) -> None:
        """One pass. A failure of one pod concerns that pod only: the others are reconciled all the same.

        Errors: `AgentError` and `OSError` for failures of the whole node; the marks are kept for the next pass.
        """
        began = time.monotonic()
        if batch.keys == _TICK and not batch.everything and not self._signalled and not self._tick():
            return
        if not batch.everything and not self._signalled and batch.keys and all(map(_is_files_key, batch.keys)):
            await self._compare_files(batch, began)
            return
        signalled, self._signalled = self._signalled, {}
        try:
            await self._look(batch, signalled, began)
        except BaseException:
            # Kept for the next pass; a signal that came meanwhile is the newer one.
            self._signalled = {**signalled, **self._signalled}
            raise

    async def _look(self, batch: DirtyBatch, signalled: Mapping[str, float], began: float) -> None:
        full = bool(batch.everything)
        failed = {key: self.errors.failures(key) for key in self.errors}
        if full:
            listed, uids = await self._list(periodic=set(batch.everything) == {"periodic"})
        else:
            listed, uids = self._list_some(self._concerned(batch, signalled))
        # Before the pods are assembled: the record of a known container is read again only here.
        for cid, at in signalled.items():
            with self.errors.contained(container_key(cid)):
                self._settle(cid, at)
        seen = await self._see(uids, listed)
        same = {uid for uid, change in seen.items() if change.pod is not None and change.pod is change.before}
        touched = self._take_kubelet()
        looked = {uid for uid, change in seen.items() if change.pod is not None} | touched
        if loaded := full or NODE in batch.keys:
            # Before the plan, which rests on their periods: another program may have written them.
            self._load_directories()
            cpus = self.actuator.judge.control_files.cpus_in_effect(self.inventory.layout.kubepods)
            self.inventory.take(kubepods_cpus=cpus)
        if full:
            judge = self.actuator.judge
            # A file over which another is mounted is not the kernel's control file.
            judge.control_files.covered = await in_worker(covered, judge.hierarchy)
            if await self.controllers.check(self.inventory.pods):
                # The kernel offers more files now: they are searched again.
                self.inventory.take(knobs=frozenset())
            await self.earlier_run.check()
        view, plan, moved = self._plan_node()
        if moved or signalled or _caused(batch):
            self._counters.events += 1
        every, self._regrouped = self._regrouped, False
        reweighted, self._reweighted = self._reweighted, False
        targets: list[GroupTarget] = []
        above_before = self.wanted.get("", {})
        starts, self._starts = self._starts, set()
        if full or moved or starts or reweighted or NODE in batch.keys:
            if not loaded:
                self._load_directories()
            targets += self._plan_parents(view, plan)
        if starts & plan.starts.pods:
            # Before all others: a start is throttled until then. A start allowance only loosens.
            await self.actuator.apply(targets)
            targets = []
        slices = TimeSlice()
        as_before: set[str] = set()
        by_clock = set(batch.everything) == {"periodic"} and not (moved or every or starts or signalled)
        if by_clock and self._whole is not None and same_for_pods(self._whole, view):
            # Their settings are the same: only the files are compared.
            as_before = same - touched - self._concerned(batch, ())
        for uid in sorted(looked):
            with self.errors.contained(pod_key(uid)):
                if uid not in as_before or pod_key(uid) in failed:
                    targets += self._plan_pod(self.inventory.pods[uid], view, plan, signalled, every=True)
                else:
                    targets += self._unsettled(self.inventory.pods[uid])
            await slices.checkpoint()
        if full:
            self._whole = view
        elif moved:
            self._whole = None
        if moved:
            for uid, pod in list(self.inventory.pods.items()):
                if uid not in looked and (every or pod.pod_class is PodClass.RECLAIMED or uid in self.wanted):
                    with self.errors.contained(pod_key(uid)):
                        targets += self._plan_pod(pod, view, plan, signalled, every=False)
                    await slices.checkpoint()
        loans = {key.removeprefix(LOAN) for key in batch.keys if key.startswith(LOAN)}
        for uid in sorted(loans if moved else loans | starts):
            if uid not in looked and (lent := self.inventory.pods.get(uid)) is not None:
                with self.errors.contained(pod_key(uid)):
                    targets += self._plan_pod(lent, view, plan, signalled, every=False)
                await slices.checkpoint()
        await self.actuator.apply(targets)
        self._planned(view, plan)
        self.timelines.looked(targets, signalled)
        if full:
            self._metadata.keep_only(self.inventory.pods.keys())
            self._prune()
        for key in list(self.errors):
            concerned = full if key == NODE else key.partition(":")[2] in uids and key.startswith("pod:")
            # Over only where this pass did not add a failure.
            if concerned and self.errors.failures(key) == failed.get(key, 0):
                self.errors.passed(key)
        of_pods = any(target.pod_uid is not None for target in targets)
        above = self.wanted.get("", {}) != above_before
        self._passed(began, changed=moved or of_pods or above or bool(touched) or len(same) != len(seen))

    async def _compare_files(self, batch: DirtyBatch, began: float) -> None:
        """Another program has written control files of these pods, and nothing else has changed: apply the last plan.

        Nothing is listed, read from the runtime, or planned. A pod that is not in the inventory is reconciled as a
        whole.
        """
        self._counters.events += 1
        targets: list[GroupTarget] = []
        for uid in sorted(key.removeprefix(FILES) for key in batch.keys):
            pod, wanted = self.inventory.pods.get(uid), self.wanted.get(uid, {})
            if pod is None:
                self.dirty.mark(pod_key(uid))
            else:
                targets += self._targets(pod, wanted, wanted, (), every=True)
        await self.actuator.apply(targets)
        self.timelines.looked(targets, {})
        self._passed(began, changed=bool(targets))

    def _passed(self, began: float, *, changed: bool) -> None:
        """Count a finished pass. ``began``: monotonic seconds."""
        self.looks += 1
        self.changes += changed
        self.look_s = time.monotonic() - began
        self._counters.passes.observe(self.look_s)

    async def _list(self, *, periodic: bool) -> tuple[Mapping[str, PodDirs], set[str]]:
        """Every pod's directories, and the pods to read: a pod whose directory cannot be read keeps its state."""
        listing = await (self._tree.list_again() if periodic else self._tree.scan_gently())
        self._unlisted = None
        for path, exc in listing.unread.items():
            name = self.inventory.layout.parse(path)
            uid = name.pod_uid if name is not None else None
            if uid is None:
                # A QoS class's directory, with all its pods.
                self._unlisted = str(exc)
            self.errors.failed(pod_key(uid) if uid is not None else f"directory:{path}", exc)
        directories = {f"directory:{path}" for path in listing.unread}
        self.errors.keep("directory", directories)
        pods = self.inventory.pods
        known = {uid for uid, pod in pods.items() if listing.knows(pod.group.path)} if listing.unread else pods.keys()
        return listing.pods, listing.pods.keys() | known

    def _list_some(self, concerned: Iterable[str]) -> tuple[Mapping[str, PodDirs], set[str]]:
        """The directories of these pods, and the pods among them that can be read."""
        listed: dict[str, PodDirs] = {}
        uids: set[str] = set()
        for uid in concerned:
            with self.errors.contained(pod_key(uid)):
                dirs = self._tree.rescan(uid)
                uids.add(uid)
                if dirs is not None:
                    listed[uid] = dirs
        return listed, uids

    def _settle(self, cid: str, at: float) -> None:
        ran = self.inventory.runs(cid)
        changed = self.inventory.refresh(cid)
        if cid not in self._found:
            self._reassertion.updated(cid, at, changed=changed)
        if ran and changed:
            # A running container was given other values: a resize; its spec has the rest.
            self._metadata.refresh()

    def _tick(self) -> bool:
        """Time has passed: True when the pools differ now, so that a pass is due. Capacity files need none."""
        before = self.plan
        view, plan, moved = self._plan_node()
        if before is not None and before.capacities != plan.capacities:
            self._planned(view, plan)
        # Kept for the pass that follows: it plans again, and finds no difference to this plan.
        self._moved = self._moved or moved
        return moved or bool(self._starts) or self._reweighted

    def _concerned(self, batch: DirtyBatch, signalled: Iterable[str]) -> set[str]:
        uids = set()
        for key in {*batch.keys, *map(container_key, signalled)}:
            kind, _, name = key.partition(":")
            if kind in {"pod", "files"}:
                uids.add(name)
            elif kind == "container":
                owner = self.inventory.owner(name)
                if owner is None and (dirs := self._tree.locate(name)) is not None:
                    owner = dirs.uid
                if owner is not None:
                    uids.add(owner)
        return uids

    async def _see(self, uids: Iterable[str], listed: Mapping[str, PodDirs]) -> dict[str, PodChange]:
        """Assemble the pods concerned; request labels that no source has reported."""
        seen: dict[str, PodChange] = {}
        slices = TimeSlice()
        for uid in uids:
            with self.errors.contained(pod_key(uid)):
                seen[uid] = change = self.inventory.sample(uid, listed.get(uid))
                self._came_and_went(change)
            await slices.checkpoint()
        unknown = [uid for uid, item in seen.items() if item.pod is not None and self.inventory.unlabelled(uid)]
        if unknown and not self.ready.is_set():
            await self._metadata.prefetch(unknown, _FIRST_LABELS_S)
            for uid in unknown:
                if self._metadata.get(uid):
                    self.inventory.reassemble(uid)
        else:
            # Planned by what is known now; the answer, some milliseconds from here, marks the pod again.
            self._metadata.request(unknown)
        return seen

    def _take_kubelet(self) -> set[str]:
        """The kubelet's allocations for the pods that exist now; the pods whose CPUs or resources changed by them."""
        before = self.inventory.readings.kubelet
        after = self.inventory.take(kubelet=self._kubelet(self.inventory.pods)).kubelet
        touched = _differing(before.exclusive, after.exclusive)
        if resized := _differing(before.granted, after.granted) & self.inventory.pods.keys():
            self._metadata.refresh()
            touched |= resized
        # A pod that is the same after it counts, too: policies also read the allocations themselves.
        return {uid for uid in touched if self.inventory.reassemble(uid) or uid in self.inventory.pods}

    def _came_and_went(self, seen: PodChange) -> None:
        for cid in seen.came:
            self.timelines.came(cid)
            if not self.inventory.signalled(cid):
                self._verify_until_stable(cid)
        before: dict[str, str] = {}
        if seen.went and seen.before is not None:
            before = {container.id: container.group.path for container in seen.before.containers}
        for cid in seen.went:
            self.timelines.went(cid)
            self._found.discard(cid)
            if cid in before:
                self.actuator.forget(before[cid], cid)
        if seen.before is not None and (seen.pod is None or seen.pod.group != seen.before.group):
            # Removed, or created again under its old uid (a static pod).
            self.actuator.forget(seen.before.group.path)
        if seen.pod is not None:
            # Each time (9 µs): the directory is the kubelet's, whose writes there bring no event, and its set and quota
            # bound what is planned for the pod.
            knobs = (*BOUNDS, "cpu.mems") if self.policies.numa_memory.enabled else BOUNDS
            self.actuator.judge.control_files.load(seen.pod.group.path, knobs)
        elif seen.before is not None:
            self.wanted.pop(seen.before.uid, None)
            self.refusals.pop(seen.before.uid, None)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """No pass runs within the block; marks are kept. Calling the value lets a pass that waits run."""
        async with self._one_look:
            yield self._let_pass

    async def _let_pass(self) -> None:
        # The lock is fair: a pass that waits is the next to have it.
        self._one_look.release()
        with trio.CancelScope(shield=True):
            await self._one_look.acquire()

    # Planning

    def _plan_node(self) -> tuple[NodeView, NodePlan, bool]:
        """The plan of this moment, and whether it differs from the last one."""
        if not self.inventory.readings.knobs:
            # The kubepods directory may not exist yet.
            self.inventory.take(knobs=self.actuator.judge.control_files.offered(self.inventory.layout.kubepods))
        files = self.actuator.judge.control_files
        view = self.inventory.view(time.monotonic(), files.actual, files.floors)
        before, plan = self.plan, plan_node(view, self.plan, self.policies)
        beside = (
            view.capacity_milli,
            view.online_in_besteffort,
            view.unweighed_in_besteffort,
            view.kubelet.may_resize,
        )
        moved = self._moved or before is None or _substance(plan) != _substance(before) or beside != self._beside
        self._beside = beside
        self._moved = False
        # Then online pods that had no settings get some.
        self._regrouped |= before is not None and plan.pools.confine_shared != before.pools.confine_shared
        self._reweighted |= plan.daemons != (before.daemons if before is not None else {})
        self._starts |= plan.starts.pods ^ (before.starts.pods if before is not None else frozenset())
        if (due := plan.starts.due) is not None and due != self._due:
            heapq.heappush(self._later, (trio.current_time() + due - view.now, TICK))
        self._due = due
        change = movement(self.pools, plan.pools)
        self._counters.cpus_moved += change.cpus
        self._counters.pools_changed += change.pools_changed
        if change.pools_changed or self.plan is None:
            self._ledger.note(plan_event(self.pools, plan.pools))
        self.plan, self.view = plan, view
        return view, plan, moved

    def _load_directories(self) -> None:
        """Read what in the directories above the pods bounds them."""
        control_files, inventory = self.actuator.judge.control_files, self.inventory
        for path in (inventory.kubepods, inventory.besteffort, inventory.burstable):
            control_files.load(path)
        control_files.load(inventory.besteffort, ("cpu.weight",))  # what of the harm law depends on it

    def _plan_parents(self, view: NodeView, plan: NodePlan) -> list[GroupTarget]:
        settings, self.refusals[""] = plan_parents(view, plan, self.policies)
        wanted = _by_group(settings)
        # Also those with a value that no policy wants any more, which is restored: of kubepods, of QoS directories, and
        # of groups beside kubepods (node_daemons). One that was only shown has no row.
        levels = ("/", view.besteffort, view.burstable)
        paths = {*wanted, *self.wanted.get("", {})}
        paths |= {path for path in self._ledger.groups() if path in levels or path.count("/") == 1}
        self.wanted[""] = wanted
        targets = []
        for path in sorted(paths):
            with self.errors.contained(NODE):
                group = GroupRef(path=path, inode=self._inode(path))
                if group.inode:
                    targets.append(GroupTarget(group=group, settings=wanted.get(path, {})))
                else:
                    self.actuator.forget(path)
        return targets

    def _plan_pod(
        self, pod: Pod, view: NodeView, plan: NodePlan, signalled: Container[str], *, every: bool
    ) -> list[GroupTarget]:
        """Plan one pod: its groups to reconcile, all that matter or (``every`` False) those whose settings changed."""
        settings, refusals = plan_pod(pod, view, plan, self.policies)
        if refusals:
            self.refusals[pod.uid] = refusals
        else:
            self.refusals.pop(pod.uid, None)
        wanted = _by_group(settings)
        before = self.wanted.get(pod.uid, {})
        if wanted:
            self.wanted[pod.uid] = wanted
        else:
            self.wanted.pop(pod.uid, None)
        return self._targets(pod, wanted, before, signalled, every=every)

    def _unsettled(self, pod: Pod) -> list[GroupTarget]:
        """The pod's groups with a file that differs from its last comparison, for the settings of the last pass."""
        wanted = self.wanted.get(pod.uid, {})
        judge, paths = self.actuator.judge, (pod.group.path, *[item.group.path for item in pod.containers])
        if not wanted and not any(map(self._ledger.has_group, paths)) and not judge.recent_releases:
            return []
        targets = self._targets(pod, wanted, wanted, (), every=True)
        return [target for target in targets if not self.actuator.judge.is_settled(target)]

    def _targets(
        self, pod: Pod, wanted: Wanted, before: Wanted, signalled: Container[str], *, every: bool
    ) -> list[GroupTarget]:
        """The pod's groups to reconcile. ``before``: their settings in the last pass."""
        targets = []
        groups = [(pod.group, None), *((item.group, item) for item in pod.containers)]
        for group, container in groups:
            settings = wanted.get(group.path, {})
            ours = self._ledger.group(group.path) or group.path in self.actuator.judge.recent_releases
            if not settings and not ours and group.path not in before:
                continue
            if container is None and not pod.containers and pod.sandbox is None:
                # The kubelet is still writing its own values there: it finishes before the first container starts.
                continue
            if not every and _values(settings) == _values(before.get(group.path, {})):
                continue
            reported = container is not None and container.id in signalled
            fresh = container is not None and reported and container.id not in self._found
            target = GroupTarget(group=group, settings=settings, pod_uid=pod.uid, container=container, signalled=fresh)
            if reported:
                # The runtime's last write makes the original, not what the group has had since its mkdir.
                self.actuator.rebase(target)
            targets.append(target)
        return targets

    # Times

    def _next_deadline(self) -> float:
        times = [self._later[0][0]] if self._later else []
        retries = (self.actuator.judge.next_check(), self.errors.next_retry())
        # Both speak the process's monotonic clock, deadlines are the loop's.
        times += [trio.current_time() + max(0.0, at - time.monotonic()) for at in retries if at is not None]
        return min(times, default=float("inf"))

    def _mark_due(self) -> None:
        now = trio.current_time()
        while self._later and self._later[0][0] <= now:
            key = heapq.heappop(self._later)[1]
            if key:
                self.dirty.mark(key, within_s=_WRITTEN_S if key == TICK else 0.0)
            else:
                self.dirty.mark_all("after an error")
        for uid in self.actuator.judge.due(time.monotonic()):
            self.dirty.mark(pod_key(uid) if uid is not None else NODE)
        for key in self.errors.due(time.monotonic()):
            if key.startswith(("pod:", "container:")):
                self.dirty.mark(key)
            else:
                self.dirty.mark_all("after an error")

    def _verify_until_stable(self, cid: str) -> None:
        """No event will show the runtime's last write: look again after short, growing delays."""
        at = trio.current_time()
        for delay in self._verify:
            heapq.heappush(self._later, (at + delay, container_key(cid)))

    # The ledger and the groups

    def _prune(self) -> None:
        """After a full pass: drop the ledger's rows of groups that were removed. An undetermined group is kept."""
        listed: dict[str, int] = {}
        for pod in self.inventory.pods.values():
            listed[pod.group.path] = pod.group.inode
            for container in pod.containers:
                listed[container.group.path] = container.group.inode

        control_files = self.actuator.judge.control_files

        def inode_now(entry: LedgerEntry) -> int | None:
            try:
                inode = listed.get(entry.path) or self._inode(entry.path) or None
                same = inode is not None and same_group(entry.inode, inode)
                # A mount over the directory shows another inode: the originals outlast it.
                return inode if same or not control_files.is_hidden(entry.path) else entry.inode
            except OSError as exc:
                self.errors.failed(NODE, exc)
                return entry.inode

        self._ledger.prune(inode_now)

    def _inode(self, path: str) -> int:
        """The inode of a group's directory, 0 when it was removed. Errors: `OSError` when that cannot be determined."""
        try:
            return os.stat(self.actuator.judge.hierarchy.identity_directory(path)).st_ino
        except (FileNotFoundError, NotADirectoryError):
            return 0


def _caused(batch: DirtyBatch) -> bool:
    """Whether anything but the clock and what it drives requested the pass."""
    reported = any(key != TICK and not key.startswith(LOAN) for key in batch.keys)
    return reported or any(why != "periodic" for why in batch.everything)


def _is_files_key(key: str) -> bool:
    return key.startswith(FILES)


def _differing(before: Mapping[str, object], after: Mapping[str, object]) -> set[str]:
    if before is after or before == after:
        return set()
    return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


def _by_group(settings: Iterable[Setting]) -> Wanted:
    groups: Wanted = {}
    for setting in settings:
        groups.setdefault(setting.path, {})[setting.knob] = setting
    return groups


def _values(settings: Mapping[str, Setting]) -> dict[str, object]:
    return {knob: setting.value for knob, setting in settings.items()}


def _of_pools(pools: Pools) -> Pools:
    return replace(pools, reasons={}, sizes={}, remembered={}, budget_at=0.0, unknown_since=None, budget_milli=0)


def _substance(plan: NodePlan) -> NodePlan:
    """The plan without parts that lead to no control file and do not concern an actuator before the next pass."""
    pools = _of_pools(plan.pools)
    pools = replace(pools, trials={name: _of_pools(trial) for name, trial in pools.trials.items()})
    cookies, scores, idle = plan.cookies, plan.oom_scores, plan.idle_threads
    return replace(
        plan,
        pools=pools,
        # The other pods' settings do not follow from who starts.
        starts=StartPlan(),
        # Of pods, and pods change by a pass only; of free memory, at each reading.
        cookies=replace(cookies, members={}) if cookies is not None else None,
        oom_scores=replace(scores, settings={}) if scores is not None else None,
        idle_threads=replace(idle, settings={}) if idle is not None else None,
        files={name: FileTarget(setting=None, dry_run=target.dry_run) for name, target in plan.files.items()},
        # Of groups above the pods only: only their settings are planned again.
        daemons={},
        # Written by an actuator after each pass, and by no control file.
        capacity=None,
        reasons={},
    )
