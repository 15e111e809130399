"""The settings of probes: what is accepted, what is refused with its place, and what is never shown."""

import re
from pathlib import Path

import pytest
from msgspec import Struct

from reconciler.clients.http_config import TlsTrust
from reconciler.config.model import Config
from reconciler.pods.selectors import LabelSelector
from reconciler.settings.binder import ConfigError, Text, bind
from reconciler.signals.probe_config import (
    CommandProbe,
    HttpProbe,
    LatencyUnit,
    Probe,
    PrometheusProbe,
    check_names,
)


class Model(Struct, frozen=True, kw_only=True):
    """Replaces the section that holds the probes."""

    probes: dict[str, Probe] = {}


def bound(text: str) -> dict[str, Probe]:
    return bind(Model, [Text("f", text)]).value.probes


def refused(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        bind(Model, [Text("f", text)])
    return [str(problem) for problem in caught.value.problems]


def test_the_three_kinds_are_read() -> None:
    probes = bound("""
probes:
  cart:
    namespaces: [shop]
    labels: {matchLabels: {app: cart}}
    interval_s: 500ms
    http: {url: "http://{ip}:8080/ping", token_file: /etc/token, statuses: [200, 204]}
  db:
    pods: ["db-*"]
    unit: us
    command: {argv: [/opt/ask, "{namespace}/{name}"], user: "1000", field: p99}
  api:
    namespaces: [api]
    prometheus:
      url: http://{ip}:{annotation:prometheus.io/port}/metrics
      select: http_request_duration_seconds{path="/cart"}
      quantile: 0.95
""")
    assert probes["cart"].http == HttpProbe(url="http://{ip}:8080/ping", token_file="/etc/token", statuses=(200, 204))
    assert probes["cart"].labels == LabelSelector(match_labels={"app": "cart"})
    assert (probes["cart"].kind, probes["cart"].interval_s, probes["cart"].per_pod) == ("http", 0.5, True)
    assert probes["db"].command == CommandProbe(argv=("/opt/ask", "{namespace}/{name}"), user="1000", field="p99")
    assert (probes["db"].unit, probes["db"].factor) == (LatencyUnit.US, 1e-3)
    assert isinstance(probes["api"].prometheus, PrometheusProbe)
    assert (probes["api"].prometheus.quantile, probes["api"].factor) == (0.95, 1e3)


HTTP = "http: {url: http://h"


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("", "13: probes.a", "expected exactly one of command, http, prometheus; got none"),
        ("command: {argv: [/a]}, http: {url: http://h}", "13: probes.a", "prometheus; got command, http"),
        ("command: {argv: [a]}", "34: probes.a.command", "argv: expected a program's absolute path"),
        ("command: {argv: ['/{name}']}", "34: probes.a.command", "argv: expected a program's absolute path"),
        ("command: {}", "34: probes.a.command", "missing key 'argv'"),
        (f"interval_s: 1ms, {HTTP}}}", "37: probes.a.interval_s", "expected from 200ms to 10s; got '1ms'"),
        ("htp: {}", "25: probes.a.htp", "unknown key 'htp'; did you mean 'http'?"),
        ("http: {url: ftp://h}", "31: probes.a.http", "url: expected http://HOST[:PORT][/PATH] or https"),
        ("http: {url: http://a..b}", "31: probes.a.http", "url: expected http://HOST[:PORT][/PATH] or https"),
        ("http: {url: 'http://h/{pod}'}", "31: probes.a.http", "{annotation:KEY}; got something else in braces"),
        ("http: {url: 'http://{label:h}/'}", "31: probes.a.http", "annotations are allowed for the port only"),
        ("http: {url: 'http://me:pw@h/'}", "31: probes.a.http", "credentials are not allowed"),
        (f"{HTTP}, headers: {{Authorization: x}}}}", "31: probes.a.http", "Authorization is a secret"),
        (f"{HTTP}, headers: {{a b: x}}}}", "31: probes.a.http", "a key of 3 characters is not a header name"),
        (f"{HTTP}, headers: {{A: x}}, header_files: {{a: /x}}}}", "31: probes.a.http", "both give a"),
        (
            f"{HTTP}, header_files: {{X: rel}}}}",
            "31: probes.a.http",
            "X: expected an absolute path; got 3 characters",
        ),
        (f"{HTTP}, field: a}}", "31: probes.a.http", "field: only with measure: value"),
        (f"{HTTP}, measure: value, connect: yes}}", "31: probes.a.http", "only with measure: time"),
        (f"{HTTP}, cert_file: /c}}", "31: probes.a.http", "cert_file and key_file must both be set"),
        (f"unit: s, {HTTP}}}", "13: probes.a", "unit: not allowed with measure: time"),
        ("prometheus: {url: http://h, select: 'a{b}'}", "37: probes.a.prometheus", "!=, =~ or !~, at 'b'; got"),
        ("prometheus: {url: http://h, select: 'a{b=~\"(\"}'}", "37: probes.a.prometheus", "not a regular expression"),
        (
            "prometheus: {url: http://h, select: a, quantile: 0}",
            "74: probes.a.prometheus.quantile",
            "expected above 0, up to 1; got '0'",
        ),
    ],
)
def test_a_mistake_is_told_with_its_place(text: str, place: str, words: str) -> None:
    problem = refused(f"probes: {{a: {{pods: [x], {text}}}}}")[-1]
    assert problem.startswith(f"f:1:{place}: ")
    assert words in problem


