"""Virtual time that stands still while a thread works: trio's own clock leaps once no task has run for a moment."""

import math
from typing import Any

import pytest
import trio
from trio.testing import MockClock


def thread_clock(monkeypatch: pytest.MonkeyPatch, *, threshold_s: float) -> MockClock:
    """A clock that leaps after ``threshold_s`` without a task that runs, and without a thread of `trio.to_thread`."""
    clock = MockClock(autojump_threshold=threshold_s)
    run_sync = trio.to_thread.run_sync
    running = 0

    async def awaited(*arguments: Any, **named: Any) -> Any:
        nonlocal running
        running += 1
        clock.autojump_threshold = math.inf
        try:
            return await run_sync(*arguments, **named)
        finally:
            running -= 1
            if not running:
                clock.autojump_threshold = threshold_s

    monkeypatch.setattr(trio.to_thread, "run_sync", awaited)
    return clock
