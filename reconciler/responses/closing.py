"""Closes the node to new BE pods while a shortage lasts, and opens it again. Pure.

While the node is closed, headroom is 0, and the node's object in the cluster has a mark
(`reconciler.actuators.node_mark`). What runs on the node is not changed.

Source: Crane's "disable scheduling" (a node condition and a PreferNoSchedule taint). Differences: the causes are the
shortages of evictions and not water marks of its own, it has an age, and the mark is removed after a crash.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from reconciler.responses.config import ClosingConfig
from reconciler.responses.eviction.triggers.base import Shortage
from reconciler.responses.eviction.triggers.table import TRIGGERS
from reconciler.responses.ladder import EscalationMemory, in_force
from reconciler.runtime.format import duration, plural
from state.closing import ClosedNode
from state.measures import Response

_SLOWEST: Final = 8
_RELAPSE_S: Final = 600.0
"""Closed again so soon after it was opened: it was opened too early."""
_SET_S: Final = 60.0
"""A clock that is adjusted moves by less; what the mark says until then is right to the minute."""
_LONGEST_REASON: Final = 200


class ClosingTurn(StrEnum):
    CLOSED = "closed"
    OPENED = "opened"
    AGED = "opened by its age"


class ClosingChange(Struct, frozen=True, kw_only=True):
    """One change, for people. ``closed``: what was or is in force."""

    turn: ClosingTurn
    closed: ClosedNode
    words: str


class ClosingState(Struct, frozen=True, kw_only=True):
    """What is remembered between two moments. Times are of the frame's clock.

    ``closed``: None: the node is open. ``calm_s``: since when no cause is left. ``spent``: it was opened by its age,
    and the causes are not over yet. ``first_s``: when an earlier run closed it; until no cause is left for
    ``reopen_s``.
    """

    closed: ClosedNode | None = None
    closed_s: float = 0.0
    opened_s: float | None = None
    calm_s: float | None = None
    relapses: int = 0
    spent: bool = False
    first_s: float | None = None


class ClosingPast(Struct, frozen=True, kw_only=True):
    """The state that is stored for the next run. Seconds since the epoch.

    ``since_s``: when the node was closed first; None: it is open. ``seen_s``: when that was so.
    """

    since_s: float | None = None
    spent: bool = False
    seen_s: float = 0.0


def kept(state: ClosingState, now: tuple[float, float]) -> ClosingPast:
    at_s, wall_s = now
    first_s = state.closed_s if state.closed is not None else state.first_s
    if first_s is None and not state.spent:
        return ClosingPast()
    since_s = wall_s if first_s is None else wall_s - (at_s - first_s)
    return ClosingPast(since_s=since_s, spent=state.spent, seen_s=wall_s)


def resumed(past: ClosingPast, now: tuple[float, float]) -> ClosingState:
    """The state to begin with: an open node. If it is closed again soon its age counts from the first closing.

    Restarts of the daemon must not keep the node out of the cluster for longer than ``longest_s``.
    """
    at_s, wall_s = now
    if past.since_s is None or not 0 <= wall_s - past.seen_s <= _RELAPSE_S:
        return ClosingState()
    return ClosingState(first_s=at_s - max(0.0, wall_s - past.since_s), spent=past.spent)


def causes_of(pressures: Iterable[Shortage], enforced: Iterable[str], ladder: EscalationMemory) -> Mapping[str, str]:
    """Why the node should be closed now, as texts by key. ``enforced``: the triggers that are no dry run."""
    triggers = set(enforced)
    causes = {
        f"{shortage.trigger} {shortage.subject}": f"{shortage.trigger}: {shortage.evidence}"
        for shortage in pressures
        if shortage.trigger in triggers and _closes(shortage.trigger)
    }
    for climb, step in in_force(ladder):
        if step.response is Response.CLOSE:
            causes[f"{climb.rule} {climb.victim}"] = f"victim {climb.title} ({climb.rule})"
    return causes


def advance(
    state: ClosingState, causes: Mapping[str, str], now: tuple[float, float], config: ClosingConfig, *, off: str = ""
) -> tuple[ClosingState, ClosingChange | None]:
    """One moment further. ``now``: the frame's clock, and seconds since the epoch. ``off``: why it must be open.

    The node is closed at the first cause, and opened after ``reopen_s`` without one, or after ``longest_s``.
    """
    at_s, _ = now
    if off or not config.enabled:
        return _opened(state, at_s, off or "closing.enabled is false", spent=False)
    if causes:
        state = replace(state, calm_s=None)
    elif state.calm_s is None:
        # A run that begins has not measured everything yet: what an earlier one knew is forgotten later.
        state = replace(state, calm_s=at_s, spent=state.spent and state.first_s is not None)
    if state.first_s is not None and state.calm_s is not None and at_s - state.calm_s >= config.reopen_s:
        state = replace(state, first_s=None, spent=False)
    # The age is over before the node is closed again: it is not closed for a moment only.
    if state.first_s is not None and at_s - state.first_s >= config.longest_s:
        state = replace(state, spent=True)
    closed = state.closed
    if closed is None:
        return (state, None) if not causes or state.spent else _close(state, causes, now, config)
    if at_s - state.closed_s >= config.longest_s:
        # A shortage that closing does not end must not keep the node out of the cluster. ``spent``: the node is closed
        # again only once all causes are over.
        words = f"closed for {duration(config.longest_s)}"
        return _opened(state, at_s, words, spent=bool(causes), turn=ClosingTurn.AGED)
    needed_s = reopen_s(state, config)
    if state.calm_s is not None and at_s - state.calm_s >= needed_s:
        return _opened(state, at_s, f"no shortage for {duration(needed_s)}", spent=False)
    if closed.mark is not config.mark:
        state = replace(state, closed=replace(closed, mark=config.mark))
    return _dated(state, now, config), None


def _dated(state: ClosingState, now: tuple[float, float], config: ClosingConfig) -> ClosingState:
    """The state with its wall-clock times corrected, if that clock was set since."""
    at_s, wall_s = now
    since_s, closed = wall_s - (at_s - state.closed_s), state.closed
    if closed is None or abs(since_s - closed.since_s) < _SET_S:
        return state
    return replace(state, closed=replace(closed, since_s=since_s, until_s=since_s + config.longest_s))


def reopen_s(state: ClosingState, config: ClosingConfig) -> float:
    """How long there must be no cause before the node is opened: longer after each time it was opened too early."""
    return config.reopen_s * min(1 << state.relapses, _SLOWEST)


def _closes(trigger: str) -> bool:
    # What a rule names has no trigger of its own: an online pod suffers.
    return trigger not in TRIGGERS or TRIGGERS[trigger].closes


def _close(
    state: ClosingState, causes: Mapping[str, str], now: tuple[float, float], config: ClosingConfig
) -> tuple[ClosingState, ClosingChange]:
    at_s, wall_s = now
    texts = list(causes.values())
    reason = texts[0][:_LONGEST_REASON]
    if len(texts) > 1:
        reason += f"; and {plural(len(texts) - 1, 'more cause')}"
    closed_s = at_s if state.first_s is None else state.first_s
    since_s = wall_s - (at_s - closed_s)
    closed = ClosedNode(reason=reason, since_s=since_s, until_s=since_s + config.longest_s, mark=config.mark)
    soon = state.opened_s is not None and at_s - state.opened_s < _RELAPSE_S
    relapses = state.relapses + 1 if soon else 0
    change = ClosingChange(turn=ClosingTurn.CLOSED, closed=closed, words=reason)
    return ClosingState(closed=closed, closed_s=closed_s, relapses=relapses), change


def _opened(
    state: ClosingState, at_s: float, words: str, *, spent: bool, turn: ClosingTurn = ClosingTurn.OPENED
) -> tuple[ClosingState, ClosingChange | None]:
    if state.closed is None:
        return replace(state, spent=spent, first_s=None), None
    change = ClosingChange(turn=turn, closed=state.closed, words=words)
    opened = ClosingState(opened_s=at_s, calm_s=state.calm_s, relapses=state.relapses, spent=spent)
    return opened, change
