"""When a side actuator acts: after each look that concerns it, and every so often; and how it does slow work.

Every one of them has the same four rules. The newest situation counts, and those between are skipped. Never two acts at
once, `restore` among them. After a restore nothing is done before the next look, because what is known of mode and
holds is older. All that blocks runs in one thread of its own, never in the loop.
"""

import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar, final

import trio

from reconciler.actuators.side import Situation

T = TypeVar("T")


@final
class SideRun:
    """The task of one side actuator, without what it does."""

    def __init__(
        self,
        act: Callable[[Situation], Awaitable[None]],
        period_s: Callable[[Situation], float | None],
        *,
        gap_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``period_s``: how often to act without a look, None: only after one; ``gap_s``: at least, between two."""
        self.situation: Situation | None = None
        """The newest; None before the first look and after a restore."""
        self.sweeps = 0
        self.swept_s = 0.0
        """How many acts there were, and how long the last one took."""
        self._act = act
        self._period_s = period_s
        self._gap_s = gap_s
        self._clock = clock
        self._woken = trio.Event()
        self._alone = trio.Lock()
        self._lane = trio.CapacityLimiter(1)

    def planned(self, situation: Situation, *, wake: bool) -> None:
        """A look is over. ``wake``: something of it concerns this actuator; else it comes into use when it is due."""
        self.situation = situation
        if wake:
            self._woken.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Act, for ever."""
        task_status.started()
        while True:
            period_s = self._period_s(self.situation) if self.situation is not None else None
            with trio.move_on_after(math.inf if period_s is None else period_s):
                await self._woken.wait()
            self._woken = trio.Event()
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
    async def restoring(self) -> AsyncIterator[Situation | None]:
        """No act while this lasts, and none after it before the next look. Gives the last situation."""
        async with self._alone:
            last, self.situation = self.situation, None
            yield last

    async def work(self, work: Callable[[], T]) -> T:
        """Do what blocks, in the actuator's one thread."""
        return await trio.to_thread.run_sync(work, limiter=self._lane)
