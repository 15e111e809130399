"""Settings of a control plane below those of the files and of ``protect``, above the defaults.

Each value is checked by its own setting's type and bounds. Values that contradict each other, or a file, are found
section by section: all of a section first; if its own check refuses that, one value after the other, twice, so that the
order of two that belong together does not matter. So the work is at most three checks for each value and section, and
no other section is checked again.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from reconciler.config.load import Loaded
from reconciler.config.model import Config
from reconciler.settings.binder import scalar_of
from reconciler.settings.schema import Schema, section_of
from state.printable import printable

_LONGEST: Final = 200
_ROUNDS: Final = 2


class Layer(NamedTuple):
    """``loaded`` with the settings that are taken. ``overridden``, ``refused``: of others, by setting, the reason."""

    loaded: Loaded
    overridden: Mapping[str, str]
    refused: Mapping[str, str]


def layered(loaded: Loaded, values: Mapping[str, tuple[str, str]], top: Schema | None = None) -> Layer:
    """Settings below those of ``loaded``. ``values``: text and origin, by setting. ``top``: as of `load`.

    Errors: none; each value that cannot be taken is named with the reason.
    """
    top = section_of(Config) if top is None else top
    overridden: dict[str, str] = {}
    refused: dict[str, str] = {}
    tree: dict[str, Any] = {}
    for setting, (text, _) in values.items():
        if setting in loaded.preset:
            overridden[setting] = "protect has it"
        elif (at := loaded.origins.get(setting)) is not None:
            overridden[setting] = f"{at} has it"
        else:
            try:
                value = scalar_of(top, setting, text)
            except ValueError as exc:
                refused[setting] = printable(str(exc), _LONGEST)
                continue
            section = tree
            *parts, name = setting.split(".")
            for part in parts:
                section = section.setdefault(part, {})
            section[name] = value
    config = _applied(loaded.config, top, tree, "", refused)
    assert isinstance(config, Config)
    taken = {name: origin for name, (_, origin) in values.items() if name not in overridden and name not in refused}
    return Layer(replace(loaded, config=config, node=taken), overridden, refused)


def _applied(section: Struct, schema: Schema, tree: Mapping[str, Any], path: str, refused: dict[str, str]) -> Struct:
    """The section with the values of ``tree``; those without which it is valid are added to ``refused``."""
    changes: dict[str, object] = {}
    names: dict[str, list[str]] = {}
    for name, value in tree.items():
        field = schema.fields[name]
        inner = f"{path}{name}"
        if isinstance(value, dict):
            before = set(refused)
            changes[field.attribute] = _applied(
                getattr(section, field.attribute), field.schema, value, f"{inner}.", refused
            )
            names[field.attribute] = [
                each for each in _names(value, f"{inner}.") if each not in refused or each in before
            ]
        else:
            changes[field.attribute] = value
            names[field.attribute] = [inner]
    if not changes:
        return section
    try:
        return _with(section, schema, changes)
    except ValueError:
        return _one_by_one(section, schema, changes, names, refused)


def _one_by_one(
    section: Struct,
    schema: Schema,
    changes: Mapping[str, object],
    names: Mapping[str, list[str]],
    refused: dict[str, str],
) -> Struct:
    left = dict(changes)
    reasons: dict[str, str] = {}
    for _ in range(_ROUNDS):
        for name, value in list(left.items()):
            try:
                section = _with(section, schema, {name: value})
            except ValueError as exc:
                reasons[name] = str(exc)
            else:
                del left[name]
    for name in left:
        refused.update(dict.fromkeys(names[name], printable(reasons[name], _LONGEST)))
    return section


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
        raise ValueError(str(exc.__cause__ or exc)) from exc


def _names(tree: Mapping[str, Any], path: str) -> list[str]:
    """The settings below a section."""
    found: list[str] = []
    for name, value in tree.items():
        found += _names(value, f"{path}{name}.") if isinstance(value, dict) else [f"{path}{name}"]
    return found
