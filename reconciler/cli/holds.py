"""``bypassctl holds``: the holds, until when and why."""

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
    document = fetch(options, ("holds", "podlist"))
    holds = document.body["holds"]
    if options.output != "table":
        emit({"holds": holds}, options.output)
        return Exit.OK
    now = time.time()
    # Only the daemon has the pods' names.
    pods = document.body.get("podlist", ())
    titles = {pod["uid"]: f"{pod['namespace']}/{pod['name']}" for pod in pods if pod["name"]}
    rows = [
        (
            hold["target"],
            titles.get(hold["target"].partition(":")[2], "-"),
            "until release"
            if hold["until"] is None
            else StyledText("expired", "dim")
            if hold["until"] <= now
            else f"{fmt.duration(hold['until'] - now)} left",
            hold["by"],
            hold["reason"],
        )
        for hold in holds
    ]
    show([Table(("TARGET", "POD", "LASTS", "BY", "REASON"), rows)] if rows else [line("no holds")])
    return Exit.OK
