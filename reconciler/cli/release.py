"""``bypassctl release``: end a hold."""

from argparse import Namespace

from reconciler.cli.client import DaemonRefused, quoted
from reconciler.cli.control import hold_target, order
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.output import emit
from reconciler.cli.screen import line, show


def run(options: Namespace) -> int:
    """End the hold. Errors: `CliError` (`Exit.NOT_FOUND`) when there is none."""
    named = hold_target(options, options.target)
    try:
        answer = order(options, "DELETE", f"/holds/{quoted(named.target)}")
    except DaemonRefused as exc:
        if exc.status != 404:
            raise
        raise CliError(f"no hold on {named.title}; bypassctl holds lists them", Exit.NOT_FOUND) from exc
    if options.output != "table":
        emit(answer, options.output)
    else:
        title = named.title if answer["released"] == named.target else answer["released"]
        show([line(f"hold on {title} released; managed again")])
    return Exit.OK
