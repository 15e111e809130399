"""A probe that is a GET request: the time until the response, or the number in it."""

from collections.abc import Mapping
from typing import Final, final

import trio

from cgroupfs.errors import SourceError
from reconciler.clients.endpoint import MASK, split_url
from reconciler.clients.http import HttpResponse, HttpSession, Take
from reconciler.clients.http_config import read_line
from reconciler.runtime.format import size
from reconciler.signals.probe_config import HttpProbe, PrometheusProbe
from reconciler.signals.probe_source import ProbeResult, number_in
from reconciler.signals.probe_targets import ProbeTarget

_MOST_VALUE: Final = 64 * 1024
_LATE: Final = 0.5
"""Confidence of a time that is only known to be at least this."""


@final
class HttpProbeClient:
    """One URL with its credentials. The kept connection leaves the time of connecting out of the measurement."""

    def __init__(self, target: ProbeTarget, config: HttpProbe | PrometheusProbe) -> None:
        base, self._path, _ = split_url(target.url)
        self._config = config
        self._title = target.title
        self._shown = self._path.partition("?")[0] + (f"?{MASK}" if "?" in self._path else "")
        self.url = f"{base}{self._shown}"
        self._session = HttpSession(config.peer(target.title, base, target.probe.timeout_s))

    async def get(self, headers: Mapping[str, str], most: int) -> HttpResponse:
        return await self._session.exchange(
            "GET", self._path, None, self._headers(headers), most=most, shown=self._shown
        )

    async def read(self, headers: Mapping[str, str], take: Take) -> None:
        """One request; ``take`` gets the answer's body as it arrives. Errors: `SourceError`, and those of ``take``."""
        response = await self._session.stream("GET", self._path, take, self._headers(headers), shown=self._shown)
        if not response.ok:
            raise self.refused(response)

    def _headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        try:
            secret = {name: read_line(path) for name, path in self._config.header_files.items()}
        except ValueError as exc:
            raise SourceError(self._title, str(exc)) from exc
        return {"Accept": "*/*", **headers, **self._config.headers, **secret}

    def refused(self, response: HttpResponse) -> SourceError:
        message = f" {response.excerpt}" if response.excerpt else ""
        return SourceError(self._title, f"{self.url}: HTTP {response.status}{message}")

    def wrong(self, exc: ValueError) -> SourceError:
        return SourceError(self._title, f"{self.url}: {exc}")

    async def aclose(self) -> None:
        await self._session.aclose()


@final
class HttpSource:
    """`ProbeSource`."""

    def __init__(self, target: ProbeTarget) -> None:
        config = target.probe.http
        assert config is not None
        self._config = config
        self._probe = target.probe
        self._client = HttpProbeClient(target, config)

    async def measure(self) -> ProbeResult:
        if self._config.measure == "value":
            return await self._value()
        try:
            # The body is read to its end, which counts; its first bytes are for an error's text.
            response = await self._client.get({"Connection": "close"} if self._config.connect else {}, most=200)
        except SourceError as exc:
            if self._config.count_late and isinstance(exc.__cause__, trio.TooSlowError):
                return ProbeResult(self._probe.timeout_s * 1e3, _LATE)
            raise
        if not self._config.counts(response.status):
            raise self._client.refused(response)
        seconds = response.seconds + (response.connect_s if self._config.connect else 0.0)
        return ProbeResult(seconds * 1e3)

    async def _value(self) -> ProbeResult:
        accept = "application/json" if self._config.field is not None else "text/plain, */*"
        response = await self._client.get({"Accept": accept}, most=_MOST_VALUE)
        if not self._config.counts(response.status):
            raise self._client.refused(response)
        try:
            if len(response.body) >= _MOST_VALUE:
                raise ValueError(f"the answer is larger than {size(_MOST_VALUE)}")  # noqa: TRY301
            return ProbeResult(number_in(response.body, self._config.field) * self._probe.factor)
        except ValueError as exc:
            raise self._client.wrong(exc) from exc

    async def aclose(self) -> None:
        await self._client.aclose()
