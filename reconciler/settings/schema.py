"""What a configuration may hold, read off the frozen structs that hold it: one declaration, everything else derives.

A setting is a struct's field: its type gives kind and bounds (`msgspec.Meta`), its name the unit, ``Meta.description``
the words. ``Meta(extra={"restart": True})`` marks what a reload cannot change, ``{"path": True}`` a path,
``{"secret": True}`` what may hold a secret, by mistake (a token where its file belongs) or not: no message shows it.
Parser, validation, ``config explain``, the example file and docs/config.md all walk the `StructSchema` made here.

What few nodes set is not loaded on every node: behind the keys of a table may stand a struct that is imported when the
first of them is written (`LazyStruct`).
"""

import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum, StrEnum
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import NODEFAULT, Meta, Struct

from cgroupfs.cpuset import CpuSet
from reconciler.runtime.lazy import load
from reconciler.settings import units


class ScalarKind(StrEnum):
    """What stands behind a leaf."""

    BOOL = "true or false"
    INT = "a whole number"
    FLOAT = "a number"
    TEXT = "text"
    PATH = "an absolute path"
    CHOICE = "one of a few words"
    CPUS = "a CPU list"


class ScalarSchema(Struct, frozen=True, kw_only=True):
    """A single value. ``annotation`` is what `msgspec.convert` checks against; ``optional`` allows null."""

    kind: ScalarKind
    annotation: Any  # a type expression, which has no static type of its own
    unit: units.Unit | None = None
    optional: bool = False
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    above: bool = False
    """``low`` itself is out of bounds."""

    @property
    def whole(self) -> bool:
        """True for an integer."""
        return self.kind is ScalarKind.INT

    @property
    def bounds(self) -> str:
        """``from 10ms to 60s`` in the setting's own unit; empty without bounds."""
        low = None if self.low is None else units.format_number(self.low, self.unit)
        high = None if self.high is None else units.format_number(self.high, self.unit)
        if low is not None and high is not None:
            return f"above {low}, up to {high}" if self.above else f"from {low} to {high}"
        if low is not None:
            return f"above {low}" if self.above else f"at least {low}"
        return f"at most {high}" if high is not None else ""

    @property
    def describe(self) -> str:
        """What to write, for a message and the documentation: ``a duration such as 200ms, 10s or 5m``."""
        match self.kind:
            case ScalarKind.CHOICE:
                return f"one of {', '.join(self.choices)}"
            case ScalarKind.INT | ScalarKind.FLOAT:
                return units.expected(self.unit, whole=self.whole)
            case ScalarKind.CPUS:
                return "a CPU list such as 0-3,8"
            case _:
                return str(self.kind)


class ListSchema(Struct, frozen=True, kw_only=True):
    """A list. ``make`` builds the frozen container from the items."""

    item: "Schema"
    make: type[tuple[object, ...]] | type[frozenset[object]]
    optional: bool = False


class MapSchema(Struct, frozen=True, kw_only=True):
    """Keys that the operator chooses. ``annotation`` is the type of what stands behind them, ``where`` its place."""

    annotation: Any  # a type expression, which has no static type of its own
    where: str
    optional: bool = False

    @property
    def item(self) -> "Schema":
        """What stands behind each key; made at each call, because a table that nobody fills needs none."""
        return _schema(self.annotation, "", self.where)


class LazyStruct(Struct, frozen=True):
    """In the type of a table's items the place of a struct that is imported when it is needed.

    For type checkers the struct itself stands there::

        if TYPE_CHECKING:
            from reconciler.detectors.rule import Rule
        else:
            Rule = LazyStruct("reconciler.detectors.rule", "Rule")
    """

    module: str
    name: str

    def load(self) -> type[Struct]:
        """The struct."""
        found = load(f"{self.module}:{self.name}")
        assert isinstance(found, type)
        assert issubclass(found, Struct)
        return found


class FieldSchema(Struct, frozen=True, kw_only=True):
    """One key of a section: ``name`` in the file, ``attribute`` in the struct; ``default`` is NODEFAULT if required.

    ``secret``: a wrong value is not shown. Of a section that is what stands in its place; its fields say it themselves.
    """

    name: str
    attribute: str
    schema: "Schema"
    default: object
    description: str = ""
    restart: bool = False
    secret: bool = False

    @property
    def required(self) -> bool:
        """True when leaving it out is an error."""
        return self.default is NODEFAULT


class StructSchema(Struct, frozen=True, kw_only=True):
    """A struct: fixed keys, built by calling ``make``.

    ``optional``: left out it is None, and not the struct with its defaults. Only within lists and tables, where one of
    several is chosen by its name.
    """

    make: type[Struct]
    fields: Mapping[str, FieldSchema]
    optional: bool = False

    @property
    def summary(self) -> str:
        """The first line of the struct's docstring."""
        return (self.make.__doc__ or "").partition("\n")[0].strip()


