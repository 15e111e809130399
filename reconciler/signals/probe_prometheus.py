"""A probe that is a metric: the service's own histogram, summary or gauge, scraped where the pod exports it.

A histogram's counters only grow, so a quantile is of the requests between two scrapes.
"""

import math
from sys import intern
from typing import Final, final

from reconciler.runtime.cooperative import TimeSlice
from reconciler.runtime.format import size
from reconciler.signals.probe_http import HttpProbeClient
from reconciler.signals.probe_source import ProbeResult
from reconciler.signals.probe_targets import ProbeTarget
from reconciler.signals.promtext import (
    BucketHistogram,
    MetricSeries,
    SeriesReader,
    grown,
    histogram,
    parse_selector,
    quantile,
)

_MOST: Final = 16 << 20
"""Bytes of one scrape."""
_ACCEPT: Final = "text/plain;version=0.0.4;q=1,*/*;q=0.1"
_STEP: Final = 4 * 1024
"""Bytes of a text between two reads of the clock."""
_NEEDED: Final = ("le", "quantile")
_LEAST_CONFIDENCE: Final = 0.1
_BEYOND: Final = 0.5
"""Confidence of a quantile beyond the last finite bucket: it is at least that bound."""


@final
class PrometheusSource:
    """`ProbeSource`. Keeps the counters of the last scrape."""

    def __init__(self, target: ProbeTarget) -> None:
        config = target.probe.prometheus
        assert config is not None
        self._config = config
        self._factor = target.probe.factor
        self._client = HttpProbeClient(target, config)
        self._selector = parse_selector(config.select)
        self._before: dict[int, dict[float, float]] | None = None

    async def measure(self) -> ProbeResult:
        reader, slices = SeriesReader(self._names(), self._kept), TimeSlice()
        length = 0

        async def take(chunk: bytes) -> None:
            nonlocal length
            length += len(chunk)
            if length >= _MOST:
                raise ValueError(f"the answer is larger than {size(_MOST)}")
            for at in range(0, len(chunk), _STEP):
                reader.feed(chunk[at : at + _STEP])
                await slices.checkpoint()

        try:
            await self._client.read({"Accept": _ACCEPT}, take)
            reader.end()
            return self._result(reader.found)
        except ValueError as exc:
            raise self._client.wrong(exc) from exc

    async def aclose(self) -> None:
        await self._client.aclose()

    def _names(self) -> tuple[str, ...]:
        name = self._selector.name
        # A quantile is a histogram's, computed from its buckets, or a summary's own series.
        return {
            "gauge": (name,),
            "mean": (f"{name}_sum", f"{name}_count"),
            "quantile": (f"{name}_bucket", name),
        }[self._config.read]

    def _kept(self, series: MetricSeries) -> MetricSeries | None:
        """Of its labels only those that a result needs: a pod's scrape may have `_MOST` of them, ten times as objects.

        The others are a hash, which is equal from scrape to scrape in one run of the daemon.
        """
        if not self._selector.fits(series.labels):
            return None
        key = hash(frozenset((name, value) for name, value in series.labels.items() if name != "le"))
        few = {name: series.labels[name] for name in _NEEDED if name in series.labels}
        return MetricSeries(intern(series.name), few, series.value, key)

    def _result(self, serieses: list[MetricSeries]) -> ProbeResult:
        if not serieses:
            raise ValueError(f"no series {self._config.select} for {self._config.read}")
        match self._config.read:
            case "gauge":
                return self._highest([series.value for series in serieses])
            case "mean":
                return self._mean(serieses)
        buckets = [series for series in serieses if series.name.endswith("_bucket") and "le" in series.labels]
        if buckets:
            return self._quantile(buckets)
        wanted = self._config.quantile
        ready = [series.value for series in serieses if _number(series.labels.get("quantile", "")) == wanted]
        if not ready:
            raise ValueError(f"{self._config.select} is neither a histogram nor a summary with the quantile {wanted:g}")
        return self._highest(ready)

    def _highest(self, values: list[float]) -> ProbeResult:
        # A summary without an observation in its window is NaN.
        known = [value for value in values if not math.isnan(value)]
        if not known:
            return ProbeResult(None)
        value = max(known)
        if value < 0 or math.isinf(value):
            raise ValueError(f"{self._config.select} is {value:g}, not a time")
        return ProbeResult(value * self._factor)

    def _mean(self, serieses: list[MetricSeries]) -> ProbeResult:
        # By series, as `grown` takes it: the count at 0.0, the sum at 1.0.
        now: dict[int, dict[float, float]] = {}
        for series in serieses:
            now.setdefault(series.key, {})[float(series.name.endswith("_sum"))] = series.value
        more = self._since(now)
        if more is None:
            return ProbeResult(None)
        count, total = more.get(0.0, 0.0), more.get(1.0, 0.0)
        return ProbeResult(total / count * self._factor) if count > 0 and total >= 0 else ProbeResult(None)

    def _quantile(self, serieses: list[MetricSeries]) -> ProbeResult:
        now: dict[int, dict[float, float]] = {}
        for series in serieses:
            bound = _number(series.labels["le"])
            if not math.isnan(bound):
                now.setdefault(series.key, {})[bound] = series.value
        more = self._since(now)
        if more is None:
            return ProbeResult(None)
        hist = histogram(more)
        if hist is None:
            raise ValueError(f'{self._config.select} has no bucket le="+Inf", or no other')
        value = quantile(hist, self._config.quantile)
        # None without a request since the last scrape: the last sample ages.
        return ProbeResult(None) if value is None else ProbeResult(value * self._factor, self._confidence(hist))

    def _since(self, now: dict[int, dict[float, float]]) -> dict[float, float] | None:
        """What the counters of all series grew by since the last scrape; None at the first."""
        before, self._before = self._before, now
        if before is None:
            return None
        total: dict[float, float] = {}
        for key, counts in now.items():
            # Each series for itself: a restart of one does not restart the others.
            for bound, count in grown(before.get(key), counts).items():
                total[bound] = total.get(bound, 0.0) + count
        return total

    def _confidence(self, hist: BucketHistogram) -> float:
        """Confidence: a high quantile of few requests is the slowest of them, and predicts little."""
        q = self._config.quantile
        slower = hist.total * (1.0 - q) if q < 1 else hist.total
        confidence = max(_LEAST_CONFIDENCE, min(1.0, slower))
        return confidence * _BEYOND if q * hist.total > hist.counts[-2] else confidence


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
