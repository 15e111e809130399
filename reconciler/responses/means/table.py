"""The table of the eviction methods, and their construction from what this node has.

A new one is a file here that implements `base.EvictionMethod` and has a function ``build``, a word in
`state.eviction.EvictionMethodName`, and one row. Its module is imported when it is built.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Final

from reconciler.responses.means.base import EvictionMethod, MethodSetup
from reconciler.runtime.registry import Registry

METHODS: Final[Registry[Callable[[MethodSetup], EvictionMethod]]] = Registry(
    "eviction method",
    FunctionType,
    ("api", "reconciler.responses.means.api:build"),
    ("cri", "reconciler.responses.means.cri:build"),
    ("signal", "reconciler.responses.means.signal:build"),
)


def build(setup: MethodSetup) -> tuple[EvictionMethod, ...]:
    return tuple(METHODS[name](setup) for name in setup.config.order)
