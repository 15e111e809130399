"""What of a judgement people are told: who suffers and no longer does, what was done about it and taken back. Pure."""

from collections.abc import Iterator
from typing import Final

from reconciler.alerts.alert import Alert, Kind, Severity
from reconciler.brain import Judgement
from reconciler.responses.ladder import Change, Turn
from state.evidence import Finding, Frame

_UNDOING: Final = frozenset({Turn.UNDONE, Turn.EASED, Turn.ENDED})


def alerts_of(judgement: Judgement, frame: Frame) -> Iterator[Alert]:
    """The alerts of one moment. What a rule in shadow would do is told as such, as information."""
    for finding in judgement.begun:
        yield _found(finding, frame, over=False)
    for finding in judgement.over:
        yield _found(finding, frame, over=True)
    for change in judgement.changes:
        if change.turn is not Turn.HELPED:
            yield _done(change, frame)


def _found(finding: Finding, frame: Frame, *, over: bool) -> Alert:
    first = finding.suspects[0] if finding.suspects else None
    whom = f"; suspect {first.title} ({first.reason})" if first is not None else ""
    words = f"{finding.title} suffers ({finding.rule}): {'; '.join(finding.evidence)}{whom}"
    if over:
        words = f"{finding.title} no longer suffers ({finding.rule}): {'; '.join(finding.evidence)}"
    return Alert(
        kind=Kind.CLEARED if over else Kind.INTERFERENCE,
        key=f"{finding.rule} {finding.victim}",
        summary=words,
        severity=Severity.INFO if over else Severity.WARNING,
        at_s=frame.wall_s,
        labels=_labels(finding.rule, finding.victim, frame),
        details={"suspects": ", ".join(f"{one.title} {one.score:.2f}" for one in finding.suspects)},
        resolved=over,
    )


def _done(change: Change, frame: Frame) -> Alert:
    undone = change.turn in _UNDOING
    would = "would " if change.shadow else ""
    verb = {Turn.APPLIED: "do", Turn.EXHAUSTED: "stop"}.get(change.turn, "take back") if change.shadow else change.turn
    return Alert(
        kind=Kind.UNDONE if undone else Kind.RESPONSE,
        key=f"{change.rule} {change.victim} {change.step.response if change.step is not None else ''}",
        summary=f"for {change.title} ({change.rule}), {would}{verb}: {change.words}",
        severity=Severity.WARNING if change.turn is Turn.EXHAUSTED and not change.shadow else Severity.INFO,
        at_s=frame.wall_s,
        labels={**_labels(change.rule, change.victim, frame), "mode": "shadow" if change.shadow else "enforce"},
        details={} if change.step is None or change.step.suspect is None else {"suspect": change.step.title},
    )


def _labels(rule: str, victim: str, frame: Frame) -> dict[str, str]:
    pod = frame.pods.get(victim.removeprefix("pod:"))
    if pod is None:
        return {"rule": rule, "victim": victim}
    return {"rule": rule, "namespace": pod.namespace or "", "pod": pod.title.rpartition("/")[2], "uid": pod.uid}
