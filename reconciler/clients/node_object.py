"""The node's own object at the API server: its taints and conditions are read, and one of them is changed.

A change names what it expects, so that the API server refuses it when another client was faster.

Source: Kubernetes documentation, "API Concepts"; Kubernetes API reference, Node v1; RFC 6902.
"""

import time
from collections.abc import Sequence
from typing import Final, final
from urllib.parse import quote, unquote

import msgspec
from msgspec import Raw, Struct

from cgroupfs.bounded import decoded
from cgroupfs.errors import SourceError
from reconciler.clients.api_identity import NAME
from reconciler.clients.http import HttpResponse
from reconciler.clients.kube import KubeApi, status_of, wait_s_of, words_of
from reconciler.clients.managed_fields import MANAGER, ManagedField, owners

_LARGEST: Final = 2 << 20
"""A node has up to 50 images and as many annotations as its owners like; etcd takes 1.5 MiB."""
_MOST: Final = 256
_MOST_NAMES: Final = 3
_TIMEOUT_S: Final = 5.0
_CONFLICT: Final = frozenset({409, 422})
"""Another resourceVersion or uid; a test of a JSON patch that has failed."""


class NodeRefusedError(SourceError):
    """The API server does not allow it, or this is none: repeating the request soon changes nothing."""


class NodeAbsentError(SourceError):
    """The API server has no object of this name, by its own Status: the node was deleted, and may be made again."""


class NodeConflictError(SourceError):
    """Another client has changed the object since it was read."""


