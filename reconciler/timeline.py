"""What happened to one container, with times: the material of ``explain`` and of the latency metrics."""

import time
from typing import final

from reconciler.hotlane import HotResult


@final
class Timeline:
    """Times are wall-clock seconds, 0.0 for "not (yet)"; ``hot_s`` is signal to last write in seconds."""

    __slots__ = ("before_exec", "hot_s", "prepared_at", "seen_at", "settled_at", "signal_at", "verified_at")

    def __init__(self, seen_at: float) -> None:
        self.seen_at = seen_at
        self.prepared_at = 0.0
        self.signal_at = 0.0
        self.settled_at = 0.0
        self.verified_at = 0.0
        self.hot_s: float | None = None
        self.before_exec: bool | None = None

    def fired(self, result: HotResult) -> None:
        """The hot lane has written at the runtime's signal."""
        if result.creation:
            self.signal_at = time.time() - (time.monotonic() - result.signal_at)
            self.settled_at = self.signal_at + result.seconds
            self.hot_s = result.seconds
            self.before_exec = result.before_exec

    def facts(self) -> dict[str, object]:
        """As it is shown."""
        return {
            "seen_at": self.seen_at,
            "prepared_at": self.prepared_at or None,
            "signal_at": self.signal_at or None,
            "written_at": self.settled_at or None,
            "verified_at": self.verified_at or None,
            "signal_to_last_write_s": self.hot_s,
            "before_exec": self.before_exec,
        }
