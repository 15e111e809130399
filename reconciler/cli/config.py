"""``bypassctl config``: the configuration in force, where each value was written, and the schema of all settings."""

import json
from argparse import Namespace
from typing import Final

from reconciler.cli import places
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.format import window_text
from reconciler.cli.screen import emit
from reconciler.cli.windowed import load_now, moment_of, window_facts
from reconciler.config import load
from reconciler.config.docs import explain, in_force, preset_in_force, show
from reconciler.config.model import Config
from reconciler.config.presets import NodeOffers
from reconciler.runtime.streams import complain_lines, write
from reconciler.settings.schema import Schema, section_of, settings

_MOST: Final = 8
"""Names in a message."""
_SHORTEST: Final = 3


def run(options: Namespace) -> int:
    """Show it. Errors: `CliError` for a key that is none."""
    if options.action == "schema":
        if options.output not in {"table", "json"}:
            raise CliError("config schema: the schema is JSON", Exit.USAGE)
        return _schema(options.key)
    top = section_of(Config)
    loaded, left = load_now(options, top)
    hidden = places.hidden_settings(options, loaded)
    complain_lines([*loaded.removed, *([] if hidden is None else [hidden])])
    short = options.action == "show" and options.output == "table"
    node = _node_offers(options, loaded) if loaded.config.protect is not None and not short else None
    try:
        if options.output != "table":
            preset = [
                {"setting": row.setting, "value": row.value, "note": note or ""}
                for row, note in preset_in_force(loaded, node)
            ]
            settings = in_force(loaded, options.key, top)
            facts = {"files": list(loaded.files), "preset": preset, "not_taken": list(left), "settings": settings}
            emit({**facts, "window": _window(options, loaded.config)}, options.output)
            return Exit.OK
        window = window_text(_window(options, loaded.config))
        text = (
            show(loaded, options.key, top)
            if short
            else explain(loaded, options.key, node, top, left=left, window=window)
        )
    except KeyError as exc:
        raise CliError(f"{options.key}: no such setting{_nearest(options.key, top)}", Exit.NOT_FOUND) from exc
    write(text)
    return Exit.OK


def _window(options: Namespace, config: Config) -> dict[str, object]:
    if not config.windows:
        return {}
    return window_facts(config, moment_of(options.root))


def _nearest(key: str, top: Schema) -> str:
    """For a message: the settings and sections with this text in their names, else those with a similar name."""
    from difflib import get_close_matches  # only for a message

    names = [name for name, _ in settings(top)]
    text = key.strip(".").lower()
    near = [name for name in names if f".{text}." in f".{name.lower()}."]
    near += [name for name in names if text in name.lower() and name not in near] if len(text) >= _SHORTEST else []
    last = {name.rpartition(".")[2]: name for name in reversed(names)}
    near = near or [last.get(name, name) for name in get_close_matches(key[:100], [*names, *last], n=3)]
    # Without the settings of a section that is listed.
    near = [name for name in near if name.rpartition(".")[0] not in near]
    more = f" and {len(near) - _MOST} more" if len(near) > _MOST else ""
    return f"; nearest: {', '.join(near[:_MOST])}{more}" if near else ""


def _node_offers(options: Namespace, loaded: load.Loaded) -> NodeOffers:
    """What the node has, for the settings of a preset."""
    # The readers of the node are half of this command's time.
    from reconciler.cli.checks.offers import offers_of
    from reconciler.cli.nodeview import inspect_node

    return offers_of(inspect_node(options, loaded=loaded))


def _schema(key: str) -> int:
    if key:
        raise CliError("config schema: expected no key; the schema is of the whole file", Exit.USAGE)
    from reconciler.config.json_schema import json_schema

    write(json.dumps(json_schema(), indent=2) + "\n")
    return Exit.OK
