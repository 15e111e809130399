"""The sinks that speak HTTP, against servers that answer well, badly, late, or not at all."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec import Struct
from msgspec.structs import replace
from trio.testing import MockClock

from reconciler.alerts.alert import AlertKind, Severity
from reconciler.alerts.incident import Incident, Incidents
from reconciler.alerts.sinks.alertmanager import AlertmanagerSink, AlertmanagerSinkConfig
from reconciler.alerts.sinks.base import AlertSink, SinkError, SinkSetup, check_kind
from reconciler.alerts.sinks.kubernetes import EventApi, KubernetesSinkConfig
from reconciler.alerts.sinks.table import SINKS, SinkSection, build
from reconciler.alerts.sinks.webhook import WebhookSinkConfig
from reconciler.clients.kube_config import ApiServer
from tests.fakes.http_peer import HttpPeer, Reply
from tests.reconciler.alerts.making import alert, notice

ROOT = Path(__file__).parents[3]
POD = {"namespace": "shop", "pod": "web-0", "uid": "u-1"}


def sink(how: str, section: Any, *, timeout_s: float = 2.0, **more: Any) -> AlertSink:
    sections: dict[str, Any] = {how: section}
    config = SinkSection(timeout_s=timeout_s, **sections)
    return build(SinkSetup(name="s", config=config, node="n1", **more))


async def sent(made: AlertSink, *notices: Incident) -> SinkError | None:
    """Send, and close; the error."""
    try:
        await made.send(notices)
    except SinkError as exc:
        return exc
    finally:
        await made.aclose()
    return None


def test_every_section_of_the_configuration_has_a_sink_and_the_other_way_round() -> None:
    assert SinkSection.sink_kinds() == tuple(SINKS)
    for name, kind in SINKS.items():
        assert SinkSection.__struct_defaults__[SinkSection.__struct_fields__.index(name)] is None
        assert kind.config_type.__module__ == SINKS._paths[name].partition(":")[0]


@pytest.mark.parametrize("name", SINKS)
def test_the_modules_that_a_sink_imports_late_exist(name: str) -> None:
    for module in SINKS[name].modules:
        assert importlib.util.find_spec(module) is not None


def test_a_kind_whose_section_accepts_anything_is_refused() -> None:
    class Loose(Struct, frozen=True, kw_only=True):
        """Accepts anything."""

    kind = SINKS["file"]
    check_kind(kind)
    with pytest.raises(ValueError, match="forbid unknown fields"):
        check_kind(replace(kind, config_type=Loose))


@pytest.mark.parametrize("name", SINKS)
def test_every_section_has_its_documentation(name: str) -> None:
    """Checked here and not when a row is loaded: the daemon runs without docstrings (``python -OO``)."""
    assert (SINKS[name].config_type.__doc__ or "").strip()


def test_the_tables_are_loaded_by_a_program_without_docstrings() -> None:
    code = (
        "from reconciler.alerts.sinks.table import SINKS; from reconciler.detectors.table import DETECTORS;"
        "from reconciler.policies.table import REGISTRY;"
        "from reconciler.responses.eviction.triggers.table import TRIGGERS;"
        "print(all(len(list(table.values())) == len(table) for table in (SINKS, DETECTORS, REGISTRY, TRIGGERS)))"
    )
    done = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("how", ["webhook", "alertmanager"])
@pytest.mark.parametrize(
    ("reply", "words", "wait_s", "permanent"),
    [
        (Reply(status="429 Slow"), "HTTP 429", None, False),
        (Reply(status="429 Slow", headers=("Retry-After: 17",)), "HTTP 429", 17.0, False),
        (Reply(b"on fire", status="500 Oh"), "HTTP 500 on fire", None, False),
        (Reply(b"bad label", status="400 No"), "HTTP 400 bad label", None, True),
        (Reply(status="302 Else", headers=("Location: http://127.0.0.1:1/",)), "HTTP 302", None, False),
        (Reply(raw=b""), "disconnected", None, False),
        (Reply(hang_s=60), "no answer within 300 ms", None, False),
    ],
)
async def test_what_a_server_answers_is_one_clear_error_without_the_urls_secrets(
    nursery: trio.Nursery,
    how: str,
    reply: Reply,
    words: str,
    wait_s: float | None,
    permanent: bool,
    idle_clock: MockClock,
) -> None:
    port = await nursery.start(HttpPeer([reply]).serve)
    url = f"http://me:pass-word@127.0.0.1:{port}/hook-key?token=query-key"
    section = WebhookSinkConfig(url=url) if how == "webhook" else AlertmanagerSinkConfig(urls=(url.partition("?")[0],))
    error = await sent(sink(how, section, timeout_s=0.3 if reply.hang_s else 10.0), notice())
    assert error is not None
    assert words in str(error)
    assert f"http://127.0.0.1:{port}" in str(error)
    assert not [secret for secret in ("pass-word", "hook-key", "query-key") if secret in str(error)]
    assert (error.retry_after_s, error.permanent) == (wait_s, permanent)


async def test_a_server_that_quotes_the_request_shows_nothing_secret_of_it(
    nursery: trio.Nursery, tmp_path: Path, idle_clock: MockClock
) -> None:
    quoted = b"POST /am/hook-key?token=query-key: no hook-key, query-key, Basic bWU6cGFzcy13b3Jk, from-file, core"
    port = await nursery.start(HttpPeer([Reply(quoted, status="404 No")]).serve)
    (tmp_path / "key").write_text("from-file\n")
    section = WebhookSinkConfig(
        url=f"http://me:pass-word@127.0.0.1:{port}/am/hook-key?token=query-key",
        headers={"X-Team": "core"},
        header_files={"X-Key": str(tmp_path / "key")},
    )
    error = await sent(sink("webhook", section), notice())
    assert str(error) == f"http://127.0.0.1:{port}: POST /***: HTTP 404 POST ***: no ***, ***, ***, ***, core"


async def test_nobody_there_is_an_error_and_the_sink_works_when_there_is(
    nursery: trio.Nursery, idle_clock: MockClock
) -> None:
    server = HttpPeer([Reply()])
    port = await nursery.start(server.serve)
    made = sink("webhook", WebhookSinkConfig(url="http://127.0.0.1:1/x"))
    error = await sent(made, notice())
    assert error is not None
    assert "refused" in str(error)
    assert await sent(sink("webhook", WebhookSinkConfig(url=f"http://127.0.0.1:{port}/x")), notice()) is None


async def test_a_webhook_gets_our_document_and_the_configured_method_headers_and_credentials(
    nursery: trio.Nursery, tmp_path: Path, idle_clock: MockClock
) -> None:
    server = HttpPeer([Reply()])
    port = await nursery.start(server.serve)
    (tmp_path / "key").write_text("from-file\n")
    (tmp_path / "url").write_text(f"http://me:pw@127.0.0.1:{port}/a/b?c=d\n")
    section = WebhookSinkConfig(
        url_file=str(tmp_path / "url"),
        method="PUT",
        headers={"X-Team": "core"},
        header_files={"X-Key": str(tmp_path / "key")},
    )
    incidents = Incidents(3600)
    incidents.take(alert(labels=POD))
    made = incidents.take(alert(labels=POD, at_s=1001.5, details={"why": "PSI"}))
    assert await sent(sink("webhook", section), made, notice("two")) is None
    (request,) = server.requests
    assert request[""] == "PUT /a/b?c=d HTTP/1.1"
    assert (request["x-team"], request["x-key"], request["authorization"]) == ("core", "from-file", "Basic bWU6cHc=")
    body = json.loads(server.bodies[0])
    assert (body["version"], body["node"], len(body["alerts"])) == (1, "n1", 2)
    assert body["alerts"][0] == {
        "id": made.id,
        "kind": "eviction-done",
        "key": "k",
        "status": "firing",
        "severity": "warning",
        "summary": "about k",
        "labels": POD,
        "details": {"why": "PSI"},
        "count": 2,
        "first_s": 1000.0,
        "last_s": 1001.5,
    }


async def test_files_with_secrets_are_read_at_each_request_and_a_missing_one_is_told(
    nursery: trio.Nursery, tmp_path: Path, idle_clock: MockClock
) -> None:
    server = HttpPeer([Reply()])
    port = await nursery.start(server.serve)
    url = tmp_path / "url"
    made = sink("webhook", WebhookSinkConfig(url_file=str(url)))
    error = await sent(made, notice())
    assert str(error) == f"{url}: cannot be read: No such file or directory"
    url.write_text("ftp://secret-place")
    error = await sent(made, notice())
    assert str(error) == f"{url}: expected http://HOST[:PORT][/PATH] or https://…"
    for path in ("/one", "/two"):
        url.write_text(f"http://127.0.0.1:{port}{path}")
        assert await sent(made, notice()) is None
    assert [texts[""] for texts in server.requests] == ["POST /one HTTP/1.1", "POST /two HTTP/1.1"]


async def test_a_template_of_one_alert_takes_one_at_a_time_and_escapes_whatever_the_words_are(
    nursery: trio.Nursery, idle_clock: MockClock
) -> None:
    server = HttpPeer([Reply()])
    port = await nursery.start(server.serve)
    text = '{"text": "$${x} ${summary} on ${node}: ${labels.pod}${labels.none}", "n": ${count}, "all": ${labels}}'
    made = sink("webhook", WebhookSinkConfig(url=f"http://127.0.0.1:{port}/", template=text))
    assert made.most == 1
    hostile = 'a "quote", a \\ and a\nline'
    assert await sent(made, notice(summary=hostile, labels=POD)) is None
    assert json.loads(server.bodies[0]) == {"text": f"${{x}} {hostile} on n1: web-0", "n": 1, "all": POD}


async def test_a_template_of_many_takes_them_together(nursery: trio.Nursery, idle_clock: MockClock) -> None:
    server = HttpPeer([Reply()])
    port = await nursery.start(server.serve)
    plain = WebhookSinkConfig(url=f"http://127.0.0.1:{port}/", content_type="text/plain", template="${total}:\n${text}")
    made = sink("webhook", plain)
    assert made.most is None
    assert await sent(made, notice("a"), notice("b", severity=Severity.CRITICAL, resolved=True)) is None
    assert server.bodies[0].decode() == "2:\nwarning: about a\ncritical: resolved: about b"
    assert server.requests[0]["content-type"] == "text/plain"


# Alertmanager


def manager(**more: Any) -> AlertmanagerSink:
    config = SinkSection(alertmanager=AlertmanagerSinkConfig(urls=("http://am:9093/base",), **more))
    return AlertmanagerSink(SinkSetup(name="s", config=config, node="n1"))


def test_labels_identify_an_alert_and_stay_the_same_to_its_end() -> None:
    incidents, made = Incidents(3600), manager(generator_url="http://n1/")
    first = made.entry(
        incidents.take(alert("v", AlertKind.INTERFERENCE, labels={**POD, "a b/c": "x", "9": "y"})), 2000.0
    )
    end = made.entry(incidents.take(alert("v", AlertKind.CLEARED, labels={"pod": "other"}, at_s=1500.0)), 2000.0)
    assert (
        first["labels"]
        == end["labels"]
        == {
            **POD,
            "a_b_c": "x",
            "_9": "y",
            "alertname": "BypassdInterference",
            "severity": "warning",
            "node": "n1",
            "key": "v",
        }
    )
    assert (first["startsAt"], first["endsAt"]) == ("1970-01-01T00:16:40.000Z", "1970-01-01T00:37:20.000Z")
    assert (end["startsAt"], end["endsAt"]) == (first["startsAt"], "1970-01-01T00:25:00.000Z")
    assert first["generatorURL"] == "http://n1/"


def test_the_severity_of_a_states_beginning_identifies_it_to_its_end_and_an_events_is_its_own() -> None:
    incidents, made = Incidents(3600), manager()
    tellings = [("warning", False), ("critical", False), ("info", True)]
    state = [alert("s", AlertKind.STORE, severity=Severity(word), resolved=over) for word, over in tellings]
    event = [alert("e", severity=Severity(word), at_s=at) for at, word in enumerate(("info", "critical"), 1000)]
    entries = [made.entry(incidents.take(item), 2000.0) for item in (*state, *event)]
    labels = [entry["labels"] for entry in entries]
    assert [label["severity"] for label in labels if isinstance(label, dict)] == [*["warning"] * 3, "info", "critical"]


def test_an_event_is_active_for_its_time_and_an_end_never_comes_before_its_beginning() -> None:
    made = manager(event_s=900.0)
    assert made.entry(notice(), 1000.0)["endsAt"] == "1970-01-01T00:31:40.000Z"
    over = made.entry(notice(resolved=True), 1000.0)
    assert (over["startsAt"], over["endsAt"]) == ("1970-01-01T00:16:40.000Z", "1970-01-01T00:16:40.001Z")


async def test_all_instances_are_told_and_one_that_takes_it_is_enough(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture, idle_clock: MockClock
) -> None:
    good, bad = HttpPeer([Reply()]), HttpPeer([Reply(status="500 No")])
    ports = [await nursery.start(peer.serve) for peer in (good, bad)]
    section = AlertmanagerSinkConfig(urls=tuple(f"http://127.0.0.1:{port}/am/" for port in ports))
    made = sink("alertmanager", section)
    assert [await sent(made, notice()) for _ in range(2)] == [None, None]
    assert [texts[""] for texts in good.requests] == ["POST /am/api/v2/alerts HTTP/1.1"] * 2
    assert len(bad.requests) == 2
    assert [record.message for record in caplog.records] == ["delivery to one of several Alertmanagers failed"]
    good.replies = [Reply(status="503 No", headers=("Retry-After: 9",))]
    error = await sent(made, notice())
    assert error is not None
    assert ("HTTP 503" in str(error), "HTTP 500" in str(error), error.retry_after_s) == (True, True, 9.0)


# Kubernetes


async def events(
    nursery: trio.Nursery, replies: Sequence[Reply], *notices: Incident, api: EventApi = EventApi.CORE
) -> tuple[list[tuple[str, Any]], SinkError | None]:
    """The requests to the API server, and the error."""
    server = HttpPeer(list(replies))
    port = await nursery.start(server.serve)
    address = ApiServer(server=f"http://127.0.0.1:{port}")
    timeout_s = 0.5 if replies[0].hang_s else 10.0
    made = sink("kubernetes", KubernetesSinkConfig(api=api), apiserver=address, timeout_s=timeout_s)
    error = await sent(made, *notices)
    parts = [texts[""].removesuffix(" HTTP/1.1") for texts in server.requests]
    nursery.cancel_scope.cancel()
    return [(word, json.loads(body)) for word, body in zip(parts, server.bodies, strict=True)], error


async def test_an_event_on_the_pod_names_it_by_uid(nursery: trio.Nursery, idle_clock: MockClock) -> None:
    made = notice(labels=POD)
    [(text, body)], error = await events(nursery, [Reply(b"{}", status="201 Created")], made)
    assert (text, error) == ("POST /api/v1/namespaces/shop/events", None)
    assert body == {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"web-0.{made.id}", "namespace": "shop"},
        "involvedObject": {"kind": "Pod", "namespace": "shop", "name": "web-0", "uid": "u-1", "apiVersion": "v1"},
        "reason": "EvictionDone",
        "message": "about k",
        "type": "Warning",
        "count": 1,
        "firstTimestamp": "1970-01-01T00:16:40Z",
        "lastTimestamp": "1970-01-01T00:16:40Z",
        "source": {"component": "bypassd", "host": "n1"},
        "reportingComponent": "bypassd",
        "reportingInstance": "n1",
    }


async def test_names_stay_within_their_segment_of_the_path(nursery: trio.Nursery, idle_clock: MockClock) -> None:
    incidents = Incidents(3600)
    incidents.take(alert(labels={"namespace": "a/../b?c", "pod": "d/e#f"}))
    again = incidents.take(alert(at_s=1001.0, labels={"namespace": "a/../b?c", "pod": "d/e#f"}))
    [(text, _)], _ = await events(nursery, [Reply(b"{}")], again)
    assert text == f"PATCH /api/v1/namespaces/a%2F..%2Fb%3Fc/events/d%2Fe%23f.{again.id}"


async def test_an_event_without_a_pod_is_on_the_node_and_an_end_is_one_of_its_own(
    nursery: trio.Nursery, idle_clock: MockClock
) -> None:
    made = notice(kind=AlertKind.STORE, resolved=True)
    [(text, body)], _ = await events(nursery, [Reply(status="201 Created")], made, api=EventApi.EVENTS)
    assert text == "POST /apis/events.k8s.io/v1/namespaces/default/events"
    assert body["regarding"] == {"kind": "Node", "name": "n1", "uid": "n1", "apiVersion": "v1"}
    assert (body["metadata"]["name"], body["reason"], body["type"]) == (f"n1.{made.id}-over", "StoreResolved", "Normal")
    assert (body["eventTime"], body["note"], "series" in body) == ("1970-01-01T00:16:40.000000Z", "about k", False)


@pytest.mark.parametrize(
    ("api", "change"),
    [
        (EventApi.CORE, {"count": 2, "lastTimestamp": "1970-01-01T00:16:41Z", "message": "about k"}),
        (EventApi.EVENTS, {"series": {"count": 2, "lastObservedTime": "1970-01-01T00:16:41.000000Z"}}),
    ],
)
async def test_more_of_the_same_counts_the_event_up_and_one_that_has_expired_is_made_anew(
    nursery: trio.Nursery, api: EventApi, change: object, idle_clock: MockClock
) -> None:
    incidents = Incidents(3600)
    incidents.take(alert())
    again = incidents.take(alert(at_s=1001.0))
    pairs, error = await events(nursery, [Reply(status="404 Gone"), Reply(status="201 Made")], again, api=api)
    assert [text.partition(" ")[0] for text, _ in pairs] == ["PATCH", "POST"]
    assert (pairs[0][0].endswith(f"/events/n1.{again.id}"), pairs[0][1], error) == (True, change, None)


@pytest.mark.parametrize("api", list(EventApi))
async def test_an_event_keeps_to_what_the_api_server_accepts_in_bytes(
    nursery: trio.Nursery, api: EventApi, idle_clock: MockClock
) -> None:
    pairs, _ = await events(nursery, [Reply(status="409 Conflict"), Reply(b"{}")], notice(summary="é" * 700), api=api)
    texts = [text for _, body in pairs for name in ("message", "note") if (text := body.get(name)) is not None]
    assert texts == ["é" * 510 + "…"] * (2 if api is EventApi.CORE else 1)
    assert len(texts[0].encode()) <= 1024


async def test_one_that_is_there_already_after_a_crash_is_counted_and_not_made_twice(
    nursery: trio.Nursery, idle_clock: MockClock
) -> None:
    pairs, error = await events(nursery, [Reply(status="409 Conflict"), Reply(b"{}")], notice())
    assert ([text.partition(" ")[0] for text, _ in pairs], error) == (["POST", "PATCH"], None)


@pytest.mark.parametrize(
    ("reply", "words", "wait_s", "permanent"),
    [
        (Reply(status="404 No"), "the namespace does not exist", None, True),
        (Reply(status="401 No"), "HTTP 401", None, False),
        (Reply(status="500 No"), "HTTP 500", None, False),
        (Reply(hang_s=60), "no answer within 500 ms", None, False),
        (
            Reply(
                b'{"kind":"Status","message":"%s","details":{"retryAfterSeconds":7}}' % (b"late " * 999),
                status="429 Slow",
            ),
            "HTTP 429 late late",
            7.0,
            False,
        ),
        (
            Reply(b'{"kind":"Status","message":"later","details":{"retryAfterSeconds":7}}', status="429 Slow"),
            "HTTP 429 later",
            7.0,
            False,
        ),
        (
            Reply(
                b'{"kind":"Status","reason":"Forbidden","details":{"causes":[{"reason":"NamespaceTerminating"}]}}',
                status="403 No",
            ),
            "the namespace does not exist",
            None,
            True,
        ),
    ],
)
async def test_what_the_api_server_refuses(
    nursery: trio.Nursery, reply: Reply, words: str, wait_s: float | None, permanent: bool, idle_clock: MockClock
) -> None:
    _, error = await events(nursery, [reply], notice())
    assert error is not None
    assert words in str(error)
    assert len(str(error)) < 400
    assert (error.retry_after_s, error.permanent) == (wait_s, permanent)
