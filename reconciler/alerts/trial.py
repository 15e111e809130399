"""Trying sinks: through their couriers in the daemon, or built here from the configuration when none runs."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import trio

from reconciler.alerts.config import AlertsConfig
from reconciler.alerts.courier import MARGIN_S
from reconciler.alerts.notice import Incidents
from reconciler.alerts.sinks import build
from reconciler.alerts.sinks.base import Setup, SinkError
from reconciler.alerts.telling import Ground, check_sink, setup_of, test_alert
from reconciler.apiserver import ApiServer


async def try_sink(setup: Setup, send: Callable[[], Awaitable[None]]) -> Mapping[str, object]:
    """Tell once; what came of it, with the seconds that it took."""
    began = trio.current_time()
    ok, detail = True, "taken"
    try:
        with trio.fail_after(setup.config.timeout_s + MARGIN_S):
            await send()
    except SinkError as exc:
        ok, detail = False, str(exc)
    except trio.TooSlowError:
        ok, detail = False, "no end within the deadline"
    seconds = round(trio.current_time() - began, 3)
    return {"sink": setup.name, "kind": setup.config.how, "ok": ok, "detail": detail, "seconds": seconds}


async def try_all(
    config: AlertsConfig, apiserver: ApiServer, ground: Ground, only: str | None, by: str
) -> Sequence[Mapping[str, object]]:
    """Build the configured sinks (or one), and tell each of a test. Errors: `InputError` when there is no such sink."""
    check_sink(config, only)
    notice = Incidents(1.0).take(test_alert(by, time.time()))
    names = [name for name in config.sinks if only is None or name == only]
    results: dict[str, Mapping[str, object]] = {}

    async def one(name: str) -> None:
        setup = setup_of(name, config.sinks[name], ground, apiserver)
        sink = build(setup)
        try:
            results[name] = await try_sink(setup, lambda: sink.send((notice,)))
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
                await sink.aclose()

    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(one, name)
    return [results[name] for name in names]