class NodeBusyError(SourceError):
    """No answer, or not now. ``wait_s``: the requested delay; None: none."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(NAME, message)
        self.wait_s = wait_s


class NodeTaint(Struct, frozen=True, omit_defaults=True):
    """One of ``spec.taints``. Other fields are kept in `ListedTaint.raw`."""

    key: str
    effect: str
    value: str = ""


class NodeCondition(Struct, frozen=True, omit_defaults=True):
    """One of ``status.conditions``, without its times."""

    type: str
    status: str
    reason: str = ""
    message: str = ""


class ListedTaint(Struct, frozen=True):
    """A taint, its index in the list, and its text there."""

    index: int
    taint: NodeTaint
    raw: bytes


class NodeObject(Struct, frozen=True, kw_only=True):
    name: str
    uid: str
    version: str
    boot: str = ""
    """That of its machine, as the kubelet has reported it; empty: not known."""
    taints: tuple[ListedTaint, ...] = ()
    conditions: tuple[NodeCondition, ...] = ()
    managed: tuple[ManagedField, ...] = ()

    def taint(self, key: str, effect: str) -> ListedTaint | None:
        """The taint of this key and effect: a node has one at most."""
        return next((each for each in self.taints if (each.taint.key, each.taint.effect) == (key, effect)), None)

    def writer(self, *place: str) -> str:
        """The other clients that own a place of the object; empty: none, as after its removal."""
        return " and ".join([name for name in owners(self.managed, [place]) if name != MANAGER][:_MOST_NAMES])

    def condition(self, kind: str) -> NodeCondition | None:
        return next((each for each in self.conditions if each.type == kind), None)


class _NodeMeta(Struct, frozen=True, rename="camel"):
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    managed_fields: list[ManagedField] = []


class _NodeSpec(Struct, frozen=True):
    taints: list[Raw] | None = None


class NodeInfo(Struct, frozen=True):
    boot: str = msgspec.field(name="bootID", default="")


class _NodeStatus(Struct, frozen=True, rename="camel"):
    conditions: list[Raw] | None = None
    node_info: NodeInfo = NodeInfo()


def other_machine(name: str, reported: str, own: str) -> str | None:
    """Why a Node object is not this machine's; None: it is, or that is not known.

    Two kubelets with one name report to one object in turn. ``reported``: the boot in the object (``bootID``, the
    kernel's random/boot_id); ``own``: this machine's; empty: not known.
    """
    if not reported or not own or reported == own:
        return None
    return (
        f"the Node {name[:63]} is of another machine: its kubelet reports boot {reported[:36]}, this is boot "
        f"{own[:36]}. Two machines have this name, or the kubelet has not reported since a reboot"
    )


class _NodeAnswer(Struct, frozen=True):
    kind: str = ""
    metadata: _NodeMeta = _NodeMeta()
    spec: _NodeSpec = _NodeSpec()
    status: _NodeStatus = _NodeStatus()


_decode_node = msgspec.json.Decoder(_NodeAnswer).decode
_decode_taint = msgspec.json.Decoder(NodeTaint).decode
_decode_condition = msgspec.json.Decoder(NodeCondition).decode


@final
class NodeClient:
    """Requests about one node's object. Errors of all of them: `SourceError`, mostly one of this module's."""

    def __init__(self, api: KubeApi, name: str) -> None:
        self._api = api
        self._name = name
        self.path: str = f"/api/v1/nodes/{quote(name, safe='')}"
        """The object, for people and for the ledger."""
        self.requests = 0

    def of(self, path: str) -> "NodeClient":
        """The client of the object at this path, with the same connection: the node may have been renamed since."""
        return self if path == self.path else NodeClient(self._api, unquote(path.rpartition("/")[2]))

    def unreachable(self) -> str | None:
        """Why no request can be made, from files only."""
        return self._api.unreachable()

    async def read(self) -> NodeObject:
        return self._object(await self._request("GET", self.path))

    async def add_taint(self, node: NodeObject, taint: NodeTaint) -> NodeObject:
        """Add a taint; the object after that."""
        if node.taints:
            change = [{"op": "add", "path": "/spec/taints/-", "value": taint}]
        else:
            # For the API server's test a list that is absent equals null.
            change = [
                {"op": "test", "path": "/spec/taints", "value": None},
                {"op": "add", "path": "/spec/taints", "value": [taint]},
            ]
        return await self._patch_taints(node, change)

    async def replace_taint(self, node: NodeObject, present: ListedTaint, taint: NodeTaint) -> NodeObject:
        """Replace a taint that was read; the object after that."""
        place = f"/spec/taints/{present.index}"
        change = [_test(present), {"op": "replace", "path": place, "value": taint}]
        return await self._patch_taints(node, change)

    async def remove_taint(self, node: NodeObject, present: ListedTaint) -> NodeObject:
        """Remove a taint that was read; the object after that."""
        return await self._patch_taints(
            node, [_test(present), {"op": "remove", "path": f"/spec/taints/{present.index}"}]
        )

    async def set_condition(
        self, node: NodeObject, condition: NodeCondition, at: str, *, any_version: bool = False
    ) -> NodeObject:
        """Set a condition. ``at``: the time, as Kubernetes writes it. ``any_version``: also of a changed object."""
        fields = {**msgspec.to_builtins(condition), "lastTransitionTime": at, "lastHeartbeatTime": at}
        return await self._patch_status(node, fields, any_version=any_version)

    async def remove_condition(self, node: NodeObject, kind: str, *, any_version: bool = False) -> NodeObject:
        """Remove a condition; the object after that."""
        return await self._patch_status(node, {"$patch": "delete", "type": kind}, any_version=any_version)

    async def aclose(self) -> None:
        await self._api.aclose()

    async def _patch_taints(self, node: NodeObject, change: Sequence[object]) -> NodeObject:
        # A JSON patch, as taints have no merge key: a merge patch replaces the whole list.
        same = {"op": "test", "path": "/metadata/uid", "value": node.uid}
        return self._object(
            await self._request("PATCH", self.path, [same, *change], content_type="application/json-patch+json")
        )

    async def _patch_status(self, node: NodeObject, condition: object, *, any_version: bool) -> NodeObject:
        # Conditions are merged by their type. Without the version the change is also made where others change the
        # object all the time.
        version = {} if any_version else {"resourceVersion": node.version}
        body = {"metadata": {"uid": node.uid, **version}, "status": {"conditions": [condition]}}
        kind = "application/strategic-merge-patch+json"
        return self._object(await self._request("PATCH", f"{self.path}/status", body, content_type=kind))

    async def _request(
        self, method: str, path: str, body: object | None = None, *, content_type: str = "application/json"
    ) -> HttpResponse:
        self.requests += 1
        try:
            answer = await self._api.request(
                method, path, body, timeout_s=_TIMEOUT_S, content_type=content_type, most=_LARGEST
            )
        except SourceError as exc:
            raise NodeBusyError(str(exc).removeprefix(f"{NAME}: ")) from exc
        if answer.ok:
            return answer
        status = status_of(answer)
        message = f"{method} {path}: HTTP {answer.status} {words_of(answer, status)}".rstrip()
        if answer.status == 404 and status.is_absent("nodes", self._name):
            raise NodeAbsentError(NAME, message)
        if answer.status in _CONFLICT and method == "PATCH":
            raise NodeConflictError(NAME, message)
        if answer.status == 429 or answer.status >= 500:
            raise NodeBusyError(message, wait_s_of(answer, status, time.time()))
        raise NodeRefusedError(NAME, message)

    def _object(self, answer: HttpResponse) -> NodeObject:
        """What an answer says. Errors: `NodeRefusedError` for what is not this node's object."""
        try:
            node = decoded(_decode_node, answer.body)
            taints = node.spec.taints or []
            conditions = node.status.conditions or []
            if len(taints) > _MOST or len(conditions) > _MOST:
                raise NodeRefusedError(NAME, f"{self.path}: more than {_MOST} taints or conditions")
            read = NodeObject(
                name=node.metadata.name,
                uid=node.metadata.uid,
                version=node.metadata.resource_version,
                boot=node.status.node_info.boot,
                managed=tuple(node.metadata.managed_fields),
                taints=tuple(
                    ListedTaint(index, decoded(_decode_taint, bytes(raw)), bytes(raw))
                    for index, raw in enumerate(taints)
                ),
                conditions=tuple(decoded(_decode_condition, bytes(raw)) for raw in conditions),
            )
        except ValueError as exc:
            raise NodeRefusedError(NAME, f"{self.path}: the answer is not a node: {str(exc)[:100]}") from exc
        if node.kind != "Node" or read.name != self._name or not read.uid:
            raise NodeRefusedError(NAME, f"{self.path}: the answer is another object")
        return read


def _test(present: ListedTaint) -> object:
    return {"op": "test", "path": f"/spec/taints/{present.index}", "value": Raw(present.raw)}
