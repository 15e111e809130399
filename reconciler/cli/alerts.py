"""``bypassctl alerts``: state of the sinks, pending alerts, and recent alerts."""

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
    document = fetch(options, ("alerts",))
    alerts: Row = document.body.get("alerts") or {"sinks": [], "stored": [], "recent": []}
    if options.output != "table":
        emit({"alerts": alerts}, options.output)
        return Exit.OK
    show(_blocks(alerts, live=document.live))
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
        StyledText("bad", "bad") if fields["problem"] else StyledText("ok", "ok"),
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
