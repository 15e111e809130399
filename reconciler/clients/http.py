"""The HTTP client of all parts: the kubelet, the API server, webhooks and probes.

Every failure becomes one `SourceError` that names the peer and the reason. Longer than other modules because a session,
its connections and the errors of both share one library (httpcore2) and its limits.
"""

import errno
import logging
import math
import os
import re
import socket
import ssl
import string
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, aclosing, contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, final
from urllib.parse import quote
from weakref import WeakValueDictionary

import trio
from msgspec import Struct

from cgroupfs.errors import SourceError
from reconciler import __version__
from reconciler.clients.endpoint import MASK, HttpEndpoint, split_url
from reconciler.clients.token_life import token_of
from reconciler.runtime.format import duration, size
from reconciler.runtime.lazy import import_in_thread
from reconciler.runtime.safe_files import FileRule, file_version, read_file
from reconciler.runtime.stints import in_worker

if TYPE_CHECKING:
    import httpcore2

    from reconciler.clients.http_backend import ClosingBackend

LONGEST_WAIT_S: Final = 3600.0
"""A delay that a server requests counts up to here."""
_LONGEST_DATE: Final = 100
"""Characters of a Retry-After header."""
_LARGEST: Final = 64 * 1024 * 1024
# Of an answer that is passed on as it arrives: a bound on work, not on memory.
_LONGEST_READ: Final = 1024 * 1024 * 1024
_MOST_WAITS: Final = 10
"""A response in parts may take this many times the peer's timeout in all."""
# Of a response that is read for its message and not for its data.
_MOST_KEPT: Final = 8 * 1024
_NO_SECRETS: Final = frozenset({"accept", "content-type", "user-agent"})
_BETWEEN: Final = re.compile("[/?&=]")
_SHORTEST_SECRET: Final = 6
_NO_HEADER: Final = "invalid character in a request header"
_KEEPALIVE_S: Final = 120.0
_CLOSE_S: Final = 1.0
"""A close that takes longer is abandoned, and the socket closed."""
_PROBES: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
# With the system's certificates a context is 0.8 MiB and takes 60 ms: sessions with the same trust share it while one
# exists.
_CONTEXTS: Final[WeakValueDictionary[object, ssl.SSLContext]] = WeakValueDictionary()


class SilentPeerError(SourceError):
    """No response, or no further part of one: unreachable, refused, broken off, or silent for too long."""


class AnswerError(SourceError):
    """A response with another status than 200; it may request a delay."""

    def __init__(self, source: str, message: str, answer: "HttpResponse") -> None:
        super().__init__(source, message)
        self.answer = answer


Take = Callable[[bytes], Awaitable[None]]
"""Gets the parts of a body as they arrive."""


class HttpResponse(Struct, frozen=True, kw_only=True):
    """A peer's response, whatever it means. Header names are in lower case; ``body`` may have been cut.

    ``seconds``: from the sending of the request to the end of the response; ``connect_s``: the time before that to make
    a connection, 0.0 where one existed.
    """

    status: int
    headers: Mapping[str, str] = {}
    body: bytes = b""
    seconds: float = 0.0
    connect_s: float = 0.0

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def excerpt(self) -> str:
        return " ".join(self.body[:200].decode(errors="replace").split())[:120]

    def wait_s(self, now_s: float) -> float | None:
        """The delay that the peer requests; None: none. ``now_s``: as `retry_after_s`, for a peer without a clock."""
        at_s = self.at_s
        return retry_after_s(self.headers.get("retry-after"), now_s if at_s is None else at_s)

    @property
    def at_s(self) -> float | None:
        """When the peer sent it, by its own clock (seconds since the epoch); None: it does not say."""
        text = self.headers.get("date", "")
        return _date_s(text) if 0 < len(text) <= _LONGEST_DATE else None


