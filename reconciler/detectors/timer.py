"""Breach after a while, clear after another: the timers that detectors with a limit share.

Source: the common shape of the peers' thresholds (breach fast, clear slowly).
"""

from typing import Annotated

from msgspec import Meta, Struct

from state.evidence import Verdict


class DebounceTiming(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long it takes until a condition counts, and until it no longer does."""

    for_s: Annotated[float, Meta(ge=0, le=86400, description="duration of the condition before it counts")] = 10.0
    clear_s: Annotated[float, Meta(ge=0, le=86400, description="duration without the condition before it clears")] = (
        30.0
    )


class DebounceState(Struct, frozen=True, kw_only=True, gc=False):
    """State between two evaluations. ``at_s``: time of the sample that the last evaluation used.

    ``active``: the condition has counted and is not cleared.
    """

    at_s: float
    since_s: float | None = None
    clear_since_s: float | None = None
    active: bool = False

    @property
    def verdict(self) -> Verdict:
        """Suspect while the condition holds but not for long enough."""
        if self.active:
            return Verdict.INTERFERED
        return Verdict.OK if self.since_s is None else Verdict.SUSPECT


def paused(memory: DebounceState | None, now: float) -> DebounceState:
    """After an evaluation without a sample: timers restart, an active breach remains active."""
    return DebounceState(at_s=now, active=memory is not None and memory.active)


def step(
    memory: DebounceState | None,
    at: float,
    timing: DebounceTiming,
    *,
    breached: bool,
    cleared: bool,
    look_s: float,
    ready: bool = True,
) -> DebounceState:
    """One evaluation. ``at``: time of its sample, so that an old sample used twice adds no time.

    ``look_s``: the longest time between two samples that counts as continuous. ``breached`` and ``cleared`` are both
    false between the limit and the value at which it clears. ``ready`` False: another condition must be true, too,
    before a breach counts.
    """
    # Time in which nothing was measured counts neither for a breach nor for its end.
    if memory is None or not 0 <= at - memory.at_s <= look_s:
        memory = paused(memory, at)
    since = None
    if breached:
        since = at if memory.since_s is None else memory.since_s
    clear_since = None
    if cleared:
        clear_since = at if memory.clear_since_s is None else memory.clear_since_s
    active = memory.active
    if not active:
        active = ready and since is not None and at - since >= timing.for_s
    elif clear_since is not None and at - clear_since >= timing.clear_s:
        active = False
    return DebounceState(at_s=at, since_s=since, clear_since_s=clear_since if active else None, active=active)
