"""The headroom of the node as a whole: CPU and memory that BE work may be promised, its file, and its publication."""

from collections import Counter
from collections.abc import Mapping
from typing import final

import msgspec
import trio
from msgspec import Struct

from cgroupfs.bounded import decoded
from reconciler.clients.kube_config import ApiServer
from reconciler.control import workload_peaks
from reconciler.control.hub import NodeBase
from reconciler.control.loop import ControlLoop
from reconciler.control.record import NodeRecord
from reconciler.control.workload_peaks import PeakPredictor
from reconciler.headroom import publisher
from reconciler.headroom.cpu import ClusterTarget, HeadroomConfig
from reconciler.headroom.memory_sampler import MemoryHeadroom
from reconciler.headroom.promises import NodePromises
from reconciler.headroom.publisher import HeadroomPublisher, Meter, PublishTarget
from reconciler.headroom.report import HeadroomReport, read_kept
from reconciler.headroom.shapes import Offer
from reconciler.runtime.format import cpu, size
from reconciler.runtime.stints import in_worker
from reconciler.runtime.supervisor import Component
from reconciler.runtime.wakeup import WakeUp
from state.model import ContainerKind, NodeView, Pod, SourceStatus
from state.plan import NodePlan
from state.schema import META, PUBLISHED
from state.store import Store, StoreBatch


class PublishedNote(Struct, frozen=True, kw_only=True):
    """The cluster's object: its kind, and the node's name in it."""

    target: ClusterTarget
    node: str


def offered(offer: Offer, pods: Mapping[str, Pod]) -> Offer:
    """What is published: the headroom, and never less than what the node's BE pods have been promised.

    New pods are kept away as well: nothing is left of it. Less would let a kubelet that restarts refuse the pods that
    run, as it admits each again (``OutOf...``), and such a pod ends without budget or grace. Requests are those that
    count for an admission: the sum of the containers, or the largest init container. Source: Kubernetes documentation,
    "Init Containers", resource sharing; kubelet's admission.
    """
    cpu = memory = 0
    for pod in pods.values():
        sums, largest = [0, 0], [0, 0]
        for item in pod.members:
            asks = (item.requests.batch_cpu_milli or 0, item.requests.batch_memory_bytes or 0)
            if item.kind is ContainerKind.INIT:
                largest = [max(pair) for pair in zip(largest, asks, strict=True)]
            else:
                sums = [sum(pair) for pair in zip(sums, asks, strict=True)]
        cpu += max(sums[0], largest[0])
        memory += max(sums[1], largest[1])
    promised = max(offer.memory, memory)
    return Offer(cpu_milli=max(offer.cpu_milli, cpu), memory_bytes=promised or offer.memory_bytes)


def read_published(store: Store) -> PublishedNote | None:
    """Where an earlier run published the headroom without having withdrawn it; None: nowhere."""
    row = dict(store.rows(META)).get(PUBLISHED)
    try:
        return None if row is None else decode_note(row)
    except ValueError:
        return None


def decode_note(row: bytes) -> PublishedNote:
    """The row. Errors: `ValueError`."""
    return decoded(msgspec.msgpack.Decoder(PublishedNote).decode, row)


@final
class PublishedRow:
    """The store's note of where the headroom is published; ``target`` None: nowhere."""

    def __init__(self, store: Store, lane: trio.CapacityLimiter, node: str) -> None:
        """``node``: the name of the node's object."""
        self._store = store
        self._lane = lane
        self._node = node
        noted = read_published(store)
        self.target = None if noted is None else noted.target

    async def note(self, target: ClusterTarget | None) -> None:
        """Make it durable. Errors: `StoreError`."""
        batch = StoreBatch()
        if target is None:
            batch.delete(META, PUBLISHED)
        else:
            batch.put(META, PUBLISHED, msgspec.msgpack.encode(PublishedNote(target=target, node=self._node)))
        await in_worker(self._store.apply, batch, limiter=self._lane)
        self.target = target

    def stage(self, batch: StoreBatch) -> None:
        """Put it into the rows of a store that is another file than before."""
        if self.target is not None:
            batch.put(META, PUBLISHED, msgspec.msgpack.encode(PublishedNote(target=self.target, node=self._node)))


@final
class NodeHeadroom:
    """The headroom of CPU and memory with its file and its publication.

    The sampler passes readings of CPU use to `report`.
    """

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

        self.peaks = peaks = PeakPredictor(
            record.store,
            record.lane,
            base.usage,
            control.inventory,
            control.plan,
            law=lambda: self.report.config.law,
        )
        self.memory = MemoryHeadroom(config, base.usage, control.inventory, control.plan, changed=changed, peaks=peaks)
        self.report = HeadroomReport(
            config,
            read_kept(record.store),
            memory=self.memory,
            peaks=peaks,
            due=due,
            changed=changed,
            node=node,
            root=place.root,
        )
        self.minutes: Counter[tuple[str, str]] = Counter()
        """Since the start: by resource, and whether the promise was kept or broken."""
        self.row = PublishedRow(record.store, record.lane, node)

        def target(name: ClusterTarget) -> PublishTarget:
            from reconciler.clients.kube import KubeApi  # most nodes have no credentials
            from reconciler.headroom.targets import target_of

            api = KubeApi(apiserver, root=place.root, kubelets=place.kubelet.kubeconfig)
            return target_of(name, api, node, meter(), valid_s=lambda: self.report.config.unknown_hold_s)

        self.publisher = HeadroomPublisher(
            target,
            wanted=lambda: self.report.config.publish,
            offer=lambda: offered(self.report.offer(), control.inventory.pods),
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

    def minute(self) -> NodePromises:
        """A minute is over: what was promised, and what was there."""
        minute = NodePromises(
            self.report.config.law.value, self.report.promises.minute(), self.memory.promises.minute()
        )
        for resource, promise in (("cpu", minute.cpu), ("memory", minute.memory)):
            if promise.available is not None:
                self.minutes[resource, "broken" if promise.is_broken else "kept"] += 1
        return minute

    def mode_changed(self) -> None:
        """What is published is withdrawn in a mode that writes nothing."""
        self.publisher.changed()

    def status(self) -> dict[str, object]:
        """The state document's part."""
        return {**self.report.status(), "law": self.peaks.status(), "published": self.publisher.status()}

    def text(self) -> str:
        """The headroom in a line, with the law that decides."""
        offer = self.report.offer()
        amounts = f"{cpu(offer.cpu_milli)}, {size(offer.memory)} memory"
        return f"{amounts}; law {self.peaks.status()['text']}"

    def statuses(self) -> list[SourceStatus]:
        """Whether the file can be written, and the cluster's object."""
        return [*self.report.statuses(), *self.publisher.statuses()]

    def components(self) -> list[Component]:
        """The reading of memory, the writing of the file, the publication."""
        return [
            Component(name="memory headroom", run=self.memory.run),
            Component(name="headroom", run=self.report.run),
            Component(name=workload_peaks.NAME, run=self.peaks.run),
            Component(name=publisher.NAME, run=self.publisher.run),
        ]
