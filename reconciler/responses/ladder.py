"""The ladder: victims by rule, the responses in force, the next step, and the way back. Pure.

For each victim: breach fast, change one thing, wait for the effect, keep what helped, undo and remember what did not;
once the victim is ok, de-escalate in small steps, slower after each relapse. While its state is unknown nothing is
tried and nothing is undone: unknown is not ok. A rule in shadow escalates the same way with steps that are not applied,
to show what it would have done.

Everything in force is dropped with its victim or its suspect, and with the daemon: a new one starts without steps. Only
what did not help is remembered for longer.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from reconciler.responses.config import LadderConfig
from reconciler.responses.steps import ActionContext, Dimension, ResponseStep, intensified, next_step, pending
from reconciler.signals.history import History
from state.evidence import RuleVerdict, SampleFrame, Verdict
from state.measures import Response
from state.model import PodClass

_SLOWEST: Final = 8
"""The way back is at most this many times slower than configured, whatever the number of relapses."""
_ASK_AGAIN_S: Final = 600.0
"""An eviction that was not carried out is not requested again for this long: eviction's own limits are over by then."""


class Transition(StrEnum):
    APPLIED = "applied"
    ASKED = "asked"
    HELPED = "helped"
    UNDONE = "undone"
    EASED = "eased"
    ENDED = "ended"
    EXHAUSTED = "exhausted"


class EscalationChange(Struct, frozen=True, kw_only=True):
    """One thing that happened on the ladder, for people. ``shadow``: it would have.

    ``no_effect``: a response ends because its effect was evaluated, and there was none.
    """

    turn: Transition
    rule: str
    victim: str
    title: str
    words: str
    shadow: bool
    step: ResponseStep | None = None
    no_effect: bool = False


class EscalationState(Struct, frozen=True, kw_only=True):
    """One victim by one rule. ``calm_s``: since when it is well, or was given something back; None: it is not.

    ``given_up``: what helped at first and then no more; not tried again before the victim is well.
    """

    rule: str
    victim: str
    title: str
    shadow: bool
    steps: tuple[ResponseStep, ...] = ()
    calm_s: float | None = None
    relapses: int = 0
    exhausted: bool = False
    given_up: tuple[str, ...] = ()


class EscalationMemory(Struct, frozen=True, kw_only=True):
    """``useless``: key -> until when (seconds since the epoch).

    ``rest``: until when a pod is not frozen, by uid and whether that is in shadow. ``kept``: until when the eviction of
    a pod is not requested again, by uid.
    """

    climbs: Mapping[str, EscalationState] = {}
    useless: Mapping[str, float] = {}
    rest: Mapping[tuple[str, bool], float] = {}
    kept: Mapping[str, float] = {}


class RuleFindings(Struct, frozen=True, kw_only=True):
    """One rule's part in a step of the ladder: its findings, and what it may do about them."""

    rule: str
    shadow: bool
    responses: tuple[Response, ...]
    findings: tuple[RuleVerdict, ...]


def advance(
    memory: EscalationMemory,
    ascents: Sequence[RuleFindings],
    moment: tuple[SampleFrame, History],
    config: LadderConfig,
    *,
    fresh_s: float,
    evicts: bool = True,
) -> tuple[EscalationMemory, tuple[EscalationChange, ...]]:
    """One moment further. ``fresh_s``: the maximum age of a sample that counts as now.

    ``evicts``: requested evictions are carried out; they are neither off nor a dry run.
    """
    ladder = _Escalation(memory, moment, config, fresh_s, evicts)
    interfered = Verdict.INTERFERED
    for ascent in ascents:
        for finding in ascent.findings:
            if memory.climbs or finding.verdict is interfered:
                ladder.process(ascent, finding)
    return ladder.end()


