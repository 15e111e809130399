"""What people are told of an eviction: once that it is planned, once how it ended. Pure."""

from typing import Final

from reconciler.alerts.alert import Alert, Kind, Severity
from state.eviction import Case, Means, Outcome

_KINDS: Final = {
    Outcome.DONE: Kind.EVICTION_DONE,
    Outcome.GONE: Kind.EVICTION_DONE,
    Outcome.REFUSED: Kind.EVICTION_REFUSED,
    Outcome.ABANDONED: Kind.EVICTION_REFUSED,
    Outcome.FAILED: Kind.EVICTION_FAILED,
}
_SEVERITIES: Final = {
    Outcome.DONE: Severity.WARNING,
    Outcome.GONE: Severity.INFO,
    Outcome.REFUSED: Severity.WARNING,
    Outcome.ABANDONED: Severity.INFO,
    Outcome.FAILED: Severity.CRITICAL,
}
_WORDS: Final = {
    Outcome.DONE: "was evicted",
    Outcome.GONE: "ended by itself before it was evicted",
    Outcome.REFUSED: "is not evicted",
    Outcome.ABANDONED: "is not evicted after all",
    Outcome.FAILED: "could not be evicted",
}
_MOST_RANKED: Final = 20


def planned(case: Case) -> Alert:
    """Before anything is done."""
    order = case.order
    return Alert(
        kind=Kind.EVICTION_PLANNED,
        key=_key(case),
        summary=f"{order.title} is going to be evicted ({order.cause}): {order.evidence}",
        severity=Severity.WARNING,
        at_s=case.begun_s,
        labels=_labels(case),
        details=_details(case),
        durable=True,
    )


def ended(case: Case) -> Alert:
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


def _key(case: Case) -> str:
    return f"eviction:{case.order.id}"


def _labels(case: Case) -> dict[str, str]:
    order = case.order
    means = {"means": str(case.means)} if isinstance(case.means, Means) else {}
    return {
        "namespace": order.namespace or "",
        "pod": order.name or order.title,
        "uid": order.uid,
        "cause": order.cause,
        **means,
    }


def _details(case: Case) -> dict[str, str]:
    order = case.order
    found = {
        "order": order.id,
        "evidence": order.evidence,
        "ranking": "\n".join(order.ranking[:_MOST_RANKED]),
        "tried": "\n".join(case.tried),
        "rounds": str(case.rounds) if case.rounds else "",
    }
    return {name: text for name, text in found.items() if text}
