"""The newest events of the ledger in memory, each with a number, so that a reader can follow them without a gap.

Numbers increase by one with each event and continue after a restart, from the last one that was stored.
"""

import secrets
from collections import deque
from collections.abc import Iterable
from typing import Final, final

import msgspec
from msgspec.structs import replace

from cgroupfs.bounded import decoded
from state.entry import LedgerEvent

RECENT: Final = 2048
"""Events in memory: some 1 MiB."""
_DECODER: Final = msgspec.msgpack.Decoder(LedgerEvent)


@final
class EventLog:
    """The events of one run, after those of earlier runs. Not thread-safe: the ledger has a lock."""

    def __init__(self, stored: Iterable[bytes] = ()) -> None:
        """``stored``: rows of the history, the oldest first; rows without a number, or unreadable, are left out."""
        # A crash loses events that were not stored, and their numbers are used again: a reader of an earlier run
        # recognises the new one by its name, and continues from its first number.
        self.run: Final = secrets.token_hex(4)
        self._recent: deque[LedgerEvent] = deque(maxlen=RECENT)
        self._next = 1
        for row in stored:
            event = _event_of(row)
            if event is not None and event.number >= self._next:
                self._recent.append(event)
                self._next = event.number + 1
        self.first: Final = self._next
        """The number of this run's first event."""

    @property
    def last(self) -> int:
        """The number of the newest event; 0: none yet."""
        return self._next - 1

    def add(self, event: LedgerEvent) -> LedgerEvent:
        numbered = replace(event, number=self._next)
        self._next += 1
        self._recent.append(numbered)
        return numbered

    def after(self, number: int) -> list[LedgerEvent]:
        """The events in memory with a higher number, the oldest first."""
        events: list[LedgerEvent] = []
        for event in reversed(self._recent):
            if event.number <= number:
                break
            events.append(event)
        return events[::-1]


def missing(events: Iterable[LedgerEvent], after: int) -> int:
    """How many events between ``after`` and the last of these are not among them."""
    lost = 0
    for event in events:
        lost += event.number - after - 1
        after = event.number
    return lost


def _event_of(row: bytes) -> LedgerEvent | None:
    try:
        return decoded(_DECODER.decode, row)
    except ValueError:
        return None
