"""The kubelet's read-only ``/pods`` on loopback, with what it tells when.

Source: recorded answers of kubelets 1.22-1.27: a pod is listed as soon as it is admitted, its containers' ids 350 to
980 ms after they were made, ``items`` is null when there are no pods.
"""

import http.server
import json
import random
import threading
import time
from datetime import UTC, datetime
from typing import Any, Final

from msgspec import Struct

from tests.e2e.pods import ContainerSpec, PodSpec

ID_DELAY_S: Final = (0.350, 0.980)


class Started(Struct, frozen=True, kw_only=True):
    """One container as the list will show it. ``shown_at``: monotonic seconds from which on its id is told."""

    id: str
    attempt: int
    started: str
    shown_at: float


class _Listed:
    def __init__(self, spec: PodSpec) -> None:
        self.spec = spec
        self.seen = datetime.now(UTC)
        self.containers: dict[str, Started] = {}


class PodServer:
    """Serves what `admit`, `started` and `removed` have told. Listening from the start; answers after `start`."""

    def __init__(self) -> None:
        self._pods: dict[str, _Listed] = {}
        self._lock = threading.Lock()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="kubelet-pods", daemon=True)
        self.requests = 0

    @property
    def port(self) -> int:
        """The loopback port."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def admit(self, pod: PodSpec) -> None:
        """The pod is in the list from now on."""
        with self._lock:
            self._pods[pod.uid] = _Listed(pod)

    def started(self, pod: PodSpec, container: str, container_id: str, *, attempt: int = 0) -> None:
        """A container runs; its id is told a while later."""
        found = Started(
            id=container_id,
            attempt=attempt,
            started=_stamp(datetime.now(UTC)),
            shown_at=time.monotonic() + random.uniform(*ID_DELAY_S),
        )
        with self._lock:
            if pod.uid in self._pods:
                self._pods[pod.uid].containers[container] = found

    def removed(self, pod: PodSpec) -> None:
        """The pod has left the list."""
        with self._lock:
            self._pods.pop(pod.uid, None)

    def listing(self, now: float) -> dict[str, Any]:
        """The answer at one moment of the monotonic clock."""
        with self._lock:
            items = [_pod(one, now) for one in self._pods.values()]
        return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items or None}

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.requests += 1
                known = self.path.partition("?")[0].rstrip("/") == "/pods"
                body = json.dumps(server.listing(time.monotonic())).encode() if known else b"404 page not found\n"
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", "application/json" if known else "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nobody reads it."""

        return Handler


def _stamp(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _pod(listed: _Listed, now: float) -> dict[str, Any]:
    spec = listed.spec
    shown = {name: one for name, one in listed.containers.items() if one.shown_at <= now}
    return {
        "metadata": {
            "name": spec.name,
            "namespace": spec.namespace,
            "uid": spec.uid,
            "creationTimestamp": _stamp(listed.seen),
            "labels": spec.labels,
            "annotations": {
                **spec.annotations,
                "kubernetes.io/config.seen": listed.seen.strftime("%Y-%m-%dT%H:%M:%S.%f000Z"),
                "kubernetes.io/config.source": "api",
            },
        },
        "spec": {
            "containers": [_container(one) for one in spec.containers],
            **({"initContainers": [_container(one) for one in spec.init]} if spec.init else {}),
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 2,
            "nodeName": "embedded",
            "hostNetwork": True,
        },
        "status": {
            "phase": "Running" if shown else "Pending",
            "startTime": _stamp(listed.seen),
            "containerStatuses": [_status(name, one) for name, one in shown.items()],
            "qosClass": spec.qos,
        },
    }


def _container(spec: ContainerSpec) -> dict[str, Any]:
    batch = {"kubernetes.io/batch-memory": str(spec.batch_memory)} if spec.batch_memory else {}
    requests = _amounts(spec.cpu_request, spec.memory_request) | batch
    limits = _amounts(spec.cpu_limit, spec.memory_limit) | batch
    resources = {name: values for name, values in (("requests", requests), ("limits", limits)) if values}
    return {"name": spec.name, "image": "app:1", "command": list(spec.run), "resources": resources}


def _amounts(milli: int, memory: int) -> dict[str, str]:
    found = {"cpu": f"{milli}m"} if milli else {}
    return found | ({"memory": str(memory)} if memory else {})


def _status(name: str, started: Started) -> dict[str, Any]:
    return {
        "name": name,
        "state": {"running": {"startedAt": started.started}},
        "ready": True,
        "restartCount": started.attempt,
        "image": "app:1",
        "containerID": f"containerd://{started.id}",
        "started": True,
    }
