"""The registry: a table of plug-ins, one row each. Policies, detectors, signal readers, sinks and others use it.

A row is a name and the object's path, ``package.module:ATTRIBUTE``. The name is the key in the configuration, in
messages and in the documentation. Rows are checked when the table is imported; the module of a row is imported when its
object is first used, so a table costs nothing for unused rows. `section_type` makes the configuration section that
belongs to a table, so that a new row needs no second declaration.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Generic, TypeVar, cast, final

from msgspec import NODEFAULT, Struct, defstruct

from reconciler.runtime.lazy import load, split

T = TypeVar("T")
Row = tuple[str, str]


@final
class Registry(Mapping[str, T], Generic[T]):
    """Name -> object, in the order of the rows. A lookup imports the object's module; listing names does not."""

    def __init__(self, kind: str, of: type, *rows: Row, check: Callable[[T], None] | None = None) -> None:
        """``kind``: what messages call an entry. ``of``: its class. ``check``: raises `ValueError` for a bad one.

        Errors: `ValueError` for a name other than an identifier, and for a name or path that is in the table twice.
        """
        self._kind: Final = kind
        self._of: Final = of
        self._check: Final = check
        self._paths: dict[str, str] = {}
        self._objects: dict[str, T] = {}
        for name, path in rows:
            if not name.isidentifier():
                raise ValueError(f"{kind} {name!r}: the name must be an identifier")
            if name in self._paths:
                raise ValueError(f"{kind} {name}: registered twice")
            if path in self._paths.values():
                raise ValueError(f"{kind} {name}: {path} is registered twice")
            try:
                split(path)
            except ValueError as exc:
                raise ValueError(f"{kind} {name}: {exc}") from exc
            self._paths[name] = path

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def __getitem__(self, name: str) -> T:
        """The object.

        Errors: `KeyError` for a name without a row; `ValueError` naming the row when its object cannot be imported, is
        of another class, has another name, or does not pass the table's check.
        """
        if name not in self._objects:
            self._objects[name] = self._loaded(name, self._paths[name])
        return self._objects[name]

    def _loaded(self, name: str, path: str) -> T:
        try:
            result = load(path)
        except (ImportError, AttributeError) as exc:
            raise ValueError(f"{self._kind} {name}: {path} cannot be imported: {exc}") from exc
        if not isinstance(result, self._of):
            raise ValueError(f"{self._kind} {name}: {path} is no {self._of.__name__}")  # noqa: TRY004  # one kind of error
        own = getattr(result, "name", name)
        if own != name:
            raise ValueError(f"{self._kind} {name}: {path} calls itself {own!r}")
        entry = cast(T, result)
        if self._check is not None:
            try:
                self._check(entry)
            except ValueError as exc:
                raise ValueError(f"{self._kind} {name}: {exc}") from exc
        return entry


def section_type(name: str, fields: Iterable[tuple[str, Any, object]], base: type[Struct], module: str) -> type[Struct]:
    """A configuration section with one field for each entry of a table: (name, type, default).

    ``base`` has the section's checks, properties and docstring; ``module``: where the section belongs.
    """
    return defstruct(
        name,
        [(key, kind, default) if default is not NODEFAULT else (key, kind) for key, kind, default in fields],
        bases=(base,),
        module=module,
        namespace={"__doc__": base.__doc__},
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )
