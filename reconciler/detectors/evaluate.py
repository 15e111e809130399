"""One rule, one victim, one moment: the verdicts of its detectors become a finding. Pure.

Groups are combined by OR, the detectors of a group by AND (`_group`). A finding remains at least suspected until
nothing has been found for ``clear_s``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from msgspec import Struct

from reconciler.detectors.base import VictimView
from reconciler.detectors.rule import RuleConfig
from reconciler.detectors.table import DETECTORS, DetectorEntry
from state.evidence import ContendedResource, DetectorVerdict, RuleVerdict, Verdict, signature

# Access to members of an enum is slow, and each is needed hundreds of times a second.
_UNKNOWN: Final = Verdict.UNKNOWN
_OK: Final = Verdict.OK
_INTERFERED: Final = Verdict.INTERFERED
_BADNESS: Final = {Verdict.UNKNOWN: 0, Verdict.OK: 1, Verdict.SUSPECT: 2, Verdict.INTERFERED: 3}


class RuleState(Struct, frozen=True, kw_only=True):
    """What a rule remembers of one victim. ``details``: by detector, ``group.entry``.

    ``verdict`` since ``since_s``; ``found_s``: when it was last interfered; None: not since it was over. ``found_by``:
    the groups that found it since then, by number.
    """

    details: Mapping[str, Struct] = {}
    verdict: Verdict = Verdict.UNKNOWN
    since_s: float = 0.0
    found_s: float | None = None
    found_by: frozenset[int] = frozenset()


class RulePart(NamedTuple):
    """One detector of a rule. ``place``: ``group.entry``, by which its memory is kept.

    ``learned``: how the keys begin under which a durable one's is kept, by workload; None: it is not durable.
    """

    place: str
    # Each is given its own config and memory, see `AnyDetector`.
    judge: Callable[[Any, VictimView, Any], tuple[DetectorVerdict, Any]]
    memory_type: type[Struct]
    config: Struct
    learned: str | None


class ReadyRule(NamedTuple):
    """A rule prepared for evaluation many times a second: its detectors looked up.

    ``near``: from this severity on a finding is a sign; of its detectors' the least.
    """

    name: str
    rule: RuleConfig
    groups: tuple[tuple[RulePart, ...], ...]
    near: float


def ready(name: str, rule: RuleConfig) -> ReadyRule:
    groups = tuple(
        tuple(_part(name, f"{number}.{position}", entry) for position, entry in enumerate(group))
        for number, group in enumerate(rule.when)
    )
    near = min(DETECTORS[entry.name].near(entry.config) for group in rule.when for entry in group)
    return ReadyRule(name, rule, groups, near)


def _part(rule: str, place: str, entry: DetectorEntry) -> RulePart:
    detector = DETECTORS[entry.name]
    learned = f"{rule} {place} " if detector.durable else None
    return RulePart(place, detector.judge, detector.memory_type, entry.config, learned)


def evaluate(
    request: ReadyRule, sight: VictimView, watch: RuleState | None, learned: Mapping[str, Struct]
) -> tuple[RuleVerdict, RuleState, Mapping[str, Struct]]:
    """The rule's finding on this victim now, without suspects; its memory of the victim, and of workloads by key.

    ``learned``: all that durable detectors have learned so far.
    """
    name, rule, groups, _ = request
    now, pod = sight.frame.at_s, sight.pod
    watch = watch or RuleState(since_s=now)
    details: dict[str, Struct] = {}
    taught: dict[str, Struct] = {}
    best: list[DetectorVerdict] = []
    verdict, bad, severity = _UNKNOWN, -1, 0.0
    found_by, unmeasured = watch.found_by, best
    for number, group in enumerate(groups):
        opinions: list[DetectorVerdict] = []
        for place, judge, memory_type, config, whose in group:
            if whose is None:
                key, before, after = place, watch.details, details
            else:
                key, before, after = whose + (sight.subject if pod is None else signature(pod)), learned, taught
            known = before.get(key)
            # A reload may have put another detector in this place.
            opinion, after[key] = judge(config, sight, known if isinstance(known, memory_type) else None)
            opinions.append(opinion)
        this = opinions[0].verdict if len(opinions) == 1 else _group(opinions)
        worst = (
            opinions[0].severity
            if len(opinions) == 1
            else max([detector_verdict.severity for detector_verdict in opinions])
        )
        if this is _INTERFERED:
            found_by |= {number}
        elif this is _UNKNOWN and number in found_by:
            unmeasured = opinions
        # The worst group counts. An unknown one is least: a rule may offer several proofs, of which a node has one.
        badness = _BADNESS[this]
        if badness > bad or (badness == bad and worst > severity):
            best, verdict, bad, severity = opinions, this, badness, worst
    before_that, since_s, found_s = watch.verdict, watch.since_s, watch.found_s
    # The numbers of a victim that is ok and was ok before are not reported.
    quiet = verdict is _OK and before_that is _OK and found_s is None
    if verdict is _INTERFERED:
        found_s = now
    elif found_s is not None and verdict is _OK:
        # Not over while a group that found it is unknown, whatever the other groups' result.
        if unmeasured:
            verdict, best = _UNKNOWN, unmeasured
        elif now - found_s < rule.clear_s:
            verdict = Verdict.SUSPECT
        else:
            found_s, found_by = None, frozenset()
    if verdict is not before_that:
        since_s = now
    finding = RuleVerdict(
        rule=name,
        victim=sight.subject,
        title="the node" if pod is None else pod.title,
        verdict=verdict,
        since_s=since_s,
        evidence=() if quiet else tuple(dict.fromkeys([text for opinion in best for text in _words(opinion)])),
        resource=rule.resource or _lacking(best),
        severity=severity,
        gap=best[0].gap
        if len(best) == 1
        else next((detector_verdict.gap for detector_verdict in best if detector_verdict.gap is not None), None),
    )
    if verdict is before_that and found_s == watch.found_s and not details and not watch.details:
        return finding, watch, taught
    now_known = RuleState(details=details, verdict=verdict, since_s=since_s, found_s=found_s, found_by=found_by)
    return finding, now_known, taught


def _group(opinions: Sequence[DetectorVerdict]) -> Verdict:
    verdicts = {opinion.verdict for opinion in opinions}
    # AND: one ok is enough for ok; one unknown among agreeing others makes it unknown.
    for verdict in (Verdict.OK, Verdict.UNKNOWN, Verdict.SUSPECT):
        if verdict in verdicts:
            return verdict
    return Verdict.INTERFERED


def _lacking(opinions: Sequence[DetectorVerdict]) -> ContendedResource:
    if len(opinions) == 1:
        return opinions[0].resource
    return max(opinions, key=lambda opinion: opinion.severity).resource


def _words(opinion: DetectorVerdict) -> tuple[str, ...]:
    if opinion.proxy is None:
        return (opinion.evidence,)
    return opinion.evidence, f"based on {opinion.proxy}"
