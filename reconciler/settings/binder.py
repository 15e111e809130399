"""Binds YAML texts to a frozen struct: every problem at once, each with its place; later texts win per setting.

Each text is checked on its own first, so that a mistake in the first file is told although a later one overrides it.
Then the checked values are merged and the structs built, which runs their own checks (``__post_init__``).
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final, Generic, NamedTuple, TypeVar, final

import msgspec
from msgspec import Struct

from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import AgentError
from reconciler.settings import units, yaml_tree
from reconciler.settings.schema import (
    FieldSchema,
    ListSchema,
    MapSchema,
    ScalarKind,
    ScalarSchema,
    Schema,
    StructSchema,
    section_of,
)
from reconciler.settings.yaml_tree import ConfigProblem, Node, Scalar, SourceLocation

T = TypeVar("T", bound=Struct)

_PLAIN: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# YAML 1.1's words, as people who write Kubernetes manifests know them. Everything else is refused, never guessed.
_BOOLS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class Text(NamedTuple):
    """One configuration file's name and content."""

    name: str
    content: str


class ConfigError(AgentError):
    """The configuration cannot be used. ``problems`` holds all of them in file order; the text has one a line."""

    def __init__(self, problems: Iterable[ConfigProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


class BoundConfig(Struct, Generic[T], frozen=True, kw_only=True):
    """A struct, and where each setting that is not a default was written (dotted name, or ``list[index]`` -> place)."""

    value: T
    origins: Mapping[str, SourceLocation]


class _Checked(NamedTuple):
    """A checked value and its place.

    A section's or table's value is a dict of these, a list's a list of them with None for a refused item.
    """

    value: object
    at: SourceLocation


def bind(model: type[T], texts: Iterable[Text]) -> BoundConfig[T]:
    """Read all ``texts`` into one ``model``.

    Errors: `ConfigError` with every problem of every text.
    """
    section = section_of(model)
    binder = _Binder()
    merged = _Checked({}, SourceLocation("", 1, 1))
    order: dict[str, int] = {}
    for text in texts:
        order[text.name] = len(order)
        tree = yaml_tree.parse_tree(text.name, text.content, binder.problems)
        given = binder.check(tree, section, "") if tree is not None else None
        if given is not None:
            merged = _merge(merged, given)
    value = binder.make(merged, section, "")
    if binder.problems:
        problems = sorted(binder.problems, key=lambda one: (order.get(one.place.file, -1), one.place))
        raise ConfigError(problems)
    origins: dict[str, SourceLocation] = {}
    _flatten(merged, "", origins)
    assert isinstance(value, model)
    return BoundConfig(value=value, origins=origins)


def _merge(under: _Checked, over: _Checked) -> _Checked:
    if isinstance(under.value, dict) and isinstance(over.value, dict):
        both = dict(under.value)
        for name, given in over.value.items():
            both[name] = _merge(both[name], given) if name in both else given
        return _Checked(both, over.at)
    return over


def _flatten(given: _Checked, path: str, origins: dict[str, SourceLocation]) -> None:
    if isinstance(given.value, dict):
        for name, inner in given.value.items():
            _flatten(inner, f"{path}.{name}" if path else name, origins)
        return
    origins[path] = given.at
    if isinstance(given.value, list):
        for index, item in enumerate(given.value):
            if item is not None:
                origins[f"{path}[{index}]"] = item.at


@final
class _Binder:
    """Collects problems while nodes become values."""

    def __init__(self) -> None:
        self.problems: list[ConfigProblem] = []
        # Settings without a usable value. An unknown key is a problem, but takes nothing from its section.
        self._lost: list[str] = []

    def _bad(self, at: SourceLocation, path: str, message: str) -> None:
        self.problems.append(ConfigProblem(at, path, message))
        self._lost.append(path)

    def check(self, node: Node, schema: Schema, path: str, *, secret: bool = False) -> _Checked | None:
        """A node as a value of ``schema``; None (and a problem) where it is not one. A ``secret`` one is not shown."""
        null = isinstance(node, Scalar) and node.null
        if isinstance(schema, StructSchema):
            # All keys of a section commented out leave "kubelet:" with nothing: the defaults, not a mistake.
            return _Checked({}, node.at) if null else self._section(node, schema, path, secret)
        if null and schema.optional:
            return _Checked(None, node.at)
        if isinstance(schema, MapSchema):
            return self._table(node, schema, path, secret)
        if isinstance(schema, ListSchema):
            return self._rows(node, schema, path, secret)
        return self._leaf(node, schema, path, secret)

    def _section(self, node: Node, schema: StructSchema, path: str, secret: bool) -> _Checked | None:
        if not isinstance(node, yaml_tree.Mapping):
            self._bad(node.at, path, f"expected a section with keys; got {_shown(node, secret)}")
            return None
        found: dict[str, _Checked] = {}
        for key, child in node.items.items():
            field = schema.fields.get(key)
            said = _redacted_key(key, secret)
            name = f"{path}.{said}" if path else said
            if field is None:
                self.problems.append(ConfigProblem(node.places[key], name, _unknown(said, schema.fields)))
                continue
            given = self.check(child, field.schema, name, secret=field.secret)
            if given is not None:
                found[key] = given
        return _Checked(found, node.at)

    def _table(self, node: Node, schema: MapSchema, path: str, secret: bool) -> _Checked | None:
        if not isinstance(node, yaml_tree.Mapping):
            self._bad(node.at, path, f"expected keys with values; got {_shown(node, secret)}")
            return None
        item = schema.item
        checked = {
            key: self.check(child, item, f"{path}.{_redacted_key(key, secret)}", secret=secret)
            for key, child in node.items.items()
        }
        return _Checked({key: given for key, given in checked.items() if given is not None}, node.at)

    def _rows(self, node: Node, schema: ListSchema, path: str, secret: bool) -> _Checked | None:
        if not isinstance(node, yaml_tree.Sequence):
            hint = ""
            if isinstance(node, Scalar) and node.text and not node.null:
                hint = "; write [ ] around it" if secret else f"; write [{node.text}]"
            self._bad(node.at, path, f"expected a list; got {_shown(node, secret)}{hint}")
            return None
        checked = [
            self.check(child, schema.item, f"{path}[{index}]", secret=secret) for index, child in enumerate(node.items)
        ]
        return _Checked(checked, node.at)

    def _leaf(self, node: Node, leaf: ScalarSchema, path: str, secret: bool) -> _Checked | None:
        if not isinstance(node, Scalar) or (node.null and leaf.kind is not ScalarKind.CHOICE):
            hint = "; leave the key out for the default" if isinstance(node, Scalar) else ""
            self._bad(node.at, path, f"expected {leaf.describe}; got {_shown(node, secret)}{hint}")
            return None
        try:
            value = _value(node, leaf, _shown(node, secret))
        except ValueError as exc:
            self._bad(node.at, path, str(exc))
            return None
        return _Checked(value, node.at)

    def make(self, given: _Checked, schema: Schema, path: str, *, secret: bool = False) -> object:
        """The finished value; None (and a problem) where a struct's own check refuses it. ``secret``: as in `check`."""
        if isinstance(schema, ScalarSchema) or given.value is None:
            return given.value
        if isinstance(schema, ListSchema):
            assert isinstance(given.value, list)
            items = [(at, one) for at, one in enumerate(given.value) if one is not None]
            return schema.make([self.make(one, schema.item, f"{path}[{at}]", secret=secret) for at, one in items])
        assert isinstance(given.value, dict)
        if isinstance(schema, MapSchema):
            item = schema.item
            return {
                key: self.make(one, item, f"{path}.{_redacted_key(key, secret)}", secret=secret)
                for key, one in given.value.items()
            }
        values: dict[str, object] = {}
        for key, field in schema.fields.items():
            name = f"{path}.{key}" if path else key
            if key in given.value:
                values[field.attribute] = self.make(given.value[key], field.schema, name, secret=field.secret)
            elif field.required and not self._refused(name):
                self._bad(given.at, path, f"missing key {key!r}{_hint(field)}")
        if self._refused(path):
            # Its own check would complain about what is missing only because it has been refused.
            return None
        try:
            return schema.make(**values)
        except ValueError as exc:
            self._bad(given.at, path, str(exc))
            return None

    def _refused(self, path: str) -> bool:
        """Whether something at ``path`` or below it has no usable value."""
        inside = (f"{path}.", f"{path}[")
        return any(not path or lost == path or lost.startswith(inside) for lost in self._lost)


def _hint(field: FieldSchema) -> str:
    return f" ({field.description})" if field.description else ""


def _shown(node: Node, secret: bool) -> str:
    """What stands there, for a message; of what may be a secret only the length."""
    if secret and isinstance(node, Scalar) and not node.null:
        return f"a text of {len(node.text)} characters"
    return node.shown


def _redacted_key(key: str, secret: bool) -> str:
    """A key, for a message. Where secrets belong, one that is no plain name may be a misplaced secret."""
    return key if not secret or _PLAIN.fullmatch(key) else f"({len(key)} characters)"


def _value(node: Scalar, leaf: ScalarSchema, shown: str) -> object:
    """A scalar in the leaf's type. Errors: `ValueError` with the whole message, which has ``shown`` for the value."""
    match leaf.kind:
        case ScalarKind.TEXT:
            value: object = node.text
        case ScalarKind.PATH:
            if not node.text.startswith("/") or "\0" in node.text:
                raise ValueError(f"expected {leaf.describe}; got {shown}")
            value = node.text
        case ScalarKind.BOOL:
            value = None if node.quoted else _BOOLS.get(node.text.lower())
            if value is None:
                raise ValueError(f"expected {leaf.describe}; got {shown}")
        case ScalarKind.CHOICE:
            if node.text not in leaf.choices:
                raise ValueError(f"expected {leaf.describe}; got {shown}{_suggestion(node.text, leaf.choices)}")
            value = node.text
        case ScalarKind.CPUS:
            try:
                return CpuSet.parse(node.text)
            except ValueError as exc:
                raise ValueError(f"expected {leaf.describe}; {exc}") from exc
        case ScalarKind.INT | ScalarKind.FLOAT:
            number = units.parse_number(node.text, leaf.unit, whole=leaf.whole)
            _within(number, leaf, shown)
            # Checked in full here: msgspec takes no bounds on "a number or null".
            return int(number) if leaf.kind is ScalarKind.INT else float(number)
    try:
        return msgspec.convert(value, type=leaf.annotation)
    except msgspec.ValidationError as exc:
        raise ValueError(f"{str(exc)[:1].lower()}{str(exc)[1:]}; got {shown}") from exc


def _within(number: float, leaf: ScalarSchema, shown: str) -> None:
    low = leaf.low is None or (number > leaf.low if leaf.above else number >= leaf.low)
    if not low or (leaf.high is not None and number > leaf.high):
        raise ValueError(f"out of bounds: expected {leaf.bounds}; got {shown}")


def _unknown(key: str, fields: Mapping[str, FieldSchema]) -> str:
    if not fields:
        return f"unknown key {key!r}; nothing can be set here"
    return f"unknown key {key!r}{_suggestion(key, fields) or '; known here: ' + ', '.join(fields)}"


def _suggestion(word: str, known: Iterable[str]) -> str:
    # Imported at the first mistake: a start without one needs not pay for it.
    from difflib import get_close_matches

    choices = {name.lower(): name for name in known}
    close = get_close_matches(word.lower().replace("-", "_"), choices, n=1)
    return f"; did you mean {choices[close[0]]!r}?" if close else ""
