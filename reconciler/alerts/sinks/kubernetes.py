"""Kubernetes Events: on the pod that an alert is about, else on the node. One Event an incident, counted up by patches.

An end is an Event of its own. Source: Kubernetes API reference, Event core/v1 and events.k8s.io/v1.
"""

import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final, final

from msgspec import Meta, Struct

from cgroupfs.errors import SourceError
from reconciler.alerts.alert import Severity
from reconciler.alerts.incident import Incident, stamp
from reconciler.alerts.sinks.base import AlertSink, SinkError, SinkKind, SinkSetup

if TYPE_CHECKING:
    from reconciler.clients.http import HttpResponse

_COMPONENT: Final = "bypassd"
_OF_NODES: Final = "default"
"""The only namespace in which the API takes an Event on an object without one (validation of core/v1 Events)."""
_PATCH: Final = "application/merge-patch+json"
_LONGEST_NAME: Final = 253
_LONGEST_NOTE: Final = 1024
"""Bytes: a longer one, and of the instance a longer name, is refused for good in events.k8s.io/v1."""
_LONGEST_INSTANCE: Final = 128


class EventApi(StrEnum):
    CORE = "v1"
    EVENTS = "events.k8s.io/v1"


class KubernetesSinkConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Kubernetes Events on the pod that an alert is about, else on the node."""

    api: Annotated[EventApi, Meta(description="API group of the Events")] = EventApi.CORE


@final
class KubernetesSink(AlertSink):
    """`AlertSink`."""

    def __init__(self, setup: SinkSetup) -> None:
        config = setup.config.section(KubernetesSinkConfig)
        from reconciler.clients.kube import KubeApi  # see `SinkKind.modules`

        self._config = config
        self._node = setup.node
        self._timeout_s = setup.config.timeout_s
        self._api = KubeApi(setup.apiserver, root=setup.root, kubelets=setup.kubelets)
        # One request each: after an error all notices of a `send` are sent again, those before it as well.
        self.most: int | None = 1

    async def send(self, notices: Sequence[Incident]) -> None:
        """Make the Event, or count it up. Errors: `SinkError`."""
        for notice in notices:
            await self._send(notice)

    async def aclose(self) -> None:
        await self._api.aclose()

    async def _send(self, notice: Incident) -> None:
        from urllib.parse import quote  # not needed to read a configuration: 4 ms

        namespace = self._about(notice).get("namespace") or _OF_NODES
        group = "/api/v1" if self._config.api is EventApi.CORE else f"/apis/{EventApi.EVENTS.value}"
        events = f"{group}/namespaces/{quote(namespace, safe='')}/events"
        name = quote(self._name(notice), safe="")
        if notice.count > 1:
            answer = await self._ask("PATCH", f"{events}/{name}", self.change(notice))
            if answer.status != 404:  # 404: it has expired, or was never made
                self._check(answer, "PATCH", events)
                return
        answer = await self._ask("POST", events, self.event(notice, namespace))
        if answer.status == 409:
            # The name is the incident's id: an earlier try has made it, and its answer was lost.
            answer = await self._ask("PATCH", f"{events}/{name}", self.change(notice))
        self._check(answer, "POST", events)

    async def _ask(self, method: str, path: str, body: object) -> "HttpResponse":
        content_type = _PATCH if method == "PATCH" else "application/json"
        try:
            return await self._api.request(method, path, body, timeout_s=self._timeout_s, content_type=content_type)
        except SourceError as exc:
            raise SinkError(str(exc)) from exc

    @staticmethod
    def _check(answer: "HttpResponse", method: str, path: str) -> None:
        from reconciler.alerts.sinks.http import check
        from reconciler.clients.kube import status_of, wait_s_of, words_of

        status = status_of(answer)
        if answer.status == 404 or (answer.status == 403 and status.has_cause("NamespaceTerminating")):
            raise SinkError(f"{method} {path}: the namespace does not exist", permanent=True)
        wait_s = wait_s_of(answer, status, time.time())
        if not answer.ok and wait_s is not None and "retry-after" not in answer.headers:
            said = words_of(answer, status)
            raise SinkError(f"{method} {path}: HTTP {answer.status} {said}", retry_after_s=wait_s)
        check(answer, f"{method} {path}")

    # The objects

    def event(self, notice: Incident, namespace: str) -> Mapping[str, object]:
        alert = notice.alert
        about = {**self._about(notice), "apiVersion": "v1"}
        reason = (
            f"{alert.kind.camel}Resolved" if alert.resolved and alert.kind.began is alert.kind else alert.kind.camel
        )
        common = {
            "apiVersion": self._config.api.value,
            "kind": "Event",
            "metadata": {"name": self._name(notice), "namespace": namespace},
            "reason": reason,
            "type": "Normal" if notice.has_ended or alert.severity is Severity.INFO else "Warning",
            "reportingInstance": self._node[:_LONGEST_INSTANCE],
        }
        message = _note(alert.summary)
        if self._config.api is EventApi.EVENTS:
            return {
                **common,
                "regarding": about,
                "note": message,
                "action": reason,
                "eventTime": _micro(notice.first_s),
                "reportingController": _COMPONENT,
                **(self.change(notice) if notice.count > 1 else {}),
            }
        return {
            **common,
            "involvedObject": about,
            "message": message,
            "count": notice.count,
            "firstTimestamp": _whole(notice.first_s),
            "lastTimestamp": _whole(notice.last_s),
            "source": {"component": _COMPONENT, "host": self._node},
            "reportingComponent": _COMPONENT,
        }

    def change(self, notice: Incident) -> Mapping[str, object]:
        if self._config.api is EventApi.EVENTS:
            # The only field that may change there.
            return {"series": {"count": max(2, notice.count), "lastObservedTime": _micro(notice.last_s)}}
        return {"count": notice.count, "lastTimestamp": _whole(notice.last_s), "message": _note(notice.alert.summary)}

    def _about(self, notice: Incident) -> dict[str, str]:
        labels = {**notice.alert.labels, **notice.labels}
        if labels.get("pod") and labels.get("namespace"):
            about = {"kind": "Pod", "namespace": labels["namespace"], "name": labels["pod"]}
            return {**about, "uid": labels["uid"]} if labels.get("uid") else about
        # The kubelet's Events on its node use the name as uid, and `kubectl describe node` selects by it.
        return {"kind": "Node", "name": self._node, "uid": self._node}

    def _name(self, notice: Incident) -> str:
        tail = f".{notice.id}{'-over' if notice.has_ended else ''}"
        # A part of a DNS name does not end in a dash, wherever the pod's name was cut.
        return self._about(notice)["name"][: _LONGEST_NAME - len(tail)].rstrip(".-") + tail


def _note(text: str) -> str:
    content = text.encode(errors="replace")
    if len(content) <= _LONGEST_NOTE:
        return text
    return f"{content[: _LONGEST_NOTE - len('…'.encode())].decode(errors='ignore')}…"


def _whole(at_s: float) -> str:
    return f"{stamp(at_s)[:19]}Z"


def _micro(at_s: float) -> str:
    return f"{stamp(at_s)[:-1]}000Z"


SINK: Final = SinkKind(
    name="kubernetes",
    config_type=KubernetesSinkConfig,
    build=KubernetesSink,
    modules=("reconciler.alerts.sinks.http", "reconciler.clients.kube"),
)
