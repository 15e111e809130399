"""The kubelet's read-only ``/pods`` over HTTP on loopback, and the ways in which a kubelet fails to answer.

Source: recorded answers of kubelets 1.22-1.27; ``items`` is null when there are no pods.
"""

import http.server
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any

from msgspec import Struct

Item = Mapping[str, Any]  # one pod of the list; its shape is the pod API's


class Behaviour(StrEnum):
    """How the kubelet answers."""

    GOOD = "good"
    UNAUTHORIZED = "401"
    BROKEN = "500"
    HALF = "half a body"
    EMPTY = "an empty list"
    HANGING = "hangs"


class KubeletApi:
    """Serves ``items()`` at ``/pods`` from `start` to `stop`; a later `start` opens the same port again."""

    def __init__(self, items: Callable[[], Sequence[Item]]) -> None:
        self.items = items
        self.requests = 0
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._released = threading.Event()
        self._behaviour = Behaviour.GOOD
        self._port = 0

    @property
    def port(self) -> int:
        """The loopback port: taken at the first use, answered from `start` on."""
        if not self._port:
            self._bind()
        return self._port

    @property
    def behaviour(self) -> Behaviour:
        return self._behaviour

    @behaviour.setter
    def behaviour(self, behaviour: Behaviour) -> None:
        self._released.set()
        self._released = threading.Event()
        self._behaviour = behaviour

    def start(self) -> None:
        server = self._server or self._bind()
        work = {"poll_interval": 0.02}
        self._thread = threading.Thread(target=server.serve_forever, kwargs=work, name="kubelet-pods", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the port and every open connection, as the end of the process would."""
        server, self._server = self._server, None
        thread, self._thread = self._thread, None
        self._released.set()
        if server is None:
            return
        if thread is not None:
            server.shutdown()
            thread.join()
        server.server_close()
        server.drop()

    def answer(self, path: str) -> tuple[int, bytes, int]:
        """Status, body, and the length that is announced."""
        if path.partition("?")[0].rstrip("/") != "/pods":
            status, body = 404, b"404 page not found\n"
        elif self._behaviour is Behaviour.UNAUTHORIZED:
            status, body = 401, b"Unauthorized"
        elif self._behaviour is Behaviour.BROKEN:
            status, body = 500, b"internal error"
        else:
            items = [] if self._behaviour is Behaviour.EMPTY else list(self.items())
            listing: dict[str, Any] = {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items or None}
            status, body = 200, json.dumps(listing).encode()
        length = len(body)
        return status, body[: length // 2] if self._behaviour is Behaviour.HALF else body, length

    def _bind(self) -> "_Server":
        self._server = _Server(("127.0.0.1", self._port), self._handler())
        self._port = int(self._server.server_address[1])
        return self._server

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        kubelet = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                kubelet.requests += 1
                if kubelet.behaviour is Behaviour.HANGING:
                    kubelet._released.wait(30)
                    self.close_connection = True
                    return
                status, body, length = kubelet.answer(self.path)
                self.send_response(status)
                self.send_header("Content-Type", "application/json" if status == 200 else "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(length))
                self.end_headers()
                self.wfile.write(body)
                self.close_connection = self.close_connection or length != len(body)

            def log_message(self, *_: object) -> None:
                """No test reads it."""

        return Handler


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._open: set[Any] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that closed its connection is no error."""

    def drop(self) -> None:
        """Close every connection that is still open."""
        for request in list(self._open):
            self.shutdown_request(request)


class ListedContainer(Struct, frozen=True, kw_only=True):
    """One container as the list shows it. ``id``: "" until the kubelet reports it; ``started``: RFC 3339."""

    name: str
    resources: Mapping[str, Mapping[str, str]] = {}
    command: Sequence[str] = ()
    id: str = ""
    started: str = ""
    attempt: int = 0


def stamp(moment: datetime) -> str:
    """RFC 3339 in seconds."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def pod_item(
    *,
    uid: str,
    name: str,
    namespace: str,
    qos: str,
    containers: Sequence[ListedContainer],
    init: Sequence[ListedContainer] = (),
    labels: object = None,
    annotations: object = None,
    priority_class: str = "",
    seen: datetime | None = None,
    status: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """One entry of ``items``. ``seen``: when the kubelet admitted it; ``status``: more fields of that section.

    ``labels`` and ``annotations`` are mappings, or what a test puts there instead.
    """
    times = {"creationTimestamp": stamp(seen)} if seen is not None else {}
    notes = {} if annotations is None else annotations
    if seen is not None and isinstance(notes, dict):
        admitted = seen.strftime("%Y-%m-%dT%H:%M:%S.%f000Z")
        notes = {**notes, "kubernetes.io/config.seen": admitted, "kubernetes.io/config.source": "api"}
    running = [container for container in containers if container.id]
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid,
            **times,
            "labels": {} if labels is None else labels,
            "annotations": notes,
        },
        "spec": {
            "containers": _specs(containers),
            **({"initContainers": _specs(init)} if init else {}),
            **({"priorityClassName": priority_class} if priority_class else {}),
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 2,
            "nodeName": "embedded",
            "hostNetwork": True,
        },
        "status": {
            "phase": "Running" if running else "Pending",
            **({"startTime": stamp(seen)} if seen is not None else {}),
            "containerStatuses": [_status(container) for container in running],
            "qosClass": qos,
            **(status or {}),
        },
    }


def _specs(containers: Iterable[ListedContainer]) -> list[dict[str, Any]]:
    return [
        {
            "name": container.name,
            "image": "app:1",
            **({"command": list(container.command)} if container.command else {}),
            "resources": dict(container.resources),
        }
        for container in containers
    ]


def _status(container: ListedContainer) -> dict[str, Any]:
    return {
        "name": container.name,
        "state": {"running": {"startedAt": container.started} if container.started else {}},
        "ready": True,
        "restartCount": container.attempt,
        "image": "app:1",
        "containerID": f"containerd://{container.id}",
        "started": True,
    }
