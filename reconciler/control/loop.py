"""The control loop as a whole: the inventory, the worker that reconciles it, and the checks of what others change."""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, final

from reconciler.control.bounds_in_force import bounds_status, sandboxed_status
from reconciler.control.cpu_hotplug import CpusetRepair
from reconciler.control.hub import NodeBase
from reconciler.control.inventory import Inventory
from reconciler.control.persistence import read_classes, read_plan, read_unexamined
from reconciler.control.reconciler import Reconciler
from reconciler.control.record import NodeRecord
from reconciler.control.record_check import NAME as OWNER_CHECK
from reconciler.control.record_check import OwnerCheck
from reconciler.control.side_actuators import SideActuators, kernel_release
from reconciler.control.writes import CgroupWrites
from reconciler.placement.claims import CpuClaim, claims_status, cpu_claims
from reconciler.pods.marks import MarkReader
from reconciler.pods.metadata import Metadata
from reconciler.pods.selectors import ClassRules
from reconciler.policies.table import PoliciesConfig
from reconciler.policies.yielding import scheduler_of
from reconciler.runtime.counters import AgentCounters
from reconciler.runtime.supervisor import Component
from reconciler.sources.checkpoints import CheckpointSource
from reconciler.sources.disks import DiskSource
from reconciler.sources.hotplug import HotplugSource
from reconciler.sources.kubelet_config import KubeletConfig
from reconciler.sources.runtime_signal import RuntimeEvents
from reconciler.sources.tree import TreeSource
from state.closing import MarkState
from state.model import Hold, KubeletView, NodeView, Pod, Pools, Setting, SourceStatus
from state.plan import NodePlan


class LoopTimes(NamedTuple):
    """Seconds. ``resync_s``: between two whole passes; ``verify_s``: of checks of a container without a signal."""

    resync_s: float
    verify_s: float


class LoopSources(Protocol):
    """The sources, as far as the loop reads them; `reconciler.daemon.sources.NodeSources` is one."""

    tree: TreeSource
    signal: RuntimeEvents
    disks: DiskSource
    checkpoints: CheckpointSource
    marks: MarkReader
    rules: ClassRules

    @property
    def metadata(self) -> Metadata: ...

    @property
    def kubelet(self) -> KubeletConfig: ...

    def kubelet_view(self, pods: Mapping[str, Pod], /) -> KubeletView: ...


@final
class ControlLoop:
    """Inventory, reconciler and checks as one part."""

    def __init__(
        self,
        base: NodeBase,
        record: NodeRecord,
        sources: LoopSources,
        writes: CgroupWrites,
        sides: SideActuators,
        *,
        policies: PoliciesConfig,
        alert: Callable[[str, str, Setting | None], None],
        times: LoopTimes,
    ) -> None:
        place, hub, files = base.place, base.hub, base.files
        judge, ledger, plan = writes.judge, record.ledger, read_plan(record.store)
        self.writes, self.sides = writes, sides
        # Without a record, values of an earlier run may be in any file.
        recorded = not judge.lost and (plan is not None or len(ledger) > 0)
        self._hub = hub
        self._claimed: tuple[Pools, tuple[CpuClaim, ...]] | None = None
        self.counters = AgentCounters()
        self.inventory = Inventory(
            topology=place.topology,
            versions=place.hierarchy.versions(),
            layout=place.layout,
            dirs=place.runtime,
            rules=lambda: sources.rules,
            metas=sources.metadata.get,
            signalled=sources.signal.covers,
            awaited=sources.signal.awaits,
            disks=lambda: sources.disks.found,
            indicators=base.samples.indicators,
            marks=sources.marks,
            classes=read_classes(record.store),
            errors=judge.errors,
            scheduler=scheduler_of(kernel_release(place.root, files)),
            pods=base.pods,
        )
        self.reconciler = Reconciler(
            dirty=hub.changed,
            tree=sources.tree,
            knowledge=self.inventory,
            metadata=sources.metadata,
            actuator=writes.actuator,
            lane=writes.fastpath,
            ledger=ledger,
            policies=policies,
            kubelet=sources.kubelet_view,
            reassertion=sources.checkpoints.reassertion,
            planned=hub.planned,
            resync_s=times.resync_s,
            verify_s=times.verify_s,
            plan=plan,
            counters=self.counters,
            unexamined=read_unexamined(record.store) if recorded else None,
        )
        self.repair = CpusetRepair(
            self.reconciler,
            judge,
            ledger,
            place.layout,
            files=files,
            tell=lambda message: alert("hotplug", message, None),
        )
        self.hotplug = HotplugSource(place.topology, self.repair.changed, root=place.root)
        self.owner_check = OwnerCheck(
            self.reconciler,
            period_s=lambda: sources.kubelet.reconcile_s,
            enforces=lambda: writes.mode.enforce,
            bounds_written=lambda: writes.attribution.bounds_written,
        )
        hub.planned.subscribe(sides.planned)
        hub.settled.subscribe(self.reconciler.settled)
        hub.unfinished.subscribe(self.reconciler.lane.write_ahead)
        hub.commanded.subscribe(self.reconciler.commanded)
        hub.gone.subscribe(self.reconciler.gone)
        hub.executed.subscribe(self.reconciler.on_executed)
        hub.held.subscribe(self._reconcile_holds)

    def plan(self) -> NodePlan | None:
        return self.reconciler.plan

    def current(self) -> tuple[NodeView, NodePlan | None]:
        files = self.writes.judge.control_files
        return self.inventory.view(time.monotonic(), files.actual, files.floors), self.reconciler.plan

    def closing(self) -> bool:
        """Whether the node is being closed to new BE pods, and the cluster cannot know it yet."""
        wanted, plan = self.inventory.readings.measures.closed, self.reconciler.plan
        if wanted is None:
            return False
        mark = self.sides.mark()
        return plan is None or plan.closed != wanted or mark is None or mark.state is MarkState.PENDING

    def claims(self) -> tuple[CpuClaim, ...]:
        """CPUs requested and granted by owner in the last plan; empty before the first."""
        plan, view = self.reconciler.plan, self.reconciler.view
        if plan is None or view is None:
            return ()
        if self._claimed is None or self._claimed[0] is not plan.pools:
            self._claimed = plan.pools, cpu_claims(view, plan.pools)
        return self._claimed[1]

    def statuses(self) -> list[SourceStatus]:
        """What the loop itself reads, and whether the claims on CPUs are met."""
        planned = self.reconciler.view is not None
        return [self.hotplug.status(), *([claims_status(self.claims())] if planned else [])]

    def conditions(self) -> list[SourceStatus]:
        """What of the node keeps a promise from being kept; each is a problem, and an alert, while it is not ok."""
        return [
            self.reconciler.controllers.status(),
            self.owner_check.limits.status(),
            self.reconciler.earlier_run.status(),
            sandboxed_status(self.reconciler.refusals, self.inventory.pods),
            bounds_status(self.reconciler),
        ]

    def worker(self) -> Component:
        """The one without which nothing is written."""
        return Component(name="reconciler", run=self.reconciler.run, essential=True)

    def components(self) -> list[Component]:
        """What runs besides the worker."""
        return [Component(name=OWNER_CHECK, run=self.owner_check.run)]

    def _reconcile_holds(self, _holds: Mapping[str, Hold]) -> None:
        self._hub.changed.mark_all("holds")
