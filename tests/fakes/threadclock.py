"""Virtual time that stops while a thread works: trio's own clock leaps once no task has run for a moment."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import trio
from trio.testing import MockClock


@contextmanager
def thread_clock(*, threshold_s: float = 0.0) -> Iterator[MockClock]:
    """A clock that leaps after ``threshold_s`` without a task that runs, and without a thread of `trio.to_thread`."""
    clock = MockClock(autojump_threshold=threshold_s)
    run_sync = trio.to_thread.run_sync
    running, set_s = 0, threshold_s

    async def awaited(*arguments: Any, **named: Any) -> Any:
        nonlocal running, set_s
        if not running:
            set_s = clock.autojump_threshold
        running += 1
        clock.autojump_threshold = math.inf
        try:
            return await run_sync(*arguments, **named)
        finally:
            running -= 1
            if not running:
                clock.autojump_threshold = set_s

    with mock.patch.object(trio.to_thread, "run_sync", awaited):
        yield clock
