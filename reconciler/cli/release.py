"""``bypassctl release``: end a hold."""

from argparse import Namespace

from reconciler.cli.client import quoted
from reconciler.cli.control import hold_target, order
from reconciler.cli.exits import Exit
from reconciler.cli.output import emit
from reconciler.cli.screen import line, show


def run(options: Namespace) -> int:
    """End the hold. Errors: `CliError` (`Exit.NOT_FOUND`) when there is none."""
    answer = order(options, "DELETE", f"/holds/{quoted(hold_target(options, options.target))}")
    if options.output != "table":
        emit(answer, options.output)
    else:
        show([line(f"hold on {answer['released']} released; managed again")])
    return Exit.OK
