"""The whole agent, composed of its rooms: run by the daemon, read by the command line.

Each room is made of those before it; what flows upwards passes through the hub, which is made first.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import final

from cgroupfs.files import REAL, FileOps
from reconciler.actuators.mode import WriteMode
from reconciler.alerts.service import AlertService, HealthWatch
from reconciler.alerts.sinks.base import SinkContext
from reconciler.config.dry_run import write_settings
from reconciler.config.environment import api_client, intents_file, node_name
from reconciler.config.model import Config
from reconciler.control import side_actuators
from reconciler.control.event_notes import WindowNow
from reconciler.control.hub import NodeBase
from reconciler.control.loop import ControlLoop, LoopTimes
from reconciler.control.node_headroom import NodeHeadroom
from reconciler.control.record import NodeRecord
from reconciler.control.state_writer import StateWriter
from reconciler.control.writes import CgroupWrites
from reconciler.daemon.accounts import NodeAccounts
from reconciler.daemon.commands import Commands
from reconciler.daemon.node_settings import UNUSED, NodeSettingsPart, SettingsUse
from reconciler.daemon.problems import NodeProblems
from reconciler.daemon.sources import NodeSources
from reconciler.interference.service import InterferenceService
from reconciler.runtime.own_process import OwnProcess
from reconciler.runtime.supervisor import Component
from reconciler.sources.node import NodeEnvironment
from state.model import SourceStatus

Renew = Callable[[str], object]
Window = Callable[[], WindowNow]
"""The window of time in force."""


@final
class Agent:
    """The agent, composed of its rooms.

    Building it opens the store and reads files; no cgroup is written before it runs.
    """

    def __init__(
        self,
        config: Config,
        place: NodeEnvironment,
        files: FileOps = REAL,
        renew: Renew = str,
        *,
        settings: SettingsUse = UNUSED,
        window: Window = WindowNow,
    ) -> None:
        """``renew``: to build another agent, with the reason. Errors: `NewerSchemaError`, of a newer store."""
        self.config, self.place, self.started_at = config, place, time.time()
        self.base = base = NodeBase(place, files, window)
        self.hub, self.pods, self.usage = base.hub, base.pods, base.usage
        self.record = record = NodeRecord(base, config.store, intents_file(config))
        store, lane, holds = record.store, record.lane, record.holds
        self.mode = WriteMode(write_settings(config), holds.in_force)
        self.hub.held.subscribe(self.mode.use_holds)
        sinks = SinkContext(node=place.name, root=place.root, kubelets=place.kubelet.kubeconfig)
        self.alerts = alerts = AlertService(
            config.alerts, config.apiserver, store, lane, ground=sinks, pods=base.pods, note=record.ledger.note
        )
        self.sources = sources = NodeSources(config, base, holds.in_force, renew)
        self.writes = writes = CgroupWrites(base, record, self.mode, config.writes, alerts.alert)
        times, api = LoopTimes(config.node.resync_s, config.writes.verify_s), partial(api_client, config, place.kubelet)
        self.sides = side_actuators.build(base, record, writes, api, node_name(place.kubelet))
        self.control = control = ControlLoop(
            base, record, sources, writes, self.sides, policies=config.policies, alert=alerts.alert, times=times
        )
        self.headroom = headroom = NodeHeadroom(base, record, control, config.headroom, config.apiserver)
        self.interference = watching = InterferenceService(
            config, base, record, control, alerts, settings=settings.row, falling=headroom.publisher.is_falling
        )
        self.conditions = conditions = together(sources.conditions, control.conditions)
        self.accounts = accounts = NodeAccounts(
            config, base, record, control, headroom=headroom, watching=watching, alerts=alerts, conditions=conditions
        )
        self.keeper = StateWriter(record, control.reconciler, headroom, alerts.alert)
        self.process = OwnProcess(place.hierarchy, place.layout.kubepods, config.node, sources.creations(), files)
        self.problems = NodeProblems(record, sources, writes, control, alerts, process=self.process, keeper=self.keeper)
        self.node_settings = NodeSettingsPart(config, record, node_name(place.kubelet), api, settings)
        rooms = (sources, writes, accounts, headroom, watching, control, record, self.node_settings)
        self.every_source = together(*(room.statuses for room in rooms))
        self.watched = together(self.every_source, conditions, self.problems.conditions)
        self.health = HealthWatch(alerts, self.watched, control.claims, base.pods)
        self.commands = Commands(config, base, record, control, headroom=headroom, watching=watching, alerts=alerts)
        record.notes.mode(config.mode.value, "configuration")
        record.report(alerts.alert)

    def components(self) -> list[list[Component]]:
        """The parts by lifetime, outermost first; the caller adds its own around them."""
        knowing, events = self.sources.components()
        control, holds = self.control, self.record.holds
        hotplug = [Component(name="CPU hot-plug", run=control.hotplug.run), Component(name="holds", run=holds.run)]
        return [
            [
                Component(name="keeper", run=self.keeper.run),
                Component(name="alerts", run=self.alerts.run),
                Component(name="source health", run=self.health.run),
            ],
            [self.writes.component(), *knowing, *hotplug],
            events,
            [control.worker()],
            self.sides.components(),
            [self.interference.component()],
            [*self.accounts.components(), *self.headroom.components(), *control.components()],
            [self.node_settings.component()],
        ]

    def statuses(self) -> list[SourceStatus]:
        """Every source with its age and what is wrong with it, and the conditions that are not ok."""
        conditions = (*self.conditions(), *self.problems.conditions())
        return [*self.every_source(), *(status for status in conditions if not status.ok)]

    def reconfigure(self, config: Config, *, paused: bool = False) -> None:
        """Take a new configuration that has been checked. What needs a restart keeps its old value in it.

        ``paused``: what a restore by command has ended remains so, whatever the mode.
        """
        self.config = config
        self.mode.use(write_settings(config))
        if paused:
            self.mode.set_enforce(enforce=False)
        else:
            self.record.notes.mode(config.mode.value, "configuration")
        self.record.notes.window(self.base.window())
        self.writes.use(config.writes)
        self.control.reconciler.use(config.policies)
        self.alerts.reconfigure(config.alerts, config.apiserver)
        self.headroom.reconfigure(config.headroom)
        self.sources.reconfigure(config)
        if not paused:  # the restore has suspended it
            self.interference.reconfigure(config)
        self.accounts.reconfigure(config)
        self.commands.reconfigure(config)
        self.node_settings.reconfigure(config)
        self.hub.changed.mark_all("reload")

    def close(self) -> None:
        """Thaw what bypassd has frozen, and close the store."""
        self.record.close()


def together(*parts: Callable[[], Iterable[SourceStatus]]) -> Callable[[], list[SourceStatus]]:
    return lambda: [status for part in parts for status in part()]
