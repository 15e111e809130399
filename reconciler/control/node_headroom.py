"""The headroom of the node as a whole: CPU and memory that BE work may be promised, its file, and its publication."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, final

import msgspec
import trio
from msgspec import Struct

from cgroupfs.bounded import decoded
from cgroupfs.errors import StoreError
from cgroupfs.log import get_log
from cgroupfs.usage import MemoryUsage
from reconciler.clients.kube_config import ApiServer
from reconciler.control.hour_rows import uptime_s
from reconciler.control.hub import NodeBase
from reconciler.control.loop import ControlLoop
from reconciler.control.pod_minutes import Minute
from reconciler.control.record import NodeRecord
from reconciler.headroom import publisher
from reconciler.headroom.cpu import ClusterTarget, HeadroomConfig, HeadroomLaw
from reconciler.headroom.memory_sampler import MemoryHeadroom
from reconciler.headroom.peak_rows import (
    ROW,
    ROWS,
    decode_row,
    decode_workload,
    elapsed_s,
    encode_row,
    encode_workload,
    row_of,
)
from reconciler.headroom.peaks import (
    FRESH_S,
    NodeReading,
    PeakPrediction,
    PodReading,
    WorkloadPeaks,
    cpu_left,
    memory_left,
    own_milli,
    reading_of,
)
from reconciler.headroom.promises import NodePromises
from reconciler.headroom.publisher import HeadroomPublisher, Meter, PublishTarget
from reconciler.headroom.report import HeadroomReport, read_kept
from reconciler.headroom.shapes import Offer
from reconciler.runtime.cooperative import TimeSlice, measured_steps
from reconciler.runtime.format import cpu, duration, plural, size
from reconciler.runtime.format import cpu as cpu_text
from reconciler.runtime.stints import in_worker
from reconciler.runtime.supervisor import Component
from reconciler.runtime.wakeup import WakeUp
from state.memory import NodeMemoryReading
from state.model import NodeCpu, NodeView, Pod, Pools, SourceStatus
from state.plan import NodePlan
from state.pod_index import derived
from state.schema import META, PUBLISHED
from state.store import Store, StoreBatch

if TYPE_CHECKING:
    from reconciler.clients.kube import KubeApi

NAME: Final = "workload peaks"
_ROWS_A_MINUTE: Final = 4
"""Of `ROWS`, in turn: each is stored within eight minutes."""
_STOP_S: Final = 2.0
_CPU_FRESH_S: Final = 3.0
_MEMORY_FRESH_S: Final = 10.0
_LOG: Final = get_log("node_headroom")
_PEAKS_LOG: Final = get_log("peaks")


class PeakReadings(Protocol):
    """The part of `reconciler.control.inventory.Inventory` that is used here."""

    @property
    def node_memory(self) -> NodeMemoryReading | None: ...

    @property
    def kubepods(self) -> str: ...

    @property
    def pods(self) -> Mapping[str, Pod]: ...


class MemoryCounters(Protocol):
    """The part of `cgroupfs.usage.UsageReader` that is used here."""

    def memory_use(self, path: str) -> MemoryUsage | None: ...


@final
class PeakPredictor:
    """A component: the learned peaks, and what they leave."""

    def __init__(
        self,
        store: Store,
        lane: trio.CapacityLimiter,
        usage: MemoryCounters,
        inventory: PeakReadings,
        plan: Callable[[], NodePlan | None],
        *,
        law: Callable[[], HeadroomLaw],
        uptime: Callable[[], float] = uptime_s,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``lane``: the store's thread limiter. ``law``: the configured one."""
        self._store, self._lane = store, lane
        self._usage, self._inventory, self._plan = usage, inventory, plan
        self._law, self._uptime, self._wall = law, uptime, wall
        self._due = WakeUp()
        self._minutes: Sequence[tuple[Pod, Minute]] = ()
        self._system_sum = self._system_count = 0
        self._system: float | None = None
        """Mean CPU use of the system in the last whole minute."""
        self._restored = False
        self._next_row = 0
        self._stored: set[str] = set()
        self.peaks = WorkloadPeaks()
        self.prediction: PeakPrediction | None = None

    def second(self, cpu: NodeCpu | None) -> None:
        if cpu is not None and cpu.age_s is not None and cpu.age_s <= _CPU_FRESH_S:
            self._system_sum += cpu.system_milli
            self._system_count += 1

    def take(self, minutes: Sequence[tuple[Pod, Minute]]) -> None:
        """The last minute of all pods; `run` learns from it."""
        if self._law() is HeadroomLaw.HISTOGRAM:
            self._minutes = minutes
            self._due.set()
        self._system = self._system_sum / self._system_count if self._system_count else None
        self._system_sum = self._system_count = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Learn from each minute until cancelled; then all is stored."""
        task_status.started()
        try:
            while True:
                await self._due.wait()
                await self.learn()
                if self._restored:
                    await self.save(_ROWS_A_MINUTE)
        finally:
            if self._restored:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + _STOP_S):
                    await self.save(ROWS)

    async def learn(self) -> None:
        """One minute: read the pods' memory, add the samples, predict."""
        if not self._restored:
            await self._restore()
        minutes = {pod.uid: minute for pod, minute in self._minutes}
        self._minutes = ()
        plan, slices = self._plan(), TimeSlice()
        own = {} if plan is None else own_milli(plan.pools)
        readings: list[PodReading] = []
        # A copy: a pass may change the pods at the checkpoint.
        for pod in list(self._inventory.pods.values()):
            if not pod.pod_class.online:
                continue
            minute = minutes.get(pod.uid)
            use = self._usage.memory_use(pod.group.path)
            readings.append(
                reading_of(
                    pod, None if minute is None else minute.use_milli, None if use is None else use.kept_bytes, own
                )
            )
            await slices.checkpoint()
        at_s = self._uptime()
        steps = self.peaks.minute(readings, NodeReading(self._system, self._system_memory()), at_s)
        self.prediction, _ = await measured_steps(steps, slices)

    def _system_memory(self) -> float | None:
        node = self._inventory.node_memory
        pods = self._usage.memory_use(self._inventory.kubepods)
        if node is None or node.age_s is None or node.age_s > _MEMORY_FRESH_S or pods is None:
            return None
        return float(max(0, node.total_bytes - node.available_bytes - pods.kept_bytes))

    # What is left

    def cpu_left(self, pools: Pools) -> int | None:
        """CPU for BE work beside the predicted peaks; None: nothing was predicted in the last minutes."""
        prediction = self._fresh()
        return None if prediction is None else cpu_left(prediction, pools)

    def memory_left(self, node: NodeMemoryReading, reserve_bytes: int) -> int | None:
        prediction = self._fresh()
        return None if prediction is None else memory_left(prediction, node, reserve_bytes)

    def _fresh(self) -> PeakPrediction | None:
        prediction = self.prediction
        return None if prediction is None or self._uptime() - prediction.at_s > FRESH_S else prediction

    def status(self) -> dict[str, object]:
        """The state document's part: which law decides, and what it knows."""
        law, prediction = self._law(), self.prediction
        if law is not HeadroomLaw.HISTOGRAM:
            return {"name": law.value, "text": f"{law.value}: what the last minutes have left"}
        if prediction is None:
            return {"name": law.value, "text": f"{law.value}: no peak is predicted yet", "stored": len(self.peaks)}
        age_s = max(0.0, self._uptime() - prediction.at_s)
        text = f"{law.value}: peaks of {plural(prediction.known, 'workload')} known"
        text += f", {prediction.cold} by their requests" if prediction.cold else ""
        text += f"; online {cpu_text(prediction.online_cpu_milli)}, system {cpu_text(prediction.system_cpu_milli)}"
        if self._fresh() is None:
            text += f"; not valid: predicted {duration(age_s)} ago"
        return {
            "name": law.value,
            "text": text,
            "stored": len(self.peaks),
            "age_s": age_s,
            "known": prediction.known,
            "cold": prediction.cold,
            "online_milli": prediction.online_cpu_milli,
            "system_milli": prediction.system_cpu_milli,
            "online_bytes": prediction.online_memory_bytes,
            "system_bytes": prediction.system_memory_bytes,
        }

    def workloads(self) -> Mapping[str, int]:
        """Workloads with pods here, by whether their peak is ``known`` or they are ``cold``; empty: another law."""
        prediction = self._fresh() if self._law() is HeadroomLaw.HISTOGRAM else None
        return {} if prediction is None else {"known": prediction.known, "cold": prediction.cold}

    # The store

    async def _restore(self) -> None:
        """Take over what an earlier run learned; a workload that cannot be read is left out."""
        try:
            rows = await in_worker(self._store.rows, META, limiter=self._lane)
        except StoreError:
            return  # tried again with the next minute: rows that are not taken over must not be replaced
        slices = TimeSlice()
        lost = 0
        for key, body in rows:
            if not key.startswith(ROW):
                continue
            self._stored.add(key)
            try:
                row = decode_row(body)
            except ValueError:
                lost += 1
                continue
            at_s = self._uptime() - elapsed_s(row, self._store.boot, self._uptime(), self._wall())
            for raw in row.workloads:
                try:
                    name, workload, known = decode_workload(raw, at_s)
                except ValueError:
                    lost += 1
                else:
                    self.peaks.restore(name, workload, known=known)
                await slices.checkpoint()
        # Not before: an end of the daemon meanwhile must not store a part of it in the place of all.
        self._restored = True
        if lost:
            _PEAKS_LOG.warning("cannot read some learned peaks of workloads; they are learned again", lost=lost)

    async def save(self, rows: int) -> None:
        """Store so many rows, in turn. A failing store is reported by the state writer, not here."""
        numbers = {(self._next_row + number) % ROWS for number in range(rows)}
        self._next_row = (self._next_row + rows) % ROWS
        at_s, slices = self._uptime(), TimeSlice()
        parts: dict[int, list[bytes]] = {number: [] for number in sorted(numbers)}
        for name, workload, known in list(self.peaks.items()):
            if (number := row_of(name)) in parts:
                parts[number].append(encode_workload(name, workload, at_s, known=known))
            await slices.checkpoint()
        batch, emptied = StoreBatch(), set[str]()
        for number, workloads in parts.items():
            key = f"{ROW}{number}"
            if workloads:
                batch.put(META, key, encode_row(self._store.boot, at_s, self._wall(), workloads))
                self._stored.add(key)
            elif key in self._stored:
                batch.delete(META, key)
                emptied.add(key)
        if batch:
            with suppress(StoreError):
                await in_worker(self._store.apply, batch, limiter=self._lane)
                self._stored -= emptied


