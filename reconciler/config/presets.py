"""The levels of ``protect``: one line of the configuration for a set of settings.

A level is the rows of `ROWS` up to it. They are a layer below the files, setting by setting: a key that is written in a
file always applies instead. No row depends on the node: a policy sets only what the kernel offers, and `lacking` says
which settings have no effect on a node. After a change of the kernel they take effect without a change of the files.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct

from cgroupfs.codecs import Version
from cgroupfs.knobs import CATALOG
from reconciler.config.model import Protection
from reconciler.policies.base import missing_reason
from reconciler.settings.binder import Text
from reconciler.settings.schema import nested

LEVELS: Final = (Protection.CPU, Protection.CPU_MEMORY, Protection.FULL)
"""From the least to the most; each includes the ones before it."""


class Facility(StrEnum):
    """What a setting may need of a node besides control files."""

    RESCTRL = "resctrl"
    POD_PRESSURE = "pressure of pods"


_FACILITIES: Final = frozenset(facility.value for facility in Facility)


class PresetRow(Struct, frozen=True, kw_only=True):
    """One setting of a level."""

    level: Protection
    setting: str
    value: bool | str
    gives: str = ""  # what for, a few words; rows with the same words belong together
    # Control files (names of `cgroupfs.knobs.CATALOG`) and facilities without which it does not do that.
    needs: tuple[str, ...] = ()
    either: bool = False  # the need is the one of these control files that the node's version of cgroups has
    listed: str = ""  # a setting that lists what it applies to, without which it has no effect


def _row(level: Protection, setting: str, value: bool | str, gives: str = "", *needs: str) -> PresetRow:
    return PresetRow(level=level, setting=setting, value=value, gives=gives, needs=needs)


_CPU: Final = Protection.CPU
_MEMORY: Final = Protection.CPU_MEMORY
_FULL: Final = Protection.FULL
_BUDGET: Final = "BE CPU budget"
_RESPONSES: Final = "responses to interference"

# No level has:
# - policies.core_sched: while BE work runs on a core the other thread may be idle, and what online work gains is not
#   measured;
# - policies.group_identity and policies.qos_level: kernels of two distributions only have them, and the second cannot
#   be undone for a pod.
ROWS: Final = (
    _row(Protection.OBSERVE, "mode", "observe"),
    _row(_CPU, "mode", "enforce"),
    _row(_CPU, "policies.reclaimed.enabled", True, _BUDGET),
    _row(_CPU, "policies.reclaimed.form", "both", _BUDGET),
    _row(_CPU, "policies.idle_buffer.enabled", True, "idle buffer"),
    _row(_CPU, "policies.idle_class.enabled", True, "idle class", "cpu.idle"),
    # On any kernel; the only side before Linux 5.15.
    _row(_CPU, "policies.idle_class.threads", True, "idle class of threads"),
    _row(_MEMORY, "policies.memory_qos.enabled", True, "protected memory requests", "memory.low"),
    # Without `hard_percent`: at a hard limit BE processes are killed.
    PresetRow(
        level=_MEMORY,
        setting="policies.be_memory.enabled",
        value=True,
        gives="BE memory limit",
        needs=("memory.high", "memory.soft"),
        either=True,
    ),
    _row(_MEMORY, "policies.oom_score.enabled", True, "OOM order"),
    _row(_MEMORY, "policies.watermarks.enabled", True, "watermarks"),
    _row(_MEMORY, "policies.memory_reclaim.enabled", True, "page cache reclaim"),
    # Probing costs BE work refaults while no online pod needs the memory.
    _row(_MEMORY, "policies.memory_reclaim.probe", False, "page cache reclaim"),
    _row(_FULL, "policies.cache.enabled", True, "cache shares", Facility.RESCTRL),
    PresetRow(
        level=_FULL,
        setting="policies.network.enabled",
        value=True,
        gives="network share",
        listed="policies.network.interfaces",
    ),
    PresetRow(
        level=_FULL, setting="policies.disk.enabled", value=True, gives="disk share", listed="policies.disk.devices"
    ),
    _row(_FULL, "policies.responses.enabled", True, _RESPONSES),
    _row(_FULL, "interference.enabled", True, _RESPONSES),
    _row(_FULL, "interference.rules.cpu.dry_run", False, _RESPONSES),
    _row(_FULL, "interference.rules.memory.dry_run", False, _RESPONSES),
    _row(_FULL, "interference.rules.cache.dry_run", False, _RESPONSES),
    _row(_FULL, "interference.rules.io.dry_run", False, "responses to disk pressure", Facility.POD_PRESSURE),
    # A dry run only: no restore undoes an eviction, and it may need rights in the cluster.
    _row(_FULL, "eviction.enabled", True, "evictions (dry run)"),
    _row(_FULL, "eviction.dry_run", True, "evictions (dry run)"),
)
"""Every level's settings, by level; a setting is in one level only, ``mode`` apart. Each can be changed by a reload."""


class NodeOffers(Struct, frozen=True, kw_only=True):
    """What a node has."""

    versions: Mapping[str, Version]  # of each mounted controller
    knobs: frozenset[str]  # names of the control files of kubepods
    facilities: Mapping[Facility, str] = {}  # the reason for each that it lacks
    unused: Mapping[str, str] = {}  # the reason for each setting that has no effect, as another does its work


