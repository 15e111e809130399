"""A small HTTP/1.1 server on loopback whose answers, good and bad, are written down beforehand."""

import ssl
from dataclasses import dataclass, field
from typing import Any

import trio
import trustme

from reconciler.clients.endpoint import HttpEndpoint, InlineCredentials
from tests.fakes.http_listener import Request, listen, talk


def server_tls(authority: trustme.CA, name: str = "127.0.0.1", *, ask_client: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(name).configure_cert(context)
    if ask_client:
        context.verify_mode = ssl.CERT_REQUIRED
        authority.configure_trust(context)
    return context


@dataclass
class Reply:
    """One answer. ``cut``: promise this many bytes more than are sent, then close. ``hang_s``: wait before it."""

    body: bytes = b""
    status: str = "200 OK"
    cut: int = 0
    hang_s: float = 0
    raw: bytes | None = None
    close: bool = False
    headers: tuple[str, ...] = ()


@dataclass
class HttpPeer:
    """Answers each request with the next `Reply`, the last one for ever; records its requests."""

    replies: list[Reply]
    requests: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    connections: int = 0
    port: int = 0

    async def serve(
        self, tls: ssl.SSLContext | None = None, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED
    ) -> None:
        listeners, self.port = await listen(0, tls)
        task_status.started(self.port)
        await trio.serve_listeners(self._talk, listeners)

    async def endpoint(
        self, nursery: trio.Nursery, authority: trustme.CA | None = None, *, token: str | None = None, **given: Any
    ) -> HttpEndpoint:
        """Serve, and give the address: with an authority over TLS, and trusting it."""
        port = await nursery.start(self.serve, None if authority is None else server_tls(authority))
        ca = None if authority is None else authority.cert_pem.bytes().decode()
        url = f"http{'s' if authority else ''}://127.0.0.1:{port}"
        return HttpEndpoint(**{"name": "x", "url": url, "inline": InlineCredentials(ca=ca, token=token), **given})

    async def _talk(self, stream: trio.abc.Stream) -> None:
        self.connections += 1
        await talk(stream, self._one)

    async def _one(self, stream: trio.abc.Stream, request: Request) -> bool:
        self.requests.append({"": request.first, **request.headers})
        self.bodies.append(request.body)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        await trio.sleep(reply.hang_s)
        if reply.raw is not None:
            await stream.send_all(reply.raw)
            return False
        length = len(reply.body) + reply.cut
        await stream.send_all(
            "\r\n".join(
                (
                    f"HTTP/1.1 {reply.status}",
                    "Content-Type: application/json",
                    f"Content-Length: {length}",
                    *reply.headers,
                    "\r\n",
                )
            ).encode()
            + reply.body
        )
        return not reply.cut and not reply.close
