"""Probes over HTTP, against servers on loopback: times and numbers, every kind of bad answer, secrets, metrics."""

import math
import ssl
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme
from prometheus_client import CollectorRegistry, Gauge, Histogram, Summary, generate_latest
from trio.testing import MockClock

from cgroupfs.errors import SourceError
from reconciler.signals.probe_config import HttpProbe, LatencyUnit, Probe, PrometheusProbe
from reconciler.signals.probe_http import HttpSource
from reconciler.signals.probe_prometheus import PrometheusSource
from reconciler.signals.probe_source import ProbeResult
from reconciler.signals.probe_targets import ProbeTarget, ProbeTargetKey
from tests.fakes.http_peer import HttpPeer, Reply, server_tls

MADE: list[HttpSource | PrometheusSource] = []


@pytest.fixture(autouse=True)
async def _closed() -> AsyncIterator[None]:
    """What the test made is closed when it ends."""
    yield
    while MADE:
        await MADE.pop().aclose()


def target(probe: Probe, url: str) -> ProbeTarget:
    return ProbeTarget(key=ProbeTargetKey("p", ""), title="probe p", probe=probe, uids=("u",), url=url)


def http(
    server: HttpPeer, path: str = "/x", *, unit: LatencyUnit | None = None, scheme: str = "http", **more: object
) -> HttpSource:
    url = f"{scheme}://127.0.0.1:{server.port}{path}"
    probe = Probe(pods=("x",), timeout_s=0.5, unit=unit, http=HttpProbe(url=url, **more))  # type: ignore[arg-type]
    made = HttpSource(target(probe, url))
    MADE.append(made)
    return made


def metrics(server: HttpPeer, select: str, **more: object) -> PrometheusSource:
    url = f"http://127.0.0.1:{server.port}/metrics"
    config = PrometheusProbe(url=url, select=select, **more)  # type: ignore[arg-type]  # as the test gives them
    made = PrometheusSource(target(Probe(pods=("x",), timeout_s=2, prometheus=config), url))
    MADE.append(made)
    return made


async def peer(nursery: trio.Nursery, *replies: Reply, tls: ssl.SSLContext | None = None) -> HttpPeer:
    server = HttpPeer(list(replies))
    await nursery.start(server.serve, tls)
    return server


async def words_of(source: HttpSource | PrometheusSource) -> str:
    with pytest.raises(SourceError) as caught:
        await source.measure()
    return str(caught.value)


# Times


async def test_the_time_of_an_answer_is_measured_on_a_kept_connection(
    nursery: trio.Nursery, idle_clock: MockClock
) -> None:
    server = await peer(nursery, Reply(b"x" * 100_000, hang_s=0.05), Reply(b"y"))
    source = http(server)
    first, second = await source.measure(), await source.measure()
    assert first.ms == pytest.approx(50)
    assert (second.ms, first.confidence, server.connections) == (0, 1.0, 1)
    assert server.requests[0][""] == "GET /x HTTP/1.1"


async def test_with_connect_each_request_makes_a_connection_and_that_counts(
    nursery: trio.Nursery, idle_clock: MockClock
) -> None:
    server = await peer(nursery, Reply(b"x", close=True, hang_s=0.05))
    source = http(server, connect=True)
    for _ in range(3):
        assert (await source.measure()).ms == pytest.approx(50)
    assert server.connections == 3
    assert server.requests[-1]["connection"] == "close"


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(b"no\nroom", status="503 Busy"), "HTTP 503 no room"),
        (Reply(hang_s=60), "no answer within 500 ms"),
        (Reply(b"x", cut=10), "peer closed connection"),
        (Reply(raw=b"hello\r\n\r\n"), "illegal"),
        (Reply(raw=b""), "disconnected"),
    ],
)
async def test_a_bad_answer_is_unknown_and_said_and_the_next_good_one_counts(
    nursery: trio.Nursery, reply: Reply, words: str, idle_clock: MockClock
) -> None:
    server = await peer(nursery, reply, Reply(b"ok"))
    source = http(server)
    said = await words_of(source)
    assert said.startswith(f"probe p: http://127.0.0.1:{server.port}")
    assert words in said.lower() or words in said
    assert (await source.measure()).confidence == 1.0


async def test_a_refused_connection_is_said(nursery: trio.Nursery, idle_clock: MockClock) -> None:
    with trio.socket.socket() as free:
        await free.bind(("127.0.0.1", 0))
        server = HttpPeer([Reply()], port=free.getsockname()[1])
    assert "refused" in await words_of(http(server))


async def test_a_late_answer_counts_where_that_is_asked_for_and_a_refused_one_never(
    nursery: trio.Nursery, idle_clock: MockClock
) -> None:
    server = await peer(nursery, Reply(hang_s=60))
    source = http(server, count_late=True)
    assert await source.measure() == ProbeResult(500.0, 0.5)


