"""Waits for a fact that has no event: a thread's progress, another program, a counter of the kernel."""

from collections.abc import Callable

import trio


async def until(met: Callable[[], object], within_s: float = 60.0) -> None:
    with trio.fail_after(within_s):
        while not met():  # noqa: ASYNC110
            await trio.sleep(0.01)
