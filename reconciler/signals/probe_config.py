"""What can be set about the probes that measure a service's latency: named, each with one section for its kind."""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from reconciler.clients.endpoint import MASK, check_url, masked_url
from reconciler.clients.http_config import TlsTrust, check_headers
from reconciler.pods.selectors import LabelSelector

KINDS: Final = ("command", "http", "prometheus")
"""Each a section of `Probe`."""

_SECRET: Final = {"secret": True}
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SECRET_HEADERS: Final = frozenset({"authorization", "cookie", "proxy-authorization", "x-api-key", "x-auth-token"})
PLACEHOLDER: Final = re.compile(r"\{(?:(ip|name|namespace|uid)|(label|annotation):([^{}]+))\}")
"""Placeholder for a value of the pod: ``{ip}``, ``{label:app}``, ``{annotation:prometheus.io/port}``."""

# The pod's author chooses labels and annotations: they may give a port or a path, never the host that receives the
# request (and possibly a token).
_URL: Final = re.compile(r"(\w+)://((?:\{[^{}]*\}|[^/?#{}])*)(.*)", re.DOTALL)
_HOST: Final = re.compile(r"(?:\{ip\}|[^{}/:@]+|\[[0-9a-fA-F:.]+\])(?::(?:\d+|\{(?:label|annotation):[^{}]+\}))?")


class LatencyUnit(StrEnum):
    """What a number that a probe reads counts."""

    S = "s"
    MS = "ms"
    US = "us"
    NS = "ns"

    @property
    def milliseconds(self) -> float:
        return {"s": 1e3, "ms": 1.0, "us": 1e-3, "ns": 1e-6}[self.value]