class _Escalation:
    def __init__(
        self,
        memory: EscalationMemory,
        moment: tuple[SampleFrame, History],
        config: LadderConfig,
        fresh_s: float,
        evicts: bool,
    ) -> None:
        self._frame, self._history = frame, _ = moment
        self._config, self._fresh_s, self._evicts = config, fresh_s, evicts
        self._before = dict(memory.climbs)
        self._after: dict[str, EscalationState] = {}
        # A clock that was set back since makes none of them longer.
        longest = frame.wall_s + config.remember_s
        self._useless = {key: min(until, longest) for key, until in memory.useless.items() if until > frame.wall_s}
        self._rest = {pod: until for pod, until in memory.rest.items() if until > frame.at_s}
        self._kept = {uid: until for uid, until in memory.kept.items() if until > frame.at_s}
        self._changes: list[EscalationChange] = []

    def end(self) -> tuple[EscalationMemory, tuple[EscalationChange, ...]]:
        # The rest is of victims that were removed or are ending, and of rules that are off.
        for climb in self._before.values():
            for step in reversed(climb.steps):
                self._end(climb, step, f"rule {climb.rule} no longer evaluates {climb.title}")
        memory = EscalationMemory(climbs=self._after, useless=self._useless, rest=self._rest, kept=self._kept)
        return memory, tuple(self._changes)

    def process(self, ascent: RuleFindings, finding: RuleVerdict) -> None:
        key = f"{ascent.rule} {finding.victim}"
        climb = self._before.pop(key, None)
        if climb is not None and climb.shadow != ascent.shadow:
            # It begins without steps.
            mode = "is a dry run" if ascent.shadow else "enforces"
            for step in reversed(climb.steps):
                self._end(climb, step, f"the rule {mode} from now on")
            climb = None
        if climb is None:
            if finding.verdict is not Verdict.INTERFERED:
                return
            climb = EscalationState(rule=ascent.rule, victim=finding.victim, title=finding.title, shadow=ascent.shadow)
        climb = self._without_the_impossible(self._followed(climb), ascent.responses)
        climb = self._end_freeze(climb)
        match finding.verdict:
            case Verdict.INTERFERED:
                climb = self._escalate(climb, ascent, finding)
            case Verdict.OK:
                climb = self._deescalate(self._has_taken_effect(climb, finding))
            case _:
                # Unknown is not ok: the calm time starts again.
                climb = replace(climb, calm_s=None)
                if finding.unblamed:
                    climb = self._judge_pending(climb, finding)
        if climb.steps or finding.verdict is not Verdict.OK:
            self._after[key] = climb

    # Up

    def _escalate(self, climb: EscalationState, ascent: RuleFindings, finding: RuleVerdict) -> EscalationState:
        if climb.calm_s is not None and climb.steps:
            climb = replace(climb, relapses=climb.relapses + 1)
        climb = replace(climb, calm_s=None)
        waiting = pending(climb.steps)
        if waiting is not None:
            if self._frame.at_s - _begun_s(waiting) < self._patience(waiting):
                return climb
            larger = None if climb.shadow or self._better(waiting, finding) else intensified(waiting)
            if larger is not None:
                # Its ``severity`` stays that of before the small step: the effect of both together is evaluated.
                larger = replace(larger, at_s=self._frame.at_s)
                self._tell(Transition.APPLIED, climb, f"{larger.describe} ({_by(waiting, finding)})", larger)
                return _with(climb, waiting, larger)
            climb = self._judge(climb, waiting, finding)
        if self._other_rule_waits(climb):
            return climb
        step = next_step(self._chance(climb, ascent, finding))
        if step is not None and step.response is Response.EVICT and not (climb.shadow or self._evicts):
            # No effect is pending: the next step follows at once.
            climb = self._take(climb, replace(step, judged=True, dry=True))
            step = next_step(self._chance(climb, ascent, finding))
        if step is None:
            if not climb.exhausted:
                self._tell(Transition.EXHAUSTED, climb, "no further step available", None)
            return replace(climb, exhausted=True)
        return self._take(climb, step)

    def _take(self, climb: EscalationState, step: ResponseStep) -> EscalationState:
        climb = replace(climb, steps=(*climb.steps, step), exhausted=False)
        self._tell(
            Transition.ASKED if step.response is Response.EVICT else Transition.APPLIED, climb, step.describe, step
        )
        return climb

    def _judge_pending(self, climb: EscalationState, finding: RuleVerdict) -> EscalationState:
        """No pod is a suspect any more: whether the last step, which may have brought that about, was of use."""
        waiting = pending(climb.steps)
        if waiting is None or self._frame.at_s - _begun_s(waiting) < self._patience(waiting):
            return climb
        return self._judge(climb, waiting, finding)

    def _judge(self, climb: EscalationState, step: ResponseStep, finding: RuleVerdict) -> EscalationState:
        """The effect has had its time."""
        if climb.shadow:
            # It was not applied: what the victim does proves nothing about it.
            return _with(climb, step, replace(step, judged=True))
        if self._better(step, finding):
            self._tell(Transition.HELPED, climb, f"{step.describe}: {_by(step, finding)}", step)
            return _with(climb, step, replace(step, judged=True))
        # What helped at first and then no more is tried again once the victim has been well.
        if any(
            response_step.judged and response_step.suspect == step.suspect and response_step.what is step.what
            for response_step in climb.steps
        ):
            climb = replace(climb, given_up=(*climb.given_up, step.key))
        else:
            self._useless[step.key] = self._frame.wall_s + self._config.remember_s
        # An evicted pod does not return.
        turn = Transition.ENDED if step.response is Response.EVICT else Transition.UNDONE
        return self._end(climb, step, f"no effect ({_by(step, finding)})", turn, no_effect=True)

    def _better(self, step: ResponseStep, finding: RuleVerdict) -> bool:
        return finding.severity <= step.severity * (1 - self._config.better_percent / 100)

    def _has_taken_effect(self, climb: EscalationState, finding: RuleVerdict) -> EscalationState:
        """The victim is ok: all pending steps have helped, except those that were only requested."""
        for step in climb.steps:
            if step.dry or (_wish(climb, step) and step.ending_s is None):
                climb = self._end(climb, step, f"{climb.title} has recovered")
        waiting = pending(climb.steps)
        if waiting is None:
            return climb
        if not climb.shadow:
            self._tell(Transition.HELPED, climb, f"{waiting.describe}: {_by(waiting, finding)}", waiting)
        return _with(climb, waiting, replace(waiting, judged=True))

    def _patience(self, step: ResponseStep) -> float:
        return self._config.evict_effect_s if step.response is Response.EVICT else self._config.effect_s

    def _alike(self, climb: EscalationState) -> list[EscalationState]:
        """The others whose steps are as real as this one's."""
        others = [*self._after.values(), *self._before.values()]
        return [escalation_state for escalation_state in others if escalation_state.shadow == climb.shadow]

    def _other_rule_waits(self, climb: EscalationState) -> bool:
        """Whether another rule has just changed something for the same victim: the effect would be that of both."""
        waits = [pending(other.steps) for other in self._alike(climb) if other.victim == climb.victim]
        return any(step is not None and self._frame.at_s - _begun_s(step) < self._patience(step) for step in waits)

    def _chance(self, climb: EscalationState, ascent: RuleFindings, finding: RuleVerdict) -> ActionContext:
        alike = self._alike(climb)
        waits = [pending(escalation_state.steps) for escalation_state in alike]
        responses = ascent.responses
        if not self._evicts and any(step.dry for step in climb.steps):
            # The next victim would depend on the effect of the first one's end.
            responses = tuple(response for response in responses if response is not Response.EVICT)
        # A pod is frozen for one victim at a time: its bound holds for all of them together.
        frozen = {
            step.suspect or ""
            for escalation_state in alike
            for step in escalation_state.steps
            if step.response is Response.FREEZE
        }
        return ActionContext(
            finding=finding,
            frame=self._frame,
            history=self._history,
            config=self._config,
            responses=responses,
            taken=climb.steps,
            useless={*self._useless, *climb.given_up},
            busy={step.suspect for step in waits if step is not None and step.suspect is not None},
            resting=frozen | {uid for uid, shadow in self._rest if shadow == climb.shadow},
            kept=self._kept.keys(),
            fresh_s=self._fresh_s,
        )

    # Down

    def _deescalate(self, climb: EscalationState) -> EscalationState:
        if not climb.steps:
            return climb
        if climb.calm_s is None:
            return replace(climb, calm_s=self._frame.at_s)
        if self._frame.at_s - climb.calm_s < self._config.recover_s * min(2**climb.relapses, _SLOWEST):
            return climb
        step = climb.steps[-1]
        eased = self._eased(climb, step)
        calmed = replace(climb, calm_s=self._frame.at_s)
        if eased is None:
            return self._end(calmed, step, f"{climb.title} has recovered")
        self._tell(Transition.EASED, climb, eased.describe, eased)
        return _with(calmed, step, eased)

    def _eased(self, climb: EscalationState, step: ResponseStep) -> ResponseStep | None:
        """The last step, one step back; None: all of it."""
        if step.what not in {Dimension.CPU, Dimension.MEMORY, Dimension.DISK}:
            return None
        # What the steps below it leave binds in any case; above that nothing would be given back.
        below = [
            response_step.amount
            for response_step in climb.steps[:-1]
            if response_step.suspect == step.suspect and response_step.what is step.what
        ]
        most = min([step.before, *below])
        amount = step.amount + (most - step.amount) * self._config.recover_percent / 100
        # The last tenth is not worth a step of its own.
        return replace(step, amount=amount) if amount < 0.9 * most else None

    # What ends by itself

    def _followed(self, climb: EscalationState) -> EscalationState:
        """Follow requested evictions, which the eviction planner may refuse.

        One is evaluated when its pod is seen ending; else it is dropped, which proves nothing about the suspect.
        """
        for step in climb.steps:
            if not _wish(climb, step) or step.ending_s is not None:
                continue
            assert step.suspect is not None
            pod = self._frame.pods.get(step.suspect)
            if pod is None or pod.terminating:
                climb = _with(climb, step, replace(step, ending_s=self._frame.at_s))
            elif self._frame.at_s - step.at_s >= self._config.evict_effect_s:
                self._kept[step.suspect] = self._frame.at_s + _ASK_AGAIN_S
                climb = self._end(climb, step, "not carried out")
        return climb

    def _without_the_impossible(self, climb: EscalationState, responses: Sequence[Response]) -> EscalationState:
        for step in climb.steps:
            if why := self._impossible(climb, step, responses):
                climb = self._end(climb, step, why)
        return climb

    def _impossible(self, climb: EscalationState, step: ResponseStep, responses: Sequence[Response]) -> str:
        """Why a step cannot be in force any more, whatever its effect; empty: it can."""
        if step.response not in responses:
            return f"the rule has no response {step.response} any more"
        if step.suspect is None:
            return ""
        pod = self._frame.pods.get(step.suspect)
        if pod is None:
            # Of a pod whose end was requested the effect is still pending.
            return "" if _wish(climb, step) else "the pod is gone"
        if pod.held:
            return "the pod is on hold"
        if pod.pod_class is not PodClass.RECLAIMED:
            return "the pod is no longer a BE pod"
        # A frozen process handles no signal.
        return "the pod is being terminated" if pod.terminating and step.response is Response.FREEZE else ""

    def _end_freeze(self, climb: EscalationState) -> EscalationState:
        for step in climb.steps:
            if step.response is Response.FREEZE and self._frame.at_s - step.at_s >= step.amount:
                climb = self._end(climb, step, "time limit reached")
        return climb

    def _end(
        self,
        climb: EscalationState,
        step: ResponseStep,
        why: str,
        turn: Transition = Transition.ENDED,
        *,
        no_effect: bool = False,
    ) -> EscalationState:
        if step.response is Response.FREEZE and step.suspect is not None:
            self._rest[step.suspect, climb.shadow] = self._frame.at_s + self._config.freeze.rest_s
        self._tell(turn, climb, f"{step.describe}: {why}", step, no_effect=no_effect)
        return _with(climb, step, None)

    def _tell(
        self,
        turn: Transition,
        climb: EscalationState,
        message: str,
        step: ResponseStep | None,
        *,
        no_effect: bool = False,
    ) -> None:
        self._changes.append(
            EscalationChange(
                turn=turn,
                rule=climb.rule,
                victim=climb.victim,
                title=climb.title,
                words=message,
                shadow=climb.shadow or (step is not None and step.dry),
                step=step,
                no_effect=no_effect,
            )
        )


