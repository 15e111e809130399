"""``bypassctl alert test``: send a test to every sink, through the daemon, or without one from the configuration."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from reconciler.cli import places
from reconciler.cli.blocks import StyledText, Table
from reconciler.cli.client import Unreachable, ask
from reconciler.cli.control import who
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.output import emit
from reconciler.cli.screen import show
from reconciler.runtime import format as fmt
from reconciler.runtime.streams import complain

_PATIENCE_S = 620.0
"""One try of the slowest sink that can be configured."""


def run(options: Namespace) -> int:
    """Test. `Exit.NOT_OK` when a sink did not take it."""
    results = _through(options)
    if options.output != "table":
        emit({"sinks": results}, options.output)
    else:
        rows = [
            (
                result["sink"],
                result["kind"],
                StyledText("ok", "ok") if result["ok"] else StyledText("bad", "bad"),
                fmt.duration(result["seconds"]),
                result["detail"],
            )
            for result in results
        ]
        show([Table(("SINK", "KIND", "", "TIME", "DETAIL"), rows, right=frozenset({3}))])
    return Exit.OK if all(result["ok"] for result in results) else Exit.NOT_OK


def _through(options: Namespace) -> list[dict[str, Any]]:  # the shape of a JSON answer
    socket = places.find(options).socket
    why = "no socket configured"
    if socket is not None:
        try:
            body = {"sink": options.sink, "by": who()}
            answer = ask(socket, "POST", "/alerts/test", body, timeout_s=_PATIENCE_S)
            return list(answer["sinks"])
        except Unreachable as exc:
            why = str(exc)
    complain(f"{why}; testing the configured sinks without the daemon")
    return [dict(fields) for fields in _directly(options)]


def _directly(options: Namespace) -> Sequence[Mapping[str, object]]:
    """Build the sinks here. Errors: `CliError` for a wrong configuration; `InputError` for no such sink."""
    # Only here: the daemon mostly answers, and all this takes a while to load.
    import os

    import trio

    from reconciler.alerts.sample_alert import try_all
    from reconciler.alerts.sinks.base import SinkContext
    from reconciler.config import load
    from reconciler.config.environment import read_kubelet
    from reconciler.settings.binder import ConfigError

    try:
        config = load.load(places.config_path(options), required=options.config is not None).config
    except ConfigError as exc:
        raise CliError(str(exc), Exit.USAGE, lines=exc.problems) from exc
    kubelet = read_kubelet(config)
    ground = SinkContext(
        node=kubelet.node_name or os.uname().nodename, root=config.node.root, kubelets=kubelet.kubeconfig
    )
    return trio.run(try_all, config.alerts, config.apiserver, ground, options.sink, who())
