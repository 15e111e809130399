"""The whole agent, assembled from its parts: it is run by the daemon, and read by the command line.

store, ledger, persistence                        (outermost: the last state is still written)
write attribution, kubelet, metadata, checkpoints (sources)
group tree, runtime signal                        (events)
reconciler                                        (the worker; essential)
sampler                                           (the clock)

Longer than other modules because the list of all parts, in the order of their dependencies, is read as one.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final, final

import trio

from cgroupfs.errors import StoreError
from cgroupfs.files import REAL, FileOps
from cgroupfs.log import get_log
from cgroupfs.usage import UsageReader
from cgroupfs.writer import KernelWriter
from reconciler import __version__
from reconciler.actuators.base import ActuatorContext, PlanSnapshot
from reconciler.actuators.cgroup.apply import CgroupActuator
from reconciler.actuators.cgroup.conflict import ForeignWrites, WriteAttribution
from reconciler.actuators.cgroup.decide import ChangeDetector
from reconciler.actuators.cgroup.fastpath import FastPath, FastResult
from reconciler.actuators.cgroup.inner_groups import managed_above
from reconciler.actuators.cgroup.records import places_of
from reconciler.actuators.cgroup.restore import adopt_unjournaled_writes, unfreeze
from reconciler.actuators.holds import active, group_of
from reconciler.actuators.restore import UndoKind, restore_ledger
from reconciler.alerts.agent_alerts import as_alert
from reconciler.alerts.service import AlertService
from reconciler.alerts.sinks.base import SinkContext
from reconciler.config.environment import NodeEnvironment, api_client, followed, intents_file, node_name, read_kubelet
from reconciler.config.model import AgentMode, Config, Lower
from reconciler.config.read_keys import read_keys
from reconciler.control import effect_hours, pod_minutes
from reconciler.control.bounds_in_force import bounds_status
from reconciler.control.cpu_hotplug import CpusetRepair
from reconciler.control.daemon_watch import DaemonWatch
from reconciler.control.event_notes import EventNotes
from reconciler.control.harm_watch import HarmWatch, WaitSource
from reconciler.control.hold_store import HoldManager
from reconciler.control.inventory import Inventory
from reconciler.control.node_hour import NodeHour
from reconciler.control.owner_check import NAME as OWNER_CHECK
from reconciler.control.owner_check import OwnerCheck
from reconciler.control.owner_ledger import NAME as OWNERS
from reconciler.control.owner_ledger import OwnerLedger
from reconciler.control.persistence import (
    StateWriter,
    read_classes,
    read_holds,
    read_plan,
    read_published,
    read_unexamined,
    was_killed,
)
from reconciler.control.reconciler import Reconciler
from reconciler.control.sampler import Sampler
from reconciler.control.sandboxed import sandboxed_status
from reconciler.daemon import side_actuators
from reconciler.daemon.api_credentials import ApiCredentials
from reconciler.daemon.effect import effect_hours_of
from reconciler.daemon.operator_files import OperatorFiles
from reconciler.daemon.pod_off import restore_control_files
from reconciler.daemon.pod_sources import PodSources
from reconciler.headroom import publisher
from reconciler.headroom.memory_sampler import MemoryHeadroom
from reconciler.headroom.publisher import Meter, publisher_of
from reconciler.headroom.report import HeadroomReport, read_kept
from reconciler.interference import service
from reconciler.placement.claims import CpuClaim, claims_status, cpu_claims
from reconciler.pods.marks import MarkReader, ReadKeys
from reconciler.pods.selectors import ClassRules
from reconciler.policies import node_daemons
from reconciler.policies.yielding import scheduler_of
from reconciler.runtime.counters import AgentCounters
from reconciler.runtime.object_errors import ObjectErrors
from reconciler.runtime.own_group import OwnGroup
from reconciler.runtime.priority import LoopPriority
from reconciler.runtime.stints import Stints, in_worker
from reconciler.runtime.supervisor import Component, at_once
from reconciler.runtime.trials import clean_left
from reconciler.runtime.workqueue import DirtyKeys
from reconciler.sources.checkpoints import CheckpointSource
from reconciler.sources.disks import DiskSource
from reconciler.sources.hotplug import HotplugSource
from reconciler.sources.kubelet_config import KubeletConfig
from reconciler.sources.kubelet_watch import KubeletChange, KubeletWatch
from reconciler.sources.outside import groups_outside, outside_status
from reconciler.sources.runtime_signal import RuntimeEvent, RuntimeEvents
from reconciler.sources.tree import TreeSource
from state.cache import CacheUsage
from state.closing import MarkState, MarkStatus
from state.kinds import CGROUP
from state.ledger import Ledger
from state.model import CpuPolicy, Hold, KubeletView, NodeCpu, NodeView, Pod, Pools, Setting, SourceStatus
from state.plan import NodePlan
from state.schema import PLACES
from state.store import Store, boot_id
from state.undo import RestoreResult

_FILES_S: Final = 30.0
_PATIENCE_S: Final = 0.5
"""How long one pass waits for lowered memory limits, in all: enough for some 12 GB of page cache."""


@final
class Agent:
    """See the module's text. Building it opens the store and reads files; no cgroup is written before it runs."""

    def __init__(
        self,
        config: Config,
        place: NodeEnvironment,
        *,
        files: FileOps = REAL,
        renew: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``renew`` is called with the reason when the kubelet changed what the parts are built from.

        Then the caller closes this agent and builds another one on the node as it is by then.

        Errors: `NewerSchemaError` when the store is of a newer version.
        """
        self.config = config
        self._renew = renew
        self.place = place
        self.files = files
        self.log = get_log("agent")
        self.outside: list[str] = []
        """Groups of containers outside of the pods' directories, as of the last look."""
        self.started_at = time.time()
        self.alerts: Counter[str] = Counter()
        self.counters = AgentCounters()
        self.dirty = DirtyKeys()
        intents = intents_file(config)
        self.store = Store(
            config.store.path,
            boot=boot_id(config.node.root),
            version=__version__,
            node=place.kubelet.node_name or os.uname().nodename,
            history_limit=config.store.history,
            meta={PLACES: places_of(place.root, place.runtime, place.kubelet.root_dir, intents)},
        )
        self.ledger = Ledger(self.store, intents=intents)
        self.note = self.ledger.note
        self.notes = EventNotes(self.note, __version__)
        if was_killed(self.store):
            adopted = adopt_unjournaled_writes(place.hierarchy, self.ledger, files=files)
            self.log.info(
                "the last run was killed; its values stay in force", files=len(self.ledger), not_noted=adopted
            )
        self.thaw()
        left = clean_left(place.hierarchy, os.path.dirname(config.store.path), config.node.root)
        for group in left.removed:
            self.log.info("removed what a killed doctor --prove left", group=group)
        for group in left.remaining:
            self.log.warning("what a killed doctor --prove left cannot be removed", group=group)
        self.store_lane = trio.CapacityLimiter(1)
        self.alert_service = AlertService(
            config.alerts,
            self.store,
            self.store_lane,
            ground=SinkContext(
                node=place.kubelet.node_name or os.uname().nodename,
                root=place.root,
                kubelets=place.kubelet.kubeconfig,
            ),
            apiserver=config.apiserver,
            statuses=self._watched,
            claims=lambda: (self.claims(), self.inventory.pods),
            note=self.note,
        )
        self.holds = HoldManager(read_holds(self.store), self._hold, boot_id=self.store.boot)
        self.marks = MarkReader(ReadKeys())
        self.operator_files = OperatorFiles(config, place, self.marks)
        self.kubelet_watch = KubeletWatch(
            place.kubelet,
            lambda: read_kubelet(config),
            changed=self._kubelet_changed,
            restarted=lambda: self.checkpoints.restarted(),  # noqa: PLW0108  (made below)
            pidfd=place.root == "/",
        )
        self.checkpoints = CheckpointSource(
            self.dirty,
            root=place.root,
            kubelet_root=place.kubelet.root_dir,
            reconcile_s=place.kubelet.reconcile_s,
            on_restart=self.kubelet_watch.check,
        )
        self.pods = PodSources(config, place, self.dirty, self.marks)
        self.metadata = self.pods.metadata
        self.credentials = ApiCredentials(
            config.apiserver,
            root=place.root,
            kubelets=place.kubelet.kubeconfig,
            changed=self._credentials_changed,
        )
        self.tree = TreeSource(place.hierarchy, place.layout, self.dirty, resync_s=config.node.resync_s)
        self.signal = RuntimeEvents(place.runtime, self, root=place.root, resync_s=config.node.resync_s)
        self.priority = LoopPriority(
            nice=config.node.nice, slice_s=config.node.realtime_ms / 1000, starting=self.is_urgent
        )
        self.own_group = OwnGroup(
            place.hierarchy,
            place.layout.kubepods,
            shares=config.node.own_shares,
            starting=self.signal.awaits_any,
            files=files,
        )
        self.stints = Stints()
        self.errors = ObjectErrors()
        self.disks = DiskSource(
            lambda: [rule.name for rule in self.config.policies.disk.devices], self.dirty, root=place.root
        )
        self.inventory = Inventory(
            topology=place.topology,
            versions=place.hierarchy.versions(),
            layout=place.layout,
            dirs=place.runtime,
            rules=self._rules(),
            metas=self.metadata.get,
            signalled=self.signal.covers,
            awaited=self.signal.awaits,
            disks=lambda: self.disks.found,
            indicators=lambda: self.watching.indicators(),  # noqa: PLW0108  # made later
            marks=self.marks,
            classes=read_classes(self.store),
            errors=self.errors,
            scheduler=scheduler_of(side_actuators.kernel_release(place.root, files)),
        )
        self.ledger.title_of = lambda uid: pod.title if (pod := self.inventory.pods.get(uid)) is not None else ""
        self.marks.use(read_keys(config, self.inventory.rules))
        self.attribution = WriteAttribution(
            place.hierarchy,
            self.dirty,
            kubepods=place.layout.kubepods,
            owner=self._owner,
            # A tenant's own groups inside a container are read when the container's set is written.
            ours=lambda path: (
                (bool(self.ledger.group(path)) or path in self.judge.in_place) and managed_above(path) is None
            ),
        )
        self.lane = FastPath(self._fired, waits=place.runtime.waits_for_start, files=files, root=place.root)
        self.foreign = ForeignWrites(config.writes.foreign)
        self.judge = ChangeDetector(
            hierarchy=place.hierarchy,
            ledger=self.ledger,
            foreign=self.foreign,
            attribution=self.attribution,
            files=files,
            alert=self.alert,
            held=self.holds.add_manual,
            errors=self.errors,
        )
        if self.store.damage is not None:
            # The files' present values may be bypassd's: they must not be recorded as originals.
            self.judge.lost = self.store.lost
            aside = f" and was moved to {self.store.quarantined}" if self.store.quarantined else ""
            saved = f"{len(self.ledger)} file records were recovered" if self.store.lost else "no data was lost"
            self.alert("store", f"the store was damaged ({self.store.damage}){aside}; {saved}", None)
        self.actuator = CgroupActuator(
            judge=self.judge,
            ledger=self.ledger,
            writer=KernelWriter(
                place.hierarchy, files=files, deadline_s=config.writes.slow_timeout_s, patience_s=_PATIENCE_S
            ),
            lane=self.lane,
            store_lane=self.store_lane,
            watched=self.attribution,
        )
        for path in self.ledger.groups():
            self.attribution.follow(path)
        plan = read_plan(self.store)
        self._claimed: tuple[Pools, tuple[CpuClaim, ...]] | None = None
        self.reconciler = Reconciler(
            dirty=self.dirty,
            tree=self.tree,
            knowledge=self.inventory,
            metadata=self.metadata,
            actuator=self.actuator,
            lane=self.lane,
            ledger=self.ledger,
            policies=config.policies,
            kubelet=self._kubelet_view,
            updated=lambda cid, at, changed: self.checkpoints.reassertion.updated(cid, at, changed=changed),
            resync_s=config.node.resync_s,
            verify_s=config.writes.verify_s,
            plan=plan,
            unexamined=None
            if self.judge.lost or not (plan is not None or len(self.ledger))
            else read_unexamined(self.store),
            counters=self.counters,
            planned=self._planned,
        )
        self.signal.commanded = self.reconciler.commanded
        self.signal.updates = lambda: self.inventory.readings.kubelet.policy is not CpuPolicy.NONE
        self.watching = service.InterferenceService(self, self.alert_service)
        means = ActuatorContext(
            hierarchy=place.hierarchy,
            root=place.root,
            ledger=self.ledger,
            store_lane=self.store_lane,
            fastpath=self.lane,
            writes=self.actuator.writes,
            files=files,
            misses=self.watching.misses,
            kubelet_dir=place.kubelet.root_dir,
            api=partial(api_client, config, place.kubelet),
            node=node_name(place.kubelet),
        )
        self.sides = side_actuators.build(means)
        self.usage = UsageReader(place.hierarchy, ops=files)
        self.effect = effect_hours_of(self)
        self.minutes = pod_minutes.PodMinutes(
            place.hierarchy, lambda: self.inventory.pods, sampled=self.effect.minute, files=files
        )
        self.hour = NodeHour()
        harm = HarmWatch(self.reconciler, self.usage, wait=self._online_wait)
        self.owners = OwnerLedger(self, lambda: self.config.owners, self.watching.cases, lambda: harm.withheld_s)
        node = place.kubelet.node_name or os.uname().nodename
        self.memory_headroom = MemoryHeadroom(
            config.headroom,
            self.usage,
            self.inventory,
            lambda: self.reconciler.plan,
            changed=lambda: self.headroom.changed(),  # noqa: PLW0108  (made below)
        )
        self.headroom = HeadroomReport(
            config.headroom, read_kept(self.store), memory=self.memory_headroom, node=node, root=place.root
        )
        self.replug = CpusetRepair(
            self.reconciler,
            self.judge,
            self.ledger,
            place.layout,
            files=files,
            tell=lambda message: self.alert("hotplug", message, None),
        )
        self.owner_check = OwnerCheck(
            self.reconciler, period_s=lambda: self.place.kubelet.reconcile_s, enforces=self.enforces
        )
        self.hotplug = HotplugSource(place.topology, self.replug.changed, root=place.root)
        release = side_actuators.kernel_release(place.root, files)
        self.sampler = Sampler(
            self.reconciler,
            self.usage,
            root=place.root,
            sample_s=config.node.sample_s,
            files=files,
            lagged=self.counters.lagged,
            sampled=self.hotplug.check,
            read=self._read,
            harm=harm,
            daemons=DaemonWatch(
                self.reconciler, self.ledger, place.hierarchy, self.usage, root=place.root, files=files
            ),
            idle_threads=lambda: side_actuators.idle_containers(self.sides, release),
        )
        self.keeper = StateWriter(
            self.store,
            self.ledger,
            self.reconciler,
            self.store_lane,
            alert=self.alert,
            headroom=self.headroom.persisted,
            held=self.holds.all.values,
        )
        self.holds.keeper = self.keeper
        self.publisher = publisher_of(
            self.headroom,
            self._node_use,
            config.apiserver,
            node=node,
            root=place.root,
            kubelets=place.kubelet.kubeconfig,
            writes=self.enforces,
            note=self.keeper.published,
            noted=read_published(self.store),
        )
        self._apply_config(config)
        self.notes.known(active(self.holds.all.values(), time.time()))
        self.holds.refresh()

    def is_urgent(self) -> bool:
        """Whether a container is in creation, or an event waits to be read that may be of one.

        Asked at each wake-up: the step that reads the event must not wait for a CPU, either.
        """
        return self.signal.awaits_any() or self.signal.has_unread or self.tree.has_unread

    def components(self) -> list[list[Component]]:
        """The parts by lifetime, outermost first; the caller adds its own around them."""
        sources = [
            Component(name="write attribution", run=self.attribution.run),
            Component(name="checkpoints", run=self.checkpoints.run),
            Component(name="metadata", run=self.metadata.run),
            Component(name="CPU hot-plug", run=self.hotplug.run),
            Component(name="operator's files", run=self._watch_files),
            Component(name="disks", run=self.disks.run),
            Component(name="holds", run=self.holds.run),
        ]
        if self.config.apiserver.enabled:
            sources.append(Component(name="API credentials", run=self.credentials.run))
        if self.config.kubelet.enabled:
            sources.append(Component(name="kubelet configuration", run=self.kubelet_watch.run))
        if self.pods.kubelet is not None:
            sources.append(Component(name="kubelet", run=at_once(self.pods.kubelet.run)))
        if self.pods.watch is not None:
            sources.append(Component(name="pod watch", run=self.pods.watch.run))
        return [
            [Component(name="keeper", run=self.keeper.run), Component(name="alerts", run=self.alert_service.run)],
            sources,
            [
                Component(name="cgroup tree", run=self.tree.run),
                Component(name="runtime signal", run=self.signal.run),
            ],
            [Component(name="reconciler", run=self.reconciler.run, essential=True)],
            [Component(name=side.name, run=side.run) for side in self.sides],
            [Component(name=service.NAME, run=self.watching.run)],
            [
                Component(name="ticker", run=self.sampler.run),
                Component(name="memory headroom", run=self.memory_headroom.run),
                Component(name="headroom", run=self.headroom.run),
                Component(name=publisher.NAME, run=self.publisher.run),
                Component(name=OWNERS, run=self.owners.run),
                Component(name=OWNER_CHECK, run=self.owner_check.run),
                Component(name=pod_minutes.NAME, run=self.minutes.run),
                Component(name=effect_hours.NAME, run=self.effect.run),
            ],
        ]

    def close(self) -> None:
        """Thaw what we have frozen, and give the store back."""
        self.thaw()
        self.notes.stopped()
        with suppress(StoreError):
            self.ledger.flush()
        self.store.close()

    def thaw(self) -> list[str]:
        """Thaw every group that bypassd has frozen; a response that still needs it freezes again.

        Returns the group paths.
        """
        done, failed = unfreeze(self.place.hierarchy, self.ledger, files=self.files)
        for path in done:
            self.log.info("runs again", group=path)
        for message in failed:
            self.log.error(message)
        return done

    # The runtime's events pass through here, so that the parts do not depend on each other

    def on_settled(self, container_id: str, at: float, which: RuntimeEvent) -> None:
        """`RuntimeEventHandler`."""
        self.reconciler.wait_idle(container_id, at, which)
        self.pods.list_on_event()

    def gone(self, container_id: str) -> None:
        """`RuntimeEventHandler`."""
        self.checkpoints.reassertion.gone(container_id)
        self.reconciler.gone(container_id)
        self.pods.list_on_event()

    def _fired(self, result: FastResult) -> None:
        self.reconciler.on_executed(result)
        if result.creation:
            self.counters.started(result.seconds, result.before_exec)

    def _planned(self, view: NodeView, plan: NodePlan) -> None:
        situation = PlanSnapshot(view=view, plan=plan, enforce=self.judge.enforce, holds=self.judge.holds)
        for side in self.sides:
            side.planned(situation)
        self.headroom.close(plan.closed.reason if plan.closed is not None and self.judge.enforce else None)

    def _online_wait(self) -> WaitSource:
        """Loaded with the first BE pod in the idle class only."""
        from reconciler.signals.onlinewait import OnlineWait

        return OnlineWait(self.place.hierarchy, root=self.place.root, files=self.files)

    def _node_use(self) -> Meter:
        """Loaded where the headroom is published only."""
        from reconciler.signals.node_use import NodeUseMeter

        return NodeUseMeter(self.usage, self.inventory, root=self.place.root)

    def _read(self, cpu: NodeCpu | None, now: float) -> None:
        pools, topology = self.reconciler.pools, self.inventory.readings.topology
        self.headroom.update(pools, topology, cpu, now)
        self.hour.add(cpu, pools.budget_milli if pools is not None else None, len(topology.online), now)

    def current(self) -> tuple[NodeView, NodePlan | None]:
        """The node's present state, and the plan of the last pass."""
        files = self.judge.control_files
        return self.inventory.view(time.monotonic(), files.actual, files.floors), self.reconciler.plan

    def cache_use(self) -> CacheUsage | None:
        """What was measured last of caches and memory bandwidth; None: nothing is."""
        return side_actuators.cache_use(self.sides)

    def mark(self) -> MarkStatus | None:
        """What became of the mark of a closed node; None: none is wanted."""
        return side_actuators.mark(self.sides)

    def closing(self) -> bool:
        """Whether the node is being closed to new BE pods, and the cluster cannot know it yet."""
        wanted, plan = self.inventory.readings.measures.closed, self.reconciler.plan
        if wanted is None:
            return False
        mark = self.mark()
        return plan is None or plan.closed != wanted or mark is None or mark.state is MarkState.PENDING

    def notified(self) -> frozenset[str]:
        """Uids of the pods whose capacity file could be written."""
        return side_actuators.notified(self.sides)

    def holds_now(self) -> Mapping[str, Hold]:
        """The holds in force, by target."""
        return self.judge.holds

    def enforces(self) -> bool:
        """Whether what is planned is also written."""
        return self.judge.enforce

    def claims(self) -> tuple[CpuClaim, ...]:
        """What every owner asked of the CPUs and got in the last plan; empty before the first."""
        plan, view = self.reconciler.plan, self.reconciler.view
        if plan is None or view is None:
            return ()
        if self._claimed is None or self._claimed[0] is not plan.pools:
            self._claimed = plan.pools, cpu_claims(view, plan.pools)
        return self._claimed[1]

    def statuses(self) -> list[SourceStatus]:
        """Every source with its age and what is wrong with it, and the conditions that are not ok."""
        return [*self._sources(), *(status for status in self.conditions() if not status.ok)]

    def _sources(self) -> list[SourceStatus]:
        statuses = [
            self.tree.status(),
            self.signal.status(self.inventory.container_ids(), len(self.inventory.sandboxed())),
            self.checkpoints.status(),
            *self.metadata.statuses(trio.current_time()),
            *self.credentials.statuses(),
            self.attribution.status(),
            self.sampler.status(),
            *self.headroom.statuses(),
            *self.publisher.statuses(),
            *self.watching.statuses(),
            self.hotplug.status(),
            *([self.disks.status()] if self.config.policies.disk.devices else []),
        ]
        statuses += self.operator_files.statuses()
        if self.reconciler.view is not None:
            statuses.append(claims_status(self.claims()))
        if self.config.kubelet.enabled:
            statuses.append(self.kubelet_watch.status())
        if not self.store.writable:
            statuses.append(
                SourceStatus(name="store", ok=False, age_s=None, detail=self.store.problem or "not writable")
            )
        else:
            statuses.append(SourceStatus(name="store", ok=True, age_s=0.0, detail=self.store.path))
        return statuses

    def conditions(self) -> list[SourceStatus]:
        """What of the node keeps a promise from being kept; each is a problem, and an alert, while it is not ok."""
        return [
            outside_status(self.outside),
            self.reconciler.controllers.status(),
            self.owner_check.limits.status(),
            self.reconciler.earlier_run.status(),
            sandboxed_status(self.reconciler.refusals, self.inventory.pods),
            bounds_status(self.reconciler),
        ]

    def _watched(self) -> list[SourceStatus]:
        """What the alerts follow: every source, and every condition until it is ok again."""
        return [*self._sources(), *self.conditions()]

    def _kubelet_changed(self, kubelet: KubeletConfig, changes: tuple[KubeletChange, ...]) -> None:
        """Plan with the new values; parts that are built from others are built anew, by the caller of this agent."""
        place, different = followed(self.config, self.place, kubelet)
        if different:
            self._renew(f"the kubelet's {', '.join(different)} changed")
        self.place = place
        self.checkpoints.reassertion.expect(kubelet.reconcile_s)
        if changes:
            self.dirty.mark_all("kubelet configuration")

    def _credentials_changed(self, server: bool) -> None:
        if self.pods.needs_watch():
            self._renew("credentials for the API server were found")
        else:
            self.pods.credentials_changed(server=server)

    def _kubelet_view(self, pods: Mapping[str, Pod]) -> KubeletView:
        if not self.config.kubelet.enabled:
            return KubeletView()
        kubelet = self.place.kubelet
        return self.checkpoints.view(
            pods,
            reserved=kubelet.reserved_cpus,
            strict_reserved=kubelet.strict_reserved,
            listed=self.pods.kubelet.listed if self.pods.kubelet is not None else None,
        )

    def _owner(self, path: str) -> str | None:
        name = self.place.layout.parse(path)
        return None if name is None else name.pod_uid

    async def _watch_files(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Check the operator's file and the static-pod manifests at intervals; people change them."""
        await in_worker(self.operator_files.prefetch)
        self.operator_files.read_manifests(self.metadata, self.inventory.pods)
        task_status.started()
        while True:
            self.outside = await in_worker(groups_outside, self.place.hierarchy)
            await trio.sleep(_FILES_S)
            await in_worker(self.operator_files.prefetch)
            self.reread_files()

    def reread_files(self) -> None:
        """Read them again; all pods are reconciled when a rule changed. A runtime's socket may exist by now, too."""
        if self.pods.find_runtime():
            self.dirty.mark_all("runtime")
        rules = self._rules()
        if self.marks.use(read_keys(self.config, rules)):
            self.metadata.relist()
        if rules != self.inventory.rules:
            self.inventory.use_rules(rules)
            self.dirty.mark_all("rules")
        if self.operator_files.read_manifests(self.metadata, self.inventory.pods):
            self.dirty.mark_all("manifests")

    # Alerts and commands

    def alert(self, kind: str, message: str, setting: Setting | None) -> None:
        """An alert for people; sent once per occasion."""
        self.alerts[kind] += 1
        path, knob = (setting.path, setting.knob) if setting is not None else ("", "")
        self.log.warning(message, alert=kind, path=path, knob=knob)
        self.alert_service.send(as_alert(kind, message, setting, self.inventory.pods))

    def _hold(self, now: Mapping[str, Hold]) -> None:
        """Pass the holds in force to the judge; targets of an ended hold are reconciled again."""
        if now != self.judge.holds:
            self.judge.holds = now
            self.notes.held(now)
            self.inventory.use_rules(self._rules())
            self.dirty.mark_all("holds")

    def _rules(self) -> ClassRules:
        """The class rules in force, those of freed pods among them."""
        return self.operator_files.rules(self.config.classes, active(self.holds.all.values(), time.time()).values())

    async def release(self, target: str) -> bool:
        """End a hold; False when there was none. Errors: `StoreError`."""
        if not await self.holds.release(target):
            return False
        if (path := group_of(target)) is not None:
            self.foreign.forget(path)
        self.holds.refresh()
        return True

    async def restore(self, only: str | None = None, *, by: str = "") -> list[RestoreResult]:
        """Restore everything and enforce no more until a reload; or one pod, which is then held for a while.

        An operator's hold on it is unchanged. Errors: `StoreError` when the ledger cannot be written afterwards; the
        files are restored all the same.
        """
        if only is None:
            self.set_enforce(enforce=False)
            await self.watching.suspend()
        else:
            self.holds.restored(only, by, self.config.writes.foreign.hold_person_s)
        self.lane.clear()
        table: dict[str, UndoKind] = {CGROUP: partial(restore_control_files, self, only)}
        table |= side_actuators.restore_table(self.sides, only)
        done = await restore_ledger(self.ledger, table, side_actuators.codec_of, only)
        await in_worker(self.ledger.flush, limiter=self.store_lane)
        for result in done:
            if not result.ok:
                self.alert("restore", f"{result.path}/{result.file}: {result.undo}: {result.detail}", None)
        self.dirty.mark_all("restore")
        return done

    async def restore_daemon_weights(self) -> None:
        """Restore the weights of the node's other daemons: without the law that raises them they are too low."""
        if not any(entry.policy == node_daemons.NAME for entry in self.ledger.control_files()):
            return
        for result in await restore_control_files(self, policy=node_daemons.NAME):
            self.log.info("weight of the node's daemons restored", group=result.path, outcome=result.undo.value)

    def set_enforce(self, *, enforce: bool) -> None:
        """Write, or only say what would be written."""
        self.judge.enforce = enforce
        self.publisher.changed()
        self.notes.mode("enforce" if enforce else "observe", "command")
        if not enforce:
            self.lane.clear()
            self.thaw()
        self.dirty.mark_all("mode")

    def _apply_config(self, config: Config) -> None:
        self.judge.enforce = config.mode is AgentMode.ENFORCE
        self.notes.mode(config.mode.value, "configuration")
        self.actuator.reclaim = config.memory.lower is Lower.RECLAIM
        sections = ((name, getattr(config.policies, name)) for name in config.policies.__struct_fields__)
        self.judge.dry_policies = frozenset(name for name, item in sections if getattr(item, "dry_run", False))

    def reconfigure(self, config: Config) -> None:
        """Take a new configuration that has been checked. What needs a restart keeps its old value in it."""
        before, self.config = self.config, config
        self.reconciler.policies = config.policies
        self.foreign.rules = config.writes.foreign
        self.alert_service.reconfigure(config.alerts, config.apiserver)
        self.headroom.config = self.memory_headroom.config = config.headroom
        self.publisher.changed()
        if (before.operator_file, before.static_manifests) != (config.operator_file, config.static_manifests):
            self.operator_files.open(config)
        self._apply_config(config)
        self.disks.refresh()
        self.watching.reconfigure()
        self.reread_files()
        if self.judge.enforce is False:
            self.lane.clear()
            self.thaw()
        self.dirty.mark_all("reload")
