"""The table of alert sinks.

A new sink is a file in this package that ends in ``SINK = SinkKind(...)``, and one row here. Its key and section under
``alerts.sinks`` and its part of docs/config.md follow from the row. docs/contributing.md has an example.
"""

from typing import TYPE_CHECKING, Annotated, Any, Final

from msgspec import Meta

from reconciler.alerts.config import SinkConfig
from reconciler.alerts.sinks.base import AlertSink, AnySinkKind, SinkKind, SinkSetup, check_kind
from reconciler.runtime.lazy import import_in_thread
from reconciler.runtime.registry import Registry, section_type

SINKS: Final[Registry[AnySinkKind]] = Registry(
    "sink",
    SinkKind,
    ("journal", "reconciler.alerts.sinks.journal:SINK"),
    ("alertmanager", "reconciler.alerts.sinks.alertmanager:SINK"),
    ("webhook", "reconciler.alerts.sinks.webhook:SINK"),
    ("kubernetes", "reconciler.alerts.sinks.kubernetes:SINK"),
    ("command", "reconciler.alerts.sinks.command:SINK"),
    ("file", "reconciler.alerts.sinks.file:SINK"),
    check=check_kind,
)


class _Section(SinkConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sink: one of the sections below is the destination, the settings filter alerts."""


if TYPE_CHECKING:

    class SinkSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """Has an optional field for every row."""

        def __init__(self, **settings: Any) -> None: ...

else:
    SinkSection = section_type(
        "SinkSection",
        [
            (
                name,
                Annotated[kind.config_type | None, Meta(extra={"secret": True})]
                if kind.secret
                else kind.config_type | None,
                None,
            )
            for name, kind in SINKS.items()
        ],
        _Section,
        __name__,
    )


def build(setup: SinkSetup) -> AlertSink:
    return SINKS[setup.config.how].build(setup)


async def prepare(setup: SinkSetup) -> None:
    """Import in a thread what `build` will need: an HTTP library takes tenths of a second."""
    for module in SINKS[setup.config.how].modules:
        await import_in_thread(module)
