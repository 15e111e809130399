"""Pods from the container runtime's CRI socket, and, for evictions, the calls to stop a container or a sandbox.

**Memory.** The messages' library costs 3 MiB that are never released: call only where the kubelet's list has no labels.

Source: Kubernetes' CRI; recorded responses of containerd 1.6.
"""

import os
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Self, TypeVar, final

import trio
from msgspec import Struct

from cgroupfs.errors import SourceError
from reconciler.clients.grpc import Code, GrpcStatusError, UnaryCall, UnaryChannel
from reconciler.clients.proto_items import LONGEST_ITEM, MessageItems
from reconciler.pods.marks import LONGEST_NAME, MarkReader, ReadKeys, note, too_long
from reconciler.runtime.lazy import import_in_thread
from reconciler.runtime.stints import in_worker
from reconciler.sources.podspec import CONFIG_SOURCE, MOST_CONTAINERS, STATIC_SOURCES, Marks, marks_of
from state.model import ContainerKind, ContainerMeta, PodMeta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from google.protobuf.message import Message

    from reconciler.sources.criapi import cri_pb2

NAME: Final = "cri"

_APIS: Final = ("v1", "v1alpha2")
"""Runtimes before containerd 1.6 and CRI-O 1.23 support only the second, whose messages are the same for all that is
used here.
"""
_MESSAGES: Final = "reconciler.sources.criapi.cri_pb2"
# Longer answers are taken apart in a thread.
_LONG: Final = 64 * 1024
_MOST_ITEMS: Final = 16_384
_POD_UID: Final = "io.kubernetes.pod.uid"
# An annotation of each container, not of the sandbox.
_GRACE: Final = "io.kubernetes.pod.terminationGracePeriod"
# The kubelet adds these to a pod's own labels; the API server's list does not have them.
_KUBELETS_LABELS: Final = frozenset({_POD_UID, "io.kubernetes.pod.name", "io.kubernetes.pod.namespace"})

T = TypeVar("T")


class _Call(NamedTuple):
    """``items``: takes a list's items one by one; the response itself is not made then."""

    method: str
    request: "Message"
    response: "type[Message]"
    items: "_Items[Any] | None" = None


class _Sandbox(NamedTuple):
    uid: str
    id: str
    created_at: int
    namespace: str
    name: str
    marks: Marks
    static: bool


class _Container(NamedTuple):
    """What is kept of a container. ``uid``, ``namespace`` and ``pod_name``: its pod's, as its labels have them."""

    id: str
    sandbox_id: str
    created_at: int
    name: str
    uid: str
    namespace: str | None
    pod_name: str | None
    grace_s: float | None


@final
class _Items(Generic[T]):
    """The items of one list, each made into something small as soon as it is there.

    ``problems``: a message for each that cannot be read; the others hold.
    """

    def __init__(self, method: str, make: "Callable[[bytes], T | None]") -> None:
        self.made: list[T] = []
        self.problems: list[str] = []
        self.method = method
        self._make = make
        self._message = MessageItems(self._take)

    @property
    def whole(self) -> bool:
        return self._message.whole

    def sink(self) -> "Callable[[bytes], None]":
        """Start, or start over."""
        self.made, self.problems = [], []
        self._message = MessageItems(self._take)
        return self._message.feed

    def _take(self, item: bytes, length: int) -> None:
        number = len(self.made) + len(self.problems) + 1
        if len(self.made) >= _MOST_ITEMS:
            note(self.problems, f"{self.method}: more than {_MOST_ITEMS} items")
        elif length > len(item):
            note(self.problems, too_long(f"{self.method}: item {number}", length, LONGEST_ITEM))
        else:
            try:
                made = self._make(item)
            except ValueError as exc:
                note(self.problems, f"{self.method}: item {number}: {str(exc)[:200]}")
            else:
                self.made += () if made is None else (made,)


