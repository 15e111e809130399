"""Recent load of one place as a ring of samples of equal length, for triggers that act on a lasting load. Pure.

A ring that is not full yet has no result: a mean over the full size, as in Katalyst, would be too low at first. After a
gap the ring starts again.
"""

from typing import Final

from msgspec import Struct

from reconciler.responses.eviction.config import NumaCpuConfig, PoolLoadConfig
from reconciler.responses.eviction.samples import EvictionContext

_GAP: Final = 2.5
"""Sample times without a sample after which a ring is too old to go on with."""


RingConfig = NumaCpuConfig | PoolLoadConfig
"""Those whose ``samples``, ``sample_s`` and ``met_percent`` shape a ring."""


class LoadRing(Struct, frozen=True):
    """Load per CPU of the place, the oldest first; ``at_s``: when the newest sample was taken."""

    ratios: tuple[float, ...]
    at_s: float

    def above(self, config: RingConfig, threshold: float) -> int | None:
        """How many samples are above ``threshold``; None: too few of them, or the ring is not full."""
        above = sum(ratio > threshold for ratio in self.ratios)
        full = len(self.ratios) >= config.samples
        return above if full and above * 100 >= config.met_percent * len(self.ratios) else None


def advance(
    ring: LoadRing | None, config: RingConfig, scene: EvictionContext, *, subject: str, signal: str, whole: float
) -> LoadRing | None:
    """The ring with a further sample when its time has come; None: nothing is known of ``subject``.

    ``whole``: what the mean of ``signal`` is divided by.
    """
    if ring is not None and scene.now - ring.at_s > _GAP * config.sample_s:
        ring = None
    if ring is not None and scene.now - ring.at_s < config.sample_s:
        return ring
    points = scene.past(subject, signal, config.sample_s)
    if not points:
        return ring
    ratio = sum(value for _, value in points) / len(points) / whole
    return LoadRing((*(ring.ratios if ring is not None else ()), ratio)[-config.samples :], scene.now)
