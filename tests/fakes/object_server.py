"""An API server with single objects: get, create, and patches of ``status``, with ``managedFields``.

As strict as the real one (Kubernetes 1.26): a status patch of a custom resource changes nothing but its status, of a
Node also its metadata; amounts of a Node are quantities; an object that does not exist is 404 with a Status that names
it, a kind that does not exist is 404 with a line of text; rights are asked before existence. Source: Kubernetes
documentation, API concepts; RFC 7386.
"""

import copy
import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

import trio

from tests.fakes.http_listener import Request, listen, talk
from tests.fakes.json_patch import JsonPatchError, json_patched

Object = dict[str, Any]  # the JSON of the API
NODES = "/api/v1/nodes"
_PATCHES = ("application/merge-patch+json", "application/json-patch+json")
_QUANTITY = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+|[mkMGTPE]|[KMGTPE]i)?")


class ObjectServer:
    """``kinds``: collections that exist, by path. ``denied``: ``METHOD path-prefix`` that gets 403.

    ``trouble``: a status for every answer, with ``retry_after``. ``raw``: status and body of a path, whatever there is
    (None: no answer). ``tracks``: whether ``managedFields`` of custom resources are kept. ``wall``: the server's clock.
    """

    def __init__(self, wall: Callable[[], float]) -> None:
        self.kinds: set[str] = {NODES}
        self.objects: dict[str, Object] = {}
        self.denied: set[str] = set()
        self.trouble = 0
        self.retry_after = ""
        self.raw: dict[str, tuple[int, bytes | None]] = {}
        self.tracks = True
        self.requests: list[str] = []
        self.port = 0
        self.wall = wall

    def make(self, path: str, **content: Any) -> Object:
        """An object as someone else has made it."""
        name = path.rpartition("/")[2]
        self.objects[path] = {"metadata": {"name": name, "managedFields": []}, **content}
        return self.objects[path]

    def patch(self, path: str, patch: Object | list[Object], *, manager: str, status: bool = True) -> int:
        """A merge patch, or a list of a JSON patch, by this manager; the HTTP status."""
        found = self.objects[path]
        try:
            merged = _merged(found, patch) if isinstance(patch, dict) else json_patched(found, patch)
        except JsonPatchError:
            return 422
        if status:
            kept = copy.deepcopy(found)
            kept["status"] = merged.get("status", {})
            if path.startswith(NODES):
                kept["metadata"] = {**merged["metadata"], "managedFields": found["metadata"]["managedFields"]}
            merged = kept
        if path.startswith(NODES) and not _are_quantities(merged.get("status", {})):
            return 422
        tracks = self.tracks and merged["metadata"]["managedFields"] is not None
        if not tracks and not path.startswith(NODES):
            self.objects[path] = merged
            return 200
        fields = merged["metadata"]["managedFields"]
        subresource = "status" if status else ""
        fields[:] = [
            entry for entry in fields if (entry["manager"], entry.get("subresource", "")) != (manager, subresource)
        ]
        at = datetime.fromtimestamp(self.wall(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        owned: Object = {}
        for place in _changed(found.get("status", {}), merged.get("status", {}), ("status",)):
            for entry in fields:
                _disown(entry["fieldsV1"], place)
            _own(owned, place)
        entry = {"manager": manager, "operation": "Update", "time": at, "subresource": subresource, "fieldsV1": owned}
        fields.append(entry)
        self.objects[path] = merged
        return 200

    async def serve(self, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
        listeners, self.port = await listen(0, None)
        task_status.started(self.port)
        await trio.serve_listeners(partial(talk, answer=self._one), listeners)

    async def _one(self, stream: trio.abc.Stream, request: Request) -> bool:
        method, target, _ = request.first.split(" ")
        url = urlsplit(target)
        self.requests.append(f"{method} {url.path}")
        if url.path in self.raw:
            code, raw = self.raw[url.path]
            if raw is None:
                return False
            body = raw
        else:
            code, item = self._answer(method, url.path, parse_qs(url.query), request)
            if code >= 300:
                item = _status(code, method, url.path)
            body = json.dumps(item).encode()
            if code == 404 and not any(url.path.startswith(path) for path in self.kinds):
                body = b"404 page not found\n"
        head = f"HTTP/1.1 {code} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head += f"Date: {format_datetime(datetime.fromtimestamp(self.wall(), UTC), usegmt=True)}\r\n"
        head += f"Retry-After: {self.retry_after}\r\n\r\n" if self.retry_after else "\r\n"
        await stream.send_all(head.encode() + body)
        return True

    def _answer(self, method: str, path: str, query: dict[str, list[str]], request: Request) -> tuple[int, Object]:
        if self.trouble:
            return self.trouble, {}
        if path == "/apis":
            groups: dict[str, list[Object]] = {}
            for _, _, group, version, *_ in (kind.split("/") for kind in sorted(self.kinds) if kind != NODES):
                groups.setdefault(group, []).append({"version": version})
            items = [{"name": name, "versions": versions} for name, versions in groups.items()]
            return 200, {"kind": "APIGroupList", "groups": [{"name": "apps", "versions": [{"version": "v1"}]}, *items]}
        if kinds := [kind for kind in self.kinds if kind.rpartition("/")[0] == path]:
            resources = [{"name": kind.rpartition("/")[2]} for kind in kinds]
            return 200, {"kind": "APIResourceList", "resources": resources}
        if any(f"{method} {path}".startswith(text) for text in self.denied):
            return 403, {}
        status = path.endswith("/status")
        path = path.removesuffix("/status")
        if method == "POST":
            if path not in self.kinds:
                return 404, {}
            body = json.loads(request.body)
            place = f"{path}/{body['metadata']['name']}"
            if place in self.objects:
                return 409, {}
            item = self.make(place)
            if not body.keys() - {"apiVersion", "kind", "metadata"}:
                # Created without a field: none is ever tracked (seen with 1.26).
                item["metadata"]["managedFields"] = None
            return 201, item
        if path.rpartition("/")[0] not in self.kinds or path not in self.objects:
            return 404, {}
        if method == "GET":
            return 200, self.objects[path]
        if method != "PATCH" or request.headers.get("content-type") not in _PATCHES:
            return 415, {}
        manager = query.get("fieldManager", ["unknown"])[0]
        code = self.patch(path, json.loads(request.body), manager=manager, status=status)
        return code, self.objects[path]


def _status(code: int, method: str, path: str) -> Object:
    reason = {403: "Forbidden", 404: "NotFound", 409: "AlreadyExists", 415: "UnsupportedMediaType", 422: "Invalid"}.get(
        code, ""
    )
    *_, kind, name = path.removesuffix("/status").split("/")
    details = {"name": name, "kind": kind}
    return {
        "kind": "Status",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": f"{method} {path}: {code}",
        "details": details,
    }


def _merged(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return result


def _changed(before: Any, after: Any, place: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The places of values that were set or changed, not of those that were removed."""
    if not isinstance(after, dict):
        if before != after:
            yield place
        return
    for key, value in after.items():
        yield from _changed(before.get(key) if isinstance(before, dict) else None, value, (*place, key))


def _own(tree: Object, place: tuple[str, ...]) -> None:
    for part in place:
        tree = tree.setdefault(f"f:{part}", {})


def _disown(tree: Object, place: tuple[str, ...]) -> None:
    *way, last = place
    for part in way:
        tree = tree.get(f"f:{part}", {})
    tree.pop(f"f:{last}", None)


def _are_quantities(status: Object) -> bool:
    amounts = [*status.get("capacity", {}).values(), *status.get("allocatable", {}).values()]
    return all(isinstance(text, str) and _QUANTITY.fullmatch(text) for text in amounts)