async def test_only_the_statuses_that_count_count(nursery: trio.Nursery, idle_clock: MockClock) -> None:
    server = await peer(nursery, Reply(b"", status="302 Found"), Reply(b"", status="404 None"))
    assert (await http(server).measure()).ms is not None
    assert (await http(server, statuses=(404,)).measure()).ms is not None
    assert "HTTP 404" in await words_of(http(server, statuses=(200,)))


# Numbers


async def test_a_number_is_read_from_the_answer(nursery: trio.Nursery, idle_clock: MockClock) -> None:
    server = await peer(nursery, Reply(b" 12.5\n"), Reply(b'{"a":{"p99":0.25}}'), Reply(b"{}"), Reply(b"1" * 70_000))
    assert await http(server, measure="value").measure() == ProbeResult(12.5)
    assert await http(server, measure="value", field="a.p99", unit=LatencyUnit.S).measure() == ProbeResult(250.0)
    url = f"probe p: http://127.0.0.1:{server.port}/x"
    source = http(server, path="/x", measure="value", field="a")
    assert await words_of(source) == f"{url}: no 'a' in the JSON: 'a' is missing"
    assert await words_of(http(server, measure="value")) == f"{url}: the answer is larger than 64 KiB"


# Secrets and trust


async def test_tokens_and_headers_come_from_files_and_are_in_no_message(
    nursery: trio.Nursery, tmp_path: Path, idle_clock: MockClock
) -> None:
    (tmp_path / "token").write_text("hush-token\n")
    (tmp_path / "key").write_text("hush-key\n")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    server = await peer(nursery, Reply(b"x", status="500 Oh"), Reply(b"ok"), tls=server_tls(authority))
    given = {"X-Key": str(tmp_path / "key")}
    trust: dict[str, Any] = {"token_file": str(tmp_path / "token"), "ca_file": str(tmp_path / "ca.pem")}
    source = http(server, "/x?key=hush", scheme="https", **trust, header_files=given, headers={"X-Team": "a"})
    said = await words_of(source)
    assert server.requests[0]["authorization"] == "Bearer hush-token"
    assert (server.requests[0]["x-key"], server.requests[0]["x-team"]) == ("hush-key", "a")
    assert "hush" not in said + repr(source._config)
    (tmp_path / "key").write_text("newer\n")
    await source.measure()
    assert server.requests[1]["x-key"] == "newer"
    (tmp_path / "key").write_text("a\nb\n")
    assert "expected one line of plain ASCII text" in await words_of(source)
    (tmp_path / "key").unlink()
    assert "No such file" in await words_of(source)


async def test_a_certificate_is_checked_unless_told_otherwise(
    nursery: trio.Nursery, tmp_path: Path, idle_clock: MockClock
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    server = await peer(nursery, Reply(b"ok"), tls=server_tls(authority))
    assert "certificate is not trusted" in await words_of(http(server, scheme="https"))
    for more in ({"ca_file": str(tmp_path / "ca.pem")}, {"insecure_skip_verify": True}):
        source = http(server, scheme="https", **more)
        assert (await source.measure()).ms is not None


# Metrics


class Service:
    """A service with a registry; each scrape gets what it is then."""

    def __init__(self, *, buckets: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8)) -> None:
        self.buckets = buckets
        self.server = HttpPeer([Reply()])
        self.restart()

    def restart(self) -> None:
        self.registry = CollectorRegistry()
        self.seconds = Histogram("req_seconds", "x", ["path"], registry=self.registry, buckets=self.buckets)
        self.gauge = Gauge("last_seconds", "x", ["path"], registry=self.registry)
        self.summary = Summary("sum_seconds", "x", registry=self.registry)

    def publish(self) -> None:
        self.server.replies = [Reply(generate_latest(self.registry))]

    def observe(self, path: str, *seconds: float) -> None:
        for second in seconds:
            self.seconds.labels(path).observe(second)


@pytest.fixture
async def service(nursery: trio.Nursery) -> Service:
    made = Service()
    await nursery.start(made.server.serve)
    return made


async def test_a_quantile_is_of_what_came_since_the_last_scrape(
    nursery: trio.Nursery, service: Service, idle_clock: MockClock
) -> None:
    source = metrics(service.server, 'req_seconds{path=~"/a|/b"}', quantile=0.5)
    service.observe("/a", *[0.7] * 1000)
    service.publish()
    assert (await source.measure()).ms is None
    service.observe("/a", *[0.15] * 30)
    service.observe("/b", *[0.15] * 30)
    service.observe("/c", *[0.7] * 900)
    service.publish()
    assert tuple(await source.measure()) == pytest.approx((150.0, 1.0))
    # Nothing arrived: nothing is reported, and nothing is wrong.
    assert (await source.measure()).ms is None
    assert service.server.requests[0]["accept"].startswith("text/plain;version=0.0.4")


async def test_a_restarted_service_begins_anew(nursery: trio.Nursery, service: Service, idle_clock: MockClock) -> None:
    source = metrics(service.server, "req_seconds", quantile=0.5)
    service.observe("/a", *[0.7] * 1000)
    service.publish()
    await source.measure()
    service.restart()
    service.observe("/a", *[0.3] * 500)
    service.publish()
    assert (await source.measure()).ms == pytest.approx(300.0)