def in_force(memory: EscalationMemory) -> Iterator[tuple[EscalationState, ResponseStep]]:
    """Every step that is really taken, with its climb."""
    for climb in memory.climbs.values():
        if not climb.shadow:
            for step in climb.steps:
                if not step.dry:
                    yield climb, step


def let_go(memory: EscalationMemory, config: LadderConfig) -> EscalationMemory:
    """The memory to keep where everything in force has been ended at once from outside."""
    rest = dict(memory.rest)
    for climb, step in in_force(memory):
        if step.response is Response.FREEZE and step.suspect is not None:
            # It began to rest by now at the latest.
            rest[step.suspect, climb.shadow] = step.at_s + step.amount + config.freeze.rest_s
    return EscalationMemory(useless=memory.useless, rest=rest, kept=memory.kept)


def _with(climb: EscalationState, old: ResponseStep, new: ResponseStep | None) -> EscalationState:
    steps = tuple(new if step is old else step for step in climb.steps if step is not old or new is not None)
    return replace(climb, steps=tuple(step for step in steps if step is not None))


def _wish(climb: EscalationState, step: ResponseStep) -> bool:
    """An eviction that was really requested and is not evaluated yet."""
    return step.response is Response.EVICT and not (climb.shadow or step.judged)


def _begun_s(step: ResponseStep) -> float:
    """Since when there may be an effect."""
    return step.at_s if step.ending_s is None else step.ending_s


def _by(step: ResponseStep, finding: RuleVerdict) -> str:
    return f"severity {step.severity:.2f} -> {finding.severity:.2f}"
