"""Nodes' objects as an API server keeps them: reads, JSON patches of taints, merge patches of conditions.

As strict as kube-apiserver 1.26, whose answers these are (`tests/cluster/test_closed_node.py` compares both): a failed
test, a missing list and a duplicate taint are 422, a stale resourceVersion is 409, another content type is 415, and the
NodeRestriction plug-in lets no node change its taints.
"""

import copy
import json
import re
from typing import Any

from tests.fakes.json_patch import JsonPatchError, json_patched

Object = dict[str, Any]  # the JSON of the API
Answer = tuple[int, Object]

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/strategic-merge-patch+json"
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_ERROR = "the server rejected our request due to an error in our request"


class _RejectedError(Exception):
    pass


class FakeNodes:
    """``rights``: what is allowed of ``get nodes``, ``patch nodes``, ``patch nodes/status``; None: all.

    ``kubelet``: the client has a kubelet's credentials, and NodeRestriction is on. ``before_patch`` is called once,
    before the next patch: what another client does meanwhile.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, Object] = {}
        self.rights: set[str] | None = None
        self.kubelet = False
        self.before_patch: Any = None  # a function without arguments
        self.patches: list[tuple[str, Any]] = []
        self._version = 1000

    def add(self, name: str, *, taints: list[Object] | None = None, uid: str = "") -> Object:
        """A Ready node; taints are left out where there are none, as the API server does."""
        metadata = {"name": name, "uid": uid or f"uid-of-{name}", "resourceVersion": self._next()}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "posting ready status"}
        node = {"kind": "Node", "apiVersion": "v1", "metadata": metadata, "spec": {}, "status": {"conditions": [ready]}}
        if taints:
            node["spec"] = {"taints": taints}
        self.nodes[name] = node
        return node

    def taints(self, name: str) -> list[Object]:
        """All of a node."""
        return list(self.nodes[name]["spec"].get("taints", []))

    def condition(self, name: str, kind: str) -> Object | None:
        """One of a node."""
        conditions = self.nodes[name]["status"]["conditions"]
        return next((item for item in conditions if item["type"] == kind), None)

    def touch(self, name: str) -> None:
        """Another client has changed the object in some way: a kubelet's heartbeat."""
        self.nodes[name]["metadata"]["resourceVersion"] = self._next()

    def answer(self, method: str, path: str, kind: str, body: bytes) -> Answer:
        """The answer to a request for a path below ``/api/v1/nodes/``."""
        name, _, part = path.removeprefix("/api/v1/nodes/").partition("/")
        verb = {"GET": "get", "PATCH": "patch"}.get(method, method.lower())
        resource = f"nodes/{part}" if part else "nodes"
        if self.rights is not None and f"{verb} {resource}" not in self.rights:
            user = "system:serviceaccount:kube-system:bypassd"
            words = f'{resource.partition("/")[0]} "{name}" is forbidden: User "{user}" cannot {verb} resource'
            return _status(403, "Forbidden", f'{words} "{resource}" in API group "" at the cluster scope')
        node = self.nodes.get(name)
        if node is None:
            return _status(404, "NotFound", f'nodes "{name}" not found', {"name": name, "kind": "nodes"})
        if method == "GET":
            return 200, node
        if kind not in {JSON_PATCH, MERGE_PATCH}:
            return _status(415, "UnsupportedMediaType", "415: Unsupported Media Type")
        if (before := self.before_patch) is not None:
            self.before_patch = None
            before()
        change = json.loads(body)
        self.patches.append((path, change))
        node = self.nodes[name]
        try:
            changed = _json_patched(node, change) if kind == JSON_PATCH else self._merged(node, change, part)
        except _RejectedError as exc:
            code, reason = (409, "Conflict") if "modified" in str(exc) else (422, "Invalid")
            return _status(code, reason, str(exc))
        if self.kubelet and changed["spec"].get("taints") != node["spec"].get("taints"):
            words = f'nodes "{name}" is forbidden: node "{name}" is not allowed to modify taints'
            return _status(403, "Forbidden", words)
        if part == "status":
            changed["spec"] = node["spec"]
        else:
            changed["status"] = node["status"]
        changed["metadata"]["resourceVersion"] = self._next()
        self.nodes[name] = changed
        return 200, changed

    def _next(self) -> str:
        self._version += 1
        return str(self._version)

    def _merged(self, node: Object, change: Object, part: str) -> Object:
        assert part == "status", "only conditions are merged here"
        wanted, has = change.get("metadata", {}), node["metadata"]
        if wanted.get("resourceVersion", has["resourceVersion"]) != has["resourceVersion"]:
            name = has["name"]
            raise _RejectedError(f'Operation cannot be fulfilled on nodes "{name}": the object has been modified')
        if wanted.get("uid", has["uid"]) != has["uid"]:
            raise _RejectedError(f"metadata.uid: Invalid value: {wanted['uid']!r}: field is immutable")
        changed = copy.deepcopy(node)
        for item in change["status"]["conditions"]:
            kept = [old for old in changed["status"]["conditions"] if old["type"] != item["type"]]
            # A new one is the first, which the real one does, too.
            changed["status"]["conditions"] = kept if item.get("$patch") == "delete" else [item, *kept]
        return changed


def _json_patched(node: Object, operations: list[Object]) -> Object:
    try:
        changed = json_patched(node, operations)
    except JsonPatchError:
        raise _RejectedError(_ERROR) from None
    if not changed["spec"].get("taints"):
        changed["spec"].pop("taints", None)
    _validate(changed["spec"].get("taints", []))
    return changed


def _validate(taints: list[Object]) -> None:
    seen = set()
    for index, taint in enumerate(taints):
        where, key = f"metadata.taints[{index}]", (taint["key"], taint["effect"])
        if key in seen:
            raise _RejectedError(f"{where}: Duplicate value: taints must be unique by key and effect pair")
        seen.add(key)
        if taint["effect"] not in _EFFECTS:
            raise _RejectedError(f"{where}.effect: Unsupported value: {taint['effect']!r}")
        value = taint.get("value", "")
        if len(value) > 63 or _VALUE.fullmatch(value) is None:
            raise _RejectedError(f"{where}.value: Invalid value: {value!r}: a valid label must be")


def _status(code: int, reason: str, message: str, details: Object | None = None) -> Answer:
    item = {"kind": "Status", "status": "Failure", "message": message, "reason": reason, "code": code}
    return code, {**item, "details": details or {}}
