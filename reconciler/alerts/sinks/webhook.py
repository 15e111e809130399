"""A webhook: our document, or a body by template. URL and headers may come from files, read at each request."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Final, Literal, final

from msgspec import Meta

from reconciler.alerts.document import document
from reconciler.alerts.incident import Incident
from reconciler.alerts.sinks.base import BaseSink, SinkError, SinkKind, SinkSetup
from reconciler.alerts.template import Template
from reconciler.clients.http_config import TlsTrust, check_headers, read_line
from reconciler.clients.urls import MASK, check_url, masked_url

if TYPE_CHECKING:
    from reconciler.alerts.sinks.http import HttpSink


class WebhookSinkConfig(TlsTrust, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Any HTTP server: our own JSON document, or a body of your own."""

    url: Annotated[str | None, Meta(description="target URL; only its host is ever shown", extra={"secret": True})] = (
        None
    )
    url_file: Annotated[
        str | None,
        Meta(
            description="file with the URL, if it is a secret; read at each request",
            extra={"path": True, "secret": True},
        ),
    ] = None
    method: Annotated[Literal["POST", "PUT", "PATCH"], Meta(description="the request's method")] = "POST"
    headers: Annotated[
        Mapping[str, str], Meta(description="headers; values are never shown", extra={"secret": True})
    ] = {}
    header_files: Annotated[
        Mapping[str, str],
        Meta(description="headers whose values are in these files, read at each request", extra={"secret": True}),
    ] = {}
    content_type: Annotated[
        str,
        Meta(description="content type of the body; if it contains json, placeholders are escaped for JSON strings"),
    ] = "application/json"
    template: Annotated[
        str | None,
        Meta(
            description="the body, with placeholders such as ${summary}; null: the JSON document of bypassd "
            "(docs/alerts.md)"
        ),
    ] = None

    def __post_init__(self) -> None:
        self.check()
        if (self.url is None) == (self.url_file is None):
            raise ValueError("expected exactly one of url, url_file")
        if self.url is not None:
            check_url("url", self.url)
        check_headers(self.headers, self.header_files)
        if self.template is not None:
            Template(self.template, json="json" in self.content_type)

    def __repr__(self) -> str:
        url = masked_url(self.url) if self.url is not None else self.url_file
        return f"Webhook(url={url}, headers={dict.fromkeys(self.headers, MASK)})"


@final
class WebhookSink(BaseSink):
    """`AlertSink`."""

    def __init__(self, setup: SinkSetup) -> None:
        config = setup.config.section(WebhookSinkConfig)
        self._config = config
        self._setup = setup
        self._template = None
        if config.template is not None:
            self._template = Template(config.template, json="json" in config.content_type)
            self.most = 1 if self._template.each else None
        self._door: tuple[str, HttpSink] | None = None

    async def send(self, notices: Sequence[Incident]) -> None:
        """One request. Errors: `SinkError`."""
        config, node = self._config, self._setup.node
        headers = {**config.headers, **{name: self._read(path) for name, path in config.header_files.items()}}
        template = self._template
        body = document(notices, node) if template is None else template.render(notices, node).encode()
        door = await self._to(config.url if config.url is not None else self._read(config.url_file or ""))
        await door.send(config.method, body, config.content_type, headers)

    async def aclose(self) -> None:
        """Close the connection."""
        if self._door is not None:
            await self._door[1].aclose()

    async def _to(self, url: str) -> "HttpSink":
        if self._door is None or self._door[0] != url:
            from reconciler.alerts.sinks.http import HttpSink  # see `SinkKind.modules`

            await self.aclose()
            try:
                self._door = url, HttpSink(self._setup.name, url, self._config, self._setup.config.timeout_s)
            except ValueError as exc:
                raise SinkError(f"{self._config.url_file}: {exc}") from exc
        return self._door[1]

    def _read(self, path: str) -> str:
        try:
            return read_line(path, self._setup.root)
        except ValueError as exc:
            raise SinkError(str(exc)) from exc


SINK: Final = SinkKind(
    name="webhook",
    config_type=WebhookSinkConfig,
    build=WebhookSink,
    secret=True,
    modules=("reconciler.alerts.sinks.http",),
)
