"""Prometheus' text format, as far as one metric of it is needed, and PromQL's functions on it. Pure.

OpenMetrics' text is the same for the parts read here (its exemplars and timestamps are left out).
Source: Prometheus documentation, instrumenting/exposition_formats, querying/basics (selectors) and querying/functions
(``histogram_quantile``); OpenMetrics 1.0.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from re import _constants as _sre  # type: ignore[attr-defined]  # the pattern's tree has no public name
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Final, NamedTuple, final

from msgspec import Struct

from cgroupfs.bounded import shown
from reconciler.runtime.format import size

_NAME: Final = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_SELECTOR: Final = re.compile(rf"\s*({_NAME})\s*(?:\{{(.*)\}})?\s*", re.DOTALL)
_MATCHER: Final = re.compile(
    r"\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*(?:\"((?:\\.|[^\"\\])*)\"|'((?:\\.|[^'\\])*)')\s*(?:,|$)", re.DOTALL
)
_SAMPLE: Final = re.compile(
    # Possessive or atomic, as in `pod_list`: no position of an untrusted text is scanned twice.
    rb"[ \t]*+([a-zA-Z_:][a-zA-Z0-9_:]*+)[ \t]*+"
    rb"(?>(?:\{((?>(?:[^\"{}]++|\"(?:[^\"\\]++|(?=\\.)\\.)*+\")*))\}[ \t]*+)?)([^ \t#]++)"
)
_LABEL: Final = re.compile(
    r"\s*+([a-zA-Z_][a-zA-Z0-9_]*+)\s*+=\s*+\"((?:[^\"\\]++|(?=\\.)\\.)*+)\"\s*+(?:,|$)", re.DOTALL
)
LONGEST_LINE: Final = 16 * 1024
"""Bytes of a line that is wanted; one of another metric may have any length."""
MOST_SERIES: Final = 10_000
"""Of one scrape."""
LONGEST_MATCHED: Final = 256
"""Characters of a label's value that a pattern is compared with; a longer one fits none."""
_MOST_REPEATS: Final = 2
"""Such as ``.*``, in one pattern: more, or one within another, and a label made for it holds the daemon for seconds."""
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "\\": "\\", '"': '"'}
_ESCAPED_IN_PROMQL: Final = {**_ESCAPED, "'": "'"}
_SPECIAL: Final = {"nan": math.nan, "+inf": math.inf, "inf": math.inf, "-inf": -math.inf}


class LabelMatcher(Struct, frozen=True, kw_only=True):
    """One condition on a label. ``pattern`` for ``=~`` and ``!~``, which must match the whole value."""

    label: str
    operator: str
    value: str
    pattern: re.Pattern[str] | None = None

    def fits(self, labels: Mapping[str, str]) -> bool:
        """As in PromQL a label that is not there is an empty one."""
        text = labels.get(self.label, "")
        if self.pattern is None:
            same = text == self.value
        else:
            same = len(text) <= LONGEST_MATCHED and self.pattern.fullmatch(text) is not None
        return same is (self.operator in {"=", "=~"})


class SeriesSelector(Struct, frozen=True, kw_only=True):
    name: str
    matchers: tuple[LabelMatcher, ...] = ()

    def fits(self, labels: Mapping[str, str]) -> bool:
        return all(matcher.fits(labels) for matcher in self.matchers)


class MetricSeries(NamedTuple):
    """``key``: by which a reader knows it again where not all labels are kept."""

    name: str
    labels: Mapping[str, str]
    value: float
    key: int = 0


