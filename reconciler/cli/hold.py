"""``bypassctl hold``: suspend management of a pod, a knob, a group or the node."""

import shlex
from argparse import Namespace

from reconciler.cli.control import order, pod_target, release_command, who
from reconciler.cli.exits import Exit
from reconciler.cli.output import emit
from reconciler.cli.screen import line, show
from reconciler.runtime import format as fmt


def run(options: Namespace) -> int:
    """Make the hold; it is durable when this returns."""
    named = pod_target(options, options.target)
    body = {
        "target": named.target,
        "reason": options.reason,
        "by": options.by or who(),
        **({"until_released": True} if options.until_released else {"seconds": options.seconds}),
    }
    hold = order(options, "POST", "/holds", body)
    if options.output not in {"table", "wide"}:
        emit(hold, options.output)
        return Exit.OK
    target = named.title if options.output == "table" else hold["target"]
    show(
        [
            line(f"{target} is on hold until {fmt.until(hold['until'])} (current values stay{_undo(target)})"),
            line(f"end the hold: {release_command(target)}"),
        ]
    )
    return Exit.OK


def _undo(target: str) -> str:
    """How to undo the values on hold; empty for a knob or a file, of which no single restore exists."""
    kind, _, name = target.partition(":")
    if kind == "pod":
        return f"; undo them: bypassctl restore --pod {shlex.quote(name)}"
    return "; undo them: bypassctl restore" if kind == "node" else ""
