"""Alerts of an evaluation: pods with interference and its end, responses and their end. Pure.

A finding lasts until its end is reported, and so do all steps of one response against one suspect (or all): they end
with the last of them.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Final

from msgspec.structs import replace

from reconciler.alerts.alert import Alert, AlertKind, Severity
from reconciler.interference.engine import Evaluation
from reconciler.responses.closing import ClosingChange, ClosingTurn
from reconciler.responses.ladder import EscalationChange, EscalationState, Transition
from reconciler.responses.promotion import ModeChange
from reconciler.responses.steps import ResponseStep
from reconciler.runtime.format import clock
from state.closing import ClosedNode, NodeMark
from state.entry import LedgerEvent
from state.evidence import RuleVerdict, SampleFrame

_BACK: Final = frozenset({Transition.UNDONE, Transition.ENDED})
"""A step is no longer in force."""
_NODE_KEY: Final = "node"
_WOULD: Final = {Transition.APPLIED: "do", Transition.ASKED: "do", Transition.EXHAUSTED: "stop"}


def alerts_of(judgement: Evaluation, frame: SampleFrame, climbs: Iterable[EscalationState]) -> Iterator[Alert]:
    """The alerts of one moment. What a rule in shadow would do is reported as such, as information.

    ``climbs``: what is in force after that moment.
    """
    for finding in judgement.begun:
        yield _found(finding, frame, over=False)
    for finding in judgement.over:
        yield _found(finding, frame, over=True)
    for mode in judgement.modes:
        yield _moded(mode, frame)
    in_force = {_key(climb, step) for climb in climbs for step in climb.steps}
    for change in judgement.changes:
        if change.turn is not Transition.HELPED:
            yield _done(change, frame, in_force)


def effect_events(judgement: Evaluation, frame: SampleFrame) -> Iterator[LedgerEvent]:
    """Responses that had the wanted effect: no alert, and an event of the history."""
    for change in judgement.changes:
        if change.turn is Transition.HELPED:
            labels = _labels(change.rule, change.victim, frame)
            would = "would have " if change.shadow else ""
            reason = f"victim {change.title} ({change.rule}), {would}{change.turn}: {change.words}"
            yield LedgerEvent(at=frame.wall_s, kind="helped", reason=reason, pod_uid=labels.get("uid"))


def resolutions(
    findings: Iterable[RuleVerdict], climbs: Iterable[EscalationState], frame: SampleFrame, why: str
) -> Iterator[Alert]:
    """The ends of all that lasts, because the monitor stops. ``frame``: the newest, at the time of the end."""
    for finding in findings:
        summary = f"{finding.title}: interference by {finding.rule} can no longer be evaluated: {why}"
        yield replace(_found(finding, frame, over=True), summary=summary)
    for climb in climbs:
        for step in reversed(climb.steps):
            change = EscalationChange(
                turn=Transition.ENDED,
                rule=climb.rule,
                victim=climb.victim,
                title=climb.title,
                words=f"{step.describe}: {why}",
                shadow=climb.shadow or step.dry,
                step=step,
            )
            yield _done(change, frame, ())


def closing_alert(change: ClosingChange, at_s: float) -> Alert:
    """The node was closed to new BE pods, or is open to them again."""
    if change.turn is ClosingTurn.CLOSED:
        closed = change.closed
        also = " NoSchedule keeps online pods away, too." if closed.mark is NodeMark.NO_SCHEDULE else ""
        return Alert(
            kind=AlertKind.CLOSED,
            key=_NODE_KEY,
            summary=f"the node is closed to new BE pods (headroom 0, mark {closed.mark}): {closed.reason}.{also}",
            severity=Severity.WARNING if also else Severity.INFO,
            at_s=at_s,
            labels={"mark": closed.mark.value},
            details={"until": clock(closed.until_s)},
        )
    alert = opened_alert(change.closed, change.words, at_s)
    if change.turn is ClosingTurn.AGED:
        summary = f"{alert.summary}; the shortage lasts: {change.closed.reason}"
        return replace(alert, summary=summary, severity=Severity.WARNING)
    return alert


def opened_alert(closed: ClosedNode, why: str, at_s: float) -> Alert:
    return Alert(
        kind=AlertKind.OPENED,
        key=_NODE_KEY,
        summary=f"the node is open to new BE pods again: {why}",
        severity=Severity.INFO,
        at_s=at_s,
        labels={"mark": closed.mark.value},
        details={"closed": clock(closed.since_s), "reason": closed.reason},
    )


def _found(finding: RuleVerdict, frame: SampleFrame, *, over: bool) -> Alert:
    first = finding.suspects[0] if finding.suspects else None
    whom = f"; suspect {first.title} ({first.reason})" if first is not None else ""
    message = f"{finding.title}: interference ({finding.rule}): {'; '.join(finding.evidence)}{whom}"
    if over:
        message = f"{finding.title}: interference ended ({finding.rule}): {'; '.join(finding.evidence)}"
    return Alert(
        kind=AlertKind.CLEARED if over else AlertKind.INTERFERENCE,
        key=f"{finding.rule} {finding.victim}",
        summary=message,
        severity=Severity.INFO if over else Severity.WARNING,
        at_s=frame.wall_s,
        labels=_labels(finding.rule, finding.victim, frame),
        details={"suspects": ", ".join(f"{suspect.title} {suspect.score:.2f}" for suspect in finding.suspects)},
        resolved=over,
    )


def _moded(mode: ModeChange, frame: SampleFrame) -> Alert:
    """A rule enforces from now on by its record, or is a dry run again."""
    now = "enforced from now on" if mode.enforcing else "a dry run again"
    return Alert(
        kind=AlertKind.OTHER,
        key=f"rule {mode.rule}",
        summary=f"rule {mode.rule} is {now}: {mode.reason}",
        severity=Severity.INFO if mode.enforcing else Severity.WARNING,
        at_s=frame.wall_s,
        labels={"rule": mode.rule, "mode": "enforce" if mode.enforcing else "dry_run"},
    )


def _done(change: EscalationChange, frame: SampleFrame, in_force: Collection[str]) -> Alert:
    step = change.step
    key = _key(change, step)
    kind = AlertKind.UNDONE if change.turn in _BACK and key not in in_force else AlertKind.RESPONSE
    if change.turn is Transition.EXHAUSTED:
        kind = AlertKind.EXHAUSTED
    would = "would " if change.shadow else ""
    verb = _WOULD.get(change.turn, "undo") if change.shadow else change.turn
    return Alert(
        kind=kind,
        key=key,
        summary=f"victim {change.title} ({change.rule}), {would}{verb}: {change.words}",
        severity=Severity.WARNING if change.turn is Transition.EXHAUSTED and not change.shadow else Severity.INFO,
        at_s=frame.wall_s,
        labels={**_labels(change.rule, change.victim, frame), "mode": "dry_run" if change.shadow else "enforce"},
        details={} if step is None or step.suspect is None else {"suspect": step.title},
    )


def _key(of: EscalationChange | EscalationState, step: ResponseStep | None) -> str:
    """What makes steps one and the same response. A shadow's is another one: it may end as the other begins."""
    what = () if step is None else (step.response, step.what, step.suspect or "all")
    shadow = of.shadow or (step is not None and step.dry)
    return " ".join((of.rule, of.victim, *what, *(("shadow",) if shadow else ())))


def _labels(rule: str, victim: str, frame: SampleFrame) -> dict[str, str]:
    pod = frame.pods.get(victim.removeprefix("pod:"))
    if pod is None:
        return {"rule": rule, "victim": victim}
    return {"rule": rule, "namespace": pod.namespace or "", "pod": pod.title.rpartition("/")[2], "uid": pod.uid}
