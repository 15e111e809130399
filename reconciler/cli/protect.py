"""``bypassctl protect``: the level in force with what each adds here; or set it, reload, and say what changed.

The level is one line of the configuration. Only that line is changed, in the file that has it; the result is checked
as a whole before it is written, and a reload that the daemon refuses puts the old text back unless someone has edited
the file meanwhile.
"""

import os
from argparse import Namespace
from collections.abc import Iterator
from typing import Final, NamedTuple

from cgroupfs.bounded import read_file
from cgroupfs.errors import errno_name
from reconciler.cli import places
from reconciler.cli.checks.offers import offers_of
from reconciler.cli.control import order
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.format import window_text
from reconciler.cli.nodeview import inspect_node
from reconciler.cli.screen import Block, StyledText, line, present
from reconciler.cli.windowed import moment_of, window_facts
from reconciler.config import load
from reconciler.config.docs import preset_in_force, shown
from reconciler.config.model import AgentMode, Config, Protection
from reconciler.config.presets import ROWS, LevelEffect, NodeOffers, effects, with_level
from reconciler.runtime.safe_files import replace_file
from reconciler.settings.binder import Text
from reconciler.settings.yaml import MAX_BYTES

_NONE: Final = "none"
_MODE: Final = 0o644


class _LevelChange(NamedTuple):
    """``file`` with ``old`` text (None: it does not exist) gets ``new``; the configuration before and after."""

    file: str
    old: bytes | None
    new: bytes
    before: load.Loaded
    after: load.Loaded


def run(options: Namespace) -> int:
    """Show the levels, or set one. Errors: `CliError`, which says what the file has if it was written."""
    if options.level is None:
        return _show_levels(options)
    if options.root != "/":
        raise CliError("protect LEVEL changes this node's configuration; it has no --root", Exit.USAGE)
    change = _planned(places.config_path(options), Protection(options.level))
    # What a control plane has set applies below both levels.
    before, _ = places.with_node_settings(options, change.before)
    after, _ = places.with_node_settings(options, change.after)
    change = change._replace(before=before, after=after)
    # Before the level is in force: an error here means that nothing is written.
    node = offers_of(inspect_node(options, loaded=change.after))
    answer: dict[str, object] = {}
    if not options.dry_run:
        if change.new != change.old:
            if _content(change.file) != change.old:
                raise CliError(f"{change.file}: edited meanwhile; nothing is written; run it again", Exit.REFUSED)
            _write(change.file, change.new)
        answer = _reload(options, change)
    facts = {
        "protect": options.level,
        "file": change.file,
        "written": not options.dry_run and change.new != change.old,
        **answer,
        "changed": {name: {"from": was, "to": now} for name, was, now in _differences(change)},
        "notes": _notes(change.after, node),
    }
    present(options.output, facts, _blocks(options, change, node, answer))
    return Exit.OK


def _planned(path: str, level: Protection) -> _LevelChange:
    """The change, checked as the daemon will. Errors: `ConfigError` with every problem; `CliError`."""
    before = load.load(path)
    at = before.origins.get("protect")
    file = at.file if at is not None else path
    old = _content(file)
    try:
        new = with_level((old or b"").decode(), level, at.line if at is not None else 0)
        after = load.load(path, edited=Text(file, new))
    except ValueError as exc:
        raise CliError(f"{at or file}: {exc}", Exit.REFUSED) from exc
    if after.config.protect is not level:
        raise CliError(f"{file}: a line was added, and another one decides; change it in an editor", Exit.REFUSED)
    return _LevelChange(file, old, new.encode(), before, after)


