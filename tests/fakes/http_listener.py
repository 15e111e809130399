"""The side of a server that every fake HTTP/1.1 peer has: a port of loopback, connections, whole requests."""

import ssl
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import trio

Answer = Callable[[trio.abc.Stream, "Request"], Awaitable[bool]]
"""Answers one request; False: the connection ends."""


class Request(NamedTuple):
    """One request; header names are in lower case."""

    first: str
    headers: dict[str, str]
    body: bytes


async def listen(port: int, tls: ssl.SSLContext | None) -> tuple[list[trio.abc.Listener[trio.abc.Stream]], int]:
    """Listeners of 127.0.0.1 and their port; ``port`` 0: any."""
    listeners = await trio.open_tcp_listeners(port, host="127.0.0.1")
    number = int(listeners[0].socket.getsockname()[1])
    if tls is None:
        return [*listeners], number
    return [trio.SSLListener(listener, tls, https_compatible=True) for listener in listeners], number


async def talk(stream: trio.abc.Stream, answer: Answer) -> None:
    """Answer the requests of one connection until one of both sides ends it."""
    try:
        while (request := await read_request(stream)) is not None and await answer(stream, request):
            pass
    except (trio.BrokenResourceError, trio.ClosedResourceError, ssl.SSLError):
        return
    finally:
        with trio.move_on_after(0.1, shield=True):
            await stream.aclose()


async def read_request(stream: trio.abc.Stream) -> Request | None:
    """The next request; None: the client closed the connection."""
    head = b""
    while b"\r\n\r\n" not in head:
        chunk = await stream.receive_some(65536)
        if not chunk:
            return None
        head += chunk
    head, _, body = head.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        chunk = await stream.receive_some(65536)
        if not chunk:
            return None
        body += chunk
    return Request(first, headers, body)
