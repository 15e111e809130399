"""Keeps the headroom from one reading to the next, and publishes it: to the CLI, metrics, the store, and a file.

The sampler passes each CPU reading; `reconciler.headroom.cpu` computes. The file is one small JSON object for an
overcommit reporter on the node (what a device plug-in or a node agent turns into an extended resource).
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Final, final

import msgspec
import trio
from msgspec import Struct

from cgroupfs.bounded import decoded
from cgroupfs.errors import errno_name
from cgroupfs.log import get_log
from reconciler.headroom.cpu import HeadroomConfig, HeadroomLaw, HeadroomSample, update
from reconciler.headroom.memory_sampler import MemoryHeadroom, PeakSource
from reconciler.headroom.promises import PromiseWindow, Tops
from reconciler.headroom.shapes import Offer
from reconciler.headroom.smoothing import SmoothedAmount, available, restored, step, step_below, withdrawn
from reconciler.runtime.stints import in_worker
from reconciler.runtime.wakeup import WakeUp
from state.model import NodeCpu, Pools, SourceStatus
from state.schema import ASSIGNMENTS
from state.store import Store
from state.topology import Topology

_LOG: Final = get_log("report")
HEADROOM: Final = "headroom"
"""Row of the ASSIGNMENTS table."""
SCHEMA: Final = 1
_KIND: Final = "bypassd-headroom"


class HeadroomState(Struct, frozen=True, kw_only=True):
    """What the store holds: the promise by NUMA node, and when it was last known to be right (wall clock).

    The same of memory; None: nothing has been promised of it. ``lately``, ``memory_lately``: the largest promise of
    each of the last minutes (`reconciler.headroom.promises`).

    In the agent's own store: Katalyst's util-based headroom reads the last amount from the API server, and stops where
    there is none.
    """

    milli: Mapping[str, int]
    at: float
    memory_bytes: int | None = None
    memory_at: float | None = None
    lately: Tops = ()
    memory_lately: Tops = ()


def read_kept(store: Store) -> HeadroomState | None:
    """The promise of an earlier run; None when there is none that can be read."""
    row = dict(store.rows(ASSIGNMENTS)).get(HEADROOM)
    if row is None:
        return None
    try:
        return decoded(msgspec.msgpack.Decoder(HeadroomState).decode, row)
    except ValueError as exc:
        _LOG.warning("cannot read the headroom of the last run", error=str(exc))
        return None


@final
class HeadroomReport:
    """The newest headroom, and its file."""

    def __init__(
        self,
        config: HeadroomConfig,
        kept: HeadroomState | None = None,
        *,
        memory: MemoryHeadroom | None = None,
        peaks: PeakSource | None = None,
        due: WakeUp | None = None,
        changed: Callable[[], None] | None = None,
        node: str = "",
        root: str = "/",
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``kept``: the promise of an earlier run. ``memory``: the promise of it. ``node``: its name, for the file.

        ``peaks``: what predicted peaks leave, for that law.
        ``due`` makes the file follow; ``changed`` is called when a promise is another one, and sets that.
        """
        self.config = config
        self.problem: str | None = None
        self._memory = memory
        self._peaks = peaks
        self._node = node
        self._root = root
        self._clock = clock
        self._wall = wall
        self._due = due or WakeUp()
        self._announce = changed or self._due.set
        self._sample: HeadroomSample | None = None
        self._kept = kept
        self._closed: str | None = None
        self.state = SmoothedAmount()
        self.promises = PromiseWindow()
        if kept is not None:
            self.promises = PromiseWindow(kept.lately, wall() - kept.at)
            milli = {int(node): milli for node, milli in kept.milli.items() if node.isdecimal()}
            self.state = restored(milli, wall() - kept.at, clock(), config.smoothing)
            if memory is not None and kept.memory_bytes is not None and kept.memory_at is not None:
                memory.restore(kept.memory_bytes, wall() - kept.memory_at, kept.memory_lately)

    def use(self, config: HeadroomConfig) -> None:
        self.config = config

    def update(self, pools: Pools | None, topology: Topology, cpu: NodeCpu | None, now: float) -> None:
        """One CPU reading (None, or an old one: unknown), with the pools in force."""
        if pools is None:
            return
        before = self.state
        self._sample = sample = update(pools, topology, cpu, self.config)
        if self.config.law is HeadroomLaw.HISTOGRAM and self._peaks is not None:
            self._peaks.second(cpu)
            left = self._peaks.cpu_left(pools)
            self.state = step_below(before, sample, left, now, self.config.smoothing)
        else:
            self.state = step(before, sample, now, self.config.smoothing)
        if self._closed is not None:
            self.state = withdrawn(self.state, now, self._closed)
        self.promises.add(self.state.total, available(sample))
        if self.state.amounts != before.amounts:
            self._announce()

    def close(self, reason: str | None) -> None:
        """Promise nothing from now on, for this reason; None: promise again, in steps from 0."""
        closed = None if reason is None else f"closed to new BE pods: {reason}"
        if closed == self._closed:
            return
        self._closed = closed
        if self._memory is not None:
            self._memory.close(closed)
        if closed is not None:
            self.state = withdrawn(self.state, self._clock(), closed)
        self._announce()

    def offer(self) -> Offer:
        return Offer(
            cpu_milli=self.state.total, memory_bytes=self._memory.state.total if self._memory is not None else None
        )

    def persisted(self) -> HeadroomState | None:
        """What the store is to hold. Equal until a promise changes or half its time is over: the disk may sleep."""
        at, last = self._known(self.state), self._kept
        if at is None:
            return last
        memory = self._memory.state if self._memory is not None else SmoothedAmount()
        memory_at = self._known(memory)
        milli = {str(node): milli for node, milli in self.state.amounts.items()}
        fresh = HeadroomState(
            milli=milli,
            at=at,
            memory_bytes=memory.total if memory_at is not None else None,
            memory_at=memory_at,
            lately=self.promises.tops,
            memory_lately=self._memory.promises.tops if self._memory is not None else (),
        )
        if last is None or not self._is_stored(last, fresh):
            self._kept = fresh
        return self._kept

    def _known(self, promise: SmoothedAmount) -> float | None:
        """When a promise was last known to be right, by the wall clock."""
        if promise.known_at is None:
            return None
        return self._wall() - max(0.0, self._clock() - promise.known_at)

    def _is_stored(self, last: HeadroomState, fresh: HeadroomState) -> bool:
        """Whether what the store has is the same, and young enough."""
        half = self.config.unknown_hold_s / 2
        same = (last.milli, last.memory_bytes) == (fresh.milli, fresh.memory_bytes)
        pairs = ((last.at, fresh.at), (last.memory_at, fresh.memory_at))
        return same and all(
            old == new or (old is not None and new is not None and 0 <= new - old < half) for old, new in pairs
        )

    def status(self) -> dict[str, object]:
        state, sample = self.state, self._sample
        supply = (sample.supply if sample is not None else None) or {}
        cpus = sample.cpus if sample is not None else {}
        return {
            "milli": state.total,
            "reason": state.reason,
            "closed": self._closed is not None,
            "known_s": None if state.known_at is None else max(0.0, self._clock() - state.known_at),
            "nodes": [
                {
                    "numa_node": node,
                    "milli": milli,
                    "supply_milli": supply.get(node),
                    "cpus": str(cpus[node]) if node in cpus else None,
                }
                for node, milli in sorted(state.amounts.items())
            ],
            "memory": self._memory.status() if self._memory is not None else None,
        }

    def document(self) -> dict[str, object]:
        """The file's content. After ``valid_until`` nothing is promised."""
        now = self._wall()
        return {
            "schema": SCHEMA,
            "kind": _KIND,
            "node": self._node,
            "at": now,
            # The file of an agent that was stopped expires soon.
            "valid_until": now + self.config.unknown_hold_s,
            "cpu_milli": self.state.total,
            "memory_bytes": self._memory.state.total if self._memory is not None else None,
            "numa_nodes": {str(node): {"cpu_milli": milli} for node, milli in sorted(self.state.amounts.items())},
            "closed": self._closed is not None,
            "reason": self.state.reason,
        }

    # The file

    def statuses(self) -> list[SourceStatus]:
        """Whether the file can be written, where there is one."""
        if self.config.file is None:
            return []
        detail = self.problem or self.config.file
        return [SourceStatus(name="headroom file", ok=self.problem is None, age_s=None, detail=detail)]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Replace the file when the promise changes, and often enough for its time never to run out."""
        task_status.started()
        while True:
            await self._due.wait(min(self.config.report_s, max(1.0, self.config.unknown_hold_s / 3)))
            await self.write()

    async def write(self) -> None:
        """Replace the file now, if one is configured. A failure is reported once, and writing is tried again."""
        if self.config.file is None:
            self.problem = None
            return
        from reconciler.runtime.safe_files import replace_file  # only where a file is configured

        path = os.path.join(self._root, self.config.file.lstrip("/"))
        content = msgspec.json.encode(self.document()) + b"\n"
        try:
            await in_worker(replace_file, path, content)
        except OSError as exc:
            problem = f"{path}: {errno_name(exc.errno) if exc.errno else exc}"
            if self.problem != problem:
                _LOG.warning("cannot write the headroom", error=problem)
            self.problem = problem
        else:
            self.problem = None
