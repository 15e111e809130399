"""The agent's own alerts: messages of its parts, and sources or claims on CPUs that fail for long."""

import time
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, final

from reconciler.alerts.alert import Alert, AlertKind, Severity
from reconciler.placement.claims import PLACEMENT, CpuClaim
from reconciler.runtime.supervisor import ComponentHealth, ComponentStatus
from state.model import Pod, Setting, SourceStatus

STORE_IS_WELL: Final = "the store is writable again"
"""What ends an alert about the store."""

_KINDS: Final[Mapping[str, tuple[AlertKind, Severity]]] = {
    "store": (AlertKind.STORE, Severity.CRITICAL),
    "yield": (AlertKind.TUG_OF_WAR, Severity.WARNING),
    "hold": (AlertKind.OTHER, Severity.INFO),
    "hotplug": (AlertKind.OTHER, Severity.INFO),
}


def as_alert(kind: str, message: str, setting: Setting | None, pods: Mapping[str, Pod]) -> Alert:
    """One alert; of a kind that is not in the table it is `AlertKind.OTHER`, a warning."""
    alert_kind, severity = _KINDS.get(kind, (AlertKind.OTHER, Severity.WARNING))
    resolved = kind == "store" and message == STORE_IS_WELL
    labels = {"cause": kind}
    details: dict[str, str] = {}
    # Alerts without a file are identified by their text; the store is a single object.
    key = kind if kind == "store" else f"{kind}:{message}"
    if setting is not None:
        key = f"{kind}:{setting.path}:{setting.knob}"
        labels["knob"] = setting.knob
        details = {"path": setting.path, "policy": setting.policy, "reason": setting.reason}
        pod = pods.get(setting.pod_uid or "")
        if setting.pod_uid:
            labels["uid"] = setting.pod_uid
        if pod is not None and pod.namespace and pod.name:
            labels |= {"namespace": pod.namespace, "pod": pod.name}
    return Alert(
        kind=alert_kind,
        key=key,
        summary=message,
        severity=Severity.INFO if resolved else severity,
        at_s=time.time(),
        labels=labels,
        details=details,
        resolved=resolved,
    )


def source_alert(
    key: str,
    message: str,
    labels: Mapping[str, str],
    at_s: float,
    *,
    well: bool,
    details: Mapping[str, str] = MappingProxyType({}),
) -> Alert:
    """Something that bypassd needs does not work, or is ``well`` again."""
    return Alert(
        kind=AlertKind.SOURCE,
        key=key,
        summary=message,
        severity=Severity.INFO if well else Severity.WARNING,
        at_s=at_s,
        labels=labels,
        details=details,
        resolved=well,
    )


def component_alert(status: ComponentStatus) -> Alert:
    """A part of the daemon that failed and is started again; or runs again."""
    well = status.health is ComponentHealth.RUNNING
    message = (
        f"component {status.name} is running again"
        if well
        else f"component {status.name} failed, restarting: {status.error}"
    )
    return source_alert(f"component:{status.name}", message, {"component": status.name}, time.time(), well=well)


# The store reports itself; of the placement each claim is watched by itself.
_REPORTED_ELSEWHERE: Final = frozenset({"store", PLACEMENT})


RUNBOOKS: Final = "docs/runbooks.md"
_OF_ITS_OWN: Final = frozenset(
    {
        *("bounds of pods", "cgroup controllers", "cgroup driver", "limits and CPU sets", "placement"),
        *("pods in gVisor or kata", "values of an earlier run"),
        *("alert sinks", "marks of pods", "own CPU group", "own priority", "pod list", "reconcile pass"),
        *("recorded originals", "single objects", "state files", "unreadable files"),
    }
)
"""Conditions, each with a part of its name in the runbooks."""


def runbook(name: str) -> str:
    """The part of the runbooks about a source or a condition."""
    if name.startswith("actuator "):
        return f"{RUNBOOKS}#actuators"
    if name == "api token":
        return f"{RUNBOOKS}#bypassdtokenexpires"
    part = name.lower().replace(" ", "-") if name in _OF_ITS_OWN else "bypassdsourcedown"
    return f"{RUNBOOKS}#{part}"


class WatchedState(NamedTuple):
    """One thing that may be down, at one moment. ``labels`` of its alert; the messages are for people."""

    name: str
    ok: bool
    down: str
    well: str
    labels: Mapping[str, str]


def source_states(statuses: Iterable[SourceStatus]) -> Iterator[WatchedState]:
    """The sources that do not report themselves."""
    for status in statuses:
        if status.name not in _REPORTED_ELSEWHERE:
            down, well = f"{status.name}: {status.detail}", f"{status.name} works again"
            yield WatchedState(status.name, status.ok, down, well, {"source": status.name})


def claim_states(claims: Iterable[CpuClaim], pods: Mapping[str, Pod]) -> Iterator[WatchedState]:
    """Every claim on CPUs; the claim of one pod has that pod's labels."""
    for claim in claims:
        labels = {"source": PLACEMENT, "claim": claim.owner}
        pod = pods.get(claim.pods[0]) if len(claim.pods) == 1 else None
        if pod is not None:
            labels["uid"] = pod.uid
            if pod.namespace and pod.name:
                labels |= {"namespace": pod.namespace, "pod": pod.name}
        name, well = f"{PLACEMENT}:{claim.owner}", f"{PLACEMENT}: {claim.owner} has what it requests"
        yield WatchedState(name, not claim.cut, f"{PLACEMENT}: {claim.message}", well, labels)


@final
class SourceHealth:
    """What is not ok for ``down_s`` is reported once, and again when it is ok again."""

    def __init__(self, down_s: float) -> None:
        self.down_s = down_s
        self._since: dict[str, float] = {}
        self._reported: dict[str, WatchedState] = {}

    def check(self, states: Iterable[WatchedState], now: float, wall_s: float) -> list[Alert]:
        """The alerts to send. Units: ``now`` seconds of a clock that only runs forward, ``wall_s`` since the epoch."""
        alerts: list[Alert] = []
        seen = set()
        for state in states:
            seen.add(state.name)
            if state.ok:
                self._since.pop(state.name, None)
                if (told := self._reported.pop(state.name, None)) is not None:
                    alerts.append(_alert(told, state.well, wall_s, resolved=True))
                continue
            since = self._since.setdefault(state.name, now)
            if now - since >= self.down_s and state.name not in self._reported:
                self._reported[state.name] = state
                alerts.append(_alert(state, state.down, wall_s, resolved=False))
        for name in self._reported.keys() - seen:
            told = self._reported.pop(name)
            alerts.append(_alert(told, f"{name} is no longer used", wall_s, resolved=True))
        self._since = {name: since for name, since in self._since.items() if name in seen}
        return alerts


def _alert(state: WatchedState, message: str, wall_s: float, *, resolved: bool) -> Alert:
    details = {"runbook": runbook(state.labels["source"])}
    return source_alert(f"source:{state.name}", message, state.labels, wall_s, well=resolved, details=details)
