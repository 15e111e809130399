"""The law by which a rule in shadow becomes enforcing and a dry run again, day by day and frame by frame."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from reconciler.responses.config import LadderConfig, PromotionConfig
from reconciler.responses.ladder import EscalationChange, Transition
from reconciler.responses.promotion import (
    DAY_S,
    DayRecord,
    EvidenceMemory,
    ModeChange,
    Moment,
    RuleRecord,
    changed,
    close_day,
    next_mode,
    observe,
)
from tests.fakes.constants import varied

CONFIG = varied(varied(PromotionConfig(enabled=True, days=3), undo_percent=25), verdicts=6, actions=4, rest_days=2)
LADDER = varied(LadderConfig(), effect_s=10)
CLEAN, QUIET, REGRETTED = DayRecord(verdicts=2), DayRecord(), DayRecord(verdicts=9, regrets=1)


@pytest.mark.parametrize(
    ("days", "enforcing"),
    [
        ((CLEAN, CLEAN, CLEAN), True),
        ((CLEAN, CLEAN), False),
        ((QUIET, CLEAN, CLEAN), False),
        ((QUIET, QUIET, DayRecord(verdicts=6)), True),
        ((CLEAN, REGRETTED, CLEAN), False),
        ((REGRETTED, CLEAN, CLEAN), False),
        ((), False),
    ],
)
def test_a_rule_enforces_after_enough_days_and_responses_without_regret(
    days: tuple[DayRecord, ...], enforcing: bool
) -> None:
    assert next_mode(RuleRecord(days=days), CONFIG)[0] is enforcing
    assert next_mode(RuleRecord(days=days, rest_days=1), CONFIG)[0] is False


@pytest.mark.parametrize(
    ("helped", "undone", "enforcing"),
    [(0, 0, True), (0, 3, True), (3, 1, True), (2, 2, False), (0, 4, False), (100, 33, True), (100, 34, False)],
)
def test_it_goes_back_when_too_many_of_enough_responses_had_no_effect(
    helped: int, undone: int, enforcing: bool
) -> None:
    """75 and 25 of a hundred are 25 %; three are too few to count."""
    day = DayRecord(helped=helped, undone=undone)
    for record in (RuleRecord(enforcing=True, today=day), RuleRecord(enforcing=True, days=(day, QUIET, QUIET)[:2])):
        assert next_mode(record, CONFIG)[0] is enforcing
    old = RuleRecord(enforcing=True, days=(DayRecord(undone=50), QUIET, QUIET), today=QUIET)
    assert next_mode(old, CONFIG)[0] is True, "it is older than the days that count"


def test_days_of_a_rest_are_no_evidence_and_each_further_rest_is_longer() -> None:
    record, rests = RuleRecord(enforcing=True), []
    for _ in range(6):
        record = changed(replace(record, enforcing=True), False, 5.0, CONFIG)
        rests.append(record.rest_days)
    assert rests == [2, 4, 8, 16, 16, 16]
    record = changed(RuleRecord(enforcing=True), False, 5.0, CONFIG)
    for left in (1, 0):
        record = close_day(replace(record, today=CLEAN), CONFIG)
        assert (record.rest_days, record.days) == (left, ())
    assert close_day(replace(record, today=CLEAN), CONFIG).days == (CLEAN,)


def change(turn: Transition, *, shadow: bool, no_effect: bool = False, victim: str = "pod:web") -> EscalationChange:
    return EscalationChange(
        turn=turn, rule="cpu", victim=victim, title=victim, words="", shadow=shadow, no_effect=no_effect
    )


WOULD = change(Transition.APPLIED, shadow=True)
UNDONE = change(Transition.UNDONE, shadow=False, no_effect=True)
LAPSED = change(Transition.ENDED, shadow=False, no_effect=True)


class Watch:
    """Frames of one rule, some seconds apart."""

    def __init__(self, record: RuleRecord | None = None, *, enforce: bool = True) -> None:
        self.memory = EvidenceMemory(records={} if record is None else {"cpu": record})
        self.at_s, self.wall_s, self.enforce = 100.0, 1.7e9, enforce
        self.modes: list[ModeChange] = []
        self.frame()

    def frame(
        self, *changes: EscalationChange, after: float = 1.0, well: Sequence[str] = (), gone: Sequence[str] = ()
    ) -> RuleRecord:
        self.at_s += after
        self.wall_s += after
        ended = [("cpu", uid, True) for uid in well] + [("cpu", uid, False) for uid in gone]
        moment = Moment(
            at_s=self.at_s, wall_s=self.wall_s, enforce=self.enforce, rules=["cpu"], changes=changes, ended=ended
        )
        self.memory, modes = observe(self.memory, moment, CONFIG, LADDER)
        self.modes += modes
        return self.memory.records["cpu"]

    def day(self, *changes: EscalationChange) -> None:
        for item in changes:
            self.frame(item)
            self.frame(after=30, well=[item.victim])
        number = len(self.memory.records["cpu"].days), self.memory.records["cpu"].rest_days
        for _ in range(int(DAY_S // 60) + 2):
            record = self.frame(after=60)
            if (len(record.days), record.rest_days) != number or self.modes:
                return


def test_a_victim_that_is_well_before_the_effect_is_a_regret() -> None:
    watch = Watch()
    watch.frame(WOULD)
    assert watch.frame(after=9, well=["pod:web"]).today == DayRecord(verdicts=1, regrets=1)
    watch.frame(WOULD)
    assert watch.frame(after=11, well=["pod:web"]).today == DayRecord(verdicts=2, regrets=1)
    watch.frame(WOULD)
    assert watch.frame(after=2, gone=["pod:web"]).today.regrets == 1
    assert watch.frame(after=1, well=["pod:web"]).today.regrets == 1


def test_victims_that_vanish_are_no_evidence() -> None:
    """Else pods that are made, wait for a CPU and are removed have a rule enforced on everyone."""
    watch = Watch()
    for number in range(40):
        watch.frame(change(Transition.APPLIED, shadow=True, victim=f"pod:{number}"))
        watch.frame(after=9, gone=[f"pod:{number}"])
    assert watch.memory.records["cpu"].today == DayRecord()
    watch.frame(WOULD)
    assert watch.frame(after=10, gone=["pod:web"]).today == DayRecord(verdicts=1), "its effect would be known"
    watch.frame(WOULD)
    watch.frame(after=10)
    assert watch.frame(WOULD, after=5).today == DayRecord(verdicts=2), "the next step of the same victim"


def test_days_without_regret_make_a_rule_enforcing_once() -> None:
    watch = Watch()
    for _ in range(3):
        watch.day(WOULD, WOULD)
    assert [mode.enforcing for mode in watch.modes] == [True]
    record = watch.memory.records["cpu"]
    assert (record.enforcing, record.days, record.since_s) == (True, (), watch.wall_s)


def test_in_observe_mode_it_never_does() -> None:
    watch = Watch(enforce=False)
    for _ in range(4):
        watch.day(WOULD, WOULD)
    assert not watch.modes
    assert next_mode(watch.memory.records["cpu"], CONFIG)[0], "the record is there for the day it may"


@pytest.mark.parametrize("failed", [UNDONE, LAPSED])
def test_what_had_no_effect_makes_it_a_dry_run_at_once(failed: EscalationChange) -> None:
    watch = Watch(RuleRecord(enforcing=True))
    for _ in range(3):
        watch.frame(failed)
    assert not watch.modes
    record = watch.frame(failed)
    assert [mode.enforcing for mode in watch.modes] == [False]
    assert (record.enforcing, record.rest_days, record.demotions) == (False, 2, 1)


def test_steps_that_are_a_dry_run_under_an_enforcing_rule_are_no_evidence() -> None:
    assert Watch(RuleRecord(enforcing=True)).frame(WOULD).today == DayRecord()


def test_neither_a_set_clock_nor_a_stop_makes_a_day() -> None:
    watch = Watch()
    watch.wall_s += 40 * DAY_S
    assert watch.frame().watched_s == 1.0
    assert watch.frame(after=30 * DAY_S).watched_s == 1.0
    assert watch.frame(after=-5000.0).watched_s == 1.0
    assert watch.frame().days == ()


def test_a_rule_that_a_person_decided_has_no_record_any_more() -> None:
    watch = Watch(RuleRecord(enforcing=True))
    memory, _ = observe(watch.memory, Moment(at_s=200.0, wall_s=1.0, enforce=True, rules=[]), CONFIG, LADDER)
    assert memory.records == {}


day = st.builds(DayRecord, verdicts=st.integers(0, 99), regrets=st.integers(0, 9))
records = st.builds(
    RuleRecord,
    enforcing=st.booleans(),
    since_s=st.none() | st.floats(),
    days=st.lists(day, max_size=200).map(tuple),
    today=day,
    watched_s=st.floats(),
    rest_days=st.integers(0, 2**40),
    demotions=st.integers(0, 2**40),
)


@given(records)
def test_any_row_of_the_store_can_be_continued(record: RuleRecord) -> None:
    body = msgspec.msgpack.encode(record)
    again = msgspec.msgpack.decode(body, type=RuleRecord)
    assert msgspec.msgpack.encode(again) == body
    watch = Watch(again)
    watch.frame(WOULD)
    now = watch.frame(UNDONE)
    assert 0 <= now.watched_s < DAY_S
    assert now.rest_days <= max(record.rest_days, 16)


@given(records, st.sampled_from(["rest_days", "demotions"]))
def test_a_row_with_negative_counts_is_refused(record: RuleRecord, field: str) -> None:
    body = msgspec.msgpack.encode({**msgspec.to_builtins(record), field: -1})
    with pytest.raises(ValueError, match=">= 0"):
        msgspec.msgpack.decode(body, type=RuleRecord)
