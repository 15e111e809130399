"""Auxiliary actuators: they set what is not in a cgroup file, such as resctrl, queueing disciplines, threads' cookies.

Each has a task of its own. It compares its part of the newest plan with the node and writes the difference. Before a
value is changed, a row of its kind is durable in the ledger (`reconciler.actuators.codec`), and the row remains exactly
as long as there is something to restore.

A new one is a module that ends in ``ACTUATOR = ActuatorKind(...)`` and a row in `reconciler.control.side_actuators`.
"""

import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, final

import trio
from msgspec import Struct

from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from reconciler.actuators.cgroup.fastpath import FastPath
from reconciler.actuators.cgroup.status import SettingStatus
from reconciler.actuators.codec import RowCodec
from reconciler.runtime.stints import in_worker
from reconciler.runtime.wakeup import WakeUp
from state.cache import CacheUsage
from state.closing import MarkStatus
from state.entry import RestoreResult
from state.evidence import Sample
from state.ledger import Ledger
from state.model import Hold, NodeView
from state.plan import NodePlan

if TYPE_CHECKING:
    from reconciler.clients.kube import KubeApi


class PlanSnapshot(Struct, frozen=True, kw_only=True):
    """The input of an auxiliary actuator. ``enforce`` False: compare and report, change nothing (observe mode)."""

    view: NodeView
    plan: NodePlan
    enforce: bool
    holds: Mapping[str, Hold] = {}


class ActuatorContext(Struct, frozen=True, kw_only=True):
    """The arguments to build an auxiliary actuator.

    ``root``: the node's root; ``kubelet_dir``: the kubelet's directory below it; ``store_lane``: the one-thread limiter
    of all calls that write to the store; ``fastpath``: what is done at the runtime's signal; ``writes``: counts by knob
    and outcome; ``misses``: the newest cache misses of pods by uid, per 1000 instructions, with their age as of the
    call; a pod without an entry was not measured (`reconciler.signals.resctrl_reader.misses_of`); ``api``: makes a
    client of the API server; ``node``: the name of this node's object there.
    """

    hierarchy: Hierarchy
    root: str
    ledger: Ledger
    store_lane: trio.CapacityLimiter
    fastpath: FastPath
    writes: Counter[tuple[str, str]]
    misses: Callable[[], Mapping[str, Sample]]
    api: "Callable[[], KubeApi]"
    node: str
    files: FileOps = REAL
    kubelet_dir: str = "/var/lib/kubelet"


class OfflineContext(Struct, frozen=True, kw_only=True):
    """The input of a restore without a daemon. ``only``: the uid of one pod; None: everything.

    ``api``: makes a client of the API server, by the daemon's configuration.
    """

    root: str
    ledger: Ledger
    api: "Callable[[], KubeApi]"
    only: str | None = None
    files: FileOps = REAL


class ActuatorKind(Struct, frozen=True, kw_only=True):
    """The entry points of an auxiliary actuator's module.

    ``codecs``: of its rows in the ledger, by kind. ``undo``: restores those without a daemon, in a thread; it raises
    `StoreError` if the result cannot be recorded, and `SourceError` if the kernel does not answer. ``undo_online``: the
    same with requests to other programs, in the loop.
    """

    codecs: Mapping[str, RowCodec[Any]]  # of each kind's own state
    build: Callable[[ActuatorContext], "AuxiliaryActuator"]
    undo: Callable[[OfflineContext], Sequence[RestoreResult]] | None = None
    undo_online: Callable[[OfflineContext], Awaitable[Sequence[RestoreResult]]] | None = None


class AuxiliaryActuator(ABC):
    """The interface of an auxiliary actuator. What only some have, as a measurement, has a default: none."""

    name: str
    """Of its component and of its state section, such as ``resctrl``."""
    _statuses: Mapping[str, Mapping[str, SettingStatus]] = MappingProxyType({})

    @abstractmethod
    def planned(self, situation: PlanSnapshot) -> None:
        """Called after each reconciliation, which it must not delay: it only stores the situation and wakes `run`."""

    @abstractmethod
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Apply the newest plan, for ever. Never raises for an error that the kernel returns."""

    @abstractmethod
    async def restore(self, only: str | None = None) -> Sequence[RestoreResult]:
        """Restore everything, or one pod's values (uid). Errors: none; they are in the results.

        In a result ``file`` names what was changed (such as ``schemata``) and ``path`` the object.
        """

    @abstractmethod
    def status(self) -> Mapping[str, object]:
        """Its section of the state document: plain values."""

    @abstractmethod
    def problems(self) -> Sequence[str]:
        """What does not work now, as texts for people."""

    @property
    def statuses(self) -> Mapping[str, Mapping[str, SettingStatus]]:
        """Outcomes that belong to groups, shown and counted with those of control files: by group path, then knob.

        The knobs have names of their own, none of the catalog's.
        """
        return self._statuses

    def measured(self) -> CacheUsage | None:
        """The cache and memory bandwidth of pods, as measured last; None: no plan requests it."""
        return None

    def notified(self) -> frozenset[str]:
        """Uids of the pods that got its last notice of a step before it was taken."""
        return frozenset()

    def mark(self) -> MarkStatus | None:
        """What became of the mark of the node's object in the cluster; None: none is wanted."""
        return None

    def api_usable(self) -> bool:
        """Called when the API server responds again or has other credentials. Returns whether it retries something."""
        return False


