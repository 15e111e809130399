"""Turns frames into evaluations: rules, suspects, ladder and eviction, frame by frame. Pure but for its memory.

It reads no clock and no file, so that a recording gives the same evaluations as the node did (`bypassctl simulate`).
"""

from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.bounded import decoded
from cgroupfs.log import get_log
from reconciler.detectors.base import VictimView
from reconciler.detectors.config import InterferenceConfig
from reconciler.detectors.evaluate import RuleState, evaluate, ready
from reconciler.detectors.neighbours import overlap
from reconciler.detectors.rule import SHIPPED, RuleConfig, VictimSelector, effective
from reconciler.detectors.suspects import SIGNALS as SUSPECT_SIGNALS
from reconciler.detectors.suspects import rank
from reconciler.detectors.table import DETECTORS
from reconciler.detectors.uses import ResourceUses
from reconciler.responses.eviction.triggers.named import RequestedVictim
from reconciler.responses.ladder import EscalationChange, EscalationMemory, RuleFindings, Transition, advance, let_go
from reconciler.responses.measure import demands_of
from reconciler.responses.promotion import EvidenceMemory, ModeChange, Moment, RuleRecord, observe, record_facts
from reconciler.responses.steps import SIGNALS as STEP_SIGNALS
from reconciler.runtime.cooperative import all_steps
from reconciler.signals.catalog import NODE_AND_POOLS
from reconciler.signals.history import STALE_S, History
from state.evidence import (
    HOST,
    NODE,
    ContendedResource,
    PodSnapshot,
    RuleVerdict,
    SampleFrame,
    Suspect,
    Verdict,
    pod_subject,
)
from state.measures import Response, Restrictions

_LOG: Final = get_log("engine")
# Access to members of an enum is slow, and each is needed hundreds of times a second.
_UNKNOWN: Final = Verdict.UNKNOWN
_OK: Final = Verdict.OK
_INTERFERED: Final = Verdict.INTERFERED
_NOBODY: Final = "no suspect found"
_MOVED: Final = ("disk.read", "disk.write")
_LEARNED_MOST: Final = 2000
"""Workloads' memories kept at most; those not seen for longest go first."""
_UNUSED_S: Final = 7 * 86400.0
"""So long is kept what was learned by a rule that is switched off."""
_LOOK_THROUGH_S: Final = 3600.0
"""Between two searches for what is unused."""
_SHOWN_S: Final = 10.0
"""Between two rankings for people. What is done by suspects is ranked in each frame."""


class _Shown(NamedTuple):
    """The suspects of a victim that is suspected only, as of ``at_s``."""

    at_s: float
    resource: ContendedResource
    suspects: tuple[Suspect, ...]


class Evaluation(Struct, frozen=True, kw_only=True):
    """Result of one frame.

    ``findings``: of every rule and victim. ``begun`` and ``over``: victims that became interfered, and those that
    ceased to be. ``signs``: a victim is not well, or nearly so (`reconciler.interference.pace`). ``modes``:
    rules whose mode changes by evidence, from the next frame on. ``measures``: demands on the plan. ``named``: pods to
    evict as the ladder's last step; the eviction planner decides. ``would``: the same by rules in shadow, for which no
    pod is evicted.
    """

    at_s: float
    findings: tuple[RuleVerdict, ...] = ()
    begun: tuple[RuleVerdict, ...] = ()
    over: tuple[RuleVerdict, ...] = ()
    signs: bool = False
    changes: tuple[EscalationChange, ...] = ()
    modes: tuple[ModeChange, ...] = ()
    measures: Restrictions = Restrictions()
    named: tuple[RequestedVictim, ...] = ()
    would: tuple[RequestedVictim, ...] = ()


class EngineState(Struct, frozen=True, kw_only=True):
    """What outlives the daemon: what durable detectors learned (by detector, then key), what has not helped.

    ``records``: evidence for and against rules, by name.
    """

    learned: Mapping[str, Mapping[str, msgspec.Raw]] = {}
    useless: Mapping[str, float] = {}
    records: Mapping[str, RuleRecord] = {}