class PublishedNote(Struct, frozen=True, kw_only=True):
    """The cluster's object: its kind, and the node's name in it."""

    target: ClusterTarget
    node: str


def offered(offer: Offer, pods: Mapping[str, Pod], node: Offer) -> Offer:
    """What is published: the headroom, and never less than what the node's BE pods request.

    Less would let a kubelet that restarts refuse the pods that run, as it admits each again (``OutOf...``), and such a
    pod ends without budget or grace. New pods are kept away all the same, as nothing is left of it.

    ``node``: all that it has. A pod may request more under a name that no scheduler and no kubelet has counted.
    """
    cpu, memory = derived(pods, _promised)
    promised = max(offer.memory, min(memory, node.memory))
    return Offer(cpu_milli=max(offer.cpu_milli, min(cpu, node.cpu_milli)), memory_bytes=promised or offer.memory_bytes)


def _promised(pods: Mapping[str, Pod]) -> tuple[int, int]:
    """Batch CPU (thousandths) and memory (bytes) that the node's pods request, as an admission counts them.

    Mid-tier requests are of another resource, counted by itself.
    """
    cpu = memory = 0
    for pod in pods.values():
        cpu += pod.total(lambda item: 0 if item.requests.mid else item.requests.batch_cpu_milli or 0)
        memory += pod.total(lambda item: 0 if item.requests.mid else item.requests.batch_memory_bytes or 0)
    return cpu, memory


