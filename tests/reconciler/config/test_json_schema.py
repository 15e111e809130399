"""The JSON Schema has every setting, and accepts what the reader accepts."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from msgspec.inspect import DictType

from reconciler.cli.main import main
from reconciler.config.docs import CLASSES_EXAMPLE
from reconciler.config.json_schema import json_schema
from reconciler.config.model import Config
from reconciler.settings.binder import ConfigError, Text, bind
from reconciler.settings.schema import ListType, Schema, section_of

PROJECT = Path(__file__).parents[3]
SCHEMA = json_schema()
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
}
KNOWN = {
    *("$schema", "$defs", "$ref", "title", "description", "default", "type", "enum", "anyOf", "required"),
    *("properties", "additionalProperties", "items", "maxItems", "minimum", "exclusiveMinimum", "maximum"),
    *("pattern", "minLength", "maxLength"),
}


def conforms(value: object, schema: Mapping[str, Any]) -> bool:
    """Whether a value conforms; for the keywords that our schema has."""
    assert set(schema) <= KNOWN
    if "$ref" in schema and not conforms(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")]):
        return False
    if "anyOf" in schema and not any(conforms(value, part) for part in schema["anyOf"]):
        return False
    if "enum" in schema and not any(type(value) is type(entry) and value == entry for entry in schema["enum"]):
        return False
    kinds = schema.get("type", list(TYPES))
    names = [kinds] if isinstance(kinds, str) else kinds
    if not any(
        isinstance(value, TYPES[name]) and (name == "boolean" or (value is not True and value is not False))
        for name in names
    ):
        return False
    match value:
        case dict():
            inner, extra = schema.get("properties", {}), schema.get("additionalProperties", True)
            parts = [(entry, inner.get(key, extra)) for key, entry in value.items()]
            return set(schema.get("required", ())) <= set(value) and all(
                part if isinstance(part, bool) else conforms(entry, part) for entry, part in parts
            )
        case list():
            return bool(len(value) <= schema.get("maxItems", len(value))) and all(
                conforms(entry, schema.get("items", {})) for entry in value
            )
        case str():
            fits = re.search(schema.get("pattern", ""), value) is not None
            return fits and bool(schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)))
        case int() | float():
            above = bool(value > schema.get("exclusiveMinimum", value - 1))
            return above and bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
        case _:
            return True


def keys(schema: Schema, *path: str) -> Iterator[tuple[str, ...]]:
    """Every key of the model, with the marks of lists and maps."""
    for name, field in schema.fields.items():
        yield (*path, name)
        yield from keys(field.schema, *path, name)
    if isinstance(schema.kind, (ListType, DictType)):
        yield from keys(schema.item, *path, "[]" if isinstance(schema.kind, ListType) else "NAME")


def schema_keys(schema: Mapping[str, Any], *path: str) -> Iterator[tuple[str, ...]]:
    """Every key of the JSON Schema, in the same form."""
    if "$ref" in schema:
        yield from schema_keys(SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")], *path)
    for part in schema.get("anyOf", ()):
        yield from schema_keys(part, *path)
    for name, part in schema.get("properties", {}).items():
        yield (*path, name)
        yield from schema_keys(part, *path, name)
    if isinstance(schema.get("additionalProperties"), dict):
        yield from schema_keys(schema["additionalProperties"], *path, "NAME")
    if "items" in schema:
        yield from schema_keys(schema["items"], *path, "[]")


def configurations() -> Iterator[tuple[str, str]]:
    """Every configuration that we ship or print: the example, and each block of the documents.

    Not those with a plugin of a site's own, which must be installed to be read, and not contributing.md: its blocks set
    what its examples add, which exists in a copy of the tree only (tests/test_contributing.py).
    """
    yield "deploy/config.yaml", (PROJECT / "deploy/config.yaml").read_text()
    yield "classes example", CLASSES_EXAMPLE
    sections = "|".join(name for name, field in section_of(Config).fields.items() if field.schema.struct is not None)
    for path in (PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))):
        if path.name == "contributing.md":
            continue
        text = path.read_text()
        fenced = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        indented = [
            re.sub(r"^    ", "", block, flags=re.MULTILINE)
            for block in re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
        ]
        for number, block in enumerate((*fenced, *indented)):
            if re.match(rf"({sections}):\s*(\n|\{{)", block) and "site_rules" not in block:
                yield f"{path.name} {number}", block


CONFIGURATIONS = dict(configurations())


def test_every_key_of_the_model_is_in_the_schema_and_no_other() -> None:
    model, schema = set(keys(section_of(Config))), set(schema_keys(SCHEMA))
    assert len(model) > 600
    assert schema == model


def test_each_struct_has_a_definition_of_its_own_and_each_setting_a_text() -> None:
    for name, definition in SCHEMA["$defs"].items():
        assert definition["description"], name
        assert definition["additionalProperties"] is False
        for key, part in definition["properties"].items():
            assert "default" in part or key in definition.get("required", ()) or "$ref" in json.dumps(part), (name, key)
    resync = SCHEMA["$defs"]["NodeSection"]["properties"]["resync_s"]
    assert resync["default"] == 30.0
    assert resync["description"].endswith("A change needs a restart.")
    assert [part.get("minimum") for part in resync["anyOf"]] == [1, None]


def test_the_documents_have_configurations() -> None:
    assert len(CONFIGURATIONS) >= 8


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_shipped_configuration_conforms_and_is_read(name: str) -> None:
    assert conforms(yaml.safe_load(CONFIGURATIONS[name]), SCHEMA)
    bind(Config, [Text(name, CONFIGURATIONS[name])])


def test_the_defaults_conform() -> None:
    assert conforms(msgspec.json.decode(msgspec.json.encode(Config(), enc_hook=str)), SCHEMA)


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("mode: enforce", True),
        ("mode: enforse", False),
        ("mod: enforce", False),
        ("node: {resync_s: 10s}", True),
        ("node: {resync_s: 1.5 m}", True),
        ("node: {resync_s: 10}", True),
        ("node: {resync_s: 0}", False),
        ("node: {resync_s: 10parsecs}", False),
        ("node: {resync_s: [10]}", False),
        ("node:", True),
        ("node: 5", False),
        ("kubelet: {endpoint: off}", True),
        ("kubelet: {endpoint: on}", False),
        ("kubelet: {http_port: 3, https_port: null}", True),
        ("node: {resync_s: null}", False),
        ("http: {port: 70000}", False),
        ("http: {pod_metrics: yes}", True),
        ("http: {pod_metrics: 1}", False),
        ("store: {path: state.db}", False),
        ("classes: {overrides: [{class: shared, uid: 7}]}", True),
        ("classes: {overrides: [{uid: a}]}", False),
        ("classes: {overrides: }", True),
        ("eviction: {classes: [reclaimed, online]}", False),
        ("policies: {reserve: {cpus: 0}}", True),
        ("policies: {reserve: {cpus: true}}", False),
        ("policies: {exclusive: {avoid_irqs: [1]}}", True),
        ("policies: {disk: {devices: [{name: 253}]}}", True),
        ("http: {reader_group: on}", True),
        ("http: {reader_group: 4711}", True),
        ("http: {reader_group: 9_to_5}", False),
        ("runtime: {state_dir: 1}", False),
    ],
)
def test_it_accepts_what_the_reader_accepts(text: str, good: bool) -> None:
    try:
        bind(Config, [Text("f", text)])
        read = True
    except ConfigError:
        read = False
    assert (conforms(yaml.safe_load(text), SCHEMA), read) == (good, good)


def test_the_command_writes_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
    assert main(["config", "schema", "node"]) == 2
