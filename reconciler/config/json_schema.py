"""The configuration's JSON Schema, for editors and for checks before a roll-out; made from the same declarations.

Bounds of numbers with units, rules across settings and rules that need a node are checked by ``bypassd check-config``
alone.

Source: JSON Schema 2020-12; the YAML language server reads it from a ``# yaml-language-server: $schema=`` line.
"""

import re
from typing import Any, Final

from msgspec import json
from msgspec.inspect import BoolType, CustomType, DictType, FloatType, IntType, StrType

from reconciler.config.model import Config
from reconciler.settings.schema import FieldSchema, ListType, Schema, section_of
from reconciler.settings.units import Unit

DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"
_BARE: Final = {"number": "1", "boolean": "true"}
"""JSON types of bare words of YAML, each with one such word."""
_CPU_LIST: Final = r"^\s*([0-9]+(-[0-9]+)?(\s*,\s*[0-9]+(-[0-9]+)?)*)?\s*$"


def json_schema() -> dict[str, Any]:
    """The schema as plain values, ready for JSON. Sections are in ``$defs`` by the name of their struct."""
    definitions: dict[str, Any] = {}
    root = _of(section_of(Config), definitions)
    return {
        "$schema": DRAFT,
        "title": "Configuration of bypassd",
        **root,
        "$defs": {name: definitions[name] for name in sorted(definitions)},
    }


def _of(schema: Schema, definitions: dict[str, Any]) -> dict[str, Any]:
    """A value, null aside. ``definitions`` gets the sections below it."""
    if schema.struct is not None:
        # A section of which nothing is written is its defaults.
        return {"anyOf": [{"$ref": f"#/$defs/{_definition(schema, definitions)}"}, {"type": "null"}]}
    match schema.kind:
        case DictType():
            return {"type": "object", "additionalProperties": _item(schema.item, definitions)}
        case BoolType():
            # What YAML 1.1 also writes; an editor of YAML 1.2 takes these for text.
            return {"enum": [True, False, "yes", "no", "on", "off"]}
        case IntType() | FloatType():
            return _number(schema)
        case CustomType():
            return {"anyOf": [{"type": "string", "pattern": _CPU_LIST}, {"type": "integer", "minimum": 0}]}
        case StrType() as kind:
            return _text(kind, path=schema.path)
        case _ if schema.choices:
            return _choice(schema.choices)
        case kind:
            assert isinstance(kind, ListType)
            longest = {} if kind.max_length is None else {"maxItems": kind.max_length}
            return {"type": "array", "items": _item(schema.item, definitions), **longest}


def _definition(schema: Schema, definitions: dict[str, Any]) -> str:
    assert schema.struct is not None
    name = schema.struct.__name__
    if name not in definitions:
        fields = schema.fields
        definitions[name] = made = {"type": "object", "description": schema.summary, "additionalProperties": False}
        made["properties"] = {key: _field(field, definitions) for key, field in fields.items()}
        if required := [key for key, field in fields.items() if field.required]:
            made["required"] = required
    return name


def _item(schema: Schema, definitions: dict[str, Any]) -> dict[str, Any]:
    made = _of(schema, definitions)
    return {"anyOf": [made, {"type": "null"}]} if schema.optional and schema.struct is None else made


def _field(field: FieldSchema, definitions: dict[str, Any]) -> dict[str, Any]:
    made = _item(field.schema, definitions)
    if field.schema.many:
        made = {"anyOf": [made, {"type": "null"}]}
    restart = "A change needs a restart." if field.restart else ""
    if text := ". ".join(filter(None, (field.description, restart))):
        made = {"description": text, **made}
    if not field.required and field.schema.struct is None:
        # A CPU list is text.
        made["default"] = json.decode(json.encode(field.default, enc_hook=str, order="deterministic"))
    return made


def _choice(choices: tuple[str, ...]) -> dict[str, Any]:
    # An editor of YAML 1.1 takes "on" and "off" for true and false.
    switches = {"on": True, "off": False}
    return {"enum": [*choices, *(switches[choice] for choice in choices if choice in switches)]}


def _text(kind: StrType, *, path: bool) -> dict[str, Any]:
    pattern = "^/" if path else kind.pattern
    bounds = {"minLength": kind.min_length, "maxLength": kind.max_length, "pattern": pattern}
    strict = {key: value for key, value in bounds.items() if value is not None}
    # What an editor takes for a number or a truth value is text as well, where the bounds allow such a text.
    kinds = ["string", *(name for name, text in _BARE.items() if re.search(pattern or "", text))]
    return {"type": kinds if len(kinds) > 1 else "string", **strict}


def _number(schema: Schema) -> dict[str, Any]:
    bounds = {"exclusiveMinimum" if schema.above else "minimum": schema.low, "maximum": schema.high}
    number: dict[str, Any] = {"type": "integer" if schema.whole else "number"}
    number |= {key: value for key, value in bounds.items() if value is not None}
    if schema.unit is None or not schema.unit.factors:
        return number
    # With a unit it is a string in YAML.
    return {"anyOf": [number, {"type": "string", "pattern": _unit_pattern(schema.unit)}]}


def _unit_pattern(unit: Unit) -> str:
    return rf"^[+-]?[0-9]+(\.[0-9]+)? ?({'|'.join(map(re.escape, unit.factors))})?$"
