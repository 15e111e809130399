"""``bypassd``: the daemon's program. Configuration, one instance, signals, systemd, and an orderly end.

Exit codes: 0 stopped by a signal; 1 an essential part failed; 2 bad usage or configuration; 3 another instance runs; 4
the store is of a newer version; 6 standard output cannot be written (check-config, --help).

Longer than other modules because one run is read as one sequence: what begins it, what renews it, and each way it ends.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Final, final

import trio

from cgroupfs.errors import AgentError
from cgroupfs.log import BoundLog, get_log
from cgroupfs.naming import QosClass
from reconciler import __version__
from reconciler.config import load
from reconciler.config.environment import node_name, wait_for_place
from reconciler.config.load import DEFAULT_PATH, Loaded
from reconciler.config.model import AgentMode, Config, OnStop
from reconciler.daemon.agent import Agent
from reconciler.daemon.config_in_force import ConfigInForce
from reconciler.daemon.node_settings import SettingsUse, changes
from reconciler.daemon.status import ReloadResult, StatusReport
from reconciler.interference.service import watched
from reconciler.runtime import logs, malloc
from reconciler.runtime.cgroup_namespace import join_host_cgroups
from reconciler.runtime.cooperative import share_interpreter
from reconciler.runtime.format import duration, plural
from reconciler.runtime.lock import AlreadyRunningError, InstanceLock, exclusive
from reconciler.runtime.standby import REFUSES_S, REQUEST, NotHandedOverError, StopSignals, wait_for_lock
from reconciler.runtime.stint_timer import TIMER
from reconciler.runtime.stints import LoopTimer, in_worker
from reconciler.runtime.streams import OutputError, Parser, complain, complain_lines, finish, give_up, prepared, write
from reconciler.runtime.supervisor import Component, ComponentStatus, Supervisor
from reconciler.runtime.systemd import Heartbeat, Notifier, Watchdog, watchdog_interval_s
from reconciler.runtime.wakeup import WakeUp, next_beat
from reconciler.settings.binder import ConfigError
from reconciler.settings.schema import FeatureSwitch
from reconciler.sources.node import NodeEnvironment
from reconciler.web import components as web
from state.schema import NewerSchemaError

if TYPE_CHECKING:
    from reconciler.config.node_settings import KeptSettings

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_RUNNING: Final = 3
EXIT_NEWER: Final = 4
EXIT_OUTPUT: Final = 6
_DESCRIPTION: Final = "Keeps latency-critical pods fast on Kubernetes nodes without NRI."
_STUCK_S: Final = 20.0
"""A pass that takes longer than this means that the loop is blocked."""
_BEAT_S: Final = 1.0
_SETTLE_S: Final = 3.0
"""After this time the memory that only the start needed is returned to the kernel."""
_RENEW_S: Final = 60.0
"""The least time between two renewals of the agent: a kubelet that flaps costs the node no more than this."""
_RESTORE_S: Final = 30.0
"""With ``on_stop: restore``: the rest of the end fits into the unit's TimeoutStopSec, too."""
_READY_S: Final = 30.0
"""So long systemd waits for the first pass; /readyz reports the state after that."""


