"""Prometheus' text format, as far as one metric of it is wanted, and what PromQL makes of it. Pure.

Lines of other metrics are passed over unread: 10 MB with one wanted metric take 50 ms. OpenMetrics'
text is the same for what is read here (its exemplars and timestamps are left out).

Source: Prometheus documentation, instrumenting/exposition_formats, querying/basics (selectors) and querying/functions
(``histogram_quantile``); OpenMetrics 1.0.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from msgspec import Struct

from cgroupfs.bounded import shown

_NAME: Final = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_SELECTOR: Final = re.compile(rf"\s*({_NAME})\s*(?:\{{(.*)\}})?\s*", re.DOTALL)
_MATCHER: Final = re.compile(
    r"\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*(?:\"((?:\\.|[^\"\\])*)\"|'((?:\\.|[^'\\])*)')\s*(?:,|$)", re.DOTALL
)
_SAMPLE: Final = re.compile(
    rb"[ \t]*([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]*(?:\{((?:[^\"{}]|\"(?:\\.|[^\"\\])*\")*)\})?[ \t]*([^ \t#]+)"
)
_LABEL: Final = re.compile(r"\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*\"((?:\\.|[^\"\\])*)\"\s*(?:,|$)", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
_MEANT: Final = {"n": "\n", "\\": "\\", '"': '"'}
_MEANT_IN_PROMQL: Final = {**_MEANT, "'": "'"}
_SPECIAL: Final = {"nan": math.nan, "+inf": math.inf, "inf": math.inf, "-inf": -math.inf}

Labels = frozenset[tuple[str, str]]


class Matcher(Struct, frozen=True, kw_only=True):
    """One condition on a label. ``pattern`` for ``=~`` and ``!~``, which must match the whole value."""

    label: str
    operator: str
    value: str
    pattern: re.Pattern[str] | None = None

    def fits(self, labels: Mapping[str, str]) -> bool:
        """As in PromQL a label that is not there is an empty one."""
        found = labels.get(self.label, "")
        same = self.pattern.fullmatch(found) is not None if self.pattern is not None else found == self.value
        return same is (self.operator in {"=", "=~"})


class Selector(Struct, frozen=True, kw_only=True):
    """Which series are meant."""

    name: str
    matchers: tuple[Matcher, ...] = ()

    def fits(self, labels: Mapping[str, str]) -> bool:
        """Whether all conditions hold."""
        return all(one.fits(labels) for one in self.matchers)


class Series(NamedTuple):
    """One line."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse_selector(text: str) -> Selector:
    """Read ``name{label="value",other=~"a|b"}``. Errors: `ValueError`."""
    found = _SELECTOR.fullmatch(text)
    if found is None:
        raise ValueError(f'select: expected a metric such as name{{label="value"}}; got {shown(text)}')
    matchers: list[Matcher] = []
    rest = (found[2] or "").strip()
    at = 0
    while at < len(rest):
        one = _MATCHER.match(rest, at)
        if one is None:
            raise ValueError(
                f'select: expected label="value", or !=, =~ or !~, at {shown(rest[at:])}; got {shown(text)}'
            )
        at = one.end()
        value = _unescaped(one[3] if one[3] is not None else one[4], _MEANT_IN_PROMQL)
        pattern = None
        if one[2] in {"=~", "!~"}:
            try:
                pattern = re.compile(value, re.DOTALL)
            except re.error as exc:
                raise ValueError(f"select: {shown(value)} is no regular expression: {exc}") from exc
        matchers.append(Matcher(label=one[1], operator=one[2], value=value, pattern=pattern))
    return Selector(name=found[1], matchers=tuple(matchers))


def _unescaped(text: str, meant: Mapping[str, str] = _MEANT) -> str:
    return _ESCAPE.sub(lambda found: meant.get(found[1], found[0]), text) if "\\" in text else text


def series_of(body: bytes, names: Iterable[str]) -> Iterator[Series]:
    """The lines of these metrics, by their names as they stand in the text.

    Errors: `ValueError` for one of their lines that is broken, with the line.
    """
    wanted = b"|".join(re.escape(name.encode()) for name in names)
    for line in re.finditer(rb"^[ \t]*(?:" + wanted + rb")(?=[{ \t])[^\n]*", body, re.MULTILINE):
        found = _SAMPLE.match(line[0])
        if found is None:
            raise ValueError(f"not a sample: {_shown(line[0])}")
        try:
            labels = _labels(found[2].decode()) if found[2] is not None else {}
            yield Series(found[1].decode(), labels, number(found[3].decode()))
        except ValueError as exc:
            raise ValueError(f"not a sample: {_shown(line[0])}") from exc


def _labels(text: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    at, text = 0, text.strip()
    while at < len(text):
        found = _LABEL.match(text, at)
        if found is None:
            raise ValueError(text[at:])
        labels[found[1]] = _unescaped(found[2])
        at = found.end()
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


class Histogram(Struct, frozen=True, kw_only=True):
    """Cumulative counts by upper bound, in ascending order; the last bound is infinite."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]

    @property
    def total(self) -> float:
        """How many were observed."""
        return self.counts[-1]


def histogram(buckets: Mapping[float, float]) -> Histogram | None:
    """One from its buckets; None for less than two, or without an infinite one: it tells no quantile then.

    Counts that fall from one bucket to the next (scraped while it was written) count as equal.
    """
    bounds = sorted(bound for bound in buckets if not math.isnan(bound))
    if len(bounds) < 2 or not math.isinf(bounds[-1]) or bounds[-1] < 0:
        return None
    counts: list[float] = []
    for bound in bounds:
        counts.append(max(buckets[bound], counts[-1] if counts else 0.0))
    return Histogram(bounds=tuple(bounds), counts=tuple(counts))


def quantile(hist: Histogram, q: float) -> float | None:
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
    """How much the counters of one series grew. ``before`` None: it is new, and began at 0.

    One counter that fell means that all were restarted: what they are now has come since.
    """
    if before is None or any(after.get(key, 0.0) < count for key, count in before.items()):
        return dict(after)
    return {key: count - before.get(key, 0.0) for key, count in after.items()}
