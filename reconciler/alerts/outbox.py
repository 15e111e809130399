"""What one sink gets, and when: filter, de-duplication, batches, repeats, resends, and a limit for storms. Pure.

Every alert that is offered ends in exactly one of the counts of `DeliveryStats`, or is pending. ``now`` is a clock that
only runs forward; units: seconds.

An alert waits up to ``batch_delay_s`` for others; a critical one is sent at once, with those that wait. Of new
incidents ``per_minute`` are sent, the others counted and reported once, in one notice.
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterator
from operator import attrgetter
from typing import Final, final

from msgspec import Struct
from msgspec.structs import asdict

from reconciler.alerts.alert import Alert, AlertKind, Severity
from reconciler.alerts.incident import Incident

STORM_S: Final = 60.0
KEPT: Final = 4096
"""Delivered incidents that a sink remembers."""


class SinkRules(Struct, frozen=True, kw_only=True):
    """One sink's rules. ``kinds`` empty: all. ``resend_s``: a state is sent this often until it ends; None: once.

    ``most``: alerts that wait at most; ``resolved``: whether ends are sent.
    """

    minimum: Severity = Severity.INFO
    kinds: frozenset[AlertKind] = frozenset()
    batch_size: int = 10
    batch_delay_s: float = 5.0
    repeat_s: float = 3600.0
    resend_s: float | None = None
    per_minute: int = 30
    resolved: bool = True
    most: int = 1000


class DeliveryStats(Struct):
    offered: int = 0
    told: int = 0
    ignored: int = 0
    folded: int = 0
    dropped: int = 0
    failed: int = 0

    @property
    def outcomes(self) -> dict[str, int]:
        """All but those that were offered, which are the sum and what still waits."""
        return {name: count for name, count in asdict(self).items() if name != "offered"}


@final
class _Record:
    """State of one incident at this sink. ``due_at``: when it is to be sent, infinity for never.

    ``ended``: by an end that this sink does not get.
    """

    __slots__ = ("due_at", "ended", "folded", "loudest", "notice", "over_told", "pending", "since", "told_at")

    def __init__(self, notice: Incident) -> None:
        self.notice = notice
        self.pending = 0
        self.since = math.inf
        self.due_at = math.inf
        self.told_at: float | None = None
        self.over_told = False
        self.loudest = -1
        self.folded = False
        self.ended = False

    @property
    def waits(self) -> bool:
        return self.due_at < math.inf

    @property
    def is_news(self) -> bool:
        """Whether the sink has not had the incident as it is now: it never had it, or it was milder, or has ended."""
        notice = self.notice
        return self.told_at is None or notice.has_ended or notice.alert.severity.rank > self.loudest


@final
class Outbox:
    """One sink's. `offer` each alert, `take` those that are due, then call `delivered`, `failed` or `dropped`."""

    def __init__(self, name: str, rules: SinkRules, wall_offset_s: float = 0.0) -> None:
        """``wall_offset_s``: what makes ``now`` seconds since the epoch."""
        self.rules = rules
        self.tally = DeliveryStats()
        self.lost: list[str] = []
        """Incidents dropped since this list was last emptied."""
        self._name = name
        self._records: dict[str, _Record] = {}
        self._flying: dict[str, tuple[Incident, int]] = {}
        """The incidents that are being sent, with how many alerts of each."""
        self._accepted: deque[float] = deque()
        """When the new incidents of the last minute were accepted."""
        self._storm: Counter[str] = Counter()
        self._storm_at = math.inf
        self._storms = 0
        self._wall_offset_s = wall_offset_s

    # In

    def offer(self, notice: Incident, now: float, *, age_s: float = 0.0) -> bool:
        """Add one alert, which has waited ``age_s`` already; False when it is not for this sink."""
        self.tally.offered += 1
        record = self._records.get(notice.id)
        if not self._wants(notice, record):
            self.tally.ignored += 1
            if record is not None and notice.has_ended:
                # Otherwise a state would be sent again for ever.
                record.ended = True
                if not record.pending:
                    record.due_at = math.inf
            return False
        if record is None or record.folded:
            while self._accepted and self._accepted[0] <= now - STORM_S:
                self._accepted.popleft()
            # A durable one is sent in a storm, too: it is promised to be delivered.
            if not notice.alert.durable and self._is_storm(notice, record, now):
                return True
            if record is None:
                self._accepted.append(now)
            record = self._records.setdefault(notice.id, _Record(notice))
            record.folded = False
        record.notice = notice
        record.pending += 1
        if notice.has_ended and record.over_told:
            # Its end was delivered already: nothing new.
            self.tally.told += record.pending
            record.pending = 0
            return True
        record.since = min(record.since, now - age_s)
        record.due_at = min(record.due_at, self._due(record, now))
        self._bound()
        return True

    def wants(self, notice: Incident) -> bool:
        return self._wants(notice, self._records.get(notice.id))

    def pending(self, key: str) -> bool:
        """Whether an alert of this incident waits, or is being sent."""
        record = self._records.get(key)
        return record is not None and record.pending > 0

    # Out

    def next_at(self, now: float) -> float:
        """When `take` has something; infinity for nothing."""
        if self._flying:
            return math.inf
        due = [record for record in self._records.values() if record.waits]
        reach = now + self.rules.batch_delay_s
        # What is sent again has its own time: of enough of it each delivery would be followed by the next at once.
        soon = sum(record.due_at <= reach and record.is_news for record in due)
        if soon >= self.rules.batch_size:
            return now
        return min([*(record.due_at for record in due), self._storm_at])

    def take(self, now: float, most: int | None = None) -> tuple[Incident, ...]:
        """The alerts to send now, the longest due first; empty when none is.

        Until the result is reported, no others.
        """
        if self.next_at(now) > now:
            return ()
        if self._storm_at <= now:
            self._tell_storm(now)
        size = self.rules.batch_size if most is None else min(most, self.rules.batch_size)
        reach = now + self.rules.batch_delay_s
        soon = sorted((record for record in self._records.values() if record.due_at <= reach), key=attrgetter("due_at"))
        for record in soon[:size]:
            self._flying[record.notice.id] = (record.notice, record.pending)
        return tuple(notice for notice, _ in self._flying.values())

    def delivered(self, now: float) -> list[str]:
        """The sink has taken it. The answer: incidents of which nothing waits any more."""
        done = []
        for key, record, notice, pending in self._came_back():
            self.tally.told += pending
            self._was_told(record, notice, now)
            if not record.pending:
                done.append(key)
        self._forget(now)
        return done

    def failed(self) -> None:
        """It did not work: all of it waits again, together with what has come since."""
        self._flying.clear()

    def dropped(self, ids: Collection[str], now: float) -> list[str]:
        """Delivery of these was given up; the others wait again. Returns the same as `delivered`."""
        done = []
        for key, record, notice, pending in self._came_back(ids):
            self.tally.failed += pending
            # Given up is not delivered: a repeated end is new.
            self._was_told(record, notice, now, over_told=False)
            if not record.pending:
                done.append(key)
        self._flying.clear()
        return done

    # Status

    @property
    def waiting(self) -> int:
        """Alerts that have not been delivered yet."""
        return sum(record.pending for record in self._records.values())

    def age_s(self, now: float) -> float:
        """Lateness of the oldest pending alert; 0 when none is late."""
        return max(0.0, now - min((record.due_at for record in self._records.values() if record.pending), default=now))

    def waited_s(self, key: str, now: float) -> float:
        """How long one incident's alert has waited."""
        record = self._records.get(key)
        return 0.0 if record is None or math.isinf(record.since) else now - record.since

    # Within

    def _wants(self, notice: Incident, record: _Record | None) -> bool:
        alert = notice.alert
        if notice.besides == self._name or (notice.has_ended and not self.rules.resolved):
            return False
        if self.rules.kinds and not self.rules.kinds & {alert.kind, alert.kind.began}:
            return False
        # A sink that got the beginning gets the end, whatever its severity.
        known = notice.has_ended and record is not None
        return known or alert.severity.rank >= self.rules.minimum.rank

    def _is_storm(self, notice: Incident, record: _Record | None, now: float) -> bool:
        """Whether there are too many alerts in this minute: this one is counted, and not sent."""
        if len(self._accepted) < self.rules.per_minute and not (record is not None and notice.has_ended):
            if record is not None:
                self._accepted.append(now)
            return False
        self.tally.folded += 1
        if notice.has_ended and record is not None:
            # Its beginning was never delivered by name.
            del self._records[notice.id]
            return True
        self._storm[notice.alert.kind.value] += 1
        self._storm_at = min(self._storm_at, now + STORM_S)
        self._records.setdefault(notice.id, _Record(notice)).folded = True
        self._forget(now)
        return True

    def _due(self, record: _Record, now: float) -> float:
        alert = record.notice.alert
        # Repeats of a delivered incident wait, and are sent with the count; its end and a higher severity are news.
        if record.told_at is not None and not record.is_news:
            return max(now, record.told_at + self.rules.repeat_s)
        return now if alert.severity is Severity.CRITICAL else now + self.rules.batch_delay_s

    def _came_back(self, ids: Collection[str] | None = None) -> Iterator[tuple[str, _Record, Incident, int]]:
        for key, (notice, pending) in self._flying.items():
            record = self._records.get(key)
            # Dropped while it was being sent: it has been counted.
            if record is not None and (ids is None or key in ids):
                record.pending -= pending
                yield key, record, notice, pending
        if ids is None:
            self._flying.clear()

    def _was_told(self, record: _Record, notice: Incident, now: float, *, over_told: bool | None = None) -> None:
        record.told_at, record.over_told = now, notice.has_ended if over_told is None else over_told
        record.loudest = max(record.loudest, notice.alert.severity.rank)
        record.since, record.due_at = math.inf, math.inf
        if record.pending:
            if record.notice.has_ended and record.over_told:
                self.tally.told += record.pending
                record.pending = 0
                return
            record.since, record.due_at = now, self._due(record, now)
        elif self.rules.resend_s is not None and notice.alert.kind.lasts and not (notice.has_ended or record.ended):
            record.due_at = now + self.rules.resend_s

    def _bound(self) -> None:
        """Drop the oldest: of the others before critical ones, of those that a crash may lose before durable ones."""
        waiting = [
            record for record in self._records.values() if record.pending and record.notice.id not in self._flying
        ]
        if len(waiting) <= self.rules.most:
            return
        dropped = min(waiting, key=_by_worth)
        self.tally.dropped += dropped.pending
        self.lost.append(dropped.notice.id)
        del self._records[dropped.notice.id]

    def _forget(self, now: float) -> None:
        """Drop records that no longer matter; if none is so old, the older half of those of which nothing waits."""
        if len(self._records) <= KEPT // 2:
            return
        horizon = now - max(self.rules.repeat_s, STORM_S)
        idle = [key for key, record in self._records.items() if not record.pending and not record.waits]
        old = [key for key in idle if (self._records[key].told_at or -math.inf) < horizon]
        for key in old or idle[: len(idle) // 2]:
            del self._records[key]

    def _tell_storm(self, now: float) -> None:
        total = sum(self._storm.values())
        message = ", ".join(f"{kind} {count}" for kind, count in sorted(self._storm.items()))
        self._storms += 1
        at_s = self._wall_offset_s + now
        alert = Alert(
            kind=AlertKind.OTHER,
            key="storm",
            summary=f"{total} more alerts within a minute, sent as one summary: {message}",
            at_s=at_s,
            details={kind: str(count) for kind, count in sorted(self._storm.items())},
        )
        notice = Incident(
            id=f"storm-{self._name}-{round(at_s * 1000):x}-{self._storms}", alert=alert, first_s=at_s, last_s=at_s
        )
        record = self._records.setdefault(notice.id, _Record(notice))
        record.since = record.due_at = now
        self._storm.clear()
        self._storm_at = math.inf


def _by_worth(record: _Record) -> tuple[bool, bool, float]:
    alert = record.notice.alert
    return alert.severity is Severity.CRITICAL, alert.durable, record.since
