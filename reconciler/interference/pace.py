"""How often the monitor passes: each ``interference.sample_s``, half as often without a sign that something is wrong.

A pass costs some milliseconds of CPU time, most of which read what has not changed. Signs are an interfered victim,
half of a limit that has to be exceeded for a while (`Detector.near`), a measure in force, a shortage, an eviction, and
an event of memory or CPU pressure, which makes a pass at once. Suspicion by windows of two seconds is none: idle pods
that wake up a few times a second beside BE work cause it all the time. Units: seconds on the monotonic clock.
"""

from typing import Final, final

from reconciler.detectors.base import CALM_S

WATCHED_S: Final = 5.0
"""After the last sign passes stay frequent for so long: about what it takes from a condition's beginning to a verdict
by windows. A recurring sign changes the pace once.
"""


@final
class PassPace:
    """The time between two passes."""

    def __init__(self) -> None:
        self._signed_at: float | None = None

    def sign(self, now: float) -> None:
        """There is a sign; the start of the monitor is one, too."""
        self._signed_at = now

    def interval_s(self, sample_s: float, now: float) -> float:
        """Until the next pass; ``sample_s``: the configuration's."""
        if self._signed_at is None or now - self._signed_at < WATCHED_S:
            return sample_s
        # What begins without an event is found one interval later at most. One that a person has set to more is not
        # doubled.
        return max(sample_s, min(2 * sample_s, CALM_S))
