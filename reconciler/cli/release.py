"""``bypassctl release``: end a hold."""

from argparse import Namespace

from reconciler.cli.client import quoted
from reconciler.cli.control import hold_target, order
from reconciler.cli.exits import Exit
from reconciler.cli.output import emit
from reconciler.cli.screen import line, show


def run(options: Namespace) -> int:
    """End the hold. Errors: `CliError` (`Exit.NOT_FOUND`) when there is none."""
    named = hold_target(options, options.target)
    answer = order(options, "DELETE", f"/holds/{quoted(named.target)}")
    if options.output != "table":
        emit(answer, options.output)
    else:
        title = named.title if answer["released"] == named.target else answer["released"]
        show([line(f"hold on {title} released; managed again")])
    return Exit.OK
