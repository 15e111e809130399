"""Turns the text messages of the agent's parts into alerts, with kinds of their own."""

import time
from collections.abc import Mapping
from typing import Final

from reconciler.alerts.alert import Alert, AlertKind, Severity
from reconciler.runtime.supervisor import ComponentHealth, ComponentStatus
from state.model import Pod, Setting

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


def component_alert(status: ComponentStatus) -> Alert:
    """A part of the daemon that failed and is started again; or runs again."""
    well = status.health is ComponentHealth.RUNNING
    message = (
        f"component {status.name} is running again"
        if well
        else f"component {status.name} failed, restarting: {status.error}"
    )
    return Alert(
        kind=AlertKind.SOURCE,
        key=f"component:{status.name}",
        summary=message,
        severity=Severity.INFO if well else Severity.WARNING,
        at_s=time.time(),
        labels={"component": status.name},
        resolved=well,
    )