def _content(file: str) -> bytes | None:
    """None: it does not exist. Errors: `CliError`."""
    try:
        return read_file(file, MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise CliError(f"{file}: cannot be read: {errno_name(exc.errno)}", Exit.REFUSED) from exc


def _write(file: str, content: bytes) -> None:
    try:
        # A link, as a configuration management may make it, stays one.
        replace_file(os.path.realpath(file), content, mode=_MODE, durable=True, keep_owner=True)
    except PermissionError as exc:
        raise CliError(f"{file}: permission denied: run with sudo", Exit.REFUSED) from exc
    except OSError as exc:
        managed = " (in a pod: change the ConfigMap)" if errno_name(exc.errno) in {"EROFS", "EBUSY", "EXDEV"} else ""
        raise CliError(f"{file}: cannot be written: {errno_name(exc.errno)}{managed}", Exit.REFUSED) from exc


def _reload(options: Namespace, change: _LevelChange) -> dict[str, object]:
    """The daemon's answer, or why there is none (``unreachable``). Errors: `CliError`, with what the file has then."""
    try:
        answer = dict(order(options, "POST", "/reload"))
    except CliError as exc:
        if exc.code == Exit.UNREACHABLE:
            return {"unreachable": str(exc).partition(";")[0]}
        text = f"{change.file} {_taken_back(change)}:"
        raise CliError(f"{text} {exc}", exc.code, lines=(text, *exc.lines) if exc.lines else ()) from exc
    if answer.get("protect", options.level) != options.level:
        text = f"{change.file} is written, and the daemon has protect: {answer['protect']}: it reads another file"
        raise CliError(f"{text} (systemctl cat bypassd)", Exit.REFUSED)
    return answer


def _taken_back(change: _LevelChange) -> str:
    """What the file has after a refused reload: the old text, unless another one was written since."""
    if change.new == change.old:
        return "is unchanged"
    try:
        if _content(change.file) != change.new:
            return "was edited meanwhile and keeps the edit"
        if change.old is not None:
            _write(change.file, change.old)
        else:
            os.unlink(os.path.realpath(change.file))
    except (CliError, OSError) as exc:
        return f"keeps protect: {change.after.config.protect} ({exc})"
    return "is as before"


def _differences(change: _LevelChange) -> Iterator[tuple[str, str, str]]:
    """The settings that the two levels have: only the level's line differs. A rule that no file has is ``default``."""
    for name in dict.fromkeys(row.setting for row in ROWS):
        was, now = (_shown(loaded.config, name) for loaded in (change.before, change.after))
        if was != now:
            yield name, was, now


def _shown(config: Config, name: str) -> str:
    try:
        return shown(load.value_at(config, name))
    except AttributeError:
        return "default"


def _notes(loaded: load.Loaded, node: NodeOffers) -> dict[str, str]:
    """What of the level is not in force here, by setting."""
    return {row.setting: note for row, note in preset_in_force(loaded, node) if note is not None}


def _blocks(options: Namespace, change: _LevelChange, node: NodeOffers, answer: dict[str, object]) -> Iterator[Block]:
    was, config = change.before.config.protect, change.after.config
    levels = f"protect: {_name(was)} -> {options.level}" if was is not config.protect else f"protect: {options.level}"
    if options.dry_run:
        state = "not written (--dry-run)"
    else:
        written = "written" if change.new != change.old else "there already"
        after = (
            f"not reloaded: {answer['unreachable']}"
            if "unreachable" in answer
            else f"mode {answer.get('mode', 'unknown')}"
        )
        state = f"{written}{', ' if 'unreachable' in answer else ' and reloaded; '}{after}"
    yield line(StyledText(levels, "head"), f" in {change.file}: {state}")
    differences = {name: f"{name}: {old} -> {new}" for name, old, new in _differences(change)}
    notes = _notes(change.after, node)
    if not differences:
        yield line(f"no other setting changes{'; of the level:' if notes else ''}", indent=2)
    for name in dict.fromkeys([*differences, *notes]):
        text = differences.get(name, name)
        if name in notes:
            yield line(StyledText(text, "warn"), f"; {notes[name]}", indent=2)
        else:
            yield line(text, indent=2)
    if config.mode is AgentMode.OBSERVE and config.protect is not Protection.OBSERVE:
        at = change.after.origins.get("mode")
        yield line(StyledText("nothing is written", "warn"), f": mode: observe{f' at {at}' if at else ''}; remove it")
    yield from _window_blocks(options, config)
    yield line(f"see what it writes: bypassctl diff{'' if options.dry_run else _undo(change)}")


def _window_blocks(options: Namespace, config: Config) -> Iterator[Block]:
    """``config``: as the files have it."""
    facts = window_facts(config, moment_of(options.root))
    if not facts:
        return
    window = next((window for window in config.windows if window.name == facts["name"]), None)
    level = f": protect: {window.protect} while it lasts" if window is not None and window.protect is not None else ""
    yield line(f"window {window_text(facts)}", StyledText(level, "warn"))


def _undo(change: _LevelChange) -> str:
    was = change.before.config.protect
    if was is change.after.config.protect:
        return ""
    if was is None:
        # Settings without a level are not those of observe.
        return f"; undo: remove protect from {change.file}, then bypassctl reload"
    return f"; undo: bypassctl protect {was.value}"


def _show_levels(options: Namespace) -> int:
    loaded = load.load(places.config_path(options), required=options.config is not None)
    config = loaded.config
    node = offers_of(inspect_node(options, loaded=loaded))
    at = loaded.origins.get("protect")
    levels = list(effects(node))
    rows = [
        {"level": row.level.value, "adds": row.gives, "lacks": row.lacks, "waits_for": row.unlisted} for row in levels
    ]
    facts: dict[str, object] = {"protect": _name(config.protect), "origin": str(at) if at else None, "levels": rows}
    facts["window"] = window_facts(config, moment_of(options.root))
    text = _level_blocks(config, str(at) if at else "not set in a file", levels)
    present(options.output, facts, (*text, *_window_blocks(options, config)))
    return Exit.OK


def _level_blocks(config: Config, origin: str, levels: list[LevelEffect]) -> Iterator[Block]:
    yield line(StyledText(f"protect: {_name(config.protect)}", "head"), f" ({origin}), mode {config.mode.value}")
    yield line("observe: plans, and writes nothing", indent=2)
    for level in levels:
        yield line(f"{level.level.value}: {', '.join(level.gives) or 'nothing more'}", indent=2)
        for name, reason in level.lacks.items():
            yield line(StyledText(name, "warn"), f" lacks: {reason}", indent=4)
        for name, setting in level.unlisted.items():
            yield line(StyledText(name, "warn"), f" waits for entries of {setting}", indent=4)
    yield line("each has those above it, too; set one: bypassctl protect cpu")


def _name(level: Protection | None) -> str:
    return level.value if level is not None else _NONE
