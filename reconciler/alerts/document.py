"""Alerts as JSON: what webhooks, commands and files get. Its keys are added to, never renamed, within one version."""

from collections.abc import Sequence
from typing import Final

import msgspec

from reconciler.alerts.incident import Incident
from state.printable import printable_json

VERSION: Final = 1


def entry(notice: Incident) -> dict[str, object]:
    """One alert. Times are seconds since the epoch."""
    alert = notice.alert
    return {
        "id": notice.id,
        "kind": alert.kind.value,
        "key": alert.key,
        "status": notice.status,
        "severity": alert.severity.value,
        "summary": alert.summary,
        "labels": {**alert.labels, **notice.labels},
        "details": dict(alert.details),
        "count": notice.count,
        "first_s": notice.first_s,
        "last_s": notice.last_s,
    }


def document(notices: Sequence[Incident], node: str) -> bytes:
    """All alerts of one delivery."""
    return _encode({"version": VERSION, "node": node, "alerts": [entry(notice) for notice in notices]})


def lines(notices: Sequence[Incident], node: str) -> bytes:
    """One JSON object a line."""
    rows = ({"version": VERSION, "node": node, **entry(notice)} for notice in notices)
    return b"".join(_encode(row) + b"\n" for row in rows)


def _encode(value: object) -> bytes:
    # A stored alert may be of a version that did not tidy it so.
    return printable_json(msgspec.json.encode(value).decode()).encode()


def line(notice: Incident) -> str:
    """One alert as one line for a person."""
    alert = notice.alert
    over = "resolved: " if notice.has_ended else ""
    count = f" ({notice.count} times)" if notice.count > 1 else ""
    return f"{alert.severity.value}: {over}{' '.join(alert.summary.split())}{count}"
