"""The agent's interface to alerts: counts all, and loads the dispatcher when there is a sink, or a stored alert.

On a node without sinks alerts are in the daemon's log.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, final

import trio
from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.errors import StoreError
from cgroupfs.log import get_log
from reconciler.alerts.agent_alerts import SourceHealth, as_alert, claim_states, component_alert, source_states
from reconciler.alerts.alert import Alert
from reconciler.alerts.config import AlertsConfig, SinkConfig, check_sink
from reconciler.alerts.sinks.base import SinkContext, SinkSetup, setup_of
from reconciler.clients.kube_config import ApiServer
from reconciler.placement.claims import CpuClaim
from reconciler.runtime.lazy import import_in_thread
from reconciler.runtime.stints import in_worker
from reconciler.runtime.supervisor import ComponentHealth, ComponentStatus
from reconciler.runtime.wakeup import WakeUp, next_beat
from state.entry import LedgerEvent
from state.model import Pod, Setting, SourceStatus
from state.schema import META
from state.store import Store, StoreBatch

if TYPE_CHECKING:
    from reconciler.alerts.dispatcher import AlertDispatcher

_LOG: Final = get_log("alerts")
_AGENT_LOG: Final = get_log("agent")
_EARLY: Final = 100
"""Alerts kept until the dispatcher is loaded; the oldest are dropped."""
_LOOK_S: Final = 20.0


class SinkNumbers(Struct, frozen=True, kw_only=True):
    """One sink in the metrics. ``late_s``: lateness of the oldest pending alert."""

    outcomes: Mapping[str, int] = {}
    waiting: int = 0
    late_s: float = 0.0
    failing: bool = False


class AlertNumbers(Struct, frozen=True, kw_only=True):
    """Alerts in the metrics: by kind and severity, and by sink."""

    counts: Mapping[tuple[str, str], int] = {}
    sinks: Mapping[str, SinkNumbers] = {}
    stored: int = 0


@final
class AlertService:
    """A component; `send` may be called at any time, and never waits."""

    def __init__(
        self,
        config: AlertsConfig,
        apiserver: ApiServer,
        store: Store,
        lane: trio.CapacityLimiter,
        *,
        ground: SinkContext,
        pods: Mapping[str, Pod] = MappingProxyType({}),
        note: Callable[[LedgerEvent], object] = str,
    ) -> None:
        """``lane``: the store's thread limiter. ``pods``: the node's, by uid; an alert names them.

        Each alert is an event of the history (``note``).
        """
        self._config = config
        self._apiserver = apiserver
        self._store = store
        self._lane = lane
        self._ground = ground
        self._pods = pods
        self._note = note
        self._teller: AlertDispatcher | None = None
        self._early: deque[Alert] = deque(maxlen=_EARLY)
        self._changed = WakeUp()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.raised: Counter[str] = Counter()
        """Those about the agent itself, by cause."""

    @property
    def config(self) -> AlertsConfig:
        return self._config

    def alert(self, cause: str, message: str, setting: Setting | None) -> None:
        """An alert of the agent's own, for people; sent once per occasion."""
        self.raised[cause] += 1
        path, knob = (setting.path, setting.knob) if setting is not None else ("", "")
        _AGENT_LOG.warning(message, alert=cause, path=path, knob=knob)
        self.send(as_alert(cause, message, setting, self._pods))

    def component(self, status: ComponentStatus) -> None:
        """A component waits for its next start, or runs again after a failure."""
        if status.health is ComponentHealth.WAITING:
            self.raised["component"] += 1
            self.send(component_alert(status))
        elif status.health is ComponentHealth.RUNNING and status.failures:
            self.send(component_alert(status))

    def send(self, alert: Alert) -> None:
        self._count(alert)
        alert = self._linked(alert)
        if self._teller is not None:
            self._teller.send(alert)
        elif self._config.sinks:
            self._early.append(alert)

    async def stage(self, batch: StoreBatch, alert: Alert) -> Callable[[], None]:
        """Put a durable alert into a batch of the caller's, stored together; call the answer when it has been."""
        self._count(alert)
        if self._teller is None and self._config.sinks:
            await self._load()
        return _nothing if self._teller is None else self._teller.stage(batch, self._linked(alert))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        if not self._config.sinks and not await self._left():
            task_status.started()
            # The dispatcher reports its start, too, and `started` may be called once only.
            task_status = trio.TASK_STATUS_IGNORED
            while not self._config.sinks:
                await self._changed.wait()
        teller = await self._load()
        await teller.run(task_status=task_status)

    def reconfigure(self, config: AlertsConfig, apiserver: ApiServer) -> None:
        self._config, self._apiserver = config, apiserver
        if self._teller is not None:
            self._teller.reconfigure(config)
        self._changed.set()

    async def test(self, only: str | None, by: str) -> Sequence[Mapping[str, object]]:
        """Send a test to every sink (or one). Errors: `InputError` without such a sink, or without any."""
        check_sink(self._config, only)
        return await (await self._load()).test(only, by)

    # Status

    def problems(self) -> list[str]:
        return self._teller.problems() if self._teller is not None else []

    def status(self) -> dict[str, object]:
        return self._teller.status() if self._teller is not None else {"sinks": [], "stored": [], "recent": []}

    def numbers(self) -> AlertNumbers:
        now = trio.current_time()
        couriers = self._teller.couriers() if self._teller is not None else ()
        sinks = {}
        for worker in couriers:
            sinks[worker.name] = SinkNumbers(
                outcomes=worker.outbox.tally.outcomes,
                waiting=worker.outbox.waiting,
                late_s=worker.outbox.age_s(now),
                failing=worker.problem is not None,
            )
        stored = self._teller.stored if self._teller is not None else 0
        return AlertNumbers(counts=dict(self.counts), sinks=sinks, stored=stored)

    # Within

    def _linked(self, alert: Alert) -> Alert:
        return linked(alert, self._config.page_url, self._ground.node)

    def _count(self, alert: Alert) -> None:
        self.counts[alert.kind.value, alert.severity.value] += 1
        self._note(event_of(alert))

    async def _left(self) -> bool:
        """Whether the store has alerts of an earlier run, which are to be sent or removed."""
        with suppress(StoreError):
            rows = await in_worker(self._store.rows, META, limiter=self._lane)
            return any(key.startswith("alert:") for key, _ in rows)
        return False

    async def _load(self) -> "AlertDispatcher":
        await import_in_thread("reconciler.alerts.dispatcher")
        from reconciler.alerts.dispatcher import AlertDispatcher

        if self._teller is None:
            self._teller = AlertDispatcher(self._config, self._store, self._lane, self._setup)
            while self._early:
                self._teller.send(self._early.popleft())
        return self._teller

    def _setup(self, name: str, config: SinkConfig) -> SinkSetup:
        return setup_of(name, config, self._ground, self._apiserver)


