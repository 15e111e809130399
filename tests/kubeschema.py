"""Checks Kubernetes objects against the schemas in tests/fixtures/kubernetes, as an API server with strict fields does.

Only what those schemas use is understood (`KEYWORDS`; a test holds them to it). ``format`` is not checked.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

SCHEMAS: Final = Path(__file__).parent / "fixtures/kubernetes"
VERSIONS: Final = tuple(sorted(path.stem for path in SCHEMAS.glob("*.json")))
KEYWORDS: Final = frozenset(
    {"type", "properties", "additionalProperties", "required", "items", "$ref", "oneOf", "enum", "format", "$id"}
)
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


@cache
def schemas(version: str) -> Mapping[str, Any]:
    """``kinds`` by ``apiVersion/kind``, and the ``definitions`` that they refer to."""
    result: Mapping[str, Any] = json.loads((SCHEMAS / f"{version}.json").read_text())
    return result


def problems(document: Mapping[str, Any], version: str) -> list[str]:
    """What an API server of this version would refuse; empty: nothing."""
    kinds, definitions = schemas(version)["kinds"], schemas(version)["definitions"]
    name = f"{document['apiVersion']}/{document['kind']}"
    if name not in kinds:
        return [f"no schema for {name}"]
    return list(_check(document, kinds[name], definitions, document["kind"]))


def _check(value: Any, schema: Mapping[str, Any], definitions: Mapping[str, Any], place: str) -> Iterator[str]:
    if "$ref" in schema:
        yield from _check(value, definitions[schema["$ref"]], definitions, place)
        return
    if "oneOf" in schema:
        if sum(not list(_check(value, part, definitions, place)) for part in schema["oneOf"]) != 1:
            yield f"{place}: {value!r} is none of the forms"
        return
    if "type" in schema and not _is(value, schema["type"]):
        yield f"{place}: {value!r} is not {schema['type']}"
        return
    if "enum" in schema and value is not None and value not in schema["enum"]:
        yield f"{place}: {value!r} is not one of {schema['enum']}"
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from _check(item, schema["items"], definitions, f"{place}[{index}]")
    if isinstance(value, dict):
        yield from (f"{place}: no {name}" for name in schema.get("required", ()) if name not in value)
        fields, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        for name, item in value.items():
            if name in fields:
                yield from _check(item, fields[name], definitions, f"{place}.{name}")
            elif isinstance(others, dict):
                yield from _check(item, others, definitions, f"{place}.{name}")
            elif not others or fields:
                yield f"{place}: unknown field {name}"


def _is(value: Any, types: str | list[str]) -> bool:
    names = [types] if isinstance(types, str) else types
    # In Python a bool is an int.
    return any(isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool)) for name in names)
