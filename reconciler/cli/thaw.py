"""``bypassctl thaw``: let run again what a daemon that ended without a word has left frozen. For the unit, mostly."""

from argparse import Namespace

from reconciler.cli import places
from reconciler.cli.exits import Exit
from reconciler.cli.screen import line, show


def run(options: Namespace) -> int:
    """Thaw. `Exit.NOT_OK` when something is still frozen. A running daemon takes care of it itself."""
    from reconciler.cli.ledger import thaw_without_daemon  # the loop and the models

    done, failed = thaw_without_daemon(places.find(options).store, options.root)
    show([line(text) for text in (*(f"{path}: unfrozen" for path in done), *failed)])
    return Exit.NOT_OK if failed else Exit.OK
