"""The registration of the means: which there are, made of what this node has.

A new one is a file here that implements `base.Way`, a word in `state.eviction.EvictionMethodName`, and one entry in
`_MAKERS`. Their modules are imported where they are made.
"""

from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from reconciler.clients.kube import KubeApi
from reconciler.responses.means.base import EvictionMethod
from reconciler.responses.means.config import EvictionMeans
from reconciler.sources.cri import CriClient
from state.eviction import EvictionMethodName


class MethodSetup(Struct, frozen=True, kw_only=True):
    """What they are made of. ``api`` and ``cri`` are theirs alone; see `CriEviction` of the latter."""

    config: EvictionMeans
    api: KubeApi
    cri: Callable[[], CriClient | None]


def _api(setup: MethodSetup) -> EvictionMethod:
    from reconciler.responses.means.api import ApiEviction  # noqa: PLC0415

    return ApiEviction(setup.config, setup.api)


def _cri(setup: MethodSetup) -> EvictionMethod:
    from reconciler.responses.means.cri import CriEviction  # noqa: PLC0415

    return CriEviction(setup.config, setup.cri)


def _signal(setup: MethodSetup) -> EvictionMethod:
    from reconciler.responses.means.signal import SignalEviction  # noqa: PLC0415

    return SignalEviction(setup.config)


_MAKERS: Final[Mapping[EvictionMethodName, Callable[[MethodSetup], EvictionMethod]]] = {
    EvictionMethodName.API: _api,
    EvictionMethodName.CRI: _cri,
    EvictionMethodName.SIGNAL: _signal,
}


def build(setup: MethodSetup) -> tuple[EvictionMethod, ...]:
    """The configured means, in their order."""
    return tuple(_MAKERS[means](setup) for means in setup.config.order)
