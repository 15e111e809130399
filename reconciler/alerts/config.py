"""What can be set about alerts: named sinks, each with one section for its kind, and what it wants to be told."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from cgroupfs.errors import InputError
from reconciler.alerts.alert import AlertKind, Severity
from reconciler.clients.http_config import TlsTrust, check_headers
from reconciler.clients.urls import MASK, check_url, masked_url

_PATH: Final = {"path": True}
_SECRET: Final = {"secret": True}
_SECRET_PATH: Final = {"path": True, "secret": True}
SINKS: Final = ("journal", "alertmanager", "webhook", "kubernetes", "command", "file")
"""The kinds of sinks, each a section of `SinkConfig`; `reconciler.alerts.sinks` has what they do."""


class JournalSinkConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The systemd journal, one structured entry for each alert; the daemon's own log where no journal listens."""

    socket: Annotated[str, Meta(description="socket of journald", extra=_PATH)] = "/run/systemd/journal/socket"


class AlertmanagerSinkConfig(TlsTrust, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prometheus Alertmanager, API v2; every instance of a cluster is told, and one that takes it is enough."""

    urls: Annotated[
        tuple[str, ...],
        Meta(
            description="instances such as http://alertmanager:9093; a path before /api/v2/alerts may follow",
            extra=_SECRET,
        ),
    ]
    resend_s: Annotated[
        float,
        Meta(
            ge=1, le=3600, description="interval at which an active alert is sent again; it expires after 4 times this"
        ),
    ] = 60.0
    event_s: Annotated[
        float, Meta(ge=1, le=86400, description="time for which an event without an end stays active")
    ] = 900.0
    generator_url: Annotated[
        str, Meta(description="link shown by Alertmanager as the source; empty: none", extra=_SECRET)
    ] = ""

    def __post_init__(self) -> None:
        self.check()
        if not self.urls:
            raise ValueError("urls: expected at least one URL")
        for url in self.urls:
            check_url("urls", url)

    def __repr__(self) -> str:
        return f"Alertmanager(urls={[masked_url(url) for url in self.urls]})"


class WebhookSinkConfig(TlsTrust, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Any HTTP server: our own JSON document, or a body of your own."""

    url: Annotated[str | None, Meta(description="target URL; only its host is ever shown", extra=_SECRET)] = None
    url_file: Annotated[
        str | None,
        Meta(description="file with the URL, if it is a secret; read at each request", extra=_SECRET_PATH),
    ] = None
    method: Annotated[Literal["POST", "PUT", "PATCH"], Meta(description="the request's method")] = "POST"
    headers: Annotated[Mapping[str, str], Meta(description="headers; values are never shown", extra=_SECRET)] = {}
    header_files: Annotated[
        Mapping[str, str],
        Meta(description="headers whose values are in these files, read at each request", extra=_SECRET),
    ] = {}
    content_type: Annotated[
        str,
        Meta(description="content type of the body; if it contains json, placeholders are escaped for JSON strings"),
    ] = "application/json"
    template: Annotated[
        str | None,
        Meta(
            description="the body, with placeholders such as ${summary}; null: the JSON document of bypassd "
            "(docs/alerts.md)"
        ),
    ] = None

    def __post_init__(self) -> None:
        self.check()
        if (self.url is None) == (self.url_file is None):
            raise ValueError("expected exactly one of url, url_file")
        if self.url is not None:
            check_url("url", self.url)
        check_headers(self.headers, self.header_files)
        if self.template is not None:
            from reconciler.alerts.template import Template  # noqa: PLC0415  (nothing that few nodes need is loaded)

            Template(self.template, json="json" in self.content_type)

    def __repr__(self) -> str:
        url = masked_url(self.url) if self.url is not None else self.url_file
        return f"Webhook(url={url}, headers={dict.fromkeys(self.headers, MASK)})"


class EventApi(StrEnum):
    """Which API group the Events are written to."""

    CORE = "v1"
    EVENTS = "events.k8s.io/v1"


class KubernetesSinkConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Kubernetes Events on the pod that an alert is about, else on the node; section apiserver says how."""

    api: Annotated[EventApi, Meta(description="API group of the Events")] = EventApi.CORE
    node_namespace: Annotated[str, Meta(description="namespace of Events on the node")] = "default"


class CommandSinkConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program that reads the JSON document of bypassd from its standard input; exit code 0 confirms it."""

    argv: Annotated[
        tuple[str, ...],
        Meta(description="program (absolute path) and arguments; no shell; arguments are never shown", extra=_SECRET),
    ]

    def __post_init__(self) -> None:
        if not self.argv or not self.argv[0].startswith("/"):
            raise ValueError("argv: expected a program's absolute path, then its arguments")

    def __repr__(self) -> str:
        return f"Command({self.argv[0]!r}, {len(self.argv) - 1} arguments)"


class FileSinkConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of JSON lines, mode 0600, with the older ones beside it as PATH.1 and so on."""

    path: Annotated[str, Meta(description="the file; its directory must exist", extra=_PATH)]
    rotate_bytes: Annotated[int, Meta(ge=4096, le=1 << 34, description="size at which a new file starts")] = 16 << 20
    keep: Annotated[int, Meta(ge=0, le=100, description="number of old files kept")] = 4
    fsync: Annotated[bool, Meta(description="an alert counts as delivered only when it is on the disk")] = False


class SinkConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One receiver of alerts: exactly one of the sections below sets the kind, the settings filter the alerts."""

    minimum: Annotated[Severity, Meta(description="minimum severity")] = Severity.INFO
    kinds: Annotated[tuple[AlertKind, ...], Meta(description="only these kinds, including their ends; empty: all")] = ()
    resolved: Annotated[bool, Meta(description="also send the end of alerts")] = True
    batch_size: Annotated[int, Meta(ge=1, le=1000, description="most alerts in one delivery")] = 10
    batch_delay_s: Annotated[
        float, Meta(ge=0, le=3600, description="time an alert waits for others; a critical alert is sent at once")
    ] = 5.0
    repeat_s: Annotated[
        float, Meta(ge=1, le=604800, description="interval at which a repeated alert is sent, once, with its count")
    ] = 3600.0
    per_minute: Annotated[
        int, Meta(ge=1, le=10000, description="new alerts per minute; further ones are counted and sent as one summary")
    ] = 30
    timeout_s: Annotated[float, Meta(ge=0.1, le=600, description="timeout of one delivery")] = 10.0
    attempts: Annotated[
        int, Meta(ge=0, le=100000, description="deliveries tried before an alert is dropped; 0: until give_up_s")
    ] = 0
    give_up_s: Annotated[float, Meta(ge=10, le=2592000, description="age at which an alert is dropped")] = 86400.0
    journal: JournalSinkConfig | None = None
    alertmanager: Annotated[AlertmanagerSinkConfig | None, Meta(extra=_SECRET)] = None
    webhook: Annotated[WebhookSinkConfig | None, Meta(extra=_SECRET)] = None
    kubernetes: KubernetesSinkConfig | None = None
    command: Annotated[CommandSinkConfig | None, Meta(extra=_SECRET)] = None
    file: FileSinkConfig | None = None

    def __post_init__(self) -> None:
        given = [name for name in SINKS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"expected exactly one of {', '.join(SINKS)}; got {', '.join(given) or 'none'}")

    @property
    def how(self) -> str:
        """The kind of sink: the name of the one section that is given."""
        return next(name for name in SINKS if getattr(self, name) is not None)


class AlertsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The receivers of alerts. Without a sink, alerts appear in the daemon's log only."""

    sinks: Annotated[
        Mapping[str, SinkConfig],
        Meta(description="sinks by name; the name appears in metrics and messages", extra=_SECRET),
    ] = {}
    labels: Annotated[
        Mapping[str, str], Meta(description="labels added to every alert, such as the cluster's name")
    ] = {}
    queue: Annotated[int, Meta(ge=10, le=100000, description="most pending alerts, per sink and in the store")] = 1000
    source_down_s: Annotated[
        float, Meta(ge=1, le=86400, description="a source is reported as failed after this time")
    ] = 60.0

    def __post_init__(self) -> None:
        for name in self.sinks:
            if not name.isascii() or not name.replace("-", "").replace("_", "").isalnum() or len(name) > 63:
                raise ValueError(f"sinks: expected a name of letters, digits, - and _; got {len(name)} characters")
        for name in self.labels:
            if not name.isascii() or not name.isidentifier():
                raise ValueError(f"labels: {name!r}: expected letters, digits and _, with no digit first")


def check_sink(config: AlertsConfig, only: str | None) -> None:
    """Errors: `InputError` when there is no sink, or none of this name."""
    if not config.sinks:
        raise InputError("alerts.sinks", "", "at least one configured sink; there is none")
    if only is not None and only not in config.sinks:
        raise InputError("sink", only, f"one of {', '.join(config.sinks)}")
