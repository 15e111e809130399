"""Detects a kubelet that rewrites every container periodically, whether or not anything changed. Pure, inferred.

The static CPU manager of 1.21 and older does (measured: every 10.05 s, all running containers); later ones write on
change only. No file or endpoint reports it, so it is inferred from the runtime's updates: the same container updated
three times at equal distances with nothing changed in between is that rhythm. Repeated writes against it are useless,
so policies choose knobs that it does not write.

Source: recordings of 1.22 (updates at the first tick, at a restart, at changes: never twice at an equal distance), and
measurements of a kubelet that reconciles as 1.21 does.
"""

from typing import Final, final

SHORTEST_S: Final = 1.0
LONGEST_S: Final = 120.0
_SAME: Final = 0.15
"""Two intervals are equal when they differ by less than this share: the rhythm is a timer plus the work of a round."""
_ONE_UPDATE_S: Final = 0.5
"""Signals of one container closer than this are one update (state.json, then init.pid)."""
_MISSED: Final = 3


@final
class Reassertion:
    """Learns the rhythm from updates, and unlearns it when it stops or the kubelet restarts."""

    def __init__(self) -> None:
        self._updates: dict[str, list[float]] = {}
        self._period: float | None = None
        self._last = 0.0

    def updated(self, container_id: str, at: float, *, changed: bool) -> None:
        """The runtime finished writing a container's values again. ``changed``: they differ from before.

        Units: ``at`` is monotonic seconds. A container's creation may be left out, or reported as a change.
        """
        times = self._updates.setdefault(container_id, [])
        if times and at - times[-1] < _ONE_UPDATE_S:
            return
        if changed:
            # The update had a cause: the distance to it proves nothing.
            times.clear()
            return
        times.append(at)
        del times[:-3]
        if len(times) < 3:
            return
        first, second = times[1] - times[0], times[2] - times[1]
        mean = (first + second) / 2
        if abs(first - second) <= _SAME * mean and SHORTEST_S <= mean <= LONGEST_S:
            self._period = mean if self._period is None else (self._period + mean) / 2
            self._last = at

    def restarted(self) -> None:
        """The kubelet restarted, possibly as another version: its first round rewrites everything in any version."""
        self._updates.clear()
        self._period = None

    def gone(self, container_id: str) -> None:
        """The container was removed."""
        self._updates.pop(container_id, None)

    def period(self, now: float) -> float | None:
        """The rhythm in seconds, None when there is none (or not yet, or not any more)."""
        if self._period is not None and now - self._last > _MISSED * self._period:
            self._period = None
        return self._period
