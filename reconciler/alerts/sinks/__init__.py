"""The sinks, each a file; the registration is here. A module is loaded when a sink of its kind is made.

Belongs here: one file with a class that implements `base.Sink`, a section in `reconciler.alerts.config.SinkConfig`, and
a line in the table below.

Does not belong here: what is sent and when (`alerts`), and connections (`clients`).
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Final, cast

from reconciler.alerts.sinks.base import AlertSink, SinkSetup

TABLE: Final[Mapping[str, tuple[str, str]]] = {
    "journal": ("journal", "JournalSink"),
    "alertmanager": ("alertmanager", "AlertmanagerSink"),
    "webhook": ("webhook", "WebhookSink"),
    "kubernetes": ("kubernetes", "KubernetesSink"),
    "command": ("command", "CommandSink"),
    "file": ("file", "FileSink"),
}
"""Kind of sink -> module and class. A test holds it to the configuration's sections."""


def build(setup: SinkSetup) -> AlertSink:
    """The sink that the configuration names."""
    module, name = TABLE[setup.config.how]
    made = getattr(import_module(f"{__name__}.{module}"), name)
    return cast(AlertSink, made(setup))
