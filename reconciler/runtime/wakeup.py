"""The wait of every loop that works when something has happened, or when it is time.

    while True:
        await self._wake.wait(period_s)
        await self.work()

Any number of wake-ups before a wait returns are one. A wake-up during the work is kept for the next wait, so what it
announces is never lost. A wake-up carries no data: the work reads the state as it is then.
"""

import math
from typing import Final, final

import trio

BEAT_S: Final = 1.0
"""Periodic tasks of the loop wake up together, at whole seconds of its clock."""
EARLY: Final = 0.9
"""Share of a period after which it counts as over: beats are not exactly a period apart."""
_WAITING: Final = trio.lowlevel.RunVar[dict[float, dict[trio.lowlevel.Task, None]] | None]("beats", None)
"""The tasks of a run that wait for a time, except the one that sleeps until then, by that time."""


def beat_after(seconds: float) -> float:
    """When a periodic task that waits about so long is to work (trio's clock).

    The last whole second up to then, or the next one, if that is not half as far away; the same by half seconds for
    less than a second. Waits of less than half a second are exact.
    """
    # A wake-up of the loop costs as much as a short task's work (0.2 ms), so the tasks of a second share one.
    now = trio.current_time()
    if seconds < BEAT_S / 2:
        return now + seconds
    beat_s = BEAT_S if seconds >= BEAT_S else BEAT_S / 2
    at = math.floor((now + seconds) / beat_s) * beat_s
    return at if at - now >= seconds / 2 else at + beat_s


async def next_beat(seconds: float) -> float:
    """Wait until `beat_after`, and return that time. ``seconds``: as there. Always a checkpoint."""
    at = beat_after(seconds)
    # Of the tasks that wait for the same time the first one sleeps and wakes up the others: a sleep is a cancel scope
    # that expires, which takes five times as long as to wake up a task.
    if (waiting := _WAITING.get()) is None:
        _WAITING.set(waiting := {})
    while (others := waiting.get(at)) is not None:
        await _woken_with(others)
        # It is earlier where the one that slept was cancelled: another one sleeps then.
        if trio.current_time() >= at:
            return at
    waiting[at] = others = {}
    try:
        await trio.sleep_until(at)
    finally:
        del waiting[at]
        for task in others:
            trio.lowlevel.reschedule(task)
    return at


async def _woken_with(others: dict[trio.lowlevel.Task, None]) -> None:
    task = trio.lowlevel.current_task()
    others[task] = None

    def abort(_: object) -> trio.lowlevel.Abort:
        del others[task]
        return trio.lowlevel.Abort.SUCCEEDED

    await trio.lowlevel.wait_task_rescheduled(abort)


@final
class WakeUp:
    """Wake-ups for one waiting task. `set` may be called at any time on the loop's thread, outside a run too."""

    def __init__(self) -> None:
        self._event = trio.Event()
        self._waiting = False

    def set(self) -> None:
        """Wake the task: now, or at its next wait."""
        self._event.set()

    def clear(self) -> None:
        """Take back what has been set so far: the work that follows, or that has just been done, covers it."""
        if self._event.is_set():
            self._event = trio.Event()

    async def wait(self, timeout_s: float = math.inf, *, settle_s: float = 0.0) -> bool:
        """Wait for a wake-up, at most ``timeout_s``; as `wait_until`."""
        return await self.wait_until(trio.current_time() + timeout_s, settle_s=settle_s)

    async def wait_until(self, deadline: float, *, settle_s: float = 0.0) -> bool:
        """Wait for a wake-up, at most until ``deadline`` (trio's clock): True when there was one.

        ``settle_s``: after the first wake-up this much longer, within the deadline; those that follow in this time are
        the same one. Cancelled: no wake-up is lost. Always a checkpoint, also where the deadline has passed.

        Errors: `RuntimeError` when another task waits: which of the two is to work would be chance.
        """
        if self._waiting:
            raise RuntimeError("two tasks wait for the same wake-up")
        self._waiting = True
        try:
            with trio.move_on_at(deadline):
                # Again where the wake-up was taken back before this task ran.
                while True:
                    await self._event.wait()
                    if settle_s > 0:
                        await trio.sleep(settle_s)
                    if self._event.is_set():
                        break
        finally:
            self._waiting = False
        if not self._event.is_set():
            return False
        self._event = trio.Event()
        return True
