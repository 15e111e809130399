"""What a TCP listener that other machines reach has for trust: a certificate of its own, and a token of its clients.

Both are files, and read again when they are replaced, as certificates and projected tokens are. What was read before
stays in use where a file cannot be read.
"""

import hmac
import os
import re
import ssl
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, final

from cgroupfs.errors import AgentError
from cgroupfs.log import get_log
from reconciler.web.limits import LogWindow, address_of

SHORTEST_TOKEN: Final = 16
LONGEST_TOKEN: Final = 4096
_LONGEST_PEM: Final = 1 << 20
_BEARER: Final = b"bearer "
ALWAYS: Final = ("localhost", "127.0.0.1", "::1")
_HOST: Final = re.compile(rb"(?:\[([0-9a-f:.%]{2,64})\]|([a-z0-9_.-]{1,253}?)\.?)(?::[0-9]{1,5})?", re.IGNORECASE)


class TrustError(AgentError):
    """A certificate, key or token file cannot be used. The text has no part of its content."""


def _version(path: str) -> tuple[int, int, int, int]:
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@final
class ServerTls:
    """TLS 1.2 or later with this certificate (PEM, with its chain) and key; the listener does not start without."""

    def __init__(self, cert_file: str, key_file: str) -> None:
        self._files = cert_file, key_file
        self._versions: tuple[object, ...] = ()
        self._context: ssl.SSLContext | None = None
        self._window = LogWindow(get_log("web"))

    def context(self) -> ssl.SSLContext:
        """For a new connection. Errors: `TrustError` while there has never been a usable pair of files."""
        try:
            versions = tuple(_version(path) for path in self._files)
            if self._context is None or versions != self._versions:
                # Versions of files that could be used: a reading that failed (no free descriptor) is tried again.
                self._context, self._versions = self._made(), versions
        except OSError as exc:  # ssl.SSLError is one
            why = str(exc.strerror or exc)
            if self._context is None:
                raise TrustError(f"cannot use {' and '.join(self._files)}: {why}") from exc
            # Each connection comes here while a file is missing, and any machine makes connections.
            cert, key = self._files
            self._window.warning(
                "cannot use the certificate; the one read before stays in use",
                time.monotonic(),
                cert=cert,
                key=key,
                error=why,
            )
        return self._context

    def _made(self) -> ssl.SSLContext:
        for path in self._files:
            if os.stat(path).st_size > _LONGEST_PEM:
                raise OSError(f"{path} is larger than {_LONGEST_PEM} bytes")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # A key with a passphrase must not ask for it on the terminal.
        context.load_cert_chain(*self._files, password=b"")
        # A client that offers HTTP/2, too, must not choose it.
        context.set_alpn_protocols(["http/1.1"])
        return context


@final
class Token:
    """The bearer token that clients must send, from a file.

    While the file's content is not a token, each request is refused, also after it was one.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._version: object = None
        self._token: bytes | None = None

    def allows(self, header: bytes | None) -> bool:
        """Whether an Authorization header has the token. Errors: `TrustError` without a usable one in the file."""
        token = self._read()
        sent = header or b""
        if sent[: len(_BEARER)].lower() != _BEARER:
            return False
        # In a time that does not depend on where the two differ.
        return hmac.compare_digest(sent[len(_BEARER) :].strip(), token)

    def _read(self) -> bytes:
        try:
            version = _version(self._file)
            if self._token is None or version != self._version:
                with open(self._file, "rb") as file:
                    token = file.read(LONGEST_TOKEN + 1).strip()
                if not SHORTEST_TOKEN <= len(token) <= LONGEST_TOKEN or not all(33 <= byte < 127 for byte in token):
                    raise TrustError(
                        f"{self._file}: expected a token of {SHORTEST_TOKEN} to {LONGEST_TOKEN} printable characters"
                    )
                self._version, self._token = version, token
        except OSError as exc:
            if self._token is None:
                raise TrustError(f"cannot read the token of {self._file}: {exc.strerror or exc}") from exc
        return self._token


@final
class Hosts:
    """The names allowed in Host headers, with or without a port: a check against DNS rebinding.

    A web page whose own name its owner points to 127.0.0.1 is same-origin with the listener there, and could read all
    of it; the browser still sends that name. Source: RFC 9110, sections 7.2 (Host) and 15.5.20 (421).

    ``undotted``: any name without a dot, too, for unix sockets.
    """

    def __init__(self, names: Iterable[str] = (), *, undotted: bool = False) -> None:
        self._undotted = undotted
        self._names = frozenset(name.lower().strip("[]").removesuffix(".").encode() for name in (*ALWAYS, *names))

    def allow(self, host: bytes | None, server: tuple[str, int] | None) -> bool:
        """Whether a request with this Host header is allowed. ``server``: the address that the client connected to."""
        match = _HOST.fullmatch(host or b"")
        if match is None:
            return False
        name = (match[1] or match[2]).lower()
        # Clients of a unix socket write what they like, and ssh may forward it to a port, where a page may call it by a
        # name of its own; but public names have a dot.
        if self._undotted and not match[1] and b"." not in name:
            return True
        if name in self._names or server is None:
            return name in self._names
        # A listener may have all of a machine's addresses, and no name of another host is an address.
        with suppress(ValueError):
            return address_of(name.decode()) == address_of(server[0])
        return False
