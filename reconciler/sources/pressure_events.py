"""Wakes the interference monitor when memory or CPU pressure of the node begins, instead of at its next sample.

One PSI trigger each on ``/proc/pressure/memory`` and ``/proc/pressure/cpu``. The event has no value: the monitor
decides on signals that are read after it.

Source: kernel documentation, accounting/psi, "Monitoring for pressure thresholds".
"""

from collections.abc import Callable
from typing import Final, final

import trio

from cgroupfs.errors import AgentError
from cgroupfs.log import get_log
from cgroupfs.pressure import PressureResource, PressureTrigger, TriggerSpec, node_pressure_file, open_trigger
from reconciler.runtime.wakeup import next_beat
from state.model import SourceStatus

_LOG: Final = get_log("pressure")
NAME: Final = "pressure events"
RESOURCES: Final = (PressureResource.MEMORY, PressureResource.CPU)
SPEC: Final = TriggerSpec(stall_us=150_000, window_us=1_000_000)
"""Tasks stalled for 150 ms within 1 s. Without CAP_SYS_RESOURCE the window is 2 s (Linux 6.5 and later), or the trigger
is refused.
"""
QUIET_S: Final = 10.0
"""Only the first report after so long without one is passed on: the kernel reports again in each window of a stall."""
_READ_S: Final = 2.0
"""Reports of lasting pressure are read so far apart, each as of its reading."""
_RETRY_S: Final = 300.0


@final
class PressureEvents:
    """Waits for the kernel's PSI triggers."""

    def __init__(self, begun: Callable[[PressureResource], None], *, root: str = "/") -> None:
        """``begun`` is called when pressure of a resource begins; it must not wait."""
        self._begun = begun
        self._root = root
        self._problems: dict[PressureResource, str] = {}
        self._windows_us: dict[PressureResource, int] = {}

    def status(self) -> SourceStatus:
        """Which triggers are armed. Polling continues without them, so a refusal is not a failure of the agent."""
        parts: list[str] = []
        for resource in RESOURCES:
            if (window_us := self._windows_us.get(resource)) is not None:
                parts.append(f"{resource} within {window_us / 1e6:g} s")
            elif (problem := self._problems.get(resource)) is not None:
                parts.append(f"{resource} by polling only: {problem}")
        return SourceStatus(name=NAME, ok=True, age_s=0.0, detail="; ".join(parts))

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for resource in RESOURCES:
                nursery.start_soon(self._watch, resource)

    async def _watch(self, resource: PressureResource) -> None:
        path = node_pressure_file(resource, self._root)
        while True:
            try:
                async with open_trigger(path, SPEC) as trigger:
                    self._problems.pop(resource, None)
                    self._windows_us[resource] = trigger.spec.window_us
                    await self._pass_on(resource, trigger)
            except AgentError as exc:
                # Without a trigger the monitor's own interval remains.
                self._windows_us.pop(resource, None)
                if self._problems.get(resource) != str(exc):
                    _LOG.info("pressure is polled: the kernel has no event for it", resource=resource, error=str(exc))
                self._problems[resource] = str(exc)
            await trio.sleep(_RETRY_S)

    async def _pass_on(self, resource: PressureResource, trigger: PressureTrigger) -> None:
        last = float("-inf")
        while True:
            await trigger.wait()
            now = trio.current_time()
            if now - last >= QUIET_S:
                self._begun(resource)
            last = now
            # The kernel keeps the next one, so lasting pressure (BE work that fills the CPUs) causes no wake-up in each
            # window.
            await next_beat(_READ_S)
