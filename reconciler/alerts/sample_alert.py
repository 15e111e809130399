"""Trying sinks: through their couriers in the daemon, or built here from the configuration when none runs."""

import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import trio

from reconciler.alerts.alert import Alert, AlertKind, Severity
from reconciler.alerts.config import AlertsConfig, check_sink
from reconciler.alerts.incident import Incident, Incidents, sanitize
from reconciler.alerts.sink_worker import MARGIN_S
from reconciler.alerts.sinks.base import SinkContext, SinkError, SinkSetup, setup_of
from reconciler.alerts.sinks.table import build
from reconciler.clients.kube_config import ApiServer


def test_notice(config: AlertsConfig, by: str, at_s: float) -> Incident:
    """The test alert. It has the configured labels and takes the same path as every other alert."""
    alert = Alert(
        kind=AlertKind.TEST,
        key=f"test:{at_s:.3f}",
        summary=f"TEST alert from bypassd ({by + '@' if by else ''}{os.uname().nodename})",
        severity=Severity.INFO,
        at_s=at_s,
        labels=config.labels,
        details={"by": by} if by else {},
    )
    return Incidents(1.0).take(sanitize(alert))


async def try_sinks(tries: Sequence[tuple[SinkSetup, Callable[[], Awaitable[None]]]]) -> Sequence[Mapping[str, object]]:
    """Send to each once, all at the same time; returns the results, with the seconds that each took."""
    results: dict[str, Mapping[str, object]] = {}

    async def one(setup: SinkSetup, send: Callable[[], Awaitable[None]]) -> None:
        began = trio.current_time()
        ok, detail = True, "taken"
        try:
            with trio.fail_after(setup.config.timeout_s + MARGIN_S):
                await send()
        except SinkError as exc:
            ok, detail = False, str(exc)
        except trio.TooSlowError:
            ok, detail = False, "no success before the deadline"
        seconds = round(trio.current_time() - began, 3)
        fields = {"sink": setup.name, "kind": setup.config.how, "ok": ok, "detail": detail, "seconds": seconds}
        results[setup.name] = fields

    async with trio.open_nursery() as nursery:
        for setup, send in tries:
            nursery.start_soon(one, setup, send)
    return [results[setup.name] for setup, _ in tries]


async def try_all(
    config: AlertsConfig, apiserver: ApiServer, ground: SinkContext, only: str | None, by: str
) -> Sequence[Mapping[str, object]]:
    """Build the configured sinks (or one), and send each a test. Errors: `InputError` when no such sink exists."""
    check_sink(config, only)
    notice = test_notice(config, by, time.time())
    setups = [
        setup_of(name, sink_config, ground, apiserver)
        for name, sink_config in config.sinks.items()
        if only in {None, name}
    ]
    made = [(setup, build(setup)) for setup in setups]
    try:
        return await try_sinks([(setup, partial(sink.send, (notice,))) for setup, sink in made])
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
            for _, sink in made:
                await sink.aclose()