Schema = ScalarSchema | ListSchema | MapSchema | StructSchema

_PLAIN: Final[Mapping[object, ScalarKind]] = {
    bool: ScalarKind.BOOL,
    int: ScalarKind.INT,
    float: ScalarKind.FLOAT,
    str: ScalarKind.TEXT,
}


def section_of(struct: type[Struct]) -> StructSchema:
    """The schema of a struct and all below it.

    Errors: `TypeError` for a field whose type has no form in the file; it shows at the first start of a developer.
    """
    hints = typing.get_type_hints(struct, include_extras=True)
    config = msgspec.structs.fields(struct)
    fields: dict[str, FieldSchema] = {}
    for info in config:
        annotation = hints[info.name]
        metas = _metas(annotation)
        default: object = info.default
        if info.default_factory is not NODEFAULT:
            default = info.default_factory()
        fields[info.encode_name] = FieldSchema(
            name=info.encode_name,
            attribute=info.name,
            schema=_schema(annotation, info.name, f"{struct.__name__}.{info.name}"),
            default=default,
            description=next((meta.description for meta in reversed(metas) if meta.description), ""),
            restart=any((meta.extra or {}).get("restart", False) for meta in metas),
            secret=any((meta.extra or {}).get("secret", False) for meta in metas),
        )
    return StructSchema(make=struct, fields=fields)


def _metas(annotation: Any) -> list[Meta]:
    metas = [meta for meta in getattr(annotation, "__metadata__", ()) if isinstance(meta, Meta)]
    inner = typing.get_args(annotation)
    # Annotated[X | None, Meta] and Annotated[X, Meta] | None both carry words; the outer one comes last.
    return [meta for part in inner for meta in _metas(part)] + metas if metas or inner else metas


def _schema(annotation: Any, name: str, where: str) -> Schema:
    bare, optional = _without_none(annotation)
    metas = _metas(bare)
    while typing.get_origin(bare) is Annotated:
        bare, inner_optional = _without_none(typing.get_args(bare)[0])
        optional = optional or inner_optional
    if isinstance(bare, LazyStruct):
        bare = bare.load()
    origin, args = typing.get_origin(bare), typing.get_args(bare)
    if origin in {tuple, frozenset}:
        return ListSchema(item=_schema(args[0], name, where), make=origin, optional=optional)
    if origin in {dict, Mapping}:
        return MapSchema(annotation=args[1], where=where, optional=optional)
    if isinstance(bare, type) and issubclass(bare, Struct):
        return msgspec.structs.replace(section_of(bare), optional=optional)
    if bare is CpuSet:
        return ScalarSchema(kind=ScalarKind.CPUS, annotation=annotation, optional=optional)
    if origin is Literal:
        return ScalarSchema(
            kind=ScalarKind.CHOICE, annotation=annotation, choices=tuple(map(str, args)), optional=optional
        )
    if isinstance(bare, type) and issubclass(bare, Enum):
        return ScalarSchema(
            kind=ScalarKind.CHOICE,
            annotation=annotation,
            choices=tuple(str(item.value) for item in bare),
            optional=optional,
        )
    kind = _PLAIN.get(bare)
    if kind is None:
        raise TypeError(f"{where}: a configuration file cannot hold {annotation!r}")
    if kind is ScalarKind.TEXT and any((meta.extra or {}).get("path", False) for meta in metas):
        kind = ScalarKind.PATH
    if any(meta.lt is not None or meta.multiple_of is not None for meta in metas):
        raise TypeError(f"{where}: of the bounds only ge, gt and le are known here")
    low = next((bound for meta in metas for bound in (meta.ge, meta.gt) if bound is not None), None)
    return ScalarSchema(
        kind=kind,
        annotation=annotation,
        optional=optional,
        unit=units.unit_of(name) if kind in {ScalarKind.INT, ScalarKind.FLOAT} else None,
        low=low,
        high=next((meta.le for meta in metas if meta.le is not None), None),
        above=any(meta.gt is not None for meta in metas),
    )


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if typing.get_origin(annotation) not in {typing.Union, types.UnionType}:
        return annotation, False
    rest = [part for part in typing.get_args(annotation) if part is not type(None)]
    if len(rest) != 1:
        raise TypeError(f"a setting has one type, or one type and null, not {annotation!r}")
    return rest[0], True


def settings(section: StructSchema, prefix: str = "") -> Iterator[tuple[str, FieldSchema]]:
    """Every setting below ``section`` with its dotted name, in the order of declaration; sections go before theirs."""
    for field in section.fields.values():
        path = f"{prefix}{field.name}"
        yield path, field
        if isinstance(field.schema, StructSchema):
            yield from settings(field.schema, f"{path}.")
