"""Measures the node's other daemons once a second, and steps the law of their groups' weights.

They are measured without the policy, too, each five seconds: `status` and `doctor` name what delays online pods.
"""

from typing import Final, final

from msgspec.structs import asdict, replace

from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.usage import UsageReader
from reconciler.control.reconciler import Reconciler
from reconciler.policies import daemon_weight, node_daemons
from reconciler.policies.daemon_weight import WeightRules, WeightSample, WeightState
from reconciler.runtime.own_group import service_weight
from reconciler.runtime.workqueue import TICK
from reconciler.signals.root_groups import RootGroups
from state.daemons import DaemonGroup, DaemonRow, Daemons
from state.ledger import Ledger

_EVERY_S: Final = 1.0
_SHOWN_S: Final = 5.0
"""Where no law needs the readings."""
_SOON: Final = 3
"""So many rounds after the start are a second apart all the same: then what is shown is known."""
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
        self._at = float("-inf")
        self._rounds = 0

    def close(self) -> None:
        """Give the sources back."""
        self._groups.close()

    async def round(self, now: float) -> None:
        """Measure, if it is time, and mark the node when a weight differs. ``now``: monotonic seconds."""
        config = self._reconciler.policies.node_daemons
        every_s = _EVERY_S if config.enabled or self._rounds < _SOON else _SHOWN_S
        if 0.0 <= now - self._at < every_s * 0.9:
            return
        self._at, self._rounds = now, self._rounds + 1
        named = node_daemons.paths(config) if config.enabled else ()
        read = await self._groups.sample(named)
        groups = {path: replace(group, original=self._original(path, group)) for path, group in read.groups.items()}
        daemons = replace(read, groups=groups)
        states: dict[str, WeightState] = {}
        for path in named:
            group = groups.get(path)
            if group is None or path in read.refused or group.original is None or read.pods_weight is None:
                continue
            state = daemon_weight.step(
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
                credit_us=daemon_weight.credit_us(group.weight, daemons.latency_ns, version),
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
            starting=inventory.arrived_within(config.hold_s, now),
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
