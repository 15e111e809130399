"""Evictions as plain values for people and programs: the state document's section ``eviction``. Pure.

``enabled``, ``dry_run``; ``triggers`` (name, mode ``off``/``dry-run``/``evict``, known, words, cools_s); ``pressures``;
``would`` and ``open``, ``ended`` (newest first) with the whole ranking each, and of cases the API server's
``requests``, last ``reply``, the ``budget`` that refused and why none could be asked (``unasked``); ``refusals``:
pressures for which no pod is evicted, why, and the ranking; ``room``: how many the caps leave now, and which binds.
Times: seconds since the epoch.
"""

from collections.abc import Iterable
from typing import Final

from reconciler.responses.eviction.config import EvictionConfig, TriggersConfig
from reconciler.responses.eviction.limits import cooldown_left, room
from reconciler.responses.eviction.plan import EvictionDecision, EvictionPlanState
from reconciler.responses.eviction.triggers.base import TriggerResult
from reconciler.runtime.plain import fields_of
from state.eviction import EvictionCase, EvictionOrder

_ENDED: Final = 20
"""Ended cases that are shown."""

Row = dict[str, object]


def section(
    config: EvictionConfig,
    decision: EvictionDecision,
    memory: EvictionPlanState | None,
    cases: Iterable[EvictionCase],
    *,
    enforce: bool,
    now: float,
) -> Row:
    """The section. ``enforce``: what is planned on this node is also written. ``now``: the monotonic clock."""
    known = list(cases)
    ended = sorted((case for case in known if not case.open), key=lambda case: -case.ended_s)
    dry = config.dry_run or not enforce
    return {
        "enabled": config.enabled,
        "dry_run": dry,
        "triggers": [
            _trigger(config, name, decision.readings.get(name), memory, dry=dry, now=now)
            for name in TriggersConfig.__struct_fields__
        ],
        "pressures": [
            fields_of(shortage, "trigger subject good need hard classes evidence") for shortage in decision.pressures
        ],
        "would": [_order(order) for order in decision.would],
        "open": [_case(case) for case in sorted(known, key=lambda case: case.begun_s) if case.open],
        "ended": [_case(case) for case in ended[:_ENDED]],
        "refusals": [
            fields_of(refusal, "trigger subject good why reason evidence ranking") for refusal in decision.refusals
        ],
        "room": _room(config, memory, now),
    }


def _trigger(
    config: EvictionConfig,
    name: str,
    reading: TriggerResult | None,
    memory: EvictionPlanState | None,
    *,
    dry: bool,
    now: float,
) -> Row:
    own = getattr(config.triggers, name)
    mode = "evict"
    if dry or own.dry_run:
        mode = "dry-run"
    if not (config.enabled and own.enabled):
        mode = "off"
    return {
        "name": name,
        "mode": mode,
        "known": None if reading is None else reading.known,
        "words": "" if reading is None else reading.words,
        "cools_s": 0.0 if memory is None else cooldown_left(memory.past, name, own.cooldown_s, now),
    }


def _order(order: EvictionOrder) -> Row:
    names = "id uid title owner cause subject evidence forced critical grace_s frees ranking"
    return fields_of(order, names) | {"decided_at": order.decided_s}


def _case(case: EvictionCase) -> Row:
    row = fields_of(case, "step means tried requests reply budget unasked outcome detail")
    return _order(case.order) | row | {"step_at": case.step_s, "ended_at": case.ended_s}


def _room(config: EvictionConfig, memory: EvictionPlanState | None, now: float) -> Row | None:
    if memory is None:
        return None
    left = room(config.limits, memory.past, now)
    return {"count": max(0, left.count), "reason": left.reason}
