"""Whether a victim is at a limit of its own, which no neighbour caused: then no other pod is a suspect."""

from typing import Final

from reconciler.detectors.base import VictimView
from reconciler.runtime.format import quantity

AT_LIMIT: Final = 0.95
"""From this share of it on a limit counts as reached: a group is reclaimed and throttled before it is full."""
_BEFORE_S: Final = 15.0
"""How long before a kill the pod may have been at its limit: the kill itself frees memory."""


def memory_at_limit(sight: VictimView, killed_at: float | None = None) -> str:
    """The pod's use of its own memory limit, as text, if it is at the limit; empty: it is not, or that is unknown.

    ``killed_at``: the use up to then counts, shortly before a process of it was killed.
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