@final
class LazyActuator(AuxiliaryActuator):
    """An `AuxiliaryActuator` that builds the real one with ``make`` as soon as a situation is ``wanted``.

    Most nodes need none of them, and each costs memory.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], AuxiliaryActuator],
        wanted: Callable[[PlanSnapshot], bool],
        *,
        leftover: bool = False,
    ) -> None:
        """``leftover``: an earlier run has left rows of its kinds, so the real one is built at once."""
        self.name = name
        self._make = make
        self._wanted = wanted
        self._real: AuxiliaryActuator | None = make() if leftover else None
        self._loaded = trio.Event()

    def planned(self, situation: PlanSnapshot) -> None:
        """Build the real one when it is wanted for the first time; it remains from then on."""
        if self._real is None and self._wanted(situation):
            self._real = self._make()
            self._loaded.set()
        if self._real is not None:
            self._real.planned(situation)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        if self._real is None:
            task_status.started()
            await self._loaded.wait()
            task_status = trio.TASK_STATUS_IGNORED  # started() may be called once only
        assert self._real is not None
        await self._real.run(task_status=task_status)

    async def restore(self, only: str | None = None) -> Sequence[RestoreResult]:
        return await self._real.restore(only) if self._real is not None else ()

    def status(self) -> Mapping[str, object]:
        return self._real.status() if self._real is not None else {}

    def problems(self) -> Sequence[str]:
        return self._real.problems() if self._real is not None else ()

    @property
    def statuses(self) -> Mapping[str, Mapping[str, SettingStatus]]:
        return self._real.statuses if self._real is not None else {}

    def measured(self) -> CacheUsage | None:
        return self._real.measured() if self._real is not None else None

    def notified(self) -> frozenset[str]:
        return self._real.notified() if self._real is not None else frozenset()

    def mark(self) -> MarkStatus | None:
        return self._real.mark() if self._real is not None else None

    def api_usable(self) -> bool:
        return self._real is not None and self._real.api_usable()


T = TypeVar("T")


@final
class PeriodicWorker:
    """Schedules the sweeps of an auxiliary actuator, and runs its blocking work in a thread, never in the event loop.

    The newest situation counts; those in between are skipped. There are never two sweeps at once, `restore` included.
    """

    def __init__(
        self,
        act: Callable[[PlanSnapshot], Awaitable[None]],
        period_s: Callable[[PlanSnapshot], float | None],
        *,
        gap_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``period_s``: between sweeps without a reconciliation, None: no such sweeps; ``gap_s``: least between two."""
        self.situation: PlanSnapshot | None = None
        """The newest; None before the first reconciliation and after a restore."""
        self.sweeps = 0
        self.swept_s = 0.0
        """Number of sweeps, and the duration of the last one (s)."""
        self._act = act
        self._period_s = period_s
        self._gap_s = gap_s
        self._clock = clock
        self._wake_up = WakeUp()
        self._lock = trio.Lock()
        self._limiter = trio.CapacityLimiter(1)

    def planned(self, situation: PlanSnapshot, *, wake: bool) -> None:
        """Called after a reconciliation. ``wake``: sweep now; else the situation is used at the next sweep."""
        self.situation = situation
        if wake:
            self._wake_up.set()

    def wake(self) -> None:
        """Sweep now."""
        self._wake_up.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        rests_until = -math.inf
        while True:
            period_s = self._period_s(self.situation) if self.situation is not None else None
            # Both in one wait: a sleep over the gap first would be one more wake-up.
            await self._wake_up.wait(math.inf if period_s is None else self._gap_s + period_s)
            if trio.current_time() < rests_until:
                await trio.sleep_until(rests_until)
                # What was announced meanwhile is in the situation that this sweep uses.
                self._wake_up.clear()
            await self.sweep()
            rests_until = trio.current_time() + self._gap_s

    async def sweep(self) -> None:
        """Act once on the newest situation; without one nothing is done."""
        async with self._lock:
            if self.situation is None:
                return
            began = self._clock()
            await self._act(self.situation)
            self.sweeps += 1
            self.swept_s = self._clock() - began

    @asynccontextmanager
    async def restoring(self) -> AsyncIterator[PlanSnapshot | None]:
        """No sweep inside this block, and none after it before the next reconciliation. Yields the last situation."""
        async with self._lock:
            # Mode and holds may change with the restore: the old situation would set the values again.
            last, self.situation = self.situation, None
            yield last

    async def work(self, work: Callable[[], T]) -> T:
        """Run blocking work in the actuator's one thread."""
        return await in_worker(work, limiter=self._limiter)


class PeriodicActuator(AuxiliaryActuator):
    """Base of auxiliary actuators that sweep at intervals, and when their part of the plan changes."""

    def __init__(self, worker: PeriodicWorker, relevant: Callable[[PlanSnapshot], object] | None = None) -> None:
        """``relevant``: the parts of a situation on which sweeps depend; None: they depend on each reconciliation."""
        self._worker = worker
        self._relevant = relevant

    def planned(self, situation: PlanSnapshot) -> None:
        """A reconciliation is over. Only another relevant part wakes a sweep."""
        before, relevant = self._worker.situation, self._relevant
        changed = before is None or relevant is None or relevant(before) != relevant(situation)
        # What is shown ends with the sweep that finds it unwanted.
        self._worker.planned(situation, wake=changed and (bool(self._statuses) or self._concerns(situation)))

    def _concerns(self, situation: PlanSnapshot) -> bool:
        """Whether a change of this situation needs a sweep at once, also where nothing is shown."""
        del situation
        return True

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await self._worker.run(task_status=task_status)

    async def sweep(self) -> None:
        await self._worker.sweep()
