"""What the tests of alerts share: alerts, a sink that does as the test says, and a dispatcher on a real store."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import trio

from reconciler.alerts.alert import Alert, AlertKind
from reconciler.alerts.config import AlertsConfig
from reconciler.alerts.dispatcher import AlertDispatcher
from reconciler.alerts.incident import Incident, Incidents
from reconciler.alerts.sinks.base import AlertSink, SinkError, SinkSetup
from reconciler.alerts.sinks.journal import JournalSinkConfig
from reconciler.alerts.sinks.table import SinkSection
from state.reader import open_readonly
from state.store import Store
from tests.fakes.constants import varied


def alert(key: str = "k", kind: AlertKind = AlertKind.EVICTION_DONE, **more: Any) -> Alert:
    return Alert(**{"kind": kind, "key": key, "summary": f"about {key}", "at_s": 1000.0, **more})


def notice(key: str = "k", kind: AlertKind = AlertKind.EVICTION_DONE, **more: Any) -> Incident:
    return Incidents(3600.0).take(alert(key, kind, **more))


def told(notices: Sequence[Incident]) -> list[tuple[str, int]]:
    return [(incident.alert.key, incident.count) for incident in notices]


class FakeSink(AlertSink):
    """`AlertSink`: remembers what it took and when; ``errors`` are raised first, one a call."""

    def __init__(self, setup: SinkSetup) -> None:
        self.setup = setup
        self.log: list[tuple[float, list[tuple[str, int]]]] = []
        self.notices: list[Incident] = []
        self.errors: list[SinkError] = []
        self.broken: SinkError | None = None
        self.tries: list[float] = []
        self.hang_s = 0.0
        self.closed = 0

    async def send(self, notices: Sequence[Incident]) -> None:
        self.tries.append(trio.current_time())
        await trio.sleep(self.hang_s)
        if self.errors:
            raise self.errors.pop(0)
        if self.broken is not None:
            raise self.broken
        self.log.append((trio.current_time(), told(notices)))
        self.notices += notices

    async def aclose(self) -> None:
        self.closed += 1

    def keys(self) -> list[str]:
        """Of what it took, once for each delivery."""
        return [key for _, pairs in self.log for key, _ in pairs]


class World:
    """A teller with fake sinks."""

    def __init__(self, tmp_path: Path, *names: str, most: int = 1000, **settings: Any) -> None:
        self.path = str(tmp_path / "state.db")
        self.store = Store(self.path, boot="b")
        self.lane = trio.CapacityLimiter(1)
        self.made: dict[str, FakeSink] = {}
        self.settings = {"batch_delay_s": 0.0, **settings}
        self.config = self.configured(*names, most=most)
        self.teller = self.new_teller()

    def configured(self, *names: str, most: int = 1000, **more: Any) -> AlertsConfig:
        settings = {**self.settings, **more}
        return varied(
            AlertsConfig(sinks={name: SinkSection(journal=JournalSinkConfig(), **settings) for name in names}),
            queue=most,
        )

    def new_teller(self, build: Callable[[SinkSetup], AlertSink] | None = None) -> AlertDispatcher:
        return AlertDispatcher(
            self.config,
            self.store,
            self.lane,
            lambda name, config: SinkSetup(name=name, config=config, node="n1"),
            build=build or self.build,
            clock=lambda: 1000.0 + trio.current_time(),
        )

    def build(self, setup: SinkSetup) -> AlertSink:
        sink = self.made.setdefault(setup.name, FakeSink(setup))
        sink.setup = setup
        return sink

    def rows(self) -> list[str]:
        """The alerts' keys in the store, by a connection of our own: the teller's belongs to its lane."""
        with contextlib.closing(open_readonly(self.path)) as connection:
            keys = [key for (key,) in connection.execute("SELECT key FROM meta ORDER BY rowid")]
        return [key for key in keys if key.startswith("alert:")]
