"""What is measured and accounted of the node: the clock's samples, pods' minutes, hourly rows, owners' accounts.

`reconciler.control.sampler` is the one clock; the rest follows its readings or reads counters in its own time.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

from reconciler.alerts.service import AlertService
from reconciler.config.model import Config
from reconciler.control import effect_hours, owner_ledger, pod_minutes
from reconciler.control.effect_hours import EffectHours, ModeNow
from reconciler.control.harm_watch import HarmWatch, WaitSource
from reconciler.control.host_watch import NAME as HOST_WORKLOADS
from reconciler.control.host_watch import DaemonWatch, HostWatch
from reconciler.control.hub import NodeBase
from reconciler.control.loop import ControlLoop
from reconciler.control.node_headroom import NodeHeadroom
from reconciler.control.owner_ledger import OwnerLedger
from reconciler.control.pod_minutes import Minute, NodeHour, PodMinutes
from reconciler.control.record import NodeRecord
from reconciler.control.sampler import Sampler
from reconciler.interference.service import InterferenceService
from reconciler.runtime.supervisor import Component
from state.model import NodeCpu, Pod, SourceStatus

_TURNS: Final = {"applied": "actions", "asked": "actions", "helped": "helped", "undone": "undone"}
"""Transitions of responses that were in force; those of rules in shadow have names of their own."""
_EVICTIONS: Final = {
    "eviction-done": "evictions",
    "eviction-failed": "evictions_failed",
    "eviction-refused": "evictions_failed",
}
_NODE: Final = "node"


@final
class NodeAccounts:
    """The sampler, pods' minutes, hourly rows and owners' accounts as one part."""

    def __init__(
        self,
        config: Config,
        base: NodeBase,
        record: NodeRecord,
        control: ControlLoop,
        *,
        headroom: NodeHeadroom,
        watching: InterferenceService,
        alerts: AlertService,
        conditions: Callable[[], Sequence[SourceStatus]],
    ) -> None:
        """``conditions``: what of the node keeps a promise from being kept."""
        place, usage, files, reconciler = base.place, base.usage, base.files, control.reconciler
        root = place.root
        self._config, self._conditions = config, conditions
        self._control, self._headroom, self._watching, self._alerts = control, headroom, watching, alerts
        self.hour = NodeHour()
        self._window = base.window
        self.effect = EffectHours(
            record.store,
            record.lane,
            counted=self.counts,
            mode=self.mode,
            promises=headroom.minute,
            window=self._window_name,
        )
        self.minutes = PodMinutes(place.hierarchy, lambda: control.inventory.pods, sampled=self._minute, files=files)

        def online_wait() -> WaitSource:
            from reconciler.signals.onlinewait import OnlineWait  # with the first BE pod in the idle class only

            return OnlineWait(place.hierarchy, root=root, files=files)

        self.hosts = HostWatch(
            control.inventory, place.hierarchy, entries=lambda: self._config.host_workloads, root=root, files=files
        )
        harm = HarmWatch(reconciler, usage, wait=online_wait, hosts=lambda: self.hosts.victims)
        self.owners = OwnerLedger(
            record.store,
            record.lane,
            control.inventory,
            usage,
            reconciler.dirty,
            config=lambda: self._config.owners,
            cases=watching.cases,
            withheld_s=lambda: harm.withheld_s,
        )
        self.sampler = Sampler(
            reconciler,
            usage,
            root=root,
            sample_s=config.node.sample_s,
            files=files,
            lagged=control.counters.lag.observe,
            sampled=control.hotplug.check,
            read=self._read,
            harm=harm,
            daemons=DaemonWatch(reconciler, record.ledger, place.hierarchy, usage, root=root, files=files),
            idle_threads=control.sides.idle_containers,
        )

    def reconfigure(self, config: Config) -> None:
        self._config = config
        self.hosts.reconfigure()

    def statuses(self) -> list[SourceStatus]:
        return [self.sampler.status()]

    def components(self) -> list[Component]:
        return [
            Component(name="ticker", run=self.sampler.run),
            Component(name=owner_ledger.NAME, run=self.owners.run),
            Component(name=HOST_WORKLOADS, run=self.hosts.run),
            Component(name=pod_minutes.NAME, run=self.minutes.run),
            Component(name=effect_hours.NAME, run=self.effect.run),
        ]

    def counts(self) -> Mapping[str, int]:
        """The counters `COUNTED` of the hourly rows, since this was built; those of responses since detection began."""
        starts, foreign = self._control.counters.values.starts, self._control.writes.judge.foreign_writes
        counts = Counter(
            starts=starts["true"] + starts["false"],
            late=starts["false"],
            foreign_writes=sum(foreign.writes.values()),
            yields=foreign.yields,
            host_be_ms=int(self.hosts.be_ms),
            host_wait_ms=int(self.hosts.wait_ms),
        )
        if self._watching.observer is not None:
            for (_, turn), count in self._watching.observer.changes.items():
                if turn in _TURNS:
                    counts[_TURNS[turn]] += count
        for (kind, _), count in self._alerts.counts.items():
            if kind in _EVICTIONS:
                counts[_EVICTIONS[kind]] += count
        return counts

    def mode(self) -> ModeNow:
        """What the report counts the minutes by; ``broken`` by the kernel's files, not by the mode or the plan."""
        broken = any(not status.ok for status in self._conditions()) or any(
            claim.cut for claim in self._control.claims()
        )
        broken = broken or bool(self._control.writes.judge.statuses.unreadable_settings())
        mode = self._control.writes.mode
        return ModeNow(enforces=mode.enforce, on_hold=_NODE in mode.holds, broken=broken)

    def _minute(self, pods: Sequence[tuple[Pod, Minute]]) -> None:
        self.effect.minute(pods)
        self._headroom.peaks.take(pods)

    def _window_name(self) -> str | None:
        """Of the window in force, empty outside of all; None: there are no windows."""
        now = self._window()
        return (now.name or "") if now.names else None

    def _read(self, cpu: NodeCpu | None, now: float) -> None:
        pools, topology = self._control.reconciler.pools, self._control.inventory.readings.topology
        self._headroom.report.update(pools, topology, cpu, now)
        self.hour.add(cpu, pools.budget_milli if pools is not None else None, len(topology.online), now)
