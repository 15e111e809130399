"""Prometheus' text: read as its own client reads it, selected as PromQL selects, quantiles as its functions define."""

import itertools
import math
import re
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from reconciler.signals.promtext import (
    MOST_SERIES,
    MetricSeries,
    SeriesReader,
    grown,
    histogram,
    number,
    parse_selector,
    quantile,
)
from tests.cputime import least_cpu_s, longest_step_s
from tests.known import known

# What a label may hold: everything, and often what has to be escaped.
VALUES = st.text(st.one_of(st.sampled_from('\\"\n{}=,# \t\r'), st.characters(codec="utf-8")), max_size=12)
NUMBERS = st.one_of(st.floats(), st.integers(-(10**12), 10**12).map(float))


def series_of(body: bytes, names: list[str]) -> list[MetricSeries]:
    reader = SeriesReader(names)
    reader.feed(body)
    reader.end()
    return reader.found


def plain(samples: list[tuple[str, dict[str, str], float]]) -> list[tuple[str, list[tuple[str, str]], str]]:
    """Comparable: not-a-number is equal to itself here."""
    return sorted((name, sorted(labels.items()), repr(value)) for name, labels, value in samples)


@given(st.lists(st.tuples(VALUES, VALUES, NUMBERS), max_size=6))
def test_samples_are_read_as_the_client_reads_them(rows: list[tuple[str, str, float]]) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("wanted_seconds", "Help with \\ and\nlines", ["one", "other"], registry=registry)
    noise = Gauge("wanted_seconds_too", "Noise", ["one"], registry=registry)
    for text, other, value in rows:
        gauge.labels(text, other).set(value)
        noise.labels(text).set(value)
    body = generate_latest(registry)
    message = [
        (sample.name, dict(sample.labels), sample.value)
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
        if sample.name == "wanted_seconds"
    ]
    read = [(series.name, dict(series.labels), series.value) for series in series_of(body, ["wanted_seconds"])]
    assert plain(read) == plain(message)
    assert {(item, other) for item, other, _ in rows} == {(row[1]["one"], row[1]["other"]) for row in read}


@given(st.lists(st.tuples(st.sampled_from(["a", 'b"\\']), st.floats(0, 20)), max_size=30))
def test_histograms_are_read_from_both_formats(rows: list[tuple[str, float]]) -> None:
    registry = CollectorRegistry()
    hist = Histogram("h", "x", ["p"], buckets=(0.1, 1, 10), registry=registry)
    Counter("h_other", "x", registry=registry).inc()
    Summary("s", "x", registry=registry).observe(1)
    for path, value in rows:
        hist.labels(path).observe(value, None)
    openmetrics: bytes = generate_openmetrics(registry)  # type: ignore[no-untyped-call]  # the client's own
    for body in (generate_latest(registry), openmetrics):
        for path in {path for path, _ in rows}:
            selector = parse_selector('h{p="%s"}' % path.replace("\\", "\\\\").replace('"', '\\"'))  # noqa: UP031
            values = {
                float(series.labels["le"]): series.value
                for series in series_of(body, ["h_bucket"])
                if selector.fits(series.labels)
            }
            mine = [value for label, value in rows if label == path]
            assert values == {
                bound: float(sum(value <= bound for value in mine)) for bound in (0.1, 1.0, 10.0, math.inf)
            }


def test_timestamps_exemplars_and_odd_spacing_are_read_over() -> None:
    body = (
        b'm_bucket{le="1"} 5 # {trace_id="m_bucket 9"} 0.5 1.0\n'
        b'  m_bucket { le = "2" , } 6 1700000000000\r\n'
        b"m_bucket 7\n"
        b'# m_bucket{le="3"} 8\n'
        b"m_bucketing 9\n"
    )
    assert [(dict(series.labels), series.value) for series in series_of(body, ["m_bucket"])] == [
        ({"le": "1"}, 5.0),
        ({"le": "2"}, 6.0),
        ({}, 7.0),
    ]


@pytest.mark.parametrize("line", ["m", "m{", 'm{a="b} 1', "m{a=b} 1", "m x", "m 1_0", 'm{a="b",,} 1', "m {} "])
def test_a_broken_line_of_the_metric_is_told_and_of_others_is_nobodys_business(line: str) -> None:
    assert list(series_of(f"other{line}\n".encode(), ["m"])) == []
    body = f"{line}\n".encode()
    if line == "m":
        assert list(series_of(body, ["m"])) == []
        return
    with pytest.raises(ValueError, match="not a sample: "):
        list(series_of(body, ["m"]))


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_in_words(noise: bytes) -> None:
    body = b"m{" + noise + b"\nm 1\n"
    try:
        serieses = list(series_of(body, ["m"]))
    except ValueError as exc:
        assert "not a sample" in str(exc)  # noqa: PT017
    else:
        assert serieses[-1].value == 1.0


