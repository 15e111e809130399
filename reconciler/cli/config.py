"""``bypassctl config``: the configuration in force, and where each value was written."""

from argparse import Namespace

from reconciler.cli import places
from reconciler.cli.exits import CliError, Exit
from reconciler.config import load
from reconciler.config.docs import explain
from reconciler.runtime.streams import complain_lines, write
from reconciler.settings.binder import ConfigError


def run(options: Namespace) -> int:
    """Show it. Errors: `CliError` with every problem of a wrong configuration, or for a key that is none."""
    try:
        loaded = load.load(places.config_path(options), required=options.config is not None)
    except ConfigError as exc:
        # One line each, unlike other mistakes: every one of them has a place of its own.
        complain_lines(exc.problems)
        return Exit.USAGE
    try:
        text = explain(loaded, options.key)
    except KeyError as exc:
        raise CliError(f"{options.key}: no such setting", Exit.NOT_FOUND) from exc
    if options.action == "show":
        text = "".join(f"{one}\n" for one in text.splitlines() if not one.startswith("  "))
    write(text)
    return Exit.OK
