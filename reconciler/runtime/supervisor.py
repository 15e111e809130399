"""Runs the daemon's components in nested lifetimes, restarts failed ones, and stops all of them in order.

Layers are given outermost first: a layer starts when the one around it has started, and ends before it. A component
that fails or returns is started again after a growing wait, and reported.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final, Protocol, final

import trio
from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.errors import AgentError
from cgroupfs.log import get_log
from reconciler.runtime.stints import COMPONENT

START_DEADLINE_S: Final = 10.0
"""The next layer starts then, whatever this one lacks."""
FIRST_WAIT_S: Final = 0.5
LONGEST_WAIT_S: Final = 60.0
CALM_S: Final = 60.0
"""A component that ran this long before it failed starts again with the first wait."""
SLOW_STOP_S: Final = 5.0
"""Before systemd's timeout: the log names the component that does not end."""


class ComponentTask(Protocol):
    """A component's one task. ``task_status.started()`` reports that callers may rely on it."""

    def __call__(self, *, task_status: trio.TaskStatus[None]) -> Awaitable[None]: ...


class Component(Struct, frozen=True, kw_only=True):
    """One named part. ``essential``: a fault of its own ends the process, in order, and systemd starts a new one."""

    name: str
    run: ComponentTask
    essential: bool = False


class ComponentHealth(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    STOPPED = "stopped"


class ComponentStatus(Struct, frozen=True, kw_only=True):
    """For /state, /readyz and the metrics. ``error`` is the last failure's text, "" if there was none."""

    name: str
    health: ComponentHealth
    failures: int = 0
    error: str = ""


class EssentialError(AgentError):
    """An essential component has ended, so the process ends. ``__cause__`` is its error, None if it just returned."""


@final
class _Supervised:
    """State of one component while it runs."""

    def __init__(self, component: Component) -> None:
        self.component = component
        self.settled = trio.Event()
        """Started, or failed for the first time: the layer need not wait for it any more."""
        self.status = ComponentStatus(name=component.name, health=ComponentHealth.STARTING)
        self.ran = False


@final
class Supervisor:
    """Runs components, restarts failed ones, stops all in order.

    ``report`` is called, on the loop, with each change of a component's status.
    """

    def __init__(
        self, layers: Iterable[Sequence[Component]], report: Callable[[ComponentStatus], None] | None = None
    ) -> None:
        self._layers = [[_Supervised(component) for component in layer] for layer in layers]
        self._report = report
        self.started = trio.Event()
        """Set when every component has started, has failed once, or has used up its time."""
        self._log = get_log("supervisor")
        self._stop = trio.Event()
        self._reason = ""
        self._fatal: BaseException | None = None
        names = [kept.component.name for layer in self._layers for kept in layer]
        if len(set(names)) != len(names):
            raise ValueError(f"component names must differ: {', '.join(sorted(names))}")

    @property
    def statuses(self) -> Mapping[str, ComponentStatus]:
        """Every component's status now, outermost layer first."""
        return {kept.component.name: kept.status for layer in self._layers for kept in layer}

    def stop(self, reason: str) -> None:
        """Begin the way out; the first reason counts. May be called at any time, also before the start is over."""
        if not self._stop.is_set():
            self._reason = reason
            self._stop.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until `stop`, cancellation, or the end of an essential component.

        ``started()`` is called when `started` is set. Errors: `EssentialError`.
        """
        await self._run_layer(0, task_status)
        if self._fatal is not None:
            raise EssentialError(self._reason) from (None if isinstance(self._fatal, _Returned) else self._fatal)

    async def _run_layer(self, index: int, task_status: trio.TaskStatus[None]) -> None:
        if index == len(self._layers):
            self.started.set()
            task_status.started()
            await self._stop.wait()
            return
        layer = self._layers[index]
        async with trio.open_nursery() as watcher:
            async with trio.open_nursery() as nursery:
                for kept in layer:
                    nursery.start_soon(self._keep, kept, name=f"keep {kept.component.name}")
                await self._wait_for_start(layer)
                if not self._stop.is_set():
                    await self._run_layer(index + 1, task_status)
                nursery.cancel_scope.cancel(reason=f"stop: {self._reason}")
                # In a nursery around this one, which is left only when every component has ended.
                watcher.start_soon(self._warn_of_slow_stop, layer)
            watcher.cancel_scope.cancel(reason="the layer has stopped")

    async def _warn_of_slow_stop(self, layer: Sequence[_Supervised]) -> None:
        """Name the component that keeps the process from ending, before systemd's timeout is over."""
        await trio.sleep(SLOW_STOP_S)
        late = [kept.component.name for kept in layer if kept.status.health is not ComponentHealth.STOPPED]
        self._log.warning("slow to stop", components=",".join(late), after_s=SLOW_STOP_S)

    async def _wait_for_start(self, layer: Sequence[_Supervised]) -> None:
        """Wait for the layer's start, for its deadline, or for a stop."""
        async with trio.open_nursery() as nursery:

            async def stop_waiting() -> None:
                await self._stop.wait()
                nursery.cancel_scope.cancel(reason="stop")

            nursery.start_soon(stop_waiting)
            with trio.move_on_after(START_DEADLINE_S) as scope:
                for kept in layer:
                    await kept.settled.wait()
            if scope.cancelled_caught:
                late = [kept.component.name for kept in layer if not kept.settled.is_set()]
                self._log.warning("slow to start; continuing without it", components=",".join(late))
            nursery.cancel_scope.cancel(reason="the layer has started")

    async def _keep(self, kept: _Supervised) -> None:
        COMPONENT.set(kept.component.name)
        wait_s = FIRST_WAIT_S
        try:
            while True:
                began = trio.current_time()
                failure = await self._run_once(kept)
                if self._stop.is_set():
                    return
                # By a refusal of the node (`AgentError`, `OSError`) an essential one that has run is restarted, too: a
                # new process would be refused the same, and meanwhile no pod would be managed. Any other end is a fault
                # of its own, after which its state is unreliable: no partly working daemon remains.
                if kept.component.essential and not (kept.ran and isinstance(failure, AgentError | OSError)):
                    self._fatal = failure
                    self.stop(f"{kept.component.name} ended: {_error_text(failure)}")
                    return
                if trio.current_time() - began >= CALM_S:
                    wait_s = FIRST_WAIT_S
                self._log.warning("restarting", component=kept.component.name, wait_s=wait_s)
                self._set(kept, ComponentHealth.WAITING)
                kept.settled.set()
                await trio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        finally:
            self._set(kept, ComponentHealth.STOPPED)
            kept.settled.set()

    async def _run_once(self, kept: _Supervised) -> BaseException:
        """One life of a component; what ended it."""
        name = kept.component.name
        failure: BaseException = _Returned("it returned")
        self._set(kept, ComponentHealth.STARTING)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(kept.component.run, name=name)
                self._set(kept, ComponentHealth.RUNNING)
                kept.ran = True
                kept.settled.set()
        except* Exception as group:  # noqa: BLE001  # here and in `object_errors` alone
            # A programming error in the metrics page must not stop the node's protection. Logged here: when the daemon
            # is being stopped at the same time, the cancellation continues and this is lost.
            failure = _innermost(group)
            if isinstance(failure, AgentError):
                self._log.error("failed", component=name, error=str(failure))
            else:
                self._log.failure("failed", failure, component=name)
        kept.status = replace(kept.status, failures=kept.status.failures + 1, error=_error_text(failure))
        return failure

    def _set(self, kept: _Supervised, health: ComponentHealth) -> None:
        old, kept.status = kept.status, replace(kept.status, health=health)
        if self._report is not None and kept.status != old:
            self._report(kept.status)


class _Returned(Exception):
    """Used as the error of a component that ended without one."""


def _innermost(exc: BaseException) -> BaseException:
    """The one error inside nested groups of one; a group of several remains a group."""
    while isinstance(exc, BaseExceptionGroup) and len(exc.exceptions) == 1:
        exc = exc.exceptions[0]
    return exc


def _error_text(exc: BaseException) -> str:
    return str(exc) if isinstance(exc, AgentError | _Returned) else f"{type(exc).__name__}: {exc}"


def at_once(run: ComponentTask) -> ComponentTask:
    """The component, as started at once: its first result is waited for where it is needed, and only there."""

    async def started(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        async with trio.open_nursery() as nursery:
            await nursery.start(run)

    return started
