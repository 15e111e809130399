"""A peer of the HTTP client: its address, and what it and this side trust each other by.

Of a URL not all may be shown: a webhook's path is often its key, and a userinfo is a password.
"""

from typing import Final, NamedTuple

from msgspec import Struct

MASK: Final = "***"
_LONGEST_LABEL: Final = 63
_HOST: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789.-_:")


class Url(NamedTuple):
    """``base`` is scheme, host and port; ``target`` path and query; ``user`` the userinfo, decoded, or None."""

    base: str
    target: str
    user: str | None


def split_url(url: str) -> Url:
    """The parts. Errors: `ValueError`, without the URL's own words."""
    from urllib.parse import unquote, urlsplit  # 4 ms that programs without requests save

    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise ValueError("expected http://HOST[:PORT][/PATH] or https://…") from exc
    name = parts.hostname or ""
    plain = url.isascii() and url.isprintable() and " " not in url
    # The resolver refuses other labels, with an error that is not a network error.
    labels = name.removesuffix(".").split(".")
    valid = not set(name) - _HOST and all(0 < len(label) <= _LONGEST_LABEL for label in labels)
    if parts.scheme not in {"http", "https"} or not plain or not valid:
        raise ValueError("expected http://HOST[:PORT][/PATH] or https://…")
    host = f"[{name}]" if ":" in name else name
    user = None
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    target = parts.path or "/"
    if parts.query:
        target += f"?{parts.query}"
    return Url(f"{parts.scheme}://{host}" + (f":{port}" if port is not None else ""), target, user)


def check_url(name: str, url: str) -> None:
    """Errors: `ValueError` that names the setting. Any part of an invalid URL may be a secret."""
    try:
        split_url(url)
    except ValueError as exc:
        raise ValueError(f"{name}: {exc}; got {len(url)} characters") from exc


def shown_url(url: str) -> str:
    """A server's URL for messages: with its path, without the userinfo, and with a mask for a query."""
    try:
        base, target, _ = split_url(url)
    except ValueError:
        return MASK
    path, query, _ = target.partition("?")
    return f"{base}{path if path != '/' else ''}{query}{MASK if query else ''}"


def masked_url(url: str) -> str:
    """Scheme, host and port, and a mask for the rest."""
    try:
        base, target, user = split_url(url)
    except ValueError:
        return MASK
    return base if target == "/" and user is None else f"{base}/{MASK}"


class InlineCredentials(Struct, frozen=True, kw_only=True):
    """Credentials that have no file of their own, PEM texts and a token: they are in memory only, and never shown."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    token: str | None = None

    def __repr__(self) -> str:
        return f"Inline({', '.join(name for name in self.__struct_fields__ if getattr(self, name))})"


class HttpEndpoint(Struct, frozen=True, kw_only=True):
    """A peer and the mutual trust. All files are read again when they change.

    ``server_name``: the name in the peer's certificate, where the address is not in it. ``insecure``: accept any
    certificate; then no token and no client certificate is sent. ``root_only``: those of the files that another
    component named, which only root may be able to change.
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
    inline: InlineCredentials = InlineCredentials()
    root_only: tuple[str, ...] = ()

    @property
    def exposed(self) -> str:
        """Why these credentials must not be used: an attacker on the way could take them; empty: they may."""
        if not (self.token_file or self.cert_file or self.inline.token or self.inline.cert):
            return ""
        if not self.secure:
            return f"{self.credentials} is not sent without TLS: use an https address"
        if self.insecure:
            return f"{self.credentials} is not sent: the server's certificate is not verified; configure its CA"
        return ""

    def __repr__(self) -> str:
        return f"Peer({self.name!r}, {self.shown!r})"

    @property
    def shown(self) -> str:
        """The URL for messages: without credentials."""
        return shown_url(self.url)

    @property
    def secure(self) -> bool:
        return self.url.startswith("https:")

    @property
    def credentials(self) -> str:
        """What we show to the peer, for messages."""
        if self.token_file:
            return f"the token of {self.token_file}"
        if self.cert_file:
            return f"the certificate {self.cert_file}"
        return "the token" if self.inline.token else "the certificate" if self.inline.cert else "no credentials"
