"""Common parts of HTTP sinks: the endpoint, and the meaning of a response for the notices."""

import base64
import time
from collections.abc import Mapping
from typing import Final, final

from cgroupfs.errors import SourceError
from reconciler.alerts.sinks.base import SinkError
from reconciler.clients.endpoint import MASK, split_url
from reconciler.clients.http import HttpResponse, HttpSession
from reconciler.clients.http_config import TlsTrust

_NEVER: Final = frozenset({400, 413, 415, 422})
"""Statuses that mean the message and not the moment."""


@final
class HttpSink:
    """One server: a kept connection, and the path and credentials of its URL, which no message shows."""

    def __init__(self, name: str, url: str, trust: TlsTrust, timeout_s: float) -> None:
        base, self._target, self._user = split_url(url)
        self._session = HttpSession(trust.peer(name, base, timeout_s))
        self._name = name
        self._base = base

    async def send(
        self, method: str, body: bytes, content_type: str, headers: Mapping[str, str] | None = None, *, below: str = ""
    ) -> None:
        """One request; ``below`` is appended to the URL's path. Errors: `SinkError`."""
        given = {"Content-Type": content_type, **(headers or {})}
        if self._user is not None:
            given["Authorization"] = f"Basic {base64.b64encode(self._user.encode()).decode()}"
        target = f"{self._target.rstrip('/')}{below}" if below else self._target
        shown = below or ("" if self._target == "/" else f"/{MASK}")
        try:
            answer = await self._session.exchange(method, target, body, given, shown=shown)
        except SourceError as exc:
            raise SinkError(str(exc).removeprefix(f"{self._name}: ")) from exc
        check(answer, f"{self._base}: {method} {shown}".rstrip())

    async def aclose(self) -> None:
        await self._session.aclose()


def check(answer: HttpResponse, what: str) -> None:
    """Errors: `SinkError` for every response other than a success."""
    if answer.ok:
        return
    message = f" {answer.excerpt}" if answer.excerpt else ""
    raise SinkError(
        f"{what}: HTTP {answer.status}{message}",
        retry_after_s=answer.wait_s(time.time()),
        permanent=answer.status in _NEVER,
    )