class RuntimeVersion(Struct, frozen=True, kw_only=True):
    """The runtime behind the socket: ``containerd`` ``1.6.20`` over ``v1``."""

    name: str
    version: str
    api: str


class RuntimeCondition(Struct, frozen=True, kw_only=True):
    """One of the runtime's own statements about its health, such as ``RuntimeReady``."""

    type: str
    ok: bool
    message: str = ""


@final
class CriClient:
    """CRI client of one runtime. Connects on the first call, and again after `aclose` or a lost connection.

    ``timeout_s`` is for one round trip; a call makes one, or two, and at first one or two more. ``root_only``: as for
    `UnaryChannel`.
    """

    def __init__(
        self,
        socket: str,
        *,
        root: str = "/",
        timeout_s: float = 2.0,
        root_only: bool = False,
        marks: MarkReader | None = None,
    ) -> None:
        self._problems: tuple[str, ...] = ()
        self._marks = marks or MarkReader(ReadKeys())
        self._socket = socket
        self._path = os.path.abspath(os.path.join(root, socket.lstrip("/")))
        self._timeout_s = timeout_s
        self._channel = UnaryChannel(self._path, source=NAME, shown=socket, root_only=root_only)
        self._limiter = trio.CapacityLimiter(1)
        self._api: str | None = None
        """The version that the runtime supports; detected again after a failure or `aclose`."""
        self._pb: Any = None  # the module of generated messages

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def connected(self) -> bool:
        return self._channel.connected

    @property
    def problems(self) -> tuple[str, ...]:
        """Sandboxes and containers of the last list that cannot be read."""
        return self._problems

    async def aclose(self) -> None:
        """Drop the connection. The client remains usable."""
        self._api = None
        self._channel.close()

    async def version(self) -> RuntimeVersion:
        """The runtime's name and API version: the newest that it supports, which is used from then on.

        Errors: `SourceError`, as for all calls: no socket, no response in time, no CRI, a refusal.
        """
        pb = await self._messages()
        call = _Call("Version", pb.VersionRequest(version="0.1.0"), pb.VersionResponse)
        for api in _APIS:
            try:
                (message,) = await self._send_in(api, call)
            except GrpcStatusError as exc:
                if exc.code != Code.UNIMPLEMENTED:
                    raise
            else:
                self._api = api
                return RuntimeVersion(name=message.runtime_name, version=message.runtime_version, api=api)
        await self.aclose()
        spoken = " nor ".join(_APIS)
        raise SourceError(NAME, f"{self._socket}: it speaks neither {spoken} (is the runtime's CRI plugin disabled?)")

    async def status(self) -> tuple[RuntimeCondition, ...]:
        pb = await self._messages()
        (message,) = await self._send(_Call("Status", pb.StatusRequest(), pb.StatusResponse))
        return tuple(
            RuntimeCondition(type=condition.type, ok=condition.status, message=condition.message or condition.reason)
            for condition in message.status.conditions
        )

    async def pods(self) -> tuple[PodMeta, ...]:
        """All pods that have a sandbox or a container which has not exited."""
        return await self._listed({}, {})

    async def pod(self, uid: str) -> PodMeta | None:
        """One pod by the uid in its cgroup's name; None while the runtime does not list it yet.

        The quick path for a new container: two filtered requests in one round trip.
        """
        # Every sandbox and container made by a kubelet has this label.
        wanted = {"label_selector": {_POD_UID: uid}}
        return next(iter(await self._listed(wanted, wanted)), None)

    async def stop_container(self, container_id: str, grace_s: int, *, timeout_s: float) -> bool:
        """Have one container stopped: SIGTERM (or its image's signal), after the grace SIGKILL.

        Returns when it has ended; False: the runtime has no such container. May be called again. Errors: `SourceError`,
        also after ``timeout_s``.
        """
        pb = await self._messages()
        request = pb.StopContainerRequest(container_id=container_id, timeout=grace_s)
        return await self._stop(_Call("StopContainer", request, pb.StopContainerResponse), timeout_s)

    async def stop_sandbox(self, sandbox_id: str, *, timeout_s: float) -> bool:
        """Have a pod's sandbox stopped, with a SIGKILL for what still runs in it. As `stop_container`."""
        pb = await self._messages()
        request = pb.StopPodSandboxRequest(pod_sandbox_id=sandbox_id)
        return await self._stop(_Call("StopPodSandbox", request, pb.StopPodSandboxResponse), timeout_s)

    async def _stop(self, call: _Call, timeout_s: float) -> bool:
        try:
            await self._send(call, timeout_s=timeout_s)
        except GrpcStatusError as exc:
            if exc.code != Code.NOT_FOUND:
                raise
            return False
        return True

    async def _listed(self, sandboxes: dict[str, Any], containers: dict[str, Any]) -> tuple[PodMeta, ...]:
        """The pods of all sandboxes and containers that these filters let through."""
        pb = await self._messages()
        from google.protobuf.message import DecodeError  # lazy: 3 MiB and 20 ms

        def message(kind: "type[Message]", item: bytes) -> Any:
            try:
                return kind.FromString(item)
            except DecodeError as exc:
                raise ValueError(str(exc)) from exc

        sandbox_items = _Items("ListPodSandbox", lambda item: _sandbox(message(pb.PodSandbox, item), self._marks))
        container_items = _Items("ListContainers", lambda item: _container(message(pb.Container, item), pb))
        await self._send(
            _Call(
                "ListPodSandbox",
                pb.ListPodSandboxRequest(filter=pb.PodSandboxFilter(**sandboxes)),
                pb.ListPodSandboxResponse,
                sandbox_items,
            ),
            _Call(
                "ListContainers",
                pb.ListContainersRequest(filter=pb.ContainerFilter(**containers)),
                pb.ListContainersResponse,
                container_items,
            ),
        )
        for items in (sandbox_items, container_items):
            if not items.whole:
                raise SourceError(NAME, f"{self._socket}: {items.method}: its answer cannot be read to the end")
        self._problems = (*sandbox_items.problems, *container_items.problems)
        return tuple(_joined(sandbox_items.made, container_items.made))

    async def _send(self, *calls: _Call, timeout_s: float | None = None) -> list[Any]:
        """The responses that were not taken item by item; in the API version that the runtime supports."""
        if self._api is not None:
            try:
                return await self._send_in(self._api, *calls, timeout_s=timeout_s)
            except GrpcStatusError as exc:
                if exc.code != Code.UNIMPLEMENTED:
                    raise
                # Another release of the runtime may be behind the socket by now.
            except SourceError:
                self._api = None
                raise
        return await self._send_in((await self.version()).api, *calls, timeout_s=timeout_s)

    async def _send_in(self, api: str, *calls: _Call, timeout_s: float | None = None) -> list[Any]:
        requests = (
            UnaryCall(
                f"/runtime.{api}.RuntimeService/{call.method}",
                call.request.SerializeToString(),
                None if call.items is None else call.items.sink,
            )
            for call in calls
        )
        bodies = await self._channel.call(*requests, timeout_s=timeout_s or self._timeout_s)

        def made() -> list[Any]:
            whole = [(call, body) for call, body in zip(calls, bodies, strict=True) if call.items is None]
            return [call.response.FromString(body) for call, body in whole]

        from google.protobuf.message import DecodeError  # lazy: 3 MiB and 20 ms

        try:
            if sum(map(len, bodies)) > _LONG:
                return await in_worker(made, limiter=self._limiter)
            return made()
        except DecodeError as exc:
            text = ", ".join(call.method for call in calls)
            raise SourceError(NAME, f"{self._socket}: {text}: its answer cannot be read: {exc}") from exc

    async def _messages(self) -> Any:
        if self._pb is None:
            # Before the import: a node without a runtime's socket does not pay for it. In a thread: it takes 20 ms and
            # more.
            if not os.path.exists(self._path):
                raise SourceError(NAME, f"{self._socket}: no such socket")
            self._pb = await import_in_thread(_MESSAGES, self._limiter)
        return self._pb


