"""One rule, one victim, one moment: the opinions of its detectors become a finding. Pure.

In a group (AND) one ``ok`` is enough for ok, and one ``unknown`` beside agreeing others makes it unknown. Between
groups (OR) the worst counts; a group that is unknown takes no part while another can answer, so that a rule may offer
several proofs of which a node has one. What was found stays at least suspected until nothing has been found for
``clear_s``.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from reconciler.detectors.base import Sight, signature
from reconciler.detectors.rule import Rule
from reconciler.detectors.table import DETECTORS, DetectorEntry
from state.evidence import Finding, Opinion, Resource, Verdict

_BADNESS = {Verdict.UNKNOWN: 0, Verdict.OK: 1, Verdict.SUSPECT: 2, Verdict.INTERFERED: 3}


class Watch(Struct, frozen=True, kw_only=True):
    """What a rule remembers of one victim. ``details``: by detector, ``group.entry``.

    ``verdict`` since ``since_s``; ``found_s``: when it was last interfered; None: not since it was over.
    """

    details: Mapping[str, Struct] = {}
    verdict: Verdict = Verdict.UNKNOWN
    since_s: float = 0.0
    found_s: float | None = None


class Seen(Struct, frozen=True, kw_only=True):
    """A finding without suspects, and what to remember. ``learned``: of durable detectors, by `learned_key`."""

    finding: Finding
    watch: Watch
    learned: Mapping[str, Struct]


def learned_key(rule: str, place: str, sight: Sight) -> str:
    """Under which a durable detector's memory is kept: by workload."""
    whose = signature(sight.pod) if sight.pod is not None else sight.subject
    return f"{rule} {place} {whose}"


def evaluate(name: str, rule: Rule, sight: Sight, watch: Watch | None, learned: Mapping[str, Struct]) -> Seen:
    """What the rule says of this victim now."""
    watch = watch or Watch(since_s=sight.now)
    asked = _Asked(name, sight, watch, learned)
    groups = [
        [asked.opinion(f"{number}.{position}", entry) for position, entry in enumerate(group)]
        for number, group in enumerate(rule.when)
    ]
    best = max(groups, key=lambda opinions: (_BADNESS[_group(opinions)], max(one.severity for one in opinions)))
    verdict = _group(best)
    found_s = watch.found_s
    if verdict is Verdict.INTERFERED:
        found_s = sight.now
    elif found_s is not None and verdict is Verdict.OK:
        if sight.now - found_s < rule.clear_s:
            verdict = Verdict.SUSPECT
        else:
            found_s = None
    since_s = watch.since_s if verdict is watch.verdict else sight.now
    finding = Finding(
        rule=name,
        victim=sight.subject,
        title=sight.pod.title if sight.pod is not None else "the node",
        verdict=verdict,
        since_s=since_s,
        evidence=tuple(dict.fromkeys(text for opinion in best for text in _words(opinion))),
        resource=rule.resource or _lacking(best),
        severity=max(opinion.severity for opinion in best),
        gap=next((opinion.gap for opinion in best if opinion.gap is not None), None),
    )
    after = Watch(details=asked.details, verdict=verdict, since_s=since_s, found_s=found_s)
    return Seen(finding=finding, watch=after, learned=asked.learned)


class _Asked:
    """Asks detectors about one victim, and collects what they want to remember."""

    def __init__(self, rule: str, sight: Sight, watch: Watch, learned: Mapping[str, Struct]) -> None:
        self._rule, self._sight, self._watch, self._learned = rule, sight, watch, learned
        self.details: dict[str, Struct] = {}
        self.learned: dict[str, Struct] = {}

    def opinion(self, place: str, entry: DetectorEntry) -> Opinion:
        detector = DETECTORS[entry.name]
        key = learned_key(self._rule, place, self._sight) if detector.durable else place
        known = (self._learned if detector.durable else self._watch.details).get(key)
        # A reload may have put another detector in this place.
        memory = known if isinstance(known, detector.memory_type) else None
        opinion, memory = detector.judge(entry.config, self._sight, memory)
        (self.learned if detector.durable else self.details)[key] = memory
        return opinion


def _group(opinions: Sequence[Opinion]) -> Verdict:
    verdicts = {opinion.verdict for opinion in opinions}
    for verdict in (Verdict.OK, Verdict.UNKNOWN, Verdict.SUSPECT):
        if verdict in verdicts:
            return verdict
    return Verdict.INTERFERED


def _lacking(opinions: Sequence[Opinion]) -> Resource:
    return max(opinions, key=lambda opinion: opinion.severity).resource


def _words(opinion: Opinion) -> tuple[str, ...]:
    if opinion.proxy is None:
        return (opinion.evidence,)
    return opinion.evidence, f"judged by {opinion.proxy}"
