"""The container runtime interface as a kubelet uses it: one typed method per call, over the runtime's unix socket."""

import time
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message

from tests.e2e.criapi import runtime_pb2 as pb

Answer = TypeVar("Answer", bound=Message)

_RUNTIME: Final = "/runtime.v1.RuntimeService"
_IMAGE: Final = "/runtime.v1.ImageService"
_PASSING: Final = ("still running", "ttrpc: closed")
"""What containerd 1.6 answers between the end of a pod's last process and its own notice of that end."""


class CriError(Exception):
    """The runtime refused a call; the text is its own message."""

    def __init__(self, call: str, code: str, message: str) -> None:
        super().__init__(f"{call}: {code}: {message}")
        self.code = code
        self.message = message


class Cri:
    """A blocking client; calls may be made from several threads at once."""

    def __init__(self, socket: str, *, timeout_s: float = 60.0) -> None:
        self._channel = grpc.insecure_channel(f"unix:{socket}")
        self._timeout_s = timeout_s

    def close(self) -> None:
        self._channel.close()

    def _call(self, service: str, name: str, request: Message, answer: type[Answer]) -> Answer:
        # grpc's stubs are untyped: the result is what the deserializer makes.
        method: Any = self._channel.unary_unary(
            f"{service}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        try:
            result: Answer = method(request, timeout=self._timeout_s)
        except grpc.RpcError as exc:
            raise CriError(name, exc.code().name, exc.details() or "") from exc
        return result

    def _settled(self, service: str, name: str, request: Message, answer: type[Answer]) -> Answer:
        """A call that ends or removes, repeated for ten seconds while containerd has not noticed the processes' end.

        A shim exits with its pod's last container, and a call that is on its way to it fails. A kubelet repeats it with
        its next sync of the pod.
        """
        until = time.monotonic() + 60
        while True:
            try:
                return self._call(service, name, request, answer)
            except CriError as exc:
                if not any(text in exc.message for text in _PASSING) or time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def version(self) -> pb.VersionResponse:
        return self._call(_RUNTIME, "Version", pb.VersionRequest(), pb.VersionResponse)

    def has_image(self, image: str) -> bool:
        request = pb.ImageStatusRequest(image=pb.ImageSpec(image=image))
        return bool(self._call(_IMAGE, "ImageStatus", request, pb.ImageStatusResponse).image.id)

    def run_sandbox(self, config: pb.PodSandboxConfig, handler: str = "") -> str:
        request = pb.RunPodSandboxRequest(config=config, runtime_handler=handler)
        return self._call(_RUNTIME, "RunPodSandbox", request, pb.RunPodSandboxResponse).pod_sandbox_id

    def stop_sandbox(self, sandbox: str) -> None:
        request = pb.StopPodSandboxRequest(pod_sandbox_id=sandbox)
        self._settled(_RUNTIME, "StopPodSandbox", request, pb.StopPodSandboxResponse)

    def remove_sandbox(self, sandbox: str) -> None:
        request = pb.RemovePodSandboxRequest(pod_sandbox_id=sandbox)
        self._settled(_RUNTIME, "RemovePodSandbox", request, pb.RemovePodSandboxResponse)

    def list_sandboxes(self) -> list[pb.PodSandbox]:
        answer = self._call(_RUNTIME, "ListPodSandbox", pb.ListPodSandboxRequest(), pb.ListPodSandboxResponse)
        return list(answer.items)

    def create_container(self, sandbox: str, config: pb.ContainerConfig, sandbox_config: pb.PodSandboxConfig) -> str:
        request = pb.CreateContainerRequest(pod_sandbox_id=sandbox, config=config, sandbox_config=sandbox_config)
        return self._call(_RUNTIME, "CreateContainer", request, pb.CreateContainerResponse).container_id

    def start_container(self, container: str) -> None:
        request = pb.StartContainerRequest(container_id=container)
        self._call(_RUNTIME, "StartContainer", request, pb.StartContainerResponse)

    def update_container(self, container: str, resources: pb.LinuxContainerResources) -> None:
        request = pb.UpdateContainerResourcesRequest(container_id=container, linux=resources)
        self._call(_RUNTIME, "UpdateContainerResources", request, pb.UpdateContainerResourcesResponse)

    def stop_container(self, container: str, *, grace_s: int = 0) -> None:
        request = pb.StopContainerRequest(container_id=container, timeout=grace_s)
        self._settled(_RUNTIME, "StopContainer", request, pb.StopContainerResponse)

    def remove_container(self, container: str) -> None:
        request = pb.RemoveContainerRequest(container_id=container)
        self._settled(_RUNTIME, "RemoveContainer", request, pb.RemoveContainerResponse)

    def list_containers(self) -> list[pb.Container]:
        answer = self._call(_RUNTIME, "ListContainers", pb.ListContainersRequest(), pb.ListContainersResponse)
        return list(answer.containers)

    def container_status(self, container: str) -> pb.ContainerStatus:
        request = pb.ContainerStatusRequest(container_id=container)
        return self._call(_RUNTIME, "ContainerStatus", request, pb.ContainerStatusResponse).status
