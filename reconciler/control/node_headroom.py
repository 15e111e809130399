"""The headroom of the node as a whole: CPU and memory that BE work may be promised, its file, and its publication."""

from typing import final

import msgspec
import trio

from cgroupfs.bounded import decoded
from reconciler.clients.kube_config import ApiServer
from reconciler.control.hub import NodeBase
from reconciler.control.loop import ControlLoop
from reconciler.control.record import NodeRecord
from reconciler.headroom import publisher
from reconciler.headroom.cpu import ClusterTarget, HeadroomConfig
from reconciler.headroom.memory_sampler import MemoryHeadroom
from reconciler.headroom.publisher import HeadroomPublisher, Meter, PublishTarget
from reconciler.headroom.report import HeadroomReport, read_kept
from reconciler.runtime.stints import in_worker
from reconciler.runtime.supervisor import Component
from reconciler.runtime.wakeup import WakeUp
from state.model import NodeView, SourceStatus
from state.plan import NodePlan
from state.schema import META, PUBLISHED
from state.store import Store, StoreBatch


def read_published(store: Store) -> ClusterTarget | None:
    """Where an earlier run published the headroom without having withdrawn it; None: nowhere."""
    row = dict(store.rows(META)).get(PUBLISHED)
    try:
        return None if row is None else ClusterTarget(decoded(msgspec.msgpack.Decoder(str).decode, row))
    except ValueError:
        return None


@final
class PublishedRow:
    """The store's note of where the headroom is published; ``target`` None: nowhere."""

    def __init__(self, store: Store, lane: trio.CapacityLimiter) -> None:
        self._store = store
        self._lane = lane
        self.target = read_published(store)

    async def note(self, target: ClusterTarget | None) -> None:
        """Make it durable. Errors: `StoreError`."""
        batch = StoreBatch()
        if target is None:
            batch.delete(META, PUBLISHED)
        else:
            batch.put(META, PUBLISHED, msgspec.msgpack.encode(target.value))
        await in_worker(self._store.apply, batch, limiter=self._lane)
        self.target = target

    def stage(self, batch: StoreBatch) -> None:
        """Put it into the rows of a store that is another file than before."""
        if self.target is not None:
            batch.put(META, PUBLISHED, msgspec.msgpack.encode(self.target.value))


@final
class NodeHeadroom:
    """See the module's text. The sampler passes readings of CPU use to `report`."""

    def __init__(
        self,
        base: NodeBase,
        record: NodeRecord,
        control: ControlLoop,
        config: HeadroomConfig,
        apiserver: ApiServer,
    ) -> None:
        place, node = base.place, base.place.name
        self._mode = control.writes.mode
        due, publish = WakeUp(), WakeUp()

        def changed() -> None:
            due.set()
            publish.set()

        def meter() -> Meter:
            from reconciler.signals.node_use import NodeUseMeter  # where the headroom is published only

            return NodeUseMeter(base.usage, control.inventory, root=place.root)

        self.memory = MemoryHeadroom(config, base.usage, control.inventory, control.plan, changed=changed)
        self.report = HeadroomReport(
            config,
            read_kept(record.store),
            memory=self.memory,
            due=due,
            changed=changed,
            node=node,
            root=place.root,
        )
        self.row = PublishedRow(record.store, record.lane)

        def target(name: ClusterTarget) -> PublishTarget:
            from reconciler.clients.kube import KubeApi  # most nodes have no credentials
            from reconciler.headroom.targets import target_of

            api = KubeApi(apiserver, root=place.root, kubelets=place.kubelet.kubeconfig)
            return target_of(name, api, node, meter(), valid_s=lambda: self.report.config.unknown_hold_s)

        self.publisher = HeadroomPublisher(
            target,
            wanted=lambda: self.report.config.publish,
            offer=self.report.offer,
            writes=lambda: self._mode.enforce,
            note=self.row.note,
            noted=self.row.target,
            changed=publish,
        )
        base.hub.planned.subscribe(self._planned)

    def reconfigure(self, config: HeadroomConfig) -> None:
        """Take a new configuration."""
        self.memory.use(config)
        self.report.use(config)
        self.publisher.changed()

    def _planned(self, _view: NodeView, plan: NodePlan) -> None:
        """Nothing is promised while the node is closed to new BE pods."""
        self.report.close(plan.closed.reason if plan.closed is not None and self._mode.enforce else None)

    def mode_changed(self) -> None:
        """What is published is withdrawn in a mode that writes nothing."""
        self.publisher.changed()

    def status(self) -> dict[str, object]:
        """The state document's part."""
        return {**self.report.status(), "published": self.publisher.status()}

    def statuses(self) -> list[SourceStatus]:
        """Whether the file can be written, and the cluster's object."""
        return [*self.report.statuses(), *self.publisher.statuses()]

    def components(self) -> list[Component]:
        """The reading of memory, the writing of the file, the publication."""
        return [
            Component(name="memory headroom", run=self.memory.run),
            Component(name="headroom", run=self.report.run),
            Component(name=publisher.NAME, run=self.publisher.run),
        ]
