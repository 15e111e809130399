"""Schedule of counting: the next pods, within the bound on descriptors. Pure."""

import math
from collections.abc import Collection, Mapping
from typing import Final

from reconciler.signals.perf_config import PerfConfig

TICK_S: Final = 1.0
"""Windows begin and end on ticks."""


def due(pods: Collection[str], begun: Mapping[str, float], now: float, law: PerfConfig, *, counting: int) -> list[str]:
    """Which pods to begin with at this tick, those that have waited longest first.

    ``pods``: all of them; ``begun``: when each was last begun with; ``counting``: how many are being counted now.
    Beginnings are spread over the period, so that few are counted at the same time.
    """
    waiting = [uid for uid in pods if now - begun.get(uid, -math.inf) >= law.period_s]
    waiting.sort(key=lambda uid: (begun.get(uid, -math.inf), uid))
    a_tick = math.ceil(len(pods) * TICK_S / law.period_s)
    # Windows end on ticks, and so are up to one longer than they should.
    at_once = math.ceil(len(pods) * (law.window_s + TICK_S) / law.period_s) + 1
    return waiting[: max(0, min(a_tick, at_once - counting))]


def stretched_s(needs: Collection[int], budget: int, law: PerfConfig) -> float:
    """How often each pod can be counted really. ``needs``: descriptors of each pod, of ``budget`` at once."""
    demand = sum(need for need in needs if need <= budget) * (law.window_s + TICK_S) / law.period_s
    return law.period_s * max(1.0, demand / max(1, budget))
