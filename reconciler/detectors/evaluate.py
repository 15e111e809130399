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

# Members of an enum are slow to look up, and each is needed hundreds of times a second.
_UNKNOWN: Final = Verdict.UNKNOWN
_OK: Final = Verdict.OK
_INTERFERED: Final = Verdict.INTERFERED
_BADNESS: Final = {Verdict.UNKNOWN: 0, Verdict.OK: 1, Verdict.SUSPECT: 2, Verdict.INTERFERED: 3}
_NOTHING: Final[Mapping[str, Struct]] = {}


class Watch(Struct, frozen=True, kw_only=True):
    """What a rule remembers of one victim. ``details``: by detector, ``group.entry``.

    ``verdict`` since ``since_s``; ``found_s``: when it was last interfered; None: not since it was over.
    """

    details: Mapping[str, Struct] = {}
    verdict: Verdict = Verdict.UNKNOWN
    since_s: float = 0.0
    found_s: float | None = None


class Seen(NamedTuple):
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
    details: dict[str, Struct] = {}
    taught: dict[str, Struct] = {}
    best: list[Opinion] = []
    verdict, bad, severity = _UNKNOWN, -1, 0.0
    for group in asked.groups:
        opinions: list[Opinion] = []
        for place, detector, config in group:
            if detector.durable:
                key, before, after = learned_key(asked.name, place, sight), learned, taught
            else:
                key, before, after = place, watch.details, details
            known = before.get(key)
            # A reload may have put another detector in this place.
            memory = known if isinstance(known, detector.memory_type) else None
            opinion, after[key] = detector.judge(config, sight, memory)
            opinions.append(opinion)
        this = _group(opinions)
        worst = opinions[0].severity if len(opinions) == 1 else max([one.severity for one in opinions])
        badness = _BADNESS[this]
        if badness > bad or (badness == bad and worst > severity):
            best, verdict, bad, severity = opinions, this, badness, worst
    found_s = watch.found_s
    # Nobody is told the numbers of who is well and was before.
    quiet = verdict is _OK and watch.verdict is _OK and found_s is None
    if verdict is _INTERFERED:
        found_s = now
    elif found_s is not None and verdict is _OK:
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
        evidence=() if quiet else tuple(dict.fromkeys([text for opinion in best for text in _words(opinion)])),
        resource=rule.resource or _lacking(best),
        severity=severity,
        gap=_gap(best),
    )
    return Seen(finding, _after(watch, details, verdict, since_s, found_s), taught)


def _after(
    watch: Watch, details: Mapping[str, Struct], verdict: Verdict, since_s: float, found_s: float | None
) -> Watch:
    """What to remember: the same, where nothing has changed."""
    same = verdict is watch.verdict and since_s == watch.since_s and found_s == watch.found_s
    if same and not details and not watch.details:
        return watch
    return Watch(details=details, verdict=verdict, since_s=since_s, found_s=found_s)


def _group(opinions: Sequence[Opinion]) -> Verdict:
    if len(opinions) == 1:
        return opinions[0].verdict
    verdicts = {opinion.verdict for opinion in opinions}
    for verdict in (Verdict.OK, Verdict.UNKNOWN, Verdict.SUSPECT):
        if verdict in verdicts:
            return verdict
    return Verdict.INTERFERED


def _lacking(opinions: Sequence[Opinion]) -> Resource:
    if len(opinions) == 1:
        return opinions[0].resource
    return max(opinions, key=lambda opinion: opinion.severity).resource


def _gap(opinions: Sequence[Opinion]) -> float | None:
    for opinion in opinions:
        if opinion.gap is not None:
            return opinion.gap
    return None


def _words(opinion: Opinion) -> tuple[str, ...]:
    if opinion.proxy is None:
        return (opinion.evidence,)
    return opinion.evidence, f"judged by {opinion.proxy}"
