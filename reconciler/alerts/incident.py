"""What sinks get: an alert with the id, count and times of the incident that it belongs to.

All alerts of one kind and key, from the first to the end, are one incident. As JSON it is what webhooks, commands and
files get.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Final, final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from reconciler.alerts.alert import Alert, AlertKind, Severity
from state.printable import printable, printable_json, printable_lines

MOST: Final = 4096
"""Incidents remembered; the incident without an alert for longest is dropped first."""
_LONGEST_NAME: Final = 1024
_LONGEST_SUMMARY: Final = 4096
_LONGEST_DETAIL: Final = 65536


class Incident(Struct, frozen=True, kw_only=True):
    """One incident now. ``alert`` is the newest one, ``labels`` are of the first: they identify it.

    ``began_as``: the first alert's severity, which identifies a state as well: its end has a lower one, and is the same
    alert. ``count``: alerts since it began. ``first_s``, ``last_s``: seconds since the epoch. ``besides``: the sink
    that never gets it, because it is about that sink.
    """

    id: str
    alert: Alert
    first_s: float
    last_s: float
    count: int = 1
    labels: Mapping[str, str] = {}
    besides: str = ""
    began_as: Severity = Severity.WARNING

    @property
    def has_ended(self) -> bool:
        return self.alert.has_ended

    @property
    def status(self) -> str:
        """In the words of Alertmanager's webhooks: ``firing`` or ``resolved``."""
        return "resolved" if self.has_ended else "firing"


def sanitize(alert: Alert) -> Alert:
    """The alert with texts that every sink can write, of bounded length and safe to print at any destination."""
    # Texts may be from a process, a pod or the name of a file; a sink may be a terminal, a log or a chat.
    return replace(
        alert,
        key=_line(alert.key),
        summary=_lines(alert.summary, _LONGEST_SUMMARY),
        labels={_line(name): _line(text) for name, text in alert.labels.items()},
        details={_line(name): _lines(text, _LONGEST_DETAIL) for name, text in alert.details.items()},
    )


def _line(text: str) -> str:
    return _bounded(printable(text[:_LONGEST_NAME]), text, _LONGEST_NAME)


def _lines(text: str, longest: int) -> str:
    return _bounded(printable_lines(text[:longest]), text, longest)


def _bounded(shown: str, whole: str, longest: int) -> str:
    # An escape counts with its own length, which is longer than its character: receivers have bounds of their own.
    return shown if len(whole) <= longest and len(shown) <= longest else f"{shown[: longest - 1]}…"


def incident_id(kind: AlertKind, key: str, first_s: float) -> str:
    """Fingerprint of kind and key, and the first time in milliseconds; both hexadecimal."""
    # Not random: a daemon that crashed before it recorded a delivery makes the same id again, and receivers can drop a
    # duplicate.
    fingerprint = hashlib.blake2b(f"{kind.began.value}\0{key}".encode(), digest_size=8).hexdigest()
    return f"{fingerprint}-{max(0, round(first_s * 1000)):x}"


def stamp(at_s: float) -> str:
    """RFC 3339 in UTC with milliseconds, as every sink writes times."""
    whole_s, milli = divmod(round(at_s * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole_s))}.{milli:03d}Z"


@final
class Incidents:
    """Groups alerts into incidents. An event without an alert for ``forget_s`` is another incident next time."""

    def __init__(self, forget_s: float, most: int = MOST) -> None:
        self.forget_s = forget_s
        self._most = most
        self._known: dict[tuple[AlertKind, str], Incident] = {}

    def __len__(self) -> int:
        return len(self._known)

    def take(self, alert: Alert, besides: str = "") -> Incident:
        """The incident with this alert added. The very same alert again changes nothing."""
        name = (alert.kind.began, alert.key)
        known = self._known.pop(name, None)
        if known is not None and known.alert == alert:
            self._known[name] = known
            return known
        if known is not None and self._goes_on(known, alert):
            notice = replace(known, alert=alert, count=known.count + 1, last_s=max(known.last_s, alert.at_s))
        else:
            made = incident_id(alert.kind, alert.key, alert.at_s)
            if known is not None and made == known.id:
                # It ended and began again within a millisecond: still another one.
                made = incident_id(alert.kind, alert.key, known.last_s + 0.001)
            notice = Incident(
                id=made,
                alert=alert,
                first_s=alert.at_s,
                last_s=alert.at_s,
                labels=dict(alert.labels),
                besides=besides,
                began_as=alert.severity,
            )
        # At the end of the order again: the first is the incident without an alert for longest.
        self._known[name] = notice
        if len(self._known) > self._most:
            del self._known[next(iter(self._known))]
        return notice

    def resume(self, notice: Incident) -> None:
        """Take over an incident of an earlier run, so that later alerts use its id."""
        self._known.setdefault((notice.alert.kind.began, notice.alert.key), notice)

    def _goes_on(self, known: Incident, alert: Alert) -> bool:
        if known.has_ended:
            # A repeated end is not a new incident; a beginning is.
            return alert.has_ended and alert.at_s - known.last_s < self.forget_s
        return alert.has_ended or alert.kind.lasts or alert.at_s - known.last_s < self.forget_s


VERSION: Final = 1
"""Within one version keys are added, never renamed."""


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
    return _encode({"version": VERSION, "node": node, "alerts": [entry(notice) for notice in notices]})


def lines(notices: Sequence[Incident], node: str) -> bytes:
    rows = ({"version": VERSION, "node": node, **entry(notice)} for notice in notices)
    return b"".join(_encode(row) + b"\n" for row in rows)


def _encode(value: object) -> bytes:
    # A stored alert may be of a version that did not sanitize it.
    return printable_json(msgspec.json.encode(value).decode()).encode()


def line(notice: Incident) -> str:
    alert = notice.alert
    over = "resolved: " if notice.has_ended else ""
    count = f" ({notice.count} times)" if notice.count > 1 else ""
    return f"{alert.severity.value}: {over}{' '.join(alert.summary.split())}{count}"