@final
class HealthWatch:
    """A component: checks sources and claims at intervals, and sends an alert for what lasts. It is in the log, too."""

    def __init__(
        self,
        service: AlertService,
        statuses: Callable[[], Sequence[SourceStatus]],
        claims: Callable[[], Sequence[CpuClaim]],
        pods: Mapping[str, Pod],
    ) -> None:
        """``claims``: on CPUs. ``pods``: the node's, by uid."""
        self._service = service
        self._statuses = statuses
        self._claims = claims
        self._pods = pods

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        config = self._service.config
        watch, had_sinks = SourceHealth(config.source_down_s), bool(config.sinks)
        while True:
            await next_beat(_LOOK_S)
            config = self._service.config
            if config.sinks and not had_sinks:
                # The first sink has yet to get what lasts.
                watch = SourceHealth(config.source_down_s)
            had_sinks = bool(config.sinks)
            watch.down_s = config.source_down_s
            states = (*source_states(self._statuses()), *claim_states(self._claims(), self._pods))
            for alert in watch.check(states, trio.current_time(), time.time()):
                (_LOG.info if alert.has_ended else _LOG.warning)(alert.summary, alert=str(alert.kind))
                self._service.send(alert)


def _nothing() -> None:
    """No sink is configured."""


def event_of(alert: Alert) -> LedgerEvent:
    labels, details = alert.labels, alert.details
    return LedgerEvent(
        at=alert.at_s,
        kind=f"alert:{labels.get('cause', alert.kind)}",
        path=details.get("path", ""),
        file=labels.get("knob", ""),
        reason=alert.summary,
        pod_uid=labels.get("uid"),
        pod=f"{labels['namespace']}/{labels['pod']}" if labels.get("namespace") and labels.get("pod") else "",
    )


def linked(alert: Alert, page_url: str, node: str) -> Alert:
    """The alert with ``details.page``: the address of the node's page, at its pod if it is about one."""
    if not page_url:
        return alert
    from urllib.parse import quote  # 4 ms that a daemon without links saves

    labels = alert.labels
    named = labels.get("namespace") and labels.get("pod")
    pod = [labels["namespace"], labels["pod"]] if named else [uid] if (uid := labels.get("uid")) else []
    fragment = f"#pod={'/'.join(quote(part, safe='') for part in pod)}" if pod else ""
    page = page_url.replace("{node}", quote(node, safe="")) + fragment
    return replace(alert, details={**alert.details, "page": page})
