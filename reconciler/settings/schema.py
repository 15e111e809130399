"""What a configuration file may hold, as `msgspec.inspect` describes the frozen structs that it is decoded into.

A setting is a field of a struct, declared once: its type gives kind and bounds (`msgspec.Meta`), the end of its name
the unit, ``Meta.description`` the text. ``Meta(extra={"restart": True})`` marks what a reload cannot change, ``{"path":
True}`` an absolute path, ``{"secret": True}`` what may hold a secret, by mistake (a token where its file belongs) or
not: no message shows it; ``{"internal": True}`` a field that the loader sets and no file can; ``{"check":
"module:function"}`` a text that the function refuses with `ValueError`. Reading, checks,
``config explain``, ``config schema`` and docs/config.md all use the `Schema` made here.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, Final

from msgspec import NODEFAULT, Meta, Struct
from msgspec.inspect import (
    BoolType,
    CustomType,
    DictType,
    EnumType,
    Field,
    FloatType,
    FrozenSetType,
    IntType,
    LiteralType,
    Metadata,
    NoneType,
    StrType,
    StructType,
    Type,
    UnionType,
    VarTupleType,
    type_info,
)

from cgroupfs.cpuset import CpuSet
from reconciler.runtime.lazy import load
from reconciler.settings import units

ListType = VarTupleType | FrozenSetType
_SCALARS: Final = (BoolType, IntType, FloatType, StrType, EnumType, LiteralType)


class FeatureSwitch(StrEnum):
    """Whether an optional source is used."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


def lazy_struct(module: str, name: str) -> Any:
    """The type of a map's values, or of a list's entries, whose struct is imported only if a file has some.

    A type checker sees the struct itself::

        if TYPE_CHECKING:
            from reconciler.detectors.rule import RuleConfig
        else:
            RuleConfig = lazy_struct("reconciler.detectors.rule", "RuleConfig")
    """
    return Annotated[object, Meta(extra={"struct": f"{module}:{name}"})]


class Schema(Struct, frozen=True, kw_only=True, dict=True):
    """A type in a file. ``kind`` has neither metadata nor null; ``optional`` allows null; ``where`` names it in errors.

    An optional struct that is left out is None, and not the struct with its defaults. Only lists and maps hold such:
    one of several is chosen by its name. ``check``: the function that checks a text, as
    `reconciler.runtime.lazy` loads it.
    """

    kind: Type
    where: str
    optional: bool = False
    path: bool = False
    check: str = ""
    unit: units.Unit | None = None

    @property
    def struct(self) -> type[Struct] | None:
        """The struct of a section; None for everything else."""
        return self.kind.cls if isinstance(self.kind, StructType) else None

    @property
    def scalar(self) -> bool:
        return isinstance(self.kind, (*_SCALARS, CustomType))

    @property
    def many(self) -> bool:
        """True for a list or a map that cannot be null."""
        return isinstance(self.kind, (ListType, DictType)) and not self.optional

    # Made once: a look-up of every setting by its name would make them for each.
    @cached_property
    def fields(self) -> dict[str, "FieldSchema"]:
        """The keys of a section, in the order of declaration; empty for anything else.

        Errors: `TypeError` for a field whose type has no form in a file; a developer's first start shows it.
        """
        if not isinstance(self.kind, StructType):
            return {}
        made = (_field(self.kind.cls, info) for info in self.kind.fields)
        return {field.name: field for field in made if field is not None}

    # When it is needed: an empty map needs none, and its struct may not be imported yet. Once: a rule's takes 4 ms.
    @cached_property
    def item(self) -> "Schema":
        """The schema of a list's items or of a map's values."""
        if isinstance(self.kind, DictType):
            return _schema(self.kind.value_type, self.where, None)
        assert isinstance(self.kind, ListType)
        return _schema(self.kind.item_type, self.where, self.unit)

    @property
    def of_sections(self) -> bool:
        """True for a list or a map whose items are sections. Unlike `item` it imports no struct."""
        inner = self.kind.value_type if isinstance(self.kind, DictType) else getattr(self.kind, "item_type", None)
        while isinstance(inner, Metadata):
            if "struct" in (inner.extra or {}):
                return True
            inner = inner.type
        return isinstance(inner, StructType)

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of an enum; empty for everything else."""
        match self.kind:
            case EnumType(cls=cls):
                return tuple(str(item.value) for item in cls)
            case LiteralType(values=values):
                return tuple(map(str, values))
            case _:
                return ()

    @property
    def whole(self) -> bool:
        return isinstance(self.kind, IntType)

    @property
    def low(self) -> float | None:
        """The lower bound of a number. It is itself out of bounds where ``above`` is true."""
        if not isinstance(self.kind, IntType | FloatType):
            return None
        return self.kind.gt if self.kind.ge is None else self.kind.ge

    @property
    def above(self) -> bool:
        """True where a number must be larger than ``low``."""
        return isinstance(self.kind, IntType | FloatType) and self.kind.ge is None and self.kind.gt is not None

    @property
    def high(self) -> float | None:
        return self.kind.le if isinstance(self.kind, IntType | FloatType) else None

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
            case EnumType() | LiteralType():
                return f"one of {', '.join(self.choices)}"
            case IntType() | FloatType():
                return units.expected(self.unit, whole=self.whole)
            case CustomType():
                return "a CPU list such as 0-3,8"
            case BoolType():
                return "true or false"
            case _:
                return "an absolute path" if self.path else "text"

    @property
    def summary(self) -> str:
        """The first line of the struct's docstring."""
        return ((self.struct and self.struct.__doc__) or "").partition("\n")[0].strip()


