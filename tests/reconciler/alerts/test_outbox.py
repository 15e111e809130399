"""What one sink gets and when: every delivery ends in exactly one count, and no durable one is lost."""

import math
from typing import Self

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reconciler.alerts.alert import AlertKind, Severity
from reconciler.alerts.incident import Incident, Incidents
from reconciler.alerts.outbox import Outbox, SinkRules
from tests.reconciler.alerts.making import alert, notice, told


def run(outbox: Outbox, now: float) -> list[tuple[str, int]]:
    batch = outbox.take(now)
    outbox.delivered(now)
    return told(batch)


def test_an_alert_waits_for_company_and_a_full_batch_goes_at_once() -> None:
    outbox = Outbox("s", SinkRules(batch_size=3, batch_delay_s=5))
    outbox.offer(notice("a"), 0)
    assert (outbox.next_at(0), outbox.take(4.9)) == (5, ())
    outbox.offer(notice("b"), 1)
    assert run(outbox, 5) == [("a", 1), ("b", 1)]
    for key in ("c", "d", "e", "f"):
        outbox.offer(notice(key), 6)
    assert outbox.next_at(6) == 6
    assert run(outbox, 6) == [("c", 1), ("d", 1), ("e", 1)]
    assert outbox.next_at(6) == 11


def test_a_critical_one_goes_at_once_and_takes_along_what_waits() -> None:
    outbox = Outbox("s", SinkRules(batch_delay_s=60))
    outbox.offer(notice("a"), 0)
    outbox.offer(notice("b", severity=Severity.CRITICAL), 1)
    assert sorted(run(outbox, 1)) == [("a", 1), ("b", 1)]


def test_the_same_again_is_one_with_a_count_and_told_again_after_the_repeat_interval() -> None:
    incidents, outbox = Incidents(3600), Outbox("s", SinkRules(batch_delay_s=5, repeat_s=100))
    for at in (0.0, 1.0, 2.0):
        outbox.offer(incidents.take(alert(at_s=at)), at)
    assert run(outbox, 5) == [("k", 3)]
    outbox.offer(incidents.take(alert(at_s=6.0)), 6)
    outbox.offer(incidents.take(alert(at_s=7.0)), 7)
    assert outbox.next_at(7) == 105
    batch = outbox.take(105)
    assert (told(batch), batch[0].first_s, batch[0].last_s) == ([("k", 5)], 0.0, 7.0)


def test_a_louder_one_and_the_end_do_not_wait_for_the_repeat_interval() -> None:
    incidents, outbox = Incidents(3600), Outbox("s", SinkRules(batch_delay_s=0, repeat_s=100))
    outbox.offer(incidents.take(alert(kind=AlertKind.INTERFERENCE)), 0)
    assert run(outbox, 0) == [("k", 1)]
    outbox.offer(incidents.take(alert(kind=AlertKind.INTERFERENCE, at_s=1001.0, severity=Severity.CRITICAL)), 1)
    assert run(outbox, 1) == [("k", 2)]
    outbox.offer(incidents.take(alert(kind=AlertKind.CLEARED, at_s=1002.0, severity=Severity.INFO)), 2)
    batch = outbox.take(2)
    outbox.delivered(2)
    assert (told(batch), batch[0].has_ended) == ([("k", 3)], True)
    outbox.offer(incidents.take(alert(kind=AlertKind.CLEARED, at_s=1003.0, severity=Severity.INFO)), 3)
    assert (outbox.next_at(3), outbox.waiting, outbox.tally.told) == (math.inf, 0, 4)


