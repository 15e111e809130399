"""``bypassctl alerts``: how the sinks are, what has yet to be told, and what was told lately."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Final

from reconciler.cli.blocks import Block, Cell, StyledText, Table
from reconciler.cli.document import Row, fetch
from reconciler.cli.exits import Exit
from reconciler.cli.output import emit
from reconciler.cli.screen import blank, line, show
from reconciler.runtime import format as fmt

_STYLES: Final = {"critical": "bad", "warning": "warn", "info": "dim"}


def run(options: Namespace) -> int:
    """Show them, from the daemon, else what the store has kept."""
    found = fetch(options, ("alerts",))
    alerts: Row = found.body.get("alerts") or {"sinks": [], "stored": [], "recent": []}
    if options.output != "table":
        emit({"alerts": alerts}, options.output)
        return Exit.OK
    show(_blocks(alerts, live=found.live))
    return Exit.OK


def _blocks(alerts: Row, *, live: bool) -> Iterator[Block]:
    if live and not alerts["sinks"]:
        yield line("no sinks configured (alerts.sinks); alerts are written to the daemon's log only")
    if alerts["sinks"]:
        yield Table(
            ("SINK", "KIND", "", "SENT", "PENDING", "LOST", "PROBLEM"),
            [_sink(one) for one in alerts["sinks"]],
            right=frozenset({3, 4, 5}),
        )
    seen = {one["id"] for one in alerts["stored"]}
    rows = [*alerts["stored"], *(one for one in alerts["recent"] if one["id"] not in seen)]
    rows.sort(key=lambda one: -float(one["last_s"]))
    if rows:
        if alerts["sinks"]:
            yield blank()
        yield Table(("LAST", "SEVERITY", "KIND", "COUNT", "PENDING FOR", "SUMMARY"), [_row(one) for one in rows])
    elif not live:
        yield line("no pending alerts")


def _sink(one: Row) -> tuple[Cell, ...]:
    lost = one["failed"] + one["dropped"]
    return (
        one["sink"],
        one["kind"],
        StyledText("bad", "bad") if one["problem"] else StyledText("ok", "ok"),
        str(one["told"]),
        str(one["waiting"]),
        StyledText(str(lost), "warn") if lost else "0",
        one["problem"] or "-",
    )


def _row(one: Row) -> tuple[Cell, ...]:
    over = "ended: " if one["status"] == "resolved" else ""
    return (
        fmt.clock(one["last_s"]),
        StyledText(one["severity"], _STYLES.get(one["severity"], "")),
        one["kind"],
        str(one["count"]),
        ", ".join(one["to"]) or "-",
        f"{over}{' '.join(one['summary'].split())}",
    )