class CommandProbe(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program that prints a number, or JSON with one; no shell."""

    argv: Annotated[
        tuple[str, ...],
        Meta(description="program (absolute path) and arguments, with placeholders such as {ip}", extra=_SECRET),
    ]
    user: Annotated[str | None, Meta(description="user name or number to run as; null: nobody if bypassd is root")] = (
        None
    )
    field: Annotated[
        str | None, Meta(description="path of the number in JSON output, such as latency.p99; null: the output is it")
    ] = None

    def __post_init__(self) -> None:
        if not self.argv or not self.argv[0].startswith("/") or PLACEHOLDER.search(self.argv[0]):
            raise ValueError("argv: expected a program's absolute path, then its arguments")
        if any("\0" in word for word in self.argv):
            raise ValueError("argv: NUL characters are not allowed")
        for word in self.argv:
            _check_placeholders("argv", word)

    def __repr__(self) -> str:
        return f"CommandProbe({self.argv[0]!r}, {len(self.argv) - 1} arguments)"


class _HttpQuery(TlsTrust, frozen=True, kw_only=True):
    """The HTTP request of a probe."""

    url: Annotated[
        str,
        Meta(
            description="URL such as http://{ip}:8080/ping; {ip}, {name}, {label:KEY}, {annotation:KEY} are "
            "replaced by the pod's",
            extra=_SECRET,
        ),
    ]
    headers: Annotated[
        Mapping[str, str], Meta(description="headers of each request; values are never shown", extra=_SECRET)
    ] = {}
    header_files: Annotated[
        Mapping[str, str],
        Meta(description="headers whose values are in these files, read at each request", extra=_SECRET),
    ] = {}

    def __post_init__(self) -> None:
        self.check()
        _check_placeholders("url", self.url)
        check_url("url", PLACEHOLDER.sub("1", self.url))
        _, host, _ = url_parts(self.url)
        if "@" in host:
            raise ValueError("url: credentials are not allowed; use token_file, or header_files for Authorization")
        if not _HOST.fullmatch(host):
            raise ValueError(
                "url: expected {ip} or a fixed name as the host; labels and annotations are allowed for the port only"
            )
        check_headers(self.headers, self.header_files)
        for name in self.headers:
            if name.lower() in _SECRET_HEADERS:
                raise ValueError(f"headers: {name} is a secret; put it into a file listed in header_files")

    def __repr__(self) -> str:
        headers = dict.fromkeys((*self.headers, *self.header_files), MASK)
        return f"{type(self).__name__}(url={masked_url(PLACEHOLDER.sub('1', self.url))}, headers={headers})"


class HttpProbe(_HttpQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GET request: its time, or a number in the answer."""

    measure: Annotated[
        Literal["time", "value"], Meta(description="time: response time of the whole answer; value: a number in it")
    ] = "time"
    field: Annotated[
        str | None, Meta(description="path of the number in the JSON; null: the whole answer is the number")
    ] = None
    statuses: Annotated[
        tuple[int, ...], Meta(description="valid status codes; empty: 200 to 399 for time, 200 to 299 for value")
    ] = ()
    connect: Annotated[bool, Meta(description="use a new connection for each request; its setup time counts")] = False
    count_late: Annotated[
        bool, Meta(description="on timeout, record timeout_s with half confidence instead of unknown")
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.measure == "time" and self.field is not None:
            raise ValueError("field: only with measure: value")
        if self.measure == "value" and (self.connect or self.count_late):
            raise ValueError("connect and count_late: only with measure: time")

    def counts(self, status: int) -> bool:
        """Whether a response with this status is a latency sample."""
        if self.statuses:
            return status in self.statuses
        return 200 <= status < (400 if self.measure == "time" else 300)


class PrometheusProbe(_HttpQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A metric of the service in Prometheus' text format."""

    select: Annotated[
        str, Meta(description='metric and labels as in PromQL: http_request_duration_seconds{path="/cart",code!~"5.."}')
    ]
    read: Annotated[
        Literal["quantile", "mean", "gauge"],
        Meta(
            description="quantile of a histogram (since the last scrape) or a summary; mean: sum divided by "
            "count since the last scrape; gauge: the value, the highest of several"
        ),
    ] = "quantile"
    quantile: Annotated[float, Meta(gt=0, le=1, description="quantile, such as 0.99")] = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        from reconciler.signals.promtext import parse_selector  # imported only with such a probe

        parse_selector(self.select)


class Probe(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A latency measurement, by one of the last three sections.

    With a placeholder in it each pod is measured separately; without one the result is of all the pods together.
    """

    namespaces: Annotated[tuple[str, ...], Meta(description="namespaces of the pods (globs); empty: any")] = ()
    pods: Annotated[tuple[str, ...], Meta(description="names of the pods (globs); empty: any")] = ()
    labels: Annotated[LabelSelector, Meta(description="labels of the pods")] = LabelSelector()
    host_workloads: Annotated[
        tuple[str, ...],
        Meta(max_length=64, description="host workloads instead of pods, by their names; without placeholders"),
    ] = ()
    interval_s: Annotated[
        float, Meta(ge=0.2, le=10, description="interval; rules treat a value older than 30 s as unknown")
    ] = 5.0
    timeout_s: Annotated[float, Meta(ge=0.01, le=60, description="timeout of one measurement")] = 2.0
    unit: Annotated[
        LatencyUnit | None, Meta(description="unit of the number; null: s for prometheus, ms otherwise")
    ] = None
    command: Annotated[CommandProbe | None, Meta(extra=_SECRET)] = None
    http: Annotated[HttpProbe | None, Meta(extra=_SECRET)] = None
    prometheus: Annotated[PrometheusProbe | None, Meta(extra=_SECRET)] = None

    def __post_init__(self) -> None:
        kinds = [name for name in KINDS if getattr(self, name) is not None]
        if len(kinds) != 1:
            raise ValueError(f"expected exactly one of {', '.join(KINDS)}; got {', '.join(kinds) or 'none'}")
        of_pods = bool(self.namespaces or self.pods or not self.labels.empty)
        if of_pods == bool(self.host_workloads):
            raise ValueError("a probe needs namespaces, pods or labels; or host_workloads")
        if self.host_workloads and self.per_pod:
            raise ValueError("host_workloads: placeholders are for values of pods")
        if self.http is not None and self.http.measure == "time" and self.unit is not None:
            raise ValueError("unit: not allowed with measure: time")

    @property
    def kind(self) -> str:
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def per_pod(self) -> bool:
        texts = self.command.argv if self.command is not None else ()
        probe = self.http or self.prometheus
        return any(PLACEHOLDER.search(text) for text in (*texts, probe.url if probe is not None else ""))

    @property
    def factor(self) -> float:
        """Milliseconds in one of what is read."""
        unit = self.unit or (LatencyUnit.S if self.prometheus is not None else LatencyUnit.MS)
        return unit.milliseconds


def url_parts(url: str) -> tuple[str, str, str]:
    """Scheme, host with port, and the rest, of a URL whose placeholders may have slashes in them."""
    match = _URL.fullmatch(url)
    return (match[1], match[2], match[3]) if match is not None else ("", "", "")


def check_names(probes: Mapping[str, Probe]) -> None:
    """Errors: `ValueError` for a probe's name that a message or a metric could not show."""
    for name in probes:
        if not _NAME.fullmatch(name):
            raise ValueError(f"probes: {name!r} is not a probe name; expected letters, digits, dots, _ and -")


def _check_placeholders(setting: str, text: str) -> None:
    rest = PLACEHOLDER.sub("", text)
    if setting == "url" and ("{" in rest or "}" in rest):
        raise ValueError(
            f"{setting}: expected the placeholders {{ip}}, {{name}}, {{namespace}}, {{uid}}, {{label:KEY}} and "
            f"{{annotation:KEY}}; got something else in braces"
        )
