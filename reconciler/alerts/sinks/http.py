"""What the sinks that speak HTTP share: whom to ask, and what an answer means for the notices."""

import base64
import time
from collections.abc import Mapping
from typing import Final, final

from cgroupfs.errors import SourceError
from reconciler.alerts.sinks.base import SinkError
from reconciler.httpclient import Answer, HttpSession
from reconciler.httpconfig import Trust
from reconciler.urls import MASK, split_url

LONGEST_WAIT_S: Final = 3600.0
"""A server's Retry-After counts up to here."""
_NEVER: Final = frozenset({400, 413, 415, 422})
"""Statuses that mean the message and not the moment."""


@final
class Door:
    """One server: a kept connection, and the path and credentials of its URL, which no message shows."""

    def __init__(self, name: str, url: str, trust: Trust, timeout_s: float) -> None:
        base, self._target, self._user = split_url(url)
        self._session = HttpSession(trust.peer(name, base, timeout_s))
        self._name = name
        self._base = base

    async def send(
        self, method: str, body: bytes, content_type: str, headers: Mapping[str, str] | None = None, *, below: str = ""
    ) -> None:
        """One request; ``below`` goes behind the URL's path. Errors: `SinkError`."""
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
        """Close the connection."""
        await self._session.aclose()


def check(answer: Answer, what: str) -> None:
    """Errors: `SinkError` for every answer that is no success."""
    if answer.good:
        return
    words = f" {answer.words}" if answer.words else ""
    raise SinkError(
        f"{what}: it answered {answer.status}{words}",
        retry_after_s=retry_after_s(answer.headers.get("retry-after"), time.time()),
        permanent=answer.status in _NEVER,
    )


def retry_after_s(text: str | None, now_s: float) -> float | None:
    """A Retry-After header in seconds from now, bounded; None for none, or one that nobody can read.

    Source: RFC 9110, section 10.2.3: a number of seconds, or a date.
    """
    if text is None:
        return None
    if text.strip().isdecimal():
        wait_s = float(text)
    else:
        from email.utils import parsedate_to_datetime  # noqa: PLC0415  (rare, and not light)

        try:
            wait_s = parsedate_to_datetime(text).timestamp() - now_s
        except (ValueError, TypeError, OverflowError):
            return None
    return min(max(0.0, wait_s), LONGEST_WAIT_S)
