"""Rules in shadow that become enforcing by evidence, and are a dry run again by their undo rate. Pure.

A rule in shadow regrets a response when the victim was well again before the response's effect would have been
evaluated: it would have been needless, and would have been credited with the recovery. While it enforces, the ladder
evaluates every response itself: it helped, or was undone.

    shadow -> enforcing: `days` whole days of watched time in a row without regret, with `verdicts` responses, no rest
    enforcing -> shadow: of at least `actions` responses in `days` days more than `undo_percent` were undone, at once;
                         then no day counts for `rest_days`, and twice as long after each further time
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

from msgspec import Meta, Struct, to_builtins
from msgspec.structs import replace

from reconciler.responses.config import LadderConfig, PromotionConfig
from reconciler.responses.ladder import EscalationChange, Transition

DAY_S: Final = 86400.0
_LONGEST_FRAME_S: Final = 60.0
"""Frames further apart belong to two runs."""
_MOST_REST: Final = 3
"""A rest is doubled at most so often."""
_MOST_OPEN: Final = 1000
_Count = Annotated[int, Meta(ge=0)]


class DayRecord(Struct, frozen=True, kw_only=True):
    """One day of one rule. ``verdicts``: responses that it would have begun; ``regrets``: needless ones of them.

    Only those whose victims were seen until the effect would have been evaluated, or until they were well. ``helped``
    and ``undone``: responses that were carried out, by their effect.
    """

    verdicts: _Count = 0
    regrets: _Count = 0
    helped: _Count = 0
    undone: _Count = 0


class RuleRecord(Struct, frozen=True, kw_only=True):
    """What is known of one rule. ``days``: whole days, the oldest first; ``today``: the present one so far.

    ``enforcing``: by evidence; ``since_s``: seconds since the epoch of the last change, for people. ``rest_days``: days
    that do not count yet; ``demotions``: how often it went back. ``watched_s``: of the present day.
    """

    enforcing: bool = False
    since_s: float | None = None
    days: tuple[DayRecord, ...] = ()
    today: DayRecord = DayRecord()
    watched_s: float = 0.0
    rest_days: _Count = 0
    demotions: _Count = 0


class ModeChange(Struct, frozen=True, kw_only=True):
    rule: str
    enforcing: bool
    reason: str


def close_day(record: RuleRecord, config: PromotionConfig) -> RuleRecord:
    """The day is over. Days of a rest count down, and are no evidence."""
    if record.rest_days:
        return replace(record, rest_days=record.rest_days - 1, days=(), today=DayRecord())
    return replace(record, days=(*record.days, record.today)[-config.days :], today=DayRecord())


def next_mode(record: RuleRecord, config: PromotionConfig) -> tuple[bool, str]:
    """Whether the rule is to enforce from now on, and why."""
    if record.enforcing:
        recent = (*record.days, record.today)[-config.days :]
        undone = sum(day.undone for day in recent)
        judged = undone + sum(day.helped for day in recent)
        if judged >= config.actions and 100 * undone > config.undo_percent * judged:
            return False, f"{undone} of {judged} responses had no effect (more than {config.undo_percent} %)"
        return True, f"{undone} of {judged} responses had no effect"
    days = record.days
    if record.rest_days:
        return False, f"resting for {record.rest_days} more days"
    clean = clean_days(days)
    verdicts = sum(day.verdicts for day in days[len(days) - clean :])
    text = f"{clean} of {config.days} days without regret, {verdicts} of {config.verdicts} responses"
    return clean >= config.days and verdicts >= config.verdicts, text


def clean_days(days: Sequence[DayRecord]) -> int:
    """How many of the last days in a row are without regret."""
    return next((count for count, day in enumerate(reversed(days)) if day.regrets), len(days))


def changed(record: RuleRecord, enforcing: bool, wall_s: float, config: PromotionConfig) -> RuleRecord:
    """The record after a change of mode: evidence of the other mode is none of this one."""
    if enforcing:
        return replace(record, enforcing=True, since_s=wall_s, days=(), today=DayRecord())
    rest = config.rest_days * (2 ** min(record.demotions, _MOST_REST))
    return RuleRecord(since_s=wall_s, watched_s=record.watched_s, rest_days=rest, demotions=record.demotions + 1)


def record_facts(record: RuleRecord, config: PromotionConfig) -> dict[str, object]:
    """The record for people: sums of the days that count, the present one included."""
    total = DayRecord()
    for day in (*record.days, record.today):
        total = _sum(total, day)
    return {
        "enforcing": record.enforcing,
        "since_s": record.since_s,
        "days": len(record.days),
        "clean_days": clean_days(record.days),
        "rest_days": record.rest_days,
        "demotions": record.demotions,
        **to_builtins(total),
        "text": next_mode(record, config)[1],
    }


class EvidenceMemory(Struct, frozen=True, kw_only=True):
    """``records`` by rule; ``open``: when a response in shadow would have begun, by rule and victim (monotonic).

    Only of responses that are not counted yet.
    """

    records: Mapping[str, RuleRecord] = {}
    open: Mapping[tuple[str, str], float] = {}
    at_s: float | None = None


class Moment(Struct, frozen=True, kw_only=True):
    """One frame's evidence. ``rules``: those that may change their mode.

    ``ended``: rule, victim, and whether it is well. ``enforce``: the agent's mode; in observe mode no rule becomes
    enforcing.
    """

    at_s: float
    wall_s: float
    enforce: bool
    rules: Sequence[str]
    changes: Sequence[EscalationChange] = ()
    ended: Sequence[tuple[str, str, bool]] = ()


def observe(
    memory: EvidenceMemory, moment: Moment, config: PromotionConfig, ladder: LadderConfig
) -> tuple[EvidenceMemory, tuple[ModeChange, ...]]:
    """One frame further. Records of rules that may not change any more are dropped: a person has decided."""
    # Only time between two frames: neither a stopped daemon nor a clock that is set makes a day.
    passed = 0.0 if memory.at_s is None else moment.at_s - memory.at_s
    passed = passed if 0 < passed <= _LONGEST_FRAME_S else 0.0
    counts, still = _counted(memory, moment, ladder)
    records: dict[str, RuleRecord] = {}
    modes: list[ModeChange] = []
    for rule in moment.rules:
        record = memory.records.get(rule, RuleRecord())
        today = counts.get(rule)
        if today is not None:
            record = replace(record, today=_sum(record.today, today))
        watched = record.watched_s + passed
        whole = DAY_S <= watched < 2 * DAY_S
        # What no observer has written (a damaged row) is not a day, nor many.
        record = replace(record, watched_s=watched - DAY_S if whole else watched if 0 <= watched < DAY_S else 0.0)
        if whole:
            record = close_day(record, config)
        if whole or today is not None:
            enforcing, reason = next_mode(record, config)
            # A rule becomes enforcing with a whole day only, and never in observe mode.
            if enforcing != record.enforcing and (not enforcing or (whole and moment.enforce)):
                record = changed(record, enforcing, moment.wall_s, config)
                modes.append(ModeChange(rule=rule, enforcing=enforcing, reason=reason))
        records[rule] = record
    return EvidenceMemory(records=records, open=still, at_s=moment.at_s), tuple(modes)


def _counted(
    memory: EvidenceMemory, moment: Moment, ladder: LadderConfig
) -> tuple[dict[str, DayRecord], dict[tuple[str, str], float]]:
    """What this frame adds to each rule's day, and the responses in shadow that are not counted yet."""
    counts: dict[str, DayRecord] = {}
    still: dict[tuple[str, str], float] = {}

    def add(rule: str, **more: int) -> None:
        counts[rule] = _sum(counts.get(rule, DayRecord()), DayRecord(**more))

    def enforcing(rule: str) -> bool:
        return rule in memory.records and memory.records[rule].enforcing

    for (rule, victim), began in memory.open.items():
        if moment.at_s - began < ladder.effect_s:
            still[rule, victim] = began
        elif not enforcing(rule):
            add(rule, verdicts=1)
    for change in moment.changes:
        shadow = change.shadow and not enforcing(change.rule)
        if shadow and change.turn in {Transition.APPLIED, Transition.ASKED}:
            if len(still) < _MOST_OPEN:
                still[change.rule, change.victim] = moment.at_s
        elif not change.shadow and change.turn is Transition.HELPED:
            add(change.rule, helped=1)
        elif not change.shadow and change.no_effect:
            add(change.rule, undone=1)
    for rule, victim, well in moment.ended:
        known = still.pop((rule, victim), None)
        # A victim that was removed before proves nothing: who makes and removes pods must not have a rule enforced.
        if known is not None and well and not enforcing(rule):
            add(rule, verdicts=1, regrets=1)
    return counts, still


def _sum(first: DayRecord, second: DayRecord) -> DayRecord:
    return DayRecord(
        verdicts=first.verdicts + second.verdicts,
        regrets=first.regrets + second.regrets,
        helped=first.helped + second.helped,
        undone=first.undone + second.undone,
    )
