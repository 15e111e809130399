"""Configuration of alerts: named sinks, each with one section for its kind, and its filters.

The section of a kind is declared with the sink, in `reconciler.alerts.sinks`; those files are loaded when a sink is
configured.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, TypeVar

from msgspec import Meta, Struct

from cgroupfs.errors import InputError
from reconciler.alerts.alert import AlertKind, Severity
from reconciler.clients.endpoint import check_url
from reconciler.settings.schema import lazy_struct

_SECRET: Final = {"secret": True}
C = TypeVar("C", bound=Struct)


class SinkConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every sink has; `reconciler.alerts.sinks.table.SinkSection` adds a section for each kind of sink."""

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

    def __post_init__(self) -> None:
        given = [name for name in self.sink_kinds() if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"expected exactly one of {', '.join(self.sink_kinds())}; got {', '.join(given) or 'none'}"
            )

    @classmethod
    def sink_kinds(cls) -> tuple[str, ...]:
        """The keys of which exactly one sets the destination."""
        return cls.__struct_fields__[len(SinkConfig.__struct_fields__) :]

    @property
    def how(self) -> str:
        """The kind of sink: the name of the one section that is set."""
        return next(name for name in self.sink_kinds() if getattr(self, name) is not None)

    def section(self, of: type[C]) -> C:
        """The settings of the sink's own kind, which are of this type."""
        section = getattr(self, self.how)
        assert isinstance(section, of)
        return section


if TYPE_CHECKING:
    SinkSection = SinkConfig
else:
    SinkSection = lazy_struct("reconciler.alerts.sinks.table", "SinkSection")


class AlertsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The receivers of alerts; without a sink only the daemon's log."""

    sinks: Annotated[
        Mapping[str, SinkSection],
        Meta(description="sinks by name; the name appears in metrics and messages", extra=_SECRET),
    ] = {}
    labels: Annotated[
        Mapping[str, str], Meta(description="labels added to every alert, such as the cluster's name")
    ] = {}
    page_url: Annotated[
        str,
        Meta(description="the node's page in every alert (details.page), such as https://{node}:9470/; empty: none"),
    ] = ""

    # Hours of a noisy node without its receiver, in some hundred KiB.
    queue: ClassVar[int] = 1000
    # A kubelet or a runtime that restarts is back by then.
    source_down_s: ClassVar[float] = 60.0

    def __post_init__(self) -> None:
        if self.page_url:
            check_url("page_url", self.page_url.replace("{node}", "node"))
            if "#" in self.page_url:
                raise ValueError("page_url: has a fragment (#); the link to a pod is added to it")
        for name in self.sinks:
            if not name.isascii() or not name.replace("-", "").replace("_", "").isalnum() or len(name) > 63:
                raise ValueError(f"sinks: expected a name of letters, digits, - and _; got {len(name)} characters")
        for name in self.labels:
            if not name.isascii() or not name.isidentifier():
                raise ValueError(f"labels: {name!r}: expected letters, digits and _, with no digit first")


def check_sink(config: AlertsConfig, only: str | None) -> None:
    """Errors: `InputError` without any sink, or without one of this name."""
    if not config.sinks:
        raise InputError("alerts.sinks", "", "at least one configured sink; there is none")
    if only is not None and only not in config.sinks:
        raise InputError("sink", only, f"one of {', '.join(config.sinks)}")