@final
class InterferenceEngine:
    """Keeps the history of the signals and what rules and ladder remember."""

    def __init__(
        self,
        config: InterferenceConfig,
        remembered: EngineState | None = None,
        *,
        evicts: bool = True,
        responds: bool = True,
    ) -> None:
        """``evicts``, ``responds``: see `configure`."""
        self.history = History()
        self.ladder = EscalationMemory(useless=remembered.useless if remembered is not None else {})
        self.evidence = EvidenceMemory(records=remembered.records if remembered is not None else {})
        # By rule, then by victim.
        self._watches: dict[str, dict[str, RuleState]] = {}
        self._learned: dict[str, Struct] = _learned(remembered) if remembered is not None else {}
        self._active: dict[tuple[str, str], RuleVerdict] = {}
        self._shown: dict[tuple[str, str], _Shown] = {}
        """By rule and victim, of the last frame, or of this one so far."""
        self._first_s: float | None = None
        self._aged_s: float | None = None
        self.rules: Mapping[str, RuleConfig] = {}
        self._changed: frozenset[str] = frozenset()
        """Rules that a reload gave other detectors: what the former ones found ends in the next frame."""
        self.configure(config, evicts=evicts, responds=responds)

    def configure(self, config: InterferenceConfig, *, evicts: bool = True, responds: bool = True) -> None:
        """Use another configuration from the next frame on; the measures of removed rules end there.

        ``evicts``: evictions that a rule requests are carried out; ``responds``: the other responses are. What was
        learned for removed rules is kept for a while: they may be added again.
        """
        self.config, self._evicts, self._responds = config, evicts, responds
        before, self.rules = self.rules, effective(config.rules) if config.enabled else {}
        self._changed |= {
            name for name in self.rules.keys() & before if _reads(self.rules[name]) != _reads(before[name])
        }
        self._ready = [ready(name, rule) for name, rule in self.rules.items()]

    def forget(self) -> None:
        """Start over: nothing is in force, and the history is empty. What was learned stays."""
        self.history, self.ladder = History(), let_go(self.ladder, self.config.responses)
        self._watches, self._active, self._shown, self._first_s = {}, {}, {}, None
        self.evidence = EvidenceMemory(records=self.evidence.records)

    @property
    def active(self) -> tuple[RuleVerdict, ...]:
        """Interfered victims whose end has not been reported yet."""
        return tuple(self._active.values())

    @property
    def fresh_s(self) -> float:
        """How old a sample may be to count as now."""
        return STALE_S * self.config.sample_s

    def evaluate(self, frame: SampleFrame) -> Generator[None, None, Evaluation]:
        """One frame further. Yields at least each half millisecond or so, for a caller that lets others run."""
        self.history.add(frame)
        self._forget_unused(frame.wall_s)
        if self._first_s is None:
            self._first_s = frame.at_s
        watches: dict[str, dict[str, RuleState]] = {}
        sights: dict[str, VictimView] = {}
        shared: dict[Hashable, object] = {}
        victims: list[tuple[VictimSelector, list[VictimView]]] = []
        lately = ResourceUses(frame, self.history, self.fresh_s)
        ascents: list[RuleFindings] = []
        shown, self._shown = self._shown, {}
        signs = False
        yield
        for item in self._ready:
            name, rule = item.name, item.rule
            if name in self._changed:
                continue
            watched = next((victim_views for chosen, victim_views in victims if chosen == rule.victims), None)
            if watched is None:
                watched = list(self._sights(rule, frame, sights, shared))
                victims.append((rule.victims, watched))
                yield
            findings: list[RuleVerdict] = []
            before, after = self._watches.get(name, {}), watches.setdefault(name, {})
            for sight in watched:
                subject = sight.subject
                finding, after[subject], taught = evaluate(item, sight, before.get(subject), self._learned)
                if taught:
                    self._learn(taught)
                yield
                if finding.verdict is not _OK and finding.verdict is not _UNKNOWN:
                    finding = yield from self._blamed(item.rule, sight, finding, lately, shown)
                signs = signs or finding.severity >= item.near
                findings.append(finding)
            # Steps that are not written cannot help: their effect is not evaluated.
            shadow = not (self.enforces(name) and frame.enforce)
            ascents.append(RuleFindings(rule=name, shadow=shadow, responses=rule.allowed, findings=tuple(findings)))
        self._watches = watches
        changes: tuple[EscalationChange, ...] = ()
        # Nothing is done before rates and windows have a past.
        if frame.at_s - self._first_s >= self.config.settle_s:
            self.ladder, changes = advance(
                self.ladder,
                ascents,
                (frame, self.history),
                self.config.responses,
                fresh_s=self.fresh_s,
                evicts=self._evicts,
            )
        every = tuple(finding for ascent in ascents for finding in ascent.findings)
        begun, over = self._transitions(every, frame)
        self._changed = frozenset()
        modes = self._weigh(frame, changes, over)
        return Evaluation(
            at_s=frame.at_s,
            findings=every,
            begun=begun,
            over=over,
            signs=signs or bool(self._active or self.ladder.climbs),
            changes=changes,
            modes=modes,
            measures=demands_of(self.ladder, frame),
            named=tuple(_named(changes, ascents, shadow=False)),
            would=tuple(_named(changes, ascents, shadow=True)),
        )

    def evaluate_now(self, frame: SampleFrame) -> Evaluation:
        """`evaluate` without pauses."""
        return all_steps(self.evaluate(frame))

    def remember(self) -> EngineState:
        """What to keep for the next start."""
        learned: dict[str, dict[str, msgspec.Raw]] = {}
        for key, memory in self._learned.items():
            learned.setdefault(_detector_of(memory), {})[key] = msgspec.Raw(msgspec.msgpack.encode(memory))
        return EngineState(learned=learned, useless=self.ladder.useless, records=self.evidence.records)

    def wanted(self) -> frozenset[str]:
        """The signals that rules and responses use."""
        if not self.rules:
            return frozenset()
        entries = [entry for rule in self.rules.values() for group in rule.when for entry in group]
        texts = {signal for entry in entries for signal in DETECTORS[entry.name].signals(entry.config)}
        if any(map(self._is_own, self.rules)):
            # It may name any subject; a lack of disk shows in the delay of the node's disks, too.
            texts |= NODE_AND_POOLS | {"disk.delay"}
        return frozenset(texts | set(SUSPECT_SIGNALS) | set(STEP_SIGNALS))

    def finds_network(self) -> bool:
        """Whether a rule may find that its victim lacks the network."""
        network = ContendedResource.NETWORK
        return any(rule.resource is network or self._is_own(name) for name, rule in self.rules.items())

    def _is_own(self, name: str) -> bool:
        """Whether the rule is other than a shipped one in what it reads: its detectors, or the node as a victim."""
        rule, shipped = self.rules[name], SHIPPED.get(name)
        return rule.victims.node or shipped is None or rule.when != shipped.when

    def enforces(self, name: str) -> bool:
        """Whether a rule enforces, in the agent's mode ``enforce``: by the configuration, or by evidence."""
        rule = self.rules[name]
        if not self._responds and set(rule.allowed) != {Response.EVICT}:
            return False  # what is not written has no effect to be evaluated, and no pod is evicted for that
        record = self.evidence.records.get(name) if self._promotable(rule) else None
        return not rule.dry_run or (record is not None and record.enforcing)

    def record(self, name: str) -> dict[str, object] | None:
        """The evidence for or against a rule, for people; None: only a person changes its mode."""
        if not self._promotable(self.rules[name]):
            return None
        return record_facts(self.evidence.records.get(name, RuleRecord()), self.config.promotion)

    def _promotable(self, rule: RuleConfig) -> bool:
        """A person's ``dry_run: false`` or ``promote: false`` has precedence over evidence."""
        return self.config.promotion.enabled and rule.dry_run and rule.promote

    def _weigh(
        self, frame: SampleFrame, changes: Sequence[EscalationChange], over: Sequence[RuleVerdict]
    ) -> tuple[ModeChange, ...]:
        """Count this frame as evidence; the rules whose mode changes by it."""
        promotable = [name for name, rule in self.rules.items() if self._promotable(rule)]
        if not promotable:
            # Kept while detection is off; where a person has decided about each rule, evidence counts for nothing.
            self.evidence = EvidenceMemory(records=self.evidence.records if not self.rules else {})
            return ()
        moment = Moment(
            at_s=frame.at_s,
            wall_s=frame.wall_s,
            enforce=frame.enforce and self._responds,
            rules=promotable,
            changes=changes,
            ended=[(finding.rule, finding.victim, finding.verdict is _OK) for finding in over],
        )
        self.evidence, modes = observe(self.evidence, moment, self.config.promotion, self.config.responses)
        return modes

    def _sights(
        self, rule: RuleConfig, frame: SampleFrame, known: dict[str, VictimView], shared: dict[Hashable, object]
    ) -> Iterable[VictimView]:
        """The rule's victims; ``known`` are those of other rules, which see the same."""
        subjects: list[tuple[str, PodSnapshot | None]] = [(NODE, None)] if rule.victims.node else []
        # In an order that a recording has as well: the first victim may take a suspect that two would take.
        subjects += [(pod.subject, pod) for _, pod in sorted(frame.pods.items()) if rule.victims.match(pod)]
        subjects += [(host.subject, host) for _, host in sorted(frame.hosts.items()) if rule.victims.match_host(host)]
        for subject, pod in subjects:
            sight = known.get(subject)
            if sight is None:
                sight = known[subject] = VictimView(
                    subject=subject,
                    pod=pod,
                    frame=frame,
                    history=self.history,
                    fresh_s=self.fresh_s,
                    shared=shared,
                )
            yield sight

    def _forget_unused(self, wall_s: float) -> None:
        """Drop what no rule has used for long."""
        if self._aged_s is not None and 0 <= wall_s - self._aged_s < _LOOK_THROUGH_S:
            return
        self._aged_s = wall_s
        used = {(name, place) for name, rule in self.rules.items() for place in _places(rule)}
        for key, memory in list(self._learned.items()):
            rule, place, _ = key.split(" ", 2)
            learned_s = DETECTORS[_detector_of(memory)].learned_s
            if (rule, place) not in used and learned_s is not None and wall_s - learned_s(memory) > _UNUSED_S:
                del self._learned[key]

    def _learn(self, learned: Mapping[str, Struct]) -> None:
        for key, memory in learned.items():
            self._learned.pop(key, None)  # the newest are last
            self._learned[key] = memory
        while len(self._learned) > _LEARNED_MOST:
            del self._learned[next(iter(self._learned))]

    def _blamed(
        self,
        rule: RuleConfig,
        sight: VictimView,
        finding: RuleVerdict,
        lately: ResourceUses,
        before: Mapping[tuple[str, str], _Shown],
    ) -> Generator[None, None, RuleVerdict]:
        """The finding with its suspects. Those of a victim that is itself suspected only are ranked at intervals."""
        if finding.verdict is not _INTERFERED:
            key = finding.rule, finding.victim
            shown = before.get(key)
            if shown is None or shown.resource is not finding.resource or sight.now - shown.at_s >= _SHOWN_S:
                suspects = yield from rank(sight, finding.resource, rule.window_s, lately)
                shown = _Shown(sight.now, finding.resource, _weighed(finding, suspects, sight))
            self._shown[key] = shown
            return replace(finding, suspects=shown.suspects)
        suspects = yield from rank(sight, finding.resource, rule.window_s, lately)
        finding = replace(finding, suspects=_weighed(finding, suspects, sight))
        likely = any(suspect.score >= self.config.responses.min_score for suspect in finding.suspects)
        if rule.needs_suspect and not likely:
            # Those with a lower score are listed below it: "none" would contradict the list.
            least = f"no suspect reaches the score of {self.config.responses.min_score:g}"
            reason = least if finding.suspects else _NOBODY
            evidence = (*finding.evidence, reason)
            return replace(finding, verdict=Verdict.SUSPECT, evidence=evidence, unblamed=True)
        return finding

    def _transitions(
        self, every: Sequence[RuleVerdict], frame: SampleFrame
    ) -> tuple[tuple[RuleVerdict, ...], tuple[RuleVerdict, ...]]:
        active: dict[tuple[str, str], RuleVerdict] = {}
        begun: list[RuleVerdict] = []
        over: list[RuleVerdict] = []
        for finding in every:
            if not self._active and finding.verdict is not _INTERFERED:
                continue
            key = finding.rule, finding.victim
            before = self._active.pop(key, None)
            if finding.verdict is _INTERFERED:
                active[key] = finding
                if before is None:
                    begun.append(finding)
            elif before is not None:
                if finding.verdict is Verdict.OK:
                    over.append(finding)
                else:
                    active[key] = before  # not over before it is well
        over += [
            replace(left, verdict=Verdict.UNKNOWN, evidence=(self._why_left(left, frame),))
            for left in self._active.values()
        ]
        self._active = active
        return tuple(begun), tuple(over)

    def _why_left(self, finding: RuleVerdict, frame: SampleFrame) -> str:
        """Why this rule has no result for this victim now."""
        if finding.rule not in self.rules:
            return "the rule is no longer evaluated"
        if finding.rule in self._changed:
            return "the rule has other detectors now"
        victim = finding.victim
        noun = "host workload" if victim.startswith(HOST) else "pod"
        known = frame.hosts.get(victim) or frame.pods.get(victim.removeprefix("pod:"))
        if known is None:
            return f"the {noun} is gone" if victim != NODE else "the rule no longer covers the node"
        return f"the {noun} is being terminated" if known.terminating else f"the rule no longer covers the {noun}"


