"""An API server with pods of one node: lists, watches, reviews of rights; and the ways in which it fails.

Source: Kubernetes documentation, "API Concepts" (watch events, bookmarks, 410) and "Authorization" (reviews).
"""

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

import trio

from tests.fakes.api_nodes import FakeNodes
from tests.fakes.http_listener import Request, listen, talk

Object = dict[str, Any]  # the JSON of the API


class FakeApiServer:
    """Serves ``pods``; `change` and `delete` are seen by lists and watches.

    ``token``: the one that is accepted; empty: none is needed. ``rights``: ``verb resource`` that reviews allow; None:
    all. ``issues``: the token that a TokenRequest gets; empty: the service account does not exist. ``requests`` has
    method and path of each request, ``tokens`` and ``bodies`` its contents. ``oldest``: watches from an older
    version end with 410. ``nodes``: their objects; without any, each name has an empty one.
    ``frozen``: it takes connections and sends nothing, as a process that is stopped.
    """

    def __init__(self, *, token: str = "") -> None:
        self.token = token
        self.rights: set[str] | None = None
        self.requests: list[str] = []
        self.tokens: list[str] = []
        self.bodies: list[bytes] = []
        self.issues = ""
        self.pods: dict[str, Object] = {}
        self.version = 100
        self.oldest = 0
        self.events: list[tuple[int, bytes]] = []
        self.frozen = False
        self.refusal: tuple[int, str] | None = None
        self.raw: bytes | None = None
        self.port = 0
        self.loop: trio.lowlevel.TrioToken | None = None
        self.nodes = FakeNodes()
        self._changed = trio.Event()
        self._ended = trio.Event()

    @property
    def watches(self) -> list[str]:
        return [path for path in self.requests if "watch=true" in path]

    @property
    def lists(self) -> list[str]:
        return [path for path in self.requests if path.startswith("GET /api/v1/pods?") and "watch=true" not in path]

    def change(self, uid: str, *, labels: Object | None = None, **more: Any) -> None:
        """Make a pod, or give it other labels (``annotations`` and other metadata in ``more``)."""
        before = self.pods.get(uid)
        self.version += 1
        metadata = {
            "name": f"pod-{uid}",
            "namespace": "default",
            "uid": uid,
            **({} if before is None else before["metadata"]),
            **({} if labels is None else {"labels": labels}),
            **more,
            "resourceVersion": str(self.version),
        }
        self.pods[uid] = {"metadata": metadata, "spec": {"nodeName": "n1", "containers": []}}
        self._emit("ADDED" if before is None else "MODIFIED", self.pods[uid])

    def change_soon(self, uid: str, **metadata: Any) -> None:
        """`change` on the loop's thread, from another one."""
        if self.loop is not None:
            self.loop.run_sync_soon(partial(self.change, uid, **metadata))

    def delete(self, uid: str) -> None:
        self.version += 1
        pod = self.pods.pop(uid)
        pod["metadata"]["resourceVersion"] = str(self.version)
        self._emit("DELETED", pod)

    def bookmark(self) -> None:
        self.version += 1
        self._emit("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(self.version)}})

    def expire(self) -> None:
        """Forget the history: an ``ERROR`` on open watches, 410 for new ones."""
        self.oldest = self.version = self.version + 10
        self._emit("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"})

    def restore(self, version: int) -> None:
        """A store of an earlier time: open watches end; those from a later version get nothing until it has passed."""
        self.version = version
        self.events = [event for event in self.events if event[0] <= version]
        self.end_watches()

    def say(self, line: bytes) -> None:
        """Send any line on the watches."""
        self.events.append((self.version, line))
        self._wake()

    def end_watches(self) -> None:
        """End them as after their timeout."""
        ended, self._ended = self._ended, trio.Event()
        ended.set()

    def _emit(self, kind: str, item: Object) -> None:
        self.say(json.dumps({"type": kind, "object": item}).encode())

    def _wake(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def serve(
        self, tls: ssl.SSLContext | None = None, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED
    ) -> None:
        listeners, self.port = await listen(self.port, tls)
        task_status.started(self.port)
        await trio.serve_listeners(partial(talk, answer=self._one), listeners)

    async def _one(self, stream: trio.abc.Stream, request: Request) -> bool:
        method, path, _ = request.first.split(" ")
        self.requests.append(f"{method} {path}")
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        self.tokens.append(token)
        self.bodies.append(request.body)
        if self.frozen:
            await trio.sleep_forever()
        if self.raw is not None:
            await stream.send_all(self.raw)
            return False
        if self.refusal is not None:
            await self._answer(stream, self.refusal[0], {"kind": "Status", "message": self.refusal[1]})
        elif self.token and token != self.token:
            await self._answer(stream, 401, {"kind": "Status", "message": "Unauthorized"})
        elif "watch=true" in path:
            return await self._watch(stream, int(parse_qs(urlsplit(path).query)["resourceVersion"][0]))
        else:
            await self._answer(stream, *self._result(method, path, request))
        return True

    def _result(self, method: str, path: str, request: Request) -> tuple[int, Object]:
        where, body = urlsplit(path).path, request.body
        if where in {"/api/v1/pods", "/pods"}:
            meta = {"resourceVersion": str(self.version)}
            return 200, {"kind": "PodList", "metadata": meta, "items": list(self.pods.values()) or None}
        if where == "/version":
            return 200, {}
        if where.startswith("/api/v1/nodes/") and self.nodes.nodes:
            return self.nodes.answer(method, where, request.headers.get("content-type", ""), body)
        if where.startswith("/api/v1/nodes/"):
            return 200, {"kind": "Node", "metadata": {"name": where.rpartition("/")[2]}}
        if method == "POST" and where.endswith("/selfsubjectaccessreviews"):
            wanted = json.loads(body)["spec"]["resourceAttributes"]
            resource = "/".join(filter(None, (wanted["resource"], wanted.get("subresource"))))
            allowed = self.rights is None or f"{wanted['verb']} {resource}" in self.rights
            return 201, {"kind": "SelfSubjectAccessReview", "status": {"allowed": allowed}}
        if method == "POST" and where.endswith("/token") and self.issues:
            issued = {"token": self.issues, "expirationTimestamp": "2030-01-01T00:00:00Z"}
            return 201, {"kind": "TokenRequest", "status": issued}
        return 404, {"kind": "Status", "message": "not found"}

    async def _answer(self, stream: trio.abc.Stream, code: int, item: Object) -> None:
        body = json.dumps(item).encode()
        head = f"HTTP/1.1 {code} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        await stream.send_all(head.encode() + body)

    async def _watch(self, stream: trio.abc.Stream, since: int) -> bool:
        if since < self.oldest:
            await self._answer(stream, 410, {"kind": "Status", "code": 410, "message": "too old"})
            return True
        ended = self._ended  # before the answer is sent: a test may end the watches meanwhile
        sent = next((number for number, (at, _) in enumerate(self.events) if at > since), len(self.events))
        await stream.send_all(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        while True:
            changed = self._changed
            while self.frozen:  # noqa: ASYNC110  (tests set it)
                await trio.sleep(0.01)
            while sent < len(self.events):
                at, line = self.events[sent]
                line += b"\n"
                sent += 1
                if at < since:
                    continue  # a version that the client has seen, of a store that was replaced
                await stream.send_all(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            if ended.is_set():
                await stream.send_all(b"0\r\n\r\n")
                return True
            async with trio.open_nursery() as nursery:
                for event in (changed, ended):
                    nursery.start_soon(_cancel_after, event, nursery.cancel_scope)


async def _cancel_after(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


@contextmanager
def in_thread(make: Callable[[], FakeApiServer], tls: ssl.SSLContext | None = None) -> Iterator[FakeApiServer]:
    """The server in a thread of its own, for tests of programs that run an event loop themselves."""
    ready = threading.Event()
    made: list[FakeApiServer] = []
    ends: list[Callable[[], None]] = []

    async def main() -> None:
        server = make()
        server.loop = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, tls)
            token = server.loop
            ends.append(lambda: token.run_sync_soon(nursery.cancel_scope.cancel))
            made.append(server)
            ready.set()

    thread = threading.Thread(target=trio.run, args=(main,), daemon=True)
    thread.start()
    if not ready.wait(10):
        raise RuntimeError("the fake API server did not start")
    try:
        yield made[0]
    finally:
        ends[0]()
        thread.join(10)
