"""What can be set about alerts: named sinks, each with one section for its kind, and what it wants to be told.

The section of a kind is declared with the sink, in `reconciler.alerts.sinks`; those files are loaded when a sink is
configured.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

from msgspec import Meta, Struct

from cgroupfs.errors import InputError
from reconciler.alerts.alert import AlertKind, Severity
from reconciler.settings.schema import lazy_struct

_SECRET: Final = {"secret": True}
C = TypeVar("C", bound=Struct)


class SinkConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every sink has; `reconciler.alerts.sinks.table.SinkSection` adds a section for each kind of sink."""

    minimum: Annotated[Severity, Meta(description="the least severity that is told")] = Severity.INFO
    kinds: Annotated[tuple[AlertKind, ...], Meta(description="only these kinds, with their ends; empty: all")] = ()
    resolved: Annotated[bool, Meta(description="tell of ends, too")] = True
    batch_size: Annotated[int, Meta(ge=1, le=1000, description="told together at most")] = 10
    batch_delay_s: Annotated[
        float, Meta(ge=0, le=3600, description="an alert waits this long for company; a critical one does not wait")
    ] = 5.0
    repeat_s: Annotated[
        float, Meta(ge=1, le=604800, description="more of the same is told after this, once, with the count")
    ] = 3600.0
    per_minute: Annotated[
        int, Meta(ge=1, le=10000, description="new alerts told in a minute; the others are counted and told once")
    ] = 30
    timeout_s: Annotated[float, Meta(ge=0.1, le=600, description="one try")] = 10.0
    attempts: Annotated[
        int, Meta(ge=0, le=100000, description="tries before an alert is given up; 0: as long as give_up_s")
    ] = 0
    give_up_s: Annotated[float, Meta(ge=10, le=2592000, description="age at which an alert is given up")] = 86400.0

    def __post_init__(self) -> None:
        given = [name for name in self.sink_kinds() if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"expected exactly one of {', '.join(self.sink_kinds())}; got {', '.join(given) or 'none'}"
            )

    @classmethod
    def sink_kinds(cls) -> tuple[str, ...]:
        """The keys of which exactly one says where to send."""
        return cls.__struct_fields__[len(SinkConfig.__struct_fields__) :]

    @property
    def how(self) -> str:
        """The kind of sink: the name of the one section that is given."""
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
    """Who is told what happens on this node. Without a sink, the daemon's log alone."""

    sinks: Annotated[
        Mapping[str, SinkSection],
        Meta(description="sinks by a name of your choice, which metrics and messages use", extra=_SECRET),
    ] = {}
    labels: Annotated[Mapping[str, str], Meta(description="labels put on every alert, such as the cluster's name")] = {}
    queue: Annotated[
        int, Meta(ge=10, le=100000, description="alerts that wait at most, for each sink and in the store")
    ] = 1000
    source_down_s: Annotated[
        float, Meta(ge=1, le=86400, description="a source of knowledge is told to be down after this")
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
        raise InputError("alerts.sinks", "", "a sink in the configuration; there is none")
    if only is not None and only not in config.sinks:
        raise InputError("sink", only, f"one of {', '.join(config.sinks)}")