class FieldSchema(Struct, frozen=True, kw_only=True):
    """One key of a section: ``name`` in the file, ``attribute`` in the struct; ``default`` is NODEFAULT if required.

    ``secret``: a wrong value is not shown; of a section a value in its place, for its fields have marks of their own.
    """

    name: str
    attribute: str
    schema: Schema
    default: object
    description: str = ""
    restart: bool = False
    secret: bool = False

    @property
    def required(self) -> bool:
        """True when leaving it out is an error."""
        return self.default is NODEFAULT


def section_of(struct: type[Struct]) -> Schema:
    """The schema of a struct and all below it. Takes 5 ms for the whole configuration."""
    return Schema(kind=type_info(struct), where=struct.__name__)


def list_of(struct: type[Struct]) -> Schema:
    return Schema(kind=type_info(tuple[struct, ...]), where=struct.__name__)  # type: ignore[valid-type]


def _field(struct: type[Struct], info: Field) -> FieldSchema | None:
    metas = list(_metas(info.type))
    extra = {key: value for meta in metas for key, value in (meta.extra or {}).items()}
    if extra.get("internal", False):
        return None
    default: object = info.default if info.default_factory is NODEFAULT else info.default_factory()
    described = [text for meta in metas if (text := (meta.extra_json_schema or {}).get("description"))]
    return FieldSchema(
        name=info.encode_name,
        attribute=info.name,
        schema=_schema(info.type, f"{struct.__name__}.{info.name}", units.unit_of(info.name)),
        default=default,
        description=described[0] if described else "",
        restart=extra.get("restart", False),
        secret=extra.get("secret", False),
    )


def _metas(info: Type) -> Iterator[Metadata]:
    """The metadata of a type, the outermost first; of ``Annotated[X, ...] | None`` also that of X."""
    if isinstance(info, Metadata):
        yield info
        yield from _metas(info.type)
    elif isinstance(info, UnionType):
        for part in info.types:
            yield from _metas(part)


def _schema(info: Type, where: str, unit: units.Unit | None) -> Schema:
    optional = path = False
    check = ""
    bare = info
    while isinstance(bare, Metadata | UnionType):
        if isinstance(bare, UnionType):
            rest = [part for part in bare.types if not isinstance(part, NoneType)]
            if len(rest) != 1:
                raise TypeError(f"{where}: a setting has one type, or one type and null, not {bare!r}")
            optional, bare = True, rest[0]
            continue
        extra = bare.extra or {}
        path = path or extra.get("path", False)
        check = check or extra.get("check", "")
        if "struct" in extra:
            place = extra["struct"]
            bare = type_info(load(place))
        else:
            bare = bare.type
    if isinstance(bare, IntType | FloatType):
        if bare.lt is not None or bare.multiple_of is not None:
            raise TypeError(f"{where}: of the bounds only ge, gt and le are known here")
        return Schema(kind=bare, where=where, optional=optional, unit=unit)
    known = isinstance(bare, (*_SCALARS, StructType, DictType, ListType))
    if not known and not (isinstance(bare, CustomType) and bare.cls is CpuSet):
        raise TypeError(f"{where}: a configuration file cannot hold {bare!r}")
    return Schema(kind=bare, where=where, optional=optional, path=path, check=check, unit=unit)


def nested(values: Mapping[str, object]) -> dict[str, Any]:
    """Values by dotted name as sections within sections."""
    top: dict[str, Any] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        section = top
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return top


def settings(section: Schema, prefix: str = "") -> Iterator[tuple[str, FieldSchema]]:
    """Every setting below ``section`` with its dotted name, in the order of declaration; sections go before theirs."""
    for field in section.fields.values():
        path = f"{prefix}{field.name}"
        yield path, field
        yield from settings(field.schema, f"{path}.")
