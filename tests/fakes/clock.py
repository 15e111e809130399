"""A clock that a test moves."""


class Clock:
    """Call it for monotonic seconds; ``now`` is set by the test."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def wall(self) -> float:
        """Seconds since the epoch at the same moment."""
        return 1_700_000_000.0 + self.now
