"""What a control plane has set for one node: requests for single objects by name, and nothing else.

- Koordinator: the annotations and labels of the Node, and the specification of the NodeSLO of the same name.
- Katalyst: the AdminQoSConfiguration to which the status of the node's CustomNodeConfig points.

Answers are bounded in bytes and nesting, and must be the requested object.

Source: Kubernetes documentation, "API Concepts", Status; Koordinator's apis/slo/v1alpha1; Katalyst's
apis/config/v1alpha1 (CustomNodeConfigStatus, TargetConfig).
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Final, TypeVar, final
from urllib.parse import quote

import msgspec
from msgspec import Raw, Struct

from cgroupfs.bounded import decoded, is_shallow
from cgroupfs.errors import SourceError
from reconciler.clients.api_identity import NAME
from reconciler.clients.http import HttpResponse
from reconciler.clients.kube import Absence, KubeApi, absence_of, status_of, wait_s_of, words_of
from reconciler.runtime.stints import in_worker
from state.printable import printable

KOORDINATOR_GROUP: Final = "slo.koordinator.sh"
KATALYST_GROUP: Final = "config.katalyst.kubewharf.io"
_ADMIN_QOS: Final = "adminqosconfigurations"
_NODE_BYTES: Final = 2 << 20
"""A node has up to 50 images and as many annotations as its owners like; etcd takes 1.5 MiB."""
_BYTES: Final = 512 << 10
"""A NodeSLO has some 5 KiB."""
_DEEPEST: Final = 24
_MOST_TARGETS: Final = 256
_TIMEOUT_S: Final = 10.0
_LONGEST_MESSAGE: Final = 200
_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class ObjectState(StrEnum):
    """Whether there is an object, by the API server's own word."""

    FOUND = "found"
    ABSENT = "absent"
    NOT_INSTALLED = "not installed"


class SettingsObject(Struct, frozen=True, kw_only=True):
    """``title``: kind and name, for people. ``content``: decoded JSON, empty without an object."""

    title: str
    state: ObjectState
    content: Mapping[str, object] = {}


class AdminQosTarget(Struct, frozen=True, kw_only=True):
    """The AdminQoSConfiguration that counts on the node.

    ``hash``: of its content, as Katalyst's controller has it: an unchanged one is not requested again.
    """

    namespace: str
    name: str
    hash: str = ""


class SettingsAnswerError(SourceError):
    """No usable answer. ``wait_s``: the requested delay; None: none. ``denied``: rights are missing."""

    def __init__(self, message: str, *, wait_s: float | None = None, denied: bool = False) -> None:
        super().__init__(NAME, message)
        self.wait_s = wait_s
        self.denied = denied


class _SettingsMeta(Struct, frozen=True):
    name: str = ""
    annotations: dict[str, object] | None = None
    labels: dict[str, object] | None = None


class _SettingsSpec(Struct, frozen=True):
    kind: str = ""
    metadata: _SettingsMeta = _SettingsMeta()
    spec: Raw = Raw(b"{}")


class _ConfigType(Struct, frozen=True):
    group: str = ""
    resource: str = ""


class _Target(Struct, frozen=True, rename="camel"):
    config_type: _ConfigType = _ConfigType()
    config_name: str = ""
    config_namespace: str = ""
    hash: str = ""


class _TargetList(Struct, frozen=True, rename="camel"):
    katalyst_custom_config_list: list[_Target] | None = None


class _NodeConfig(Struct, frozen=True):
    kind: str = ""
    metadata: _SettingsMeta = _SettingsMeta()
    status: _TargetList = _TargetList()


_T = TypeVar("_T", _SettingsSpec, _NodeConfig)
_decode_spec = msgspec.json.Decoder(_SettingsSpec).decode
_decode_node_config = msgspec.json.Decoder(_NodeConfig).decode


