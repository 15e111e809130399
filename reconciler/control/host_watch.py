"""What runs outside of pods: host workloads, and the weights of the node's other daemons.

Host workloads are measured once a second while the configuration names any; else nothing of them is loaded. The other
daemons are measured without their policy, too, each five seconds: `status` and `doctor` name what delays online pods.
"""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, final

import trio
from msgspec.structs import asdict, replace

from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.usage import UsageReader
from reconciler.control.inventory import Inventory
from reconciler.control.reconciler import Reconciler
from reconciler.policies import node_daemons
from reconciler.policies.node_daemons import WeightRules, WeightSample, WeightState
from reconciler.runtime.own_weight import service_weight
from reconciler.runtime.wakeup import EARLY, WakeUp
from reconciler.runtime.workqueue import TICK
from reconciler.signals.root_groups import RootGroups
from state.daemons import DaemonGroup, DaemonRow, Daemons
from state.hosts import CountsAs, HostWorkloads
from state.ledger import Ledger

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
        self._changed.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            entries = self._entries()
            if entries:
                await self._measure(entries)
            else:
                await self._changed.wait()

    async def _measure(self, entries: "Mapping[str, HostWorkloadConfig]") -> None:
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


_SHOWN_S: Final = 5.0
"""Between two readings where no law needs them."""
_SOON: Final = 3
"""The first rounds after the start are a second apart in any case, so that `status` has values soon."""
_BUSY_MILLI: Final = 10
"""From this use on another group competes for the CPU."""


@final
class DaemonWatch:
    """The loop of the node daemons' weights, once a second."""

    def __init__(
        self,
        reconciler: Reconciler,
        ledger: Ledger,
        hierarchy: Hierarchy,
        usage: UsageReader,
        *,
        root: str = "/",
        files: FileOps = REAL,
        groups: RootGroups | None = None,
    ) -> None:
        self._reconciler = reconciler
        self._ledger = ledger
        self._version = hierarchy.version("cpu")
        kubepods = reconciler.inventory.layout.kubepods
        self._groups = groups or RootGroups(hierarchy, usage, kubepods, root=root, files=files)
        self._states: dict[str, WeightState] = {}
        self._at = self._removed_at = float("-inf")
        self._removed = 0
        self._rounds = 0

    def close(self) -> None:
        self._groups.close()

    async def round(self, now: float) -> None:
        """Measure, if it is time, and mark the node when a weight differs. ``now``: monotonic seconds."""
        config = self._reconciler.policies.node_daemons
        every_s = _EVERY_S if config.enabled or self._rounds < _SOON else _SHOWN_S
        if 0.0 <= now - self._at < every_s * EARLY:
            return
        self._at, self._rounds = now, self._rounds + 1
        if self._removed != (removed := self._reconciler.inventory.removed):
            self._removed, self._removed_at = removed, now
        named = node_daemons.paths(config) if config.enabled else ()
        read = await self._groups.sample(named)
        groups = {path: replace(group, original=self._original(path, group)) for path, group in read.groups.items()}
        daemons = replace(read, groups=groups)
        states: dict[str, WeightState] = {}
        for path in named:
            group = groups.get(path)
            if group is None or path in read.refused or group.original is None or read.pods_weight is None:
                continue
            state = node_daemons.step(
                self._states.get(path), self._sample(path, daemons, group.original, now), now, self._rules()
            )
            states[path] = state
            groups[path] = replace(group, wanted=state.weight, need_milli=state.need_milli)
        changed = {path: state.weight for path, state in states.items()} != {
            path: state.weight for path, state in self._states.items()
        }
        self._states = states
        self._reconciler.inventory.take(daemons=replace(daemons, groups=groups))
        if changed:
            self._reconciler.dirty.mark(TICK)

    def rows(self) -> tuple[DaemonRow, ...]:
        """The groups, as read last; those that can delay online pods most are first."""
        daemons, version = self._reconciler.inventory.readings.daemons, self._version or 2
        rows = [
            DaemonRow(
                group=path,
                credit_us=node_daemons.credit_us(group.weight, daemons.latency_ns, version),
                **asdict(group),
            )
            for path, group in daemons.groups.items()
        ]
        return tuple(sorted(rows, key=lambda row: (not row.use_milli, -(row.weight or 0), row.group)))

    def problems(self) -> dict[str, str]:
        """Why a group that the configuration names is not managed, by path."""
        return dict(self._reconciler.inventory.readings.daemons.refused)

    def _rules(self) -> WeightRules:
        config = self._reconciler.policies.node_daemons
        floor = config.floor_shares if self._version == 1 else service_weight(config.floor_shares)
        return WeightRules(percent=config.need_percent, floor=floor, window_s=config.window_s)

    def _sample(self, path: str, daemons: Daemons, original: int, now: float) -> WeightSample:
        config, inventory = self._reconciler.policies.node_daemons, self._reconciler.inventory
        group = daemons.groups[path]
        others = sum(
            other.weight or 0
            for name, other in daemons.groups.items()
            if name != path and (other.use_milli or 0) >= _BUSY_MILLI
        )
        return WeightSample(
            use_milli=group.use_milli,
            waits=group.waits,
            original=original,
            competing=(daemons.pods_weight or 0) + others,
            cpus=len(inventory.readings.topology.online),
            busy=inventory.arrived_within(config.hold_s, now) or now - self._removed_at < config.hold_s,
        )

    def _original(self, path: str, group: DaemonGroup) -> int | None:
        """The weight without bypassd: the ledger's, else what is there."""
        entry = self._ledger.get(self._groups.key(path))
        if entry is None:
            return group.weight
        try:
            return int(entry.restore_text or "")
        except ValueError:
            return None
