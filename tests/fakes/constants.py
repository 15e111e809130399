"""A law with other constants: they are not settings, and a test of an hour's law takes no hour."""

from typing import Any, TypeVar

from msgspec import Struct, defstruct

T = TypeVar("T", bound=Struct)


def varied(config: T, **constants: Any) -> T:
    """``config`` of a type that differs from its own in these class constants. `Any`: whatever their types are."""
    kind = type(config)
    for name in constants:
        assert hasattr(kind, name), f"{kind.__name__} has no constant {name}"
        assert name not in kind.__struct_fields__, f"{kind.__name__}.{name} is a setting"
    other = defstruct(
        kind.__name__, [], bases=(kind,), namespace=constants, frozen=True, kw_only=True, forbid_unknown_fields=True
    )
    made = other(**{name: getattr(config, name) for name in kind.__struct_fields__})
    assert isinstance(made, kind)
    return made
