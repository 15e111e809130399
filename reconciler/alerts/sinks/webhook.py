"""A webhook: our document, or a body by template. URL and headers may come from files, read at each request.

A template is checked when the configuration is read. ``${summary}`` and the like are of one alert: there is a request
for each. ``${text}``, ``${alerts}`` and ``${total}`` are to a whole batch: one request. A template uses one sort or the
other; ``${node}`` is allowed in both. Source: string.Template for the form of a placeholder; ``$$`` is a dollar.
"""

import json as encoder
import re
from collections.abc import Mapping, Sequence
from string import Template as Text
from typing import TYPE_CHECKING, Annotated, Final, Literal, final

from msgspec import Meta

from reconciler.alerts.alert import Alert, AlertKind
from reconciler.alerts.incident import Incident, document, entry, line, stamp
from reconciler.alerts.sinks.base import AlertSink, SinkError, SinkKind, SinkSetup
from reconciler.clients.endpoint import MASK, check_url, masked_url
from reconciler.clients.http_config import TlsTrust, check_headers, read_line

if TYPE_CHECKING:
    from reconciler.alerts.sinks.http import HttpSink


ONE: Final = (
    *("id", "kind", "name", "key", "summary", "severity", "status", "count", "first", "last"),
    *("first_s", "last_s", "labels", "details", "alert"),
)
MANY: Final = ("text", "alerts", "total")
EITHER: Final = ("node",)
_RAW: Final = frozenset({"labels", "details", "alert", "alerts", "count", "total", "first_s", "last_s"})
"""These are JSON values, and have no quotes in a JSON body."""
_DOTTED: Final = frozenset({"labels.", "details"})
"""How the placeholders begin that have fields: the first seven characters."""
_EXAMPLE: Final = Incident(
    id="0123456789abcdef-18c2f1e9a00",
    alert=Alert(
        kind=AlertKind.TEST, key="example", summary='"quoted", with a \\ and a\nnew line', labels={"pod": "web-0"}
    ),
    first_s=1700000000.0,
    last_s=1700000000.0,
    labels={"pod": "web-0"},
)


class _Placeholders(Text):
    braceidpattern = r"[a-z_]+(?:\.[A-Za-z0-9_./-]+)?"
    idpattern = r"[a-z_]+"
    flags = re.ASCII


@final
class Template:
    """A checked body with placeholders."""

    def __init__(self, text: str, *, json: bool) -> None:
        """Errors: `ValueError` for a placeholder that is none, two sorts together, or a body other than JSON."""
        self._text = _Placeholders(text)
        self._json = json
        if not self._text.is_valid():
            raise ValueError("template: a $ without a placeholder; write $$ for a dollar sign")
        used = {name.partition(".")[0] for name in self._text.get_identifiers()}
        if unknown := sorted(used - {*ONE, *MANY, *EITHER}):
            known = ", ".join((*ONE, *MANY, *EITHER, "labels.NAME", "details.NAME"))
            raise ValueError(f"template: unknown placeholder {unknown[0]!r}; known are {known}")
        if dotted := [name for name in self._text.get_identifiers() if "." in name and name[:7] not in _DOTTED]:
            raise ValueError(f"template: {dotted[0]!r}: only labels and details have fields")
        if used & {*ONE} and used & {*MANY}:
            raise ValueError(
                f"template: {', '.join(sorted(used & {*ONE}))} applies to one alert, "
                f"{', '.join(sorted(used & {*MANY}))} to a whole batch"
            )
        self.each = not used & {*MANY}
        """A request for each alert."""
        if json:
            self._check()

    def render(self, notices: Sequence[Incident], node: str) -> str:
        """The body: of the first notice where a template is of one alert."""
        return self._text.substitute(_TemplateValues(self._values(notices, node), self._json))

    def _values(self, notices: Sequence[Incident], node: str) -> Mapping[str, object]:
        if not self.each:
            return {
                "node": node,
                "text": "\n".join(line(notice) for notice in notices),
                "alerts": [entry(notice) for notice in notices],
                "total": len(notices),
            }
        notice = notices[0]
        return {
            **entry(notice),
            "node": node,
            "name": notice.alert.kind.camel,
            "first": stamp(notice.first_s),
            "last": stamp(notice.last_s),
            "alert": entry(notice),
        }

    def _check(self) -> None:
        """Check that a rendered body is JSON, whatever the alert's texts."""
        text = self.render([_EXAMPLE], "node")
        try:
            encoder.loads(text)
        except ValueError as exc:
            raise ValueError(
                f"template: invalid JSON with an example alert: {exc}; "
                f"{', '.join(sorted(_RAW))} are JSON values and need no quotes"
            ) from exc


@final
class _TemplateValues(dict[str, str]):
    """What is put in: escaped for a JSON text, and empty for a label that an alert does not have."""

    def __init__(self, values: Mapping[str, object], json: bool) -> None:
        super().__init__()
        self._values = values
        self._json = json

    def __missing__(self, name: str) -> str:
        first, _, rest = name.partition(".")
        value = self._values[first]
        if rest:
            value = value.get(rest, "") if isinstance(value, dict) else ""
        elif first in _RAW:
            return encoder.dumps(value, ensure_ascii=False)
        text = str(value)
        return encoder.dumps(text, ensure_ascii=False)[1:-1] if self._json else text


class WebhookSinkConfig(TlsTrust, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Any HTTP server: our own JSON document, or a body of your own."""

    url: Annotated[str | None, Meta(description="target URL; only its host is ever shown", extra={"secret": True})] = (
        None
    )
    url_file: Annotated[
        str | None, Meta(description="file with the URL, read at each request", extra={"path": True, "secret": True})
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
        str, Meta(description="of the body; if it contains json, placeholders are escaped for JSON strings")
    ] = "application/json"
    template: Annotated[
        str | None,
        Meta(description="the body, with placeholders such as ${summary}; null: our JSON document (docs/alerts.md)"),
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
class WebhookSink(AlertSink):
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
        config, node = self._config, self._setup.node
        headers = {**config.headers, **{name: self._read(path) for name, path in config.header_files.items()}}
        template = self._template
        body = document(notices, node) if template is None else template.render(notices, node).encode()
        door = await self._to(config.url if config.url is not None else self._read(config.url_file or ""))
        await door.send(config.method, body, config.content_type, headers)

    async def aclose(self) -> None:
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