def _sandbox(item: "cri_pb2.PodSandbox", reader: MarkReader) -> _Sandbox:
    marks = marks_of(item.labels, item.annotations, reader)
    labels = {key: text for key, text in (marks.labels or {}).items() if key not in _KUBELETS_LABELS}
    return _Sandbox(
        uid=item.metadata.uid[:LONGEST_NAME],
        id=item.id[:LONGEST_NAME],
        created_at=item.created_at,
        namespace=item.metadata.namespace[:LONGEST_NAME],
        name=item.metadata.name[:LONGEST_NAME],
        marks=marks._replace(labels=labels),
        static=(marks.annotations or {}).get(CONFIG_SOURCE) in STATIC_SOURCES,
    )


def _container(item: "cri_pb2.Container", pb: Any) -> _Container | None:
    """None for a container that has exited."""
    if item.state == pb.CONTAINER_EXITED:
        return None
    labels, grace = item.labels, item.annotations.get(_GRACE, "")
    namespace, name = labels.get("io.kubernetes.pod.namespace"), labels.get("io.kubernetes.pod.name")
    return _Container(
        id=item.id[:LONGEST_NAME],
        sandbox_id=item.pod_sandbox_id[:LONGEST_NAME],
        created_at=item.created_at,
        name=item.metadata.name[:LONGEST_NAME],
        uid=labels.get(_POD_UID, "")[:LONGEST_NAME],
        namespace=None if namespace is None else namespace[:LONGEST_NAME],
        pod_name=None if name is None else name[:LONGEST_NAME],
        grace_s=float(grace) if grace.isascii() and grace.isdecimal() and len(grace) < 10 else None,
    )


