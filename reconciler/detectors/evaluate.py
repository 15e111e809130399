"""One rule, one victim, one moment: the opinions of its detectors become a finding. Pure.

In a group (AND) one ``ok`` is enough for ok, and one ``unknown`` beside agreeing others makes it unknown. Between
groups (OR) the worst counts; a group that is unknown takes no part while another can answer, so that a rule may offer
several proofs of which a node has one. What was found stays at least suspected until nothing has been found for
``clear_s``.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from reconciler.detectors.base import AnyDetector, Sight, signature
from reconciler.detectors.rule import Rule
from reconciler.detectors.table import DETECTORS
from state.evidence import Finding, Opinion, Resource, Verdict

_BADNESS: Final = {Verdict.UNKNOWN: 0, Verdict.OK: 1, Verdict.SUSPECT: 2, Verdict.INTERFERED: 3}


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


class Part(NamedTuple):
    """One detector of a rule. ``place``: ``group.entry``, by which its memory is kept."""

    place: str
    detector: AnyDetector
    config: Struct


class Ready(NamedTuple):
    """A rule as it is asked many times a second: its detectors looked up."""

    name: str
    rule: Rule
    groups: tuple[tuple[Part, ...], ...]


def ready(name: str, rule: Rule) -> Ready:
    """Look up its detectors."""
    groups = tuple(
        tuple(Part(f"{number}.{position}", DETECTORS[entry.name], entry.config) for position, entry in enumerate(group))
        for number, group in enumerate(rule.when)
    )
    return Ready(name, rule, groups)


def learned_key(rule: str, place: str, sight: Sight) -> str:
    """Under which a durable detector's memory is kept: by workload."""
    whose = signature(sight.pod) if sight.pod is not None else sight.subject
    return f"{rule} {place} {whose}"


def evaluate(asked: Ready, sight: Sight, watch: Watch | None, learned: Mapping[str, Struct]) -> Seen:
    """What the rule says of this victim now."""
    now, rule = sight.frame.at_s, asked.rule
    watch = watch or Watch(since_s=now)
    asking = _Asking(asked.name, sight, watch, learned)
    best: list[Opinion] = []
    verdict, rank = Verdict.UNKNOWN, (-1, 0.0)
    for group in asked.groups:
        opinions = [asking.opinion(part) for part in group]
        this = _group(opinions)
        worst = _BADNESS[this], max([one.severity for one in opinions])
        if worst > rank:
            best, verdict, rank = opinions, this, worst
    found_s = watch.found_s
    if verdict is Verdict.INTERFERED:
        found_s = now
    elif found_s is not None and verdict is Verdict.OK:
        if now - found_s < rule.clear_s:
            verdict = Verdict.SUSPECT
        else:
            found_s = None
    since_s = watch.since_s if verdict is watch.verdict else now
    finding = Finding(
        rule=asked.name,
        victim=sight.subject,
        title=sight.pod.title if sight.pod is not None else "the node",
        verdict=verdict,
        since_s=since_s,
        evidence=tuple(dict.fromkeys([text for opinion in best for text in _words(opinion)])),
        resource=rule.resource or _lacking(best),
        severity=rank[1],
        gap=next((opinion.gap for opinion in best if opinion.gap is not None), None),
    )
    after = Watch(details=asking.details, verdict=verdict, since_s=since_s, found_s=found_s)
    return Seen(finding=finding, watch=after, learned=asking.learned)


class _Asking:
    """Asks detectors about one victim, and collects what they want to remember."""

    __slots__ = ("_known", "_rule", "_sight", "_watch", "details", "learned")

    def __init__(self, rule: str, sight: Sight, watch: Watch, learned: Mapping[str, Struct]) -> None:
        self._rule, self._sight, self._watch, self._known = rule, sight, watch, learned
        self.details: dict[str, Struct] = {}
        self.learned: dict[str, Struct] = {}

    def opinion(self, part: Part) -> Opinion:
        place, detector, config = part
        if detector.durable:
            key, before, after = learned_key(self._rule, place, self._sight), self._known, self.learned
        else:
            key, before, after = place, self._watch.details, self.details
        known = before.get(key)
        # A reload may have put another detector in this place.
        memory = known if isinstance(known, detector.memory_type) else None
        opinion, after[key] = detector.judge(config, self._sight, memory)
        return opinion


def _group(opinions: Sequence[Opinion]) -> Verdict:
    if len(opinions) == 1:
        return opinions[0].verdict
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
