"""``bypassctl reload``: have the daemon read its configuration again, and say what is wrong with it."""

from argparse import Namespace

from reconciler.cli.control import order
from reconciler.cli.exits import Exit
from reconciler.cli.output import emit
from reconciler.cli.screen import line, show


def run(options: Namespace) -> int:
    """Reload. A bad configuration is refused with every problem, and the old one stays in force."""
    answer = order(options, "POST", "/reload")
    if options.output != "table":
        emit(answer, options.output)
    else:
        show([line(f"reloaded; mode {answer['mode']}")])
    return Exit.OK
