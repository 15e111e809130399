"""``bypassctl holds``: what is left alone, until when and why."""

import time
from argparse import Namespace

from reconciler.cli.blocks import StyledText, Table
from reconciler.cli.document import fetch
from reconciler.cli.exits import Exit
from reconciler.cli.output import emit
from reconciler.cli.screen import line, show
from reconciler.runtime import format as fmt


def run(options: Namespace) -> int:
    """List them, those that have run out too."""
    found = fetch(options, ("holds",))
    holds = found.body["holds"]
    if options.output != "table":
        emit({"holds": holds}, options.output)
        return Exit.OK
    now = time.time()
    rows = [
        (
            one["target"],
            "until release"
            if one["until"] is None
            else StyledText("expired", "dim")
            if one["until"] <= now
            else f"{fmt.duration(one['until'] - now)} left",
            one["by"],
            one["reason"],
        )
        for one in holds
    ]
    show([Table(("TARGET", "LASTS", "BY", "REASON"), rows)] if rows else [line("no holds")])
    return Exit.OK