def parse_selector(text: str) -> SeriesSelector:
    """Read ``name{label="value",other=~"a|b"}``. Errors: `ValueError`."""
    match = _SELECTOR.fullmatch(text)
    if match is None:
        raise ValueError(f'select: expected a metric such as name{{label="value"}}; got {shown(text)}')
    matchers: list[LabelMatcher] = []
    rest = (match[2] or "").strip()
    at = 0
    while at < len(rest):
        item = _MATCHER.match(rest, at)
        if item is None:
            raise ValueError(
                f'select: expected label="value", or !=, =~ or !~, at {shown(rest[at:])}; got {shown(text)}'
            )
        at = item.end()
        value = _unescaped(item[3] if item[3] is not None else item[4], _ESCAPED_IN_PROMQL)
        pattern = None
        if item[2] in {"=~", "!~"}:
            try:
                pattern = re.compile(value, re.DOTALL)
                # Python's patterns try all ways where none fits; Prometheus' own always take linear time. The half
                # allows for branches of fewer than 16 choices in all, the square root of `LONGEST_MATCHED`.
                bounded = _ways(_parser.parse(value, re.DOTALL)) < _MOST_REPEATS + 0.5
            except (re.error, RecursionError, OverflowError) as exc:
                raise ValueError(f"select: {shown(value)} is not a regular expression: {exc}") from exc
            if not bounded:
                raise ValueError(
                    f"select: {shown(value)} may match very slowly: expected at most "
                    f"{_MOST_REPEATS} repeats such as .*, and none within another"
                )
        matchers.append(LabelMatcher(label=item[1], operator=item[2], value=value, pattern=pattern))
    return SeriesSelector(name=match[1], matchers=tuple(matchers))


def _ways(parts: Iterable[tuple[Any, Any]]) -> float:
    """In how many ways a parsed pattern can share a label's value out, as a power of its greatest length."""
    total = 0.0
    for kind, value in parts:
        if kind in {_sre.MAX_REPEAT, _sre.MIN_REPEAT, _sre.POSSESSIVE_REPEAT}:
            least, most, inner = value
            least, most = min(least, LONGEST_MATCHED), min(most, LONGEST_MATCHED)
            total += _power(most - least + 1) + most * _ways(inner)
        elif kind is _sre.BRANCH:
            total += _power(len(value[1])) + max((_ways(branch) for branch in value[1]), default=0.0)
        elif kind in {_sre.GROUPREF, _sre.GROUPREF_EXISTS, _sre.ASSERT, _sre.ASSERT_NOT}:
            # RE2, which Prometheus uses, has none of these.
            return math.inf
        else:
            total += sum(_ways(inner) for inner in _inner(value))
    return total


def _power(choices: int) -> float:
    return math.log(max(1, choices), LONGEST_MATCHED)


def _inner(value: Any) -> Iterator[Any]:  # the parser's own shapes
    if isinstance(value, _parser.SubPattern):
        yield value
    elif isinstance(value, tuple):
        for entry in value:
            yield from _inner(entry)


def _unescaped(text: str, escaped: Mapping[str, str] = _ESCAPED) -> str:
    return _ESCAPE.sub(lambda match: escaped.get(match[1], match[0]), text) if "\\" in text else text


@final
class SeriesReader:
    """Takes the wanted series out of a text that arrives in parts; the rest is not kept.

    ``names``: of the metrics, as in the text. ``keep``: what is kept of a series; None: nothing. ``found``: so far.
    """

    def __init__(
        self, names: Iterable[str], keep: Callable[[MetricSeries], MetricSeries | None] = lambda series: series
    ) -> None:
        self.found: list[MetricSeries] = []
        self._keep = keep
        either = b"|".join(re.escape(name.encode()) for name in names)
        # Lines of other metrics are skipped unread: 10 MB with one wanted metric take 50 ms.
        self._line = re.compile(rb"^[ \t]{0,16}(?:" + either + rb")(?=[{ \t])[^\n]*", re.MULTILINE)
        self._rest = bytearray()
        self._skipped = False

    def feed(self, data: bytes) -> None:
        """Take the next part. Errors: `ValueError` for a wanted line that is broken or too long, or too many."""
        cut = data.rfind(b"\n") + 1
        if not cut:
            self._hold(data)
            return
        if self._skipped:
            self._lines(data[data.index(b"\n") + 1 : cut])
        else:
            self._lines(bytes(self._rest) + data[:cut])
        self._rest.clear()
        self._skipped = False
        self._hold(data[cut:])

    def end(self) -> None:
        self.feed(b"\n")

    def _hold(self, part: bytes) -> None:
        """Keep the beginning of a line whose end has not arrived yet."""
        if self._skipped:
            return
        self._rest += part
        if len(self._rest) > LONGEST_LINE:
            if self._line.match(self._rest) is not None:
                raise ValueError(f"a line is longer than {size(LONGEST_LINE)}: {_shown(bytes(self._rest[:120]))}")
            self._rest.clear()
            self._skipped = True

    def _lines(self, text: bytes) -> None:
        for line in self._line.finditer(text):
            if len(line[0]) > LONGEST_LINE:
                raise ValueError(f"a line is longer than {size(LONGEST_LINE)}: {_shown(line[0][:120])}")
            if (series := self._keep(_series(line[0]))) is not None:
                if len(self.found) >= MOST_SERIES:
                    raise ValueError(f"it has more than {MOST_SERIES} series of {_shown(series.name.encode())}")
                self.found.append(series)