class _Request(NamedTuple):
    """``shown`` replaces the path in messages, if that contains a secret."""

    method: str
    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = {}
    shown: str | None = None

    @property
    def what(self) -> str:
        """Before a message."""
        return f"{self.path}: " if self.shown is None else f"{self.method} {self.shown}".rstrip() + ": "

    def secrets(self, token: str | None) -> list[str]:
        """What a server's refusal may quote of the request, and no message may show; the longest first."""
        found = {token or ""}
        for name, value in self.headers.items():
            if name.lower() not in _NO_SECRETS:
                found |= {value, *value.split()}
        if self.shown is not None:
            path, _, query = self.path.partition("?")
            found |= {self.path, path, query, *_BETWEEN.split(self.path)} - {self.shown, *_BETWEEN.split(self.shown)}
        return sorted((text for text in found if len(text) >= _SHORTEST_SECRET), key=len, reverse=True)

    def fields(self, host: str, token: str | None) -> list[tuple[bytes, bytes]]:
        """The header as it is sent; what the asker gives wins. Errors: `ValueError` for what no header can hold."""
        texts = {
            "Host": host,
            "User-Agent": f"bypassd/{__version__}",
            "Accept": "application/json",
            "Accept-Encoding": "identity",  # the library decodes nothing
            **({"Authorization": f"Bearer {token}"} if token else {}),
        }
        own = {name.lower() for name in self.headers}
        fields = [(name, value) for name, value in texts.items() if name.lower() not in own]
        return [(name.encode("ascii"), value.encode("latin-1")) for name, value in (*fields, *self.headers.items())]


