"""The reason of each order under way, and whether it still applies: an expired reason does not justify ending a pod.

Pure.

Unknown is not expired: orders of a trigger without readings, and of an earlier run of the daemon, stay valid.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from reconciler.responses.eviction.triggers.base import TriggerResult
from reconciler.responses.eviction.triggers.named import NAME, RequestedVictim
from state.eviction import EvictionOrder
from state.evidence import RuleVerdict, Verdict

EASED_S: Final = 10.0
"""A pressure absent for this long is over: a shorter time would order and withdraw in turn."""

Suffering = Collection[tuple[str, str]]
"""Rule and title of each victim that is not known to be well."""


class EvictionReason(Struct, frozen=True, kw_only=True):
    """Of one order. ``named``: where a rule named the pod. ``pressed_s``: when it was last so (monotonic seconds)."""

    trigger: str
    subject: str
    uid: str
    pressed_s: float
    named: RequestedVictim | None = None


def unhealthy(findings: Iterable[RuleVerdict]) -> Suffering:
    """Of the findings of one moment."""
    return frozenset((verdict.rule, verdict.title) for verdict in findings if verdict.verdict is not Verdict.OK)


def reason_of(order: EvictionOrder, named: RequestedVictim | None, now: float) -> EvictionReason:
    """The reason for an order that is given now."""
    return EvictionReason(trigger=order.cause, subject=order.subject, uid=order.uid, pressed_s=now, named=named)


def still_active(
    reasons: Mapping[str, EvictionReason], readings: Mapping[str, TriggerResult], ill: Suffering | None, now: float
) -> dict[str, EvictionReason]:
    """The reasons, by order, now. ``ill`` None: the state of the rules' victims is unknown."""
    return {
        order: replace(reason, pressed_s=now) if _presses(reason, readings, ill) else reason
        for order, reason in reasons.items()
    }


def expired(reasons: Mapping[str, EvictionReason], now: float) -> dict[str, str]:
    """The orders whose reason no longer applies, with a text."""
    return {
        order: f"{reason.named.victim} has recovered" if reason.named is not None else "the shortage has ended"
        for order, reason in reasons.items()
        if now - reason.pressed_s >= EASED_S
    }


def _presses(reason: EvictionReason, readings: Mapping[str, TriggerResult], ill: Suffering | None) -> bool:
    if reason.trigger == NAME:
        named = reason.named
        return named is None or ill is None or (named.rule, named.victim) in ill
    reading = readings.get(reason.trigger)
    if reading is None:
        return False  # it was switched off
    return not reading.known or any(
        shortage.subject == reason.subject and (shortage.only is None or reason.uid in shortage.only)
        for shortage in reading.pressures
    )
