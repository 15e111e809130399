"""An alert: its kind, its subject, and the identity by which two alerts are the same."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct


class Severity(StrEnum):
    """The severities of Prometheus' alert rules."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """Larger is more severe."""
        return list(Severity).index(self)


class AlertKind(StrEnum):
    INTERFERENCE = "interference"
    CLEARED = "interference-cleared"
    RESPONSE = "response"
    UNDONE = "response-undone"
    EXHAUSTED = "response-exhausted"
    CLOSED = "node-closed"
    OPENED = "node-opened"
    EVICTION_PLANNED = "eviction-planned"
    EVICTION_UNGUARDED = "eviction-unguarded"
    EVICTION_DONE = "eviction-done"
    EVICTION_REFUSED = "eviction-refused"
    EVICTION_FAILED = "eviction-failed"
    TUG_OF_WAR = "tug-of-war"
    STORE = "store"
    SOURCE = "source"
    OTHER = "other"
    TEST = "test"

    @property
    def began(self) -> "AlertKind":
        """The kind of which this is the end; its own for a kind that begins something."""
        return _BEGAN.get(self, self)

    @property
    def lasts(self) -> bool:
        """True for a state, which lasts until its end is reported; false for an event."""
        return self.began in _STATES

    @property
    def camel(self) -> str:
        """As Kubernetes and Alertmanager write names: ``EvictionDone``."""
        return "".join(word.capitalize() for word in self.value.split("-"))


_BEGAN: Final[Mapping[AlertKind, AlertKind]] = {
    AlertKind.CLEARED: AlertKind.INTERFERENCE,
    AlertKind.UNDONE: AlertKind.RESPONSE,
    AlertKind.OPENED: AlertKind.CLOSED,
}
_STATES: Final = frozenset(
    {AlertKind.INTERFERENCE, AlertKind.RESPONSE, AlertKind.CLOSED, AlertKind.STORE, AlertKind.SOURCE}
)


class Alert(Struct, frozen=True, kw_only=True):
    """An alert. ``key``: alerts of one kind and key are the same incident, repeated or over (``resolved``).

    ``at_s``: seconds since the epoch. ``labels`` are for routing (pod, namespace, rule, cause), ``details`` are for
    reading; neither contains a secret. ``durable``: once stored (`AlertDispatcher.stage`) it must be delivered even if
    the daemon crashes then. The labels ``namespace``, ``pod`` and ``uid`` name the pod that it is about. A kind that
    ends another (`AlertKind.began`) with the same key is the end of that one.
    """

    kind: AlertKind
    key: str
    summary: str
    severity: Severity = Severity.WARNING
    at_s: float = 0.0
    labels: Mapping[str, str] = {}
    details: Mapping[str, str] = {}
    resolved: bool = False
    durable: bool = False

    @property
    def has_ended(self) -> bool:
        return self.resolved or self.kind.began is not self.kind
