"""When new containers are read again: processes may enter one after it was complete, without an event.

Each new container has the same few early sweeps, counted from when it was first seen; after them only the periodic
ones. Times are of trio's clock, in seconds.
"""

import math
from collections.abc import Collection, Mapping
from typing import final

from state.model import GroupRef


@final
class EarlySweeps:
    """``after_s``: of each container's sweeps, ascending, from the moment at which it was first seen."""

    def __init__(self, after_s: tuple[float, ...]) -> None:
        self._after_s = after_s
        self._known: frozenset[GroupRef] = frozenset()
        self._due: dict[str, tuple[float, ...]] = {}
        """By path: when its remaining early sweeps are due."""

    def follow(self, complete: Mapping[GroupRef, bool], now: float) -> None:
        """These containers exist. The value: whether it needs early sweeps if it is new."""
        due: dict[str, tuple[float, ...]] = {}
        for group, needed in complete.items():
            if group in self._known:
                # Built anew, so that containers that no longer exist leave: others may start faster than sweeps end.
                due[group.path] = self._due.get(group.path, ())
            elif needed:
                due[group.path] = tuple(now + after_s for after_s in self._after_s)
        self._due = {path: times for path, times in due.items() if times}
        self._known = frozenset(complete)

    def next_at(self) -> float:
        """When the next one is due; inf: never."""
        return min((times[0] for times in self._due.values()), default=math.inf)

    def take(self, now: float) -> Collection[str]:
        """The paths of the containers that have a sweep due now; the caller reads them."""
        taken = {path for path, times in self._due.items() if times[0] <= now}
        for path in taken:
            # One reading serves all sweeps that are overdue.
            self._due[path] = tuple(at for at in self._due[path] if at > now)
            if not self._due[path]:
                del self._due[path]
        return taken