def test_a_probe_of_nobody_is_refused() -> None:
    message = "f:1:13: probes.a: a probe needs namespaces, pods or labels; or host_workloads"
    assert refused("probes: {a: {command: {argv: [/a]}}}") == [message]


@pytest.mark.parametrize(
    "host",
    [
        "{ip}",
        "{ip}:80",
        "{ip}:{label:port}",
        "{ip}:{annotation:prometheus.io/port}",
        "h.example:80",
        "[fd00::1]:80",
        "10.0.0.1",
        "[fd00::1]",
    ],
)
def test_hosts_that_the_pods_author_cannot_choose_are_taken(host: str) -> None:
    assert HttpProbe(url=f"http://{host}/x").url == f"http://{host}/x"


@pytest.mark.parametrize(
    "host", ["{name}", "{label:a}.svc", "{ip}{label:a}", "{ip}:{name}", "a{ip}", "{ip}:8{label:a}"]
)
def test_hosts_that_he_could_choose_are_refused(host: str) -> None:
    with pytest.raises(ValueError, match="url: "):
        HttpProbe(url=f"http://{host}/x")


def test_nothing_secret_is_shown() -> None:
    probe = HttpProbe(url="http://h/hook?key=hush", headers={"X-Team": "hush"}, header_files={"Cookie": "/hush"})
    text = repr(Probe(pods=("x",), http=probe)) + repr(CommandProbe(argv=("/a", "hush")))
    assert "hush" not in text
    assert "X-Team" in text
    assert isinstance(probe, TlsTrust)


def test_a_probes_name_can_be_shown() -> None:
    probe = Probe(pods=("x",), command=CommandProbe(argv=("/a",)))
    check_names({"a.b-c_1": probe})
    with pytest.raises(ValueError, match="'a b' is not a probe name"):
        check_names({"a b": probe})


@pytest.mark.parametrize(
    ("probe", "status", "counts"),
    [
        (HttpProbe(url="http://h"), 200, True),
        (HttpProbe(url="http://h"), 399, True),
        (HttpProbe(url="http://h"), 503, False),
        (HttpProbe(url="http://h", measure="value"), 302, False),
        (HttpProbe(url="http://h", statuses=(503,)), 503, True),
        (HttpProbe(url="http://h", statuses=(503,)), 200, False),
    ],
)
def test_which_answers_count(probe: HttpProbe, status: int, counts: bool) -> None:
    assert probe.counts(status) is counts


def test_the_examples_of_the_documentation_are_taken() -> None:
    text = (Path(__file__).parents[3] / "docs/probes.md").read_text()
    whole, *parts = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    config = bind(Config, [Text("f", whole)]).value
    assert config.interference.probes["cart"].kind == "http"
    for part in parts:
        assert len(bound(f"probes:\n{part}")) == 1
    assert len(parts) == 2