def _weighed(finding: RuleVerdict, suspects: Sequence[Suspect], sight: VictimView) -> tuple[Suspect, ...]:
    """Suspects by their possible effect: a pod that used a tenth of the lacking CPU is not the cause."""
    measure, most = _measure(finding, sight)
    if not most:
        return tuple(suspects)
    ours = sight.pod.cpus if sight.pod is not None and finding.resource is ContendedResource.CPU else ""
    result = []
    for suspect in suspects:
        known = [value for name in measure if (value := sight.value(name, pod_subject(suspect.uid))) is not None]
        pod = sight.frame.pods.get(suspect.uid) or sight.frame.hosts[suspect.uid]
        part = min(1.0, overlap(ours, pod.cpus) * sum(known) / most)
        result.append(replace(suspect, score=round(suspect.score * part, 3)) if part < 1.0 else suspect)
    return tuple(sorted(result, key=lambda item: -item.score))


def _measure(finding: RuleVerdict, sight: VictimView) -> tuple[tuple[str, ...], float]:
    """By which signals of a suspect it is weighed, and their sum from which on it counts in full; 0.0: not at all."""
    if finding.resource is ContendedResource.CPU:
        return ("cpu.use",), finding.gap or 0.0
    if finding.resource is ContendedResource.IO:
        # A pod that moved a tenth of what the victim itself moves to and from the disks is not the cause.
        known = [value for name in _MOVED if (value := sight.value(name)) is not None]
        return _MOVED, sum(known)
    return (), 0.0


