"""What the agent's parts count, for the hourly rows of `reconciler.control.effect_hours`."""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from reconciler.control.effect_hours import EffectHours, ModeNow

if TYPE_CHECKING:
    from reconciler.daemon.agent import Agent

_TURNS: Final = {"applied": "actions", "asked": "actions", "helped": "helped", "undone": "undone"}
"""Transitions of responses that were in force; those of rules in shadow have names of their own."""
_EVICTIONS: Final = {
    "eviction-done": "evictions",
    "eviction-failed": "evictions_failed",
    "eviction-refused": "evictions_failed",
}
_NODE: Final = "node"


def effect_hours_of(agent: "Agent") -> EffectHours:
    """The hourly rows of an agent that is being built."""
    return EffectHours(
        agent.store, agent.store_lane, counted=lambda: effect_counts(agent), mode=lambda: effect_mode(agent)
    )


def effect_counts(agent: "Agent") -> Mapping[str, int]:
    """The counters `COUNTED` since the agent was built; those of responses since detection began."""
    starts, foreign = agent.counters.values.starts, agent.judge.foreign_writes
    counts = Counter(
        starts=starts["true"] + starts["false"],
        late=starts["false"],
        foreign_writes=sum(foreign.writes.values()),
        yields=foreign.yields,
    )
    if agent.watching.observer is not None:
        for (_, turn), count in agent.watching.observer.changes.items():
            if turn in _TURNS:
                counts[_TURNS[turn]] += count
    for (kind, _), count in agent.alert_service.counts.items():
        if kind in _EVICTIONS:
            counts[_EVICTIONS[kind]] += count
    return counts


def effect_mode(agent: "Agent") -> ModeNow:
    """What the report counts the minutes by; ``broken`` by the kernel's files, not by the mode or the plan."""
    broken = any(not status.ok for status in agent.conditions()) or any(claim.cut for claim in agent.claims())
    return ModeNow(enforces=agent.judge.enforce, on_hold=_NODE in agent.judge.holds, broken=broken)