async def test_few_requests_and_the_last_bucket_are_believed_less(
    nursery: trio.Nursery, service: Service, idle_clock: MockClock
) -> None:
    source = metrics(service.server, "req_seconds")
    service.observe("/a", 0.1)
    service.publish()
    await source.measure()
    service.observe("/a", *[0.15] * 20)
    service.publish()
    assert tuple(await source.measure()) == pytest.approx((199.0, 0.2))
    service.observe("/a", *[5.0] * 1000)
    service.publish()
    assert await source.measure() == ProbeResult(800.0, 0.5)


async def test_a_mean_is_of_what_came_since_the_last_scrape(
    nursery: trio.Nursery, service: Service, idle_clock: MockClock
) -> None:
    for select in ("req_seconds", "sum_seconds"):
        service.restart()
        source = metrics(service.server, select, read="mean")

        def observe(*seconds: float, of: str = select) -> None:
            for each in seconds:
                service.summary.observe(each)
                service.observe("/a", each)
            service.publish()

        observe(9.0)
        assert (await source.measure()).ms is None
        observe(0.1, 0.3)
        assert (await source.measure()).ms == pytest.approx(200.0)
        assert (await source.measure()).ms is None


async def test_of_gauges_the_highest_counts_and_one_without_a_value_does_not(
    nursery: trio.Nursery, service: Service, idle_clock: MockClock
) -> None:
    source = metrics(service.server, "last_seconds", read="gauge")
    service.gauge.labels("/a").set(0.1)
    service.gauge.labels("/b").set(0.25)
    service.gauge.labels("/c").set(math.nan)
    service.publish()
    assert await source.measure() == ProbeResult(250.0)
    service.gauge.clear()
    service.gauge.labels("/c").set(math.nan)
    service.publish()
    assert (await source.measure()).ms is None
    service.gauge.labels("/c").set(-1)
    service.publish()
    assert "last_seconds is -1, not a time" in await words_of(source)


async def test_a_summarys_own_quantile_is_taken(nursery: trio.Nursery, idle_clock: MockClock) -> None:
    body = b's{quantile="0.5"} 1\ns{quantile="0.99",path="/a"} 0.5\ns{quantile="0.990",path="/b"} 0.75\ns_count 4\n'
    server = await peer(nursery, Reply(body))
    assert await metrics(server, "s").measure() == ProbeResult(750.0)
    assert await metrics(server, 's{path="/a"}').measure() == ProbeResult(500.0)
    said = await words_of(metrics(server, "s", quantile=0.9))
    assert said.endswith("s is neither a histogram nor a summary with the quantile 0.9")


async def test_a_histogram_without_its_last_bucket_is_told(nursery: trio.Nursery, idle_clock: MockClock) -> None:
    server = await peer(nursery, Reply(b'm_bucket{le="1"} 1\nm_bucket{le="2"} 1\nm_bucket{le="x"} 1\n'))
    source = metrics(server, "m")
    await source.measure()
    assert 'no bucket le="+Inf"' in await words_of(source)


async def test_a_long_text_is_read(nursery: trio.Nursery, idle_clock: MockClock) -> None:
    server = await peer(nursery, Reply(b'noise{a="b"} 1\n' * 10_000 + b"m 0.5\n"))
    assert await metrics(server, "m", read="gauge").measure() == ProbeResult(500.0)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(b"other 1\n"), "no series m for quantile"),
        (Reply(b'm_bucket{le="1"} x\n'), "not a sample: 'm_bucket{le=\"1\"} x'"),
        (Reply(b"", status="404 None"), "HTTP 404"),
        (Reply(b"<html>", status="200 OK"), "no series"),
        (Reply(bytes(20 << 20)), "the answer is larger than 16 MiB"),
    ],
)
async def test_what_is_no_metric_is_told(
    nursery: trio.Nursery, reply: Reply, words: str, idle_clock: MockClock
) -> None:
    server = await peer(nursery, reply)
    assert words in await words_of(metrics(server, "m"))


async def test_of_a_pods_labels_only_those_that_are_needed_are_kept(
    nursery: trio.Nursery, idle_clock: MockClock
) -> None:
    """Else 14 MB of labels, which a pod's author chooses, are 250 MB from one scrape to the next."""

    def series(index: int) -> str:
        labels = ",".join(f'l{number}="x{index}"' for number in range(100))
        return f'm_bucket{{le="{index}",{labels}}} 1\n'

    text = "".join(map(series, range(200))) + 'm_bucket{le="+Inf"} 9\n'
    server = await peer(nursery, Reply(text.encode()))
    source = metrics(server, "m")
    assert (await source.measure()).ms is None
    tracemalloc.start()
    try:
        await source.measure()
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (kept < 3 * len(text), most < 5 * len(text)) == (True, True), (kept, most, len(text))
