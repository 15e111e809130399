"""What an actuator is that brings something else than cgroup files to the plan: cache, network, tasks' attributes.

It has a task of its own, so that nothing it does can hold up a look or the hot lane. After each look it is handed the
newest view and plan. It compares its field of the plan with what is there, makes the difference, and keeps what it
needs to undo it. What it does must be found again without it: `restore` also works while no daemon runs, and after a
crash.

An auxiliary actuator is loaded when the first plan wants it: most nodes want none, and each costs memory.

One that an earlier run has left something of is loaded at once, so that what is no longer wanted is taken back.

What it changes has rows of its kind in the ledger (`reconciler.actuators.codec`), durable before anything is done. They
are there exactly while there is something to take back: by them alone the daemon knows, at its next start, which side
actuators it has to load (`reconciler.daemon.side_actuators`).

When an auxiliary actuator acts: after each look that concerns it, and every so often; and how it does slow work.

Every one of them has the same four rules. The newest situation counts, and those between are skipped. Never two acts at
once, `restore` among them. After a restore nothing is done before the next look, because what is known of mode and
holds is older. All that blocks runs in one thread of its own, never in the loop.
"""

import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar, final, runtime_checkable

import trio
from msgspec import Struct

from reconciler.actuators.cgroup.status import SettingStatus
from reconciler.runtime.wakeup import WakeUp
from state.cache import CacheUsage
from state.model import Hold, NodeView
from state.plan import NodePlan
from state.undo import RestoreResult


class PlanSnapshot(Struct, frozen=True, kw_only=True):
    """What an auxiliary actuator goes by. ``enforce`` False: look and tell, but change nothing (observe mode)."""

    view: NodeView
    plan: NodePlan
    enforce: bool
    holds: Mapping[str, Hold] = {}


class AuxiliaryActuator(Protocol):
    """One of them. Registered in `reconciler.daemon.side_actuators`."""

    @property
    def name(self) -> str:
        """Its component's and its state section's name, such as ``resctrl``."""

    def planned(self, situation: PlanSnapshot) -> None:
        """A look is over. Must not wait: it only keeps the situation and wakes `run`."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Bring things to the newest situation, for ever. Never raises for something that the node refuses."""

    async def restore(self, only: str | None = None) -> Sequence[RestoreResult]:
        """Undo everything, or what was done for one pod (uid). Errors: none; they are in the answer.

        In the answer ``file`` is what was changed (such as ``schemata``) and ``path`` where.
        """

    def status(self) -> Mapping[str, object]:
        """Its section of the state document: plain values."""

    def problems(self) -> Sequence[str]:
        """What does not work now, for a person."""


@runtime_checkable
class GroupOutcomes(Protocol):
    """An auxiliary actuator whose outcomes belong to groups: shown and counted beside those of control files."""

    @property
    def standings(self) -> Mapping[str, Mapping[str, SettingStatus]]:
        """By group path, then knob. The knobs have names of their own, none of the catalog's."""


@runtime_checkable
class CacheUsageSource(Protocol):
    """An auxiliary actuator that measures what pods use of cache and memory bandwidth."""

    def measured(self) -> CacheUsage | None:
        """The newest; None while nobody wants it."""


@final
class LazyActuator:
    """`AuxiliaryActuator`: nothing at all until ``wanted`` says so of a situation, then the one that ``make`` makes."""

    def __init__(
        self,
        name: str,
        make: Callable[[], AuxiliaryActuator],
        wanted: Callable[[PlanSnapshot], bool],
        *,
        leftover: bool = False,
    ) -> None:
        """``leftover``: there is something to take back, wanted or not."""
        self._name = name
        self._make = make
        self._wanted = wanted
        self._real: AuxiliaryActuator | None = make() if leftover else None
        self._loaded = trio.Event()

    @property
    def name(self) -> str:
        """The real one's name, before there is one."""
        return self._name

    def planned(self, situation: PlanSnapshot) -> None:
        """Load it when it is wanted for the first time; from then on it stays."""
        if self._real is None and self._wanted(situation):
            self._real = self._make()
            self._loaded.set()
        if self._real is not None:
            self._real.planned(situation)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Wait until it is wanted, then be the real one's task."""
        if self._real is None:
            task_status.started()
            await self._loaded.wait()
            task_status = trio.TASK_STATUS_IGNORED
        assert self._real is not None
        await self._real.run(task_status=task_status)

    async def restore(self, only: str | None = None) -> Sequence[RestoreResult]:
        """The real one's; without it there is nothing of it to undo."""
        return await self._real.restore(only) if self._real is not None else ()

    def status(self) -> Mapping[str, object]:
        """The real one's; empty without it."""
        return self._real.status() if self._real is not None else {}

    def problems(self) -> Sequence[str]:
        """The real one's."""
        return self._real.problems() if self._real is not None else ()

    @property
    def standings(self) -> Mapping[str, Mapping[str, SettingStatus]]:
        """The real one's, where its outcomes belong to groups."""
        return self._real.standings if isinstance(self._real, GroupOutcomes) else {}

    def measured(self) -> CacheUsage | None:
        """The real one's, where it measures."""
        return self._real.measured() if isinstance(self._real, CacheUsageSource) else None


T = TypeVar("T")


@final
class PeriodicWorker:
    """The task of one auxiliary actuator, without what it does."""

    def __init__(
        self,
        act: Callable[[PlanSnapshot], Awaitable[None]],
        period_s: Callable[[PlanSnapshot], float | None],
        *,
        gap_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``period_s``: how often to act without a look, None: only after one; ``gap_s``: at least, between two."""
        self.situation: PlanSnapshot | None = None
        """The newest; None before the first look and after a restore."""
        self.sweeps = 0
        self.swept_s = 0.0
        """How many acts there were, and how long the last one took."""
        self._act = act
        self._period_s = period_s
        self._gap_s = gap_s
        self._clock = clock
        self._woken = WakeUp()
        self._alone = trio.Lock()
        self._lane = trio.CapacityLimiter(1)

    def planned(self, situation: PlanSnapshot, *, wake: bool) -> None:
        """A look is over. ``wake``: something of it concerns this actuator; else it comes into use when it is due."""
        self.situation = situation
        if wake:
            self._woken.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Act, for ever."""
        task_status.started()
        while True:
            period_s = self._period_s(self.situation) if self.situation is not None else None
            await self._woken.wait(math.inf if period_s is None else period_s)
            await self.sweep()
            await trio.sleep(self._gap_s)

    async def sweep(self) -> None:
        """Act once, on the newest situation; without one nothing is done."""
        async with self._alone:
            if self.situation is None:
                return
            began = self._clock()
            await self._act(self.situation)
            self.sweeps += 1
            self.swept_s = self._clock() - began

    @asynccontextmanager
    async def restoring(self) -> AsyncIterator[PlanSnapshot | None]:
        """No act while this lasts, and none after it before the next look. Gives the last situation."""
        async with self._alone:
            last, self.situation = self.situation, None
            yield last

    async def work(self, work: Callable[[], T]) -> T:
        """Do what blocks, in the actuator's one thread."""
        return await trio.to_thread.run_sync(work, limiter=self._lane)