@final
class HttpSession:
    """One kept connection to a `HttpEndpoint`. Use as ``async with``; it may be used again after any error."""

    def __init__(self, peer: HttpEndpoint) -> None:
        self._peer = peer
        self._pool: httpcore2.AsyncConnectionPool | None = None
        self._backend: ClosingBackend | None = None
        self._trusted: object = None
        self._token: tuple[object, str | None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection; the next `get` opens another."""
        pool, self._pool = self._pool, None
        if pool is not None:
            with trio.move_on_after(_CLOSE_S, shield=True):
                await pool.aclose()
            if self._backend is not None:
                self._backend.close()

    async def get(self, path: str) -> bytes:
        """The body of a 200.

        Errors: `SourceError` for anything else: refused, silent, broken off, another status, too long.
        """
        body = bytearray()

        async def take(chunk: bytes) -> None:
            body.extend(chunk)
            if len(body) > _LARGEST:
                raise self._error(f"{path}: the answer is larger than {size(_LARGEST)}")

        self._check(path, await self.stream("GET", path, take))
        return bytes(body)

    async def read(self, path: str, take: Take) -> None:
        """Hand the body of a 200 to ``take`` as it arrives; nothing of it is kept.

        The peer's timeout bounds each wait for a part of it, and `_MOST_WAITS` times that all waits together, without
        the time of ``take``. Errors: as `get`, but for the length: `_LONGEST_READ` bytes. ``take`` may have had a part
        before.
        """
        self._check(path, await self._within(_Request("GET", path), take=take, in_parts=True))

    async def stream(
        self,
        method: str,
        path: str,
        take: Take,
        headers: Mapping[str, str] | None = None,
        *,
        shown: str | None = None,
    ) -> HttpResponse:
        """As `exchange`, but ``take`` gets the body of a success as it arrives; the answer has none then."""
        return await self._within(_Request(method, path, headers=headers or {}, shown=shown), take=take)

    async def follow(
        self,
        path: str,
        take: Take,
        *,
        silence_s: float,
        longest_s: float,
        begun: Callable[[], None] = lambda: None,
    ) -> HttpResponse:
        """As `stream` of a GET whose answer has no end of its own, such as a watch.

        The peer's timeout bounds the wait for the beginning of the answer, ``silence_s`` that for each next part, and
        ``longest_s`` all waits together. ``begun`` is called when a success starts. Errors: `SourceError`, also when
        one of these has passed.
        """
        request = _Request("GET", path)
        what = f"{path.partition('?')[0]}: "
        waits: _Waits | None = None
        try:
            with trio.fail_after(self._peer.timeout_s) as scope:
                waits = waiting = _Waits(scope, silence_s, take, longest_s)

                def has_begun() -> None:
                    waiting.begin()
                    begun()

                return await self._ask(request, what, _MOST_KEPT, waits.take, begun=has_begun)
        except trio.TooSlowError as exc:
            await self.aclose()
            if waits is None or not waits.begun:
                raise self._silent(f"{what}no answer within {duration(self._peer.timeout_s)}") from exc
            bound_s = longest_s if waits.used_up else silence_s
            raise self._silent(f"{what}no further part within {duration(bound_s)}") from exc

    async def exchange(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        most: int = _MOST_KEPT,
        timeout_s: float | None = None,
        shown: str | None = None,
    ) -> HttpResponse:
        """Any response of the peer, of its body the first ``most`` bytes. ``timeout_s`` None: the peer's.

        ``shown`` replaces the path in messages, if that contains a secret. Errors: `SourceError` without a whole
        response: unreachable, silent, broken off.
        """
        request = _Request(method, path, body, headers or {}, shown)
        return await self._within(request, keep=most, timeout_s=timeout_s)

    async def _within(
        self,
        request: _Request,
        *,
        keep: int = _MOST_KEPT,
        timeout_s: float | None = None,
        take: Take | None = None,
        in_parts: bool = False,
    ) -> HttpResponse:
        """The answer before the deadline, cut at ``keep``. ``take`` gets the body of a success instead.

        ``in_parts``: the deadline is one for each part, as of `read`.
        """
        patience_s = self._peer.timeout_s if timeout_s is None else timeout_s
        waits: _Waits | None = None
        try:
            with trio.fail_after(patience_s) as scope:
                if in_parts and take is not None:
                    waits = _Waits(scope, patience_s, take, patience_s * _MOST_WAITS)
                    take = waits.take
                return await self._ask(request, request.what, keep, take)
        except trio.TooSlowError as exc:
            await self.aclose()
            late = "no answer" if waits is None or not waits.parts else "incomplete answer"
            if waits is not None and waits.used_up:
                late, patience_s = "incomplete answer", patience_s * _MOST_WAITS
            raise self._silent(f"{request.what}{late} within {duration(patience_s)}") from exc

    async def _ask(
        self,
        request: _Request,
        what: str,
        keep: int,
        take: Take | None,
        *,
        begun: Callable[[], None] | None = None,
    ) -> HttpResponse:
        """``begun`` is called when a success has started, before its first part."""
        # Lazy: with TLS it costs 5 MiB, and many nodes send no request. In a thread: it takes a tenth of a second. Not
        # httpx2 above it, whose redirects, cookies, forms and decoding are not needed, and which takes 2 MiB more.
        await import_in_thread("httpcore2")
        import httpcore2

        if self._peer.exposed:
            raise self._error(f"{what}{self._peer.exposed}")
        pool = await self._open()
        token = self._read_token()
        try:
            url, host = _address(self._peer.url, request.path)
            fields = request.fields(host, token)
        except UnicodeError:
            # Its text, and what it holds, is the header's value: it is not kept as the cause either.
            raise self._error(f"{what}{_NO_HEADER}") from None
        except ValueError as exc:
            raise self._error(f"{what}{exc}") from exc
        began, connecting = trio.current_time(), 0.0

        async def trace(event: str, _: object) -> None:
            nonlocal began, connecting
            if event.startswith("connection.connect_") and event.endswith(".started"):
                connecting = trio.current_time()
            elif event.endswith(".send_request_headers.started"):
                began = trio.current_time()

        # Any: the library's own type of them.
        extensions: dict[str, Any] = {"trace": trace}
        if self._peer.server_name:
            extensions["sni_hostname"] = self._peer.server_name
        try:
            async with pool.stream(
                request.method, url, content=request.body, headers=fields, extensions=extensions
            ) as answer:
                good = 200 <= answer.status < 300
                if take is not None and good:
                    body = b""
                    if begun is not None:
                        begun()
                    if not await _pass_on(answer.aiter_stream(), take):
                        raise self._error(f"{what}the answer is larger than {size(_LONGEST_READ)}")
                else:
                    body = await _body(answer.aiter_stream(), keep)
                if not good:
                    for secret in request.secrets(token):
                        body = body.replace(secret.encode(), MASK.encode())
                return HttpResponse(
                    status=answer.status,
                    headers=_by_name(answer.headers),
                    body=body,
                    seconds=trio.current_time() - began,
                    connect_s=began - connecting if connecting else 0.0,
                )
        except httpcore2.LocalProtocolError:
            # Its text quotes the header's value, which may be a secret.
            await self.aclose()
            raise self._error(f"{what}{_NO_HEADER}") from None
        except (SourceError, ValueError):
            # From `take`, or too long: the connection has an unread rest.
            await self.aclose()
            raise
        except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException) as exc:
            await self.aclose()
            raise self._silent(f"{what}{_reason(exc)}") from exc

    def _check(self, path: str, answer: HttpResponse) -> None:
        if answer.status != 200:
            message = f"{self._peer.shown}: {path}: {self._refused(answer)}"
            raise AnswerError(self._peer.name, message, answer)

    def _refused(self, answer: HttpResponse) -> str:
        if answer.status == 401:
            return f"401: unauthorized with {self._peer.credentials}"
        if answer.status == 403:
            return f"403: forbidden with {self._peer.credentials}"
        return f"HTTP {answer.status} {answer.excerpt}".rstrip()

    async def _open(self) -> "httpcore2.AsyncConnectionPool":
        trusted = tuple(file_version(path) for path in (self._peer.ca_file, self._peer.cert_file, self._peer.key_file))
        if self._pool is not None and trusted == self._trusted:
            return self._pool
        context = await self._shared_context(trusted) if self._peer.secure else None
        await self.aclose()
        import httpcore2

        from reconciler.clients.http_backend import ClosingBackend

        self._backend = ClosingBackend()
        # At our own level debug each request would be ten lines.
        logging.getLogger("httpcore2").setLevel(logging.WARNING)
        # No timeouts of the library's: the whole exchange has one deadline, in `_within`.
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=context,
            max_connections=1,
            keepalive_expiry=_KEEPALIVE_S,
            network_backend=self._backend,
            # A peer that vanished without a word ends a watch within a minute.
            socket_options=_PROBES,
        )
        self._trusted = trusted
        return self._pool

    async def _shared_context(self, versions: object) -> ssl.SSLContext:
        peer = self._peer
        key = versions, peer.ca_file, peer.cert_file, peer.key_file, peer.insecure, peer.inline, peer.root_only
        context = _CONTEXTS.get(key)
        if context is None:
            context = await in_worker(self._context)
            _CONTEXTS[key] = context
        return context

    def _context(self) -> ssl.SSLContext:
        peer = self._peer
        try:
            with ExitStack() as held:

                def path_of(path: str | None) -> str | None:
                    return None if path is None else held.enter_context(_in_memory(self._read(path)))

                context = ssl.create_default_context(cafile=path_of(peer.ca_file), cadata=peer.inline.ca)
                # What is trusted may be a server's own certificate, without its issuer's (a kubelet's tlsCertFile).
                context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
                if peer.insecure:
                    context.check_hostname = False
                    context.verify_mode = ssl.CERT_NONE
                if (cert := path_of(peer.cert_file)) is not None:
                    context.load_cert_chain(cert, path_of(peer.key_file), _no_pass_phrase)
                elif peer.inline.cert:
                    both = f"{peer.inline.cert}\n{peer.inline.key or ''}".encode()
                    context.load_cert_chain(held.enter_context(_in_memory(both)), password=_no_pass_phrase)
        except OSError as exc:
            files = ", ".join(path for path in (peer.ca_file, peer.cert_file, peer.key_file) if path)
            files = files or "the certificates given"
            raise self._error(f"cannot use {files}: {exc.strerror or exc}") from exc
        return context

    def _read_token(self) -> str | None:
        """The bearer token; read again when the file has been replaced, as projected tokens are every hour."""
        path = self._peer.token_file
        version = None if path is None else file_version(path)
        if self._token is None or self._token[0] != version:
            self._token = version, token_of(self._peer)
        return self._token[1]

    def _read(self, path: str) -> bytes:
        """One of the peer's files. Errors: `OSError`."""
        rule = FileRule.ROOT if path in self._peer.root_only else FileRule.OPERATOR
        return read_file(os.path.abspath(path), rule)

    def _error(self, message: str) -> SourceError:
        return SourceError(self._peer.name, f"{self._peer.shown}: {message}")

    def _silent(self, message: str) -> SilentPeerError:
        return SilentPeerError(self._peer.name, f"{self._peer.shown}: {message}")


@final
class _Waits:
    """Moves a scope's deadline so that only waiting for the peer counts; ``take`` is to be called with each part."""

    def __init__(self, scope: trio.CancelScope, patience_s: float, take: Take, whole_s: float) -> None:
        self.parts = 0
        self.begun = False
        self._scope = scope
        self._patience_s = patience_s
        self._take = take
        self._left_s = whole_s
        self._since = trio.current_time()

    @property
    def used_up(self) -> bool:
        """Whether it was all waits together that were too long, and not one."""
        return self._left_s < self._patience_s

    def begin(self) -> None:
        """The answer has started: from now on each part has the patience for one."""
        self.begun = True
        self._since = trio.current_time()
        self._scope.deadline = self._since + min(self._patience_s, self._left_s)

    async def take(self, part: bytes) -> None:
        self.parts += 1
        self._left_s -= trio.current_time() - self._since
        # How long the caller takes depends on what the answer holds: it is not the peer's delay.
        self._scope.deadline = math.inf
        await self._take(part)
        self._since = trio.current_time()
        self._scope.deadline = self._since + min(self._patience_s, self._left_s)


def retry_after_s(text: str | None, now_s: float) -> float | None:
    """A Retry-After header in seconds from now, bounded; None for none, or an unreadable one.

    Source: RFC 9110, section 10.2.3: a number of seconds, or a date.
    """
    if text is None:
        return None
    text = text.strip()
    plain = text.isascii() and text.isdecimal()
    if len(text) > _LONGEST_DATE:
        # So many digits are more than the longest wait; and no date is as long.
        return LONGEST_WAIT_S if plain else None
    if plain:
        wait_s = float(text)
    else:
        if (at_s := _date_s(text)) is None:
            return None
        wait_s = at_s - now_s
    return min(max(0.0, wait_s), LONGEST_WAIT_S)


def _date_s(text: str) -> float | None:
    """Source: RFC 9110, section 5.6.7."""
    from email.utils import parsedate_to_datetime  # rare, and not light

    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None


def _address(base: str, path: str) -> "tuple[httpcore2.URL, str]":
    """Target, address and the field ``Host`` of a request. Errors: `ValueError` for an invalid ``base``."""
    import httpcore2

    root, prefix, _ = split_url(base)
    place = httpcore2.URL(root)
    # Encoded characters remain; only those that a request must not contain are encoded here.
    target = quote(prefix.rstrip("/") + path, safe=string.punctuation)
    url = httpcore2.URL(scheme=place.scheme, host=place.host, port=place.port, target=target)
    return url, root.partition("://")[2].removesuffix(":443" if place.scheme == b"https" else ":80")


def _by_name(fields: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Fields by their names in lower case; of a repeated field all values, joined."""
    texts: dict[str, str] = {}
    for raw, value in fields:
        name, text = raw.decode("latin-1").lower(), value.decode("latin-1")
        texts[name] = f"{texts[name]}, {text}" if name in texts else text
    return texts


async def _body(stream: AsyncGenerator[bytes], keep: int) -> bytes:
    """The first ``keep`` bytes of the body."""
    body, length = bytearray(), 0
    async with aclosing(stream) as chunks:
        async for chunk in chunks:
            length += len(chunk)
            # The rest is read, too, up to a bound: the library leaves its inner generators open after a half-read body.
            body += chunk[: max(0, keep - len(body))]
            if length > _LARGEST:
                break
    return bytes(body)


async def _pass_on(stream: AsyncGenerator[bytes], take: Take) -> bool:
    """Whether the body ended within the bound."""
    length = 0
    async with aclosing(stream) as chunks:
        async for chunk in chunks:
            length += len(chunk)
            if length > _LONGEST_READ:
                return False
            await take(chunk)
    return True


def _no_pass_phrase() -> str:
    """In place of OpenSSL's prompt on a terminal, for which a worker thread would wait without an end."""
    raise OSError(errno.EINVAL, "the key has a pass phrase; expected one without")


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """The path of a file without a name, in memory, with this content. Errors: `OSError`."""
    # OpenSSL takes certificates and keys from a file only. So it reads the same content that was checked.
    number = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(number, content)
        yield f"/proc/self/fd/{number}"
    finally:
        os.close(number)


def _reason(exc: Exception) -> str:
    """The reason of a failed exchange, for people: the innermost cause with a text."""
    cause: BaseException | None = exc
    inner: BaseException = exc
    while cause is not None:
        inner = cause
        # One address tried of several is as good as another.
        cause = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause.__cause__ or cause.__context__
    cause = inner
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {cause.verify_message}"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(exc) or type(exc).__name__