def rows_of(level: Protection | None) -> tuple[PresetRow, ...]:
    """The settings of a level, in the table's order; none where no level is set."""
    if level is None:
        return ()
    if level is Protection.OBSERVE:
        # The other levels do not include it: they have the other mode.
        return tuple(row for row in ROWS if row.level is level)
    levels = LEVELS[: LEVELS.index(level) + 1]
    return tuple(row for row in ROWS if row.level in levels)


def layer(level: Protection) -> Text:
    """The settings of a level as a configuration text (JSON, which is YAML), named by `preset_name`."""
    return Text(preset_name(level), json.dumps(nested({row.setting: row.value for row in rows_of(level)})))


def preset_name(level: Protection) -> str:
    """A level as the source of a setting."""
    return f"protect: {level.value}"


def lacking(row: PresetRow, node: NodeOffers) -> str | None:
    """Why a setting does not do what it is for on a node; None where the node has what it needs."""
    needs = row.needs
    if row.either:
        needs = tuple(name for name in needs if node.versions.get(CATALOG[name].controller) in CATALOG[name].forms)
        # Neither: the controller is not mounted, and the reason is the same for both.
        needs = needs or row.needs[:1]
    reasons = [reason for need in needs if (reason := _reason(need, node)) is not None]
    return "; ".join(dict.fromkeys(reasons)) or None


def _reason(need: str, node: NodeOffers) -> str | None:
    if need in _FACILITIES:
        return node.facilities.get(Facility(need))
    return missing_reason(need, node.versions, node.knobs)


class LevelEffect(Struct, frozen=True, kw_only=True):
    """What a level adds to the one before it on a node."""

    level: Protection
    gives: tuple[str, ...]
    lacks: Mapping[str, str]  # by what it would give: the reason why it does not
    unlisted: Mapping[str, str]  # by what it would give: the name of the list that has no entries


def effects(node: NodeOffers, without: Collection[str] = ()) -> Iterator[LevelEffect]:
    """Each level on a node, the least first. ``without``: settings that are overridden, and lists that are empty.

    A setting that is not used on the node is in neither.
    """
    for level in LEVELS:
        omitted = {*without, *node.unused}
        rows = [row for row in ROWS if row.level is level and row.gives and row.setting not in omitted]
        lacks = {row.gives: reason for row in rows if (reason := lacking(row, node)) is not None}
        unlisted = {row.gives: row.listed for row in rows if row.listed in without}
        gives = dict.fromkeys(row.gives for row in rows if row.gives not in lacks | unlisted)
        yield LevelEffect(level=level, gives=tuple(gives), lacks=lacks, unlisted=unlisted)


_VALUE: Final = r"""(protect[ \t]*:[ \t]+)['"]?[a-z+~]+['"]?((?:[ \t]+#[^\r\n]*)?[ \t]*)"""
_LINE: Final = re.compile(_VALUE)
_COMMENTED: Final = re.compile(r"#[ \t]?" + _VALUE)
_DOCUMENT: Final = re.compile(r"[^#\s]")
_START: Final = "---"
_BEFORE_COMMENT: Final = 2


def with_level(text: str, level: Protection, line: int = 0) -> str:
    """The text with the level; the caller reads the result again before it is used.

    ``line``: of the setting, as read, from 1; 0: the file does not have it, so the commented line of the example
    becomes the setting, or a new line precedes the first key. Errors: `ValueError` for a setting that is written in
    another form than a line of its own, which only its author can change.
    """
    lines = text.splitlines(keepends=True)
    if line:
        if (match := _LINE.fullmatch(lines[line - 1].rstrip("\r\n"))) is None:
            raise ValueError("protect is not on a line of its own there; change it in an editor")
        lines[line - 1] = _line(match, level, lines[line - 1])
        return "".join(lines)
    for index, row in enumerate(lines):
        if (match := _COMMENTED.fullmatch(row.rstrip("\r\n"))) is not None:
            lines[index] = _line(match, level, row)
            return "".join(lines)
    at = next((index for index, row in enumerate(lines) if _DOCUMENT.match(row)), len(lines))
    # A document's start and a directive are before its keys.
    starts = [index for index, row in enumerate(lines) if row.rstrip() == _START]
    at = starts[0] + 1 if starts else at
    if at and not lines[at - 1].endswith("\n"):
        lines[at - 1] += "\n"
    return "".join([*lines[:at], f"protect: {level.value}\n", *lines[at:]])


def _line(match: re.Match[str], level: Protection, row: str) -> str:
    """With the comment at its column, where the value leaves room for it."""
    head, comment = match.groups()
    end = row[len(row.rstrip("\r\n")) :]
    if not comment.strip():
        return f"{head}{level.value}{end}"
    column = len(match[0]) - len(comment.lstrip())
    blanks = max(column - len(head) - len(level.value), _BEFORE_COMMENT)
    return f"{head}{level.value}{' ' * blanks}{comment.lstrip()}{end}"
