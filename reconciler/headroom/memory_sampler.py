"""Keeps the memory headroom from one reading to the next; `reconciler.headroom.memory` computes it."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, final

import trio

from cgroupfs.naming import QosClass
from cgroupfs.usage import UsageReader
from reconciler.headroom.cpu import HeadroomConfig, HeadroomLaw
from reconciler.headroom.memory import WHOLE, reserve_bytes, smoothing_of, update
from reconciler.headroom.promises import PromiseWindow
from reconciler.headroom.smoothing import (
    SmoothedAmount,
    SmoothedReading,
    available,
    restored,
    step,
    step_below,
    withdrawn,
)
from reconciler.runtime.cooperative import TimeSlice
from reconciler.runtime.wakeup import next_beat
from state.memory import NodeMemoryReading
from state.model import NodeCpu, Pod, PodClass, Pools
from state.plan import NodePlan

_EVERY_S: Final = 5.0
"""Between two readings: each has three files of besteffort and of each pod outside the directory of its class."""
_STALE_S: Final = 10.0
"""The node's memory is read each second."""


class MemoryHeadroomReading(Protocol):
    """The part of `reconciler.control.inventory.Inventory` that is used here."""

    @property
    def node_memory(self) -> NodeMemoryReading | None: ...

    @property
    def besteffort(self) -> str: ...

    @property
    def pods(self) -> Mapping[str, Pod]: ...


class PeakSource(Protocol):
    """The part of `reconciler.control.node_headroom.PeakPredictor` that is used here."""

    def second(self, cpu: NodeCpu | None) -> None: ...

    def cpu_left(self, pools: Pools) -> int | None: ...

    def memory_left(self, node: NodeMemoryReading, reserve_bytes: int) -> int | None: ...


@final
class MemoryHeadroom:
    def __init__(
        self,
        config: HeadroomConfig,
        usage: UsageReader,
        knowledge: MemoryHeadroomReading,
        plan: Callable[[], NodePlan | None],
        *,
        changed: Callable[[], None],
        peaks: PeakSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``changed`` is called when the promise changes. ``peaks``: what predicted peaks leave."""
        self.config = config
        self.state = SmoothedAmount()
        self.promises = PromiseWindow()
        self._usage = usage
        self._knowledge = knowledge
        self._plan = plan
        self._peaks = peaks
        self._changed = changed
        self._clock = clock
        self._supply: SmoothedReading | None = None
        self._closed: str | None = None

    def use(self, config: HeadroomConfig) -> None:
        self.config = config

    def restore(self, promised_bytes: int, age_s: float, lately: Sequence[int] = ()) -> None:
        """Go on from what an earlier run promised so long ago; ``lately``: the promises of its last minutes."""
        self.promises = PromiseWindow(lately, age_s)
        self.state = restored({WHOLE: promised_bytes}, age_s, self._clock(), smoothing_of(self.config))

    def close(self, reason: str | None) -> None:
        """Promise nothing from now on, for this reason; None: promise again, in steps from 0."""
        self._closed = reason
        if reason is not None:
            self.state = withdrawn(self.state, self._clock(), reason)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            await self.sample()
            await next_beat(_EVERY_S)

    async def sample(self) -> None:
        plan = self._plan()
        if plan is None:
            return
        kept = await self._be_kept()
        before = self.state
        bound = plan.memory.reclaimed_high_bytes
        node = self._knowledge.node_memory
        self._supply = supply = update(node, kept, bound, self.config, stale_after_s=_STALE_S)
        law = smoothing_of(self.config)
        if self.config.law is HeadroomLaw.HISTOGRAM and self._peaks is not None and node is not None:
            left = self._peaks.memory_left(node, reserve_bytes(node, self.config))
            self.state = step_below(before, supply, left, self._clock(), law)
        else:
            self.state = step(before, supply, self._clock(), law)
        if self._closed is not None:
            self.state = withdrawn(self.state, self._clock(), self._closed)
        self.promises.add(self.state.total, available(supply))
        if self.state.amounts != before.amounts:
            self._changed()

    def status(self) -> dict[str, object]:
        """The state document's part. ``supply_bytes``: what the newest reading would give, None: unknown."""
        state = self.state
        supply = self._supply.supply if self._supply is not None else None
        return {
            "bytes": state.total,
            "supply_bytes": supply[WHOLE] if supply is not None else None,
            "reason": state.reason,
            "known_s": None if state.known_at is None else max(0.0, self._clock() - state.known_at),
        }

    async def _be_kept(self) -> int | None:
        """BE pods' memory that remains in use after dropping page cache; None where that is unknown."""
        whole = self._usage.memory_use(self._knowledge.besteffort)
        if whole is None:
            return None
        kept, slices = whole.kept_bytes, TimeSlice()
        # A copy: the inventory changes its table while this waits at a checkpoint.
        for pod in list(self._knowledge.pods.values()):
            is_be = pod.pod_class is PodClass.RECLAIMED
            # In the directory of its class: besteffort's sum has it, or lacks it, rightly.
            if is_be == (pod.qos is QosClass.BESTEFFORT):
                continue
            use = self._usage.memory_use(pod.group.path)
            if use is not None:
                kept += use.kept_bytes if is_be else -use.kept_bytes
            elif not is_be:
                return None  # an online pod's memory would count as BE's
            await slices.checkpoint()
        return max(0, kept)