def read_published(store: Store) -> PublishedNote | None:
    """Where an earlier run published the headroom without having withdrawn it; None: nowhere, or it is unknown."""
    row = dict(store.rows(META)).get(PUBLISHED)
    try:
        return None if row is None else decode_note(row)
    except ValueError as exc:
        _LOG.warning("cannot read where the headroom was published; it may remain there", error=str(exc))
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
        self.renamed = None if noted is None or noted.node == node else noted
        """The object that was published under an earlier name of this node."""
        self.target = None if noted is None or self.renamed is not None else noted.target

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

        def api() -> "KubeApi":
            from reconciler.clients.kube import KubeApi  # most nodes have no credentials

            return KubeApi(apiserver, root=place.root, kubelets=place.kubelet.kubeconfig)

        def target(name: ClusterTarget) -> PublishTarget:
            from reconciler.headroom.targets import target_of

            return target_of(
                name, api(), node, meter(), valid_s=lambda: self.report.config.unknown_hold_s, boot=record.store.boot
            )

        async def withdraw_renamed(note: PublishedNote) -> None:
            from reconciler.headroom.targets import withdraw_from

            async with api() as client:
                await withdraw_from(note.target, client, note.node, boot=record.store.boot)

        def whole() -> Offer:
            memory = control.inventory.node_memory
            cpus = len(control.inventory.readings.topology.online)
            # Before the first reading no pod's request is cut.
            return Offer(cpu_milli=1000 * cpus, memory_bytes=1 << 62 if memory is None else memory.total_bytes)

        self.publisher = HeadroomPublisher(
            target,
            wanted=lambda: self.report.config.publish,
            offer=lambda: offered(self.report.offer(), control.inventory.table, whole()),
            writes=lambda: self._mode.enforce,
            note=self.row.note,
            noted=self.row.target,
            renamed=None if self.row.renamed is None else partial(withdraw_renamed, self.row.renamed),
            changed=publish,
        )
        base.hub.api_usable.subscribe(self.publisher.retry)
        base.hub.planned.subscribe(self._planned)

    def reconfigure(self, config: HeadroomConfig) -> None:
        self.memory.use(config)
        self.report.use(config)
        self.publisher.changed()
        self.publisher.retry()

    def _planned(self, _view: NodeView, plan: NodePlan) -> None:
        """Nothing is promised while the node is closed to new BE pods."""
        self.report.close(plan.closed.reason if plan.closed is not None and self._mode.enforce else None)

    def minute(self) -> NodePromises:
        minute = NodePromises(
            self.report.config.law.value, self.report.promises.minute(), self.memory.promises.minute()
        )
        for resource, promise in (("cpu", minute.cpu), ("memory", minute.memory)):
            if promise.available is not None:
                self.minutes[resource, "broken" if promise.is_broken else "kept"] += 1
        return minute

    def mode_changed(self) -> None:
        """In a mode that writes nothing the publisher withdraws the headroom."""
        self.publisher.changed()

    def status(self) -> dict[str, object]:
        return {**self.report.status(), "law": self.peaks.status(), "published": self.publisher.status()}

    def text(self) -> str:
        """The headroom in a line, with the law that decides."""
        offer = self.report.offer()
        amounts = f"{cpu(offer.cpu_milli)}, {size(offer.memory)} memory"
        return f"{amounts}; law {self.peaks.status()['text']}"

    def statuses(self) -> list[SourceStatus]:
        return [*self.report.statuses(), *self.publisher.statuses()]

    def components(self) -> list[Component]:
        """The reading of memory, the writing of the file, the publication."""
        return [
            Component(name="memory headroom", run=self.memory.run),
            Component(name="headroom", run=self.report.run),
            Component(name=NAME, run=self.peaks.run),
            Component(name=publisher.NAME, run=self.publisher.run),
        ]
