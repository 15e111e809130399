"""Learns the peaks of online workloads each minute, keeps them over restarts, and says what they leave for BE work.

Only with ``headroom.law: histogram``. CPU use is that of `reconciler.control.pod_minutes`; memory is read here, three
files a pod and minute, in slices. An eighth of the store's rows is written each minute, all at the end: a crash costs
eight minutes of samples. `reconciler.headroom.peaks` has the law.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol, final

import trio

from cgroupfs.errors import StoreError
from cgroupfs.log import get_log
from cgroupfs.usage import MemoryUsage
from reconciler.control.hour_rows import uptime_s
from reconciler.control.pod_minutes import Minute
from reconciler.headroom.cpu import HeadroomLaw
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
from reconciler.runtime.cooperative import TimeSlice
from reconciler.runtime.format import cpu as cpu_text
from reconciler.runtime.format import duration, plural
from reconciler.runtime.stints import in_worker
from reconciler.runtime.wakeup import WakeUp
from state.memory import NodeMemoryReading
from state.model import NodeCpu, Pod, Pools
from state.plan import NodePlan
from state.schema import META
from state.store import Store, StoreBatch

NAME: Final = "workload peaks"
_ROWS_A_MINUTE: Final = 4
_STOP_S: Final = 2.0
_CPU_FRESH_S: Final = 3.0
_MEMORY_FRESH_S: Final = 10.0
_LOG: Final = get_log("peaks")


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
        """A reading of the node's CPU use."""
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
        while True:
            try:
                next(steps)
            except StopIteration as end:
                self.prediction = end.value
                return
            await slices.checkpoint()

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
        """The same of memory."""
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
            _LOG.warning("cannot read some learned peaks of workloads; they are learned again", lost=lost)

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
        batch = StoreBatch()
        for number, workloads in parts.items():
            key = f"{ROW}{number}"
            if workloads:
                batch.put(META, key, encode_row(self._store.boot, at_s, self._wall(), workloads))
                self._stored.add(key)
            elif key in self._stored:
                batch.delete(META, key)
                self._stored.discard(key)
        if batch:
            with suppress(StoreError):
                await in_worker(self._store.apply, batch, limiter=self._lane)
