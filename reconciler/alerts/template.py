"""A webhook's body with placeholders, checked when the configuration is read.

``${summary}`` and the like are of one alert: there is a request for each. ``${text}``, ``${alerts}`` and ``${total}``
are to a whole batch: one request. A template uses one sort or the other; ``${node}`` is allowed in both. Source:
string.Template for the form of a placeholder; ``$$`` is a dollar.
"""

import json as encoder
import re
from collections.abc import Mapping, Sequence
from string import Template as Text
from typing import Final, final

from reconciler.alerts.alert import Alert, AlertKind
from reconciler.alerts.document import entry, line
from reconciler.alerts.incident import Incident, stamp

ONE: Final = (
    *("id", "kind", "name", "key", "summary", "severity", "status", "count", "first", "last"),
    *("first_s", "last_s", "labels", "details", "alert"),
)
MANY: Final = ("text", "alerts", "total")
EITHER: Final = ("node",)
_RAW: Final = frozenset({"labels", "details", "alert", "alerts", "count", "total", "first_s", "last_s"})
"""These are JSON values, and have no quotes in a JSON body."""
_DOTTED: Final = frozenset({"labels.", "details"})
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
