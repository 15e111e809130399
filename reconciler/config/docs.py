"""The configuration's texts: the example file, docs/config.md and ``config explain``, all from the declarations.

``python -m reconciler.config.docs`` (in the project's directory) writes deploy/config.yaml and docs/config.md; a test
compares them.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Final

from msgspec import Struct
from msgspec.inspect import DictType, StrType

from cgroupfs.cpuset import CpuSet
from reconciler.clients.endpoint import masked_url
from reconciler.config.load import DEFAULT_PATH, Loaded, value_at
from reconciler.config.model import Config
from reconciler.config.presets import LEVELS, ROWS, NodeOffers, PresetRow, lacking, preset_name, rows_of
from reconciler.policies.table import POLICIES
from reconciler.settings import units
from reconciler.settings.schema import FieldSchema, ListType, Schema, section_of, settings

# Bare YAML words: everything else is quoted.
_SAFE: Final = re.compile(r"[A-Za-z0-9/][A-Za-z0-9/._%-]*")

_HEAD: Final = f"""\
# Configuration of bypassd: what most nodes change, with the defaults. Uncomment what you change; SIGHUP reloads.
# Read from {DEFAULT_PATH}, then from conf.d/*.yaml beside it in name order; what comes later wins.
# Every setting: docs/config.md. What is in force and where it was written: bypassctl config explain.
# For completion in an editor: bypassctl config schema > config.schema.json, then let the first line of this file be
#   "# yaml-language-server: $schema=config.schema.json". A setting marked ↻ needs a restart.
"""
EXAMPLE: Final = (
    *("protect", "mode", "on_stop", "operator_file"),
    *("kubelet.endpoint", "kubelet.token_file", "kubelet.ca_file"),
    *("policies.reserve.cpus", "policies.exclusive.enabled", "policies.exclusive.keep_cpus", "policies.shared.mode"),
    *("policies.idle_buffer.buffer_milli", "policies.reclaimed.budget.limit_percent", "policies.reclaimed.form"),
    *("policies.reclaimed.minimum_cpus", "policies.quota_burst.enabled", "policies.be_memory.enabled"),
    *("policies.memory_qos.enabled", "policies.oom_score.enabled", "policies.disk.enabled"),
    *("policies.network.enabled", "policies.cache.enabled", "policies.node_daemons.enabled"),
    *("interference.enabled", "eviction.enabled", "eviction.dry_run", "eviction.spared.namespaces"),
    *("writes.foreign.rounds", "http.address", "http.port", "http.allow_remote", "http.reader_group"),
    *("http.pod_metrics", "log.level"),
)
"""What the example shows, in its order of sections."""
_EXAMPLE_TAIL: Final = """\

# Classes of pods without marks of their own; the first that fits wins (docs/config.md has more).
# classes:
#   selectors:
#   - {class: reclaimed, namespaces: [ci, "batch-*"]}

# Where alerts are sent, beside the journal (docs/alerts.md).
# alerts:
#   sinks:
#     team: {alertmanager: {urls: ["http://alertmanager.monitoring:9093"]}}
"""
_COLUMN: Final = 34

CLASSES_EXAMPLE: Final = """\
classes:
  # An operator's last word on some pods; the first that fits wins.
  overrides:
  - class: shared
    pod: batch/report-*
    reason: month-end report, must be fast until the 5th
  # Pods without marks of their own; the first that fits wins.
  selectors:
  - class: reclaimed
    namespaces: [ci, "batch-*"]
  - class: system
    priorityClasses: [system-node-critical]
    labels:
      matchLabels: {tier: node}
      matchExpressions:
      - {key: canary, operator: DoesNotExist}
