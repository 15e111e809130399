"""``bypassctl config``: the configuration in force, and where each value was written."""

from argparse import Namespace

from reconciler import configfile
from reconciler.binder import ConfigError
from reconciler.cli import places
from reconciler.cli.exits import CliError, Exit
from reconciler.configdoc import explain
from reconciler.streams import complain_lines, write


def run(options: Namespace) -> int:
    """Show it. Errors: `CliError` with every problem of a wrong configuration, or for a key that is none."""
    try:
        loaded = configfile.load(places.config_path(options), required=options.config is not None)
    except ConfigError as exc:
        # One line each, unlike other mistakes: every one of them has a place of its own.
        complain_lines(exc.problems)
        return Exit.USAGE
    try:
        text = explain(loaded, options.key)
    except KeyError as exc:
        raise CliError(f"{options.key}: there is no such setting", Exit.NOT_FOUND) from exc
    if options.action == "show":
        text = "".join(f"{one}\n" for one in text.splitlines() if not one.startswith("  "))
    write(text)
    return Exit.OK