def test_ten_megabytes_of_others_cost_little() -> None:
    line = b'other_metric_with_a_name{label="some value",second="another"} 12345.678\n'
    body = line * (10_000_000 // len(line)) + b"m 1\n"
    assert [series.value for series in series_of(body, ["m", "m_bucket"])] == [1.0]
    # 50 ms where this was written; reading every line takes seconds.
    assert least_cpu_s(lambda: list(series_of(body, ["m", "m_bucket"])), 0.5) < 0.5


# Selecting


@pytest.mark.parametrize(
    ("text", "labels", "fits"),
    [
        ("m", {}, True),
        ("m{}", {"a": "b"}, True),
        ('m{a="b"}', {"a": "b"}, True),
        ("m{a='b',}", {"a": "b"}, True),
        ('m{a="b", c != "d"}', {"a": "b"}, True),
        ('m{a="b",c!="d"}', {"a": "b", "c": "d"}, False),
        ('m{a=""}', {}, True),
        ('m{a=~"b|c"}', {"a": "c"}, True),
        ('m{a=~"b"}', {"a": "bb"}, False),
        ('m{a!~"5.."}', {"a": "503"}, False),
        ('m{a!~"5.."}', {"a": "200"}, True),
        ('m{a="}\\"\\\\,\\n"}', {"a": '}"\\,\n'}, True),
    ],
)
def test_a_selector_fits_as_in_promql(text: str, labels: dict[str, str], fits: bool) -> None:
    selector = parse_selector(f" {text} ")
    assert (selector.name, selector.fits(labels)) == ("m", fits)


@pytest.mark.parametrize("text", ["", "1m", "m{", 'm{a="b"', "m{a}", "m{a=b}", 'm{a=="b"}', 'm{a="b" c="d"}', "m n"])
def test_what_is_no_selector_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="select: "):
        parse_selector(text)


# Quantiles


def told(q: float, **buckets: float) -> float | None:
    bounds = {math.inf if name == "inf" else float(name[1:].replace("_", ".")): n for name, n in buckets.items()}
    hist = histogram(bounds)
    return None if hist is None else quantile(hist, q)


def test_quantiles_are_those_of_histogram_quantile() -> None:
    # Worked by hand from the definition in Prometheus' documentation.
    assert told(0.5, b1=0, b2=10, inf=10) == pytest.approx(1.5)
    assert told(0.9, b0_1=50, b0_5=90, b1=100, inf=100) == pytest.approx(0.5)
    assert told(0.95, b0_1=50, b0_5=90, b1=100, inf=100) == pytest.approx(0.75)
    assert told(0.1, b4=100, inf=100) == pytest.approx(0.4)
    assert told(0.99, b1=10, inf=20) == 1.0
    assert told(1.0, b1=10, b2=20, inf=20) == 2.0
    assert told(0.5, b0=10, b1=12, inf=12) == 0.0
    assert told(0.5, b1=0, inf=0) is None
    assert told(0.5, inf=5) is None
    assert told(0.5, b1=5, b2=6) is None


def test_buckets_that_fall_count_as_equal() -> None:
    assert told(0.5, b1=10, b2=8, inf=10) == pytest.approx(0.5)


@given(
    st.lists(st.floats(0.0, 100.0), min_size=1, max_size=200),
    st.lists(st.floats(0.1, 90.0), min_size=1, max_size=12, unique=True),
    st.floats(0.001, 1.0),
)
def test_a_quantile_lies_in_the_bucket_of_the_real_one(values: list[float], bounds: list[float], q: float) -> None:
    edges = [*sorted(bounds), math.inf]
    hist = known(histogram({edge: float(sum(value <= edge for value in values)) for edge in edges}))
    result = known(quantile(hist, q))
    real = sorted(values)[max(0, math.ceil(q * len(values) - 1e-9) - 1)]
    index = next(at for at, edge in enumerate(edges) if real <= edge)
    low = 0.0 if index == 0 else edges[index - 1]
    high = edges[-2] if index == len(edges) - 1 else edges[index]
    assert min(low, high) - 1e-9 <= result <= high + 1e-9


# Counters