@final
class Daemon:
    """One run of the daemon, from a loaded configuration to its end."""

    def __init__(
        self,
        loaded: Loaded,
        *,
        observe: bool = False,
        hands_over_from: float | None = None,
        stops: StopSignals | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``hands_over_from``: requests for a hand-over count from then on (monotonic clock); None: never.

        ``stops``: what has the signals until this daemon takes them. ``wall``: the clock that windows go by.
        """
        self.in_force = ConfigInForce(loaded, observe=observe, wall=wall)
        self.handed_over = False
        """It has ended for a daemon that was started beside it."""
        self._observe = observe
        self._hands_over_from = hands_over_from
        self._stops = stops
        self.agent: Agent | None = None
        self.supervisor: Supervisor | None = None
        self.heartbeat = Heartbeat(_STUCK_S)
        self._changing = trio.Lock()
        """One change of the configuration at a time."""
        self._window_due = WakeUp()
        self._renewal: str | None = None
        """Why the running agent ends for another one; None: it does not."""
        self._renewal_reason = ""
        self._renew_from = 0.0
        self._restored = False
        """Everything was restored by command: no write until the configuration is read again."""
        self._stopped_by: str | None = None
        """The signal that ends the daemon, also where it arrives between two agents."""
        self._place: NodeEnvironment | None = None
        """The environment of the last agent."""
        self._search: trio.CancelScope | None = None
        self._ended = False
        self._settings = SettingsUse(self._use_node_settings, self.in_force.settings_facts, self.in_force.settings_row)
        self._log = get_log("daemon")
        self._notifier = Notifier()

    @property
    def config(self) -> Config:
        return self.in_force.config

    async def run(self) -> None:
        """Run until a signal or the end of an essential part. Errors: `EssentialError`, `SourceError`."""
        trio.lowlevel.add_instrument(
            LoopTimer(
                lambda: self.agent is not None and self.agent.process.urgent(),
                lambda: self.agent is not None and self.agent.process.may_pace(),
            )
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(self._signals, nursery.cancel_scope)
            if self._stops is not None and self._stops.received is not None:
                nursery.cancel_scope.cancel(reason=self._stops.received)
                return
            try:
                while not self._ended:
                    place = self._place = await self._found()
                    if place is None:
                        return
                    for problem in (*place.kubelet.problems, *(str(error) for error in place.runtime.problems)):
                        self._log.warning(problem)
                    if place.own is not None and place.own.qos is QosClass.BESTEFFORT:
                        self._log.warning(
                            "bypassd's own pod is of QoS class BestEffort and in the BE budget: give it a CPU request"
                        )
                    # One that can only observe may run beside another one.
                    pods = place.hierarchy.trigger_directory(place.layout.kubepods)
                    with nullcontext() if self._observe else exclusive(pods):
                        await self._serve(place)
                    if not self._ended:
                        malloc.free_earlier()  # the objects of the last agent, which the collector has skipped
            finally:
                nursery.cancel_scope.cancel(reason="the daemon has stopped")

    async def _found(self) -> NodeEnvironment | None:
        """The node, once there is one to work on; the last one, if any, when the search is cancelled for a restore.

        A node without a kubelet has none. The start counts as done then, so that an installation does not hang on it;
        the status line says what is missing. From that moment systemd waits for signs of life.
        """
        place = self._place
        async with trio.open_nursery() as nursery:
            self._search = nursery.cancel_scope
            watchdog = Watchdog(self._notifier, self.heartbeat, watchdog_interval_s())

            def waiting(missing: str) -> None:
                self._notifier.ready(f"{self.config.mode.value}: {missing}")

            await nursery.start(self._beat)
            await nursery.start(watchdog.run)
            place = await wait_for_place(self.config, waiting)
            nursery.cancel_scope.cancel(reason="the node is there")
        self._search = None
        return place

    async def _serve(self, place: NodeEnvironment) -> None:
        wanted = trio.Event()
        # Since the last agent, or while the node was searched.
        await self._change_window()

        def renew(reason: str) -> None:
            self._log.warning("the parts are built again", reason=reason)
            self._renewal_reason = reason
            wanted.set()

        self.in_force.drop_settings_of_others(lambda: node_name(place.kubelet))
        use, window = self._settings, self.in_force.window
        agent = self.agent = Agent(self.config, place, renew=renew, settings=use, window=window)
        TIMER.ask(agent.sources.has_unread)
        agent.process.prepare()
        if self._restored:
            agent.commands.set_enforce(enforce=False)
        layers = [self._outer(), *agent.components(), self._inner(agent)]
        self.supervisor, self._renewal = Supervisor(layers, self._component_changed), None
        self._log.info(
            "starts",
            version=__version__,
            mode=self.config.mode.value,
            cgroups=place.hierarchy.mode.value,
            driver=place.layout.driver.value,
            kubepods=place.layout.kubepods,
            cpus=str(place.topology.online),
        )
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._tell_ready, agent, self.supervisor)
                nursery.start_soon(self._renew, wanted, self.supervisor)
                if self._stopped_by is not None:
                    self.supervisor.stop(self._stopped_by)
                await self.supervisor.run()
                nursery.cancel_scope.cancel(reason="the supervisor has stopped")
        finally:
            with trio.CancelScope(shield=True):
                await self._end(agent)
            self.agent = self.supervisor = None
            TIMER.ask(bool)  # without an agent nothing is unread

    async def _renew(self, wanted: trio.Event, supervisor: Supervisor) -> None:
        """End the present agent for a new one when what it is built from has changed, but not often."""
        await wanted.wait()
        await trio.sleep_until(self._renew_from)
        self._renew_from = trio.current_time() + _RENEW_S
        self._renewal = self._renewal_reason
        supervisor.stop(self._renewal)

    def _outer(self) -> list[Component]:
        """Components that outlive the agent's own parts."""
        watchdog = Watchdog(self._notifier, self.heartbeat, watchdog_interval_s())
        return [
            Component(name="heartbeat", run=self._beat),
            Component(name="watchdog", run=watchdog.run),
            Component(name="windows", run=self._follow_windows),
        ]

    def _inner(self, agent: Agent) -> list[Component]:
        """The web part. Last, because its libraries take longer to load than the first pass takes."""
        show = StatusReport(agent, self.heartbeat, statuses=self._statuses, reload=self.reload)
        name = agent.place.kubelet.node_name
        return web.components(self.config.http, show, show, root="/", names=[name] if name else [])

    async def _end(self, agent: Agent) -> None:
        # The next agent has one of its own, and two of them in one thread undo each other.
        agent.process.stop()
        if self.handed_over:
            # Not a stop, either: the next daemon is there.
            self._notifier.status("handed over; standby")
            agent.close()
            self._ended = True
            return
        if self._renewal is not None and self._stopped_by is None:
            # Not a stop: what is in force remains, as the next agent finds it in the store.
            self._restored = self.config.mode is AgentMode.ENFORCE and not agent.mode.enforce
            self._notifier.status(f"{self.config.mode.value}: {self._renewal}; starting the parts again")
            agent.close()
            return
        self._notifier.stopping("stopping")
        self._ended = True
        try:
            with trio.move_on_after(_RESTORE_S) as scope:
                await self._restore_on_stop(agent)
            if scope.cancelled_caught:
                self._log.error(
                    "the restore on stop did not end; bypassctl restore restores the others", after_s=_RESTORE_S
                )
        finally:
            # Also where a full disk or a slow kernel has ended the restore.
            await agent.headroom.publisher.end()
            agent.close()
        self._notifier.close()

    async def _restore_on_stop(self, agent: Agent) -> None:
        if self.config.on_stop is OnStop.RESTORE and self.config.mode is AgentMode.ENFORCE:
            done = await agent.commands.restore()
            left = [result for result in done if not result.ok]
            self._log.info("restored on stop", files=len(done) - len(left), left=len(left))
        elif agent.mode.enforce:
            await agent.commands.restore_daemon_weights()

    async def _tell_ready(self, agent: Agent, supervisor: Supervisor) -> None:
        with trio.move_on_after(_READY_S) as waiting:
            await agent.control.reconciler.ready.wait()
        if waiting.cancelled_caught:
            # The unit has no start timeout: an installation or upgrade must not hang on the state that /readyz reports.
            problem = agent.control.reconciler.problem or "the first reconciliation is not finished"
            self._notifier.ready(f"{self.config.mode.value}: not ready: {problem}")
            self._log.warning("not ready yet", problem=problem)
            await agent.control.reconciler.ready.wait()
        pods = len(agent.control.inventory.pods)
        # Before that is reported, and before the loop has a priority.
        malloc.keep_objects()
        self._notifier.ready(f"{self.config.mode.value}: {plural(pods, 'pod')}")
        # Only now: the first pass is a second of work, which needs no high priority.
        agent.process.start()
        self._log.info("ready", pods=pods, look_ms=round(agent.control.reconciler.look_s * 1000, 1))
        # The web part has loaded its libraries, too.
        await supervisor.started.wait()
        agent.process.settle()
        await trio.sleep(_SETTLE_S)
        malloc.trim_after_start()

    async def _beat(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The loop is alive while this runs and no pass of the worker is blocked."""
        task_status.started()
        while True:
            busy = self.agent.control.reconciler.busy_since if self.agent is not None else None
            if busy is None or time.monotonic() - busy < _STUCK_S:
                self.heartbeat.beat()
            logs.write_due()  # the counts of equal lines
            if self.in_force.is_due():
                self._window_due.set()
            await next_beat(_BEAT_S)

    def _statuses(self) -> list[ComponentStatus]:
        return list(self.supervisor.statuses.values()) if self.supervisor is not None else []

    def _component_changed(self, status: ComponentStatus) -> None:
        if self.agent is not None:
            self.agent.alerts.component(status)

    async def _signals(
        self, scope: trio.CancelScope, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        more = () if self._hands_over_from is None else (REQUEST,)
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *more) as received:
            task_status.started()
            async for number in received:
                if number == signal.SIGHUP:
                    await self.reload()
                    continue
                if number == REQUEST:
                    # A stop under way remains one: it restores and withdraws, and the process ends.
                    if self._stopped_by is not None or not self._hands_over():
                        continue
                else:
                    # Also in the middle of a hand-over, and after its end: this process is not to be a standby.
                    self.handed_over = False
                self._stopped_by = signal.Signals(number).name
                self._log.info("stopping", signal=self._stopped_by)
                if self.supervisor is not None:
                    self.supervisor.stop(self._stopped_by)
                elif self._renewal is None:
                    scope.cancel(reason=self._stopped_by)
                elif self._search is not None:
                    # The next agent restores and withdraws; the node may never be as that agent needs it.
                    self._search.cancel(reason=self._stopped_by)

    def _hands_over(self) -> bool:
        assert self._hands_over_from is not None
        left_s = self._hands_over_from - time.monotonic()
        if left_s > 0:
            self._log.error("hand-over refused: the last daemon that took over has ended", left=duration(left_s))
            return False
        self.handed_over = True
        return True

    async def _follow_windows(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            await self._window_due.wait()
            await self._change_window()

    async def _change_window(self) -> None:
        """Apply the window that holds now, as a reload would; what a restore by command has ended remains so."""
        async with self._changing:
            if not self.in_force.is_due():
                return
            before = self.in_force.window().name
            try:
                with trio.CancelScope(shield=True):
                    changed = await self.in_force.decide()
            except ConfigError as exc:
                self._log.error("the window cannot be applied; the configuration is unchanged", problems=str(exc))
                return
            if not changed:
                return
            now = self.in_force.window()
            self._log.info("window changed", before=before or "none", window=now.name or "none")
            if self.agent is not None:
                paused = self.config.mode is AgentMode.ENFORCE and not self.agent.mode.enforce
                self.agent.reconfigure(self.config, paused=paused)

    async def reload(self) -> ReloadResult:
        """Read the configuration again; a bad one is reported and changes nothing.

        Errors: none; problems are returned.
        """
        # Not half of it: systemd waits for the end of a reload that was announced.
        result = ReloadResult()
        with trio.CancelScope(shield=True):
            async with self._changing:
                result = await self._reload()
        return result

    async def _reload(self) -> ReloadResult:
        self._notifier.reloading()
        try:
            kept = await self.in_force.reload()
        except ConfigError as exc:
            self._log.error("new configuration invalid; keeping the old one", problems=str(exc))
            self._notifier.ready("invalid configuration; keeping the old one")
            return ReloadResult(problems=exc.problems)
        self._restored = False
        config = self.config
        logs.setup(config.log.level, config.log.format)
        if self.agent is not None:
            self.agent.reconfigure(config)
        _warn_of_removed(self.in_force.loaded)
        for name in kept:
            self._log.warning("needs a restart to take effect", setting=name)
        self._log.info("reloaded", mode=config.mode.value)
        self._notifier.ready(f"{config.mode.value}: reloaded")
        return ReloadResult(needs_restart=kept)

    async def _use_node_settings(self, kept: "KeptSettings | None") -> None:
        """The control plane's settings of this node are others: as a reload, but the files are not read again."""
        async with self._changing:
            with trio.CancelScope(shield=True):
                await self._take_node_settings(kept)

    async def _take_node_settings(self, kept: "KeptSettings | None") -> None:
        before, left = self.config, self.in_force.settings_left()
        is_other = await self.in_force.use_node_settings(kept)
        if (now := self.in_force.settings_left()) != left and self.agent is not None:
            text = f"{plural(len(now), 'value')} not taken: bypassctl config explain apiserver.node_settings"
            self.agent.record.notes.settings([text], "the control plane's settings")
        if not is_other:
            return
        config, agent = self.config, self.agent
        assert agent is not None
        # What was restored by command remains so: the control plane is not the operator.
        agent.reconfigure(config, paused=config.mode is AgentMode.ENFORCE and not agent.mode.enforce)
        changed = await in_worker(lambda: [*changes(before, config)])
        agent.record.notes.settings(changed, "the control plane's settings")
        self._log.info("reloaded", reason="the control plane's settings of this node are others")


class _Renamed(argparse.Action):
    """An option of an older version: a usage error that names the replacement (``const``)."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.error(f"{self.option_strings[0]} is renamed; write {self.const}")


def parser() -> Parser:
    top = Parser(prog="bypassd", description=_DESCRIPTION)
    top.add_argument("--version", action="version", version=f"bypassd {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run the agent in the foreground")
    check = commands.add_parser("check-config", help="validate the configuration and report all errors")
    for command in (run, check):
        command.add_argument("--config", default=None, metavar="FILE", help=f"default: {DEFAULT_PATH}")
    observe = "plan and report without writing, whatever mode the file sets"
    wait = "wait for a daemon that runs already, which hands over if it was started so, too (docs/kubernetes.md)"
    run.add_argument("--wait", action="store_true", help=wait)
    run.add_argument("--observe", action="store_true", help=observe)
    run.add_argument("--dry-run", action=_Renamed, nargs=0, const="--observe", help=argparse.SUPPRESS)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    with prepared():
        try:
            return _main(arguments)
        except OutputError as exc:
            # --help, --version and check-config: the daemon itself writes to standard error only.
            give_up()
            if exc.seen_enough:
                return 0
            complain(str(exc), "bypassd")
            return EXIT_OUTPUT


def _main(arguments: Sequence[str] | None) -> int:
    options = parser().parse_args(arguments)
    path = options.config or DEFAULT_PATH
    try:
        loaded = load.load(path, required=options.config is not None)
    except ConfigError as exc:
        complain_lines(exc.problems)
        return EXIT_USAGE
    if options.command == "check-config":
        complain_lines(loaded.removed)
        if loaded.config.windows:
            complain_lines(load.window_table(loaded.config).overlaps(time.time()))
        write(f"{', '.join(loaded.files) or 'no file, defaults apply'}: OK ({_counts(loaded)})\n")
        finish()
        return 0
    logs.setup(loaded.config.log.level, loaded.config.log.format)
    sys.excepthook = logs.uncaught
    _warn_of_removed(loaded)
    # Before any thread: a thread has the namespace of its creator.
    if loaded.config.node.root == "/" and (problem := join_host_cgroups()) is not None:
        get_log("daemon").warning(problem)
    return _run(loaded, path, options)


def _warn_of_removed(loaded: Loaded) -> None:
    for problem in loaded.removed:
        get_log("daemon").warning("key of an earlier version in the configuration", problem=str(problem))


def _counts(loaded: Loaded) -> str:
    """``489 settings, 1 changed``: all settings, and those whose value differs from the default."""
    changed = len(load.changed(Config(), loaded.config))
    return f"{load.setting_count()} settings, {changed} changed"


def _run(loaded: Loaded, path: str, options: argparse.Namespace) -> int:
    log = get_log("daemon")
    malloc.limit_arenas()  # before threads start
    share_interpreter()
    if problem := TIMER.install():
        log.warning("online tasks may wait for a whole step of the daemon's work", problem=problem)
    elif TIMER.refused and TIMER.installed:
        log.info("short stints by a timer, which costs more CPU time than a perf event", problem=TIMER.refused)
    elif TIMER.refused:
        log.info("online tasks may wait for the work before a container starts: no perf event", problem=TIMER.refused)
    TIMER.run()
    try:
        _serve(loaded, path, options)
    except AgentError as exc:
        return _problem_text(log, [exc])
    except BaseExceptionGroup as group:
        leaves = list(_leaves(group))
        if not all(isinstance(leaf, AgentError) for leaf in leaves):
            raise
        return _problem_text(log, leaves)
    finally:
        logs.write_due(all_of_them=True)
    return 0


def _serve(loaded: Loaded, path: str, options: argparse.Namespace) -> None:
    """Run the daemon; with ``--wait`` as soon as no other one runs, and again after one to which it has handed over.

    Errors: those of `Daemon.run` and of the lock.
    """
    if not options.wait:
        daemon = Daemon(loaded, observe=options.observe)
        with InstanceLock(os.path.dirname(daemon.config.store.path)):
            trio.run(daemon.run)
        return
    with StopSignals() as stops:
        _serve_by_turns(loaded, path, options, stops)


def _serve_by_turns(loaded: Loaded, path: str, options: argparse.Namespace, stops: StopSignals) -> None:
    log, took_over = get_log("daemon"), False

    def waiting(why: str) -> None:
        log.info("standby", reason=why)

    while True:
        directory = os.path.dirname(loaded.config.store.path)
        if not took_over:
            _preload(loaded.config)
        lock = wait_for_lock(directory, stops, request=not took_over, waiting=waiting)
        if lock is None:
            return
        with lock:
            # One that had to take over again refuses for a while: a rollout of daemons that end at once stops there.
            hands_over_from = time.monotonic() + (REFUSES_S if took_over else 0.0)
            daemon = Daemon(loaded, observe=options.observe, hands_over_from=hands_over_from, stops=stops)
            trio.run(daemon.run)
        if not daemon.handed_over:
            return
        took_over, loaded = True, daemon.in_force.loaded
        malloc.free_earlier()
        # The files may have changed meanwhile; with an error in them the configuration of the last daemon counts on.
        with suppress(ConfigError):
            loaded = load.load(path, required=options.config is not None)


def _preload(config: Config) -> None:
    """Import what the first seconds need: no daemon runs between the end of the other one and the first pass.

    Nor is a library imported in a thread then, which has the interpreter while a container's last write is due.
    """
    import reconciler.signals.onlinewait

    if config.runtime.cri is not FeatureSwitch.OFF:
        import reconciler.sources.criapi.cri_pb2
    if config.http.enabled or config.http.socket is not None or config.http.reader_group is not None:
        import reconciler.web.app
        import reconciler.web.server
    if config.apiserver.enabled or config.kubelet.enabled:
        import encodings.idna  # noqa: F401  # the resolution of a host's name imports it

        import httpcore2  # noqa: F401
    if watched(config):
        import reconciler.interference.monitor
        import reconciler.responses.eviction.executor  # noqa: F401


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for exception in group.exceptions:
        if isinstance(exception, BaseExceptionGroup):
            yield from _leaves(exception)
        else:
            yield exception


def _problem_text(log: BoundLog, errors: Sequence[BaseException]) -> int:
    """Log each error; the exit code of the process."""
    for error in errors:
        log.error(str(error))
    if any(isinstance(error, AlreadyRunningError | NotHandedOverError) for error in errors):
        return EXIT_RUNNING
    if any(isinstance(error, NewerSchemaError) for error in errors):
        return EXIT_NEWER
    return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
