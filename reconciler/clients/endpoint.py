"""A peer of the HTTP client: its address, and what it and this side trust each other by."""

from msgspec import Struct

from reconciler.clients.urls import shown_url


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
        """Whether TLS is spoken."""
        return self.url.startswith("https:")

    @property
    def credentials(self) -> str:
        """What we show to the peer, for messages."""
        if self.token_file:
            return f"the token of {self.token_file}"
        if self.cert_file:
            return f"the certificate {self.cert_file}"
        return "the token" if self.inline.token else "the certificate" if self.inline.cert else "no credentials"
