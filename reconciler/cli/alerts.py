"""``bypassctl alerts``: sinks and their alerts; ``alert test``: a test of every sink, also without the daemon."""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from reconciler.cli import places
from reconciler.cli.control import who
from reconciler.cli.document import Row, Unreachable, fetch, send
from reconciler.cli.exits import Exit
from reconciler.cli.screen import Block, Cell, StyledText, Table, blank, line, mark, present
from reconciler.runtime import format as fmt
from reconciler.runtime.streams import complain

_STYLES: Final = {"critical": "bad", "warning": "warn", "info": "dim"}


def run_alerts(options: Namespace) -> int:
    """Show them, from the daemon, else what the store has kept."""
    document = fetch(options, ("alerts",))
    alerts: Row = document.body.get("alerts") or {"sinks": [], "stored": [], "recent": []}
    present(options.output, {"alerts": alerts}, _blocks(alerts, live=document.live))
    return Exit.OK


def _blocks(alerts: Row, *, live: bool) -> Iterator[Block]:
    if live and not alerts["sinks"]:
        yield line("no sinks configured (alerts.sinks); alerts are written to the daemon's log only")
    if alerts["sinks"]:
        yield Table(
            ("SINK", "KIND", "", "SENT", "PENDING", "LOST", "PROBLEM"),
            [_sink(sink) for sink in alerts["sinks"]],
            right=frozenset({3, 4, 5}),
        )
    seen = {entry["id"] for entry in alerts["stored"]}
    rows = [*alerts["stored"], *(entry for entry in alerts["recent"] if entry["id"] not in seen)]
    rows.sort(key=lambda item: -float(item["last_s"]))
    if rows:
        if alerts["sinks"]:
            yield blank()
        yield Table(("LAST", "SEVERITY", "KIND", "COUNT", "PENDING FOR", "SUMMARY"), [_row(row) for row in rows])
    elif not live:
        yield line("no pending alerts")


def _sink(fields: Row) -> tuple[Cell, ...]:
    lost = fields["failed"] + fields["dropped"]
    return (
        fields["sink"],
        fields["kind"],
        mark(ok=not fields["problem"]),
        str(fields["told"]),
        str(fields["waiting"]),
        StyledText(str(lost), "warn") if lost else "0",
        fields["problem"] or "-",
    )


def _row(fields: Row) -> tuple[Cell, ...]:
    over = "ended: " if fields["status"] == "resolved" else ""
    return (
        fmt.clock(fields["last_s"]),
        StyledText(fields["severity"], _STYLES.get(fields["severity"], "")),
        fields["kind"],
        str(fields["count"]),
        ", ".join(fields["to"]) or "-",
        f"{over}{' '.join(fields['summary'].split())}",
    )


_PATIENCE_S = 620.0
"""One try of the slowest sink that can be configured."""


def run_test(options: Namespace) -> int:
    """Test. `Exit.NOT_OK` when a sink did not take it."""
    results = _through(options)
    rows = [
        (
            result["sink"],
            result["kind"],
            mark(ok=result["ok"]),
            fmt.duration(result["seconds"]),
            result["detail"],
        )
        for result in results
    ]
    table = Table(("SINK", "KIND", "", "TIME", "DETAIL"), rows, right=frozenset({3}))
    present(options.output, {"sinks": results}, [table])
    return Exit.OK if all(result["ok"] for result in results) else Exit.NOT_OK


def _through(options: Namespace) -> list[dict[str, Any]]:  # the shape of a JSON answer
    body = {"sink": options.sink, "by": who()}
    try:
        return list(send(places.find(options), "POST", "/alerts/test", body, timeout_s=_PATIENCE_S)["sinks"])
    except Unreachable as exc:
        complain(f"{exc}; testing the configured sinks without the daemon")
    return [dict(fields) for fields in _directly(options)]


def _directly(options: Namespace) -> Sequence[Mapping[str, object]]:
    """Build the sinks here. Errors: `ConfigError`; `InputError` for no such sink."""
    # Only here: the daemon mostly answers, and all this takes a while to load.
    import os

    import trio

    from reconciler.alerts.sample_alert import try_all
    from reconciler.alerts.sinks.base import SinkContext
    from reconciler.config import load
    from reconciler.config.environment import read_kubelet

    config = load.load(places.config_path(options), required=options.config is not None).config
    kubelet = read_kubelet(config)
    ground = SinkContext(
        node=kubelet.node_name or os.uname().nodename, root=config.node.root, kubelets=kubelet.kubeconfig
    )
    return trio.run(try_all, config.alerts, config.apiserver, ground, options.sink, who())