def test_counters_grow_begin_anew_or_are_new() -> None:
    assert grown({1.0: 5.0, 2.0: 7.0}, {1.0: 6.0, 2.0: 9.0}) == {1.0: 1.0, 2.0: 2.0}
    # One that fell: the process was restarted, and all of them with it.
    assert grown({1.0: 5.0, 2.0: 7.0}, {1.0: 1.0, 2.0: 8.0}) == {1.0: 1.0, 2.0: 8.0}
    assert grown(None, {1.0: 5.0}) == {1.0: 5.0}
    # A bucket of a new version of the service only, and one of the old.
    assert grown({1.0: 5.0}, {1.0: 5.0, 2.0: 8.0}) == {1.0: 0.0, 2.0: 8.0}
    assert grown({1.0: 5.0, 2.0: 7.0}, {2.0: 9.0}) == {2.0: 9.0}


@given(st.lists(st.floats(0, 5), min_size=1, max_size=40), st.data())
def test_what_has_grown_since_any_moment_of_a_process_is_what_it_has_observed_since(
    values: list[float], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(values)))
    bounds = (1.0, 2.0, math.inf)

    def counts(of: list[float]) -> dict[float, float]:
        return {bound: float(sum(value <= bound for value in of)) for bound in bounds}

    assert grown(counts(values[:cut]), counts(values)) == counts(values[cut:])


@pytest.mark.parametrize(("text", "value"), [("+Inf", math.inf), ("-Inf", -math.inf), ("1e3", 1000.0), ("0", 0.0)])
def test_numbers_as_prometheus_writes_them(text: str, value: float) -> None:
    assert number(text) == value
    assert math.isnan(number("NaN"))
    with pytest.raises(ValueError, match=re.escape("1_0")):
        number("1_0")


# What a service's author wrote


AMBIGUOUS = ("(a+)+b", "(a|aa)*b", ".*.*.*x", "(?:x*)*", "a?" * 30 + "a" * 30, r"(a)\\1", "(?=a).")
USUAL = ("a|b", "5..", "/api/.*", ".*foo.*", "(?i)get", "[0-9]{3}", "/v1/(users|jobs)/[^/]+")


@pytest.mark.parametrize("pattern", AMBIGUOUS)
def test_a_pattern_that_could_take_for_ever_is_refused_with_the_configuration(pattern: str) -> None:
    with pytest.raises(ValueError, match="may match very slowly"):
        parse_selector(f'm{{x=~"{pattern}"}}')


@pytest.mark.parametrize("pattern", USUAL)
def test_usual_patterns_take_any_label_in_no_time(pattern: str) -> None:
    selector = parse_selector(f'm{{x=~"{pattern}"}}')
    for value in ("a" * 256, "/" * 255 + "!", "foo" * 85, "x" * 1_000_000):
        assert least_cpu_s(lambda label=value: selector.fits({"x": label}), 0.05) < 0.05  # type: ignore[misc]
    assert not selector.fits({"x": "foo" * 1000}), "no label is so long"


WORST = {
    "one line": b"m" * (16 << 20),
    "blanks": b"m" + b" " * (16 << 10) + b"#",
    "blanks and labels": b"m {" + b" " * (8 << 10) + b"}" + b" " * (4 << 10) + b"#",
    "open label": b'm{a="' + b"x" * (15 << 10),
    "backslashes": b'm{a="' + b"\\" * (15 << 10) + b'"} 1',
    "labels": b"m{" + b'a="b",' * 2500 + b"} x",
    "digits": b"m " + b"9" * (15 << 10),
    "long wanted line": b"m 1" + b" " * (17 << 10),
}


@pytest.mark.parametrize("name", WORST)
def test_the_worst_text_takes_little_work_and_memory_in_any_parts(name: str) -> None:
    text = WORST[name]
    said = ""

    def read() -> Iterator[None]:
        nonlocal said
        reader = SeriesReader(["m"])
        try:
            for part in itertools.chain((text[at : at + 4096] for at in range(0, len(text), 4096)), [b"\n"]):
                reader.feed(part)
                yield
        except ValueError as exc:
            said = str(exc)

    assert longest_step_s(read, 0.1) < 0.1
    assert len(said) < 300
    tracemalloc.start()
    try:
        for _ in read():
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@given(st.binary(max_size=200) | st.text('m{}="\\, \n1x', max_size=80).map(str.encode), st.integers(1, 30))
def test_a_text_tells_the_same_in_any_parts(text: bytes, size: int) -> None:
    def told(parts: list[bytes]) -> object:
        reader = SeriesReader(["m"])
        try:
            for part in parts:
                reader.feed(part)
            reader.end()
        except ValueError:
            return "broken"
        return [(series.name, dict(series.labels), str(series.value)) for series in reader.found]

    assert told([text[at : at + size] for at in range(0, len(text), size)]) == told([text])


def test_more_series_than_a_scrape_may_have_are_refused() -> None:
    reader = SeriesReader(["m"])
    with pytest.raises(ValueError, match="more than 10000 series"):
        reader.feed(b'm{a="b"} 1\n' * (MOST_SERIES + 1))
