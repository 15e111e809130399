"""The listeners of a daemon, with clients for all of them."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx2
import trio

from reconciler.config.model import HttpSection
from reconciler.web.components import components
from tests.fakes.constants import varied
from tests.fakes.ports import free_port
from tests.fakes.web import FakeControl, FakeShown

LIVES: Final = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
"""The last request of a connection: a server that is up answers 200."""
NO_TLS: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
# The server may end an idle connection in the moment in which its client uses it again.
ANEW: Final = httpx2.Limits(max_keepalive_connections=0)


class Site:
    """A daemon's two sockets with clients for both."""

    def __init__(self, path: str, port: int, shown: FakeShown | None = None) -> None:
        self.path = path
        self.port = port
        self.shown = shown or FakeShown()
        self.control = FakeControl()
        # To load the machine's authorities for each would be half of these tests' work.
        self.tcp = httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=NO_TLS, limits=ANEW)
        transport = httpx2.AsyncHTTPTransport(uds=path, verify=NO_TLS, limits=ANEW)
        self.unix = httpx2.AsyncClient(transport=transport, base_url="http://bypassd")

    async def metric(self, name: str) -> float:
        """One series of ``/metrics``, 0 where there is none."""
        for line in (await self.unix.get("/metrics")).text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.rpartition(" ")[2])
        return 0.0

    async def until(self, name: str) -> None:
        """Wait until this series is there, and more than 0."""
        with trio.fail_after(60):
            while not await self.metric(name):  # noqa: ASYNC110  (what counts it has no event)
                await trio.sleep(0.01)


@asynccontextmanager
async def serving(
    directory: Path, max_connections: int = 32, shown: FakeShown | None = None, **more: Any
) -> AsyncIterator[Site]:
    site = Site(str(directory / "s"), free_port(), shown)
    config = varied(HttpSection(port=site.port, socket=site.path, **more), max_connections=max_connections)
    async with trio.open_nursery() as nursery:
        for component in components(config, site.shown, site.control, names=["node-7"]):
            await nursery.start(partial(component.run))
        async with site.tcp, site.unix:
            yield site
        nursery.cancel_scope.cancel()


async def raw(site: Site, request: bytes, timeout_s: float = 60) -> bytes:
    """Send bytes over TCP and read until the other side closes."""
    return await exchange(await trio.open_tcp_stream("127.0.0.1", site.port), request, timeout_s)


async def raw_unix(site: Site, request: bytes, timeout_s: float = 60) -> bytes:
    """The same over root's unix socket."""
    return await exchange(await trio.open_unix_socket(site.path), request, timeout_s)


async def exchange(stream: trio.SocketStream, request: bytes, timeout_s: float) -> bytes:
    answer = b""
    async with stream:
        with trio.fail_after(timeout_s):
            try:
                if request:
                    await stream.send_all(request)
                async for part in stream:
                    answer += part
            except trio.BrokenResourceError:
                pass
    return answer