"""


TWELVE: Final[Mapping[str, str]] = {
    "protect": "always: begin with `observe`, then `cpu`; see [Presets](#presets)",
    "mode": "`observe` beside a higher `protect` shows what it would write",
    "classes.selectors": "BE pods without marks of their own, by namespace, label or priority class",
    "policies.reserve.cpus": "system daemons or interrupts need CPUs that no pod uses",
    "policies.reclaimed.budget.limit_percent": "how full the CPUs may become, where BE pods are not in the idle class",
    "policies.reclaimed.minimum_cpus": "BE work must progress on a full node, too",
    "policies.disk.devices": "BE work reads or writes disks that online pods use",
    "policies.network.interfaces": "BE work sends through interfaces that online pods use",
    "eviction.dry_run": "`false`, once `bypassctl evictions` has shown only pods that you would have chosen",
    "eviction.spared.namespaces": "pods of other namespaces must never be evicted",
    "alerts.sinks": "alerts are sent to Alertmanager, a webhook or a file",
    "http.address": "Prometheus scrapes from another machine (with `http.allow_remote`)",
}
"""What most sites decide about, and when."""


_NODE_SETTINGS: Final = "apiserver.node_settings"
_COMMON: Final = "Settings of many sections"
_MANY: Final = 4
_NAMED: Final = ".NAME"
# Detectors and triggers are described in documents of their own, to which the sections above them lead.
_ELSEWHERE: Final = ("interference.rules.NAME.when[][].", "eviction.triggers.")


def shown(value: object, field: FieldSchema | None = None) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case Enum():
            return str(value.value)
        case int() | float():
            return units.format_number(value, field.schema.unit if field is not None else None)
        case CpuSet():
            return str(value) or '""'
        case tuple():
            return f"[{', '.join(shown(item) for item in value)}]"
        case frozenset():
            return f"[{', '.join(sorted(shown(item) for item in value))}]"
        case Mapping():
            return f"{{{', '.join(f'{shown(key)}: {shown(item)}' for key, item in value.items())}}}"
        case _:
            text = str(value)
            return text if _SAFE.fullmatch(text) else json.dumps(text)


def accepts(field: FieldSchema) -> str:
    """What may be written: kind, bounds, whether null."""
    schema = field.schema
    if schema.struct is not None:
        return "a section"
    if isinstance(schema.kind, DictType):
        return "names with sections" if schema.of_sections else "keys with values"
    if isinstance(schema.kind, ListType):
        if schema.of_sections:
            return "a list of rules"
        return "a list of lists" if isinstance(schema.item.kind, ListType) else "a list"
    bounds = schema.bounds
    text = schema.unit.noun if schema.unit is not None and bounds else schema.describe
    text += f" {bounds}" if bounds else ""
    return f"{text}; or null" if schema.optional else text


def _summary(path: str, section: Schema) -> str:
    name = path.removeprefix("policies.")
    for policy in POLICIES:
        if policy.name == name:
            return _sentence(policy.summary)
    return section.summary


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def example() -> str:
    """deploy/config.yaml: the settings that most nodes change, each with its default and one line of text."""
    lines = [_HEAD]
    fields = dict(settings(section_of(Config)))
    before: tuple[str, ...] = ()
    for path in EXAMPLE:
        *sections, name = path.split(".")
        field = fields[path]
        if sections[:1] != list(before[:1]):
            lines.append("")
        for depth, section in enumerate(sections):
            if tuple(sections[: depth + 1]) != before[: depth + 1]:
                lines.append(f"{'  ' * depth}{section}:")
        before = tuple(sections)
        setting = f"{'  ' * len(sections)}# {name}: {shown(field.default, field)}"
        above = ".".join(sections)
        text = _summary(above, fields[above].schema) if name == "enabled" else field.description
        limits = _limits(field)
        text += f"{f' ({limits})' if limits else ''}{' ↻' if field.restart else ''}"
        lines.append(f"{setting.ljust(_COLUMN)}  # {text}")
    return "\n".join(lines) + "\n" + _EXAMPLE_TAIL


def markdown() -> str:
    """docs/config.md: every setting in lists, one per section."""
    root = section_of(Config)
    fields = dict(settings(root))
    lines = [
        "# Configuration",
        "",
        "Made by `python -m reconciler.config.docs` from the declarations in the code; do not edit.",
        "",
        f"bypassd reads `{DEFAULT_PATH}`, then `conf.d/*.yaml` beside it in name order. What comes later wins, setting",
        "by setting; lists are replaced whole. Every problem of every file is reported at once, as",
        "`file:line:column: setting: message`, and none of it is used then. `systemctl reload bypassd` (SIGHUP) reads",
        "the files again; after an error the old configuration stays in force. A setting marked ↻ needs a restart.",
        "",
        "A bare number is in the unit that the setting's name ends in (`_s` seconds, `_bytes`, `_milli` thousandths of",
        "a CPU, `_percent`); a unit may be written: `200ms`, `10s`, `5m`, `1h`; `512Mi`, `4Gi`; `500m`, `2cpu`;",
        "`75%`. Text is taken as it is written (`on` and `12:30` are text). Anchors, aliases and tags are refused.",
        "Each setting has its default, in brackets bounds (`>0..1`: above 0, up to 1) and choices. An editor completes",
        "and checks the file by `bypassctl config schema` ([bypassctl.1.md](bypassctl.1.md)).",
        "",
        "## The twelve settings you need",
        "",
        "| setting | default | set it when |",
        "|---|---|---|",
        *(f"| `{path}` | `{shown(fields[path].default, fields[path])}` | {when} |" for path, when in TWELVE.items()),
        "",
        "Some keys of earlier versions are constants now. Such a key has no effect, and a rule that has one is off;",
        "`bypassd check-config` says what applies instead. Rules that name classes:",
        "",
        "```yaml",
        CLASSES_EXAMPLE.rstrip(),
        "```",
        *_presets(),
    ]
    lines += _lists(root)
    return "\n".join(lines) + "\n"


def _presets() -> list[str]:
    """The levels of ``protect``, as a section."""
    names = ", ".join(f"`{level.value}`" for level in LEVELS)
    lines = [
        "",
        "## Presets",
        "",
        f"`protect` is one line for a set of settings: `observe`, or one of {names}, each of",
        "which includes the ones before it. A key in a file overrides the preset's: `protect: full` with",
        "`mode: observe` shows what `full` would write; `protect: observe` with `mode: enforce` is refused.",
        "",
        "`bypassctl config explain protect` lists the settings, with what overrides them and what this node lacks.",
        "`core_sched`, `group_identity` and `qos_level` are in no level, and evictions are a dry run: enable them by",
        "their own settings.",
        "",
        "| level | for | settings | needs |",
        "|---|---|---|---|",
    ]
    parts: dict[tuple[str, str, str], list[str]] = {}
    for row in ROWS:
        needs = " or ".join(row.needs) if row.either else ", ".join(row.needs)
        needs = needs or (f"entries in `{row.listed}`" if row.listed else "")
        parts.setdefault((row.level.value, row.gives, needs), []).append(f"`{row.setting}: {shown(row.value)}`")
    lines += [f"| `{level}` | {gives} | {', '.join(what)} | {needs} |" for (level, gives, needs), what in parts.items()]
    return lines


def _sections(
    section: Schema, path: str, title: str, named: set[type[Struct] | None]
) -> Iterator[tuple[str, str, Schema, list[FieldSchema]]]:
    """The section and those within it: path, title, schema, and what is set in it directly.

    ``named``: the sections of maps that were described so far; each is described where the first such map is.
    """
    yield path, title, section, [field for field in section.fields.values() if field.schema.struct is None]
    for field in section.fields.values():
        inner = f"{path}.{field.name}" if path else field.name
        if field.schema.struct is not None:
            yield from _sections(field.schema, inner, f"`{inner}`", named)
            continue
        mark, item = _item(field.schema)
        if item is None or item.struct in named:
            continue
        if mark == _NAMED:
            named.add(item.struct)
        yield from _sections(item, f"{inner}{mark}", f"`{inner}{mark}`", named)


def _lists(root: Schema) -> list[str]:
    """Every section with its settings. What many sections have is described once, and so are equal sections."""
    sections = list(_sections(root, "", "Top level", set()))
    counts = Counter(_row(field) for *_, fields in sections for field in fields if _is_plain(field))
    common = [row for row, count in counts.items() if count >= _MANY]
    lines = ["", f"## {_COMMON}", ""]
    lines += [
        "*on* or *off* after a section's name is the default of `enabled`. Policies and triggers have `dry_run`, too."
    ]
    lines += ["The lists below repeat the other settings without their text.", "", *common]
    equal: dict[tuple[str, ...], list[str]] = {}
    texts: dict[tuple[str, ...], tuple[str, list[FieldSchema]]] = {}
    bodies: dict[str, tuple[str, str, list[str]]] = {}
    for path, title, section, fields in sections:
        rows = [row for field in fields if (row := _row(field)) not in common]
        # The row of a policy's `enabled` says the same as its summary, where it has a text of its own.
        repeated = path.startswith("policies.") and any(row.startswith("- `enabled:") for row in rows)
        summary = "" if repeated or not path or path.startswith(_ELSEWHERE) else _summary(path, section)
        short = {field.name: field for field in fields if _row(field) in common}
        heading = title
        if enabled := short.pop("enabled", None):
            heading = f"{title} {'on' if enabled.default else 'off'}"
        if "enabled" in {field.name for field in fields}:
            short.pop("dry_run", None)
        if short:
            rows.append(f"- {', '.join(map(_setting, short.values()))}")
        first, before = texts.setdefault(tuple(map(_text, fields)), (title, fields))
        if first != title and len(rows) > 1 and list(map(_row, before)) != list(map(_row, fields)):
            rows = [f"As {first}, with {', '.join(map(_setting, fields))}."]
        if rows or enabled:
            equal.setdefault((heading,) if enabled else (summary, *rows), []).append(title)
            bodies[title] = (heading, summary, rows)
    for titles in equal.values():
        first, *others = titles
        heading, summary, rows = bodies[first]
        lines += ["", f"## {heading}", *(["", summary] if summary else []), *(["", *rows] if rows else [])]
        if others:
            lines += ["", f"The same in {', '.join(others)}."]
    return lines


def _is_plain(field: FieldSchema) -> bool:
    return bool(field.description) and not field.restart


def _item(schema: Schema) -> tuple[str, Schema | None]:
    """The section that a list or a map holds, with the marks of its place: ``[]`` and ``.NAME``."""
    mark = ""
    while isinstance(schema.kind, ListType | DictType):
        mark += _NAMED if isinstance(schema.kind, DictType) else "[]"
        schema = schema.item
    return mark, schema if schema.struct is not None and mark else None


def _row(field: FieldSchema) -> str:
    """A setting as one writes it, with its default; the limits; what it is."""
    return f"- {_setting(field)}{_text(field).removeprefix(field.name)}"


def _text(field: FieldSchema) -> str:
    """The same without its default."""
    limits = _limits(field)
    text = "".join((field.name, " ↻" if field.restart else "", f" ({limits})" if limits else ""))
    return f"{text}: {field.description}" if field.description else text


def _setting(field: FieldSchema) -> str:
    return f"`{field.name}` (required)" if field.required else f"`{field.name}: {shown(field.default, field)}`"


def _limits(field: FieldSchema) -> str:
    """`accepts`, without what the default and the description show: the kind, null where it is the default, choices."""
    schema = field.schema
    limits = ranged(schema.bounds)
    if not limits and schema.choices and not all(_is_word_of(choice, field.description) for choice in schema.choices):
        limits = ", ".join(schema.choices)
    nullable = schema.optional and field.default is not None
    return ", ".join(filter(None, (limits, "or null" if nullable else "")))


def ranged(bounds: str) -> str:
    """``1s..1h`` of ``from 1s to 1h``, ``>0..1`` of ``above 0, up to 1``, ``≥0`` of ``at least 0``."""
    short = bounds.removeprefix("from ").replace(" to ", "..") if bounds.startswith("from ") else bounds
    return short.replace("above ", ">").replace(", up to ", "..").replace("at least ", "≥")


def _is_word_of(word: str, text: str) -> bool:
    return re.search(rf"(?<![\w+-]){re.escape(word)}(?![\w+-])", text) is not None


def explain(
    loaded: Loaded,
    prefix: str = "",
    node: NodeOffers | None = None,
    top: Schema | None = None,
    *,
    left: Sequence[str] = (),
    window: str = "",
) -> str:
    """What is in force: each setting (below ``prefix``) with its value, where that was written, and its words.

    ``node``: what the node has, for the settings of a preset that have no effect there. ``top``: as of `load`.
    ``left``: the values of the control plane that do not count, each with its reason. ``window``: about the
    window in force.
    Errors: `KeyError` when no setting's name starts with ``prefix``.
    """
    blocks: list[str] = []
    preset = preset_in_force(loaded, node)
    sources = _sources(loaded)
    for path, field, value in _chosen(top, loaded.config, prefix):
        written = sources.get(path, ())
        parts = [f"  {text}" for text in (field.description, accepts(field)) if text]
        if written:
            parts.append(f"  default {shown(field.default, field)}")
        if field.restart:
            parts.append("  a change needs a restart")
        if path == _NODE_SETTINGS:
            parts += [f"  not taken: {text}" for text in left]
        if path == "windows" and window:
            parts.append(f"  now: {window}")
        for row, note in preset:
            if path == "protect" or (note and _is_of(row.setting, path)):
                parts.append(f"  preset: {row.setting}: {shown(row.value)}{f' ({note})' if note else ''}")
        blocks.append("\n".join([_line(path, field, value, written), *parts]))
    return "\n".join(blocks) + "\n"


def show(loaded: Loaded, prefix: str = "", top: Schema | None = None) -> str:
    """The first line of each setting in `explain`: its value and where that was written. Errors: as `explain`."""
    chosen, sources = _chosen(top, loaded.config, prefix), _sources(loaded)
    return "".join(f"{_line(path, field, value, sources.get(path, ()))}\n" for path, field, value in chosen)


def _line(path: str, field: FieldSchema, value: object, written: Sequence[str]) -> str:
    return f"{path} = {_in_force(value, field)}   [{', '.join(written) if written else 'default'}]"


def _chosen(top: Schema | None, config: Config, prefix: str) -> list[tuple[str, FieldSchema, object]]:
    """The settings of ``prefix`` (empty: all) with their values. Errors: `KeyError` where there is none."""
    chosen = list(_within(section_of(Config) if top is None else top, config, prefix, ""))
    if not chosen:
        raise KeyError(prefix)
    return chosen


def _within(section: Schema, values: Struct, prefix: str, before: str) -> Iterator[tuple[str, FieldSchema, object]]:
    """The same; a section that has none of them is not gone through."""
    for field in section.fields.values():
        path = f"{before}{field.name}"
        inside = not prefix or _is_of(path, prefix)
        value = getattr(values, field.attribute)
        if field.schema.struct is None:
            if inside:
                yield path, field, value
        elif inside or _is_of(prefix, path):
            yield from _within(field.schema, value, prefix, f"{path}.")


def preset_in_force(loaded: Loaded, node: NodeOffers | None) -> list[tuple[PresetRow, str | None]]:
    """The settings of the preset, each with where it is overridden or what it lacks; None: it is in force.

    ``node``: what the node has; None: not known.
    """
    return [(row, _preset_note(row, loaded, node)) for row in rows_of(loaded.config.protect)]


def _preset_note(row: PresetRow, loaded: Loaded, node: NodeOffers | None) -> str | None:
    if row.setting not in loaded.preset and value_at(loaded.config, row.setting) != row.value:
        at = loaded.origins.get(row.setting)
        # Only the mode is neither of the level nor written: the window in force has the level.
        return "the same in every window" if at is None else f"overridden in {at}"
    if row.listed and not value_at(loaded.config, row.listed):
        return f"no effect: {row.listed} is empty"
    if node is not None and (why := node.unused.get(row.setting)) is not None:
        return f"not used: {why}"
    reason = lacking(row, node) if node is not None else None
    return None if reason is None else f"this node lacks it: {reason}"


def _is_of(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _sources(loaded: Loaded) -> dict[str, list[str]]:
    """The places of each setting and section, and the preset where that has a part of it; no entry: the default."""
    places: dict[str, list[str]] = {}
    for name, at in loaded.origins.items():
        for path in _around(name):
            places.setdefault(path, []).append(str(at))
    for name, origin in loaded.node.items():
        for path in _around(name):
            places.setdefault(path, []).append(origin)
    level = loaded.config.protect
    if level is not None:
        for path in {path for name in loaded.preset for path in _around(name)}:
            places.setdefault(path, []).append(preset_name(level))
    return places


def _around(name: str) -> Iterator[str]:
    """A dotted name, and all that it is in: the paths of which `_is_of` is true."""
    yield name
    at = name.rfind(".")
    while at > 0:
        yield name[:at]
        at = name.rfind(".", 0, at)


def in_force(loaded: Loaded, prefix: str = "", top: Schema | None = None) -> dict[str, dict[str, object]]:
    """The same as plain values by setting: ``value``, ``source``, ``changed``.

    ``source``: the places, and ``protect: LEVEL`` for what is the preset's; empty for a default.
    What `explain` masks or sums up is the same text here. Errors: as `explain`.
    """
    rows: dict[str, dict[str, object]] = {}
    sources = _sources(loaded)
    for path, field, value in _chosen(top, loaded.config, prefix):
        written = sources.get(path, [])
        plain = value is None or (isinstance(value, bool | int | float) and not field.secret)
        rows[path] = {
            "value": value if plain else _in_force(value, field),
            "source": written,
            "changed": value != field.default,
        }
    return rows


def _in_force(value: object, field: FieldSchema) -> str:
    kind = field.schema.kind
    if isinstance(kind, ListType) and field.schema.of_sections:
        assert isinstance(value, tuple)
        return f"{len(value)} rules"
    if isinstance(value, Mapping) and field.schema.of_sections:
        return ", ".join(map(str, value)) or "none"
    if field.secret and isinstance(value, str) and isinstance(kind, StrType) and not field.schema.path:
        return shown(masked_url(value), field)
    return shown(value, field)


def main() -> None:
    """Write the two generated files below the current directory."""
    for path, text in (("deploy/config.yaml", example()), ("docs/config.md", markdown())):
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()
