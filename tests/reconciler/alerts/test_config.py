"""What can be configured about alerts, what is refused with its place, and what is never shown."""

import pytest

from reconciler.alerts.alert import AlertKind, Severity
from reconciler.alerts.config import AlertsConfig
from reconciler.alerts.sinks.journal import JournalSinkConfig
from reconciler.alerts.sinks.table import SinkSection
from reconciler.alerts.sinks.webhook import WebhookSinkConfig
from reconciler.clients.endpoint import masked_url, split_url
from reconciler.settings.binder import ConfigError, Text, bind

WHOLE = """
labels: {cluster: east}
sinks:
  log:
    journal:
  oncall:
    minimum: warning
    kinds: [eviction-done, interference]
    repeat_s: 30m
    alertmanager:
      urls: [http://am-0:9093, "https://user:secret-1@am-1/prefix"]
      token_file: /etc/bypassd/token
  chat:
    webhook:
      url: https://hooks.example.org/services/secret-2?key=secret-3
      headers: {Authorization: secret-4}
      template: '{"text": "${summary}"}'
  program:
    command: {argv: [/usr/local/bin/tell, --password, secret-5]}
  events:
    kubernetes: {api: events.k8s.io/v1}
  lines:
    file: {path: /var/log/bypassd-alerts.json, rotate_bytes: 1Mi}
"""


def bound(text: str) -> AlertsConfig:
    return bind(AlertsConfig, [Text("f", text)]).value


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        bound(text)
    return str(caught.value)


def test_a_whole_configuration_is_read() -> None:
    config = bound(WHOLE)
    assert [(name, sink_config.how) for name, sink_config in config.sinks.items()] == [
        ("log", "journal"),
        ("oncall", "alertmanager"),
        ("chat", "webhook"),
        ("program", "command"),
        ("events", "kubernetes"),
        ("lines", "file"),
    ]
    oncall = config.sinks["oncall"]
    assert (oncall.minimum, oncall.kinds) == (Severity.WARNING, (AlertKind.EVICTION_DONE, AlertKind.INTERFERENCE))
    assert config.sinks["log"].section(JournalSinkConfig) == JournalSinkConfig()


def test_no_secret_is_in_a_repr() -> None:
    shown = repr(bound(WHOLE))
    assert [secret for secret in (f"secret-{number}" for number in range(1, 6)) if secret in shown] == []
    assert "hooks.example.org" in shown


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sinks: {a: {}}", "sinks.a: expected exactly one of journal, alertmanager, webhook"),
        ("sinks: {a: {journal: {}, file: {path: /x}}}", "got journal, file"),
        ("sinks: {a: {pager: {}}}", "unknown key 'pager'"),
        ("sinks: {a b: {journal: {}}}", "expected a name of letters"),
        ("sinks: {a: {minimum: loud, journal: }}", "expected one of info, warning, critical"),
        ("sinks: {a: {kinds: [evictions], journal: }}", "expected one of interference"),
        ("sinks: {a: {alertmanager: {urls: []}}}", "expected at least one URL"),
        ("sinks: {a: {alertmanager: {urls: [am:9093]}}}", "urls: expected http://HOST"),
        ("sinks: {a: {alertmanager: {urls: ['http://a<m']}}}", "urls: expected http://HOST"),
        ("sinks: {a: {webhook: {url: 'http://h', headers: {X: ü}}}}", "one line of plain ASCII"),
        ("sinks: {a: {alertmanager: {urls: ['http://am'], cert_file: /c}}}", "cert_file and key_file must both be set"),
        ("sinks: {a: {webhook: {}}}", "expected exactly one of url, url_file"),
        ("sinks: {a: {webhook: {url: 'http://h', url_file: /u}}}", "expected exactly one of url, url_file"),
        ("sinks: {a: {webhook: {url: 'http://h', headers: {'a b': c}}}}", "is not a header name"),
        ("sinks: {a: {webhook: {url: 'http://h', header_files: {X: rel}}}}", "expected an absolute path"),
        ("sinks: {a: {webhook: {url: 'http://h', headers: {X: a}, header_files: {x: /f}}}}", "both give x"),
        ("sinks: {a: {webhook: {url: 'http://h', template: '{\"a\": $5}'}}}", "without a placeholder"),
        ("sinks: {a: {webhook: {url: 'http://h', template: '\"${sumary}\"'}}}", "unknown placeholder 'sumary'"),
        ("sinks: {a: {webhook: {url: 'http://h', template: '\"${node.x}\"'}}}", "only labels and details have fields"),
        (
            "sinks: {a: {webhook: {url: 'http://h', template: '\"${key} ${text}\"'}}}",
            "key applies to one alert, text to a whole batch",
        ),
        ("sinks: {a: {webhook: {url: 'http://h', template: '{\"a\": ${summary}}'}}}", "invalid JSON"),
        ("sinks: {a: {command: {argv: [tell]}}}", "absolute path"),
        ("sinks: {a: {command: {argv: []}}}", "absolute path"),
        ("sinks: {a: {file: {path: rel}}}", "expected an absolute path"),
        ("labels: {a-b: c}", "expected letters, digits and _"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_place(text: str, words: str) -> None:
    message = refused(text)
    assert message.startswith("f:1:")
    assert words in message


def test_a_refusal_does_not_show_a_secret_either() -> None:
    message = refused("sinks: {a: {webhook: {url: 'https://user:secret@host:port/key'}}}")
    assert "secret" not in message
    assert "characters" in message


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://am:9093", "http://am:9093"),
        ("http://am:9093/", "http://am:9093"),
        ("https://h/key", "https://h/***"),
        ("https://h?key=1", "https://h/***"),
        ("https://u:p@h", "https://h/***"),
        ("http://[fe80::1]:1/x", "http://[fe80::1]:1/***"),
        ("nonsense", "***"),
    ],
)
def test_of_a_url_only_the_host_is_shown(url: str, shown: str) -> None:
    assert masked_url(url) == shown


def test_a_userinfo_is_decoded() -> None:
    assert split_url("https://a%40b:c%2Fd@h:1/x?y=z#f") == ("https://h:1", "/x?y=z", "a@b:c/d")


def test_text_templates_are_not_held_to_json() -> None:
    section = WebhookSinkConfig(url="http://h", content_type="text/plain", template="${summary} costs 5$$")
    assert SinkSection(webhook=section).how == "webhook"
