"""Keeps the memory of the groups' CPU use between two readings: the fading peaks, and since when each is known."""

from collections.abc import Mapping
from typing import Final, final

from reconciler.placement.estimate import remembered
from state.cpu import GroupUse

_FIRST: Final = 2
"""A rate takes two readings: work in the second one existed before the agent, and is not new."""


@final
class UsageHistory:
    """Fading peaks of CPU use by group; `reconciler.placement.estimate.remembered` is the law."""

    def __init__(self) -> None:
        self._last: Mapping[str, GroupUse] = {}
        self._at: float | None = None
        self._readings = 0

    def add(self, uses: Mapping[str, GroupUse], now: float, half_life_s: float) -> Mapping[str, GroupUse]:
        """The newest use of each group, with its memory. ``now`` on the monotonic clock."""
        before = None if self._readings < _FIRST else self._last
        elapsed_s = 0.0 if self._at is None else now - self._at
        self._readings += 1
        self._at = now
        self._last = remembered(before, uses, elapsed_s, half_life_s)
        return self._last
