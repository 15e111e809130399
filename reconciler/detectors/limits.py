"""Whether a victim is at a limit of its own, which no neighbour has put there: then nobody else is blamed for it."""

from typing import Final

from reconciler.detectors.base import VictimView
from reconciler.runtime.format import quantity

AT_LIMIT: Final = 0.95
"""From this share of it on a limit counts as reached: a group is reclaimed and throttled before it is full."""
_BEFORE_S: Final = 15.0
"""How long before a kill the pod may have been at its limit: the kill itself frees memory."""


def memory_at_limit(sight: VictimView, killed_at: float | None = None) -> str:
    """What the pod uses of its own memory limit, in words, where it is at it; empty: it is not, or that is not known.

    ``killed_at``: what counts is what it used up to then, shortly before somebody of it was killed.
    """
    limit = sight.value("memory.limit")
    if limit is None and sight.pod is not None and sight.pod.limits.memory_bytes:
        limit = float(sight.pod.limits.memory_bytes)
    use = sight.value("memory.use") if sight.pod is not None else None
    if killed_at is not None:
        series = sight.series("memory.use")
        points = [] if series is None else series.tail(killed_at - _BEFORE_S)
        use = max((value for at, value in points if at <= killed_at), default=use)
    if not limit or use is None or use < AT_LIMIT * limit:
        return ""
    return f"{quantity(use, 'bytes')} of {quantity(limit, 'bytes')}"
