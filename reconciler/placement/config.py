"""Configuration of the rules for the choice of CPUs.

In a module of its own: the chain, its rules and their arithmetic are a megabyte, which a node without a pod that owns
CPUs does not load.
"""

from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct, field

from reconciler.runtime.registry import Registry

_RULES: Final = (
    ("spread", "reconciler.placement.plugins:Spread", 30.0),
    ("socket", "reconciler.placement.plugins:OneSocket", 20.0),
    ("apart", "reconciler.placement.plugins:KeepApart", 12.0),
    ("nodes", "reconciler.placement.plugins:NearNodes", 10.0),
    ("cores", "reconciler.placement.plugins:WholeCores", 8.0),
    ("threads", "reconciler.placement.plugins:OneThread", 8.0),
    ("kind", "reconciler.placement.plugins:PreferCoreKind", 6.0),
    ("l3", "reconciler.placement.plugins:WholeL3", 4.0),
    ("interrupts", "reconciler.placement.plugins:Interrupts", 3.0),
    ("movement", "reconciler.placement.plugins:LeastMovement", 2.0),
)
"""Short name, class and weight: even spread and one socket where requested, near memory, whole cores, the rest.

Two half cores in one L3 domain lose against a whole core in the next one, and both against another node.
"""
BUILT_IN: Final[Registry[type[object]]] = Registry("placement rule", type, *((name, path) for name, path, _ in _RULES))

Weight = Annotated[float, Meta(ge=0, le=1000)]


def weights() -> dict[str, float]:
    return {name: weight for name, _, weight in _RULES}


class PlacementConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The choice of CPUs."""

    plugins: Annotated[
        Mapping[str, Weight],
        Meta(
            description="weights of the rules, merged with the built-in ones; 0: off; a custom rule is "
            "package.module:Class"
        ),
    ] = field(default_factory=weights)