def test_a_quiet_end_is_told_to_who_was_told_of_the_beginning_and_to_nobody_else() -> None:
    incidents = Incidents(3600)
    knows, knows_not = (Outbox(name, SinkRules(minimum=Severity.WARNING, batch_delay_s=0)) for name in "ab")
    knows.offer(incidents.take(alert(kind=AlertKind.INTERFERENCE)), 0)
    run(knows, 0)
    end = incidents.take(alert(kind=AlertKind.CLEARED, at_s=1001.0, severity=Severity.INFO))
    assert (knows.offer(end, 1), knows_not.offer(end, 1)) == (True, False)
    assert (run(knows, 1), run(knows_not, 1)) == ([("k", 2)], [])
    assert knows_not.tally.ignored == 1


def test_only_the_kinds_that_are_wanted_with_their_ends_and_no_ends_when_those_are_not() -> None:
    outbox = Outbox("s", SinkRules(kinds=frozenset({AlertKind.INTERFERENCE})))
    assert not outbox.wants(notice(kind=AlertKind.EVICTION_DONE))
    assert outbox.wants(notice(kind=AlertKind.INTERFERENCE))
    assert outbox.wants(notice(kind=AlertKind.CLEARED))
    assert not Outbox("s", SinkRules(resolved=False)).wants(notice(kind=AlertKind.CLEARED))


def test_a_sink_is_never_told_of_itself() -> None:
    about = Incidents(1).take(alert(kind=AlertKind.SOURCE), besides="s")
    assert (Outbox("s", SinkRules()).wants(about), Outbox("t", SinkRules()).wants(about)) == (False, True)


def test_a_state_is_sent_again_until_it_ends_and_an_event_is_not() -> None:
    incidents, outbox = Incidents(3600), Outbox("s", SinkRules(batch_delay_s=0, resend_s=60))
    outbox.offer(incidents.take(alert("state", AlertKind.INTERFERENCE)), 0)
    outbox.offer(incidents.take(alert("event")), 0)
    assert sorted(run(outbox, 0)) == [("event", 1), ("state", 1)]
    assert [outbox.next_at(0), run(outbox, 60), outbox.next_at(60)] == [60, [("state", 1)], 120]
    outbox.offer(incidents.take(alert("state", AlertKind.INTERFERENCE, at_s=1061.0, resolved=True)), 61)
    assert (run(outbox, 61), outbox.next_at(61)) == ([("state", 2)], math.inf)


def test_a_state_whose_end_the_sink_does_not_get_is_not_sent_again_after_it() -> None:
    incidents, outbox = Incidents(3600), Outbox("s", SinkRules(batch_delay_s=0, resend_s=60, resolved=False))
    outbox.offer(incidents.take(alert("told", AlertKind.SOURCE)), 0)
    assert (run(outbox, 0), run(outbox, 60)) == ([("told", 1)], [("told", 1)])
    outbox.offer(incidents.take(alert("waits", AlertKind.SOURCE)), 61)
    for key in ("told", "waits"):
        end = incidents.take(alert(key, AlertKind.SOURCE, at_s=1062.0, severity=Severity.INFO, resolved=True))
        assert not outbox.offer(end, 62)
    assert run(outbox, 62) == [("waits", 1)], "its beginning is still sent, once"
    assert outbox.next_at(62) == math.inf
    outbox.offer(incidents.take(alert("told", AlertKind.SOURCE, at_s=1063.0)), 63)
    assert (run(outbox, 63), run(outbox, 123)) == ([("told", 1)], [("told", 1)]), "another state of this name"


def test_what_is_sent_again_later_fills_no_batch_that_goes_at_once() -> None:
    incidents = Incidents(3600)
    outbox = Outbox("s", SinkRules(batch_size=2, batch_delay_s=60, resend_s=30, repeat_s=30))
    for key in ("a", "b"):
        outbox.offer(incidents.take(alert(key, AlertKind.SOURCE)), 0)
    assert run(outbox, 0) == [("a", 1), ("b", 1)]
    assert outbox.next_at(0) == 30
    outbox.offer(incidents.take(alert("a", AlertKind.SOURCE, at_s=1001.0)), 1)
    outbox.offer(incidents.take(alert("event")), 2)
    assert outbox.next_at(2) == 30
    assert run(outbox, 30) == [("a", 2), ("b", 1)]
    assert outbox.next_at(30) == 60
    outbox.offer(incidents.take(alert("another")), 31)
    assert outbox.next_at(31) == 31, "two that are new"


def test_durable_alerts_of_years_leave_no_times_behind() -> None:
    outbox = Outbox("s", SinkRules(batch_delay_s=0))
    for number in range(200):
        outbox.offer(notice(f"k{number}", durable=True), 100.0 * number)
        run(outbox, 100.0 * number)
    assert len(outbox._accepted) == 1


def test_of_a_storm_some_are_told_the_rest_is_counted_and_told_once_and_durable_ones_always() -> None:
    outbox = Outbox("s", SinkRules(batch_delay_s=0, per_minute=3, batch_size=100), wall_offset_s=1_000_000)
    for number in range(10):
        outbox.offer(notice(f"n{number}"), 1)
    outbox.offer(notice("kept", durable=True), 1)
    outbox.offer(notice("cpu", AlertKind.TUG_OF_WAR), 1)
    assert run(outbox, 1) == [("n0", 1), ("n1", 1), ("n2", 1), ("kept", 1)]
    assert (outbox.tally.folded, outbox.next_at(1)) == (8, 61)
    (digest,) = outbox.take(61)
    outbox.delivered(61)
    assert digest.alert.summary == ("8 more alerts within a minute, sent as one summary: eviction-done 7, tug-of-war 1")
    assert (digest.alert.kind, digest.first_s, outbox.next_at(61)) == (AlertKind.OTHER, 1_000_061, math.inf)
    outbox.offer(notice("later"), 62)
    assert run(outbox, 62) == [("later", 1)]


def test_the_end_of_what_was_only_counted_is_only_counted_and_what_goes_on_after_the_storm_is_told() -> None:
    incidents, outbox = Incidents(3600), Outbox("s", SinkRules(batch_delay_s=0, per_minute=1))
    for key in ("a", "b", "c"):
        outbox.offer(incidents.take(alert(key, AlertKind.INTERFERENCE)), 0)
    assert run(outbox, 0) == [("a", 1)]
    outbox.offer(incidents.take(alert("b", AlertKind.CLEARED, at_s=1001.0)), 1)
    run(outbox, 60)
    assert (outbox.tally.folded, outbox.next_at(61)) == (3, math.inf)
    outbox.offer(incidents.take(alert("c", AlertKind.INTERFERENCE, at_s=1070.0)), 70)
    assert run(outbox, 70) == [("c", 2)]


def test_when_too_many_wait_the_oldest_goes_first_and_critical_and_durable_ones_last() -> None:
    outbox = Outbox("s", SinkRules(batch_delay_s=60, most=3, per_minute=1000))
    outbox.offer(notice("old"), 0)
    outbox.offer(notice("durable", durable=True), 1)
    outbox.offer(notice("critical", severity=Severity.CRITICAL), 2)
    outbox.offer(notice("new"), 3)
    assert (outbox.lost, outbox.tally.dropped) == ([notice("old").id], 1)
    outbox.offer(notice("newer"), 4)
    outbox.offer(notice("loud", severity=Severity.CRITICAL), 5)
    outbox.offer(notice("louder", severity=Severity.CRITICAL), 6)
    assert [outbox.lost[-2:], sorted(key for key, _ in run(outbox, 6))] == [
        [notice("newer").id, notice("durable").id],
        ["critical", "loud", "louder"],
    ]


def test_what_failed_waits_again_with_what_has_come_since_and_giving_up_counts_it() -> None:
    incidents, outbox = Incidents(3600), Outbox("s", SinkRules(batch_delay_s=0))
    outbox.offer(incidents.take(alert()), 0)
    assert told(outbox.take(0)) == [("k", 1)]
    assert outbox.next_at(0) == math.inf
    outbox.offer(incidents.take(alert(at_s=1001.0)), 1)
    outbox.failed()
    (again,) = outbox.take(1)
    assert again.count == 2
    assert outbox.dropped([again.id], 2) == [again.id]
    assert (outbox.tally.failed, outbox.waiting) == (2, 0)


def test_an_end_that_was_given_up_is_told_when_it_comes_again() -> None:
    incidents, outbox = Incidents(600.0), Outbox("s", SinkRules(batch_delay_s=0))
    outbox.offer(incidents.take(alert(kind=AlertKind.CLEARED)), 0)
    (end,) = outbox.take(0)
    assert outbox.dropped([end.id], 1) == [end.id]
    outbox.offer(incidents.take(alert(kind=AlertKind.INTERFERENCE, resolved=True, durable=True, at_s=1002.0)), 2)
    assert [incident.id for incident in outbox.take(2)] == [end.id]


class Boxes(RuleBasedStateMachine):
    """Any order of tellings, successes, failures, and time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.incidents = Incidents(600.0)
        self.wishes = SinkRules(
            minimum=Severity.INFO, batch_size=3, batch_delay_s=5, repeat_s=60, per_minute=3, most=6, resend_s=30
        )
        self.outbox = Outbox("s", self.wishes)
        self.durable: dict[str, int] = {}
        self.seen: dict[str, int] = {}
        self.offered = 0

    @rule(
        key=st.sampled_from("abcdefgh"),
        kind=st.sampled_from([AlertKind.INTERFERENCE, AlertKind.CLEARED, AlertKind.EVICTION_DONE, AlertKind.STORE]),
        severity=st.sampled_from(Severity),
        durable=st.booleans(),
        resolved=st.booleans(),
    )
    def offer(self: Self, key: str, kind: AlertKind, severity: Severity, durable: bool, resolved: bool) -> None:
        self.now += 0.25
        made = self.incidents.take(
            alert(key, kind, severity=severity, durable=durable, resolved=resolved, at_s=1000 + self.now)
        )
        self.outbox.offer(made, self.now)
        self.offered += 1
        if durable:
            self.durable[made.id] = made.count
        for lost in self.outbox.lost:
            self.durable.pop(lost, None)
        self.outbox.lost.clear()

    @rule(seconds=st.sampled_from([0.5, 5.0, 30.0, 61.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(good=st.sampled_from(["landed", "failed", "gave up"]))
    def tell(self, good: str) -> None:
        batch = self.outbox.take(self.now)
        assert len(batch) <= self.wishes.batch_size
        if good == "landed":
            self._seen(batch)
            self.outbox.delivered(self.now)
        elif good == "failed":
            self.outbox.failed()
        elif batch:
            self.outbox.dropped([batch[0].id], self.now)
            self.durable.pop(batch[0].id, None)

    def _seen(self, batch: tuple[Incident, ...]) -> None:
        for incident in batch:
            self.seen[incident.id] = incident.count

    @invariant()
    def every_telling_is_in_one_count(self) -> None:
        tally = self.outbox.tally
        known = tally.ignored + tally.told + tally.folded + tally.dropped + tally.failed + self.outbox.waiting
        assert (tally.offered, known) == (self.offered, self.offered)
        assert self.outbox.waiting >= 0

    @precondition(lambda self: self.durable)
    @rule()
    def all_durable_ones_come_through_in_the_end(self) -> None:
        for _ in range(200):
            at = self.outbox.next_at(self.now)
            if at > self.now + 600:
                break
            self.now = max(self.now, at)
            self._seen(self.outbox.take(self.now))
            self.outbox.delivered(self.now)
        for key, count in self.durable.items():
            over_before = self.outbox.pending(key) is False
            assert over_before
            # A repeated end has no news: the count may stay behind there, but nothing else.
            assert key in self.seen, (key, count)
        self.durable.clear()


TestBoxes = Boxes.TestCase
