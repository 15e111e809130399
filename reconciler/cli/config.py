"""``bypassctl config``: the configuration in force, where each value was written, and the schema of all settings."""

import json
from argparse import Namespace

from reconciler.cli import places
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.output import emit
from reconciler.config import load
from reconciler.config.docs import explain, in_force
from reconciler.runtime.streams import write
from reconciler.settings.binder import ConfigError


def run(options: Namespace) -> int:
    """Show it. Errors: `CliError` for a key that is none."""
    if options.action == "schema":
        if options.output not in {"table", "json"}:
            raise CliError("config schema: the schema is JSON", Exit.USAGE)
        return _schema(options.key)
    try:
        loaded = load.load(places.config_path(options), required=options.config is not None)
    except ConfigError as exc:
        raise CliError(str(exc), Exit.USAGE, lines=exc.problems) from exc
    try:
        if options.output != "table":
            emit({"files": list(loaded.files), "settings": in_force(loaded, options.key)}, options.output)
            return Exit.OK
        text = explain(loaded, options.key)
    except KeyError as exc:
        raise CliError(f"{options.key}: no such setting", Exit.NOT_FOUND) from exc
    if options.action == "show":
        text = "".join(f"{line}\n" for line in text.splitlines() if not line.startswith("  "))
    write(text)
    return Exit.OK


def _schema(key: str) -> int:
    if key:
        raise CliError("config schema: expected no key; the schema is of the whole file", Exit.USAGE)
    from reconciler.config.json_schema import json_schema

    write(json.dumps(json_schema(), indent=2) + "\n")
    return Exit.OK
