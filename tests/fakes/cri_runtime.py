"""A container runtime's CRI endpoint on a unix socket: recorded answers, and the filters a real runtime has."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf import json_format

from reconciler.sources.criapi import cri_pb2

FIXTURES = Path(__file__).parents[1] / "fixtures/meta"
_HANG_S = 120.0


def _recorded(name: str, message: Any) -> Any:  # a protobuf message of any type
    return json_format.Parse((FIXTURES / f"cri-{name}.json").read_text(), message, ignore_unknown_fields=True)


def _selected(item: Any, wanted: Mapping[str, str]) -> bool:
    return all(item.labels.get(key) == value for key, value in wanted.items())


class FakeRuntime:
    """Serves ``apis`` (``v1``, ``v1alpha2``) on ``socket``. ``asked``: every method called, with its API version.

    ``on_stop`` is called (in a thread of the server's) with what is to be stopped and its grace, -1 for a sandbox.
    """

    def __init__(self, socket: Path, apis: tuple[str, ...] = ("v1",)) -> None:
        self.socket = socket
        self.apis = apis
        self.asked: list[str] = []
        self.answers = threading.Event()
        """While it is not set all calls hang."""
        self.answers.set()
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.on_stop: Callable[[str, int], None] = lambda _id, _grace: None
        self.sandboxes = list(_recorded("ListPodSandbox", cri_pb2.ListPodSandboxResponse()).items)
        self.containers = list(_recorded("ListContainers", cri_pb2.ListContainersResponse()).containers)

    def __enter__(self) -> Self:
        self._server = grpc.server(ThreadPoolExecutor(8))  # questions that hang leave room for others
        handlers: dict[str, tuple[Any, Any]] = {
            "Version": (self._version, cri_pb2.VersionRequest),
            "Status": (lambda _: _recorded("Status", cri_pb2.StatusResponse()), cri_pb2.StatusRequest),
            "ListPodSandbox": (self._list_sandboxes, cri_pb2.ListPodSandboxRequest),
            "ListContainers": (self._list_containers, cri_pb2.ListContainersRequest),
            "StopContainer": (self._stop_container, cri_pb2.StopContainerRequest),
            "StopPodSandbox": (self._stop_sandbox, cri_pb2.StopPodSandboxRequest),
        }
        for api in self.apis:
            methods = {
                name: grpc.unary_unary_rpc_method_handler(
                    self._answering(f"{api} {name}", answer),
                    request_deserializer=request.FromString,
                    response_serializer=lambda message: message.SerializeToString(),
                )
                for name, (answer, request) in handlers.items()
            }
            service = grpc.method_handlers_generic_handler(f"runtime.{api}.RuntimeService", methods)
            self._server.add_generic_rpc_handlers((service,))
        self._server.add_insecure_port(f"unix://{self.socket}")
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.answers.set()
        self._server.stop(0).wait()

    def _answering(self, name: str, answer: Any) -> Any:  # gRPC's handlers are untyped
        def handle(request: Any, context: Any) -> Any:
            self.asked.append(name)
            self.answers.wait(_HANG_S)
            if self.refusal is not None:
                context.abort(*self.refusal)
            try:
                return answer(request)
            except KeyError as exc:
                context.abort(grpc.StatusCode.NOT_FOUND, f"no such container: {exc}")

        return handle

    def _version(self, request: Any) -> Any:
        assert request.version == "0.1.0"
        return _recorded("Version", cri_pb2.VersionResponse())

    def _list_sandboxes(self, request: Any) -> Any:
        wanted = request.filter
        items = [
            sandbox
            for sandbox in self.sandboxes
            if (not wanted.id or sandbox.id == wanted.id) and _selected(sandbox, wanted.label_selector)
        ]
        return cri_pb2.ListPodSandboxResponse(items=items)

    def _list_containers(self, request: Any) -> Any:
        wanted = request.filter
        containers = [
            container
            for container in self.containers
            if (not wanted.id or container.id == wanted.id)
            and (not wanted.pod_sandbox_id or container.pod_sandbox_id == wanted.pod_sandbox_id)
            and _selected(container, wanted.label_selector)
        ]
        return cri_pb2.ListContainersResponse(containers=containers)

    def _stop_container(self, request: Any) -> Any:
        container = next((entry for entry in self.containers if entry.id == request.container_id), None)
        if container is None:
            raise KeyError(request.container_id)
        self.on_stop(request.container_id, request.timeout)
        _stop(container)
        return cri_pb2.StopContainerResponse()

    def _stop_sandbox(self, request: Any) -> Any:
        # As containerd: one that is gone is as good as stopped.
        for sandbox in self.sandboxes:
            if sandbox.id == request.pod_sandbox_id:
                self.on_stop(sandbox.id, -1)
                sandbox.state = cri_pb2.SANDBOX_NOTREADY
        for container in self.containers:
            if container.pod_sandbox_id == request.pod_sandbox_id:
                _stop(container)
        return cri_pb2.StopPodSandboxResponse()


def _stop(container: Any) -> None:
    """As containerd: nothing happens to a container that is created, even while it is being started."""
    if container.state != cri_pb2.CONTAINER_CREATED:
        container.state = cri_pb2.CONTAINER_EXITED
