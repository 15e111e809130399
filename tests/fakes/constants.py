"""Other numbers for a law: constants of the configuration's structs and of modules, which no two nodes need to differ.

In the process of a test: `varied`. In a daemon that a test starts: `applied`, which its launcher calls.
"""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from msgspec import Struct, defstruct
from msgspec.structs import replace

from reconciler.config.model import Config

T = TypeVar("T", bound=Struct)


def varied(config: T, **values: Any) -> T:
    """``config`` with these class constants, by a type of its own, and settings. `Any`: whatever their types are."""
    kind = type(config)
    for name in values:
        assert hasattr(kind, name), f"{kind.__name__} has neither a constant nor a setting {name}"
    constants = {name: value for name, value in values.items() if name not in kind.__struct_fields__}
    settings = {name: getattr(config, name) for name in kind.__struct_fields__} | values
    other = defstruct(
        kind.__name__, [], bases=(kind,), namespace=constants, frozen=True, kw_only=True, forbid_unknown_fields=True
    )
    made = other(**{name: value for name, value in settings.items() if name not in constants})
    assert isinstance(made, kind)
    return made


@contextmanager
def applied(constants: Mapping[str, object]) -> Iterator[None]:
    """For all of the process: of a section (``kubelet.timeout_s``) or of a module (``state.store:_LONG_S``)."""
    before: list[tuple[object, str, object]] = []
    try:
        for path, value in constants.items():
            module, of_module, name = path.partition(":")
            if of_module:
                loaded = importlib.import_module(module)
                assert hasattr(loaded, name), f"there is no constant {path}"
                before.append((loaded, name, getattr(loaded, name)))
                setattr(loaded, name, value)
                continue
            *sections, name = path.split(".")
            above: Struct = Config()
            section = above
            for step in sections:
                above, section = section, getattr(section, step)
            kind, set_to = type(section), value
            if sections[-1] not in above.__struct_fields__:
                # The section is a constant as a whole.
                kind, name, set_to = type(above), sections[-1], replace(section, **{name: value})
            assert name not in kind.__struct_fields__, f"{path} is a setting"
            assert hasattr(kind, name), f"there is no constant {path}"
            before.append((kind, name, getattr(kind, name)))
            setattr(kind, name, set_to)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)