def _joined(sandboxes: "Iterable[_Sandbox]", containers: "Iterable[_Container]") -> "Iterator[PodMeta]":
    """One `PodMeta` per pod from its sandboxes (a pod whose sandbox ended has several) and its running containers."""
    by_pod: dict[str, list[_Sandbox]] = {}
    pod_of_sandbox: dict[str, str] = {}
    for sandbox in sorted(sandboxes, key=_newest_first):
        by_pod.setdefault(sandbox.uid, []).append(sandbox)
        pod_of_sandbox[sandbox.id] = sandbox.uid
    members: dict[str, list[_Container]] = {uid: [] for uid in by_pod}
    for container in sorted(containers, key=_newest_first):
        uid = pod_of_sandbox.get(container.sandbox_id) or container.uid
        if uid:
            members.setdefault(uid, []).append(container)
    for uid, parts in members.items():
        yield _meta(uid, by_pod.get(uid, ()), parts)


def _newest_first(item: "_Sandbox | _Container") -> tuple[int, str]:
    return -item.created_at, item.id


def _meta(uid: str, sandboxes: "list[_Sandbox] | tuple[()]", containers: "list[_Container]") -> PodMeta:
    newest = sandboxes[0] if sandboxes else None
    # A container whose sandbox is not listed (yet) has its pod's names, not its labels.
    first = containers[0] if newest is None else None
    return PodMeta(
        uid=uid,
        source=NAME,
        namespace=newest.namespace if newest else first.namespace if first else None,
        name=newest.name if newest else first.pod_name if first else None,
        labels=newest.marks.labels if newest else None,
        annotations=newest.marks.annotations if newest else None,
        static=newest.static if newest else False,
        grace_s=next((container.grace_s for container in containers if container.grace_s is not None), None),
        containers=tuple(
            # CRI does not separate init containers from the others; while they run they are treated equally.
            ContainerMeta(name=container.name, id=container.id, kind=ContainerKind.APP)
            for container in containers[:MOST_CONTAINERS]
        ),
        sandbox_ids=tuple(sandbox.id for sandbox in sandboxes),
        problems=newest.marks.problems if newest else (),
    )
