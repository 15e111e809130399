"""One HTTP client for everything that asks: the kubelet now, webhooks and probes later.

The only module that imports the HTTP library, and only when a session opens: with TLS it costs 9 MiB, which a node
that needs no HTTP does not pay. Whatever goes wrong becomes one `SourceError` that names the asked and the reason.
"""

import importlib
import logging
import os
import ssl
from contextlib import aclosing
from typing import TYPE_CHECKING, Final, Self, final

import trio
from msgspec import Struct

from cgroupfs.errors import SourceError

if TYPE_CHECKING:
    from types import TracebackType

    import httpx2

_LARGEST: Final = 64 * 1024 * 1024
_KEEPALIVE_S: Final = 120.0
_CLOSE_S: Final = 1.0


class Peer(Struct, frozen=True, kw_only=True):
    """Whom to ask and how to trust each other. All files are read again when they change.

    ``server_name``: the name in the peer's certificate, where the address is not in it. ``insecure``: accept any
    certificate; only ever set by the operator's own hand.
    """

    name: str
    url: str
    token_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None
    insecure: bool = False
    timeout_s: float = 5.0

    @property
    def secure(self) -> bool:
        """Whether TLS is spoken."""
        return self.url.startswith("https:")

    @property
    def credentials(self) -> str:
        """What we show to the peer, for messages."""
        if self.token_file:
            return f"the token of {self.token_file}"
        return f"the certificate {self.cert_file}" if self.cert_file else "no credentials"


@final
class HttpSession:
    """One kept connection to a `Peer`. Use as ``async with``; `get` may be called again after any error."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._client: httpx2.AsyncClient | None = None
        self._trusted: object = None
        self._token: tuple[object, str] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection; the next `get` opens another."""
        client, self._client = self._client, None
        if client is not None:
            with trio.move_on_after(_CLOSE_S, shield=True):
                await client.aclose()

    async def get(self, path: str) -> bytes:
        """The body of a 200.

        Errors: `SourceError` for anything else: refused, silent, broken off, another status, too long.
        """
        try:
            with trio.fail_after(self._peer.timeout_s):
                return await self._get(path)
        except trio.TooSlowError as exc:
            await self.aclose()
            raise self._error(f"{path}: no answer within {self._peer.timeout_s:g} s") from exc

    async def _get(self, path: str) -> bytes:
        # Lazy: see the module's docstring. In a thread: the loop has better to do for a tenth of a second.
        await trio.to_thread.run_sync(importlib.import_module, "httpx2")
        import httpx2  # noqa: PLC0415

        client = await self._open()
        headers = {"Accept": "application/json"}
        token = self._read_token()
        if token:
            headers["Authorization"] = f"Bearer {token}"
        extensions = {"sni_hostname": self._peer.server_name} if self._peer.server_name else {}
        try:
            async with client.stream("GET", path, headers=headers, extensions=extensions) as answer:
                if answer.status_code != 200:
                    raise self._error(f"{path}: {await self._refused(answer)}")
                body, whole = await _body(answer, _LARGEST)
                if not whole:
                    raise self._error(f"{path}: the answer is longer than {_LARGEST >> 20} MiB")
                return body
        except httpx2.HTTPError as exc:
            await self.aclose()
            raise self._error(f"{path}: {_reason(exc)}") from exc

    async def _refused(self, answer: "httpx2.Response") -> str:
        status = answer.status_code
        if status == 401:
            return f"401: it does not accept {self._peer.credentials}"
        if status == 403:
            return f"403: it knows {self._peer.credentials} but does not let it read this"
        body, _ = await _body(answer, 200)
        said = " ".join(body[:200].decode(errors="replace").split())
        return f"it answered {status} {said[:120]}".rstrip()

    async def _open(self) -> "httpx2.AsyncClient":
        trusted = tuple(_version(path) for path in (self._peer.ca_file, self._peer.cert_file, self._peer.key_file))
        if self._client is not None and trusted == self._trusted:
            return self._client
        await self.aclose()
        import httpx2  # noqa: PLC0415

        # One line per request at INFO would fill the journal.
        for name in ("httpx2", "httpcore2"):
            logging.getLogger(name).setLevel(logging.WARNING)
        limits = httpx2.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=_KEEPALIVE_S)
        self._client = httpx2.AsyncClient(
            base_url=self._peer.url,
            verify=self._context() if self._peer.secure else False,
            limits=limits,
            timeout=None,  # the whole exchange has one deadline, in `get`
            trust_env=False,
        )
        self._trusted = trusted
        return self._client

    def _context(self) -> ssl.SSLContext:
        peer = self._peer
        try:
            context = ssl.create_default_context(cafile=peer.ca_file)
            if peer.insecure:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if peer.cert_file:
                context.load_cert_chain(peer.cert_file, peer.key_file)
        except OSError as exc:
            files = ", ".join(path for path in (peer.ca_file, peer.cert_file, peer.key_file) if path)
            raise self._error(f"cannot use {files}: {exc.strerror or exc}") from exc
        return context

    def _read_token(self) -> str | None:
        """The bearer token; read again when the file has been replaced, as projected tokens are every hour."""
        path = self._peer.token_file
        if path is None:
            return None
        version = _version(path)
        if self._token is None or self._token[0] != version:
            try:
                with open(path, encoding="ascii") as file:
                    self._token = (version, file.read().strip())
            except (OSError, UnicodeDecodeError) as exc:
                raise self._error(f"cannot read the token of {path}: {exc}") from exc
        return self._token[1]

    def _error(self, message: str) -> SourceError:
        return SourceError(self._peer.name, f"{self._peer.url}: {message}")


async def _body(answer: "httpx2.Response", most: int) -> tuple[bytes, bool]:
    """The body up to a little over ``most`` bytes, and whether that is all of it."""
    body = bytearray()
    # Left half-read, a generator must be closed at once: the event loop complains about one that is only dropped.
    async with aclosing(answer.aiter_bytes()) as chunks:
        async for chunk in chunks:
            body += chunk
            if len(body) > most:
                return bytes(body), False
    return bytes(body), True


def _version(path: str | None) -> object:
    """Changes when the file does, also when a symlink above it is switched; None when there is none."""
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _reason(exc: Exception) -> str:
    """What a person needs to know of a failed exchange: the innermost cause that says something."""
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
