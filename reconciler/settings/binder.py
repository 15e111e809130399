"""Decodes YAML texts into a frozen struct through msgspec: every problem at once, each with its place.

Each text is checked, the checked values are merged (later texts win, setting by setting), and each section is
converted by msgspec. No message shows a secret.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Annotated, Final, Generic, NamedTuple, TypeVar, final

import msgspec
from msgspec import Meta, Struct
from msgspec.inspect import (
    BoolType,
    CustomType,
    DictType,
    FloatType,
    FrozenSetType,
    IntType,
    StrType,
    VarTupleType,
)

from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import AgentError, InputError
from reconciler.runtime import lazy
from reconciler.settings import nodes, units
from reconciler.settings.nodes import BOOLS, ConfigProblem, Node, Scalar, SourceLocation
from reconciler.settings.schema import FieldSchema, ListType, Schema, list_of, section_of
from reconciler.settings.yaml import MAX_BYTES, parse_tree

T = TypeVar("T", bound=Struct)

_PLAIN: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_SHOWN: Final = 64
_MAX_MESSAGE: Final = 500


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
    """A struct, and the place of each setting that is written (dotted name, or ``list[index]``).

    ``problems``: of the entries that `bind_usable` left out.
    """

    value: T
    origins: Mapping[str, SourceLocation]
    problems: tuple[ConfigProblem, ...] = ()


class _Checked(NamedTuple):
    """A checked value and its place.

    A section's or map's value is a dict of these, a list's a list of them with None for a refused item.
    """

    value: object
    at: SourceLocation


def bind(model: type[T], texts: Iterable[Text]) -> BoundConfig[T]:
    """Read all ``texts`` into one ``model``. Errors: `ConfigError` with every problem of every text."""
    layers = TextLayers(model, texts)
    bound = layers.bind()
    if bound is None:
        raise ConfigError(layers.problems())
    return bound


Path = tuple[str | int, ...]
"""A place in checked texts: names of sections and settings, and indexes of lists."""


@final
class TextLayers(Generic[T]):
    """Texts that are read once, and the values of ``model`` that are made of them.

    ``prune``: gets each text's tree and returns the tree to read, such as one without the keys of older versions.
    ``section``: the schema of ``model``, if the caller has it. All that is bound adds its problems to `problems`.
    """

    def __init__(
        self,
        model: type[T],
        texts: Iterable[Text],
        *,
        prune: Callable[[Node], Node] | None = None,
        section: Schema | None = None,
    ) -> None:
        self._model = model
        self._section = section_of(model) if section is None else section
        self._order: dict[str, int] = {}
        self._binder = _Binder(prune)
        self._merged = _Checked({}, SourceLocation("", 1, 1))
        self._under: dict[Text, _Checked | None] = {}
        self._problems: dict[ConfigProblem, None] = {}
        # Each separately: a mistake in the first file is reported although a later one overrides it.
        for text in texts:
            self._order[text.name] = len(self._order)
            checked = self._binder.read(text, self._section)
            if checked is not None:
                self._merged = _merge(self._merged, checked)
        self._problems.update(dict.fromkeys(self._binder.problems))

    def problems(self) -> list[ConfigProblem]:
        return sorted(self._problems, key=lambda problem: (self._order.get(problem.place.file, -1), problem.place))

    def count(self, name: str) -> int:
        """How many entries a list at the top level has."""
        found = _inside(self._merged, (name,))
        return len(found.value) if found is not None and isinstance(found.value, list) else 0

    def place(self, path: Path) -> SourceLocation | None:
        """Where this is written; None: nowhere, or not in a usable form."""
        found = _inside(self._merged, path)
        return None if found is None else found.at

    def value(self, path: Path) -> object:
        """A single value that is written there; None: none, or none that is usable."""
        found = _inside(self._merged, path)
        return None if found is None else found.value

    def origins(self, path: Path, name: str) -> dict[str, SourceLocation]:
        """The place of each setting written at ``path``, by the names that these have at ``name``."""
        found = _inside(self._merged, path)
        return {} if found is None or found.value is None else _origins(found, name)

    def refuse(self, problem: ConfigProblem) -> None:
        self._problems[problem] = None

    def bind(
        self,
        below: Callable[[Mapping[str, object]], Text | None] | None = None,
        moved: Mapping[Path, str] | None = None,
        without: str = "",
        note: str = "",
    ) -> BoundConfig[T] | None:
        """One value of the model; None where any text has a problem.

        ``below``: from the single values at the top level, a text whose settings apply where the texts have none.
        ``moved``: what is written at a path is written at this dotted name, too, above all texts. ``without``: of the
        settings at the top level one that keeps its default. ``note`` is at the end of each problem that no earlier
        value had.
        """
        binder = self._binder.fresh()
        merged = self._merged
        assert isinstance(merged.value, dict)
        for path, name in (moved or {}).items():
            found = _inside(merged, path)
            if found is not None and found.value is not None:
                for part in reversed(name.split(".")):
                    found = _Checked({part: found}, found.at)
                merged = _merge(merged, found)
        assert isinstance(merged.value, dict)
        if without in merged.value:
            merged = _Checked({name: given for name, given in merged.value.items() if name != without}, merged.at)
        assert isinstance(merged.value, dict)
        if below is not None:
            plain = {name for name, field in self._section.fields.items() if field.schema.scalar}
            under = below({name: given.value for name, given in merged.value.items() if name in plain})
            if under is not None:
                # Several windows may have the same level: its text is read once.
                if under not in self._under:
                    self._under[under] = binder.read(under, self._section)
                if (checked := self._under[under]) is not None:
                    merged = _merge(checked, merged)
        value = binder.make(merged, self._section, "")
        # What the files alone have is not reported again for each window.
        known = {(of, problem.message) for problem in self._problems for of in (problem.path, problem.place)}
        for problem in binder.problems:
            if known.isdisjoint({(problem.path, problem.message), (problem.place, problem.message)}):
                self.refuse(problem._replace(message=f"{problem.message}{note}"))
        if self._problems:
            return None
        assert isinstance(value, self._model)
        return BoundConfig(value=value, origins=_origins(merged))


def bind_usable(model: type[T], text: Text, *, largest: int = MAX_BYTES) -> BoundConfig[T]:
    """Read one text into ``model``, without unknown keys and without the list entries that have a problem.

    ``origins`` count the entries that are left. ``largest`` is in characters.
    Errors: `ConfigError` with every problem where one is not inside a list's entry.
    """
    section = section_of(model)
    binder = _Binder()
    checked = binder.read(text, section, largest=largest)
    if checked is not None:
        binder.make(checked, section, "")
    problems = sorted(binder.problems, key=lambda problem: problem.place)
    kept = None if checked is None else binder.usable(checked)
    if kept is None:
        raise ConfigError(problems)
    value = _Binder().make(kept, section, "")
    assert isinstance(value, model)
    return BoundConfig(value=value, origins=_origins(kept), problems=tuple(problems))


def bind_list(
    item: type[T], text: Text, *, largest: int = MAX_BYTES
) -> tuple[tuple[T, ...], Mapping[str, SourceLocation]]:
    """Read a text that is a list of ``item``: the entries, and the place of each as in `BoundConfig`.

    ``largest`` is in characters. Errors: `ConfigError` with every problem.
    """
    schema = list_of(item)
    binder = _Binder()
    checked = binder.read(text, schema, largest=largest)
    value = () if checked is None else binder.make(checked, schema, "")
    if checked is None or binder.problems:
        raise ConfigError(sorted(binder.problems, key=lambda problem: problem.place))
    assert isinstance(value, tuple)
    return value, _origins(checked)


def scalar_of(section: Schema, setting: str, text: str) -> object:
    """The value of a setting (dotted name below ``section``) from a text, which is read like a file's plain scalar.

    Errors: `ValueError` with the whole message: its type or bounds refuse it, or it is not a single value.
    """
    schema = section
    for name in setting.split("."):
        if name not in schema.fields:
            raise ValueError("no such setting")
        schema = schema.fields[name].schema
    node = Scalar(SourceLocation(""), text, quoted=False)
    if not schema.scalar:
        raise ValueError("not a single value")
    return _value(node, schema, node.shown)


def _inside(checked: _Checked, path: Path) -> _Checked | None:
    """What is at a path; None: nothing, or nothing usable."""
    at: _Checked | None = checked
    for part in path:
        inner = at.value if at is not None else None
        if isinstance(inner, dict):
            at = inner.get(part)
        elif isinstance(inner, list) and isinstance(part, int) and part < len(inner):
            at = inner[part]
        else:
            return None
    return at


def _merge(under: _Checked, over: _Checked) -> _Checked:
    if isinstance(under.value, dict) and isinstance(over.value, dict):
        both = dict(under.value)
        for name, checked in over.value.items():
            both[name] = _merge(both[name], checked) if name in both else checked
        return _Checked(both, over.at)
    return over


def _origins(checked: _Checked, path: str = "") -> dict[str, SourceLocation]:
    origins: dict[str, SourceLocation] = {}
    if isinstance(checked.value, dict):
        for name, inner in checked.value.items():
            origins |= _origins(inner, f"{path}.{name}" if path else name)
        return origins
    origins[path] = checked.at
    if isinstance(checked.value, list):
        origins |= {f"{path}[{index}]": item.at for index, item in enumerate(checked.value) if item is not None}
    return origins


@final
class _Binder:
    """Collects problems while nodes become values."""

    def __init__(self, prune: Callable[[Node], Node] | None = None) -> None:
        self._prune = prune
        self.problems: list[ConfigProblem] = []
        self._refused: set[str] = set()
        """Settings without a usable value, and all above them ("": the whole); without unknown keys."""
        self._lost = False
        """Whether one of them is not within an entry of a list."""

    def fresh(self) -> "_Binder":
        """One with the same settings refused, and no problems yet."""
        binder = _Binder(self._prune)
        binder._lost, binder._refused = self._lost, set(self._refused)
        return binder

    def read(self, text: Text, schema: Schema, *, largest: int = MAX_BYTES) -> _Checked | None:
        """One text, checked; None (and a problem) where nothing of it is usable."""
        tree = parse_tree(text.name, text.content, self.problems, largest=largest)
        if tree is None:
            return None
        if schema.struct is not None and not isinstance(tree, nodes.Mapping):
            self.problems.append(ConfigProblem(tree.at, "", f"expected settings as 'key: value'; got {tree.shown}"))
            return None
        return self.check(tree if self._prune is None else self._prune(tree), schema, "")

    def check(self, node: Node, schema: Schema, path: str, *, secret: bool = False) -> _Checked | None:
        """A node as a value of ``schema``; None (and a problem) where it is not one. A ``secret`` one is not shown."""
        null = isinstance(node, Scalar) and node.null
        if schema.struct is not None:
            # All keys of a section commented out leave "kubelet:" with nothing: the defaults, not a mistake.
            return _Checked({}, node.at) if null else self._section(node, schema, path, secret)
        if null and schema.optional:
            return _Checked(None, node.at)
        match schema.kind:
            case DictType():
                return self._map(node, schema, path, secret)
            case VarTupleType() | FrozenSetType():
                return self._list(node, schema, path, secret)
            case _:
                return self._scalar(node, schema, path, secret)

    def _section(self, node: Node, schema: Schema, path: str, secret: bool) -> _Checked | None:
        if not isinstance(node, nodes.Mapping):
            self._bad(node.at, path, f"expected a section with keys; got {_shown(node, secret)}")
            return None
        values: dict[str, _Checked] = {}
        fields = schema.fields
        for key, child in node.items.items():
            field = fields.get(key)
            shown_key = _redacted_key(key, secret)
            name = f"{path}.{shown_key}" if path else shown_key
            if field is None:
                # Not `_bad`: the rest of the section is usable.
                self.problems.append(ConfigProblem(node.places[key], name, _unknown(shown_key, fields)))
                continue
            if isinstance(child, Scalar) and child.null and not child.text and field.schema.many:
                continue  # "overrides:" with all its entries commented out, as a section of which nothing is written
            checked = self.check(child, field.schema, name, secret=field.secret)
            if checked is not None:
                values[key] = checked
        return _Checked(values, node.at)

    def _map(self, node: Node, schema: Schema, path: str, secret: bool) -> _Checked | None:
        if not isinstance(node, nodes.Mapping):
            self._bad(node.at, path, f"expected keys with values; got {_shown(node, secret)}")
            return None
        if not node.items:
            return _Checked({}, node.at)
        item = schema.item
        checked = {
            key: self.check(child, item, f"{path}.{_redacted_key(key, secret)}", secret=secret)
            for key, child in node.items.items()
        }
        return _Checked({key: value for key, value in checked.items() if value is not None}, node.at)

    def _list(self, node: Node, schema: Schema, path: str, secret: bool) -> _Checked | None:
        if not isinstance(node, nodes.Sequence):
            hint = ""
            if isinstance(node, Scalar) and node.text and not node.null:
                hint = f"; write [{node.text}]" if not secret and len(node.text) <= 40 else "; write [ ] around it"
            self._bad(node.at, path, f"expected a list; got {_shown(node, secret)}{hint}")
            return None
        assert isinstance(schema.kind, ListType)
        longest = schema.kind.max_length
        if longest is not None and len(node.items) > longest:
            self._bad(node.at, path, f"expected at most {longest} entries; got {len(node.items)}")
            return None
        item = schema.item
        return _Checked(
            [self.check(child, item, f"{path}[{index}]", secret=secret) for index, child in enumerate(node.items)],
            node.at,
        )

    def _scalar(self, node: Node, schema: Schema, path: str, secret: bool) -> _Checked | None:
        if not isinstance(node, Scalar) or (node.null and not schema.choices):
            hint = "; leave the key out for the default" if isinstance(node, Scalar) else ""
            self._bad(node.at, path, f"expected {schema.describe}; got {_shown(node, secret)}{hint}")
            return None
        try:
            return _Checked(_value(node, schema, _shown(node, secret)), node.at)
        except ValueError as exc:
            self._bad(node.at, path, str(exc))
            return None

    def usable(self, checked: _Checked, path: str = "") -> _Checked | None:
        """A checked value without the list entries that have a problem; None where something else was refused."""
        if self._lost or any(not problem.path for problem in self.problems):
            return None
        return self._usable(checked, path, {part for problem in self.problems for part in _with_above(problem.path)})

    def _usable(self, checked: _Checked, path: str, bad: Collection[str]) -> _Checked:
        if isinstance(checked.value, dict):
            inner = {
                key: self._usable(value, f"{path}.{key}" if path else key, bad) for key, value in checked.value.items()
            }
            return _Checked(inner, checked.at)
        if isinstance(checked.value, list):
            # An unknown key counts here: without it an entry may apply to more than was meant.
            kept = [
                entry
                for index, entry in enumerate(checked.value)
                if entry is not None and f"{path}[{index}]" not in bad
            ]
            return _Checked(kept, checked.at)
        return checked

    def make(self, checked: _Checked, schema: Schema, path: str, *, secret: bool = False) -> object:
        """The finished value; None (and a problem) where a struct's own check (``__post_init__``) refuses it.

        Sections are made the innermost first. ``secret``: as in `check`.
        """
        content = checked.value
        if schema.scalar or content is None:
            return content
        if isinstance(schema.kind, ListType):
            assert isinstance(content, list)
            item = schema.item
            made = [
                self.make(entry, item, f"{path}[{index}]", secret=secret)
                for index, entry in enumerate(content)
                if entry is not None
            ]
            return tuple(made) if isinstance(schema.kind, VarTupleType) else frozenset(made)
        assert isinstance(content, dict)
        if isinstance(schema.kind, DictType):
            # `item` of an empty map could import a struct that is not needed.
            item = schema.item if content else schema
            return {
                key: self.make(entry, item, f"{path}.{_redacted_key(key, secret)}", secret=secret)
                for key, entry in content.items()
            }
        values: dict[str, object] = {}
        for key, field in schema.fields.items():
            name = f"{path}.{key}" if path else key
            if key in content:
                values[key] = self.make(content[key], field.schema, name, secret=field.secret)
            elif field.required and name not in self._refused:
                self._bad(checked.at, path, f"missing key {key!r}{_hint(field)}")
        if path in self._refused:
            # Its own check would report as missing what was only refused.
            return None
        assert schema.struct is not None
        try:
            return msgspec.convert(values, schema.struct)
        except InputError as exc:  # of a check that reads something else, such as a plugin's module
            self._bad(checked.at, path, str(exc))
            return None
        except msgspec.ValidationError as exc:
            message, _, at = str(exc).partition(" - at `$.")
            if isinstance(exc.__cause__, ValueError):
                self._bad(checked.at, path, str(exc.__cause__))
            else:
                key = at.rstrip("`")
                self._bad(content[key].at, f"{path}.{key}" if path else key, f"{message[:1].lower()}{message[1:]}")
            return None

    def _bad(self, at: SourceLocation, path: str, message: str) -> None:
        # A struct's own check may quote what was written.
        message = message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}..."
        self.problems.append(ConfigProblem(at, path, message))
        self._lost = self._lost or "[" not in path
        self._refused.update(_with_above(path))


def _with_above(path: str) -> Iterator[str]:
    """A path and all above it, such as ``a[0]``, ``a`` and "" of ``a[0].b``."""
    yield ""
    yield path
    yield from (path[:at] for at, char in enumerate(path) if char in ".[")


def _hint(field: FieldSchema) -> str:
    return f" ({field.description})" if field.description else ""


def _shown(node: Node, secret: bool) -> str:
    """A node, for a message; of what may be a secret only the length."""
    if secret and isinstance(node, Scalar) and not node.null:
        return f"a text of {len(node.text)} characters"
    return node.shown


def _redacted_key(key: str, secret: bool) -> str:
    """A key, for a message. Where secrets are allowed, a key other than a plain name may be a misplaced secret."""
    if secret and not _PLAIN.fullmatch(key):
        return f"({len(key)} characters)"
    return key if len(key) <= _MAX_SHOWN else f"{key[:_MAX_SHOWN]}..."


def _value(node: Scalar, schema: Schema, shown: str) -> object:
    """A scalar in the setting's type; ``shown`` is the value for a message.

    Errors: `ValueError` with the whole message.
    """
    refusal = f"expected {schema.describe}; got {shown}"
    match schema.kind:
        case BoolType():
            if node.quoted or node.text.lower() not in BOOLS:
                raise ValueError(refusal)
            return BOOLS[node.text.lower()]
        case IntType() | FloatType():
            number = units.parse_number(node.text, schema.unit, whole=schema.whole)
            low = schema.low is None or (number > schema.low if schema.above else number >= schema.low)
            if not low or (schema.high is not None and number > schema.high):
                raise ValueError(f"out of bounds: expected {schema.bounds}; got {shown}")
            return number
        case CustomType():
            try:
                return CpuSet.parse(node.text)
            except ValueError as exc:
                raise ValueError(f"expected {schema.describe}; {exc}") from exc
        case StrType(min_length=shortest, max_length=longest, pattern=pattern):
            if schema.path and (not node.text.startswith("/") or "\0" in node.text):
                raise ValueError(refusal)
            try:
                kind = Annotated[str, Meta(min_length=shortest, max_length=longest, pattern=pattern)]
                text = msgspec.convert(node.text, kind)
            except msgspec.ValidationError as exc:
                raise ValueError(f"{str(exc)[:1].lower()}{str(exc)[1:]}; got {shown}") from exc
            if schema.check:
                check = lazy.load(schema.check)
                assert callable(check)
                check(text)
            return text
        case _:
            if node.text not in schema.choices:
                raise ValueError(f"{refusal}{_suggestion(node.text, schema.choices)}")
            return node.text


def _unknown(key: str, fields: Mapping[str, FieldSchema]) -> str:
    if not fields:
        return f"unknown key {key!r}; nothing can be set here"
    return f"unknown key {key!r}{_suggestion(key, fields) or '; known here: ' + ', '.join(fields)}"


def _suggestion(text: str, known: Iterable[str]) -> str:
    # Imported at the first mistake: a start without one does not pay for it.
    from difflib import get_close_matches

    choices = {name.lower(): name for name in known}
    close = get_close_matches(text.lower().replace("-", "_"), choices, n=1)
    return f"; did you mean {choices[close[0]]!r}?" if close else ""
