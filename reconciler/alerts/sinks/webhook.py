"""A webhook: our document, or a body by template. URL and headers may come from files, read at each request."""

from collections.abc import Sequence
from typing import final

from reconciler.alerts.document import document
from reconciler.alerts.incident import Incident
from reconciler.alerts.sinks.base import BaseSink, SinkError, SinkSetup
from reconciler.alerts.sinks.http import HttpSink
from reconciler.alerts.template import Template
from reconciler.clients.http_config import read_line


@final
class WebhookSink(BaseSink):
    """`Sink`."""

    def __init__(self, setup: SinkSetup) -> None:
        config = setup.config.webhook
        assert config is not None
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

    async def _to(self, url: str) -> HttpSink:
        if self._door is None or self._door[0] != url:
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