def _series(line: bytes) -> MetricSeries:
    match = _SAMPLE.match(line)
    if match is None:
        raise ValueError(f"not a sample: {_shown(line)}")
    try:
        labels = _labels(match[2].decode()) if match[2] is not None else {}
        return MetricSeries(match[1].decode(), labels, number(match[3].decode()))
    except ValueError as exc:
        raise ValueError(f"not a sample: {_shown(line)}") from exc


def _labels(text: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    at, text = 0, text.strip()
    while at < len(text):
        match = _LABEL.match(text, at)
        if match is None:
            raise ValueError("not a label")
        labels[match[1]] = _unescaped(match[2])
        at = match.end()
    return labels


def number(text: str) -> float:
    """A sample's value. Errors: `ValueError`, also for what Python takes and Prometheus does not (``1_000``)."""
    special = _SPECIAL.get(text.lower())
    if special is not None:
        return special
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return float(text)


def _shown(line: bytes) -> str:
    text = line.decode(errors="replace")
    return repr(text if len(text) <= 120 else f"{text[:117]}...")


class BucketHistogram(Struct, frozen=True, kw_only=True):
    """Cumulative counts by upper bound, in ascending order; the last bound is infinite."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]

    @property
    def total(self) -> float:
        return self.counts[-1]


def histogram(buckets: Mapping[float, float]) -> BucketHistogram | None:
    """A histogram from its buckets; None for less than two, or without an infinite one: it has no quantile then."""
    bounds = sorted(bound for bound in buckets if not math.isnan(bound))
    if len(bounds) < 2 or not math.isinf(bounds[-1]) or bounds[-1] < 0:
        return None
    counts: list[float] = []
    for bound in bounds:
        # A count may be below that of the bucket before: scraped while it was written.
        counts.append(max(buckets[bound], counts[-1] if counts else 0.0))
    return BucketHistogram(bounds=tuple(bounds), counts=tuple(counts))


def quantile(hist: BucketHistogram, q: float) -> float | None:
    """``histogram_quantile``: linear within the bucket, which begins at 0 where it is the first and has a bound above.

    In the last bucket it is that bucket's lower bound. None: nothing was observed.
    """
    if hist.total <= 0 or not math.isfinite(hist.total):
        return None
    rank = q * hist.total
    index = next(at for at, count in enumerate(hist.counts) if count >= rank)
    if index == len(hist.bounds) - 1:
        return hist.bounds[-2]
    upper = hist.bounds[index]
    if index == 0:
        if upper <= 0:
            return upper
        lower, before = 0.0, 0.0
    else:
        lower, before = hist.bounds[index - 1], hist.counts[index - 1]
    inside = hist.counts[index] - before
    return upper if inside <= 0 else lower + (upper - lower) * (rank - before) / inside


def grown(before: Mapping[float, float] | None, after: Mapping[float, float]) -> dict[float, float]:
    """How much the counters of one series grew. ``before`` None: it is new, and began at 0."""
    # One counter that fell means that all were restarted: what they are now has come since.
    if before is None or any(after.get(key, 0.0) < count for key, count in before.items()):
        return dict(after)
    return {key: count - before.get(key, 0.0) for key, count in after.items()}
