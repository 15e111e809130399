"""Pressure that begins is passed on once; pressure that lasts, or that the kernel does not report, is polled."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from cgroupfs.errors import CgroupGoneError, SourceError
from cgroupfs.pressure import PressureResource, TriggerSpec, node_pressure_file
from reconciler.sources import pressure_events
from reconciler.sources.pressure_events import QUIET_S, PressureEvents
from tests.cgroupfs.test_pressure import two_spinners

MEMORY, CPU = PressureResource.MEMORY, PressureResource.CPU


@final
class FakeTrigger:
    """`PressureTrigger`: fires at the given seconds of trio's clock, then never again. One event waits to be read."""

    def __init__(self, spec: TriggerSpec, times: Iterator[float]) -> None:
        self.spec = spec
        self._times = times
        self._next: float | None = None

    async def wait(self) -> None:
        at, waited = next(self._times, math.inf) if self._next is None else self._next, False
        while at <= trio.current_time():
            at, waited = next(self._times, math.inf), True
        self._next = at if waited else None
        await trio.sleep_until(0.0 if waited else at)

    async def __aenter__(self) -> "FakeTrigger":
        return self

    async def __aexit__(self, *_: object) -> None:
        await trio.lowlevel.checkpoint()


@pytest.fixture
def fired(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the kernel does by file: times at which a trigger fires, or its refusal."""
    kernel: dict[str, Any] = {}

    def open_trigger(path: str, spec: TriggerSpec) -> FakeTrigger:
        answer = kernel[path]
        if isinstance(answer, Exception):
            raise answer
        return FakeTrigger(spec, iter(answer))

    monkeypatch.setattr(pressure_events, "open_trigger", open_trigger)
    return kernel


async def begun(events_s: float = 700.0, root: str = "/") -> tuple[list[tuple[float, str]], PressureEvents]:
    start, log = trio.current_time(), list[tuple[float, str]]()
    events = PressureEvents(lambda resource: log.append((trio.current_time() - start, resource)), root=root)
    with trio.move_on_after(events_s):
        await events.run()
    return log, events


async def test_pressure_that_lasts_is_passed_on_once(fired: dict[str, Any], autojump_clock: MockClock) -> None:
    lasting = [5.0 + second for second in range(60)]
    # The last report is read a second later.
    fired[node_pressure_file(MEMORY)] = [*lasting, 65.0 + QUIET_S]
    fired[node_pressure_file(CPU)] = [30.0]
    log, events = await begun()
    assert log == [(5.0, "memory"), (30.0, "cpu"), (65.0 + QUIET_S, "memory")]
    assert events.status().detail == "memory within 1 s; cpu within 1 s"


async def test_where_the_kernel_refuses_it_is_polled_and_says_so(
    fired: dict[str, Any], autojump_clock: MockClock
) -> None:
    fired[node_pressure_file(MEMORY)] = SourceError("psi", "a trigger needs CAP_SYS_RESOURCE on this kernel")
    fired[node_pressure_file(CPU)] = [1.0]
    log, events = await begun()
    assert log == [(1.0, "cpu")]
    assert events.status().ok
    assert events.status().detail.startswith("memory by polling only: psi: a trigger needs CAP_SYS_RES")


async def test_a_trigger_that_is_lost_is_armed_again_later(fired: dict[str, Any], autojump_clock: MockClock) -> None:
    def lost() -> Iterator[float]:
        yield 1.0
        raise CgroupGoneError("memory", "wait for pressure: group is gone")

    fired[node_pressure_file(MEMORY)] = lost()
    fired[node_pressure_file(CPU)] = []
    log: list[float] = []
    events = PressureEvents(lambda _resource: log.append(trio.current_time()))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(events.run)
        await trio.sleep(4.0)
        assert events.status().detail.startswith("memory by polling only")
        fired[node_pressure_file(MEMORY)] = [400.0]
        await trio.sleep(500.0)
        nursery.cancel_scope.cancel()
    assert log == [1.0, 400.0]
    assert "polling" not in events.status().detail


async def test_files_of_another_root_are_used(fired: dict[str, Any], autojump_clock: MockClock) -> None:
    fired["/host/proc/pressure/memory"], fired["/host/proc/pressure/cpu"] = [1.0], []
    log, _ = await begun(root="/host")
    assert log == [(1.0, "memory")]


@pytest.mark.kernel
async def test_real_cpu_pressure_of_the_node_is_passed_on() -> None:
    if not Path("/proc/pressure/cpu").exists():
        pytest.skip("REAL KERNEL TEST NOT RUN: /proc/pressure/cpu is missing")
    woken = trio.Event()
    events = PressureEvents(lambda resource: woken.set() if resource is CPU else None)
    spinners = two_spinners(0)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(events.run)
            await trio.testing.wait_all_tasks_blocked()
            if "cpu by polling only" in events.status().detail:
                pytest.skip(f"REAL KERNEL TEST NOT RUN: {events.status().detail}")
            with trio.fail_after(60):
                await woken.wait()
            nursery.cancel_scope.cancel()
    finally:
        for spinner in spinners:
            spinner.kill()
            await trio.to_thread.run_sync(spinner.wait)
