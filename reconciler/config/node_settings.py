"""The control plane's settings of this node: as read, as kept over a restart, and as a layer of the configuration.

Everything is bounded: values, their texts, and the row as a whole.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct

from cgroupfs.bounded import decoded
from cgroupfs.errors import InputError
from reconciler.clients.kube_config import NodeSettings
from reconciler.clients.node_settings import SettingsObject
from reconciler.config.imported import DEEPEST, FoundValue, accounted, values_of
from reconciler.config.load import Loaded
from reconciler.config.mapping import (
    JSON_ANNOTATIONS,
    KATALYST,
    NODE_KOORDINATOR,
    NODE_SECTIONS,
    REPORTS,
    Leaf,
    Source,
)
from reconciler.config.node_layer import layered
from reconciler.settings.schema import Schema
from state.printable import printable
from state.reader import read_meta
from state.rows import RowForm
from state.schema import NODE_SETTINGS

SOURCES: Final[Mapping[NodeSettings, Source]] = {
    NodeSettings.KOORDINATOR: NODE_KOORDINATOR,
    NodeSettings.KATALYST: KATALYST,
}
_LONGEST_PATH: Final = 200
_LONGEST_TEXT: Final = 400
_LARGEST_ANNOTATION: Final = 16 << 10
_LARGEST_ROW: Final = 256 << 10
_MOST_OBJECTS: Final = 4
_MOST_LEFT: Final = 100
"""Values that are not taken, in the daemon's report; the others are counted."""


class KeptValue(Struct, frozen=True, array_like=True):
    """One value of an object; as `FoundValue`."""

    path: str
    # The object's and not our setting: a version with another mapping reads it as it would read the object.
    value: str | int | float | bool | None
    off: bool = False


class KeptObject(Struct, frozen=True, kw_only=True):
    """One object."""

    title: str
    values: tuple[KeptValue, ...] = ()  # none: it does not exist
    problems: tuple[str, ...] = ()  # of parts that cannot be read


class KeptSettings(Struct, frozen=True, kw_only=True):
    """The last settings of a node."""

    v: int = 1
    source: NodeSettings
    node: str  # the name of its object; a row of another node (a copied disk) is not used
    objects: tuple[KeptObject, ...] = ()
    version: str = ""  # what an unchanged object has


_FORM: Final = RowForm(KeptSettings, 1)


def encode_kept(kept: KeptSettings) -> bytes:
    """The row. Errors: `InputError` for one that is too large."""
    row = _FORM.encode(kept)
    if len(row) > _LARGEST_ROW:
        raise InputError("the node's settings", f"{len(row)} bytes", f"at most {_LARGEST_ROW}")
    return row


def decode_kept(row: bytes) -> KeptSettings | None:
    """The settings of a row; None where a newer version, or no version of bypassd, has written it. Errors: none."""
    if len(row) > _LARGEST_ROW:
        return None
    try:
        kept = _FORM.decode(row)
    except ValueError:
        return None
    return kept if kept is not None and kept.source in SOURCES and len(kept.objects) <= _MOST_OBJECTS else None


def kept_in(store: str) -> KeptSettings | None:
    """The last settings, of a store that may be in use; None: there are none, or they cannot be read."""
    row = read_meta(store, NODE_SETTINGS)
    return None if row is None else decode_kept(row)


def kept_object(item: SettingsObject) -> KeptObject:
    """The values of an object. Errors: `InputError` for one with too many."""
    problems: list[str] = []
    values = values_of(_decoded(item.content, problems))
    return KeptObject(title=item.title, values=tuple(map(_kept, values)), problems=tuple(problems))


def _decoded(content: Mapping[str, object], problems: list[str]) -> dict[str, object]:
    """With objects in place of their texts, and without reports."""
    result: dict[str, object] = {}
    for key, value in content.items():
        if key in REPORTS:
            continue
        if key not in JSON_ANNOTATIONS or not isinstance(value, str):
            result[key] = value
            continue
        if len(value) > _LARGEST_ANNOTATION:
            problems.append(f"{key}: longer than {_LARGEST_ANNOTATION >> 10} KiB")
            continue
        try:
            result[key] = decoded(msgspec.json.decode, value.encode(), deepest=DEEPEST)
        except ValueError as exc:
            problems.append(f"{key}: not JSON: {printable(str(exc), 100)}")
    return result


def _kept(found: FoundValue) -> KeptValue:
    path, value = printable(found.path, _LONGEST_PATH), found.value
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        value = f"a text of {len(value)} characters"
    return KeptValue(path, value, found.off)


class SettingsInForce(NamedTuple):
    """The configuration with the settings that count."""

    loaded: Loaded
    left: tuple[str, ...] = ()  # each other value with its reason
    total: int = 0  # number of values

    def facts(self) -> dict[str, object]:
        return {
            "values": self.total,
            "taken": dict(self.loaded.node),
            "left": [*self.left[:_MOST_LEFT]],
            "left_count": len(self.left),
        }


def in_force(loaded: Loaded, kept: KeptSettings | None, top: Schema | None = None) -> SettingsInForce:
    """The configuration with what is kept below it. ``top``: as of `load`. Errors: none."""
    if kept is None or loaded.config.apiserver.node_settings is NodeSettings.OFF:
        return SettingsInForce(loaded)
    found = accounted(SOURCES[kept.source], _values(kept.objects))
    taken: dict[str, tuple[str, str]] = {}
    left: list[str] = [f"{item.title}: {problem}" for item in kept.objects for problem in item.problems]
    left += found.left
    for item in found.settings:
        if item.setting.startswith(NODE_SECTIONS):
            # Further values of a setting are equal, see `Imported`.
            taken.setdefault(item.setting, (item.text, item.origin))
        else:
            left.append(f"{item.origin}: {item.setting} is set in a file alone")
    layer = layered(loaded, taken, top)
    for reasons in (layer.overridden, layer.refused):
        left += (f"{taken[name][1]}: {name}: {reason}" for name, reason in reasons.items())
    return SettingsInForce(layer.loaded, tuple(left), sum(len(item.values) for item in kept.objects))


def _values(objects: Sequence[KeptObject]) -> Iterator[FoundValue]:
    for item in objects:
        title = printable(item.title, _LONGEST_PATH)
        for path, value, off in ((each.path, each.value, each.off) for each in item.values):
            leaf: Leaf = value
            yield FoundValue(path, leaf, off, title)
