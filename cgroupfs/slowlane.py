"""The writer's thread for blocking steps: writes that may keep the kernel busy, and for which no task has to wait.

A write that makes the kernel reclaim memory or move pages cannot be interrupted. After a bounded wait it is left there:
the thread is busy until it ends, no other step is started in it meanwhile, and its result is reported later.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar, final

import trio

from cgroupfs.steps import WriteStep

T = TypeVar("T")


class BlockingJob(Generic[T]):
    """What one thread is at. ``since``: trio's clock. The thread sets ``at``, ``done``, ``began`` and ``over``."""

    def __init__(self) -> None:
        self.since = trio.current_time()
        self.at: WriteStep | None = None
        self.done: list[T] = []
        self.over = False
        self.began = False
        self.given_up = False
        self.told = 0
        self.ended = trio.Event()

    def holds(self, step: WriteStep) -> bool:
        """Whether the kernel is at this very file."""
        return self.at is not None and (self.at.path, self.at.file) == (step.path, step.file)


@final
class BlockingWriter(Generic[T]):
    """Performs writes that may block, one at a time, in a thread."""

    def __init__(self) -> None:
        self._one = trio.CapacityLimiter(1)
        self._left: BlockingJob[T] | None = None
        self._late: list[T] = []

    def at_work(self) -> BlockingJob[T] | None:
        """Steps left in the kernel and still there; None: the thread is free."""
        self._collect()
        return self._left

    def late(self) -> list[T]:
        """Results of steps that were left; each is returned once."""
        self._collect()
        items, self._late = self._late, []
        return items

    async def quiet(self) -> None:
        """Wait until the kernel has finished what it was given."""
        await trio.lowlevel.checkpoint()
        if (left := self.at_work()) is not None:
            await left.ended.wait()

    async def run(self, steps: Sequence[WriteStep], do: Callable[[WriteStep], T], done: list[T]) -> None:
        """Do the steps in the thread, and add their results to ``done``.

        Cancelled: the step that the kernel is at is left there, and none after it is started.
        """
        job = BlockingJob[T]()
        token = trio.lowlevel.current_trio_token()

        def work() -> None:
            job.began = True
            try:
                for step in steps:
                    job.at = step
                    if job.given_up:
                        return
                    job.done.append(do(step))
            finally:
                job.over = True
                # The program may have ended meanwhile; then no task waits.
                with suppress(trio.RunFinishedError):
                    token.run_sync_soon(job.ended.set)

        try:
            await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._one)
        finally:
            job.given_up = True
            # In this order: a thread that was over before the count has no more results.
            over = job.over
            job.told = len(job.done)
            done += job.done[: job.told]
            if job.began and not over:
                self._left = job

    def _collect(self) -> None:
        if self._left is not None and self._left.over:
            self._late += self._left.done[self._left.told :]
            self._left = None
