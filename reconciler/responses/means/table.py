"""The registration of the means: which there are, made of what this node has.

A new one is a file here that implements `base.Way`, a word in `state.eviction.Means`, and one entry in `_MAKERS`. Their
modules are imported where they are made.
"""

from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from reconciler.clients.kube import KubeApi
from reconciler.responses.means.base import Way
from reconciler.responses.means.config import EvictionMeans
from reconciler.sources.cri import CriClient
from state.eviction import Means


class Setup(Struct, frozen=True, kw_only=True):
    """What they are made of. ``api`` and ``cri`` are theirs alone; see `CriWay` of the latter."""

    config: EvictionMeans
    api: KubeApi
    cri: Callable[[], CriClient | None]


def _api(setup: Setup) -> Way:
    from reconciler.responses.means.api import ApiWay  # noqa: PLC0415

    return ApiWay(setup.config, setup.api)


def _cri(setup: Setup) -> Way:
    from reconciler.responses.means.cri import CriWay  # noqa: PLC0415

    return CriWay(setup.config, setup.cri)


def _signal(setup: Setup) -> Way:
    from reconciler.responses.means.signal import SignalWay  # noqa: PLC0415

    return SignalWay(setup.config)


_MAKERS: Final[Mapping[Means, Callable[[Setup], Way]]] = {Means.API: _api, Means.CRI: _cri, Means.SIGNAL: _signal}


def build(setup: Setup) -> tuple[Way, ...]:
    """The configured means, in their order."""
    return tuple(_MAKERS[means](setup) for means in setup.config.order)
