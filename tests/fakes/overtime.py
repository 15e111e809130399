"""A program's time limit, which is over when the program has started and not because the machine is slow."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import trio
from trio.testing import MockClock, wait_all_tasks_blocked, wait_all_threads_completed

T = TypeVar("T")

LIMIT_S: Final = 60.0
"""For the limits of programs that hang: nothing takes so long but a program that hangs."""


async def line_in(path: Path) -> str:
    """What a program has written into a file, when it is a whole line."""
    with trio.fail_after(LIMIT_S):
        while not path.exists() or not (text := path.read_text()).endswith("\n"):  # noqa: ASYNC110  # a program's
            await trio.sleep(0.01)
    return text


async def overtime(clock: MockClock, work: Callable[[], Awaitable[T]], begun: Path) -> T:
    """The result of work that runs a program, whose limit is over as soon as it has written a line into ``begun``.

    ``clock`` runs in real time from now on, but for that.
    """
    clock.rate = 1.0
    results: list[T] = []

    async def run() -> None:
        results.append(await work())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await line_in(begun)
        # The thread that started it may still be on its way back, and starting has the same limit.
        await wait_all_threads_completed()
        # What it has written until now is read before its time is over.
        await wait_all_tasks_blocked(0.01)
        clock.jump(LIMIT_S)
    return results[0]
