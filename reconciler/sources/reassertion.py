"""Detects a kubelet that rewrites every container periodically, whether or not anything changed. Pure, inferred.

The static CPU manager of 1.21 and older does (measured: every 10.05 s, all running containers); later ones write on
change only. Repeated writes against it are useless, so policies choose knobs that it does not write. No file or
endpoint reports it: it is inferred from the distances between the runtime's updates.

Source: recordings of 1.22 (updates at the first tick, at a restart, at changes: never twice at an equal distance), and
measurements of a kubelet that reconciles as 1.21 does; KubeletConfiguration (v1beta1) for the period.
"""

import math
from typing import Final, final

RECONCILE_S: Final = 10.0
"""The default of ``cpuManagerReconcilePeriod``."""
_SHORTEST: Final = 0.85
_LONGEST: Final = 1.3
"""Distances that are one period, as shares of it."""
_PAUSE: Final = 0.5
"""The least share of the period without an update between two rounds."""
_ONE_UPDATE_S: Final = 0.5
"""Signals of one container closer than this are one update (state.json, then init.pid)."""
_ROUNDS: Final = 4
"""Updates of one container in the rhythm. What else updates containers has another distance, or is a change."""
_LATE: Final = 1.5
"""Periods without an update: one round did not come. That ends the rhythm, as settings are given up for it."""


@final
class Reassertion:
    """Learns the rhythm from updates, and unlearns it when it stops or the kubelet restarts."""

    def __init__(self, reconcile_s: float = RECONCILE_S) -> None:
        """``reconcile_s``: the kubelet's setting, in seconds."""
        self._expected = reconcile_s
        self._rounds: dict[str, tuple[float, int]] = {}
        """Of each container its last update, and how many in the rhythm led to it; 0: it changed something."""
        self._round = self._previous = (-math.inf, -math.inf)
        """When the first and the last container of this round, and of the one before, were updated."""
        self._period: float | None = None
        self._last = 0.0

    @property
    def ends_at(self) -> float | None:
        """When the rhythm counts as ended without another round; None while there is none."""
        return None if self._period is None else self._last + _LATE * self._period

    def expect(self, reconcile_s: float) -> None:
        """The kubelet runs with this period now (seconds); of another one, what was learnt is dropped."""
        if reconcile_s != self._expected:
            self._expected = reconcile_s
            self.restarted()

    def updated(self, container_id: str, at: float, *, changed: bool) -> None:
        """The runtime finished writing a container's values again. ``changed``: they differ from before.

        Units: ``at`` is monotonic seconds. A container's creation may be left out, or reported as a change.
        """
        if not changed:
            self._note_round(at)
        before = self._rounds.get(container_id)
        if before is None:
            self._rounds[container_id] = (at, 0 if changed else 1)
            return
        last, rounds = before
        distance = at - last
        if distance < _ONE_UPDATE_S:
            return
        follows = any(
            _SHORTEST * self._expected <= apart <= _LONGEST * self._expected
            for apart in (distance, self._pause(last, at))
        )
        # An update with a cause starts again: the distance to it proves nothing.
        count = rounds + 1 if follows and rounds else 1
        rounds = 0 if changed else count
        self._rounds[container_id] = (at, rounds)
        if rounds >= _ROUNDS:
            self._period = distance if self._period is None else (self._period + distance) / 2
            self._last = at
        elif follows and self._period is not None:
            # A change is written in a round, too: the rhythm continues.
            self._last = at

    def _note_round(self, at: float) -> None:
        began, ended = self._round
        if at - ended >= _PAUSE * self._expected:
            self._previous, began = self._round, at
        self._round = (began, at)

    def _pause(self, last: float, at: float) -> float:
        """The time between two rounds, in which a container was updated; 0 where it was not in both."""
        # The kubelet's timer begins at the end of a round (wait.Until), and a round takes seconds on a busy node: a
        # container's updates are apart by a part of both rounds' work, too, in no fixed order.
        (first, ended), (began, _) = self._previous, self._round
        return began - ended if first <= last <= ended and began <= at else 0.0

    def restarted(self) -> None:
        """The kubelet restarted, possibly as another version."""
        # The first round rewrites everything in any version, and systemd restarts a failing kubelet every 10 s or so,
        # which is the CPU manager's period, too.
        self._rounds.clear()
        self._round = self._previous = (-math.inf, -math.inf)
        self._period = None

    def gone(self, container_id: str) -> None:
        self._rounds.pop(container_id, None)

    def period(self, now: float) -> float | None:
        """The rhythm in seconds, None when there is none (or not yet, or not any more)."""
        if (ends_at := self.ends_at) is not None and now >= ends_at:
            self._period = None
        return self._period
