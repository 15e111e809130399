"""One thing worth telling: its kind, whom it is about, and what makes two of them the same."""

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct


class Severity(StrEnum):
    """How loud, in the words of Prometheus' alert rules."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class Kind(StrEnum):
    """What happened."""

    INTERFERENCE = "interference"
    CLEARED = "interference-cleared"
    RESPONSE = "response"
    UNDONE = "response-undone"
    EVICTION_PLANNED = "eviction-planned"
    EVICTION_DONE = "eviction-done"
    EVICTION_REFUSED = "eviction-refused"
    EVICTION_FAILED = "eviction-failed"
    TUG_OF_WAR = "tug-of-war"
    STORE = "store"
    SOURCE = "source"
    OTHER = "other"
    TEST = "test"


class Alert(Struct, frozen=True, kw_only=True):
    """One of them. ``key``: alerts of one kind and key are one and the same thing, told again or over (``resolved``).

    ``at_s``: seconds since the epoch. ``labels`` tell them apart for routing (pod, namespace, rule, cause), ``details``
    are for reading. ``durable``: must be told even if the daemon dies now. Neither holds a secret.
    """

    kind: Kind
    key: str
    summary: str
    severity: Severity = Severity.WARNING
    at_s: float = 0.0
    labels: Mapping[str, str] = {}
    details: Mapping[str, str] = {}
    resolved: bool = False
    durable: bool = False
