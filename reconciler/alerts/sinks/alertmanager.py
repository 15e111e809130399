"""Alertmanager, API v2: labels make an alert's identity, and it ends when it is no longer sent.

So a state is sent again every ``resend_s``, and its end with the true time.
Source: Alertmanager, api/v2/openapi.yaml; Prometheus, docs "Sending alerts".
"""

import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Final, final

import msgspec
from msgspec import Meta

from cgroupfs.log import get_log
from reconciler.alerts.incident import Incident, stamp
from reconciler.alerts.sinks.base import AlertSink, SinkError, SinkKind, SinkSetup
from reconciler.clients.endpoint import check_url, masked_url
from reconciler.clients.http_config import TlsTrust

if TYPE_CHECKING:
    from reconciler.alerts.sinks.http import HttpSink

_PATH: Final = "/api/v2/alerts"
_KEPT: Final = 4
"""A state ends there after so many ``resend_s`` without a resend, as Prometheus sets it."""
_NO_LABEL: Final = re.compile(r"[^a-zA-Z0-9_]")


class AlertmanagerSinkConfig(TlsTrust, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prometheus Alertmanager, API v2; one instance that takes an alert is enough."""

    urls: Annotated[
        tuple[str, ...],
        Meta(
            description="instances such as http://alertmanager:9093, with the path before /api/v2/alerts",
            extra={"secret": True},
        ),
    ]
    resend_s: Annotated[
        float,
        Meta(ge=1, le=3600, description="interval at which an active alert is sent again; expires after 4 times this"),
    ] = 60.0
    event_s: Annotated[
        float, Meta(ge=1, le=86400, description="time for which an event without an end stays active")
    ] = 900.0
    generator_url: Annotated[
        str, Meta(description="link to the source; empty: that to the page, if any", extra={"secret": True})
    ] = ""

    def __post_init__(self) -> None:
        self.check()
        if not self.urls:
            raise ValueError("urls: expected at least one URL")
        for url in self.urls:
            check_url("urls", url)

    def __repr__(self) -> str:
        return f"Alertmanager(urls={[masked_url(url) for url in self.urls]})"


@final
class AlertmanagerSink(AlertSink):
    """`AlertSink`."""

    def __init__(self, setup: SinkSetup) -> None:
        config = setup.config.section(AlertmanagerSinkConfig)
        self._config = config
        self._node = setup.node
        self._log = get_log("alerts", sink=setup.name)
        # A repeated alert is the same alert there, never a second one: none has to be held back.
        self.resend_s: float | None = config.resend_s
        self.repeat_s: float | None = config.resend_s
        from reconciler.alerts.sinks.http import HttpSink  # see `SinkKind.modules`

        self._doors = [
            (masked_url(url), HttpSink(setup.name, url, config, setup.config.timeout_s)) for url in config.urls
        ]
        self._down: set[int] = set()

    async def send(self, notices: Sequence[Incident]) -> None:
        """Post to all instances. Errors: `SinkError` when none takes it."""
        import trio

        body = msgspec.json.encode([self.entry(notice, time.time()) for notice in notices])
        errors: dict[int, SinkError] = {}

        async def post(index: int, door: "HttpSink") -> None:
            try:
                await door.send("POST", body, "application/json", below=_PATH)
            except SinkError as exc:
                errors[index] = exc

        async with trio.open_nursery() as nursery:
            # Alertmanagers of a cluster do not pass alerts on to each other.
            for index, (_, door) in enumerate(self._doors):
                nursery.start_soon(post, index, door)
        if len(errors) == len(self._doors):
            raise self._worst(list(errors.values()))
        for index in errors.keys() - self._down:
            self._log.warning("delivery to one of several Alertmanagers failed", error=str(errors[index]))
        for index in self._down - errors.keys():
            self._log.info("delivery works again", alertmanager=self._doors[index][0])
        self._down = set(errors)

    async def aclose(self) -> None:
        for _, door in self._doors:
            await door.aclose()

    def entry(self, notice: Incident, now_s: float) -> Mapping[str, object]:
        alert = notice.alert
        # An empty label is the same as none for Prometheus.
        labels = {_label(name): text for name, text in notice.labels.items() if text}
        # A state's end must have the labels that its beginning had; an event has no end.
        severity = notice.began_as if alert.kind.lasts else alert.severity
        fields: dict[str, object] = {
            "labels": {
                **labels,
                "alertname": f"Bypassd{alert.kind.began.camel}",
                "severity": severity.value,
                "node": self._node,
                "key": alert.key,
            },
            "annotations": {
                "summary": alert.summary,
                **{_label(name): text for name, text in alert.details.items()},
                "id": notice.id,
                "count": str(notice.count),
            },
            "startsAt": stamp(notice.first_s),
            "endsAt": stamp(self._ends(notice, now_s)),
        }
        if url := self._config.generator_url or alert.details.get("page"):
            fields["generatorURL"] = url
        return fields

    def _ends(self, notice: Incident, now_s: float) -> float:
        if notice.has_ended:
            # An end before its beginning is refused.
            return max(notice.last_s, notice.first_s + 0.001)
        if notice.alert.kind.lasts:
            return now_s + _KEPT * self._config.resend_s
        # An event has no end of its own.
        return max(now_s, notice.last_s) + self._config.event_s

    @staticmethod
    def _worst(errors: Sequence[SinkError]) -> SinkError:
        waits = [error.retry_after_s for error in errors if error.retry_after_s is not None]
        return SinkError(
            "; ".join(dict.fromkeys(map(str, errors))),
            retry_after_s=max(waits, default=None),
            permanent=all(error.permanent for error in errors),
        )


def _label(name: str) -> str:
    """A name that Prometheus accepts."""
    plain = _NO_LABEL.sub("_", name) or "_"
    return f"_{plain}" if plain[0].isdigit() else plain


SINK: Final = SinkKind(
    name="alertmanager",
    config_type=AlertmanagerSinkConfig,
    build=AlertmanagerSink,
    secret=True,
    modules=("trio", "reconciler.alerts.sinks.http"),
)
