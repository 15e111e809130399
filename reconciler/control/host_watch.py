"""Measures host workloads once a second while the configuration names any; else it sleeps and has nothing loaded."""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, final

import trio

from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from reconciler.control.inventory import Inventory
from reconciler.runtime.wakeup import WakeUp
from state.hosts import CountsAs, HostWorkloads

if TYPE_CHECKING:
    from reconciler.signals.host_config import HostWorkloadConfig
    from reconciler.signals.host_meter import HostVictim

NAME: Final = "host workloads"
_EVERY_S: Final = 1.0
_MANY: Final = 128
"""Groups, each a tenth of a millisecond: more of them are read every other second, which rules still take as now."""


@final
class HostWatch:
    """A component. Its readings are in the inventory; there are none while nothing is measured."""

    def __init__(
        self,
        inventory: Inventory,
        hierarchy: Hierarchy,
        *,
        entries: "Callable[[], Mapping[str, HostWorkloadConfig]]",
        root: str = "/",
        files: FileOps = REAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``entries``: those of the configuration in use."""
        self._inventory = inventory
        self._hierarchy = hierarchy
        self._entries = entries
        self._root = root
        self._files = files
        self._clock = clock
        self._changed = WakeUp()
        self.be_ms = 0.0
        """CPU time that BE entries have used, milliseconds."""
        self.wait_ms = 0.0
        """Time that tasks of victims have waited for a CPU, milliseconds."""
        self.victims: Mapping[str, HostVictim] = {}
        """What of them has processes, for the harm law; see `HostMeter.victims`."""

    def reconfigure(self) -> None:
        """Take the entries of a new configuration."""
        self._changed.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Measure until cancelled."""
        task_status.started()
        while True:
            entries = self._entries()
            if entries:
                await self._measure(entries)
            else:
                await self._changed.wait()

    async def _measure(self, entries: "Mapping[str, HostWorkloadConfig]") -> None:
        """Until there are other entries."""
        from reconciler.signals.host_meter import HostMeter  # with all readers of samples, which only some nodes need

        kubepods = self._inventory.layout.kubepods
        meter = HostMeter(entries, self._hierarchy, kubepods, root=self._root, files=self._files, clock=self._clock)
        try:
            before: float | None = None
            while self._entries() == entries:
                hosts = await meter.read(self._clock())
                self._inventory.take(hosts=hosts)
                self.victims = meter.victims()
                self._count(hosts, 0.0 if before is None else max(0.0, hosts.at_s - before))
                before = hosts.at_s
                groups = sum(len(host.groups) for host in hosts.entries.values())
                await self._changed.wait(_EVERY_S if groups <= _MANY else 2 * _EVERY_S)
        finally:
            self._inventory.take(hosts=HostWorkloads())
            self.victims = {}
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _EVERY_S):
                await meter.aclose()

    def _count(self, hosts: HostWorkloads, seconds: float) -> None:
        self.be_ms += (hosts.be_milli or 0) * seconds
        waits = (host.value("cpu.wait_milli") for host in hosts.entries.values() if host.counts_as is CountsAs.VICTIM)
        self.wait_ms += sum(wait for wait in waits if wait is not None) * seconds
