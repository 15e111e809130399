"""Which sources have been down long enough for an alert. Pure."""

from collections.abc import Iterable
from typing import final

from reconciler.alerts.alert import Alert, AlertKind, Severity
from state.model import SourceStatus

_TOLD_BY_THEMSELVES = frozenset({"store"})


@final
class SourceHealth:
    """A source that is not ok for ``down_s`` is reported once, and once more when it is ok again."""

    def __init__(self, down_s: float) -> None:
        self.down_s = down_s
        self._since: dict[str, float] = {}
        self._reported: set[str] = set()

    def check(self, statuses: Iterable[SourceStatus], now: float, wall_s: float) -> list[Alert]:
        """The alerts to send. Units: ``now`` seconds of a clock that only runs forward, ``wall_s`` since the epoch."""
        alerts: list[Alert] = []
        seen = set()
        for status in statuses:
            if status.name in _TOLD_BY_THEMSELVES:
                continue
            seen.add(status.name)
            if status.ok:
                self._since.pop(status.name, None)
                if status.name in self._reported:
                    self._reported.discard(status.name)
                    alerts.append(_alert(status.name, f"{status.name} works again", wall_s, resolved=True))
                continue
            since = self._since.setdefault(status.name, now)
            if now - since >= self.down_s and status.name not in self._reported:
                self._reported.add(status.name)
                alerts.append(_alert(status.name, f"{status.name}: {status.detail}", wall_s, resolved=False))
        alerts += [_alert(name, f"{name} is no longer used", wall_s, resolved=True) for name in self._reported - seen]
        self._reported &= seen
        self._since = {name: since for name, since in self._since.items() if name in seen}
        return alerts


def _alert(name: str, message: str, wall_s: float, *, resolved: bool) -> Alert:
    return Alert(
        kind=AlertKind.SOURCE,
        key=f"source:{name}",
        summary=message,
        severity=Severity.INFO if resolved else Severity.WARNING,
        at_s=wall_s,
        labels={"source": name},
        resolved=resolved,
    )