def _named(
    changes: Iterable[EscalationChange], ascents: Iterable[RuleFindings], *, shadow: bool
) -> Iterable[RequestedVictim]:
    """Pods that rules in shadow, or the others, would evict from now on; all of them where evictions are a dry run."""
    verdicts = {
        (verdict.rule, verdict.victim): verdict
        for ascent in ascents
        if ascent.shadow == shadow
        for verdict in ascent.findings
    }
    for change in changes:
        step, finding = change.step, verdicts.get((change.rule, change.victim))
        if change.turn is not Transition.ASKED or step is None or finding is None:
            continue
        assert step.suspect is not None
        evidence = "; ".join(finding.evidence)
        yield RequestedVictim(
            uid=step.suspect, rule=change.rule, victim=change.title, evidence=evidence, resource=finding.resource
        )


def _reads(rule: RuleConfig) -> object:
    """What a rule's detectors measure, each in its place; their limits are no part of it."""
    return [
        [
            (entry.name, DETECTORS[entry.name].signals(entry.config), getattr(entry.config, "of", None))
            for entry in group
        ]
        for group in rule.when
    ]


def _places(rule: RuleConfig) -> Iterable[str]:
    for number, group in enumerate(rule.when):
        for position, entry in enumerate(group):
            if DETECTORS[entry.name].durable:
                yield f"{number}.{position}"


def _detector_of(memory: Struct) -> str:
    return next(
        name for name, detector in DETECTORS.items() if detector.durable and isinstance(memory, detector.memory_type)
    )


def _learned(remembered: EngineState) -> dict[str, Struct]:
    """State of durable detectors from an earlier run; state that cannot be read (an older form) is learned again."""
    values: dict[str, Struct] = {}
    for name, memories in remembered.learned.items():
        detector = DETECTORS.get(name)
        if detector is None or not detector.durable:
            continue
        for key, raw in memories.items():
            try:
                values[key] = decoded(msgspec.msgpack.Decoder(detector.memory_type).decode, raw)
            except ValueError as exc:
                _LOG.warning("cannot read the state of a detector", detector=name, workload=key, error=str(exc))
    return values
