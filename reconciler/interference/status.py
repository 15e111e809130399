"""The section ``interference`` of the state document: victims, evidence, and responses in force."""

from collections import Counter
from collections.abc import Callable, Mapping

from msgspec import to_builtins

from reconciler.config.model import Config
from reconciler.interference.engine import Evaluation
from reconciler.interference.monitor import InterferenceMonitor
from reconciler.responses.closing import reopen_s
from reconciler.responses.eviction.status import section
from reconciler.responses.ladder import EscalationState, in_force
from reconciler.runtime.counters import InterferenceCounters
from reconciler.runtime.plain import fields_of
from state.evidence import RuleVerdict, Verdict
from state.measures import Response, Restrictions

_AT_PODS = frozenset({Response.SQUEEZE, Response.FREEZE})
_QUIET = frozenset({Verdict.OK})


def status_document(observer: InterferenceMonitor, refused: Callable[[str], str]) -> Mapping[str, object]:
    """Plain values. Findings that are ``ok`` are counted, not listed.

    ``refused``: what of the responses on a pod is not in its files, by uid.
    """
    judgement = observer.judgement or Evaluation(at_s=0.0)
    return {
        "rules": {
            name: {
                "dry_run": not observer.engine.enforces(name),
                "responses": [response.value for response in rule.allowed],
                "record": observer.engine.record(name),
            }
            for name, rule in observer.engine.rules.items()
        },
        "verdicts": _counts(judgement),
        "findings": [
            _finding(verdict, judgement.at_s) for verdict in judgement.findings if verdict.verdict not in _QUIET
        ],
        "ladder": [
            _climb(climb, judgement.at_s, refused) for _, climb in sorted(observer.engine.ladder.climbs.items())
        ],
        "useless": dict(sorted(observer.engine.ladder.useless.items())),
        "measures": to_builtins(judgement.measures) if judgement.measures != Restrictions() else {},
        "signals": {"problems": observer.problems(), "cpu_s": observer.costs()},
        "passes": observer.passes,
        "woken": dict(sorted(observer.wakes.items())),
        "last_pass_s": observer.pass_s,
        "recording": {
            "bytes": observer.recorder.written,
            "lost_blocks": observer.recorder.lost,
            "problem": observer.recorder.problem,
        },
    }


def evictions(observer: InterferenceMonitor, config: Config, *, enforce: bool, now: float) -> Mapping[str, object]:
    """The section ``eviction``. ``now``: the monotonic clock."""
    facts = section(config.eviction, observer.decision, observer.evictions, observer.cases(), enforce=enforce, now=now)
    return {**facts, "closing": _closing(observer, config, now)}


def _closing(observer: InterferenceMonitor, config: Config, now: float) -> Mapping[str, object]:
    """Whether the node is closed to new BE pods, why, what the cluster reads of it, and when it opens. Wall clock."""
    state, mark = observer.closing, observer.mark()
    closed = state.closed
    opens_s = None
    if closed is not None and state.calm_s is not None:
        opens_s = max(0.0, state.calm_s + reopen_s(state, config.closing) - now)
    return {
        "enabled": config.closing.enabled,
        "closed": closed is not None,
        "reason": "" if closed is None else closed.reason,
        "since": None if closed is None else closed.since_s,
        "until": None if closed is None else closed.until_s,
        "opens_s": opens_s,
        "spent": state.spent,
        **({"mark": None, "state": None, "detail": ""} if mark is None else fields_of(mark, "mark state detail")),
        "times": dict(sorted(observer.closings.items())),
    }


def numbers(observer: InterferenceMonitor) -> InterferenceCounters:
    """The same for the metrics."""
    judgement = observer.judgement or Evaluation(at_s=0.0)
    cases = observer.cases()
    return InterferenceCounters(
        verdicts={
            (rule, verdict): count for rule, counts in _counts(judgement).items() for verdict, count in counts.items()
        },
        steps=Counter(step.response.value for _, step in in_force(observer.engine.ladder)),
        changes=dict(observer.changes),
        read_s=observer.costs(),
        pass_s=observer.pass_s,
        orders=Counter("open" if case.outcome is None else case.outcome.value for case in cases),
        ended={outcome.value: count for outcome, count in observer.ended().items()},
        would=len(observer.decision.would),
        closed=observer.closing.closed is not None,
        closings=dict(observer.closings),
        mark=observer.mark(),
    )


def _counts(judgement: Evaluation) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for rule_verdict in judgement.findings:
        current = counts.setdefault(rule_verdict.rule, dict.fromkeys((verdict.value for verdict in Verdict), 0))
        current[rule_verdict.verdict.value] += 1
    return counts


def _finding(verdict: RuleVerdict, now: float) -> dict[str, object]:
    return {
        **fields_of(verdict, "rule victim title verdict resource gap evidence"),
        "for_s": round(now - verdict.since_s, 1),
        "severity": round(verdict.severity, 3),
        "suspects": [fields_of(suspect, "uid title score reason") for suspect in verdict.suspects],
    }


def _climb(climb: EscalationState, now: float, refused: Callable[[str], str]) -> dict[str, object]:
    return {
        **fields_of(climb, "rule victim title relapses exhausted"),
        "dry_run": climb.shadow,
        "steps": [
            {
                **fields_of(step, "response suspect judged"),
                "words": step.describe,
                "for_s": round(now - step.at_s, 1),
                "refused": refused(step.suspect) if step.response in _AT_PODS and step.suspect else "",
                "dry_run": climb.shadow or step.dry,
                "ending": step.ending_s is not None,
            }
            for step in climb.steps
        ],
    }
