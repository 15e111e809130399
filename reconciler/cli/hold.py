"""``bypassctl hold``: leave a pod, a knob, a group or the node alone."""

from argparse import Namespace

from reconciler.cli import words
from reconciler.cli.control import order, pod_target, who
from reconciler.cli.exits import Exit
from reconciler.cli.output import emit
from reconciler.cli.screen import line, show


def run(options: Namespace) -> int:
    """Make the hold; it is durable when this returns."""
    body = {
        "target": pod_target(options, options.target),
        "reason": options.reason,
        "by": options.by or who(),
        **({"until_released": True} if options.until_released else {"seconds": options.seconds}),
    }
    hold = order(options, "POST", "/holds", body)
    if options.output != "table":
        emit(hold, options.output)
        return Exit.OK
    until = f"until {words.clock(hold['until'])}" if hold["until"] else f"until: bypassctl release {hold['target']}"
    show([line(f"{hold['target']} is left alone {until}")])
    return Exit.OK
