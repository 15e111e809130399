"""Alerts of an eviction: one that it is planned, one with its result. Pure."""

from typing import Final

from reconciler.alerts.alert import Alert, AlertKind, Severity
from state.eviction import EvictionCase, EvictionMethodName, EvictionOutcome

_KINDS: Final = {
    EvictionOutcome.DONE: AlertKind.EVICTION_DONE,
    EvictionOutcome.GONE: AlertKind.EVICTION_DONE,
    EvictionOutcome.REFUSED: AlertKind.EVICTION_REFUSED,
    EvictionOutcome.ABANDONED: AlertKind.EVICTION_REFUSED,
    EvictionOutcome.FAILED: AlertKind.EVICTION_FAILED,
}
_SEVERITIES: Final = {
    EvictionOutcome.DONE: Severity.WARNING,
    EvictionOutcome.GONE: Severity.INFO,
    EvictionOutcome.REFUSED: Severity.WARNING,
    EvictionOutcome.ABANDONED: Severity.INFO,
    EvictionOutcome.FAILED: Severity.CRITICAL,
}
_WORDS: Final = {
    EvictionOutcome.DONE: "was evicted",
    EvictionOutcome.GONE: "ended before it was evicted",
    EvictionOutcome.REFUSED: "was not evicted: refused",
    EvictionOutcome.ABANDONED: "eviction cancelled",
    EvictionOutcome.FAILED: "eviction failed",
}
_MOST_RANKED: Final = 20


def planned(case: EvictionCase) -> Alert:
    """Before anything is done."""
    order = case.order
    return Alert(
        kind=AlertKind.EVICTION_PLANNED,
        key=_key(case),
        summary=f"{order.title} will be evicted ({order.cause}): {order.evidence}",
        severity=Severity.WARNING,
        at_s=case.begun_s,
        labels=_labels(case),
        details=_details(case),
        durable=True,
    )


def unguarded(case: EvictionCase, at_s: float) -> Alert:
    """Before the first action that no disruption budget has allowed."""
    order = case.order
    return Alert(
        kind=AlertKind.EVICTION_UNGUARDED,
        key=_key(case),
        summary=f"{order.title} is ended without its disruption budget, which could not be asked ({case.unasked}): "
        f"{order.cause}: {order.evidence}",
        severity=Severity.CRITICAL,
        at_s=at_s,
        labels=_labels(case),
        details=_details(case),
        durable=True,
    )


def ended(case: EvictionCase) -> Alert:
    """How it ended; the case has an outcome."""
    assert case.outcome is not None
    order = case.order
    return Alert(
        kind=_KINDS[case.outcome],
        key=_key(case),
        summary=f"{order.title} {_WORDS[case.outcome]} ({order.cause}): {case.detail}",
        severity=_SEVERITIES[case.outcome],
        at_s=case.ended_s,
        labels={**_labels(case), "outcome": str(case.outcome)},
        details=_details(case),
        durable=True,
    )


def _key(case: EvictionCase) -> str:
    return f"eviction:{case.order.id}"


def _labels(case: EvictionCase) -> dict[str, str]:
    order = case.order
    means = {"means": str(case.means)} if isinstance(case.means, EvictionMethodName) else {}
    return {
        "namespace": order.namespace or "",
        "pod": order.name or order.title,
        "uid": order.uid,
        "cause": order.cause,
        **means,
    }


def _details(case: EvictionCase) -> dict[str, str]:
    order = case.order
    texts = {
        "order": order.id,
        "evidence": order.evidence,
        "ranking": "\n".join(order.ranking[:_MOST_RANKED]),
        "tried": "\n".join(case.tried),
        "rounds": str(case.rounds) if case.rounds else "",
        "budget": case.budget,
        "unasked": case.unasked,
    }
    return {name: text for name, text in texts.items() if text}
