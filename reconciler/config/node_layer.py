"""Settings of a control plane below those of the files and of ``protect``, above the defaults.

Each value is checked by its own setting's type and bounds, and section by section against the other values and those of
the files. No other section is checked again.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from reconciler.config.load import Loaded
from reconciler.config.model import Config
from reconciler.settings.binder import scalar_of
from reconciler.settings.schema import Schema, nested, section_of
from state.printable import printable

_LONGEST: Final = 200
_ROUNDS: Final = 2
"""Of trying values one by one: in the second, one is taken that was refused before the value that it belongs to."""


class Layer(NamedTuple):
    """A configuration with settings of a control plane."""

    loaded: Loaded  # with the settings that are taken
    overridden: Mapping[str, str]  # of others, by setting, the reason
    refused: Mapping[str, str]  # the same


def layered(loaded: Loaded, values: Mapping[str, tuple[str, str]], top: Schema | None = None) -> Layer:
    """Settings below those of ``loaded``. ``values``: text and origin, by setting. ``top``: as of `load`.

    Errors: none; each value that cannot be taken is named with the reason.
    """
    top = section_of(Config) if top is None else top
    overridden: dict[str, str] = {}
    refused: dict[str, str] = {}
    converted: dict[str, object] = {}
    for setting, (text, _) in values.items():
        if setting in loaded.preset:
            overridden[setting] = "protect has it"
        elif (at := loaded.origins.get(setting)) is not None:
            overridden[setting] = f"{at} has it"
        else:
            try:
                converted[setting] = scalar_of(top, setting, text)
            except ValueError as exc:
                refused[setting] = printable(str(exc), _LONGEST)
    config = _applied(loaded.config, top, nested(converted), "", refused)
    assert isinstance(config, Config)
    taken = {name: origin for name, (_, origin) in values.items() if name not in overridden and name not in refused}
    return Layer(replace(loaded, config=config, node=taken), overridden, refused)


class _ChangedField(NamedTuple):
    """A changed field of a section. ``leaves``: the values in it, by setting, each with its way from the section."""

    value: object
    leaves: Mapping[str, tuple[Sequence[str], object]]


def _applied(section: Struct, schema: Schema, tree: Mapping[str, Any], path: str, refused: dict[str, str]) -> Struct:
    """The section with the values of ``tree``; those without which it is valid are added to ``refused``."""
    parts: dict[str, _ChangedField] = {}
    for name, value in tree.items():
        field = schema.fields[name]
        if isinstance(value, dict):
            before = set(refused)
            inner = _applied(getattr(section, field.attribute), field.schema, value, f"{path}{name}.", refused)
            leaves = {
                f"{path}{'.'.join(way)}": (way, leaf)
                for way, leaf in _leaves({name: value})
                if f"{path}{'.'.join(way)}" not in refused.keys() - before
            }
            parts[field.attribute] = _ChangedField(inner, leaves)
        else:
            parts[field.attribute] = _ChangedField(value, {f"{path}{name}": ((name,), value)})
    if not parts:
        return section
    try:
        # All at once first: mostly they are valid, and this is one check.
        return _with(section, schema, {name: part.value for name, part in parts.items()})
    except ValueError:
        return _one_by_one(section, schema, parts, refused)


def _one_by_one(section: Struct, schema: Schema, parts: Mapping[str, _ChangedField], refused: dict[str, str]) -> Struct:
    left = dict(parts)
    reasons: dict[str, str] = {}
    # With the check of all at once these are at most three checks for each value and section.
    for _ in range(_ROUNDS):
        for name, part in list(left.items()):
            try:
                section = _with(section, schema, {name: part.value})
            except ValueError as exc:
                reasons[name] = str(exc)
            else:
                del left[name]
    for name, part in left.items():
        if isinstance(part.value, Struct):
            section = _value_by_value(section, schema, part.leaves, refused)
        else:
            refused.update(dict.fromkeys(part.leaves, printable(reasons[name], _LONGEST)))
    return section


def _value_by_value(
    section: Struct, schema: Schema, leaves: Mapping[str, tuple[Sequence[str], object]], refused: dict[str, str]
) -> Struct:
    """The section with those values of an inner one that contradict nothing in it."""
    # Separately: a value must not be refused for the mistake of another one in its own section.
    left = dict(leaves)
    reasons: dict[str, str] = {}
    for _ in range(_ROUNDS):
        for name, (way, value) in list(left.items()):
            try:
                section = _with_value(section, schema, way, value)
            except ValueError as exc:
                reasons[name] = printable(str(exc), _LONGEST)
            else:
                del left[name]
    refused.update({name: reasons[name] for name in left})
    return section


def _with_value(section: Struct, schema: Schema, way: Sequence[str], value: object) -> Struct:
    """The section with one value at or below it, every section on the way checked. Errors: `ValueError`."""
    name, *rest = way
    field = schema.fields[name]
    if rest:
        value = _with_value(getattr(section, field.attribute), field.schema, rest, value)
    return _with(section, schema, {field.attribute: value})


def _with(section: Struct, schema: Schema, changes: Mapping[str, object]) -> Struct:
    """The section with these fields, checked. Errors: `ValueError` with the reason of its own check."""
    assert schema.struct is not None
    try:
        fields = {field.name: getattr(section, field.attribute) for field in schema.fields.values()}
        fields |= {
            field.name: changes[field.attribute] for field in schema.fields.values() if field.attribute in changes
        }
        return msgspec.convert(fields, schema.struct)
    except msgspec.ValidationError as exc:
        # The cause is the section's own error; msgspec's adds a path, which is not that of the setting.
        raise ValueError(str(exc.__cause__ or exc)) from exc


def _leaves(tree: Mapping[str, Any], *way: str) -> Iterator[tuple[tuple[str, ...], object]]:
    """The values below a section, each with the way to it."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, *way, name)
        else:
            yield (*way, name), value