@final
class SettingsClient:
    """The requests about one node. Errors of each: `SettingsAnswerError`."""

    def __init__(self, api: KubeApi, node: str) -> None:
        """``node``: the name of the node's object."""
        self._api = api
        self._node = node
        self.requests = 0

    def unreachable(self) -> str | None:
        """Why no request can be made, from files only."""
        return self._api.unreachable()

    async def node(self, prefixes: Sequence[str]) -> SettingsObject:
        """The annotations of the Node with these prefixes, and its labels; an annotation is first."""
        title = f"Node {self._node}"
        answer = await self._get(f"/api/v1/nodes/{quote(self._node, safe='')}", "", _NODE_BYTES)
        if isinstance(answer, ObjectState):
            return SettingsObject(title=title, state=answer)
        # In a thread: the largest take 60 ms.
        return await in_worker(_with_marks, answer, self._node, title, tuple(prefixes))

    async def node_slo(self) -> SettingsObject:
        title, path = (
            f"NodeSLO {self._node}",
            f"/apis/{KOORDINATOR_GROUP}/v1alpha1/nodeslos/{quote(self._node, safe='')}",
        )
        answer = await self._get(path, KOORDINATOR_GROUP, _BYTES)
        if isinstance(answer, ObjectState):
            return SettingsObject(title=title, state=answer)
        return await in_worker(_with_spec, answer, "NodeSLO", self._node, title)

    async def admin_qos_target(self) -> AdminQosTarget | ObjectState:
        """The AdminQoSConfiguration that the node's CustomNodeConfig names; or its state."""
        title = f"CustomNodeConfig {self._node}"
        path = f"/apis/{KATALYST_GROUP}/v1alpha1/customnodeconfigs/{quote(self._node, safe='')}"
        answer = await self._get(path, KATALYST_GROUP, _BYTES)
        if isinstance(answer, ObjectState):
            return answer
        targets = (await in_worker(_object, _decode_node_config, answer, "CustomNodeConfig", self._node, title)).status
        listed = targets.katalyst_custom_config_list or []
        if len(listed) > _MOST_TARGETS:
            raise SettingsAnswerError(f"{title}: more than {_MOST_TARGETS} configurations")
        named = (target for target in listed if target.config_type == _ConfigType(KATALYST_GROUP, _ADMIN_QOS))
        if (target := next(named, None)) is None:
            return ObjectState.ABSENT
        space, name = target.config_namespace, target.config_name
        # They become a part of a path.
        if not _LABEL.fullmatch(space) or not _SUBDOMAIN.fullmatch(name) or ".." in name:
            shown = printable(f"{space}/{name}", _LONGEST_MESSAGE)
            raise SettingsAnswerError(f"{title}: names {shown!r}; expected a namespace and a name")
        return AdminQosTarget(namespace=space, name=name, hash=printable(target.hash, _LONGEST_MESSAGE))

    async def admin_qos(self, target: AdminQosTarget) -> SettingsObject:
        title = f"AdminQoSConfiguration {target.namespace}/{target.name}"
        path = f"/apis/{KATALYST_GROUP}/v1alpha1/namespaces/{target.namespace}/{_ADMIN_QOS}/{target.name}"
        answer = await self._get(path, KATALYST_GROUP, _BYTES)
        if isinstance(answer, ObjectState):
            return SettingsObject(title=title, state=answer)
        found = await in_worker(_with_spec, answer, "AdminQoSConfiguration", target.name, title)
        config = found.content.get("config", {})
        if not isinstance(config, dict):
            raise SettingsAnswerError(f"{title}: spec.config is not an object")
        return SettingsObject(title=title, state=ObjectState.FOUND, content=config)

    async def aclose(self) -> None:
        """Close the connection; it may be used again."""
        await self._api.aclose()

    async def _get(self, path: str, group: str, most: int) -> HttpResponse | ObjectState:
        """The answer, or the state of an object that does not exist."""
        answer = await self._request(path, most)
        if answer.ok:
            return answer
        # Only the API server itself may say that there are no settings: a proxy's page is an error like any other.
        if answer.status == 404:
            match await absence_of(path, answer, self._request):
                case Absence.OBJECT:
                    return ObjectState.ABSENT
                case Absence.KIND:
                    return ObjectState.NOT_INSTALLED
                case Absence.VERSION:
                    raise SettingsAnswerError(f"GET {path}: the API server has {group} in other versions alone")
        raise _refusal(answer, path)

    async def _request(self, path: str, most: int) -> HttpResponse:
        self.requests += 1
        try:
            # One more: a longer answer is recognized, and not read as a broken one.
            answer = await self._api.request("GET", path, timeout_s=_TIMEOUT_S, most=most + 1)
        except SourceError as exc:
            raise SettingsAnswerError(printable(str(exc).removeprefix(f"{NAME}: "), _LONGEST_MESSAGE)) from exc
        if len(answer.body) > most:
            raise SettingsAnswerError(f"GET {path}: an answer of more than {most >> 10} KiB")
        return answer


def _refusal(answer: HttpResponse, path: str) -> SettingsAnswerError:
    status = status_of(answer)
    return SettingsAnswerError(
        f"GET {path}: HTTP {answer.status} {printable(words_of(answer, status))}".rstrip(),
        wait_s=wait_s_of(answer, status, time.time()),
        denied=answer.status in {401, 403},
    )


def _object(decode: Callable[[bytes], _T], answer: HttpResponse, kind: str, name: str, title: str) -> _T:
    """The object in an answer. Errors: `SettingsAnswerError` for another one."""
    try:
        item = decoded(decode, answer.body)
    except ValueError as exc:
        raise SettingsAnswerError(f"{title}: {printable(str(exc), _LONGEST_MESSAGE)}") from exc
    if (item.kind, item.metadata.name) != (kind, name):
        shown = printable(f"{item.kind} {item.metadata.name}", _LONGEST_MESSAGE)
        raise SettingsAnswerError(f"{title}: the answer is another object: {shown}")
    return item


def _with_marks(answer: HttpResponse, name: str, title: str, prefixes: tuple[str, ...]) -> SettingsObject:
    item = _object(_decode_spec, answer, "Node", name, title)
    marks = {**(item.metadata.labels or {}), **(item.metadata.annotations or {})}
    content = {key: value for key, value in marks.items() if key.startswith(prefixes)}
    if not is_shallow(content, _DEEPEST):
        raise SettingsAnswerError(f"{title}: annotations nested more than {_DEEPEST} levels deep")
    return SettingsObject(title=title, state=ObjectState.FOUND, content=content)


def _with_spec(answer: HttpResponse, kind: str, name: str, title: str) -> SettingsObject:
    item = _object(_decode_spec, answer, kind, name, title)
    try:
        spec = decoded(msgspec.json.decode, bytes(item.spec), deepest=_DEEPEST)
    except ValueError as exc:
        raise SettingsAnswerError(f"{title}: {printable(str(exc), _LONGEST_MESSAGE)}") from exc
    if not isinstance(spec, dict | None):
        raise SettingsAnswerError(f"{title}: the specification is not an object")
    return SettingsObject(title=title, state=ObjectState.FOUND, content=spec or {})
